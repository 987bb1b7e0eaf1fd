"""The demonstration: three banks train a fraud model on made-up transactions, with every protection switched on."""

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from privfed.agreement import RoundContext
from privfed.audit.canaries import transaction_schema
from privfed.audit.findings import Audit
from privfed.audit.run import run_audit
from privfed.client import Client
from privfed.consortium import Consortium
from privfed.data.partition import dirichlet_partition
from privfed.data.paysim import PRE, features, grouped_split
from privfed.data.samples import Samples
from privfed.data.transactions import generate_transactions
from privfed.dp.ledger import Ledger
from privfed.dp.mechanism import Budget
from privfed.dp.statement import PrivacyStatement
from privfed.engines.local import Simulation
from privfed.he.secret import SharedKey
from privfed.history import History, RoundSummary
from privfed.report.checks import Check
from privfed.report.write import write_report
from privfed.scanner import process_holds_key
from privfed.training.loss import BinaryCrossEntropy
from privfed.training.mechanism import DpSgd
from privfed.training.model import mlp

BANKS = ("bank_a", "bank_b", "bank_c")
BUDGET = Budget(epsilon=4.0, delta=1e-6)  # delta is below a tenth of one over all records of the demonstration
ALPHA = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How long the demonstration takes."""

    rows: int
    rounds: int
    steps: int
    repeats: int


FULL = Size(rows=60_000, rounds=10, steps=40, repeats=16)
QUICK = Size(rows=20_000, rounds=3, steps=20, repeats=4)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """What the demonstration measured. The data are made up, so all of it may be shown.

    Args:
        history: The run.
        audit: What attacks on canaries found, under the same protection and without it.
        statements: What was promised about each bank's data.
        server_has_secret_key: Whether a key was found in the memory of the server's process; None where it cannot be read.
    """

    history: History
    audit: Audit
    statements: tuple[PrivacyStatement, ...]
    server_has_secret_key: bool | None

    @property
    def epsilon(self) -> dict[str, float]:
        """What each bank had spent at the end."""
        return dict(self.history.epsilon)

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
            "audit": [finding.to_json() for finding in self.audit.findings],
        }

    def write_report(self, folder: Path, *, command: str | None = None) -> Path:
        """Writes report.html, report.md and report.json into a folder, which is made; returns the HTML file.

        Args:
            folder: Where to. A report that is there is replaced.
            command: How the demonstration was started, for the report.
        """
        found = self.server_has_secret_key
        searched = "its memory was searched for the shared key and the key of every round"
        scan = Check(
            claim="The server, a process of its own, held no secret key.",
            evidence="its memory cannot be read on this system" if found is None else f"{searched}: {'found' if found else 'not found'}",
            holds=None if found is None else not found,
        )
        return write_report(
            self.history,
            folder / "report.html",
            audit=self.audit,
            statements=self.statements,
            checks=[scan],
            title="privfed demo: three banks, one fraud model, and what it gave away",
            command=command,
        )


def run_demo(
    size: Size, *, progress: Callable[[RoundSummary], None] | None = None, auditing: Callable[[int], None] | None = None
) -> DemoResult:
    """Runs the demonstration: data, three banks with a ledger each, a server process without a key, encrypted rounds, an audit.

    Args:
        size: `FULL` or `QUICK`.
        progress: Is called after each round.
        auditing: Is called after each of the audit's repeats, with the number of repeats done.
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
        statements = tuple(_statement(client) for client in clients)
        audit = run_audit(consortium, model, schema=transaction_schema(PRE), repeats=size.repeats, progress=auditing)
    return DemoResult(history=history, audit=audit, statements=statements, server_has_secret_key=found)


def _statement(client: Client) -> PrivacyStatement:
    if not isinstance(client.training, DpSgd) or client.ledger is None:
        raise ValueError("expected a bank that trains with DP-SGD and has a ledger")
    return PrivacyStatement.of(
        client.ledger.events(), population=client.name, delta=client.ledger.budget.delta, max_grad_norm=client.training.max_grad_norm
    )


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
