import numpy as np
import torch

from privfed.attacks.row_space import RowSpace, row_space
from privfed.attacks.silent_neurons import SILENT, SilentNeurons, _different, _fit_planes, _wrong_sides
from privfed.training.model import mlp


def space_of(table, observe, *, size: int, width: int, seed: int = 0) -> tuple[RowSpace, np.ndarray]:
    rows, labels = table.batch(size, seed=seed)
    torch.manual_seed(seed)
    space = row_space(observe(rows, labels, table.schema, model=mlp(table.schema.width, hidden=(width, 32)), seed=seed))
    assert isinstance(space, RowSpace)
    return space, rows


def true_directions(space: RowSpace, rows: np.ndarray) -> np.ndarray:
    """Directions in which one row alone shows, from the rows."""
    extended = np.column_stack([rows, np.ones(len(rows))])
    combinations = np.linalg.lstsq(space.basis.T, extended.T, rcond=None)[0].T
    directions = np.linalg.inv(combinations).T
    return directions / np.linalg.norm(directions, axis=1, keepdims=True)


def test_one_search_finds_the_direction_of_every_row(generate_table, observe) -> None:
    table = generate_table(numeric=50, categories=())
    space, rows = space_of(table, observe, size=8, width=64)
    neurons = SilentNeurons(space, np.random.default_rng(0), guesses=np.zeros((0, 8)))
    for _ in range(3):
        neurons.search()
    found = neurons.independent()
    assert found.shape == (8, 8)
    # Compared where every row counts alike, up to sign.
    whitened = [directions * space.scales for directions in (found, true_directions(space, rows))]
    cosines = np.abs(
        np.divide(whitened[0].T, np.linalg.norm(whitened[0], axis=1)).T @ (whitened[1].T / np.linalg.norm(whitened[1], axis=1))
    )
    assert cosines.max(axis=0).min() > 1 - 1e-6
    assert sorted(cosines.argmax(axis=0)) == list(range(8))


def test_neurons_show_the_rows_that_fire_them_and_no_other(generate_table, observe) -> None:
    table = generate_table(numeric=50, categories=())
    space, rows = space_of(table, observe, size=4, width=64)
    fires = np.column_stack([rows, np.ones(4)]) @ space.before.T > 0
    shown = np.abs(true_directions(space, rows) @ space.coordinates.T) > SILENT
    assert (shown == fires).mean() > 0.99


def test_too_few_neurons_are_not_enough(table, observe) -> None:
    wide, _ = space_of(table, observe, size=4, width=64)
    assert SilentNeurons(wide, np.random.default_rng(0), guesses=np.zeros((0, 4))).enough
    narrow, _ = space_of(table, observe, size=3, width=4)
    assert not SilentNeurons(narrow, np.random.default_rng(0), guesses=np.zeros((0, 3))).enough


def test_the_same_generator_gives_the_same_planes(table, observe) -> None:
    space, _ = space_of(table, observe, size=6, width=64)

    def planes(seed: int) -> np.ndarray:
        neurons = SilentNeurons(space, np.random.default_rng(seed), guesses=np.zeros((0, 6)))
        neurons.search()
        return neurons.independent()

    np.testing.assert_array_equal(planes(1), planes(1))


def test_a_plane_is_fitted_in_spite_of_points_that_are_not_on_it() -> None:
    rng = np.random.default_rng(0)
    right = 0
    for _ in range(20):
        normal = rng.normal(size=6)
        normal /= np.linalg.norm(normal)
        on, off = rng.normal(size=(30, 6)), rng.normal(size=(10, 6))
        on -= np.outer(on @ normal, normal)
        points = np.concatenate([on, off])
        points /= np.linalg.norm(points, axis=1, keepdims=True)
        found = _fit_planes(points, np.ones((1, 40)))[0]
        # Least squares would be off by some tenths.
        right += abs(found @ normal) > 1 - 1e-9
    assert right == 20


def test_only_planes_that_some_row_would_make_have_no_neuron_on_the_wrong_side() -> None:
    rng = np.random.default_rng(0)
    inputs = np.linalg.svd(rng.normal(size=(64, 8)), full_matrices=False)[0] * 8
    one, other = rng.normal(size=(2, 8))
    fired = [inputs @ one > 0, inputs @ other > 0]
    sides = np.where([fired[0], fired[1], fired[0] ^ fired[1], fired[0] | fired[1], rng.random(64) > 0.5], 1.0, -1.0)
    wrong = _wrong_sides(sides, inputs)
    assert wrong[:2].tolist() == [0, 0]
    # Rows fire half-spaces of neurons; differences of rows, unions and accidents are none.
    assert (wrong[2:] >= 4).all()


def test_multiples_of_one_point_count_once_and_are_counted() -> None:
    points = 1000 * np.array([[1.0, 0, 0], [2.0, 0.0005, 0], [0, 3.0, 0], [0, -1.0, 0], [0, 0, 1.0]])
    kept, sizes = _different(points)
    assert kept.tolist() == [2, 1, 4]
    assert sizes.tolist() == [2, 2, 1]
