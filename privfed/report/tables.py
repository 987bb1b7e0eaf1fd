"""The rows of a report's tables."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from privfed.attacks.adversary import Form, Holding
from privfed.audit.findings import Audit, Finding, Measured, Verdict, strongest
from privfed.history import History
from privfed.report.tone import Tone

_MOST_COLUMNS = 12

_FORMS = {
    Form.CIPHERTEXT: ("sealed", Tone.CALM),
    Form.OPENABLE: ("can open", Tone.CAUTION),
    Form.NUMBERS: ("in the clear", Tone.CAUTION),
    Form.PUBLIC: ("no numbers", None),
    Form.OWN: ("its own", None),
    Form.KEY: ("a secret key", Tone.DANGER),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One attack, under the protection in use and without it; None where it was not tried."""

    attack: str
    audited: Finding | None
    control: Finding | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartyFindings:
    """What one party could read. `nothing` says so in place of all audited findings, if it had nothing to attack."""

    name: str
    nothing: str
    rows: tuple[Compared, ...]


def compared(audit: Audit | None) -> tuple[PartyFindings, ...]:
    """Every party of the consortium, then those that exist in controls only."""
    if audit is None:
        return ()
    parties: list[PartyFindings] = []
    for party in audit.parties:
        own = audit.of(party)
        # A control under another protection than the party's first one stands in a line of its own.
        controls = [finding for finding in audit.controls if finding.party == party]
        first = {finding.attack: finding for finding in reversed(controls)}
        others: dict[str, list[Finding]] = {}
        for finding in controls:
            if first[finding.attack] is not finding:
                others.setdefault(finding.adversary.name, []).append(finding)
        blind = all(finding.bytes_seen is not None for finding in own)
        rows = tuple(Compared(attack=finding.attack, audited=finding, control=first.get(finding.attack)) for finding in own)
        parties.append(PartyFindings(name=party, nothing=own[0].sentence() if blind else "", rows=rows))
        for name, findings in others.items():
            lines = tuple(Compared(attack=finding.attack, audited=None, control=finding) for finding in findings)
            parties.append(PartyFindings(name=name, nothing="", rows=lines))
    return tuple(sorted(parties, key=lambda party: party.rows[0].audited is None))


def gain_words(finding: Finding) -> str:
    """How an attack compares with guessing, and between which bounds; empty without a score."""
    if not isinstance(finding.outcome, Measured):
        return ""
    outcome = finding.outcome
    if finding.picks:
        allowed = "no promise to break" if outcome.bound == 1 else "no more than the declared noise allows"
        return "MORE than the declared noise allows" if outcome.breaks_bound else allowed
    if outcome.gain.low == outcome.gain.high == 0:
        return "the same as guessing" + (", in too few batches to tell" if outcome.verdict is Verdict.UNDECIDED else "")
    if outcome.certified and outcome.gain.low <= 0:
        return f"{outcome.verdict.value} (it certified records)"
    low, high = (100 * min(1 - outcome.baseline, max(-outcome.baseline, end)) for end in (outcome.gain.low, outcome.gain.high))
    return f"{outcome.verdict.value} ({_signed(low)} to {_signed(high)} points)"


def finding_tone(finding: Finding) -> Tone | None:
    """How alarming a finding is: an attack that reads records, one that is better than guessing at anything, one that is not."""
    if finding.verdict is None:
        return None if finding.bytes_seen is None else Tone.CALM
    if finding.reads_records or (isinstance(finding.outcome, Measured) and finding.outcome.breaks_bound):
        return Tone.DANGER
    return Tone.CAUTION if finding.verdict in (Verdict.BETTER, Verdict.UNDECIDED) else Tone.CALM


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
    better = finding.reads_records
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
class Held:
    """How a party holds something: in what form, and how many bytes."""

    form: str
    size: str
    tone: Tone | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldThing:
    """Something that was held, and by whom: None at parties that do not hold it."""

    what: str
    by: tuple[Held | None, ...]


def holdings(audit: Audit | None) -> tuple[HeldThing, ...]:
    """Everything that any party held, a line per kind of thing and a column per party, in the order of `audit.holdings`."""
    if audit is None:
        return ()
    columns = [_kinds(held) for held in audit.holdings.values()]
    names = dict.fromkeys(name for column in columns for name in column)
    return tuple(HeldThing(what=name, by=tuple(column.get(name) for column in columns)) for name in names)


def _kinds(held: Sequence[Holding]) -> Mapping[str, Held]:
    """Things by what they are; what there is of several clients is told once."""
    groups: dict[str, list[Holding]] = {}
    for holding in held:
        groups.setdefault(holding.what.rpartition(" of ")[0] or holding.what, []).append(holding)
    kinds: dict[str, Held] = {}
    for start, group in groups.items():
        several = len(group) > 1
        form, tone = _FORMS[group[0].form]
        size = f"{len(group)} times {_sizes(group)}" if several else f"{group[0].size:,}"
        kinds[f"{start} of each client" if several else group[0].what] = Held(form=form, size=size, tone=tone)
    return kinds


def _sizes(group: Sequence[Holding]) -> str:
    sizes = {holding.size for holding in group}
    return f"{min(sizes):,}" if len(sizes) == 1 else f"{min(sizes):,} to {max(sizes):,}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """A round in a line."""

    number: int
    quality: str
    clients: int
    effective: str
    up: str
    down: str


def rounds(history: History) -> tuple[Round, ...]:
    """Every round that was held."""
    return tuple(
        Round(
            number=summary.record.round + 1,
            quality="-" if summary.evaluation is None or math.isnan(summary.evaluation.pr_auc) else f"{summary.evaluation.pr_auc:.3f}",
            clients=sum(weight > 0 for weight in summary.record.coefficients.values()),
            effective=f"{summary.record.effective_clients:.1f}",
            up=f"{fmean(summary.record.bytes_up.values() or (0,)):,.0f}",
            down=f"{fmean(summary.record.bytes_down.values() or (0,)):,.0f}",
        )
        for summary in history.rounds
    )


def scope(history: History) -> str:
    """On which kind of records the model was evaluated."""
    scopes = {summary.evaluation.scope.value for summary in history.rounds if summary.evaluation is not None}
    return f"The model's quality was measured on: {', '.join(sorted(scopes))}." if scopes else "The model was not evaluated."


def traffic(history: History) -> str:
    """What travelled, in a sentence; empty where nothing did."""
    up = [size for summary in history.rounds for size in summary.record.bytes_up.values()]
    down = [size for summary in history.rounds for size in summary.record.bytes_down.values()]
    if not up:
        return ""
    received = f", and received {fmean(down):,.0f} ({history.bytes_down_per_parameter:.2f})" if down else ""
    return (
        f"Per round, a client sent {fmean(up):,.0f} bytes on average ({history.bytes_up_per_parameter:.2f} per weight of the model)"
        f"{received}.{_scoring(history)}"
    )


def _scoring(history: History) -> str:
    """What was opened to find the coefficients, in sentences; empty where they were agreed."""
    records = [summary.record for summary in history.rounds if summary.record.disclosed]
    if not records:
        return ""
    opened, size = sum(record.disclosed for record in records), fmean(record.bytes_scoring for record in records)
    assurances = ", ".join(sorted({record.assurance.lower().replace("_", " ") for record in records}))
    fallbacks = sum(record.fallback != "NONE" for record in records)
    what = f"opened {opened:,} inner products in {len(records)} rounds: rounded norms and angles of updates, and no update."
    if history.mode == "EscrowKey":
        who = f"the key holder multiplied the signed uploads itself and {what}"
    else:
        who = f"each opener received {size:,.0f} bytes of these per round and {what} They rest on a server that is {assurances}."
    previous = f" In {fallbacks} rounds the weights of the rounds before were taken." if fallbacks else ""
    return f" To weigh the updates, {who}{previous}"


def _signed(points: float) -> str:
    rounded = round(points)
    return f"{rounded:+d}" if rounded else "0"
