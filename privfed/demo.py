"""The demonstration: three banks train a fraud model on made-up transactions, with every protection switched on."""

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from privfed.agreement import RoundContext
from privfed.client import Client
from privfed.consortium import Consortium
from privfed.data.partition import dirichlet_partition
from privfed.data.paysim import PRE, features, grouped_split
from privfed.data.samples import Samples
from privfed.data.transactions import generate_transactions
from privfed.dp.ledger import Ledger
from privfed.dp.mechanism import Budget
from privfed.engines.local import Simulation
from privfed.he.secret import SharedKey
from privfed.history import History, RoundSummary
from privfed.scanner import process_holds_key
from privfed.training.loss import BinaryCrossEntropy
from privfed.training.mechanism import DpSgd
from privfed.training.model import mlp

BANKS = ("bank_a", "bank_b", "bank_c")
BUDGET = Budget(epsilon=4.0, delta=1e-5)
ALPHA = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How long the demonstration takes."""

    rows: int
    rounds: int
    steps: int


FULL = Size(rows=60_000, rounds=10, steps=40)
QUICK = Size(rows=20_000, rounds=3, steps=20)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """What the demonstration measured. The data are made up, so all of it may be shown.

    Args:
        history: The run.
        epsilon: What each bank had spent at the end.
        server_has_secret_key: Whether a key was found in the memory of the server's process; None where it cannot be read.
    """

    history: History
    epsilon: dict[str, float]
    server_has_secret_key: bool | None

    def to_json(self) -> dict[str, object]:
        """The result as one JSON object."""
        history = self.history
        evaluations = [summary.evaluation for summary in history.rounds if summary.evaluation is not None]
        return {
            "rounds": len(history.rounds),
            "mode": history.mode,
            "pr_auc": list(history.pr_auc),
            "pr_auc_scope": evaluations[-1].scope.value,
            "epsilon": self.epsilon,
            "delta": BUDGET.delta,
            "budget": asdict(BUDGET),
            "effective_clients": history.rounds[-1].record.effective_clients,
            "parameters": history.model.layout.size,
            "bytes_up_per_parameter": history.bytes_up_per_parameter,
            "bytes_down_per_parameter": history.bytes_down_per_parameter,
            "he_error_max": history.grid_error_max,
            "server_has_secret_key": self.server_has_secret_key,
            "audit": [],
        }


def run_demo(size: Size, *, progress: Callable[[RoundSummary], None] | None = None) -> DemoResult:
    """Runs the demonstration: data, three banks with a ledger each, a server process without a key, encrypted rounds.

    Args:
        size: `FULL` or `QUICK`.
        progress: Is called after each round.
    """
    rng = np.random.default_rng(20)
    table = generate_transactions(rows=size.rows, fraud_rate=0.01, rng=rng)
    train, test = grouped_split(features(table, PRE), test_share=0.25, rng=rng)
    partition = dirichlet_partition(train, clients=len(BANKS), alpha=ALPHA, rng=rng, min_samples=size.rows // 12, min_positive=20)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="privfed-demo-")))
        clients = [
            Client(
                name,
                data,
                training=training(data, size=size),
                ledger=stack.enter_context(Ledger.open(folder / f"{name}.ledger", population=name, budget=BUDGET)),
            )
            for name, data in zip(BANKS, partition.split(train), strict=True)
        ]
        keys = SharedKey.generate()
        consortium = Consortium(clients, keys=keys, loss=BinaryCrossEntropy(positive_weight=20.0))
        with torch.random.fork_rng():
            torch.manual_seed(0)  # the same first model in every demonstration; noise and keys are never seeded
            model = mlp(inputs=len(train.columns), hidden=(64, 48))
        simulation = stack.enter_context(Simulation(consortium, model, evaluation=test, separate_server=True))
        history = simulation.run(rounds=size.rounds, progress=progress)
        contexts = [RoundContext(agreement=simulation.agreement, round=number) for number in range(size.rounds)]
        try:
            found: bool | None = process_holds_key(simulation.server_pid, keys, contexts)
        except (NotImplementedError, PermissionError):
            found = None  # not looked at, which is said as such, never as "no key"
        return DemoResult(history=history, epsilon=dict(history.epsilon), server_has_secret_key=found)


def training(data: Samples, *, size: Size) -> DpSgd:
    """How a bank of the demonstration trains: it declares its size, rounded up to thousands, and calibrates to its budget."""
    return DpSgd.for_budget(
        BUDGET,
        rounds=size.rounds,
        max_records=-(-len(data) // 1000) * 1000,
        expected_batch_size=512,
        steps=size.steps,
        learning_rate=1.0,
    )
