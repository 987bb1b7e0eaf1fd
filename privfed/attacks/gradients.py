"""What an attack by optimisation compares: the gradient behind an update, and the gradients of guessed records on the same model.

The architecture is public. All guesses of all restarts are computed at once, in float32, with the model before the round.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from privfed.attacks.facts import AdaptiveOptimizer, BinaryLoss, SoftmaxLoss
from privfed.attacks.observation import NotApplicable, Observation, gradient_part
from privfed.errors import LayoutMismatchError
from privfed.training.model import layout_of, load_values, trainable_parameters

# Float32 gradients of the same record differ by some 1e-6 of their length; below this share nothing is gained.
_REACHED = 1e-3


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TargetGradient:
    """The mean gradient of a batch as an update shows it, and the means to compare guesses with it. Private.

    Args:
        values: Gradient averaged over records, steps and clients, of shape (parameters,), float32.
        deviation: Standard deviation of the known noise on each of its coordinates; 0 without noise.
        errors: Standard deviation of noise and rounding together, of shape (parameters,), above 0.
        module: The model before the round.
        loss: What each client minimises.
        size: Number of records behind each step's gradient, rounded, at least 1.
        max_grad_norm: Bound that each record's gradient was clipped to; None if it was not.
    """

    values: torch.Tensor
    deviation: float
    errors: torch.Tensor
    module: nn.Module
    loss: BinaryLoss | SoftmaxLoss
    size: int
    max_grad_norm: float | None

    @property
    def tolerance(self) -> float:
        """How far the right records may be off in a coordinate: the known noise, or what an optimiser reaches where there is none."""
        return max(self.deviation, _REACHED * (self.max_grad_norm or float(self.values.norm())) / self.size)

    def of_batches(self, rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean gradients of several batches as the client makes them, of shape (batches, parameters). Differentiable.

        Args:
            rows: Of shape (batches, records, ...), float32.
            labels: Class indices of shape (batches, records).
        """
        if self.max_grad_norm is None:
            return self._unclipped(rows, labels)
        return self.of_records(rows.flatten(0, 1), labels.flatten()).unflatten(0, labels.shape).mean(dim=1)

    def of_batch(self, rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean gradient of one batch as the client makes it, of shape (parameters,). Differentiable, and faster than `of_batches`.

        Args:
            rows: Of shape (records, ...), float32.
            labels: Class indices of shape (records,).
        """
        if self.max_grad_norm is not None and len(labels) > 1:
            return self.of_records(rows, labels).mean(dim=0)
        gradients = grad(self._mean_loss)(self._parameters(), rows, labels)
        joined = torch.cat([gradient.flatten() for gradient in gradients.values()])
        return joined if self.max_grad_norm is None else joined * (self.max_grad_norm / joined.norm().clamp(min=self.max_grad_norm))

    def of_records(self, rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Gradients of single records, clipped as the client does it, of shape (records, parameters). Differentiable.

        Args:
            rows: Of shape (records, ...), float32.
            labels: Class indices of shape (records,).
        """
        gradients = self._unclipped(rows[:, None], labels[:, None])
        if self.max_grad_norm is None:
            return gradients
        norms = torch.linalg.vector_norm(gradients, dim=1, keepdim=True)
        return gradients * (self.max_grad_norm / norms.clamp(min=self.max_grad_norm))

    def _unclipped(self, rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self._flat(vmap(grad(self._mean_loss), in_dims=(None, 0, 0))(self._parameters(), rows, labels))

    def _parameters(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in trainable_parameters(self.module).items()}

    def _mean_loss(self, parameters: dict[str, torch.Tensor], rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return mean_loss(functional_call(self.module, parameters, (rows,)), labels, loss=self.loss)

    @staticmethod
    def _flat(gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([gradient.flatten(1) for gradient in gradients.values()], dim=1)


def mean_loss(outputs: torch.Tensor, labels: torch.Tensor, *, loss: BinaryLoss | SoftmaxLoss) -> torch.Tensor:
    """What a client minimises on a batch.

    Args:
        outputs: Of shape (records, outputs).
        labels: Class indices of shape (records,).
        loss: The client's own loss.
    """
    if isinstance(loss, SoftmaxLoss):
        return functional.cross_entropy(outputs, labels)
    weight = outputs.new_tensor(loss.positive_weight)
    return functional.binary_cross_entropy_with_logits(outputs[:, 0], labels.to(outputs.dtype), pos_weight=weight)


def target_gradient(observation: Observation, module: nn.Module) -> TargetGradient | NotApplicable:
    """The mean gradient behind an update, all steps taken as if at the model before the round.

    Several steps move the model, so what they show is not quite a gradient; the shorter the steps, the better.

    Args:
        observation: What the attacker holds.
        module: The architecture; its own weights are ignored and not changed. Public.

    Raises:
        LayoutMismatchError: If the architecture has another layout than the observation.
    """
    part, training, optimizer = gradient_part(observation), observation.training, observation.training.optimizer
    if isinstance(part, NotApplicable):
        return part
    if isinstance(optimizer, AdaptiveOptimizer):
        return NotApplicable(reason=f"{optimizer.name} rescales each coordinate")
    if layout_of(module) != observation.layout:
        raise LayoutMismatchError("expected an architecture of the observation's layout, got another one; nothing was attacked")
    model = copy.deepcopy(module).eval()
    load_values(model, part.before)
    deviation = 0.0
    if training.noise is not None:
        shares = torch.tensor(observation.coefficients, dtype=torch.float64) / sum(observation.coefficients)
        one_step = training.noise.noise_multiplier * training.noise.max_grad_norm / training.batch_size
        deviation = one_step / math.sqrt(training.steps) * float(shares.norm())
    response = optimizer.response(training.steps)
    return TargetGradient(
        values=torch.tensor(part.change.values / -response, dtype=torch.float32),
        deviation=deviation,
        errors=torch.tensor(part.deviation.values / response, dtype=torch.float32),
        module=model,
        loss=training.loss,
        size=max(1, round(training.batch_size * len(observation.coefficients))),
        max_grad_norm=None if training.noise is None else training.noise.max_grad_norm,
    )


def minimise(
    variables: torch.Tensor,
    objective: Callable[[torch.Tensor], torch.Tensor],
    *,
    iterations: int,
    learning_rate: float,
    pixels: bool = False,
) -> torch.Tensor:
    """Lowers an objective of every restart by Adam with a falling learning rate (cosine), and returns the last variables.

    Args:
        variables: Where to start, of shape (restarts, ...). Not changed.
        objective: Gives one number for each restart.
        iterations: Number of steps.
        learning_rate: Of the first step.
        pixels: Whether the variables are pixels: they stay from 0 to 1, and of each one's derivative the sign alone is used.
    """
    current = variables.clone().requires_grad_()
    optimizer = torch.optim.Adam([current], lr=learning_rate)
    for step in range(iterations):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * (0.01 + 0.5 * (1 + math.cos(math.pi * step / iterations)))
        (gradient,) = torch.autograd.grad(objective(current).sum(), current)
        current.grad = gradient.sign() if pixels else gradient
        optimizer.step()
        if pixels:
            with torch.no_grad():
                current.clamp_(0, 1)
    return current.detach()
