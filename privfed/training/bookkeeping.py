"""Clipped sums without a gradient of any record, for linear layers: book-keeping."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from privfed.errors import UnsupportedModelError
from privfed.training.gradients import ClippedGradients, clip_factors, zero_broken
from privfed.training.loss import PerSampleLoss, derivative_of, unchecked
from privfed.training.steady import wide_enough, widened


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
        return torch.cat(self._write_down(self._pieces_of(features, labels)), dim=1)

    def _write_down(self, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients of each record, one tensor of shape (records, numel) per parameter; empty for those of other layers."""
        rows = [torch.empty(0)] * len(self._sizes)
        for (weight, bias), a, g in zip(self._places, *self._of_layers(pieces), strict=True):
            rows[weight] = (g[:, :, None] * a[:, None, :]).flatten(start_dim=1)
            if bias is not None:
                rows[bias] = g
        return rows

    def _of_layers(self, pieces: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Of the pieces, what goes into each layer, and the derivatives of the records' losses by what comes out."""
        layers = len(self._layers)
        return pieces[:layers], pieces[layers : 2 * layers]

    def _pieces(self, features: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
        loss, inputs, outputs = self._forward(features, labels)
        return [*inputs, *torch.autograd.grad(loss, outputs)]

    def _add(self, pieces: list[torch.Tensor], total: torch.Tensor) -> tuple[torch.Tensor, int]:
        inputs, derivatives = self._of_layers([piece.double() for piece in pieces])
        norms = self._squared_norms(inputs, derivatives).sqrt_()
        zeroed = zero_broken(norms, [*inputs, *derivatives])
        self._add_products(inputs, derivatives, clip_factors(norms, max_grad_norm=self.max_grad_norm), total.split(self._sizes))
        return norms, zeroed

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
                sums[bias].addmv_(g.T, factors)
            place = sums[weight].view(g.shape[1], a.shape[1])
            # Whichever is narrower is scaled, and comes first in the product, because BLAS likes it so.
            if a.shape[1] < g.shape[1]:
                place.T.addmm_(a.mul_(factors[:, None]).T, g)
            else:
                place.addmm_(g.mul_(factors[:, None]).T, a)

    def _forward(self, features: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """The sum of the losses, and what goes into each layer and comes out."""
        self._seen.clear()
        losses = unchecked(self._loss)(self._model(features), labels)
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

    def _pieces(self, features: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
        inputs, derivatives = self._run_with([(layer.weight, layer.bias) for layer in self._layers], features, labels)
        return [*inputs, *derivatives]

    def _run_with(
        self, weights: Sequence[tuple[torch.Tensor, torch.Tensor | None]], features: torch.Tensor, labels: torch.Tensor
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        widths = [layer.out_features for layer in self._layers]
        sizes = [wide_enough(width) for width in widths]
        with torch.no_grad():
            if sizes == widths:
                return self._run_steadily(weights, features, labels)
            wide = [
                (widened(weight, outputs, taken), None if bias is None else widened(bias, outputs))
                for (weight, bias), taken, outputs in zip(weights, [features.shape[1], *sizes], sizes, strict=False)
            ]
            inputs, derivatives = self._run_steadily(wide, features, labels)
        taken = [tensor[:, : layer.in_features] for tensor, layer in zip(inputs, self._layers, strict=True)]
        return taken, [tensor[:, :width] for tensor, width in zip(derivatives, widths, strict=True)]

    def _run_steadily(
        self, weights: Sequence[tuple[torch.Tensor, torch.Tensor | None]], features: torch.Tensor, labels: torch.Tensor
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        inputs = [features]
        for weight, bias in weights[:-1]:
            inputs.append(functional.linear(inputs[-1], weight, bias).relu())
        outputs = functional.linear(inputs[-1], *weights[-1])
        derivatives = [widened(derivative_of(self._loss)(outputs[:, : self._layers[-1].out_features], labels), outputs.shape[1])]
        for (weight, _), after in zip(weights[:0:-1], inputs[:0:-1], strict=True):
            derivatives.append(torch.ops.aten.threshold_backward(derivatives[-1] @ weight, after, 0))
        return inputs, derivatives[::-1]


def linear_layers(model: nn.Module, *, features: torch.Tensor) -> list[nn.Linear]:
    """The layers that `BookKeeping` can serve: `nn.Linear`, nothing derived from it, all of it trained, each used once.

    Layers within a module that has trained parameters of its own are not among them: Opacus treats such a module as a whole.

    Args:
        model: The model. It is not changed.
        features: Made-up records, of shape (records, columns), that show what the model does with each layer.
    """
    whole = {part for module in model.modules() if _own_trained(module) for part in module.modules() if part is not module}
    candidates = [
        layer
        for layer in model.modules()
        if type(layer) is nn.Linear
        and layer not in whole
        and layer._parameters.keys() == {"weight", "bias"}
        and all(parameter.requires_grad for parameter in layer.parameters())
    ]
    shapes: dict[nn.Module, list[torch.Size]] = {layer: [] for layer in candidates}
    handles = [layer.register_forward_hook(lambda used, inputs, _output: shapes[used].append(inputs[0].shape[:-1])) for layer in candidates]
    try:
        model(features)
    finally:
        for handle in handles:
            handle.remove()
    return [layer for layer in candidates if shapes[layer] == [features.shape[:1]]]


def relu_network(model: nn.Module, *, layers: Sequence[nn.Linear]) -> bool:
    """Whether a model is an `nn.Sequential` of `nn.Linear` and `nn.ReLU` in turn, with these and no other `nn.Linear`."""
    if type(model) is not nn.Sequential:
        return False
    kinds = [type(layer) for layer in model]
    return kinds == [*([nn.Linear, nn.ReLU] * (len(kinds) // 2)), nn.Linear] and [*model][::2] == list(layers)


def _own_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters(recurse=False))
