import numpy as np
import pytest
import torch
from torch import nn

from privfed.attacks.analytic import EXACT
from privfed.attacks.facts import Activation, AdaptiveOptimizer, Sgd
from privfed.attacks.observation import NotApplicable, Reconstruction
from privfed.attacks.row_space import row_space
from privfed.attacks.scoring import check_certificates, score_rows
from privfed.attacks.unmixing import unmix, whole_records
from privfed.training.model import mlp


def exact(result: object, rows: np.ndarray, schema) -> float:
    assert isinstance(result, Reconstruction)
    assert check_certificates(result, rows, schema=schema, tolerance=EXACT).false == 0
    return score_rows(result.rows, rows, schema=schema, tolerance=EXACT, baseline=np.full_like(rows, 99.0)).rows


def network(activation: nn.Module, seed: int = 0, width: int = 64) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(50, width), activation, nn.Linear(width, 32), activation, nn.Linear(32, 1))


@pytest.mark.parametrize("activation", [nn.Tanh(), nn.GELU(), nn.ReLU()])
def test_four_rows_are_exact_and_mostly_certified_whatever_the_activation(activation: nn.Module, table, observe) -> None:
    certified, seconds = [], []
    for seed in range(10):
        rows, labels = table.batch(4, seed=seed)
        kind = Activation.RELU if isinstance(activation, nn.ReLU) else Activation.OTHER
        result = unmix(observe(rows, labels, table.schema, model=network(activation, seed), activation=kind))
        assert exact(result, rows, table.schema) == 1.0
        certified.append(result.certified.sum())
        seconds.append(result.seconds)
    assert np.mean(certified) >= 3.5  # now and then a fifth record is whole by chance
    assert min(seconds) < 0.02  # the others may have waited for the processor


def test_all_rows_are_among_the_whole_records_and_only_as_many_are_certified(table, observe) -> None:
    seen = []
    for seed in range(20):
        rows, labels = table.batch(8, seed=seed)
        observation = observe(rows, labels, table.schema, model=network(nn.Tanh(), seed), activation=Activation.OTHER)
        space = row_space(observation)
        points = whole_records(space, table.schema)
        if not points.fixed:
            continue
        found, _ = space.rows(points.combinations)
        distance = np.abs(found[:, None] - rows) / (table.schema.high - table.schema.low)
        assert distance.max(axis=2).min(axis=0).max() < EXACT
        result = unmix(observation)
        exact(result, rows, table.schema)
        assert result.certified.any() == (len(found) == 8)
        seen.append(len(found))
    # Both kinds occur: as many whole records as rows, and more.
    assert min(seen) == 8 < max(seen)
    assert len(seen) > 10


def test_rows_survive_steps_momentum_and_weight_decay_on_tanh(table, observe) -> None:
    rows, labels = table.batch(4, seed=2)
    optimizer = Sgd(learning_rate=0.05, momentum=0.9, weight_decay=0.01)
    observation = observe(rows, labels, table.schema, model=network(nn.Tanh()), activation=Activation.OTHER, optimizer=optimizer, steps=10)
    assert exact(unmix(observation), rows, table.schema) == 1.0


def test_confidence_is_lower_where_more_whole_records_than_rows_were_found(table, observe) -> None:
    for seed in range(10):
        rows, labels = table.batch(12, seed=seed)
        result = unmix(observe(rows, labels, table.schema, model=network(nn.Tanh(), seed), activation=Activation.OTHER))
        if isinstance(result, Reconstruction) and not result.certified.any():
            assert result.confidence.max() < 0.95
            assert len(result.rows) <= 12


def test_categories_that_do_not_fix_the_rows_are_not_applicable(generate_table, observe) -> None:
    table = generate_table(numeric=20, categories=(3,))
    rows, labels = table.batch(8)
    observation = observe(rows, labels, table.schema, model=mlp(table.schema.width, hidden=(64, 32)))
    assert "do not tell the 8 rows apart" in str(unmix(observation))
    points = whole_records(row_space(observation), table.schema)
    # One point for each category that occurs, in the middle of the ranges otherwise.
    assert not points.fixed
    assert len(points.combinations) == len(np.unique(rows[:, -3:], axis=0))


def test_a_table_without_categories_is_not_applicable(generate_table, observe) -> None:
    table = generate_table(numeric=12, categories=())
    rows, labels = table.batch(2)
    assert "no one-hot block" in str(unmix(observe(rows, labels, table.schema)))


def test_updates_of_adam_are_not_applicable(table, observe) -> None:
    rows, labels = table.batch(2)
    assert isinstance(unmix(observe(rows, labels, table.schema, optimizer=AdaptiveOptimizer(name="Adam"))), NotApplicable)
