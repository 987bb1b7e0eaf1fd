"""Losses, one number per record. The library reduces them itself, because a mean over the batch would tie records together."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from privfed.errors import UnsupportedDataError, UnsupportedModelError
from privfed.training.memory import check_memory
from privfed.training.probe import perturbed_copy, synthetic_records

# Rounding differs between a batch and a single record by some 1e-6; a loss that mixes six records differs by whole shares.
_TOLERANCE = 1e-3
_LARGE_REPEATS, _LARGE_VALUES = 11, 30.0


class PerSampleLoss(Protocol):
    """A loss per record, that depends on this record alone."""

    def __call__(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The losses of a batch.

        Args:
            outputs: What the model returned, with the batch first, float32.
            labels: Class indices of shape (batch,), int64.

        Returns:
            Losses of shape (batch,), differentiable with respect to the outputs.
        """
        ...


def binary_cross_entropy(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of yes-or-no labels, of shape (batch,).

    Args:
        outputs: Logits of shape (batch,) or (batch, 1).
        labels: 0 or 1, of shape (batch,).

    Raises:
        ValueError: If the outputs have another shape.
        UnsupportedDataError: If there is another label than 0 and 1.
    """
    return _UNWEIGHTED(outputs, labels)


def cross_entropy(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of class labels, of shape (batch,).

    Args:
        outputs: Logits of shape (batch, classes).
        labels: Class indices from 0, of shape (batch,).

    Raises:
        ValueError: If the outputs have another shape.
        UnsupportedDataError: If a label is not one of the classes.
    """
    _check_classes(outputs)
    _check_labels(labels, classes=outputs.shape[1])
    return _unchecked_cross_entropy(outputs, labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class BinaryCrossEntropy:
    """Cross-entropy of yes-or-no labels in which each positive record counts several times.

    The weight multiplies the gradient of a record before clipping, so it never raises the sensitivity.

    Args:
        positive_weight: Factor on the loss of records with label 1. Public; do not derive it from private label counts.

    Raises:
        ValueError: If the weight is not positive and finite.
    """

    positive_weight: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.positive_weight) and self.positive_weight > 0):
            raise ValueError(f"expected positive_weight to be positive and finite, got {self.positive_weight}")

    def __call__(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The losses of a batch, of shape (batch,); see `binary_cross_entropy`."""
        _check_labels(labels, classes=2)
        return self._losses(outputs, labels)

    def _losses(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if outputs.shape not in (labels.shape, (*labels.shape, 1)):
            raise ValueError(f"expected one output per record, of shape (batch,) or (batch, 1), got {tuple(outputs.shape)}")
        positive = labels.to(outputs.dtype)
        losses = functional.binary_cross_entropy_with_logits(outputs.reshape(labels.shape), positive, reduction="none")
        return losses if self.positive_weight == 1.0 else losses * self._weights(positive)

    def _derivative(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        positive = labels.to(outputs.dtype).reshape(outputs.shape)
        derivatives = outputs.sigmoid() - positive
        return derivatives if self.positive_weight == 1.0 else derivatives * self._weights(positive)

    def _weights(self, positive: torch.Tensor) -> torch.Tensor:
        return 1.0 + (self.positive_weight - 1.0) * positive


_UNWEIGHTED = BinaryCrossEntropy(positive_weight=1.0)


def unchecked(loss: PerSampleLoss) -> PerSampleLoss:
    """A loss without its look at the labels of each batch, for labels that `check_loss` has accepted.

    It saves time in every step, and a look at values cannot be compiled. A loss from elsewhere is given back as it is.
    """
    if isinstance(loss, BinaryCrossEntropy):
        return loss._losses
    if loss is binary_cross_entropy:
        return _UNWEIGHTED._losses
    return _unchecked_cross_entropy if loss is cross_entropy else loss


def derivative_of(loss: PerSampleLoss) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The derivative of each record's loss by the outputs, in the shape of the outputs, as a function of outputs and labels.

    It looks at no label's value. For the losses of this module it is written down: torch's way to it costs a small model much.
    """
    if isinstance(loss, BinaryCrossEntropy):
        return loss._derivative
    if loss is binary_cross_entropy:
        return _UNWEIGHTED._derivative
    if loss is cross_entropy:
        return _cross_entropy_derivative

    def derivative(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            leaves = outputs.detach().requires_grad_()
            return torch.autograd.grad(loss(leaves, labels).sum(), leaves)[0]

    return derivative


def _unchecked_cross_entropy(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs, labels, reduction="none")


def _cross_entropy_derivative(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return outputs.softmax(dim=1) - (labels[:, None] == torch.arange(outputs.shape[1])).to(outputs.dtype)


def _check_classes(outputs: torch.Tensor) -> None:
    if outputs.ndim != 2 or outputs.shape[1] < 2:
        raise ValueError(f"expected outputs of shape (batch, classes) with at least 2 classes, got {tuple(outputs.shape)}")


def _check_labels(labels: torch.Tensor, *, classes: int) -> None:
    if not len(labels):
        return
    least, most = labels.aminmax()
    if int(least) < 0 or int(most) >= classes:
        raise UnsupportedDataError(f"expected labels from 0 to {classes - 1}, got another one; nothing was trained")


def _mixes_large(model: nn.Module, loss: PerSampleLoss, inputs: int) -> bool:
    """Whether records have other losses alone in a larger batch, or one with large values: what few small records may not show."""
    features, labels = synthetic_records(inputs, repeats=_LARGE_REPEATS)
    for batch in (features, _LARGE_VALUES * features):
        together = loss(model(batch), labels)[::_LARGE_REPEATS]
        alone = torch.cat([loss(model(batch[i : i + 1]), labels[i : i + 1]) for i in range(0, len(batch), _LARGE_REPEATS)])
        if not torch.allclose(together, alone, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True):
            return True
    return False


def check_loss(module: nn.Module, loss: PerSampleLoss, *, inputs: int, labels: NDArray[np.int64]) -> None:
    """Refuses a loss, or a model under it, that is not one number per record from that record alone.

    Runs on made-up records. Of the private data only the labels are read, to find those that the loss cannot take.

    Args:
        module: The model. It is not changed.
        loss: The loss.
        inputs: Number of feature columns. Public.
        labels: All labels of the client. Private.

    Raises:
        UnsupportedModelError: If model or loss fail on made-up records, return another shape than (batch,), draw from torch's
            generator, or give a record another loss when it stands alone; or as `check_memory`.
        UnsupportedDataError: If the loss does not take a label.
    """
    model = perturbed_copy(module)
    features, synthetic_labels = synthetic_records(inputs)
    generator_state = torch.random.get_rng_state()
    try:
        outputs = model(features)
        losses = loss(outputs, synthetic_labels)
        alone = [loss(model(features[i : i + 1]), synthetic_labels[i : i + 1]) for i in range(len(features))]
    except (RuntimeError, IndexError, ValueError) as error:
        why = next(iter(str(error).splitlines()), type(error).__name__)  # about made-up records, so it may be told
        raise UnsupportedModelError(
            f"model and loss fail on {len(features)} made-up records of {inputs} columns: {why}; nothing was trained"
        ) from error
    finally:
        drew = not torch.equal(generator_state, torch.random.get_rng_state())
        torch.random.set_rng_state(generator_state)
    if drew:
        raise UnsupportedModelError("model or loss draws from torch's generator; remove dropout and the like; nothing was trained")
    if losses.shape != synthetic_labels.shape or any(single.shape != (1,) for single in alone):
        raise UnsupportedModelError(
            f"expected one loss per record, of shape (batch,), got {tuple(losses.shape)}; use reduction='none'; nothing was trained"
        )
    check_memory(module, loss, inputs=inputs)
    if not torch.allclose(losses, torch.cat(alone), rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True) or _mixes_large(model, loss, inputs):
        raise UnsupportedModelError(
            "the loss of a record depends on the other records of its batch, so clipping would not bound what one record does; "
            "remove means, sums and weights over the batch from model and loss; nothing was trained"
        )
    try:
        loss(outputs.new_zeros((1, *outputs.shape[1:])).expand(len(labels), *outputs.shape[1:]), torch.tensor(labels))
    except (RuntimeError, IndexError, ValueError):
        # Not chained: the inner message may hold a label.
        raise UnsupportedDataError("the loss does not take the client's labels; nothing was trained") from None
