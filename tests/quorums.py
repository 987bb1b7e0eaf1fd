"""Rounds of `ThresholdKey`, step by step: bytes go from hand to hand, without training."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privfed.aggregation.rules import FedAvg
from privfed.agreement import Agreement, RoundContext
from privfed.approval import approve
from privfed.digest import RoundDigest, hash_message
from privfed.he.codec import dequantise, quantise
from privfed.he.params import CkksParams
from privfed.he.threshold import key_id
from privfed.he.threshold_key import ThresholdKey
from privfed.he.threshold_secret import SummandKey
from privfed.identity import Identity, Roster
from privfed.journal import Journal
from privfed.keys.party import Party
from privfed.policy import OpeningPolicy
from privfed.protect import protect
from privfed.quorum import QuorumOpener
from privfed.server import Server
from privfed.sharing import answer, check_shares, deal
from privfed.trust import ThresholdTrust
from privfed.update import Layout, PlainVector, Update
from privfed.wire import encode_upload
from privfed.wire_digest import encode_digest
from tests.keys.conftest import new_party

LAYOUT = Layout(names=("weight", "bias"), shapes=((3, 2), (2,)))


def terms(key: ThresholdKey, server: Identity, parties: Mapping[str, Party], **changes: Any) -> dict[str, Any]:
    """What an agreement of these parties says."""
    agreed: dict[str, Any] = {
        "session": b"session of tests",
        "roster": Roster(server=server.public, clients=tuple(party.public.identity for party in parties.values())),
        "params": CkksParams.threshold(clients=len(parties)),
        "layout": LAYOUT,
        "start": b"weights from which all of us sta",
        "weights": {name: 1.0 + index for index, name in enumerate(parties)},
        "rule": FedAvg(),
        "policy": OpeningPolicy(),
        "trust": ThresholdTrust(key=key, encryption_keys={name: party.public.encryption_key for name, party in parties.items()}),
    }
    return agreed | changes


@dataclass
class QuorumRound:
    """One attempt at one round, with the keys and journals of everybody."""

    folder: Path
    key: ThresholdKey
    attempt: int = 0
    server_identity: Identity = field(default_factory=lambda: Identity.generate("server"))
    parties: dict[str, Party] = field(default_factory=dict)
    uploads: dict[str, bytes] = field(default_factory=dict)
    relayed: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.parties = self.parties or {name: new_party(name) for name in (f"bank_{index}" for index in range(self.key.clients))}
        self.context = RoundContext(
            agreement=Agreement(**terms(self.key, self.server_identity, self.parties)), round=3, attempt=self.attempt
        )
        self.server = self.new_server()
        rng = np.random.default_rng(1)
        self.updates = {name: rng.uniform(-1, 1, LAYOUT.size) for name in self.parties}
        self.secrets: dict[str, SummandKey] = {}

    def new_server(self) -> Server:
        return Server(context=self.context, identity=self.server_identity, selected=tuple(self.parties), spool=self.folder / "spool")

    def identity(self, name: str) -> Identity:
        return self.parties[name]._identity

    def setup_message(self, name: str) -> bytes:
        self.secrets[name] = SummandKey(params=self.context.agreement.params, binding=self.context.digest)
        trust = self.context.agreement.trust
        assert trust is not None
        return deal(self.secrets[name], self.context, self.identity(name), trust)

    def setup(self, *names: str) -> "QuorumRound":
        for name in names or self.parties:
            self.server.receive_setup(self.setup_message(name))
        self.server.start_uploads()
        for name in names or self.parties:
            self.relayed[name] = self.server.relay(name)
            check_shares(self.relayed[name], self.context, self.parties[name])
        return self

    def upload_message(self, name: str) -> bytes:
        vector = PlainVector(layout=LAYOUT, values=self.updates[name])
        update = Update(sender=name, round=self.context.round, vector=vector)
        return encode_upload(self.context, self.identity(name), protect(update, self.context, round_key=self.secrets[name]).update)

    def upload(self, *names: str) -> "QuorumRound":
        for name in names or self.relayed:
            self.uploads[name] = self.upload_message(name)
            self.server.receive_upload(self.uploads[name])
        return self

    def announce(self, participants: Collection[str]) -> bytes:
        """What a lying server can announce: any set of those who uploaded."""
        coefficients = self.context.agreement.coefficients(participants)
        digest = RoundDigest(
            participants=tuple(coefficients),
            coefficients=tuple(coefficients.values()),
            upload_hashes=tuple(hash_message(self.uploads[name]) for name in coefficients),
            rule="FedAvg",
            key_id=key_id(self.context.digest),
        )
        return encode_digest(self.context, self.server_identity, digest)

    def approve(self, name: str, digest: bytes, *, journal: Journal | None = None) -> bytes:
        return approve(
            self.context,
            self.identity(name),
            digest,
            key_id=key_id(self.context.digest),
            upload_hash=hash_message(self.uploads[name]),
            journal=journal or self.journal(name),
            answer=lambda names: answer(self.relayed[name], self.context, self.parties[name], participants=names),
        )

    def approve_by(self, *names: str) -> "QuorumRound":
        digest = self.server.close()
        for name in names or self.server.participants():
            self.server.receive_approval(self.approve(name, digest))
        return self

    def journal(self, name: str) -> Journal:
        return Journal(self.folder / f"{name}.journal")

    def opener(self, name: str) -> QuorumOpener:
        trust = self.context.agreement.trust
        assert trust is not None
        return QuorumOpener(context=self.context, trust=trust, journal=self.journal(name))

    def expected_mean(self, participants: Collection[str]) -> NDArray[np.float64]:
        """What the round must open to, from the updates in the clear and integer arithmetic alone."""
        params, weighting = self.context.agreement.params, self.context.agreement.weighting
        total = np.sum([quantise(self.updates[name], params, weighting.share(name))[0] for name in participants], axis=0)
        return dequantise(total, weighting.divisor(participants), params)
