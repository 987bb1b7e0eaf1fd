"""The messages between approvals and aggregate where a rule looks at inner products: masked products there, coefficients back.

PRODUCTS      the digest, its approvals, a masked product for each pair of uploads
COEFFICIENTS  the hash of the digest, and a coefficient for each participant: all zero if nothing is to be opened
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from privfed.agreement import DIGEST_BYTES, RoundContext
from privfed.digest import COEFFICIENT_BYTES, RoundDigest
from privfed.errors import InvalidMessageError, RoundMismatchError, UnsupportedInThisModeError
from privfed.he.product import MaskedProducts, pairs
from privfed.he.product_params import ProductParams
from privfed.identity import Identity
from privfed.message import Kind, Reader, seal, unseal
from privfed.wire import check_key
from privfed.wire_approved import max_approved_payload, read_approved, write_approved


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenableProducts:
    """An authentic products message.

    Args:
        digest: What the server says it multiplied.
        approved_by: Participants whose signed approval of this digest was verified, in the message's order.
        products: What the server says are the masked products.
        seed: What the signs of the chunks of a sketch follow from.
    """

    digest: RoundDigest
    approved_by: tuple[str, ...]
    products: MaskedProducts
    seed: bytes


def product_params(context: RoundContext) -> ProductParams:
    """Parameters of a scored session in which the clients open what the server multiplied.

    Raises:
        UnsupportedInThisModeError: If the session is none.
    """
    params = context.agreement.params
    if not isinstance(params, ProductParams) or not context.agreement.weighed_by_clients:
        raise UnsupportedInThisModeError("in this session the server needs no inner products; nothing was multiplied")
    return params


def sketch_seed(context: RoundContext, digest: RoundDigest, approvals: Sequence[bytes]) -> bytes:
    """What the signs of chunks follow from, 32 bytes: nobody knows it before all participants have signed which uploads there are."""
    state = hashlib.sha256(b"privfed sketch seed v1" + digest.digest(context))
    for approval in approvals:
        state.update(hashlib.sha256(approval).digest())
    return state.digest()


def encode_products(
    context: RoundContext, identity: Identity, digest_message: bytes, approvals: Sequence[bytes], *, products: MaskedProducts
) -> bytes:
    """Masked products, with the signed digest and the signed approvals that allow their opening.

    Args:
        context: Agreement, round and attempt.
        identity: The roster's server.
        digest_message: As `encode_digest` made it.
        approvals: Approval messages, in the order in which the seed was made of them.
        products: Of all participants, in the digest's order.

    Raises:
        ValueError: If the identity is not the roster's server.
    """
    head = write_approved(digest_message, approvals)
    return seal(context, identity, Kind.PRODUCTS, key_id=products.key_id, payload=head, chunks=products.chunks)


def decode_products(data: bytes, context: RoundContext, key_id: bytes) -> OpenableProducts:
    """The masked products in a products message, with the server's and every approver's signature verified.

    Whether the approvals suffice is for the opener to decide.

    Raises:
        RoundMismatchError: If it is authentic and speaks of another key than `key_id`.
        PrivFedError: As `message.unseal`.
    """
    params, clients = context.agreement.params, len(context.agreement.roster.clients)
    if not isinstance(params, ProductParams) or not context.agreement.weighed_by_clients:
        raise InvalidMessageError  # nobody sends these in such a session
    most = max_approved_payload(context) + len(pairs(clients)) * params.product_bytes
    frame = unseal(data, context, Kind.PRODUCTS, max_payload=most)
    check_key(frame.sender, frame.key_id, key_id)
    reader = Reader(frame.payload)
    approved = read_approved(reader, context, key_id)
    digest = approved.digest
    uploads = len(digest.participants)
    chunks = tuple(reader.take(params.product_bytes) for _ in pairs(uploads))
    reader.end()
    if uploads < 2:
        raise InvalidMessageError
    products = MaskedProducts(params=params, key_id=key_id, count=uploads, chunks=chunks)
    seed = sketch_seed(context, digest, approved.approvals)
    return OpenableProducts(digest=digest, approved_by=approved.approved_by, products=products, seed=seed)


def encode_coefficients(context: RoundContext, identity: Identity, digest: RoundDigest, coefficients: Sequence[int]) -> bytes:
    """What an opener found: a coefficient for each participant, and of the inner products nothing.

    Raises:
        ValueError: If the identity is no client of the roster, or there is not one coefficient for each participant.
    """
    if len(coefficients) != len(digest.participants):
        raise ValueError(f"expected one coefficient for each of {len(digest.participants)} participants, got {len(coefficients)}")
    numbers = b"".join(coefficient.to_bytes(COEFFICIENT_BYTES, "big") for coefficient in coefficients)
    return seal(context, identity, Kind.COEFFICIENTS, key_id=digest.key_id, payload=digest.digest(context) + numbers)


def decode_coefficients(data: bytes, context: RoundContext, digest: RoundDigest) -> tuple[str, tuple[int, ...]]:
    """Name of an opener, and the coefficients that it found for this digest.

    Raises:
        RoundMismatchError: If it is authentic and speaks of another digest.
        PrivFedError: As `message.unseal`.
    """
    if not context.agreement.weighed_by_clients:
        raise InvalidMessageError
    most = DIGEST_BYTES + len(context.agreement.roster.clients) * COEFFICIENT_BYTES
    frame = unseal(data, context, Kind.COEFFICIENTS, max_payload=most)
    check_key(frame.sender, frame.key_id, digest.key_id)
    reader = Reader(frame.payload)
    if reader.take(DIGEST_BYTES) != digest.digest(context):
        raise RoundMismatchError(f"{frame.sender!r} weighed another digest; its message was dropped and nothing happened")
    coefficients = tuple(reader.integer(COEFFICIENT_BYTES) for _ in digest.participants)
    reader.end()
    return frame.sender, coefficients
