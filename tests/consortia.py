"""Small consortia for audits, reports and views: a table with two one-hot blocks, and a network on which the attacks work."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from privfed.attacks.facts import Continuous, OneHot, TableSchema
from privfed.audit.canaries import Canaries
from privfed.client import Client
from privfed.consortium import Consortium
from privfed.dp.ledger import Ledger
from privfed.dp.mechanism import Budget
from privfed.he.secret import SharedKey
from privfed.training.mechanism import DpSgd, NonPrivate, TrainingMechanism
from privfed.training.model import mlp

torch.set_num_threads(1)

SCHEMA = TableSchema(
    columns=(
        Continuous(name="amount", low=-2.0, high=2.0),
        OneHot(name="kind", categories=("cash", "card", "wire", "cheque", "coin")),
        Continuous(name="hour", low=-1.0, high=1.0),
    )
)
COLUMNS = ("amount", "cash", "card", "wire", "cheque", "coin", "hour")

PRIVATE = DpSgd(
    noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.1, expected_batch_size=64, steps=5, learning_rate=0.5, max_records=640
)
OPEN = NonPrivate(learning_rate=0.05, batch_size=16, steps=2, seed=0)


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return mlp(SCHEMA.width, hidden=(64, 16))


def consortium(
    stack: ExitStack,
    folder: Path,
    *,
    training: TrainingMechanism | Sequence[TrainingMechanism] = PRIVATE,
    count: int = 3,
    epsilon: float = 50.0,
    **options: Any,
) -> Consortium:
    """Banks with made-up tables; those that train privately have a ledger in the folder."""
    trainings = [training] * count if isinstance(training, DpSgd | NonPrivate) else list(training)
    clients = []
    for index, mechanism in enumerate(trainings):
        name = f"bank_{index}"
        data = Canaries.draw(SCHEMA, count=60, rng=np.random.default_rng(index)).samples(COLUMNS)
        ledger = None
        if isinstance(mechanism, DpSgd):
            budget = Budget(epsilon=epsilon, delta=1e-5)
            ledger = stack.enter_context(Ledger.open(folder / f"{name}.ledger", population=name, budget=budget))
        clients.append(Client(name, data, training=mechanism, ledger=ledger))
    return Consortium(clients, **({"keys": SharedKey.generate()} | options))
