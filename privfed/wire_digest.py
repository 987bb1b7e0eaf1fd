"""The payloads of the digest and of the approvals: see `privfed.wire`."""

from collections.abc import Mapping
from types import MappingProxyType

from privfed.agreement import DIGEST_BYTES, RoundContext
from privfed.digest import COEFFICIENT_BYTES, COUNT_BYTES, RoundDigest
from privfed.errors import InvalidMessageError, RoundMismatchError
from privfed.he.threshold import unpack_polynomial
from privfed.identity import SIGNATURE_BYTES, Identity
from privfed.message import MAX_TEXT_BYTES, Kind, Reader, seal, unseal
from privfed.wire import LENGTH_BYTES, MAX_STATEMENT_BYTES, check_key, right_statement

_NO_HEADS: Mapping[str, bytes] = MappingProxyType({})
_MAX_ENTRY_BYTES = 1 + MAX_TEXT_BYTES + COEFFICIENT_BYTES + DIGEST_BYTES


def encode_digest(context: RoundContext, identity: Identity, digest: RoundDigest, statements: Mapping[str, bytes] = _NO_HEADS) -> bytes:
    """The server's announcement.

    Args:
        context: Agreement, round and attempt.
        identity: The roster's server.
        digest: What will be summed.
        statements: `upload_statement` of each participant's upload, where there is one, by name.

    Raises:
        ValueError: If the identity is not the roster's server.
    """
    parts = (statements.get(name, b"") for name in digest.participants)
    heads = b"".join(len(part).to_bytes(LENGTH_BYTES, "big") + part for part in parts)
    return seal(context, identity, Kind.DIGEST, key_id=digest.key_id, payload=digest.payload + heads)


def decode_digest(data: bytes, context: RoundContext, key_id: bytes) -> RoundDigest:
    """The announcement in a digest message. Participants are pinned, each is named once.

    Raises:
        RoundMismatchError: If it is authentic and speaks of another key than `key_id`.
        PrivFedError: As `message.unseal`.
    """
    return read_digest(data, context, key_id)[0]


def read_digest(data: bytes, context: RoundContext, key_id: bytes) -> tuple[RoundDigest, Mapping[str, bytes]]:
    """What `decode_digest` gives, and the heads of the ledgers of those participants that keep one, by name. Each is signed by its owner.

    Raises:
        PrivFedError: As `decode_digest`.
    """
    frame = unseal(data, context, Kind.DIGEST, max_payload=max_digest_payload(context))
    check_key(frame.sender, frame.key_id, key_id)
    reader = Reader(frame.payload)
    announced = take_digest(reader, context, key_id)
    reader.end()
    return announced


def take_digest(reader: Reader, context: RoundContext, key_id: bytes) -> tuple[RoundDigest, Mapping[str, bytes]]:
    """Takes what a digest message says off the front of a payload.

    Raises:
        InvalidMessageError: If it does not say it.
    """
    rule = reader.text()
    names, coefficients, hashes = list[str](), list[int](), list[bytes]()
    for _ in range(reader.integer(COUNT_BYTES)):
        names.append(reader.text())
        coefficients.append(reader.integer(COEFFICIENT_BYTES))
        hashes.append(reader.take(DIGEST_BYTES))
    statements = {name: reader.take(reader.integer(LENGTH_BYTES)) for name in names}
    named = set(names)
    if not names or names != [name for name in context.agreement.roster.names if name in named]:
        raise InvalidMessageError
    if not all(right_statement(statement, name, context) for name, statement in statements.items()):
        raise InvalidMessageError
    digest = RoundDigest(participants=tuple(names), coefficients=tuple(coefficients), upload_hashes=tuple(hashes), rule=rule, key_id=key_id)
    return digest, {name: statement for name, statement in statements.items() if statement}


def max_digest_payload(context: RoundContext) -> int:
    """Most bytes that a digest of this session takes."""
    clients, statements = len(context.agreement.roster.clients), len(context.agreement.populations) * MAX_STATEMENT_BYTES
    return 1 + MAX_TEXT_BYTES + COUNT_BYTES + clients * (_MAX_ENTRY_BYTES + LENGTH_BYTES) + statements


def encode_approval(
    context: RoundContext,
    identity: Identity,
    digest: RoundDigest,
    countersignature: bytes = b"",
    *,
    answer: bytes = b"",
) -> bytes:
    """A participant's signature under a digest. Only `approval.approve` should ask for it.

    Args:
        context: Agreement, round and attempt.
        identity: The participant.
        digest: What it approves.
        countersignature: 64 bytes under the heads of all participants that keep a ledger; empty if none does.
        answer: The client's sum of shares for exactly the participants, if the trust mode has such.

    Raises:
        ValueError: If the identity is no client of the roster, or a countersignature or an answer is missing or one too many.
    """
    if len(answer) != context.agreement.answer_bytes:
        raise ValueError(f"expected an answer of {context.agreement.answer_bytes} bytes in this trust mode, got {len(answer)}")
    expected = countersignature_bytes(context, digest)
    if len(countersignature) != expected:
        raise ValueError(f"expected a countersignature of {expected} bytes in this round, got {len(countersignature)}")
    payload = digest.digest(context) + countersignature + answer
    return seal(context, identity, Kind.APPROVAL, key_id=digest.key_id, payload=payload)


def decode_approval(data: bytes, context: RoundContext, digest: RoundDigest) -> str:
    """Name of the client that approved this digest.

    Raises:
        RoundMismatchError: If it is authentic and approves another digest.
        PrivFedError: As `message.unseal`.
    """
    return read_approval(data, context, digest)[0]


def read_approval(data: bytes, context: RoundContext, digest: RoundDigest) -> tuple[str, bytes]:
    """What `decode_approval` gives, and the countersignature of the ledgers' heads, if any. The latter is not verified."""
    countersigned = countersignature_bytes(context, digest)
    frame = unseal(data, context, Kind.APPROVAL, max_payload=DIGEST_BYTES + countersigned + context.agreement.answer_bytes)
    check_key(frame.sender, frame.key_id, digest.key_id)
    reader = Reader(frame.payload)
    approved = reader.take(DIGEST_BYTES)
    if approved != digest.digest(context):
        raise RoundMismatchError(f"{frame.sender!r} approved another digest; its message was dropped and nothing happened")
    countersignature = reader.take(countersigned)
    answer = reader.take(context.agreement.answer_bytes)
    reader.end()
    if answer:
        unpack_polynomial(answer, context.agreement.params)
    return frame.sender, countersignature


def countersignature_bytes(context: RoundContext, digest: RoundDigest) -> int:
    """Bytes of the countersignature in an approval: there is one where a participant keeps a ledger."""
    return SIGNATURE_BYTES if any(name in context.agreement.populations for name in digest.participants) else 0


def approval_answer(data: bytes, context: RoundContext) -> bytes:
    """The sum of shares in a verified approval message; empty if the trust mode has none."""
    end = len(data) - SIGNATURE_BYTES
    return bytes(data[end - context.agreement.answer_bytes : end])
