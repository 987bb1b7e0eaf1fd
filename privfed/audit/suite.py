"""The attacks of an audit, each with its own scoring. A new one is an object with these methods, put into the tuple.

`run` never gets the truth. `score` never gets the observation. Both know the background, which is public but for its line-ups: these
hold every record of the batch, as the attacker knows them that differential privacy is about, and hide one among others.

`SUITE` takes milliseconds, so that every round can be attacked with it. `DEEPER` has what takes seconds.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from privfed.attacks.analytic import EXACT, analytic
from privfed.attacks.candidates import CandidateAttack
from privfed.attacks.facts import AdaptiveOptimizer
from privfed.attacks.most_likely import MostLikelyRows
from privfed.attacks.observation import NotApplicable, Observation, Reconstruction, gradient_part, linear_layers
from privfed.attacks.prior import Prior
from privfed.attacks.quotients import quotients
from privfed.attacks.reconstruction_bound import reconstruction_bound
from privfed.attacks.scoring import check_certificates, marginal_rows, match_rows, mean_rows
from privfed.attacks.spear import spear
from privfed.audit.background import CANDIDATES, Background
from privfed.audit.canaries import Canaries
from privfed.audit.example import Example
from privfed.dp.mechanism import PoissonSampledGaussian

TOLERANCE = 0.05
"""Largest error of a number that counts as right, as a share of its column's range."""

_TOLD = 0.5  # of what decides a row, the share that comes from the update
_DRAWS = 10  # of the random baseline per batch, so that its luck does not blur a score


class Baseline(Enum):
    """What somebody says who saw nothing of the round. The value says it in words."""

    MEAN = "the most typical answer"
    MARGINAL = "an answer drawn at public frequencies"


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How right an attack was about one batch, from 0 to 1.

    Args:
        value: By the baseline that speaks where the attack says nothing.
        baseline: What that baseline reaches alone.
        certified: Rows that the attack certified.
        false: Those among them that are no canary.
        example: For the report; None for attacks that read no rows.
        bound: What the declared noise allows anyone at most, 1 without noise; None for attacks of which no bound is known.
    """

    value: Mapping[Baseline, float]
    baseline: Mapping[Baseline, float]
    certified: int = 0
    false: int = 0
    example: Example | None = None
    bound: float | None = None


Found = TypeVar("Found")


class AuditAttack(Protocol[Found]):
    """An attack, and how what it found is compared with the truth."""

    @property
    def name(self) -> str:
        """For reports."""
        ...

    @property
    def measure(self) -> str:
        """What its score is the share of, in words."""
        ...

    def run(self, observation: Observation, background: Background) -> Found | NotApplicable:
        """Attacks."""
        ...

    def score(self, found: Found, truth: Canaries, background: Background, rng: np.random.Generator) -> Score:
        """Compares with the truth; `rng` draws the baseline."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RowAttack:
    """Reads rows.

    Args:
        name: For reports.
        read: The attack.
    """

    name: str
    read: Callable[[Observation], Reconstruction | NotApplicable]
    measure: str = "of cells right"

    def run(self, observation: Observation, background: Background) -> Reconstruction | NotApplicable:
        """Attacks; the background is not needed."""
        del background
        return self.read(observation)

    def score(self, found: Reconstruction, truth: Canaries, background: Background, rng: np.random.Generator) -> Score:
        """As `score_records`."""
        return score_records(found, truth, background, rng)


@dataclass(frozen=True, slots=True, kw_only=True)
class LikelyRows:
    """Reads rows with the help of what is known of records like these.

    Of rows about which the update says less than that knowledge does, it says nothing: the likeliest row is then one that fits noise,
    and worse than a guess.
    """

    name: str = "records, likeliest under the known noise"
    measure: str = "of cells right"

    def run(self, observation: Observation, background: Background) -> Reconstruction | NotApplicable:
        """Attacks with the pool for a prior."""
        pool = background.pool
        prior = Prior(rows=pool.rows, labels=pool.labels, schema=pool.schema)
        found = MostLikelyRows(module=background.module, prior=prior).attack(observation)
        if isinstance(found, NotApplicable):
            return found
        told = found.confidence >= _TOLD
        return replace(found, rows=found.rows[told], certified=found.certified[told], confidence=found.confidence[told])

    def score(self, found: Reconstruction, truth: Canaries, background: Background, rng: np.random.Generator) -> Score:
        """As `score_records`."""
        return score_records(found, truth, background, rng)


def score_records(found: Reconstruction, truth: Canaries, background: Background, rng: np.random.Generator) -> Score:
    """Share of cells right: numbers within `TOLERANCE` of their range. Certified rows must be right to within `analytic.EXACT`."""
    schema, pool = truth.schema, background.pool.rows
    typical = mean_rows(pool, schema=schema, count=len(truth))
    guesses = {
        Baseline.MEAN: [typical],
        Baseline.MARGINAL: [marginal_rows(pool, schema=schema, count=len(truth), rng=rng) for _ in range(_DRAWS)],
    }

    def share(rows: NDArray[np.float64], guess: NDArray[np.float64]) -> float:
        return float(match_rows(rows, truth.rows, schema=schema, tolerance=TOLERANCE, baseline=guess).right.mean())

    check = check_certificates(found, truth.rows, schema=schema, tolerance=EXACT)
    return Score(
        value={kind: float(np.mean([share(found.rows, guess) for guess in draws])) for kind, draws in guesses.items()},
        baseline={kind: float(np.mean([share(guess, guess) for guess in draws])) for kind, draws in guesses.items()},
        certified=check.certified,
        false=check.false,
        example=Example.of(found, truth, typical, tolerance=TOLERANCE),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Picks:
    """Which candidate of each line-up was picked, and how often anybody can be right at most, 1 without noise."""

    chosen: tuple[int, ...]
    bound: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PickAttack:
    """Picks a record out of a line-up, knowing every other record of the batch: what the noise limits, and does not rule out."""

    name: str = f"which of {CANDIDATES} records took part, all others known"
    measure: str = "of picks right"

    def run(self, observation: Observation, background: Background) -> Picks | NotApplicable:
        """Picks from every line-up."""
        chosen: list[int] = []
        for line_up in background.line_ups:
            attack = CandidateAttack(module=background.module, candidates=line_up.candidates, known=line_up.known)
            guess = attack.attack(observation)
            if isinstance(guess, NotApplicable):
                return guess
            chosen.append(guess.best)
        if not chosen:
            return NotApplicable(reason="there is no line-up to pick from")
        return Picks(chosen=tuple(chosen), bound=_pick_bound(observation))

    def score(self, found: Picks, truth: Canaries, background: Background, rng: np.random.Generator) -> Score:
        """Share of picks that are the record. Nothing is drawn: whoever guesses is right once in `CANDIDATES` times."""
        del rng
        picked = [line_up.candidates.rows[chosen] for line_up, chosen in zip(background.line_ups, found.chosen, strict=True)]
        right = [np.array_equal(row, record) for row, record in zip(picked, truth.rows[: len(picked)], strict=True)]
        return Score(
            value=dict.fromkeys(Baseline, float(np.mean(right))), baseline=dict.fromkeys(Baseline, 1 / CANDIDATES), bound=found.bound
        )


def _pick_bound(observation: Observation) -> float:
    """The reconstruction bound of what was seen: in a weighted sum, all clients' noise hides the record, as far as it weighs."""
    training, coefficients = observation.training, observation.coefficients
    if training.noise is None or not training.noise.noise_multiplier:
        return 1.0
    noise_multiplier = training.noise.noise_multiplier * math.hypot(*coefficients) / max(coefficients)
    event = PoissonSampledGaussian(noise_multiplier=noise_multiplier, sample_rate=1.0, steps=training.steps)
    return reconstruction_bound(event, candidates=CANDIDATES)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelAttack:
    """Counts the positive records of the batch, from what they do to the bias of the last layer."""

    name: str = "number of positive labels"
    measure: str = "of batches counted exactly"

    def run(self, observation: Observation, background: Background) -> int | NotApplicable:
        """The most probable number, given the update, the known clipping and noise, and how frequent positive records are.

        The likelihood of a number is Gaussian, with the mean and the variance that so many positive records of the pool, and the other
        ones negative, would give. Where noise hides everything, the most frequent number is said: never worse than guessing, on average.
        """
        part, layers = gradient_part(observation), linear_layers(observation.layout)
        if isinstance(part, NotApplicable):
            return part
        training, pulls = observation.training, background.pulls
        if pulls is None or isinstance(training.optimizer, AdaptiveOptimizer):
            return NotApplicable(reason="labels are counted for models with one output only, trained by SGD")
        mean, variance = pulls.moments(math.inf if training.noise is None else training.noise.max_grad_norm)
        scale = observation.records / training.optimizer.response(training.steps)
        pull = -scale * float(observation.layout.unflatten(part.change)[layers[-1].bias].item())
        deviation = scale * float(observation.layout.unflatten(part.deviation)[layers[-1].bias].item())
        positive = np.arange(round(observation.records) + 1)
        negative = positive[::-1]
        spread = negative * variance[0] + positive * variance[1] + deviation**2
        fit = -((negative * mean[0] + positive * mean[1] - pull) ** 2) / (2 * spread) - np.log(spread) / 2
        return int(np.argmax(fit + binom.logpmf(positive, positive[-1], background.prevalence)))

    def score(self, found: int, truth: Canaries, background: Background, rng: np.random.Generator) -> Score:
        """1 if the number is right, else 0."""
        positives = int(truth.labels.sum())
        drawn = rng.binomial(len(truth), background.prevalence, size=_DRAWS)
        return Score(
            value=dict.fromkeys(Baseline, float(found == positives)),
            baseline={
                Baseline.MEAN: float(round(len(truth) * background.prevalence) == positives),
                Baseline.MARGINAL: float((drawn == positives).mean()),
            },
        )


SUITE: tuple[AuditAttack[Any], ...] = (
    RowAttack(name="records, only what it can prove", read=analytic),
    RowAttack(name="records, best guess", read=quotients),
    LabelAttack(),
)
"""Milliseconds per view. What an audit runs unless told otherwise."""

DEEPER: tuple[AuditAttack[Any], ...] = (
    *SUITE,
    RowAttack(name="records, all of a batch together", read=spear),
    LikelyRows(),
    PickAttack(),
)
"""Seconds per view: also all rows at once and exactly, the likeliest rows under the noise, and the test of the noise's own promise."""
