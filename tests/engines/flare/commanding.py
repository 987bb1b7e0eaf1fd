"""A server that sends the banks FLARE's own commands, and does not ask them to check who gave them."""

import json
import time
from typing import Any

from nvflare.apis.client import Client
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
from nvflare.private.admin_defs import Message
from nvflare.private.defs import CellChannel, RequestHeader, new_cell_message

ANSWERED = "ANSWERED "


class CommandingCoordinator(Controller):
    """Sends every command to each of these banks, and writes their answers into the server's log."""

    def __init__(self, banks: list[str], commands: list[list[str]], job_commands: list[str]) -> None:
        super().__init__()
        self.banks, self.commands, self.job_commands = banks, commands, job_commands

    def start_controller(self, fl_ctx: FLContext) -> None: ...
    def stop_controller(self, fl_ctx: FLContext) -> None: ...
    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None: ...

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        engine: Any = fl_ctx.get_engine()
        cell, job = engine.get_cell(), fl_ctx.get_job_id()
        answers = {bank: self._answers(cell, job, bank) for bank in self.banks}
        self.log_info(fl_ctx, ANSWERED + json.dumps(answers))

    def _answers(self, cell: Any, job: str, bank: str) -> dict[str, str]:
        answers: dict[str, str] = {}
        for topic, body in self.commands:
            message = Message(topic=topic, body=body)
            message.set_header(RequestHeader.JOB_ID, job)
            reply = cell.send_request(
                channel=CellChannel.CLIENT_MAIN, topic="admin", target=bank, request=new_cell_message({}, message), timeout=20
            )
            answers[topic] = repr(getattr(reply.payload, "body", reply.get_header(MessageHeaderKey.RETURN_CODE)))
        for topic in self.job_commands:
            for _ in range(60):  # the bank's job may still be starting
                reply = cell.send_request(
                    channel=CellChannel.CLIENT_COMMAND,
                    topic=topic,
                    target=f"{bank}.{job}",
                    request=new_cell_message({}, "DEBUG"),
                    timeout=10,
                )
                answers[topic] = f"{reply.get_header(MessageHeaderKey.RETURN_CODE)} {reply.payload!r}"
                if reply.get_header(MessageHeaderKey.RETURN_CODE) in (ReturnCode.OK, ReturnCode.INVALID_REQUEST):
                    break
                time.sleep(0.5)
        return answers
