import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from privfed.contribution import estimators
from privfed.contribution.estimators import Automatic, Exact, MonteCarlo, Strata
from privfed.contribution.game import AngularUtility, EuclideanUtility, Game

ESTIMATORS: tuple[Any, ...] = (Exact(), Strata(), Strata(edge=1), MonteCarlo(permutations=7), Automatic())
every_estimator = pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda estimator: estimator.name)
UTILITIES = ("euclidean", "angular")


def world(
    seed: int, count: int, *, size: int = 9, kind: str = "euclidean", bad: int = 0, long: float = 1.0
) -> tuple[Game, np.ndarray, np.ndarray]:
    """A game of clients that follow one direction more or less, some of them backwards and at another length."""
    rng = np.random.default_rng(seed)
    base = rng.normal(size=size) / math.sqrt(size)
    rows = base + rng.normal(size=(count, size)) / math.sqrt(size) * rng.uniform(0.5, 1.5, size=(count, 1))
    rows[:bad] *= -long
    reference = base + 0.5 * rng.normal(size=size) / math.sqrt(size)
    square = float(reference @ reference)
    utility: Any = (
        EuclideanUtility(reference_square=square, unit=square) if kind == "euclidean" else AngularUtility(reference_square=square)
    )
    return (
        Game(products=rows @ rows.T, linear=rows @ reference, utility=utility, empty=1 / 2 if kind == "euclidean" else 1 / 3),
        rows,
        reference,
    )


def naive(rows: np.ndarray, reference: np.ndarray, kind: str) -> np.ndarray:
    """The definition of the Shapley value, with every coalition's mean formed from the updates."""

    def worth(members: tuple[int, ...]) -> float:
        if not members:
            return 1 / 2 if kind == "euclidean" else 1 / 3
        mean = rows[list(members)].mean(axis=0)
        if kind == "euclidean":
            return 1 / (1 + float((mean - reference) @ (mean - reference)) / float(reference @ reference))
        return 1 / (1 + 2 * (1 - float(mean @ reference) / (np.linalg.norm(mean) * np.linalg.norm(reference))))

    count = len(rows)
    values = np.zeros(count)
    for client in range(count):
        others = [other for other in range(count) if other != client]
        for size in range(count):
            for some in itertools.combinations(others, size):
                values[client] += (worth((*some, client)) - worth(some)) / (count * math.comb(count - 1, size))
    return values


@pytest.mark.parametrize("kind", UTILITIES)
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_exact_values_are_those_of_averaging_every_coalition_again(kind: str, count: int) -> None:
    game, rows, reference = world(count, count, kind=kind, bad=count // 4)
    np.testing.assert_allclose(Exact().values(game), naive(rows, reference, kind), atol=1e-13)


@pytest.mark.parametrize("kind", UTILITIES)
@pytest.mark.parametrize("count", [2, 5, 8, 11])
def test_strata_up_to_half_the_clients_are_exact(kind: str, count: int) -> None:
    game, _, _ = world(count, count, kind=kind, bad=count // 4, long=5.0)
    np.testing.assert_allclose(Strata(edge=count // 2).values(game), Exact().values(game), atol=1e-13)
    if count > 5:
        assert np.abs(Strata().values(game) - Exact().values(game)).max() > 1e-6  # fewer strata are not


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_two_exact_sizes_at_each_end_are_all_sizes_of_up_to_five_clients(count: int) -> None:
    game, _, _ = world(count, count, bad=count // 4, long=5.0)
    for estimator in (Strata(), MonteCarlo(permutations=1)):
        np.testing.assert_allclose(estimator.values(game), Exact().values(game), atol=1e-13)


@every_estimator
@pytest.mark.parametrize("kind", UTILITIES)
@pytest.mark.parametrize("count", [1, 2, 3, 7, 15])
def test_values_sum_to_the_worth_of_all_minus_the_worth_of_nobody(estimator: Any, kind: str, count: int) -> None:
    game, _, _ = world(count, count, kind=kind, bad=count // 3, long=4.0)
    # Some ten thousand additions of numbers below one.
    assert abs(estimator.values(game).sum() - (game.whole - game.empty)) < 1e-11


@every_estimator
@pytest.mark.parametrize("kind", UTILITIES)
def test_equal_clients_have_equal_values(estimator: Any, kind: str) -> None:
    game, rows, reference = world(3, 9, kind=kind, bad=2)
    rows[5] = rows[1]
    game = Game(products=rows @ rows.T, linear=rows @ reference, utility=game.utility, empty=game.empty)
    if isinstance(estimator, MonteCarlo):  # on average
        values = np.stack([MonteCarlo(permutations=7, seed=seed).values(game) for seed in range(100)])
        differences = values[:, 5] - values[:, 1]
        assert abs(differences.mean()) < 6 * differences.std(ddof=1) / math.sqrt(100)
        return
    values = estimator.values(game)
    assert abs(values[5] - values[1]) < 1e-12


@every_estimator
def test_a_client_that_changes_nothing_of_a_linear_game_gets_what_it_is(estimator: Any) -> None:
    # At a right angle to the reference and of no length: all coalitions of a size are equally long, with it and without it.
    count = 8
    game = Game(
        products=np.zeros((count, count)), linear=np.zeros(count), utility=EuclideanUtility(reference_square=1.0, unit=1.0), empty=0.5
    )
    np.testing.assert_allclose(estimator.values(game), 0.0, atol=1e-15)


@every_estimator
def test_the_same_game_gives_the_same_values(estimator: Any) -> None:
    game, _, _ = world(4, 12)
    np.testing.assert_array_equal(estimator.values(game), estimator.values(game))


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10_000))
def test_a_permutation_of_the_clients_permutes_exact_and_strata_values(seed: int) -> None:
    game, _, _ = world(seed, 9, bad=2)
    order = np.random.default_rng(seed).permutation(9)
    shuffled = Game(products=game.products[np.ix_(order, order)], linear=game.linear[order], utility=game.utility, empty=game.empty)
    for estimator in (Exact(), Strata()):
        np.testing.assert_allclose(estimator.values(shuffled), estimator.values(game)[order], atol=1e-13)


@pytest.mark.parametrize("kind", UTILITIES)
@pytest.mark.parametrize("permutations", [50, 800])
def test_sampling_is_unbiased_and_its_error_falls_with_the_square_root(kind: str, permutations: int) -> None:
    game, _, _ = world(5, 14, kind=kind, bad=3, long=3.0)
    exact = Exact().values(game)
    estimates = np.stack([MonteCarlo(permutations=permutations, seed=seed).values(game) for seed in range(40)])
    error = estimates.std(axis=0, ddof=1).max()
    # Forty estimates: their mean is off by error / sqrt(40), six of these. One permutation has an error of the size of a value.
    assert np.abs(estimates.mean(axis=0) - exact).max() < 6 * error / math.sqrt(40)
    assert error < np.ptp(exact) * 2 / math.sqrt(permutations)


def test_every_round_draws_other_permutations_and_all_parties_of_a_round_the_same() -> None:
    game, _, _ = world(5, 14, bad=3, long=3.0)
    estimator = MonteCarlo(permutations=20)
    rounds = [replace(game, seed=seed) for seed in (1, 2)]
    np.testing.assert_array_equal(estimator.values(rounds[0]), estimator.values(replace(game, seed=1)))
    assert np.abs(estimator.values(rounds[0]) - estimator.values(rounds[1])).max() > 0
    assert np.abs(estimator.values(rounds[0]) - MonteCarlo(permutations=20, seed=1).values(game)).max() > 0


def test_over_rounds_the_errors_of_sampling_cancel_out() -> None:
    game, _, _ = world(5, 14, bad=3, long=3.0)
    exact, estimator = Exact().values(game), MonteCarlo(permutations=20)
    estimates = np.stack([estimator.values(replace(game, seed=number)) for number in range(100)])
    error = estimates.std(axis=0, ddof=1)
    # The mean of a hundred is off by a tenth of the error of one; with the permutations of one round in all of them, by all of it.
    assert (np.abs(estimates.mean(axis=0) - exact) < 6 * error / 10).all()
    assert np.abs(estimates[0] - exact).max() > 6 * np.abs(estimates.mean(axis=0) - exact).max() / 3


def one_by_one(game: Game, line: Any, order: np.ndarray) -> np.ndarray:
    """What each client adds to the game minus its linearisation, in every order, from its definition."""
    total = np.zeros(game.clients)
    for row in order:
        last = 0.0
        for step, client in enumerate(row):
            members, size = row[: step + 1], step + 1
            rest = 0.0
            if 2 < size < game.clients - 2:
                square, product = game.products[np.ix_(members, members)].sum(), game.linear[members].sum()
                at = np.array([size])
                rest = float(game.utility.value(square, product, size)) - float(line.value_at(square, product, at)[0, 0])
            total[client] += rest - last
            last = rest
    return total


@pytest.mark.parametrize("kind", UTILITIES)
@pytest.mark.parametrize("count", [4, 5, 6, 9])
def test_all_orders_at_once_are_the_orders_one_by_one(kind: str, count: int) -> None:
    game, _, _ = world(2, count, kind=kind, bad=1, long=6.0)
    line = estimators._Line.of(game, estimators._Means.of(game))
    order = np.random.default_rng(0).permuted(np.tile(np.arange(count), (7, 1)), axis=1)
    np.testing.assert_allclose(MonteCarlo._marginals(game, line, order), one_by_one(game, line, order), atol=1e-13)


def plain_monte_carlo(game: Game, permutations: int, seed: int) -> np.ndarray:
    """Marginals of the game itself, without a control variate."""
    rng = np.random.default_rng(seed)
    values = np.zeros(game.clients)
    for _ in range(permutations):
        order = rng.permutation(game.clients)
        ordered = game.products[np.ix_(order, order)]
        size = np.arange(1, game.clients + 1)
        square = np.cumsum(2 * np.tril(ordered, -1).sum(axis=1) + np.diag(ordered))
        worth = game.utility.value(square, np.cumsum(game.linear[order]), size)
        values[order] += np.diff(worth, prepend=game.empty)
    return values / permutations


def test_the_control_variate_does_with_a_hundred_permutations_what_plain_sampling_does_with_nearly_a_thousand() -> None:
    game, _, _ = world(6, 40, size=2000)
    truth = MonteCarlo(permutations=40_000, seed=99).values(game)

    def error(estimate: Any) -> float:
        return math.sqrt(np.mean([((estimate(seed) - truth) ** 2).mean() for seed in range(6)]))

    controlled = error(lambda seed: MonteCarlo(permutations=100, seed=seed).values(game))
    # Measured: a factor of 3.1 at equal permutations, so of nine in their number. The error of the truth is a twentieth of it.
    assert controlled < error(lambda seed: plain_monte_carlo(game, 100, seed)) / 2.4
    assert controlled < error(lambda seed: plain_monte_carlo(game, 500, seed))


@pytest.mark.parametrize(("count", "least"), [(20, 0.99), (100, 0.998)])
def test_strata_order_clients_as_the_true_values_do(count: int, least: float) -> None:
    game, _, _ = world(7, count, size=2000, bad=count // 5)
    truth = Exact().values(game) if count <= 20 else MonteCarlo(permutations=40_000, seed=99).values(game)
    strata = Strata().values(game)
    assert spearmanr(strata, truth).statistic > least
    assert np.abs(strata - truth).max() < 0.05 * np.ptp(truth)  # measured: 3 %, and alike for all clients of a kind
    shuffled = np.random.default_rng(0).permutation(strata)
    assert spearmanr(shuffled, truth).statistic < 0.5  # another order is told apart


def test_the_estimator_is_chosen_by_the_number_of_clients_and_the_spread_of_the_norms() -> None:
    assert isinstance(Automatic().choose(world(0, 20)[0]), Exact)
    assert isinstance(Automatic().choose(world(0, 21, size=500)[0]), Strata)
    sampling = MonteCarlo(permutations=5)
    assert Automatic(sampling=sampling).choose(world(0, 21, size=500, bad=2, long=10.0)[0]) is sampling


def test_strata_lose_the_order_where_automatic_does_not_take_them() -> None:
    game, _, _ = world(8, 20, size=2000, bad=4, long=30.0)
    exact = Exact().values(game)
    assert np.abs(Strata().values(game) - exact).max() > 5 * np.abs(MonteCarlo().values(game) - exact).max()


def test_too_many_clients_for_exact_values_are_refused() -> None:
    with pytest.raises(ValueError, match="expected at most 20 clients, got 21"):
        Exact().values(world(0, 21)[0])


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="an edge of at least 1"):
        Strata(edge=0)
    with pytest.raises(ValueError, match="permutations from 1"):
        MonteCarlo(permutations=0)
    with pytest.raises(ValueError, match="a seed from 0"):
        MonteCarlo(seed=-1)
    with pytest.raises(ValueError, match="expected products of shape"):
        Game(products=np.eye(2), linear=np.zeros(3), utility=EuclideanUtility(reference_square=1.0, unit=1.0), empty=0.5)


@pytest.mark.parametrize("kind", UTILITIES)
def test_slopes_are_the_derivatives_of_the_value(kind: str) -> None:
    utility = world(9, 3, kind=kind)[0].utility
    square, product, size, step = np.array([2.0, 5.0]), np.array([0.7, -1.1]), np.array([1.0, 3.0]), 1e-6
    by_square, by_product = utility.slopes(square, product, size)
    up, down = utility.value(square + step, product, size), utility.value(square - step, product, size)
    np.testing.assert_allclose(by_square, (up - down) / (2 * step), rtol=1e-6)
    up, down = utility.value(square, product + step, size), utility.value(square, product - step, size)
    np.testing.assert_allclose(by_product, (up - down) / (2 * step), rtol=1e-6)


def test_names_hold_every_parameter() -> None:
    names = {estimator.name for estimator in (*ESTIMATORS, MonteCarlo(seed=1), Automatic(sampling=MonteCarlo(seed=1)))}
    assert len(names) == len(ESTIMATORS) + 2
