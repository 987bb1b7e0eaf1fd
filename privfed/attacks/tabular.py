"""Rows of a table by optimisation: records whose gradient points where the update does. For where the exact attacks do not apply.

It starts several times, since most starts end at something else than the batch, and pools the best of them (TabLeak: Vero et al.,
2023, arXiv:2210.01785, section 4).
"""

import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import nn
from torch.nn.functional import cosine_similarity

from privfed.attacks.facts import TableSchema
from privfed.attacks.gradients import minimise, target_gradient
from privfed.attacks.label_guesses import guess_labels
from privfed.attacks.observation import NotApplicable, Observation, Reconstruction
from privfed.attacks.pooling import certainty, pool_rows, whole_categories
from privfed.attacks.prior import Prior
from privfed.attacks.row_space import RowSpace, row_space

# Restarts whose distance is within this factor of the best one's are pooled with it.
_POOLED, _LEAST_DISTANCE = 3.0, 1e-7
_LEARNING_RATE = 0.1


@dataclass(frozen=True, kw_only=True, eq=False)
class TabularEnsemble:
    """Matches the gradient's direction from several starts, and pools the best of them.

    Where the first layer's change shows the space that the rows span (see `row_space`), only rows of that space are tried, and as
    many as its rank: some dozen unknowns in place of hundreds, so that batches of eight are often found nearly exactly, whatever the
    activation. Else entries are free, and categories are shares that a softmax keeps positive and summing to 1.

    Not applicable to updates with noise, where a direction without a prior answers worse than a guess: `MostLikelyRows` is.

    Confidence is how little entropy the pooled shares have and how little the pooled numbers spread, against the public records'.

    Args:
        module: The architecture. Public.
        prior: Public records; of them only means, spreads and label frequencies are used.
        restarts: Number of starts, at least 1.
        iterations: Steps of each.
        seed: Decides where they start.
    """

    module: nn.Module
    prior: Prior
    restarts: int = 16
    iterations: int = 600
    seed: int = 0

    # Tensors this small only wait for each other's threads.
    @threadpool_limits.wrap(limits=1)
    def attack(self, observation: Observation) -> Reconstruction | NotApplicable:
        """As many rows as show in the update, or else as there are records in a step of all clients, surest first. None is certified."""
        started = time.perf_counter()
        self.prior.check(observation.schema)
        target, space = target_gradient(observation, self.module), row_space(observation)
        if isinstance(target, NotApplicable):
            return target
        if target.deviation > 0:
            return NotApplicable(reason="the update has noise, for which the most likely rows are the better question")
        schema = observation.schema
        rows: _FreeRows | _SpannedRows = _FreeRows.near(self.prior)
        if isinstance(space, RowSpace) and space.rank:
            target, rows = replace(target, size=space.rank), _SpannedRows.of(space)
        guessed = guess_labels(observation, target, self.prior, restarts=1)
        if isinstance(guessed, NotApplicable):
            return guessed
        labels = guessed.labels.expand(self.restarts, -1)

        def distance(variables: torch.Tensor) -> torch.Tensor:
            return 1 - cosine_similarity(target.of_batches(rows.records(variables), labels), target.values, dim=1)

        start = torch.randn(self.restarts, target.size, rows.unknowns, generator=torch.Generator().manual_seed(self.seed))
        found = minimise(start, distance, iterations=self.iterations, learning_rate=_LEARNING_RATE)
        with torch.no_grad():
            distances = distance(found).numpy()
        good = np.flatnonzero(distances <= _POOLED * max(float(distances.min()), _LEAST_DISTANCE))
        pooled = pool_rows(rows.records(found).double().numpy()[good], best=int(distances[good].argmin()))
        confidence = certainty(pooled, schema=schema, usual_spread=self.prior.rows.std(axis=0))
        order = np.argsort(-confidence)
        return Reconstruction(
            rows=whole_categories(pooled.rows, schema=schema)[order],
            certified=np.zeros(len(order), dtype=np.bool_),
            confidence=confidence[order],
            certificate="no row is certified: an optimiser may end anywhere",
            seconds=time.perf_counter() - started,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _FreeRows:
    """Records whose numbers are free and whose categories are shares."""

    mean: torch.Tensor
    spread: torch.Tensor
    schema: TableSchema

    @classmethod
    def near(cls, prior: Prior) -> "_FreeRows":
        mean, spread = (torch.tensor(values, dtype=torch.float32) for values in (prior.rows.mean(axis=0), prior.rows.std(axis=0)))
        return cls(mean=mean, spread=spread, schema=prior.schema)

    @property
    def unknowns(self) -> int:
        return self.schema.width

    def records(self, variables: torch.Tensor) -> torch.Tensor:
        rows, parts, start = self.mean + self.spread * variables, list[torch.Tensor](), 0
        for block in self.schema.blocks:
            parts += [rows[..., start : block.start], variables[..., block].softmax(dim=-1)]
            start = block.stop
        return torch.cat([*parts, rows[..., start:]], dim=-1)


@dataclass(frozen=True, kw_only=True, eq=False)
class _SpannedRows:
    """Records of a row space: a point of it, and directions in it of the length that entries usually have."""

    origin: torch.Tensor
    directions: torch.Tensor

    @classmethod
    def of(cls, space: RowSpace) -> "_SpannedRows":
        scaled = space.basis * space.scales[:, None]
        bias = scaled[:, -1]
        # Combinations that leave the bias at 1: one, and what can be added to it.
        one, free = bias / (bias @ bias), np.linalg.svd(bias[None])[2][1:]
        directions = np.linalg.svd(free @ scaled[:, :-1], full_matrices=False)[2] * np.sqrt(space.basis.shape[1] / max(1, space.rank - 1))
        origin = one @ scaled[:, :-1]
        origin -= origin @ np.linalg.pinv(directions) @ directions
        return cls(origin=torch.tensor(origin, dtype=torch.float32), directions=torch.tensor(directions, dtype=torch.float32))

    @property
    def unknowns(self) -> int:
        return len(self.directions)

    def records(self, variables: torch.Tensor) -> torch.Tensor:
        return self.origin + variables @ self.directions
