import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from privfed.attacks.facts import Activation, AdaptiveOptimizer, OneHot, Sgd, TableSchema
from privfed.attacks.observation import CiphertextOnly, NotApplicable, Reconstruction
from privfed.attacks.prior import Prior
from privfed.attacks.row_space import row_space
from privfed.attacks.scoring import match_rows, score_rows
from privfed.attacks.tabular import TabularEnsemble
from privfed.training.model import mlp
from privfed.update import PlainVector


def tolerance(schema) -> float:
    """0.319 standard deviations: the columns are standardised. Source: Vero et al., 2023, section 5."""
    return 0.319 / float((schema.high - schema.low)[0])


def network(seed: int, *, hidden: tuple[int, ...] = (64, 32)) -> nn.Module:
    torch.manual_seed(seed)
    return mlp(50, hidden=hidden)


def cells(result: object, rows: np.ndarray, prior: Prior) -> tuple[float, float]:
    """Share of cells that are right, and the same for the better of two guesses that saw nothing."""
    assert isinstance(result, Reconstruction)
    mean = np.tile(prior.rows.mean(axis=0), (len(rows), 1))
    score, *guesses = (
        score_rows(guess, rows, schema=prior.schema, tolerance=tolerance(prior.schema), baseline=mean).cells
        for guess in (result.rows, mean, prior.guess(len(rows)))
    )
    return score, max(guesses)


def attacked(table, prior: Prior, observe, *, size: int, seed: int, **ensemble) -> tuple[float, float]:
    rows, labels = table.batch(size, seed=seed)
    observation = observe(rows, labels, table.schema, model=network(seed))
    return cells(TabularEnsemble(module=network(seed), prior=prior, **ensemble).attack(observation), rows, prior)


def test_a_single_record_is_read_completely(fraud_table, fraud_prior, observe) -> None:
    scores = [attacked(fraud_table, fraud_prior, observe, size=1, seed=seed, restarts=4, iterations=100) for seed in range(5)]
    assert [score for score, _ in scores] == [1.0] * 5


def test_of_eight_records_two_thirds_of_the_cells_are_read(fraud_table, fraud_prior, observe) -> None:
    scores, baselines = zip(*(attacked(fraud_table, fraud_prior, observe, size=8, seed=seed) for seed in range(3)), strict=True)
    assert np.mean(scores) >= 0.65
    assert np.mean(baselines) <= 0.45


@pytest.mark.nightly
def test_of_eight_records_two_thirds_of_the_cells_are_read_in_forty_batches(fraud_table, fraud_prior, observe) -> None:
    scores, baselines = zip(*(attacked(fraud_table, fraud_prior, observe, size=8, seed=seed) for seed in range(40)), strict=True)
    print(f"cells right {np.mean(scores):.3f}, least {min(scores):.3f}, guessing {np.mean(baselines):.3f}")
    assert np.mean(scores) >= 0.65
    assert np.mean(baselines) <= 0.45
    assert [attacked(fraud_table, fraud_prior, observe, size=1, seed=seed)[0] for seed in range(40)] == [1.0] * 40


def test_neither_relu_nor_the_size_of_the_batch_is_needed(fraud_table, fraud_prior, observe) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(50, 64), nn.GELU(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 1))
    rows, labels = fraud_table.batch(4, seed=1)
    observation = observe(rows, labels, fraud_table.schema, model=copy.deepcopy(module), activation=Activation.OTHER)
    observation = replace(observation, training=replace(observation.training, batch_size=9.0))
    result = TabularEnsemble(module=module, prior=fraud_prior).attack(observation)
    assert isinstance(result, Reconstruction)
    assert len(result.rows) == 4
    # The gradient's length is not known when the size is not; its direction is all that counts.
    assert cells(result, rows, fraud_prior)[0] >= 0.65


def test_sums_of_clients_and_several_steps_hide_nothing(fraud_table, fraud_prior, observe) -> None:
    rows, labels = fraud_table.batch(4, seed=1)
    optimizer = Sgd(learning_rate=0.01, momentum=0.5)
    clients = [
        observe(rows[pair], labels[pair], fraud_table.schema, model=network(0), optimizer=optimizer, steps=3)
        for pair in (slice(0, 2), slice(2, 4))
    ]
    mean = PlainVector(layout=clients[0].layout, values=(clients[0].seen.values + clients[1].seen.values) / 2)
    opened = replace(clients[0], seen=mean, coefficients=(1, 1))
    result = TabularEnsemble(module=network(0), prior=fraud_prior, restarts=8, iterations=400).attack(opened)
    assert len(result.rows) == 4
    assert cells(result, rows, fraud_prior)[0] >= 0.65


def test_where_the_rows_span_everything_entries_are_free_and_better_than_a_guess(fraud_table, fraud_prior, observe) -> None:
    rows, labels = fraud_table.batch(8)
    module = network(0, hidden=(8, 8))
    observation = observe(rows, labels, fraud_table.schema, model=copy.deepcopy(module))
    assert isinstance(row_space(observation), NotApplicable)
    result = TabularEnsemble(module=module, prior=fraud_prior, restarts=8).attack(observation)
    assert len(result.rows) == 8
    score, baseline = cells(result, rows, fraud_prior)
    assert score > baseline


def test_confidence_separates_success_from_failure(fraud_table, fraud_prior, observe) -> None:
    right, wrong = [], []
    for seed in range(2):
        for size, iterations in ((1, 50), (4, 300), (8, 60), (16, 60)):
            rows, labels = fraud_table.batch(size, seed=seed)
            observation = observe(rows, labels, fraud_table.schema, model=network(seed))
            result = TabularEnsemble(module=network(seed), prior=fraud_prior, iterations=iterations).attack(observation)
            match = match_rows(result.rows, rows, schema=fraud_table.schema, tolerance=tolerance(fraud_table.schema), baseline=rows)
            share = match.right.mean(axis=1)[np.argsort(match.found)]
            right += result.confidence[share >= 0.9].tolist()
            wrong += result.confidence[share < 0.6].tolist()
    assert len(right) >= 5
    assert len(wrong) >= 10
    assert np.mean(np.array(right)[:, None] > np.array(wrong)) >= 0.95
    assert np.mean(wrong) < 0.65
    assert np.mean(right) > 0.9


def test_clipping_without_noise_hides_nothing(fraud_table, fraud_prior, noised_round) -> None:
    rows, labels = fraud_table.batch(2, seed=1)
    observation = noised_round(rows, labels, fraud_table.schema, noise_multiplier=1e-9, max_grad_norm=0.3)
    training = replace(observation.training, noise=replace(observation.training.noise, noise_multiplier=0.0))
    result = TabularEnsemble(module=mlp(50), prior=fraud_prior, restarts=4, iterations=150).attack(replace(observation, training=training))
    score, baseline = cells(result, rows, fraud_prior)
    assert score >= 0.65 > baseline + 0.15


def test_it_says_when_it_is_not_applicable(fraud_table, fraud_prior, observe, noised_round) -> None:
    rows, labels = fraud_table.batch(2)
    observation = observe(rows, labels, fraud_table.schema, model=network(0))
    adam = replace(observation, training=replace(observation.training, optimizer=AdaptiveOptimizer(name="Adam")))
    noised = noised_round(rows, labels, fraud_table.schema, noise_multiplier=1.0)
    encrypted = replace(observation, seen=CiphertextOnly(bytes_seen=10))
    for refused, reason in ((adam, "Adam rescales"), (noised, "noise"), (encrypted, "holds no key")):
        result = TabularEnsemble(module=network(0), prior=fraud_prior).attack(refused)
        assert isinstance(result, NotApplicable)
        assert reason in str(result)


def test_a_prior_on_another_schema_is_refused(fraud_prior, observe, generate_table) -> None:
    table = generate_table(count=100)
    other = replace(table.schema, columns=(*table.schema.columns[:-1], OneHot(name="kind", categories=tuple("abcdefghijkl"))))
    assert isinstance(other, TableSchema)
    observation = observe(table.rows[:2], table.labels[:2], other, model=network(0))
    with pytest.raises(ValueError, match="another schema"):
        TabularEnsemble(module=network(0), prior=fraud_prior).attack(observation)


def test_the_result_is_the_same_when_the_truth_is_replaced_by_garbage(fraud_table, fraud_prior, observe) -> None:
    rows, labels = (part.copy() for part in fraud_table.batch(3))
    observation = observe(rows, labels, fraud_table.schema, model=network(0))
    attack = TabularEnsemble(module=network(0), prior=fraud_prior, restarts=3, iterations=20)
    first = attack.attack(observation)
    rows[:], labels[:] = 99.0, 1
    torch.manual_seed(77)
    again = attack.attack(observation)
    np.testing.assert_array_equal(first.rows, again.rows)
    np.testing.assert_array_equal(first.confidence, again.confidence)
    assert not first.certified.any()
