import copy
from collections import Counter
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from privfed.attacks.facts import SoftmaxLoss
from privfed.attacks.gradients import target_gradient
from privfed.attacks.label_guesses import guess_labels
from privfed.attacks.observation import NotApplicable
from privfed.attacks.prior import Prior
from privfed.training.model import mlp


def guesses(observation, module: nn.Module, prior: Prior, *, restarts: int):
    return guess_labels(observation, target_gradient(observation, module), prior, restarts=restarts)


def test_without_noise_the_number_of_positives_is_the_true_one(table, observe) -> None:
    prior = Prior(rows=table.public, labels=table.public_labels, schema=table.schema)
    right = []
    for seed in range(10):
        rows, labels = table.batch(8, seed=seed)
        observation = observe(rows, labels, table.schema, seed=seed)
        guessed = guesses(observation, mlp(50, hidden=(256, 32)), prior, restarts=1)
        right.append(int(guessed.labels.sum()) == labels.sum())
    # Guessing the most frequent number alone is right for a quarter of the batches.
    assert np.mean(right) >= 0.9


def test_under_noise_restarts_try_the_frequent_numbers_and_rare_ones_cost_energy(fraud_table, fraud_prior, noised_round) -> None:
    rows, labels = fraud_table.batch(16)
    observation = noised_round(rows, labels, fraud_table.schema, noise_multiplier=4.0)
    guessed = guesses(observation, mlp(50), fraud_prior, restarts=40)
    assert guessed.labels.shape == (40, 16)
    counts = Counter(guessed.labels.sum(dim=1).tolist())
    # Of 16 records one in twenty is positive: none 44 %, one 37 %, two 15 %.
    assert 15 <= counts[0] <= 20
    assert 12 <= counts[1] <= 18
    assert 3 <= counts[2] <= 9
    energies = {int(row.sum()): float(energy) for row, energy in zip(guessed.labels, guessed.energy, strict=True)}
    assert energies[0] == 0
    assert energies[0] < energies[1] < energies[2]


def test_a_single_records_class_is_read_off_and_otherwise_guessed(table, observe) -> None:
    three = np.arange(len(table.public)) % 3
    prior = Prior(rows=table.public, labels=three, schema=table.schema)
    torch.manual_seed(0)
    module = mlp(50, hidden=(16,), outputs=3)
    rows, _ = table.batch(1)
    observation = observe(rows, np.array([2]), table.schema, model=copy.deepcopy(module), loss=SoftmaxLoss())
    assert guesses(observation, module, prior, restarts=4).labels.tolist() == [[2]] * 4
    twice = replace(observation, training=replace(observation.training, steps=2))
    assert sorted(set(guesses(twice, module, prior, restarts=6).labels[:, 0].tolist())) == [0, 1, 2]


def test_several_records_of_several_classes_are_not_applicable(table, observe) -> None:
    prior = Prior(rows=table.public, labels=np.arange(len(table.public)) % 3, schema=table.schema)
    module = mlp(50, hidden=(16,), outputs=3)
    rows, labels = table.batch(2)
    observation = observe(rows, labels, table.schema, model=copy.deepcopy(module), loss=SoftmaxLoss())
    result = guesses(observation, module, prior, restarts=4)
    assert isinstance(result, NotApplicable)
    assert "labels of several records" in str(result)
