"""Who speaks: Ed25519 identities, and the roster of those that a session trusts.

Every party pins the roster by the fingerprints that it got out of band. A roster that the server supplies is no roster.
"""

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NoReturn, Self, final

from cryptography.exceptions import InternalError, InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from privfed.errors import InvalidMessageError
from privfed.files import create, read_private

SIGNATURE_BYTES = 64
_MOST_PEM_BYTES = 10_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_name(name: object) -> None:
    """Refuses what is no name of a party: names stand in messages, paths and reports.

    Raises:
        ValueError: If it is not 1-64 letters, digits, dots, dashes or underscores that start with a letter or digit.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"expected a name of 1-64 letters, digits, '.', '-' or '_', starting with a letter or digit, got {name!r}")


def check_encryption_key(key: bytes, *, name: str) -> None:
    """Refuses what is no X25519 public key, or is one to which nothing can be encrypted, because everybody could open it.

    Args:
        key: 32 raw bytes.
        name: Of the party whose key it is.

    Raises:
        ValueError: If it is not 32 bytes, or of small order.
    """
    try:
        X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(key))
    except ValueError:
        raise ValueError(f"expected an X25519 public key of {name!r}, 32 bytes and not of small order") from None


def _raw(key: Ed25519PublicKey) -> bytes:
    return key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicIdentity:
    """A party's name and public Ed25519 key (32 raw bytes). Public.

    Raises:
        ValueError: If the name is not 1-64 letters, digits, dots, dashes or underscores, or the key is not 32 bytes.
    """

    name: str
    public_key: bytes

    def __post_init__(self) -> None:
        check_name(self.name)
        if type(self.public_key) is not bytes or len(self.public_key) != 32:
            raise ValueError("expected a public key of 32 bytes, got something else")

    @property
    def fingerprint(self) -> str:
        """What people compare out of band: SHA-256 over name and key, as 8 groups of 8 hexadecimal digits."""
        digest = hashlib.sha256(
            b"privfed identity v1" + len(self.name).to_bytes(1, "big") + self.name.encode() + self.public_key
        ).hexdigest()
        return " ".join(digest[i : i + 8] for i in range(0, 64, 8))

    def verify(self, message: bytes | memoryview, signature: bytes) -> None:
        """Checks an Ed25519 signature.

        Raises:
            InvalidMessageError: If this party did not sign this message.
        """
        try:
            Ed25519PublicKey.from_public_bytes(self.public_key).verify(signature, message)
        except (InvalidSignature, ValueError):
            raise InvalidMessageError from None


@final
class Identity:
    """A party's private signing key. It cannot be printed, copied or pickled.

    Example:
        >>> bank = Identity.generate("bank_a")
        >>> bank.public.verify(b"hello", bank.sign(b"hello"))
    """

    __slots__ = ("_key", "_public")

    def __init__(self, *, name: str, key: Ed25519PrivateKey) -> None:
        self._key = key
        self._public = PublicIdentity(name=name, public_key=_raw(key.public_key()))

    @classmethod
    def generate(cls, name: str) -> Self:
        """Makes a new identity from the operating system's entropy."""
        return cls(name=name, key=Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: Path, *, name: str) -> Self:
        """Reads a PKCS#8 PEM file that `save` wrote.

        Raises:
            PermissionError: If others than the owner may read the file.
            ValueError: If the file holds no Ed25519 private key.
        """
        pem = read_private(path, most=_MOST_PEM_BYTES)
        try:
            key = serialization.load_pem_private_key(pem, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm, InternalError):
            key = None  # what exactly is wrong with a private key is nobody's business
        if not isinstance(key, Ed25519PrivateKey):
            raise ValueError(f"expected an Ed25519 private key without a password in {path.name}, got something else")
        return cls(name=name, key=key)

    def save(self, path: Path) -> None:
        """Writes the private key as PKCS#8 PEM, mode 0600, never over an existing file."""
        pem = self._key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        create(path, pem)

    @property
    def name(self) -> str:
        """Name in the roster. Public."""
        return self._public.name

    @property
    def public(self) -> PublicIdentity:
        """The half that others may know."""
        return self._public

    def sign(self, message: bytes | memoryview) -> bytes:
        """Ed25519 signature, 64 bytes (RFC 8032)."""
        return self._key.sign(message)

    def __repr__(self) -> str:
        return f"Identity(name={self.name!r}, key=<secret>)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("an identity holds a private key and cannot be copied or pickled; use save and load")

    def __getstate__(self) -> NoReturn:
        self.__reduce__()


@dataclass(frozen=True, kw_only=True)
class Roster:
    """The pinned parties of a session: one server and the clients. Public.

    Raises:
        ValueError: If a name or a key occurs twice, or there is no client.
    """

    server: PublicIdentity
    clients: tuple[PublicIdentity, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "clients", tuple(self.clients))
        if not self.clients:
            raise ValueError("expected at least one client in the roster")
        parties = (self.server, *self.clients)
        if len({party.name for party in parties}) != len(parties) or len({party.public_key for party in parties}) != len(parties):
            raise ValueError("expected every name and every public key once in the roster, got one twice")

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the clients, in roster order."""
        return tuple(client.name for client in self.clients)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 over all names and keys in order, 32 bytes."""
        state = hashlib.sha256(b"privfed roster v1")
        for party in (self.server, *self.clients):
            encoded = party.name.encode()
            state.update(len(encoded).to_bytes(1, "big") + encoded + party.public_key)
        return state.digest()

    def client(self, name: str) -> PublicIdentity:
        """The pinned client of that name.

        Raises:
            InvalidMessageError: If no such client is pinned. Names arrive in messages; strangers get no other answer.
        """
        for client in self.clients:
            if client.name == name:
                return client
        raise InvalidMessageError
