"""Encrypted rounds among parties on this machine: each with its own folder, exchanging wire bytes."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from privfed.agreement import RoundContext
from privfed.client import Trainer
from privfed.consortium import is_escrow
from privfed.engines.site import Site
from privfed.engines.spawned import SpawnedServer
from privfed.errors import CohortError, DamagedFileError
from privfed.escrow import EscrowHolder
from privfed.escrow_session import EscrowSession
from privfed.he.threshold import ThresholdKey
from privfed.phases import RoundServer
from privfed.round import Participant, check_same_model, run_round
from privfed.round_record import RoundRecord, Stage
from privfed.server import Server
from privfed.session import ClientSession
from privfed.threshold_session import ThresholdSession
from privfed.update import Aggregate, PlainVector

if TYPE_CHECKING:
    from privfed.he.escrow_secret import EscrowKey
    from privfed.he.secret import SharedKey


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    context: RoundContext
    selected: tuple[str, ...]


class EncryptedRounds:
    """The parties of an encrypted run.

    Args:
        site: The run's folder.
        keys: The clients' shared key, how many of them open together, or the key holder's key.
        trainers: Each client's training, by name.
        initial: Weights from which the run starts.
        separate_server: Whether the server is a process of its own.
        stack: Ends what must be ended with the run.
    """

    def __init__(
        self,
        *,
        site: Site,
        keys: "SharedKey | ThresholdKey | EscrowKey",
        trainers: Mapping[str, Trainer],
        initial: PlainVector,
        separate_server: bool,
        stack: ExitStack,
    ) -> None:
        self._site = site
        self.participants: dict[str, Participant] = {}
        for name, identity in site.clients.items():
            terms: dict[str, Any] = {"trainer": trainers[name], "identity": identity, "agreement": site.agreement}
            place: dict[str, Any] = {"start": initial, "directory": site.client(name)}
            session: ClientSession
            if isinstance(keys, ThresholdKey):
                session = ThresholdSession(**terms, party=site.parties[name], **place)
            elif is_escrow(keys):
                session = EscrowSession(**terms, party=site.parties[name], **place)
            else:
                shared: dict[str, Any] = {"keys": keys}
                session = ClientSession(**terms, **shared, **place)
            stack.callback(session.close)
            self.participants[name] = Participant(session)
        self.holder = (
            EscrowHolder(identity=site.holder, key=keys, agreement=site.agreement, directory=site.holder_folder)
            if site.holder is not None and is_escrow(keys)
            else None
        )
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

    def context(self, number: int, *, attempt: int = 0) -> RoundContext:
        """The context of the next round."""
        return RoundContext(agreement=self._site.agreement, round=number, attempt=attempt, history=self._history)

    def was_held(self, number: int, selected: Sequence[str], record: RoundRecord) -> None:
        """Takes note of a round that was held, now or before a restart."""
        self._opened.append(_Opened(context=self.context(number, attempt=record.attempt), selected=tuple(selected)))
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
        context = self._attempt(number, selected)
        check_same_model([participant.session for participant in self.participants.values()])
        record = run_round(
            server=self._server(context, selected),
            clients={name: client for name, client in self.participants.items() if name not in behind},
            context=context,
            selected=[name for name in selected if name not in behind],
            silent=silent,
            holder=self.holder,
        )
        check_same_model([participant.session for participant in self.participants.values()])
        self.was_held(number, selected, record)
        opened = [client.opened for client in self.participants.values() if client.opened is not None]
        return record, next((aggregate for aggregate in opened if aggregate.round == number), None)

    def _attempt(self, number: int, selected: Sequence[str]) -> RoundContext:
        """The attempt at a round that can be held: a client that was restarted between its setup and its upload needs a new one.

        Not once the digest is announced: then everybody in it has uploaded.
        """
        context = self.context(number)
        sessions = [participant.session for participant in self.participants.values()]
        while any(isinstance(session, ThresholdSession) and session.key_lost(context) for session in sessions):
            if self._server(context, selected).participants():
                break
            context = self.context(number, attempt=context.attempt + 1)
        return context

    def _catch_up(self, client: Participant) -> bool:
        """Opens the rounds that a client missed, in their order; False if the server has lost one of them."""
        for missed in self._opened:
            if missed.context.round not in client.opened_rounds():
                server = self._server(missed.context, missed.selected)
                try:
                    products = server.products() if missed.context.agreement.weighed_by_clients else b""
                    data = server.result()
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
