"""The first page: who can read what, how sure that is, and what would help, in words for people who decide."""

import math
from dataclasses import dataclass
from enum import Enum

from privfed.attacks.adversary import PLAINTEXT_ADVERSARIES, SHARED_KEY_ADVERSARIES, Adversary
from privfed.consortium import Plaintext
from privfed.dp.statement import PrivacyStatement
from privfed.he.secret import SharedKey
from privfed.report.model import Report

_PARTIES = {SharedKey.__name__: SHARED_KEY_ADVERSARIES, Plaintext.__name__: PLAINTEXT_ADVERSARIES}
_STRICT_EPSILON = 1.0
_NO_PRIVACY = (
    "No differential privacy is claimed for this run: use it for comparisons only. Claims that stood their test are about other things."
)
_EVERY_UPDATE = "every client's update"


class Exposure(Enum):
    """What a party can make of the clients' updates. The value says it in words."""

    CIPHERTEXT = "nothing: only ciphertext"
    NOISED = "numbers that carry the clients' noise"
    CLEAR = "numbers without noise"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposed:
    """What one party can read. Public.

    Args:
        party: Its name.
        holds_key: Whether it can decrypt.
        sees: What of the updates it sees, in words.
        exposure: What it can make of that.
        evidence: What attacks on canaries found, in one sentence.
        control: What they found where they must succeed; empty if nothing was audited.
        bound: What no attack can exceed, in words.
    """

    party: str
    holds_key: bool
    sees: str
    exposure: Exposure
    evidence: str
    control: str
    bound: str


def exposed(report: Report) -> tuple[Exposed, ...]:
    """What each party of the run's trust mode can read.

    Raises:
        ValueError: If the trust mode is one that has no threat model here.
    """
    return tuple(_exposed(report, adversary) for adversary in _parties(report))


def _parties(report: Report) -> tuple[Adversary, ...]:
    mode = report.history.mode
    if mode not in _PARTIES:
        raise ValueError(f"expected a trust mode out of {', '.join(_PARTIES)}, got {mode!r}; nothing was reported")
    return _PARTIES[mode]


def _exposed(report: Report, adversary: Adversary) -> Exposed:
    history, audit = report.history, report.audit
    encrypted = history.mode != Plaintext.__name__
    if adversary.sees_messages and (adversary.holds_key or not encrypted):
        sees, readable = _EVERY_UPDATE, True
    elif adversary.gets_model:
        sees, readable = "the sum of all updates" + (", out of which it can take its own" if adversary.trains else ""), True
    else:
        sees, readable = "every client's update, encrypted", False
    evidence, control = "not audited", ""
    if audit is not None and adversary.name in audit.parties:
        evidence = audit.shown(adversary.name).sentence()
        planted = audit.control_of(adversary.name)
        control = "" if planted is None else f"With the protection taken away: {planted.sentence()}"
    exposure = (Exposure.NOISED if history.private else Exposure.CLEAR) if readable else Exposure.CIPHERTEXT
    noise = f"epsilon {max(spent.epsilon for spent in report.spending):.2f} per record" if history.private else "nothing"
    bound = noise if readable else f"the encryption, and behind it {noise}"
    return Exposed(
        party=adversary.name,
        holds_key=adversary.holds_key and encrypted,
        sees=sees,
        exposure=exposure,
        evidence=evidence,
        control=control,
        bound=bound,
    )


def headlines(report: Report) -> tuple[str, ...]:
    """The run in a few sentences: what nobody can read, the weakest point, what attacks did, what was spent, what failed."""
    history = report.history
    rows = exposed(report)
    lines: list[str] = [] if history.private else [_NO_PRIVACY]
    blind = [row for row in rows if row.exposure is Exposure.CIPHERTEXT]
    if blind:
        lines.append(f"{_listed([row.party for row in blind], start=True)} can read nothing: only ciphertext, without the key.")
    weakest = max(rows, key=lambda row: (row.exposure is not Exposure.CIPHERTEXT, row.sees == _EVERY_UPDATE))
    protected = "and what it reads carries that client's noise" if history.private else "and nothing hides the records in it"
    lines.append(f"The weakest point is {weakest.party}: it sees {weakest.sees} in the clear, {protected}.")
    lines.append(_attacks(report, weakest))
    if history.private:
        most = max(report.spending, key=lambda spent: spent.epsilon)
        limit = "" if most.budget is None or math.isinf(most.budget) else f" of a budget of {most.budget:g}"
        lines.append(f"Each client spent at most epsilon {most.epsilon:.2f}{limit}.{_meaning(report)}")
    failed = [check.claim for check in report.checks if check.holds is False]
    lines.append(f"{len(report.checks) - len(failed)} of {len(report.checks)} claims below stood their test." if not failed else "")
    lines += [f"A claim did NOT stand its test: {claim}" for claim in failed]
    return tuple(line for line in lines if line)


def _meaning(report: Report) -> str:
    guesses = [statement.best_guess for statement in report.statements if statement.private]
    if not guesses:
        return ""
    return (
        " That is a promise about every attack, also one that knows all records but one: it tells whether that one was used at most "
        f"{max(guesses):.1%} of the time, where a coin is right 50% of the time. What attacks reach that were tried, and know less, is "
        "measured, not bounded."
    )


def _attacks(report: Report, weakest: Exposed) -> str:
    audit = report.audit
    if audit is None:
        return "No attack was tried on this run: what is said here follows from the design alone."
    if not audit.controls_succeed:
        return "Attacks were tried, but they fail even where nothing protects the records: the audit says nothing about this model."
    best = audit.best_control
    taken_away = "" if best is None else f" With the protection taken away, the same attacks had {best.sentence()}."
    return f"Attacks on made-up records, seen from there, had {weakest.evidence}.{taken_away}"


def advice(report: Report) -> tuple[str, ...]:
    """What would make the run safer, most urgent first."""
    history = report.history
    lines: list[str] = []
    if history.mode == Plaintext.__name__:
        lines.append("Encrypt. This run was in the clear, for comparison: whoever summed the updates saw each of them.")
    if not history.private:
        lines.append(
            "Train with differential privacy (DP-SGD) and a ledger. Without noise, whoever gets an update can read records off it."
        )
    if history.mode == SharedKey.__name__:
        lines.append(
            "Let a party run the server that no client controls. Every client holds the key in this trust mode, so that one client "
            "together with the server can open every update; then only the noise protects."
        )
    private = [statement for statement in report.statements if statement.private and statement.epsilon > _STRICT_EPSILON]
    if private:
        worst = max(private, key=lambda statement: statement.epsilon)
        lines.append(
            f"Spend less. At epsilon {worst.epsilon:.2f} somebody who knows everything else may be right about one record "
            f"{worst.best_guess:.1%} of the time; at epsilon 1 it would be {_best_guess(worst):.1%}. Fewer rounds, more records per "
            "client or more noise bring it down, at a cost in accuracy."
        )
    few = min(summary.record.effective_clients for summary in history.rounds)
    fewest = min(len(summary.record.participants) for summary in history.rounds)
    if few < 5 and fewest > 1:
        left = "the update of the other one" if fewest == 2 else f"a sum of {fewest - 1}"
        lines.append(
            f"Take in more clients. The smallest sum was of {fewest} clients ({few:.1f} effective clients): a client that takes "
            f"its own update out of it is left with {left}."
        )
    if report.faults:
        lines.append("Look at the rounds with faults below: clients that are left out make the sum smaller.")
    return tuple(lines)


def _best_guess(statement: PrivacyStatement) -> float:
    return 1 - (1 - statement.delta) / (1 + math.exp(_STRICT_EPSILON))


def _listed(names: list[str], *, start: bool = False) -> str:
    """Names as part of a sentence, or at its start."""
    if len(names) > 8:
        names = [*names[:7], f"{len(names) - 7} others"]
    text = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return text[0].upper() + text[1:] if start else text
