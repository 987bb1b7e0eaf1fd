import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from privfed.contribution.estimators import Exact
from privfed.contribution.game import EuclideanUtility, Game
from privfed.contribution.leave_one_out import leave_one_out_by_utility
from privfed.contribution.shapley import GtgShapley, TruncatedMonteCarlo, exact_by_utility
from privfed.errors import LayoutMismatchError
from privfed.update import Layout, PlainVector

SIZE = 10


def plain(row: Any) -> PlainVector:
    return PlainVector(layout=Layout(names=("w",), shapes=((len(row),),)), values=row)


def world(seed: int = 0, count: int = 6) -> tuple[dict[str, PlainVector], Any, Game]:
    """Updates, a utility that evaluates their mean, and the game of the same worths from inner products."""
    rng = np.random.default_rng(seed)
    base = rng.normal(size=SIZE) / math.sqrt(SIZE)
    rows = base + rng.normal(size=(count, SIZE)) / math.sqrt(SIZE)
    rows[0] *= -2
    square = float(base @ base)

    def utility(mean: PlainVector) -> float:
        return 1 / (1 + float((mean.values - base) @ (mean.values - base)) / square)

    game = Game(
        products=rows @ rows.T,
        linear=rows @ base,
        utility=EuclideanUtility(reference_square=square, unit=square),
        empty=utility(plain([0.0] * SIZE)),
    )
    return {f"c{index}": plain(row) for index, row in enumerate(rows)}, utility, game


def as_array(values: Mapping[str, float]) -> np.ndarray:
    return np.array([values[f"c{index}"] for index in range(len(values))])


def test_exact_values_by_evaluation_are_those_from_inner_products() -> None:
    updates, utility, game = world()
    valuation = exact_by_utility(updates, utility)
    np.testing.assert_allclose(as_array(valuation.values), Exact().values(game), atol=1e-13)
    assert valuation.evaluations == 2**6


def test_truncation_at_nothing_is_plain_sampling_and_is_unbiased() -> None:
    updates, utility, game = world()
    estimates = np.stack(
        [
            as_array(TruncatedMonteCarlo(permutations=60).values(updates, utility, rng=np.random.default_rng(seed)).values)
            for seed in range(20)
        ]
    )
    error = estimates.std(axis=0, ddof=1) / math.sqrt(20)
    assert (np.abs(estimates.mean(axis=0) - Exact().values(game)) < 6 * error + 1e-12).all()
    np.testing.assert_allclose(estimates.sum(axis=1), game.whole - game.empty, atol=1e-12)


def test_truncation_saves_evaluations_and_moves_values_by_no_more_than_its_tolerance() -> None:
    updates, utility, game = world(count=10)
    tolerance = 0.05
    whole = TruncatedMonteCarlo(permutations=30).values(updates, utility, rng=np.random.default_rng(0))
    cut = TruncatedMonteCarlo(permutations=30, tolerance=tolerance).values(updates, utility, rng=np.random.default_rng(0))
    assert cut.evaluations < whole.evaluations
    # Each permutation leaves out marginals that sum to less than the tolerance.
    assert abs(sum(cut.values.values()) - (game.whole - game.empty)) < tolerance


def test_gtg_agrees_with_the_exact_values_and_puts_each_client_first_equally_often() -> None:
    updates, utility, game = world()
    first_evaluated: list[int] = []

    def watched(mean: PlainVector) -> float:
        for index, vector in enumerate(updates.values()):
            if np.array_equal(vector.values, mean.values):
                first_evaluated.append(index)
        return utility(mean)

    valuation = GtgShapley(tolerance=0.0, settled=0.02).values(updates, watched, rng=np.random.default_rng(0))
    assert sorted(first_evaluated) == list(range(6))  # each once, and kept
    assert valuation.permutations % 6 == 0
    # It settles at changes of 2 % over ten cycles.
    assert np.abs(as_array(valuation.values) - Exact().values(game)).max() < 0.1 * np.ptp(Exact().values(game))
    assert sum(valuation.values.values()) == pytest.approx(game.whole - game.empty, abs=1e-12)


def test_gtg_gives_nothing_in_a_round_that_changed_nothing_and_evaluates_two_coalitions() -> None:
    updates, utility, _ = world()
    valuation = GtgShapley(round_tolerance=10.0).values(updates, utility, rng=np.random.default_rng(0))
    assert set(valuation.values.values()) == {0.0}
    assert (valuation.evaluations, valuation.permutations) == (2, 0)


def test_gtg_stops_at_its_most_cycles() -> None:
    updates, utility, _ = world()
    valuation = GtgShapley(tolerance=0.0, settled=1e-12, most_cycles=3).values(updates, utility, rng=np.random.default_rng(0))
    assert valuation.permutations == 18


@pytest.mark.parametrize("valued", [TruncatedMonteCarlo(permutations=40), GtgShapley()], ids=lambda valued: type(valued).__name__)
def test_the_same_generator_gives_the_same_values_in_any_order_of_the_clients(valued: Any) -> None:
    updates, utility, _ = world()
    values = valued.values(updates, utility, rng=np.random.default_rng(1)).values
    shuffled = valued.values(dict(reversed(updates.items())), utility, rng=np.random.default_rng(1)).values
    assert shuffled == values
    assert list(shuffled) == list(reversed(values))


def test_leave_one_out_by_utility_is_its_definition() -> None:
    updates, utility, game = world()
    rows = np.stack([vector.values for vector in updates.values()])
    expected = [game.whole - utility(plain(np.delete(rows, index, axis=0).mean(axis=0))) for index in range(len(rows))]
    np.testing.assert_allclose(as_array(leave_one_out_by_utility(updates, utility)), expected, atol=1e-13)


def everyone(utility: Any) -> list[Any]:
    rng = np.random.default_rng(0)
    return [
        lambda updates: exact_by_utility(updates, utility),
        lambda updates: TruncatedMonteCarlo(permutations=2).values(updates, utility, rng=rng),
        lambda updates: GtgShapley().values(updates, utility, rng=rng),
    ]


def test_a_utility_that_is_not_finite_is_refused() -> None:
    updates, _, _ = world()
    for bad in (math.nan, math.inf):
        for value in [*everyone(lambda _, bad=bad: bad), lambda updates, bad=bad: leave_one_out_by_utility(updates, lambda _: bad)]:
            with pytest.raises(ValueError, match="a finite utility"):
                value(updates)


def test_no_update_and_mixed_layouts_are_refused() -> None:
    updates, utility, _ = world()
    for value in everyone(utility):
        with pytest.raises(ValueError, match="at least one update"):
            value({})
        with pytest.raises(LayoutMismatchError, match="nothing was evaluated"):
            value({**updates, "c9": plain([1.0])})
    same_size = PlainVector(layout=Layout(names=("another",), shapes=((updates["c0"].layout.size,),)), values=updates["c0"].values)
    for value in [*everyone(utility), lambda updates: leave_one_out_by_utility(updates, utility)]:
        with pytest.raises(LayoutMismatchError, match="nothing was evaluated"):
            value({**updates, "c9": same_size})
    with pytest.raises(ValueError, match="at least 2 clients, got 1"):
        leave_one_out_by_utility({"c0": updates["c0"]}, utility)


@pytest.mark.parametrize(
    "changes", [{"permutations": 0}, {"permutations": 1, "tolerance": -1.0}, {"permutations": 1, "tolerance": math.nan}]
)
def test_numbers_of_truncated_sampling_out_of_range_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="permutations from 1 and a finite tolerance"):
        TruncatedMonteCarlo(**changes)


@pytest.mark.parametrize(
    "changes", [{"round_tolerance": -1.0}, {"tolerance": math.nan}, {"settled": 0.0}, {"settled": math.nan}, {"most_cycles": 0}]
)
def test_numbers_of_gtg_out_of_range_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        GtgShapley(**changes)
