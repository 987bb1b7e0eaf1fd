"""The messages that only `EscrowKey` has.

REQUEST  server -> key holder    the digest, the approvals and the commitments; the uploads follow as their clients signed them
OPENED   key holder -> clients   the request, and the opened sum, encrypted to every client
"""

from collections.abc import Sequence
from dataclasses import replace

from privfed.agreement import RoundContext
from privfed.digest import RoundDigest
from privfed.errors import InvalidMessageError
from privfed.identity import Identity
from privfed.message import MAX_FRAME_BYTES, Kind, Reader, seal, unseal
from privfed.trust import EscrowTrust
from privfed.wire import COUNT_BYTES, LENGTH_BYTES, check_key
from privfed.wire_aggregate import OpenableAggregate, SealedSum, max_approved_payload, read_approved
from privfed.wire_commit import check_committed, decode_commitments, max_commitments_bytes

_SEALED_KEY_BYTES = 32 + 32 + 16
_TAG_BYTES = 16


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
    messages = b"".join(len(message).to_bytes(LENGTH_BYTES, "big") + message for message in (digest_message, *approvals, commitments))
    return seal(context, identity, Kind.REQUEST, key_id=key_id, payload=len(approvals).to_bytes(COUNT_BYTES, "big") + messages)


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
    return approved.openable(coefficients=approved.digest.coefficients, uploads=(), total=total)


def encode_opened(context: RoundContext, identity: Identity, request: bytes, release: SealedSum, *, key_id: bytes) -> bytes:
    """What the key holder opened, for the clients.

    Raises:
        ValueError: If the identity is not the key holder's.
    """
    keys = b"".join(release.sealed[name] for name in context.agreement.roster.names)
    head = len(request).to_bytes(LENGTH_BYTES, "big") + request + keys
    return seal(context, identity, Kind.OPENED, key_id=key_id, payload=head, chunks=(release.ciphertext,))


def decode_opened(data: bytes, context: RoundContext, key_id: bytes) -> tuple[bytes, OpenableAggregate]:
    """The request that was opened, and what came of it, with every signature verified.

    Raises:
        PrivFedError: As `decode_request`.
    """
    names = context.agreement.roster.names
    most_numbers = 8 * context.agreement.sent_layout.size + _TAG_BYTES
    most = LENGTH_BYTES + MAX_FRAME_BYTES + _max_request_payload(context) + len(names) * _SEALED_KEY_BYTES + most_numbers
    frame = unseal(data, context, Kind.OPENED, max_payload=most)
    check_key(frame.sender, frame.key_id, key_id)
    reader = Reader(frame.payload)
    request = reader.take(reader.integer(LENGTH_BYTES))
    message = decode_request(request, context, key_id)
    sealed = {name: reader.take(_SEALED_KEY_BYTES) for name in names}
    release = SealedSum(sealed=sealed, ciphertext=bytes(reader.rest()))
    return request, replace(message, total=release)


def escrow_trust(context: RoundContext) -> EscrowTrust:
    """The terms of the key holder.

    Raises:
        InvalidMessageError: If there is none in this session.
    """
    trust = context.agreement.trust
    if not isinstance(trust, EscrowTrust):
        raise InvalidMessageError
    return trust


def opened_digest(data: bytes, context: RoundContext, key_id: bytes) -> RoundDigest:
    """The digest in an opened message."""
    return decode_opened(data, context, key_id)[1].digest


def _max_request_payload(context: RoundContext) -> int:
    return max_approved_payload(context) + LENGTH_BYTES + max_commitments_bytes(context)
