"""Who can open what, where it is not the clients that share a key: part of what a session agreed on. Public."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from privfed.he.threshold_key import ThresholdKey
from privfed.identity import PublicIdentity, check_encryption_key

_KEY_BYTES = 32


@dataclass(frozen=True, kw_only=True)
class ThresholdTrust:
    """The terms of `ThresholdKey`: how many clients open a sum together, and how they reach each other.

    Args:
        key: The quorum.
        encryption_keys: X25519 key of every client, 32 raw bytes, by name: to these the shares are encrypted. As pinned in the roster.

    Raises:
        ValueError: If a key is not 32 bytes, of small order or occurs twice, or there is not one for each client.
    """

    key: ThresholdKey
    encryption_keys: Mapping[str, bytes]

    def __post_init__(self) -> None:
        object.__setattr__(self, "encryption_keys", _checked_keys(self.encryption_keys))
        if len(self.encryption_keys) != self.key.clients:
            raise ValueError(f"expected {self.key.clients} clients, for which the quorum was solved, got {len(self.encryption_keys)}")

    @property
    def mode(self) -> str:
        """Name of the trust mode."""
        return ThresholdKey.__name__

    @property
    def quorum(self) -> int:
        """Fewest clients that a round needs."""
        return self.key.quorum

    @property
    def digest(self) -> bytes:
        """SHA-256 over all of it, 32 bytes."""
        numbers = (self.key.clients, self.key.corrupted, self.key.dropouts)
        state = b"".join(number.to_bytes(4, "big") for number in numbers) + _key_fields(self.encryption_keys)
        return hashlib.sha256(b"privfed threshold trust v1" + state).digest()


@dataclass(frozen=True, kw_only=True)
class EscrowTrust:
    """The terms of `EscrowKey`: who the key holder is, and how it reaches the clients. For each attempt it signs its public keys.

    Args:
        holder: Name and signing key of the key holder, as pinned.
        encryption_keys: X25519 key of every client, 32 raw bytes, by name: to these the opened sums are encrypted.

    Raises:
        ValueError: If an encryption key is not 32 bytes, of small order or occurs twice.
    """

    holder: PublicIdentity
    encryption_keys: Mapping[str, bytes]

    def __post_init__(self) -> None:
        object.__setattr__(self, "encryption_keys", _checked_keys(self.encryption_keys))

    @property
    def mode(self) -> str:
        """Name of the trust mode."""
        return "EscrowKey"

    @property
    def quorum(self) -> int:
        """Fewest clients that a round needs, beside what the policy demands: none."""
        return 0

    @property
    def digest(self) -> bytes:
        """SHA-256 over all of it, 32 bytes."""
        name = self.holder.name.encode()
        state = len(name).to_bytes(2, "big") + name + self.holder.public_key
        return hashlib.sha256(b"privfed escrow trust v3" + state + _key_fields(self.encryption_keys)).digest()


Trust = ThresholdTrust | EscrowTrust
"""Who opens what, where the clients do not share a key."""


def _checked_keys(keys: Mapping[str, bytes]) -> Mapping[str, bytes]:
    if not all(type(key) is bytes and len(key) == _KEY_BYTES for key in keys.values()) or len(set(keys.values())) != len(keys):
        raise ValueError(f"expected an encryption key of {_KEY_BYTES} bytes of each client, and none twice")
    for name, key in keys.items():
        # Before a session: else each round would stop where the first secret is encrypted to it, at every honest party.
        check_encryption_key(key, name=name)
    return MappingProxyType(dict(sorted(keys.items())))


def _key_fields(keys: Mapping[str, bytes]) -> bytes:
    return b"".join(len(name).to_bytes(2, "big") + name.encode() + key for name, key in keys.items())
