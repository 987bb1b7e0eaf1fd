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
    GaussianNoise,
    OneHot,
    Sgd,
    SoftmaxLoss,
    TableSchema,
    TrainingFacts,
)
from privfed.attacks.observation import Observation
from privfed.attacks.prior import Prior
from privfed.data.samples import Samples
from privfed.training.dpsgd import train
from privfed.training.loss import binary_cross_entropy, cross_entropy
from privfed.training.mechanism import DpSgd
from privfed.training.model import layout_of, mlp, values_of
from privfed.training.randomness import _SeededRandomness
from privfed.update import PlainVector

NUMERIC_RANGE = (-4.0, 12.0)
FRAUD_RANGE = (-20.0, 60.0)


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

    @classmethod
    def fraud(cls, *, count: int = 5000, seed: int = 0) -> "Table":
        """Fifty columns as `generate` makes them, but standardised, with one label in twenty that the columns depend on."""
        rng = np.random.default_rng(seed)
        labels = (rng.random(count) < 0.05).astype(np.int64)
        values = rng.normal(size=(count, 20)) @ (np.eye(20) + 0.35 * rng.normal(size=(20, 20)))
        values[:, :5] = np.exp(0.8 * values[:, :5])
        values += labels[:, None] * 0.8 * rng.normal(size=20)
        values = (values - values.mean(axis=0)) / values.std(axis=0)
        blocks, sizes = [], (2, 3, 5, 8, 12)
        for size in sizes:
            kinds = [rng.choice(size, size=count, p=rng.dirichlet(np.ones(size))) for _ in range(2)]
            blocks.append(np.eye(size)[np.where(labels == 1, kinds[1], kinds[0])])
        rows = np.concatenate([values, *blocks], axis=1).astype(np.float32).astype(np.float64)
        low, high = FRAUD_RANGE
        columns = [Continuous(name=f"number {i}", low=low, high=high) for i in range(20)]
        kinds = [OneHot(name=f"kind {i}", categories=tuple(map(str, range(size)))) for i, size in enumerate(sizes)]
        return cls(rows=rows, labels=labels, schema=TableSchema(columns=(*columns, *kinds)))

    def batch(self, size: int, *, seed: int = 0) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Private rows and labels, out of the first 2000."""
        chosen = np.random.default_rng(seed).choice(2000, size=size, replace=False)
        return self.rows[chosen], self.labels[chosen]

    @property
    def public(self) -> NDArray[np.float64]:
        """Rows that the attacker has, none of them private."""
        return self.rows[2000:]

    @property
    def public_labels(self) -> NDArray[np.int64]:
        return self.labels[2000:]


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


def noised_round(
    rows: NDArray[np.float64],
    labels: NDArray[np.int64],
    schema: TableSchema,
    *,
    noise_multiplier: float,
    max_grad_norm: float = 1.0,
    model: nn.Module | None = None,
    loss: BinaryLoss | SoftmaxLoss | None = None,
    seed: int = 0,
) -> Observation:
    """One step of the product's own DP-SGD that visits all rows, on a fresh one-logit network unless another is given."""
    torch.manual_seed(seed)
    module = mlp(schema.width) if model is None else model
    loss = BinaryLoss() if loss is None else loss
    start, size = values_of(module), len(rows)
    mechanism = DpSgd(
        noise_multiplier=noise_multiplier,
        max_grad_norm=max_grad_norm,
        sample_rate=1.0,
        expected_batch_size=size,
        steps=1,
        learning_rate=0.1,
    )
    columns = tuple(f"c{i}" for i in range(schema.width))
    samples = Samples(features=rows, labels=labels, groups=None, columns=columns)
    per_sample = cross_entropy if isinstance(loss, SoftmaxLoss) else binary_cross_entropy
    result = train(module, start, samples, mechanism=mechanism, loss=per_sample, randomness=_SeededRandomness(seed))
    noise = GaussianNoise(noise_multiplier=noise_multiplier, max_grad_norm=max_grad_norm)
    training = TrainingFacts(optimizer=Sgd(learning_rate=0.1), loss=loss, steps=1, batch_size=size, noise=noise)
    facts = {"layout": start.layout, "model": start, "seen": result.update_values, "training": training}
    return Observation(**facts, activation=Activation.RELU, schema=schema)


@pytest.fixture(scope="session", name="noised_round")
def noised_round_fixture() -> Callable[..., Observation]:
    return noised_round


@pytest.fixture(scope="session")
def fraud_table() -> Table:
    return Table.fraud()


@pytest.fixture(scope="session")
def fraud_prior(fraud_table: Table) -> Prior:
    """What the attacker knows of the table: the public rows."""
    return Prior(rows=fraud_table.public, labels=fraud_table.public_labels, schema=fraud_table.schema)


@pytest.fixture(scope="session")
def generate_table() -> Callable[..., Table]:
    return Table.generate


@pytest.fixture(scope="session")
def table() -> Table:
    return Table.generate()


@pytest.fixture(scope="session", name="observe")
def observe_fixture() -> Callable[..., Observation]:
    return observe
