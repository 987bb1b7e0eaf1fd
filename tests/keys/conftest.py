from collections.abc import Callable, Collection
from dataclasses import dataclass

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from privfed.he.params import CkksParams
from privfed.he.secret import RoundBinding
from privfed.identity import Identity, PublicIdentity
from privfed.keys.chain import KeyChain
from privfed.keys.party import Party
from privfed.keys.roster import PinnedRoster

BANKS = ("bank_a", "bank_b", "bank_c", "bank_d", "bank_e")


@dataclass(frozen=True)
class People:
    """The keys of everybody, which in life are never in one place."""

    server: PublicIdentity
    parties: dict[str, Party]

    def roster(self, names: Collection[str] = BANKS) -> PinnedRoster:
        return PinnedRoster(server=self.server, members=tuple(self.parties[name].public for name in names))

    def __getitem__(self, name: str) -> Party:
        return self.parties[name]


def new_party(name: str) -> Party:
    return Party(identity=Identity.generate(name), encryption_key=X25519PrivateKey.generate())


@pytest.fixture(scope="session")
def people() -> People:
    return People(server=Identity.generate("hub").public, parties={name: new_party(name) for name in (*BANKS, "bank_f")})


@pytest.fixture(scope="session")
def roster(people: People) -> PinnedRoster:
    return people.roster()


@pytest.fixture
def chain(roster: PinnedRoster) -> KeyChain:
    return KeyChain.generate(roster)


@pytest.fixture(scope="session")
def bind(roster: PinnedRoster) -> Callable[..., RoundBinding]:
    """What a round of a chain's session is bound to."""

    def make(chain: KeyChain, number: int, **changes: object) -> RoundBinding:
        fields = {
            "session": chain.facts.session,
            "attempt": 0,
            "round": number,
            "roster_digest": roster.parties.digest,
            "params": CkksParams.standard(),
        }
        return RoundBinding(**(fields | changes))

    return make
