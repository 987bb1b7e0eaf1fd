"""The payloads of the messages of a round. Updates travel encrypted or not at all.

SETUP      client -> server     nothing: the key id in the frame says it; where the server multiplies uploads, the round's public key
UPLOAD     client -> server     the head of the client's privacy ledger, the encrypted update, and its sealed tags if keys are shared; in
                                `EscrowKey` mode the update is sealed to the key holder
DIGEST     server -> clients    who takes part, with which coefficients, by which rule, hashes of the uploads; the heads: see
                                `privfed.wire_digest`
APPROVAL   client -> server     the hash of the digest; where participants keep ledgers, one countersignature of all their heads; in
                                `ThresholdKey` mode the sum of the client's shares; see `privfed.wire_digest`
HOLDER_KEY key holder -> clients in `EscrowKey` mode, before the setup: its public keys of the attempt; see `privfed.wire_escrow`
COMMIT     client -> server     in `EscrowKey` mode, before the upload: its hash; see `privfed.wire_commit`
AGGREGATE  server -> openers    the digest, the approvals, the abridged uploads, the encrypted sum: see `privfed.wire_aggregate`
PRODUCTS   server -> openers    where a rule needs inner products: the digest, the approvals, masked products; see `privfed.wire_products`
COEFFICIENTS client -> server   what the rule made of them
ABORT      client -> server     the word "abort": that it did not open the aggregate, and not why
"""

from collections.abc import Sequence
from typing import cast

from privfed.agreement import RoundContext
from privfed.errors import InvalidMessageError, RoundMismatchError
from privfed.he.additive import CkksVector, check_chunk
from privfed.he.codec import unpack_public_key
from privfed.he.escrow import SealedVector
from privfed.he.params import KEY_ID_BYTES
from privfed.he.threshold import OnePolynomialVector, unpack_polynomial
from privfed.identity import SIGNATURE_BYTES, Identity
from privfed.message import Kind, Reader, seal, unseal
from privfed.trust import EscrowTrust
from privfed.update import Update

MAX_STATEMENT_BYTES = 1 << 20
LENGTH_BYTES = 4
UploadVector = CkksVector | OnePolynomialVector | SealedVector
"""An encrypted update as it travels in an upload, by the trust mode of the session."""
AnyUpdate = Update[CkksVector] | Update[OnePolynomialVector] | Update[SealedVector]

_ABORT = b"abort"


def encode_setup(context: RoundContext, identity: Identity, key_id: bytes, public_key: bytes = b"") -> bytes:
    """A client's word that it is there and derived the round key `key_id` (16 bytes).

    Args:
        context: Agreement, round and attempt.
        identity: The client.
        key_id: Names the key.
        public_key: `RoundKey.public_key`, if the server multiplies uploads under a shared key. Else empty.

    Raises:
        ValueError: If the identity is no client of the roster, the key id is not 16 bytes, or a public key is missing or one too many.
    """
    if len(key_id) != KEY_ID_BYTES:
        raise ValueError(f"expected a key id of {KEY_ID_BYTES} bytes, got {len(key_id)}")
    if len(public_key) != context.agreement.setup_key_bytes:
        raise ValueError(f"expected a public key of {context.agreement.setup_key_bytes} bytes in this session, got {len(public_key)}")
    return seal(context, identity, Kind.SETUP, key_id=key_id, payload=public_key)


def decode_setup(data: bytes, context: RoundContext) -> tuple[str, bytes]:
    """Sender and key id of a setup message.

    Raises:
        PrivFedError: As `message.unseal`.
    """
    frame = unseal(data, context, Kind.SETUP, max_payload=context.agreement.setup_key_bytes)
    if len(frame.payload) != context.agreement.setup_key_bytes:
        raise InvalidMessageError
    if frame.payload:
        unpack_public_key(bytes(frame.payload), context.agreement.params)
    return frame.sender, frame.key_id


def setup_public_key(data: bytes, context: RoundContext) -> bytes:
    """The round's public key in a verified setup message; empty where the server multiplies nothing."""
    end = len(data) - SIGNATURE_BYTES
    return bytes(data[end - context.agreement.setup_key_bytes : end])


def encode_upload(context: RoundContext, identity: Identity, update: AnyUpdate, *, statement: bytes = b"") -> bytes:
    """A client's encrypted update.

    Args:
        context: Agreement, round and attempt.
        identity: The sender.
        update: Encrypted.
        statement: The head of its ledger, if the agreement names a population of it; at most 1 MiB. Else empty.

    Raises:
        TypeError: If the vector is not encrypted. There is no way to send another.
        ValueError: If the update has another sender, round, layout or parameters, or is a sum; or if the statement is missing, too
            long, or one too many.
    """
    vector = cast("object", update.vector)  # the type says so already; this is for callers that do not check types
    if not isinstance(vector, UploadVector):
        raise TypeError(f"expected an update that is encrypted, got one that holds a {type(vector).__name__}; nothing was encoded")
    agreement = context.agreement
    if (update.sender, update.round) != (identity.name, context.round):
        raise ValueError(f"expected an update of {identity.name!r} for round {context.round}, got {update!r}")
    as_agreed = vector.layout == agreement.sent_layout and vector.params == agreement.params
    if not as_agreed or not isinstance(vector, _kind_of_vector(context)) or (isinstance(vector, CkksVector) and not vector.fresh):
        raise ValueError(
            "expected a fresh vector with the layout and the parameters of the session, in the form of its trust mode, got another"
        )
    if not right_statement(statement, identity.name, context):
        raise ValueError(
            f"expected a statement of at most {MAX_STATEMENT_BYTES} bytes of whoever keeps an agreed ledger, and of nobody else; "
            f"got {len(statement)} bytes of {identity.name!r}"
        )
    head = statement + len(statement).to_bytes(LENGTH_BYTES, "big")
    tags = vector.sealed_tags if isinstance(vector, CkksVector) else b""
    return seal(context, identity, Kind.UPLOAD, key_id=vector.key_id, payload=head, chunks=(*vector.chunks, tags))


def decode_upload(data: bytes, context: RoundContext, key_id: bytes) -> Update[UploadVector]:
    """The encrypted update in an upload message, structurally checked.

    Raises:
        RoundMismatchError: If it is authentic and encrypted under another key than `key_id`.
        PrivFedError: As `message.unseal`.
    """
    agreement, params, layout = context.agreement, context.agreement.params, context.agreement.sent_layout
    update_size = sum(agreement.upload_chunk_sizes) + agreement.upload_tags_bytes
    most_statement = MAX_STATEMENT_BYTES if context.agreement.populations else 0
    frame = unseal(data, context, Kind.UPLOAD, max_payload=most_statement + LENGTH_BYTES + update_size)
    check_key(frame.sender, frame.key_id, key_id)
    reader = Reader(frame.payload)
    statement = reader.take(max(0, len(frame.payload) - update_size - LENGTH_BYTES))
    if reader.integer(LENGTH_BYTES) != len(statement) or not right_statement(statement, frame.sender, context):
        raise InvalidMessageError
    chunks = read_chunks(reader, agreement.upload_chunk_sizes)
    sealed_tags = reader.take(agreement.upload_tags_bytes)
    reader.end()
    vector: UploadVector
    if agreement.trust is None:
        for chunk, size in zip(chunks, params.first_polynomial_sizes(layout), strict=True):
            check_chunk(chunk, params, size, fresh=True)
        vector = CkksVector(layout=layout, params=params, key_id=key_id, chunks=chunks, fresh=True, sealed_tags=sealed_tags)
    elif isinstance(agreement.trust, EscrowTrust):
        # What is sealed only the key holder can look at.
        vector = SealedVector(layout=layout, params=params, key_id=key_id, chunks=chunks)
    else:
        for chunk in chunks:
            unpack_polynomial(chunk, params)
        vector = OnePolynomialVector(layout=layout, params=params, key_id=key_id, chunks=chunks)
    return Update(sender=frame.sender, round=context.round, vector=vector)


def _kind_of_vector(context: RoundContext) -> type[UploadVector]:
    match context.agreement.trust:
        case None:
            return CkksVector
        case EscrowTrust():
            return SealedVector
        case _:
            return OnePolynomialVector


def check_upload(data: bytes, context: RoundContext, *, sender: str) -> None:
    """Refuses a stored upload that is not the verified message of this sender any more. Its ciphertexts are not looked at again.

    Raises:
        PrivFedError: As `message.unseal`, or if another one sent it.
    """
    if unseal(data, context, Kind.UPLOAD, max_payload=len(data)).sender != sender:
        raise InvalidMessageError


def upload_statement(data: bytes, context: RoundContext) -> bytes:
    """The head of the sender's ledger in a verified upload message; empty if it keeps none."""
    end = upload_chunk(len(data), context, 0).start - LENGTH_BYTES
    return bytes(data[end - int.from_bytes(data[end : end + LENGTH_BYTES], "big") : end])


def upload_chunk(length: int, context: RoundContext, index: int) -> slice:
    """Where chunk `index` stands in a verified upload message of `length` bytes, for servers that stream from disk."""
    sizes = context.agreement.upload_chunk_sizes
    # All but the last are of one size, and a sum over all of them for every chunk of every upload would take long.
    behind = (len(sizes) - 1 - index) * sizes[0] + sizes[-1] + context.agreement.upload_tags_bytes
    start = length - SIGNATURE_BYTES - behind
    return slice(start, start + sizes[index])


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
    check_key(frame.sender, frame.key_id, key_id)
    if bytes(frame.payload) != _ABORT:
        raise InvalidMessageError
    return frame.sender


def right_statement(statement: bytes, name: str, context: RoundContext) -> bool:
    """Whether whoever keeps an agreed ledger, and nobody else, says something of its head, and not too much."""
    return bool(statement) is (name in context.agreement.populations) and len(statement) <= MAX_STATEMENT_BYTES


def check_key(sender: str, key_id: bytes, expected: bytes) -> None:
    """Refuses an authentic message about another key."""
    if key_id != expected:
        raise RoundMismatchError(f"the message of {sender!r} belongs to another key; it was dropped and nothing happened")


def read_chunks(reader: Reader, sizes: Sequence[int]) -> tuple[bytes, ...]:
    """All chunks of a vector of the session, of so many bytes each."""
    return tuple(reader.take(size) for size in sizes)
