"""The key holder that answers requests, from its own folder. It needs no torch."""

from pathlib import Path

from privfed.agreement import Agreement, RoundContext
from privfed.engines.envelope import Answer, Request
from privfed.engines.party_folder import ESCROW_KEY, STATE
from privfed.engines.site_code import with_rule
from privfed.errors import CohortError, InvalidMessageError, PrivFedError, TamperedAggregateError
from privfed.escrow import EscrowHolder
from privfed.identity import Identity
from privfed.keys.load import load_escrow_key
from privfed.phases import Step
from privfed.spool import Spool
from privfed.wire import check_upload
from privfed.wire_escrow import decode_request


class Holder:
    """The key holder's side of a session, opened from its folder.

    Uploads come one at a time, each signed by its client, and are kept until the sum was opened.

    Args:
        folder: The key holder's; see `privfed.engines.party_folder`.
        agreement: What is in it.
        identity: The key holder's signing key.

    Raises:
        PrivFedError: As `EscrowHolder`.
        ValueError: If the rule is known by its name alone, and `rule.py` does not define it.
    """

    def __init__(self, folder: Path, *, agreement: Agreement, identity: Identity) -> None:
        self.agreement = agreement = with_rule(agreement, folder)
        self._name = identity.name
        key = load_escrow_key(folder / ESCROW_KEY)
        self._holder = EscrowHolder(identity=identity, key=key, agreement=agreement, directory=folder / STATE)
        self._uploads = Spool(folder / STATE / "uploads")
        self.seeded = False

    @property
    def epsilon(self) -> None:
        """A key holder spends nothing."""

    def answer(self, request: Request) -> tuple[Answer, PrivFedError | None]:
        """Announces its key of an attempt, keeps an upload, or opens the sum of a round.

        Raises:
            PrivFedError: As `EscrowHolder.open`, and if an upload is not authentic.
            ValueError: If a key holder is not asked for this step.
        """
        match request.step:
            case Step.STATUS:
                return Answer(name=self._name), None
            case Step.ANNOUNCE:
                return Answer(name=self._name, payload=self._holder.announce_key(request.context)), None
            case Step.STORE:
                self._store(request)
                return Answer(name=self._name), None
            case Step.HOLD:
                return self._hold(request), None
            case _:
                raise ValueError(f"expected a step of a key holder, got {request.step.name}")

    def opened(self, request: Request) -> dict[str, object] | None:
        """What the key holder keeps of a round that it published: for its record of rounds."""
        if request.step is not Step.HOLD:
            return None
        return {"round": request.context.round, "attempt": request.context.attempt}

    def close(self) -> None:
        """Nothing is held open."""

    def _store(self, request: Request) -> None:
        if request.about not in self.agreement.roster.names:
            raise InvalidMessageError
        check_upload(request.payload, request.context, sender=request.about)
        try:
            self._uploads.put(_upload_name(request.context, request.about), request.payload)
        except FileExistsError:
            raise InvalidMessageError from None

    def _hold(self, request: Request) -> Answer:
        context = request.context

        def stored(name: str) -> bytes:
            file = _upload_name(context, name)
            if not self._uploads.has(file):
                raise _LackingError(f"the upload of {name!r} has not come; nothing was opened")
            return self._uploads.get(file)

        try:
            published = self._holder.open(context, request.payload, stored)
        except _LackingError:
            participants = decode_request(request.payload, context, self._holder.key_id(context)).digest.participants
            lacking = [name for name in participants if not self._uploads.has(_upload_name(context, name))]
            return Answer(name=self._name, facts={"lacking": lacking})
        except TamperedAggregateError:
            self._forget(context)
            raise
        self._forget(context)
        return Answer(name=self._name, payload=published)

    def _forget(self, context: RoundContext) -> None:
        """Removes the uploads of this round, and of earlier ones that never opened: they are with the server, and were only lent."""
        for name in self._uploads.names(""):
            number = name.partition("-")[0]
            if number.isdecimal() and int(number) <= context.round:  # what a crash left unfinished has no number
                self._uploads.path(name).unlink()


class _LackingError(CohortError):
    """An upload has not come yet."""


def _upload_name(context: RoundContext, name: str) -> str:
    return f"{context.round}-{context.attempt}-{name}"
