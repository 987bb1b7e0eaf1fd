r"""The frame of every message: who says what kind of thing about which round, signed.

    magic "privfed\0" | version 1 | kind 1 | sender | session 16 | round 4 | attempt 4 | history 32 | agreement 32 | hints 44 | key id 16 |
    library versions | payload length 8 | payload | Ed25519 signature 64

Numbers are big-endian; sender and library versions are ASCII with a length byte in front. The agreement is `Agreement.digest`, which
fixes all that was agreed; the hints are the first four bytes of each of `Agreement.parts`, for naming what differs if it does. The first
message of a party says its library versions, later ones have none. The signature covers every byte before it. Nothing behind the sender
is looked at before the length was bounded and the signature verified; nothing in the payload before the whole header agrees with what the
receiver expects.

A receiver that expects a message knows all of its header but the sender. So inside of another message it travels without: see `detach`.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from io import BytesIO

from privfed.agreement import DIGEST_BYTES, SESSION_BYTES, RoundContext
from privfed.errors import (
    AgreementMismatchError,
    HistoryMismatchError,
    InvalidMessageError,
    LayoutMismatchError,
    ParametersMismatchError,
    RoundMismatchError,
)
from privfed.he.params import KEY_ID_BYTES
from privfed.identity import SIGNATURE_BYTES, Identity, PublicIdentity
from privfed.trust import EscrowTrust

MAGIC = b"privfed\0"
FORMAT_VERSION = 2
MAX_TEXT_BYTES = 255
_PREFIX = struct.Struct(f">{len(MAGIC)}sBB")
_ROUND = struct.Struct(f">{SESSION_BYTES}sII{DIGEST_BYTES}s")
_PARTS = ("roster", "params", "layout", "start", "weights", "rule", "policy", "populations", "silo noise", "private weights", "trust mode")
_HINT_BYTES = 4
_AGREED_BYTES = DIGEST_BYTES + len(_PARTS) * _HINT_BYTES
_SIZE_BYTES = 8
MAX_FRAME_BYTES = _PREFIX.size + _ROUND.size + _AGREED_BYTES + KEY_ID_BYTES + 2 * (1 + MAX_TEXT_BYTES) + _SIZE_BYTES + SIGNATURE_BYTES


class Kind(IntEnum):
    """What a message says. The number is a byte on the wire and is never given to another kind."""

    SETUP = 1
    UPLOAD = 2
    DIGEST = 3
    APPROVAL = 4
    AGGREGATE = 5
    ABORT = 6
    PRODUCTS = 16
    COEFFICIENTS = 17
    SHARE = 18
    SHARES = 19
    REQUEST = 20
    OPENED = 21
    COMMIT = 22
    COMMITS = 23
    HOLDER_KEY = 24


_FIRST = (Kind.SETUP, Kind.HOLDER_KEY)
_FROM_HOLDER = (Kind.OPENED, Kind.HOLDER_KEY)
_FROM_SERVER = (Kind.DIGEST, Kind.AGGREGATE, Kind.PRODUCTS, Kind.SHARES, Kind.REQUEST, Kind.COMMITS)


class Reader:
    """Takes fields off bytes from outside, front to back.

    Raises:
        InvalidMessageError: From every method, if the bytes are not what they should be.
    """

    __slots__ = ("_data", "_position")

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)
        self._position = 0

    def take(self, size: int) -> bytes:
        """The next `size` bytes."""
        if size > len(self._data) - self._position:
            raise InvalidMessageError
        self._position += size
        return bytes(self._data[self._position - size : self._position])

    def integer(self, size: int) -> int:
        """The next `size` bytes as an unsigned integer."""
        return int.from_bytes(self.take(size), "big")

    def text(self) -> str:
        """A length byte and so many printable ASCII characters."""
        raw = self.take(self.integer(1))
        if not all(32 <= byte < 127 for byte in raw):
            raise InvalidMessageError
        return raw.decode("ascii")

    def rest(self) -> memoryview:
        """What was not taken yet."""
        return self._data[self._position :]

    def end(self) -> None:
        """Demands that nothing is left."""
        if self._position != len(self._data):
            raise InvalidMessageError


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Frame:
    """A message whose length, signature and header were checked.

    Args:
        sender: Pinned party that signed it.
        key_id: Key to which it belongs.
        payload: Not parsed yet.
    """

    sender: str
    key_id: bytes
    payload: memoryview


def write_text(text: str) -> bytes:
    """Length byte and ASCII characters.

    Raises:
        ValueError: If the text is longer than 255 characters or not ASCII.
    """
    raw = text.encode("ascii")
    if len(raw) > MAX_TEXT_BYTES:
        raise ValueError(f"expected at most {MAX_TEXT_BYTES} characters, got {len(raw)}")
    return len(raw).to_bytes(1, "big") + raw


def seal(context: RoundContext, identity: Identity, kind: Kind, *, key_id: bytes, payload: bytes, chunks: Sequence[bytes] = ()) -> bytes:
    """Frames and signs a payload.

    Args:
        context: Agreement, round and attempt.
        identity: Who says it.
        kind: What it says.
        key_id: Key to which it belongs.
        payload: The payload, or its beginning.
        chunks: The rest of a long one, which is then copied once less.

    Raises:
        ValueError: If the identity is not the one that the roster pins for this kind of message.
    """
    if identity.public not in _speakers(context, kind):
        raise ValueError(f"expected an identity that the roster pins for {kind.name}, got {identity.name!r}")
    size = len(payload) + sum(len(chunk) for chunk in chunks)
    parts = (_header(context, kind, identity.name, key_id=key_id, size=size), payload, *chunks)
    # A long message is neither copied for the signature behind it, nor does it grow piece by piece.
    message = BytesIO()
    message.seek(sum(len(part) for part in parts))
    message.write(bytes(SIGNATURE_BYTES))
    message.seek(0)
    message.writelines(parts)
    with message.getbuffer() as whole, whole[:-SIGNATURE_BYTES] as body:
        signature = identity.sign(body)
    message.write(signature)
    return message.getvalue()


def unseal(data: bytes, context: RoundContext, kind: Kind, *, max_payload: int) -> Frame:
    """Verifies length, signature and header of a message, in this order.

    Args:
        data: Bytes from outside.
        context: What the receiver takes part in.
        kind: The only kind that is acceptable here.
        max_payload: Largest payload in bytes that this kind can have in this context.

    Raises:
        InvalidMessageError: If it is not an authentic message of this kind from a pinned party.
        RoundMismatchError: If it is authentic and belongs to another session, round or attempt.
        HistoryMismatchError: If the sender opened other rounds before this one.
        ParametersMismatchError: If the sender has other encryption parameters, or other versions of SEAL or TenSEAL.
        LayoutMismatchError: If the sender has another layout.
        AgreementMismatchError: If the sender has another idea of anything else that was agreed.
    """
    if len(data) > MAX_FRAME_BYTES + max_payload or len(data) < SIGNATURE_BYTES:
        raise InvalidMessageError
    body = memoryview(data)[:-SIGNATURE_BYTES]
    reader = Reader(body)
    magic, version, number = _PREFIX.unpack(reader.take(_PREFIX.size))
    if magic != MAGIC or version != FORMAT_VERSION or number != kind:
        raise InvalidMessageError
    name = reader.text()
    sender = next((party for party in _speakers(context, kind) if party.name == name), None)
    if sender is None:
        raise InvalidMessageError
    sender.verify(body, bytes(data[-SIGNATURE_BYTES:]))
    _check_header(reader, context, name)
    key_id = reader.take(KEY_ID_BYTES)
    versions = reader.text()
    if versions and kind not in _FIRST:
        raise InvalidMessageError
    size = reader.integer(_SIZE_BYTES)
    if size != len(reader.rest()) or size > max_payload:
        raise InvalidMessageError
    return Frame(sender=name, key_id=key_id, payload=reader.rest())


def detach(data: bytes) -> tuple[str, bytes, bytes]:
    """Sender, payload and signature of a verified message; with them and the header that he expects, a receiver has the message again."""
    reader = Reader(memoryview(data)[:-SIGNATURE_BYTES])
    reader.take(_PREFIX.size)
    sender = reader.text()
    reader.take(_ROUND.size + _AGREED_BYTES + KEY_ID_BYTES)
    reader.text()
    reader.take(_SIZE_BYTES)
    return sender, bytes(reader.rest()), bytes(data[-SIGNATURE_BYTES:])


def attach(context: RoundContext, kind: Kind, *, sender: str, key_id: bytes, payload: bytes, signature: bytes) -> bytes:
    """The message of which `detach` left these, if the sender signed it for the same context and key. Nothing is verified here.

    Args:
        context: What the receiver takes part in.
        kind: Of the message; none that says library versions.
        sender: Its name.
        key_id: Key to which the message belongs.
        payload: Of the message.
        signature: 64 bytes.
    """
    return _header(context, kind, sender, key_id=key_id, size=len(payload)) + payload + signature


def _header(context: RoundContext, kind: Kind, sender: str, *, key_id: bytes, size: int) -> bytes:
    agreement = context.agreement
    return b"".join(
        (
            _PREFIX.pack(MAGIC, FORMAT_VERSION, kind),
            write_text(sender),
            _ROUND.pack(agreement.session, context.round, context.attempt, context.history),
            agreement.digest,
            *(agreement.parts[part][:_HINT_BYTES] for part in _PARTS),
            key_id,
            write_text(agreement.params.versions if kind in _FIRST else ""),
            size.to_bytes(_SIZE_BYTES, "big"),
        )
    )


def _speakers(context: RoundContext, kind: Kind) -> tuple[PublicIdentity, ...]:
    roster, trust = context.agreement.roster, context.agreement.trust
    if kind in _FROM_HOLDER:
        return (trust.holder,) if isinstance(trust, EscrowTrust) else ()
    return (roster.server,) if kind in _FROM_SERVER else roster.clients


def _check_header(reader: Reader, context: RoundContext, sender: str) -> None:
    """Compares the signed header with what the receiver agreed to; names what differs."""
    agreement = context.agreement
    session, number, attempt, history = _ROUND.unpack(reader.take(_ROUND.size))
    agreed = reader.take(DIGEST_BYTES)
    hints = {part: reader.take(_HINT_BYTES) for part in _PARTS}
    differing = [part for part in _PARTS if hints[part] != agreement.parts[part][:_HINT_BYTES]]
    if session != agreement.session:
        raise RoundMismatchError(f"the message of {sender!r} belongs to another session; it was dropped and nothing happened")
    if (number, attempt) != (context.round, context.attempt):
        raise RoundMismatchError(
            f"the message of {sender!r} belongs to round {number}, attempt {attempt}, and not to round {context.round}, "
            f"attempt {context.attempt}; it was dropped and nothing happened"
        )
    if agreed == agreement.digest and differing:
        raise InvalidMessageError
    if "params" in differing:
        after_key_id = Reader(reader.rest())
        after_key_id.take(KEY_ID_BYTES)
        theirs = after_key_id.text() or "it did not say which"
        raise ParametersMismatchError(
            f"{sender!r} has other encryption parameters or library versions ({theirs}; here {agreement.params.versions}); "
            "its message was dropped and nothing happened; install the same minor versions and agree on the parameters"
        )
    if "layout" in differing:
        raise LayoutMismatchError(f"{sender!r} has another layout of the model; its message was dropped and nothing happened")
    if agreed != agreement.digest:
        what = f"the {' and the '.join(differing)}" if differing else "what was agreed"
        raise AgreementMismatchError(
            f"{sender!r} has another idea of {what}; its message was dropped and nothing happened; settle the agreement and start a new "
            "session"
        )
    if history != context.history:
        raise HistoryMismatchError(
            f"{sender!r} has not opened the same rounds before round {number} as this party; its message was dropped and nothing "
            "happened; whoever missed a round opens its aggregate first"
        )
