"""Clients that train together get what each gets alone.

The two ways sum the same float32 numbers in another order. In units of 2^-24, a step rounds each weight (of at most some 2) once and
each coordinate of a gradient (of at most some 1, times a learning rate of 0.3) once per number in its sums: 20 records, 4 columns, 8
hidden units and some ten operations of the loss. Five steps make 5 (2 + 0.3 * 42) = 73 units; until the end of the round the later steps
amplify them by at most (1 + 0.3)^5 < 4, as the curvature of the loss is at most about 1. That is 2e-5. A second round amplifies what the
first one left, and adds its own: 5 times that.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from privfed.client import Client
from privfed.consortium import Consortium, Plaintext
from privfed.data.samples import Samples
from privfed.dp.ledger import Ledger
from privfed.dp.mechanism import Budget
from privfed.engines.local import Simulation, simulate
from privfed.errors import UnsupportedInThisModeError, UnsupportedModelError
from privfed.training.mechanism import NonPrivate
from privfed.training.objective import FedProx
from tests.engines.conftest import table

Make = Callable[..., Consortium]
TOLERANCE = 2e-5


@pytest.fixture
def smooth() -> nn.Module:
    """Without a kink, at which a last digit would decide between two gradients."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def test_clients_that_train_together_get_the_updates_that_each_gets_alone(non_private: Make, smooth: nn.Module) -> None:
    models: dict[bool, list[np.ndarray]] = {}
    updates: dict[bool, dict[str, np.ndarray]] = {}
    for together in (False, True):
        with Simulation(non_private(count=5, keys=Plaintext(train_together=together)), smooth) as simulation:
            history = simulation.run(rounds=1)
            updates[together] = {name: update.vector.values for name, update in simulation.updates.items()}
            assert history.grid_error_max == 0
        two = simulate(non_private(count=5, keys=Plaintext(train_together=together)), smooth, rounds=2)
        models[together] = [history.model.values, two.model.values]
    assert updates[True].keys() == updates[False].keys() == {f"bank_{index}" for index in range(5)}
    for name, alone in updates[False].items():
        np.testing.assert_allclose(updates[True][name], alone, atol=TOLERANCE)
        assert np.abs(alone).max() > 1000 * TOLERANCE
    for rounds, most in enumerate((TOLERANCE, 5 * TOLERANCE)):
        np.testing.assert_allclose(models[True][rounds], models[False][rounds], atol=most)
    # Each client has an order of its own: two clients with the same records are told apart.
    assert np.abs(updates[True]["bank_0"] - updates[True]["bank_1"]).max() > 100 * TOLERANCE


def test_each_client_keeps_its_own_seed(smooth: nn.Module) -> None:
    data, training = table(60, seed=0), NonPrivate(learning_rate=0.3, batch_size=20, steps=5, seed=0)
    clients = [Client(f"bank_{seed}", data, training=replace(training, seed=seed)) for seed in (0, 1, 0)]
    clients[2] = Client("bank_2", data, training=training)
    with Simulation(Consortium(clients, keys=Plaintext(train_together=True)), smooth) as simulation:
        simulation.run(rounds=1)
        first, other, same = (simulation.updates[f"bank_{index}"].vector.values for index in range(3))
    assert np.abs(first - same).max() < TOLERANCE
    assert np.abs(first - other).max() > 100 * TOLERANCE


@pytest.mark.parametrize("what", ["learning rate", "correction", "ledger", "columns", "private"])
def test_clients_that_do_not_train_alike_are_refused(non_private: Make, private: Make, tmp_path: Any, what: str) -> None:
    keys, options = Plaintext(train_together=True), dict[str, Any]()
    clients = list(non_private(keys=Plaintext()).clients)
    if what == "private":
        clients = list(private(keys=Plaintext()).clients)
    elif what == "learning rate":
        clients[1] = replace_client(clients[1], training=NonPrivate(learning_rate=0.2, batch_size=20, steps=5, seed=1))
    elif what == "columns":
        data = clients[1].data
        renamed = Samples(features=data.features, labels=data.labels, groups=None, columns=("a", "b", "c", "e"))
        clients[1] = replace_client(clients[1], data=renamed)
    elif what == "correction":
        options["correction"] = FedProx(proximal_weight=0.1)
    with Ledger.open(tmp_path / "some.ledger", population="bank_1", budget=Budget.unlimited(delta=1e-5)) as ledger:
        if what == "ledger":
            clients[1] = replace_client(clients[1], ledger=ledger)
        with pytest.raises(UnsupportedInThisModeError, match=r"train together need .*; nothing was started; take Plaintext\(\)"):
            Consortium(clients, keys=keys, **options)
        Consortium(clients, keys=Plaintext(), **options)


def replace_client(client: Client, **changes: Any) -> Client:
    fields = {"name": client.name, "data": client.data, "training": client.training, "ledger": client.ledger}
    given = fields | changes
    return Client(given.pop("name"), given.pop("data"), **given)


class LooksAtValues(nn.Module):
    """Takes another path for other records, which stacked records cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.linear(features) if float(features.sum()) > -1e9 else self.linear(-features)


def test_a_model_that_cannot_be_stacked_is_refused_and_not_trained_otherwise(non_private: Make) -> None:
    with pytest.raises(UnsupportedModelError, match="cannot be stacked; train its clients one by one"):
        simulate(non_private(keys=Plaintext(train_together=True)), LooksAtValues(), rounds=1)
    simulate(non_private(keys=Plaintext()), LooksAtValues(), rounds=1)
