"""Whole runs of parties with folders of their own, beside the same run in `engines.local`; and parties that fall silent or come back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from privfed.engines.coordinator import coordinate
from privfed.he.escrow_secret import EscrowKey
from privfed.he.params import CkksParams
from privfed.he.secret import SharedKey
from privfed.he.threshold import ThresholdKey
from privfed.phases import Step
from privfed.round_record import RoundRecord
from tests.engines.deployed import ROUNDS, SERVER, Deployed, deploy, simulated
from tests.engines.exchanges import LocalExchange, dropping

MODES: dict[str, Callable[[], dict[str, Any]]] = {
    "SharedKey": lambda: {"keys": SharedKey.generate()},
    "KeyChain": lambda: {"chain": True},
    "ThresholdKey": lambda: {"keys": ThresholdKey(clients=3, corrupted=1, dropouts=0)},
    "EscrowKey": lambda: {"keys": EscrowKey.generate(), "params": CkksParams.escrow()},
}


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> dict[str, Any]:
    return MODES[request.param]()


def run(deployed: Deployed, exchange: LocalExchange, *, rounds: int = ROUNDS, **options: Any) -> tuple[RoundRecord, ...]:
    return coordinate(deployed.folder(SERVER), exchange, rounds=rounds, **options).rounds


def models(deployed: Deployed) -> set[bytes]:
    return {deployed.state(name).values.values.tobytes() for name in deployed.names}


def test_a_run_of_parties_with_folders_of_their_own_ends_with_the_integers_of_the_local_engine(tmp_path: Path, mode: Any) -> None:
    deployed = deploy(tmp_path / "parties", **mode)
    with LocalExchange(deployed) as exchange:
        records = run(deployed, exchange)
    history = simulated(deployed, tmp_path / "local")
    assert [record.coefficients for record in records] == [summary.record.coefficients for summary in history.rounds]
    (values,) = models(deployed)
    assert np.array_equal(np.frombuffer(values), history.model.values)
    assert history.grid_error_max == 0


@pytest.mark.parametrize("step", [Step.STATUS, Step.SETUP, Step.UPLOAD, Step.OPEN])
def test_a_round_goes_on_without_who_is_silent_and_that_client_catches_up(tmp_path: Path, step: Step) -> None:
    deployed = deploy(tmp_path, count=4)
    with LocalExchange(deployed, fault=dropping(("bank_3", step, 1))) as exchange:
        first, second, third = run(deployed, exchange)
        asked = exchange.asked
    assert second.silent == {"bank_3": step.stage}
    assert second.participants == ("bank_0", "bank_1", "bank_2", *(("bank_3",) if step is Step.OPEN else ()))
    assert first.participants == third.participants == deployed.names
    assert len(models(deployed)) == 1
    if step is not Step.UPLOAD:  # a client that fell silent with its upload is not asked to open it either
        assert asked.index(("bank_3", Step.STATUS, 2)) < asked.index(("bank_3", Step.SETUP, 2))
    assert deployed.state("bank_3").rounds == (0, 1, 2)
