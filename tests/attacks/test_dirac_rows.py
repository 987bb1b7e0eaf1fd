import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from privfed.attacks.dirac_rows import DiracReading, DiracRows, compare_noise
from privfed.client import Client, Trainer
from privfed.dp.accounting import calibrate_noise_multiplier
from privfed.dp.clipping import AdaptiveClipping
from privfed.dp.ledger import Ledger
from privfed.dp.mechanism import Budget
from privfed.he.params import CkksParams
from privfed.training.dpsgd import train
from privfed.training.loss import binary_cross_entropy
from privfed.training.mechanism import DpSgd
from privfed.training.model import layout_of, mlp
from privfed.training.randomness import _SeededRandomness
from privfed.update import PlainVector
from tests.attacks.wrong_randomness import EachRecordTwice, OneDraw

DELTA, CANARIES = 1e-5, 1000


class DoubledRate(_SeededRandomness):
    """Samples twice as many records as were asked for."""

    def poisson_batches(self, records: int, *, sample_rate: float, steps: int) -> Iterator[NDArray[np.int64]]:
        return super().poisson_batches(records, sample_rate=2 * sample_rate, steps=steps)


def mechanism(epsilon: float, *, steps: int = 1, sample_rate: float = 1.0) -> DpSgd:
    """DP-SGD that spends this epsilon."""
    budget = Budget(epsilon=epsilon, delta=DELTA)
    return DpSgd(
        noise_multiplier=calibrate_noise_multiplier(budget, sample_rate=sample_rate, steps=steps),
        max_grad_norm=1.0,
        sample_rate=sample_rate,
        expected_batch_size=round(CANARIES * sample_rate),
        steps=steps,
        learning_rate=0.5,
        max_records=CANARIES,
    )


SETTINGS = [(1.0, 1, 1.0), (8.0, 1, 1.0), (1.0, 40, 0.1), (8.0, 40, 0.1)]
every_setting = pytest.mark.parametrize(("epsilon", "steps", "sample_rate"), SETTINGS)


def audit(
    declared: DpSgd,
    *,
    seed: int = 0,
    actual: Callable[[DpSgd], DpSgd] = lambda right: right,
    randomness: type[_SeededRandomness] = _SeededRandomness,
) -> tuple[DiracRows, PlainVector]:
    """Canaries, and the update of a training on them that may not be as it is declared."""
    canaries = DiracRows.draw(declared, count=CANARIES, rng=np.random.default_rng(seed))
    result = train(
        canaries.module,
        canaries.start,
        canaries.samples,
        mechanism=actual(canaries.mechanism),
        loss=binary_cross_entropy,
        randomness=randomness(seed),
    )
    return canaries, result.update_values


def read(pair: tuple[DiracRows, PlainVector]) -> DiracReading:
    return pair[0].read(pair[1], delta=DELTA)


def noise_times(factor: float) -> Callable[[DpSgd], DpSgd]:
    return lambda right: replace(right, noise_multiplier=factor * right.noise_multiplier)


def unclipped(right: DpSgd) -> DpSgd:
    """The same noise on gradients of any length."""
    return replace(right, max_grad_norm=1000.0, noise_multiplier=right.noise_multiplier * right.max_grad_norm / 1000.0)


@every_setting
def test_the_right_mechanism_passes(epsilon: float, steps: int, sample_rate: float) -> None:
    declared = mechanism(epsilon, steps=steps, sample_rate=sample_rate)
    # 20 audits at a level of 1e-3 find two or more faults once in 5,000 times.
    found = [fault for seed in range(20) for fault in read(audit(declared, seed=seed)).faults]
    assert len(found) <= 1


@every_setting
@pytest.mark.parametrize("actual", [noise_times(0.5), noise_times(0.1), noise_times(1e-9)], ids=["half", "a tenth", "none"])
def test_missing_noise_is_found(epsilon: float, steps: int, sample_rate: float, actual) -> None:
    reading = read(audit(mechanism(epsilon, steps=steps, sample_rate=sample_rate), actual=actual))
    assert reading.noise.fault.startswith("less noise than declared")
    assert reading.faults


@every_setting
def test_missing_clipping_is_found(epsilon: float, steps: int, sample_rate: float) -> None:
    reading = read(audit(mechanism(epsilon, steps=steps, sample_rate=sample_rate), actual=unclipped))
    assert reading.weight.fault.startswith("records weigh more")


@pytest.mark.parametrize("epsilon", [1.0, 8.0])
@pytest.mark.parametrize("randomness", [DoubledRate, EachRecordTwice])
def test_doubled_sampling_and_records_used_twice_are_found(epsilon: float, randomness: type) -> None:
    declared = mechanism(epsilon, steps=40, sample_rate=0.1)
    faults = [read(audit(declared, seed=seed, randomness=randomness)).weight.fault for seed in range(5)]
    # At an epsilon of 1, one audit in ten misses the doubled rate: three or more of five do once in 100 times.
    assert sum(fault is not None and fault.startswith("records weigh more") for fault in faults) >= 3


@pytest.mark.parametrize("epsilon", [1.0, 8.0])
def test_noise_that_is_used_in_several_steps_is_found(epsilon: float) -> None:
    reading = read(audit(mechanism(epsilon, steps=10), randomness=OneDraw))
    assert "one draw is used several times" in reading.noise.fault


def test_noise_that_is_used_in_several_rounds_or_by_several_clients_is_found() -> None:
    declared = mechanism(1.0)
    first, other = audit(declared, seed=1), audit(declared, seed=2)
    again = DiracRows.draw(declared, count=CANARIES, rng=np.random.default_rng(3))
    update = train(
        again.module, again.start, again.samples, mechanism=again.mechanism, loss=binary_cross_entropy, randomness=_SeededRandomness(1)
    )
    assert compare_noise(first, other, what="the noise of rounds 1 and 2").fault is None
    assert "not independent" in compare_noise(first, (again, update.update_values), what="the noise of rounds 1 and 3").fault
    fewer = DiracRows.draw(declared, count=50, rng=np.random.default_rng(0))
    with pytest.raises(ValueError, match="expected equally many canaries"):
        compare_noise(first, (fewer, fewer.start), what="the noise of different canaries")


@pytest.mark.parametrize("epsilon", [1.0, 8.0])
def test_the_lower_bound_stays_below_the_accounted_epsilon_and_comes_near_it(epsilon: float) -> None:
    readings = [read(audit(mechanism(epsilon), seed=seed)) for seed in range(20)]
    bounds = [reading.sharpest_bound(significance=1e-3) for reading in readings]
    assert all(reading.claimed <= epsilon for reading in readings)
    assert max(bounds) <= readings[0].claimed
    assert np.mean([reading.sharpest_bound() for reading in readings]) > 0.35 * epsilon
    halved = read(audit(mechanism(epsilon), actual=noise_times(0.5)))
    assert halved.sharpest_bound() > halved.claimed


def test_the_audit_goes_through_a_clients_ledger_and_training(tmp_path: Path) -> None:
    declared = mechanism(8.0, steps=5)
    canaries = DiracRows.draw(declared, count=CANARIES, rng=np.random.default_rng(0))
    faults = {}
    for name, actual in (("ash", canaries.mechanism), ("oak", noise_times(0.5)(canaries.mechanism))):
        with Ledger.open(tmp_path / name, population=name, budget=Budget(epsilon=100.0, delta=DELTA)) as ledger:
            client = Client(name, canaries.samples, training=actual, ledger=ledger)
            params = CkksParams.standard(bound=1.0)
            facts = {"model": canaries.module, "start": canaries.start, "loss": binary_cross_entropy, "params": params}
            trainer = Trainer(client=client, randomness=_SeededRandomness, **facts)
            update = trainer.train(canaries.start, session=b"session", round=0, attempt=0)
            assert list(ledger.events()) == [actual.event()]
        # As it travels: rounded to the grid of encryption.
        sent = PlainVector(layout=update.vector.layout, values=np.rint(update.vector.values / params.step) * params.step)
        faults[name] = canaries.read(sent, delta=DELTA).faults
    assert faults["ash"] == ()
    assert any("less noise" in fault for fault in faults["oak"])


def test_a_reading_says_what_was_claimed_and_proved() -> None:
    reading = read(audit(mechanism(8.0), actual=noise_times(0.1)))
    assert reading.claimed == pytest.approx(8.0, abs=0.1)
    assert any(fault.startswith("epsilon is at least") and "was claimed" in fault for fault in reading.faults)
    sampled = read(audit(mechanism(1.0, steps=40, sample_rate=0.1), actual=noise_times(1e-9)))
    # Where steps are sampled nothing is assumed about the mechanism, so that no more is proved than such canaries can prove.
    assert 1 < sampled.proved < 6


def test_a_record_weighs_exactly_the_clipping_norm_in_every_step() -> None:
    declared = replace(mechanism(8.0, steps=3), max_grad_norm=0.01)
    canaries, update = audit(declared, actual=noise_times(1e-9))
    scores = canaries.read(update, delta=DELTA).scores
    np.testing.assert_allclose(scores.included, 3, rtol=1e-4)
    np.testing.assert_allclose(scores.excluded, 0, atol=1e-6)


def test_coins_are_fair_and_fixed_before_training() -> None:
    canaries = DiracRows.draw(mechanism(1.0), count=CANARIES, rng=np.random.default_rng(0))
    assert abs(canaries.included.mean() - 0.5) < 4 * 0.5 / math.sqrt(CANARIES)
    np.testing.assert_array_equal(canaries.included, DiracRows.draw(mechanism(1.0), count=CANARIES, rng=np.random.default_rng(0)).included)
    assert len(canaries.samples) == canaries.included.sum()
    assert (canaries.samples.features.argmax(axis=1) == np.flatnonzero(canaries.included)).all()


def test_canaries_and_mechanisms_that_do_not_fit_are_refused() -> None:
    declared, rng = mechanism(1.0), np.random.default_rng(0)
    with pytest.raises(ValueError, match="at least 40 canaries"):
        DiracRows.draw(declared, count=39, rng=rng)
    with pytest.raises(ValueError, match="two of each kind, got 50 with 50"):
        DiracRows(included=np.ones(50, dtype=np.bool_), declared=declared)
    with pytest.raises(ValueError, match="at most 10 included canaries"):
        DiracRows.draw(replace(declared, max_records=10), count=100, rng=rng)
    adaptive = replace(
        declared, adaptive_clipping=AdaptiveClipping(initial_norm=0.5, target_quantile=0.5, learning_rate=0.2, count_noise=50.0)
    )
    with pytest.raises(ValueError, match="fixed clipping norm, got AdaptivelyClippedGaussian"):
        DiracRows.draw(adaptive, count=100, rng=rng)
    other = mlp(3)
    zeros = PlainVector(layout=layout_of(other), values=np.zeros(layout_of(other).size))
    with pytest.raises(ValueError, match="one for each canary, got another layout"):
        DiracRows.draw(declared, count=100, rng=rng).read(zeros, delta=DELTA)
