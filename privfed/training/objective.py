"""What a client minimises besides its loss: corrections of the gradient that know nothing of the data.

Under DP-SGD a term in the loss would be dropped, or would escape clipping. A correction is added to the gradient after clipping and
noise. It sees weights that are already noised, so it is post-processing: it costs no privacy.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn


class Correction(Protocol):
    """A data-independent addition to the gradient. It must not hold or reach private data."""

    def gradient(self, weights: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        """The addition at the current weights.

        Args:
            weights: Current trainable weights, flat, in the order of the layout, of shape (size,), float32.
            start: The weights that the run started from, of the same shape.

        Returns:
            A tensor of the same shape.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FedProx:
    """Pulls the weights back to the received model: the gradient of `proximal_weight / 2 * |weights - start|^2`.

    Source: Li et al., 2020, "Federated optimization in heterogeneous networks", equation 2.

    Args:
        proximal_weight: Strength of the pull, at least 0; 0 is FedAvg. Public.

    Raises:
        ValueError: If the strength is negative or not finite.
    """

    proximal_weight: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.proximal_weight) and self.proximal_weight >= 0):
            raise ValueError(f"expected proximal_weight to be finite and at least 0, got {self.proximal_weight}")

    def gradient(self, weights: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        """See `Correction.gradient`."""
        return self.proximal_weight * (weights - start)


def flat(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """A copy of the parameters in one vector."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters])


def add_correction(parameters: Sequence[nn.Parameter], start: torch.Tensor, correction: Correction) -> None:
    """Adds a correction to the `grad` of each parameter.

    Raises:
        ValueError: If the correction has another shape than the weights.
    """
    addition = correction.gradient(flat(parameters), start)
    if addition.shape != start.shape:
        raise ValueError(f"expected a correction of shape {tuple(start.shape)}, got {tuple(addition.shape)}")
    for parameter, part in zip(parameters, addition.split([parameter.numel() for parameter in parameters]), strict=True):
        correction_part = part.view_as(parameter)
        parameter.grad = correction_part if parameter.grad is None else parameter.grad + correction_part
