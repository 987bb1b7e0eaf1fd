"""The shared key as a chain: one key per round, each erased once the round is over, so that a stolen file opens no earlier round.

The chain key of a round gives two things, by HKDF under labels of their own: the shared secret of this round, and the chain key of
the next round. There is no way back. The file holds the chain key of the first round that was not erased; keys of later rounds are
derived when they are asked for. So a client that missed rounds opens them in their order, and each is erased when it is stored.

    header | session 16 | roster 32 | epoch 4 | first round that is left 8 | fingerprint 32 | chain key 32 | check 32

The check is derived from the chain key and everything before it: a file with a changed byte is refused.
"""

import hmac
import os
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, final

from privfed import files
from privfed.errors import KeyErasedError, KeyRefusedError
from privfed.he._seal_secret import Secret, derive
from privfed.he.secret import RoundBinding, RoundKey, SharedKey
from privfed.keys.roster import PinnedRoster, grouped

CHAIN_HEADER = b"privfed key chain v1\n"
CHAIN_KEY_BYTES = 32
SESSION_BYTES = 16
_FIELDS = struct.Struct(">16s32sIQ32s")
_CHECK_BYTES = 32
CHAIN_FILE_BYTES = len(CHAIN_HEADER) + _FIELDS.size + CHAIN_KEY_BYTES + _CHECK_BYTES
# A round number comes from whoever runs the session; a huge one must not keep a client deriving for hours. One step takes microseconds.
_MOST_ROUNDS_AHEAD = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainFacts:
    """What everybody may know about a chain. Public.

    Args:
        session: 16 bytes, those of the agreement's session.
        roster_digest: `PinnedRoster.digest` of those who share it, 32 bytes.
        epoch: From 1; each rotation is a new one, with a fresh key.
        next_round: First round, from 0, whose key is not erased.
        fingerprint: What people compare to see that they share the same chain: 8 groups of 8 hexadecimal digits.

    Raises:
        ValueError: If a length or a number is out of its range.
    """

    session: bytes
    roster_digest: bytes
    epoch: int
    next_round: int
    fingerprint: str

    def __post_init__(self) -> None:
        if len(self.session) != SESSION_BYTES or len(self.roster_digest) != 32:
            raise ValueError(
                f"expected a session of 16 bytes and a roster digest of 32, got {len(self.session)}, {len(self.roster_digest)}"
            )
        if not (1 <= self.epoch < 2**32 and 0 <= self.next_round <= 2**32):
            raise ValueError(f"expected an epoch from 1 and a round from 0, below 2^32, got {self.epoch} and {self.next_round}")


@final
class KeyChain(Secret):
    """The key that the clients of a roster share for one epoch of a session. It cannot be printed, copied or pickled.

    It stands where a `SharedKey` does: the same binding gives the same round key to everyone who shares it. A round key does not
    give an earlier or a later one away, and what is left after `erase_through` gives no erased one.

    Python cannot promise to erase it from memory, and a file system may keep the blocks of a replaced file for a while: keep key
    files on an encrypted disk, and out of backups.
    """

    __slots__ = ("_chain_key", "_facts", "_parties_digest", "_path")

    def __init__(self, *, facts: ChainFacts, chain_key: bytes, roster: PinnedRoster, path: Path | None = None) -> None:
        if facts.roster_digest != roster.digest:
            raise KeyRefusedError(
                "the key is shared among another roster than this one; nothing was done; take the roster with which it was made, or "
                "rotate the key"
            )
        self._facts = facts
        self._chain_key = chain_key
        self._parties_digest = roster.parties.digest
        self._path = path

    @classmethod
    def generate(cls, roster: PinnedRoster, *, after: ChainFacts | None = None) -> Self:
        """A fresh key from the operating system's generator.

        Args:
            roster: Those who will share it.
            after: What it succeeds: it is of the same session and the next epoch. None for epoch 1 of a new session.
        """
        session, epoch = (os.urandom(SESSION_BYTES), 1) if after is None else (after.session, after.epoch + 1)
        return cls.beginning(os.urandom(CHAIN_KEY_BYTES), roster=roster, session=session, epoch=epoch)

    @classmethod
    def beginning(cls, chain_key: bytes, *, roster: PinnedRoster, session: bytes, epoch: int) -> Self:
        """The chain that begins with the chain key of round 0, 32 bytes, which came over a confidential channel between clients.

        Raises:
            ValueError: If a length or the epoch is out of its range.
        """
        if len(chain_key) != CHAIN_KEY_BYTES:
            raise ValueError(f"expected a chain key of {CHAIN_KEY_BYTES} bytes, got {len(chain_key)}")
        facts = ChainFacts(session=session, roster_digest=roster.digest, epoch=epoch, next_round=0, fingerprint="")
        fields = (session, roster.digest, epoch.to_bytes(4, "big"))
        fingerprint = grouped(derive(chain_key, 32, b"privfed key chain fingerprint v1", *fields))
        return cls(facts=replace(facts, fingerprint=fingerprint), chain_key=chain_key, roster=roster)

    @classmethod
    def load(cls, path: Path, *, roster: PinnedRoster) -> Self:
        """Reads a file that `save` wrote.

        Raises:
            KeyRefusedError: If the key is shared among another roster.
            PermissionError: If others than the owner may read the file.
            ValueError: If the file holds something else, or is damaged.
        """
        facts, chain_key = _read(path)
        return cls(facts=facts, chain_key=chain_key, roster=roster, path=path)

    def save(self, path: Path) -> None:
        """Writes the key, mode 0600. It takes the place of no file but the one of an earlier epoch of the same session.

        From here on rounds are erased in this file; in one that was written before, they are not: remove that one.

        Raises:
            KeyRefusedError: If the file holds a key of another session, of this epoch or of a later one; it stays as it is.
            PermissionError: If others than the owner may read the file that is there.
            ValueError: If that file holds something else.
        """
        with files.locked(path):
            if path.exists():
                _check_succeeds(self._facts, _read(path)[0], where=path.name)
                files.replace(path, _packed(self._facts, self._chain_key))
            else:
                files.create(path, _packed(self._facts, self._chain_key))
        self._path = path

    @property
    def facts(self) -> ChainFacts:
        """What everybody may know about it."""
        return self._facts

    @property
    def fingerprint(self) -> str:
        """What people compare to see that they share the same chain. It stays the same from round to round. Public."""
        return self._facts.fingerprint

    def belongs_to(self, session: bytes, roster_digest: bytes) -> bool:
        """Whether it is the key of this session, 16 bytes, of the parties with this `Roster.digest`, 32 bytes."""
        return (session, roster_digest) == (self._facts.session, self._parties_digest)

    def round_key(self, binding: RoundBinding) -> RoundKey:
        """The key of one attempt at one round. Nothing is erased by asking for it.

        Raises:
            KeyErasedError: If the round's key was erased.
            KeyRefusedError: If the round belongs to another session, or to another roster.
            ValueError: If the round lies more than 100 000 rounds ahead.
        """
        if not self.belongs_to(binding.session, binding.roster_digest):
            raise KeyRefusedError(
                f"the key is for another session or another roster than round {binding.round}; nothing was derived; take the session and "
                "the roster that privfed keys show prints for this key"
            )
        secret = derive(_advanced(self._facts, self._chain_key, binding.round)[1], CHAIN_KEY_BYTES, b"privfed chain round secret v1")
        return SharedKey.from_bytes(secret).round_key(binding)

    def erase_through(self, number: int) -> None:
        """Moves the chain forward, so that neither this object nor its file gives the key of this round or of an earlier one.

        When this returns, the file was replaced and synchronised. Rounds that were erased before are fine.

        Args:
            number: A round that this client has opened and stored, or will never open.

        Raises:
            KeyRefusedError: If the file holds another key by now; nothing was erased.
            ValueError: If the round lies more than 100 000 rounds ahead.
        """
        target = max(number + 1, self._facts.next_round)
        if self._path is None:
            self._facts, self._chain_key = _advanced(self._facts, self._chain_key, target)
            return
        with files.locked(self._path):
            stored, chain_key = _read(self._path)
            if stored.fingerprint != self._facts.fingerprint:
                raise KeyRefusedError(f"{self._path.name} holds another key by now; nothing was erased; open the file again")
            # Another process of this client may have moved the file on, and it must never go back; and one that was put back goes on.
            if target > stored.next_round:
                stored, chain_key = _advanced(stored, chain_key, target)
                files.replace(self._path, _packed(stored, chain_key))
        self._facts, self._chain_key = stored, chain_key


def _check_succeeds(new: ChainFacts, held: ChainFacts, *, where: str) -> None:
    """Refuses a key in the place of one that it does not succeed.

    Raises:
        KeyRefusedError: If it is of another session, or of no later epoch.
    """
    if new.session != held.session:
        raise KeyRefusedError(f"{where} holds the key of another session; nothing was done; give the new key a file of its own")
    if new.epoch <= held.epoch:
        raise KeyRefusedError(
            f"{where} holds the key of epoch {held.epoch}, and this one is of epoch {new.epoch}; nothing was done; only one of a "
            "later epoch takes its place"
        )


def read_facts(path: Path) -> ChainFacts:
    """What everybody may know about the chain in a file.

    Raises:
        PermissionError: If others than the owner may read the file.
        ValueError: If the file holds something else, or is damaged.
    """
    return _read(path)[0]


def shared_key_fingerprint(path: Path) -> str:
    """`SharedKey.fingerprint` of a file that `SharedKey.save` wrote. Public.

    Raises:
        PermissionError: If others than the owner may read the file.
        ValueError: If the file holds something else.
    """
    return SharedKey.load(path).fingerprint


def chain_in(data: bytes) -> bool:
    """Whether these bytes are a whole key chain."""
    return (
        len(data) == CHAIN_FILE_BYTES and data.startswith(CHAIN_HEADER) and hmac.compare_digest(data[-_CHECK_BYTES:], _check(*_split(data)))
    )


def _read(path: Path) -> tuple[ChainFacts, bytes]:
    data = files.read_private(path, most=CHAIN_FILE_BYTES + 1)
    if not chain_in(data):
        raise ValueError(f"expected a key chain in {path.name}, whole and unchanged, got something else")
    head, chain_key = _split(data)
    session, roster_digest, epoch, next_round, fingerprint = _FIELDS.unpack(head[len(CHAIN_HEADER) :])
    facts = ChainFacts(session=session, roster_digest=roster_digest, epoch=epoch, next_round=next_round, fingerprint=grouped(fingerprint))
    return facts, chain_key


def _advanced(facts: ChainFacts, chain_key: bytes, number: int) -> tuple[ChainFacts, bytes]:
    """The chain as it is when all before this round is erased."""
    first = facts.next_round
    if number < first:
        raise KeyErasedError(
            f"the keys of the rounds before {first} were erased when round {first - 1} was stored; nothing was derived; round {number} "
            "cannot be opened with this key: take the model of a client that opened it"
        )
    if number - first > _MOST_ROUNDS_AHEAD:
        raise ValueError(f"expected a round at most {_MOST_ROUNDS_AHEAD} after round {first}, got {number}; nothing was derived")
    for _ in range(number - first):
        chain_key = derive(chain_key, CHAIN_KEY_BYTES, b"privfed next chain key v1")
    return replace(facts, next_round=number), chain_key


def _packed(facts: ChainFacts, chain_key: bytes) -> bytes:
    fingerprint = bytes.fromhex(facts.fingerprint)
    head = CHAIN_HEADER + _FIELDS.pack(facts.session, facts.roster_digest, facts.epoch, facts.next_round, fingerprint)
    return head + chain_key + _check(head, chain_key)


def _split(data: bytes) -> tuple[bytes, bytes]:
    middle = len(CHAIN_HEADER) + _FIELDS.size
    return data[:middle], data[middle : middle + CHAIN_KEY_BYTES]


def _check(head: bytes, chain_key: bytes) -> bytes:
    return derive(chain_key, _CHECK_BYTES, b"privfed key chain check v1", head)
