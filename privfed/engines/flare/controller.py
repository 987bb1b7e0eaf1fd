"""What runs at the server when a FLARE job begins: the coordinator of a run, without torch and without secret keys."""

import threading
import time
from collections.abc import Callable
from typing import Any

from nvflare.apis.client import Client
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.widgets.info_collector import InfoCollector

from privfed.engines.exchange import TimeOuts
from privfed.engines.flare.exchange import FlareExchange
from privfed.engines.flare.messages import REASON, STATS
from privfed.engines.flare.workspace import party_folder
from privfed.engines.forbidden import forbid_secrets
from privfed.errors import PrivFedError

_POLL_SECONDS = 0.1
_TELLING_SECONDS = 10.0


class Coordinator(Controller):
    """The server of a run in a FLARE job. It goes on where its folder stands.

    Args:
        rounds: Number of rounds of the whole run, at least 1.
        time_outs: Seconds to wait, by step, where they are not those of `TimeOuts`.

    Raises:
        ValueError: If `rounds` is below 1, or a time-out is none.
    """

    def __init__(self, rounds: int, time_outs: dict[str, float] | None = None) -> None:
        super().__init__()
        if type(rounds) is not int or rounds < 1:
            raise ValueError(f"expected at least 1 round, got {rounds!r}")
        try:
            self._time_outs = TimeOuts(**time_outs or {})
        except TypeError:
            raise ValueError(f"expected time-outs of the steps of a round, got {sorted(time_outs or {})}") from None
        self._rounds = rounds
        self._reason = ""
        self._told = threading.Event()
        self._joined: set[str] = set()

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Nothing: the run begins in `control_flow`."""

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Runs all rounds that are left. A round that fails ends the job as failed when all are over, and so does what is refused.

        The reason stands in the server's log, and the operator who waits for the end is told. However early the run is over, the job does
        not end before every party that is in it has joined.
        """
        panic = ""
        try:
            self._hold_rounds(abort_signal, fl_ctx)
        except (PrivFedError, ValueError, OSError) as error:
            # Errors of privfed are for all to read; what another library says of a file is for this host alone.
            self._reason = str(error) if isinstance(error, PrivFedError) else f"{type(error).__name__} at the server; see its output"
            # FLARE keeps no reason of a job's end, so the operator's command asks while the job still runs.
            _wait_until(self._told.is_set, seconds=_TELLING_SECONDS, abort=abort_signal)
            panic = f"the run ended: {error}"
        finally:
            # Who joins after the end has nobody to say so: it asks for a task for ever, and FLARE waits for it.
            _wait_until(lambda: self._all_joined(fl_ctx), seconds=self._time_outs.status, abort=abort_signal)
        if panic:
            self.system_panic(panic, fl_ctx)

    def _hold_rounds(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        forbid_secrets()
        from privfed.engines.coordinator import coordinate  # noqa: PLC0415 -- after what it must not load was forbidden

        exchange = FlareExchange(self, context=fl_ctx, abort=abort_signal)
        coordinate(party_folder(fl_ctx), exchange, rounds=self._rounds, time_outs=self._time_outs).check_held()

    def _all_joined(self, fl_ctx: FLContext) -> bool:
        engine: Any = fl_ctx.get_engine()
        there = {client.name for client in engine.get_clients() if self.get_client_disconnect_time(client.name) is None}
        return there <= self._joined

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Takes note of who joined, and says why the run failed, to who asks for the statistics of the job."""
        super().handle_event(event_type, fl_ctx)
        if event_type == EventType.BEFORE_PROCESS_TASK_REQUEST:
            peer: Any = fl_ctx.get_peer_context()
            self._joined.add(peer.get_identity_name())
        elif event_type == InfoCollector.EVENT_TYPE_GET_STATS and self._reason:
            collector: Any = fl_ctx.get_prop(InfoCollector.CTX_KEY_STATS_COLLECTOR)
            collector.set_info(STATS, {REASON: self._reason})
            self._told.set()

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Nothing is held open."""

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """A late reply: it is dropped."""


def _wait_until(happened: Callable[[], bool], *, seconds: float, abort: Signal) -> None:
    """Returns when it has happened, or so many seconds are over, or the job is aborted."""
    deadline = time.monotonic() + seconds
    while not happened() and time.monotonic() < deadline and not abort.triggered:
        time.sleep(_POLL_SECONDS)
