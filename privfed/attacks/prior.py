"""What everybody knows about records before seeing an update: their distribution, estimated from public ones.

Numbers follow a Gaussian copula: each has its own distribution, and what they have in common is a correlation of their normal
scores. Categories have frequencies. Without it an attack under noise answers worse than somebody who saw nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri
from torch.distributions import Categorical

from privfed.attacks.facts import TableSchema

# Normal scores further out than one in two thousand are taken for that.
_FURTHEST, _KNOTS = 3.3, 65
_RIDGE, _RAREST = 1e-3, 1e-4


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Prior:
    """A distribution of records, in terms of variables that any real numbers are good for.

    A record's variables are a normal score for each number and a logit for each category. They have the columns of the record,
    numbers first.

    Args:
        rows: Public records, of shape (n, width), at least two.
        labels: Their labels, class indices from 0, of shape (n,).
        schema: The columns.

    Raises:
        ValueError: If shapes do not fit.
    """

    rows: NDArray[np.float64]
    labels: NDArray[np.int64]
    schema: TableSchema

    def __post_init__(self) -> None:
        if self.rows.ndim != 2 or len(self.rows) < 2 or self.rows.shape[1] != self.schema.width or self.labels.shape != self.rows.shape[:1]:
            raise ValueError(
                f"expected at least two public records of {self.schema.width} columns and a label for each, "
                f"got shapes {self.rows.shape} and {self.labels.shape}"
            )

    def check(self, schema: TableSchema) -> None:
        """Refuses a schema that is not the public records', with a ValueError."""
        if schema != self.schema:
            raise ValueError("expected a prior on the observation's schema, got one on another schema")

    @cached_property
    def _order(self) -> NDArray[np.intp]:
        """Columns in the order of the variables: numbers first, then blocks."""
        return np.concatenate([self.schema.continuous, *(np.arange(block.start, block.stop) for block in self.schema.blocks)]).astype(
            np.intp
        )

    @cached_property
    def _quantiles(self) -> torch.Tensor:
        """Values of each number at the knots, of shape (numbers, knots)."""
        values = np.sort(self.rows[:, self.schema.continuous], axis=0)
        shares = (np.arange(len(values)) + 0.5) / len(values)
        levels = ndtr(np.linspace(-_FURTHEST, _FURTHEST, _KNOTS))
        return torch.tensor(np.array([np.interp(levels, shares, column) for column in values.T]).reshape(-1, _KNOTS), dtype=torch.float32)

    @cached_property
    def _scores(self) -> NDArray[np.float64]:
        """Normal scores of the public records' numbers, of shape (n, numbers)."""
        ranks = self.rows[:, self.schema.continuous].argsort(axis=0).argsort(axis=0)
        return ndtri((ranks + 0.5) / len(self.rows))

    @cached_property
    def _precision(self) -> torch.Tensor:
        covariance = np.atleast_2d(np.cov(self._scores.T)) if len(self.schema.continuous) else np.zeros((0, 0))
        return torch.tensor(np.linalg.inv(covariance + _RIDGE * np.eye(len(covariance))), dtype=torch.float32)

    @cached_property
    def _log_frequencies(self) -> torch.Tensor:
        categories = self._order[len(self.schema.continuous) :]
        return torch.tensor(np.log(self.rows[:, categories].mean(axis=0) + _RAREST), dtype=torch.float32)

    @cached_property
    def log_label_frequencies(self) -> NDArray[np.float64]:
        """Logarithm of the share of each class, of shape (classes,), at least two; with one record more in each."""
        counts = np.bincount(self.labels, minlength=2) + 1
        return np.log(counts / counts.sum())

    def records(self, variables: torch.Tensor) -> torch.Tensor:
        """Records of shape (..., width) from variables of the same shape. Differentiable; categories are shares."""
        numbers = len(self.schema.continuous)
        place = ((variables[..., :numbers] + _FURTHEST) * (_KNOTS - 1) / (2 * _FURTHEST)).clamp(0, _KNOTS - 1.001)
        below = place.floor().long()
        values = self._quantiles.expand(*place.shape, _KNOTS)
        low, high = (values.gather(-1, (below + offset)[..., None])[..., 0] for offset in (0, 1))
        parts = [low + (high - low) * (place - below), *(logits.softmax(dim=-1) for logits, _ in self._blocks(variables))]
        back = torch.from_numpy(np.argsort(self._order))
        return torch.cat(parts, dim=-1)[..., back]

    def energy(self, variables: torch.Tensor) -> torch.Tensor:
        """Minus the logarithm of the density of each record, up to a constant: of shape (...) for variables of shape (..., width).

        Shares of categories cost their relative entropy to the frequencies, so that without evidence they are the frequencies.
        """
        scores = variables[..., : len(self.schema.continuous)]
        energy = 0.5 * ((scores @ self._precision) * scores).sum(dim=-1)
        for logits, log_frequencies in self._blocks(variables):
            logs = logits.log_softmax(dim=-1)
            energy = energy + (logs.exp() * (logs - log_frequencies)).sum(dim=-1)
        return energy

    def curvature(self, count: int) -> torch.Tensor:
        """How firmly the prior alone holds `count` records: second derivatives of their energy near `typical`.

        Of shape (count * width, count * width), double precision, positive definite.
        """
        frequencies = [log_frequencies.exp() for _, log_frequencies in self._blocks(self.typical())]
        categories = torch.cat([torch.zeros(0), *(share * (1 - share) for share in frequencies)]).clamp(min=_RAREST)
        return torch.block_diag(*[torch.block_diag(self._precision, categories.diag()).double()] * count)

    def entropy_left(self, variables: torch.Tensor) -> torch.Tensor:
        """Entropy of each block's shares over that of its frequencies, of shape (..., blocks): 0 for a whole category."""
        left = [
            Categorical(logits=logits).entropy() / Categorical(logits=log_frequencies).entropy()
            for logits, log_frequencies in self._blocks(variables)
        ]
        return torch.stack(left, dim=-1) if left else torch.zeros(*variables.shape[:-1], 0)

    def _blocks(self, variables: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The logits of each block, of shape (..., categories), and the logarithms of its frequencies."""
        sizes = [block.stop - block.start for block in self.schema.blocks]
        logits = variables[..., len(self.schema.continuous) :].split(sizes, dim=-1) if sizes else ()
        return zip(logits, self._log_frequencies.split(sizes) if sizes else (), strict=True)

    def typical(self) -> torch.Tensor:
        """Variables of the record that somebody guesses who saw nothing: medians and frequencies."""
        return torch.cat([torch.zeros(len(self.schema.continuous)), self._log_frequencies])

    def guess(self, count: int) -> NDArray[np.float64]:
        """Baseline for attacks with this prior: that record `count` times, of shape (count, width)."""
        return np.tile(self.records(self.typical()).double().numpy(), (count, 1))

    def variables_near(self, indices: torch.Tensor) -> torch.Tensor:
        """Variables of public records, of shape (n, width), with categories that are likely and not certain."""
        chosen = indices.numpy()
        categories = torch.tensor(self.rows[chosen][:, self._order[len(self.schema.continuous) :]], dtype=torch.float32)
        likely = (0.7 * categories + 0.3 * self._log_frequencies.exp() + _RAREST).log()
        return torch.cat([torch.tensor(self._scores[chosen], dtype=torch.float32), likely], dim=1)
