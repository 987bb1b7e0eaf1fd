"""A round with a key holder, message by message, without training: for tests of bytes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from privfed.agreement import Agreement, RoundContext
from privfed.digest import RoundDigest, hash_message
from privfed.he.escrow import seal_vector
from privfed.he.escrow_secret import AttemptKey, EscrowKey, encrypt_to_holder
from privfed.he.params import CkksParams
from privfed.identity import SIGNATURE_BYTES, Identity
from privfed.message import Kind
from privfed.trust import EscrowTrust
from privfed.update import Update
from privfed.wire import encode_upload
from privfed.wire_aggregate import SealedSum
from privfed.wire_commit import encode_commitment, encode_commitments
from privfed.wire_digest import encode_approval, encode_digest
from privfed.wire_escrow import decode_holder_key, encode_holder_key, encode_opened, encode_request


@dataclass(frozen=True)
class HeldRound:
    """The same people as in another agreement, with a key holder beside them.

    Args:
        agreement: Under a shared key.
        server: Its server.
        banks: Its clients, in order.
        round: Number of the round.
        attempt: Number of the attempt.
    """

    agreement: Agreement
    server: Identity
    banks: Sequence[Identity]
    round: int
    attempt: int = 0

    @cached_property
    def holder(self) -> Identity:
        return Identity.generate("key_holder")

    @cached_property
    def context(self) -> RoundContext:
        keys = {bank.name: bytes([index + 1]) * 32 for index, bank in enumerate(self.banks)}
        trust = EscrowTrust(holder=self.holder.public, encryption_keys=keys)
        agreement = replace(self.agreement, params=CkksParams.escrow(), trust=trust)
        return RoundContext(agreement=agreement, round=self.round, attempt=self.attempt)

    @cached_property
    def key(self) -> AttemptKey:
        return EscrowKey.generate().attempt_key(binding=self.context.digest, params=self.context.agreement.params)

    @cached_property
    def public_key(self) -> bytes:
        return self.key.public_key()

    @cached_property
    def messages(self) -> dict[Kind, bytes]:
        """One authentic message of each kind that exists there alone, or is of another form there."""
        context, agreement = self.context, self.context.agreement
        heads = dict.fromkeys(agreement.populations, b"a head")
        announced = encode_holder_key(context, self.holder, self.public_key, self.key.encryption_key)
        zeros = np.zeros(agreement.layout.size, np.int64)
        first, holder_key = self.banks[0], decode_holder_key(announced, context)
        whole = encrypt_to_holder(zeros, agreement.layout, agreement.params, self.public_key)
        vector, key_id = seal_vector(whole, holder_key, sender=first.name), whole.key_id
        update = Update(sender=first.name, round=context.round, vector=vector)
        upload = encode_upload(context, first, update, statement=heads.get(first.name, b""))
        names = agreement.roster.names
        digest = RoundDigest(
            participants=names,
            coefficients=tuple(agreement.coefficients(names).values()),
            upload_hashes=tuple(hash_message(name.encode()) for name in names),
            rule=agreement.rule.name,
            key_id=key_id,
        )
        approvals = [encode_approval(context, bank, digest, bytes(SIGNATURE_BYTES) if heads else b"") for bank in self.banks]
        hashes = zip(self.banks, digest.upload_hashes, strict=True)
        commits = {bank.name: encode_commitment(context, bank, upload_hash, key_id=key_id) for bank, upload_hash in hashes}
        commitments = encode_commitments(context, self.server, commits, key_id=key_id)
        asked = encode_request(
            context, self.server, encode_digest(context, self.server, digest, heads), approvals, commitments=commitments, key_id=key_id
        )
        release = SealedSum(sealed=dict.fromkeys(names, bytes(80)), ciphertext=bytes(agreement.layout.size * agreement.opened_bytes + 16))
        return {
            Kind.HOLDER_KEY: announced,
            Kind.UPLOAD: upload,
            Kind.REQUEST: asked,
            Kind.OPENED: encode_opened(context, self.holder, asked, release, key_id=key_id),
        }
