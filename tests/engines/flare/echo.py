"""A job whose banks send back what they got: how long messages may be, without anything to compute."""

import time

from nvflare.apis.client import Client
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from privfed.engines.flare.exchange import FlareExchange
from privfed.engines.flare.executor import Party


class _Echo:
    def answer(self, request: bytes) -> bytes:
        return request[::-1]

    def close(self) -> None: ...


class EchoParty(Party):
    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        self._node = _Echo()


class EchoCoordinator(Controller):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def start_controller(self, fl_ctx: FLContext) -> None: ...
    def stop_controller(self, fl_ctx: FLContext) -> None: ...
    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None: ...

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        exchange = FlareExchange(self, context=fl_ctx, abort=abort_signal)
        requests = {name: name.encode() * (self.size // len(name)) for name in ("bank_a", "bank_b", "bank_c")}
        begun = time.monotonic()
        replies = exchange.ask(requests, seconds=120)
        if replies != {name: request[::-1] for name, request in requests.items()}:
            raise RuntimeError("the replies are not those to the requests")
        seconds = time.monotonic() - begun
        self.log_info(fl_ctx, f"ECHO of {len(replies)} x {self.size} bytes took {seconds:.2f} s")
        if exchange.ask({"a_stranger": b"hello"}, seconds=1):
            raise RuntimeError("a stranger answered")
