"""The sum of book-keeping as one compiled function of fixed shape, for long runs of small models.

A step spends less between its operations, and its norms and sums are float32, the sums within blocks of 64 records only. The noise is
larger by as much as this rounding can move a sum: by 1.2 percent for batches of 512 and layers of 128 and 64. Batches that do not fit,
and those with a gradient that is NaN or infinite, or with numbers that float32 could not square without losing digits that matter, are
clipped and summed in float64. What the gradients consist of comes from the compiled function all the same: a record's gradient does
not depend on which way its batch takes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from privfed.errors import UnsupportedModelError
from privfed.training.bookkeeping import ReluNetworkBookKeeping, linear_layers, relu_network
from privfed.training.gradients import ClippedSum, clip_factors
from privfed.training.loss import PerSampleLoss
from privfed.training.mechanism import DpSgd, TrainingMechanism
from privfed.training.model import layout_of, trainable_parameters
from privfed.training.probe import perturbed_copy, synthetic_records
from privfed.training.steady import filled_up, one_thread
from privfed.update import Layout

_BLOCK = 64
_UNIT = 2.0**-24  # relative rounding error of a float32 operation
# Beyond, the noise would grow by several percent, and there is little left to gain.
_LARGEST_CAPACITY = 1024

_EXTREME_NORM = 2.0**20
# The square of a float32 may be 0 or infinite where the number is neither. Below 2^-126, torch may lose all digits, so a square is off by
# as much. While what goes into a layer, the derivatives by what comes out, and the gradients are no longer than 2^40 times the bound C, a
# square is multiplied by 2^80 C^2 at most, and that of a norm is off by 2^-46 C^2 per neuron: nothing beside its rounding. No factor is
# below 2^-40 then, and what is lost where a derivative is multiplied by it, 2^-126 times an input, is nothing either.
_LONGEST = 2.0**40

_Sum = Callable[..., tuple[torch.Tensor, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledSum:
    """What `compile_sum` makes: the same for every round, and for every client that trains the same model alike. Public.

    Args:
        layout: Layout of the model that it is for.
        loss: Loss per record.
        max_grad_norm: Bound on the norm that one record's gradient has in a sum.
        capacity: Most records that a pass takes.
        function: The compiled function.
    """

    layout: Layout
    loss: PerSampleLoss
    max_grad_norm: float
    capacity: int
    function: _Sum = field(repr=False)


def compile_sum(module: nn.Module, *, mechanism: DpSgd, loss: PerSampleLoss, inputs: int) -> CompiledSum:
    """Compiles the clipped sum for a model; it takes 10 to 30 seconds, and a C++ compiler.

    Args:
        module: An `nn.Sequential` of `nn.Linear` and `nn.ReLU` in turn, all of it trained. It is not changed.
        mechanism: How it is trained.
        loss: Loss per record. One from elsewhere must not look at values, as Python's `if` does.
        inputs: Number of feature columns.

    Raises:
        UnsupportedModelError: If it is another model, its batches are too large to gain anything, or it cannot be compiled.
        ValueError: If its clipping norm is not fixed, or not from 2^-20 to 2^20.
    """
    if mechanism.adaptive_clipping is not None:
        raise ValueError("expected a fixed clipping norm to compile, got adaptive_clipping; nothing was compiled")
    expected = mechanism.record_limit * mechanism.sample_rate
    capacity = _BLOCK * math.ceil((expected + 2.5 * math.sqrt(expected)) / _BLOCK)
    model = perturbed_copy(module)
    features, labels = synthetic_records(inputs)
    layers = linear_layers(model, features=features)
    if not relu_network(model, layers=layers):
        raise UnsupportedModelError("expected nn.Linear and nn.ReLU in turn, as `mlp` makes them; nothing was compiled")
    if not 1 / _EXTREME_NORM <= mechanism.max_grad_norm <= _EXTREME_NORM:
        raise ValueError(f"expected max_grad_norm from 2^-20 to 2^20 to compile, got {mechanism.max_grad_norm}; nothing was compiled")
    if capacity > _LARGEST_CAPACITY:
        raise UnsupportedModelError(
            f"a pass of {capacity} records gains nothing from being compiled; go without, or declare smaller batches; nothing was compiled"
        )
    parameters = list(trainable_parameters(model).values())
    traced = _Traced(model, layers=layers, parameters=parameters, loss=loss, max_grad_norm=mechanism.max_grad_norm)
    padded = torch.arange(capacity) % len(labels)
    example = (features[padded], labels[padded], torch.ones(capacity), *(parameter.detach() for parameter in parameters))
    try:
        with one_thread(), torch.no_grad():
            function = torch.compile(make_fx(traced.clipped_sum)(*example).forward, dynamic=False, options={"cpp_wrapper": True})
            function(*example)
    except (RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModelError("torch.compile fails on this model and loss; go without; nothing was compiled") from error
    return CompiledSum(layout=layout_of(module), loss=loss, max_grad_norm=mechanism.max_grad_norm, capacity=capacity, function=function)


def check_compiled(compiled: CompiledSum, *, layout: Layout, loss: PerSampleLoss, mechanism: TrainingMechanism) -> None:
    """Refuses a sum that was compiled for something else than a training.

    Raises:
        ValueError: If it was, or if torch was told to round products to less than float32.
    """
    if isinstance(mechanism, DpSgd) and mechanism.adaptive_clipping is not None:
        raise ValueError("expected a fixed clipping norm for a compiled sum, got adaptive_clipping; go without either; nothing was trained")
    if not isinstance(mechanism, DpSgd) or (compiled.layout, compiled.loss, compiled.max_grad_norm) != (
        layout,
        loss,
        mechanism.max_grad_norm,
    ):
        raise ValueError("expected DpSgd and a sum compiled for this model, loss and max_grad_norm, got another; nothing was trained")
    if torch.get_float32_matmul_precision() != "highest":
        raise ValueError("expected products of full precision; call torch.set_float32_matmul_precision('highest'); nothing was trained")


class CompiledBookKeeping(ReluNetworkBookKeeping):
    """The sums of a model through a `CompiledSum`.

    Args:
        model: The model.
        layers: All its `nn.Linear`.
        parameters: Its trained parameters, in the order of the layout; moved in place.
        compiled: What was compiled for such a model.
    """

    def __init__(self, model: nn.Module, *, layers: Sequence[nn.Linear], parameters: Sequence[nn.Parameter], compiled: CompiledSum) -> None:
        super().__init__(model, layers=layers, parameters=parameters, loss=compiled.loss, max_grad_norm=compiled.max_grad_norm)
        self._compiled = compiled
        self._tensors = [parameter.detach() for parameter in parameters]
        self._ones_and_zeros = torch.cat([torch.ones(compiled.capacity), torch.zeros(compiled.capacity)])
        self._longest = _LONGEST * compiled.max_grad_norm
        self.rounding = 2 * compiled.capacity * _rounding_per_record(layers)

    @property
    def shapes(self) -> Sequence[int]:
        return (self._compiled.capacity,)

    def _at_once(self, features: torch.Tensor, labels: torch.Tensor, count: int | None) -> ClippedSum | None:
        rows = self._compiled.capacity
        if count is None and 0 < len(features) <= rows:
            features, labels, count = filled_up(features, rows), filled_up(labels, rows), len(features)
        if count is None or len(features) != rows:
            return None
        total, norms, longest, *_ = self._run(features, labels, count)
        return ClippedSum(total, norms[:count], 0) if float(longest) <= self._longest else None  # not if it is NaN

    def _pieces(self, features: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
        rows = self._compiled.capacity
        _, _, _, *pieces = self._run(filled_up(features, rows), filled_up(labels, rows), len(features))
        return [piece[: len(features)] for piece in pieces]

    def _run(self, features: torch.Tensor, labels: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
        # What follows the records is one of them again: what it gives is finite if the record is, and then it is multiplied by zero.
        rows = self._compiled.capacity
        return self._compiled.function(features, labels, self._ones_and_zeros[rows - count : 2 * rows - count], *self._tensors)


def _rounding_per_record(layers: Sequence[nn.Linear]) -> float:
    """How far a sum may be from that of exactly clipped gradients, per record in it and in units of `max_grad_norm`.

    A sum of k terms, in whatever order, is off by at most k units of the sum of their sizes (Higham, 2002, section 3.1). The norm is the
    root of such a sum, over what goes into a layer and comes out, and over the layers. A record enters its block with it.
    """
    norm = (max(layer.in_features + layer.out_features for layer in layers) + len(layers) + 2) / 2 + 3
    return (norm + _BLOCK + 2) * _UNIT


class _Traced(ReluNetworkBookKeeping):
    def clipped_sum(
        self, features: torch.Tensor, labels: torch.Tensor, kept: torch.Tensor, *parameters: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """The sum of the records with 1 in `kept`, of shape (size,), float64, the norms of all, of shape (records,), the longest, pieces.

        The longest is the largest norm of a gradient, of what goes into a layer, or of a derivative by what comes out; NaN if one is.
        """
        weights = [(parameters[weight], None if bias is None else parameters[bias]) for weight, bias in self._places]
        inputs, derivatives = self._run_with(weights, features, labels)
        squares, longest = torch.zeros(len(features)), torch.zeros(len(features))
        for (_, bias), a, g in zip(self._places, inputs, derivatives, strict=True):
            of_inputs, of_derivatives = a.square().sum(dim=1), g.square().sum(dim=1)
            squares = squares + of_derivatives * (of_inputs + (0.0 if bias is None else 1.0))
            longest = longest.maximum(of_inputs).maximum(of_derivatives)
        norms = squares.sqrt()
        factors = kept * clip_factors(norms, max_grad_norm=self.max_grad_norm)
        parts: list[torch.Tensor] = [norms] * len(parameters)
        for (weight, bias), a, g in zip(self._places, inputs, derivatives, strict=True):
            scaled, of_inputs = (g * factors[:, None]).view(-1, _BLOCK, g.shape[1]), a.view(-1, _BLOCK, a.shape[1])
            # The narrower one comes first in the product, because BLAS likes it so.
            if a.shape[1] < g.shape[1]:
                summed = torch.bmm(of_inputs.transpose(1, 2), scaled).sum(dim=0, dtype=torch.float64).T
            else:
                summed = torch.bmm(scaled.transpose(1, 2), of_inputs).sum(dim=0, dtype=torch.float64)
            parts[weight] = summed.flatten()
            if bias is not None:
                parts[bias] = scaled.sum(dim=1).sum(dim=0, dtype=torch.float64)
        return torch.cat(parts), norms, longest.maximum(squares).amax().sqrt(), *inputs, *derivatives
