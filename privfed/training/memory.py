"""What a model and a loss remember: nothing may change from batch to batch but the trained weights.

A counter, a running mean or a frozen weight that moves carries one record into the gradients of others, later, where clipping no longer
bounds what that record does and no noise covers it. So a model and a loss are run on made-up records before anything is charged, and
compared with what they were; and after training they are compared again, before the update is given back. It finds mistakes. Code that
hides its state on purpose runs on the client's machine all the same, and could do worse.
"""

import array
import functools
import hashlib
import re
import types
from collections import deque
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from privfed.errors import UnsupportedModelError
from privfed.training.model import trainable_parameters
from privfed.training.probe import perturbed_copy, synthetic_records

# What torch keeps in every module for itself; hooks, which training adds, among it.
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}

# What training hangs on the layers of the model that it goes on with.
_ADDED_IN_TRAINING = re.compile(r"the model.*\.(forward|activations|autograd_grad_sample_hooks|ft_compute_sample_grad|max_batch_len)")

_BYTES = (bytes, bytearray, memoryview, array.array)
_OF_LIBRARIES = frozenset({"builtins", "torch", "functools", "collections", "typing", "abc", "enum", "random", "numpy"})
_CONTAINERS = (list, tuple, deque, set, frozenset, Mapping)

_Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def state_of(
    *, model: nn.Module, loss: _Loss, without: Collection[nn.Parameter] = (), since: Container[str] | None = None
) -> dict[str, str]:
    """Everything that a model and a loss hold, by where it is: tensors, arrays, numbers and texts, bit for bit.

    That is parameters and buffers, attributes of objects and of their classes, what is in containers and other objects, what a function
    closes over, and what an object without attributes would be copied by.

    Args:
        model: The model.
        loss: Loss per record.
        without: Parameters that are left out, because they may change.
        since: Places that were there before training; what training itself adds is left out. Left out, nothing is.

    Returns:
        A digest or the value itself for each. Private once private records went through.
    """
    skipped = {id(parameter) for parameter in without}
    known: set[int] = set()
    found: dict[str, str] = {}
    pending: list[tuple[str, object]] = [("the loss", loss), ("the model", model)]  # the last one first
    while pending:
        place, thing = pending.pop()
        if id(thing) in skipped or isinstance(thing, type | types.ModuleType):
            continue
        if since is not None and place not in since and _ADDED_IN_TRAINING.fullmatch(place):
            continue
        if isinstance(thing, torch.Tensor):
            found[place] = _bits_of(thing)
        elif isinstance(thing, np.ndarray) and not thing.dtype.hasobject:
            found[place] = f"{thing.dtype} {thing.shape} {hashlib.sha256(thing.tobytes()).hexdigest()}"
        elif isinstance(thing, _BYTES):
            found[place] = f"{type(thing).__name__} {len(thing)} {hashlib.sha256(thing).hexdigest()}"
        elif thing is None or isinstance(thing, bool | int | float | complex | str | np.generic | torch.dtype):
            found[place] = repr(thing)
        elif id(thing) in known:
            found[place] = "another name"
        else:
            known.add(id(thing))
            parts = list(_parts_of(thing))
            found[place] = f"{type(thing).__qualname__} of {len(thing)}" if isinstance(thing, _CONTAINERS) else type(thing).__qualname__
            pending.extend((f"{place}{name}", part) for name, part in reversed(parts))
    return found


def first_change(before: Mapping[str, str], after: Mapping[str, str]) -> str | None:
    """The first place that holds something else than before, nothing any more, or something new; None if there is none."""
    return next((place for place in (*before, *after) if before.get(place) != after.get(place)), None)


def check_memory(module: nn.Module, loss: _Loss, *, inputs: int) -> None:
    """Refuses a model or a loss that changes while records go through it. Runs forward and backward on made-up records.

    Args:
        module: The model. It is not changed. It is run in training mode.
        loss: The loss.
        inputs: Number of feature columns. Public.

    Raises:
        UnsupportedModelError: If anything in the model or the loss is not what it was, bit for bit, after a forward and a backward pass,
            trained and frozen parameters included; if the same records give other losses or gradients after others went through; or if
            there are no gradients.
    """
    model = perturbed_copy(module)
    features, labels = synthetic_records(inputs)
    before = state_of(model=model, loss=loss)
    first = _pass(model, loss, features, labels)
    after = state_of(model=model, loss=loss)
    _pass(model, loss, -3.0 * features.flip(0), labels.flip(0))
    again = _pass(model, loss, features, labels)
    changed = first_change(before, after)
    if changed is not None:
        raise UnsupportedModelError(
            f"{changed} changes while records go through, so that a record could act on the gradients of later ones, which no noise "
            "covers; take out counters, running statistics and whatever else is kept from batch to batch; nothing was trained"
        )
    if not torch.equal(first.view(torch.int32), again.view(torch.int32)):
        raise UnsupportedModelError(
            "model and loss treat the same records differently after others went through, so something is kept from batch to batch, or "
            "drawn from another generator; take it out; nothing was trained"
        )


def check_unchanged(before: Mapping[str, str], *, model: nn.Module, loss: _Loss, without: Collection[nn.Parameter]) -> None:
    """Refuses the outcome of a training in which something changed, or was added, that is not trained.

    Args:
        before: `state_of` model and loss at the start, without the trained parameters.
        model: The model as it is now. Private.
        loss: The loss.
        without: The trained parameters.

    Raises:
        UnsupportedModelError: If anything is not what it was, bit for bit. What training itself adds does not count.
    """
    changed = first_change(before, state_of(model=model, loss=loss, without=without, since=before))
    if changed is not None:
        raise UnsupportedModelError(
            f"{changed} changed in training although it is not trained, so that noise may not cover what records did; no update was "
            "made; what was charged stays charged; take out whatever is kept from batch to batch"
        )


def _pass(model: nn.Module, loss: _Loss, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    parameters = list(trainable_parameters(model).values())
    try:
        losses = loss(model(features), labels)
        gradients = torch.autograd.grad(losses.sum(), parameters, allow_unused=True, materialize_grads=True)
    except RuntimeError as error:
        raise UnsupportedModelError(
            "the losses of made-up records have no gradient; use inplace=False in all layers, and a loss that torch can differentiate; "
            "nothing was trained"
        ) from error
    return torch.cat([part.detach().float().reshape(-1) for part in (losses, *gradients)])


def _bits_of(tensor: torch.Tensor) -> str:
    about = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.requires_grad} {tensor.device}"
    if tensor.device.type == "meta":
        return about  # it has no bits
    strided = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    return f"{about} {hashlib.sha256(strided.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()}"


def _parts_of(thing: Any) -> Iterator[tuple[str, object]]:
    """What an object consists of, and how each part is called after the name of the object."""
    if isinstance(thing, np.ndarray):
        yield from ((f"[{number}]", part) for number, part in enumerate(thing.flat))
    elif isinstance(thing, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in thing.items())
    elif isinstance(thing, _CONTAINERS):
        yield from ((f"[{number}]", part) for number, part in enumerate(thing))
    elif isinstance(thing, functools.partial):
        yield from ((f".{name}", getattr(thing, name)) for name in ("func", "args", "keywords"))
    elif isinstance(thing, types.MethodType):
        yield from ((f".{name}", getattr(thing, name)) for name in ("__self__", "__func__"))
    elif isinstance(thing, types.FunctionType):
        yield ".__defaults__", thing.__defaults__
        yield ".__kwdefaults__", thing.__kwdefaults__
        for name, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True):
            yield f", its {name}", cell.cell_contents
    elif isinstance(thing, nn.Module):
        yield from ((f".{name}", part) for group in (thing._parameters, thing._buffers, thing._modules) for name, part in group.items())
    yield from _attributes_of(thing)


def _attributes_of(thing: Any) -> Iterator[tuple[str, object]]:
    attributes: Mapping[str, object] | None = getattr(thing, "__dict__", None)
    ignored = _OF_TORCH if isinstance(thing, nn.Module) else frozenset[str]()
    yield from ((f".{name}", part) for name, part in (attributes or {}).items() if name not in ignored)
    slotted = False
    for kind in type(thing).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            slotted = True
            if hasattr(thing, name) and name not in {"__dict__", "__weakref__"}:
                yield f".{name}", getattr(thing, name)
        if kind.__module__.partition(".")[0] not in _OF_LIBRARIES:
            yield from ((f", its class's {name}", part) for name, part in vars(kind).items() if _is_data(name, part))
    if attributes is None and not slotted and not isinstance(thing, _CONTAINERS):
        yield ", copied", _copied_by(thing)


def _is_data(name: str, part: object) -> bool:
    """Whether something in a class is neither code nor what Python itself puts there."""
    return not name.startswith("__") and not callable(part) and not hasattr(type(part), "__get__")


def _copied_by(thing: Any) -> object:
    """What a counter, a generator of numbers or another object from C is copied by; None for one that cannot be."""
    try:
        return thing.__reduce_ex__(4)
    except (TypeError, ValueError, NotImplementedError):
        return None
