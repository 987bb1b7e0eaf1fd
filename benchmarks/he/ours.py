"""Our profiles, each through the whole of the product's round: protect, signed messages, server, approvals, key holder."""

import secrets
import tempfile
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from benchmarks.he.meter import Meter
from benchmarks.he.workload import BOUND, Workload
from privfed.aggregation.rules import FedAvg
from privfed.agreement import Agreement, RoundContext
from privfed.approval import approve
from privfed.digest import hash_message
from privfed.he._seal_public import ring
from privfed.he.params import CkksParams
from privfed.he.profiles import COMPACT, COMPATIBLE, PARITY, STANDARD, Profile
from privfed.he.secret import RoundKey, SharedKey
from privfed.identity import Identity, Roster
from privfed.journal import Journal
from privfed.keyholder import KeyHolder
from privfed.protect import Protected, protect, round_key
from privfed.server import Server
from privfed.update import Layout, Update
from privfed.wire import encode_setup, encode_upload
from privfed.written_agreement import decode_agreement, encode_agreement

_SERVER = "server"


class Round:
    """Files that hold what the parties of a round would each keep for themselves."""

    profile: ClassVar[Profile]

    def __init__(self, work: Workload, folder: Path) -> None:
        self._work = work
        self._folder = folder
        self._names = tuple(f"client_{client:03}" for client in range(work.clients))

    @classmethod
    def params(cls, clients: int) -> CkksParams:
        """Encryption parameters for so many clients."""
        return CkksParams.from_profile(cls.profile, bound=BOUND, clients=clients)

    @cached_property
    def _context(self) -> RoundContext:
        return RoundContext(agreement=decode_agreement((self._folder / "agreement.json").read_text(encoding="utf-8")), round=0)

    def _load_ring(self) -> None:
        """What is made once in a process and serves all rounds; peers load their contexts as early."""
        params = self._context.agreement.params
        ring(params.poly_modulus_degree, params.modulus, slots=params.slots)

    def _identity(self, name: str) -> Identity:
        return Identity.load(self._folder / f"{name}.pem", name=name)

    def _round_key(self) -> RoundKey:
        return round_key(SharedKey.load(self._folder / "shared.key"), self._context)

    def _journal(self, name: str) -> Journal:
        return Journal(self._folder / f"{name}.journal")

    def prepare(self, meter: Meter) -> None:
        identities = {name: Identity.generate(name) for name in (_SERVER, *self._names)}
        for name, identity in identities.items():
            identity.save(self._folder / f"{name}.pem")
        SharedKey.generate().save(self._folder / "shared.key")
        agreement = Agreement(
            session=secrets.token_bytes(16),
            roster=Roster(server=identities[_SERVER].public, clients=tuple(identities[name].public for name in self._names)),
            params=self.params(self._work.clients),
            layout=Layout(names=tuple(self._work.sizes), shapes=tuple((size,) for size in self._work.sizes.values())),
            start=bytes(32),
            weights=dict(zip(self._names, self._work.weights, strict=True)),
            rule=FedAvg(),
        )
        (self._folder / "agreement.json").write_text(encode_agreement(agreement), encoding="utf-8")
        key_id = self._round_key().key_id
        for name in self._names:
            with meter:
                message = encode_setup(self._context, identities[name], key_id)
            (self._folder / f"{name}.setup").write_bytes(message)

    def _protected(self, client: int, tensors: dict[str, NDArray[np.float32]], key: RoundKey) -> Protected:
        context = self._context
        update = Update(sender=self._names[client], round=context.round, vector=context.agreement.layout.flatten(tensors))
        return protect(update, context, round_key=key)

    def upload(self, client: int, meter: Meter, agreeing: Meter) -> bytes:
        tensors, context, identity = self._work.update(client), self._context, self._identity(self._names[client])
        self._load_ring()
        with agreeing:
            key = self._round_key()  # a client derives it for its setup message, and keeps it
        with meter:
            data = encode_upload(context, identity, self._protected(client, tensors, key).update)
        with agreeing:
            upload_hash = hash_message(data)
        (self._folder / f"{self._names[client]}.hash").write_bytes(upload_hash)
        return data

    def serve(self, uploads: Iterator[bytes], answers: Callable[[], None], meter: Meter) -> bytes:
        identity, context = self._identity(_SERVER), self._context
        self._load_ring()
        with tempfile.TemporaryDirectory(dir=self._folder) as spool:
            with meter:
                server = Server(context=context, identity=identity, selected=self._names, spool=Path(spool))
                for name in self._names:
                    server.receive_setup((self._folder / f"{name}.setup").read_bytes())
                server.start_uploads()
            for data in uploads:
                with meter:
                    server.receive_upload(data)
                del data  # else this one would be held while the next one comes
            with meter:
                announced = server.close()
            (self._folder / "digest").write_bytes(announced)
            answers()
            with meter:
                for name in self._names:
                    server.receive_approval((self._folder / f"{name}.approval").read_bytes())
                return server.aggregate()

    def answer(self, meter: Meter) -> None:
        announced, key_id = (self._folder / "digest").read_bytes(), self._round_key().key_id
        for name in self._names:
            identity, upload_hash, journal = self._identity(name), (self._folder / f"{name}.hash").read_bytes(), self._journal(name)
            with meter:
                approval = approve(self._context, identity, announced, key_id=key_id, upload_hash=upload_hash, journal=journal)
            (self._folder / f"{name}.approval").write_bytes(approval)

    def open(self, data: bytes, meter: Meter) -> NDArray[np.floating]:
        context, journal = self._context, self._journal(self._names[0])
        self._load_ring()
        with meter:
            holder = KeyHolder(context=context, round_key=self._round_key(), journal=journal)
            return holder.open(data).vector.values


class Standard(Round):
    """54 bits, weights at the server."""

    profile = STANDARD


class Compact(Round):
    """40 bits, weights at the server."""

    profile = COMPACT


class Parity(Round):
    """32 bits, weights at the clients."""

    profile = PARITY


class Compatible(Round):
    """60 bits in slots, weights at the clients."""

    profile = COMPATIBLE
