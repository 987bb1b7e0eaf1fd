"""`EscrowKey` through the engine: the key holder computes the sum itself, and nobody else can open anything."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from privfed.aggregation.private_weights import PrivateWeights
from privfed.aggregation.robust import FLTrust, GeometricMedian
from privfed.aggregation.rules import MultiKrum
from privfed.aggregation.server_optimizer import FedAdam, ServerOptimizer, ServerSgd
from privfed.agreement import Validator
from privfed.consortium import Consortium
from privfed.digest import RoundDigest, hash_message
from privfed.engines.local import Simulation, simulate
from privfed.engines.site import HOLDER_NAME
from privfed.errors import (
    AgreementMismatchError,
    AlreadyOpenedError,
    CohortError,
    DamagedFileError,
    DecryptionError,
    InvalidMessageError,
    OpeningRefusedError,
    RoundMismatchError,
    TamperedAggregateError,
    UnsupportedInThisModeError,
)
from privfed.escrow import EscrowHolder
from privfed.escrow_session import EscrowSession
from privfed.he._seal_public import members, saved
from privfed.he._seal_public import ring as ring_of
from privfed.he._seal_secret import SumKey, transform
from privfed.he.codec import gather, pack_words, unpack_words
from privfed.he.escrow import HolderKey, RunningSum, SealedVector, WholeVector, seal_vector, sealed_info
from privfed.he.escrow_secret import EscrowKey, encrypt_to_holder
from privfed.he.params import CkksParams
from privfed.he.product_params import ProductParams
from privfed.he.secret import SharedKey
from privfed.hpke import SEALED_OVERHEAD_BYTES
from privfed.identity import Identity
from privfed.release import open_release
from privfed.round import run_round
from privfed.round_record import Stage
from privfed.server import Server
from privfed.server_spool import COMMITMENTS
from privfed.session import outbox_name
from privfed.training.model import mlp
from privfed.training.scaffold import Scaffold
from privfed.update import Update
from privfed.wire import decode_upload, encode_upload
from privfed.wire_commit import encode_commitment, encode_commitments
from privfed.wire_digest import encode_approval, encode_digest
from privfed.wire_escrow import decode_holder_key, decode_opened, encode_request
from tests.engines.test_threshold import Crash, Script, crash

Make = Callable[..., Consortium]


def terms(key: EscrowKey | None = None) -> dict[str, Any]:
    return {"keys": key or EscrowKey.generate(), "params": CkksParams.escrow()}


def test_a_run_gives_the_same_model_as_under_a_shared_key_and_in_a_server_process(model: torch.nn.Module, non_private: Make) -> None:
    models = []
    weights = (0.5, 0.3, 0.2)
    shared = {"keys": SharedKey.generate(), "params": replace(CkksParams.standard(), weight_sum=256)}
    for options, separate in ((terms(), False), (terms(), True), (shared, False)):
        with Simulation(non_private(weights=weights, **options), model, separate_server=separate) as simulation:
            history = simulation.run(rounds=2)
        assert history.grid_error_max == 0
        models.append(history.model.values)
    assert history.mode == "SharedKey"
    assert np.array_equal(models[0], models[1])
    assert np.array_equal(models[0], models[2])


def test_clients_that_fall_silent_before_their_upload_or_at_the_opening_leave_exact_rounds(
    model: torch.nn.Module, non_private: Make
) -> None:
    script = Script(
        round_0={"bank_3": Stage.SETUP},
        round_1={"bank_2": Stage.UPLOAD, "bank_1": Stage.OPENING},
        round_2={"bank_0": Stage.APPROVAL},
    )
    with Simulation(non_private(count=4, **terms()), model) as simulation:
        history = simulation.run(rounds=4, absences=script)
        states = [participant.session.state for participant in simulation.encrypted.participants.values()]
    assert [failed.round for failed in history.failed] == [2]
    assert history.grid_error_max == 0
    assert all(state.rounds == (0, 1, 3) for state in states)


@pytest.mark.parametrize("stop", ["start_uploads", "close", "aggregate", "receive_opened", "result"])
def test_a_run_that_was_killed_goes_on_where_it_stood(
    model: torch.nn.Module, non_private: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: str
) -> None:
    key = EscrowKey.generate()
    whole = simulate(non_private(**terms(key)), model, rounds=1)
    with monkeypatch.context() as patch:
        patch.setattr(Server, stop, crash)
        with pytest.raises(Crash):
            simulate(non_private(**terms(key)), model, rounds=1, directory=tmp_path)
    history = simulate(non_private(**terms(key)), model, rounds=1, directory=tmp_path)
    assert np.array_equal(history.model.values, whole.model.values)
    with pytest.raises(AgreementMismatchError, match="another shared key"):
        simulate(non_private(**terms()), model, rounds=2, directory=tmp_path)


class Halted:
    """A round as the key holder finds it: everybody has approved, and nothing is opened."""

    def __init__(self, simulation: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
        self.encrypted = simulation.encrypted
        with monkeypatch.context() as patch:
            patch.setattr(EscrowHolder, "open", crash)
            with pytest.raises(Crash):
                simulation.run(rounds=1)
        self.context = self.encrypted.context(0)
        server = self.encrypted._server(self.context, tuple(self.encrypted.participants))
        assert isinstance(server, Server)
        self.server = server
        assert self.encrypted.holder is not None
        self.holder = self.encrypted.holder
        self.key_id = self.encrypted.participants["bank_0"].session.key_id(self.context)
        self.request = server.aggregate()


@pytest.fixture
def halted(model: torch.nn.Module, non_private: Make, monkeypatch: pytest.MonkeyPatch) -> Any:
    with Simulation(non_private(**terms()), model) as simulation:
        yield Halted(simulation, monkeypatch)


def test_the_holder_opens_the_signed_uploads_and_nothing_that_the_server_puts_in_their_place(halted: Halted) -> None:
    swapped = {"bank_0": "bank_1", "bank_1": "bank_0", "bank_2": "bank_2"}
    damaged = bytearray(halted.server.upload("bank_0"))
    damaged[-1000] ^= 1
    lies: tuple[Callable[[str], bytes], ...] = (
        lambda name: halted.server.upload(swapped[name]),
        lambda name: halted.server.upload("bank_0"),
        lambda name: bytes(damaged) if name == "bank_0" else halted.server.upload(name),
        lambda name: b"",
    )
    for lie in lies:
        with pytest.raises(TamperedAggregateError):
            halted.holder.open(halted.context, halted.request, lie)
    opened = halted.holder.open(halted.context, halted.request, halted.server.upload)
    assert halted.holder.open(halted.context, halted.request, halted.server.upload) == opened


def test_the_holder_opens_one_request_a_round_and_only_with_every_approval(halted: Halted) -> None:
    digest, server = halted.server.close(), halted.encrypted._site.server
    approvals = [halted.encrypted.participants[name].approve(halted.context, digest) for name in halted.encrypted.participants]
    key_id = halted.encrypted.participants["bank_0"].session.key_id(halted.context)
    fewer = encode_request(halted.context, server, digest, approvals[:2], commitments=halted.server.relay("bank_0"), key_id=key_id)
    with pytest.raises(OpeningRefusedError, match=r"missing \['bank_2'\]; nothing was decrypted"):
        halted.holder.open(halted.context, fewer, halted.server.upload)
    halted.holder.open(halted.context, halted.request, halted.server.upload)
    with pytest.raises(AlreadyOpenedError, match="was already opened; nothing was decrypted"):
        halted.holder.open(halted.context, fewer, halted.server.upload)


def test_what_the_holder_publishes_is_read_by_the_clients_and_by_nobody_else(halted: Halted) -> None:
    opened = halted.holder.open(halted.context, halted.request, halted.server.upload)
    session: Any = halted.encrypted.participants["bank_0"].session
    _, message = decode_opened(opened, halted.context, session.key_id(halted.context))
    digest = message.digest.digest(halted.context)
    release: Any = message.total
    numbers = open_release(release, halted.context, session.party, digest=digest)
    other: Any = halted.encrypted.participants["bank_1"].session
    stolen = replace(release, sealed=release.sealed | {"bank_1": release.sealed["bank_0"]})
    for wrong, party, named in (
        (stolen, other.party, digest),
        (release, session.party, bytes(32)),
        (replace(release, ciphertext=release.ciphertext[:-1]), session.party, digest),
    ):
        with pytest.raises(InvalidMessageError):
            open_release(wrong, halted.context, party, digest=named)
    # The server stores it, and the numbers are not in it.
    halted.server.receive_opened(opened)
    stored = b"".join(path.read_bytes() for path in halted.encrypted._site.server_identity_path.parent.rglob("*") if path.is_file())
    largest = halted.context.agreement.params.largest_sum
    assert (numbers[:8] + largest).astype("<u8").view(np.uint8).reshape(-1, 8)[:, :5].tobytes() not in stored


def test_a_release_that_the_holder_did_not_sign_is_refused_by_server_and_clients(halted: Halted) -> None:
    with pytest.raises(CohortError, match="the key holder has not opened round 0"):
        halted.server.result()
    opened = halted.holder.open(halted.context, halted.request, halted.server.upload)
    damaged = bytearray(opened)
    damaged[-70] ^= 1
    with pytest.raises(InvalidMessageError):
        halted.server.receive_opened(bytes(damaged))
    with pytest.raises(InvalidMessageError):
        halted.encrypted.participants["bank_0"].open(halted.context, bytes(damaged))
    halted.server.receive_opened(opened)
    halted.server.receive_opened(opened)
    assert halted.server.result() == opened
    halted.encrypted.participants["bank_0"].open(halted.context, opened)
    with pytest.raises(CohortError, match="'stranger' is not in the digest"):
        halted.server.upload("stranger")


class Collusion:
    """Three honest banks, and `bank_3` that works together with the server: who sees every upload as soon as it is handed out."""

    HONEST = ("bank_0", "bank_1", "bank_2")
    INSIDER = "bank_3"

    def __init__(self, simulation: Simulation) -> None:
        encrypted = simulation.encrypted
        assert encrypted.holder is not None
        self.parties, self.holder, self.context = encrypted.participants, encrypted.holder, encrypted.context(0)
        self.server, self.insider = encrypted._site.server, encrypted._site.clients[self.INSIDER]
        self.identities = encrypted._site.clients
        self.agreement = self.context.agreement
        announced = self.holder.announce_key(self.context)
        self.holder_key = decode_holder_key(announced, self.context)
        self.key_id = self.holder_key.key_id
        for party in self.parties.values():
            party.take_key(self.context, announced)
        self.weights = self.agreement.coefficients(self.agreement.roster.names)
        self.commits = {name: party.commit(self.context) for name, party in self.parties.items()}
        self.first = self.commitments(self.commits)

    def commitments(self, commits: dict[str, bytes]) -> bytes:
        return encode_commitments(self.context, self.server, commits, key_id=self.key_id)

    def second(self, upload: bytes) -> bytes:
        """What the clients committed to, but for the insider, which chose again."""
        commit = encode_commitment(self.context, self.insider, hash_message(upload), key_id=self.key_id)
        return self.commitments(self.commits | {self.INSIDER: commit})

    def hand_out(self, commitments: bytes, *names: str) -> dict[str, bytes]:
        for name in names:
            self.parties[name].take_commitments(self.context, commitments)
        return {name: self.parties[name].upload(self.context) for name in names}

    def vector(self, upload: bytes) -> WholeVector:
        """The ciphertexts in an upload with the seal taken off, as the key holder alone can."""
        update = decode_upload(upload, self.context, self.key_id)
        assert isinstance(update.vector, SealedVector)
        return self.holder._attempt_key(self.context).unseal(update.vector, sender=update.sender)

    def encode(self, vector: WholeVector) -> bytes:
        """The insider's upload with ciphertexts of its choice, sealed as they should be."""
        sealed = seal_vector(vector, self.holder_key, sender=self.INSIDER)
        return encode_upload(self.context, self.insider, Update(sender=self.INSIDER, round=0, vector=sealed))

    def cancelling(self, uploads: dict[str, bytes]) -> bytes:
        """The insider's upload that takes those of others out of the sum: an encryption of minus theirs, over its own weight.

        The pair cannot take the seals off; here it is given what is behind them.
        """
        layout, params = self.agreement.sent_layout, self.agreement.params
        modulus, inverse = params.modulus, pow(self.weights[self.INSIDER], -1, params.modulus)

        def words(vector: WholeVector, chunk: int) -> Any:
            return unpack_words(vector.chunks[chunk], params).astype(object)

        def zero() -> WholeVector:
            return encrypt_to_holder(np.zeros(layout.size, np.int64), layout, params, self.holder_key.public_key)

        base, chunks = zero(), list[bytes]()
        others = [(self.weights[name], self.vector(upload), zero()) for name, upload in uploads.items()]
        for chunk in range(len(base.chunks)):
            taken: Any = sum(weight * (words(fresh, chunk) - words(vector, chunk)) for weight, vector, fresh in others)
            chunks.append(pack_words(((words(base, chunk) + inverse * taken) % modulus).astype(np.uint64), params))
        return self.encode(WholeVector(layout=layout, params=params, key_id=self.key_id, chunks=tuple(chunks)))

    def digest(self, uploads: dict[str, bytes]) -> RoundDigest:
        names = tuple(name for name in self.parties if name in uploads)
        return RoundDigest(
            participants=names,
            coefficients=tuple(self.agreement.coefficients(names).values()),
            upload_hashes=tuple(hash_message(uploads[name]) for name in names),
            rule=self.agreement.rule.name,
            key_id=self.key_id,
        )

    def announce(self, digest: RoundDigest) -> bytes:
        return encode_digest(self.context, self.server, digest)

    def request(self, digest: RoundDigest, approvals: list[bytes], commitments: bytes) -> bytes:
        return encode_request(self.context, self.server, self.announce(digest), approvals, commitments=commitments, key_id=self.key_id)

    def read(self, opened: bytes) -> Any:
        """What the insider reads of what the holder published."""
        message = decode_opened(opened, self.context, self.key_id)[1]
        session: Any = self.parties[self.INSIDER].session
        total: Any = message.total
        return open_release(total, self.context, session.party, digest=message.digest.digest(self.context))

    def truth(self, upload: bytes) -> Any:
        """What is in an upload, as the key holder could read it."""
        total = RunningSum(layout=self.agreement.sent_layout, params=self.agreement.params, key_id=self.key_id)
        total.add(1, self.vector(upload))
        return self.holder._attempt_key(self.context).open_sum(total.total(), coefficients=(1,))


@pytest.fixture
def collusion(model: torch.nn.Module, non_private: Make) -> Any:
    with Simulation(non_private(count=4, weights=(1.0, 2.0, 3.0, 2.0), **terms()), model) as simulation:
        yield Collusion(simulation)


@pytest.mark.parametrize("unchecked", ["nothing", "clients", "holder"])
def test_one_client_together_with_the_server_cannot_open_an_upload(
    collusion: Collusion, monkeypatch: pytest.MonkeyPatch, unchecked: str
) -> None:
    """The insider takes all updates but one out of the sum. Where clients, or the holder, do not ask for commitments, it reads that one."""
    uploads = collusion.hand_out(collusion.first, *collusion.HONEST)
    crafted = collusion.cancelling({name: uploads[name] for name in ("bank_1", "bank_2")})
    uploads[collusion.INSIDER] = crafted
    digest = collusion.digest(uploads)
    announced = collusion.announce(digest)
    own = encode_approval(collusion.context, collusion.insider, digest)
    refusal = pytest.raises(OpeningRefusedError, match="an upload of 'bank_3' to which it had not committed .* nothing was approved")
    if unchecked == "clients":
        monkeypatch.setattr("privfed.approval.check_committed", lambda digest, committed: None)
        approvals = [collusion.parties[name].approve(collusion.context, announced) for name in collusion.HONEST]
        request = collusion.request(digest, [*approvals, own], collusion.second(crafted))
    else:
        for name in collusion.HONEST:
            with pytest.raises(OpeningRefusedError, match="an upload of 'bank_3' to which it had not committed .* nothing was approved"):
                collusion.parties[name].approve(collusion.context, announced)
        # As if every client were the server's: only the holder is left to ask.
        approvals = [encode_approval(collusion.context, collusion.identities[name], digest) for name in collusion.HONEST]
        request = collusion.request(digest, [*approvals, own], collusion.first)
        if unchecked == "nothing":
            with refusal:
                collusion.holder.open(collusion.context, request, uploads.__getitem__)
            return
        monkeypatch.setattr("privfed.wire_escrow.check_committed", lambda digest, committed: None)
    opened = collusion.holder.open(collusion.context, request, uploads.__getitem__)
    victim = collusion.truth(uploads["bank_0"])
    assert np.count_nonzero(victim)
    assert np.array_equal(collusion.read(opened), collusion.weights["bank_0"] * victim)


def test_a_client_whose_upload_decrypts_to_the_key_reads_no_upload_together_with_the_server(non_private: Make) -> None:
    """It gets the key: zero is encrypted, and a multiple of the grid added to its second polynomial, which is opened times the key.

    The upload was committed to before any other was seen, and everybody approves it. With the ternary key in the largest grid points, the
    other updates beside it are rounding errors. As a control the pair is given the ciphertexts that the uploads seal: it reads each.
    """
    with Simulation(non_private(count=4, weights=(1.0, 2.0, 3.0, 2.0), **terms()), mlp(inputs=4, hidden=(1024,))) as simulation:
        collusion = Collusion(simulation)
        layout, params = collusion.agreement.sent_layout, collusion.agreement.params
        degree, public_key = params.poly_modulus_degree, collusion.holder_key.public_key
        zero = encrypt_to_holder(np.zeros(layout.size, np.int64), layout, params, public_key)
        words = unpack_words(zero.chunks[0], params).astype(object)
        words[degree:] += params.amplitude << params.guard_bits  # the constant's transform is that constant
        vector = replace(zero, chunks=(pack_words((words % params.modulus).astype(np.uint64), params), *zero.chunks[1:]))
        crafted = collusion.encode(vector)
        commitments = collusion.second(crafted)
        uploads = collusion.hand_out(commitments, *collusion.HONEST) | {collusion.INSIDER: crafted}
        digest = collusion.digest(uploads)
        approvals = [collusion.parties[name].approve(collusion.context, collusion.announce(digest)) for name in collusion.HONEST]
        request = collusion.request(digest, [*approvals, encode_approval(collusion.context, collusion.insider, digest)], commitments)
        opened = collusion.read(collusion.holder.open(collusion.context, request, uploads.__getitem__))
        secret = np.rint(opened[:degree] / (collusion.weights[collusion.INSIDER] * params.amplitude)).astype(np.int64)
        ring = ring_of(degree, params.modulus, slots=False)
        with transform(ring) as plaintexts:
            body = members(saved(plaintexts(secret.reshape(1, degree))[0]))
        key = SumKey(ring, np.frombuffer(body[-8 * degree :], "<u8"))

        def read(ciphertexts: Sequence[bytes]) -> Any:
            points = [gather(key.decrypt_unrounded(unpack_words(chunk, params)), params) / 2**params.guard_bits for chunk in ciphertexts]
            return np.rint(np.concatenate(points)[: layout.size]).astype(np.int64)

        for name in collusion.HONEST:
            truth = collusion.truth(uploads[name])
            assert np.count_nonzero(truth)
            assert np.array_equal(read(collusion.vector(uploads[name]).chunks), truth)
            for taken in windows(collusion, uploads[name]):
                assert np.mean(read(taken) == truth) < 1e-3  # a grid of 2^23 points is hit by chance once in 8 million


def windows(collusion: Collusion, upload: bytes) -> list[tuple[bytes, ...]]:
    """What of a sealed upload could be taken for its ciphertexts: as it stands there, before and behind what a seal adds.

    Where a word is not below the modulus, which ciphertexts cannot have, it is taken modulo that.
    """
    vector = decode_upload(upload, collusion.context, collusion.key_id).vector
    params = collusion.agreement.params
    size, places = params.sum_chunk_bytes, range(0, SEALED_OVERHEAD_BYTES + 1, 16)

    def fitted(data: bytes) -> bytes:
        numbers = np.zeros((2 * params.poly_modulus_degree, 8), np.uint8)
        width = size // len(numbers)
        numbers[:, :width] = np.frombuffer(data, np.uint8).reshape(-1, width)
        return pack_words(numbers.reshape(-1).view("<u8") % np.uint64(params.modulus), params)

    return [tuple(fitted(chunk[place : place + size]) for chunk in vector.chunks) for place in places]


@pytest.mark.parametrize("scored", [False, True], ids=["sums", "products"])
def test_who_has_the_key_under_which_an_attempt_is_encrypted_opens_none_of_its_uploads(
    model: torch.nn.Module, non_private: Make, scored: bool
) -> None:
    """However it came by it. Nothing that it has beside the key opens a seal, and no other sender's upload can be sent as its own."""
    options = {"keys": EscrowKey.generate(), "params": ProductParams.escrow(), "rule": GeometricMedian()} if scored else terms()
    with Simulation(non_private(count=4, **options), model) as simulation:
        collusion = Collusion(simulation)
        uploads = collusion.hand_out(collusion.first, *collusion.HONEST)
        right = collusion.holder._attempt_key(collusion.context)
        pair = EscrowKey.generate().attempt_key(binding=collusion.context.digest, params=collusion.agreement.params)
        pair._ring_key = right._ring_key
        for name in collusion.HONEST:
            sealed = decode_upload(uploads[name], collusion.context, collusion.key_id).vector
            assert isinstance(sealed, SealedVector)
            # The control: beside the ciphertexts themselves the key is all that it takes.
            total = RunningSum(layout=sealed.layout, params=sealed.params, key_id=sealed.key_id)
            total.add(1, right.unseal(sealed, sender=name))
            truth = pair.open_sum(total.total(), coefficients=(1,))
            assert np.count_nonzero(truth)
            assert np.array_equal(truth, collusion.truth(uploads[name]))
            with pytest.raises(InvalidMessageError):
                pair.unseal(sealed, sender=name)
            with pytest.raises(InvalidMessageError):
                right.unseal(sealed, sender=collusion.INSIDER)
            for party in collusion.parties.values():
                session: Any = party.session
                with pytest.raises(InvalidMessageError):
                    session.party.unseal(sealed.chunks[0], info=sealed_info(collusion.context.digest, sender=name, place=0))
        # What the server stores, and what it and the insider see, has no ciphertext of an honest client in it.
        chunks = [chunk for name in collusion.HONEST for chunk in collusion.vector(uploads[name]).chunks]
        seen = b"".join([*uploads.values(), collusion.first])
        assert not any(chunk[start : start + 32] in seen for chunk in chunks for start in (0, 4096))


def test_an_upload_whose_seal_is_broken_or_anothers_opens_nothing_and_is_named(collusion: Collusion) -> None:
    """The server cannot see it, and so everybody has committed to it and approved it when the key holder refuses."""
    stored = {name: party.session._outbox.get(outbox_name(collusion.context)) for name, party in collusion.parties.items()}
    own = collusion.vector(stored[collusion.INSIDER])
    sealed = seal_vector(own, collusion.holder_key, sender=collusion.INSIDER)
    flipped = bytes([sealed.chunks[0][0] ^ 1]) + sealed.chunks[0][1:]
    transparent = replace(own, chunks=(bytes(len(own.chunks[0])), *own.chunks[1:]))
    anothers = EscrowKey.generate().attempt_key(binding=collusion.context.digest, params=own.params)
    other = replace(collusion.holder_key, encryption_key=anothers.encryption_key)
    later = replace(collusion.holder_key, binding=replace(collusion.context, attempt=1).digest)
    crafted = (
        replace(sealed, chunks=(flipped, *sealed.chunks[1:])),
        seal_vector(transparent, collusion.holder_key, sender=collusion.INSIDER),
        seal_vector(own, other, sender=collusion.INSIDER),
        seal_vector(own, later, sender=collusion.INSIDER),
        # What another client sealed. It is not handed out before the commitments, and would be of no use if it were.
        decode_upload(stored["bank_0"], collusion.context, collusion.key_id).vector,
    )
    for vector in crafted:
        upload = encode_upload(collusion.context, collusion.insider, Update(sender=collusion.INSIDER, round=0, vector=vector))
        commitments = collusion.second(upload)
        uploads = stored | {collusion.INSIDER: upload}
        digest = collusion.digest(uploads)
        approvals = [encode_approval(collusion.context, collusion.identities[name], digest) for name in collusion.parties]
        request = collusion.request(digest, approvals, commitments)
        with pytest.raises(DecryptionError, match="what 'bank_3' signed was not sealed by it .* nothing was decrypted; leave it out"):
            collusion.holder.open(collusion.context, request, uploads.__getitem__)
    uploads[collusion.INSIDER] = collusion.encode(own)
    digest = collusion.digest(uploads)
    approvals = [encode_approval(collusion.context, collusion.identities[name], digest) for name in collusion.parties]
    request = collusion.request(digest, approvals, collusion.second(uploads[collusion.INSIDER]))
    assert np.count_nonzero(collusion.read(collusion.holder.open(collusion.context, request, uploads.__getitem__)))


def test_a_server_that_shows_clients_different_commitments_gets_no_approval_of_all(collusion: Collusion) -> None:
    """It has the others upload for one set, and shows the victim another one, in which the insider chose when it had seen them."""
    uploads = collusion.hand_out(collusion.first, "bank_1", "bank_2")
    crafted = collusion.cancelling(uploads)
    uploads |= collusion.hand_out(collusion.second(crafted), "bank_0")
    uploads[collusion.INSIDER] = crafted
    announced = collusion.announce(collusion.digest(uploads))
    collusion.parties["bank_0"].approve(collusion.context, announced)
    for name in ("bank_1", "bank_2"):
        with pytest.raises(OpeningRefusedError, match="'bank_3' to which it had not committed"):
            collusion.parties[name].approve(collusion.context, announced)
    without = collusion.digest({name: uploads[name] for name in ("bank_0", collusion.INSIDER)} | {"bank_1": uploads["bank_1"]})
    with pytest.raises(OpeningRefusedError, match="'bank_3' to which it had not committed"):
        collusion.parties["bank_1"].approve(collusion.context, collusion.announce(without))


def test_a_client_takes_one_set_of_commitments_with_its_own_among_enough(collusion: Collusion) -> None:
    bank, context = collusion.parties["bank_0"], collusion.context
    with pytest.raises(OpeningRefusedError, match="have not come to 'bank_0'; nothing was handed out"):
        bank.upload(context)
    with pytest.raises(OpeningRefusedError, match="have not come to 'bank_0'; nothing was handed out or approved"):
        bank.approve(context, collusion.announce(collusion.digest(dict.fromkeys(collusion.parties, b""))))
    commits = collusion.commits
    stranger = Identity.generate("bank_1")
    forged = commits["bank_1"][:-64] + stranger.sign(commits["bank_1"][:-64])
    twice = encode_commitment(context, collusion.insider, bytes(32), key_id=collusion.key_id)
    later = replace(context, attempt=1)
    for messages in (
        [commits["bank_0"], forged, commits["bank_2"], commits["bank_3"]],
        [commits["bank_0"], commits["bank_2"], commits["bank_1"], commits["bank_3"]],
        [commits["bank_0"], commits["bank_1"], commits["bank_3"], twice],
    ):
        with pytest.raises(InvalidMessageError):
            bank.take_commitments(context, collusion.commitments({str(index): message for index, message in enumerate(messages)}))
    old = encode_commitment(later, collusion.insider, bytes(32), key_id=collusion.key_id)
    with pytest.raises(RoundMismatchError, match="attempt 1, and not to round 0, attempt 0"):
        bank.take_commitments(context, collusion.commitments(commits | {"bank_3": old}))
    with pytest.raises(OpeningRefusedError, match="lack its own; nothing was kept"):
        bank.take_commitments(context, collusion.commitments({name: commits[name] for name in ("bank_1", "bank_2", "bank_3")}))
    with pytest.raises(OpeningRefusedError, match="a round needs 3 clients, and 2 committed; nothing was kept"):
        bank.take_commitments(context, collusion.commitments({name: commits[name] for name in ("bank_0", "bank_3")}))
    with pytest.raises(OpeningRefusedError, match="have not come"):
        bank.upload(context)
    bank.take_commitments(context, collusion.first)
    bank.take_commitments(context, collusion.first)
    with pytest.raises(OpeningRefusedError, match="other commitments of round 0 came to 'bank_0' before; these were dropped"):
        bank.take_commitments(context, collusion.commitments(commits | {"bank_3": twice}))
    upload = bank.upload(context)
    assert bank.commit(context) == commits["bank_0"]
    assert bank.upload(context) == upload
    with pytest.raises(OpeningRefusedError, match="'bank_0' has not committed to an upload in round 0; nothing was kept"):
        bank.take_commitments(later, collusion.first)
    bank.take_key(later, collusion.holder.announce_key(later))
    assert bank.commit(later) != commits["bank_0"]


def test_a_client_whose_upload_or_kept_commitments_are_gone_or_damaged_hands_out_nothing(collusion: Collusion) -> None:
    bank, context = collusion.parties["bank_0"], collusion.context
    collusion.hand_out(collusion.first, "bank_0")
    (kept,) = Path(bank.session._outbox._directory).glob("*-commitments")
    upload = kept.with_name(kept.name.removesuffix("-commitments"))
    stored = upload.read_bytes()
    upload.unlink()
    for again in (bank.commit, bank.upload):
        with pytest.raises(DamagedFileError, match="to which it committed, is gone; nothing was trained or charged"):
            again(context)
    assert not upload.exists()
    upload.write_bytes(stored)
    assert bank.upload(context) == stored
    kept.write_bytes(collusion.first[:-1])
    with pytest.raises(DamagedFileError, match="commitments that 'bank_0' kept of round 0 are not what was written"):
        bank.upload(context)


def test_a_server_takes_one_commitment_of_each_client_and_the_upload_that_it_names(model: torch.nn.Module, non_private: Make) -> None:
    with Simulation(non_private(count=5, **terms()), model) as simulation:
        encrypted = simulation.encrypted
        context, parties, identities = encrypted.context(0), encrypted.participants, encrypted._site.clients
        server: Any = encrypted._server(context, tuple(parties))
        assert encrypted.holder is not None
        announced = encrypted.holder.announce_key(context)
        holder_key = decode_holder_key(announced, context)
        key_id = holder_key.key_id
        server.receive_holder_key(announced)
        for party in parties.values():
            party.take_key(context, server.holder_key())
        commits = {name: party.commit(context) for name, party in parties.items()}
        with pytest.raises(CohortError, match="still in its setup"):
            server.receive_commitment(commits["bank_0"])
        for name in ("bank_0", "bank_1", "bank_2", "bank_3"):
            server.receive_setup(parties[name].setup(context))
        server.start_uploads()
        with pytest.raises(CohortError, match="'bank_4' takes no part in round 0"):
            server.receive_commitment(commits["bank_4"])
        for name in ("bank_0", "bank_1"):
            server.receive_commitment(commits[name])
            server.receive_commitment(commits[name])
        other = encode_commitment(context, identities["bank_0"], bytes(32), key_id=key_id)
        with pytest.raises(CohortError, match="'bank_0' sent another COMMIT message before"):
            server.receive_commitment(other)
        with pytest.raises(CohortError, match="demands 3 clients, and there are 2 commitments"):
            server.close_commitments()
        with pytest.raises(CohortError, match="'bank_0' is not among the closed commitments"):
            server.relay("bank_0")
        server.receive_commitment(commits["bank_2"])
        assert server.committed() == ()
        assert server.close_commitments() == server.close_commitments() == server.committed() == ("bank_0", "bank_1", "bank_2")
        with pytest.raises(CohortError, match="'bank_3' takes no part in round 0"):
            server.receive_commitment(commits["bank_3"])
        relayed = server.relay("bank_0")
        assert server.relay("bank_1") == relayed
        uploads = {}
        for name in ("bank_0", "bank_1", "bank_2"):
            parties[name].take_commitments(context, relayed)
            uploads[name] = parties[name].upload(context)
        session: Any = parties["bank_3"].session
        for upload in (
            session._outbox.get(f"{context.agreement.session.hex()}-0-0"),
            _other_upload(context, identities["bank_0"], holder_key),
        ):
            with pytest.raises(CohortError, match="is not the one of its closed commitment; it was dropped"):
                server.receive_upload(upload)
        server.receive_upload(uploads["bank_0"])
        # Another set in the place of the one that was closed, or none, is not taken for it.
        path = server._spool.files.path(COMMITMENTS)
        path.unlink()
        for use in (server.committed, server.close_commitments, lambda: server.receive_upload(uploads["bank_1"])):
            with pytest.raises(DamagedFileError, match="spool of round 0 is damaged"):
                use()
        path.write_bytes(relayed)
        for name in ("bank_1", "bank_2"):
            server.receive_upload(uploads[name])
        digest = server.close()
        for name in uploads:
            server.receive_approval(parties[name].approve(context, digest))
        server.receive_opened(encrypted.holder.open(context, server.aggregate(), server.upload))
        for party in parties.values():
            party.open(context, server.result())


def _other_upload(context: Any, identity: Identity, holder_key: HolderKey) -> bytes:
    agreement = context.agreement
    zero = np.zeros(agreement.sent_layout.size, np.int64)
    whole = encrypt_to_holder(zero, agreement.sent_layout, agreement.params, holder_key.public_key)
    vector = seal_vector(whole, holder_key, sender=identity.name)
    return encode_upload(context, identity, Update(sender=identity.name, round=context.round, vector=vector))


def test_a_client_that_falls_silent_after_its_commitment_is_left_out(model: torch.nn.Module, non_private: Make) -> None:
    with Simulation(non_private(count=4, **terms()), model) as simulation:
        encrypted = simulation.encrypted
        silent = encrypted.participants["bank_3"]

        def gone(*arguments: object) -> None:
            raise Crash

        silent.take_commitments = gone  # type: ignore[method-assign]
        with pytest.raises(Crash):
            simulation.run(rounds=1)
        record = simulation.run(rounds=1, absences=Script(round_0={"bank_3": Stage.UPLOAD})).rounds[0].record
        assert record.participants == ("bank_0", "bank_1", "bank_2")
        server = Server(
            context=replace(encrypted.context(1), round=0, history=bytes(32)),
            identity=encrypted._site.server,
            selected=tuple(encrypted.participants),
            spool=encrypted._site.spool,
        )
        assert server.committed() == ("bank_0", "bank_1", "bank_2", "bank_3")
        assert {name for name, party in encrypted.participants.items() if party.opened_rounds() == (0,)} == set(record.participants)


def test_a_client_that_comes_back_when_the_commitments_are_closed_is_not_asked_to_train(
    model: torch.nn.Module, private: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    consortium = private(count=4, **terms())
    with Simulation(consortium, model) as simulation:
        with monkeypatch.context() as patch:
            patch.setattr(EscrowSession, "take_commitments", crash)
            with pytest.raises(Crash):
                simulation.run(rounds=1, absences=Script(round_0={"bank_3": Stage.UPLOAD}))
        record = simulation.run(rounds=1).rounds[0].record
    assert record.participants == ("bank_0", "bank_1", "bank_2")
    assert [len(client.ledger.events()) for client in consortium.clients if client.ledger is not None] == [1, 1, 1, 0]


STEPS = (
    (Server, "receive_commitment", 2),
    (Server, "close_commitments", 1),
    (Server, "relay", 2),
    (EscrowSession, "take_commitments", 2),
    (EscrowSession, "upload", 2),
    (Server, "receive_upload", 2),
    (EscrowSession, "approve", 2),
)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step[1])
def test_a_restart_around_the_commitments_trains_and_charges_nothing_again(
    model: torch.nn.Module, private: Make, tmp_path: Path, step: tuple[type, str, int], after: bool
) -> None:
    consortium, calls = private(**terms()), 0
    owner, name, fatal = step
    original = getattr(owner, name)

    def dying(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == fatal and not after:
            raise Crash
        result = original(*arguments)
        if calls == fatal:
            raise Crash
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, dying)
        with pytest.raises(Crash):
            simulate(consortium, model, rounds=1, directory=tmp_path / "run")
    stored = {path: path.read_bytes() for path in (tmp_path / "run" / "clients").rglob("outbox/*")}
    assert stored
    simulate(consortium, model, rounds=1, directory=tmp_path / "run")
    assert all(path.read_bytes() == data for path, data in stored.items())
    for client in consortium.clients:
        assert client.ledger is not None
        assert len(client.ledger.events()) == 1


def test_a_session_without_a_key_holder_knows_no_key_of_one_and_no_commitments(model: torch.nn.Module, non_private: Make) -> None:
    with Simulation(non_private(), model) as simulation:
        bank, context = simulation.encrypted.participants["bank_0"], simulation.encrypted.context(0)
        for refused in (lambda: bank.commit(context), lambda: bank.take_commitments(context, b""), lambda: bank.take_key(context, b"")):
            with pytest.raises(UnsupportedInThisModeError, match="EscrowKey mode only; nothing was trained or kept"):
                refused()
        server = simulation.encrypted._server(context, ("bank_0", "bank_1", "bank_2"))
        for name, party in simulation.encrypted.participants.items():
            assert server.receive_setup(party.setup(context)) == name
        server.start_uploads()
        assert server.committed() == ()
        for refused in (
            server.close_commitments,
            server.holder_key,
            lambda: server.receive_commitment(b""),
            lambda: server.receive_holder_key(b""),
        ):
            with pytest.raises(UnsupportedInThisModeError, match="EscrowKey mode only; nothing happened"):
                refused()


def test_a_client_whose_budget_is_spent_commits_to_nothing_and_the_others_hear_why(model: torch.nn.Module, private: Make) -> None:
    consortium = private(count=3, epsilons=(20.0, 20.0, 1e-3), **terms())
    with Simulation(consortium, model) as simulation:
        parties, context = simulation.encrypted.participants, simulation.encrypted.context(0)
        server = simulation.encrypted._server(context, tuple(parties))
        with pytest.raises(CohortError, match="2 commitments; nothing was summed. Refused by bank_2: the privacy budget"):
            run_round(server=server, clients=parties, context=context, selected=tuple(parties), holder=simulation.encrypted.holder)
        assert server.committed() == ()


def test_another_holder_than_the_agreed_one_is_refused(halted: Halted, tmp_path: Path) -> None:
    agreement = halted.context.agreement
    with pytest.raises(AgreementMismatchError, match="pins another key holder"):
        EscrowHolder(identity=Identity.generate("other"), key=EscrowKey.generate(), agreement=agreement, directory=tmp_path / "other")
    trust: Any = agreement.trust
    with pytest.raises(ValueError, match="beside the server and the clients"):
        replace(agreement, trust=replace(trust, holder=agreement.roster.server))
    with pytest.raises(UnsupportedInThisModeError, match="these parameters are for EscrowKey"):
        replace(agreement, trust=None)
    from privfed.written_agreement import decode_agreement, encode_agreement

    assert decode_agreement(encode_agreement(agreement)).digest == agreement.digest
    other = replace(agreement, trust=replace(trust, holder=Identity.generate("other").public))
    assert [part for part in agreement.parts if agreement.parts[part] != other.parts[part]] == ["trust mode"]


def test_a_consortium_takes_the_parameters_of_the_mode_and_of_the_rule(model: torch.nn.Module, non_private: Make) -> None:
    with pytest.raises(UnsupportedInThisModeError, match="take CkksParams.escrow"):
        non_private(keys=EscrowKey.generate())
    with pytest.raises(UnsupportedInThisModeError, match="these parameters cannot compute; nothing was started; take ProductParams.escrow"):
        non_private(count=5, rule=MultiKrum(byzantine=1, keep=3), **terms())
    for params in (ProductParams.exact(), ProductParams.sketched()):
        with pytest.raises(UnsupportedInThisModeError, match=r"nothing was agreed; take .* ProductParams.escrow"):
            non_private(count=5, rule=MultiKrum(byzantine=1, keep=3), **terms() | {"params": params})
    validator = Validator(name="bank_0", commitment=bytes(32), public=True)
    with pytest.raises(ValueError, match="a rule that needs a reference"):
        non_private(validator=validator, **terms())
    with pytest.raises(TypeError, match="got the class EscrowKey"):
        non_private(**terms() | {"keys": EscrowKey})
    consortium = non_private(**terms())
    assert consortium.mode == "EscrowKey"
    renamed = [replace(consortium.clients[0], name=HOLDER_NAME), *consortium.clients[1:]]
    with pytest.raises(ValueError, match="which is the key holder's"):
        simulate(replace(consortium, clients=renamed), model, rounds=1)


def test_a_session_with_a_key_holder_takes_a_rule_that_looks_at_inner_products_with_its_own_parameters_alone(halted: Halted) -> None:
    agreement = halted.context.agreement
    validator = Validator(name="bank_0", commitment=bytes(32), public=True)
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"rule": MultiKrum(byzantine=0, keep=3)}, r"cannot multiply ciphertexts; no session was made; take ProductParams.escrow"),
        ({"rule": MultiKrum(byzantine=0, keep=3), "params": ProductParams.exact()}, r"nothing was agreed; take .* ProductParams.escrow"),
        ({"rule": FLTrust(), "params": ProductParams.sketched(), "validator": validator}, r"take .* ProductParams.escrow"),
        (
            {"trust": None, "params": ProductParams.escrow()},
            r"these parameters are for EscrowKey; nothing was agreed; take ProductParams.exact",
        ),
    )
    for changes, words in refused:
        with pytest.raises(UnsupportedInThisModeError, match=words):
            replace(agreement, **changes)
    with pytest.raises(ValueError, match="expected no validator beside"):
        replace(agreement, validator=validator)


@pytest.mark.parametrize("optimizer", [FedAdam(learning_rate=0.05), ServerSgd(learning_rate=0.7, momentum=0.5)], ids=["FedAdam", "FedAvgM"])
def test_every_client_applies_the_server_optimiser_to_what_the_key_holder_published(
    model: torch.nn.Module, non_private: Make, tmp_path: Path, optimizer: ServerOptimizer
) -> None:
    """The key holder has no model: the clients move theirs, all to the same weights, and as under a shared key; also after a restart."""
    key, shared = EscrowKey.generate(), {"keys": SharedKey.generate(), "params": replace(CkksParams.standard(), weight_sum=256)}
    expected = simulate(non_private(server_optimizer=optimizer, **shared), model, rounds=3)
    simulate(non_private(server_optimizer=optimizer, **terms(key)), model, rounds=1, directory=tmp_path)
    with Simulation(non_private(server_optimizer=optimizer, **terms(key)), model, directory=tmp_path) as simulation:
        history = simulation.run(rounds=3, absences=Script(round_1={"bank_2": Stage.OPENING}))
        states = [participant.session.state for participant in simulation.encrypted.participants.values()]
    assert np.array_equal(history.model.values, expected.model.values)
    assert all(np.array_equal(state.values.values, expected.model.values) for state in states)
    assert not np.array_equal(history.model.values, simulate(non_private(**terms()), model, rounds=3).model.values)


def test_private_weights_and_scaffold_work_with_a_key_holder(model: torch.nn.Module, non_private: Make) -> None:
    private = non_private(weights=(3, 2, 1), private_weights=PrivateWeights(largest=4), **terms())
    assert simulate(private, model, rounds=1).grid_error_max == 0
    scaffold = non_private(correction=Scaffold(clients=3), **terms())
    assert simulate(scaffold, model, rounds=2).grid_error_max == 0


def test_ledgers_are_countersigned_in_rounds_with_a_key_holder(model: torch.nn.Module, private: Make) -> None:
    consortium = private(**terms())
    history = simulate(consortium, model, rounds=2)
    assert history.grid_error_max == 0
