"""The server's way to the other parties: one message to each SuperNode, and what came back in time."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from privfed.engines.envelope import said_step
from privfed.engines.flower.envelope import seal, unseal
from privfed.errors import InvalidMessageError

_LOG = logging.getLogger("privfed.engines.flower")
_POLL_SECONDS = 0.5
_SHORTEST_SECONDS = 0.001
_AWAY_SECONDS = 60.0
_OFFLINE = "its SuperNode is not online"
_ERRORS = {
    ErrorCode.LOAD_CLIENT_APP_EXCEPTION: "its app could not be loaded",
    ErrorCode.CLIENT_APP_RAISED_EXCEPTION: "its app failed",
    ErrorCode.CLIENT_APP_CRASHED: "its app crashed",
    ErrorCode.MESSAGE_UNAVAILABLE: "the message expired",
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: "its reply expired",
    ErrorCode.INVALID_FAB: "it refuses the app",
}


class Online(NamedTuple):
    """A party's SuperNode that is online: its id, and since when. One that was restarted has lost what it was sent before."""

    node_id: int
    since: str


FindNodes = Callable[[Grid], Mapping[str, Online]]
"""Which parties' nodes are online at this moment, by party name."""


def registered(keys: Mapping[str, bytes]) -> FindNodes:
    """Finds the node of a party by the key that was registered for it, not by what a node says of itself.

    Args:
        keys: The encoded public key of each party's SuperNode, by party name. Public.

    Raises:
        ValueError: If two parties have the same key.
    """
    if len(set(keys.values())) < len(keys):
        raise ValueError("expected another key for each party's SuperNode, got the same one twice")
    names = {key: name for name, key in keys.items()}

    def find(grid: Grid) -> dict[str, Online]:
        known = [node for node in grid.get_nodes() if node.public_key in names]
        return {names[node.public_key]: Online(node.node_id, node.last_activated_at) for node in known}

    return find


@dataclass(slots=True)
class _Asked:
    """What became of the request to one party so far."""

    request: bytes
    message_id: str = ""
    sent_to: Online | None = None
    missed_since: float | None = None


class FlowerExchange:
    """An `Exchange` over a Flower grid.

    A party is asked as soon as its SuperNode is online, and again if that was restarted meanwhile; asking twice is harmless, because a
    node resends what it had stored. Flower notices after two heart beats of 30 seconds that a SuperNode was killed; a party whose
    SuperNode then stays away for a minute is waited for no longer, however much time there is. The transport is not trusted: whose reply
    it is, and for which round, is decided by what is signed inside.

    Args:
        grid: The grid of the run.
        nodes: Which node is whose.
    """

    def __init__(self, grid: Grid, *, nodes: FindNodes) -> None:
        self._grid = grid
        self._nodes = nodes

    def ask(self, requests: Mapping[str, bytes], *, seconds: float) -> dict[str, bytes]:
        """Sends each party its request and waits for the replies; see `privfed.engines.exchange.Exchange`.

        Args:
            requests: A request for each party, by name. Opaque.
            seconds: Longest time to wait, above 0.

        Returns:
            The replies of those that answered in time, by name; possibly of nobody. Opaque.

        Raises:
            ValueError: If `seconds` is not above 0.
        """
        if not seconds > 0:
            raise ValueError(f"expected seconds above 0, got {seconds}")
        end = time.monotonic() + seconds
        asked = {name: _Asked(request) for name, request in requests.items()}
        replies: dict[str, bytes] = {}
        while True:
            self._send(asked, seconds=max(end - time.monotonic(), _SHORTEST_SECONDS))
            by_message = {each.message_id: name for name, each in asked.items() if each.message_id}
            for message in self._grid.pull_messages(list(by_message)) if by_message else ():
                name = by_message.get(message.metadata.reply_to_message_id)
                if name is None or name not in asked:
                    continue
                if message.has_error() and message.error.code == ErrorCode.NODE_UNAVAILABLE:
                    asked[name].message_id, asked[name].sent_to = "", None
                    _LOG.warning("%s: its SuperNode is gone", name)
                    continue
                del asked[name]
                if message.has_error():
                    # The reason in the message is the other side's text, and is not repeated.
                    _LOG.warning("no answer from %s: %s", name, _ERRORS.get(message.error.code, "unknown error"))
                    continue
                try:
                    replies[name] = unseal(message.content)
                except InvalidMessageError:
                    _LOG.warning("no answer from %s: its reply is no message of privfed", name)
            left = end - time.monotonic()
            if not asked:
                return replies
            if left <= 0:
                for name, each in asked.items():
                    _LOG.warning("no answer from %s: %s", name, "it took too long" if each.message_id else _OFFLINE)
                return replies
            time.sleep(min(_POLL_SECONDS, left))

    def _send(self, asked: dict[str, _Asked], *, seconds: float) -> None:
        """Sends what waits for a node that is online by now, and gives up who stays away."""
        online, now = self._nodes(self._grid), time.monotonic()
        for name, each in list(asked.items()):
            node = online.get(name)
            if each.message_id and (node is None or node == each.sent_to):
                continue  # Flower says of itself when a node is gone
            if node is None:
                each.missed_since = now if each.missed_since is None else each.missed_since
                if now - each.missed_since >= _AWAY_SECONDS:
                    _LOG.warning("no answer from %s: %s", name, _OFFLINE)
                    del asked[name]
                continue
            each.missed_since = None
            # Flower writes the group behind the word ROUND into the log of the party's SuperNode.
            group = f"{said_step(each.request)}, {name}".removeprefix(", ")
            message = Message(seal(each.request), node.node_id, "train", ttl=seconds, group_id=group)
            # One at a time: one push of all would hold every party's request in memory at once, and fail for all together.
            each.message_id = next((identifier for identifier in self._grid.push_messages([message]) if identifier), "")
            each.sent_to = node
