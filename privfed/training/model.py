"""Models: what may be trained, and how their weights become a flat vector and back."""

import copy
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from privfed.errors import LayoutMismatchError, UnsupportedModelError
from privfed.update import Layout, PlainVector

_ROWS_AT_ONCE = 65536

_REFUSED_LAYERS: tuple[tuple[type[nn.Module], str], ...] = (
    (_BatchNorm, "it mixes the records of a batch; use nn.GroupNorm or nn.LayerNorm"),
    (nn.MultiheadAttention, "it has no gradient per record; build attention from nn.Linear layers"),
    (nn.RNNBase, "it has no gradient per record; build recurrence from nn.Linear layers"),
)


def mlp(inputs: int, *, hidden: tuple[int, ...] = (64, 32), outputs: int = 1) -> nn.Module:
    """A fully connected network with ReLU between its layers, for tables.

    Its initial weights come from torch's global generator. They are public: all clients start from the same.

    Args:
        inputs: Number of feature columns.
        hidden: Widths of the hidden layers; none, `()`, makes a linear model.
        outputs: 1 for a yes-or-no label, else the number of classes.

    Raises:
        TypeError: If `hidden` is no tuple.
        ValueError: If a width is not positive.

    Example:
        >>> layout_of(mlp(10)).size
        2817
    """
    if not isinstance(hidden, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers without a type checker
        raise TypeError(f"expected hidden to be a tuple of widths, such as (64, 32), got {type(hidden).__name__}")
    widths = (inputs, *hidden, outputs)
    if any(width < 1 for width in widths):
        raise ValueError(f"expected widths of at least 1, got {widths}")
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained and released, by name, in the order of the layout. Frozen ones are not among them."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def join_parameters(module: nn.Module) -> nn.Parameter:
    """Moves the trainable parameters of a module into one vector, of which they become views: who moves one, moves the other.

    Returns:
        The vector, of shape (size,), in the order of the layout.
    """
    parameters = list(trainable_parameters(module).values())
    joined = nn.Parameter(torch.cat([parameter.detach().reshape(-1) for parameter in parameters]))
    for parameter, part in zip(parameters, joined.detach().split([parameter.numel() for parameter in parameters]), strict=True):
        parameter.data = part.view_as(parameter)
    return joined


def layout_of(module: nn.Module) -> Layout:
    """Names and shapes of the trainable parameters. Public.

    Raises:
        UnsupportedModelError: If there is none.
    """
    parameters = trainable_parameters(module)
    if not parameters:
        raise UnsupportedModelError("the model has no trainable parameter; nothing was trained")
    return Layout(names=tuple(parameters), shapes=tuple(tuple(parameter.shape) for parameter in parameters.values()))


def values_of(module: nn.Module) -> PlainVector:
    """The trainable parameters as one flat vector (a copy).

    Raises:
        ValueError: If a weight is NaN or infinite.
    """
    return layout_of(module).flatten({name: parameter.detach().numpy() for name, parameter in trainable_parameters(module).items()})


def load_values(module: nn.Module, vector: PlainVector) -> None:
    """Overwrites the trainable parameters of a module with a vector, rounded to float32.

    Raises:
        LayoutMismatchError: If the vector has another layout than the module.
        ValueError: If a coordinate does not fit into float32.
    """
    if vector.layout != layout_of(module):
        raise LayoutMismatchError("the vector does not have the layout of the model; nothing was loaded")
    if np.abs(vector.values).max() > np.finfo(np.float32).max:
        raise ValueError("expected coordinates that fit into float32, got a larger one")
    tensors = vector.layout.unflatten(vector)
    with torch.no_grad():
        for name, parameter in trainable_parameters(module).items():
            parameter.copy_(torch.from_numpy(tensors[name]))


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def check_model(module: nn.Module) -> None:
    """Refuses a model that would release more than noised parameters, or whose records would not be independent.

    Frozen parameters (`requires_grad=False`) are allowed: they are the client's copy of something public, they are not trained,
    and they are not in the layout. That nothing in a frozen parameter or elsewhere changes while records go through is for
    `privfed.training.memory.check_memory` to find, which runs the model.

    Raises:
        UnsupportedModelError: If a layer is of a kind that mixes records or has no gradient per record, or there is a buffer, a
            shared, empty, uninitialised or non-float32 parameter or one that is not on the CPU, or nothing to train.
    """
    for name, layer in module.named_modules():
        for kind, reason in _REFUSED_LAYERS:
            if isinstance(layer, kind):
                raise UnsupportedModelError(f"layer {name!r} is {type(layer).__name__}: {reason}; nothing was trained")
        if getattr(layer, "max_norm", None) is not None:
            raise UnsupportedModelError(
                f"layer {name!r} has a max_norm, so that it would move its weights by the records that go through, which no noise covers; "
                "leave it out; nothing was trained"
            )
    for name, _ in module.named_buffers():
        raise UnsupportedModelError(
            f"buffer {name!r} could carry raw data out of training; make it a frozen parameter if it is a public constant, and "
            "set track_running_stats=False if it is a running statistic; nothing was trained"
        )
    storages: set[int] = set()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if is_lazy(parameter):
            raise UnsupportedModelError(f"parameter {name!r} has no shape yet; run the model once first; nothing was trained")
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            raise UnsupportedModelError(
                f"parameter {name!r} is {parameter.dtype} on {parameter.device}; expected float32 on the CPU; nothing was trained"
            )
        if parameter.numel() == 0:
            raise UnsupportedModelError(f"parameter {name!r} is empty; remove it; nothing was trained")
        storage = parameter.untyped_storage().data_ptr()
        if storage in storages:
            raise UnsupportedModelError(
                f"parameter {name!r} shares its memory with another one; give every layer its own; nothing was trained"
            )
        storages.add(storage)
    for name, layer in module.named_modules():
        if any(getattr(layer, hooks) for hooks in _HOOKS):
            raise UnsupportedModelError(
                f"layer {name!r} has hooks, which may keep or mix what goes through; remove them, or do it in forward; nothing was trained"
            )
    layout_of(module)


def check_columns(module: nn.Module, columns: Sequence[str]) -> None:
    """Refuses a model that begins with a linear layer of another width than the data. Others are found out by running them.

    Args:
        module: The model.
        columns: Names of the feature columns. Public.

    Raises:
        UnsupportedModelError: If the widths differ; the message names both, and the columns.
    """
    first = module
    while isinstance(first, nn.Sequential) and len(first):
        first = first[0]
    if isinstance(first, nn.Linear) and first.in_features != len(columns):
        raise UnsupportedModelError(
            f"the model takes {first.in_features} columns, and the data have {len(columns)}: {', '.join(columns[:20])}"
            f"{', ...' if len(columns) > 20 else ''}; make a model for {len(columns)}, as mlp(inputs={len(columns)}) does, or take other "
            "columns; nothing was trained"
        )


def scores(module: nn.Module, vector: PlainVector, features: NDArray[np.float32]) -> NDArray[np.float32]:
    """What the model with these weights says about each row. Neither argument is changed.

    Args:
        module: The architecture; its own weights are ignored.
        vector: The weights.
        features: Rows to score, of shape (rows, columns). Scores of private rows are private.

    Returns:
        Raw outputs, before any sigmoid or softmax: of shape (rows,) for a model with one output, else (rows, outputs).

    Raises:
        LayoutMismatchError: If the vector has another layout than the module.
    """
    model = copy.deepcopy(module).eval()
    load_values(model, vector)
    with torch.inference_mode():
        parts = [model(rows) for rows in torch.tensor(features, dtype=torch.float32).split(_ROWS_AT_ONCE)]
    outputs: NDArray[np.float32] = torch.cat(parts).numpy()
    return outputs[:, 0] if outputs.ndim == 2 and outputs.shape[1] == 1 else outputs
