"""Servers and banks that are killed at any moment of a distributed run, and started again on their folders."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from privfed.engines.coordinator import coordinate
from privfed.engines.node import Node
from privfed.errors import LedgerError
from privfed.he.threshold_key import ThresholdKey
from privfed.phases import Step
from privfed.round_record import RoundRecord
from tests.engines.deployed import ROUNDS, SERVER, Deployed, deploy, simulated
from tests.engines.exchanges import Killed, LocalExchange, dropping, round_of, step_of
from tests.engines.test_coordinator import MODES, charges, events, models


class Killing(LocalExchange):
    """Kills the server once before and once after every question of one round: answers that were on their way are lost."""

    def __init__(self, deployed: Deployed, *, number: int) -> None:
        super().__init__(deployed)
        self._number = number
        self.kills: list[tuple[str, Step]] = []

    def ask(self, requests: Mapping[str, bytes], *, seconds: float) -> Mapping[str, bytes]:
        request = next(iter(requests.values()))
        self._kill("before", request)
        replies = super().ask(requests, seconds=seconds)
        self._kill("after", request)
        return replies

    def _kill(self, moment: str, request: bytes) -> None:
        point = (moment, step_of(request))
        if round_of(request) == self._number and point not in self.kills:
            self.kills.append(point)
            raise Killed


def persist(deployed: Deployed, exchange: LocalExchange, *, rounds: int = ROUNDS) -> tuple[RoundRecord, ...]:
    """Starts the server again as often as it is killed."""
    while True:
        try:
            return coordinate(deployed.folder(SERVER), exchange, rounds=rounds).rounds
        except Killed:
            continue


@pytest.mark.parametrize("mode", MODES)
def test_a_server_killed_before_and_after_every_question_goes_on_exactly_there(tmp_path: Path, mode: str) -> None:
    deployed = deploy(tmp_path / "parties", **MODES[mode]())
    with Killing(deployed, number=1) as exchange:
        records = persist(deployed, exchange)
        steps = {step for _, step in exchange.kills}
    expected = {Step.STATUS, Step.SETUP, Step.UPLOAD, Step.APPROVE, Step.OPEN}
    assert steps == expected | ({Step.ANNOUNCE, Step.COMMIT, Step.STORE, Step.HOLD} if mode == "EscrowKey" else set())
    assert len(exchange.kills) == 2 * len(steps)
    history = simulated(deployed, tmp_path / "local")
    assert [record.coefficients for record in records] == [summary.record.coefficients for summary in history.rounds]
    assert [record.attempt for record in records] == [0, 0, 0]
    assert not any(record.silent or record.refused for record in records)
    (values,) = models(deployed)
    assert np.array_equal(np.frombuffer(values), history.model.values)
    assert charges(deployed) == dict.fromkeys(deployed.names, ROUNDS)


def test_a_server_killed_before_and_after_every_question_of_its_first_round_goes_on_exactly_there(tmp_path: Path) -> None:
    deployed = deploy(tmp_path)
    with Killing(deployed, number=0) as exchange:
        (record,) = persist(deployed, exchange, rounds=1)
    assert len(exchange.kills) == 10
    assert (record.participants, record.attempt) == (deployed.names, 0)
    assert charges(deployed) == dict.fromkeys(deployed.names, 1)


def test_a_server_that_is_started_again_between_rounds_goes_on_with_the_next_one(tmp_path: Path) -> None:
    deployed = deploy(tmp_path)
    with LocalExchange(deployed) as exchange:
        for rounds in (1, 2, 2, 3):
            records = coordinate(deployed.folder(SERVER), exchange, rounds=rounds).rounds
            assert [record.round for record in records] == list(range(rounds))
        asked = [(step, number) for name, step, number in exchange.asked if name == "bank_0" and step is Step.UPLOAD]
    assert asked == [(Step.UPLOAD, 0), (Step.UPLOAD, 1), (Step.UPLOAD, 2)]


def killed_in_training(node: Node, exchange: LocalExchange) -> Callable[..., Any]:
    """In place of the storing of an upload: the bank has reserved and trained, and its process ends."""

    def kill(*_: object) -> None:
        exchange.nodes.pop(node.name)
        party: Any = node._party
        party._session.close()
        party._close_ledger()
        node._folder_lock.release()
        raise Killed

    return kill


def test_a_bank_killed_in_training_retries_when_the_server_asks_again_and_one_reservation_more_is_counted(tmp_path: Path) -> None:
    deployed = deploy(tmp_path / "parties")
    with LocalExchange(deployed) as exchange:
        coordinate(deployed.folder(SERVER), exchange, rounds=1)
        node = exchange.nodes["bank_1"]
        node._party._session._outbox.put = killed_in_training(node, exchange)  # type: ignore[union-attr,method-assign]
        with pytest.raises(Killed):  # the server goes with it
            coordinate(deployed.folder(SERVER), exchange, rounds=2)
        exchange.start("bank_1")
        coordinate(deployed.folder(SERVER), exchange, rounds=ROUNDS)
    history = simulated(deployed, tmp_path / "local")
    (values,) = models(deployed)
    assert np.array_equal(np.frombuffer(values), history.model.values)
    assert charges(deployed) == {"bank_0": ROUNDS, "bank_1": ROUNDS + 1, "bank_2": ROUNDS}


def test_a_bank_killed_in_training_is_left_out_of_the_round_and_catches_up(tmp_path: Path) -> None:
    deployed = deploy(tmp_path, count=4)

    with LocalExchange(deployed) as exchange:
        coordinate(deployed.folder(SERVER), exchange, rounds=1)
        node = exchange.nodes["bank_1"]
        node._party._session._outbox.put = killed_in_training(node, exchange)  # type: ignore[union-attr,method-assign]

        def fault(name: str, step: Step, number: int, _: bytes, honest: Callable[[], bytes]) -> bytes | None:
            try:
                return honest()
            except Killed:
                return None

        exchange.fault = fault
        coordinate(deployed.folder(SERVER), exchange, rounds=2)
        exchange.start("bank_1")
        _, second, third = coordinate(deployed.folder(SERVER), exchange, rounds=3).rounds
    assert second.participants == ("bank_0", "bank_2", "bank_3")
    assert third.participants == deployed.names
    assert len(models(deployed)) == 1
    assert charges(deployed) == dict.fromkeys(deployed.names, 3)


def test_a_bank_restarted_between_its_shares_and_its_upload_takes_part_in_a_new_attempt(tmp_path: Path) -> None:
    deployed = deploy(tmp_path / "parties", keys=ThresholdKey(clients=4, corrupted=1, dropouts=0), count=4)

    class Restarting(LocalExchange):
        done = False

        def ask(self, requests: Mapping[str, bytes], *, seconds: float) -> Mapping[str, bytes]:
            request = next(iter(requests.values()))
            if (step_of(request), round_of(request)) == (Step.UPLOAD, 1) and not self.done:
                self.done = True
                self.restart("bank_1")
                raise Killed
            return super().ask(requests, seconds=seconds)

    with Restarting(deployed) as exchange:
        records = persist(deployed, exchange)
    assert [record.attempt for record in records] == [0, 1, 0]
    assert all(record.participants == deployed.names for record in records)
    history = simulated(deployed, tmp_path / "local")
    (values,) = models(deployed)
    assert np.array_equal(np.frombuffer(values), history.model.values)
    assert charges(deployed) == dict.fromkeys(deployed.names, ROUNDS)


def test_a_bank_that_says_in_every_attempt_that_its_secret_is_lost_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    deployed = deploy(tmp_path, keys=ThresholdKey(clients=5, corrupted=1, dropouts=1), count=5)
    with LocalExchange(deployed) as exchange:
        exchange.nodes["bank_4"]._party._session.key_lost = lambda _: True  # type: ignore[union-attr,method-assign]
        (record,) = coordinate(deployed.folder(SERVER), exchange, rounds=1).rounds
    assert record.attempt == 2
    assert record.participants == ("bank_0", "bank_1", "bank_2", "bank_3")


def test_a_bank_that_lost_its_ledger_does_not_start_and_says_why(tmp_path: Path) -> None:
    deployed = deploy(tmp_path)
    with LocalExchange(deployed) as exchange:
        coordinate(deployed.folder(SERVER), exchange, rounds=1)
        exchange.stop("bank_1")
        kept = {path: path.read_bytes() for path in deployed.folder("bank_1").glob("records.ledger*")}
        for path in kept:
            path.unlink()
        with pytest.raises(LedgerError, match="does not hold the charge of round 0"):
            exchange.start("bank_1")
        for path in deployed.folder("bank_1").glob("records.ledger*"):
            path.unlink()
        for path, data in kept.items():
            path.write_bytes(data)
            path.chmod(0o600)
        exchange.start("bank_1")
        records = coordinate(deployed.folder(SERVER), exchange, rounds=2).rounds
    assert records[1].participants == deployed.names


def test_who_fell_silent_before_a_restart_is_not_said_to_have_refused(tmp_path: Path) -> None:
    deployed = deploy(tmp_path, count=4)
    with Killing(deployed, number=0) as exchange:
        exchange.fault = dropping(("bank_3", Step.UPLOAD, 0))
        exchange.kills = [(moment, step) for moment in ("before", "after") for step in Step if (moment, step) != ("after", Step.APPROVE)]
        (record,) = persist(deployed, exchange, rounds=1)
    assert exchange.kills[-1] == ("after", Step.APPROVE)
    assert (record.refused, record.silent["bank_3"].name) == ((), "UPLOAD")
    assert sum(event["event"] == "started" for event in events(deployed, SERVER)) == 2
