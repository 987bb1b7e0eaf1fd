import copy
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from opacus import GradSampleModule
from torch import nn
from torch.nn import functional

from privfed.client import Client, Trainer
from privfed.data.samples import Samples
from privfed.dp.ledger import Ledger
from privfed.dp.mechanism import Budget
from privfed.errors import UnsupportedModelError
from privfed.he.params import CkksParams
from privfed.training import dpsgd
from privfed.training.bookkeeping import ReluNetworkBookKeeping
from privfed.training.compiled import CompiledBookKeeping, CompiledSum, _Traced, compile_sum
from privfed.training.dpsgd import _HookedGradients, check, train
from privfed.training.gradients import ClippedSum
from privfed.training.loss import BinaryCrossEntropy, PerSampleLoss, binary_cross_entropy, cross_entropy
from privfed.training.mechanism import DpSgd, NonPrivate
from privfed.training.model import join_parameters, layout_of, mlp, values_of
from privfed.training.randomness import _SeededRandomness

torch.set_num_threads(1)
MECHANISM = DpSgd(
    noise_multiplier=1.0, max_grad_norm=0.5, sample_rate=0.1, expected_batch_size=100, steps=3, learning_rate=0.1, max_records=1000
)
CAPACITY = 128  # 100 + 2.5 * sqrt(100), rounded up to blocks of 64


def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return mlp(5, hidden=(16, 8), outputs=2)


@pytest.fixture(scope="module")
def compiled() -> CompiledSum:
    """Compiled for real; the other tests of the compiled path only trace."""
    return compile_sum(model(), mechanism=MECHANISM, loss=cross_entropy, inputs=5)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    return monkeypatch


def records(count: int, *, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return scale * torch.randn(count, 5, generator=generator), torch.randint(0, 2, (count,), generator=generator)


def table(count: int) -> Samples:
    features, labels = records(count)
    return Samples(features=features.numpy(), labels=labels.numpy(), groups=None, columns=tuple("abcde"))


def sums(compiled: CompiledSum) -> tuple[CompiledBookKeeping, ReluNetworkBookKeeping, _HookedGradients]:
    """The compiled sum of one model, and the same by book-keeping and by hooks."""
    models = [model() for _ in range(3)]
    parameters = [list(module.parameters()) for module in models]
    layers = [[layer for layer in module.modules() if isinstance(layer, nn.Linear)] for module in models]
    common = {"loss": cross_entropy, "max_grad_norm": MECHANISM.max_grad_norm}
    return (
        CompiledBookKeeping(models[0], layers=layers[0], parameters=parameters[0], compiled=compiled),
        ReluNetworkBookKeeping(models[1], layers=layers[1], parameters=parameters[1], **common),
        _HookedGradients(models[2], layers=[], parameters=parameters[2], **common),
    )


@pytest.mark.parametrize("count", [1, 63, 64, 100, CAPACITY])
def test_the_compiled_sum_equals_that_of_hooks_to_1e_6(compiled: CompiledSum, count: int) -> None:
    ours, _, theirs = sums(compiled)
    expected, clipped = theirs.sum(*records(count)), ours.sum(*records(count))
    assert clipped.values.dtype == torch.float64
    assert clipped.zeroed == 0
    assert float((clipped.values - expected.values).norm()) <= 1e-6 * float(expected.values.norm())
    assert clipped.norms.tolist() == pytest.approx(expected.norms.tolist(), rel=1e-5)


@pytest.mark.parametrize("count", [0, 1, 63, 100, CAPACITY, CAPACITY + 1, 2 * CAPACITY])
def test_batches_that_are_chosen_in_whole_passes_have_the_compiled_sum_of_their_records_bit_for_bit(
    compiled: CompiledSum, count: int
) -> None:
    ours, _, _ = sums(compiled)
    features, labels = records(2 * CAPACITY)
    chosen = torch.from_numpy(ours.whole_blocks(np.arange(count)))
    whole, expected = ours.sum(features[chosen], labels[chosen], count=count), ours.sum(features[:count], labels[:count])
    assert torch.equal(whole.values, expected.values)
    assert torch.equal(whole.norms, expected.norms)
    assert len(whole.norms) == count


def in_float64(pieces: CompiledBookKeeping, features: torch.Tensor, labels: torch.Tensor, *, max_grad_norm: float) -> ClippedSum:
    """Clips and adds up what the compiled function says of each record alone, one by one."""
    total, norms, zeroed = torch.zeros(pieces.size, dtype=torch.float64), [], 0
    for record in range(len(labels)):
        parts = [part[0].double() for part in pieces._pieces(features[record : record + 1], labels[record : record + 1])]
        inputs, derivatives = parts[:3], parts[3:]
        row = torch.cat([part for a, g in zip(inputs, derivatives, strict=True) for part in (torch.outer(g, a).flatten(), g)])
        norm = float(row.norm())
        if not norm <= float(torch.finfo(torch.float32).max):
            norms, zeroed = [*norms, 0.0], zeroed + 1
            continue
        norms.append(norm)
        total += row * (max_grad_norm / max(norm, max_grad_norm))
    return ClippedSum(total, torch.tensor(norms, dtype=torch.float64), zeroed)


def test_batches_that_do_not_fit_and_broken_gradients_are_summed_in_float64_from_the_same_gradients(compiled: CompiledSum) -> None:
    ours, _, _ = sums(compiled)

    def differs_by(features: torch.Tensor, labels: torch.Tensor) -> float:
        clipped, expected = (
            ours.sum(features, labels),
            in_float64(ours, features, labels, max_grad_norm=MECHANISM.max_grad_norm),
        )
        assert clipped.zeroed == expected.zeroed
        assert clipped.norms.tolist() == pytest.approx(expected.norms.tolist(), rel=1e-5)
        return float((clipped.values - expected.values).norm()) / float(expected.values.norm())

    # Float64 is 1e-16 from record to record, and float32, as the compiled sum has it, some 1e-8.
    assert differs_by(*records(CAPACITY + 1)) <= 1e-13 < differs_by(*records(CAPACITY))
    for broken in (math.nan, math.inf):
        features, labels = records(50)
        features[7, 2] = broken
        assert ours.sum(features, labels).zeroed == 1
        assert differs_by(features, labels) <= 1e-13
    # Squares of these overflow in float32, and the gradients do not.
    assert differs_by(*records(50, scale=1e19)) <= 1e-13
    assert not ours.sum(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64)).values.any()


def test_what_a_pass_is_filled_up_with_contributes_exactly_zero(compiled: CompiledSum) -> None:
    features, labels = records(CAPACITY)
    kept = (torch.arange(CAPACITY) < 50).float()
    tensors = [parameter.detach() for parameter in model().parameters()]
    results: list[torch.Tensor] = []
    for filling in (features[:1], torch.full((1, 5), 1e6), torch.zeros(1, 5)):
        filled = torch.where(kept[:, None] == 1, features, filling)
        results.append(compiled.function(filled, torch.where(kept == 1, labels, 0), kept, *tensors)[0])
        assert torch.equal(results[0], results[-1])
    assert float(results[0].norm()) > 0.1
    everything = compiled.function(features, labels, torch.ones(CAPACITY), *tensors)[0]
    assert not torch.equal(results[0], everything)


def test_the_compiled_sum_follows_the_weights_as_they_are_moved(compiled: CompiledSum) -> None:
    module = model()
    weights = join_parameters(module)
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    ours = CompiledBookKeeping(module, layers=layers, parameters=list(module.parameters()), compiled=compiled)
    before = ours.sum(*records(20)).values
    with torch.no_grad():
        weights += 0.1
    plain = ReluNetworkBookKeeping(
        module, layers=layers, parameters=list(module.parameters()), loss=cross_entropy, max_grad_norm=MECHANISM.max_grad_norm
    )
    expected = plain.sum(*records(20)).values
    assert float((ours.sum(*records(20)).values - expected).norm()) <= 1e-6 * float(expected.norm())
    assert float((before - expected).norm()) > 1e-3 * float(expected.norm())


def test_training_with_a_compiled_sum_is_training_but_for_rounding_and_the_wider_noise(compiled: CompiledSum) -> None:
    module, samples = model(), table(1000)

    def update(given: CompiledSum | None, noise_multiplier: float) -> np.ndarray:
        mechanism = replace(MECHANISM, noise_multiplier=noise_multiplier)
        return train(
            module,
            values_of(module),
            samples,
            mechanism=mechanism,
            loss=cross_entropy,
            randomness=_SeededRandomness(1),
            compiled=given,
        ).update_values.values

    ours, _, _ = sums(compiled)
    # Twice 128 records, each off by blocks of 64, sums over at most 5 + 16 numbers and a few operations more.
    assert 2 * 128 * (64 + (5 + 16) / 2) * 2**-24 < ours.rounding < 2 * 128 * (64 + (5 + 16) / 2 + 10) * 2**-24
    same = update(None, 1.0 + ours.rounding)
    # Three steps, each a grid step and a rounding of weights below 1; the sum itself is known to 1e-6 * 100 * 0.5.
    tolerance = 3 * 0.1 / 100 * (0.5 * 2**-20 + 5e-5) + 3 * 2**-24
    assert np.abs(update(compiled, 1.0) - same).max() <= tolerance
    assert np.abs(update(None, 1.0) - same).max() > 2 * tolerance


def test_the_rounding_of_the_compiled_sum_is_within_what_the_noise_is_widened_by(compiled: CompiledSum) -> None:
    ours, theirs, _ = sums(compiled)
    label = torch.zeros(CAPACITY, dtype=torch.int64)
    for seed in range(20):
        # Many records that are almost the same round in the same direction. One sum may be off by half of what two may be.
        generator = torch.Generator().manual_seed(seed)
        features = torch.randn(1, 5, generator=generator) + 1e-3 * torch.randn(CAPACITY, 5, generator=generator)
        moved = float((ours.sum(features, label).values - theirs.sum(features, label).values).norm())
        assert moved <= ours.rounding / 2 * MECHANISM.max_grad_norm


# ---------------------------------------------------------------- gradients beyond what float32 can square


def stretched(inputs: float, weights: float, *, derivatives: float = 1.0) -> nn.Module:
    """A network whose features may be `inputs` large: its first weights are so much smaller, and later ones bend the derivatives."""
    module = model()
    with torch.no_grad():
        for layer, factor in ((module[0], weights / inputs), (module[2], derivatives), (module[4], 1.0 / weights / derivatives)):
            layer.weight *= factor
            layer.bias *= 0.0
    return module


def clipped_by_opacus(module: nn.Module, features: torch.Tensor, labels: torch.Tensor, *, scale: float, bound: float) -> torch.Tensor:
    """Each record's clipped gradient by Opacus' hooks, the model and everything else in float64, of shape (records, size)."""
    precise = GradSampleModule(copy.deepcopy(module).double(), loss_reduction="sum")
    (scale * functional.cross_entropy(precise(features.double()), labels, reduction="sum")).backward()
    rows = torch.cat([parameter.grad_sample.flatten(start_dim=1) for parameter in precise.parameters()], dim=1)
    # Scaled before it is squared, so that the oracle itself is safe.
    largest = rows.abs().amax(dim=1, keepdim=True).clamp(min=1e-300)
    norms = largest[:, 0] * (rows / largest).norm(dim=1)
    return rows * (bound / norms.clamp(min=bound))[:, None]


class ScaledLoss:
    """A loss whose gradients are as small or as large as wanted."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.scale * functional.cross_entropy(outputs, labels, reduction="none")


EXTREMES = [
    # Size of the features, of the loss, and the bound.
    (1.0, 1e-25, 0.5), (1.0, 1e25, 0.5), (1e25, 1.0, 0.5), (1e-25, 1.0, 0.5), (1e12, 1e-25, 1e-6), (1e18, 1e-23, 1e-6), (1e18, 1e-22, 1e-5),
    (1e25, 1e-25, 1e-3), (1e-25, 1e25, 0.5), (1e30, 1e-30, 1e-6), (1e37, 1e-37, 1e-6), (1e-37, 1e37, 0.5), (1e18, 1e18, 0.5),
    (1e6, 1e-6, 1e6),
]  # fmt: skip


@pytest.mark.parametrize(("inputs", "scale", "bound"), EXTREMES)
def test_tiny_and_huge_gradients_are_clipped_as_opacus_clips_them_in_float64(
    inputs: float, scale: float, bound: float, traced: pytest.MonkeyPatch
) -> None:
    module = stretched(inputs, 1.0)
    loss = ScaledLoss(scale)
    compiled = compile_sum(module, mechanism=replace(MECHANISM, max_grad_norm=bound), loss=loss, inputs=5)
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    ours = CompiledBookKeeping(module, layers=layers, parameters=list(module.parameters()), compiled=compiled)
    features, labels = records(40, scale=inputs)
    rows = clipped_by_opacus(module, features, labels, scale=scale, bound=bound)
    norms = rows.norm(dim=1)
    assert float(norms.max()) > 0
    clipped = ours.sum(features, labels)
    assert clipped.zeroed == 0
    # The model itself runs in float32: a gradient is off by some 1e-5 of itself, and what it does to the loss by as much.
    assert float((clipped.values - rows.sum(dim=0)).norm()) <= 1e-4 * float(norms.sum())
    for record in range(8):
        alone = ours.sum(features[record : record + 1], labels[record : record + 1])
        size = float(alone.values.norm())
        assert size <= bound * (1 + ours.rounding)
        assert abs(size - float(norms[record])) <= 1e-4 * float(norms[record])


@pytest.mark.parametrize(("inputs", "derivatives"), [(1e17, 1e-20), (1e17, 1e-12), (1.0, 1e-30), (1e10, 1e-15), (1e17, 1e12)])
def test_compiled_for_real_extreme_gradients_are_clipped_as_opacus_clips_them_in_float64(
    compiled: CompiledSum, inputs: float, derivatives: float
) -> None:
    module = stretched(inputs, 1.0, derivatives=derivatives)
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    ours = CompiledBookKeeping(module, layers=layers, parameters=list(module.parameters()), compiled=compiled)
    features, labels = records(CAPACITY, scale=inputs)
    expected = clipped_by_opacus(module, features, labels, scale=1.0, bound=MECHANISM.max_grad_norm)
    clipped = ours.sum(features, labels)
    assert float((clipped.values - expected.sum(dim=0)).norm()) <= 1e-4 * float(expected.norm(dim=1).sum())


@settings(max_examples=60, deadline=None)
@example(inputs=18.0, scale=-23.0, first=0.0, bound=-6.0, seed=0)  # squares of derivatives are 0 in float32
@example(inputs=30.0, scale=-30.0, first=0.0, bound=-6.0, seed=0)  # derivatives are as they are scaled down
@given(inputs=st.floats(-37, 37), scale=st.floats(-37, 37), first=st.floats(-18, 18), bound=st.floats(-6, 6), seed=st.integers(0, 2**20))
def test_no_record_moves_the_compiled_sum_by_more_than_the_bound_whatever_its_size(
    inputs: float, scale: float, first: float, bound: float, seed: int
) -> None:
    """The traced function on numbers of any size: one more record, whatever its gradient, moves the sum by at most the bound."""
    generator = torch.Generator().manual_seed(seed)
    module = model()
    with torch.no_grad():
        module[0].weight *= 10.0**first
        module[2].weight *= 10.0**-first
    features, labels = (10.0**inputs * torch.randn(30, 5, generator=generator)).clamp(-3e38, 3e38), torch.randint(0, 2, (30,))
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    parameters = list(module.parameters())
    traced = _Traced(module, layers=layers, parameters=parameters, loss=ScaledLoss(10.0**scale), max_grad_norm=10.0**bound)
    compiled = CompiledSum(
        layout=layout_of(module),
        loss=ScaledLoss(10.0**scale),
        max_grad_norm=10.0**bound,
        capacity=CAPACITY,
        function=traced.clipped_sum,
    )
    ours = CompiledBookKeeping(module, layers=layers, parameters=parameters, compiled=compiled)
    rows = [ours.sum(features[record : record + 1], labels[record : record + 1]).values for record in range(30)]
    assert max(float(row.norm()) for row in rows) <= 10.0**bound * (1 + ours.rounding / CAPACITY)
    for record in (0, 7):
        others = [number for number in range(30) if number != record]
        moved = float((ours.sum(features, labels).values - ours.sum(features[others], labels[others]).values).norm())
        assert moved <= 10.0**bound * (1 + ours.rounding)


def test_what_float32_would_lose_digits_of_is_summed_in_float64(traced: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    passes = CompiledBookKeeping._add
    traced.setattr(CompiledBookKeeping, "_add", lambda self, *arguments: taken.append(1) or passes(self, *arguments))
    compiled = compile_sum(model(), mechanism=MECHANISM, loss=cross_entropy, inputs=5)
    ours, theirs, _ = sums(compiled)
    for inputs, slow in ((1e9, 0), (1e11, 0), (1e13, 1), (1e25, 1)):
        taken.clear()
        clipped = ours.sum(*records(20, scale=inputs))
        assert len(taken) == slow
        expected = theirs.sum(*records(20, scale=inputs))
        assert float((clipped.values - expected.values).norm()) <= (1e-12 if slow else 1e-6) * float(expected.values.norm())


@pytest.mark.parametrize("bound", [2.0**-21, 2.0**21])
def test_a_bound_that_float32_cannot_scale_to_is_not_compiled(bound: float) -> None:
    with pytest.raises(ValueError, match="max_grad_norm from 2"):
        compile_sum(model(), mechanism=replace(MECHANISM, max_grad_norm=bound), loss=cross_entropy, inputs=5)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "module",
    [nn.Linear(5, 2), nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)), nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Flatten())],
    ids=["one layer", "tanh", "nothing to train"],
)
def test_another_model_is_not_compiled(module: nn.Module) -> None:
    with pytest.raises(UnsupportedModelError, match="nothing was compiled"):
        compile_sum(module, mechanism=MECHANISM, loss=cross_entropy, inputs=5)


def test_large_batches_are_not_compiled() -> None:
    with pytest.raises(UnsupportedModelError, match="gains nothing"):
        compile_sum(model(), mechanism=replace(MECHANISM, max_records=20_000), loss=cross_entropy, inputs=5)


def test_a_loss_that_looks_at_values_is_not_compiled(traced: pytest.MonkeyPatch) -> None:
    def looking(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy(outputs, labels) * (2 if int(labels.max()) > 5 else 1)

    with pytest.raises(UnsupportedModelError, match=r"torch\.compile fails"):
        compile_sum(model(), mechanism=MECHANISM, loss=looking, inputs=5)


def test_a_failing_compiler_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_function: object, **_: object) -> Callable[..., None]:
        def run(*_: object) -> None:
            raise RuntimeError("no C++ compiler")

        return run

    monkeypatch.setattr(torch, "compile", failing)
    with pytest.raises(UnsupportedModelError, match="nothing was compiled"):
        compile_sum(model(), mechanism=MECHANISM, loss=cross_entropy, inputs=5)


@pytest.mark.parametrize("loss", [binary_cross_entropy, BinaryCrossEntropy(positive_weight=7.0)])
def test_the_library_s_losses_can_be_traced_and_give_the_same_sum(loss: PerSampleLoss, traced: pytest.MonkeyPatch) -> None:
    module = mlp(5, hidden=(6,))
    compiled = compile_sum(module, mechanism=MECHANISM, loss=loss, inputs=5)
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    parameters = list(module.parameters())
    ours = CompiledBookKeeping(module, layers=layers, parameters=parameters, compiled=compiled)
    theirs = ReluNetworkBookKeeping(module, layers=layers, parameters=parameters, loss=loss, max_grad_norm=MECHANISM.max_grad_norm)
    expected = theirs.sum(*records(70)).values
    assert float((ours.sum(*records(70)).values - expected).norm()) <= 1e-6 * float(expected.norm())


def test_a_sum_compiled_for_something_else_is_refused_before_any_work(traced: pytest.MonkeyPatch) -> None:
    module, samples = model(), table(1000)
    compiled = compile_sum(module, mechanism=MECHANISM, loss=cross_entropy, inputs=5)
    arguments = {"mechanism": MECHANISM, "loss": cross_entropy, "compiled": compiled}
    check(module, values_of(module), samples, **arguments)
    # The noise, the rate and the steps are no part of the sum.
    check(module, values_of(module), samples, **arguments | {"mechanism": replace(MECHANISM, noise_multiplier=2.0, steps=9)})
    wider = mlp(5, hidden=(16, 9), outputs=2)
    for changes in (
        {"loss": lambda outputs, labels: 2 * cross_entropy(outputs, labels)},
        {"mechanism": replace(MECHANISM, max_grad_norm=0.6)},
        {"mechanism": NonPrivate(learning_rate=0.1, batch_size=8, steps=3, seed=0)},
    ):
        with pytest.raises(ValueError, match="nothing was trained"):
            check(module, values_of(module), samples, **arguments | changes)
    with pytest.raises(ValueError, match="nothing was trained"):
        check(wider, values_of(wider), samples, **arguments)
    tanh = nn.Sequential(*(nn.Tanh() if isinstance(layer, nn.ReLU) else layer for layer in module))
    assert layout_of(tanh) == compiled.layout
    with pytest.raises(UnsupportedModelError, match="nothing was trained"):
        check(tanh, values_of(tanh), samples, **arguments)


def test_products_of_less_than_float32_are_refused(traced: pytest.MonkeyPatch) -> None:
    module = model()
    compiled = compile_sum(module, mechanism=MECHANISM, loss=cross_entropy, inputs=5)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(ValueError, match="full precision"):
            train(module, values_of(module), table(1000), mechanism=MECHANISM, loss=cross_entropy, compiled=compiled)
    finally:
        torch.set_float32_matmul_precision(precision)


def test_a_client_trains_with_its_compiled_sum(traced: pytest.MonkeyPatch, tmp_path: object) -> None:
    module = model()
    compiled = compile_sum(module, mechanism=MECHANISM, loss=cross_entropy, inputs=5)
    used: list[CompiledSum | None] = []
    choose = dpsgd._clipped_gradients
    traced.setattr(
        dpsgd, "_clipped_gradients", lambda *args, compiled, **rest: used.append(compiled) or choose(*args, compiled=compiled, **rest)
    )
    with Ledger.open(tmp_path / "ledger", population="ash", budget=Budget(epsilon=100.0, delta=1e-5)) as ledger:
        client = Client("ash", table(1000), training=MECHANISM, ledger=ledger, compiled=compiled)
        trainer = Trainer(client=client, model=module, start=values_of(module), loss=cross_entropy, params=CkksParams.standard(bound=1.0))
        trainer.train(values_of(module), session=b"session", round=0, attempt=0)
    # Two for the check before anything is charged, of which the look at steadiness is not repeated before training; then training.
    assert used == [compiled] * 4
