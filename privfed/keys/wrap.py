"""How the shared key gets from one client to another: encrypted to the recipient, signed by the sender, bound to where it belongs.

    magic | sender | recipient | session 16 | roster 32 | epoch 4 | sealed chain key 80 | Ed25519 signature 64

Names are ASCII with a length byte in front. The signature covers every byte before it, and everything before the sealed key is bound
to it once more as the `info` of HPKE: who takes the signature off and signs as somebody else has a message that nobody can open.
"""

import struct
from pathlib import Path

from privfed.errors import InvalidMessageError, KeyRefusedError
from privfed.hpke import SEALED_OVERHEAD_BYTES
from privfed.identity import SIGNATURE_BYTES
from privfed.keys.chain import CHAIN_KEY_BYTES, SESSION_BYTES, ChainFacts, KeyChain
from privfed.keys.party import Party, seal
from privfed.keys.roster import Member, PinnedRoster
from privfed.message import Reader, write_text

_MAGIC = b"privfed key wrap v1\n"
_TERMS = struct.Struct(f">{SESSION_BYTES}s32sI")
_SEALED_BYTES = CHAIN_KEY_BYTES + SEALED_OVERHEAD_BYTES
_MOST_NAME_BYTES = 64
MOST_WRAP_BYTES = len(_MAGIC) + 2 * (1 + _MOST_NAME_BYTES) + _TERMS.size + _SEALED_BYTES + SIGNATURE_BYTES


def wrap(chain: KeyChain, *, sender: Party, recipient: Member, roster: PinnedRoster) -> bytes:
    """Encrypts the chain to one other client of the roster. The server is none: it has no key to encrypt to.

    Args:
        chain: The key, of which no round was erased yet.
        sender: Whose signature it carries.
        recipient: Who alone can open it.
        roster: Among whom it is shared.

    Returns:
        The message. Whoever carries it learns who shares a key, and no more.

    Raises:
        KeyRefusedError: If sender or recipient are not pinned as they are here, or are the same, the key is shared among another
            roster, or rounds of it were erased.
    """
    facts = chain.facts
    _check_own(sender, roster)
    if roster.member(recipient.name) != recipient or recipient.name == sender.name:
        raise KeyRefusedError(f"expected another client than {sender.name!r}, with the keys that the roster pins; nothing was wrapped")
    if facts.roster_digest != roster.digest:
        raise KeyRefusedError("the key is shared among another roster; nothing was wrapped; rotate the key for this one")
    if facts.next_round:
        raise KeyRefusedError(
            f"the keys of the rounds before {facts.next_round} were erased here, so this is not the whole key; nothing was wrapped; "
            "rotate the key"
        )
    terms = _TERMS.pack(facts.session, facts.roster_digest, facts.epoch)
    info = _MAGIC + write_text(sender.name) + write_text(recipient.name) + terms
    body = info + seal(chain._chain_key, recipient, info=info)  # pyright: ignore[reportPrivateUsage] # no public name gives it away
    return body + sender.sign(body)


def unwrap(data: bytes, *, recipient: Party, roster: PinnedRoster, epoch: int, held: ChainFacts | None = None) -> KeyChain:
    """Opens a wrapped key, after its length, its signature and everything in it were checked.

    Args:
        data: Bytes from outside.
        recipient: This party.
        roster: The roster as this party pins it.
        epoch: The only epoch that is acceptable.
        held: What the recipient holds of the same session, if it does: the new key must succeed it.

    Raises:
        InvalidMessageError: If no client of the roster signed these bytes, or they cannot be opened.
        KeyRefusedError: If they were signed, and are for another party, roster, session or epoch; or if the roster pins other keys of
            the recipient than it has. Nothing was decrypted.
    """
    _check_own(recipient, roster)
    if len(data) > MOST_WRAP_BYTES or len(data) < SIGNATURE_BYTES:
        raise InvalidMessageError
    body = data[:-SIGNATURE_BYTES]
    reader = Reader(body)
    if reader.take(len(_MAGIC)) != _MAGIC:
        raise InvalidMessageError
    name = reader.text()
    sender = next((member for member in roster.members if member.name == name), None)
    if sender is None:
        raise InvalidMessageError
    sender.identity.verify(body, data[-SIGNATURE_BYTES:])
    addressee = reader.text()
    session, roster_digest, number = _TERMS.unpack(reader.take(_TERMS.size))
    sealed = reader.take(_SEALED_BYTES)
    reader.end()
    refused = "nothing was decrypted"
    if addressee != recipient.name:
        raise KeyRefusedError(f"{name!r} wrapped this key for {addressee!r}, not for {recipient.name!r}; {refused}")
    if roster_digest != roster.digest:
        raise KeyRefusedError(
            f"{name!r} pins another roster than this one; {refused}; compare the fingerprints that privfed keys show prints"
        )
    if held is not None and session != held.session:
        raise KeyRefusedError(f"{name!r} wrapped a key of another session than the one that is held here; {refused}")
    if number != epoch or (held is not None and number <= held.epoch):
        if held is not None and number == held.epoch:
            raise KeyRefusedError(
                f"you hold this key already: {name!r} wrapped a key of epoch {number}, and epoch {number} is held here; {refused}"
            )
        holding = "" if held is None else f", and epoch {held.epoch} is held here"
        told = "" if held is not None and number < held.epoch else f"if the others told you epoch {number}, give --epoch {number}; else "
        raise KeyRefusedError(
            f"{name!r} wrapped a key of epoch {number}, expected was epoch {epoch}{holding}; {refused}; {told}ask for a new message"
        )
    chain_key = recipient.unseal(sealed, info=body[:-_SEALED_BYTES])
    return KeyChain.beginning(chain_key, roster=roster, session=session, epoch=number)


def read_wrap(path: Path) -> bytes:
    """The bytes of a message in a file, or as many of them as are needed to see that it is none.

    Raises:
        ValueError: If it does not begin as a message does, or its end is missing. Nothing is verified here.
    """
    with path.open("rb") as file:
        data = file.read(MOST_WRAP_BYTES + 1)
    place = len(_MAGIC)
    for _ in ("sender", "recipient"):
        place += 1 + (data[place] if place < len(data) else 0)
    if not data.startswith(_MAGIC) or len(data) < place + _TERMS.size + _SEALED_BYTES + SIGNATURE_BYTES:
        raise ValueError(
            f"expected a whole message from privfed keys wrap in {path.name}, got something else or a part of one; nothing was opened; "
            "ask for it again"
        )
    return data


def _check_own(party: Party, roster: PinnedRoster) -> None:
    if roster.member(party.name) != party.public:
        raise KeyRefusedError(
            f"the roster pins other keys of {party.name!r} than its folder holds; nothing was done; find out whose they are"
        )
