"""Whole runs over a real SuperLink with TLS and authenticated SuperNodes, beside the same run in `engines.local`."""

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install privfed[flower]")

from privfed import __version__
from privfed.engines.flower.provisioning import write
from privfed.engines.party_folder import EVENTS, ROUNDS
from privfed.round_record import RoundRecord
from tests.engines.canary import KEEPING, check_server_is_blind, commands
from tests.engines.deployed import SERVER, Deployed, deploy, simulated
from tests.engines.flower.processes import RUN_SECONDS, Place, Started, free_port, wait_for

NOTICED_SECONDS = 4 * (63 + 60)  # a killed SuperNode is noticed after 63 s at the latest, and then waited for


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="pf-") as folder:
        yield Path(folder)


def settle(root: Path, **terms: Any) -> tuple[Deployed, Place]:
    deployed = deploy(root, **terms)
    write(SimpleNamespace(host="127.0.0.1", port=free_port(), parties=deployed.names, versions={"privfed": __version__}, rounds=3), root)
    place = Place(root)
    place.settle()
    return deployed, place


def start_all(deployed: Deployed, place: Place) -> dict[str, tuple[Started, Started]]:
    nodes = {name: place.start(name, "start-node.sh") for name in deployed.names}  # they load their data beside the SuperLink's start
    place.start_superlink()
    supernodes = {name: place.start(name, "start-supernode.sh") for name in deployed.names}
    place.wait_until_online(*supernodes.values())
    return {name: (nodes[name], supernodes[name]) for name in deployed.names}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def held(deployed: Deployed) -> list[RoundRecord]:
    return [RoundRecord.from_json(entry["held"]["record"]) for entry in lines(deployed.folder(SERVER) / ROUNDS) if "held" in entry]


def asked(deployed: Deployed, step: str, number: int) -> bool:
    return any(
        (entry.get("event"), entry.get("step"), entry.get("round")) == ("asked", step, number)
        for entry in lines(deployed.folder(SERVER) / EVENTS)
    )


def models(deployed: Deployed) -> list[np.ndarray]:
    return [deployed.state(name).values.values for name in deployed.names]


def check_same_as_local(deployed: Deployed, folder: Path, *, rounds: int) -> None:
    """The same integers were summed: the model of every party is, to the last bit, that of the local engine."""
    history = simulated(deployed, folder, rounds=rounds)
    assert [record.coefficients for record in held(deployed)] == [summary.record.coefficients for summary in history.rounds]
    assert not np.array_equal(history.model.values, history.initial.values)
    for values in models(deployed):
        assert np.array_equal(values, history.model.values)


HOLDING = """
import time

_SEEDED = _randomness


def _randomness(name, number):
    while (FOLDER / f"hold-{number}").exists():
        (FOLDER / "holding").touch()
        time.sleep(0.05)
    return _SEEDED(name, number)
"""


def test_three_rounds_over_tls_with_authenticated_nodes_end_with_the_integers_of_the_local_engine(root: Path, tmp_path: Path) -> None:
    deployed, place = settle(root, site=f"{KEEPING}{HOLDING}")
    hold = deployed.folder("bank_2") / "hold-2"
    hold.touch()
    with place:
        parties = start_all(deployed, place)
        operator = place.start(SERVER, "run.sh", "3")
        wait_for((hold.parent / "holding").exists, "the third round", seconds=RUN_SECONDS)
        if sys.platform.startswith("linux"):
            server = place.started["server-start-superlink.sh-0"].process.pid
            assert any("serverapp" in command for command in commands(server)), commands(server)
            check_server_is_blind(
                server=server,
                servers_folder=deployed.folder(SERVER),
                bank=parties["bank_0"][0].process.pid,
                banks_folder=deployed.folder("bank_0"),
                rounds=(0, 1),
            )
        hold.unlink()
        assert operator.process.wait(RUN_SECONDS) == 0, operator.text()
        # Nothing that the server keeps was in the clear: it has no key to open it with.
        assert not list(deployed.folder(SERVER).rglob("shared.key"))
    assert len(held(deployed)) == 3
    check_same_as_local(deployed, tmp_path / "local", rounds=3)


@pytest.mark.nightly
def test_a_bank_killed_in_round_two_is_gone_on_without_and_catches_up_exactly(root: Path) -> None:
    deployed, place = settle(root, count=4)
    with place:
        parties = start_all(deployed, place)
        operator = place.start(SERVER, "run.sh", "4")
        wait_for(lambda: asked(deployed, "UPLOAD", 1), "round 2", seconds=600)
        for started in parties["bank_3"]:
            started.kill()
        wait_for(lambda: len(held(deployed)) == 2, "round 2 without the bank", seconds=NOTICED_SECONDS)
        assert held(deployed)[1].participants == ("bank_0", "bank_1", "bank_2")
        place.wait_until_online(place.start_party("bank_3")[1])
        assert operator.process.wait(600) == 0, operator.text()
    assert [len(record.participants) for record in held(deployed)][::3] == [4, 4]
    first, *others = models(deployed)
    assert all(np.array_equal(first, other) for other in others)
    assert deployed.state("bank_3").rounds == deployed.state("bank_0").rounds == (0, 1, 2, 3)


@pytest.mark.nightly
def test_a_bank_restarted_within_the_time_takes_part_as_if_nothing_had_been(root: Path, tmp_path: Path) -> None:
    deployed, place = settle(root)
    with place:
        parties = start_all(deployed, place)
        operator = place.start(SERVER, "run.sh", "2")
        wait_for(lambda: asked(deployed, "UPLOAD", 1), "round 2", seconds=600)
        for started in parties["bank_1"]:
            started.kill()
        place.start_party("bank_1")
        assert operator.process.wait(600) == 0, operator.text()
    check_same_as_local(deployed, tmp_path / "local", rounds=2)


@pytest.mark.nightly
def test_a_superlink_killed_between_rounds_loses_its_run_and_a_new_one_goes_on_from_the_servers_folder(root: Path, tmp_path: Path) -> None:
    deployed, place = settle(root)
    with place:
        start_all(deployed, place)
        operator = place.start(SERVER, "run.sh", "3")
        wait_for(lambda: len(held(deployed)) == 1, "round 1", seconds=600)
        place.started["server-start-superlink.sh-0"].kill()
        assert operator.process.wait(300) == 1
        assert len(held(deployed)) == 1
        time.sleep(5)
        place.start_superlink()
        done = place.run(3, seconds=900)
        assert done.returncode == 0, done.stderr
    check_same_as_local(deployed, tmp_path / "local", rounds=3)


@pytest.mark.nightly
def test_too_few_banks_let_the_run_fail_and_nothing_is_opened(root: Path) -> None:
    deployed, place = settle(root)
    with place:
        place.start_superlink()
        place.wait_until_online(*[place.start_party(name)[1] for name in deployed.names[:2]])
        done = place.run(1)
        assert done.returncode == 1
        assert "finished:failed" in done.stderr
        assert "none of 1 rounds could be held: round 0: " in done.stderr
    assert held(deployed) == []
    for name in deployed.names:
        assert not (deployed.folder(name) / "state" / "model.npz").exists()


@pytest.mark.nightly
def test_answers_that_are_tampered_with_or_stale_or_signed_by_a_stranger_are_left_out_of_their_rounds(root: Path) -> None:
    deployed, place = settle(root, count=4)
    script = place.folder("bank_3") / "start-node.sh"
    script.write_text(
        script.read_text().replace("privfed.engines.flower.party --folder", "tests.engines.flower.hostile").replace("--socket ", "")
    )
    with place:
        start_all(deployed, place)
        done = place.run(4, seconds=1200)
        assert done.returncode == 0, done.stderr
    check_left_out(deployed)


def check_left_out(deployed: Deployed) -> None:
    """The fourth bank is in the last round alone, and its model is that of the others."""
    assert [record.participants for record in held(deployed)] == 3 * [deployed.names[:3]] + [deployed.names]
    events = lines(deployed.folder(SERVER) / EVENTS)
    assert [event["round"] for event in events if event["event"] == "dropped" and event["of"] == "bank_3"] == [0, 1, 2]
    first, *others = models(deployed)
    assert all(np.array_equal(first, other) for other in others)
