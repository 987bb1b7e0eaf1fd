"""The messages that only `ThresholdKey` has: shares of the clients' secrets of a round, encrypted to each other.

SETUP   client -> server             one SHARE for every client of the roster, in its order; the key id in the frame
SHARE   client -> client, inside     for whom, and the share, encrypted to it: signed on its own, so that whoever gets it sees from whom
SHARES  server -> client             the SHAREs that the clients of the round made for this one
"""

from collections.abc import Mapping

from privfed.agreement import RoundContext
from privfed.digest import COUNT_BYTES
from privfed.errors import InvalidMessageError
from privfed.he.threshold import key_id
from privfed.hpke import SEALED_OVERHEAD_BYTES
from privfed.identity import Identity
from privfed.message import MAX_FRAME_BYTES, MAX_TEXT_BYTES, Kind, Reader, seal, unseal, write_text
from privfed.wire import LENGTH_BYTES, check_key


def sealed_share_bytes(context: RoundContext) -> int:
    """Bytes of an encrypted share: one polynomial, and what encryption adds."""
    return context.agreement.params.polynomial_bytes + SEALED_OVERHEAD_BYTES


def encode_share(context: RoundContext, identity: Identity, *, recipient: str, sealed: bytes) -> bytes:
    """A share of the sender's secret.

    Args:
        context: Agreement, round and attempt.
        identity: The sender.
        recipient: Who alone can decrypt it.
        sealed: The share, encrypted.

    Raises:
        ValueError: If the identity is no client of the roster, or the share has another size.
    """
    if len(sealed) != sealed_share_bytes(context):
        raise ValueError(f"expected an encrypted share of {sealed_share_bytes(context)} bytes, got {len(sealed)}")
    return seal(context, identity, Kind.SHARE, key_id=key_id(context.digest), payload=write_text(recipient) + sealed)


def decode_share(data: bytes, context: RoundContext) -> tuple[str, str, bytes]:
    """Sender, recipient and encrypted share of a share message.

    Raises:
        PrivFedError: As `message.unseal`.
    """
    size = sealed_share_bytes(context)
    frame = unseal(data, context, Kind.SHARE, max_payload=1 + MAX_TEXT_BYTES + size)
    check_key(frame.sender, frame.key_id, key_id(context.digest))
    reader = Reader(frame.payload)
    recipient, sealed = reader.text(), reader.take(size)
    reader.end()
    return frame.sender, recipient, sealed


def encode_dealt_setup(context: RoundContext, identity: Identity, shares: Mapping[str, bytes]) -> bytes:
    """A client's word that it is there, and its share messages for all.

    Args:
        context: Agreement, round and attempt.
        identity: The sender.
        shares: Its share message for each client of the roster, by recipient.

    Raises:
        ValueError: If there is not one for each client.
    """
    names = context.agreement.roster.names
    if set(shares) != set(names):
        raise ValueError("expected one share for every client of the roster")
    payload = b"".join(_prefixed(shares[name]) for name in names)
    return seal(context, identity, Kind.SETUP, key_id=key_id(context.digest), payload=payload)


def decode_dealt_setup(data: bytes, context: RoundContext) -> tuple[str, bytes, Mapping[str, bytes]]:
    """Sender, key id, and share messages by recipient, of a setup message. Each share is the sender's own, for the right recipient.

    Raises:
        PrivFedError: As `message.unseal`.
    """
    names = context.agreement.roster.names
    frame = unseal(data, context, Kind.SETUP, max_payload=len(names) * _most_share_bytes(context))
    check_key(frame.sender, frame.key_id, key_id(context.digest))
    reader = Reader(frame.payload)
    shares = {name: reader.take(reader.integer(LENGTH_BYTES)) for name in names}
    reader.end()
    for name, share in shares.items():
        if decode_share(share, context)[:2] != (frame.sender, name):
            raise InvalidMessageError
    return frame.sender, frame.key_id, shares


def encode_relay(context: RoundContext, identity: Identity, shares: Mapping[str, bytes]) -> bytes:
    """What the clients of a round made for one of them.

    Args:
        context: Agreement, round and attempt.
        identity: The roster's server.
        shares: Share messages, by sender.

    Raises:
        ValueError: If the identity is not the roster's server.
    """
    entries = (write_text(name) + _prefixed(share) for name, share in shares.items())
    payload = len(shares).to_bytes(COUNT_BYTES, "big") + b"".join(entries)
    return seal(context, identity, Kind.SHARES, key_id=key_id(context.digest), payload=payload)


def decode_relay(data: bytes, context: RoundContext) -> Mapping[str, bytes]:
    """Share messages as the server says that they came, by sender, in roster order. They are not verified here.

    Raises:
        PrivFedError: As `message.unseal`.
    """
    names = context.agreement.roster.names
    most = COUNT_BYTES + len(names) * (1 + MAX_TEXT_BYTES + _most_share_bytes(context))
    frame = unseal(data, context, Kind.SHARES, max_payload=most)
    check_key(frame.sender, frame.key_id, key_id(context.digest))
    reader = Reader(frame.payload)
    found = [(reader.text(), reader.take(reader.integer(LENGTH_BYTES))) for _ in range(reader.integer(COUNT_BYTES))]
    reader.end()
    shares = dict(found)
    if len(shares) != len(found) or list(shares) != [name for name in names if name in shares]:
        raise InvalidMessageError
    return shares


def _prefixed(message: bytes) -> bytes:
    return len(message).to_bytes(LENGTH_BYTES, "big") + message


def _most_share_bytes(context: RoundContext) -> int:
    return LENGTH_BYTES + MAX_FRAME_BYTES + 1 + MAX_TEXT_BYTES + sealed_share_bytes(context)
