"""What a key holder opened, on its way to the clients: encrypted to each of them, so that the server that carries it cannot read it."""

import math
import os
import struct

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from numpy.typing import NDArray

from privfed.agreement import RoundContext
from privfed.errors import InvalidMessageError
from privfed.keys.party import Party, seal
from privfed.keys.roster import Member
from privfed.message import write_text
from privfed.trust import EscrowTrust
from privfed.wire_aggregate import SealedSum

_MAGIC = b"privfed release v1\n"
_CONTENT_KEY_BYTES = 32
# Each content key encrypts one release.
_NONCE = bytes(12)
_SCALE = struct.Struct(">d")


def seal_release(
    grid_sum: NDArray[np.int64], context: RoundContext, trust: EscrowTrust, *, digest: bytes, scale: float | None = None
) -> SealedSum:
    """Encrypts opened sums of grid points to every client of the roster.

    Args:
        grid_sum: Of shape (sent_layout.size,).
        context: Agreement, round and attempt.
        trust: The keys to encrypt to.
        digest: `RoundDigest.digest` of what was opened, 32 bytes.
        scale: `Decision.scale` of a scored session; None in any other.
    """
    content_key = os.urandom(_CONTENT_KEY_BYTES)
    sealed: dict[str, bytes] = {}
    for public in context.agreement.roster.clients:
        recipient = Member(identity=public, encryption_key=trust.encryption_keys[public.name])
        sealed[public.name] = seal(content_key, recipient, info=_info(context, digest) + write_text(public.name))
    # As many bytes of the little-endian number, which is made positive, as the largest sum needs.
    largest = context.agreement.params.largest_sum
    numbers = (grid_sum + largest).astype("<u8").view(np.uint8).reshape(-1, 8)[:, : context.agreement.opened_bytes]
    head = b"" if scale is None else _SCALE.pack(scale)
    ciphertext = ChaCha20Poly1305(content_key).encrypt(_NONCE, head + numbers.tobytes(), _info(context, digest))
    return SealedSum(sealed=sealed, ciphertext=ciphertext)


def open_release(release: SealedSum, context: RoundContext, party: Party, *, digest: bytes) -> NDArray[np.int64]:
    """The opened sums of grid points, of shape (sent_layout.size,).

    Raises:
        InvalidMessageError: If they were not encrypted to this client, for this digest, as `seal_release` does it.
    """
    return _grid_sum(_decrypted(release, context, party, digest=digest), context)


def open_scored_release(release: SealedSum, context: RoundContext, party: Party, *, digest: bytes) -> tuple[NDArray[np.int64], float]:
    """The opened sums of a scored session, and by what their mean is multiplied before it moves the model.

    Raises:
        InvalidMessageError: As `open_release`; or if the scale is no positive number.
    """
    data = _decrypted(release, context, party, digest=digest)
    if len(data) < _SCALE.size:
        raise InvalidMessageError
    scale = float(_SCALE.unpack_from(data)[0])
    if not 0 < scale < math.inf:
        raise InvalidMessageError
    return _grid_sum(data[_SCALE.size :], context), scale


def _decrypted(release: SealedSum, context: RoundContext, party: Party, *, digest: bytes) -> bytes:
    content_key = party.unseal(release.sealed[party.name], info=_info(context, digest) + write_text(party.name))
    try:
        return ChaCha20Poly1305(content_key).decrypt(_NONCE, release.ciphertext, _info(context, digest))
    except (InvalidTag, ValueError):
        raise InvalidMessageError from None


def _grid_sum(data: bytes, context: RoundContext) -> NDArray[np.int64]:
    bytes_each, size, largest = context.agreement.opened_bytes, context.agreement.sent_layout.size, context.agreement.params.largest_sum
    if len(data) != size * bytes_each:
        raise InvalidMessageError
    numbers = np.zeros((size, 8), np.uint8)
    numbers[:, :bytes_each] = np.frombuffer(data, np.uint8).reshape(size, bytes_each)
    values = numbers.reshape(-1).view("<u8")
    if (values > 2 * largest).any():
        raise InvalidMessageError
    return values.astype(np.int64) - largest


def _info(context: RoundContext, digest: bytes) -> bytes:
    return _MAGIC + context.digest + digest
