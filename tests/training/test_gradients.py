import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from privfed.errors import UnsupportedModelError
from privfed.training import gradients as gradients_module
from privfed.training.bookkeeping import BookKeeping, ReluNetworkBookKeeping, linear_layers, relu_network
from privfed.training.dpsgd import _clipped_gradients, _HookedGradients
from privfed.training.gradients import ClippedGradients, clip_factors, zero_broken
from privfed.training.loss import PerSampleLoss, binary_cross_entropy, cross_entropy
from privfed.training.model import mlp, trainable_parameters
from privfed.training.probe import synthetic_records

torch.set_num_threads(1)
FLOAT32_MAX = torch.finfo(torch.float32).max


def records(count: int, columns: int = 4, *, classes: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, columns, generator=generator), torch.randint(0, classes, (count,), generator=generator)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return make()


def is_relu_network(module: nn.Module, *, columns: int = 4) -> bool:
    return relu_network(module, layers=linear_layers(module, features=torch.ones(6, columns)))


def ways(module: Callable[[], nn.Module], *, loss: PerSampleLoss, max_grad_norm: float, columns: int = 4) -> list[ClippedGradients]:
    """Every way to the sums of a linear network, hooks alone last, each on its own copy of the model."""

    def way(kind: type[BookKeeping], served: slice) -> ClippedGradients:
        model = seeded(module)
        layers = linear_layers(model, features=torch.ones(6, columns))
        parameters = list(trainable_parameters(model).values())
        return kind(model, layers=layers[served], parameters=parameters, loss=loss, max_grad_norm=max_grad_norm)

    fast = [way(ReluNetworkBookKeeping, slice(None))] if is_relu_network(seeded(module), columns=columns) else []
    return [*fast, way(BookKeeping, slice(None)), way(_HookedGradients, slice(1, None)), way(_HookedGradients, slice(0))]


class Reversed(nn.Module):
    """Registers its layers in another order than it uses them, one without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.middle, self.first = nn.Linear(3, 2), nn.Linear(5, 3, bias=False), nn.Linear(4, 5)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(torch.relu(self.first(features)))))


class Skipping(nn.Module):
    """A residual connection, and a public constant that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=False)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(features))
        return self.last(hidden + self.scale * self.inner(hidden))


def partly_frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    module[2].requires_grad_(False)
    return module


LINEAR: dict[str, Callable[[], nn.Module]] = {
    "one layer": lambda: nn.Linear(4, 2),
    "network": lambda: mlp(4, hidden=(16, 8), outputs=2),
    "other order, no bias": Reversed,
    "residual": Skipping,
    "partly frozen": partly_frozen,
}


@pytest.mark.parametrize("bound", [1e-3, 0.7, 1e3])
@pytest.mark.parametrize("module", LINEAR.values(), ids=LINEAR.keys())
def test_book_keeping_equals_hooks_to_1e_6_on_the_noiseless_sum(module: Callable[[], nn.Module], bound: float) -> None:
    features, labels = records(300)
    *ours, theirs = (source.sum(features, labels).values for source in ways(module, loss=cross_entropy, max_grad_norm=bound))
    assert float(theirs.norm()) > 0
    for total in ours:
        assert float((total - theirs).norm()) <= 1e-6 * float(theirs.norm())


def test_book_keeping_equals_hooks_for_a_yes_or_no_label_and_for_a_single_record() -> None:
    for count in (1, 64):
        features, labels = records(count)
        sources = ways(lambda: mlp(4, hidden=(128, 64)), loss=binary_cross_entropy, max_grad_norm=0.1)
        *ours, theirs = (source.sum(features, labels).values for source in sources)
        assert len(ours) == 3
        for total in ours:
            assert float((total - theirs).norm()) <= 1e-6 * float(theirs.norm())


@pytest.mark.parametrize("module", LINEAR.values(), ids=LINEAR.keys())
def test_the_gradients_of_records_are_those_of_each_record_alone(module: Callable[[], nn.Module]) -> None:
    features, labels = records(5)
    plain = seeded(module)
    for source in ways(module, loss=cross_entropy, max_grad_norm=1.0):
        rows = source.of_records(features, labels)
        assert rows.shape == (5, source.size)
        for row, feature, label in zip(rows, features, labels, strict=True):
            alone = torch.autograd.grad(cross_entropy(plain(feature[None]), label[None]).sum(), list(trainable_parameters(plain).values()))
            assert row.tolist() == pytest.approx(torch.cat([part.reshape(-1) for part in alone]).tolist(), abs=1e-6)


@settings(max_examples=25, deadline=None)
@given(count=st.integers(0, 40), bound=st.floats(1e-4, 1e4), scale=st.floats(1e-6, 1e6))
def test_the_sum_is_that_of_the_gradients_each_scaled_down_to_the_bound(count: int, bound: float, scale: float) -> None:
    features, labels = records(count)
    for source in ways(LINEAR["network"], loss=cross_entropy, max_grad_norm=bound):
        clipped = source.sum(scale * features, labels)
        total = clipped.values
        assert total.dtype == torch.float64
        assert clipped.zeroed == 0
        assert len(clipped.norms) == count
        if not count:
            assert not total.any()
            continue
        rows = source.of_records(scale * features, labels).double()
        assert clipped.norms.tolist() == pytest.approx(rows.norm(dim=1).tolist(), rel=1e-6)
        expected = (bound / rows.norm(dim=1).clamp(min=bound)) @ rows
        assert float((total - expected).norm()) <= 1e-6 * max(float(expected.norm()), bound)


def test_every_way_clips_to_the_bound_as_it_is_changed() -> None:
    features, labels = records(20)
    for before, after in zip(
        ways(LINEAR["network"], loss=cross_entropy, max_grad_norm=0.5),
        ways(LINEAR["network"], loss=cross_entropy, max_grad_norm=0.2),
        strict=True,
    ):
        expected = after.sum(features, labels).values
        assert float((before.sum(features, labels).values - expected).norm()) > 0.1 * float(expected.norm())
        before.max_grad_norm = 0.2
        assert torch.equal(before.sum(features, labels).values, expected)


def test_no_factor_lets_a_gradient_exceed_the_bound_and_none_makes_one_longer() -> None:
    norms = torch.tensor([0.0, 1e-300, 0.5, 1.0, 1.0 + 2**-50, 3.0, 1e30, FLOAT32_MAX], dtype=torch.float64)
    factors = clip_factors(norms, max_grad_norm=1.0)
    assert factors[:4].tolist() == [1.0] * 4
    assert (factors <= 1.0).all()
    assert (factors * norms <= 1.0 + 2**-52).all()
    assert (factors[4:] * norms[4:]).tolist() == pytest.approx([1.0] * 4, rel=1e-15)


def test_a_gradient_that_is_nan_infinite_or_beyond_float32_counts_as_zero() -> None:
    norms = torch.tensor([1.0, math.nan, math.inf, 1.01 * FLOAT32_MAX, FLOAT32_MAX], dtype=torch.float64)
    rows = torch.full((5, 2), math.nan)
    rows[[0, 4]] = 1.0
    assert zero_broken(norms, [rows]) == 3
    assert norms.tolist() == [1.0, 0.0, 0.0, 0.0, FLOAT32_MAX]
    assert rows.tolist() == [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]


def test_broken_records_are_zeroed_and_counted_and_leave_the_others_alone_on_both_ways() -> None:
    features, labels = records(12)
    broken = features.clone()
    broken[3] = math.nan
    broken[7, 1] = math.inf
    sound = [index for index in range(12) if index not in (3, 7)]
    for source in ways(LINEAR["network"], loss=cross_entropy, max_grad_norm=0.5):
        whole, expected = source.sum(broken, labels), source.sum(features[sound], labels[sound])
        assert (whole.zeroed, expected.zeroed) == (2, 0)
        assert whole.values.tolist() == pytest.approx(expected.values.tolist(), abs=1e-6)
        assert [index for index in range(12) if not whole.norms[index]] == [3, 7]


def test_a_product_beyond_float32_counts_as_zero_although_book_keeping_never_writes_it_down() -> None:
    class Steep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1, bias=False)
            nn.init.zeros_(self.layer.weight)

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            return 1000.0 * self.layer(features)

    # The derivatives are 500 and the inputs finite; only their product overflows.
    features, labels = torch.tensor([[1e35], [1e36]]), torch.zeros(2, dtype=torch.int64)
    for source in ways(Steep, loss=binary_cross_entropy, max_grad_norm=1.0, columns=1):
        clipped = source.sum(features, labels)
        assert clipped.zeroed == 1
        assert clipped.values.tolist() == pytest.approx([1.0])


# ---------------------------------------------------------------- passes


def test_a_large_batch_takes_several_passes_and_gives_the_sum_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    features, labels = records(301)
    for source in ways(LINEAR["network"], loss=cross_entropy, max_grad_norm=0.5):
        expected = source.sum(features, labels)
        seen: list[int] = []
        add = source._add
        with monkeypatch.context() as patch:
            patch.setattr(gradients_module, "_NUMBERS_PER_PASS", 64 * source.numbers_per_record)
            patch.setattr(source, "_add", lambda pieces, *rest, add=add, seen=seen: (seen.append(len(pieces[0])), add(pieces, *rest))[1])
            several = source.sum(features, labels)
        assert seen == [64, 64, 64, 64, 45]
        assert float((several.values - expected.values).norm()) <= 1e-6 * float(expected.values.norm())
        assert several.norms.tolist() == pytest.approx(expected.norms.tolist(), rel=1e-6)


def test_a_pass_holds_no_more_than_its_share_of_numbers_and_at_least_one_record(monkeypatch: pytest.MonkeyPatch) -> None:
    features, labels = records(10_000)
    for source in ways(LINEAR["network"], loss=cross_entropy, max_grad_norm=0.5):
        seen: list[int] = []
        pieces = source._pieces
        monkeypatch.setattr(
            source, "_pieces", lambda part, *rest, seen=seen, pieces=pieces: (seen.append(len(part)), pieces(part, *rest))[1]
        )
        source.sum(features, labels)
        assert max(seen) * source.numbers_per_record <= gradients_module._NUMBERS_PER_PASS
        assert set(seen) <= set(source.shapes) == set(range(64, 1025, 64))
        assert sum(seen) < 10_000 + 64
        for affordable, rows in ((0.5, 1), (1, 1), (5, 4), (63, 32), (64, 64)):
            seen.clear()
            monkeypatch.setattr(gradients_module, "_NUMBERS_PER_PASS", int(affordable * source.numbers_per_record))
            source.sum(features[:7], labels[:7])
            assert seen == [rows] * math.ceil(7 / rows)
        monkeypatch.undo()


def test_hooks_hold_as_many_numbers_per_record_as_there_are_parameters_and_book_keeping_as_there_are_neurons() -> None:
    fast, kept, mixed, hooked = ways(lambda: mlp(4, hidden=(128, 64)), loss=binary_cross_entropy, max_grad_norm=1.0)
    assert fast.size == kept.size == mixed.size == hooked.size == 8961
    assert hooked.numbers_per_record >= 8961 > mixed.numbers_per_record > kept.numbers_per_record
    assert 4 + 128 + 64 + 128 + 64 + 1 <= fast.numbers_per_record == kept.numbers_per_record < 2000


# ---------------------------------------------------------------- which models fit


class Tall(nn.Linear):
    """A layer that is an nn.Linear and does something else."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(features)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.layer(torch.tanh(self.layer(features)))))


class Scaled(nn.Module):
    """Has a trained parameter of its own beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 2), nn.Parameter(torch.tensor(1.0))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.scale * self.layer(features)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.idle = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.layer(features)


def frozen_bias() -> nn.Module:
    module = nn.Linear(4, 2)
    module.bias.requires_grad_(False)
    return module


SERVED: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "network": (LINEAR["network"], ["0", "2", "4"]),
    "other order, no bias": (Reversed, ["last", "middle", "first"]),
    "residual": (Skipping, ["first", "inner", "last"]),
    "partly frozen": (partly_frozen, ["0", "4"]),
    "convolution": (lambda: nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 2), nn.Flatten(), nn.Linear(6, 2)), ["3"]),
    "norm": (lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)), ["0", "2"]),
    "derived layer": (lambda: Tall(4, 2), []),
    "layer used twice": (Twice, ["last"]),
    "layer not used": (Unused, ["layer"]),
    "several rows per record": (lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Linear(2, 2), nn.Flatten(), nn.Linear(4, 2)), ["3"]),
    "beside a parameter": (lambda: nn.Sequential(nn.Linear(4, 4), Scaled()), ["0"]),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)), []),
    "old weight norm": (lambda: nn.utils.weight_norm(nn.Linear(4, 2)), []),
    "frozen bias": (frozen_bias, []),
}


@pytest.mark.parametrize(("make", "names"), SERVED.values(), ids=SERVED.keys())
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_book_keeping_serves_linear_layers_that_are_used_once_and_looking_leaves_no_hook(
    make: Callable[[], nn.Module], names: list[str]
) -> None:
    module = make()
    layers = linear_layers(module, features=synthetic_records(4)[0])
    assert [name for name, layer in module.named_modules() if any(layer is served for served in layers)] == names
    assert not any(layer._forward_hooks for layer in module.modules())


def test_only_linear_and_relu_in_turn_do_without_autograd() -> None:
    assert is_relu_network(mlp(4))
    assert is_relu_network(nn.Sequential(nn.Linear(4, 2)))
    assert is_relu_network(nn.Sequential(nn.Linear(4, 3, bias=False), nn.ReLU(inplace=True), nn.Linear(3, 2)))
    for other in (
        nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)),
        nn.Sequential(nn.Linear(4, 3), nn.ReLU()),
        nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)),
        nn.Sequential(nn.ReLU(), nn.Linear(4, 2)),
        nn.Sequential(Tall(4, 2)),
        nn.Linear(4, 2),
        partly_frozen(),
        Reversed(),
    ):
        assert not is_relu_network(other)


KINDS: dict[str, tuple[Callable[[], nn.Module], type[ClippedGradients]]] = {
    "network": (LINEAR["network"], ReluNetworkBookKeeping),
    "partly frozen network": (partly_frozen, BookKeeping),
    "frozen head": (lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2).requires_grad_(requires_grad=False)), BookKeeping),
    "residual": (Skipping, BookKeeping),
    "convolution": (SERVED["convolution"][0], _HookedGradients),
    "several rows per record": (SERVED["several rows per record"][0], _HookedGradients),
    "frozen bias": (frozen_bias, _HookedGradients),
    "beside a parameter": (SERVED["beside a parameter"][0], _HookedGradients),
    "layer used twice": (Twice, _HookedGradients),
    "norm": (SERVED["norm"][0], _HookedGradients),
}


@pytest.mark.parametrize(("make", "kind"), KINDS.values(), ids=KINDS.keys())
def test_the_cheapest_way_is_chosen_by_the_structure_of_the_model_and_gives_each_record_s_gradient(
    make: Callable[[], nn.Module], kind: type[ClippedGradients]
) -> None:
    model, plain = seeded(make), seeded(make)
    source = _clipped_gradients(model, loss=cross_entropy, max_grad_norm=0.3, inputs=4)
    assert type(source) is kind
    features, labels = records(40)
    rows: list[torch.Tensor] = []
    for feature, label in zip(features, labels, strict=True):
        loss = cross_entropy(plain(feature[None]), label[None]).sum()
        rows.append(torch.cat([part.reshape(-1) for part in torch.autograd.grad(loss, list(trainable_parameters(plain).values()))]))
    alone = torch.stack(rows).double()
    expected = clip_factors(alone.norm(dim=1), max_grad_norm=0.3) @ alone
    assert float((source.sum(features, labels).values - expected).norm()) <= 1e-6 * float(expected.norm())


@pytest.mark.parametrize("behaviour", ["twice", "not at all", "fewer rows", "more dimensions"])
def test_a_model_that_does_something_else_with_other_records_is_refused_in_the_step(behaviour: str) -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            if not (features > 10).any():
                return self.last(self.layer(features))
            if behaviour == "twice":
                return self.last(self.layer(self.layer(features)))
            if behaviour == "not at all":
                return self.last(features)
            if behaviour == "fewer rows":
                return functional.pad(self.last(self.layer(features[1:])), (0, 0, 1, 0))
            return self.last(self.layer(features[:, None, :]))[:, 0, :]

    model = Changing()
    source = _clipped_gradients(model, loss=cross_entropy, max_grad_norm=1.0, inputs=4)
    assert type(source) is BookKeeping
    source.sum(*records(6))
    features, labels = records(7)
    with pytest.raises(UnsupportedModelError, match="no update was made"):
        source.sum(100 * features, labels)
