from pathlib import Path

import numpy as np
import pytest

from privfed.client import Client, Trainer
from privfed.data.samples import Samples
from privfed.dp.ledger import Ledger
from privfed.dp.mechanism import Budget
from privfed.errors import UnsupportedDataError
from privfed.he.params import CkksParams
from privfed.training import gradients, steady
from privfed.training.loss import binary_cross_entropy
from privfed.training.mechanism import DpSgd, NonPrivate
from privfed.training.model import mlp, values_of
from privfed.update import PlainVector

TRAINING = DpSgd(
    noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.1, expected_batch_size=10, steps=2, learning_rate=0.1, max_records=100
)


def samples(records: int) -> Samples:
    return Samples(features=np.zeros((records, 2)), labels=np.arange(records) % 2, groups=None, columns=("a", "b"))


def ledger(path: Path, delta: float) -> Ledger:
    return Ledger.open(path, population="bank_a", budget=Budget(epsilon=100.0, delta=delta))


@pytest.mark.parametrize("records", [4, 100])
def test_a_delta_of_one_over_the_declared_records_is_refused_whatever_the_records_are_and_nothing_is_charged(
    tmp_path: Path, records: int
) -> None:
    with ledger(tmp_path / "ledger", 0.01) as opened:
        with pytest.raises(ValueError, match="one over the 100 records that 'bank_a' declares at most, got 0.01, .* nothing was charged"):
            Client("bank_a", samples(records), training=TRAINING, ledger=opened)
        assert not opened.events()


def test_a_delta_below_one_over_the_declared_records_is_accepted(tmp_path: Path) -> None:
    with ledger(tmp_path / "ledger", 0.0099) as opened:
        Client("bank_a", samples(100), training=TRAINING, ledger=opened)


def test_a_client_that_promises_nothing_may_have_any_delta(tmp_path: Path) -> None:
    with ledger(tmp_path / "ledger", 0.5) as opened:
        Client("bank_a", samples(100), training=NonPrivate(learning_rate=0.1, batch_size=10, steps=1, seed=0), ledger=opened)


def test_a_client_with_more_records_than_it_declares_is_refused_by_name_and_its_records_are_not_counted_out(tmp_path: Path) -> None:
    model = mlp(2, hidden=(4,))
    with ledger(tmp_path / "ledger", 1e-5) as opened:
        client = Client("bank_a", samples(137), training=TRAINING, ledger=opened)
        with pytest.raises(UnsupportedDataError, match="'bank_a' has more records than the declared limit of 100") as refusal:
            Trainer(client=client, model=model, start=values_of(model), loss=binary_cross_entropy, params=CkksParams.standard())
        assert "137" not in str(refusal.value)
        assert not opened.events()


def test_a_round_is_charged_before_a_record_is_touched_and_stays_charged_if_training_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class InterruptedTrainingError(Exception):
        pass

    charged: list[object] = []

    with ledger(tmp_path / "ledger", 1e-5) as opened:

        def interrupted(*_: object, **__: object) -> None:
            charged.extend(opened.events())
            raise InterruptedTrainingError

        monkeypatch.setattr("privfed.client.train", interrupted)
        model = mlp(2, hidden=(4,))
        client = Client("bank_a", samples(10), training=TRAINING, ledger=opened)
        params = CkksParams.standard(bound=4.0)
        trainer = Trainer(client=client, model=model, start=values_of(model), loss=binary_cross_entropy, params=params)
        with pytest.raises(InterruptedTrainingError):
            trainer.train(values_of(model), session=b"session", round=0, attempt=0)
        assert charged == [TRAINING.event()] == list(opened.events())


def test_a_grid_that_is_finer_than_differential_privacy_allows_is_refused(tmp_path: Path) -> None:
    model = mlp(2, hidden=(4,))
    with ledger(tmp_path / "ledger", 1e-5) as opened:
        client = Client("bank_a", samples(10), training=TRAINING, ledger=opened)
        terms = {"client": client, "model": model, "start": values_of(model), "loss": binary_cross_entropy}
        coarse = CkksParams.standard()
        Trainer(**terms, params=coarse)
        fine = CkksParams.standard(bound=coarse.bound * TRAINING.release_grid / coarse.step / 2)
        with pytest.raises(ValueError, match="expected a grid step of at least .* for 'bank_a', .* nothing was trained"):
            Trainer(**terms, params=fine)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"data": np.zeros((3, 2))}, "expected data of 'bank_a' to be Samples, got ndarray"),
        ({"training": "dpsgd"}, "expected training of 'bank_a' to be DpSgd or NonPrivate, got str"),
        ({"training": DpSgd}, "expected training of 'bank_a' to be DpSgd or NonPrivate, got type"),
        ({"ledger": "a.ledger"}, r"expected ledger of 'bank_a' to be a Ledger \(see Ledger.open\), got str"),
    ],
)
def test_a_client_of_other_kinds_of_things_is_refused(tmp_path: Path, wrong: dict[str, object], told: str) -> None:
    with ledger(tmp_path / "ledger", 1e-5) as opened:
        with pytest.raises(TypeError, match=told):
            Client("bank_a", **({"data": samples(10), "training": TRAINING, "ledger": opened} | wrong))
        assert not opened.events()


def test_a_client_looks_once_and_not_in_every_round_whether_its_model_is_steady(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[bool] = []

    def look(*arguments: object, **named: object) -> bool:
        looks.append(steady.is_steady(*arguments, **named))  # type: ignore[arg-type]
        return looks[-1]

    monkeypatch.setattr(gradients, "is_steady", look)
    model = mlp(2, hidden=(4,))
    with ledger(tmp_path / "ledger", 1e-5) as opened:
        client = Client("bank_a", samples(50), training=TRAINING, ledger=opened)
        trainer = Trainer(
            client=client, model=model, start=values_of(model), loss=binary_cross_entropy, params=CkksParams.standard(bound=8.0)
        )
        values = values_of(model)
        for number in range(3):
            update = trainer.train(values, session=bytes(16), round=number, attempt=0)
            values = PlainVector(layout=values.layout, values=values.values + update.vector.values)
    assert looks == [True]
