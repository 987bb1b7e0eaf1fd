from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import debiasing
from benchmarks.debiasing import MEAN, QUICK, RULES
from privfed.data.samples import Samples
from privfed.training.dpsgd import train
from privfed.training.loss import cross_entropy
from privfed.training.model import values_of

torch.set_num_threads(1)


def test_a_halved_picture_has_the_mean_of_four_pixels() -> None:
    picture = np.arange(784, dtype=np.float32).reshape(1, 784)
    columns = tuple(f"p{index}" for index in range(784))
    halved = debiasing.halved(Samples(features=picture, labels=np.array([3]), groups=None, columns=columns))
    assert halved.features.shape == (1, 196)
    assert halved.features[0, 0] == np.mean([0, 1, 28, 29])
    assert halved.features[0, 15] == np.mean([58, 59, 86, 87])


def test_the_declared_energy_is_that_of_the_noise_in_an_update(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of 2762 coordinates the squared norm varies by sqrt(2 / 2762), 2.7 %; the signal is at most steps * lr * clipping norm = 0.2 long."""
    monkeypatch.setenv("PRIVFED_DATA", str(tmp_path))
    table = debiasing.load(None, quick=True)
    model, size = table.network(), QUICK
    values = values_of(model)
    some = table.train.take(np.arange(size.records))
    update = train(model, values, some, mechanism=size.mechanism(4.0), loss=cross_entropy).update_values.values
    noise, signal = size.energy(values.layout.size, 4.0), (size.steps * size.learning_rate * 4 * size.max_grad_norm) ** 2
    deviation = noise * np.sqrt(2 / values.layout.size)
    assert noise - 6 * deviation < update @ update < noise + 6 * deviation + signal + 12 * np.sqrt(signal * noise / values.layout.size)
    assert signal < noise


def test_all_ways_run_and_only_the_plain_mean_has_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PRIVFED_DATA", str(tmp_path))
    table = debiasing.load(None, quick=True)
    outcomes = debiasing.collect(table, QUICK)
    assert [(outcome.rule, outcome.debiased) for outcome in outcomes] == [
        (MEAN, False),
        *((name, debiased) for name in RULES for debiased in (False, True)),
    ]
    assert all(len(outcome.accuracy) == QUICK.rounds and 0 <= outcome.malicious <= 1 for outcome in outcomes)
    page = debiasing.dossier(outcomes, table, QUICK, "command")
    assert all(f"* {rule} at noise multiplier 4: accuracy" in page for rule in RULES)
    debiasing.draw(outcomes, QUICK, tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").stat().st_size > 1000
