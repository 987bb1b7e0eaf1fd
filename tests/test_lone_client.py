"""The audits of DP-SGD through the real client, its encryption and the server: every pass beside a fault that the same run flags."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import privfed.client
from privfed.attacks.cardinality import CardinalityCanary
from privfed.attacks.dirac_rows import DiracReading, DiracRows, compare_noise
from privfed.attacks.model_meters import CopiesTraining, SilentTraining
from privfed.audit.lone_client import lone_update
from privfed.client import Client
from privfed.consortium import Consortium, Plaintext
from privfed.data.samples import Samples
from privfed.dp.accounting import calibrate_noise_multiplier
from privfed.dp.ledger import Ledger
from privfed.dp.mechanism import Budget
from privfed.he.escrow_secret import EscrowKey
from privfed.he.params import CkksParams
from privfed.he.secret import SharedKey
from privfed.he.threshold_key import ThresholdKey
from privfed.training.compiled import CompiledSum, compile_sum
from privfed.training.loss import PerSampleLoss, binary_cross_entropy
from privfed.training.mechanism import DpSgd, NonPrivate
from privfed.training.model import mlp
from privfed.training.randomness import _SeededRandomness
from privfed.update import PlainVector

DELTA, CANARIES, INPUTS = 1e-5, 1000, 36
every_setting = pytest.mark.parametrize(("epsilon", "steps", "sample_rate"), [(1.0, 1, 1.0), (8.0, 1, 1.0), (1.0, 20, 0.1), (8.0, 20, 0.1)])


def mechanism(epsilon: float, *, steps: int = 1, sample_rate: float = 1.0) -> DpSgd:
    noise = calibrate_noise_multiplier(Budget(epsilon=epsilon, delta=DELTA), sample_rate=sample_rate, steps=steps)
    batch = max(1, round(CANARIES * sample_rate))
    facts = {"max_grad_norm": 1.0, "sample_rate": sample_rate, "expected_batch_size": batch, "steps": steps, "learning_rate": 0.1}
    return DpSgd(noise_multiplier=noise, max_records=CANARIES, **facts)


Change = Callable[[DpSgd], DpSgd]
HONEST: Change = lambda right: right  # noqa: E731
FAULTS: dict[str, Change] = {
    "half the noise": lambda right: replace(right, noise_multiplier=0.5 * right.noise_multiplier),
    "a tenth of the noise": lambda right: replace(right, noise_multiplier=0.1 * right.noise_multiplier),
    "no noise": lambda right: replace(right, noise_multiplier=1e-9),
    "no clipping": lambda right: replace(right, max_grad_norm=1e3, noise_multiplier=1e-3 * right.noise_multiplier),
}


@dataclass(frozen=True, kw_only=True)
class Federation:
    """Three banks that declare one mechanism. `audited` holds a round in which one of them trains as it is told, whatever it declares."""

    consortium: Consortium
    monkeypatch: pytest.MonkeyPatch

    def audited(
        self,
        index: int,
        module: nn.Module,
        samples: Samples,
        declared: DpSgd,
        *,
        actual: Change = HONEST,
        loss: PerSampleLoss = binary_cross_entropy,
        compiled: CompiledSum | None = None,
        seed: int = 0,
    ) -> PlainVector:
        client = replace(self.consortium.clients[index], data=samples, training=declared, compiled=compiled)
        honest = privfed.client.train

        def otherwise(*arguments: object, mechanism: DpSgd | NonPrivate, **options: object) -> object:
            planted = actual(mechanism) if isinstance(mechanism, DpSgd) else mechanism
            return honest(*arguments, mechanism=planted, **options)  # type: ignore[arg-type]

        with self.monkeypatch.context() as patch:
            patch.setattr(privfed.client, "train", otherwise)
            return lone_update(
                client, module, consortium=self.consortium, loss=loss, _randomness=lambda _, number: _SeededRandomness(seed + number)
            )

    def canaries(self, index: int, declared: DpSgd, *, actual: Change = HONEST, seed: int = 0) -> tuple[DiracRows, PlainVector]:
        rows = DiracRows.draw(declared, count=CANARIES, rng=np.random.default_rng(seed))
        return rows, self.audited(index, rows.module, rows.samples, rows.mechanism, actual=actual, seed=seed)

    def reading(self, index: int, declared: DpSgd, *, actual: Change = HONEST, seed: int = 0) -> DiracReading:
        rows, update = self.canaries(index, declared, actual=actual, seed=seed)
        return rows.read(update, delta=DELTA)


MODES: dict[str, Callable[[], dict[str, Any]]] = {
    "SharedKey": lambda: {"keys": SharedKey.generate()},
    "ThresholdKey": lambda: {"keys": ThresholdKey(clients=3, corrupted=0, dropouts=0), "params": CkksParams.threshold(clients=3)},
    "EscrowKey": lambda: {"keys": EscrowKey.generate(), "params": CkksParams.escrow()},
    "Plaintext": lambda: {"keys": Plaintext()},
}


@pytest.fixture(params=["SharedKey"])
def federation(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Federation]:
    torch.set_num_threads(1)
    nobody = Samples(features=np.zeros((2, 1), dtype=np.float32), labels=np.zeros(2, dtype=np.int64), groups=None, columns=("a",))
    with ExitStack() as stack:
        clients = []
        for name in ("ash", "oak", "yew"):
            budget = Budget.unlimited(delta=DELTA)
            ledger = stack.enter_context(Ledger.open(tmp_path / f"{name}.ledger", population="canaries", budget=budget))
            clients.append(Client(name, nobody, training=mechanism(8.0), ledger=ledger))
        yield Federation(consortium=Consortium(clients, **MODES[request.param]()), monkeypatch=monkeypatch)


@every_setting
def test_the_right_client_passes_and_every_faulty_one_is_flagged_in_the_same_run(
    epsilon: float, steps: int, sample_rate: float, federation: Federation
) -> None:
    declared = mechanism(epsilon, steps=steps, sample_rate=sample_rate)
    assert federation.reading(0, declared).faults == ()
    for name, actual in FAULTS.items():
        started = time.process_time()
        reading = federation.reading(1, declared, actual=actual)
        assert time.process_time() - started < 5
        words = "records weigh more" if name == "no clipping" else "less noise than declared"
        assert any(fault.startswith(words) for fault in reading.faults), name


@pytest.mark.nightly
@every_setting
def test_of_twenty_right_clients_one_is_flagged_at_most(epsilon: float, steps: int, sample_rate: float, federation: Federation) -> None:
    declared = mechanism(epsilon, steps=steps, sample_rate=sample_rate)
    readings = [federation.reading(0, declared, seed=seed) for seed in range(20)]
    # At a family-wise level of 1e-3, two or more are flagged once in 5,000 times.
    assert sum(bool(reading.faults) for reading in readings) <= 1
    assert all(reading.proved <= reading.claimed for reading in readings)
    if sample_rate == 1:
        bounds = [reading.sharpest_bound() for reading in readings]
        print(f"epsilon {epsilon}: claimed {readings[0].claimed:.3f}, lower bounds {min(bounds):.3f} to {max(bounds):.3f}")
        assert max(reading.sharpest_bound(significance=1e-3) for reading in readings) <= readings[0].claimed
    assert federation.reading(1, declared, actual=FAULTS["half the noise"]).faults


@pytest.mark.parametrize("federation", MODES, indirect=True)
def test_the_part_of_one_client_is_what_it_trained_on_the_grid(federation: Federation) -> None:
    declared = mechanism(8.0)
    rows, update = federation.canaries(0, declared)
    trained = privfed.client.train(
        rows.module, rows.start, rows.samples, mechanism=rows.mechanism, loss=binary_cross_entropy, randomness=_SeededRandomness(0)
    ).update_values
    # The noise stands hundreds of grid steps high.
    assert 0 < np.abs(update.values - trained.values).max() < 0.01 * trained.values.std()


def test_noise_that_two_clients_share_is_found_in_what_was_opened(federation: Federation) -> None:
    declared = mechanism(8.0)
    first, own, shared = (federation.canaries(index, declared, seed=seed) for index, seed in ((0, 1), (1, 2), (2, 1)))
    assert compare_noise(first, own, what="the noise of ash and oak").fault is None
    other = DiracRows.draw(declared, count=CANARIES, rng=np.random.default_rng(5))
    again = federation.audited(2, other.module, other.samples, other.mechanism, seed=1)
    assert "not independent" in compare_noise(first, (other, again), what="the noise of ash and yew").fault
    np.testing.assert_array_equal(shared[1].values, first[1].values)


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 6, 6)), nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 1))


PATHS: dict[str, Callable[[], nn.Module]] = {
    "book-keeping of a ReLU network": lambda: mlp(INPUTS, hidden=(32, 16)),
    "book-keeping": lambda: nn.Sequential(nn.Linear(INPUTS, 32), nn.Tanh(), nn.Linear(32, 1)),
    "hooks": convolutions,
}
LAYERED = DpSgd(
    noise_multiplier=1.5, max_grad_norm=0.5, sample_rate=0.5, expected_batch_size=100, steps=4, learning_rate=0.1, max_records=200
)


def layered_faults(federation: Federation, index: int, module: nn.Module, *, actual: Change = HONEST, compiled: bool = False) -> list[str]:
    """Faults of the noise on every layer, and of the clipping."""
    silent = SilentTraining(module=module, inputs=INPUTS, declared=LAYERED)
    copies = CopiesTraining(module=module, inputs=INPUTS, loss=binary_cross_entropy, classes=2, declared=LAYERED, copies=200)
    sums = [None, None]
    if compiled:
        made = (probe.mechanism for probe in (silent, copies))
        sums = [compile_sum(module, mechanism=one, loss=binary_cross_entropy, inputs=INPUTS) for one in made]
    noise = silent.read(federation.audited(index, module, silent.samples, silent.mechanism, actual=actual, compiled=sums[0]))
    weight = copies.read(federation.audited(index, module, copies.samples, copies.mechanism, actual=actual, compiled=sums[1]))
    return [meter.fault for meter in (*noise, weight) if meter.fault is not None]


@pytest.mark.parametrize("path", PATHS)
def test_on_every_path_of_training_the_right_client_passes_and_faults_are_flagged_in_the_same_run(
    path: str, federation: Federation
) -> None:
    torch.manual_seed(0)
    module = PATHS[path]()
    assert layered_faults(federation, 0, module) == []
    for name, actual in FAULTS.items():
        words = "records weigh more" if name == "no clipping" else "less noise"
        assert any(fault.startswith(words) for fault in layered_faults(federation, 1, module, actual=actual)), name


@pytest.mark.nightly
def test_on_the_compiled_path_the_right_client_passes_and_missing_noise_is_flagged_in_the_same_run(federation: Federation) -> None:
    torch.manual_seed(0)
    module = PATHS["book-keeping of a ReLU network"]()
    assert layered_faults(federation, 0, module, compiled=True) == []
    assert layered_faults(federation, 1, module, actual=FAULTS["half the noise"], compiled=True)


def test_the_number_of_records_does_not_show_in_what_is_opened_and_a_client_that_divides_by_it_is_flagged(federation: Federation) -> None:
    canary = CardinalityCanary(declared=mechanism(1.0, steps=2, sample_rate=0.1))

    def faults(index: int, actual: Callable[[int], Change]) -> list[str]:
        updates = [
            federation.audited(index, canary.module, canary.samples(size), canary.mechanism, actual=actual(size), seed=10 * position)
            for position, size in enumerate(canary.sizes)
        ]
        return [meter.fault for meter in canary.read(updates) if meter.fault is not None]

    assert faults(0, lambda _: HONEST) == []
    assert faults(1, lambda size: lambda right: replace(right, expected_batch_size=max(1, int(size * right.sample_rate))))


@pytest.mark.parametrize("federation", ["ThresholdKey", "EscrowKey", "Plaintext"], indirect=True)
def test_a_consortium_of_another_trust_mode_is_audited_likewise(federation: Federation) -> None:
    declared = mechanism(8.0)
    assert federation.reading(0, declared).faults == ()
    assert federation.reading(1, declared, actual=FAULTS["half the noise"]).faults


def test_a_client_without_noise_to_measure_is_refused(federation: Federation) -> None:
    client = replace(federation.consortium.clients[0], training=NonPrivate(learning_rate=0.1, batch_size=1, steps=1, seed=0))
    with pytest.raises(ValueError, match="trains with DP-SGD, got NonPrivate"):
        lone_update(client, mlp(1), consortium=federation.consortium, loss=binary_cross_entropy)
