"""Lower bounds on epsilon from the scores of canaries: what a training has leaked with confidence, beside what it was to leak at most.

All bounds hold with probability 1 - significance, the choice among thresholds included (Bonferroni). A bound below the claim proves
nothing: `largest_provable` says how far a bound could have reached with so many canaries, whatever had leaked.
"""

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np
from dp_accounting import get_epsilon_gaussian, get_sigma_gaussian
from numpy.typing import NDArray
from scipy.optimize import root_scalar
from scipy.special import expit, ndtr, ndtri
from scipy.stats import beta, binom, chi2, norm

from privfed.attacks.canary_scores import CanaryScores

_LARGEST_EPSILON = 1e5


class EpsilonBound(Protocol):
    """A function that bounds epsilon from below."""

    def __call__(self, scores: CanaryScores, *, delta: float, significance: float = ...) -> float:
        """The bound, at least 0."""
        ...


def one_run_epsilon(scores: CanaryScores, *, delta: float, significance: float = 0.05) -> float:
    """Bound from a single run with many canaries, for any mechanism (Steinke et al., 2023, arXiv:2305.08846, theorem 5.2).

    Canaries above a threshold are guessed to have taken part; there is no guess about the others.

    Args:
        scores: Each canary took part with probability one half, independently of all others.
        delta: From 0 up to, not including, 1.
        significance: Probability of a bound that is too high, above 0 and below one half.
    """
    return _best_guesses(scores, one_run_epsilon_of_guesses, delta=delta, significance=significance)


def one_run_gaussian_epsilon(scores: CanaryScores, *, delta: float, significance: float = 0.05) -> float:
    """Bound from a single run for a mechanism whose trade-off is at best that of a Gaussian (Mahloujifar et al., 2024, arXiv:2410.22235).

    Without subsampling DP-SGD is such a mechanism. Arguments as for `one_run_epsilon`, delta above 0.
    """
    return _best_guesses(scores, _one_run_gaussian_epsilon_of_guesses, delta=delta, significance=significance)


def clopper_pearson_epsilon(scores: CanaryScores, *, delta: float, significance: float = 0.05) -> float:
    """Bound from exact intervals for both error rates, for any mechanism (Nasr et al., 2021, arXiv:2101.04535, section III).

    It takes scores as independent: with many canaries in one run that is an assumption; with one canary in many runs it is true.
    Arguments as for `one_run_epsilon`.
    """
    _check(delta, significance)
    counts = scores.counts
    each = significance / scores.looks
    included, excluded = len(scores.included), len(scores.excluded)
    pairs = zip(counts.true_positives.tolist(), counts.false_positives.tolist(), strict=True)
    return max(_rates_epsilon(tp, included - tp, fp, excluded - fp, delta=delta, significance=each) for tp, fp in pairs)


def clopper_pearson_epsilon_of_counts(
    *, true_positives: int, false_negatives: int, false_positives: int, true_negatives: int, delta: float, significance: float = 0.05
) -> float:
    """The same for one threshold that was fixed beforehand."""
    _check(delta, significance)
    return _rates_epsilon(true_positives, false_negatives, false_positives, true_negatives, delta=delta, significance=significance)


def gaussian_trade_off_epsilon(scores: CanaryScores, *, delta: float, significance: float = 0.05) -> float:
    """Bound from the same intervals for a mechanism with a Gaussian trade-off (Dong et al., 2022, arXiv:1905.02383, equation 6).

    Arguments as for `one_run_epsilon`, delta above 0.
    """
    _check(delta, significance)
    counts = scores.counts
    each = significance / (2 * scores.looks)
    included, excluded = len(scores.included), len(scores.excluded)
    missed = _upper_rate(included - counts.true_positives, included, each)
    false = _upper_rate(counts.false_positives, excluded, each)
    usable = np.maximum(missed, false) < 1 - delta
    # Only upwards: rates that are too high for their sum to be below 1 prove nothing, and nothing about the other direction.
    distances = ndtri(1 - false[usable]) - ndtri(missed[usable])
    return _gaussian_epsilon(float(distances.max(initial=0.0)), delta)


def gaussian_epsilon(scores: CanaryScores, *, delta: float, significance: float = 0.05) -> float:
    """Bound from the distance of both kinds' means in standard deviations, for scores that are normal.

    It holds only where the mechanism is Gaussian: one coordinate of noise, and every canary in every step. There it is the sharpest.
    Arguments as for `one_run_epsilon`, delta above 0.
    """
    _check(delta, significance)
    included, excluded = scores.included, scores.excluded
    if min(len(included), len(excluded)) < 2:
        return 0.0
    deviation = float(excluded.std(ddof=1))
    highest = deviation * math.sqrt((len(excluded) - 1) / float(chi2.ppf(significance / 2, len(excluded) - 1)))
    error = math.sqrt(float(included.var(ddof=1)) / len(included) + deviation**2 / len(excluded))
    distance = float(included.mean() - excluded.mean()) - float(norm.isf(significance / 2)) * error
    if distance <= 0:
        return 0.0
    return _gaussian_epsilon(distance / highest if highest > 0 else math.inf, delta)


def largest_provable(bound: EpsilonBound, *, included: int, excluded: int, delta: float, significance: float = 0.05) -> float:
    """What a bound says about canaries that are told apart without error: it can prove no more with so many of them.

    Example:
        >>> round(largest_provable(one_run_epsilon, included=1000, excluded=1000, delta=1e-5), 1)
        4.4
    """
    perfect = CanaryScores(included=np.ones(included), excluded=np.zeros(excluded))
    return bound(perfect, delta=delta, significance=significance)


def one_run_epsilon_of_guesses(*, canaries: int, guesses: int, correct: int, delta: float, significance: float = 0.05) -> float:
    """Bound from so many guesses about whether a canary took part, as many of which as were correct.

    Args:
        canaries: Number of canaries, each of which took part with probability one half.
        guesses: Number of canaries about which a guess was made.
        correct: Number of right guesses.
        delta: From 0 up to, not including, 1.
        significance: See `one_run_epsilon`.

    Raises:
        ValueError: If a number is out of range.
    """
    _check(delta, significance)
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError(f"expected correct <= guesses <= canaries, got {correct}, {guesses} and {canaries}")
    fewer = np.arange(1, correct + 1)

    def refuted_by(epsilon: float) -> float:
        # Probability of as many right guesses; with delta, some guesses may be right for free.
        right = expit(epsilon)
        likely = float(binom.sf(correct - 1, guesses, right))
        if delta:
            free = (binom.sf(correct - fewer - 1, guesses, right) - likely) / fewer
            likely += 2 * canaries * delta * float(free.max(initial=0.0))
        return significance - likely

    return _highest_refuted(refuted_by)


def _one_run_gaussian_epsilon_of_guesses(*, canaries: int, guesses: int, correct: int, delta: float, significance: float) -> float:
    def refuted_by(epsilon: float) -> float:
        mean = 1 / get_sigma_gaussian(epsilon, delta)
        # Algorithm 3 there: from the most right guesses down, how probable at least each number is.
        right, wrong = significance * correct / canaries, significance * (guesses - correct) / canaries
        for left in range(correct - 1, -1, -1):
            raised = max(wrong, float(ndtr(ndtri(right) - mean)))
            if raised == wrong:
                break
            right = min(1.0, right + left / (guesses - left) * (raised - wrong))
            wrong = raised
        return right + wrong - guesses / canaries

    return _highest_refuted(refuted_by)


def _best_guesses(scores: CanaryScores, bound: Callable[..., float], *, delta: float, significance: float) -> float:
    """The best bound over all thresholds. Those that cannot be better than what was found before are not computed."""
    _check(delta, significance)
    right, wrong = scores.counts.true_positives, scores.counts.false_positives
    each = significance / scores.looks
    sure = 1 - _upper_rate(wrong, right + wrong, each)
    best = 0.0
    for index in np.argsort(-sure):
        guesses, correct = int(right[index] + wrong[index]), int(right[index])
        # A share of right guesses is at most what epsilon allows; with fewer it cannot refute it.
        if guesses and correct / guesses > expit(best):
            canaries = len(scores.included) + len(scores.excluded)
            found = bound(canaries=canaries, guesses=guesses, correct=correct, delta=delta, significance=each)
            best = max(best, found)
    return best


def _rates_epsilon(tp: int, fn: int, fp: int, tn: int, *, delta: float, significance: float) -> float:
    lowest = 1 - float(_upper_rate(np.array(fn), tp + fn, significance / 2))
    highest = float(_upper_rate(np.array(fp), fp + tn, significance / 2))
    return max(0.0, math.log((lowest - delta) / highest)) if lowest > delta else 0.0


def _upper_rate(events: NDArray[np.int64], trials: NDArray[np.int64] | int, significance: float) -> NDArray[np.float64]:
    """Upper end of the one-sided exact interval for a probability (Clopper and Pearson, 1934)."""
    others = trials - events
    return np.where(others > 0, beta.ppf(1 - significance, events + 1, np.maximum(others, 1)), 1.0)


def _highest_refuted(refuted_by: Callable[[float], float]) -> float:
    """The largest epsilon at which a falling function is positive; 0 if it is at none."""
    if refuted_by(0.0) <= 0:
        return 0.0
    high = 1.0
    while refuted_by(high) > 0:
        high *= 2
    return float(root_scalar(refuted_by, bracket=(0.0, high), xtol=1e-9).root)


def _gaussian_epsilon(distance: float, delta: float) -> float:
    if distance <= 0:
        return 0.0
    if distance > math.sqrt(_LARGEST_EPSILON):
        return math.inf
    return get_epsilon_gaussian(1 / distance, delta)


def _check(delta: float, significance: float) -> None:
    if not (0 <= delta < 1 and 0 < significance < 0.5):
        raise ValueError(f"expected 0 <= delta < 1 and a significance above 0 and below one half, got {delta} and {significance}")
