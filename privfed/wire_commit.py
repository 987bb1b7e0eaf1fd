"""The messages with which clients fix their uploads before anybody sees one. They exist where a key holder has a public key.

COMMIT   client -> server    the hash of its upload, which it does not hand out yet
COMMITS  server -> clients   everybody's COMMIT, as its client signed it; on to the key holder with the request

Whoever has ciphertexts can add and subtract them, and under a public key encrypt what is to be added. A client that chose its upload when
it had seen those of the others could take them out of the sum, so that one client's update alone is left. So all choose first.
"""

from collections.abc import Mapping

from privfed.agreement import DIGEST_BYTES, RoundContext
from privfed.digest import COUNT_BYTES, RoundDigest
from privfed.errors import InvalidMessageError, OpeningRefusedError
from privfed.identity import Identity
from privfed.message import MAX_FRAME_BYTES, Kind, Reader, seal, unseal
from privfed.wire import LENGTH_BYTES, check_key

# In front of the hash, so that no other payload of one hash passes for a commitment.
_WORD = b"commit"
_COMMITMENT_BYTES = len(_WORD) + DIGEST_BYTES


def encode_commitment(context: RoundContext, identity: Identity, upload_hash: bytes, *, key_id: bytes) -> bytes:
    """A client's word which upload it will send.

    Args:
        context: Agreement, round and attempt.
        identity: The sender.
        upload_hash: `digest.hash_message` of its upload message, 32 bytes.
        key_id: Key under which the upload is encrypted.

    Raises:
        ValueError: If the identity is no client of the roster, or the hash is not 32 bytes.
    """
    if len(upload_hash) != DIGEST_BYTES:
        raise ValueError(f"expected a hash of {DIGEST_BYTES} bytes, got {len(upload_hash)}")
    return seal(context, identity, Kind.COMMIT, key_id=key_id, payload=_WORD + upload_hash)


def decode_commitment(data: bytes, context: RoundContext, key_id: bytes) -> tuple[str, bytes]:
    """Sender, and hash of the upload that it will send.

    Raises:
        RoundMismatchError: If it is authentic and speaks of another key than `key_id`.
        PrivFedError: As `message.unseal`.
    """
    frame = unseal(data, context, Kind.COMMIT, max_payload=_COMMITMENT_BYTES)
    check_key(frame.sender, frame.key_id, key_id)
    reader = Reader(frame.payload)
    word, upload_hash = reader.take(len(_WORD)), reader.take(DIGEST_BYTES)
    reader.end()
    if word != _WORD:
        raise InvalidMessageError
    return frame.sender, upload_hash


def encode_commitments(context: RoundContext, identity: Identity, commitments: Mapping[str, bytes], *, key_id: bytes) -> bytes:
    """The commitments of all clients of a round, for each of them.

    Args:
        context: Agreement, round and attempt.
        identity: The roster's server.
        commitments: Commitment messages, by sender, in roster order.
        key_id: Key under which the uploads are encrypted.

    Raises:
        ValueError: If the identity is not the roster's server.
    """
    messages = b"".join(len(message).to_bytes(LENGTH_BYTES, "big") + message for message in commitments.values())
    return seal(context, identity, Kind.COMMITS, key_id=key_id, payload=len(commitments).to_bytes(COUNT_BYTES, "big") + messages)


def decode_commitments(data: bytes, context: RoundContext, key_id: bytes) -> Mapping[str, bytes]:
    """The hash of each upload, by sender, in roster order. Every commitment is signed by its sender, and nobody sent two.

    Raises:
        RoundMismatchError: If a message is authentic and speaks of another key than `key_id`.
        PrivFedError: As `message.unseal`.
    """
    frame = unseal(data, context, Kind.COMMITS, max_payload=_max_payload(context))
    check_key(frame.sender, frame.key_id, key_id)
    reader = Reader(frame.payload)
    messages = [reader.take(reader.integer(LENGTH_BYTES)) for _ in range(reader.integer(COUNT_BYTES))]
    reader.end()
    found = [decode_commitment(message, context, key_id) for message in messages]
    committed = dict(found)
    if len(committed) != len(found) or list(committed) != [name for name in context.agreement.roster.names if name in committed]:
        raise InvalidMessageError
    return committed


def max_commitments_bytes(context: RoundContext) -> int:
    """Most bytes that the message with all commitments takes."""
    return MAX_FRAME_BYTES + _max_payload(context)


def check_committed(digest: RoundDigest, committed: Mapping[str, bytes]) -> None:
    """Refuses a digest that names an upload to which its sender had not committed.

    Args:
        digest: What is to be summed.
        committed: As `decode_commitments` gives it.

    Raises:
        OpeningRefusedError: If it does.
    """
    for name, upload_hash in zip(digest.participants, digest.upload_hashes, strict=True):
        if committed.get(name) != upload_hash:
            raise OpeningRefusedError(
                f"the digest names an upload of {name!r} to which it had not committed before it could see others; nothing was approved or "
                "opened; go on with a new round"
            )


def _max_payload(context: RoundContext) -> int:
    return COUNT_BYTES + len(context.agreement.roster.clients) * (LENGTH_BYTES + MAX_FRAME_BYTES + _COMMITMENT_BYTES)
