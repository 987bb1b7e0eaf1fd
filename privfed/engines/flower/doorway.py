"""From the app that Flower starts at a party to the party's node, which holds the keys and runs as another user.

Flower starts a new process for each message, runs whatever app it was sent in it, and keeps nothing across restarts. So the app holds
nothing: it hands the bytes to a process of the party's own, over a Unix socket, and takes back the answer.
"""

import os
import socket as sockets
import struct
import time
from collections.abc import Callable
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Protocol

_MOST_BYTES = 2**32
_TIME_OUT = struct.pack("@ll", 60, 0)  # seconds and microseconds, as the kernel takes them
_SOCKET_UMASK = 0o117  # the owner and the group may connect
_RETRY_SECONDS = 0.5


class Answering(Protocol):
    """Who answers requests: `privfed.engines.node.Node`."""

    @property
    def most_bytes(self) -> int: ...
    def answer(self, request: bytes) -> bytes: ...


def serve(node: Answering, socket: Path, *, ready: Callable[[], None] = lambda: None) -> None:
    """Answers requests, one after the other, until the process ends.

    Whoever may connect is not trusted: longer messages than a request can be are not taken in, and who sends or takes nothing for a
    minute is let go of, so that others are answered.

    Args:
        node: Who answers.
        socket: Where to listen; its owner and their group may connect. What is left of a process before is replaced.
        ready: Is called as soon as requests are taken.
    """
    socket.unlink(missing_ok=True)
    before = os.umask(_SOCKET_UMASK)
    try:
        listener = Listener(str(socket), "AF_UNIX")
    finally:
        os.umask(before)
    with listener:
        ready()
        while True:
            with listener.accept() as connection:
                try:
                    _limit_waiting(connection.fileno())
                    request = connection.recv_bytes(node.most_bytes)
                except (EOFError, OSError):  # the app went away, or is none
                    continue
                answer = node.answer(request)
                try:
                    connection.send_bytes(answer)
                except OSError:  # the app went away; it asks again, and gets what was stored
                    continue


def _limit_waiting(descriptor: int) -> None:
    with sockets.socket(fileno=os.dup(descriptor)) as same:
        for option in (sockets.SO_RCVTIMEO, sockets.SO_SNDTIMEO):
            same.setsockopt(sockets.SOL_SOCKET, option, _TIME_OUT)


def ask(socket: Path, request: bytes, *, seconds: float) -> bytes:
    """The node's answer to a request.

    Args:
        socket: Where the node listens.
        request: Opaque.
        seconds: Time to wait for a node that is being restarted; an answer may take longer.

    Raises:
        ConnectionError: If nobody listens, or the node went away before it answered.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            connection = Client(str(socket), "AF_UNIX")
            break
        except (FileNotFoundError, ConnectionRefusedError) as error:
            if time.monotonic() >= end:
                raise ConnectionError("the party's node does not listen; start it, and ask again") from error
            time.sleep(_RETRY_SECONDS)
    with connection:
        try:
            connection.send_bytes(request)
            return connection.recv_bytes(_MOST_BYTES)
        except (EOFError, OSError) as error:
            raise ConnectionError("the party's node went away before it answered; start it, and ask again") from error
