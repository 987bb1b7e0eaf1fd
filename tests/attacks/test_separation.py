import numpy as np
import pytest
import torch

from privfed.attacks.row_space import RowSpace, row_space
from privfed.attacks.separation import AGREEMENT, choose, separate
from privfed.attacks.unmixing import whole_records
from privfed.training.model import mlp


def space_and_points(table, observe, *, size: int, seed: int = 0) -> tuple[RowSpace, np.ndarray, np.ndarray]:
    """A row space, the rows as points of it, and the rows."""
    rows, labels = table.batch(size, seed=seed)
    torch.manual_seed(seed)
    space = row_space(observe(rows, labels, table.schema, model=mlp(table.schema.width), seed=seed))
    assert isinstance(space, RowSpace)
    extended = np.column_stack([rows, np.ones(size)])
    return space, np.linalg.lstsq(space.basis.T, extended.T, rcond=None)[0].T, rows


def nearest(found: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return np.abs(found[:, None] - rows).max(axis=2).min(axis=0)


def test_of_rows_and_points_that_are_none_the_rows_are_chosen(table, observe) -> None:
    rng = np.random.default_rng(0)
    for seed in range(5):
        space, points, rows = space_and_points(table, observe, size=6, seed=seed)
        shares = rng.normal(size=(8, 6))
        others = shares / shares.sum(axis=1, keepdims=True) @ points
        found = choose(space, rng.permutation(np.concatenate([points, others])), rng)
        assert found is not None
        assert found.complete
        assert not found.rival
        assert nearest(found.rows, rows).max() < 1e-2


def test_rows_explain_the_neurons_and_their_mixtures_do_not(table, observe) -> None:
    space, points, _ = space_and_points(table, observe, size=6)
    right = np.linalg.inv(points).T
    right /= np.linalg.norm(right, axis=1, keepdims=True)
    assert separate(space, right).complete
    wrong = np.linalg.svd(space.coordinates, full_matrices=False)[2]
    assert separate(space, wrong).agreement.min() < AGREEMENT


def test_two_choices_that_explain_the_neurons_alike_are_rivals(table, observe) -> None:
    space, points, _ = space_and_points(table, observe, size=4)
    # A point that is nearly one of the rows fires the same neurons.
    twin = points[:1] + 1e-6 * (points[1:2] - points[:1])
    found = choose(space, np.concatenate([points, twin]), np.random.default_rng(0))
    assert found is not None
    assert found.complete
    assert found.rival


def test_points_that_do_not_span_the_space_are_no_choice(table, observe) -> None:
    space, points, _ = space_and_points(table, observe, size=4)
    assert choose(space, points[:3], np.random.default_rng(0)) is None
    assert choose(space, np.zeros((0, 4)), np.random.default_rng(0)) is None


@pytest.mark.parametrize("size", [4, 8])
def test_the_whole_records_of_a_space_are_enough_where_categories_fix_them(size: int, table, observe) -> None:
    space, _, rows = space_and_points(table, observe, size=size)
    points = whole_records(space, table.schema)
    assert points.fixed
    found = choose(space, points.combinations, np.random.default_rng(0))
    assert found is not None
    assert nearest(found.rows, rows).max() < 1e-2
