"""Whole runs in this process: the coordinator, the adapter, the parties' app, their sockets and their nodes, without Flower's processes."""

import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install privfed[flower]")

from privfed.engines.exchange import TimeOuts
from privfed.engines.flower import client
from privfed.engines.flower.app import TIME_OUT
from privfed.engines.flower.doorway import Answering, ask, serve
from privfed.engines.flower.exchange import FlowerExchange, registered
from privfed.engines.flower.server import hold_rounds
from privfed.engines.node import Node
from privfed.errors import CohortError, FolderInUseError
from privfed.files import FolderLock
from privfed.he.secret import SharedKey
from tests.engines.deployed import SERVER, Deployed, deploy, simulated
from tests.engines.flower.grid import ANode, InProcessGrid, a_task
from tests.engines.flower.hostile import HostileNode
from tests.engines.flower.test_rounds import check_left_out, held, models


class NodeStoppedError(Exception):
    """Ends a node's thread."""


class Stoppable:
    def __init__(self, node: Answering) -> None:
        self._node = node

    @property
    def most_bytes(self) -> int:
        return self._node.most_bytes

    def answer(self, request: bytes) -> bytes:
        if request == b"stop":
            raise NodeStoppedError
        return self._node.answer(request)


def stop(socket: Path) -> None:
    with pytest.raises(ConnectionError):
        ask(socket, b"stop", seconds=5)


@contextlib.contextmanager
def grid_of(deployed: Deployed, make: Callable[[str, Path], Any] = lambda _, folder: Node(folder)) -> Iterator[InProcessGrid]:
    """A SuperNode, a socket and a node for each party."""
    with tempfile.TemporaryDirectory(prefix="pf-") as short, a_task(), contextlib.ExitStack() as stack:
        nodes = {}
        for number, name in enumerate(deployed.names):
            socket, ready = Path(short) / name, threading.Event()
            node = stack.enter_context(contextlib.closing(make(name, deployed.folder(name))))

            def answer(node: Any = node, socket: Path = socket, ready: threading.Event = ready) -> None:
                with contextlib.suppress(NodeStoppedError):
                    serve(Stoppable(node), socket, ready=ready.set)

            thread = threading.Thread(target=answer, daemon=True)
            thread.start()
            assert ready.wait(10)
            stack.callback(thread.join, 10)
            stack.callback(stop, socket)
            nodes[number] = ANode(client.app, {"socket": str(socket)}, key=name.encode())
        yield InProcessGrid(nodes)


def run(deployed: Deployed, grid: InProcessGrid, *, rounds: int, seconds: float = 30.0) -> None:
    config = {"rounds": rounds, **{f"{TIME_OUT}{name}": seconds for name in TimeOuts.__dataclass_fields__}}
    exchange = FlowerExchange(grid, nodes=registered({name: name.encode() for name in deployed.names}))
    hold_rounds(deployed.folder(SERVER), exchange, config=config)


def test_three_rounds_end_with_the_integers_of_the_local_engine(tmp_path: Path) -> None:
    deployed = deploy(tmp_path / "parties")
    with grid_of(deployed) as grid:
        run(deployed, grid, rounds=3)
        groups = [message.metadata.group_id for message in grid.nodes[0].received]
    history = simulated(deployed, tmp_path / "local", rounds=3)
    # What the log of the bank's SuperNode says behind the word ROUND.
    assert groups[::5] == ["0, STATUS, bank_0", "1, STATUS, bank_0", "2, STATUS, bank_0"]
    assert groups[1:5] == [f"0, {step}, bank_0" for step in ("SETUP", "UPLOAD", "APPROVE", "OPEN")]
    assert not np.array_equal(history.model.values, history.initial.values)
    assert all(np.array_equal(values, history.model.values) for values in models(deployed))


def test_a_run_in_two_parts_ends_as_one(tmp_path: Path) -> None:
    deployed = deploy(tmp_path / "parties")
    for rounds in (1, 2, 2):
        with grid_of(deployed) as grid:
            run(deployed, grid, rounds=rounds)
    history = simulated(deployed, tmp_path / "local", rounds=2)
    assert len(held(deployed)) == 2
    assert all(np.array_equal(values, history.model.values) for values in models(deployed))


def test_what_is_tampered_with_or_stale_or_signed_by_a_stranger_is_left_out_of_its_round(tmp_path: Path) -> None:
    deployed = deploy(tmp_path, count=4)
    with grid_of(deployed, lambda name, folder: HostileNode(folder) if name == "bank_3" else Node(folder)) as grid:
        run(deployed, grid, rounds=4)
    check_left_out(deployed)


def test_a_bank_with_another_key_is_left_out(tmp_path: Path) -> None:
    deployed = deploy(tmp_path, count=4)
    (deployed.folder("bank_3") / "shared.key").unlink()
    SharedKey.generate().save(deployed.folder("bank_3") / "shared.key")
    with grid_of(deployed) as grid:
        run(deployed, grid, rounds=1)
    assert held(deployed)[0].participants == deployed.names[:3]
    assert not (deployed.folder("bank_3") / "state" / "model.npz").exists()


def test_too_few_replies_let_the_run_fail_and_nothing_is_opened(tmp_path: Path) -> None:
    deployed = deploy(tmp_path)
    with grid_of(deployed) as grid:
        del grid.nodes[2]
        with pytest.raises(CohortError):
            run(deployed, grid, rounds=1, seconds=1.0)
    assert held(deployed) == []
    assert not list(tmp_path.glob("bank_*/state/model.npz"))


def test_a_run_in_which_one_round_failed_fails_though_the_others_were_held_and_a_later_one_does_not(tmp_path: Path) -> None:
    deployed = deploy(tmp_path)
    with grid_of(deployed) as grid:
        run(deployed, grid, rounds=1)
        away = grid.nodes.pop(2)
        with pytest.raises(CohortError, match=r"1 of 2 rounds were not held, and nothing of them was opened.*what was held stays"):
            run(deployed, grid, rounds=2, seconds=1.0)
        grid.nodes[2] = away
        run(deployed, grid, rounds=3)
    assert [record.round for record in held(deployed)] == [0, 2]


def test_a_run_beside_another_one_leaves_the_record_of_rounds_alone(tmp_path: Path) -> None:
    deployed = deploy(tmp_path)
    record = deployed.folder(SERVER) / "rounds.jsonl"
    record.write_text('{"begun": {}}\n{"silent": ')  # the other run is writing a line
    lock = FolderLock(deployed.folder(SERVER))
    with grid_of(deployed) as grid, pytest.raises(FolderInUseError):
        run(deployed, grid, rounds=1)
    lock.release()
    assert record.read_text() == '{"begun": {}}\n{"silent": '
