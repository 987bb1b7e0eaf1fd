"""The bound on the norm of an update that docs/protocol.md derives from declared numbers."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import privfed as pf
from privfed.aggregation.gram import noise_energy
from privfed.training.model import layout_of

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
RECORDS, BATCH, STEPS = 400, 200, 20

torch.set_num_threads(1)


def documented() -> Callable[[pf.DpSgd, int], float]:
    code = re.search(r"```python\n(def longest_update.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[1]
    names: dict[str, Callable[[pf.DpSgd, int], float]] = {}
    exec(code, names)  # noqa: S102 -- the page's own code
    return names["longest_update"]


def norm_of_update(folder: Path, training: pf.DpSgd, inputs: int) -> tuple[float, int]:
    """Of a client all of whose gradients are clipped and point the same way: the records are one record, far from being learnt."""
    rows = np.full((RECORDS, inputs), 10.0, dtype=np.float32)
    data = pf.Samples(features=rows, labels=np.ones(RECORDS, dtype=np.int64), groups=None, columns=tuple(f"c{i}" for i in range(inputs)))
    model = pf.mlp(inputs, hidden=())
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.0)
    with pf.Ledger.open(folder / "one.ledger", population="one", budget=pf.Budget.unlimited(delta=1e-5)) as ledger:
        result = pf.train_alone(pf.Client("one", data, training=training, ledger=ledger), model, rounds=1)
    return float(np.linalg.norm(result.model.values)), layout_of(model).size


@pytest.mark.parametrize(("noise_multiplier", "inputs"), [(0.01, 8), (3.0, 8), (100.0, 2000)])
def test_no_update_is_longer_than_the_documented_bound_and_a_tenth_and_the_worst_case_reaches_it(
    tmp_path: Path, noise_multiplier: float, inputs: int
) -> None:
    training = pf.DpSgd(
        noise_multiplier=noise_multiplier,
        max_grad_norm=0.1,
        sample_rate=BATCH / RECORDS,
        expected_batch_size=BATCH,
        steps=STEPS,
        learning_rate=0.05,
        max_records=RECORDS,
    )
    norm, parameters = norm_of_update(tmp_path, training, inputs)
    bound = documented()(training, parameters)
    # Of STEPS * RECORDS coins a tenth more than half fall on one side with a probability below 1e-18: 0.1 * 4000 is 9 deviations.
    assert norm <= 1.1 * bound
    # Signal and noise are at right angles but by chance, so that the norm is at least 1 / sqrt(2) of their sum; the noise has 9 or more
    # coordinates, whose norm is below a third of what is expected with a probability below 1e-4, and it is the smaller part there.
    assert norm >= 0.6 * bound


def test_the_noise_in_the_documented_bound_is_what_the_rules_take_out_of_distances() -> None:
    training = pf.DpSgd(
        noise_multiplier=2.0, max_grad_norm=0.5, sample_rate=0.1, expected_batch_size=64, steps=30, learning_rate=0.7, max_records=640
    )
    energy = noise_energy(5000, steps=30, learning_rate=0.7, noise_multiplier=2.0, max_grad_norm=0.5, expected_batch_size=64)
    signal = 30 * 0.7 * 0.5
    assert documented()(training, 5000) == pytest.approx(signal + energy**0.5)
