"""What a report says, before it is laid out: everything in it is public, or about canaries."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from platform import python_version

from privfed.audit.findings import Audit
from privfed.dp.statement import PrivacyStatement
from privfed.history import History
from privfed.report.checks import Check, audit_checks, budget_checks, delta_checks, run_checks, statement_checks
from privfed.round_record import Stage

_DISTRIBUTIONS = ("privfed", "tenseal", "opacus", "dp-accounting", "torch", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """What one client spent of its privacy budget. Public.

    Args:
        name: The client.
        epsilon: What is promised after all that its ledger charged, for this run or another job; infinite without differential privacy.
        delta: At which epsilon is stated; None without a ledger.
        budget: Most that may be spent, infinite without a limit; None without a ledger.
        adaptive: Whether the whole budget is what is promised from the first charge on, because jobs may follow what they see.
    """

    name: str
    epsilon: float
    delta: float | None
    budget: float | None
    adaptive: bool = False

    @property
    def used_up(self) -> bool:
        """Whether more than 90 % of the budget is spent: hardly another round fits."""
        return not self.adaptive and self.share is not None and self.share > 0.9

    @property
    def share(self) -> float | None:
        """Share of the budget that is spent; None where there is no limit."""
        limited = self.budget is not None and math.isfinite(self.budget) and math.isfinite(self.epsilon)
        return self.epsilon / self.budget if limited and self.budget else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that did not go to plan in a round. Public.

    Args:
        round: Number of the round, from 1.
        what: In words.
        held: Whether the round was held all the same.
    """

    round: int
    what: str
    held: bool


@dataclass(frozen=True, kw_only=True)
class Report:
    """A run, what was spent and what was found out about it.

    Args:
        title: Heading.
        history: The run.
        audit: What attacks found; None if none was made.
        statements: The privacy statement of each client that has one.
        further_checks: Claims that were tested elsewhere.
        command: How the run was started; None if unknown.
        created: When the report was made, in UTC.
        versions: Of what computed it, by name.
    """

    title: str
    history: History = field(repr=False)
    audit: Audit | None = None
    statements: tuple[PrivacyStatement, ...] = ()
    further_checks: tuple[Check, ...] = ()
    command: str | None = None
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    versions: Mapping[str, str] = field(
        default_factory=lambda: {name: version(name) for name in _DISTRIBUTIONS} | {"python": python_version()}
    )

    @property
    def clients(self) -> tuple[str, ...]:
        """Names of the clients."""
        return tuple(self.history.training)

    @property
    def encrypted(self) -> bool:
        """Whether anything travelled: in the clear nothing does."""
        return any(summary.record.bytes_up for summary in self.history.rounds)

    @property
    def private(self) -> bool:
        """Whether differential privacy may be claimed: the run does, and so does every statement about a ledger."""
        return self.history.private and all(statement.private for statement in self.statements)

    @property
    def spending(self) -> tuple[Spending, ...]:
        """What each client spent: as its statement says, which covers its whole ledger; as the run noted, if there is no statement."""
        history = self.history
        stated = {statement.population: statement for statement in self.statements}
        return tuple(
            Spending(
                name=name,
                epsilon=history.epsilon[name] if name not in stated else stated[name].epsilon,
                delta=history.delta.get(name) if name not in stated else stated[name].delta,
                budget=history.budget.get(name),
                adaptive=name in stated and stated[name].adaptive_budget is not None,
            )
            for name in self.clients
        )

    @property
    def faults(self) -> tuple[Fault, ...]:
        """What did not go to plan, by round."""
        faults = [
            Fault(round=failed.round + 1, what=_silence(failed.silent) or failed.reason, held=False) for failed in self.history.failed
        ]
        for summary in self.history.rounds:
            record = summary.record
            for what in (_refusal(record.refused), _silence(record.silent)):
                if what:
                    faults.append(Fault(round=record.round + 1, what=what, held=True))
        return tuple(sorted(faults, key=lambda fault: fault.round))

    @property
    def seconds(self) -> Mapping[str, float]:
        """Wall-clock seconds of all rounds, by phase, and of the audit."""
        total: dict[str, float] = {}
        for summary in self.history.rounds:
            for phase, seconds in summary.record.seconds.items():
                total[phase] = total.get(phase, 0.0) + seconds
        return total | ({} if self.audit is None else {"audit": self.audit.seconds})

    @property
    def checks(self) -> tuple[Check, ...]:
        """Every claim that was tested, with its evidence."""
        return (
            *run_checks(self.history, encrypted=self.encrypted),
            *budget_checks({spent.name: (spent.epsilon, spent.budget) for spent in self.spending}),
            *delta_checks(self.history.training, {spent.name: spent.delta for spent in self.spending}),
            *statement_checks(self.history, self.statements),
            *audit_checks(self.audit),
            *self.further_checks,
        )

    def to_json(self) -> dict[str, object]:
        """The report as JSON values. What is infinite or undefined is null."""
        history = self.history
        return {
            "title": self.title,
            "created": self.created,
            "command": self.command,
            "versions": dict(self.versions),
            "mode": history.mode,
            "rule": history.rule,
            "private": self.private,
            "parameters": history.model.layout.size,
            "encryption": history.params.versions,
            "bytes_up_per_parameter": history.bytes_up_per_parameter,
            "bytes_down_per_parameter": history.bytes_down_per_parameter,
            "spending": [
                {"client": spent.name, "epsilon": _finite(spent.epsilon), "delta": spent.delta, "budget": _finite(spent.budget)}
                for spent in self.spending
            ],
            "rounds": [summary.to_json() for summary in history.rounds],
            "faults": [{"round": fault.round, "what": fault.what, "held": fault.held} for fault in self.faults],
            "checks": [{"claim": check.claim, "evidence": check.evidence, "holds": check.holds} for check in self.checks],
            "statements": [json.loads(statement.to_json()) for statement in self.statements],
            "audit": None if self.audit is None else self.audit.to_json(),
            "seconds": dict(self.seconds),
        }


def _refusal(names: Sequence[str]) -> str:
    return f"{', '.join(names)}: privacy budget used up, left out" if names else ""


def _silence(silent: Mapping[str, Stage]) -> str:
    return "; ".join(f"{name}: no answer from {stage.name.lower()} on" for name, stage in silent.items())


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value
