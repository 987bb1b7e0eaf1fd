"""What an audit found: one finding per party, attack and setting, beside what guessing reaches."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum

from scipy.special import rel_entr

from privfed.attacks.adversary import Adversary, Form, Holding
from privfed.attacks.observation import NotApplicable
from privfed.attacks.scoring import Interval
from privfed.audit.example import Example
from privfed.audit.metering import MeteredTraining
from privfed.audit.openings import OpeningReading
from privfed.audit.poisoned import Poisoned
from privfed.audit.suite import Baseline

_FALSE_ALARM = 1e-3
_UNSEEN = 0.05  # with this probability, what happens in so large a share of batches happens in none of them


class Verdict(Enum):
    """How an attack compares with guessing. The value says it in words."""

    BETTER = "better than guessing"
    UNDECIDED = "too few batches to tell"
    NO_BETTER = "no better than guessing"
    WORSE = "worse than guessing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """How right an attack was about canaries, over independent batches.

    Args:
        score: Mean and interval over the batches, each from 0 to 1.
        baseline: What the stronger baseline reaches; where the attack said nothing, it spoke.
        stronger: Which baseline that is.
        baselines: What each reaches.
        gain: Score minus baseline of the same batch, from -1 to 1. The confidence level of its interval is 95 %, for audited findings
            all together: where attacks only guess, about one audit in forty says that some attack does better.
        advantage: Share of what guessing leaves open that the attack gets: 1 everything, 0 no better than guessing.
        certified: Mean number of rows per batch that the attack certified to be exact, false ones not counted.
        false_certificates: Certified rows of all batches that were none.
        rows: Rows per batch.
        example: What it said in the first batch; None for attacks that read no rows.
        bound: Largest score that the declared noise allows anyone, 1 without noise; None for attacks of which no bound is known.
    """

    score: Interval
    baseline: float
    stronger: Baseline
    baselines: Mapping[Baseline, float]
    gain: Interval
    advantage: float
    certified: float
    false_certificates: int
    rows: int
    example: Example | None = field(repr=False)
    bound: float | None = None

    @property
    def breaks_bound(self) -> bool:
        """Whether the score proves that the noise is less than declared: at most once in `_FALSE_ALARM` by chance.

        The mean of n independent shares of expectation b reaches s > b with probability exp(-n KL(s, b)) at most (Hoeffding, 1963,
        theorem 1). It asks for no normal distribution, and so holds for few batches.
        """
        score, bound = self.score, self.bound
        return bound is not None and score.mean > bound and score.repeats * _divergence(score.mean, bound) > -math.log(_FALSE_ALARM)

    @property
    def telling(self) -> float:
        """The gain of an attack that reads one whole record in every second batch and guesses the others: one that would matter."""
        return (1 - self.baseline) / (2 * self.rows)

    @property
    def highest_gain(self) -> float:
        """Largest mean gain that the batches do not rule out, from 0 to 1 - baseline.

        The interval of the gain knows of the spread that it saw. An attack that says nothing in most batches, and reads all of some,
        shows none if it was seen in the wrong ones: so it may read all of 1 - 0.05^(1/n) of the batches, if n showed none of it.
        """
        rarely = 1 - _UNSEEN ** (1 / self.gain.repeats)
        return min(1 - self.baseline, max(self.gain.high, rarely * (1 - self.baseline)))

    @property
    def verdict(self) -> Verdict:
        """Better than guessing if something was certified or the interval of the gain is above zero, no better if `telling` is excluded.

        Where all batches gave the same, the interval has no width: `telling` is excluded by so many that none would be the second one.
        """
        if self.certified or self.gain.low > 0:
            return Verdict.BETTER
        gain = self.gain
        if gain.high > self.telling or (gain.low == gain.high and 0.5**gain.repeats > (1 - gain.level) / 2):
            return Verdict.UNDECIDED
        return Verdict.WORSE if self.gain.high < 0 else Verdict.NO_BETTER


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one party could read with one attack.

    Args:
        adversary: The party.
        party: Name of the audited party that a control is about; else the adversary's own.
        attack: Name of the attack.
        measure: What its score is the share of.
        protection: What protected the round.
        control: Whether this is a planted positive: a round, or a key, in which the attack is expected to succeed.
        outcome: What came of it. `NotApplicable` is no score and says nothing about safety.
        bytes_seen: Bytes of ciphertext that the party saw; None if it saw numbers.
    """

    adversary: Adversary
    party: str
    attack: str
    measure: str
    protection: str
    control: bool
    outcome: Measured | NotApplicable
    bytes_seen: int | None

    def sentence(self) -> str:
        """The finding in one sentence."""
        outcome = self.outcome
        if isinstance(outcome, NotApplicable):
            if self.bytes_seen is not None:
                return f"nothing to attack: only ciphertext ({self.bytes_seen:,} bytes)"
            return str(outcome)
        certified = f"; {outcome.certified:.1f} of {outcome.rows} records certified" if outcome.certified else ""
        number = outcome.false_certificates
        false = f"; {number} {'certificate was' if number == 1 else 'certificates were'} false" if number else ""
        bound = "" if outcome.bound in (None, 1) else f"; the declared noise allows {outcome.bound:.0%}"
        return f"{outcome.score.mean:.0%} {self.measure} (guessing: {outcome.baseline:.0%}{bound}){certified}{false}"

    @property
    def verdict(self) -> Verdict | None:
        """How the attack compares with guessing; None without a score."""
        return self.outcome.verdict if isinstance(self.outcome, Measured) else None

    @property
    def reads_records(self) -> bool:
        """Whether the attack was better than guessing at what single records are, not at how many there are of a kind."""
        return self.about_records and self.verdict is Verdict.BETTER

    @property
    def about_records(self) -> bool:
        """Whether the attack had something to say about single records."""
        return isinstance(self.outcome, Measured) and self.outcome.example is not None

    @property
    def picks(self) -> bool:
        """Whether the attack picked records out of candidates, all others known: what noise limits, and does not rule out."""
        return isinstance(self.outcome, Measured) and self.outcome.bound is not None

    def to_json(self) -> dict[str, object]:
        """The finding as JSON values; a score that does not exist is null."""
        outcome = self.outcome
        values: dict[str, object] = {
            "adversary": self.adversary.name,
            "party": self.party,
            "attack": self.attack,
            "protection": self.protection,
            "control": self.control,
            "applicable": isinstance(outcome, Measured),
            "finding": self.sentence(),
            "measure": self.measure,
            "bytes_of_ciphertext": self.bytes_seen,
        }
        if isinstance(outcome, NotApplicable):
            empty = ("score", "interval", "repeats", "baseline", "baselines", "gain", "verdict", "advantage")
            none = dict.fromkeys((*empty, "certified", "false_certificates", "rows", "bound"))
            return {**values, "reason": outcome.reason, **none}
        return {
            **values,
            "reason": None,
            "score": outcome.score.mean,
            "interval": [outcome.score.low, outcome.score.high],
            "repeats": outcome.score.repeats,
            "baseline": outcome.baseline,
            "baselines": {kind.value: share for kind, share in outcome.baselines.items()},
            "gain": [outcome.gain.low, outcome.gain.high],
            "verdict": outcome.verdict.value,
            "advantage": None if math.isnan(outcome.advantage) else outcome.advantage,
            "certified": outcome.certified,
            "false_certificates": outcome.false_certificates,
            "rows": outcome.rows,
            "bound": outcome.bound,
        }


def strongest(findings: Iterable[Finding]) -> Finding | None:
    """The finding with the largest advantage over guessing, of attacks that read rows if there is one; None if nothing was attacked."""
    measured = [(finding, finding.outcome) for finding in findings if isinstance(finding.outcome, Measured)]

    def rank(pair: tuple[Finding, Measured]) -> tuple[bool, float, float]:
        outcome = pair[1]
        return outcome.example is not None, outcome.certified, -math.inf if math.isnan(outcome.advantage) else outcome.advantage

    return max(measured, key=rank)[0] if measured else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """A finished audit. The rows in it are canaries, so all of it may be shown.

    Args:
        mode: Trust mode of the audited consortium.
        protection: What protected the audited rounds.
        clients: Clients in each canary round.
        rows: Canaries per client.
        repeats: Independent batches.
        findings: The audited setting first, then the controls.
        trainings: Whether each client trains as it declares, measured.
        holdings: Everything that each party held after the first round, by the party's name.
        seconds: Elapsed time.
        opening: What the first opened sum gave away of its key; None where nothing was encrypted.
        poisonings: What one client that lies could make of a round under the rule and the policy, first of one that is honest; empty if
            no round of honest clients is held on canaries.
    """

    mode: str
    protection: str
    clients: int
    rows: int
    repeats: int
    findings: tuple[Finding, ...]
    trainings: tuple[MeteredTraining, ...]
    holdings: Mapping[str, tuple[Holding, ...]]
    seconds: float
    opening: OpeningReading | None = None
    poisonings: tuple[Poisoned, ...] = ()

    @property
    def keys_at_server(self) -> tuple[str, ...]:
        """Secret keys that lay among the files of a party that must not have one, in words."""
        held = [holding.what for holdings in self.holdings.values() for holding in holdings if holding.form is Form.KEY]
        return tuple(dict.fromkeys(held))

    @property
    def training_verdict(self) -> str:
        """Whether the clients train as they declare, in a sentence. It says nothing of attacks: `better_than_guessing` does."""
        claiming = [metered for metered in self.trainings if metered.claims_noise]
        if not claiming:
            return "Nothing to measure: no client says that it trains with noise."
        if faults := [f"{metered.client}: {metered.fault}" for metered in claiming if metered.fault]:
            return f"NOT AS DECLARED: {'; '.join(faults)}."
        missing = [f"not measured at {metered.client}: {metered.missing}" for metered in claiming if metered.reading is None]
        held = [metered.client for metered in claiming if metered.reading is not None]
        if not held:
            return f"Not measured: {'; '.join(missing)}."
        words = f"As declared: the noise and the clipping of {', '.join(held)}, and the canaries gave away no more than epsilon allows"
        return f"{'; '.join((words, *missing))}."

    @property
    def audited(self) -> tuple[Finding, ...]:
        """Findings about the consortium's own protection."""
        return tuple(finding for finding in self.findings if not finding.control)

    @property
    def controls(self) -> tuple[Finding, ...]:
        """Planted positives: if the attacks do not succeed here, that they fail elsewhere says nothing."""
        return tuple(finding for finding in self.findings if finding.control)

    @property
    def best_control(self) -> Finding | None:
        """The control in which an attack succeeded most; None if none could be attacked."""
        return strongest(self.controls)

    @property
    def controls_succeed(self) -> bool:
        """Whether some attack on records got most of what guessing leaves open in a control: without it the audit says nothing."""
        best = self.best_control
        return best is not None and best.about_records and isinstance(best.outcome, Measured) and best.outcome.advantage > 0.5

    @property
    def untested(self) -> tuple[str, ...]:
        """Parties that see numbers, and as which no attack on records read any where nothing hides them: that it fails says nothing."""
        seeing = dict.fromkeys(finding.party for finding in self.audited if finding.bytes_seen is None)
        able = {finding.party for finding in self.controls if finding.reads_records}
        tried = {finding.party for finding in self.audited if finding.about_records}
        return tuple(party for party in seeing if party not in able & tried)

    def of(self, party: str) -> tuple[Finding, ...]:
        """Findings about one party under the consortium's own protection."""
        return tuple(finding for finding in self.audited if finding.party == party)

    @property
    def better_than_guessing(self) -> tuple[Finding, ...]:
        """What was learned under the consortium's own protection, picks apart: these are better than guessing as far as epsilon allows."""
        return tuple(finding for finding in self.audited if finding.verdict is Verdict.BETTER and not finding.picks)

    @property
    def parties(self) -> tuple[str, ...]:
        """Names of the audited parties."""
        return tuple(dict.fromkeys(finding.party for finding in self.audited))

    def shown(self, party: str) -> Finding:
        """The finding that stands for a party: the strongest of those that are better than guessing, else of all; any if none has a score.

        Raises:
            ValueError: If there is no finding about that party.
        """
        findings = self.of(party)
        if not findings:
            raise ValueError(f"expected one of {', '.join(self.parties)}, got {party!r}")
        reading = [finding for finding in findings if not finding.picks]
        better = [finding for finding in reading if finding.verdict is Verdict.BETTER]
        return strongest(better or reading or findings) or findings[0]

    def control_of(self, party: str) -> Finding | None:
        """The planted positive beside a party's findings: the control in which an attack succeeded most; None if there is none."""
        return strongest(finding for finding in self.controls if finding.party == party)

    def to_json(self) -> dict[str, object]:
        """The audit as JSON values."""
        return {
            "mode": self.mode,
            "protection": self.protection,
            "clients": self.clients,
            "rows": self.rows,
            "repeats": self.repeats,
            "seconds": self.seconds,
            "training_verdict": self.training_verdict,
            "trainings": [metered.to_json() for metered in self.trainings],
            "opening": None if self.opening is None else {"fault": self.opening.fault or None, "evidence": self.opening.evidence},
            "findings": [finding.to_json() for finding in self.findings],
            "poisoning": [poisoned.to_json() for poisoned in self.poisonings],
            "holdings": {
                name: [{**asdict(holding), "form": holding.form.value} for holding in holdings] for name, holdings in self.holdings.items()
            },
        }


def _divergence(score: float, bound: float) -> float:
    """Kullback-Leibler divergence of two coins."""
    return float(rel_entr([score, 1 - score], [bound, 1 - bound]).sum())
