"""Models that an attacker trains on own records as the client trained on private ones: they show what not being a member looks like."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.func import functional_call, grad, vmap

from privfed.attacks.candidates import LabelledRows
from privfed.attacks.facts import BinaryLoss, Sgd, SoftmaxLoss, TrainingFacts
from privfed.attacks.gradients import mean_loss
from privfed.attacks.observation import NotApplicable, Observation
from privfed.training.model import trainable_parameters

Parameters = Mapping[str, torch.Tensor]
_LEAST_NORM = 1e-12


@dataclass(frozen=True, kw_only=True, eq=False)
class Shadows:
    """Shadow models, side by side.

    Args:
        parameters: Each of shape (shadows, ...).
        trained_on: Which of the attacker's records each was trained on, of shape (shadows, records).
    """

    parameters: Parameters
    trained_on: NDArray[np.bool_]


def train_shadows(
    observation: Observation, module: nn.Module, own: LabelledRows, *, records: int, count: int, seed: int
) -> Shadows | NotApplicable:
    """Trains shadow models as the client did: from the same model, with the same optimiser, steps, batches, clipping and noise.

    Batches are drawn evenly, in every step anew. All models are trained at once.

    Args:
        observation: What the attacker holds.
        module: The architecture, with the weights before the round. Public.
        own: The attacker's records.
        records: How many of them each model is trained on: as many as the client is believed to have, not all.
        count: Number of models, at least 1.
        seed: Decides who trains on what, and the noise.

    Raises:
        ValueError: If there are not more own records than each model is to be trained on.
    """
    training = observation.training
    if not isinstance(training.optimizer, Sgd):
        return NotApplicable(reason=f"{training.optimizer.name} is not imitated, so that nothing can be compared with its model")
    if not 1 <= records < len(own):
        raise ValueError(f"expected more own records than each shadow model is trained on, got {len(own)} and {records}")
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    chosen = np.stack([rng.choice(len(own), size=records, replace=False) for _ in range(count)])
    trained_on = np.zeros((count, len(own)), dtype=np.bool_)
    np.put_along_axis(trained_on, chosen, values=True, axis=1)
    rows, labels = torch.from_numpy(own.rows.astype(np.float32)), torch.from_numpy(own.labels)
    weights = {name: value.detach().repeat(count, *[1] * value.ndim) for name, value in trainable_parameters(module).items()}
    velocity = {name: torch.zeros_like(value) for name, value in weights.items()}
    size = min(records, max(1, round(training.batch_size)))
    step = vmap(_gradient(module, training), in_dims=(0, 0, 0))
    for _ in range(training.steps):
        picked = np.take_along_axis(chosen, rng.random(chosen.shape).argpartition(size - 1, axis=1)[:, :size], axis=1)
        gradients = step(weights, rows[picked], labels[picked])
        for name, gradient in gradients.items():
            noised = gradient
            if training.noise is not None:
                scale = training.noise.noise_multiplier * training.noise.max_grad_norm / training.batch_size
                noised = gradient + scale * torch.randn(gradient.shape, generator=generator)
            optimizer = training.optimizer
            velocity[name] = optimizer.momentum * velocity[name] + noised + optimizer.weight_decay * weights[name]
            weights[name] = weights[name] - optimizer.learning_rate * velocity[name]
    return Shadows(parameters=weights, trained_on=trained_on)


def _gradient(module: nn.Module, training: TrainingFacts) -> Callable[[Parameters, torch.Tensor, torch.Tensor], Parameters]:
    """The mean gradient of a batch as the client makes it, but for the noise."""

    def loss(parameters: Parameters, rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return mean_loss(functional_call(module, dict(parameters), (rows,)), labels, loss=training.loss)

    if training.noise is None:
        return grad(loss)
    bound, batch_size = training.noise.max_grad_norm, training.batch_size

    def clipped(parameters: Parameters, rows: torch.Tensor, labels: torch.Tensor) -> Parameters:
        each = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, rows[:, None], labels[:, None])
        squares = torch.stack([gradient.flatten(1).square().sum(dim=1) for gradient in each.values()]).sum(dim=0)
        factors = (bound / (squares.sqrt() + _LEAST_NORM)).clamp(max=1.0) / batch_size
        return {name: torch.tensordot(factors, gradient, dims=1) for name, gradient in each.items()}

    return clipped


def log_odds(module: nn.Module, parameters: Parameters, records: LabelledRows, loss: BinaryLoss | SoftmaxLoss) -> NDArray[np.float64]:
    """Logarithm of the odds that each model gives the true label of each record, of shape (models, records).

    Args:
        module: The architecture.
        parameters: Each of shape (models, ...).
        records: Rows and labels.
        loss: What the outputs mean.
    """
    rows, labels = torch.from_numpy(records.rows.astype(np.float32)), torch.from_numpy(records.labels)
    with torch.no_grad():
        outputs = vmap(lambda one: functional_call(module, one, (rows,)))(dict(parameters))
    if isinstance(loss, BinaryLoss):
        return ((2 * labels - 1) * outputs[:, :, 0]).double().numpy()
    at_label = labels.expand(len(outputs), -1)[..., None]
    others = outputs.scatter(-1, at_label, -torch.inf).logsumexp(dim=-1)
    return (outputs.gather(-1, at_label)[..., 0] - others).double().numpy()
