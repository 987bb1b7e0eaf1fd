"""Noise for whole silos in encrypted rounds: it is in what is opened, it is charged, and nothing can be seen that it does not cover."""

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from privfed.aggregation.rules import MultiKrum
from privfed.approval import check_digest
from privfed.client import Client
from privfed.consortium import Consortium, Plaintext
from privfed.digest import RoundDigest
from privfed.dp.ledger import Ledger
from privfed.dp.mechanism import Budget
from privfed.dp.silo import SiloNoise
from privfed.engines.dropouts import Dropouts
from privfed.engines.local import Simulation
from privfed.errors import BudgetExceededError, CohortError, InsufficientCapacityError, OpeningRefusedError, UnsupportedInThisModeError
from privfed.he.params import CkksParams
from privfed.he.secret import SharedKey
from privfed.policy import OpeningPolicy
from privfed.training.mechanism import DpSgd, NonPrivate
from privfed.training.model import values_of
from privfed.training.scaffold import Scaffold
from privfed.update import Layout
from privfed.written_agreement import decode_agreement, encode_agreement
from tests.engines.conftest import MECHANISM, table

COORDINATES = 3000
LAYOUT = Layout(names=("weight",), shapes=((COORDINATES,),))
BANKS = tuple(f"bank_{index:02}" for index in range(5))
WEIGHTS = dict(zip(BANKS, (1, 2, 2, 3, 2), strict=True))


def noise(**changes: Any) -> SiloNoise:
    terms = {"weights": WEIGHTS, "clip_steps": 200, "noise_multiplier": 2.0, "coordinates": COORDINATES, "dropouts": 2}
    return SiloNoise(**(terms | changes))


@pytest.fixture
def session(meet: Callable[..., Any]) -> Any:
    return meet(count=5, layout=LAYOUT, weights=WEIGHTS, silo=noise())


def opened_sum(session: Any, arrivals: tuple[str, ...], updates: dict[str, np.ndarray]) -> np.ndarray:
    """The grid sum that a key holder opens when these banks arrive."""
    joint = session.round().setup().upload({name: updates[name] for name in arrivals}).approve_all()
    aggregate = joint.key_holder(arrivals[0]).open(joint.server.aggregate())
    silo = session.agreement.silo
    grid = aggregate.vector.values * silo.denominator / session.agreement.params.step
    assert np.abs(grid - np.rint(grid)).max() < 1e-6  # no output off the grid
    return np.rint(grid)


@pytest.mark.parametrize("count", [3, 4, 5])
def test_an_opened_sum_has_the_distribution_that_the_shares_of_those_who_arrived_give(session: Any, count: int) -> None:
    """Chi-square on 3,000 coordinates: 1e-6 per side accepts the variance of `count` shares, and neither 2/3 nor 3/2 of it."""
    zeros = dict.fromkeys(BANKS, np.zeros(COORDINATES))
    found = opened_sum(session, BANKS[:count], zeros)
    statistic = float(found @ found)
    variance = count * session.agreement.silo.share_variance
    low, high = chi2.ppf([1e-6, 1 - 1e-6], COORDINATES)
    assert low < statistic / variance < high
    assert statistic / (variance * 2 / 3) > high
    assert statistic / (variance * 3 / 2) < low


def test_what_is_opened_is_the_weighted_mean_over_all_clients_of_clipped_updates_and_noise(session: Any) -> None:
    """Whoever is missing counts as zeros; an update beyond the norm counts with the norm."""
    session = session.amended(silo=noise(noise_multiplier=0.02))
    silo, step = session.agreement.silo, session.agreement.params.step
    direction = np.where(np.arange(COORDINATES) < 25, 1 / 5, 0.0)
    updates = {name: direction * step * length for name, length in zip(BANKS, (100, 150, 150, 10**6, 150), strict=True)}
    found = opened_sum(session, BANKS[:4], updates)
    along = float(found @ direction)
    # Weights 1, 2, 2, 3 on lengths 100, 150, 150 and, clipped, 200. Along a unit vector four shares have the deviation of their sum.
    # Lengths over 5 are whole, so nothing is rounded but the clipped update, of weight 3: by at most one step in each of 25 coordinates.
    tolerance = 5 * math.sqrt(4 * silo.share_variance) + 3 * 25 / 5
    assert abs(along - (100 + 2 * 150 + 2 * 150 + 3 * 200)) < tolerance
    for wrong in (100 + 150 + 150 + 200, 100 + 150 + 150 + 3 * 200, 100 + 2 * 150 + 2 * 150 + 3 * 10**6):  # weights or clipping left out
        assert abs(along - wrong) > tolerance


def test_too_few_arrivals_are_not_opened(session: Any) -> None:
    joint = session.round().setup().upload({name: np.zeros(COORDINATES) for name in BANKS[:2]})
    with pytest.raises(CohortError):
        joint.server.close()
    patient = session.amended(policy=OpeningPolicy(min_clients=2))
    joint = patient.round(1).setup().upload({name: np.zeros(COORDINATES) for name in BANKS[2:4]})
    with pytest.raises(CohortError, match="with fewer than 3 the noise is too little"):
        joint.server.close()


def test_a_server_that_announces_too_few_arrivals_is_refused_by_participants_and_openers(session: Any) -> None:
    patient = session.amended(policy=OpeningPolicy(min_clients=2))
    lie = RoundDigest(participants=BANKS[2:4], coefficients=(2, 3), upload_hashes=(bytes(32), bytes(32)), rule="FedAvg", key_id=bytes(16))
    context = patient.round().context
    with pytest.raises(OpeningRefusedError, match="noise is too little; nothing was opened"):
        check_digest(context, replace(lie, rule=context.agreement.rule.name))


def test_the_noise_is_part_of_the_agreement_and_of_its_written_form(session: Any) -> None:
    agreement = session.agreement
    assert decode_agreement(encode_agreement(agreement)).digest == agreement.digest
    assert decode_agreement(encode_agreement(agreement)).silo == agreement.silo
    weaker = session.amended(silo=noise(noise_multiplier=1.0)).agreement
    without = session.amended(silo=None).agreement
    assert len({terms.digest for terms in (agreement, weaker, without)}) == 3


def test_an_agreement_refuses_noise_that_does_not_fit_it(session: Any) -> None:
    with pytest.raises(ValueError, match="the weights for which the silo noise was made"):
        session.amended(silo=noise(weights=dict.fromkeys(BANKS, 1)))
    with pytest.raises(ValueError, match="updates of 3000 coordinates, got 3001"):
        session.amended(silo=noise(coordinates=COORDINATES + 1))
    with pytest.raises(UnsupportedInThisModeError, match="voids its promise"):
        session.amended(params=CkksParams.parity(clients=5))
    with pytest.raises(InsufficientCapacityError, match="amplitude"):
        session.amended(silo=noise(clip_steps=10**6))
    heavy = {name: 1000 * weight for name, weight in WEIGHTS.items()}
    with pytest.raises(InsufficientCapacityError, match="smaller weights"):
        session.amended(weights=heavy, silo=noise(weights=heavy, clip_steps=1))


class Silos:
    """Consortia of three banks on a small model, each bank with a ledger that has a budget for the silo."""

    def __init__(self, stack: ExitStack, folder: Path, model: torch.nn.Module) -> None:
        self.stack, self.folder, self.model = stack, folder, model
        self.size = values_of(model).layout.size

    def consortium(
        self, *, training: DpSgd | NonPrivate, silo_epsilon: float | None = 200.0, noise_multiplier: float = 0.5, **options: Any
    ) -> Consortium:
        clients = []
        for index in range(3):
            silo_budget = None if silo_epsilon is None else Budget(epsilon=silo_epsilon, delta=1e-6)
            ledger = Ledger.open(
                self.folder / f"{silo_epsilon}-{index}.ledger",
                population=f"bank_{index}",
                budget=Budget.unlimited(delta=1e-6),
                silo_budget=silo_budget,
            )
            clients.append(Client(f"bank_{index}", table(80, seed=index), training=training, ledger=self.stack.enter_context(ledger)))
        silo = SiloNoise(
            weights={client.name: 1 for client in clients}, clip_steps=1000, noise_multiplier=noise_multiplier, coordinates=self.size
        )
        return Consortium(clients, **({"keys": SharedKey.generate(), "silo": silo} | options))


@pytest.fixture
def silos(tmp_path: Path, model: torch.nn.Module) -> Any:
    with ExitStack() as stack:
        yield Silos(stack, tmp_path, model)


OPEN = NonPrivate(learning_rate=0.3, batch_size=20, steps=5, seed=1)


@pytest.mark.parametrize("training", [OPEN, MECHANISM], ids=["without DP-SGD", "with DP-SGD"])
def test_a_run_charges_every_silo_for_every_round_beside_what_its_records_cost(silos: Silos, training: DpSgd | NonPrivate) -> None:
    consortium = silos.consortium(training=training)
    with Simulation(consortium, silos.model) as simulation:
        history = simulation.run(rounds=2)
    assert consortium.silo is not None
    for client in consortium.clients:
        assert client.ledger is not None
        assert client.ledger.silo_events() == (consortium.silo.event(),) * 2
        assert 0 < client.ledger.silo_spent() < 200
        assert math.isinf(client.ledger.spent()) is (training is OPEN)
    assert history.grid_error_max is None
    assert not np.array_equal(history.model.values, history.initial.values)


def test_a_run_stops_before_training_when_the_budget_of_the_silo_is_spent(silos: Silos) -> None:
    consortium = silos.consortium(training=OPEN, silo_epsilon=5.0)
    with Simulation(consortium, silos.model) as simulation:
        with pytest.raises(BudgetExceededError, match="the budget of bank_0 covers 0 of 5 rounds, .*; nothing was trained"):
            simulation.run(rounds=5)
        assert all(client.ledger is not None and not client.ledger.silo_events() for client in consortium.clients)
        # Where clients may be absent, nobody counts the rounds beforehand.
        with pytest.raises(CohortError, match="budget does not cover the round"):
            simulation.run(rounds=5, absences=Dropouts(probability=0.0, seed=0))
    assert all(client.ledger is not None and len(client.ledger.silo_events()) < 5 for client in consortium.clients)


@pytest.mark.parametrize(
    "options",
    [{"rule": MultiKrum(byzantine=0, keep=3)}, {"keys": Plaintext()}, {"correction": Scaffold(clients=3)}],
    ids=["inner products", "no encryption", "SCAFFOLD"],
)
def test_a_rule_or_a_mode_that_sees_more_than_the_sum_is_refused_by_type(silos: Silos, options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedInThisModeError, match=r"its promise is for the sum.*nothing was started"):
        silos.consortium(training=MECHANISM, **options)


def test_a_client_without_a_budget_for_its_silo_is_refused(silos: Silos) -> None:
    with pytest.raises(ValueError, match="a ledger with a silo_budget for every client"):
        silos.consortium(training=MECHANISM, silo_epsilon=None)
