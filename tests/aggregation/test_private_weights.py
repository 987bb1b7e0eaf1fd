from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from privfed.aggregation.private_weights import WEIGHT_NAME, PrivateWeights
from privfed.aggregation.rules import MultiKrum
from privfed.client import Client
from privfed.consortium import Consortium, Plaintext
from privfed.dp.silo import SiloNoise
from privfed.engines.local import Simulation, simulate
from privfed.errors import DecryptionError, InsufficientCapacityError, UnsupportedInThisModeError
from privfed.he.params import CkksParams
from privfed.he.secret import SharedKey
from privfed.policy import OpeningPolicy
from privfed.training.mechanism import NonPrivate
from privfed.training.model import mlp
from privfed.training.scaffold import Scaffold
from privfed.update import Layout
from privfed.written_agreement import decode_agreement, encode_agreement
from tests.engines.conftest import table

WEIGHTS = {"bank_00": 1, "bank_01": 7, "bank_02": 20, "bank_03": 13}
LAYOUT = Layout(names=("weight", "bias"), shapes=((40, 2), (3,)))


@pytest.fixture
def parties(meet: Callable[..., Any]) -> Any:
    from dataclasses import replace

    return replace(meet(layout=LAYOUT, private_weights=PrivateWeights(largest=20)), private_weights=WEIGHTS)


def test_the_opened_mean_is_that_under_the_weights_that_nobody_sent_in_the_clear(parties: Any) -> None:
    joint = parties.round()
    updates = {name: np.random.default_rng(index).uniform(-1.2, 1.2, LAYOUT.size) for index, name in enumerate(WEIGHTS)}
    aggregate = joint.key_holder("bank_00").open(joint.run(updates))
    clipped = {name: np.clip(values, -1, 1) for name, values in updates.items()}
    expected = sum(WEIGHTS[name] * clipped[name] for name in WEIGHTS) / sum(WEIGHTS.values())
    # Each client rounds to half a grid step, and the sum is divided by 41/20.
    tolerance = 4 * 0.5 * parties.agreement.params.step * 20 / 41
    assert np.abs(aggregate.vector.values - expected).max() <= tolerance * 1.0001
    assert np.abs(aggregate.vector.values - sum(clipped.values()) / 4).max() > 1000 * tolerance
    assert dict(aggregate.coefficients) == dict.fromkeys(WEIGHTS, 1)


def test_the_weight_of_who_is_missing_is_not_in_the_mean(parties: Any) -> None:
    joint = parties.round(1).setup("bank_00", "bank_01", "bank_03")
    updates = {name: np.full(LAYOUT.size, 0.5 if name == "bank_01" else 0.0) for name in ("bank_00", "bank_01", "bank_03")}
    aggregate = joint.key_holder("bank_00").open(joint.upload(updates).approve_all().server.aggregate())
    assert np.abs(aggregate.vector.values - 0.5 * 7 / 21).max() < 1e-6


def test_no_message_but_the_ciphertext_differs_between_weights(parties: Any) -> None:
    """What the server holds of two runs with other weights has the same lengths, and the digest the same coefficients."""
    from dataclasses import replace

    sizes = []
    for weights in (WEIGHTS, dict.fromkeys(WEIGHTS, 20)):
        joint = replace(parties, private_weights=weights, directory=parties.directory / str(sum(weights.values()))).round()
        joint.run()
        spool = next((joint.parties.directory / "spool").iterdir())
        sizes.append(sorted((path.name, path.stat().st_size) for path in spool.iterdir()))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("weight", [0, -1, 21, 1.5])
def test_a_weight_that_the_agreement_does_not_allow_is_not_sent_nor_shown(parties: Any, weight: float) -> None:
    from dataclasses import replace

    joint = replace(parties, private_weights={"bank_00": weight}).round()
    with pytest.raises(ValueError, match=r"weight of 'bank_00' to be a whole number from 1 to 20; nothing was sent$"):
        joint.encode("bank_00", np.zeros(LAYOUT.size))


@pytest.mark.parametrize("total", [3, 81, -1, 10**6])
def test_a_sum_of_weights_that_is_none_of_so_many_clients_does_not_enter_the_model(total: int) -> None:
    with pytest.raises(DecryptionError, match="nothing was put into the model"):
        PrivateWeights(largest=20).mean(np.array([5, total]), clients=4, params=CkksParams.standard())
    PrivateWeights(largest=20).mean(np.array([5, 4]), clients=4, params=CkksParams.standard())


def test_a_client_that_lies_about_its_weight_is_bounded_by_the_total_alone(parties: Any) -> None:
    """What is said not to be claimed: one client may take the room that the others leave."""
    joint = parties.round(2)
    joint.setup()
    agreement = joint.context.agreement
    from privfed.he.secret import encrypt
    from privfed.update import Update
    from privfed.wire import encode_upload

    for name in WEIGHTS:
        key = joint.keys.pop(name)
        if name == "bank_00":
            grid = np.append(np.zeros(LAYOUT.size, np.int64), 30)
            vector = encrypt(grid, agreement.sent_layout, agreement.params, key, sender=name)
            joint.uploads[name] = encode_upload(joint.context, parties.clients[name], Update(sender=name, round=2, vector=vector))
        else:
            joint.uploads[name] = joint.encode(name, np.full(LAYOUT.size, 0.5), key)
        joint.server.receive_upload(joint.uploads[name])
    aggregate = joint.key_holder("bank_01").open(joint.approve_all().server.aggregate())
    assert aggregate.vector.values[0] == pytest.approx(0.5 * 40 / 70, abs=1e-6)


def test_an_agreement_refuses_what_does_not_go_with_private_weights(parties: Any) -> None:
    with pytest.raises(ValueError, match="weights of 1 beside private weights"):
        parties.amended(weights=dict.fromkeys(WEIGHTS, 2))
    silo = SiloNoise(weights=dict.fromkeys(WEIGHTS, 1), clip_steps=10, noise_multiplier=1.0, coordinates=LAYOUT.size)
    for changes in ({"silo": silo}, {"params": CkksParams.parity(clients=4)}, {"rule": MultiKrum(byzantine=0, keep=3)}):
        with pytest.raises(UnsupportedInThisModeError):
            parties.amended(**changes)
    with pytest.raises(InsufficientCapacityError, match="smaller largest weight"):
        parties.amended(private_weights=PrivateWeights(largest=2**23))
    with pytest.raises(ValueError, match="expected largest"):
        PrivateWeights(largest=0)


def test_private_weights_are_part_of_the_agreement_and_of_its_written_form(parties: Any) -> None:
    agreement = parties.agreement
    assert agreement.sent_layout.names[-1] == WEIGHT_NAME
    assert decode_agreement(encode_agreement(agreement)).digest == agreement.digest
    assert parties.amended(private_weights=PrivateWeights(largest=21)).agreement.digest != agreement.digest


def banks(weights: tuple[float, ...], **options: Any) -> Consortium:
    clients = [
        Client(
            f"bank_{index}",
            table(60, seed=index),
            weight=weight,
            training=NonPrivate(learning_rate=0.3, batch_size=20, steps=5, seed=index),
        )
        for index, weight in enumerate(weights)
    ]
    return Consortium(clients, **({"keys": SharedKey.generate(), "private_weights": PrivateWeights(largest=10)} | options))


def test_a_run_with_private_weights_moves_as_one_with_public_ones() -> None:
    torch.manual_seed(3)
    model = mlp(inputs=4, hidden=(8,))
    policy = OpeningPolicy(max_share=0.9)
    private = simulate(banks((2, 10, 4), policy=policy), model, rounds=3)
    public = simulate(banks((2, 10, 4), policy=policy, private_weights=None), model, rounds=3)
    equal = simulate(banks((1, 1, 1), policy=policy), model, rounds=3)
    assert private.grid_error_max == 0
    # A grid step on one weight, in three rounds, and what training makes of it.
    assert np.abs(private.model.values - public.model.values).max() < 1e-4
    assert np.abs(private.model.values - equal.model.values).max() > 1e-3
    with Simulation(banks((2, 10, 4), policy=policy), model) as simulation:
        assert set(simulation.agreement.weights.values()) == {1}


def test_a_consortium_refuses_what_does_not_go_with_private_weights() -> None:
    for options in ({"keys": Plaintext()}, {"correction": Scaffold(clients=3)}):
        with pytest.raises(UnsupportedInThisModeError, match="agree on public weights"):
            banks((1, 1, 1), **options)
    with pytest.raises(ValueError, match="'bank_1' to be a whole number from 1 to 10"):
        banks((1, 11, 1))
