"""The rows of a report's tables."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean

from privfed.audit.findings import Audit, Finding, Measured, strongest
from privfed.history import History

_MOST_COLUMNS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class PartyFindings:
    """What one party could read: a line for all attacks, if it had nothing to attack, else a finding per attack."""

    name: str
    nothing: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Findings under one protection."""

    heading: str
    parties: tuple[PartyFindings, ...]


def groups(audit: Audit | None) -> tuple[Group, ...]:
    """The consortium's own protection first, then the controls."""
    if audit is None:
        return ()
    groups = [Group(heading=f"As this consortium trains: {audit.protection}", parties=_by_party(audit.audited))]
    for protection in dict.fromkeys(finding.protection for finding in audit.controls):
        findings = [finding for finding in audit.controls if finding.protection == protection]
        groups.append(Group(heading=f"Control, with the protection taken away: {protection}", parties=_by_party(findings)))
    return tuple(groups)


def _by_party(findings: Sequence[Finding]) -> tuple[PartyFindings, ...]:
    """Findings by party; a party that has nothing to attack gets one line for all attacks."""
    parties: list[PartyFindings] = []
    for name, group in groupby(findings, key=lambda finding: finding.adversary.name):
        own = tuple(group)
        blind = all(finding.bytes_seen is not None for finding in own)
        parties.append(PartyFindings(name=name, nothing=own[0].sentence() if blind else "", findings=() if blind else own))
    return tuple(parties)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What an attack said of one cell, and whether that it is right is luck."""

    text: str
    right: bool
    luck: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A true canary, and what an attack said of it."""

    truth: tuple[str, ...]
    said: tuple[Cell, ...]
    certified: bool
    guessed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What one attack said of one client's canaries in the first batch."""

    heading: str
    finding: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]


def examples(audit: Audit | None) -> tuple[Shown, ...]:
    """What was read without protection, then what was read with it: of what was said, not guessed, the best."""
    if audit is None:
        return ()
    speaking = [finding for finding in audit.audited if _speaks(finding)]
    single = [finding for finding in speaking if isinstance(finding.outcome, Measured) and finding.outcome.rows == audit.rows]
    chosen = [finding for finding in (audit.best_control, strongest(single or speaking or audit.audited)) if finding is not None]
    return tuple(shown for finding in chosen if (shown := _shown(finding)) is not None)


def _speaks(finding: Finding) -> bool:
    example = finding.outcome.example if isinstance(finding.outcome, Measured) else None
    return example is not None and not all(example.guessed)


def _shown(finding: Finding) -> Shown | None:
    outcome = finding.outcome
    if not isinstance(outcome, Measured) or outcome.example is None:
        return None
    example = outcome.example
    # What is right in a reconstruction that is no better than guessing is right by luck.
    better = outcome.score.low > outcome.baseline
    rows = [
        Row(
            truth=truth[:_MOST_COLUMNS],
            said=tuple(
                Cell(text=text, right=right, luck=guessed or not better)
                for text, right in zip(said[:_MOST_COLUMNS], rights[:_MOST_COLUMNS], strict=True)
            ),
            certified=certified,
            guessed=guessed,
        )
        for truth, said, rights, certified, guessed in zip(
            example.truth, example.said, example.right, example.certified, example.guessed, strict=True
        )
    ]
    protection = "With the protection taken away" if finding.control else "Under the protection in use"
    return Shown(
        heading=f"{protection}: {finding.adversary.name} ({finding.attack})",
        finding=finding.sentence(),
        columns=example.columns[:_MOST_COLUMNS],
        rows=tuple(rows),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """A round in a line."""

    number: int
    quality: str
    clients: int
    up: str
    down: str


def rounds(history: History) -> tuple[Round, ...]:
    """Every round that was held."""
    return tuple(
        Round(
            number=summary.record.round + 1,
            quality="-" if summary.evaluation is None or math.isnan(summary.evaluation.pr_auc) else f"{summary.evaluation.pr_auc:.3f}",
            clients=len(summary.record.participants),
            up=f"{fmean(summary.record.bytes_up.values() or (0,)):,.0f}",
            down=f"{fmean(summary.record.bytes_down.values() or (0,)):,.0f}",
        )
        for summary in history.rounds
    )


def scope(history: History) -> str:
    """On which kind of records the model was evaluated."""
    scopes = {summary.evaluation.scope.value for summary in history.rounds if summary.evaluation is not None}
    return f"The model's quality was measured on: {', '.join(sorted(scopes))}." if scopes else "The model was not evaluated."
