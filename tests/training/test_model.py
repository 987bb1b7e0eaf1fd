import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from privfed.errors import LayoutMismatchError, UnsupportedModelError
from privfed.training.model import (
    check_columns,
    check_model,
    join_parameters,
    layout_of,
    load_values,
    mlp,
    scores,
    trainable_parameters,
    values_of,
)
from privfed.update import Layout, PlainVector

torch.set_num_threads(1)


def with_buffer() -> nn.Module:
    module = nn.Linear(3, 1)
    module.register_buffer("mean", torch.zeros(3), persistent=False)
    return module


def tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    module[2].weight = module[0].weight
    return module


def overlapping() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].bias = nn.Parameter(module[0].weight.detach()[0])
    return module


def repeated() -> nn.Module:
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.ReLU(), layer)


def frozen(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    return module


REFUSED = {
    "BatchNorm1d": (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), "GroupNorm"),
    "BatchNorm without statistics": (nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)), "GroupNorm"),
    "BatchNorm without parameters": (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False)), "GroupNorm"),
    "SyncBatchNorm": (nn.Sequential(nn.Linear(3, 4), nn.SyncBatchNorm(4)), "GroupNorm"),
    "LazyBatchNorm1d": (nn.Sequential(nn.Linear(3, 4), nn.LazyBatchNorm1d()), "GroupNorm"),
    "InstanceNorm with statistics": (
        nn.Sequential(nn.Linear(3, 4), nn.InstanceNorm1d(4, track_running_stats=True)),
        "buffer '1.running_mean'",
    ),
    "buffer": (with_buffer(), "buffer 'mean'"),
    "tied parameters": (tied(), "'2.weight' shares"),
    "overlapping parameters": (overlapping(), "'1.bias' shares"),
    "layer used under two names": (repeated(), "'2.weight' shares"),
    "float64": (nn.Linear(3, 1).double(), "float64"),
    "one half-precision parameter": (nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1).half()), "'1.weight' is torch.float16"),
    "another device": (nn.Linear(3, 1, device="meta"), "meta"),
    "lazy": (nn.Sequential(nn.LazyLinear(3)), "no shape yet"),
    "empty parameter": (nn.Sequential(nn.Linear(3, 1), nn.PReLU(0)), "empty"),
    "nothing to train": (nn.Sequential(nn.ReLU()), "no trainable"),
    "all frozen": (frozen(nn.Linear(3, 1)), "no trainable"),
    "attention": (nn.TransformerEncoderLayer(4, 2, dropout=0.0), "'self_attn' is MultiheadAttention"),
    "LSTM": (nn.LSTM(3, 4), "LSTM"),
    "GRU": (nn.Sequential(nn.GRU(3, 4)), "'0' is GRU"),
}


@pytest.mark.parametrize(("module", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_a_model_that_could_leak_or_mix_records_is_refused_with_the_name_of_the_part(module: nn.Module, says: str) -> None:
    with pytest.raises(UnsupportedModelError, match="nothing was trained") as refusal:
        check_model(module)
    assert says in str(refusal.value)


@pytest.mark.parametrize(
    "module",
    [
        mlp(10),
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True), nn.Flatten(), nn.Linear(16, 2)),
        nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.PReLU(), frozen(nn.Linear(4, 4)), nn.Linear(4, 1, bias=False)),
    ],
    ids=["mlp", "convolution", "partly frozen"],
)
def test_ordinary_models_are_accepted(module: nn.Module) -> None:
    check_model(module)


@pytest.mark.parametrize("module", [mlp(9), nn.Sequential(nn.Sequential(nn.Linear(9, 3), nn.ReLU()), nn.Linear(3, 1)), nn.Linear(9, 1)])
def test_a_model_of_another_width_than_the_data_is_refused_with_both_numbers_and_the_columns(module: nn.Module) -> None:
    columns = ("hour", "amount", "old", "new", "kind")
    with pytest.raises(UnsupportedModelError) as refusal:
        check_columns(module, columns)
    assert str(refusal.value) == (
        "the model takes 9 columns, and the data have 5: hour, amount, old, new, kind; make a model for 5, as mlp(inputs=5) does, or take "
        "other columns; nothing was trained"
    )
    check_columns(module, [*columns, "a", "b", "c", "d"])
    with pytest.raises(UnsupportedModelError, match=r"have 30: 0, 1, .* 19, \.\.\.; make"):
        check_columns(module, [str(number) for number in range(30)])


@pytest.mark.parametrize("module", [nn.Conv1d(9, 1, 1), nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Linear(9, 1)), nn.Sequential()])
def test_the_width_of_a_model_that_begins_with_something_else_is_not_guessed(module: nn.Module) -> None:
    check_columns(module, ("hour", "amount", "old", "new", "kind"))


@pytest.mark.parametrize("hidden", [64, None, 2.5])
def test_mlp_refuses_one_number_in_place_of_widths(hidden: object) -> None:
    with pytest.raises(TypeError, match=rf"expected hidden to be a tuple of widths, such as \(64, 32\), got {type(hidden).__name__}"):
        mlp(4, hidden=hidden)


def test_mlp_has_the_asked_widths() -> None:
    assert [tuple(parameter.shape) for parameter in mlp(10).parameters()] == [(64, 10), (64,), (32, 64), (32,), (1, 32), (1,)]
    assert [tuple(parameter.shape) for parameter in mlp(3, hidden=(), outputs=5).parameters()] == [(5, 3), (5,)]
    for inputs, hidden, outputs in ((0, (4,), 1), (3, (0,), 1), (3, (4,), 0)):
        with pytest.raises(ValueError, match="widths"):
            mlp(inputs, hidden=hidden, outputs=outputs)


def test_the_layout_names_the_trainable_parameters_in_order_and_no_frozen_one() -> None:
    module = nn.Sequential(nn.Linear(3, 2), frozen(nn.Linear(2, 2)), nn.Linear(2, 1))
    assert layout_of(module) == Layout(names=("0.weight", "0.bias", "2.weight", "2.bias"), shapes=((2, 3), (2,), (1, 2), (1,)))
    assert list(trainable_parameters(module)) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert values_of(module).values.shape == (11,)


@settings(max_examples=30, deadline=None)
@given(values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=9, max_size=9))
def test_loading_and_reading_gives_back_every_float32(values: list[float]) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    load_values(module, PlainVector(layout=layout_of(module), values=values))
    assert values_of(module).values.tolist() == values


def test_values_are_a_copy() -> None:
    module = nn.Linear(2, 1)
    before = values_of(module).values.tolist()
    with torch.no_grad():
        module.weight.add_(1.0)
    assert before != values_of(module).values.tolist()


def test_loading_leaves_frozen_parameters_alone() -> None:
    module = nn.Sequential(frozen(nn.Linear(2, 2)), nn.Linear(2, 1))
    before = module[0].weight.clone()
    load_values(module, PlainVector(layout=layout_of(module), values=np.ones(3)))
    assert torch.equal(module[0].weight, before)
    assert module[1].weight.tolist() == [[1.0, 1.0]]


def test_loading_refuses_another_layout_and_numbers_beyond_float32() -> None:
    module = nn.Linear(2, 1)
    before = values_of(module).values.tolist()
    with pytest.raises(LayoutMismatchError, match="nothing was loaded"):
        load_values(module, values_of(nn.Linear(3, 1)))
    with pytest.raises(ValueError, match="float32"):
        load_values(module, PlainVector(layout=layout_of(module), values=[0.0, 1e39, 0.0]))
    assert values_of(module).values.tolist() == before


def test_values_refuse_a_model_with_nan() -> None:
    module = nn.Linear(2, 1)
    with torch.no_grad():
        module.bias.fill_(torch.nan)
    with pytest.raises(ValueError, match="finite"):
        values_of(module)


def test_scores_are_the_raw_outputs_with_the_given_weights_and_change_nothing() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5), nn.Linear(3, 1))
    other = copy.deepcopy(module)
    with torch.no_grad():
        other[0].weight.mul_(2.0)
    before = values_of(module).values.tolist()
    features = np.arange(20, dtype=np.float32).reshape(10, 2)
    expected = other.eval()(torch.tensor(features))[:, 0].detach().numpy()
    assert scores(module, values_of(other), features) == pytest.approx(expected)
    assert scores(module, values_of(other), features).shape == (10,)
    assert values_of(module).values.tolist() == before
    assert module.training


def test_scores_of_several_outputs_and_of_more_rows_than_are_run_at_once_keep_their_order() -> None:
    module = mlp(1, hidden=(), outputs=2)
    features = np.arange(70000, dtype=np.float32)[:, None] / 70000
    result = scores(module, PlainVector(layout=layout_of(module), values=[1.0, -1.0, 0.0, 0.5]), features)
    assert result == pytest.approx(np.concatenate([features, 0.5 - features], axis=1), abs=1e-6)


def test_scores_refuse_weights_of_another_layout() -> None:
    with pytest.raises(LayoutMismatchError):
        scores(nn.Linear(2, 1), values_of(nn.Linear(3, 1)), np.zeros((1, 2), dtype=np.float32))


def test_joined_parameters_are_views_of_one_vector_in_the_order_of_the_layout() -> None:
    module = nn.Sequential(mlp(3, hidden=(2,)), nn.Linear(1, 1))
    module[1].requires_grad_(requires_grad=False)
    before = values_of(module).values
    frozen = module[1].weight.clone()
    vector = join_parameters(module)
    assert vector.tolist() == before.tolist()
    with torch.no_grad():
        vector += 1.0
    assert values_of(module).values.tolist() == vector.tolist()
    assert torch.equal(module[1].weight, frozen)
    module[0](torch.ones(2, 3)).sum().backward()
    assert all(parameter.grad is not None for parameter in module[0].parameters())


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
def test_a_model_with_hooks_is_refused(kind: str) -> None:
    model = mlp(3, hidden=(4,))
    check_model(model)
    handle = getattr(model[0], kind)(lambda *_: None)
    with pytest.raises(UnsupportedModelError, match="layer '0' has hooks, which may keep or mix"):
        check_model(model)
    handle.remove()
    check_model(model)
