import math
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
from scipy.special import expit
from scipy.stats import binom, norm

from privfed.attacks.canary_scores import CanaryScores
from privfed.attacks.epsilon_bounds import (
    EpsilonBound,
    clopper_pearson_epsilon,
    clopper_pearson_epsilon_of_counts,
    gaussian_epsilon,
    gaussian_trade_off_epsilon,
    largest_provable,
    one_run_epsilon,
    one_run_epsilon_of_guesses,
    one_run_gaussian_epsilon,
)

BOUNDS: tuple[EpsilonBound, ...] = (
    one_run_epsilon,
    one_run_gaussian_epsilon,
    clopper_pearson_epsilon,
    gaussian_trade_off_epsilon,
    gaussian_epsilon,
)
every_bound = pytest.mark.parametrize("bound", BOUNDS, ids=lambda bound: bound.__name__)

# Bounds of the reference implementation (jax_privacy, auditing_test.py and its CanaryScoreAuditor) on 10,000 scores of each kind at
# the normal quantiles, the included ones shifted: level 5 %, delta 1e-6. Last, the true epsilon of so much Gaussian noise.
REFERENCE = {
    1: (1.133460, 2.164749, 1.7872, 4.3347, 4.8866),
    2: (2.311945, 4.721806, 3.8280, 10.2407, 10.9972),
    4: (4.395568, 9.133752, 6.4125, 24.6905, 26.357),
    0: (0.0, 0.0, 0.0, 0.0, 0.0),
}


def quantiles(shift: float, count: int = 10_000) -> CanaryScores:
    scores = norm.ppf((np.arange(count) + 0.5) / count)
    return CanaryScores(included=scores + shift, excluded=scores)


def drawn(rng: np.random.Generator, *, canaries: int, shift: float = 0.0) -> CanaryScores:
    """Normal scores; a coin decides which canaries are included."""
    included = rng.random(canaries) < 0.5
    scores = rng.normal(size=canaries)
    return CanaryScores(included=scores[included] + shift, excluded=scores[~included])


@pytest.mark.parametrize("shift", list(REFERENCE))
def test_bounds_are_those_of_the_reference_implementation(shift: int) -> None:
    scores = quantiles(shift)
    *expected, true = REFERENCE[shift]
    for bound, value in zip(BOUNDS[:4], expected, strict=True):
        assert bound(scores, delta=1e-6) == pytest.approx(value, abs=1e-4)
    sharpest = gaussian_epsilon(scores, delta=1e-6)
    assert 0.93 * true <= sharpest <= true


@pytest.mark.parametrize(
    ("canaries", "guesses", "correct", "delta", "expected"),
    [
        (1000, 100, 90, 1e-5, 1.62614),
        (1000, 1000, 600, 1e-5, 0.29723),
        (1000, 1000, 1000, 1e-5, 5.78228),
        (100, 100, 100, 0.0, 3.49297),
        (5000, 5000, 4000, 1e-6, 1.3277),
        (1000, 200, 200, 0.0, 4.19363),
    ],
)
def test_guesses_refute_what_the_reference_implementation_refutes(canaries, guesses, correct, delta, expected) -> None:
    # _epsilon_one_run of jax_privacy at 5 %.
    found = one_run_epsilon_of_guesses(canaries=canaries, guesses=guesses, correct=correct, delta=delta)
    assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("counts", "delta", "expected"),
    [((950, 50, 50, 950), 1e-5, 2.6597), ((500, 500, 0, 1000), 0.0, 4.8462), ((1000, 0, 0, 1000), 0.0, 5.6006)],
)
def test_counts_refute_what_exact_intervals_refute(counts: tuple[int, ...], delta: float, expected: float) -> None:
    names = ("true_positives", "false_negatives", "false_positives", "true_negatives")
    assert clopper_pearson_epsilon_of_counts(**dict(zip(names, counts, strict=True)), delta=delta) == pytest.approx(expected, abs=1e-4)


def test_all_right_guesses_refute_the_closed_form() -> None:
    # expit(epsilon)^100 = 0.05 without delta.
    root = 0.05 ** (1 / 100)
    found = one_run_epsilon_of_guesses(canaries=100, guesses=100, correct=100, delta=0.0)
    assert found == pytest.approx(math.log(root / (1 - root)), abs=1e-6)


def false_alarms(bound: EpsilonBound, *, trials: int, canaries: int) -> float:
    rng = np.random.default_rng(0)
    return float(np.mean([bound(drawn(rng, canaries=canaries), delta=1e-6) > 0 for _ in range(trials)]))


@every_bound
def test_scores_without_meaning_raise_no_more_alarms_than_allowed(bound: EpsilonBound) -> None:
    trials = 100 if bound is one_run_gaussian_epsilon else 400
    assert false_alarms(bound, trials=trials, canaries=400) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / trials)


@pytest.mark.nightly
@every_bound
@pytest.mark.parametrize("canaries", [200, 1000])
def test_scores_without_meaning_raise_no_more_alarms_than_allowed_in_2000_trials(bound: EpsilonBound, canaries: int) -> None:
    share = false_alarms(bound, trials=2000, canaries=canaries)
    print(f"{bound.__name__}, {canaries} canaries: false alarms {share:.4f}")
    assert share <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 2000)


def crossing(canaries: int, epsilon: float, level: float) -> float:
    """Probability that some first k of so many guesses, each right with probability expit(epsilon), are significant at a level."""
    right = expit(epsilon)
    enough = binom.isf(level, np.arange(1, canaries + 1), right).astype(int) + 1
    walk, crossed = np.zeros(canaries + 1), 0.0
    walk[0] = 1.0
    for least in enough:
        walk[1:] = walk[1:] * (1 - right) + walk[:-1] * right
        walk[0] *= 1 - right
        crossed += walk[least:].sum()
        walk[least:] = 0.0
    return crossed


@pytest.mark.parametrize("canaries", [20, 100, 1000, 4000])
def test_the_correction_for_many_thresholds_is_enough_and_the_number_of_corners_is_not(canaries: int) -> None:
    # Under the claim each guess is right with probability expit(epsilon) at most, whatever the guesses before it were.
    looks = CanaryScores(included=np.zeros(canaries // 2), excluded=np.zeros(canaries // 2)).looks
    assert looks == math.ceil(2 * math.log2(canaries))
    for epsilon in (0.0, 1.0):
        assert crossing(canaries, epsilon, 0.05 / looks) <= 0.05
    if canaries == 1000:
        corners = np.mean([len(drawn(np.random.default_rng(seed), canaries=1000).counts.true_positives) for seed in range(20)])
        assert corners < 10
        assert crossing(1000, 0.0, 0.05 / corners) > 0.06


@every_bound
def test_bounds_of_a_gaussian_mechanism_are_below_its_epsilon_and_above_nothing(bound: EpsilonBound) -> None:
    from dp_accounting import get_epsilon_gaussian

    rng = np.random.default_rng(1)
    true = get_epsilon_gaussian(1 / 2.0, 1e-5)
    found = [bound(drawn(rng, canaries=1000, shift=2.0), delta=1e-5) for _ in range(10)]
    assert max(found) <= true
    assert min(found) > 0.5
    # Twice as far apart they prove more: the bound is a measure of what leaks.
    assert bound(drawn(rng, canaries=1000, shift=4.0), delta=1e-5) > max(found)


@every_bound
def test_a_bound_proves_no_more_than_the_largest_provable(bound: EpsilonBound) -> None:
    scores = CanaryScores(included=np.full(100, 3.0), excluded=np.full(100, 1.0))
    largest = largest_provable(bound, included=100, excluded=100, delta=1e-5)
    assert bound(scores, delta=1e-5) == pytest.approx(largest)
    assert 0 < bound(quantiles(1.5, 100), delta=1e-5) < largest
    assert largest <= largest_provable(bound, included=1000, excluded=1000, delta=1e-5)


def test_canaries_told_apart_without_error_leave_a_claim_of_8_unrefuted_where_nothing_is_assumed() -> None:
    # So neither test notices a client without noise that claims epsilon 8: 2,000 canaries are too few.
    assert largest_provable(one_run_epsilon, included=1000, excluded=1000, delta=1e-5) < 8
    assert largest_provable(clopper_pearson_epsilon, included=1000, excluded=1000, delta=1e-5) < 8
    assert largest_provable(gaussian_epsilon, included=1000, excluded=1000, delta=1e-5) == math.inf


@every_bound
def test_the_order_of_scores_does_not_matter_and_their_direction_does(bound: EpsilonBound) -> None:
    scores = drawn(np.random.default_rng(2), canaries=600, shift=2.0)
    shuffled = CanaryScores(included=scores.included[::-1].copy(), excluded=np.sort(scores.excluded))
    assert bound(shuffled, delta=1e-5) == pytest.approx(bound(scores, delta=1e-5))
    assert bound(CanaryScores(included=-scores.included, excluded=-scores.excluded), delta=1e-5) == 0


def refusals() -> Iterator[partial]:
    scores = quantiles(1.0, 10)
    for bound in BOUNDS:
        yield partial(bound, scores, delta=-0.1)
        yield partial(bound, scores, delta=1.0)
        yield partial(bound, scores, delta=1e-5, significance=0.0)
        yield partial(bound, scores, delta=1e-5, significance=0.5)


@pytest.mark.parametrize("refused", list(refusals()))
def test_probabilities_out_of_range_are_refused(refused: partial) -> None:
    with pytest.raises(ValueError, match="expected 0 <= delta < 1"):
        refused()


def test_impossible_counts_are_refused() -> None:
    for canaries, guesses, correct in ((10, 11, 5), (10, 5, 6), (10, 5, -1)):
        with pytest.raises(ValueError, match="correct <= guesses <= canaries"):
            one_run_epsilon_of_guesses(canaries=canaries, guesses=guesses, correct=correct, delta=0.0)
