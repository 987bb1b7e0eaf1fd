"""The trust modes in which the clients share no key, each through the whole of the product's round."""

import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.he.meter import Meter
from benchmarks.he.ours import Round
from benchmarks.he.workload import BOUND
from privfed.aggregation.rules import FedAvg
from privfed.agreement import Agreement
from privfed.approval import approve
from privfed.digest import hash_message
from privfed.escrow import EscrowHolder
from privfed.escrow_opener import ReleaseOpener
from privfed.he._seal_secret import KEY_SEED_BYTES, RingKey
from privfed.he.escrow import HolderKey
from privfed.he.escrow_secret import EscrowKey
from privfed.he.params import CkksParams
from privfed.he.threshold import key_id
from privfed.he.threshold_key import ThresholdKey
from privfed.he.threshold_secret import SummandKey, _ring
from privfed.identity import Identity, Roster
from privfed.keys.party import Party
from privfed.protect import protect
from privfed.quorum import QuorumOpener
from privfed.server import Server
from privfed.sharing import answer, check_shares, deal
from privfed.trust import EscrowTrust, ThresholdTrust, Trust
from privfed.update import Layout, Update
from privfed.wire import encode_setup, encode_upload
from privfed.wire_commit import decode_commitments, encode_commitment
from privfed.wire_escrow import decode_holder_key
from privfed.written_agreement import encode_agreement

_SERVER, _HOLDER = "server", "key_holder"
SHARES = "shares.json"


class _TrustRound(Round):
    """What both modes have in common: keys of each client, and terms in the agreement."""

    def _trust(self, encryption_keys: dict[str, bytes]) -> Trust:
        raise NotImplementedError

    @cached_property
    def _terms(self) -> Trust:
        trust = self._context.agreement.trust
        if trust is None:
            raise ValueError("expected an agreement with a trust mode")
        return trust

    def _party(self, name: str) -> Party:
        return Party.of(self._identity(name), self._folder / f"{name}-keys", new=True)

    def _agree(self) -> None:
        for name in (_SERVER, _HOLDER, *self._names):
            Identity.generate(name).save(self._folder / f"{name}.pem")
            (self._folder / f"{name}-keys").mkdir()
        agreement = Agreement(
            session=self._session,
            roster=Roster(server=self._identity(_SERVER).public, clients=tuple(self._identity(name).public for name in self._names)),
            params=self.params(self._work.clients),
            layout=Layout(names=tuple(self._work.sizes), shapes=tuple((size,) for size in self._work.sizes.values())),
            start=bytes(32),
            weights=dict(zip(self._names, self._work.weights, strict=True)),
            rule=FedAvg(),
            trust=self._trust({name: self._party(name).public.encryption_key for name in self._names}),
        )
        (self._folder / "agreement.json").write_text(encode_agreement(agreement), encoding="utf-8")

    @cached_property
    def _session(self) -> bytes:
        return secrets.token_bytes(16)

    def _server(self, spool: str) -> Server:
        return Server(context=self._context, identity=self._identity(_SERVER), selected=self._names, spool=Path(spool))

    def _update(self, client: int) -> Update:
        values = self._context.agreement.layout.flatten(self._work.update(client))
        return Update(sender=self._names[client], round=0, vector=values)

    def _send(self, client: int, key: SummandKey | HolderKey, meter: Meter, agreeing: Meter) -> bytes:
        update, identity = self._update(client), self._identity(self._names[client])
        self._load_ring()
        with meter:
            data = encode_upload(self._context, identity, protect(update, self._context, round_key=key).update)
        with agreeing:
            upload_hash = hash_message(data)
        (self._folder / f"{self._names[client]}.hash").write_bytes(upload_hash)
        return data


class Threshold(_TrustRound):
    """`ThresholdKey` with a fifth of the clients as dropouts: shares, one polynomial, answers of the quorum."""

    @classmethod
    def params(cls, clients: int) -> CkksParams:
        return CkksParams.threshold(clients=clients, bound=BOUND)

    def _trust(self, encryption_keys: dict[str, bytes]) -> Trust:
        clients = self._work.clients
        return ThresholdTrust(key=ThresholdKey(clients=clients, corrupted=0, dropouts=clients // 5), encryption_keys=encryption_keys)

    def _secret(self, name: str) -> SummandKey:
        # Roles are processes of their own here. In life a secret never leaves the one that made it.
        key = SummandKey(params=self._context.agreement.params, binding=self._context.digest)
        path = self._folder / f"{name}.seed"
        if not path.exists():
            path.write_bytes(os.urandom(KEY_SEED_BYTES))
        key._ring_key = RingKey(_ring(key.params), path.read_bytes())
        return key

    def prepare(self, meter: Meter) -> None:
        self._agree()
        self._load_ring()
        for name in self._names:
            secret = self._secret(name)
            with meter:
                message = deal(secret, self._context, self._identity(name), self._terms)
            (self._folder / f"{name}.setup").write_bytes(message)
        with tempfile.TemporaryDirectory(dir=self._folder) as spool:
            server = self._server(spool)
            self._start(server)
            for name in self._names:
                relayed = server.relay(name)
                with meter:
                    check_shares(relayed, self._context, self._party(name))
                (self._folder / f"{name}.shares").write_bytes(relayed)
        answered = self._context.agreement.answer_bytes
        up = (self._folder / f"{self._names[0]}.setup").stat().st_size + answered
        down = (self._folder / f"{self._names[0]}.shares").stat().st_size + self._work.clients * answered
        (self._folder / SHARES).write_text(json.dumps({"up": up, "down": down, "in_result": self._work.clients * answered}))

    def _start(self, server: Server) -> None:
        for name in self._names:
            server.receive_setup((self._folder / f"{name}.setup").read_bytes())
        server.start_uploads()

    def upload(self, client: int, meter: Meter, agreeing: Meter) -> bytes:
        return self._send(client, self._secret(self._names[client]), meter, agreeing)

    def answer(self, meter: Meter) -> None:
        announced = (self._folder / "digest").read_bytes()
        for name in self._names:
            identity, party, relayed = self._identity(name), self._party(name), (self._folder / f"{name}.shares").read_bytes()
            upload_hash, journal = (self._folder / f"{name}.hash").read_bytes(), self._journal(name)
            key_id = self._key_id()
            with meter:
                approval = approve(
                    self._context,
                    identity,
                    announced,
                    key_id=key_id,
                    upload_hash=upload_hash,
                    journal=journal,
                    answer=lambda names, relayed=relayed, party=party: answer(relayed, self._context, party, participants=names),
                )
            (self._folder / f"{name}.approval").write_bytes(approval)

    def _key_id(self) -> bytes:
        return key_id(self._context.digest)

    def open(self, data: bytes, meter: Meter) -> NDArray[np.floating]:
        journal = self._journal(self._names[0])
        self._load_ring()
        with meter:
            return QuorumOpener(context=self._context, trust=self._terms, journal=journal).open(data).vector.values


class Escrow(_TrustRound):
    """`EscrowKey`: two polynomials up, a sum that the key holder computes itself. The opener's time is the holder's and one client's."""

    @classmethod
    def params(cls, clients: int) -> CkksParams:  # noqa: ARG003 (the same for any number)
        return CkksParams.escrow(bound=BOUND)

    def _trust(self, encryption_keys: dict[str, bytes]) -> Trust:
        EscrowKey.generate().save(self._folder / "escrow.key")
        return EscrowTrust(holder=self._identity(_HOLDER).public, encryption_keys=encryption_keys)

    def _holder(self, folder: Path) -> EscrowHolder:
        key = EscrowKey.load(self._folder / "escrow.key")
        return EscrowHolder(identity=self._identity(_HOLDER), key=key, agreement=self._context.agreement, directory=folder)

    @cached_property
    def _holder_key(self) -> HolderKey:
        return decode_holder_key((self._folder / "holder.key").read_bytes(), self._context)

    def prepare(self, meter: Meter) -> None:
        self._agree()
        announced = self._holder(self._folder / _HOLDER).announce_key(self._context)
        (self._folder / "holder.key").write_bytes(announced)
        for name in self._names:
            identity = self._identity(name)
            with meter:
                message = encode_setup(self._context, identity, decode_holder_key(announced, self._context).key_id)
            (self._folder / f"{name}.setup").write_bytes(message)

    def upload(self, client: int, meter: Meter, agreeing: Meter) -> bytes:
        return self._send(client, self._holder_key, meter, agreeing)

    def answer(self, meter: Meter) -> None:
        announced = (self._folder / "digest").read_bytes()
        for name in self._names:
            identity, upload_hash, journal = self._identity(name), (self._folder / f"{name}.hash").read_bytes(), self._journal(name)
            relayed = (self._folder / "commitments").read_bytes()
            with meter:
                approval = approve(
                    self._context,
                    identity,
                    announced,
                    key_id=self._holder_key.key_id,
                    upload_hash=upload_hash,
                    journal=journal,
                    committed=decode_commitments(relayed, self._context, self._holder_key.key_id),
                )
            (self._folder / f"{name}.approval").write_bytes(approval)

    def _commit(self, server: Server, uploads: Iterator[bytes], folder: Path, meter: Meter) -> list[Path]:
        """Has every client commit to its upload; where the uploads wait until all have."""
        waiting: list[Path] = []
        for name, data in zip(self._names, uploads, strict=True):
            waiting.append(folder / f"{name}.waiting")
            waiting[-1].write_bytes(data)
            commitment = encode_commitment(self._context, self._identity(name), hash_message(data), key_id=self._holder_key.key_id)
            del data
            with meter:
                server.receive_commitment(commitment)
        with meter:
            server.close_commitments()
            relayed = server.relay(self._names[0])
        (self._folder / "commitments").write_bytes(relayed)
        return waiting

    def serve(self, uploads: Iterator[bytes], answers: Callable[[], None], meter: Meter) -> bytes:
        self._load_ring()
        with tempfile.TemporaryDirectory(dir=self._folder) as spool:
            server = self._server(spool)
            announced = (self._folder / "holder.key").read_bytes()
            with meter:
                server.receive_holder_key(announced)
                for name in self._names:
                    server.receive_setup((self._folder / f"{name}.setup").read_bytes())
                server.start_uploads()
            waiting = self._commit(server, uploads, Path(spool), meter)
            for path in waiting:
                data = path.read_bytes()
                with meter:
                    server.receive_upload(data)
                path.unlink()
                del data
            with meter:
                announced = server.close()
            (self._folder / "digest").write_bytes(announced)
            answers()
            with meter:
                for name in self._names:
                    server.receive_approval((self._folder / f"{name}.approval").read_bytes())
                request = server.aggregate()
            holding = Meter()
            with tempfile.TemporaryDirectory(dir=self._folder) as folder:
                # Every time as it was after the setup: what it has opened once it would only hand out again.
                holder = self._holder(shutil.copytree(self._folder / _HOLDER, Path(folder) / _HOLDER))
                with holding:
                    opened = holder.open(self._context, request, server.upload)
            (self._folder / "holder.json").write_text(json.dumps(holding.cpu_seconds))
            with meter:
                server.receive_opened(opened)
                return server.result()

    def open(self, data: bytes, meter: Meter) -> NDArray[np.floating]:
        name = self._names[0]
        journal, party = self._journal(name), self._party(name)
        with meter:
            return (
                ReleaseOpener(context=self._context, key_id=self._holder_key.key_id, party=party, journal=journal).open(data).vector.values
            )
