"""The message that ends a round: the encrypted sum, with all that its opener needs to trust it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from privfed.agreement import RoundContext
from privfed.digest import ABRIDGED_BYTES, COEFFICIENT_BYTES, RoundDigest
from privfed.he.additive import CkksVector, SeededSum, check_chunk
from privfed.he.codec import unpack_words
from privfed.he.params import SEED_BYTES
from privfed.he.threshold import OnePolynomialVector, unpack_polynomial
from privfed.identity import Identity
from privfed.message import Kind, Reader, seal, unseal
from privfed.trust import ThresholdTrust
from privfed.wire import check_key, read_chunks
from privfed.wire_approved import Approved, SignedHeads, max_approved_payload, read_approved, write_approved


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SealedSum:
    """An opened sum, encrypted to every client: what a key holder publishes. Public.

    Args:
        sealed: The content key for each client, by name, encrypted to it.
        ciphertext: The sums, encrypted under the content key.
    """

    sealed: Mapping[str, bytes]
    ciphertext: bytes


EncryptedSum = CkksVector | SeededSum | OnePolynomialVector
Total = EncryptedSum | SealedSum
"""An encrypted sum as it travels, by the trust mode and the parameters of the session."""


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
        answers: The sum of shares of each approver, by name; empty in trust modes that have none.
    """

    digest: RoundDigest
    coefficients: tuple[int, ...]
    approved_by: tuple[str, ...]
    uploads: tuple[bytes, ...]
    total: Total
    heads: SignedHeads
    answers: Mapping[str, bytes]


def encode_aggregate(
    context: RoundContext,
    identity: Identity,
    digest_message: bytes,
    approvals: Sequence[bytes],
    *,
    uploads: Sequence[bytes],
    total: EncryptedSum,
    coefficients: Sequence[int] = (),
) -> bytes:
    """The encrypted sum, with the signed digest and the signed approvals that allow its opening, and what it is checked against.

    Args:
        context: Agreement, round and attempt.
        identity: The roster's server.
        digest_message: As `encode_digest` made it.
        approvals: Approval messages.
        uploads: `digest.abridge` of the upload of each participant, in the digest's order; none where uploads have no tags.
        total: The sum, with seeds where `params.seeded_sums`, else whole.
        coefficients: Of each participant, where the session is scored, so that the digest does not hold them.

    Raises:
        ValueError: If the identity is not the roster's server, or the sum is not of the kind that these parameters send.
    """
    if not isinstance(total, _kind_of_total(context)):
        raise ValueError("expected a sum of the kind that the trust mode and the parameters say, got the other kind")
    seeds = total.seeds if isinstance(total, SeededSum) else ()
    numbers = (coefficient.to_bytes(COEFFICIENT_BYTES, "big") for coefficient in coefficients)
    head = b"".join((write_approved(digest_message, approvals), *numbers, *uploads))
    return seal(context, identity, Kind.AGGREGATE, key_id=total.key_id, payload=head, chunks=(*total.chunks, *seeds))


def decode_aggregate(data: bytes, context: RoundContext, key_id: bytes) -> OpenableAggregate:
    """The sum in an aggregate message, with the server's, and every approver's signature verified.

    Whether the approvals suffice, and whether it is the announced sum, is for the opener to decide.

    Raises:
        RoundMismatchError: If it is authentic and speaks of another key than `key_id`.
        PrivFedError: As `message.unseal`.
    """
    params, clients = context.agreement.params, len(context.agreement.roster.clients)
    sizes = _total_chunk_sizes(context)
    total_size = sum(sizes) + (len(sizes) * clients * SEED_BYTES if params.seeded_sums else 0)
    per_upload = ABRIDGED_BYTES + (COEFFICIENT_BYTES if context.agreement.scored else 0)
    max_payload = max_approved_payload(context) + clients * per_upload + total_size
    frame = unseal(data, context, Kind.AGGREGATE, max_payload=max_payload)
    check_key(frame.sender, frame.key_id, key_id)
    reader = Reader(frame.payload)
    approved = read_approved(reader, context, key_id)
    digest = approved.digest
    scored = context.agreement.scored
    coefficients = tuple(reader.integer(COEFFICIENT_BYTES) for _ in digest.participants) if scored else digest.coefficients
    uploads = tuple(reader.take(ABRIDGED_BYTES) for _ in digest.participants) if context.agreement.upload_tags_bytes else ()
    return openable(approved, coefficients=coefficients, uploads=uploads, total=_read_total(reader, context, digest))


def openable(approved: Approved, *, coefficients: tuple[int, ...], uploads: tuple[bytes, ...], total: Total) -> OpenableAggregate:
    """What was approved, with what is to be opened."""
    return OpenableAggregate(
        digest=approved.digest,
        coefficients=coefficients,
        approved_by=approved.approved_by,
        uploads=uploads,
        total=total,
        heads=approved.heads,
        answers=approved.answers,
    )


def _kind_of_total(context: RoundContext) -> type[EncryptedSum]:
    if isinstance(context.agreement.trust, ThresholdTrust):
        return OnePolynomialVector
    return SeededSum if context.agreement.params.seeded_sums else CkksVector


def _total_chunk_sizes(context: RoundContext) -> tuple[int, ...]:
    params, layout = context.agreement.params, context.agreement.sent_layout
    kind = _kind_of_total(context)
    if kind is OnePolynomialVector:
        return (params.polynomial_bytes,) * params.chunks(layout)
    return params.sum_chunk_sizes(layout) if kind is CkksVector else params.first_polynomial_sizes(layout)


def _read_total(reader: Reader, context: RoundContext, digest: RoundDigest) -> EncryptedSum:
    params, layout = context.agreement.params, context.agreement.sent_layout
    chunks = read_chunks(reader, _total_chunk_sizes(context))
    if _kind_of_total(context) is OnePolynomialVector:
        reader.end()
        for chunk in chunks:
            unpack_polynomial(chunk, params)
        return OnePolynomialVector(layout=layout, params=params, key_id=digest.key_id, chunks=chunks)
    seeds = tuple(reader.take(SEED_BYTES * len(chunks)) for _ in digest.participants) if params.seeded_sums else ()
    reader.end()
    if params.seeded_sums:
        for chunk in chunks:
            unpack_words(chunk, params)
        return SeededSum(layout=layout, params=params, key_id=digest.key_id, chunks=chunks, seeds=seeds)
    for chunk, size in zip(chunks, params.first_polynomial_sizes(layout), strict=True):
        check_chunk(chunk, params, size, fresh=False)
    return CkksVector(layout=layout, params=params, key_id=digest.key_id, chunks=chunks, fresh=False)
