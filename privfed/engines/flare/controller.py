"""What runs at the server when a FLARE job begins: the coordinator of a run, without torch and without secret keys."""

from nvflare.apis.client import Client
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from privfed.engines.exchange import TimeOuts
from privfed.engines.flare.exchange import FlareExchange
from privfed.engines.flare.workspace import party_folder
from privfed.engines.forbidden import forbid_secrets
from privfed.errors import PrivFedError


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

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Nothing: the run begins in `control_flow`."""

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Runs all rounds that are left. What the protocol refuses ends the job, with the reason in the server's log."""
        forbid_secrets()
        from privfed.engines.coordinator import coordinate  # noqa: PLC0415 -- after what it must not load was forbidden

        exchange = FlareExchange(self, context=fl_ctx, abort=abort_signal)
        try:
            coordinate(party_folder(fl_ctx), exchange, rounds=self._rounds, time_outs=self._time_outs)
        except (PrivFedError, ValueError, OSError) as error:
            self.system_panic(f"the run ended: {error}", fl_ctx)

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Nothing is held open."""

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """A late reply: it is dropped."""
