"""Encrypted rounds among parties on this machine: each with its own folder, exchanging wire bytes."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from privfed.agreement import RoundContext
from privfed.client import Trainer
from privfed.engines.site import Site
from privfed.engines.spawned import SpawnedServer
from privfed.errors import CohortError, DamagedFileError
from privfed.round import Participant, RoundRecord, RoundServer, Stage, check_same_model, run_round
from privfed.server import Server
from privfed.session import ClientSession
from privfed.update import Aggregate, PlainVector

if TYPE_CHECKING:
    from privfed.he.secret import SharedKey


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    context: RoundContext
    selected: tuple[str, ...]


class EncryptedRounds:
    """The parties of an encrypted run.

    Args:
        site: The run's folder.
        keys: The clients' shared key.
        trainers: Each client's training, by name.
        initial: Weights from which the run starts.
        separate_server: Whether the server is a process of its own.
        stack: Ends what must be ended with the run.
    """

    def __init__(
        self,
        *,
        site: Site,
        keys: "SharedKey",
        trainers: Mapping[str, Trainer],
        initial: PlainVector,
        separate_server: bool,
        stack: ExitStack,
    ) -> None:
        self._site = site
        self.participants = {
            name: Participant(
                ClientSession(
                    trainer=trainers[name],
                    identity=identity,
                    agreement=site.agreement,
                    keys=keys,
                    start=initial,
                    directory=site.client(name),
                )
            )
            for name, identity in site.clients.items()
        }
        for participant in self.participants.values():
            stack.callback(participant.session.close)
        self.spawned = (
            stack.enter_context(SpawnedServer(agreement=site.agreement, identity_path=site.server_identity_path, spool=site.spool))
            if separate_server
            else None
        )
        self._opened: list[_Opened] = []
        self._history = RoundContext(agreement=site.agreement, round=0).history

    @property
    def model(self) -> PlainVector:
        """The weights at the client that has opened the most rounds."""
        return max((participant.session.state for participant in self.participants.values()), key=lambda state: len(state.rounds)).values

    def context(self, number: int) -> RoundContext:
        """The context of the next round."""
        return RoundContext(agreement=self._site.agreement, round=number, history=self._history)

    def was_held(self, number: int, selected: Sequence[str], record: RoundRecord) -> None:
        """Takes note of a round that was held, now or before a restart."""
        self._opened.append(_Opened(context=self.context(number), selected=tuple(selected)))
        self._history = bytes.fromhex(record.history)

    def hold(
        self, number: int, *, selected: Sequence[str], silent: Mapping[str, Stage]
    ) -> tuple[RoundRecord, Aggregate[PlainVector] | None]:
        """Holds one round, or goes on with it where it was interrupted.

        Returns:
            Its record, and the aggregate, if a client opened it just now.

        Raises:
            CohortError: If too few answered; nothing was opened.
            PrivFedError: As `run_round`.
        """
        answering = {name: client for name, client in self.participants.items() if silent.get(name) is not Stage.SETUP}
        behind = [name for name, client in answering.items() if not self._catch_up(client)]
        context = self.context(number)
        check_same_model([participant.session for participant in self.participants.values()])
        record = run_round(
            server=self._server(context, selected),
            clients={name: client for name, client in self.participants.items() if name not in behind},
            context=context,
            selected=[name for name in selected if name not in behind],
            silent=silent,
        )
        check_same_model([participant.session for participant in self.participants.values()])
        self.was_held(number, selected, record)
        opened = [client.opened for client in self.participants.values() if client.opened is not None]
        return record, next((aggregate for aggregate in opened if aggregate.round == number), None)

    def _catch_up(self, client: Participant) -> bool:
        """Opens the rounds that a client missed, in their order; False if the server has lost one of them."""
        for missed in self._opened:
            if missed.context.round not in client.opened_rounds():
                server = self._server(missed.context, missed.selected)
                try:
                    products = server.products() if missed.context.agreement.scored else b""
                    data = server.aggregate()
                except (CohortError, DamagedFileError):
                    return False
                if products:
                    client.weigh(missed.context, products)
                client.open(missed.context, data)
        return True

    def _server(self, context: RoundContext, selected: Sequence[str]) -> RoundServer:
        if self.spawned is not None:
            return self.spawned.begin(context, selected)
        return Server(context=context, identity=self._site.server, selected=selected, spool=self._site.spool)
