"""The attacks of an audit, each with its own scoring. A new one is an object with these methods, put into the tuple.

`run` never gets the truth. `score` never gets the observation. Both know the background, which is public.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from privfed.attacks.analytic import EXACT, analytic
from privfed.attacks.facts import OneHot, Scale
from privfed.attacks.labels import label_count
from privfed.attacks.observation import NotApplicable, Observation, Reconstruction
from privfed.attacks.quotients import quotients
from privfed.attacks.scoring import check_certificates, marginal_rows, match_rows, mean_rows
from privfed.audit.canaries import Canaries
from privfed.data.paysim import money_of

TOLERANCE = 0.05
"""Largest error of a number that counts as right, as a share of its column's range."""

_COUNT_ERROR = 0.1  # what the mean prediction, on a fresh model, gets wrong of a count
_DRAWS = 10  # of the random baseline per batch, so that its luck does not blur a score


class Baseline(Enum):
    """What somebody says who saw nothing of the round. The value says it in words."""

    MEAN = "the most typical answer"
    MARGINAL = "an answer drawn at public frequencies"


@dataclass(frozen=True, slots=True, kw_only=True)
class Background:
    """What everybody knows beforehand.

    Args:
        pool: Records like the ones attacked, none of which is among them.
        mean_prediction: Mean probability that the model before the round gives them.
    """

    pool: Canaries
    mean_prediction: float

    @property
    def prevalence(self) -> float:
        """Share of positive records."""
        return float(self.pool.labels.mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """What an attack said about canaries, beside the canaries.

    Args:
        columns: Names of the columns.
        truth: Per canary and column, as text.
        said: Likewise.
        right: Likewise, whether it is right.
        certified: Per canary, whether the attack certified what it said.
        guessed: Per canary, whether the attack said nothing, so that the baseline was put in its place.
    """

    columns: tuple[str, ...]
    truth: tuple[tuple[str, ...], ...]
    said: tuple[tuple[str, ...], ...]
    right: tuple[tuple[bool, ...], ...]
    certified: tuple[bool, ...]
    guessed: tuple[bool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How right an attack was about one batch, from 0 to 1.

    Args:
        value: By the baseline that speaks where the attack says nothing.
        baseline: What that baseline reaches alone.
        certified: Rows that the attack certified.
        false: Those among them that are no canary.
        example: For the report; None for attacks that read no rows.
    """

    value: Mapping[Baseline, float]
    baseline: Mapping[Baseline, float]
    certified: int = 0
    false: int = 0
    example: Example | None = None


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
            example=_example(found, truth, typical),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelAttack:
    """Counts the positive records of the batch."""

    name: str = "number of positive records"
    measure: str = "of batches counted exactly"

    def run(self, observation: Observation, background: Background) -> int | NotApplicable:
        """The most probable number, given the update, the known noise and how frequent positive records are."""
        found = label_count(observation, mean_prediction=background.mean_prediction)
        if isinstance(found, NotApplicable):
            return found
        counts = np.arange(round(found.records) + 1)
        likelihood = -(((counts - found.positives) / max(found.standard_error, _COUNT_ERROR)) ** 2) / 2
        prior = binom.logpmf(counts, counts[-1], background.prevalence)
        return int(np.argmax(likelihood + prior))

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
"""What an audit runs unless told otherwise."""


def _example(found: Reconstruction, truth: Canaries, baseline: NDArray[np.float64]) -> Example:
    schema = truth.schema
    match = match_rows(found.rows, truth.rows, schema=schema, tolerance=TOLERANCE, baseline=baseline)
    # From "numeric columns first, then blocks" to the order of the schema.
    starts = [*schema.continuous, *(block.start for block in schema.blocks)]
    order = np.argsort(starts)
    certified = np.append(found.certified, np.zeros(len(truth), dtype=np.bool_))
    return Example(
        columns=tuple(column.name for column in schema.columns),
        truth=tuple(_texts(row, truth) for row in truth.rows),
        said=tuple(_texts(row, truth) for row in match.guesses),
        right=tuple(tuple(bool(cell) for cell in row[order]) for row in match.right),
        certified=tuple(bool(flag) for flag in certified[match.found]),
        guessed=tuple(bool(index >= len(found.rows)) for index in match.found),
    )


def _texts(row: NDArray[np.float64], canaries: Canaries) -> tuple[str, ...]:
    texts: list[str] = []
    start = 0
    for column in canaries.schema.columns:
        if isinstance(column, OneHot):
            texts.append(column.categories[int(row[start : start + len(column.categories)].argmax())])
            start += len(column.categories)
        else:
            texts.append(f"{money_of(row[start]):,.0f}" if column.scale is Scale.MONEY else f"{row[start]:.3f}")
            start += 1
    return tuple(texts)
