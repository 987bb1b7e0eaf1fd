"""The messages that only `EscrowKey` has.

HOLDER_KEY key holder -> clients its two public keys of one attempt, before anything is encrypted: to the one updates are encrypted, and
                                 to the other, X25519, what comes of it is sealed
REQUEST  server -> key holder    the digest, the approvals and the commitments; the uploads follow as their clients signed them
OPENED   key holder -> clients   the request, and the opened sum, encrypted to every client; of a scored session in between what the rule
                                 chose, and what it was that was chosen; if nothing was, there is no sum
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from privfed.agreement import RoundContext
from privfed.decision import Fallback
from privfed.digest import COEFFICIENT_BYTES, RoundDigest
from privfed.errors import InvalidMessageError
from privfed.he.codec import unpack_public_key
from privfed.he.escrow import ENCRYPTION_KEY_BYTES, HolderKey, public_key_id
from privfed.he.product import Assurance, pairs
from privfed.identity import Identity, check_encryption_key
from privfed.message import MAX_FRAME_BYTES, Kind, Reader, seal, unseal
from privfed.wire import LENGTH_BYTES, check_key
from privfed.wire_aggregate import OpenableAggregate, SealedSum, openable
from privfed.wire_approved import max_approved_payload, read_approved, write_approved
from privfed.wire_commit import check_committed, decode_commitments, max_commitments_bytes

_SEALED_KEY_BYTES = 32 + 32 + 16
_TAG_BYTES = 16
_SCALE_BYTES = 8
_FALLBACKS = tuple(Fallback)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What a key holder says in public of a scored round. Nothing is compared with anything yet, but that it skips or it does not.

    Args:
        coefficients: Of each participant, in the digest's order; all zero if the round is skipped.
        fallback: What was done.
    """

    coefficients: tuple[int, ...]
    fallback: Fallback

    @property
    def skipped(self) -> bool:
        """Whether nothing was opened but inner products."""
        return self.fallback is Fallback.SKIPPED


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighing:
    """What everybody may know of how the coefficients of a scored round were found. Public.

    Args:
        fallback: What was done where the policy did not allow what the rule chose.
        disclosed: How many inner products the openers, or the key holder, opened.
        assurance: Name of the `Assurance` of these.
    """

    fallback: Fallback
    disclosed: int
    assurance: str = Assurance.RECOMPUTED.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """An authentic message of the key holder.

    Args:
        request: What it answers.
        message: The sum; nothing is in it if the round is skipped.
        chosen: Of a scored session what the rule chose; None in any other.
    """

    request: bytes
    message: OpenableAggregate
    chosen: Chosen | None

    @property
    def weighing(self) -> Weighing | None:
        """How the coefficients were found; None if they were agreed."""
        if self.chosen is None:
            return None
        return Weighing(fallback=self.chosen.fallback, disclosed=len(pairs(len(self.message.digest.participants))))


def encode_holder_key(context: RoundContext, identity: Identity, public_key: bytes, encryption_key: bytes) -> bytes:
    """The key holder's word which keys the clients encrypt and seal to in this attempt, and in no other one.

    Args:
        context: Agreement, round and attempt.
        identity: The key holder.
        public_key: `AttemptKey.public_key` of this attempt.
        encryption_key: `AttemptKey.encryption_key` of this attempt.

    Raises:
        ValueError: If the identity is not the key holder's, or these are no public keys for the session's parameters.
    """
    if len(public_key) != context.agreement.params.public_key_bytes:
        raise ValueError(f"expected a public key of {context.agreement.params.public_key_bytes} bytes, got {len(public_key)}")
    check_encryption_key(encryption_key, name=identity.name)
    return seal(context, identity, Kind.HOLDER_KEY, key_id=public_key_id(public_key), payload=public_key + encryption_key)


def decode_holder_key(data: bytes, context: RoundContext) -> HolderKey:
    """The public keys of the attempt, as the agreed key holder signed them for this session, round, attempt, history and parameters.

    Raises:
        PrivFedError: As `message.unseal`.
    """
    size = context.agreement.params.public_key_bytes
    frame = unseal(data, context, Kind.HOLDER_KEY, max_payload=size + ENCRYPTION_KEY_BYTES)
    reader = Reader(frame.payload)
    key = HolderKey(binding=context.digest, public_key=reader.take(size), encryption_key=reader.take(ENCRYPTION_KEY_BYTES))
    reader.end()
    if frame.key_id != key.key_id:
        raise InvalidMessageError
    unpack_public_key(key.public_key, context.agreement.params)
    try:
        check_encryption_key(key.encryption_key, name=frame.sender)
    except ValueError:
        raise InvalidMessageError from None
    return key


def encode_request(
    context: RoundContext, identity: Identity, digest_message: bytes, approvals: Sequence[bytes], *, commitments: bytes, key_id: bytes
) -> bytes:
    """The server's request to open what was approved.

    Args:
        context: Agreement, round and attempt.
        identity: The roster's server.
        digest_message: As `encode_digest` made it.
        approvals: Approval messages.
        commitments: As `wire_commit.encode_commitments` made it.
        key_id: Key under which the uploads are encrypted.

    Raises:
        ValueError: If the identity is not the roster's server.
    """
    payload = write_approved(digest_message, approvals) + len(commitments).to_bytes(LENGTH_BYTES, "big") + commitments
    return seal(context, identity, Kind.REQUEST, key_id=key_id, payload=payload)


def decode_request(data: bytes, context: RoundContext, key_id: bytes) -> OpenableAggregate:
    """The digest in a request, with the server's, every approver's and every committer's signature verified.

    Raises:
        OpeningRefusedError: If the digest names an upload to which its sender had not committed.
        PrivFedError: As `wire_aggregate.read_approved` and `wire_commit.decode_commitments`.
    """
    frame = unseal(data, context, Kind.REQUEST, max_payload=_max_request_payload(context))
    check_key(frame.sender, frame.key_id, key_id)
    reader = Reader(frame.payload)
    approved = read_approved(reader, context, key_id)
    committed = decode_commitments(reader.take(reader.integer(LENGTH_BYTES)), context, key_id)
    reader.end()
    check_committed(approved.digest, committed)
    total = SealedSum(sealed={}, ciphertext=b"")
    return openable(approved, coefficients=approved.digest.coefficients, uploads=(), total=total)


def encode_opened(
    context: RoundContext, identity: Identity, request: bytes, release: SealedSum, *, key_id: bytes, chosen: Chosen | None = None
) -> bytes:
    """What the key holder opened, for the clients.

    Args:
        context: Agreement, round and attempt.
        identity: The key holder.
        request: What it answers.
        release: The sum; with nothing in it if the round is skipped.
        key_id: Of its key.
        chosen: What the rule chose, in a scored session.

    Raises:
        ValueError: If the identity is not the key holder's, or coefficients are missing or too many.
    """
    if (chosen is not None) is not context.agreement.scored:
        raise ValueError("expected what a rule chose in a scored session, and in no other")
    names = () if chosen is not None and chosen.skipped else context.agreement.roster.names
    keys = b"".join(release.sealed[name] for name in names)
    numbers = b""
    if chosen is not None:
        coefficients = (coefficient.to_bytes(COEFFICIENT_BYTES, "big") for coefficient in chosen.coefficients)
        numbers = b"".join((bytes([_FALLBACKS.index(chosen.fallback)]), *coefficients))
    head = len(request).to_bytes(LENGTH_BYTES, "big") + request + numbers + keys
    return seal(context, identity, Kind.OPENED, key_id=key_id, payload=head, chunks=(release.ciphertext,))


def decode_opened(data: bytes, context: RoundContext, key_id: bytes) -> tuple[bytes, OpenableAggregate]:
    """The request that was opened, and what came of it: see `read_opened`."""
    opened = read_opened(data, context, key_id)
    return opened.request, opened.message


def read_opened(data: bytes, context: RoundContext, key_id: bytes) -> Opened:
    """What the key holder published, with every signature verified.

    Raises:
        PrivFedError: As `decode_request`.
    """
    names, scored = context.agreement.roster.names, context.agreement.scored
    sealed_sum = context.agreement.opened_bytes * context.agreement.sent_layout.size + _TAG_BYTES + (_SCALE_BYTES if scored else 0)
    chosen_bytes = 1 + len(names) * COEFFICIENT_BYTES if scored else 0
    most = LENGTH_BYTES + MAX_FRAME_BYTES + _max_request_payload(context) + chosen_bytes + len(names) * _SEALED_KEY_BYTES + sealed_sum
    frame = unseal(data, context, Kind.OPENED, max_payload=most)
    check_key(frame.sender, frame.key_id, key_id)
    reader = Reader(frame.payload)
    request = reader.take(reader.integer(LENGTH_BYTES))
    message = decode_request(request, context, key_id)
    chosen = _read_chosen(reader, context, message.digest) if scored else None
    if chosen is not None:
        message = replace(message, coefficients=chosen.coefficients)
        if chosen.skipped:
            reader.end()
            return Opened(request=request, message=message, chosen=chosen)
    sealed = {name: reader.take(_SEALED_KEY_BYTES) for name in names}
    release = SealedSum(sealed=sealed, ciphertext=reader.take(sealed_sum))
    reader.end()
    return Opened(request=request, message=replace(message, total=release), chosen=chosen)


def _read_chosen(reader: Reader, context: RoundContext, digest: RoundDigest) -> Chosen:
    number = reader.integer(1)
    coefficients = tuple(reader.integer(COEFFICIENT_BYTES) for _ in digest.participants)
    if number >= len(_FALLBACKS) or sum(coefficients) > context.agreement.params.weight_sum:
        raise InvalidMessageError
    chosen = Chosen(coefficients=coefficients, fallback=_FALLBACKS[number])
    if chosen.skipped is any(coefficients):
        raise InvalidMessageError
    return chosen


def weighing(data: bytes, context: RoundContext, key_id: bytes) -> Weighing | None:
    """How the coefficients in a key holder's message were found; None if they were agreed.

    Raises:
        PrivFedError: As `read_opened`.
    """
    return read_opened(data, context, key_id).weighing


def opened_digest(data: bytes, context: RoundContext, key_id: bytes) -> RoundDigest:
    """The digest in an opened message."""
    return decode_opened(data, context, key_id)[1].digest


def _max_request_payload(context: RoundContext) -> int:
    return max_approved_payload(context) + LENGTH_BYTES + max_commitments_bytes(context)
