"""A client's side of a session in `ThresholdKey` mode: a fresh secret for every attempt, shares of it, and one answer a round."""

from pathlib import Path

from privfed.agreement import Agreement, RoundContext
from privfed.approval import Answer
from privfed.client import Trainer
from privfed.errors import KeyErasedError, OpeningRefusedError
from privfed.he.threshold import key_id
from privfed.he.threshold_secret import SummandKey
from privfed.identity import Identity
from privfed.keys.party import Party
from privfed.protect import Protected, protect
from privfed.session import ClientSession, outbox_name
from privfed.session_checks import agreed_trust
from privfed.sharing import answer, check_shares, deal
from privfed.trust import ThresholdTrust
from privfed.update import PlainVector, Update


class ThresholdSession(ClientSession):
    """One client's side of a session in which nobody holds a key.

    The secret of an attempt is in this object alone, from `setup` to the upload: when it is lost before, nothing was encrypted under
    it, and the attempt goes on without this client, or a new one begins. The shares that came from the others are kept as they came,
    encrypted; so a client that was restarted after its upload still answers.

    Args:
        trainer: The client's training.
        identity: Its signing key.
        party: Its keys, for which the others encrypt their shares. Secret.
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
        trust = agreed_trust(ThresholdTrust, party=party, identity=identity, agreement=agreement)
        super().__init__(trainer=trainer, identity=identity, agreement=agreement, keys=None, start=start, directory=directory)
        self._party = party
        self._trust = trust
        self._secret: SummandKey | None = None

    def key_id(self, context: RoundContext) -> bytes:
        """Name of the public polynomials of a round, 16 bytes. Public."""
        return key_id(context.digest)

    def setup(self, context: RoundContext) -> bytes:
        """The setup message: shares of this client's fresh secret for all. Again, it returns the stored bytes.

        Raises:
            HistoryMismatchError: If this client has not opened the rounds that the context builds on.
            OpeningRefusedError: If it answered for an earlier round whose sum never came to it, and it trains without noise.
        """
        self.check_history(context)
        self._check_answered(context)
        name = _setup_name(context)
        if not self._outbox.has(name):
            secret = SummandKey(params=context.agreement.params, binding=context.digest)
            self._outbox.put(name, deal(secret, context, self._identity, self._trust))
            self._secret = secret
        return self._outbox.get(name)

    def approve(self, context: RoundContext, digest: bytes) -> bytes:
        """Checks the server's digest, and signs it with the answer for its sum.

        Raises:
            OpeningRefusedError: As `setup`: what this client uploaded before it answered for another round is of the same model.
            PrivFedError: As `ClientSession.approve`.
        """
        self._check_answered(context)
        return super().approve(context, digest)

    def _check_answered(self, context: RoundContext) -> None:
        """Refuses two sums from one model, of which the server may hold one already: the difference would show who is new.

        Noise of differential privacy is fresh each time, and charged for both sums.
        """
        waiting = [number for number in self.journal.promises(context.agreement.session) if number not in self.state.rounds]
        if not self._trainer.adds_noise and any(number != context.round for number in waiting):
            raise OpeningRefusedError(
                f"{self.name!r} answered for round {waiting[0]} and its sum never came: the server may know it, and the difference to "
                "another sum from the same model would show single updates; nothing was done; have that sum handed over, or train with "
                "DP-SGD"
            )

    def take_shares(self, context: RoundContext, data: bytes) -> None:
        """Checks and keeps what the other clients made for this one. It comes before the upload.

        Raises:
            OpeningRefusedError: If other shares were kept before, or this client's own is not among them.
            ShareRefusedError: If a share cannot be used; it says whose, and nothing was kept.
            PrivFedError: As `check_history` and `wire_shares.decode_relay`.
        """
        self.check_history(context)
        senders = check_shares(data, context, self._party)
        if self.name not in senders:
            raise OpeningRefusedError(f"the shares that came to {self.name!r} lack its own; nothing was kept; begin a new attempt")
        try:
            self._outbox.put(_shares_name(context), data)
        except FileExistsError:
            raise OpeningRefusedError(
                f"other shares of round {context.round} came to {self.name!r} before; these were dropped; begin a new attempt"
            ) from None

    def key_lost(self, context: RoundContext) -> bool:
        """Whether this client dealt a secret for the attempt, and cannot encrypt under it any more: a new attempt is needed for it."""
        if self._outbox.has(outbox_name(context)) or not self._outbox.has(_setup_name(context)):
            return False
        return self._current(context) is None

    def _current(self, context: RoundContext) -> SummandKey | None:
        secret = self._secret
        return secret if secret is not None and secret.binding == context.digest and not secret.used else None

    def _check_ready(self, context: RoundContext) -> None:
        if self._current(context) is None:
            raise KeyErasedError(
                f"the secret of {self.name!r} for this attempt at round {context.round} went with the process that made it; nothing was "
                "trained or charged; begin a new attempt, or go on without this client"
            )
        if not self._outbox.has(_shares_name(context)):
            raise OpeningRefusedError(
                f"the shares of the others have not come to {self.name!r}; nothing was trained or charged; they come before the upload"
            )

    def _protect(self, update: Update[PlainVector], context: RoundContext) -> Protected:
        secret = self._current(context)
        if secret is None:
            raise KeyErasedError(f"the secret of {self.name!r} for this attempt is gone; nothing was encrypted; begin a new attempt")
        try:
            return protect(update, context, round_key=secret)
        finally:
            if secret.used:
                self._secret = None

    def _answer(self, context: RoundContext) -> Answer:
        def answered(participants: tuple[str, ...]) -> bytes:
            kept = self._outbox.get(_shares_name(context))
            return answer(kept, context, self._party, participants=participants)

        return answered


def _setup_name(context: RoundContext) -> str:
    return f"{outbox_name(context)}-setup"


def _shares_name(context: RoundContext) -> str:
    return f"{outbox_name(context)}-shares"
