"""What one attempt of an attack came to, and what many attempts come to together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import binomtest

from privfed.attacks.scoring import advantage, interval

LEVEL = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One attempt.

    Args:
        score: In the case's measure.
        baseline: What somebody reaches who saw nothing of the round, in the same measure.
        seconds: Of the attack alone.
        false: Certified rows that are no true row.
    """

    score: float
    baseline: float
    seconds: float
    false: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An attack on one kind of round.

    Args:
        attack: Its name.
        setting: What it attacks.
        measure: What the score is.
        run: One attempt, given its seed.
        repeats: Number of attempts; `quick` of them where nothing is judged.
        quick: See `repeats`; 0 where one attempt takes too long.
        least: Smallest mean score with which the attack is as good as is promised; None where nothing is.
        near: Largest distance of the mean score from the baseline where noise is promised to hide everything.
        bound: Largest score that any attack can have, where that is known. It may be exceeded by three standard errors.
        seconds: Longest that an attempt may take; None where nothing is promised. Judged by the median.
    """

    attack: str
    setting: str
    measure: str
    run: Callable[[int], Trial]
    repeats: int
    quick: int = 1
    least: float | None = None
    near: float | None = None
    bound: float | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """All attempts of a case, on seeds from 0.

    Args:
        attack: As the case.
        setting: As the case.
        measure: As the case.
        seeds: Number of attempts.
        score: Mean score.
        low: Lower end of its 95 % interval: exact where every score is 0 or 1, else Student's; None for a single attempt.
        high: Upper end.
        baseline: Mean score of the baseline.
        advantage: Share of what the baseline leaves open; None for a measure that is not a share, or where nothing is left open.
        seconds: Median.
        slowest: Largest number of seconds.
        false: Certified rows that are no true row, over all attempts.
        promised: What was promised, in words; empty where nothing was.
        kept: Whether it was; None where nothing was promised, or it was not judged.
    """

    attack: str
    setting: str
    measure: str
    seeds: int
    score: float
    low: float | None
    high: float | None
    baseline: float
    advantage: float | None
    seconds: float
    slowest: float
    false: int
    promised: str
    kept: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """What was not measured here, and why."""

    attack: str
    missing: str


def outcome(case: Case, trials: Sequence[Trial], *, judge: bool) -> Outcome:
    """What the attempts of a case come to."""
    scores, guesses = [trial.score for trial in trials], [trial.baseline for trial in trials]
    score, baseline = float(np.mean(scores)), float(np.mean(guesses))
    low, high = _interval(scores)
    seconds, false = float(np.median([trial.seconds for trial in trials])), sum(trial.false for trial in trials)
    shares = "dB" not in case.measure
    promised, kept = _promise(case, score=score, baseline=baseline, seconds=seconds, count=len(trials))
    return Outcome(
        attack=case.attack,
        setting=case.setting,
        measure=case.measure,
        seeds=len(trials),
        score=score,
        low=low,
        high=high,
        baseline=baseline,
        advantage=advantage(score, baseline=baseline) if shares and baseline < 1 else None,
        seconds=seconds,
        slowest=max(trial.seconds for trial in trials),
        false=false,
        promised=", ".join(promised),
        kept=(all(kept) and false == 0) if judge and promised else None,
    )


def _interval(scores: Sequence[float]) -> tuple[float | None, float | None]:
    if len(scores) < 2:
        return None, None
    if set(scores) <= {0.0, 1.0}:
        exact = binomtest(int(sum(scores)), len(scores)).proportion_ci(confidence_level=LEVEL)
        return float(exact.low), float(exact.high)
    found = interval(scores, level=LEVEL)
    return found.low, found.high


def _promise(case: Case, *, score: float, baseline: float, seconds: float, count: int) -> tuple[list[str], list[bool]]:
    promised, kept = list[str](), list[bool]()
    if case.least is not None:
        promised.append(f"at least {case.least:g}")
        kept.append(score >= case.least - 1e-9)
    if case.near is not None:
        promised.append(f"within {case.near:g} of the baseline")
        kept.append(abs(score - baseline) <= case.near)
    if case.bound is not None:
        promised.append(f"at most {case.bound:.3f}")
        kept.append(score <= case.bound + 3 * (case.bound * (1 - case.bound) / count) ** 0.5)
    if case.seconds is not None:
        promised.append(f"{case.seconds:g} s")
        kept.append(seconds <= case.seconds)
    return promised, kept
