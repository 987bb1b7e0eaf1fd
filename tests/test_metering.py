"""Faults are planted in the training of one bank of three, as it is called for that bank, and nowhere else."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import privfed.client
from privfed.attacks.epsilon_bounds import gaussian_trade_off_epsilon, largest_provable
from privfed.audit import metering
from privfed.audit.findings import Audit
from privfed.audit.metering import MeteredTraining, meter_training
from privfed.audit.run import run_audit
from privfed.client import Client, Trainer
from privfed.consortium import Consortium, Plaintext
from privfed.data.samples import Samples
from privfed.dp.clipping import AdaptiveClipping
from privfed.errors import UnsupportedModelError
from privfed.training.loss import cross_entropy
from privfed.training.mechanism import DpSgd, TrainingMechanism
from privfed.training.model import mlp
from privfed.training.randomness import Randomness, _SeededRandomness
from tests.consortia import OPEN, PRIVATE, SCHEMA, consortium, network

Plant = Callable[[str, dict[str, float]], None]

FAULTS = {
    "no noise": {"noise_multiplier": 1e-9},
    "half the noise": {"noise_multiplier": 0.5 * PRIVATE.noise_multiplier},
    # As much noise as before, in units of the bound that is no longer there.
    "no clipping": {"max_grad_norm": 1e4 * PRIVATE.max_grad_norm, "noise_multiplier": 1e-4 * PRIVATE.noise_multiplier},
}


@pytest.fixture
def banks(tmp_path: Path) -> Iterator[Consortium]:
    with ExitStack() as stack:
        yield consortium(stack, tmp_path)


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Makes one bank train otherwise than it declares and is charged."""

    def planted(bank: str, change: dict[str, float]) -> None:
        honest_train, honest = privfed.client.train, Trainer.train

        def train(self: Trainer, *start: object, **where: object) -> object:
            def otherwise(*arguments: object, mechanism: TrainingMechanism, **options: object) -> object:
                # While another bank is measured, this one sends zeros, for which it does not train privately.
                planted = replace(mechanism, **change) if isinstance(mechanism, DpSgd) else mechanism  # type: ignore[arg-type]
                return honest_train(*arguments, mechanism=planted, **options)  # type: ignore[arg-type]

            with monkeypatch.context() as patch:
                if self._client.name == bank:
                    patch.setattr(privfed.client, "train", otherwise)
                return honest(self, *start, **where)  # type: ignore[arg-type]

        monkeypatch.setattr(Trainer, "train", train)

    return planted


def measured(banks: Consortium) -> list[MeteredTraining]:
    return [meter_training(client, consortium=banks, model=network()) for client in banks.clients]


def audited(banks: Consortium) -> Audit:
    return run_audit(banks, network(), schema=SCHEMA, repeats=2, attacks=[], rng=np.random.default_rng(0))


def test_an_honest_run_passes_and_the_verdict_names_all_banks(banks: Consortium) -> None:
    audit = audited(banks)
    assert audit.training_verdict.startswith("As declared: the noise and the clipping of bank_0, bank_1, bank_2")
    assert not any(metered.fault for metered in audit.trainings)
    assert [metered.client for metered in audit.trainings] == ["bank_0", "bank_1", "bank_2"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_one_bank_of_three_changes_the_verdict_and_names_that_bank_alone(banks: Consortium, plant: Plant, fault: str) -> None:
    plant("bank_1", FAULTS[fault])
    audit = audited(banks)
    assert audit.training_verdict.startswith("NOT AS DECLARED: bank_1: ")
    assert not {"bank_0", "bank_2"} & set(audit.training_verdict.replace(":", " ").split())
    assert ("records weigh more" if fault == "no clipping" else "less noise") in audit.training_verdict
    assert [metered.client for metered in audit.trainings if metered.fault] == ["bank_1"]
    assert json.loads(json.dumps(audit.to_json(), allow_nan=False))["training_verdict"] == audit.training_verdict


@pytest.mark.parametrize("noise_multiplier", [0.7, 1.0, 3.0])
def test_membership_alone_tells_missing_and_halved_noise_from_what_is_declared(
    tmp_path: Path, plant: Plant, noise_multiplier: float
) -> None:
    with ExitStack() as stack:
        banks = consortium(stack, tmp_path, training=replace(PRIVATE, noise_multiplier=noise_multiplier, max_records=2000), epsilon=1e9)
        readings = [metered.reading for metered in measured(banks)]
        assert all(reading is not None and reading.proved <= reading.claimed and not reading.leak for reading in readings)
        plant("bank_1", {"noise_multiplier": 1e-9})
        plant("bank_2", {"noise_multiplier": 0.5 * noise_multiplier})
        leaks = [metered.reading.leak for metered in measured(banks) if metered.reading]
    words = "epsilon of a step over all records is at least"
    assert [words in leak for leak in leaks[:2]] == [False, True]
    if noise_multiplier <= 1:  # half of much noise is still much: then the scores of 1,000 canaries alone do not always tell
        assert words in leaks[2]


def test_noise_that_is_too_large_and_records_that_weigh_too_little_are_told_too(banks: Consortium, plant: Plant) -> None:
    plant("bank_0", {"noise_multiplier": 2 * PRIVATE.noise_multiplier})
    plant("bank_2", {"max_grad_norm": 0.5, "noise_multiplier": 2 * PRIVATE.noise_multiplier})
    first, second, third = (metered.fault for metered in measured(banks))
    assert "noise is larger than declared" in first
    assert second == ""
    assert "records weigh less than declared" in third


@pytest.mark.parametrize(("shown", "faulty", "readings"), [("good", False, 1), ("bad good", False, 2), ("bad bad", True, 2)])
def test_a_fault_must_show_twice(banks: Consortium, monkeypatch: pytest.MonkeyPatch, shown: str, faulty: bool, readings: int) -> None:
    good = meter_training(banks.clients[0], consortium=banks, model=network()).reading
    assert good is not None
    script = {"good": good, "bad": replace(good, proved=math.inf)}
    left = shown.split()
    monkeypatch.setattr(metering, "_read", lambda *_, **__: script[left.pop(0)])
    assert bool(meter_training(banks.clients[0], consortium=banks, model=network()).fault) is faulty
    assert len(shown.split()) - len(left) == readings


def test_every_meter_of_a_reading_can_be_its_fault(banks: Consortium) -> None:
    reading = measured(banks)[0].reading
    assert reading is not None
    assert len(reading.on_the_model) > 1
    assert reading.meter_fault == ""
    for part in ("on_the_model", "further"):
        meters = getattr(reading, part)
        for place, meter in enumerate(replace(meter, declared=2 * abs(meter.high)) for meter in meters):
            faulty = replace(reading, **{part: (*meters[:place], meter, *meters[place + 1 :])})
            assert faulty.meter_fault == meter.fault != ""
    for name in ("noise", "weight"):
        meter = replace(getattr(reading, name), declared=2 * getattr(reading, name).high)
        assert replace(reading, **{name: meter}).meter_fault == meter.fault


@pytest.fixture
def trained_with(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has every private training take other samples, or another source of randomness."""

    def planted(*, samples: Callable[[Samples, int], Samples] | None = None, randomness: Callable[[], Randomness] | None = None) -> None:
        honest = privfed.client.train

        def train(module: object, start: object, data: Samples, *, mechanism: TrainingMechanism, **options: object) -> object:
            if isinstance(mechanism, DpSgd):
                data = data if samples is None else samples(data, mechanism.record_limit)
                options |= {} if randomness is None else {"randomness": randomness()}
            return honest(module, start, data, mechanism=mechanism, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(privfed.client, "train", train)

    return planted


def test_noise_that_is_the_same_in_every_round_is_found_though_each_round_has_as_much_as_declared(
    banks: Consortium, trained_with: Callable[..., None]
) -> None:
    trained_with(randomness=lambda: _SeededRandomness(7))
    fault = measured(banks)[0].fault
    assert "the correlation of noise in two rounds is 1" in fault
    assert "the correlation of noise in two runs is 1" in fault
    assert "less noise" not in fault


def test_noise_that_follows_the_number_of_the_round_is_found_in_another_run(banks: Consortium, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Trainer.train

    def train(self: Trainer, *start: Any, round: int, **where: Any) -> object:
        self._randomness = _SeededRandomness  # takes the number of the round
        return honest(self, *start, round=round, **where)

    monkeypatch.setattr(Trainer, "train", train)
    fault = measured(banks)[0].fault
    assert "the correlation of noise in two runs is 1" in fault
    assert "in two rounds" not in fault


def test_noise_that_is_missing_from_the_second_round_on_is_found(banks: Consortium, monkeypatch: pytest.MonkeyPatch) -> None:
    honest_train, honest = privfed.client.train, Trainer.train

    def train(self: Trainer, *start: Any, round: int, **where: Any) -> object:
        def otherwise(*arguments: Any, mechanism: TrainingMechanism, **options: Any) -> object:
            silent = replace(mechanism, noise_multiplier=1e-9) if isinstance(mechanism, DpSgd) and round else mechanism
            return honest_train(*arguments, mechanism=silent, **options)

        with monkeypatch.context() as patch:
            patch.setattr(privfed.client, "train", otherwise)
            return honest(self, *start, round=round, **where)

    monkeypatch.setattr(Trainer, "train", train)
    assert "less noise than declared: the noise on a weight in a second round" in measured(banks)[0].fault


def test_records_that_are_used_several_times_or_not_at_all_are_found_though_they_weigh_as_declared_on_average(
    banks: Consortium, trained_with: Callable[..., None]
) -> None:
    def resampled(data: Samples, most: int) -> Samples:
        # Half of them twice, and the others not at all: what is drawn with replacement is so in part.
        twice = np.repeat(np.random.default_rng().permutation(len(data))[: len(data) // 2], 2)[:most]
        return replace(data, features=data.features[twice], labels=data.labels[twice]) if len(twice) else data

    trained_with(samples=resampled)
    fault = measured(banks)[0].fault
    assert "some records weigh more than others" in fault
    assert "records weigh less" not in fault


def test_measuring_touches_neither_the_data_nor_the_ledger_of_a_bank(banks: Consortium, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[int] = []
    honest = privfed.client.train

    def train(module: object, start: object, samples: object, **options: object) -> object:
        trained.append(id(samples))
        return honest(module, start, samples, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(privfed.client, "train", train)
    client = banks.clients[0]
    assert client.ledger is not None
    before = client.ledger.head
    assert not meter_training(client, consortium=banks, model=network()).fault
    assert client.ledger.head == before
    assert trained
    assert id(client.data) not in trained


def variant(client: Client, **change: object) -> Client:
    assert isinstance(client.training, DpSgd)
    return replace(client, training=replace(client.training, **change))  # type: ignore[arg-type]


def test_what_cannot_be_measured_is_said_and_is_never_as_declared(banks: Consortium) -> None:
    clipping = AdaptiveClipping(initial_norm=0.5, target_quantile=0.5, learning_rate=0.2, count_noise=20.0)
    for change, reason in (
        ({"batch_capacity": 300}, "plain Poisson samples"),
        ({"records_per_customer": 2}, "plain Poisson samples"),
        ({"adaptive_clipping": clipping}, "fixed clipping norm"),
        ({"max_records": 39}, "39 records at most"),
        ({"noise_multiplier": 9e-4}, "too small to be measured"),
    ):
        metered = meter_training(variant(banks.clients[0], **change), consortium=banks, model=network())
        assert metered.reading is None
        assert metered.claims_noise
        assert reason in metered.missing
        assert metered.to_json()["fault"] is None
        assert reason in str(metered.to_json()["not_measured"])
    audit = audited(replace(banks, clients=[variant(client, batch_capacity=300) for client in banks.clients]))
    assert audit.training_verdict.startswith("Not measured: not measured at bank_0")
    mixed = audited(replace(banks, clients=[variant(banks.clients[0], batch_capacity=300), *banks.clients[1:]]))
    assert mixed.training_verdict.startswith("As declared: the noise and the clipping of bank_1, bank_2")
    assert "not measured at bank_0: " in mixed.training_verdict


def test_a_training_that_refuses_canaries_is_not_measured(banks: Consortium, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> object:
        raise UnsupportedModelError("no")

    monkeypatch.setattr(privfed.client, "train", refuse)
    metered = meter_training(banks.clients[0], consortium=banks, model=network())
    assert metered.reading is None
    assert metered.missing == "its training refused canaries: no"


def test_a_bank_that_says_it_trains_without_noise_is_not_measured(tmp_path: Path) -> None:
    with ExitStack() as stack:
        banks = consortium(stack, tmp_path, training=[PRIVATE, OPEN, PRIVATE])
        assert [metered.claims_noise for metered in measured(banks)] == [True, False, True]
        assert "bank_1" not in audited(banks).training_verdict
        bare = consortium(stack, tmp_path, training=OPEN, keys=Plaintext())
        assert audited(bare).training_verdict == "Nothing to measure: no client says that it trains with noise."


def test_a_model_whose_gradients_are_not_clipped_is_measured_by_canaries_all_the_same(banks: Consortium, plant: Plant) -> None:
    wide = replace(banks, clients=[variant(client, max_grad_norm=1e6) for client in banks.clients])
    metered = meter_training(wide.clients[0], consortium=wide, model=network())
    assert metered.reading is not None
    assert not [meter for meter in metered.reading.on_the_model if "copies" in meter.what]
    assert metered.fault == ""


def test_a_model_of_several_classes_is_measured(tmp_path: Path) -> None:
    with ExitStack() as stack:
        banks = consortium(stack, tmp_path, loss=cross_entropy)
        model = mlp(SCHEMA.width, hidden=(16,), outputs=3)
        metered = meter_training(banks.clients[0], consortium=banks, model=model)
    assert metered.fault == ""
    assert metered.reading is not None
    assert len(metered.reading.on_the_model) == 4 + 1 + 4


def test_as_many_canaries_can_prove_more_than_noise_of_one_lets_out(banks: Consortium) -> None:
    reading = meter_training(banks.clients[0], consortium=banks, model=network()).reading
    assert reading is not None
    assert "times" in reading.words()
    most = largest_provable(gaussian_trade_off_epsilon, included=300, excluded=300, delta=1e-5, significance=1e-3 / 3)
    assert most > reading.claimed
