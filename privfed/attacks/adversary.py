"""Threat models: who looks at a round, told by what each can do, and in what form it holds what it sees. Public."""

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True, kw_only=True)
class Adversary:
    """A curious party, or several that put together what they hold. It follows the protocol and keeps everything. Public.

    Args:
        name: For reports.
        taps_wire: Whether it sees every message that travels.
        runs_server: Whether it holds what the server stores, which includes every message.
        holds_key: Whether it holds the key of the round.
        gets_model: Whether it gets the model before and after the round.
        trains: Whether it is one of the clients, and so knows what it sent itself.
    """

    name: str
    taps_wire: bool = False
    runs_server: bool = False
    holds_key: bool = False
    gets_model: bool = False
    trains: bool = False

    @property
    def sees_messages(self) -> bool:
        """Whether it has the bytes that each client sent."""
        return self.taps_wire or self.runs_server


OUTSIDER = Adversary(name="an outsider on the network", taps_wire=True)
SERVER = Adversary(name="the server", runs_server=True)
KEY_HOLDER = Adversary(name="any client, opening the sum as all do", holds_key=True, gets_model=True)
OTHER_CLIENT = Adversary(name="a client that also subtracts its own update", holds_key=True, gets_model=True, trains=True)
CLIENT_WITH_SERVER = Adversary(
    name="another client together with the server", runs_server=True, holds_key=True, gets_model=True, trains=True
)

SHARED_KEY_ADVERSARIES = (SERVER, OUTSIDER, KEY_HOLDER, OTHER_CLIENT, CLIENT_WITH_SERVER)
"""Who is attacked in `SharedKey` mode, in which every client holds the key."""

_WITHOUT_KEY = "gets every sum, and holds no key"

THRESHOLD_KEY_ADVERSARIES = (
    Adversary(name="the server, which learns every sum", runs_server=True, gets_model=True),
    Adversary(name="an outsider who reads what travels to the server", taps_wire=True, gets_model=True),
    Adversary(name=f"any client, which {_WITHOUT_KEY}", gets_model=True),
    Adversary(name="a client without a key that also subtracts its own update", gets_model=True, trains=True),
    Adversary(name="another client together with the server, and no key", runs_server=True, gets_model=True, trains=True),
)
"""Who is attacked in `ThresholdKey` mode: nobody holds a key, and whoever has the messages of a quorum has the sum."""

ESCROW_KEY_ADVERSARIES = (
    SERVER,
    OUTSIDER,
    Adversary(name=f"any client, which {_WITHOUT_KEY}", gets_model=True),
    Adversary(name="a client without a key that also subtracts its own update", gets_model=True, trains=True),
    Adversary(name="another client together with the server, and no key", runs_server=True, gets_model=True, trains=True),
    Adversary(name="the key holder, if it does not keep to the protocol", taps_wire=True, holds_key=True, gets_model=True),
)
"""Who is attacked in `EscrowKey` mode: the key holder gets the uploads and could open each, and nobody else can open any.

A client that works together with the server is one without a key even if it has the sum decrypt to the key of the attempt: what that key
decrypts is sealed to the key holder.
"""

PLAINTEXT_ADVERSARIES = (SERVER, KEY_HOLDER, OTHER_CLIENT)
"""Who is attacked in `Plaintext` mode, in which no message travels."""

ADVERSARIES = {
    "SharedKey": SHARED_KEY_ADVERSARIES,
    "ThresholdKey": THRESHOLD_KEY_ADVERSARIES,
    "EscrowKey": ESCROW_KEY_ADVERSARIES,
    "Plaintext": PLAINTEXT_ADVERSARIES,
}
"""Who is attacked, by the name of the trust mode."""


class Form(Enum):
    """In what form a party holds something. The value says it in words."""

    CIPHERTEXT = "ciphertext, without the key"
    OPENABLE = "ciphertext that it can open"
    NUMBERS = "numbers in the clear"
    PUBLIC = "names, hashes and signatures"
    OWN = "a secret or data of its own"
    KEY = "a secret key that it must not have"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """One thing that a party holds. Public: it says what and how much, not the content.

    Args:
        what: In words.
        size: Number of bytes.
        form: What can be made of it.
    """

    what: str
    size: int
    form: Form
