"""Batches with a capacity, customers with several records, and adaptive clipping: what training does, and what it is charged."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from privfed.client import Client, Trainer
from privfed.data.samples import Samples
from privfed.dp.accounting import epsilon
from privfed.dp.clipping import AdaptiveClipping
from privfed.dp.ledger import Ledger
from privfed.dp.mechanism import Budget, GaussianRelease, Unit
from privfed.errors import UnsupportedDataError
from privfed.he.params import CkksParams
from privfed.training import dpsgd
from privfed.training.batched import train_together
from privfed.training.compiled import CompiledSum, compile_sum
from privfed.training.dpsgd import check
from privfed.training.gradients import ClippedGradients, ClippedSum
from privfed.training.loss import binary_cross_entropy, cross_entropy
from privfed.training.mechanism import GRID_FRACTION, DpSgd
from privfed.training.model import layout_of, values_of
from privfed.training.randomness import Randomness, _SeededRandomness
from tests.training.steps import ONE_STEP, Silent, samples_of, seeded, table, update

torch.set_num_threads(1)
CLIPPING = AdaptiveClipping(initial_norm=1.0, target_quantile=0.5, learning_rate=0.2, count_noise=4.0)
ADAPTIVE = replace(ONE_STEP, max_grad_norm=4.0, expected_batch_size=40, max_records=2000, adaptive_clipping=CLIPPING)


class Drawn(Randomness):
    """Seeded noise, and all records in every batch; no noise where a single number is asked for, which is a count."""

    private = False

    def __init__(self, seed: int, *, noisy_counts: bool = True) -> None:
        self._source = _SeededRandomness(seed)
        self._noisy_counts = noisy_counts

    def _stream(self, count: int) -> bytes:
        return self._source._stream(count)

    def normal(self, count: int) -> NDArray[np.float64]:
        return np.zeros(1) if count == 1 and not self._noisy_counts else super().normal(count)


@pytest.fixture
def clipped(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, ClippedSum]]:
    """What each step clipped to, and the sums."""
    seen: list[tuple[float, ClippedSum]] = []
    whole = ClippedGradients.sum

    def watched(gradients: ClippedGradients, features: torch.Tensor, labels: torch.Tensor, *, count: int | None = None) -> ClippedSum:
        seen.append((gradients.max_grad_norm, whole(gradients, features, labels, count=count)))
        return seen[-1][1]

    monkeypatch.setattr(dpsgd, "check", lambda *_, **__: None)
    monkeypatch.setattr(ClippedGradients, "sum", watched)
    return seen


# ---------------------------------------------------------------- audits of one step

RUNS = 400
ERROR = math.sqrt(2 / RUNS)
# Sixteen records whose gradients point one way, and others that point the other; the norm of all is 1 in one digit less.
CROWD, CANARY = np.full((16, 2), 0.7), np.full((1, 2), 0.7)


def zeros() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2))
    nn.init.zeros_(module[0].weight)
    nn.init.zeros_(module[0].bias)
    return module


def worlds(canaries: int) -> tuple[Samples, Samples]:
    """The same table without and with the records of one more unit."""
    features = np.concatenate([CROWD, np.repeat(CANARY, canaries, axis=0)])
    labels, groups = np.array([0] * 16 + [1] * canaries), np.array([*range(16), *[16] * canaries])
    whole = samples_of(features, labels, groups)
    return whole.take(range(16)), whole


Observe = Callable[[Samples, Randomness], NDArray[np.float64]]


def separation(observe: Observe, *, canaries: int, variances: NDArray[np.float64] | float, noisy_counts: bool = True) -> float:
    """How far apart what is observed puts the two worlds, in standard deviations of its noise, in the best direction.

    Differential privacy of a Gaussian of noise multiplier 1 demands at most 1 (Dong, Roth and Su, 2019, "Gaussian differential privacy").
    """
    without, together = worlds(canaries)
    direction = (observe(together, Silent()) - observe(without, Silent())) / variances
    randomness = Drawn(8, noisy_counts=noisy_counts)
    outcomes = [[float(observe(world, randomness) @ direction) for _ in range(RUNS)] for world in (without, together)]
    return float(np.mean(outcomes[1]) - np.mean(outcomes[0])) / math.sqrt((np.var(outcomes[0]) + np.var(outcomes[1])) / 2)


def weights_after(mechanism: DpSgd) -> Observe:
    return lambda samples, randomness: update(zeros(), samples, mechanism, loss=cross_entropy, randomness=randomness)


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(dpsgd, "check", lambda *_, **__: None)
    return monkeypatch


def half_the_noise(optimizer: dpsgd._NoisingOptimizer) -> None:
    stated, optimizer.noise_multiplier = optimizer.noise_multiplier, optimizer.noise_multiplier / 2
    ADD_NOISE(optimizer)
    optimizer.noise_multiplier = stated


def no_clipping(gradients: ClippedGradients, features: torch.Tensor, labels: torch.Tensor, *, count: int | None = None) -> ClippedSum:
    features, labels = features[:count], labels[:count]
    rows = gradients.of_records(features, labels).double()
    return ClippedSum(rows.sum(dim=0), rows.norm(dim=1), 0)


ADD_NOISE = dpsgd._NoisingOptimizer.add_noise
BUGS = {"half the noise": (dpsgd._NoisingOptimizer, "add_noise", half_the_noise), "no clipping": (ClippedGradients, "sum", no_clipping)}


CAPPED = replace(ONE_STEP, max_grad_norm=0.4, expected_batch_size=16, batch_capacity=12, max_records=17)


def test_the_audit_of_a_capped_step_finds_no_more_than_is_charged_and_rejects_planted_bugs(unchecked: pytest.MonkeyPatch) -> None:
    # All seventeen are sampled and twelve are kept, so the canary takes the place of a record that points the other way.
    observe = weights_after(CAPPED)
    moved = weights_after(replace(CAPPED, batch_capacity=None))
    without, together = worlds(1)
    canary = (moved(together, Silent()) - moved(without, Silent())) * 16
    canary /= np.linalg.norm(canary)

    def estimate() -> float:
        """By how much the mean moves along the canary's gradient, in units of the norm that it may have."""
        means = [np.mean([observe(world, Drawn(seed)) @ canary for seed in range(RUNS)]) for world in (without, together)]
        return float(means[1] - means[0]) * 16 / 0.4

    # Every record that is kept instead of another moves the sum by twice the norm; with a probability of 12/17 the canary is one.
    # Noise of multiplier 1, and at most one canary in a batch; both worlds, so twice the variance.
    error = math.sqrt(2 * (1 + 1) / RUNS)
    assert estimate() == pytest.approx(2 * 12 / 17, abs=4 * error)
    unchecked.setattr(ClippedGradients, "sum", no_clipping)
    assert estimate() > 2 * 12 / 17 + 4 * error


@pytest.mark.parametrize("capacity", [17, 100])
def test_the_audit_of_a_step_whose_capacity_is_not_reached_finds_the_stated_privacy(capacity: int, unchecked: pytest.MonkeyPatch) -> None:
    observe = weights_after(replace(CAPPED, batch_capacity=capacity, max_records=capacity))
    assert separation(observe, canaries=1, variances=1.0) == pytest.approx(1.0, abs=4 * ERROR)


@pytest.mark.parametrize(("owner", "method", "bug"), BUGS.values(), ids=BUGS.keys())
def test_the_audit_of_a_step_over_customers_finds_what_is_charged_and_rejects_planted_bugs(
    owner: type, method: str, bug: object, unchecked: pytest.MonkeyPatch
) -> None:
    mechanism = replace(ONE_STEP, max_grad_norm=0.4, expected_batch_size=16, records_per_customer=2)
    # All records are drawn, so that a customer's two records move the sum as a single one would at half of the noise.
    as_one = GaussianRelease(noise_multiplier=1 / 2)
    assert epsilon([mechanism.event()], delta=1e-5) == pytest.approx(epsilon([as_one], delta=1e-5), rel=1e-3)
    observe = weights_after(mechanism)
    # The deviation that divides is estimated too: its relative error is that of 2 * RUNS normal numbers.
    error = math.hypot(ERROR, 2 / math.sqrt(4 * RUNS))
    assert separation(observe, canaries=2, variances=1.0) == pytest.approx(2.0, abs=4 * error)
    unchecked.setattr(owner, method, bug)
    assert separation(observe, canaries=2, variances=1.0) > 2 + 4 * error


# The count takes most of the budget here, so that a fault of either release shows.
COUNTED = replace(
    ADAPTIVE, expected_batch_size=16, adaptive_clipping=replace(CLIPPING, count_noise=0.52, target_quantile=0.3, learning_rate=1.0)
)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The noised counts, as they are released."""
    seen: list[float] = []
    follow = AdaptiveClipping.next_norm

    def next_norm(rule: AdaptiveClipping, norm: float, *, noised_count: float, expected_batch_size: int) -> float:
        seen.append(noised_count)
        return follow(rule, norm, noised_count=noised_count, expected_batch_size=expected_batch_size)

    monkeypatch.setattr(AdaptiveClipping, "next_norm", next_norm)
    return seen


def sum_and_count(counts: list[float]) -> tuple[Observe, NDArray[np.float64]]:
    """Both releases of an adaptive step, in units of a clipped gradient and of a record, and the variances of their noise."""

    def observe(samples: Samples, randomness: Randomness) -> NDArray[np.float64]:
        moved = update(zeros(), samples, COUNTED, loss=cross_entropy, randomness=randomness) * 16
        return np.array([*moved, counts.pop()])

    assert COUNTED.adaptive_clipping is not None
    return observe, np.array([*[COUNTED.sum_noise_multiplier**2] * 6, COUNTED.adaptive_clipping.count_noise**2])


def test_the_audit_of_sum_and_count_together_finds_the_stated_privacy(unchecked: pytest.MonkeyPatch, counts: list[float]) -> None:
    observe, variances = sum_and_count(counts)
    assert separation(observe, canaries=1, variances=variances) == pytest.approx(1.0, abs=4 * ERROR)


def count_of_those_below(within: torch.Tensor, *, count_noise: float, randomness: Randomness) -> float:
    return int(within.count_nonzero()) + count_noise * float(randomness.normal(1)[0])


ADAPTIVE_BUGS = {
    "the noise on the sum is not enlarged": (DpSgd, "sum_noise_multiplier", property(lambda mechanism: mechanism.noise_multiplier)),
    "the count is not centred": (dpsgd, "_noised_count", count_of_those_below),
    "the count has half its noise": (
        dpsgd,
        "_noised_count",
        lambda within, *, count_noise, randomness: NOISED_COUNT(within, count_noise=count_noise / 2, randomness=randomness),
    ),
}
NOISED_COUNT = dpsgd._noised_count


@pytest.mark.parametrize(("owner", "name", "bug"), ADAPTIVE_BUGS.values(), ids=ADAPTIVE_BUGS.keys())
def test_the_audit_of_sum_and_count_rejects_a_planted_bug(
    owner: object, name: str, bug: object, unchecked: pytest.MonkeyPatch, counts: list[float]
) -> None:
    unchecked.setattr(owner, name, bug)
    observe, variances = sum_and_count(counts)
    assert separation(observe, canaries=1, variances=variances) > 1 + 4 * ERROR


class Recording:
    """A correction that adds nothing and keeps the weights before each step."""

    def __init__(self) -> None:
        self.weights: list[NDArray[np.float64]] = []

    def gradient(self, weights: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        self.weights.append(weights.double().numpy())
        return torch.zeros_like(weights)


def second_step(samples: Samples, randomness: Randomness) -> NDArray[np.float64]:
    """What the second step alone releases. Before it the norm grows, because all gradients of the first are longer than it."""
    clipping = replace(CLIPPING, initial_norm=0.05, target_quantile=0.9, learning_rate=1.0, count_noise=2.0)
    # The first step moves the weights by next to nothing, so that the second one sees the same gradients.
    mechanism = replace(ADAPTIVE, expected_batch_size=16, steps=2, learning_rate=1e-3, adaptive_clipping=clipping)
    recording = Recording()
    moved = update(zeros(), samples, mechanism, loss=cross_entropy, randomness=randomness, correction=recording)
    return moved - (recording.weights[1] - recording.weights[0])


def noise_of_the_first_norm(optimizer: dpsgd._NoisingOptimizer) -> None:
    norm, optimizer.max_grad_norm = optimizer.max_grad_norm, 0.05
    ADD_NOISE(optimizer)
    optimizer.max_grad_norm = norm


def test_the_audit_of_the_second_adaptive_step_rejects_noise_in_multiples_of_another_norm(unchecked: pytest.MonkeyPatch) -> None:
    expected = 1 / replace(CLIPPING, count_noise=2.0).sum_noise_multiplier(1.0)
    found = separation(second_step, canaries=1, variances=1.0, noisy_counts=False)
    assert found == pytest.approx(expected, abs=4 * ERROR)
    unchecked.setattr(dpsgd._NoisingOptimizer, "add_noise", noise_of_the_first_norm)
    assert separation(second_step, canaries=1, variances=1.0, noisy_counts=False) > expected + 4 * ERROR


# ---------------------------------------------------------------- capacity


def test_a_batch_above_its_capacity_gives_way_to_a_part_of_it_and_others_are_left_alone(clipped: list[tuple[float, ClippedSum]]) -> None:
    batches = ((0, 1, 2, 3, 4), (5, 6), (), tuple(range(40)))

    class Some(Silent):
        def _stream(self, count: int) -> bytes:
            return _SeededRandomness(1)._stream(count)

    update(seeded(1, 4), table(), replace(ONE_STEP, steps=4, batch_capacity=3), randomness=Some(*batches))
    assert [len(step.norms) for _, step in clipped] == [3, 2, 0, 3]


def test_training_under_a_capacity_is_charged_as_such() -> None:
    mechanism = replace(ONE_STEP, sample_rate=0.01, batch_capacity=30, max_records=2000, steps=7)
    event = mechanism.event()
    assert (event.capacity, event.max_records, event.steps, event.sample_rate) == (30, 2000, 7, 0.01)
    assert replace(mechanism, max_records=None, expected_batch_size=20).event().max_records == 2000


@pytest.mark.parametrize(("share", "trained"), [(0.9, True), (1.0, True), (1.1, False)])
@pytest.mark.parametrize("capacity", [None, 5])
def test_what_is_charged_covers_as_many_records_as_declared_and_more_are_refused(share: float, trained: bool, capacity: int | None) -> None:
    declared = DpSgd(
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=0.02,
        expected_batch_size=4,
        steps=50,
        learning_rate=0.1,
        max_records=200,
        batch_capacity=capacity,
    )
    module, samples = seeded(1, 4), table(round(200 * share))
    if trained:
        check(module, values_of(module), samples, mechanism=declared, loss=binary_cross_entropy)
    else:
        with pytest.raises(UnsupportedDataError, match=r"declared limit of 200.*nothing was trained"):
            check(module, values_of(module), samples, mechanism=declared, loss=binary_cross_entropy)
    spent, true = (epsilon([replace(declared, max_records=n).event()], delta=1e-5) for n in (200, len(samples)))
    if trained or capacity is None:
        assert true <= spent * 1.002  # both are known to 0.2 percent
    else:
        assert true > 1.02 * spent


# ---------------------------------------------------------------- customers

CUSTOMERS = replace(ONE_STEP, sample_rate=0.1, expected_batch_size=4, records_per_customer=2)


def grouped(*groups: int) -> Samples:
    return samples_of(table(len(groups)).features.astype(np.float64), np.zeros(len(groups), dtype=np.int64), np.array(groups))


def test_a_customer_with_more_records_than_declared_is_refused_before_any_work() -> None:
    module = seeded(1, 4)
    common = {"mechanism": CUSTOMERS, "loss": binary_cross_entropy}
    check(module, values_of(module), grouped(712, 5, 712, 5, 9), **common)
    for samples in (grouped(712, 5, 712, 712, 9), grouped(5, 9, 712).take([0, 0, 0, 1])):
        with pytest.raises(UnsupportedDataError, match=r"more records than the declared 2.*nothing was trained") as refusal:
            check(module, values_of(module), samples, **common)
        assert not any(said in str(refusal.value) for said in ("712", "3"))
        check(module, values_of(module), samples.first_of_groups(2), **common)


def test_records_that_are_nobody_s_are_refused_where_customers_are_protected() -> None:
    module = seeded(1, 4)
    with pytest.raises(UnsupportedDataError, match="whose each record is"):
        check(module, values_of(module), table(), mechanism=CUSTOMERS, loss=binary_cross_entropy)


def test_training_over_customers_costs_more_than_over_records_and_is_charged_to_customers_only(tmp_path: Path) -> None:
    module, samples = seeded(1, 4), grouped(*range(20), *range(20))
    rounds = {"session": b"session", "round": 0, "attempt": 0}

    def trainer(unit: Unit) -> tuple[Trainer, Ledger]:
        ledger = Ledger.open(tmp_path / unit.name, population="ash", unit=unit, budget=Budget(epsilon=50.0, delta=1e-5))
        client = Client("ash", samples, training=CUSTOMERS, ledger=ledger)
        start, params = values_of(module), CkksParams.standard(bound=4.0)
        return Trainer(client=client, model=module, start=start, loss=binary_cross_entropy, params=params), ledger

    training, ledger = trainer(Unit.CUSTOMER)
    training.train(values_of(module), **rounds)
    assert ledger.spent() > 1.2 * epsilon([replace(CUSTOMERS, records_per_customer=None).event()], delta=1e-5)
    ledger.close()
    training, ledger = trainer(Unit.RECORD)
    with pytest.raises(ValueError, match="expected an event about one record"):
        training.train(values_of(module), **rounds)
    assert ledger.events() == ()
    ledger.close()


# ---------------------------------------------------------------- adaptive clipping


def test_every_step_clips_to_the_norm_that_its_noise_is_in_multiples_of(
    clipped: list[tuple[float, ClippedSum]], monkeypatch: pytest.MonkeyPatch
) -> None:
    noised: list[float] = []

    def add_noise(optimizer: dpsgd._NoisingOptimizer) -> None:
        noised.append(optimizer.max_grad_norm)
        ADD_NOISE(optimizer)

    monkeypatch.setattr(dpsgd._NoisingOptimizer, "add_noise", add_noise)
    update(seeded(1, 4), table(), replace(ADAPTIVE, steps=8))
    assert [norm for norm, _ in clipped] == noised
    assert noised[0] == CLIPPING.initial_norm
    assert len(set(noised)) == 8


def test_the_norm_of_a_training_run_finds_its_quantile_and_the_next_run_begins_anew(clipped: list[tuple[float, ClippedSum]]) -> None:
    clipping = replace(CLIPPING, target_quantile=0.7, initial_norm=0.05)
    mechanism = replace(ADAPTIVE, expected_batch_size=1000, steps=60, learning_rate=1e-6, adaptive_clipping=clipping)
    update(seeded(1, 4), table(1000), mechanism)
    norm, step = clipped[-1]
    # After 60 steps at rate 0.2 the start is forgotten; the count's noise of 4 in 1000 moves the norm by some 0.2 * 0.004 a step.
    assert float((step.norms <= norm).double().mean()) == pytest.approx(0.7, abs=0.02)
    update(seeded(1, 4), table(), replace(mechanism, steps=1))
    assert clipped[-1][0] == 0.05


def test_no_norm_exceeds_the_declared_largest(clipped: list[tuple[float, ClippedSum]]) -> None:
    # All gradients are longer than the norm may become, and stay so.
    steep = samples_of(10 * CROWD, np.zeros(16, dtype=np.int64))
    mechanism = replace(ADAPTIVE, max_grad_norm=1.5, expected_batch_size=16, steps=12, learning_rate=1e-9)
    update(zeros(), steep, replace(mechanism, adaptive_clipping=replace(CLIPPING, learning_rate=1.0)), loss=cross_entropy)
    norms = [norm for norm, _ in clipped]
    assert max(norms) == 1.5
    assert norms[0] == 1.0


def test_no_norm_falls_below_a_step_of_the_grid(clipped: list[tuple[float, ClippedSum]]) -> None:
    # No gradient is as long as the norm, which falls by a factor of exp(-50) in each step, and would soon be 0.
    clipping = AdaptiveClipping(initial_norm=1.0, target_quantile=0.5, learning_rate=100.0, count_noise=4.0)
    mechanism = replace(ADAPTIVE, max_grad_norm=1.0, expected_batch_size=16, steps=20, learning_rate=1e-9, adaptive_clipping=clipping)
    flat = samples_of(np.zeros((16, 2)), np.zeros(16, dtype=np.int64))
    update(zeros(), flat, mechanism, loss=lambda outputs, labels: 0.0 * outputs.sum(dim=1))
    norms = [norm for norm, _ in clipped]
    assert norms[0] == 1.0
    assert min(norms) == 2**-20


def test_counts_and_noised_sums_of_adaptive_steps_are_on_their_grids(
    counts: list[float], clipped: list[tuple[float, ClippedSum]], monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[NDArray[np.float64]] = []

    def add_noise(optimizer: dpsgd._NoisingOptimizer) -> None:
        ADD_NOISE(optimizer)
        released.append(optimizer.params[0].grad.double().numpy())

    monkeypatch.setattr(dpsgd._NoisingOptimizer, "add_noise", add_noise)
    update(seeded(1, 4), table(), replace(ADAPTIVE, max_grad_norm=1.0, steps=5))
    assert all(count * 2**20 == round(count * 2**20) and count * 2 != round(count * 2) for count in counts)
    for grid_steps in (values / GRID_FRACTION for values in released):
        assert np.abs(grid_steps).max() < 2**24  # held exactly by float32
        assert (grid_steps == np.rint(grid_steps)).all()
    assert len({norm for norm, _ in clipped}) == 5


def test_an_empty_batch_counts_as_half_and_is_a_step(counts: list[float], unchecked: pytest.MonkeyPatch) -> None:
    update(seeded(1, 4), table(), replace(ADAPTIVE, steps=2), randomness=Silent((), ()))
    assert counts == [0.0, 0.0]


def test_adaptive_training_costs_what_its_noise_multiplier_costs_with_a_fixed_norm() -> None:
    fixed = replace(ADAPTIVE, sample_rate=0.02, steps=300, adaptive_clipping=None)
    adaptive = replace(fixed, adaptive_clipping=CLIPPING)
    assert adaptive.sum_noise_multiplier > adaptive.noise_multiplier == fixed.sum_noise_multiplier
    assert epsilon([adaptive.event()], delta=1e-5) == pytest.approx(epsilon([fixed.event()], delta=1e-5), rel=2e-3)


def test_what_is_compiled_or_stacked_refuses_adaptive_clipping(monkeypatch: pytest.MonkeyPatch) -> None:
    module = seeded(1, 4)
    with pytest.raises(ValueError, match=r"adaptive_clipping.*nothing was compiled"):
        compile_sum(module, mechanism=ADAPTIVE, loss=binary_cross_entropy, inputs=4)
    compiled = CompiledSum(
        layout=layout_of(module), loss=binary_cross_entropy, max_grad_norm=4.0, capacity=64, function=lambda *_: (torch.zeros(1),) * 2
    )
    with pytest.raises(ValueError, match=r"adaptive_clipping.*nothing was trained"):
        check(module, values_of(module), table(), mechanism=ADAPTIVE, loss=binary_cross_entropy, compiled=compiled)
    with pytest.raises(TypeError, match=r"expected NonPrivate.*nothing was trained"):
        train_together(module, values_of(module), [table()], mechanism=ADAPTIVE, loss=binary_cross_entropy)  # pyright: ignore[reportArgumentType]
