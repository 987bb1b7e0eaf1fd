"""How the coordinator's requests travel over FLARE: one task for each party, with one reply.

FLARE itself cuts a message into pieces of 1 MB on the way and takes it together again, and asks again after a broken connection; a party
may so get the same request twice. Site privacy filters see every request and reply.
"""

import math
import time
from collections.abc import Mapping
from typing import Any, final

from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from privfed.engines.flare.messages import MOST_BYTES, REPLY, REQUEST, TASK
from privfed.errors import EngineError

_POLL_SECONDS = 0.1


@final
class FlareExchange:
    """An `Exchange` over the tasks of a FLARE controller.

    Args:
        controller: Whose tasks carry the requests.
        context: FLARE's context of the run.
        abort: Is triggered when the job is aborted.
    """

    def __init__(self, controller: Controller, *, context: FLContext, abort: Signal) -> None:
        self._controller = controller
        self._context = context
        self._abort = abort

    def ask(self, requests: Mapping[str, bytes], *, seconds: float) -> Mapping[str, bytes]:
        """Sends each party its request, all at once.

        Args:
            requests: By name of the party.
            seconds: How long to wait, above 0. Whole seconds for FLARE: it is rounded up.

        Returns:
            The replies of those parties that are in the job and answered in time. Whatever comes later is dropped.

        Raises:
            EngineError: If the job was aborted, or a request is too long for FLARE.
        """
        if any(len(request) > MOST_BYTES for request in requests.values()):
            raise EngineError(
                f"a request is longer than {MOST_BYTES} bytes, which FLARE does not carry; nothing was sent; take a smaller model"
            )
        engine: Any = self._context.get_engine()
        in_job = {client.name for client in engine.get_clients()}
        replies: dict[str, bytes] = {}
        tasks = {name: self._send(name, request, seconds, replies) for name, request in requests.items() if name in in_job}
        deadline = time.monotonic() + seconds
        while any(task.completion_status is None for task in tasks.values()) and time.monotonic() < deadline and not self._abort.triggered:
            time.sleep(_POLL_SECONDS)
        for task in tasks.values():
            if task.completion_status is None:
                self._controller.cancel_task(task, fl_ctx=self._context)
        if self._abort.triggered:
            raise EngineError("the job was aborted; what is stored stays; submit the job again to go on")
        return dict(replies)

    def _send(self, name: str, request: bytes, seconds: float, replies: dict[str, bytes]) -> Task:
        def received(client_task: ClientTask, fl_ctx: FLContext) -> None:  # noqa: ARG001 -- FLARE calls it by these names
            result = client_task.result
            reply = result.get(REPLY) if result is not None and result.get_return_code() == ReturnCode.OK else None
            if isinstance(reply, bytes):
                replies[name] = reply
            client_task.result = None

        data = Shareable()
        data[REQUEST] = request
        task = Task(name=TASK, data=data, timeout=math.ceil(seconds), result_received_cb=received)
        self._controller.broadcast(task, self._context, targets=[name], min_responses=1)
        return task
