"""Corrections of client drift in whole runs: they reach every client, in the clear and encrypted, and survive restarts."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from privfed.consortium import Consortium, Plaintext
from privfed.engines.local import Simulation, simulate
from privfed.errors import HistoryMismatchError, UnsupportedInThisModeError
from privfed.he.secret import SharedKey
from privfed.policy import OpeningPolicy
from privfed.round_record import Stage
from privfed.training.objective import FedProx
from privfed.training.randomness import _SeededRandomness
from privfed.training.scaffold import Scaffold
from tests.engines.test_faults import Script

Make = Callable[..., Consortium]


def test_scaffold_moves_an_encrypted_run_as_it_moves_the_plaintext_run(model: torch.nn.Module, non_private: Make) -> None:
    encrypted = simulate(non_private(correction=Scaffold(clients=3)), model, rounds=3)
    plain = simulate(non_private(correction=Scaffold(clients=3), keys=Plaintext()), model, rounds=3)
    without = simulate(non_private(), model, rounds=3)
    assert np.array_equal(encrypted.model.values, plain.model.values)
    assert np.abs(encrypted.model.values - without.model.values).max() > 1e-3


def test_the_first_round_of_scaffold_is_that_of_fedavg(model: torch.nn.Module, non_private: Make) -> None:
    first = simulate(non_private(correction=Scaffold(clients=3)), model, rounds=1)
    without = simulate(non_private(), model, rounds=1)
    assert np.array_equal(first.model.values, without.model.values)


@pytest.mark.parametrize("correction", [FedProx(proximal_weight=1.0), Scaffold(clients=3)])
def test_a_correction_really_changes_the_weights_under_dp_sgd(
    model: torch.nn.Module, private: Make, tmp_path: Path, correction: FedProx | Scaffold
) -> None:
    def run(folder: str, applied: FedProx | Scaffold | None) -> np.ndarray:
        consortium = private(folder=tmp_path / folder, correction=applied)
        seeds = {client.name: index for index, client in enumerate(consortium.clients)}
        with Simulation(consortium, model, _randomness=lambda name, number: _SeededRandomness(seeds[name] + 10 * number)) as simulation:
            return simulation.run(rounds=2).model.values

    without, again, corrected = run("without", None), run("again", None), run("corrected", correction)
    assert np.array_equal(without, again)
    assert np.abs(corrected - without).max() > 1e-3


def test_scaffold_with_selection_absences_and_a_restart_equals_the_run_that_was_not_interrupted(
    model: torch.nn.Module, non_private: Make, tmp_path: Path
) -> None:
    keys = SharedKey.generate()
    options = {"count": 5, "correction": Scaffold(clients=5), "policy": OpeningPolicy(min_clients=3), "keys": keys}
    absences = Script(round_1={"bank_0": Stage.OPENING}, round_2={"bank_1": Stage.UPLOAD})
    whole = simulate(non_private(**options), model, rounds=4, fraction=0.8, rng=np.random.default_rng(2), absences=absences)
    for rounds in (1, 2, 4):  # every call is a restart on the same folder
        parts = simulate(
            non_private(**options),
            model,
            rounds=rounds,
            fraction=0.8,
            rng=np.random.default_rng(2),
            absences=absences,
            directory=tmp_path / "run",
        )
    assert np.array_equal(parts.model.values, whole.model.values)


def test_a_client_that_lost_its_variates_does_not_go_on_with_other_ones(model: torch.nn.Module, non_private: Make, tmp_path: Path) -> None:
    options = {"correction": Scaffold(clients=3), "keys": SharedKey.generate()}
    simulate(non_private(**options), model, rounds=1, directory=tmp_path / "run")
    (tmp_path / "run" / "clients" / "bank_1" / "variates.sqlite").unlink()
    with pytest.raises(HistoryMismatchError, match="nothing was done"):
        simulate(non_private(**options), model, rounds=2, directory=tmp_path / "run")


def test_a_consortium_refuses_scaffold_where_its_variates_do_not_follow_from_the_aggregate(non_private: Make) -> None:
    with pytest.raises(UnsupportedInThisModeError, match="same weight"):
        non_private(weights=(1, 2, 1), correction=Scaffold(clients=3))
    with pytest.raises(UnsupportedInThisModeError, match="declared for 4"):
        non_private(correction=Scaffold(clients=4))
