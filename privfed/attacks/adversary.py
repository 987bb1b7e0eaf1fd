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

PLAINTEXT_ADVERSARIES = (SERVER, KEY_HOLDER, OTHER_CLIENT)
"""Who is attacked in `Plaintext` mode, in which no message travels."""


class Form(Enum):
    """In what form a party holds something. The value says it in words."""

    CIPHERTEXT = "ciphertext, without the key"
    OPENABLE = "ciphertext that it can open"
    NUMBERS = "numbers in the clear"
    PUBLIC = "names, hashes and signatures"
    OWN = "a secret or data of its own"


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
