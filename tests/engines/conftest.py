from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from privfed.client import Client
from privfed.consortium import Consortium
from privfed.data.samples import Samples
from privfed.dp.ledger import Ledger
from privfed.dp.mechanism import Budget
from privfed.he.secret import SharedKey
from privfed.training.mechanism import DpSgd, NonPrivate
from privfed.training.model import mlp

torch.set_num_threads(1)


def table(records: int, *, seed: int) -> Samples:
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(records, 4)).astype(np.float32)
    labels = (features[:, 0] + rng.normal(size=records) > 0.5).astype(np.int64)
    return Samples(features=features, labels=labels, groups=None, columns=("a", "b", "c", "d"))


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(3)
    return mlp(inputs=4, hidden=(8,))


@pytest.fixture
def non_private() -> Callable[..., Consortium]:
    """Makes a consortium whose training is reproducible."""

    def make(*, count: int = 3, weights: tuple[float, ...] | None = None, **options: Any) -> Consortium:
        clients = [
            Client(
                f"bank_{index}",
                table(60 + 20 * index, seed=index),
                weight=1 if weights is None else weights[index],
                training=NonPrivate(learning_rate=0.3, batch_size=20, steps=5, seed=index),
            )
            for index in range(count)
        ]
        return Consortium(clients, **({"keys": SharedKey.generate()} | options))

    return make


MECHANISM = DpSgd(
    noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.2, expected_batch_size=20, steps=3, learning_rate=0.3, max_records=200
)


@pytest.fixture
def private(tmp_path: Path) -> Iterator[Callable[..., Consortium]]:
    """Makes a consortium that trains with DP-SGD, each client with a ledger."""
    with ExitStack() as stack:

        def make(*, count: int = 3, epsilons: tuple[float, ...] | None = None, folder: Path = tmp_path, **options: Any) -> Consortium:
            folder.mkdir(exist_ok=True)
            clients = [
                Client(
                    f"bank_{index}",
                    table(60 + 20 * index, seed=index),
                    training=MECHANISM,
                    ledger=stack.enter_context(
                        Ledger.open(
                            folder / f"bank_{index}.ledger",
                            population=f"bank_{index}",
                            budget=Budget(epsilon=20.0 if epsilons is None else epsilons[index], delta=1e-5),
                        )
                    ),
                )
                for index in range(count)
            ]
            return Consortium(clients, **({"keys": SharedKey.generate()} | options))

        yield make
