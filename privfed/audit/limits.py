"""Limits that an auditor sets: a run that does not keep them must not pass, and neither must one of which that is not known."""

import math
import tomllib
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from privfed.audit.findings import Audit, Finding, Measured
from privfed.errors import UnsupportedDataError
from privfed.history import History
from privfed.strict_json import real


@dataclass(frozen=True, slots=True, kw_only=True)
class Exceeded:
    """A limit that was not kept, or of which it is not known. Public.

    Args:
        limit: Its name.
        asked: The number that the auditor set; empty for a limit without one.
        found: What was found instead, in words.
    """

    limit: str
    asked: str
    found: str

    def __str__(self) -> str:
        return f"{' '.join(filter(None, (self.limit, self.asked)))}: {self.found}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an auditor accepts. What was not measured is not accepted.

    Args:
        max_cells_read: Largest advantage over guessing (0 no better, 1 everything) that an attack on records may have, seen from any
            party, at the upper end of its interval and no less than so few batches can rule out. From 0, below 1. Not kept either if
            something was certified that guessing does not give, records were picked out of candidates more often than the declared noise
            allows, or no attack reads records as some party where nothing protects them.
        max_epsilon: Most that any client may have spent. Above 0.
        require_as_declared: Whether every client must have been measured to train as it declares, with noise; no key may lie at the
            server, and no opening give one away.

    Raises:
        ValueError: If a limit is out of its range.

    Example:
        >>> Limits(max_cells_read=0.1, max_epsilon=8.0).max_epsilon
        8.0
    """

    max_cells_read: float | None = None
    max_epsilon: float | None = None
    require_as_declared: bool = False

    def __post_init__(self) -> None:
        if self.max_cells_read is not None and not 0 <= real(self.max_cells_read) < 1:
            raise ValueError(f"expected max_cells_read from 0 and below 1, got {self.max_cells_read}")
        if self.max_epsilon is not None and not 0 < real(self.max_epsilon) < math.inf:
            raise ValueError(f"expected max_epsilon to be a finite number above 0, got {self.max_epsilon}")
        if not isinstance(self.require_as_declared, bool):  # pyright: ignore[reportUnnecessaryIsInstance] -- it may come from a file
            raise ValueError("expected require_as_declared to be true or false, got something else")

    @classmethod
    def load(cls, path: Path) -> "Limits":
        """Reads a TOML file with a line per limit, at least one.

        Raises:
            OSError: If the file may not be read.
            UnsupportedDataError: If it holds anything else.
        """
        known = ", ".join(field.name for field in fields(cls))
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
            limits = cls(**content)
        except (ValueError, TypeError, RecursionError) as error:
            raise UnsupportedDataError(
                f"{path} is no TOML file of limits ({known}): {' '.join(str(error).split())}; nothing was audited"
            ) from error
        if not limits.given:
            raise UnsupportedDataError(f"{path} sets no limit, out of {known}; nothing was audited")
        return limits

    @property
    def given(self) -> bool:
        """Whether there is a limit at all."""
        return self != Limits()

    def check(self, audit: Audit, history: History) -> tuple[Exceeded, ...]:
        """Limits that a run does not keep; empty if it keeps all.

        Args:
            audit: Of the run.
            history: Of the run.
        """
        found = {
            "max_cells_read": None if self.max_cells_read is None else _read_too_much(audit, self.max_cells_read),
            "max_epsilon": None if self.max_epsilon is None else _spent_too_much(history, self.max_epsilon),
            "require_as_declared": _not_as_declared(audit) if self.require_as_declared else None,
        }
        asked = {name: f"{value:g}" if isinstance(value, int | float) and value is not True else "" for name, value in asdict(self).items()}
        return tuple(Exceeded(limit=name, asked=asked[name], found=words) for name, words in found.items() if words)


def _read_too_much(audit: Audit, most: float) -> str:
    if not audit.controls_succeed:
        return "not measured: the attacks fail even where nothing protects the records"
    faults: list[str] = []
    for party in audit.parties:
        findings = audit.of(party)
        if all(finding.bytes_seen is not None for finding in findings):
            continue  # it has nothing but ciphertext
        about = [finding for finding in findings if finding.about_records]
        if not about:
            faults.append(f"not measured as {party}: no attack on records applied")
            continue
        if party in audit.untested and not any(finding.reads_records for finding in about):
            faults.append(f"not measured as {party}: no attack on records reads any there even where nothing protects them")
        worst = max(about, key=_upper)
        if not _upper(worst) <= most:
            faults.append(_words(worst))
        faults += [f"{party}: more picks are right than the declared noise allows" for finding in findings if _breaks(finding)]
    return "; ".join(faults) or ("" if audit.parties else "not measured: no party was audited")


def _upper(finding: Finding) -> float:
    """Upper end of the advantage; 1 where a certificate says so, or nothing is left to learn and so nothing was measured."""
    outcome = finding.outcome
    if not isinstance(outcome, Measured) or outcome.baseline >= 1 or outcome.certified:
        return 1.0
    return outcome.highest_gain / (1 - outcome.baseline)


def _words(finding: Finding) -> str:
    outcome, who = finding.outcome, f"{finding.adversary.name}, {finding.attack}"
    if not isinstance(outcome, Measured) or (outcome.baseline >= 1 and not outcome.certified):
        return f"not measured as {who}: guessing is always right"
    if outcome.certified:
        return f"{who}: {finding.sentence()}"
    return (
        f"{who}: an advantage of {outcome.advantage:.2f}, and up to {_upper(finding):.2f} by what "
        f"{outcome.score.repeats} batches can rule out"
    )


def _breaks(finding: Finding) -> bool:
    return isinstance(finding.outcome, Measured) and finding.outcome.breaks_bound


def _spent_too_much(history: History, most: float) -> str:
    if not history.private:
        return "no differential privacy may be claimed for this run"
    over = {name: spent for name, spent in history.epsilon.items() if not spent <= most}
    if over or not history.epsilon:
        return ", ".join(f"{name} spent {spent:.2f}" for name, spent in over.items()) or "not known what was spent"
    return ""


def _not_as_declared(audit: Audit) -> str:
    faults = list(audit.keys_at_server) + ([audit.opening.fault] if audit.opening is not None and audit.opening.fault else [])
    faults += [
        f"{metered.client}: {metered.fault or f'not measured: {metered.missing}'}"
        for metered in audit.trainings
        if metered.fault or metered.reading is None
    ]
    return "; ".join(faults) or ("" if audit.trainings else "not measured: no client's training was looked at")
