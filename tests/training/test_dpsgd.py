import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from scipy import stats
from torch import nn
from torch.nn import functional

from privfed.errors import LayoutMismatchError, UnsupportedDataError, UnsupportedModelError
from privfed.training import bookkeeping, compiled, dpsgd, gradients
from privfed.training.bookkeeping import BookKeeping
from privfed.training.compiled import CompiledSum, compile_sum
from privfed.training.dpsgd import check, train
from privfed.training.gradients import ClippedGradients, ClippedSum
from privfed.training.loss import BinaryCrossEntropy, PerSampleLoss, binary_cross_entropy, cross_entropy
from privfed.training.mechanism import GRID_FRACTION, DpSgd, NonPrivate, TrainingMechanism
from privfed.training.model import layout_of, values_of
from privfed.training.objective import Correction, FedProx
from privfed.training.randomness import OperatingSystemRandomness, Randomness, _SeededRandomness
from privfed.update import PlainVector
from tests.training.steps import ONE_STEP, Counting, Silent, StepByStep, samples_of, seeded, table, update

torch.set_num_threads(1)

NO_BATCH = replace(ONE_STEP, sample_rate=1e-15)
NON_PRIVATE = NonPrivate(learning_rate=0.1, batch_size=8, steps=5, seed=0)
FLOAT32 = 2.0**-24  # relative rounding error of one float32 operation


def compile_whatever_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has train compile the sums of ReLU networks, once per model and loss: as far as the trace, which is what may be wrong here."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    choose = dpsgd._clipped_gradients
    sums: dict[tuple[object, ...], CompiledSum] = {}

    def clipped_gradients(
        model: nn.Module, *, loss: PerSampleLoss, max_grad_norm: float, inputs: int, compiled: object = None
    ) -> ClippedGradients:
        if type(model) is not nn.Sequential or not all(parameter.requires_grad for parameter in model.parameters()):
            return choose(model, loss=loss, max_grad_norm=max_grad_norm, inputs=inputs)
        key = (loss, max_grad_norm, layout_of(model))
        if key not in sums:
            mechanism = replace(ONE_STEP, max_grad_norm=max_grad_norm, max_records=40)
            sums[key] = compile_sum(model, mechanism=mechanism, loss=loss, inputs=inputs)
        return choose(model, loss=loss, max_grad_norm=max_grad_norm, inputs=inputs, compiled=sums[key])

    monkeypatch.setattr(dpsgd, "_clipped_gradients", clipped_gradients)


@pytest.fixture(params=["relu network", "book-keeping", "hooks", "compiled"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test on each way to the clipped sum. Most models here are ReLU networks, for which the first one is chosen."""
    if request.param == "compiled":
        compile_whatever_can_be(monkeypatch)
    if request.param == "book-keeping":
        monkeypatch.setattr(dpsgd, "relu_network", lambda *_, **__: False)
    if request.param == "hooks":
        monkeypatch.setattr(dpsgd, "linear_layers", lambda *_, **__: [])
    return request.param


# ---------------------------------------------------------------- sensitivity

# Ordinary, the only one of its class, huge, so large that gradients overflow, tiny, zero, and a repeated one.
ROWS = np.array([[1, 2], [-1, 0.5], [2, 1], [1e6, -1e6], [1e20, 1e20], [3e38, 3e38], [1e-3, 0], [0, 0], [1, 2]], dtype=np.float64)
ROW_LABELS = np.array([0, 0, 1, 0, 0, 0, 0, 0, 0])
EVERYTHING = tuple(range(len(ROWS)))


@dataclass(frozen=True)
class Constant:
    value: float

    def gradient(self, weights: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        return torch.full_like(weights, self.value)


def neighbour_distances(
    module: nn.Module, loss: PerSampleLoss, *, max_grad_norm: float, correction: Correction | None = None
) -> tuple[list[float], float]:
    """Distances between the noiseless updates of neighbouring batches, and how far rounding can move one of them."""
    samples = samples_of(ROWS, ROW_LABELS)
    mechanism = replace(ONE_STEP, max_grad_norm=max_grad_norm)

    def step(batch: Sequence[int]) -> NDArray[np.float64]:
        return update(module, samples, mechanism, loss=loss, correction=correction, randomness=Silent(batch))

    full, empty = step(EVERYTHING), step(())
    distances = [float(np.linalg.norm(full - step([j for j in EVERYTHING if j != i]))) for i in EVERYTHING]
    distances += [float(np.linalg.norm(step([i]) - empty)) for i in EVERYTHING]
    # Per coordinate: half a grid step, the float32 gradient, and the float32 sum of weight and step; in both updates.
    largest = float(np.abs(values_of(module).values).max() + np.abs(full).max() + len(ROWS) * max_grad_norm)
    rounding = 2 * math.sqrt(layout_of(module).size) * (GRID_FRACTION * max_grad_norm / 2 + 3 * FLOAT32 * largest)
    return distances, rounding


LOSSES = {
    "binary": (binary_cross_entropy, 1),
    "binary, weighted": (BinaryCrossEntropy(positive_weight=100.0), 1),
    "classes": (cross_entropy, 2),
}


@pytest.mark.parametrize("correction", [None, Constant(5.0)], ids=["plain", "corrected"])
@pytest.mark.parametrize("hidden", [(), (16, 8)], ids=["linear", "network"])
@pytest.mark.parametrize(("loss", "outputs"), LOSSES.values(), ids=LOSSES.keys())
def test_one_record_more_or_less_moves_the_sum_by_at_most_max_grad_norm(
    loss: PerSampleLoss, outputs: int, hidden: tuple[int, ...], correction: Correction | None, path: str
) -> None:
    module = seeded(1, 2, hidden=hidden, outputs=outputs)
    distances, rounding = neighbour_distances(module, loss, max_grad_norm=0.7, correction=correction)
    assert rounding < 0.01
    assert max(distances) <= 0.7 + rounding
    assert max(distances) >= 0.7 - rounding  # huge records use the bound up, or clipping would lose what it could keep


def test_the_bound_holds_in_a_batch_of_many_aligned_records(path: str) -> None:
    samples = table(400, columns=10)
    module = seeded(2, 10, hidden=(64, 32))
    full = update(module, samples, ONE_STEP, randomness=Silent())
    distances = [
        np.linalg.norm(full - update(module, samples, ONE_STEP, randomness=Silent([j for j in range(400) if j != i]))) for i in range(3)
    ]
    assert max(distances) <= 1 + 2e-3  # 2 sqrt(2817) float32 roundings of weights up to 400 / sqrt(2817)


def weighted_mean(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Class weights normalised over the batch, as `nn.CrossEntropyLoss(weight=...)` does."""
    weight = torch.tensor([1.0, 100.0])
    return functional.cross_entropy(outputs, labels, weight=weight, reduction="none") * len(labels) / weight[labels].sum()


def test_the_sensitivity_test_rejects_a_loss_weighted_over_the_batch_and_training_refuses_it(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    module = seeded(1, 2, hidden=(16, 8), outputs=2)
    with pytest.raises(UnsupportedModelError, match="depends on the other records"):
        neighbour_distances(module, weighted_mean, max_grad_norm=0.7)
    monkeypatch.setattr(dpsgd, "check", lambda *_, **__: None)
    distances, rounding = neighbour_distances(module, weighted_mean, max_grad_norm=0.7)
    assert max(distances) > 1.5 * 0.7 + rounding


def test_a_gradient_below_the_bound_is_not_scaled_and_one_above_keeps_its_direction(path: str) -> None:
    samples = table()
    module = seeded(3, 4)
    model = copy.deepcopy(module)
    binary_cross_entropy(model(torch.tensor(samples.features[:1])), torch.tensor(samples.labels[:1])).sum().backward()
    gradient = np.concatenate([p.grad.numpy().ravel() for p in model.parameters() if p.grad is not None])
    norm = float(np.linalg.norm(gradient))
    for bound, factor in ((2 * norm, 1.0), (norm / 3, 1 / 3)):
        step = update(module, samples, replace(ONE_STEP, max_grad_norm=bound), randomness=Silent([0]))
        assert step == pytest.approx(-factor * gradient, abs=GRID_FRACTION * bound + 4 * FLOAT32)


@pytest.mark.parametrize("bound", [0.01, 0.4, 100.0])
def test_the_clipped_sum_is_that_of_opacus(bound: float, path: str) -> None:
    samples = table()
    module = seeded(3, 4)
    model = GradSampleModule(copy.deepcopy(module))
    optimizer = DPOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), noise_multiplier=0.0, max_grad_norm=bound, expected_batch_size=10)
    features = torch.tensor(samples.features, requires_grad=True)
    binary_cross_entropy(model(features), torch.tensor(samples.labels)).mean().backward()
    optimizer.step()
    expected = np.concatenate([parameter.detach().numpy().ravel() for parameter in model.parameters()]) - values_of(module).values
    ours = update(module, samples, replace(ONE_STEP, max_grad_norm=bound, expected_batch_size=10), randomness=Silent())
    # Opacus divides by the norm plus 1e-6.
    assert ours == pytest.approx(expected, rel=1e-4, abs=GRID_FRACTION * bound + 1e-6)


class Squaring(nn.Module):
    """Adds zero times the square of a feature: nothing, or NaN where the square overflows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = seeded(1, 2)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.layer(features + 0.0 * features.square())


class Steep(nn.Module):
    """Gradients are a thousand times the features: infinite for the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(self.layer.weight)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return 1000.0 * self.layer(features)


@pytest.mark.parametrize(("module", "broken"), [(Squaring(), (4, 5)), (Steep(), (5,))], ids=["NaN", "infinite"])
def test_a_gradient_that_is_nan_or_infinite_counts_as_zero_and_is_counted(module: nn.Module, broken: tuple[int, ...], path: str) -> None:
    samples = samples_of(ROWS, ROW_LABELS)
    whole = train(module, values_of(module), samples, mechanism=ONE_STEP, loss=binary_cross_entropy, randomness=Silent(EVERYTHING))
    assert whole.zeroed_gradients == len(broken)
    without = update(module, samples, ONE_STEP, randomness=Silent([i for i in EVERYTHING if i not in broken]))
    assert whole.update_values.values == pytest.approx(without, abs=1e-5)
    assert np.linalg.norm(without) > 0.1
    alone = update(module, samples, ONE_STEP, randomness=Silent(broken))
    assert alone.tolist() == [0.0] * len(alone)


# ---------------------------------------------------------------- noise


@pytest.fixture(scope="module")
def noise_of_a_step() -> NDArray[np.float64]:
    """The 2817 coordinates of one empty step, in units of noise_multiplier * max_grad_norm on the sum."""
    module = seeded(1, 10, hidden=(64, 32))
    mechanism = replace(NO_BATCH, noise_multiplier=3.0, max_grad_norm=0.5, expected_batch_size=64, learning_rate=0.25)
    return update(module, table(columns=10), mechanism) * 64 / 0.25 / (3.0 * 0.5)


def test_the_noise_on_the_sum_has_the_stated_deviation_and_the_test_rejects_two_thirds_and_three_halves(
    noise_of_a_step: NDArray[np.float64],
) -> None:
    def p_value(scale: float) -> float:
        return float(stats.kstest(noise_of_a_step, "norm", args=(0, scale)).pvalue)

    assert p_value(1.0) > 1e-6
    assert p_value(2 / 3) < 1e-6
    assert p_value(3 / 2) < 1e-6


def test_two_clients_with_the_same_torch_seed_get_independent_noise(noise_of_a_step: NDArray[np.float64]) -> None:
    module, samples = seeded(1, 10, hidden=(64, 32)), table(columns=10)
    noises = []
    for _ in range(2):
        torch.manual_seed(42)
        noises.append(update(module, samples, NO_BATCH))
    limit = 5 / math.sqrt(len(noises[0]))
    assert abs(np.corrcoef(noises[0], noises[1])[0, 1]) < limit
    assert abs(np.corrcoef(noises[0], noise_of_a_step)[0, 1]) < limit
    assert abs(np.corrcoef(noises[0], noises[0] + noises[1])[0, 1]) > limit


def test_the_noise_of_successive_steps_is_independent() -> None:
    module, samples = seeded(1, 10, hidden=(64, 32)), table(columns=10)

    class Recording:
        def __init__(self) -> None:
            self.weights: list[NDArray[np.float32]] = []

        def gradient(self, weights: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
            self.weights.append(weights.numpy().copy())
            return torch.zeros_like(weights)

    recording = Recording()
    update(module, samples, replace(NO_BATCH, steps=4), correction=recording)
    first, second, third = np.diff(recording.weights, axis=0)
    for a, b in ((first, second), (second, third), (first, third)):
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / math.sqrt(len(first))
    assert np.concatenate([first, second, third]).std() == pytest.approx(1.0, abs=5 / math.sqrt(2 * 3 * len(first)))


def test_the_noised_sum_is_a_multiple_of_the_grid(path: str) -> None:
    module = seeded(1, 10, hidden=(64, 32))
    start = PlainVector(layout=layout_of(module), values=np.zeros(2817))
    result = train(module, start, table(columns=10), mechanism=ONE_STEP, loss=binary_cross_entropy)
    # From zero, at learning rate 1, the weights are the sum itself; below 16 a float32 holds 20 fractional bits.
    steps = result.update_values.values / GRID_FRACTION
    assert np.abs(steps).max() < 2**24
    assert (steps == np.rint(steps)).all()
    assert np.gcd.reduce(steps.astype(np.int64)) == 1


# ---------------------------------------------------------------- audit of one step

AUDIT_RUNS = 300
AUDIT = replace(ONE_STEP, expected_batch_size=16)
# Sixteen records of the common class whose gradients point one way, below the bound, and a rare one that points the other.
CROWD = np.full((16, 2), 0.6)
CANARY = np.full((1, 2), 6.0)


def audit(loss: PerSampleLoss, *, canary: NDArray[np.float64] = CANARY, max_grad_norm: float = 1.0) -> tuple[float, float]:
    """Estimates how far apart one step puts the two worlds, with and without the canary, in standard deviations of its noise.

    Returns:
        The estimate of mu and its standard error. Differential privacy at noise multiplier 1 demands mu <= 1 (Dong, Roth and Su,
        2019, "Gaussian differential privacy").
    """
    module = nn.Sequential(nn.Linear(2, 2))
    nn.init.zeros_(module[0].weight)
    nn.init.zeros_(module[0].bias)
    worlds = [
        samples_of(CROWD, np.zeros(16, dtype=np.int64)),
        samples_of(np.concatenate([CROWD, canary]), np.array([0] * 16 + [1])),
    ]
    mechanism = replace(AUDIT, max_grad_norm=max_grad_norm)
    direction = np.subtract(*(update(module, world, mechanism, loss=loss, randomness=Silent()) for world in worlds))
    randomness = _SeededRandomness(8)
    outcomes = [
        [float(update(module, world, mechanism, loss=loss, randomness=randomness) @ direction) for _ in range(AUDIT_RUNS)]
        for world in worlds
    ]
    deviation = math.sqrt((np.var(outcomes[0], ddof=1) + np.var(outcomes[1], ddof=1)) / 2)
    return float(np.mean(outcomes[0]) - np.mean(outcomes[1])) / deviation, math.sqrt(2 / AUDIT_RUNS)


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(dpsgd, "check", lambda *_, **__: None)
    return monkeypatch


def test_the_step_audit_finds_exactly_the_stated_privacy(unchecked: pytest.MonkeyPatch, path: str) -> None:
    estimate, error = audit(cross_entropy)
    assert 1 - 4 * error < estimate < 1 + 4 * error


add_noise = dpsgd._NoisingOptimizer.add_noise


def half_the_noise(optimizer: dpsgd._NoisingOptimizer) -> None:
    noise_multiplier, optimizer.noise_multiplier = optimizer.noise_multiplier, optimizer.noise_multiplier / 2
    add_noise(optimizer)
    optimizer.noise_multiplier = noise_multiplier


def scaled_sum(rows: torch.Tensor, factors: torch.Tensor) -> ClippedSum:
    return ClippedSum(factors @ rows, rows.norm(dim=1), 0)


def no_clipping(gradients: ClippedGradients, features: torch.Tensor, labels: torch.Tensor, *, count: int | None = None) -> ClippedSum:
    features, labels = features[:count], labels[:count]
    rows = gradients.of_records(features, labels).double()
    return scaled_sum(rows, torch.ones(len(rows), dtype=torch.float64))


def clipping_the_batch(
    gradients: ClippedGradients, features: torch.Tensor, labels: torch.Tensor, *, count: int | None = None
) -> ClippedSum:
    features, labels = features[:count], labels[:count]
    rows = gradients.of_records(features, labels).double()
    factor = (gradients.max_grad_norm * len(features) / rows.sum(dim=0).norm()).clamp(max=1.0)
    return scaled_sum(rows, factor.expand(len(rows)))


def clipping_to_another_norm(
    gradients: ClippedGradients, features: torch.Tensor, labels: torch.Tensor, *, count: int | None = None
) -> ClippedSum:
    features, labels = features[:count], labels[:count]
    rows = gradients.of_records(features, labels).double()
    return scaled_sum(rows, 1.5 * gradients.max_grad_norm / rows.norm(dim=1).clamp(min=gradients.max_grad_norm))


def division_by_the_actual_size(
    gradients: ClippedGradients, features: torch.Tensor, labels: torch.Tensor, *, count: int | None = None
) -> ClippedSum:
    features, labels = features[:count], labels[:count]
    rows = gradients.of_records(features, labels).double()
    factors = gradients.max_grad_norm / rows.norm(dim=1).clamp(min=gradients.max_grad_norm)
    return scaled_sum(rows, len(CROWD) / len(features) * factors)


BUGS = {
    "half the noise": (dpsgd._NoisingOptimizer, "add_noise", half_the_noise),
    "no clipping": (ClippedGradients, "sum", no_clipping),
    "clipping the batch": (ClippedGradients, "sum", clipping_the_batch),
    "clipping to another norm": (ClippedGradients, "sum", clipping_to_another_norm),
    "division by the actual size": (ClippedGradients, "sum", division_by_the_actual_size),
}


@pytest.mark.parametrize(("owner", "method", "bug"), BUGS.values(), ids=BUGS.keys())
def test_the_step_audit_rejects_a_planted_bug(owner: type, method: str, bug: object, unchecked: pytest.MonkeyPatch) -> None:
    unchecked.setattr(owner, method, bug)
    estimate, error = audit(cross_entropy)
    assert estimate > 1 + 4 * error


def norms_without_the_bias(_: BookKeeping, inputs: list[torch.Tensor], derivatives: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([(a.norm(dim=1) * g.norm(dim=1)).square() for a, g in zip(inputs, derivatives, strict=True)]).sum(dim=0)


def norms_of_the_inputs(_: BookKeeping, inputs: list[torch.Tensor], derivatives: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([a.norm(dim=1).square() for a in inputs]).sum(dim=0)


@pytest.mark.parametrize("bug", [norms_without_the_bias, norms_of_the_inputs])
def test_the_step_audit_rejects_a_wrong_norm_in_the_book_keeping(bug: object, unchecked: pytest.MonkeyPatch) -> None:
    # All of this canary's gradient is that of the bias.
    audited = {"canary": np.zeros((1, 2)), "max_grad_norm": 0.25}
    estimate, error = audit(cross_entropy, **audited)
    assert 1 - 4 * error < estimate < 1 + 4 * error
    unchecked.setattr(BookKeeping, "_squared_norms", bug)
    estimate, error = audit(cross_entropy, **audited)
    assert estimate > 1 + 4 * error


@pytest.mark.parametrize("where", [gradients, bookkeeping, dpsgd, compiled], ids=["nowhere", "book-keeping", "hooks", "compiled"])
def test_the_step_audit_rejects_every_way_to_the_sum_that_does_not_clip(where: ModuleType, unchecked: pytest.MonkeyPatch) -> None:
    if where is dpsgd:
        unchecked.setattr(dpsgd, "linear_layers", lambda *_, **__: [])
    if where is compiled:
        compile_whatever_can_be(unchecked)
    # Each module clips by its own name of the function; that of the module where it is defined is used by none.
    unchecked.setattr(where, "clip_factors", lambda norms, **_: torch.ones_like(norms))
    estimate, error = audit(cross_entropy)
    assert (estimate > 1 + 4 * error) == (where is not gradients)


def test_the_check_refuses_a_planted_bug_before_any_record_is_touched(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    module, samples = seeded(1, 4, outputs=2), table()
    for bug in (no_clipping, clipping_to_another_norm):
        monkeypatch.setattr(ClippedGradients, "sum", bug)
        with pytest.raises(UnsupportedModelError, match="nothing was trained"):
            check(module, values_of(module), samples, mechanism=replace(ONE_STEP, max_grad_norm=0.1), loss=cross_entropy)


def test_the_step_audit_rejects_a_loss_weighted_over_the_batch(unchecked: pytest.MonkeyPatch, path: str) -> None:
    estimate, error = audit(weighted_mean)
    assert estimate > 1 + 4 * error


# ---------------------------------------------------------------- what is executed


def test_exactly_the_charged_number_of_steps_is_executed_through_empty_batches(path: str) -> None:
    counting = Counting()
    mechanism = replace(ONE_STEP, sample_rate=0.02, expected_batch_size=4, steps=60, max_records=40)
    result = train(seeded(1, 4), values_of(seeded(1, 4)), table(), mechanism=mechanism, loss=binary_cross_entropy, randomness=counting)
    assert 0 in counting.batch_sizes
    assert max(counting.batch_sizes) > 0
    assert counting.noise_draws == len(counting.batch_sizes) == result.steps == mechanism.event().steps == 60


def test_batches_are_drawn_at_the_rate_that_is_charged() -> None:
    counting = Counting()
    mechanism = replace(ONE_STEP, sample_rate=0.3, expected_batch_size=12, steps=400, max_records=40)
    update(seeded(1, 4), table(), mechanism, randomness=counting)
    error = math.sqrt(0.3 * 0.7 / (400 * 40))
    rate = float(np.mean(counting.batch_sizes)) / 40
    assert abs(rate - mechanism.event().sample_rate) < 5 * error < 0.3 / 10


def test_an_exception_in_a_step_comes_out_and_no_more_steps_are_executed_than_were_charged() -> None:
    class InterruptedStepError(Exception):
        pass

    class Interrupting:
        def __init__(self) -> None:
            self.calls = 0

        def gradient(self, weights: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == 3:
                raise InterruptedStepError
            return torch.zeros_like(weights)

    module, counting = seeded(1, 4), Counting()
    start = values_of(module)
    with pytest.raises(InterruptedStepError):
        train(
            module,
            start,
            table(),
            mechanism=replace(ONE_STEP, expected_batch_size=40, steps=10),
            loss=binary_cross_entropy,
            correction=Interrupting(),
            randomness=counting,
        )
    assert counting.noise_draws == 3
    assert values_of(module).values.tolist() == start.values.tolist()


def test_the_sum_is_divided_by_the_declared_batch_size_and_not_by_the_size_of_batch_or_table(path: str) -> None:
    module, samples = seeded(1, 4), table()
    whole = update(module, samples, ONE_STEP, randomness=Silent([0, 1, 2]))
    tenth = update(module, samples, replace(ONE_STEP, expected_batch_size=10), randomness=Silent([0, 1, 2]))
    smaller_table = update(module, samples.take(range(5)), ONE_STEP, randomness=Silent([0, 1, 2]))
    assert tenth == pytest.approx(whole / 10, abs=4 * FLOAT32)
    assert smaller_table.tolist() == whole.tolist()


def test_the_result_says_whether_the_randomness_was_private() -> None:
    module, samples = seeded(1, 4), table()

    def result_with(mechanism: TrainingMechanism, randomness: Randomness | None) -> bool:
        arguments = {"mechanism": mechanism, "loss": binary_cross_entropy, "randomness": randomness}
        return train(module, values_of(module), samples, **arguments).private_randomness

    mechanism = replace(ONE_STEP, expected_batch_size=40)
    assert result_with(mechanism, None)
    assert result_with(mechanism, OperatingSystemRandomness())
    assert not result_with(mechanism, _SeededRandomness(1))
    assert not result_with(NON_PRIVATE, None)


@pytest.mark.parametrize("mechanism", [replace(ONE_STEP, expected_batch_size=40, steps=3), NON_PRIVATE], ids=["private", "plain"])
def test_training_changes_no_argument_and_leaves_no_trace_on_the_module(mechanism: TrainingMechanism) -> None:
    module, samples = seeded(1, 4).eval(), table()
    start = PlainVector(layout=layout_of(module), values=np.linspace(-0.1, 0.1, layout_of(module).size))
    own, given, features = values_of(module).values.tolist(), start.values.tolist(), samples.features.copy()
    attributes = [sorted(vars(parameter)) for parameter in module.parameters()] + [sorted(vars(layer)) for layer in module.modules()]
    train(module, start, samples, mechanism=mechanism, loss=binary_cross_entropy)
    assert values_of(module).values.tolist() == own
    assert start.values.tolist() == given
    assert np.array_equal(samples.features, features)
    assert not module.training
    assert [sorted(vars(p)) for p in module.parameters()] + [sorted(vars(layer)) for layer in module.modules()] == attributes
    assert all(parameter.grad is None for parameter in module.parameters())
    assert not any(layer._forward_hooks or layer._backward_hooks for layer in module.modules())


def test_the_module_s_own_weights_are_ignored() -> None:
    start = values_of(seeded(7, 4))
    results = [train(seeded(own, 4), start, table(), mechanism=ONE_STEP, loss=binary_cross_entropy, randomness=Silent()) for own in (1, 2)]
    assert results[0].update_values.values.tolist() == results[1].update_values.values.tolist()


def test_the_update_is_trained_minus_loaded_weights_exactly_in_float32() -> None:
    module = seeded(1, 4)
    start = PlainVector(layout=layout_of(module), values=np.full(layout_of(module).size, 1 / 3))
    result = train(module, start, table(), mechanism=ONE_STEP, loss=binary_cross_entropy, randomness=_SeededRandomness(1))
    trained = result.update_values.values + np.float64(np.float32(1 / 3))
    assert (trained == trained.astype(np.float32)).all()
    assert (result.update_values.values != 0).all()


def test_frozen_parameters_are_used_as_they_are_and_neither_trained_nor_released(path: str) -> None:
    module = nn.Sequential(seeded(1, 4, outputs=3), nn.Linear(3, 1))
    module[0].requires_grad_(False)
    before = module[0][0].weight.clone()
    for mechanism in (ONE_STEP, NON_PRIVATE):
        result = train(module, values_of(module), table(), mechanism=mechanism, loss=binary_cross_entropy)
        assert result.update_values.layout.names == ("1.weight", "1.bias")
    assert torch.equal(module[0][0].weight, before)


@pytest.mark.parametrize("mechanism", [replace(ONE_STEP, expected_batch_size=40, steps=3), NON_PRIVATE], ids=["private", "plain"])
def test_training_neither_reads_nor_moves_the_global_generators(mechanism: TrainingMechanism) -> None:
    module, samples = seeded(1, 4), table()
    torch.manual_seed(1)
    first = update(module, samples, mechanism, randomness=_SeededRandomness(3))
    torch.manual_seed(2)
    torch_state, numpy_state = torch.random.get_rng_state(), repr(np.random.get_state(legacy=False))  # noqa: NPY002
    assert update(module, samples, mechanism, randomness=_SeededRandomness(3)).tolist() == first.tolist()
    update(module, samples, mechanism)
    assert torch.equal(torch_state, torch.random.get_rng_state())
    assert repr(np.random.get_state(legacy=False)) == numpy_state  # noqa: NPY002


def test_private_training_learns_and_plain_training_learns(path: str) -> None:
    samples = table(2000)
    module = seeded(1, 4)

    def mean_loss(values: NDArray[np.float64]) -> float:
        model = copy.deepcopy(module)
        torch.nn.utils.vector_to_parameters(torch.tensor(values, dtype=torch.float32), model.parameters())
        return float(binary_cross_entropy(model(torch.tensor(samples.features)), torch.tensor(samples.labels)).mean().detach())

    start = values_of(module).values
    private = DpSgd(noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.1, expected_batch_size=200, steps=60, learning_rate=1.0)
    plain = NonPrivate(learning_rate=1.0, batch_size=200, steps=60, seed=0)
    before = mean_loss(start)
    assert mean_loss(start + update(module, samples, private, randomness=_SeededRandomness(1))) < before / 2
    assert mean_loss(start + update(module, samples, plain)) < before / 3


@pytest.mark.parametrize("mechanism", [replace(ONE_STEP, expected_batch_size=40, steps=3), NON_PRIVATE], ids=["private", "plain"])
def test_a_client_without_positives_and_one_with_a_single_record_can_train(mechanism: TrainingMechanism) -> None:
    module = seeded(1, 4)
    negatives = samples_of(np.ones((20, 4)), np.zeros(20, dtype=np.int64))
    for samples in (negatives, table().take([0])):
        assert np.linalg.norm(update(module, samples, mechanism)) > 0


def test_a_convolution_with_group_norm_can_train() -> None:
    module = nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 4, 2), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2))
    assert np.linalg.norm(update(module, table(), replace(ONE_STEP, steps=2, sample_rate=0.5), loss=cross_entropy)) > 0
    assert np.linalg.norm(update(module, table(), NO_BATCH, loss=cross_entropy)) > 0


def test_a_parameter_without_dimensions_can_train() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(4, 1), nn.Parameter(torch.tensor(1.0))

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            return self.scale * self.layer(features)

    module = Scaled()
    assert (update(module, table(), ONE_STEP) != 0).all()
    assert (update(module, table(), NO_BATCH) != 0).all()


# ---------------------------------------------------------------- correction


def test_fedprox_pulls_the_weights_back_under_private_training_by_exactly_its_gradient() -> None:
    module, samples = seeded(1, 4), table()
    two_steps = replace(ONE_STEP, expected_batch_size=40, steps=2, learning_rate=0.5)
    first = update(module, samples, replace(two_steps, steps=1), randomness=Silent())
    plain = update(module, samples, two_steps, randomness=Silent())
    pulled = update(module, samples, two_steps, randomness=Silent(), correction=FedProx(proximal_weight=0.6))
    assert pulled - plain == pytest.approx(-0.5 * 0.6 * first, abs=8 * FLOAT32)
    assert np.linalg.norm(pulled - plain) > 1e-3


def test_a_correction_sees_noised_weights_only_and_the_start_as_it_was_loaded() -> None:
    module, samples = seeded(1, 4), table()
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    class Watching:
        def gradient(self, weights: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
            seen.append((weights.clone(), start.clone()))
            return torch.zeros_like(weights)

    update(module, samples, replace(ONE_STEP, steps=2), correction=Watching(), randomness=StepByStep(1))
    single = update(module, samples, ONE_STEP, randomness=StepByStep(1))
    start = values_of(module).values
    assert all(given.tolist() == start.tolist() for _, given in seen)
    assert seen[0][0].tolist() == start.tolist()
    assert seen[1][0].numpy() == pytest.approx(start + single, abs=1e-6)


# ---------------------------------------------------------------- refusals


def never(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    raise AssertionError


def test_more_records_than_declared_are_refused_before_any_work() -> None:
    mechanism = replace(ONE_STEP, sample_rate=0.5, expected_batch_size=10, max_records=None)
    module, counting = seeded(1, 4), Counting()
    with pytest.raises(UnsupportedDataError, match="declared limit of 20") as refusal:
        train(module, values_of(module), table(21), mechanism=mechanism, loss=never, randomness=counting)
    assert "nothing was trained" in str(refusal.value)
    assert "21" not in str(refusal.value)
    assert counting.batch_sizes == []
    check(module, values_of(module), table(20), mechanism=mechanism, loss=binary_cross_entropy)


def test_a_client_without_records_cannot_be_described() -> None:
    with pytest.raises(ValueError, match="at least one record"):
        samples_of(np.zeros((0, 4)), np.zeros(0, dtype=np.int64))


class Reused(nn.Module):
    """Uses the weight of a layer behind its back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.last(functional.linear(self.layer(features), self.layer.weight))


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.idle = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.layer(features)


class SecondDimension(nn.Module):
    """Gives a layer the records in another dimension than the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Conv1d(1, 1, 1), nn.Linear(4, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.last(self.layer(features.T[:, None, :])[:, 0, :].T)


UNSUITABLE = {
    "weight used outside its layer": Reused(),
    "unused layer": Unused(),
    "records not first": SecondDimension(),
    "in place": nn.Sequential(nn.Linear(4, 4), nn.ELU(inplace=True), nn.Linear(4, 1)),
    "BatchNorm": nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)),
    "dropout": nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1)),
}


@pytest.mark.parametrize("module", UNSUITABLE.values(), ids=UNSUITABLE.keys())
def test_a_model_whose_gradients_opacus_would_get_wrong_is_refused_before_any_work(module: nn.Module) -> None:
    counting = Counting()
    with pytest.raises(UnsupportedModelError, match="nothing was trained"):
        train(module, values_of(module), table(), mechanism=ONE_STEP, loss=binary_cross_entropy, randomness=counting)
    assert counting.batch_sizes == []


def test_a_layer_that_is_used_twice_in_one_pass_is_accepted_and_its_gradients_add_up() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            return self.last(torch.tanh(self.layer(torch.tanh(self.layer(features)))))

    module, samples = Twice(), table()
    model = copy.deepcopy(module)
    binary_cross_entropy(model(torch.tensor(samples.features[:1])), torch.tensor(samples.labels[:1])).sum().backward()
    gradient = np.concatenate([p.grad.numpy().ravel() for p in model.parameters() if p.grad is not None])
    step = update(module, samples, replace(ONE_STEP, max_grad_norm=100.0), randomness=Silent([0]))
    assert step == pytest.approx(-gradient, abs=100 * GRID_FRACTION)


def test_check_refuses_what_train_refuses_without_training() -> None:
    module, samples = seeded(1, 4), table()
    start = values_of(module)
    with pytest.raises(LayoutMismatchError, match="nothing was trained"):
        check(module, values_of(seeded(1, 5)), samples, mechanism=ONE_STEP, loss=binary_cross_entropy)
    with pytest.raises(UnsupportedModelError, match="nothing was trained"):
        check(module, start, samples, mechanism=NON_PRIVATE, loss=nn.BCEWithLogitsLoss())
    with pytest.raises(UnsupportedModelError, match="columns"):
        check(seeded(1, 5), values_of(seeded(1, 5)), samples, mechanism=NON_PRIVATE, loss=binary_cross_entropy)
    with pytest.raises(UnsupportedDataError, match="nothing was trained"):
        check(module, start, samples_of(np.ones((2, 4)), np.array([0, 2])), mechanism=ONE_STEP, loss=binary_cross_entropy)
    with pytest.raises(TypeError, match="expected DpSgd or NonPrivate"):
        check(module, start, samples, mechanism="DpSgd", loss=binary_cross_entropy)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("mechanism", [replace(ONE_STEP, learning_rate=1e38, steps=3), replace(NON_PRIVATE, learning_rate=1e38)])
def test_training_that_diverges_is_refused_and_gives_no_update(mechanism: TrainingMechanism) -> None:
    module = seeded(1, 4)
    with pytest.raises(ValueError, match="no update was made"):
        update(module, table(), mechanism, correction=FedProx(proximal_weight=1e30))


def test_opacus_is_driven_by_one_module_only() -> None:
    package = Path(dpsgd.__file__).parent
    assert [path.name for path in sorted(package.glob("*.py")) if "opacus" in path.read_text().replace("Opacus", "")] == ["dpsgd.py"]
