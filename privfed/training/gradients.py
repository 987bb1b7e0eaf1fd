"""The clipped sum of a batch: what decides the sensitivity of DP-SGD, and how it is computed for linear networks.

The model runs in float32, and so does the derivative of each record's loss. From there on everything is float64: the norm of each
record's gradient, its clipping, and the sum. `BookKeeping` gets there without ever writing down the gradient of a record.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from privfed.errors import UnsupportedModelError
from privfed.training.loss import PerSampleLoss

# A gradient beyond the range of float32 would have been infinite, had it been written down.
_LARGEST_NORM = torch.finfo(torch.float32).max
# Numbers that a pass may hold for its records, 128 MB; more records are several passes.
_NUMBERS_PER_PASS = 2**24
_RECORDS_PER_PASS = 4096


def clip_factors(norms: torch.Tensor, *, max_grad_norm: float) -> torch.Tensor:
    """What each gradient is multiplied by, so that its norm is at most `max_grad_norm` and no gradient becomes longer.

    Args:
        norms: Norms of the gradients, of shape (records,), float64, finite. Private.
        max_grad_norm: The bound.

    Returns:
        Factors of shape (records,), float64, above 0 and at most 1. Private.
    """
    return max_grad_norm / norms.clamp(min=max_grad_norm)


def zero_broken(norms: torch.Tensor, tensors: Sequence[torch.Tensor]) -> int:
    """Makes zero, in place, what belongs to gradients that are NaN, infinite or beyond the range of float32.

    Args:
        norms: Norms of the gradients, of shape (records,). Private.
        tensors: What the gradients consist of, each with the records first. Private.

    Returns:
        How many gradients that were. Private.
    """
    if float(norms.max()) <= _LARGEST_NORM:  # the largest is NaN if one is
        return 0
    broken = ~(norms <= _LARGEST_NORM)
    # Scaling by zero would not do: zero times NaN is NaN.
    for tensor in (norms, *tensors):
        tensor[broken] = 0.0
    return int(broken.count_nonzero())


class ClippedGradients(ABC):
    """Sums of clipped gradients, one record at a time or in any other way that gives the same.

    Args:
        parameters: The trained parameters, in the order of the layout.
        max_grad_norm: Bound on the norm that one record's gradient has in a sum.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, max_grad_norm: float) -> None:
        self.max_grad_norm = max_grad_norm
        self._sizes = [parameter.numel() for parameter in parameters]

    @property
    def size(self) -> int:
        """Number of coordinates of a gradient."""
        return sum(self._sizes)

    @property
    @abstractmethod
    def numbers_per_record(self) -> int:
        """Numbers that a pass holds for each of its records, roughly."""

    @abstractmethod
    def of_records(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The gradient of each record before clipping, of shape (records, size). Only for checks: it holds them all at once."""

    @abstractmethod
    def _add(self, features: torch.Tensor, labels: torch.Tensor, total: torch.Tensor) -> int:
        """Adds the clipped gradients of one pass to `total`; returns how many of them were zeroed."""

    def sum(self, features: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The sum of the records' gradients, each scaled to a norm of at most max_grad_norm over all parameters together.

        A large batch takes several passes, of records enough to fit into memory. They are summed here, before anything else can
        happen to them: there is no half of a batch that a later step could pick up.

        Args:
            features: Of shape (records, columns), float32; possibly no record. Private.
            labels: Of shape (records,). Private.

        Returns:
            The sum, of shape (size,), float64, and how many gradients count as zero in it, because they are NaN or infinite. Private.

        Raises:
            UnsupportedModelError: If the model does something else with these records than with those of `check`.
        """
        total = torch.zeros(self.size, dtype=torch.float64)
        records = len(features)
        if not records:
            return total, 0
        most = max(1, min(_RECORDS_PER_PASS, _NUMBERS_PER_PASS // self.numbers_per_record))
        zeroed = 0
        for part, part_labels in zip(*(whole.tensor_split(-(-records // most)) for whole in (features, labels)), strict=True):
            zeroed += self._add(part, part_labels, total)
        return total, zeroed


class BookKeeping(ClippedGradients):
    """For models whose trained parameters are weights and biases of `nn.Linear` layers, each used once.

    The gradient of a record at such a layer is the product of what went in, a, and the derivative by what came out, g. So its squared
    norm is |g|^2 (|a|^2 + 1), and a sum of scaled gradients is one matrix product (Bu et al., 2023, "Differentially private
    optimization on large model at small cost", section 3). Nothing of the size of a gradient is held per record.

    Args:
        model: The model; it gets hooks that stay.
        layers: Its `linear_layers`.
        parameters: Its trained parameters, in the order of the layout.
        loss: Loss per record.
        max_grad_norm: Bound on the norm that one record's gradient has in a sum.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        layers: Sequence[nn.Linear],
        parameters: Sequence[nn.Parameter],
        loss: PerSampleLoss,
        max_grad_norm: float,
    ) -> None:
        super().__init__(parameters, max_grad_norm=max_grad_norm)
        self._model = model
        self._loss = loss
        self._layers = layers
        place = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._places = [(place[id(layer.weight)], place.get(id(layer.bias))) for layer in layers]
        self._biases = torch.tensor([[0.0 if bias is None else 1.0] for _, bias in self._places], dtype=torch.float64)
        self._seen: dict[nn.Module, tuple[torch.Tensor, torch.Tensor]] = {}
        for layer in layers:
            layer.register_forward_hook(self._see)

    @property
    def numbers_per_record(self) -> int:
        return 4 * sum(layer.in_features + layer.out_features for layer in self._layers)

    def of_records(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._write_down(*self._run(features, labels)), dim=1)

    def _write_down(self, inputs: Sequence[torch.Tensor], derivatives: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients of each record, one tensor of shape (records, numel) per parameter; empty for those of other layers."""
        rows = [torch.empty(0)] * len(self._sizes)
        for (weight, bias), a, g in zip(self._places, inputs, derivatives, strict=True):
            rows[weight] = (g[:, :, None] * a[:, None, :]).flatten(start_dim=1)
            if bias is not None:
                rows[bias] = g
        return rows

    def _add(self, features: torch.Tensor, labels: torch.Tensor, total: torch.Tensor) -> int:
        inputs, derivatives = ([tensor.double() for tensor in tensors] for tensors in self._run(features, labels))
        norms = self._squared_norms(inputs, derivatives).sqrt_()
        zeroed = zero_broken(norms, [*inputs, *derivatives])
        self._add_products(inputs, derivatives, clip_factors(norms, max_grad_norm=self.max_grad_norm), total.split(self._sizes))
        return zeroed

    def _squared_norms(self, inputs: Sequence[torch.Tensor], derivatives: Sequence[torch.Tensor]) -> torch.Tensor:
        """Of the part of each gradient that belongs to the layers, of shape (records,)."""
        of_inputs, of_derivatives = (
            torch.stack([torch.linalg.vector_norm(tensor, dim=1) for tensor in tensors]).square_() for tensors in (inputs, derivatives)
        )
        return of_inputs.add_(self._biases).mul_(of_derivatives).sum(dim=0)

    def _add_products(
        self, inputs: Sequence[torch.Tensor], derivatives: Sequence[torch.Tensor], factors: torch.Tensor, sums: Sequence[torch.Tensor]
    ) -> None:
        """Adds the scaled gradients of the layers to the sums of their parameters. Scales inputs or derivatives in place."""
        for (weight, bias), a, g in zip(self._places, inputs, derivatives, strict=True):
            if bias is not None:
                sums[bias].add_(factors @ g)
            # Whichever is narrower is scaled, and comes first in the product, because BLAS likes it so.
            if a.shape[1] < g.shape[1]:
                sums[weight].view(g.shape[1], a.shape[1]).add_((a.mul_(factors[:, None]).T @ g).T)
            else:
                sums[weight].view(g.shape[1], a.shape[1]).addmm_(g.mul_(factors[:, None]).T, a)

    def _run(self, features: torch.Tensor, labels: torch.Tensor) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """What goes into each layer, and the derivative of the records' losses by what comes out."""
        loss, inputs, outputs = self._forward(features, labels)
        return inputs, torch.autograd.grad(loss, outputs)

    def _forward(self, features: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """The sum of the losses, and what goes into each layer and comes out."""
        self._seen.clear()
        losses = self._loss(self._model(features), labels)
        seen = [self._seen[layer] for layer in self._layers if layer in self._seen]
        self._seen.clear()
        if len(seen) < len(self._layers) or any(len(went_in) != len(features) for went_in, _ in seen):
            raise UnsupportedModelError("the model left out a layer, or a record; no update was made")
        return losses.sum(), [went_in for went_in, _ in seen], [came_out for _, came_out in seen]

    def _see(self, layer: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        if layer in self._seen or inputs[0].ndim != 2:
            raise UnsupportedModelError("the model uses a layer twice, or not once per record; no update was made")
        self._seen[layer] = inputs[0].detach(), output


class ReluNetworkBookKeeping(BookKeeping):
    """For a `relu_network`: the same without autograd, which costs a small model much."""

    def _run(self, features: torch.Tensor, labels: torch.Tensor) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        inputs = [features]
        with torch.no_grad():
            for layer in self._layers[:-1]:
                inputs.append(torch.relu_(functional.linear(inputs[-1], layer.weight, layer.bias)))
            outputs = functional.linear(inputs[-1], self._layers[-1].weight, self._layers[-1].bias)
        derivatives = [torch.autograd.grad(self._loss(outputs.requires_grad_(), labels).sum(), outputs)[0]]
        with torch.no_grad():
            for layer, after in zip(self._layers[:0:-1], inputs[:0:-1], strict=True):
                derivatives.append(torch.ops.aten.threshold_backward(derivatives[-1] @ layer.weight, after, 0))
        return inputs, derivatives[::-1]


def linear_layers(model: nn.Module, *, features: torch.Tensor) -> list[nn.Linear]:
    """The layers that `BookKeeping` can serve: `nn.Linear`, nothing derived from it, all of it trained, each used once.

    Args:
        model: The model. It is not changed.
        features: Made-up records, of shape (records, columns), that show what the model does with each layer.
    """
    candidates = [
        layer
        for layer in model.modules()
        if type(layer) is nn.Linear and layer._parameters.keys() == {"weight", "bias"} and all(p.requires_grad for p in layer.parameters())
    ]
    shapes: dict[nn.Module, list[torch.Size]] = {layer: [] for layer in candidates}
    handles = [
        layer.register_forward_hook(lambda used, inputs, _output: shapes[used].append(inputs[0].shape[:-1])) for layer in candidates
    ]
    try:
        model(features)
    finally:
        for handle in handles:
            handle.remove()
    return [layer for layer in candidates if shapes[layer] == [features.shape[:1]]]


def relu_network(model: nn.Module) -> bool:
    """Whether a model is an `nn.Sequential` of `nn.Linear` and `nn.ReLU` in turn."""
    if type(model) is not nn.Sequential:
        return False
    kinds = [type(layer) for layer in model]
    return kinds == [*([nn.Linear, nn.ReLU] * (len(kinds) // 2)), nn.Linear]
