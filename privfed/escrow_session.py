"""A client's side of a session in `EscrowKey` mode: it encrypts to the key holder, and cannot decrypt."""

from collections.abc import Mapping
from pathlib import Path

from privfed.agreement import Agreement, RoundContext
from privfed.client import Trainer
from privfed.errors import AgreementMismatchError
from privfed.identity import Identity
from privfed.keys.party import Party
from privfed.protect import Protected, protect
from privfed.session import ClientSession
from privfed.trust import EscrowTrust
from privfed.update import PlainVector, Update


class EscrowSession(ClientSession):
    """One client's side of a session with a key holder.

    Args:
        trainer: The client's training.
        identity: Its signing key.
        party: Its keys, to which the key holder encrypts what it opened. Secret.
        agreement: What the session agreed on.
        start: See `ClientSession`.
        directory: See `ClientSession`.

    Raises:
        AgreementMismatchError: If the agreement is of another trust mode, or names another encryption key of this client.
        PrivFedError: As `ClientSession`.
    """

    def __init__(
        self, *, trainer: Trainer, identity: Identity, party: Party, agreement: Agreement, start: PlainVector, directory: Path
    ) -> None:
        trust = agreement.trust
        if not isinstance(trust, EscrowTrust) or trust.encryption_keys.get(party.name) != party.public.encryption_key:
            raise AgreementMismatchError(
                f"{party.name!r} has another encryption key or trust mode than the agreement names for it; nothing was done; begin with "
                "what was agreed, or agree anew"
            )
        super().__init__(trainer=trainer, identity=identity, agreement=agreement, keys=None, start=start, directory=directory)
        self.party = party
        self._trust = trust

    def key_id(self, context: RoundContext) -> bytes:  # noqa: ARG002 (one key for all rounds)
        """Name of the key holder's key, 16 bytes. Public."""
        return self._trust.key_id

    def keep_scores(self, context: RoundContext, scores: Mapping[str, float]) -> None:
        """Keeps nothing: the scores are the key holder's, and no client sees any."""

    def _protect(self, update: Update[PlainVector], context: RoundContext) -> Protected:
        return protect(update, context, round_key=self._trust, weight=self._trainer.weight)
