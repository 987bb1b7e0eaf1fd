"""What runs at a bank or at the key holder when a FLARE job begins: it hands requests to the party's own node, and returns its replies."""

from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from privfed.engines.flare.messages import MOST_BYTES, REPLY, REQUEST, TASK
from privfed.engines.flare.workspace import party_folder
from privfed.engines.node import Node
from privfed.errors import PrivFedError


class Party(Executor):
    """A bank or the key holder in a FLARE job.

    Its folder is the one in which FLARE's workspace lies: no job can name another. It takes no arguments from the job at all.
    """

    def __init__(self) -> None:
        super().__init__()
        self._node: Node | None = None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Opens the party's folder when the job begins, and lets go of it when it ends."""
        if event_type == EventType.START_RUN:
            try:
                self._node = Node(party_folder(fl_ctx))
            except (PrivFedError, ValueError, OSError) as error:
                self.system_panic(f"this party does not take part: {error}", fl_ctx)
        elif event_type == EventType.END_RUN and self._node is not None:
            self._node.close()
            self._node = None

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:  # noqa: ARG002 -- FLARE's
        """Answers one request. An answer that is under way when the job is aborted is finished, stored, and not sent."""
        request = shareable.get(REQUEST)
        if task_name != TASK or not isinstance(request, bytes):
            return make_reply(ReturnCode.BAD_TASK_DATA)
        if self._node is None:
            return make_reply(ReturnCode.EXECUTION_EXCEPTION)
        reply = self._node.answer(request)
        if len(reply) > MOST_BYTES:
            return make_reply(ReturnCode.EXECUTION_RESULT_ERROR)
        answer = make_reply(ReturnCode.OK)
        answer[REPLY] = reply
        return answer
