"""Plain minibatch SGD: the comparison that protects nothing."""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from privfed.training.loss import PerSampleLoss
from privfed.training.mechanism import NonPrivate
from privfed.training.model import trainable_parameters
from privfed.training.objective import Correction, add_correction, flat


def descend(
    model: nn.Module,
    features: torch.Tensor,
    labels: torch.Tensor,
    *,
    mechanism: NonPrivate,
    loss: PerSampleLoss,
    correction: Correction | None,
    round: int,  # noqa: A002
) -> None:
    """Trains a model in place on the mean loss of each batch.

    The same model, data, seed and round give the same weights, bit for bit, in any process that runs torch on one thread.

    Args:
        model: Starts from the weights that it holds.
        features: Of shape (records, columns). Private.
        labels: Of shape (records,). Private.
        mechanism: Learning rate, batch size, steps and seed.
        loss: Loss per record.
        correction: Added to the gradient of each step.
        round: Number of the round, from 0.
    """
    parameters = list(trainable_parameters(model).values())
    start = flat(parameters)
    optimizer = torch.optim.SGD(parameters, lr=mechanism.learning_rate)
    for batch in _batches(len(labels), mechanism=mechanism, round=round):
        optimizer.zero_grad()
        loss(model(features[batch]), labels[batch]).mean().backward()
        if correction is not None:
            add_correction(parameters, start, correction)
        optimizer.step()


def _batches(records: int, *, mechanism: NonPrivate, round: int) -> Iterator[NDArray[np.int64]]:  # noqa: A002
    rng = np.random.default_rng((mechanism.seed, round))
    size = min(mechanism.batch_size, records)
    order = rng.permutation(records)
    for _ in range(mechanism.steps):
        if len(order) < size:
            order = rng.permutation(records)
        yield order[:size]
        order = order[size:]
