"""The server's way to the other parties: one message to each SuperNode, and what came back in time."""

import logging
import time
from collections.abc import Callable, Mapping

from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from privfed.engines.flower.envelope import seal, unseal
from privfed.errors import InvalidMessageError

_LOG = logging.getLogger("privfed.engines.flower")
_POLL_SECONDS = 0.5
_SHORTEST_SECONDS = 0.001
_ERRORS = {
    ErrorCode.LOAD_CLIENT_APP_EXCEPTION: "its app could not be loaded",
    ErrorCode.CLIENT_APP_RAISED_EXCEPTION: "its app failed",
    ErrorCode.CLIENT_APP_CRASHED: "its app crashed",
    ErrorCode.MESSAGE_UNAVAILABLE: "the message expired",
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: "its reply expired",
    ErrorCode.NODE_UNAVAILABLE: "its SuperNode is gone",
    ErrorCode.INVALID_FAB: "it refuses the app",
}

FindNodes = Callable[[Grid], Mapping[str, int]]
"""Which node is whose, at this moment: node ids by party name, of nodes that are online."""


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
    return lambda grid: {names[node.public_key]: node.node_id for node in grid.get_nodes() if node.public_key in names}


class FlowerExchange:
    """An `Exchange` over a Flower grid.

    A party is asked as soon as its SuperNode is online, and again if the SuperNode was restarted within the time; asking twice is
    harmless, because a node resends what it had stored. The transport is not trusted: whose reply it is, and for which round, is
    decided by what is signed inside.

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
            seconds: Time to wait, above 0.

        Returns:
            The replies of those that answered in time, by name; possibly of nobody. Opaque.

        Raises:
            ValueError: If `seconds` is not above 0.
        """
        if not seconds > 0:
            raise ValueError(f"expected seconds above 0, got {seconds}")
        end = time.monotonic() + seconds
        waiting, sent, replies = dict(requests), dict[str, str](), dict[str, bytes]()
        while True:
            sent |= self._send(waiting, seconds=max(end - time.monotonic(), _SHORTEST_SECONDS))
            for message in self._grid.pull_messages(list(sent)) if sent else ():
                name = sent.pop(message.metadata.reply_to_message_id, None)
                if name is None:
                    continue
                if message.has_error():
                    self._failed(name, message, requests=requests, waiting=waiting)
                    continue
                try:
                    replies[name] = unseal(message.content)
                except InvalidMessageError:
                    _LOG.warning("no answer from %s: its reply is no message of privfed", name)
            left = end - time.monotonic()
            if not waiting and not sent:
                return replies
            if left <= 0:
                for name in sorted({*waiting, *sent.values()}):
                    _LOG.warning("no answer from %s: %s", name, "its SuperNode is not online" if name in waiting else "it took too long")
                return replies
            time.sleep(min(_POLL_SECONDS, left))

    def _send(self, waiting: dict[str, bytes], *, seconds: float) -> dict[str, str]:
        """Sends what waits for a node that is online by now.

        Returns:
            The party that was asked, by message id.
        """
        if not waiting:
            return {}
        online = self._nodes(self._grid)
        sent: dict[str, str] = {}
        for name in [name for name in waiting if name in online]:
            message = Message(seal(waiting[name]), online[name], "train", ttl=seconds)
            # One at a time: one push of all would hold every party's request in memory at once, and fail for all together.
            for message_id in self._grid.push_messages([message]):
                if message_id:  # None, where the node went away in between: it waits on
                    sent[message_id] = name
                    del waiting[name]
        return sent

    @staticmethod
    def _failed(name: str, message: Message, *, requests: Mapping[str, bytes], waiting: dict[str, bytes]) -> None:
        code = message.error.code
        if code == ErrorCode.NODE_UNAVAILABLE:
            waiting[name] = requests[name]
        # The reason in the message is the other side's text, and is not repeated.
        _LOG.warning("no answer from %s yet: %s" if name in waiting else "no answer from %s: %s", name, _ERRORS.get(code, "unknown"))
