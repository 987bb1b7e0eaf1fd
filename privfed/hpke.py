"""Sealing to an X25519 key: HPKE (RFC 9180), HKDF-SHA256, ChaCha20-Poly1305, with a fresh key each time."""

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

from privfed.errors import InvalidMessageError

SEALED_OVERHEAD_BYTES = 48
"""By how much sealed bytes are longer: the encapsulated key, 32 bytes, and the tag, 16."""

# Base mode: the sender is authenticated by its signature.
_SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)


def seal_to(secret: bytes, encryption_key: bytes, *, info: bytes) -> bytes:
    """Encrypts bytes to whoever has the other half of a key.

    Args:
        secret: The bytes. Private.
        encryption_key: X25519 public key, 32 raw bytes, not of small order.
        info: What they are for, bound to them. Public.
    """
    return _SUITE.encrypt(secret, X25519PublicKey.from_public_bytes(encryption_key), info=info)


def unseal_with(sealed: bytes, key: X25519PrivateKey, *, info: bytes) -> bytes:
    """Opens what `seal_to` made.

    Raises:
        InvalidMessageError: If it was made for another key or another purpose, or is damaged.
    """
    try:
        return _SUITE.decrypt(sealed, key, info=info)
    except (InvalidTag, ValueError):
        raise InvalidMessageError from None
