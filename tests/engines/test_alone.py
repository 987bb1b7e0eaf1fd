import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import privfed as pf
from privfed.compression import TopK
from privfed.dp.accounting import epsilon
from privfed.errors import BudgetExceededError, UnsupportedInThisModeError
from privfed.training.evaluate import average_precision
from privfed.training.model import scores, values_of

torch.set_num_threads(1)

BUDGET = pf.Budget(epsilon=4.0, delta=1e-5)
ROUNDS = 4
TRAINING = pf.DpSgd.for_budget(BUDGET, rounds=ROUNDS, max_records=3000, expected_batch_size=300, steps=30, learning_rate=1.0)


def records(count: int, seed: int) -> pf.Samples:
    rows = np.random.default_rng(seed).uniform(-1, 1, (count, 3)).astype(np.float32)
    return pf.Samples(features=rows, labels=(rows[:, 0] > 0.6).astype(np.int64), groups=None, columns=("a", "b", "c"))


DATA = records(3000, 1)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[pf.Ledger]:
    with pf.Ledger.open(tmp_path / "bank.ledger", population="bank", budget=BUDGET) as opened:
        yield opened


def test_a_bank_alone_learns_within_its_budget_and_the_ledger_has_every_round(ledger: pf.Ledger) -> None:
    test, model = records(2000, 2), pf.mlp(3, hidden=(8,))
    before = values_of(model)
    result = pf.train_alone(pf.Client("bank", DATA, training=TRAINING, ledger=ledger), model, rounds=ROUNDS)
    assert average_precision(test.labels, scores(model, result.model, test.features)) > 2 * test.labels.mean()
    assert ledger.events() == (TRAINING.event(),) * ROUNDS
    assert result.epsilon == ledger.spent() == pytest.approx(epsilon((TRAINING.event(),) * ROUNDS, delta=BUDGET.delta))
    assert 3.9 < result.epsilon <= BUDGET.epsilon
    assert result.delta == BUDGET.delta
    assert np.array_equal(values_of(model).values, before.values)  # the module is not changed
    assert "values" not in repr(result)


def test_what_a_budget_does_not_cover_is_refused_before_anything_is_charged(ledger: pf.Ledger) -> None:
    client = pf.Client("bank", DATA, training=TRAINING, ledger=ledger)
    with pytest.raises(BudgetExceededError, match=f"covers {ROUNDS} of {ROUNDS + 1} rounds; nothing was trained"):
        pf.train_alone(client, pf.mlp(3), rounds=ROUNDS + 1)
    assert ledger.events() == ()


def test_a_round_is_charged_before_it_is_trained(ledger: pf.Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    charged: list[int] = []

    def interrupted(*_: object, **__: object) -> None:
        charged.append(len(ledger.events()))
        raise KeyboardInterrupt

    monkeypatch.setattr("privfed.client.train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pf.train_alone(pf.Client("bank", DATA, training=TRAINING, ledger=ledger), pf.mlp(3), rounds=1)
    assert charged == [1]
    assert ledger.spent() > 0


def test_rounds_alone_and_rounds_in_a_consortium_are_charged_to_the_same_budget(ledger: pf.Ledger) -> None:
    client = pf.Client("bank", DATA, training=TRAINING, ledger=ledger)
    first = pf.train_alone(client, pf.mlp(3), rounds=1)
    second = pf.train_alone(client, pf.mlp(3), rounds=1)
    assert second.epsilon > first.epsilon
    with pytest.raises(BudgetExceededError, match=f"covers {ROUNDS - 2} of {ROUNDS} rounds"):
        pf.train_alone(client, pf.mlp(3), rounds=ROUNDS)


def test_a_round_alone_is_the_round_of_a_consortium_in_which_all_have_the_same_data() -> None:
    model = pf.mlp(3, hidden=(4,))
    plain = pf.NonPrivate(learning_rate=0.3, batch_size=50, steps=5, seed=3)
    alone = pf.train_alone(pf.Client("bank", DATA, training=plain), model, rounds=3)
    same = [pf.Client(name, DATA, training=plain) for name in ("a", "b", "c")]
    together = pf.simulate(pf.Consortium(same, keys=pf.Plaintext()), model, rounds=3)
    # A mean of three equal numbers of the grid: the division by three may round in the last digit of a double.
    np.testing.assert_allclose(alone.model.values, together.model.values, rtol=0, atol=1e-12)
    assert math.isinf(alone.epsilon)
    assert alone.delta is None


def test_what_cannot_be_trained_alone_is_refused(ledger: pf.Ledger) -> None:
    client = pf.Client("bank", DATA, training=TRAINING, ledger=ledger, compressor=TopK(share=0.1))
    with pytest.raises(UnsupportedInThisModeError, match="nothing was trained"):
        pf.train_alone(client, pf.mlp(3), rounds=1)
    plain = pf.Client("bank", DATA, training=TRAINING, ledger=ledger)
    with pytest.raises(ValueError, match="expected at least 1 round"):
        pf.train_alone(plain, pf.mlp(3), rounds=0)
    with pytest.raises(TypeError, match="expected rounds to be a whole number"):
        pf.train_alone(plain, pf.mlp(3), rounds=1.5)
    with pytest.raises(ValueError, match="expected a grid step of at least"):
        pf.train_alone(plain, pf.mlp(3), rounds=1, params=pf.CkksParams.standard(bound=1e-6))
    assert ledger.events() == ()
