import copy
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from privfed.attacks.facts import BinaryLoss, GaussianNoise, SoftmaxLoss
from privfed.attacks.gradients import target_gradient
from privfed.attacks.image_labels import read_labels
from privfed.attacks.images import ImageShape
from privfed.attacks.observation import NotApplicable

SHAPE = ImageShape(channels=1, height=8, width=8)


def network(*, outputs: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, outputs))


def read(labels: np.ndarray, observe, *, loss, outputs: int, seed: int):
    rows = np.random.default_rng(seed).random((len(labels), 64))
    model = network(outputs=outputs, seed=seed)
    observation = observe(rows, labels, SHAPE.schema(), model=copy.deepcopy(model), loss=loss)
    return read_labels(observation, target_gradient(observation, model), SHAPE), observation, model


@pytest.mark.parametrize("size", [1, 2, 8])
def test_classes_of_a_batch_are_counted_on_a_fresh_network(size: int, observe) -> None:
    for seed in range(10):
        labels = np.random.default_rng(seed).integers(10, size=size)
        found, _, _ = read(labels, observe, loss=SoftmaxLoss(), outputs=10, seed=seed)
        assert Counter(found.tolist()) == Counter(labels.tolist())


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_positives_of_a_batch_are_counted_with_one_logit(weight: float, observe) -> None:
    for seed in range(10):
        labels = np.random.default_rng(seed).integers(2, size=6)
        found, _, _ = read(labels, observe, loss=BinaryLoss(positive_weight=weight), outputs=1, seed=seed)
        assert len(found) == 6
        assert int(found.sum()) == labels.sum()


def test_clipped_batches_are_not_applicable(observe) -> None:
    _, observation, model = read(np.array([1, 2]), observe, loss=SoftmaxLoss(), outputs=10, seed=0)
    noise = GaussianNoise(noise_multiplier=0.0, max_grad_norm=1.0)
    clipped = replace(observation, training=replace(observation.training, noise=noise))
    result = read_labels(clipped, target_gradient(clipped, model), SHAPE)
    assert isinstance(result, NotApplicable)
    assert "clipping each record hides" in str(result)
