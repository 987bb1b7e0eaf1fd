"""Banks whose messages are changed on the way: what travels is not what their node answered."""

from privfed.engines.envelope import open_request
from privfed.engines.flare.executor import Party
from privfed.engines.node import Node
from privfed.phases import Step


class _Changed:
    """A node between which and FLARE somebody sits."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._earlier: dict[Step, bytes] = {}

    def answer(self, request: bytes) -> bytes:
        step = open_request(request, self._node._agreement).step
        answer = self._node.answer(request)
        return self.changed(step, answer)

    def changed(self, step: Step, answer: bytes) -> bytes:
        raise NotImplementedError

    def close(self) -> None:
        self._node.close()


class _Tampered(_Changed):
    """One bit of the upload is flipped."""

    def changed(self, step: Step, answer: bytes) -> bytes:
        if step is not Step.UPLOAD:
            return answer
        middle = len(answer) // 2
        return answer[:middle] + bytes([answer[middle] ^ 1]) + answer[middle + 1 :]


class _Stale(_Changed):
    """The upload of the round before is sent again."""

    def changed(self, step: Step, answer: bytes) -> bytes:
        if step is not Step.UPLOAD:
            return answer
        return self._earlier.setdefault(step, answer)


class _Between(Party):
    kind: type[_Changed]

    def handle_event(self, event_type: str, fl_ctx: object) -> None:
        super().handle_event(event_type, fl_ctx)  # pyright: ignore[reportArgumentType]
        if isinstance(self._node, Node):
            self._node = self.kind(self._node)  # pyright: ignore[reportAttributeAccessIssue]


class TamperedParty(_Between):
    kind = _Tampered


class StaleParty(_Between):
    kind = _Stale
