"""The message that ends a round: the encrypted sum, with all that its opener needs to trust it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from privfed.agreement import DIGEST_BYTES, RoundContext
from privfed.digest import ABRIDGED_BYTES, COEFFICIENT_BYTES, COUNT_BYTES, RoundDigest
from privfed.he.additive import CkksVector, SeededSum, check_chunk
from privfed.he.codec import unpack_words
from privfed.he.params import SEED_BYTES
from privfed.identity import SIGNATURE_BYTES, Identity
from privfed.message import MAX_FRAME_BYTES, Kind, Reader, seal, unseal
from privfed.wire import LENGTH_BYTES, check_key, max_digest_payload, read_approval, read_chunks, read_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedHeads:
    """The heads of the participants' privacy ledgers in a round. Opaque here: `dp.countersign` reads and verifies them. Public.

    Args:
        statements: What each participant that keeps a ledger stated of its head, by name.
        countersignatures: What each participant, by name, signed of the statements of the others, by name.
    """

    statements: Mapping[str, bytes]
    countersignatures: Mapping[str, Mapping[str, bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenableAggregate:
    """An authentic aggregate message.

    Args:
        digest: What the server says it summed.
        coefficients: What it says it multiplied each participant's upload by. Not compared with anything yet.
        approved_by: Participants whose signed approval of this digest was verified, in the message's order.
        uploads: What the server says `digest.abridge` leaves of each participant's upload. Not compared with the digest yet.
        total: What the server says is the encrypted sum.
        heads: Of the participants' privacy ledgers.
    """

    digest: RoundDigest
    coefficients: tuple[int, ...]
    approved_by: tuple[str, ...]
    uploads: tuple[bytes, ...]
    total: CkksVector | SeededSum
    heads: SignedHeads


def encode_aggregate(
    context: RoundContext,
    identity: Identity,
    digest_message: bytes,
    approvals: Sequence[bytes],
    *,
    uploads: Sequence[bytes],
    total: CkksVector | SeededSum,
    coefficients: Sequence[int] = (),
) -> bytes:
    """The encrypted sum, with the signed digest and the signed approvals that allow its opening, and what it is checked against.

    Args:
        context: Agreement, round and attempt.
        identity: The roster's server.
        digest_message: As `encode_digest` made it.
        approvals: Approval messages.
        uploads: `digest.abridge` of the upload of each participant, in the digest's order.
        total: The sum, with seeds where `params.seeded_sums`, else whole.
        coefficients: Of each participant, where the session is scored, so that the digest does not hold them.

    Raises:
        ValueError: If the identity is not the roster's server, or the sum is not of the kind that these parameters send.
    """
    if isinstance(total, SeededSum) is not context.agreement.params.seeded_sums:
        raise ValueError("expected a sum with seeds where the parameters say so, and a whole one elsewhere, got the other kind")
    messages = b"".join(len(message).to_bytes(LENGTH_BYTES, "big") + message for message in (digest_message, *approvals))
    seeds = total.seeds if isinstance(total, SeededSum) else ()
    numbers = (coefficient.to_bytes(COEFFICIENT_BYTES, "big") for coefficient in coefficients)
    head = b"".join((len(approvals).to_bytes(COUNT_BYTES, "big"), messages, *numbers, *uploads))
    return seal(context, identity, Kind.AGGREGATE, key_id=total.key_id, payload=head, chunks=(*total.chunks, *seeds))


def decode_aggregate(data: bytes, context: RoundContext, key_id: bytes) -> OpenableAggregate:
    """The sum in an aggregate message, with the server's, and every approver's signature verified.

    Whether the approvals suffice, and whether it is the announced sum, is for the opener to decide.

    Raises:
        RoundMismatchError: If it is authentic and speaks of another key than `key_id`, or an approval is of another digest.
        PrivFedError: As `message.unseal`.
    """
    params, clients = context.agreement.params, len(context.agreement.roster.clients)
    countersigned = len(context.agreement.populations) * SIGNATURE_BYTES
    approvals_size = COUNT_BYTES + clients * (LENGTH_BYTES + MAX_FRAME_BYTES + DIGEST_BYTES + countersigned)
    digest_size = LENGTH_BYTES + MAX_FRAME_BYTES + max_digest_payload(context)
    chunk_size = params.polynomial_bytes + clients * SEED_BYTES if params.seeded_sums else params.sum_chunk_bytes
    total_size = params.chunks(context.agreement.sent_layout) * chunk_size
    per_upload = ABRIDGED_BYTES + (COEFFICIENT_BYTES if context.agreement.scored else 0)
    max_payload = approvals_size + digest_size + clients * per_upload + total_size
    frame = unseal(data, context, Kind.AGGREGATE, max_payload=max_payload)
    check_key(frame.sender, frame.key_id, key_id)
    reader = Reader(frame.payload)
    count = reader.integer(COUNT_BYTES)
    digest, statements = read_digest(reader.take(reader.integer(LENGTH_BYTES)), context, key_id)
    approvals = [read_approval(reader.take(reader.integer(LENGTH_BYTES)), context, digest) for _ in range(count)]
    scored = context.agreement.scored
    coefficients = tuple(reader.integer(COEFFICIENT_BYTES) for _ in digest.participants) if scored else digest.coefficients
    uploads = tuple(reader.take(ABRIDGED_BYTES) for _ in digest.participants)
    total = _read_total(reader, context, digest)
    heads = SignedHeads(statements=statements, countersignatures=dict(approvals))
    return OpenableAggregate(
        digest=digest,
        coefficients=coefficients,
        approved_by=tuple(name for name, _ in approvals),
        uploads=uploads,
        total=total,
        heads=heads,
    )


def _read_total(reader: Reader, context: RoundContext, digest: RoundDigest) -> CkksVector | SeededSum:
    params, layout = context.agreement.params, context.agreement.sent_layout
    chunks = read_chunks(reader, context, params.polynomial_bytes if params.seeded_sums else params.sum_chunk_bytes)
    seeds = tuple(reader.take(SEED_BYTES * len(chunks)) for _ in digest.participants) if params.seeded_sums else ()
    reader.end()
    if params.seeded_sums:
        for chunk in chunks:
            unpack_words(chunk, params)
        return SeededSum(layout=layout, params=params, key_id=digest.key_id, chunks=chunks, seeds=seeds)
    for chunk in chunks:
        check_chunk(chunk, params, fresh=False)
    return CkksVector(layout=layout, params=params, key_id=digest.key_id, chunks=chunks, fresh=False)
