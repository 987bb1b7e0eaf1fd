"""Tables and training rounds to attack. What an attack gets is an `Observation`; the rows stay with the test."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from privfed.attacks.facts import (
    Activation,
    AdaptiveOptimizer,
    BinaryLoss,
    Continuous,
    OneHot,
    Sgd,
    SoftmaxLoss,
    TableSchema,
    TrainingFacts,
)
from privfed.attacks.observation import Observation
from privfed.training.model import layout_of, mlp, values_of
from privfed.update import PlainVector

NUMERIC_RANGE = (-4.0, 12.0)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows with numeric columns (a quarter of them skewed, as amounts are) and one-hot blocks."""

    rows: NDArray[np.float64]
    labels: NDArray[np.int64]
    schema: TableSchema

    @classmethod
    def generate(cls, *, numeric: int = 20, categories: Sequence[int] = (2, 3, 5, 8, 12), count: int = 3000, seed: int = 0) -> "Table":
        rng = np.random.default_rng(seed)
        values = rng.normal(size=(count, numeric)) @ (np.eye(numeric) + 0.35 * rng.normal(size=(numeric, numeric)))
        values /= values.std(axis=0)
        values[:, : numeric // 4] = np.exp(0.8 * values[:, : numeric // 4]) - 1
        blocks = [np.eye(size)[rng.choice(size, size=count, p=rng.dirichlet(np.full(size, 2.0)))] for size in categories]
        rows = np.concatenate([np.clip(values, *NUMERIC_RANGE), *blocks], axis=1).astype(np.float32).astype(np.float64)
        low, high = NUMERIC_RANGE
        columns = [Continuous(name=f"number {i}", low=low, high=high) for i in range(numeric)]
        kinds = [OneHot(name=f"kind {i}", categories=tuple(map(str, range(size)))) for i, size in enumerate(categories)]
        labels = (rng.random(count) < 0.3).astype(np.int64)
        return cls(rows=rows, labels=labels, schema=TableSchema(columns=(*columns, *kinds)))

    def batch(self, size: int, *, seed: int = 0) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Private rows and labels, out of the first 2000."""
        chosen = np.random.default_rng(seed).choice(2000, size=size, replace=False)
        return self.rows[chosen], self.labels[chosen]

    @property
    def public(self) -> NDArray[np.float64]:
        """Rows that the attacker has, none of them private."""
        return self.rows[2000:]


def torch_optimizer(optimizer: Sgd | AdaptiveOptimizer, model: nn.Module) -> torch.optim.Optimizer:
    if isinstance(optimizer, Sgd):
        rate, momentum, decay = optimizer.learning_rate, optimizer.momentum, optimizer.weight_decay
        return torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum, weight_decay=decay)
    return torch.optim.Adam(model.parameters())


def torch_loss(loss: BinaryLoss | SoftmaxLoss, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    if isinstance(loss, SoftmaxLoss):
        return nn.functional.cross_entropy(outputs, labels)
    weight = torch.tensor(loss.positive_weight)
    return nn.functional.binary_cross_entropy_with_logits(outputs[:, 0], labels.float(), pos_weight=weight)


def observe(
    rows: NDArray[np.float64],
    labels: NDArray[np.int64],
    schema: TableSchema,
    *,
    seed: int = 0,
    model: nn.Module | None = None,
    optimizer: Sgd | AdaptiveOptimizer | None = None,
    loss: BinaryLoss | SoftmaxLoss | None = None,
    steps: int = 1,
    activation: Activation = Activation.RELU,
    **facts: Any,
) -> Observation:
    """Trains a float32 network on all rows in every step, and returns what whoever sees the update holds."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = mlp(schema.width, hidden=(256, 32)) if model is None else model
    optimizer, loss = optimizer or Sgd(learning_rate=0.1), loss or BinaryLoss()
    before = values_of(model)
    features, targets, engine = torch.tensor(rows, dtype=torch.float32), torch.tensor(labels), torch_optimizer(optimizer, model)
    for _ in range(steps):
        engine.zero_grad()
        torch_loss(loss, model(features), targets).backward()
        engine.step()
    change = PlainVector(layout=before.layout, values=values_of(model).values - before.values)
    training = TrainingFacts(optimizer=optimizer, loss=loss, steps=steps, batch_size=len(rows))
    seen = {"layout": layout_of(model), "model": before, "seen": change, "training": training}
    return Observation(**seen, activation=activation, schema=schema, **facts)


@pytest.fixture(scope="session")
def generate_table() -> Callable[..., Table]:
    return Table.generate


@pytest.fixture(scope="session")
def table() -> Table:
    return Table.generate()


@pytest.fixture(scope="session", name="observe")
def observe_fixture() -> Callable[..., Observation]:
    return observe
