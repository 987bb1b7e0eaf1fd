"""The demonstration: three banks train a fraud model on made-up transactions, with every protection switched on."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from privfed.agreement import RoundContext
from privfed.audit.findings import Audit
from privfed.consortium import Consortium
from privfed.data.transactions import generate_transactions
from privfed.dp.mechanism import Budget
from privfed.dp.statement import PrivacyStatement
from privfed.engines.local import Simulation
from privfed.errors import PrivFedError
from privfed.files import is_bookkeeping, replacements
from privfed.he.secret import SharedKey
from privfed.history import RoundSummary
from privfed.report.checks import Check
from privfed.report.write import write_report
from privfed.saved import SavedRun
from privfed.scanner import process_holds_key
from privfed.scenario import Outcome, Scenario, run_scenario

BANKS = 3
BUDGET = Budget(epsilon=4.0, delta=1e-6)  # delta is below a tenth of one over all records of the demonstration
_SEED = 5  # a deal in which every bank has frauds to learn from


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
        outcome: The run.
        audit: What attacks on canaries found, under the same protection and without it.
        statements: What was promised about each bank's data.
        server_has_secret_key: Whether a key was found in the memory of the server's process; None where it cannot be read.
    """

    outcome: Outcome
    audit: Audit
    statements: tuple[PrivacyStatement, ...]
    server_has_secret_key: bool | None

    def to_json(self) -> dict[str, object]:
        """The result as one JSON object."""
        history = self.outcome.history
        evaluations = [summary.evaluation for summary in history.rounds if summary.evaluation is not None]
        return {
            "rounds": len(history.rounds),
            "mode": history.mode,
            "pr_auc": list(history.pr_auc),
            "pr_auc_scope": evaluations[-1].scope.value,
            "epsilon": dict(history.epsilon),
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
            self.outcome.history,
            folder / "report.html",
            audit=self.audit,
            statements=self.statements,
            checks=[scan],
            title="privfed demo: three banks, one fraud model, and what it gave away",
            command=command,
        )


def run_demo(
    size: Size,
    folder: Path,
    *,
    command: str | None = None,
    progress: Callable[[RoundSummary], None] | None = None,
    auditing: Callable[[int], None] | None = None,
) -> DemoResult:
    """Runs the demonstration: data, three banks with a ledger each, a server process without a key, encrypted rounds, an audit, a report.

    Args:
        size: `FULL` or `QUICK`.
        folder: Where to leave what a saved simulation has, its audit, and a report. An earlier demonstration in it is replaced when
            all that is done; until then, and if anything fails, it stays.
        command: How it was started, for reports; None if unknown.
        progress: Is called after each round.
        auditing: Is called after each of the audit's repeats, with the number of repeats done.

    Raises:
        ValueError: If the folder holds anything but a whole earlier demonstration.
        OSError: If the folder cannot be read or written.
    """
    _check_replaceable(folder)
    table = generate_transactions(rows=size.rows, fraud_rate=0.01, rng=np.random.default_rng(_SEED))
    scenario = Scenario(banks=BANKS, rounds=size.rounds, steps=size.steps, epsilon=BUDGET.epsilon, delta=BUDGET.delta, seed=_SEED)
    found: list[bool | None] = []

    def search(simulation: Simulation, consortium: Consortium) -> None:
        found.append(_key_found(simulation, consortium, rounds=size.rounds))

    with replacements(folder) as fresh:
        outcome = run_scenario(table, scenario, ledgers=fresh, progress=progress, inspect=search)
        outcome.save(fresh, command=command, demonstration=True)
        run = SavedRun.load(fresh)
        audit = run.audit(repeats=size.repeats, progress=auditing)
        run.keep_audit(audit)
        result = DemoResult(outcome=outcome, audit=audit, statements=run.statements(), server_has_secret_key=found[0])
        result.write_report(fresh, command=command)
    return result


def _check_replaceable(folder: Path) -> None:
    """Refuses a folder with anything in it whose loss could matter."""
    if all(is_bookkeeping(path) for path in folder.iterdir()):
        return
    refusal = ValueError(
        f"expected a new or empty folder, or one as privfed demo left it, got {folder}, which holds something else; nothing was run or "
        "overwritten; take another --out"
    )
    try:
        run = SavedRun.load(folder)
        run.statements()  # reads the ledgers, which must be those of the demonstration: one of anything else is never replaced
    except PrivFedError as error:
        raise refusal from error
    if not run.demonstration:
        raise refusal


def _key_found(simulation: Simulation, consortium: Consortium, *, rounds: int) -> bool | None:
    if not isinstance(consortium.keys, SharedKey):
        raise TypeError(f"expected banks with a shared key, got {type(consortium.keys).__name__}")
    contexts = [RoundContext(agreement=simulation.agreement, round=number) for number in range(rounds)]
    try:
        return process_holds_key(simulation.server_pid, consortium.keys, contexts)
    except (NotImplementedError, PermissionError):
        return None  # not looked at, which is said as such, never as "no key"
