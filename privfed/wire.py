"""The payloads of the messages of a round. Updates travel encrypted or not at all.

SETUP      client -> server     nothing: the key id in the frame says it
UPLOAD     client -> server     the encrypted update, and its sealed tags
DIGEST     server -> clients    who takes part, with which coefficients, by which rule, hashes of the uploads
APPROVAL   client -> server     the hash of the digest
AGGREGATE  server -> openers    the digest, the approvals, the abridged uploads, the encrypted sum
ABORT      client -> server     the word "abort": that it did not open the aggregate, and not why
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from privfed.agreement import DIGEST_BYTES, RoundContext
from privfed.digest import ABRIDGED_BYTES, COEFFICIENT_BYTES, COUNT_BYTES, RoundDigest
from privfed.errors import InvalidMessageError, RoundMismatchError
from privfed.he.additive import CkksVector, SeededSum, check_chunk
from privfed.he.codec import unpack_words
from privfed.he.params import KEY_ID_BYTES, SEALED_TAGS_BYTES, SEED_BYTES
from privfed.identity import SIGNATURE_BYTES, Identity
from privfed.message import MAX_FRAME_BYTES, MAX_TEXT_BYTES, Kind, Reader, seal, unseal
from privfed.update import Update

_LENGTH_BYTES = 4
_ABORT = b"abort"
_MAX_ENTRY_BYTES = 1 + MAX_TEXT_BYTES + COEFFICIENT_BYTES + DIGEST_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenableAggregate:
    """An authentic aggregate message.

    Args:
        digest: What the server says it summed.
        approved_by: Participants whose signed approval of this digest was verified, in the message's order.
        uploads: What the server says `digest.abridge` leaves of each participant's upload. Not compared with the digest yet.
        total: What the server says is the encrypted sum.
    """

    digest: RoundDigest
    approved_by: tuple[str, ...]
    uploads: tuple[bytes, ...]
    total: CkksVector | SeededSum


def encode_setup(context: RoundContext, identity: Identity, key_id: bytes) -> bytes:
    """A client's word that it is there and derived the round key `key_id` (16 bytes).

    Raises:
        ValueError: If the identity is no client of the roster, or the key id is not 16 bytes.
    """
    if len(key_id) != KEY_ID_BYTES:
        raise ValueError(f"expected a key id of {KEY_ID_BYTES} bytes, got {len(key_id)}")
    return seal(context, identity, Kind.SETUP, key_id=key_id, payload=b"")


def decode_setup(data: bytes, context: RoundContext) -> tuple[str, bytes]:
    """Sender and key id of a setup message.

    Raises:
        PrivFedError: As `message.unseal`.
    """
    frame = unseal(data, context, Kind.SETUP, max_payload=0)
    return frame.sender, frame.key_id


def encode_upload(context: RoundContext, identity: Identity, update: Update[CkksVector]) -> bytes:
    """A client's encrypted update.

    Raises:
        TypeError: If the vector is not encrypted. There is no way to send another.
        ValueError: If the update has another sender, round, layout or parameters, or is a sum.
    """
    vector = cast("object", update.vector)  # the type says so already; this is for callers that do not check types
    if not isinstance(vector, CkksVector):
        raise TypeError(f"expected an update that is encrypted, got one that holds a {type(vector).__name__}; nothing was encoded")
    agreement = context.agreement
    if (update.sender, update.round) != (identity.name, context.round):
        raise ValueError(f"expected an update of {identity.name!r} for round {context.round}, got {update!r}")
    if vector.layout != agreement.layout or vector.params != agreement.params or not vector.fresh:
        raise ValueError("expected a fresh vector with the layout and the parameters of the session, got another")
    return seal(context, identity, Kind.UPLOAD, key_id=vector.key_id, payload=b"".join((*vector.chunks, vector.sealed_tags)))


def decode_upload(data: bytes, context: RoundContext, key_id: bytes) -> Update[CkksVector]:
    """The encrypted update in an upload message, structurally checked.

    Raises:
        RoundMismatchError: If it is authentic and encrypted under another key than `key_id`.
        PrivFedError: As `message.unseal`.
    """
    params, layout = context.agreement.params, context.agreement.layout
    frame = unseal(data, context, Kind.UPLOAD, max_payload=params.chunks(layout) * params.fresh_chunk_bytes + SEALED_TAGS_BYTES)
    _check_key(frame.sender, frame.key_id, key_id)
    reader = Reader(frame.payload)
    chunks = _read_chunks(reader, context, params.fresh_chunk_bytes)
    sealed_tags = reader.take(SEALED_TAGS_BYTES)
    reader.end()
    for chunk in chunks:
        check_chunk(chunk, params, fresh=True)
    vector = CkksVector(layout=layout, params=params, key_id=key_id, chunks=chunks, fresh=True, sealed_tags=sealed_tags)
    return Update(sender=frame.sender, round=context.round, vector=vector)


def upload_chunk(length: int, context: RoundContext, index: int) -> slice:
    """Where chunk `index` stands in a verified upload message of `length` bytes, for servers that stream from disk."""
    params = context.agreement.params
    start = length - SIGNATURE_BYTES - SEALED_TAGS_BYTES - (params.chunks(context.agreement.layout) - index) * params.fresh_chunk_bytes
    return slice(start, start + params.fresh_chunk_bytes)


def encode_digest(context: RoundContext, identity: Identity, digest: RoundDigest) -> bytes:
    """The server's announcement.

    Raises:
        ValueError: If the identity is not the roster's server.
    """
    return seal(context, identity, Kind.DIGEST, key_id=digest.key_id, payload=digest.payload)


def decode_digest(data: bytes, context: RoundContext, key_id: bytes) -> RoundDigest:
    """The announcement in a digest message. Participants are pinned, each is named once.

    Raises:
        RoundMismatchError: If it is authentic and speaks of another key than `key_id`.
        PrivFedError: As `message.unseal`.
    """
    frame = unseal(data, context, Kind.DIGEST, max_payload=_max_digest_payload(context))
    _check_key(frame.sender, frame.key_id, key_id)
    reader = Reader(frame.payload)
    rule = reader.text()
    names, coefficients, hashes = list[str](), list[int](), list[bytes]()
    for _ in range(reader.integer(COUNT_BYTES)):
        names.append(reader.text())
        coefficients.append(reader.integer(COEFFICIENT_BYTES))
        hashes.append(reader.take(DIGEST_BYTES))
    reader.end()
    named = set(names)
    if not names or names != [name for name in context.agreement.roster.names if name in named]:
        raise InvalidMessageError
    return RoundDigest(
        participants=tuple(names), coefficients=tuple(coefficients), upload_hashes=tuple(hashes), rule=rule, key_id=frame.key_id
    )


def encode_approval(context: RoundContext, identity: Identity, digest: RoundDigest) -> bytes:
    """A participant's signature under a digest. Only `approval.approve` should ask for it.

    Raises:
        ValueError: If the identity is no client of the roster.
    """
    return seal(context, identity, Kind.APPROVAL, key_id=digest.key_id, payload=digest.digest(context))


def decode_approval(data: bytes, context: RoundContext, digest: RoundDigest) -> str:
    """Name of the client that approved this digest.

    Raises:
        RoundMismatchError: If it is authentic and approves another digest.
        PrivFedError: As `message.unseal`.
    """
    frame = unseal(data, context, Kind.APPROVAL, max_payload=DIGEST_BYTES)
    _check_key(frame.sender, frame.key_id, digest.key_id)
    if len(frame.payload) != DIGEST_BYTES:
        raise InvalidMessageError
    if bytes(frame.payload) != digest.digest(context):
        raise RoundMismatchError(f"{frame.sender!r} approved another digest; its message was dropped and nothing happened")
    return frame.sender


def encode_aggregate(
    context: RoundContext,
    identity: Identity,
    digest_message: bytes,
    approvals: Sequence[bytes],
    *,
    uploads: Sequence[bytes],
    total: CkksVector | SeededSum,
) -> bytes:
    """The encrypted sum, with the signed digest and the signed approvals that allow its opening, and what it is checked against.

    Args:
        context: Agreement, round and attempt.
        identity: The roster's server.
        digest_message: As `encode_digest` made it.
        approvals: Approval messages.
        uploads: `digest.abridge` of the upload of each participant, in the digest's order.
        total: The sum, with seeds where `params.seeded_sums`, else whole.

    Raises:
        ValueError: If the identity is not the roster's server, or the sum is not of the kind that these parameters send.
    """
    if isinstance(total, SeededSum) is not context.agreement.params.seeded_sums:
        raise ValueError("expected a sum with seeds where the parameters say so, and a whole one elsewhere, got the other kind")
    messages = b"".join(len(message).to_bytes(_LENGTH_BYTES, "big") + message for message in (digest_message, *approvals))
    seeds = total.seeds if isinstance(total, SeededSum) else ()
    payload = b"".join((len(approvals).to_bytes(COUNT_BYTES, "big"), messages, *uploads, *total.chunks, *seeds))
    return seal(context, identity, Kind.AGGREGATE, key_id=total.key_id, payload=payload)


def decode_aggregate(data: bytes, context: RoundContext, key_id: bytes) -> OpenableAggregate:
    """The sum in an aggregate message, with the server's, and every approver's signature verified.

    Whether the approvals suffice, and whether it is the announced sum, is for the opener to decide.

    Raises:
        RoundMismatchError: If it is authentic and speaks of another key than `key_id`, or an approval is of another digest.
        PrivFedError: As `message.unseal`.
    """
    params, clients = context.agreement.params, len(context.agreement.roster.clients)
    approvals_size = COUNT_BYTES + clients * (_LENGTH_BYTES + MAX_FRAME_BYTES + DIGEST_BYTES)
    digest_size = _LENGTH_BYTES + MAX_FRAME_BYTES + _max_digest_payload(context)
    chunk_size = params.polynomial_bytes + clients * SEED_BYTES if params.seeded_sums else params.sum_chunk_bytes
    total_size = params.chunks(context.agreement.layout) * chunk_size
    max_payload = approvals_size + digest_size + clients * ABRIDGED_BYTES + total_size
    frame = unseal(data, context, Kind.AGGREGATE, max_payload=max_payload)
    _check_key(frame.sender, frame.key_id, key_id)
    reader = Reader(frame.payload)
    count = reader.integer(COUNT_BYTES)
    digest = decode_digest(reader.take(reader.integer(_LENGTH_BYTES)), context, key_id)
    approved_by = tuple(decode_approval(reader.take(reader.integer(_LENGTH_BYTES)), context, digest) for _ in range(count))
    uploads = tuple(reader.take(ABRIDGED_BYTES) for _ in digest.participants)
    total = _read_total(reader, context, digest)
    return OpenableAggregate(digest=digest, approved_by=approved_by, uploads=uploads, total=total)


def encode_abort(context: RoundContext, identity: Identity, key_id: bytes) -> bytes:
    """A client's word that it did not open the aggregate of a round. It has no room for a reason, which would help who tampers.

    Raises:
        ValueError: If the identity is no client of the roster.
    """
    return seal(context, identity, Kind.ABORT, key_id=key_id, payload=_ABORT)


def decode_abort(data: bytes, context: RoundContext, key_id: bytes) -> str:
    """Name of the client that did not open.

    Raises:
        RoundMismatchError: If it is authentic and speaks of another key than `key_id`.
        PrivFedError: As `message.unseal`.
    """
    frame = unseal(data, context, Kind.ABORT, max_payload=len(_ABORT))
    _check_key(frame.sender, frame.key_id, key_id)
    if bytes(frame.payload) != _ABORT:
        raise InvalidMessageError
    return frame.sender


def _check_key(sender: str, key_id: bytes, expected: bytes) -> None:
    if key_id != expected:
        raise RoundMismatchError(f"the message of {sender!r} belongs to another key; it was dropped and nothing happened")


def _read_chunks(reader: Reader, context: RoundContext, size: int) -> tuple[bytes, ...]:
    return tuple(reader.take(size) for _ in range(context.agreement.params.chunks(context.agreement.layout)))


def _read_total(reader: Reader, context: RoundContext, digest: RoundDigest) -> CkksVector | SeededSum:
    params, layout = context.agreement.params, context.agreement.layout
    chunks = _read_chunks(reader, context, params.polynomial_bytes if params.seeded_sums else params.sum_chunk_bytes)
    seeds = tuple(reader.take(SEED_BYTES * len(chunks)) for _ in digest.participants) if params.seeded_sums else ()
    reader.end()
    if params.seeded_sums:
        for chunk in chunks:
            unpack_words(chunk, params)
        return SeededSum(layout=layout, params=params, key_id=digest.key_id, chunks=chunks, seeds=seeds)
    for chunk in chunks:
        check_chunk(chunk, params, fresh=False)
    return CkksVector(layout=layout, params=params, key_id=digest.key_id, chunks=chunks, fresh=False)


def _max_digest_payload(context: RoundContext) -> int:
    return 1 + MAX_TEXT_BYTES + COUNT_BYTES + len(context.agreement.roster.clients) * _MAX_ENTRY_BYTES
