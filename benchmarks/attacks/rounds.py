"""Tables and training rounds to attack. What an attack gets is an `Observation`; the rows stay with the benchmark."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

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
from privfed.attacks.gradients import mean_loss
from privfed.attacks.observation import Observation
from privfed.attacks.prior import Prior
from privfed.data.samples import Samples
from privfed.training.dpsgd import train
from privfed.training.loss import binary_cross_entropy
from privfed.training.mechanism import DpSgd, NonPrivate
from privfed.training.model import mlp, values_of
from privfed.update import PlainVector

NUMBERS, KINDS = 20, (2, 3, 5, 8, 12)
RANGE = (-20.0, 60.0)
PRIVATE_ROWS = 2000
NOISE = {1: 3.7306, 8: 0.6002, 100: 0.0947, 1000: 0.0246}
"""Noise multipliers of a single Gaussian release with this epsilon at delta 1e-5 (Balle and Wang, 2018, theorem 8)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """Fifty columns: standardised numbers, a quarter of them skewed as amounts are, and five categories; one label in twenty is 1."""

    rows: NDArray[np.float64]
    labels: NDArray[np.int64]
    schema: TableSchema

    @classmethod
    def generate(cls, *, count: int = 5000, seed: int = 0) -> "Workload":
        rng = np.random.default_rng(seed)
        labels = (rng.random(count) < 0.05).astype(np.int64)
        values = rng.normal(size=(count, NUMBERS)) @ (np.eye(NUMBERS) + 0.35 * rng.normal(size=(NUMBERS, NUMBERS)))
        values[:, : NUMBERS // 4] = np.exp(0.8 * values[:, : NUMBERS // 4])
        values += labels[:, None] * 0.8 * rng.normal(size=NUMBERS)
        values = (values - values.mean(axis=0)) / values.std(axis=0)
        blocks = []
        for size in KINDS:
            negative, positive = (rng.choice(size, size=count, p=rng.dirichlet(np.ones(size))) for _ in range(2))
            blocks.append(np.eye(size)[np.where(labels == 1, positive, negative)])
        columns = [Continuous(name=f"number {i}", low=RANGE[0], high=RANGE[1]) for i in range(NUMBERS)]
        kinds = [OneHot(name=f"kind {i}", categories=tuple(map(str, range(size)))) for i, size in enumerate(KINDS)]
        rows = np.concatenate([np.clip(values, *RANGE), *blocks], axis=1).astype(np.float32).astype(np.float64)
        return cls(rows=rows, labels=labels, schema=TableSchema(columns=(*columns, *kinds)))

    def batch(self, size: int, *, seed: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Private rows and labels."""
        chosen = np.random.default_rng(seed).choice(PRIVATE_ROWS, size=size, replace=False)
        return self.rows[chosen], self.labels[chosen]

    @property
    def prior(self) -> Prior:
        """What the attacker knows of the table: the public rows."""
        return Prior(rows=self.rows[PRIVATE_ROWS:], labels=self.labels[PRIVATE_ROWS:], schema=self.schema)

    def samples(self, rows: NDArray[np.float64], labels: NDArray[np.int64]) -> Samples:
        names = tuple(f"column {i}" for i in range(self.schema.width))
        return Samples(features=rows.astype(np.float32), labels=labels, groups=None, columns=names)

    def observation(
        self,
        model: nn.Module,
        seen: PlainVector,
        training: TrainingFacts,
        *,
        coefficients: tuple[int, ...] = (1,),
        rounding_step: float = 0.0,
    ) -> Observation:
        """What whoever holds an update of the model, or a mean of several, gives to an attack."""
        before = values_of(model)
        facts = {"coefficients": coefficients, "rounding_step": rounding_step, "activation": Activation.RELU, "schema": self.schema}
        return Observation(layout=before.layout, model=before, seen=seen, training=training, **facts)


def network(inputs: int, *, hidden: Sequence[int], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return mlp(inputs, hidden=tuple(hidden))


def trained_network(table: Workload, *, width: int) -> nn.Module:
    """A network that has learnt rare labels from the public rows, so that it is sure of most rows."""
    prior, model = table.prior, network(table.schema.width, hidden=(width, 32), seed=0)
    score = (prior.rows - prior.rows.mean(axis=0)) @ np.random.default_rng(0).normal(size=table.schema.width)
    features, labels = torch.tensor(prior.rows, dtype=torch.float32), torch.tensor(score > np.quantile(score, 0.95)).float()
    optimizer, order = torch.optim.Adam(model.parameters(), lr=1e-3), torch.Generator().manual_seed(0)
    for _ in range(5):
        for batch in torch.randperm(len(features), generator=order).split(64):
            optimizer.zero_grad()
            binary_cross_entropy_with_logits(model(features[batch])[:, 0], labels[batch]).backward()
            optimizer.step()
    return model


def plain_update(
    model: nn.Module,
    rows: NDArray[np.float64],
    labels: NDArray[np.int64],
    *,
    loss: BinaryLoss | SoftmaxLoss,
    steps: int = 1,
    adam: bool = False,
) -> tuple[PlainVector, TrainingFacts]:
    """An update of float32 training on all rows in every step, and how it was made."""
    trained, before = copy.deepcopy(model), values_of(model)
    optimizer = torch.optim.Adam(trained.parameters()) if adam else torch.optim.SGD(trained.parameters(), lr=0.1)
    features, targets = torch.tensor(rows, dtype=torch.float32), torch.tensor(labels)
    for _ in range(steps):
        optimizer.zero_grad()
        mean_loss(trained(features), targets, loss=loss).backward()
        optimizer.step()
    facts = AdaptiveOptimizer(name="Adam") if adam else Sgd(learning_rate=0.1)
    training = TrainingFacts(optimizer=facts, loss=loss, steps=steps, batch_size=len(rows))
    return PlainVector(layout=before.layout, values=values_of(trained).values - before.values), training


def private_update(
    table: Workload, model: nn.Module, rows: NDArray[np.float64], labels: NDArray[np.int64], *, noise_multiplier: float
) -> tuple[PlainVector, TrainingFacts]:
    """An update of one step of our DP-SGD on all rows, with noise from the operating system, and how it was made."""
    mechanism = DpSgd(
        noise_multiplier=noise_multiplier,
        max_grad_norm=1.0,
        sample_rate=1.0,
        expected_batch_size=len(rows),
        steps=1,
        learning_rate=0.1,
    )
    result = train(model, values_of(model), table.samples(rows, labels), mechanism=mechanism, loss=binary_cross_entropy)
    noise = GaussianNoise(noise_multiplier=noise_multiplier, max_grad_norm=1.0)
    training = TrainingFacts(optimizer=Sgd(learning_rate=0.1), loss=BinaryLoss(), steps=1, batch_size=len(rows), noise=noise)
    return result.update_values, training


def epochs_update(
    table: Workload, model: nn.Module, rows: NDArray[np.float64], labels: NDArray[np.int64], *, seed: int
) -> tuple[PlainVector, TrainingFacts]:
    """An update of five local epochs in batches of four, by our plain SGD."""
    steps = 5 * len(rows) // 4
    mechanism = NonPrivate(learning_rate=0.1, batch_size=4, steps=steps, seed=seed)
    result = train(model, values_of(model), table.samples(rows, labels), mechanism=mechanism, loss=binary_cross_entropy)
    training = TrainingFacts(optimizer=Sgd(learning_rate=0.1), loss=BinaryLoss(), steps=steps, batch_size=4)
    return result.update_values, training
