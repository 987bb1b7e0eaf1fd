"""The first page: who can read what, and how sure that is, in words for people who decide."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby

from privfed.attacks.adversary import ADVERSARIES, Adversary
from privfed.audit.findings import Audit, Finding, Measured, Verdict
from privfed.consortium import Plaintext
from privfed.report.checks import control_check
from privfed.report.model import Report
from privfed.report.tone import Tone
from privfed.training.mechanism import DpSgd

STRONG_EPSILON, REASONABLE_EPSILON = 1.0, 10.0
"""Up to the first a promise is called strong, up to the second reasonable: tiers 1 and 2 of Ponomareva et al., 2023, arXiv:2303.00654."""

_EVERY_UPDATE = "every client's update"


class Exposure(Enum):
    """What a party can make of the clients' updates. The value says it in words."""

    CIPHERTEXT = "only ciphertext"
    NOISED = "numbers with noise"
    CLEAR = "numbers without reliable noise"

    @property
    def tone(self) -> Tone:
        """How alarming that is."""
        return {Exposure.CIPHERTEXT: Tone.CALM, Exposure.NOISED: Tone.CAUTION, Exposure.CLEAR: Tone.DANGER}[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposed:
    """What one party can read. Public.

    Args:
        party: Its name.
        role: What it does, in words.
        holds_key: Whether it can decrypt.
        sees: What of the updates it sees, in words.
        exposure: What it can make of that.
        finding: What the best attack on canaries found; None if nothing was audited.
        control: What it found where it must succeed; None if there is none.
    """

    party: str
    role: str
    holds_key: bool
    sees: str
    exposure: Exposure
    finding: Finding | None
    control: Finding | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A sentence or two of the first page, and what they are about."""

    tone: Tone
    lead: str
    text: str


def exposed(report: Report) -> tuple[Exposed, ...]:
    """What each party of the run's trust mode can read.

    Raises:
        ValueError: If the trust mode is one that has no threat model here.
    """
    mode = report.history.mode
    if mode not in ADVERSARIES:
        raise ValueError(f"expected a trust mode out of {', '.join(ADVERSARIES)}, got {mode!r}; nothing was reported")
    return tuple(_exposed(report, adversary) for adversary in ADVERSARIES[mode])


def _exposed(report: Report, adversary: Adversary) -> Exposed:
    history, audit = report.history, report.audit
    encrypted = history.mode != Plaintext.__name__
    if adversary.sees_messages and (adversary.holds_key or not encrypted):
        sees, readable = _EVERY_UPDATE, True
    elif adversary.gets_model:
        sees, readable = "the sum of all updates" + (", from which it can take its own" if adversary.trains else ""), True
    else:
        sees, readable = "every client's update, encrypted", False
    audited = audit is not None and adversary.name in audit.parties
    return Exposed(
        party=adversary.name,
        role=_role(adversary),
        holds_key=adversary.holds_key and encrypted,
        sees=sees,
        exposure=(Exposure.NOISED if report.private else Exposure.CLEAR) if readable else Exposure.CIPHERTEXT,
        finding=audit.shown(adversary.name) if audit is not None and audited else None,
        control=audit.control_of(adversary.name) if audit is not None and audited else None,
    )


def _role(adversary: Adversary) -> str:
    roles = {
        "takes part, and knows what it sent itself": adversary.trains,
        "runs the rounds, and keeps every message": adversary.runs_server,
        "copies everything that travels": adversary.taps_wire,
    }
    words = [role for role, holds in roles.items() if holds]
    return "; ".join(words) or "gets the model after every round, as every client does"


def weakest_point(rows: Sequence[Exposed]) -> Exposed:
    """The party that can read most."""
    return max(rows, key=lambda row: (row.exposure is not Exposure.CIPHERTEXT, row.sees == _EVERY_UPDATE))


def verdict(report: Report) -> Point:
    """The run in a sentence: the most alarming thing about it."""
    audit = report.audit
    read = [finding for finding in audit.audited if finding.reads_records] if audit else []
    if read:
        best = max(read, key=_gain)
        text = f"Seen from {best.adversary.name}, an attack had {best.sentence()}."
        return Point(tone=Tone.DANGER, lead="Records were read under the protection in use", text=text)
    failed = [check.claim for check in report.checks if check.holds is False and (audit is None or check != control_check(audit))]
    if failed:
        return Point(tone=Tone.DANGER, lead="Not all that is claimed holds", text=f"This does not: {' '.join(failed)}")
    if not report.private:
        text = "Whoever can read an update can look for records in it, and no noise stops that. Use the run for comparisons only."
        return Point(tone=Tone.DANGER, lead="No differential privacy is claimed for this run", text=text)
    if audit is None:
        text = "What is said here about who can read what follows from the design and from the privacy ledgers, not from a test."
        return Point(tone=Tone.CAUTION, lead="No attack was tried on this run", text=text)
    found = _audited(audit)
    if found.tone is Tone.CALM and max(spent.epsilon for spent in report.spending) > REASONABLE_EPSILON:
        return Point(tone=Tone.CAUTION, lead=f"{found.lead}, but next to nothing is promised", text=found.text)
    return found


def _audited(audit: Audit) -> Point:
    """What an audit found of a run in which nothing else is alarming."""
    if not audit.controls_succeed:
        text = "Its attacks fail even where nothing protects the records, so that it proves nothing that they fail under protection."
        return Point(tone=Tone.CAUTION, lead="The audit says nothing about this model", text=text)
    if audit.untested:
        text = (
            f"Seen from {listed(audit.untested)}, no attack on records applied, or none is shown to read any even where nothing protects "
            "them: it proves nothing that none does under protection."
        )
        return Point(tone=Tone.CAUTION, lead="The audit does not say what every party can read", text=text)
    undecided = [finding for finding in audit.audited if finding.verdict is Verdict.UNDECIDED and not finding.picks]
    if any(finding.about_records for finding in undecided):
        text = (
            f"No attack is shown to read records, but {audit.repeats} batches are too few to rule out that one reads a record in every "
            f"second batch: {_excluded(audit)}."
        )
        return Point(tone=Tone.CAUTION, lead="The audit is too small to tell", text=text)
    if audit.better_than_guessing:
        best = max(audit.better_than_guessing, key=_gain)
        text = f"Seen from {best.adversary.name}, an attack had {best.sentence()}."
        return Point(tone=Tone.CAUTION, lead="No attack read a record, but one learned something about many of them", text=text)
    text = (
        f"No attack on records that was tried did better than guessing, from whichever party it looked: {_excluded(audit)}. With the "
        "protection taken away, the same attacks did."
    )
    if undecided:
        attacks = listed(list(dict.fromkeys(finding.attack for finding in undecided)))
        text += f" Not decided, in {audit.repeats} batches: {attacks}."
    return Point(tone=Tone.CALM, lead="No attack read a record", text=text)


def _excluded(audit: Audit) -> str:
    """The largest gain of an attack on records that the audit does not rule out."""
    highest = [finding.outcome.highest_gain for finding in audit.audited if finding.about_records and isinstance(finding.outcome, Measured)]
    return f"the most that any may have gained is {_points(max((0.0, *highest)))} (95% confidence)"


def _points(gain: float) -> str:
    points = f"{100 * min(1.0, gain):.0f}"
    return f"{points} point{'' if points == '1' else 's'}"


def readers(report: Report) -> tuple[Point, ...]:
    """Who can read what: parties that see the same are told together, the weakest point last."""
    rows = exposed(report)
    weakest = weakest_point(rows)
    points: list[Point] = []
    ordered = sorted(rows, key=lambda row: (row.exposure is not Exposure.CIPHERTEXT, row.sees == _EVERY_UPDATE))
    for (sees, exposure), group in groupby(ordered, key=lambda row: (row.sees, row.exposure)):
        names = [row.party for row in group]
        what = {
            Exposure.CIPHERTEXT: "nothing: it is ciphertext to them" if len(names) > 1 else "nothing: it is ciphertext",
            Exposure.NOISED: f"{sees}, with the clients' noise in it",
            Exposure.CLEAR: f"{sees}, with no reliable noise in it",
        }[exposure]
        last = ". This is the weakest point" if weakest.party in names else ""
        points.append(Point(tone=exposure.tone, lead=listed(names, start=True), text=f"{what}{last}."))
    return tuple(points)


def certainty(report: Report) -> tuple[Point, ...]:
    """How sure that is: what attacks found, what is promised, and which claims were tested."""
    return (_attacks(report), _promise(report), _claims(report))


def _attacks(report: Report) -> Point:
    audit = report.audit
    if audit is None:
        return Point(tone=Tone.CAUTION, lead="Attacks", text="None was tried.")
    if not audit.controls_succeed:
        text = "They fail even where nothing protects the records, so that the audit says nothing about this model."
        return Point(tone=Tone.DANGER, lead="Attacks", text=text)
    weakest = weakest_point(exposed(report))
    finding = weakest.finding
    text = f"Seen from the weakest point, on {audit.repeats} batches of made-up records: {finding.sentence() if finding else 'none'}"
    gains = [found.outcome.highest_gain for found in audit.of(weakest.party) if found.about_records and isinstance(found.outcome, Measured)]
    if gains and finding is not None and finding.verdict is not Verdict.BETTER:
        text += f"; a gain of at most {_points(max(0.0, *gains))} (95% confidence)"
    best = weakest.control or audit.best_control
    text += "." if best is None else f". With the protection taken away: {best.sentence()}. So the attacks work."
    return Point(tone=_worst(audit), lead="Attacks", text=text)


def _worst(audit: Audit) -> Tone:
    if any(finding.reads_records for finding in audit.audited):
        return Tone.DANGER
    open_question = any(finding.about_records and finding.verdict is Verdict.UNDECIDED for finding in audit.audited)
    return Tone.CAUTION if open_question or audit.untested or audit.better_than_guessing else Tone.CALM


def _promise(report: Report) -> Point:
    if not report.private:
        return Point(tone=Tone.DANGER, lead="Promise", text="None: without noise that nobody knows, no attack is ruled out.")
    most = max(report.spending, key=lambda spent: spent.epsilon)
    limit = "" if most.budget is None or math.isinf(most.budget) else f" of {most.budget:g}"
    unit = protected_unit(report)
    text = (
        f"Epsilon {most.epsilon:.2f}{limit} at most. Whoever knows every other {unit}, and sees all that was released, is right about "
        f"whether a given {unit} was used {best_guess(most.epsilon, most.delta)} of the time at most; a coin is right 50%. "
    )
    strong = f"Strong would be epsilon {STRONG_EPSILON:g}, and {best_guess(STRONG_EPSILON, most.delta)}."
    tested = report.audit is not None and report.audit.controls_succeed
    if most.epsilon <= STRONG_EPSILON:
        return Point(tone=Tone.CALM, lead="Promise", text=f"{text}That is strong: it holds against every attack, known or not.")
    if most.epsilon <= REASONABLE_EPSILON:
        rest = "; whether attacks that know less succeed is measured, not promised" if tested else ""
        text += f"{strong} So this limits the best-informed attack without ruling it out{rest}."
        return Point(tone=Tone.CAUTION, lead="Promise", text=text)
    rest = "; what speaks for safety is only what attacks did not find" if tested else ""
    return Point(tone=Tone.DANGER, lead="Promise", text=f"{text}{strong} This one rules out nearly nothing{rest}.")


def _claims(report: Report) -> Point:
    failed = [check.claim for check in report.checks if check.holds is False]
    untested = sum(check.holds is None for check in report.checks)
    rest = f" {untested} could not be tested." if untested else ""
    if failed:
        return Point(tone=Tone.DANGER, lead="Claims", text=f"{len(failed)} of {len(report.checks)} do NOT hold: {' '.join(failed)}{rest}")
    every = len(report.checks)
    if untested:
        text = f"{every - untested} of {every} that are listed below hold.{rest}"
    else:
        text = f"All {every} that are listed below hold." if every > 1 else "The one that is listed below holds."
    return Point(tone=Tone.CAUTION if untested else Tone.CALM, lead="Claims", text=text)


def spent_words(report: Report) -> str:
    """What each client spent of its budget, in a line.

    Clients with the same limit are told together, so that the limit is not repeated.
    """
    alike: dict[tuple[float | None, float | None], list[str]] = {}
    for spent in report.spending:
        epsilon = f"{spent.epsilon:.2f}" if math.isfinite(spent.epsilon) else "infinite"
        alike.setdefault((spent.budget, spent.delta), []).append(f"{spent.name} {epsilon}")
    lines: list[str] = []
    for (budget, delta), clients in alike.items():
        shown = clients if len(clients) <= 8 else [*clients[:7], f"{len(clients) - 7} others, see there"]
        limit = "" if budget is None or math.isinf(budget) else f" of {budget:g}"
        lines.append(f"{', '.join(shown)}{limit}" + ("" if delta is None else f"; at delta {delta:g}"))
    return ". ".join(lines)


def protected_unit(report: Report) -> str:
    """Whose presence is hidden: a record, unless every client that trains privately does so for customers."""
    private = [training for training in report.history.training.values() if isinstance(training, DpSgd)]
    return "customer" if private and all(training.records_per_customer for training in private) else "record"


def best_guess(epsilon: float, delta: float | None) -> str:
    """How often anybody can be right about whether a record was used, at even odds; see `PrivacyStatement.best_guess`.

    Example:
        >>> best_guess(1.0, 1e-6), best_guess(20.0, 1e-6), best_guess(math.inf, None)
        ('73.1%', 'over 99.9%', '100%')
    """
    if math.isinf(epsilon):
        return "100%"
    share = 1 - (1 - (delta or 0.0)) / (1 + math.exp(min(epsilon, 700.0)))
    return "over 99.9%" if share > 0.9995 else f"{share:.1%}"


def listed(names: Sequence[str], *, start: bool = False) -> str:
    """Names as part of a sentence, or at its start."""
    shown = list(names) if len(names) <= 8 else [*names[:7], f"{len(names) - 7} others"]
    text = shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
    return text[0].upper() + text[1:] if start else text


def _gain(finding: Finding) -> tuple[float, float]:
    return (finding.outcome.certified, finding.outcome.gain.mean) if isinstance(finding.outcome, Measured) else (0.0, 0.0)
