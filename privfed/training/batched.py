"""Plain minibatch SGD of many clients at once, for simulations: one stacked model instead of one after another.

Small models spend their time between operations, not in them. With the weights of all clients stacked, a step of all of them takes
little longer than a step of one.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from privfed.data.samples import Samples
from privfed.errors import LayoutMismatchError, UnsupportedModelError
from privfed.training.loss import PerSampleLoss, check_loss
from privfed.training.mechanism import NonPrivate, TrainingResult
from privfed.training.model import check_columns, check_model, layout_of, trainable_parameters
from privfed.training.sgd import _batches
from privfed.update import PlainVector


def train_together(
    module: nn.Module,
    start: PlainVector,
    clients: Sequence[Samples],
    *,
    mechanism: NonPrivate,
    loss: PerSampleLoss,
    round: int = 0,  # noqa: A002
    seeds: Sequence[int] | None = None,
) -> list[TrainingResult]:
    """What `train` returns for each of the clients, but for the last digits of float32, which depend on the order of sums.

    No argument is changed. All memory that one client needs in a step is needed once per client.

    Args:
        module: The architecture, as `train` takes it, of layers that `torch.vmap` knows.
        start: Weights to start from, public; rounded to float32.
        clients: Records of each client, at least one, all with the same number of columns. Private.
        mechanism: How each of them trains.
        loss: Loss per record, from that record alone.
        round: Number of the round, from 0.
        seeds: What orders the records of each client; left out, the mechanism's seed for all.

    Raises:
        PrivFedError: Whatever `train` refuses, or a model that cannot be stacked; nothing was trained.
        TypeError: If the mechanism is another.
        ValueError: As `StackedClients`, or if the weights of a client became infinite or NaN.
    """
    return StackedClients(module, clients, mechanism=mechanism, loss=loss, seeds=seeds).train(start, round=round)


class StackedClients:
    """Clients that train together round after round: what they are is checked once, and their records are put together once.

    Args:
        module: The architecture, as `train` takes it, of layers that `torch.vmap` knows.
        clients: Records of each client, at least one, all with the same number of columns. Private.
        mechanism: How each of them trains.
        loss: Loss per record, from that record alone.
        seeds: What orders the records of each client; left out, the mechanism's seed for all.

    Raises:
        PrivFedError: Whatever `train` refuses.
        TypeError: If the mechanism is another.
        ValueError: If there is no client, their columns differ, or there is not one seed for each.
    """

    def __init__(
        self,
        module: nn.Module,
        clients: Sequence[Samples],
        *,
        mechanism: NonPrivate,
        loss: PerSampleLoss,
        seeds: Sequence[int] | None = None,
    ) -> None:
        if not isinstance(mechanism, NonPrivate):
            raise TypeError(f"expected NonPrivate, got {type(mechanism).__name__}; train its clients one by one; nothing was trained")
        if not clients or len({samples.features.shape[1] for samples in clients}) != 1:
            raise ValueError("expected at least one client, and records of the same columns")
        seeds = [mechanism.seed] * len(clients) if seeds is None else seeds
        if len(seeds) != len(clients):
            raise ValueError(f"expected one seed for each of {len(clients)} clients, got {len(seeds)}")
        check_model(module)
        labels = np.concatenate([samples.labels for samples in clients])
        check_columns(module, clients[0].columns)
        check_loss(module, loss, inputs=clients[0].features.shape[1], labels=labels)
        self._module, self._loss, self._layout = module, loss, layout_of(module)
        self._mechanisms = [replace(mechanism, seed=seed) for seed in seeds]
        self._records = [len(samples) for samples in clients]
        self._offsets = np.cumsum([0, *self._records[:-1]])
        self._features, self._targets = torch.from_numpy(np.concatenate([some.features for some in clients])), torch.from_numpy(labels)

    def train(self, start: PlainVector, *, round: int, among: Sequence[int] | None = None) -> list[TrainingResult]:  # noqa: A002
        """Trains all clients, or some, for one round, from the same weights.

        Args:
            start: Weights to start from, public; rounded to float32.
            round: Number of the round, from 0.
            among: Places of the clients that train, at least one; left out, all do.

        Raises:
            LayoutMismatchError: If the start has another layout than the model; nothing was trained.
            UnsupportedModelError: If the model cannot be stacked; nothing was trained.
            ValueError: If the weights of a client became infinite or NaN.
        """
        module, layout = self._module, self._layout
        if start.layout != layout:
            raise LayoutMismatchError("the weights do not have the layout of the model; nothing was trained")
        chosen = range(len(self._records)) if among is None else among
        mechanism = self._mechanisms[0]
        places, counted = self._plan(chosen, round=round)
        begin = {name: torch.from_numpy(tensor.astype(np.float32)) for name, tensor in layout.unflatten(start).items()}
        weights = {name: tensor.expand(len(chosen), *tensor.shape).clone().requires_grad_() for name, tensor in begin.items()}
        stacked = torch.vmap(lambda some, rows: functional_call(module, some, (rows,)))
        training = module.training
        module.train()
        try:
            for batch in places:
                outputs = _forward(stacked, weights, self._features[batch])
                losses = self._loss(outputs.flatten(0, 1), self._targets[batch].flatten()).reshape(batch.shape)
                # Each client's weights get the gradient of its own mean loss: the sum over clients ties none to another.
                gradients = torch.autograd.grad((losses * counted).sum(), list(weights.values()))
                with torch.no_grad():
                    for tensor, gradient in zip(weights.values(), gradients, strict=True):
                        tensor.sub_(gradient, alpha=mechanism.learning_rate)
        finally:
            module.train(training)
        if not all(bool(torch.isfinite(tensor).all()) for tensor in weights.values()):
            raise ValueError("expected a learning_rate at which the weights stay finite; they did not, and no update was made")
        names = trainable_parameters(module)
        moved = torch.cat([(weights[name].detach().double() - begin[name].double()).flatten(1) for name in names], dim=1)
        return [
            TrainingResult(
                update_values=PlainVector(layout=layout, values=row), steps=mechanism.steps, private_randomness=False, zeroed_gradients=0
            )
            for row in moved.numpy()
        ]

    def _plan(self, chosen: Sequence[int], *, round: int) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: A002
        """Which record each client looks at, of shape (steps, clients, batch), and the weight of each in its mean, (clients, batch).

        Batches of clients with fewer records are filled up with records of weight 0.
        """
        most, steps = self._mechanisms[0].batch_size, self._mechanisms[0].steps
        sizes = [min(most, self._records[client]) for client in chosen]
        places = np.zeros((steps, len(chosen), max(sizes)), dtype=np.int64)
        counted = np.zeros((len(chosen), max(sizes)), dtype=np.float32)
        for row, (client, size) in enumerate(zip(chosen, sizes, strict=True)):
            places[:, row] = self._offsets[client]
            for step, batch in enumerate(_batches(self._records[client], mechanism=self._mechanisms[client], round=round)):
                places[step, row, :size] += batch
            counted[row, :size] = 1 / size
        return torch.from_numpy(places), torch.from_numpy(counted)


def _forward(stacked: Callable[..., Any], weights: dict[str, torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    try:
        return stacked(weights, rows)
    except (RuntimeError, ValueError) as error:
        raise UnsupportedModelError("the model has layers that cannot be stacked; train its clients one by one") from error
