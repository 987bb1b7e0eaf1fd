"""What both engines train: a fraud-like table at each of many small clients, and a network for tables."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from privfed.data.samples import Samples
from privfed.training.model import mlp, values_of

COLUMNS, HIDDEN = 10, (64, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """How many clients, and how they train. All take part in every round, from the same start and with the same batches."""

    clients: int = 100
    records: int = 200
    rounds: int = 12
    steps: int = 6
    batch_size: int = 32
    learning_rate: float = 0.5

    def tables(self) -> tuple[list[Samples], Samples]:
        """The records of each client, and those for the accuracy: a boundary that is not a plane, and labels with noise."""
        rng = np.random.default_rng(0)
        weights = rng.normal(size=(2, COLUMNS))
        sides = []
        for count in (self.clients * self.records, 10_000):
            features = rng.normal(size=(count, COLUMNS)).astype(np.float32)
            margin = np.minimum(*(features @ weights.T).T) + 0.5 + 0.5 * rng.normal(size=count)
            sides.append(self._samples(features, (margin > 0).astype(np.int64)))
        everything, test = sides
        places = np.arange(self.clients * self.records).reshape(self.clients, self.records)
        return [everything.take(rows) for rows in places], test

    def model(self) -> nn.Module:
        """The network, with the weights from which all start."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return mlp(COLUMNS, hidden=HIDDEN)

    def save(self, path: Path) -> None:
        """Writes everything that the other engine needs."""
        clients, _ = self.tables()
        np.savez(
            path,
            features=np.stack([samples.features for samples in clients]),
            labels=np.stack([samples.labels for samples in clients]),
            start=values_of(self.model()).values.astype(np.float32),
            widths=np.array([COLUMNS, *HIDDEN, 1]),
            learning_rate=self.learning_rate,
            batch_size=self.batch_size,
            steps=self.steps,
            rounds=self.rounds,
        )

    def _samples(self, features: NDArray[np.float32], labels: NDArray[np.int64]) -> Samples:
        return Samples(features=features, labels=labels, groups=None, columns=tuple(f"x{index}" for index in range(COLUMNS)))
