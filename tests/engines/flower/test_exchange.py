"""The adapter's exchange over a grid in this process, with the parties' real app and sockets."""

import contextlib
import os
import socket as sockets
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install privfed[flower]")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from privfed.engines.flower import client, doorway
from privfed.engines.flower.doorway import ask, serve
from privfed.engines.flower.envelope import seal, unseal
from privfed.engines.flower.exchange import FlowerExchange, registered
from privfed.errors import InvalidMessageError
from tests.engines.flower.grid import ANode, InProcessGrid, a_task

NAMES = ("bank_a", "bank_b", "bank_c")
MOST = 1 << 22


class NodeStoppedError(Exception):
    """Ends a node's thread."""


def until_stopped(socket: Path, ready: threading.Event) -> None:
    with contextlib.suppress(NodeStoppedError):
        serve(Reversing(), socket, ready=ready.set)


class Reversing:
    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.most_bytes = MOST

    def answer(self, request: bytes) -> bytes:
        if request == b"stop":
            raise NodeStoppedError
        self.asked.append(request)
        return request[::-1]


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="pf-") as folder, a_task():
        yield Path(folder)


@pytest.fixture
def node(short: Path) -> Iterator[Callable[[str], ANode]]:
    threads: dict[str, threading.Thread] = {}

    def start(name: str) -> ANode:
        ready = threading.Event()
        threads[name] = threading.Thread(target=until_stopped, args=(short / name, ready), daemon=True)
        threads[name].start()
        assert ready.wait(10)
        return ANode(client.app, {"socket": str(short / name)}, key=name.encode())

    yield start
    for name, thread in threads.items():
        with pytest.raises(ConnectionError):
            ask(short / name, b"stop", seconds=5)
        thread.join(10)


def exchange_over(nodes: dict[int, ANode]) -> FlowerExchange:
    return FlowerExchange(InProcessGrid(nodes), nodes=registered({name: name.encode() for name in NAMES}))


def test_each_party_gets_its_own_request_and_its_reply_comes_back_under_its_name(node: Callable[[str], ANode]) -> None:
    nodes = {number: node(name) for number, name in enumerate(NAMES, 7)}
    requests = {name: name.encode() * 3 for name in NAMES}
    assert exchange_over(nodes).ask(requests, seconds=20) == {name: request[::-1] for name, request in requests.items()}
    assert [len(each.received) for each in nodes.values()] == [1, 1, 1]


def test_who_a_node_is_follows_from_its_registered_key_and_not_from_its_configuration(node: Callable[[str], ANode]) -> None:
    stranger = node("stranger")
    stranger.config |= {"name": "bank_a", "party": "bank_a"}
    assert exchange_over({1: stranger, 2: node("bank_b")}).ask({"bank_a": b"12", "bank_b": b"12"}, seconds=1.2) == {"bank_b": b"21"}
    assert stranger.received == []


def test_two_parties_cannot_share_a_node() -> None:
    with pytest.raises(ValueError, match="another key"):
        registered({"bank_a": b"key", "bank_b": b"key"})


def test_who_does_not_answer_in_time_is_left_out_and_the_others_are_not_kept_waiting_longer(
    node: Callable[[str], ANode], caplog: pytest.LogCaptureFixture
) -> None:
    begun = time.monotonic()
    nodes = {1: node("bank_a"), 2: ANode(None, key=b"bank_b")}
    assert exchange_over(nodes).ask(dict.fromkeys(NAMES, b"12"), seconds=1.5) == {"bank_a": b"21"}
    assert 1.5 <= time.monotonic() - begun < 1.5 + 4 * 0.5
    assert "bank_b: it took too long" in caplog.text
    assert "bank_c: its SuperNode is not online" in caplog.text


def test_nobody_answering_gives_nothing_and_no_error_of_the_transport() -> None:
    assert exchange_over({}).ask({"bank_a": b"1"}, seconds=0.1) == {}


def test_a_node_that_comes_up_within_the_time_is_asked_then(node: Callable[[str], ANode]) -> None:
    late = node("bank_a")
    late.online_from = time.monotonic() + 1
    assert exchange_over({1: late}).ask({"bank_a": b"12"}, seconds=10) == {"bank_a": b"21"}


def test_a_node_that_is_restarted_within_the_time_is_asked_again(node: Callable[[str], ANode]) -> None:
    restarted = node("bank_a")
    restarted.gone_after = 0
    assert exchange_over({1: restarted}).ask({"bank_a": b"12"}, seconds=10) == {"bank_a": b"21"}
    assert [unseal(message.content) for message in restarted.received] == [b"12", b"12"]


def test_a_node_that_was_restarted_before_flower_noticed_is_asked_again(node: Callable[[str], ANode]) -> None:
    restarted = node("bank_a")
    restarted.restarts_after = 0
    assert exchange_over({1: restarted}).ask({"bank_a": b"12"}, seconds=10) == {"bank_a": b"21"}
    assert len(restarted.received) == 2


def test_a_node_that_stays_away_is_not_waited_for_until_the_end(node: Callable[[str], ANode], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("privfed.engines.flower.exchange._AWAY_SECONDS", 1.5)
    away, begun = node("bank_b"), time.monotonic()
    away.gone_after = 0
    away.online_again = 1000.0
    assert exchange_over({1: node("bank_a"), 2: away}).ask(dict.fromkeys(NAMES, b"12"), seconds=1000) == {"bank_a": b"21"}
    assert 1.5 <= time.monotonic() - begun < 10


def test_an_app_that_fails_is_no_answer_and_its_words_are_not_repeated(
    node: Callable[[str], ANode], caplog: pytest.LogCaptureFixture
) -> None:
    def failing(message: Message, context: object) -> Message:
        raise ValueError("secret 0.123")

    nodes = {1: ANode(failing, key=b"bank_a"), 2: node("bank_b")}
    assert exchange_over(nodes).ask({"bank_a": b"12", "bank_b": b"12"}, seconds=20) == {"bank_b": b"21"}
    assert "bank_a: its app failed" in caplog.text
    assert "0.123" not in caplog.text
    assert len(nodes[1].received) == 1


HOSTILE = {
    "nothing": RecordDict(),
    "another record": RecordDict({"privfed": ConfigRecord({"privfed": b"x"})}),
    "two arrays": RecordDict(
        {"privfed": ArrayRecord({name: Array("uint8", (1,), "privfed.message", b"x") for name in ("privfed", "more")})}
    ),
    "two records": RecordDict({**seal(b"x"), "more": ConfigRecord({"a": 1})}),
    "another kind": RecordDict({"privfed": ArrayRecord({"privfed": Array("uint8", (1,), "numpy.ndarray", b"x")})}),
    "another type": RecordDict({"privfed": ArrayRecord({"privfed": Array("float32", (1,), "privfed.message", b"x")})}),
    "another length": RecordDict({"privfed": ArrayRecord({"privfed": Array("uint8", (2,), "privfed.message", b"x")})}),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_a_reply_that_is_no_message_of_ours_is_no_answer(content: RecordDict, node: Callable[[str], ANode]) -> None:
    with pytest.raises(InvalidMessageError):
        unseal(content)
    with a_task():
        nodes = {1: ANode(lambda message, _: Message(content, reply_to=message), key=b"bank_a"), 2: node("bank_b")}
        assert exchange_over(nodes).ask({"bank_a": b"12", "bank_b": b"12"}, seconds=20) == {"bank_b": b"21"}


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_no_time_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        exchange_over({}).ask({}, seconds=seconds)


def test_messages_are_one_array_which_flower_cuts_into_pieces_below_its_limit() -> None:
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

    with a_task():
        message = Message(seal(os.urandom(12_000_000)), 7, "train")
        pieces = [len(item.deflate()) for item in get_all_nested_objects(message).values()]
    assert sum(pieces) > 12_000_000
    assert max(pieces) < 8 * 2**20  # what the proxy must let through at least


def test_an_app_without_the_path_of_its_node_fails_and_a_node_that_is_not_there_is_named(short: Path) -> None:
    nodes = {1: ANode(client.app, key=b"bank_a")}
    assert exchange_over(nodes).ask({"bank_a": b"1"}, seconds=5) == {}
    with pytest.raises(ConnectionError, match="does not listen"):
        ask(short / "nobody", b"1", seconds=0.1)


def test_a_node_that_dies_over_a_request_is_a_failure_and_no_empty_answer(short: Path) -> None:
    listening = sockets.socket(sockets.AF_UNIX)
    listening.bind(str(short / "dying"))
    listening.listen()

    def die() -> None:
        connection, _ = listening.accept()
        connection.recv(1)
        connection.close()

    threading.Thread(target=die, daemon=True).start()
    with pytest.raises(ConnectionError, match="went away"):
        ask(short / "dying", b"request", seconds=1)


def test_only_the_owner_and_their_group_may_reach_a_node(short: Path, node: Callable[[str], ANode]) -> None:
    node("bank_a")
    assert stat.S_IMODE((short / "bank_a").stat().st_mode) == 0o660


def test_a_node_lets_go_of_who_sends_or_takes_nothing_and_takes_in_no_message_that_is_too_long(
    short: Path, node: Callable[[str], ANode], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doorway, "_TIME_OUT", struct.pack("@ll", 0, 200_000))
    node("bank_a")
    stalling = []
    for part in (b"", b"\x00\x00", b"\x00\x00\x00\x05ab"):
        connection = sockets.socket(sockets.AF_UNIX)
        connection.connect(str(short / "bank_a"))
        connection.sendall(part)
        stalling.append(connection)
    assert ask(short / "bank_a", b"12", seconds=5) == b"21"
    with pytest.raises(ConnectionError):
        ask(short / "bank_a", bytes(MOST + 1), seconds=5)
    assert ask(short / "bank_a", b"12", seconds=5) == b"21"
    taking_nothing = sockets.socket(sockets.AF_UNIX)
    taking_nothing.connect(str(short / "bank_a"))
    taking_nothing.sendall(MOST.to_bytes(4, "big") + bytes(MOST))
    assert ask(short / "bank_a", b"12", seconds=5) == b"21"
    for connection in (*stalling, taking_nothing):
        connection.close()


def test_a_node_goes_on_after_an_app_that_went_away(short: Path, node: Callable[[str], ANode]) -> None:
    node("bank_a")
    for rude in (b"", b"\x00\x00\x00\x05ab", b"\x00\x00\x00\x02ab"):
        connection = sockets.socket(sockets.AF_UNIX)
        connection.connect(str(short / "bank_a"))
        connection.sendall(rude)
        connection.close()
    assert ask(short / "bank_a", b"12", seconds=5) == b"21"
