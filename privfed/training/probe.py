"""Made-up records, and a moved copy of a model: what checks run on instead of private data and the client's own model."""

import copy

import torch
from torch import nn

from privfed.training.model import trainable_parameters

# Uneven on purpose: with as many ones as zeros in each half, a loss weighted by class frequency would look independent.
_SYNTHETIC_LABELS = (0, 1, 0, 0, 1, 0)


def synthetic_records(inputs: int, *, repeats: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Made-up records, six per repeat, features of shape (records, inputs) and labels: what checks run on instead of private data."""
    labels = torch.tensor(_SYNTHETIC_LABELS).repeat(repeats)
    return torch.arange(len(labels) * inputs, dtype=torch.float32).cos().view(len(labels), inputs), labels


def perturbed_copy(module: nn.Module) -> nn.Module:
    """A copy in training mode with slightly moved weights, because a module of zeros would hide what it does to records."""
    model = copy.deepcopy(module).train()
    with torch.no_grad():
        for parameter in trainable_parameters(model).values():
            parameter.add_(torch.arange(parameter.numel(), dtype=torch.float32).cos().view_as(parameter), alpha=0.05)
    return model
