from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from privfed.attacks.analytic import EXACT, analytic
from privfed.attacks.facts import Activation, AdaptiveOptimizer
from privfed.attacks.imprinting import imprint, read_imprint
from privfed.attacks.observation import CiphertextOnly, NotApplicable, Observation, Reconstruction
from privfed.attacks.scoring import mean_rows, score_rows
from privfed.training.model import load_values, mlp, values_of
from privfed.training.received import imprint_signs
from privfed.update import PlainVector


def crafted(table, *, width: int = 256, seed: int = 0) -> nn.Module:
    """A network that the server has imprinted with the public rows."""
    torch.manual_seed(seed)
    model = mlp(table.schema.width, hidden=(width, 32))
    load_values(model, imprint(values_of(model), table.public, rng=np.random.default_rng(seed)))
    return model


def rows_read(result: object, rows: np.ndarray, schema) -> float:
    assert isinstance(result, Reconstruction)
    assert not result.certified.any()
    return score_rows(result.rows, rows, schema=schema, tolerance=EXACT, baseline=np.full_like(rows, 99.0)).rows


@pytest.mark.parametrize(("size", "least"), [(1, 1.0), (16, 0.8), (64, 0.6)])
def test_rows_that_are_alone_in_their_bins_are_exact_in_batches_of_any_size(size: int, least: float, table, observe) -> None:
    shares = []
    for seed in range(5):
        rows, labels = table.batch(size, seed=seed)
        shares.append(rows_read(read_imprint(observe(rows, labels, table.schema, model=crafted(table, seed=seed))), rows, table.schema))
    assert np.mean(shares) >= least


def test_an_honest_server_reads_hardly_any_of_so_many_rows(table, observe) -> None:
    rows, labels = table.batch(64)
    observation = observe(rows, labels, table.schema)
    assert rows_read(analytic(observation), rows, table.schema) < 0.2
    refused = read_imprint(observation)
    assert isinstance(refused, NotApplicable)
    assert "do not all compare the same number" in str(refused)


def test_rows_of_several_clients_are_read_off_a_sum(table, observe) -> None:
    rows, labels = table.batch(30)
    clients = [observe(rows[10 * i : 10 * i + 10], labels[10 * i : 10 * i + 10], table.schema, model=crafted(table)) for i in range(3)]
    mean = PlainVector(layout=clients[0].layout, values=np.mean([client.seen.values for client in clients], axis=0))
    assert rows_read(read_imprint(replace(clients[0], seen=mean, coefficients=(1, 1, 1))), rows, table.schema) >= 0.6


def test_noise_of_dp_sgd_hides_the_rows(table, noised_round) -> None:
    rows, labels = table.batch(16)
    model = crafted(table)
    observation = noised_round(rows, labels, table.schema, noise_multiplier=1.0, model=model)
    result = read_imprint(observation)
    baseline = mean_rows(table.public, schema=table.schema, count=16)
    scores = [score_rows(some, rows, schema=table.schema, tolerance=0.02, baseline=baseline).cells for some in (result.rows, baseline)]
    assert scores[0] == scores[1]
    # The control: the same path with hardly any noise.
    bare = noised_round(rows, labels, table.schema, noise_multiplier=1e-9, model=model)
    assert rows_read(read_imprint(bare), rows, table.schema) >= 0.6


def test_confidence_separates_rows_from_mixtures(table, observe) -> None:
    right, wrong = [], []
    for seed in range(5):
        rows, labels = table.batch(100, seed=seed)
        result = read_imprint(observe(rows, labels, table.schema, model=crafted(table, seed=seed)))
        off = (np.abs(result.rows[:, None] - rows) / (table.schema.high - table.schema.low)).max(axis=2).min(axis=1)
        right += result.confidence[off <= EXACT].tolist()
        wrong += result.confidence[off > 3 * EXACT].tolist()
    assert len(right) > 100
    assert len(wrong) > 10
    assert np.mean(np.array(right)[:, None] > np.array(wrong)) > 0.9


def test_what_is_imprinted_shows(table) -> None:
    assert "neurons of 0.weight compare the same number of a record" in imprint_signs(values_of(crafted(table)))


CHANGES: tuple[tuple[Callable[[Observation], Observation], str], ...] = (
    (lambda seen: replace(seen, training=replace(seen.training, optimizer=AdaptiveOptimizer(name="Adam"))), "Adam rescales"),
    (lambda seen: replace(seen, seen=CiphertextOnly(bytes_seen=10)), "holds no key"),
    (lambda seen: replace(seen, activation=Activation.OTHER), "no fully connected layer with bias and ReLU"),
)


@pytest.mark.parametrize(("change", "reason"), CHANGES)
def test_it_says_when_it_is_not_applicable(change: Callable[[Observation], Observation], reason: str, table, observe) -> None:
    rows, labels = table.batch(2)
    result = read_imprint(change(observe(rows, labels, table.schema, model=crafted(table))))
    assert isinstance(result, NotApplicable)
    assert reason in str(result)


def test_models_that_cannot_be_imprinted_are_refused(table) -> None:
    rng = np.random.default_rng(0)
    for model, rows in ((nn.Linear(50, 1), table.public), (mlp(50), table.public[:, :7])):
        with pytest.raises(ValueError, match="two fully connected layers"):
            imprint(values_of(model), rows, rng=rng)
