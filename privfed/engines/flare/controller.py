"""What runs at the server when a FLARE job begins: the coordinator of a run, without torch and without secret keys."""

from nvflare.apis.controller_spec import ClientTask
from nvflare.apis.client import Client
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from privfed.engines.flare.exchange import FlareExchange
from privfed.engines.flare.workspace import party_folder


class Coordinator(Controller):
    def __init__(self, rounds: int) -> None:
        super().__init__()
        self._rounds = rounds

    def start_controller(self, fl_ctx: FLContext) -> None:
        pass

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        import time, sys

        exchange = FlareExchange(self, context=fl_ctx, abort=abort_signal)
        folder = party_folder(fl_ctx)
        for size in (10, 80_000_000):
            for _ in range(self._rounds):
                t = time.time()
                r = exchange.ask({n: bytes(size) for n in ("bank_a", "bank_b", "bank_c", "nobody")}, seconds=60)
                self.log_info(
                    fl_ctx,
                    f"ECHO {size} {sorted((n, len(v)) for n, v in r.items())} {time.time() - t:.2f} s torch={'torch' in sys.modules} {folder}",
                )

    def stop_controller(self, fl_ctx: FLContext) -> None:
        pass

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        pass
