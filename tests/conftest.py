import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import ArrayLike, NDArray

from privfed.aggregation.rules import FedAvg
from privfed.agreement import Agreement, RoundContext
from privfed.approval import approve
from privfed.digest import hash_message
from privfed.he.codec import dequantise, quantise
from privfed.he.params import CkksParams
from privfed.he.secret import RoundKey, SharedKey
from privfed.identity import Identity, Roster
from privfed.journal import Journal
from privfed.keyholder import KeyHolder
from privfed.message import Kind
from privfed.policy import OpeningPolicy
from privfed.protect import protect, round_key
from privfed.server import Server
from privfed.update import Layout, PlainVector, Update
from privfed.wire import encode_setup, encode_upload, upload_statement


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of data sets that are too large, or not free enough, for the repository: PRIVFED_DATA, or ../shared/data beside it."""
    folder = Path(os.environ.get("PRIVFED_DATA") or Path(__file__).parents[2] / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no data sets at {folder}: set PRIVFED_DATA to a folder that holds paysim_kaggle_rows.csv.gz and others")
    return folder


LAYOUT = Layout(names=("weight", "bias"), shapes=((3, 2), (2,)))


@dataclass(frozen=True, kw_only=True)
class Parties:
    """The keys and journals of everybody in a session, which in life are never in one place."""

    server: Identity
    clients: Mapping[str, Identity]
    key: SharedKey
    agreement: Agreement
    directory: Path
    private_weights: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def meet(cls, directory: Path, *, count: int = 4, **changes: Any) -> "Parties":
        server = Identity.generate("server")
        clients = {f"bank_{index:02}": Identity.generate(f"bank_{index:02}") for index in range(count)}
        terms: dict[str, Any] = {
            "session": b"session of tests",
            "roster": Roster(server=server.public, clients=tuple(client.public for client in clients.values())),
            "params": CkksParams.standard(bound=1.0),
            "layout": LAYOUT,
            "start": b"weights from which all of us sta",
            "weights": dict.fromkeys(clients, 1.0),
            "rule": FedAvg(),
            "policy": OpeningPolicy(),
        }
        agreement = Agreement(**(terms | changes))
        return cls(server=server, clients=clients, key=SharedKey.generate(), agreement=agreement, directory=directory)

    def amended(self, **changes: Any) -> "Parties":
        """The same people under another agreement."""
        return replace(self, agreement=replace(self.agreement, **changes))

    def journal(self, name: str) -> Journal:
        return Journal(self.directory / f"{name}.journal")

    def round(self, number: int = 0, *, attempt: int = 0, selected: Collection[str] | None = None) -> "Round":
        return Round(self, RoundContext(agreement=self.agreement, round=number, attempt=attempt), selected or tuple(self.clients))


class Round:
    """One attempt at one round, step by step: bytes go from hand to hand, as an engine does it."""

    def __init__(self, parties: Parties, context: RoundContext, selected: Collection[str]) -> None:
        self.parties = parties
        self.context = context
        self.selected = tuple(selected)
        self.server = self.new_server()
        self.keys: dict[str, RoundKey] = {}
        self.uploads: dict[str, bytes] = {}

    def new_server(self) -> Server:
        """A server process on the spool of the round: what a restart makes."""
        return Server(context=self.context, identity=self.parties.server, selected=self.selected, spool=self.parties.directory / "spool")

    def new_key(self) -> RoundKey:
        return round_key(self.parties.key, self.context)

    @cached_property
    def key_id(self) -> bytes:
        return self.new_key().key_id

    def setup_message(self, name: str) -> bytes:
        key = self.keys.setdefault(name, self.new_key())
        public_key = key.public_key() if self.context.agreement.setup_key_bytes else b""
        return encode_setup(self.context, self.parties.clients[name], key.key_id, public_key)

    def setup(self, *names: str) -> "Round":
        for name in names or self.selected:
            self.server.receive_setup(self.setup_message(name))
        self.server.start_uploads()
        return self

    def encode(self, name: str, values: ArrayLike, key: RoundKey | None = None) -> bytes:
        agreement = self.context.agreement
        update = Update(sender=name, round=self.context.round, vector=PlainVector(layout=agreement.layout, values=values))
        protected = protect(update, self.context, round_key=key or self.new_key(), weight=self.parties.private_weights.get(name, 1))
        statement = f"the head of {name}'s ledger".encode() if name in agreement.populations else b""
        return encode_upload(self.context, self.parties.clients[name], protected.update, statement=statement)

    def upload(self, updates: Mapping[str, ArrayLike] | None = None) -> "Round":
        for name, values in (updates or self.some_updates()).items():
            self.uploads[name] = self.encode(name, values, self.keys.pop(name, None))
            self.server.receive_upload(self.uploads[name])
        return self

    def some_updates(self, names: Collection[str] | None = None) -> dict[str, NDArray[np.float64]]:
        """Updates of all that took part in the setup, or of the named ones."""
        rng = np.random.default_rng(self.context.round)
        return {name: rng.uniform(-1, 1, self.context.agreement.layout.size) for name in names or self.server.received(Kind.SETUP)}

    def approve(self, name: str, data: bytes) -> bytes:
        return approve(
            self.context,
            self.parties.clients[name],
            data,
            key_id=self.key_id,
            upload_hash=hash_message(self.uploads[name]),
            journal=self.parties.journal(name),
            statement=upload_statement(self.uploads[name], self.context),
            witness=lambda heads: self.parties.clients[name].sign(b"".join(heads.values())),
        )

    def approve_all(self) -> "Round":
        announced = self.server.close()
        for name in self.uploads:
            self.server.receive_approval(self.approve(name, announced))
        return self

    def key_holder(self, name: str) -> KeyHolder:
        return KeyHolder(context=self.context, round_key=self.new_key(), journal=self.parties.journal(name))

    def run(self, updates: Mapping[str, ArrayLike] | None = None) -> bytes:
        """Everything up to the aggregate message."""
        return self.setup().upload(updates).approve_all().server.aggregate()

    def expected_mean(self, updates: Mapping[str, ArrayLike], coefficients: Mapping[str, int]) -> NDArray[np.float64]:
        """What the round must open to, from the updates in the clear and integer arithmetic alone."""
        params, weighting = self.context.agreement.params, self.context.agreement.weighting
        multipliers = dict(zip(coefficients, params.multipliers(tuple(coefficients.values())), strict=True))
        grid_sum = sum(multipliers[name] * quantise(values, params, weighting.share(name))[0] for name, values in updates.items())
        return dequantise(np.asarray(grid_sum), weighting.divisor(tuple(updates)), params)


@pytest.fixture(scope="session")
def people() -> type[Parties]:
    """For fixtures and tests that need sessions of their own."""
    return Parties


@pytest.fixture
def meet(tmp_path: Path) -> Callable[..., Parties]:
    """Makes the parties of a session."""
    return lambda **terms: Parties.meet(tmp_path, **terms)


@pytest.fixture
def parties(meet: Callable[..., Parties]) -> Parties:
    """A server and four banks of equal weight."""
    return meet()
