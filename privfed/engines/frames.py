"""How two processes of one machine talk: length-prefixed frames of one tag byte and bytes, over pipes."""

from enum import IntEnum
from typing import IO

_LENGTH_BYTES = 8


class Tag(IntEnum):
    """First byte of a frame: what is asked, or how it ended."""

    BEGIN = 1
    SETUP = 2
    START_UPLOADS = 3
    UPLOAD = 4
    CLOSE = 5
    APPROVAL = 6
    AGGREGATE = 7
    COHORT = 8
    PARTICIPANTS = 9
    MISSING_APPROVALS = 10
    NEXT_HISTORY = 11
    ABORT = 12
    RECEIVED_BYTES = 13
    PRODUCTS = 14
    RECEIVE_COEFFICIENTS = 15
    COEFFICIENTS = 16
    RELAY = 17
    STORED_UPLOAD = 18
    OPENED = 19
    RESULT = 20
    COMMIT = 21
    CLOSE_COMMITMENTS = 22
    COMMITTED = 23
    RECEIVE_HOLDER_KEY = 24
    HOLDER_KEY = 25
    DONE = 100
    REFUSED = 101


def write_frame(stream: IO[bytes], tag: Tag, payload: bytes = b"") -> None:
    """Writes one frame and flushes."""
    stream.write((len(payload) + 1).to_bytes(_LENGTH_BYTES, "big") + bytes([tag]))
    stream.write(payload)
    stream.flush()


def read_frame(stream: IO[bytes]) -> tuple[Tag, bytes]:
    """Reads one frame.

    Raises:
        EOFError: If the other side is gone.
    """
    prefix = stream.read(_LENGTH_BYTES)
    if len(prefix) < _LENGTH_BYTES:
        raise EOFError("the other process is gone")
    frame = stream.read(int.from_bytes(prefix, "big"))
    if len(frame) < int.from_bytes(prefix, "big"):
        raise EOFError("the other process is gone")
    return Tag(frame[0]), frame[1:]
