import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from privfed.attacks.facts import Continuous, OneHot, TableSchema
from privfed.attacks.observation import Reconstruction
from privfed.attacks.scoring import (
    RowScore,
    advantage,
    check_certificates,
    interval,
    marginal_rows,
    match_rows,
    mean_rows,
    nearest_rows,
    score_rows,
)

SCHEMA = TableSchema(
    columns=(
        Continuous(name="amount", low=0.0, high=10.0),
        OneHot(name="kind", categories=("a", "b", "c")),
        Continuous(name="age", low=0.0, high=1.0),
    )
)
TRUTH = np.array([[1.0, 1, 0, 0, 0.1], [5.0, 0, 1, 0, 0.5], [9.0, 0, 0, 1, 0.9], [9.0, 0, 0, 1, 0.2]])
NOWHERE = np.full_like(TRUTH, 99.0)
NOTHING = np.zeros((0, SCHEMA.width))


def score(rows: np.ndarray, *, tolerance: float = 0.01, baseline: np.ndarray = NOWHERE, truth: np.ndarray = TRUTH) -> RowScore:
    return score_rows(rows, truth, schema=SCHEMA, tolerance=tolerance, baseline=baseline)


def random_table(count: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.column_stack([rng.uniform(0, 10, count), np.eye(3)[rng.integers(3, size=count)], rng.uniform(0, 1, count)])


@given(st.permutations(range(4)))
def test_the_truth_scores_one_in_any_order(order: list[int]) -> None:
    assert score(TRUTH[order]) == RowScore(rows=1.0, cells=1.0, continuous=1.0, categorical=1.0)


def test_cells_are_counted_by_kind() -> None:
    rows = TRUTH.copy()
    rows[0, 0] = 1.2  # 2 % of the range of 10 away
    rows[1, 1:4] = [0, 0.4, 0.6]
    assert score(rows) == RowScore(rows=0.5, cells=10 / 12, continuous=7 / 8, categorical=3 / 4)
    assert score(rows, tolerance=0.021) == RowScore(rows=3 / 4, cells=11 / 12, continuous=1.0, categorical=3 / 4)


def test_every_true_row_is_shown_beside_its_guess_and_where_that_came_from() -> None:
    found, rest = TRUTH[[2, 0]], TRUTH[[3, 3, 1, 1]]
    match = match_rows(found, TRUTH, schema=SCHEMA, tolerance=0.01, baseline=rest)
    # The first four guesses count: two that were found and two of the baseline, of which the first two are the same row.
    assert match.right.all(axis=1).sum() == 3
    assert np.array_equal(match.guesses[[0, 2, 3]], TRUTH[[0, 2, 3]])
    assert sorted(match.found) == [0, 1, 2, 3]
    assert (match.found[0], match.found[2]) == (1, 0)


def test_rows_are_assigned_one_to_one() -> None:
    assert score(np.tile(TRUTH[0], (4, 1))).rows == 1 / 4


@given(st.integers(0, 1000), st.floats(0, 0.5))
def test_an_attack_that_finds_nothing_scores_as_the_baseline(seed: int, tolerance: float) -> None:
    truth, public = random_table(6, seed), random_table(50, seed + 1)
    rng = np.random.default_rng(seed)
    for baseline in (
        mean_rows(public, schema=SCHEMA, count=6),
        marginal_rows(public, schema=SCHEMA, count=6, rng=rng),
        nearest_rows(public, truth, schema=SCHEMA, tolerance=tolerance),
    ):
        guess = score(baseline, tolerance=tolerance, baseline=baseline, truth=truth)
        found = score(NOTHING, tolerance=tolerance, baseline=baseline, truth=truth)
        assert found == guess
        assert found.cells == 1 or advantage(found.cells, baseline=guess.cells) == 0


def test_spraying_guesses_gains_nothing() -> None:
    wrong = np.tile([3.0, 0.5, 0.5, 0, 0.7], (4, 1))
    assert score(np.concatenate([wrong, TRUTH])).cells == 0
    assert score(np.concatenate([TRUTH, wrong])).cells == 1


def test_rows_that_an_attack_leaves_out_are_filled_with_the_baseline() -> None:
    assert score(TRUTH[:1], baseline=np.tile(TRUTH[2], (4, 1))).rows == 2 / 4


def test_a_block_that_names_no_category_is_wrong() -> None:
    # argmax would say "a", which is right for the first row.
    rows = np.tile([1.0, 0.5, 0.5, 0.0, 0.1], (4, 1))
    assert score(rows).categorical == 0
    rows[:, 1:4] = 0
    assert score(rows).categorical == 0


def test_tables_of_one_kind_have_no_score_for_the_other() -> None:
    numbers, kinds = TableSchema(columns=SCHEMA.columns[:1]), TableSchema(columns=SCHEMA.columns[1:2])
    amounts, categories = TRUTH[:, :1], TRUTH[:, 1:4]
    only_numbers = score_rows(amounts, amounts, schema=numbers, tolerance=0.0, baseline=amounts)
    only_kinds = score_rows(categories, categories, schema=kinds, tolerance=0.0, baseline=categories)
    assert only_numbers.continuous == only_numbers.rows == only_kinds.categorical == only_kinds.rows == 1
    assert math.isnan(only_numbers.categorical)
    assert math.isnan(only_kinds.continuous)


@pytest.mark.parametrize(
    "change",
    [
        {"truth": NOTHING, "baseline": NOTHING},
        {"truth": TRUTH[:, 1:], "baseline": TRUTH[:, 1:]},
        {"baseline": TRUTH[:3]},
        {"rows": TRUTH[:, 1:]},
        {"tolerance": -0.1},
        {"tolerance": math.nan},
    ],
)
def test_scores_of_things_that_do_not_fit_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="expected"):
        score(**({"rows": TRUTH} | change))


def test_the_mean_row_has_means_and_the_most_frequent_category() -> None:
    np.testing.assert_allclose(mean_rows(TRUTH, schema=SCHEMA, count=2), np.tile([6.0, 0, 0, 1, 0.425], (2, 1)))


def test_the_marginal_sample_keeps_marginals_and_breaks_what_goes_together() -> None:
    together = np.concatenate([np.tile(TRUTH[0], (500, 1)), np.tile(TRUTH[1], (500, 1))])
    rows = marginal_rows(together, schema=SCHEMA, count=4000, rng=np.random.default_rng(0))
    assert (rows[:, 1:4].sum(axis=1) == 1).all()
    # Four standard errors of a share of one half in 4000 draws are 0.032.
    assert abs((rows[:, 0] == 1.0).mean() - 0.5) < 0.032
    assert abs(((rows[:, 0] == 1.0) & (rows[:, 1] == 1)).mean() - 0.25) < 0.028


def test_the_nearest_public_row_has_the_most_right_cells() -> None:
    public = np.array([[1.0, 0, 0, 1, 0.1], [5.0, 0, 1, 0, 0.5], [0.0, 1, 0, 0, 0.0]])
    np.testing.assert_array_equal(nearest_rows(public, TRUTH[:2], schema=SCHEMA, tolerance=0.01), public[:2])


def test_an_advantage_below_zero_is_not_cut() -> None:
    assert advantage(0.25, baseline=0.5) == -0.5
    assert advantage(1.0, baseline=0.5) == 1.0
    assert advantage(0.5, baseline=0.5) == 0.0
    assert math.isnan(advantage(1.0, baseline=1.0))


def test_the_interval_is_students() -> None:
    # Table value: the 97.5 % quantile of t with 4 degrees of freedom is 2.776445.
    result = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (result.mean, result.repeats) == (3.0, 5)
    half = 2.776445 * math.sqrt(2.5 / 5)
    assert (result.low, result.high) == pytest.approx((3.0 - half, 3.0 + half), rel=1e-6)
    assert str(result) == "3.000 [1.037, 4.963] (95% t interval, 5 repeats)"


def test_the_interval_agrees_with_the_bootstrap_and_covers_the_mean() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(0.3, 0.1, size=200)
    means = rng.choice(values, size=(2000, len(values))).mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    result = interval(values.tolist())
    # A quantile of 2000 means has a standard error of sqrt(.025 * .975 / 2000) / .0584 = 0.060 of theirs, 3 % of the half width.
    half = (result.high - result.low) / 2
    assert abs(result.low - low) < 0.15 * half
    assert abs(result.high - high) < 0.15 * half
    repeats = [interval(rng.normal(0.3, 0.1, size=5).tolist()) for _ in range(2000)]
    inside = [repeat.low < 0.3 < repeat.high for repeat in repeats]
    # Four standard errors of .95 in 2000 trials are 0.0195; a normal quantile in place of Student's would cover .88.
    assert abs(np.mean(inside) - 0.95) < 0.0195


@pytest.mark.parametrize(("values", "level"), [([1.0], 0.95), ([], 0.95), ([1.0, math.nan], 0.95), ([1.0, 2.0], 1.0)])
def test_an_interval_without_repeats_is_refused(values: list[float], level: float) -> None:
    with pytest.raises(ValueError, match="at least two finite values"):
        interval(values, level=level)


def test_a_false_certificate_is_counted() -> None:
    rows = np.concatenate([TRUTH, TRUTH[:2].mean(axis=0, keepdims=True)])
    found = Reconstruction(
        rows=rows, certified=np.array([True, False, True, False, True]), confidence=np.ones(5), certificate="", seconds=0.0
    )
    check = check_certificates(found, TRUTH, schema=SCHEMA, tolerance=0.01)
    assert (check.certified, check.false) == (3, 1)
