"""The clipped sum of a batch: what decides the sensitivity of DP-SGD.

The model runs in float32, and so does the derivative of each record's loss. From there on everything is float64: the norm of each
record's gradient, its clipping, and the sum.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

# A gradient beyond the range of float32 would have been infinite, had it been written down.
LARGEST_NORM = torch.finfo(torch.float32).max
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
    if float(norms.max()) <= LARGEST_NORM:  # the largest is NaN if one is
        return 0
    broken = ~(norms <= LARGEST_NORM)
    # Scaling by zero would not do: zero times NaN is NaN.
    for tensor in (norms, *tensors):
        tensor[broken] = 0.0
    return int(broken.count_nonzero())


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ClippedSum:
    """The clipped gradients of a batch, added up. Private.

    Args:
        values: The sum, of shape (size,), float64.
        norms: Norms of the gradients before clipping, of shape (records,); 0 for those that count as zero.
        zeroed: How many gradients count as zero, because they are NaN or infinite.
    """

    values: torch.Tensor
    norms: torch.Tensor
    zeroed: int


class ClippedGradients(ABC):
    """Sums of clipped gradients, one record at a time or in any other way that gives the same.

    Args:
        parameters: The trained parameters, in the order of the layout.
        max_grad_norm: Bound on the norm that one record's gradient has in a sum.

    Attributes:
        max_grad_norm: The same; it may be changed between two sums.
        rounding: By what share of `max_grad_norm` a record may move a sum beyond it, because sums are rounded. Public. The noise must
            be larger by as much; nothing where the sum is float64.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, max_grad_norm: float) -> None:
        self.max_grad_norm = max_grad_norm
        self.rounding = 0.0
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
    def _add(self, features: torch.Tensor, labels: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Adds the clipped gradients of one pass to `total`; returns their norms before, and how many of them were zeroed."""

    def sum(self, features: torch.Tensor, labels: torch.Tensor) -> ClippedSum:
        """The sum of the records' gradients, each scaled to a norm of at most max_grad_norm over all parameters together.

        A large batch takes several passes, of records enough to fit into memory. They are summed here, before anything else can
        happen to them: there is no half of a batch that a later step could pick up.

        Args:
            features: Of shape (records, columns), float32; possibly no record. Private.
            labels: Of shape (records,). Private.

        Raises:
            UnsupportedModelError: If the model does something else with these records than with those of `check`.
        """
        total = torch.zeros(self.size, dtype=torch.float64)
        records = len(features)
        if not records:
            return ClippedSum(total, total.new_zeros(0), 0)
        most = max(1, min(_RECORDS_PER_PASS, _NUMBERS_PER_PASS // self.numbers_per_record))
        if records <= most:
            return ClippedSum(total, *self._add(features, labels, total))
        norms: list[torch.Tensor] = []
        zeroed = 0
        for part, part_labels in zip(*(whole.tensor_split(-(-records // most)) for whole in (features, labels)), strict=True):
            of_part, broken = self._add(part, part_labels, total)
            norms.append(of_part)
            zeroed += broken
        return ClippedSum(total, torch.cat(norms), zeroed)
