"""The folder with a party's own keys: it signs with one, and a client decrypts with the other."""

from pathlib import Path
from typing import Self, final

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from privfed.errors import KeyRefusedError
from privfed.files import create, read_pinned, read_private
from privfed.he._seal_secret import Secret
from privfed.hpke import seal_to, unseal_with
from privfed.identity import Identity, PublicIdentity
from privfed.keys.roster import Member, read_line, server_line

PUBLIC_LINE = "public.txt"
ENCRYPTION = "encryption.pem"
_SIGNING = "identity.pem"
_MOST_BYTES = 10_000


@final
class Party(Secret):
    """A client's signing key and decryption key. They cannot be printed, copied or pickled."""

    __slots__ = ("_encryption_key", "_identity", "_public")

    def __init__(self, *, identity: Identity, encryption_key: X25519PrivateKey) -> None:
        self._identity = identity
        self._encryption_key = encryption_key
        self._public = Member(identity=identity.public, encryption_key=encryption_key.public_key().public_bytes_raw())

    @classmethod
    def create(cls, folder: Path, *, name: str) -> Self:
        """Makes a client's keys from the operating system's entropy, in a new folder of mode 0700, the files of mode 0600.

        Raises:
            FileExistsError: If there is such a folder; it stays as it is.
            ValueError: If the name is no name of a party.
        """
        party = cls(identity=Identity.generate(name), encryption_key=X25519PrivateKey.generate())
        folder.mkdir(mode=0o700)
        party._identity.save(folder / _SIGNING)
        _save_key(party._encryption_key, folder / ENCRYPTION)
        create(folder / PUBLIC_LINE, f"{party.public.line}\n".encode())
        return party

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Reads a folder that `create` made.

        Raises:
            KeyRefusedError: If it is a server's.
            PermissionError: If others than the owner may read a key.
            ValueError: If it is no such folder, a file is missing or holds something else, or keys and public line do not belong together.
        """
        public = _public(folder)
        if not isinstance(public, Member):
            raise KeyRefusedError(f"{public.name!r} is a server, which neither gives nor gets a key; nothing was done")
        identity = Identity.load(folder / _SIGNING, name=public.name)
        party = cls.of(identity, folder)
        if party.public != public:
            raise ValueError(
                f"expected {PUBLIC_LINE} to name the keys that lie beside it, got others; take the folder from where it was made"
            )
        return party

    @classmethod
    def of(cls, identity: Identity, folder: Path, *, new: bool = False) -> Self:
        """The keys of an identity that is known already, and of the decryption key in a folder.

        Args:
            identity: Its signing key.
            folder: Where the decryption key is kept, mode 0600.
            new: Whether to make one from the operating system's entropy if there is none.

        Raises:
            PermissionError: If others than the owner may read the key.
            ValueError: If it is missing, or the file holds something else.
        """
        path = folder / ENCRYPTION
        if new and not path.exists():
            _save_key(X25519PrivateKey.generate(), path)
        if not path.exists():
            raise ValueError(f"{ENCRYPTION} is missing in {folder}; nothing was done; put it back from where it is kept")
        pem = read_private(path, most=_MOST_BYTES)
        try:
            key = serialization.load_pem_private_key(pem, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            key = None  # what exactly is wrong with a private key is nobody's business
        if not isinstance(key, X25519PrivateKey):
            raise ValueError(f"expected an X25519 private key without a password in {ENCRYPTION}, got something else")
        return cls(identity=identity, encryption_key=key)

    @property
    def public(self) -> Member:
        """The half that others may know."""
        return self._public

    @property
    def name(self) -> str:
        """Name in the roster. Public."""
        return self._public.name

    def sign(self, message: bytes) -> bytes:
        """Ed25519 signature, 64 bytes."""
        return self._identity.sign(message)

    def unseal(self, sealed: bytes, *, info: bytes) -> bytes:
        """Opens what `seal` made for this party.

        Raises:
            InvalidMessageError: If it was made for another party or another purpose, or is damaged.
        """
        return unseal_with(sealed, self._encryption_key, info=info)


def _save_key(key: X25519PrivateKey, path: Path) -> None:
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    create(path, pem)


def seal(secret: bytes, recipient: Member, *, info: bytes) -> bytes:
    """Encrypts a secret to a client; see `privfed.hpke`.

    Args:
        secret: The secret.
        recipient: Who alone can open it.
        info: What it is for, bound to it. Public.
    """
    return seal_to(secret, recipient.encryption_key, info=info)


def create_server(folder: Path, *, name: str) -> PublicIdentity:
    """Makes a server's signing key, in a new folder of mode 0700, the files of mode 0600. It has no other key.

    Raises:
        FileExistsError: If there is such a folder; it stays as it is.
        ValueError: If the name is no name of a party.
    """
    identity = Identity.generate(name)
    folder.mkdir(mode=0o700)
    identity.save(folder / _SIGNING)
    create(folder / PUBLIC_LINE, f"{server_line(identity.public)}\n".encode())
    return identity.public


def read_public(folder: Path) -> Member | PublicIdentity:
    """Who a folder belongs to, after its keys were loaded and found to be those of its public line.

    Raises:
        PermissionError: If others than the owner may read a key.
        ValueError: If it is no folder of keys, a file is missing or holds something else, or keys and public line do not belong together.
    """
    public = _public(folder)
    if isinstance(public, Member):
        return Party.load(folder).public
    if Identity.load(folder / _SIGNING, name=public.name).public != public:
        raise ValueError(f"expected {PUBLIC_LINE} to name the key that lies beside it, got another; take the folder from where it was made")
    return public


def _public(folder: Path) -> Member | PublicIdentity:
    if not (folder / PUBLIC_LINE).exists():
        what = f"has no {PUBLIC_LINE}" if folder.is_dir() else "is no folder" if folder.exists() else "is not there"
        raise ValueError(
            f"expected the folder that privfed keys init made, and {folder} {what}; nothing was done; name the folder with your "
            f"{_SIGNING} and {PUBLIC_LINE}"
        )
    text = read_pinned(folder / PUBLIC_LINE, most=_MOST_BYTES).decode("ascii", errors="replace")
    return read_line(text, where=PUBLIC_LINE)
