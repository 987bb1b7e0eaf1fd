"""What hostile bytes can reach: every message, every key file, every text. A target either returns or refuses as documented.

Two kinds for each message: bytes from a stranger, of which none may be accepted, and a payload that a party of the session itself
signed, so that what stands behind the signature is reached at all.
"""

import bz2
import gzip
import lzma
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from privfed.aggregation.rules import FedAvg, MultiKrum
from privfed.agreement import Agreement, RoundContext
from privfed.digest import ABRIDGED_BYTES, RoundDigest, hash_message
from privfed.dp.countersign import read_statement
from privfed.dp.federation import FederationStatement
from privfed.dp.mechanism import GaussianRelease
from privfed.dp.statement import PrivacyStatement
from privfed.errors import InvalidMessageError, PrivFedError
from privfed.he.additive import check_chunk
from privfed.he.escrow import SealedVector, public_key_id, sealed_info
from privfed.he.params import CkksParams
from privfed.he.product import MaskedProducts
from privfed.he.product_params import ProductParams
from privfed.he.secret import SharedKey, encrypt
from privfed.he.threshold import key_id
from privfed.he.threshold_key import ThresholdKey
from privfed.hpke import seal_to
from privfed.identity import SIGNATURE_BYTES, Identity, Roster
from privfed.keys.chain import KeyChain
from privfed.keys.party import Party
from privfed.keys.roster import PinnedRoster, server_line
from privfed.keys.scan import scan
from privfed.keys.wrap import unwrap, wrap
from privfed.message import Kind, seal
from privfed.policy import OpeningPolicy
from privfed.protect import round_key
from privfed.state import ModelState, ModelStore
from privfed.trust import ThresholdTrust
from privfed.update import Layout, PlainVector, Update
from privfed.wire import decode_abort, decode_setup, decode_upload, encode_abort, encode_setup, encode_upload
from privfed.wire_aggregate import decode_aggregate
from privfed.wire_approved import write_approved
from privfed.wire_commit import decode_commitment, decode_commitments, encode_commitment, encode_commitments
from privfed.wire_digest import decode_approval, decode_digest, encode_approval, encode_digest
from privfed.wire_escrow import decode_holder_key, decode_opened, decode_request, encode_request
from privfed.wire_products import decode_coefficients, decode_products, encode_coefficients, encode_products
from privfed.wire_shares import (
    decode_dealt_setup,
    decode_relay,
    decode_share,
    encode_dealt_setup,
    encode_relay,
    encode_share,
    sealed_share_bytes,
)
from privfed.written_agreement import decode_agreement, encode_agreement
from tests.holders import HeldRound

CORPUS = Path(__file__).parent / "corpus"
LARGEST = 70_000

FUZZED = tuple(Kind)
_FROM_HOLDER = (Kind.HOLDER_KEY, Kind.OPENED)
_FROM_SERVER = (Kind.DIGEST, Kind.AGGREGATE, Kind.PRODUCTS, Kind.SHARES, Kind.REQUEST, Kind.COMMITS)


class HostileBytesAcceptedError(AssertionError):
    """What nobody of the session signed was taken for a message."""


@dataclass(frozen=True)
class Target:
    """Something that reads bytes from outside.

    Args:
        run: Reads them; raises only what is a finding.
        samples: Valid inputs to start from.
    """

    run: Callable[[bytes], None]
    samples: tuple[bytes, ...]


class Session:
    """Three banks and a server in the middle of a round, two of them with ledgers."""

    def __init__(self) -> None:
        self.server = Identity.generate("server")
        self.banks = [Identity.generate(f"bank_{index}") for index in range(3)]
        agreement = Agreement(
            session=b"session of fuzzy",
            roster=Roster(server=self.server.public, clients=tuple(bank.public for bank in self.banks)),
            params=CkksParams.standard(),
            layout=Layout(names=("weight",), shapes=((5,),)),
            start=bytes(32),
            weights={bank.name: 1.0 for bank in self.banks},
            rule=FedAvg(),
            policy=OpeningPolicy(),
            populations={"bank_0": "accounts", "bank_1": "cards"},
        )
        self.context = RoundContext(agreement=agreement, round=3)
        self.key = round_key(SharedKey.generate(), self.context)
        # The same people under a rule that looks at inner products: two kinds of messages exist there alone.
        scored = replace(agreement, params=ProductParams.exact(), rule=MultiKrum(byzantine=0, keep=3), populations={})
        self.scored = RoundContext(agreement=scored, round=3)
        # And beside a key holder: so do two others, and uploads are of another form.
        self.held = HeldRound(agreement, self.server, self.banks, round=3)
        # And where nobody holds a key: there setups carry shares, and approvals answers.
        encryption_keys = {bank.name: X25519PrivateKey.generate().public_key().public_bytes_raw() for bank in self.banks}
        dealt = ThresholdTrust(key=ThresholdKey(clients=3, corrupted=1, dropouts=0), encryption_keys=encryption_keys)
        agreement = replace(agreement, params=CkksParams.threshold(clients=3), trust=dealt, populations={})
        self.quorum = RoundContext(agreement=agreement, round=3)
        signers = {kind: self.server if kind in _FROM_SERVER else self.banks[0] for kind in FUZZED}
        self.signers = signers | dict.fromkeys(_FROM_HOLDER, self.held.holder)

    def context_of(self, kind: Kind) -> RoundContext:
        if kind in _FROM_HOLDER:
            return self.held.context
        return self.scored if kind in (Kind.PRODUCTS, Kind.COEFFICIENTS) else self.context

    @cached_property
    def update(self) -> Update[Any]:
        import numpy as np

        agreement = self.context.agreement
        vector = encrypt(np.arange(5), agreement.layout, agreement.params, self.key, sender="bank_0")
        return Update(sender="bank_0", round=3, vector=vector)

    @cached_property
    def digest(self) -> RoundDigest:
        names = self.context.agreement.roster.names
        hashes = tuple(hash_message(name.encode()) for name in names)
        return RoundDigest(participants=names, coefficients=(1, 1, 1), upload_hashes=hashes, rule="FedAvg", key_id=self.key.key_id)

    @cached_property
    def scored_digest(self) -> RoundDigest:
        names = self.scored.agreement.roster.names[:2]
        hashes = tuple(hash_message(name.encode()) for name in names)
        rule = self.scored.agreement.rule.name
        return RoundDigest(participants=names, coefficients=(0, 0), upload_hashes=hashes, rule=rule, key_id=self.key.key_id)

    def _products(self) -> bytes:
        params = ProductParams.exact()
        products = MaskedProducts(params=params, key_id=self.key.key_id, count=2, chunks=(bytes(params.product_bytes),) * 3)
        digest = encode_digest(self.scored, self.server, self.scored_digest)
        approvals = [encode_approval(self.scored, bank, self.scored_digest) for bank in self.banks[:2]]
        return encode_products(self.scored, self.server, digest, approvals, products=products)

    @cached_property
    def messages(self) -> Mapping[Kind, bytes]:
        bank, heads = self.banks[0], {"bank_0": b"a head", "bank_1": b"another"}
        digest = encode_digest(self.context, self.server, self.digest, heads)
        approvals = [encode_approval(self.context, each, self.digest, bytes(SIGNATURE_BYTES)) for each in self.banks]
        params = self.context.agreement.params
        layout = self.context.agreement.layout
        size = sum(params.first_polynomial_sizes(layout)) + 3 * 64 if params.seeded_sums else sum(params.sum_chunk_sizes(layout))
        payload = write_approved(digest, approvals) + 3 * bytes(ABRIDGED_BYTES) + bytes(size)
        commits = {
            each.name: encode_commitment(self.context, each, upload_hash, key_id=self.key.key_id)
            for each, upload_hash in zip(self.banks, self.digest.upload_hashes, strict=True)
        }
        commitments = encode_commitments(self.context, self.server, commits, key_id=self.key.key_id)
        share = encode_share(self.context, bank, recipient="bank_1", sealed=bytes(sealed_share_bytes(self.context)))
        return {
            Kind.SETUP: encode_setup(self.context, bank, self.key.key_id),
            Kind.UPLOAD: encode_upload(self.context, bank, self.update, statement=b"a head"),
            Kind.DIGEST: digest,
            Kind.APPROVAL: approvals[0],
            Kind.AGGREGATE: seal(self.context, self.server, Kind.AGGREGATE, key_id=self.key.key_id, payload=payload),
            Kind.ABORT: encode_abort(self.context, bank, self.key.key_id),
            Kind.PRODUCTS: self._products(),
            Kind.COEFFICIENTS: encode_coefficients(self.scored, bank, self.scored_digest, (1, 2)),
            Kind.SHARE: share,
            Kind.SHARES: encode_relay(self.context, self.server, {"bank_0": share}),
            Kind.REQUEST: encode_request(self.context, self.server, digest, approvals, commitments=commitments, key_id=self.key.key_id),
            Kind.COMMIT: commits["bank_0"],
            Kind.COMMITS: commitments,
            **{kind: self.held.messages[kind] for kind in _FROM_HOLDER},
        }

    def key_of(self, kind: Kind) -> bytes:
        if kind in _FROM_HOLDER:
            return public_key_id(self.held.public_key)
        return key_id(self.context.digest) if kind in (Kind.SHARE, Kind.SHARES) else self.key.key_id

    def decode(self, kind: Kind, data: bytes) -> None:
        own = self.key.key_id
        match kind:
            case Kind.SETUP:
                decode_setup(data, self.context)
            case Kind.UPLOAD:
                decode_upload(data, self.context, own)
            case Kind.DIGEST:
                decode_digest(data, self.context, own)
            case Kind.APPROVAL:
                decode_approval(data, self.context, self.digest)
            case Kind.AGGREGATE:
                decode_aggregate(data, self.context, own)
            case Kind.ABORT:
                decode_abort(data, self.context, own)
            case Kind.PRODUCTS:
                decode_products(data, self.scored, own)
            case Kind.COEFFICIENTS:
                decode_coefficients(data, self.scored, self.scored_digest)
            case Kind.SHARE:
                decode_share(data, self.context)
            case Kind.SHARES:
                decode_relay(data, self.context)
            case Kind.REQUEST:
                decode_request(data, self.context, own)
            case Kind.COMMIT:
                decode_commitment(data, self.context, own)
            case Kind.COMMITS:
                decode_commitments(data, self.context, own)
            case Kind.HOLDER_KEY:
                decode_holder_key(data, self.held.context)
            case Kind.OPENED:
                decode_opened(data, self.held.context, self.key_of(kind))

    def stranger(self, kind: Kind) -> Target:
        """Bytes as they come from the network."""
        authentic = self.messages[kind]

        def run(data: bytes) -> None:
            try:
                self.decode(kind, data)
            except InvalidMessageError:
                return
            if data != authentic:
                raise HostileBytesAcceptedError(kind.name)

        return Target(run=run, samples=(authentic,))

    def insider(self, kind: Kind) -> Target:
        """A payload that its rightful sender signed."""
        empty = seal(self.context_of(kind), self.signers[kind], kind, key_id=self.key_of(kind), payload=b"")
        payload = self.messages[kind][len(empty) - SIGNATURE_BYTES : -SIGNATURE_BYTES]

        def run(data: bytes) -> None:
            with suppress(PrivFedError):
                self.decode(kind, seal(self.context_of(kind), self.signers[kind], kind, key_id=self.key_of(kind), payload=data))

        return Target(run=run, samples=(payload,))

    def of_other_modes(self) -> dict[str, Target]:
        """Payloads of the kinds that have another form in another trust mode, signed by their rightful sender."""
        bank, quorum, own = self.banks[0], self.quorum, key_id(self.quorum.digest)
        held, held_key = self.held.context, public_key_id(self.held.public_key)
        names = quorum.agreement.roster.names
        sealed = bytes(sealed_share_bytes(quorum))
        setup = encode_dealt_setup(quorum, bank, {name: encode_share(quorum, bank, recipient=name, sealed=sealed) for name in names})
        hashes = tuple(hash_message(name.encode()) for name in names)
        digest = RoundDigest(participants=names, coefficients=(1, 1, 1), upload_hashes=hashes, rule="FedAvg", key_id=own)
        answers = [encode_approval(quorum, each, digest, answer=bytes(quorum.agreement.answer_bytes)) for each in self.banks]
        announced = encode_digest(quorum, self.server, digest)
        chunk = bytes(quorum.agreement.params.polynomial_bytes)
        aggregate = seal(quorum, self.server, Kind.AGGREGATE, key_id=own, payload=write_approved(announced, answers) + chunk)
        decode_aggregate(aggregate, quorum, own)

        def target(context: RoundContext, signer: Identity, kind: Kind, sample: bytes, read: Callable[[bytes], object]) -> Target:
            used = held_key if context is held else own
            empty = seal(context, signer, kind, key_id=used, payload=b"")

            def run(data: bytes) -> None:
                with suppress(PrivFedError):
                    read(seal(context, signer, kind, key_id=used, payload=data))

            return Target(run=run, samples=(sample[len(empty) - SIGNATURE_BYTES : -SIGNATURE_BYTES],))

        return {
            "dealt-setup": target(quorum, bank, Kind.SETUP, setup, lambda data: decode_dealt_setup(data, quorum)),
            "answer": target(quorum, bank, Kind.APPROVAL, answers[0], lambda data: decode_approval(data, quorum, digest)),
            "quorum-aggregate": target(quorum, self.server, Kind.AGGREGATE, aggregate, lambda data: decode_aggregate(data, quorum, own)),
            "whole-upload": target(
                held, bank, Kind.UPLOAD, self.held.messages[Kind.UPLOAD], lambda data: decode_upload(data, held, held_key)
            ),
            "sealed-chunk": self._sealed_chunk(),
            "held-request": target(
                held, self.server, Kind.REQUEST, self.held.messages[Kind.REQUEST], lambda data: decode_request(data, held, held_key)
            ),
        }

    def _sealed_chunk(self) -> Target:
        """What a client of the session sealed to the key holder, past the signature and the seal."""
        held, key, bank = self.held.context, self.held.key, self.banks[0]
        params, layout, key_id = held.agreement.params, held.agreement.sent_layout, public_key_id(self.held.public_key)
        update = decode_upload(self.held.messages[Kind.UPLOAD], held, key_id)
        assert isinstance(update.vector, SealedVector)
        sample = key.unseal(update.vector, sender=bank.name).chunks[0]

        def run(data: bytes) -> None:
            fitted = data[: len(sample)].ljust(len(sample), b"\0")
            chunk = seal_to(fitted, key.encryption_key, info=sealed_info(held.digest, sender=bank.name, place=0))
            with suppress(PrivFedError):
                key.unseal(SealedVector(layout=layout, params=params, key_id=key_id, chunks=(chunk,)), sender=bank.name)

        return Target(run=run, samples=(sample,))

    def header(self) -> Target:
        """A whole body, header included, that a party signed."""
        body = self.messages[Kind.SETUP][:-SIGNATURE_BYTES]

        def run(data: bytes) -> None:
            with suppress(PrivFedError):
                self.decode(Kind.SETUP, data + self.banks[0].sign(data))

        return Target(run=run, samples=(body,))

    def statement(self) -> Target:
        """The head of a ledger, signed by its owner."""
        owner = self.banks[0]
        context, head = bytes(32), b"privfed ledger head v2\x00\x06bank_0\x00\x08accounts" + bytes(32)

        def run(data: bytes) -> None:
            with suppress(PrivFedError):
                read_statement(data + owner.sign(head + data), owner=owner.public, population="accounts", context=context)

        return Target(run=run, samples=(bytes(8) + bytes(32) + bytes(32),))

    def chunk(self, *, fresh: bool) -> Target:
        """A ciphertext, past every signature."""
        params = self.context.agreement.params
        (size,) = params.first_polynomial_sizes(self.context.agreement.layout)
        sample = self.update.vector.chunks[0] if fresh else bytes(size + params.polynomial_bytes)

        def run(data: bytes) -> None:
            with suppress(PrivFedError):
                check_chunk(data, params, size, fresh=fresh)

        return Target(run=run, samples=(sample,))


def json_text(read: Callable[[str], object], sample: str) -> Target:
    """A document that somebody hands on."""

    def run(data: bytes) -> None:
        with suppress(PrivFedError, ValueError):
            read(data.decode())

    return Target(run=run, samples=(sample.encode(),))


def privacy_statement() -> PrivacyStatement:
    event = GaussianRelease(noise_multiplier=8.0)
    return PrivacyStatement.of([event] * 2, population="bank", delta=1e-6, max_grad_norm=1.0)


def private_file(load: Callable[[Path], object], save: Callable[[Path], None]) -> Target:
    """A file that only its owner reads."""
    folder = Path(tempfile.mkdtemp(prefix="privfed-fuzz-"))
    save(folder / "valid")
    sample = (folder / "valid").read_bytes()

    def run(data: bytes) -> None:
        path = folder / "file"
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
        with suppress(PrivFedError, ValueError):
            load(path)

    return Target(run=run, samples=(sample,))


class Keys:
    """Two clients of a roster, and a key that one of them wrapped for the other."""

    def __init__(self) -> None:
        self.sender, self.recipient = (Party(identity=Identity.generate(name), encryption_key=X25519PrivateKey.generate()) for name in "ab")
        self.roster = PinnedRoster(server=Identity.generate("hub").public, members=(self.sender.public, self.recipient.public))
        self.chain = KeyChain.generate(self.roster)
        self.wrapped = wrap(self.chain, sender=self.sender, recipient=self.recipient.public, roster=self.roster)

    def unwrap(self, data: bytes) -> KeyChain:
        return unwrap(data, recipient=self.recipient, roster=self.roster, epoch=1)

    def stranger(self) -> Target:
        """A wrapped key as it comes by any way."""

        def run(data: bytes) -> None:
            with suppress(PrivFedError):
                self.unwrap(data)
                if data != self.wrapped:
                    raise HostileBytesAcceptedError("wrapped key")

        return Target(run=run, samples=(self.wrapped,))

    def insider(self) -> Target:
        """What stands behind a client's signature."""

        def run(data: bytes) -> None:
            with suppress(PrivFedError):
                self.unwrap(data + self.sender.sign(data))

        return Target(run=run, samples=(self.wrapped[:-SIGNATURE_BYTES],))

    def roster_text(self) -> Target:
        lines = [server_line(self.roster.server), *(member.line for member in self.roster.members)]
        return json_text(PinnedRoster.parse, "\n".join(lines))

    def chain_file(self) -> Target:
        return private_file(lambda path: KeyChain.load(path, roster=self.roster), self.chain.save)

    def scan(self) -> Target:
        """A file that is searched for keys, plain and compressed."""
        folder = Path(tempfile.mkdtemp(prefix="privfed-fuzz-"))
        SharedKey.generate().save(folder / "key")
        key = (folder / "key").read_bytes()
        with zipfile.ZipFile(folder / "zip", "w", zipfile.ZIP_DEFLATED) as packed:
            packed.writestr("inner", key)

        def run(data: bytes) -> None:
            (folder / "file").write_bytes(data)
            list(scan(folder / "file"))

        return Target(run=run, samples=(key, (folder / "zip").read_bytes(), gzip.compress(key), bz2.compress(key), lzma.compress(key)))


def model_file() -> Target:
    """A client's model, out of a backup or from another disk."""
    layout = Layout(names=("weight",), shapes=((5,),))
    state = ModelState(values=PlainVector(layout=layout, values=range(5)), rounds=(0, 2))
    return private_file(lambda path: ModelStore(path, layout=layout).load(), lambda path: ModelStore(path, layout=layout).save(state))


def targets() -> dict[str, Target]:
    """All of them, by name."""
    session, keys = Session(), Keys()
    found = {f"stranger-{kind.name.lower()}": session.stranger(kind) for kind in FUZZED}
    found |= {f"insider-{kind.name.lower()}": session.insider(kind) for kind in FUZZED}
    found |= session.of_other_modes()
    return found | {
        "agreement-held": json_text(decode_agreement, encode_agreement(session.held.context.agreement)),
        "agreement-quorum": json_text(decode_agreement, encode_agreement(session.quorum.agreement)),
        "header": session.header(),
        "statement": session.statement(),
        "fresh-chunk": session.chunk(fresh=True),
        "sum-chunk": session.chunk(fresh=False),
        "agreement": json_text(decode_agreement, encode_agreement(session.context.agreement)),
        "privacy-statement": json_text(PrivacyStatement.from_json, privacy_statement().to_json()),
        "federation-statement": json_text(
            FederationStatement.from_json, FederationStatement(mode="SharedKey", statements=(privacy_statement(),)).to_json()
        ),
        "shared-key-file": private_file(SharedKey.load, SharedKey.generate().save),
        "stranger-wrap": keys.stranger(),
        "insider-wrap": keys.insider(),
        "roster": keys.roster_text(),
        "key-chain-file": keys.chain_file(),
        "scanned-file": keys.scan(),
        "model-file": model_file(),
        "identity-file": private_file(lambda path: Identity.load(path, name="bank"), Identity.generate("bank").save),
    }


def corpus(name: str) -> Iterable[bytes]:
    """Inputs that are kept: what once broke a target, and what reaches its corners."""
    folder = CORPUS / name
    return [path.read_bytes() for path in sorted(folder.iterdir())] if folder.is_dir() else []
