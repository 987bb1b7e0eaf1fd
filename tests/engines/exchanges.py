"""An `Exchange` whose parties are in this process, each answering in a thread of its own, and what can go wrong on the way."""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from privfed.engines.node import Node
from privfed.phases import Step
from tests.engines.deployed import HOLDER, SERVER, Deployed

Fault = Callable[[str, Step, int, bytes, Callable[[], bytes]], bytes | None]
"""From party, step, round, request and the honest answer to what comes back; None if nothing does."""
_STEP, _ROUND = 9, 42


class Killed(BaseException):
    """The server's process is gone."""


def step_of(request: bytes) -> Step:
    return Step(request[_STEP])


def round_of(request: bytes) -> int:
    return int.from_bytes(request[_ROUND : _ROUND + 4], "big")


class LocalExchange:
    """Opens a node for every party's folder; nodes can be stopped, killed and started again."""

    def __init__(self, deployed: Deployed, *, fault: Fault | None = None, names: tuple[str, ...] | None = None) -> None:
        self.deployed = deployed
        self.fault = fault
        self.asked: list[tuple[str, Step, int]] = []
        self.nodes: dict[str, Node] = {}
        self._stack = ExitStack()
        folders = sorted(folder.name for folder in deployed.root.iterdir() if folder.name != SERVER)
        self._names = tuple(folders) if names is None else names
        self._lock = threading.Lock()

    def start(self, name: str) -> Node:
        node = Node(self.deployed.folder(name))
        self.nodes[name] = node
        return node

    def stop(self, name: str) -> None:
        self.nodes.pop(name).close()

    def restart(self, name: str) -> None:
        self.stop(name)
        self.start(name)

    def ask(self, requests: Mapping[str, bytes], *, seconds: float) -> Mapping[str, bytes]:
        with ThreadPoolExecutor(max_workers=len(requests)) as pool:
            futures: dict[str, Future[bytes | None]] = {name: pool.submit(self._answer, name, data) for name, data in requests.items()}
            wait(futures.values())
        replies = {name: future.result() for name, future in futures.items()}
        return {name: reply for name, reply in replies.items() if reply is not None}

    def _answer(self, name: str, data: bytes) -> bytes | None:
        step, number = step_of(data), round_of(data)
        with self._lock:
            self.asked.append((name, step, number))

        def honest() -> bytes:
            return self.nodes[name].answer(data)

        if name not in self.nodes:
            return None
        return honest() if self.fault is None else self.fault(name, step, number, data, honest)

    def __enter__(self) -> Self:
        for name in self._names:
            self.start(name)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for name in list(self.nodes):
            self.stop(name)


def dropping(*dropped: tuple[str, Step, int]) -> Fault:
    """The first request to these parties at these steps of these rounds never arrives; the one of a catch-up does."""
    waiting = set(dropped)

    def fault(name: str, step: Step, number: int, _: bytes, honest: Callable[[], bytes]) -> bytes | None:
        if (name, step, number) not in waiting:
            return honest()
        waiting.discard((name, step, number))
        return None

    return fault


def changing(party: str, step: Step, number: int, change: Callable[[bytes], bytes | None]) -> Fault:
    """What one party answers at one step of one round arrives as something else."""

    def fault(name: str, at: Step, of: int, _: bytes, honest: Callable[[], bytes]) -> bytes | None:
        reply = honest()
        return change(reply) if (name, at, of) == (party, step, number) else reply

    return fault


__all__ = ["HOLDER", "Fault", "Killed", "LocalExchange", "changing", "dropping", "round_of", "step_of"]
