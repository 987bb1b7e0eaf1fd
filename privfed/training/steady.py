"""Whether a record's gradient is the same, bit for bit, wherever in a batch the record stands and whatever stands beside it.

Products of matrices round a row by the way in which its place is computed: BLAS takes other instructions for the last rows, for narrow
results, for small products, and for memory that is not aligned. Usually that is one bit of float32. Where the bit decides on which side
of a kink (ReLU) a record falls, it is another gradient, and records can be made to fall there: then one more record, which moves the
others by a place, moves the sum by more than its own gradient.

So passes have whole blocks of `ROWS` records, narrow layers are widened with zeros, and torch gets one thread. Whether that is enough on
this machine is checked for every shape of pass that can occur: how a row is computed depends on its place and on the shape, and never
on what is in the matrices.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType

import torch
from torch import nn
from torch.nn import functional

ROWS = 64
"""A pass has a multiple of as many rows; those beyond its records are there for the shape alone."""

_NARROWEST = 16
_RECORDS = 61  # no divisor of the sizes in which rows are computed together

Pieces = Callable[[torch.Tensor, torch.Tensor], Sequence[torch.Tensor]]
"""From features and labels to what the gradients of these records consist of, each with the records first."""


def filled_up(records: torch.Tensor, rows: int) -> torch.Tensor:
    """A copy of the records, and the first one again until there are `rows` of them.

    A copy, because products of rows that lie elsewhere in memory, beside a multiple of 64 bytes, are rounded in yet another way.

    Args:
        records: Of shape (records, ...), at least one. Private.
        rows: At least as many.
    """
    return torch.cat([records, records[:1].expand(rows - len(records), *records.shape[1:])])


def wide_enough(width: int) -> int:
    """The width that a layer of so many outputs is widened to. A single one is a product with a vector, which has its own instructions."""
    return width if width == 1 else max(width, _NARROWEST)


def widen_narrow_layers(model: nn.Module) -> None:
    """Has every narrow `nn.Linear` of a model compute its products with more columns, of zeros, and give back those that it has.

    Args:
        model: Changed in place; its parameters stay the same.
    """
    for layer in model.modules():
        if type(layer) is nn.Linear and any(wide_enough(width) > width for width in (layer.in_features, layer.out_features)):
            layer.forward = MethodType(_widened, layer)


def widened(tensor: torch.Tensor, *widths: int) -> torch.Tensor:
    """The tensor with zeros behind what it has, so that its last dimensions are `widths`."""
    missing = [width - size for width, size in zip(widths, tensor.shape[-len(widths) :], strict=True)]
    return functional.pad(tensor, [part for width in reversed(missing) for part in (0, width)]) if any(missing) else tensor


@contextmanager
def one_thread() -> Iterator[None]:
    """Has torch compute with one thread inside: several share out a product in ways of which some round by the place of a row."""
    threads = torch.get_num_threads()
    if threads > 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if threads > 1:
            torch.set_num_threads(threads)


def awake_copy(module: nn.Module) -> nn.Module:
    """A copy in training mode with weights of its own, frozen ones too, in which neurons fire: one that never does would hide its sum."""
    model = copy.deepcopy(module).train()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            spread = math.sqrt(6 / max(1, parameter[0].numel())) if parameter.ndim > 1 else 0.02
            digits = (
                torch.arange(parameter.numel(), dtype=torch.float64)
                .add_(1)
                .mul_(math.sqrt(5) / 2 + number * math.sqrt(2))
                .frac_()
                .sub_(0.5)
            )
            parameter.copy_(digits.mul_(spread).view_as(parameter))
    return model


def unlike_records(inputs: int, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Made-up records whose digits are all unlike each other, then the same ones negated, as `is_steady` takes them, and labels.

    Args:
        inputs: Number of columns.
        labels: Some that the loss takes.
    """
    digits = torch.arange(_RECORDS * inputs, dtype=torch.float64).add_(1).mul_((math.sqrt(5) - 1) / 2).frac_()
    features = digits.mul_(2).sub_(1).view(_RECORDS, inputs).float()
    return torch.cat([features, -features]), labels[torch.arange(2 * _RECORDS) % len(labels)]


def is_steady(pieces: Pieces, features: torch.Tensor, labels: torch.Tensor, *, shapes: Sequence[int]) -> bool:
    """Whether records are treated alike at every place of passes of all these shapes.

    Args:
        pieces: What is checked.
        features: Of `unlike_records`: a neuron that is dead on a record fires on its negative, mostly.
        labels: Of shape (records,).
        shapes: Numbers of rows.
    """
    alone = [[piece[:1] for piece in pieces(features[[record] * shapes[0]], labels[[record] * shapes[0]])] for record in range(len(labels))]
    expected = [torch.cat(parts) for parts in zip(*alone, strict=True)]
    for number, rows in enumerate(shapes):
        for first in (0, _RECORDS):
            order = (torch.arange(rows) + number) % _RECORDS + first
            for piece, known in zip(pieces(features[order], labels[order]), expected, strict=True):
                if not torch.equal(piece.nan_to_num(), known[order].nan_to_num()):
                    return False
    return True


def _widened(layer: nn.Linear, features: torch.Tensor) -> torch.Tensor:
    inputs, outputs = wide_enough(layer.in_features), wide_enough(layer.out_features)
    bias = None if layer.bias is None else widened(layer.bias, outputs)
    result = functional.linear(widened(features, inputs), widened(layer.weight, outputs, inputs), bias)
    return result[..., : layer.out_features]
