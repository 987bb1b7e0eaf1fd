from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from privfed.attacks.facts import AdaptiveOptimizer, GaussianNoise, Sgd
from privfed.attacks.observation import NotApplicable
from privfed.attacks.row_space import RowSpace, row_space
from privfed.training.model import mlp
from privfed.update import PlainVector


def narrow(width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    return mlp(50, hidden=(width, 32))


def extended(rows: np.ndarray) -> np.ndarray:
    return np.column_stack([rows, np.ones(len(rows))])


def with_noise(observation, *, noise_multiplier: float, seed: int = 0):
    """What DP-SGD adds to one step's update, and says that it adds."""
    noise = GaussianNoise(noise_multiplier=noise_multiplier, max_grad_norm=1.0)
    training = replace(observation.training, noise=noise)
    deviation = 0.1 * noise_multiplier / training.batch_size
    values = observation.seen.values + deviation * np.random.default_rng(seed).normal(size=observation.layout.size)
    return replace(observation, training=training, seen=PlainVector(layout=observation.layout, values=values))


@pytest.mark.parametrize("size", [1, 2, 7, 16, 24])
def test_the_rank_is_the_number_of_rows_whatever_the_attacker_believes_it_to_be(size: int, table, observe) -> None:
    rows, labels = table.batch(size)
    observation = observe(rows, labels, table.schema, model=narrow())
    told = row_space(observation)
    untold = row_space(replace(observation, training=replace(observation.training, batch_size=1.0)))
    assert isinstance(told, RowSpace)
    assert isinstance(untold, RowSpace)
    assert told.rank == untold.rank == size
    assert told.gap > 100


def test_every_row_is_a_combination_of_the_basis_within_the_stated_deviation(table, observe) -> None:
    for seed in range(5):
        rows, labels = table.batch(8, seed=seed)
        space = row_space(observe(rows, labels, table.schema, model=narrow(), seed=seed))
        weights = 1 / space.column_noise
        combinations = np.linalg.lstsq((space.basis * weights).T, (extended(rows) * weights).T, rcond=None)[0].T
        found, deviations = space.rows(combinations)
        errors = (found - rows) / deviations
        # The fit hides as many of the 51 errors of a row as the space has dimensions.
        deviation = np.sqrt((errors[:, (rows != 0).any(axis=0)] ** 2).mean())
        assert 0.3 < deviation < 1.2


def test_the_noise_of_each_coordinate_is_one(table, observe) -> None:
    rows, labels = table.batch(4)
    for noise_multiplier in (0.0, 1e-4, 1e-3):
        observation = observe(rows, labels, table.schema, model=narrow())
        observation = with_noise(observation, noise_multiplier=noise_multiplier) if noise_multiplier else observation
        space = row_space(observation)
        # m x n unit noise without its four largest directions: the squares of its singular values add up to about m n.
        columns = 51 if noise_multiplier else int((rows != 0).any(axis=0).sum()) + 1
        noise = np.sqrt((space.smaller**2).sum() / (len(space.coordinates) * columns))
        assert 0.4 < noise < 1.1


def test_noise_takes_rows_out_of_the_rank_and_never_puts_any_in(table, observe) -> None:
    rows, labels = table.batch(4)
    observation = observe(rows, labels, table.schema, model=narrow())
    ranks = [row_space(with_noise(observation, noise_multiplier=sigma)).rank for sigma in (1e-5, 1e-3, 1e-2, 1e-1, 1.0)]
    assert ranks[0] == 4
    assert ranks[-1] == 0
    assert (np.diff(ranks) <= 0).all()


def test_noise_that_the_attacker_was_not_told_is_not_taken_for_rows(table, observe) -> None:
    rows, labels = table.batch(4)
    observation = observe(rows, labels, table.schema, model=narrow())
    noisy = with_noise(observation, noise_multiplier=0.1)
    result = row_space(replace(noisy, training=observation.training))
    assert isinstance(result, NotApplicable)
    assert "undeclared noise" in str(result)


def test_a_cut_keeps_the_strongest_rows_and_counts_the_rest_as_noise(table, observe) -> None:
    rows, labels = table.batch(6)
    space = row_space(observe(rows, labels, table.schema, model=narrow()))
    cut = space.cut(4)
    assert cut.rank == 4
    np.testing.assert_allclose(cut.coordinates @ cut.basis, space.coordinates[:, :4] @ space.basis[:4] / (space.scales[4] / space.edge))
    assert cut.smaller[0] == pytest.approx(space.edge)
    assert next(iter(space.cuts())).rank == 6


def test_more_rows_than_the_layer_can_keep_apart_are_not_applicable(table, observe) -> None:
    rows, labels = table.batch(64)
    # 51 columns with the bias. Two categories do not occur, and in each of five blocks the last column follows from the others.
    assert (rows.any(axis=0).sum(), len(table.schema.blocks)) == (48, 5)
    assert "can keep apart (44)" in str(row_space(observe(rows, labels, table.schema, model=narrow(256))))
    rows, labels = table.batch(16)
    assert "can keep apart (8)" in str(row_space(observe(rows, labels, table.schema, model=mlp(50, hidden=(8,)))))


def test_it_is_not_applicable_where_no_sum_of_gradients_is_seen(table, observe) -> None:
    rows, labels = table.batch(2)
    adam = observe(rows, labels, table.schema, optimizer=AdaptiveOptimizer(name="Adam"))
    assert "Adam rescales" in str(row_space(adam))
    bare = nn.Sequential(nn.Linear(50, 4, bias=False), nn.ReLU(), nn.Linear(4, 1))
    assert "no fully connected layer with bias on the schema's 50 columns" in str(
        row_space(observe(rows, labels, table.schema, model=bare))
    )
    observation = observe(rows, labels, table.schema)
    still = replace(observation, seen=PlainVector(layout=observation.layout, values=np.zeros(observation.layout.size)))
    assert "no neuron of the first layer moved" in str(row_space(still))


def test_adam_declared_as_sgd_is_not_taken_for_rows(table, observe) -> None:
    rows, labels = table.batch(4)
    adam = observe(rows, labels, table.schema, optimizer=AdaptiveOptimizer(name="Adam"), model=narrow(), steps=5)
    lying = replace(adam, training=replace(adam.training, optimizer=Sgd(learning_rate=0.001)))
    assert isinstance(row_space(lying), NotApplicable)
