"""The clipped sum of a batch: what decides the sensitivity of DP-SGD.

The model runs in float32, and so does the derivative of each record's loss. From there on everything is float64: the norm of each
record's gradient, its clipping, and the sum. Up to there, a record gets the same bits in whatever batch it is: see `steady`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from privfed.training.steady import ROWS, filled_up, is_steady, one_thread

# A gradient beyond the range of float32 would have been infinite, had it been written down.
LARGEST_NORM = torch.finfo(torch.float32).max
# Numbers that a pass may hold for its records, 128 MB; more records are several passes.
_NUMBERS_PER_PASS = 2**24
# Each shape of a pass is checked, so there are not many.
_ROWS_PER_PASS = 16 * ROWS


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
    def _pieces(self, features: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
        """What the gradients of the records of a pass consist of, float32, each tensor with the records first."""

    @abstractmethod
    def _add(self, pieces: list[torch.Tensor], total: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Adds the clipped gradients that consist of these pieces to `total`; returns their norms before, and how many were zeroed."""

    def _at_once(self, features: torch.Tensor, labels: torch.Tensor, count: int | None) -> ClippedSum | None:
        """The sum, if the records need not be copied for it: they were chosen in whole blocks, enough for one pass."""
        if count is None or len(features) not in self.shapes:
            return None
        total = torch.zeros(self.size, dtype=torch.float64)
        return ClippedSum(total, *self._add([piece[:count] for piece in self._pieces(features, labels)], total))

    def _pieces_of(self, features: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
        """As `_pieces`, of records that are filled up to whole blocks for it."""
        block = self.shapes[0]
        rows = block * -(-len(features) // block)
        return [piece[: len(features)] for piece in self._pieces(filled_up(features, rows), filled_up(labels, rows))]

    @property
    def shapes(self) -> Sequence[int]:
        """Numbers of rows that a pass may have, ascending: the multiples of the first."""
        affordable = _NUMBERS_PER_PASS // self.numbers_per_record
        if affordable < ROWS:
            return (2 ** (max(affordable, 1).bit_length() - 1),)
        return range(ROWS, min(affordable, _ROWS_PER_PASS) + 1, ROWS)

    def is_steady(self, features: torch.Tensor, labels: torch.Tensor, *, most: int) -> bool:
        """Whether made-up records have the same gradients, bit for bit, at every place of every shape of pass.

        Args:
            features: Of `unlike_records`.
            labels: Likewise.
            most: Records that a batch has at most. Public.
        """
        shapes = [rows for rows in self.shapes if rows < most + self.shapes[0]] or self.shapes
        with one_thread():
            return is_steady(self._pieces, features, labels, shapes=shapes)

    def sum(self, features: torch.Tensor, labels: torch.Tensor, *, count: int | None = None) -> ClippedSum:
        """The sum of the records' gradients, each scaled to a norm of at most max_grad_norm over all parameters together.

        A large batch takes several passes, of records enough to fit into memory. They are summed here, before anything else can
        happen to them: there is no half of a batch that a later step could pick up.

        Args:
            features: Of shape (records, columns), float32; possibly no record. Private.
            labels: Of shape (records,). Private.
            count: How many of them are records, the first ones, if `whole_blocks` chose them; left out, all. Private.

        Raises:
            UnsupportedModelError: If the model does something else with these records than with those of `check`.
        """
        with one_thread():
            at_once = self._at_once(features, labels, count)
            return self._in_passes(features[:count], labels[:count]) if at_once is None else at_once

    def whole_blocks(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The indices of a batch, and the last one again until a pass is full: what is chosen by them need not be copied again.

        Args:
            indices: Of shape (records,), possibly none. Private.
        """
        missing = -len(indices) % self.shapes[0]
        return np.concatenate([indices, indices[-1:].repeat(missing)])

    def _in_passes(self, features: torch.Tensor, labels: torch.Tensor) -> ClippedSum:
        total = torch.zeros(self.size, dtype=torch.float64)
        norms, zeroed = [total.new_zeros(0)], 0
        most = self.shapes[-1]
        for start in range(0, len(features), most):
            part, part_labels = features[start : start + most], labels[start : start + most]
            of_part, broken = self._add(self._pieces_of(part, part_labels), total)
            norms.append(of_part)
            zeroed += broken
        return ClippedSum(total, torch.cat(norms), zeroed)
