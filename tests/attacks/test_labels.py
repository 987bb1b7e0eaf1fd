import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from privfed.attacks.facts import BinaryLoss, GaussianNoise, Sgd, SoftmaxLoss
from privfed.attacks.labels import LabelCount, SingleLabel, label_count, single_label
from privfed.attacks.observation import NotApplicable, Observation
from privfed.training.model import load_values, mlp
from privfed.update import PlainVector


def mean_prediction(observation: Observation, rows: np.ndarray) -> float:
    """What the attacker computes from the model before the round and its own rows."""
    model = mlp(rows.shape[1], hidden=(256, 32))
    load_values(model, observation.model)
    with torch.inference_mode():
        return float(torch.sigmoid(model(torch.tensor(rows, dtype=torch.float32))).mean())


def count(observation: Observation, rows: np.ndarray) -> float:
    result = label_count(observation, mean_prediction=mean_prediction(observation, rows))
    assert isinstance(result, LabelCount)
    return result.positives


@pytest.mark.parametrize("size", [2, 16, 64])
def test_the_number_of_positives_in_a_fresh_networks_batch_is_exact(size: int, table, observe) -> None:
    errors, guesses = [], []
    for seed in range(20):
        rows, labels = table.batch(size, seed=seed)
        observation = observe(rows, labels, table.schema, seed=seed)
        errors.append(abs(count(observation, table.public) - labels.sum()))
        guesses.append(abs(size * table.labels.mean() - labels.sum()))
    assert np.mean(np.array(errors) < 0.5) >= 0.95
    assert np.mean(errors) < np.mean(guesses) / 2


def test_the_rate_of_a_sum_of_clients_leaks(table, observe) -> None:
    batches = [table.batch(16, seed=seed) for seed in range(3)]
    clients = [observe(rows, labels, table.schema) for rows, labels in batches]
    mean = np.mean([client.seen.values for client in clients], axis=0)
    opened = dataclasses.replace(clients[0], seen=PlainVector(layout=clients[0].layout, values=mean), coefficients=(2, 2, 2))
    assert abs(count(opened, table.public) - sum(labels.sum() for _, labels in batches)) < 0.5
    assert label_count(opened, mean_prediction=0.5).records == 48


@pytest.mark.parametrize("optimizer", [Sgd(learning_rate=0.01), Sgd(learning_rate=0.01, momentum=0.5, weight_decay=0.1)])
def test_the_rate_leaks_over_several_steps(optimizer: Sgd, table, observe) -> None:
    rows, labels = table.batch(32)
    # The model hardly moves at this rate, so every step repeats the first one's gradient.
    assert abs(count(observe(rows, labels, table.schema, optimizer=optimizer, steps=4), table.public) / 4 - labels.sum()) < 1


def test_the_count_uses_the_clients_own_loss(table, observe) -> None:
    rows, labels = table.batch(64, seed=1)
    observation = observe(rows, labels, table.schema, loss=BinaryLoss(positive_weight=5.0))
    assert abs(count(observation, table.public) - labels.sum()) < 1.5
    # An attacker with another loss than the client is far off, which would read as protection.
    other = dataclasses.replace(observation, training=dataclasses.replace(observation.training, loss=BinaryLoss()))
    assert abs(count(other, table.public) - labels.sum()) > 10


def test_the_standard_error_is_that_of_the_noise(table, observe) -> None:
    rows, labels = table.batch(16)
    clear = observe(rows, labels, table.schema)
    noise = GaussianNoise(noise_multiplier=1.5, max_grad_norm=2.0)
    noisy = dataclasses.replace(clear, training=dataclasses.replace(clear.training, noise=noise))
    result = label_count(noisy, mean_prediction=0.5)
    rng, counts = np.random.default_rng(0), []
    for _ in range(1000):
        # As DP-SGD does it: noise on the sum of gradients, then divided by the batch and multiplied by the learning rate.
        values = noisy.seen.values.copy()
        values[-1] -= 0.1 * rng.normal(scale=1.5 * 2.0) / 16
        seen = PlainVector(layout=noisy.layout, values=values)
        counts.append(label_count(dataclasses.replace(noisy, seen=seen), mean_prediction=0.5).positives)
    assert result.standard_error == pytest.approx(3.0)
    assert min(counts) == 0.0
    # Negative estimates are cut to 0, so compare above the median, where one deviation ends at the 84.13 % quantile. With 1000
    # draws the distance has a standard error of 0.05 deviations; 2/3 and 3/2 of the deviation lie outside.
    distance = np.quantile(counts, 0.8413) - np.median(counts)
    assert 0.8 < distance / result.standard_error < 1.2
    assert label_count(clear, mean_prediction=0.5).standard_error == 0


def test_the_standard_error_falls_with_clients_and_grows_with_steps(table, observe) -> None:
    rows, labels = table.batch(4)
    clear = observe(rows, labels, table.schema)
    noise = GaussianNoise(noise_multiplier=1.0, max_grad_norm=1.0)
    training = dataclasses.replace(clear.training, noise=noise, steps=9)
    noisy = dataclasses.replace(clear, training=training, coefficients=(1, 1, 1, 1))
    # Noise of 36 independent (client, step) pairs on a count over all of them.
    assert label_count(noisy, mean_prediction=0.5).standard_error == pytest.approx(6.0)


@pytest.mark.parametrize("positive", [0, 1])
def test_a_single_label_is_the_sign_of_the_bias_gradient(positive: int, table, observe) -> None:
    for seed in range(5):
        rows, _ = table.batch(1, seed=seed)
        result = single_label(observe(rows, np.array([positive]), table.schema, seed=seed, loss=BinaryLoss(positive_weight=3.0)))
        assert isinstance(result, SingleLabel)
        assert (result.label, result.certain) == (positive, True)


@pytest.mark.parametrize("label", [0, 2, 4])
def test_a_single_label_of_several_classes_has_the_only_negative_entry(label: int, table, observe) -> None:
    rows, _ = table.batch(1)
    model = mlp(table.schema.width, hidden=(16,), outputs=5)
    result = single_label(observe(rows, np.array([label]), table.schema, model=model, loss=SoftmaxLoss()))
    assert isinstance(result, SingleLabel)
    assert (result.label, result.certain) == (label, True)


def test_a_label_within_the_noise_is_not_called_certain(table, observe) -> None:
    rows, labels = table.batch(1)
    observation = observe(rows, labels, table.schema)
    noise = GaussianNoise(noise_multiplier=1.0, max_grad_norm=1.0)
    result = single_label(dataclasses.replace(observation, training=dataclasses.replace(observation.training, noise=noise)))
    assert isinstance(result, SingleLabel)
    assert not result.certain


def test_the_sign_of_two_labels_is_not_applicable(table, observe) -> None:
    rows, labels = table.batch(2)
    result = single_label(observe(rows, labels, table.schema))
    assert isinstance(result, NotApplicable)
    assert "more than one record" in str(result)


def test_counting_is_not_applicable_to_several_outputs_or_none(table, observe) -> None:
    rows, labels = table.batch(2)
    classes = mlp(table.schema.width, hidden=(16,), outputs=3)
    several = observe(rows, labels, table.schema, model=classes, loss=SoftmaxLoss())
    assert "one logit" in str(label_count(several, mean_prediction=0.5))
    bare = nn.Linear(table.schema.width, 1, bias=False)
    assert "no fully connected layer with bias" in str(label_count(observe(rows, labels, table.schema, model=bare), mean_prediction=0.5))


@pytest.mark.parametrize("bad", [0.0, 1.0, float("nan")])
def test_an_impossible_mean_prediction_is_refused(bad: float, table, observe) -> None:
    rows, labels = table.batch(1)
    with pytest.raises(ValueError, match="mean_prediction above 0"):
        label_count(observe(rows, labels, table.schema), mean_prediction=bad)
