from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from privfed.aggregation.server_optimizer import FedAdagrad, FedAdam, FedYogi, ServerOptimizer, ServerSgd
from privfed.consortium import Consortium, Plaintext
from privfed.engines.local import Simulation, simulate
from privfed.errors import AgreementMismatchError
from privfed.he.secret import SharedKey
from privfed.policy import OpeningPolicy
from privfed.round_record import Stage
from privfed.training.scaffold import Scaffold

Make = Callable[..., Consortium]
OPTIMIZERS = (ServerSgd(momentum=0.9), FedAdagrad(learning_rate=0.05), FedAdam(learning_rate=0.05), FedYogi(learning_rate=0.05))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: type(optimizer).__name__)
def test_every_optimiser_moves_the_models_of_all_openers_as_it_moves_that_of_a_run_in_the_clear(
    model: torch.nn.Module, non_private: Make, optimizer: ServerOptimizer
) -> None:
    with Simulation(non_private(server_optimizer=optimizer), model) as simulation:
        history = simulation.run(rounds=3)
        states = [participant.session.state for participant in simulation.encrypted.participants.values()]
    assert history.rule == f"FedAvg, then {optimizer.name}"
    for state in states:
        assert np.array_equal(state.values.values, history.model.values)
        assert {name: moment.values.tobytes() for name, moment in state.optimizer.items()} == {
            name: moment.values.tobytes() for name, moment in states[0].optimizer.items()
        }
    plain = simulate(non_private(server_optimizer=optimizer, keys=Plaintext()), model, rounds=3)
    assert np.array_equal(plain.model.values, history.model.values)
    assert not np.array_equal(simulate(non_private(keys=Plaintext()), model, rounds=3).model.values, plain.model.values)


def test_a_restart_gives_the_model_that_an_uninterrupted_run_has(model: torch.nn.Module, non_private: Make, tmp_path: Path) -> None:
    consortium = non_private(server_optimizer=FedAdam(learning_rate=0.05))
    whole = simulate(consortium, model, rounds=3)
    simulate(consortium, model, rounds=2, directory=tmp_path / "run")
    again = simulate(consortium, model, rounds=3, directory=tmp_path / "run")
    assert np.array_equal(again.model.values, whole.model.values)


class AwayInTheSecondRound:
    def silent(self, number: int, names: list[str]) -> Mapping[str, Stage]:
        return {"bank_3": Stage.SETUP} if number == 1 else {}


def test_a_client_that_missed_a_round_arrives_at_the_same_state(model: torch.nn.Module, non_private: Make) -> None:
    consortium = non_private(count=4, server_optimizer=FedYogi(learning_rate=0.05), policy=OpeningPolicy(min_clients=3))
    with Simulation(consortium, model) as simulation:
        simulation.run(rounds=3, absences=AwayInTheSecondRound())  # type: ignore[arg-type]
        states = [participant.session.state for participant in simulation.encrypted.participants.values()]
    assert {state.rounds for state in states} == {(0, 1, 2)}
    assert len({state.values.values.tobytes() for state in states}) == 1
    assert len({state.optimizer["second_moment"].values.tobytes() for state in states}) == 1


def test_a_folder_of_a_run_with_another_optimiser_is_refused(model: torch.nn.Module, non_private: Make, tmp_path: Path) -> None:
    key = SharedKey.generate()
    simulate(non_private(keys=key, server_optimizer=FedAdam(learning_rate=0.05)), model, rounds=1, directory=tmp_path)
    with pytest.raises(AgreementMismatchError, match="another rule; nothing was changed"):
        simulate(non_private(keys=key, server_optimizer=FedAdam(learning_rate=0.1)), model, rounds=2, directory=tmp_path)


def test_what_is_no_server_optimiser_is_refused(non_private: Make) -> None:
    with pytest.raises(TypeError, match="expected a server optimiser of ServerSgd"):
        non_private(server_optimizer="adam")


def test_variates_follow_what_was_opened_and_not_how_the_model_moved(model: torch.nn.Module, non_private: Make) -> None:
    options = {"correction": Scaffold(clients=3), "server_optimizer": ServerSgd(learning_rate=0.5)}
    encrypted, plain = (simulate(non_private(**options, **keys), model, rounds=2) for keys in ({}, {"keys": Plaintext()}))
    assert np.array_equal(encrypted.model.values, plain.model.values)
