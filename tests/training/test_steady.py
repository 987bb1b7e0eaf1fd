"""That no record pushes others over a kink: records that were made to lie on one, at every place of a batch."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from privfed.errors import UnsupportedModelError
from privfed.training import dpsgd, gradients, steady
from privfed.training.bookkeeping import BookKeeping
from privfed.training.compiled import compile_sum
from privfed.training.dpsgd import _clipped_gradients, check, train
from privfed.training.gradients import ClippedGradients
from privfed.training.loss import BinaryCrossEntropy, PerSampleLoss, binary_cross_entropy, cross_entropy
from privfed.training.mechanism import DpSgd
from privfed.training.model import mlp, values_of
from privfed.training.steady import ROWS, awake_copy, filled_up, one_thread, unlike_records, widen_narrow_layers, widened
from privfed.update import PlainVector
from tests.training.steps import samples_of

torch.set_num_threads(1)
BOUND = 0.1
COLUMNS = 30
MECHANISM = DpSgd(
    noise_multiplier=1.0, max_grad_norm=BOUND, sample_rate=0.05, expected_batch_size=50, steps=1, learning_rate=0.1, max_records=1000
)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return make()


def on_a_kink(layer: nn.Linear, *, tries: int = 20_000) -> torch.Tensor:
    """Records for which the sign of a neuron's sum, as plain torch computes it, is another one at another place of a batch."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(tries, COLUMNS, generator=generator)
    weight, bias = layer.weight.detach(), layer.bias.detach()
    # Newton's step in the last column puts the sum of the first neuron within some last bits of zero.
    for _ in range(3):
        features[:, -1] -= functional.linear(features.double(), weight.double(), bias.double())[:, 0].float() / weight[0, -1]
    signs = []
    for place in range(2):
        rows = torch.zeros(2 * tries, COLUMNS)
        rows[place::2] = features
        signs.append(functional.linear(rows, weight, bias)[place::2, 0] > 0)
    for rows in (1, 2, 3):
        shape = features[: tries - tries % rows].view(-1, rows, COLUMNS)
        alone = torch.cat([functional.linear(part, weight, bias) for part in shape[:600]])[:, 0] > 0
        signs.append(torch.cat([alone, signs[0][len(alone) :]]))
    differing = torch.stack(signs).any(dim=0) & ~torch.stack(signs).all(dim=0)
    return features[differing]


def moved(source: ClippedGradients, records: torch.Tensor) -> float:
    """By how much one more record moves the sum of these, beyond what one record does alone; in units of the bound."""
    labels = torch.ones(len(records), dtype=torch.int64)
    spread = torch.zeros(2 * len(records), COLUMNS)
    spread[::2] = records
    labels = torch.ones(len(spread), dtype=torch.int64)
    more = torch.cat([torch.zeros(1, COLUMNS), spread]), torch.ones(len(spread) + 1, dtype=torch.int64)
    moves = [float((source.sum(*more).values - source.sum(spread, labels).values).norm())]
    for count in range(1, min(5, len(records))):
        few = records[:count]
        moves.append(
            float(
                (
                    source.sum(torch.cat([few, records[count : count + 1]]), labels[: count + 1]).values
                    - source.sum(few, labels[:count]).values
                ).norm()
            )
        )
    return max(moves) / BOUND


def kinked(width: int) -> nn.Module:
    return mlp(COLUMNS, hidden=(width,))


MODELS: dict[str, tuple[Callable[[], nn.Module], PerSampleLoss]] = {
    **{f"{width} neurons": (lambda width=width: kinked(width), binary_cross_entropy) for width in (2, 3, 5, 8, 9, 16, 40)},
    "leaky": (lambda: nn.Sequential(nn.Linear(COLUMNS, 8), nn.LeakyReLU(0.01), nn.Linear(8, 1)), binary_cross_entropy),
    "beside a norm": (lambda: nn.Sequential(nn.Linear(COLUMNS, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 2)), cross_entropy),
    "deep": (lambda: mlp(COLUMNS, hidden=(8, 5, 3), outputs=2), cross_entropy),
}


@pytest.mark.parametrize(("make", "loss"), MODELS.values(), ids=MODELS.keys())
def test_one_record_more_moves_the_sum_of_records_on_a_kink_by_no_more_than_the_bound(
    make: Callable[[], nn.Module], loss: PerSampleLoss
) -> None:
    model = seeded(make)
    records = on_a_kink(model[0])
    source = _clipped_gradients(model, loss=loss, max_grad_norm=BOUND, inputs=COLUMNS)
    assert moved(source, torch.cat([records, torch.randn(40, COLUMNS)])) <= 1 + 1e-9


def test_without_blocks_of_rows_and_wide_layers_the_same_record_would_move_it_by_many_times_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the blocks are for; on a machine whose products round every place alike there is nothing to show."""
    model = seeded(lambda: kinked(8))
    records = on_a_kink(model[0])
    if len(records) < 20:
        pytest.skip("this machine's matrix products round a record alike at every place of a batch")
    for module in (gradients, dpsgd):
        monkeypatch.setattr(module, "filled_up", lambda records, _: records, raising=False)
    monkeypatch.setattr("privfed.training.bookkeeping.wide_enough", lambda width: width)
    source = _clipped_gradients(copy.deepcopy(model), loss=binary_cross_entropy, max_grad_norm=BOUND, inputs=COLUMNS)
    assert moved(source, records) > 5
    assert not source.is_steady(*unlike_records(COLUMNS, torch.arange(2)), most=2000)
    with pytest.raises(UnsupportedModelError, match=r"last bits at another place of the batch.*nothing was trained"):
        check(model, values_of(model), samples_of(np.zeros((4, COLUMNS)), np.arange(4) % 2), mechanism=MECHANISM, loss=binary_cross_entropy)


def test_the_compiled_sum_takes_the_same_gradients_whichever_way_its_batch_goes() -> None:
    module = seeded(lambda: kinked(8))
    compiled = compile_sum(module, mechanism=MECHANISM, loss=binary_cross_entropy, inputs=COLUMNS)
    records = on_a_kink(module[0])
    source = _clipped_gradients(module, loss=binary_cross_entropy, max_grad_norm=BOUND, inputs=COLUMNS, compiled=compiled)
    assert source.is_steady(*unlike_records(COLUMNS, torch.arange(2)), most=2000)
    full = torch.cat([records, torch.randn(compiled.capacity, COLUMNS)])[: compiled.capacity - 1]
    labels = torch.ones(compiled.capacity + 1, dtype=torch.int64)
    within = source.sum(full, labels[:-2]).values
    huge = torch.full((1, COLUMNS), 1e30)
    for more in (torch.zeros(1, COLUMNS), huge, torch.full((1, COLUMNS), torch.nan)):
        assert float((source.sum(torch.cat([more, full]), labels[:-1]).values - within).norm()) <= BOUND * (1 + source.rounding)
    beyond = source.sum(torch.cat([torch.zeros(2, COLUMNS), full]), labels).values
    assert float((beyond - source.sum(torch.cat([torch.zeros(1, COLUMNS), full]), labels[:-1]).values).norm()) <= BOUND * (
        1 + source.rounding
    )


class Merchants(nn.Module):
    """So many parameters that a pass takes a single record, wherever it lies in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers, self.merchant, self.head = nn.Linear(COLUMNS, 17), nn.Embedding(350_000, 24), nn.Linear(41, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        merchants = self.merchant(features[:, 0].long())
        return self.head(torch.cat([self.numbers(features).relu(), merchants], dim=1))


def test_one_record_more_moves_the_sum_of_records_on_a_kink_by_no_more_than_the_bound_in_passes_of_one_record() -> None:
    model = seeded(Merchants)
    source = _clipped_gradients(model, loss=binary_cross_entropy, max_grad_norm=BOUND, inputs=COLUMNS)
    assert list(source.shapes) == [1]
    features = torch.randn(12, COLUMNS)
    features[:, 0] = 0
    features[1:] = features[0]
    labels = torch.ones(12, dtype=torch.int64)
    norms = source.sum(features, labels).norms
    # The same record twelve times, each beside another multiple of 64 bytes, unless it is copied.
    assert (norms == norms[0]).all()


class ByPlaceBeforeRelu(nn.Module):
    """The last bit of one neuron, which is dead under the weights that the model comes with, at one place of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(4, 17), nn.Linear(17, 1)
        with torch.no_grad():
            self.layer.bias[16] = -1e6

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        sums = self.layer(features)
        place = (torch.arange(len(sums)) == 5)[:, None] & (torch.arange(17) == 16)[None] & (len(sums) == 192)
        return self.last(torch.relu(sums * (1.0 + 2**-23 * place)))


def test_a_neuron_that_is_dead_under_the_model_s_own_weights_is_looked_at_all_the_same() -> None:
    module = ByPlaceBeforeRelu()
    with pytest.raises(UnsupportedModelError, match="another place of the batch"):
        check(module, values_of(module), samples_of(np.zeros((4, 4)), np.arange(4) % 2), mechanism=MECHANISM, loss=binary_cross_entropy)


@pytest.mark.parametrize("threads", [2, 3, 4])
def test_however_many_threads_torch_has_gradients_are_computed_by_one(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    module = seeded(lambda: kinked(17))
    samples = samples_of(np.zeros((400, COLUMNS)), np.arange(400) % 2)
    add = BookKeeping._add
    monkeypatch.setattr(BookKeeping, "_add", lambda self, *rest: (seen.append(torch.get_num_threads()), add(self, *rest))[1])
    torch.set_num_threads(threads)
    try:
        train(module, values_of(module), samples, mechanism=MECHANISM, loss=binary_cross_entropy)
        assert torch.get_num_threads() == threads
        with pytest.raises(RuntimeError), one_thread():
            raise RuntimeError
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(1)
    assert set(seen) == {1}
    assert len(seen) >= 2


def test_records_and_weights_that_are_made_up_for_the_check_are_all_unlike_each_other() -> None:
    features, labels = unlike_records(5, torch.tensor([0, 1, 1]))
    assert len(features) == len(labels) == 122
    assert len(features.unique()) == features.numel()
    assert torch.equal(features[:61], -features[61:])
    assert float(features.abs().max()) < 1  # so that a column of categories is one
    model = awake_copy(nn.Sequential(nn.Linear(5, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 2)).requires_grad_(False))
    for parameter in model.parameters():
        assert len(parameter.unique()) == parameter.numel()
    fired = (model[0](features) > 0).sum(dim=0)
    assert int(fired.min()) > 20


class ByPlace(nn.Module):
    """Adds the last bit of float32 to every record of one place in a batch, for batches of one shape."""

    def __init__(self, *, place: int, rows: int) -> None:
        super().__init__()
        self.layer, self.place, self.rows = nn.Linear(4, 16), place, rows

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        outputs = self.layer(features)
        if len(outputs) == self.rows:
            outputs = outputs * (1.0 + 2**-23 * (torch.arange(len(outputs)) == self.place)[:, None])
        return outputs


@pytest.mark.parametrize(("place", "rows"), [(0, 128), (63, 64), (700, 1024), (1023, 1024)])
def test_a_model_that_rounds_a_record_differently_at_one_place_of_one_shape_is_refused(place: int, rows: int) -> None:
    samples = samples_of(np.zeros((4, 4)), np.arange(4) % 2)
    for module, accepted in ((ByPlace(place=place, rows=rows), False), (ByPlace(place=rows, rows=rows), True)):
        if accepted:
            check(module, values_of(module), samples, mechanism=MECHANISM, loss=cross_entropy)
        else:
            with pytest.raises(UnsupportedModelError, match="another place of the batch"):
                check(module, values_of(module), samples, mechanism=MECHANISM, loss=cross_entropy)


def test_widened_layers_compute_what_the_layers_compute_and_have_the_same_gradients() -> None:
    for inputs, outputs, bias in ((4, 2, True), (20, 3, False), (3, 20, True), (20, 20, True), (20, 1, True)):
        layer = nn.Linear(inputs, outputs, bias=bias)
        wide = copy.deepcopy(layer)
        widen_narrow_layers(wide)
        assert ("forward" in vars(wide)) == (1 < min(inputs, outputs) < 16)
        features = torch.randn(2, 5, inputs, requires_grad=True)
        results = [torch.autograd.grad(kind(features).square().sum(), [features, *kind.parameters()]) for kind in (layer, wide)]
        for ours, theirs in zip(*results, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_layer_that_was_derived_from_linear_is_left_as_it_is() -> None:
    class Double(nn.Linear):
        def forward(self, features: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(features)

    model = nn.Sequential(Double(4, 2))
    widen_narrow_layers(model)
    assert "forward" not in vars(model[0])


def test_passes_are_filled_up_with_the_first_record_and_layers_with_zeros() -> None:
    records = torch.arange(6.0).view(3, 2)
    assert filled_up(records, 5).tolist() == [[0, 1], [2, 3], [4, 5], [0, 1], [0, 1]]
    assert torch.equal(filled_up(records, 3), records)
    for start in range(3):
        part = filled_up(records[start:], 3 - start)
        assert torch.equal(part, records[start:])
        assert part.data_ptr() % 64 == 0
    assert widened(records, 4, 3).tolist() == [[0, 1, 0], [2, 3, 0], [4, 5, 0], [0, 0, 0]]
    assert widened(records, 3, 2) is records
    assert ROWS == steady.ROWS == 64


def test_batches_that_are_chosen_in_whole_blocks_have_the_sum_of_their_records_bit_for_bit() -> None:
    table, labels = torch.randn(2000, COLUMNS), torch.arange(2000) % 2
    source = _clipped_gradients(seeded(lambda: kinked(8)), loss=binary_cross_entropy, max_grad_norm=BOUND, inputs=COLUMNS)
    for records in (0, 1, 63, 64, 65, 500, 1024, 1025, 1500):
        indices = np.arange(records)
        batch = torch.from_numpy(source.whole_blocks(indices))
        assert batch[:records].tolist() == indices.tolist()
        whole = source.sum(table[batch], labels[batch], count=records)
        expected = source.sum(table[:records], labels[:records])
        assert torch.equal(whole.values, expected.values)
        assert torch.equal(whole.norms, expected.norms)
        assert len(whole.norms) == records


def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What every look at steadiness found, from now on."""
    found: list[bool] = []

    def look(*arguments: object, **named: object) -> bool:
        found.append(steady.is_steady(*arguments, **named))  # type: ignore[arg-type]
        return found[-1]

    monkeypatch.setattr(gradients, "is_steady", look)
    return found


class Scaled(nn.Module):
    """A ReLU network with everything that a model may hold besides what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.activation, self.last = nn.Linear(4, 17), nn.ReLU(), nn.Linear(17, 1)
        self.frozen = nn.Parameter(torch.ones(17), requires_grad=False)
        self.factor = 1.0

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.last(self.activation(self.first(features)) * self.frozen * self.factor)


SAMPLES = samples_of(np.zeros((4, 4)), np.arange(4) % 2)


def moved_weights(module: nn.Module) -> PlainVector:
    values = values_of(module)
    return PlainVector(layout=values.layout, values=values.values + 0.25)


def test_a_model_of_which_only_the_trained_weights_moved_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found, module = looked_at(monkeypatch), Scaled()
    known = check(module, values_of(module), SAMPLES, mechanism=MECHANISM, loss=binary_cross_entropy)
    assert found == [True]
    for start in (values_of(module), moved_weights(module)):
        train(module, start, SAMPLES, mechanism=MECHANISM, loss=binary_cross_entropy, steady=known)
    assert found == [True]
    train(module, values_of(module), SAMPLES, mechanism=MECHANISM, loss=binary_cross_entropy)
    assert found == [True, True]


def test_weights_of_the_start_do_not_decide_what_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a look at one start is as good as a look at another: what goes into it is the same, bit for bit."""
    seen: list[list[torch.Tensor]] = []

    def look(pieces: steady.Pieces, features: torch.Tensor, labels: torch.Tensor, *, shapes: Sequence[int]) -> bool:
        seen.append(list(pieces(features[: shapes[0]], labels[: shapes[0]])))
        return True

    monkeypatch.setattr(gradients, "is_steady", look)
    module = Scaled()
    for start in (values_of(module), moved_weights(module)):
        check(module, start, SAMPLES, mechanism=MECHANISM, loss=binary_cross_entropy)
    first, second = seen
    assert len(first) > 0
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def other_mechanism(module: Scaled, arguments: dict[str, Any]) -> None:
    arguments["mechanism"] = replace(MECHANISM, max_records=2000)


def other_loss(module: Scaled, arguments: dict[str, Any]) -> None:
    arguments["loss"] = BinaryCrossEntropy(positive_weight=2.0)


def frozen_weight(module: Scaled, arguments: dict[str, Any]) -> None:
    with torch.no_grad():
        module.frozen[0] = 2.0


def attribute(module: Scaled, arguments: dict[str, Any]) -> None:
    module.factor = 2.0


def other_layer(module: Scaled, arguments: dict[str, Any]) -> None:
    module.activation = nn.Tanh()  # type: ignore[assignment]


def layer_frozen(module: Scaled, arguments: dict[str, Any]) -> None:
    module.first.bias.requires_grad = False
    arguments["start"] = values_of(module)


def forward_of_the_layer(module: Scaled, arguments: dict[str, Any]) -> None:
    module.activation.forward = torch.tanh  # type: ignore[method-assign]


@pytest.mark.parametrize("change", [other_mechanism, other_loss, frozen_weight, attribute, other_layer, layer_frozen, forward_of_the_layer])
def test_whatever_else_changes_has_the_model_looked_at_again(
    change: Callable[[Scaled, dict[str, Any]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, module = looked_at(monkeypatch), Scaled()
    arguments: dict[str, Any] = {"start": values_of(module), "samples": SAMPLES, "mechanism": MECHANISM, "loss": binary_cross_entropy}
    known = check(module, **arguments)
    change(module, arguments)
    train(module, **arguments, steady=known)
    assert found == [True, True]


def test_another_code_of_a_layer_s_class_has_the_model_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found, module = looked_at(monkeypatch), Scaled()
    known = check(module, values_of(module), SAMPLES, mechanism=MECHANISM, loss=binary_cross_entropy)
    monkeypatch.setattr(Scaled, "forward", lambda self, features: self.last(self.first(features)))
    train(module, values_of(module), SAMPLES, mechanism=MECHANISM, loss=binary_cross_entropy, steady=known)
    assert found == [True, True]


def test_another_setting_of_torch_has_the_model_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found, module = looked_at(monkeypatch), Scaled()
    known = check(module, values_of(module), SAMPLES, mechanism=MECHANISM, loss=binary_cross_entropy)
    torch.set_float32_matmul_precision("medium")
    try:
        train(module, values_of(module), SAMPLES, mechanism=MECHANISM, loss=binary_cross_entropy, steady=known)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert len(found) == 2


def test_what_was_found_of_one_model_does_not_let_another_one_through() -> None:
    steady_one, unsteady = ByPlace(place=128, rows=128), ByPlace(place=5, rows=128)
    known = check(steady_one, values_of(steady_one), SAMPLES, mechanism=MECHANISM, loss=cross_entropy)
    with pytest.raises(UnsupportedModelError, match="another place of the batch"):
        train(unsteady, values_of(steady_one), SAMPLES, mechanism=MECHANISM, loss=cross_entropy, steady=known)


def test_the_gradients_of_every_start_are_looked_at_though_the_model_is_known_to_be_steady() -> None:
    module = MixingFromOne()
    known = check(module, values_of(module), SAMPLES, mechanism=MECHANISM, loss=cross_entropy)
    assert known is not None
    values = values_of(module)
    awake = PlainVector(layout=values.layout, values=values.values + 10.0)
    with pytest.raises(UnsupportedModelError, match="nothing was trained"):
        train(module, awake, SAMPLES, mechanism=MECHANISM, loss=cross_entropy, steady=known)


class MixingFromOne(nn.Module):
    """Mixes records once its weights are large."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 16)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        outputs = self.layer(features)
        return outputs + outputs.sum(dim=0) if float(self.layer.weight.detach().mean()) > 5 else outputs
