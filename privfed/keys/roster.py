"""The pinned roster as a file that people put together and compare: a line per party, with its fingerprint.

    server hub <Ed25519 key> <fingerprint>
    client bank_a <Ed25519 key> <X25519 key> <fingerprint>

Keys are 64 hexadecimal digits, fingerprints 8 groups of 8; empty lines, and lines that start with #, are skipped. The order of the
lines does not matter. Everything in the file is public. It is worth something only if people compared the fingerprint of the whole
roster by another way than the one on which the lines came.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from privfed.errors import KeyRefusedError
from privfed.files import read_pinned
from privfed.identity import PublicIdentity, Roster, check_encryption_key

_MOST_BYTES = 1_000_000
_HEX_KEY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A client as the roster pins it: who it is, and the key to which secrets for it are encrypted. Public.

    Args:
        identity: Name and signing key.
        encryption_key: X25519 key, 32 raw bytes.

    Raises:
        ValueError: If the encryption key is not 32 bytes, or one of the few under which every secret would be known to everybody.
    """

    identity: PublicIdentity
    encryption_key: bytes

    def __post_init__(self) -> None:
        check_encryption_key(self.encryption_key, name=self.name)

    @property
    def name(self) -> str:
        """Name in the roster."""
        return self.identity.name

    @property
    def fingerprint(self) -> str:
        """What people compare out of band: SHA-256 over name and both keys, as 8 groups of 8 hexadecimal digits."""
        return grouped(_digest(b"privfed member v1", (self.name.encode(), self.identity.public_key, self.encryption_key)))

    @property
    def line(self) -> str:
        """The client's line in a roster."""
        return f"client {self.name} {self.identity.public_key.hex()} {self.encryption_key.hex()} {self.fingerprint}"


def server_line(server: PublicIdentity) -> str:
    """The server's line in a roster. It has no key to which anything could be encrypted."""
    return f"server {server.name} {server.public_key.hex()} {server.fingerprint}"


@dataclass(frozen=True, kw_only=True)
class PinnedRoster:
    """The parties among which a key is shared: one server, which never gets it, and the clients. Public.

    Args:
        server: Its identity.
        members: The clients; kept in the order of their names.

    Raises:
        ValueError: If there is no client, a key occurs twice, or two names differ only in case or in '-', '_' and '.'.
    """

    server: PublicIdentity
    members: tuple[Member, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "members", tuple(sorted(self.members, key=lambda member: member.name)))
        names = [self.server.name, *(member.name for member in self.members)]
        if len({_normalised(name) for name in names}) != len(names):
            raise ValueError("expected names that differ in more than case, '-', '_' and '.', got two alike in the roster")
        if len({member.encryption_key for member in self.members}) != len(self.members):
            raise ValueError("expected every encryption key once in the roster, got one twice")
        _ = self.parties

    @cached_property
    def parties(self) -> Roster:
        """The roster that a session's agreement names."""
        return Roster(server=self.server, clients=tuple(member.identity for member in self.members))

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 over all names and keys, 32 bytes."""
        keys = (member.encryption_key for member in self.members)
        return _digest(b"privfed pinned roster v1", (self.parties.digest, *keys))

    @property
    def fingerprint(self) -> str:
        """What people compare to see that they pin the same roster: 8 groups of 8 hexadecimal digits."""
        return grouped(self.digest)

    def member(self, name: str) -> Member:
        """The client of that name.

        Raises:
            KeyRefusedError: If it is the server, or nobody.
        """
        for member in self.members:
            if member.name == name:
                return member
        what = "the server, which never gets a key" if name == self.server.name else "not in the roster"
        raise KeyRefusedError(f"{name!r} is {what}; nothing was done")

    @classmethod
    def load(cls, path: Path) -> "PinnedRoster":
        """Reads a roster file.

        Raises:
            PermissionError: If others than the owner may write the file.
            ValueError: If it is no roster.
        """
        try:
            return cls.parse(read_pinned(path, most=_MOST_BYTES + 1).decode("ascii"))
        except UnicodeDecodeError:
            raise ValueError(f"expected a roster in {path.name}, got something else") from None

    @classmethod
    def parse(cls, text: str) -> "PinnedRoster":
        """Reads the lines of a roster, with each fingerprint checked against its keys.

        Raises:
            ValueError: If they are none.
        """
        if len(text) > _MOST_BYTES:
            raise ValueError(f"expected a roster of at most {_MOST_BYTES} bytes, got more")
        servers: list[PublicIdentity] = []
        members: list[Member] = []
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip() and not line.lstrip().startswith("#"):
                entry = read_line(line, where=f"line {number} of the roster")
                if isinstance(entry, Member):
                    members.append(entry)
                else:
                    servers.append(entry)
        if len(servers) != 1:
            raise ValueError(f"expected one server in the roster, got {len(servers)}")
        return cls(server=servers[0], members=tuple(members))


def read_line(line: str, *, where: str) -> "Member | PublicIdentity":
    """The client or the server of one line.

    Raises:
        ValueError: If it is no such line, or the fingerprint does not belong to the keys.
    """
    match line.split():
        case ["client", name, signing, encryption, *_]:
            entry = Member(identity=PublicIdentity(name=name, public_key=_key(signing, where)), encryption_key=_key(encryption, where))
            written = entry.line
        case ["server", name, signing, *_]:
            entry = PublicIdentity(name=name, public_key=_key(signing, where))
            written = server_line(entry)
        case _:
            raise ValueError(f"expected {where} to be one that privfed keys init printed, got something else")
    if line.split() != written.split():
        raise ValueError(f"{where}: the fingerprint does not belong to the keys; nothing was done; ask {name!r} for its line again")
    return entry


def grouped(digest: bytes) -> str:
    """32 bytes for people: 8 groups of 8 hexadecimal digits."""
    digits = digest.hex()
    return " ".join(digits[i : i + 8] for i in range(0, 64, 8))


def _digest(label: bytes, fields: Iterable[bytes]) -> bytes:
    return hashlib.sha256(label + b"".join(len(field).to_bytes(4, "big") + field for field in fields)).digest()


def _key(digits: str, where: str) -> bytes:
    if not _HEX_KEY.fullmatch(digits):
        raise ValueError(f"expected {where} to have keys of 64 hexadecimal digits in small letters, got something else")
    return bytes.fromhex(digits)


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
