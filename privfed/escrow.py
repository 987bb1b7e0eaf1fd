"""`EscrowKey`: the one key holder, and how a client opens what it published."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from privfed.agreement import Agreement, RoundContext
from privfed.approval import check_digest
from privfed.digest import hash_message
from privfed.errors import AgreementMismatchError, AlreadyOpenedError, TamperedAggregateError
from privfed.files import make_folder
from privfed.he.escrow import RunningSum, WholeVector
from privfed.he.escrow_secret import EscrowKey
from privfed.identity import Identity
from privfed.journal import Journal
from privfed.keyholder import Opener, check_all_approved
from privfed.keys.party import Party
from privfed.release import open_release, seal_release
from privfed.spool import Spool
from privfed.trust import EscrowTrust
from privfed.wire import decode_upload
from privfed.wire_aggregate import OpenableAggregate, SealedSum, SignedHeads, Total
from privfed.wire_escrow import decode_opened, decode_request, encode_opened


class EscrowHolder:
    """The key holder's side of a session. It neither trains nor holds a model, and it trusts no sum that it did not compute.

    Args:
        identity: Its signing key, which the agreement pins.
        key: Its key. Secret.
        agreement: What the session agreed on.
        directory: Its own folder, for what it promised and what it published; made with mode 0700 if it is not there.

    Raises:
        AgreementMismatchError: If the agreement is of another trust mode, or pins another holder.
    """

    def __init__(self, *, identity: Identity, key: EscrowKey, agreement: Agreement, directory: Path) -> None:
        trust = agreement.trust
        if not isinstance(trust, EscrowTrust) or trust.holder != identity.public:
            raise AgreementMismatchError(f"the agreement pins another key holder than {identity.name!r}; nothing was done")
        make_folder(directory)
        self._identity = identity
        self._key = key
        self._trust = trust
        self._journal = Journal(directory / "journal.sqlite")
        self._outbox = Spool(directory / "outbox")

    def open(self, context: RoundContext, request: bytes, upload: Callable[[str], bytes]) -> bytes:
        """Verifies everything, computes the sum of the signed uploads itself, records the opening, then decrypts and publishes.

        The same request again gets the same bytes.

        Args:
            context: Agreement, round and attempt.
            request: The server's request.
            upload: Gives the upload message of a participant, as its client signed it.

        Returns:
            A message for the clients, which the server carries and cannot read.

        Raises:
            OpeningRefusedError: If a participant did not approve or had not committed to its upload, the coefficients or the rule are
                not the agreed ones, or the policy does not allow the opening.
            TamperedAggregateError: If an upload is not the one that was approved.
            AlreadyOpenedError: If the round was opened, or promised to another digest.
            DecryptionError: If the sum does not decrypt to grid points.
            PrivFedError: As `wire_escrow.decode_request` and `wire.decode_upload`.
        """
        key_id, name = self._trust.key_id, f"{context.agreement.session.hex()}-{context.round}"
        if self._outbox.has(name):
            published = self._outbox.get(name)
            if decode_opened(published, context, key_id)[0] != request:
                raise AlreadyOpenedError(f"round {context.round} was already opened; nothing was decrypted")
            self._journal.settle(context)
            return published
        message = decode_request(request, context, key_id)
        check_all_approved(message)
        check_digest(context, message.digest)
        total = self._sum(context, message, upload)
        digest, asked = message.digest.digest(context), hash_message(request)
        self._journal.begin(context, digest, aggregate=asked)
        grid_sum = self._key.open_sum(total.total(), session=context.agreement.session, coefficients=tuple(total.coefficients))
        release = seal_release(grid_sum, context, self._trust, digest=digest)
        self._outbox.put(name, encode_opened(context, self._identity, request, release, key_id=key_id))
        self._journal.finish(context, aggregate=asked)
        return self._outbox.get(name)

    def _sum(self, context: RoundContext, message: OpenableAggregate, upload: Callable[[str], bytes]) -> RunningSum:
        agreement, digest = context.agreement, message.digest
        total = RunningSum(layout=agreement.sent_layout, params=agreement.params, key_id=self._trust.key_id)
        multipliers = agreement.weighting.multipliers(digest.coefficients)
        for name, multiplier, upload_hash in zip(digest.participants, multipliers, digest.upload_hashes, strict=True):
            data = upload(name)
            if hash_message(data) != upload_hash:
                raise TamperedAggregateError
            vector = decode_upload(data, context, self._trust.key_id).vector
            if not isinstance(vector, WholeVector):
                raise TamperedAggregateError
            total.add(multiplier, vector)
        return total


class ReleaseOpener(Opener):
    """Takes over what the key holder opened, after the same checks as everywhere.

    Args:
        context: Agreement, round and attempt.
        trust: The key holder.
        party: This client, to which the release is encrypted. Secret.
        journal: See `Opener`.
        check_heads: See `Opener`.
    """

    def __init__(
        self,
        *,
        context: RoundContext,
        trust: EscrowTrust,
        party: Party,
        journal: Journal,
        check_heads: Callable[[SignedHeads], None] | None = None,
    ) -> None:
        super().__init__(context=context, key_id=trust.key_id, journal=journal, check_heads=check_heads)
        self._party = party

    def _decode(self, data: bytes) -> OpenableAggregate:
        return decode_opened(data, self._context, self._key_id)[1]

    def _checked_sum(self, message: OpenableAggregate) -> Total:
        return message.total

    def _open(self, total: Total, message: OpenableAggregate) -> NDArray[np.int64]:
        if not isinstance(total, SealedSum):
            raise TamperedAggregateError
        return open_release(total, self._context, self._party, digest=message.digest.digest(self._context))
