"""Flower's grid in this process: the messages that the adapter sends reach the parties' app at once."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from uuid import uuid4

from flwr.app import Context, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

Handler = Callable[[Message, Context], Message | None]


@contextmanager
def a_task() -> Iterator[None]:
    """Since 1.38, messages can be made only where Flower has said which task this process runs."""
    before = dict(TaskIdentity.__dict__)
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    yield
    TaskIdentity._run_id, TaskIdentity._node_id, TaskIdentity._task_id = before["_run_id"], before["_node_id"], before["_task_id"]


@dataclass
class ANode:
    """A party's SuperNode. Without a handler nothing comes back; offline until the moment `online_from` (of `time.monotonic`)."""

    handler: Handler | None
    config: dict[str, str] = field(default_factory=dict)
    key: bytes = b""
    online_from: float = 0.0
    gone_after: int = 10**9
    online_again: float = 1.0
    restarts_after: int = 10**9
    since: str = "first"
    received: list[Message] = field(default_factory=list)


class InProcessGrid(Grid):
    def __init__(self, nodes: dict[int, ANode]) -> None:
        self.nodes = nodes
        self.replies: dict[str, Message] = {}

    def set_run(self, run: object) -> None: ...
    @property
    def run(self) -> object: ...
    def create_message(self, *args: object, **kwargs: object) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return [number for number, node in self.nodes.items() if time.monotonic() >= node.online_from]

    def get_nodes(self) -> Iterable[NodeInfo]:
        known = [(number, self.nodes[number]) for number in self.get_node_ids()]
        return [NodeInfo(node_id=number, public_key=node.key, last_activated_at=node.since) for number, node in known]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        identifiers = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = identifier = str(uuid4())
            identifiers.append(identifier)
            node = self.nodes[message.metadata.dst_node_id]
            node.received.append(message)
            if len(node.received) > node.gone_after:
                node.gone_after, node.online_from = 10**9, time.monotonic() + node.online_again
                self.replies[identifier] = Message(Error(ErrorCode.NODE_UNAVAILABLE, ""), reply_to=message)
            elif len(node.received) > node.restarts_after:
                node.restarts_after, node.since = 10**9, "second"  # before Flower has noticed that it was gone
            elif node.handler is not None:
                context = Context(run_id=1, node_id=1, node_config=node.config, state=RecordDict(), run_config={})
                try:
                    reply = node.handler(message, context)
                except Exception as error:  # noqa: BLE001 -- as Flower's runner does
                    reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, str(error)), reply_to=message)
                if reply is not None:
                    self.replies[identifier] = reply
        return identifiers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.replies.pop(identifier) for identifier in message_ids if identifier in self.replies]

    def send_and_receive(self, *args: object, **kwargs: object) -> Iterable[Message]:
        raise NotImplementedError
