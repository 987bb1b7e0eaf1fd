"""The key holder's key of each attempt: what was uploaded in one attempt is in no sum of another one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from privfed.agreement import RoundContext
from privfed.consortium import Consortium
from privfed.digest import hash_message
from privfed.engines.local import Simulation
from privfed.errors import (
    CohortError,
    DamagedFileError,
    DecryptionError,
    HistoryMismatchError,
    InvalidMessageError,
    OpeningRefusedError,
    RoundMismatchError,
)
from privfed.escrow import _key_name
from privfed.he.escrow import RunningSum, SealedVector, WholeVector, public_key_id, seal_vector
from privfed.he.escrow_secret import AttemptKey, EscrowKey
from privfed.he.params import CkksParams
from privfed.message import Kind, seal
from privfed.protect import protect
from privfed.release import open_release
from privfed.server import Server
from privfed.server_spool import HOLDER_KEY
from privfed.update import PlainVector, Update
from privfed.wire import decode_upload, encode_setup, encode_upload
from privfed.wire_commit import encode_commitment
from privfed.wire_digest import decode_digest, encode_approval
from privfed.wire_escrow import decode_holder_key, decode_opened, encode_holder_key
from tests.engines.test_escrow import terms

Make = Callable[..., Consortium]
HONEST, INSIDER = ("bank_0", "bank_1", "bank_2"), "bank_3"


@pytest.fixture
def simulation(model: torch.nn.Module, non_private: Make) -> Any:
    with Simulation(non_private(count=4, weights=(1.0, 2.0, 3.0, 2.0), **terms()), model) as simulation:
        yield simulation


def server_of(simulation: Any, context: RoundContext) -> Server:
    site = simulation.encrypted._site
    return Server(context=context, identity=site.server, selected=tuple(site.clients), spool=site.spool)


def hold_until_upload(simulation: Any, context: RoundContext) -> Server:
    """Everybody, the insider too, does what it should; at the end all uploads are at the server."""
    encrypted, server = simulation.encrypted, server_of(simulation, context)
    server.receive_holder_key(encrypted.holder.announce_key(context))
    for party in encrypted.participants.values():
        party.take_key(context, server.holder_key())
        server.receive_setup(party.setup(context))
    server.start_uploads()
    for party in encrypted.participants.values():
        server.receive_commitment(party.commit(context))
    server.close_commitments()
    for name, party in encrypted.participants.items():
        party.take_commitments(context, server.relay(name))
        server.receive_upload(party.upload(context))
    return server


@pytest.mark.parametrize("moved", ["round", "attempt"])
@pytest.mark.parametrize("keys", ["one for all attempts", "one for each attempt"])
def test_one_client_together_with_the_server_adds_nothing_of_an_earlier_attempt_to_a_sum(
    simulation: Any, monkeypatch: pytest.MonkeyPatch, keys: str, moved: str
) -> None:
    """It commits to what the victim uploaded before, as its own. Under one key for all, that is in the sum: bit for bit, at its weight."""
    if keys == "one for all attempts":
        real = EscrowKey.attempt_key

        def one_for_all(self: EscrowKey, *, binding: bytes, params: CkksParams) -> AttemptKey:
            key = real(self, binding=binding, params=params)
            key._ring_key = real(self, binding=bytes(32), params=params)._ring_key
            return key

        monkeypatch.setattr(EscrowKey, "attempt_key", one_for_all)
    encrypted = simulation.encrypted
    parties, holder, insider = encrypted.participants, encrypted.holder, encrypted._site.clients[INSIDER]
    before = encrypted.context(0)
    if moved == "round":
        simulation.run(rounds=1)
        stolen, context = server_of(simulation, before).upload("bank_0"), encrypted.context(1)
    else:
        hold_until_upload(simulation, before)
        stolen, context = parties["bank_0"].upload(before), encrypted.context(0, attempt=1)
    # With the seal taken off, as the pair cannot do.
    old = vector_of(holder, stolen, before, decode_holder_key(holder.announce_key(before), before).key_id)

    server = server_of(simulation, context)
    server.receive_holder_key(holder.announce_key(context))
    for party in parties.values():
        party.take_key(context, server.holder_key())
        server.receive_setup(party.setup(context))
    server.start_uploads()
    holder_key = decode_holder_key(server.holder_key(), context)
    key_id = holder_key.key_id
    for name in HONEST:
        server.receive_commitment(parties[name].commit(context))
    sealed = seal_vector(replace(old, key_id=key_id), holder_key, sender=INSIDER)
    replayed = Update(sender=INSIDER, round=context.round, vector=sealed)
    crafted = encode_upload(context, insider, replayed)
    server.receive_commitment(encode_commitment(context, insider, hash_message(crafted), key_id=key_id))
    server.close_commitments()
    uploads = {}
    for name in HONEST:
        parties[name].take_commitments(context, server.relay(name))
        uploads[name] = parties[name].upload(context)
        server.receive_upload(uploads[name])
    server.receive_upload(crafted)
    digest = server.close()
    for name in HONEST:
        server.receive_approval(parties[name].approve(context, digest))
    server.receive_approval(encode_approval(context, insider, decode_digest(digest, context, key_id)))

    if keys == "one for each attempt":
        with pytest.raises(DecryptionError):
            holder.open(context, server.aggregate(), server.upload)
        with pytest.raises(CohortError, match="has not opened round"):
            server.result()
        return
    message = decode_opened(holder.open(context, server.aggregate(), server.upload), context, key_id)[1]
    release: Any = message.total
    total = open_release(release, context, parties[INSIDER].session.party, digest=message.digest.digest(context))
    weights = context.agreement.coefficients(context.agreement.roster.names)
    key = holder._attempt_key(context)
    added = total - sum(weights[name] * read(key, vector_of(holder, uploads[name], context, key_id)) for name in HONEST)
    victim = read(key, replace(old, key_id=key_id))
    assert np.count_nonzero(victim)
    assert np.array_equal(added, weights[INSIDER] * victim)


def vector_of(holder: Any, upload: bytes, context: RoundContext, key_id: bytes) -> WholeVector:
    update = decode_upload(upload, context, key_id)
    assert isinstance(update.vector, SealedVector)
    return holder._attempt_key(context).unseal(update.vector, sender=update.sender)


def read(key: Any, vector: WholeVector) -> Any:
    total = RunningSum(layout=vector.layout, params=vector.params, key_id=vector.key_id)
    total.add(1, vector)
    return key.open_sum(total.total(), coefficients=(1,))


def test_every_attempt_history_and_session_has_another_key_and_each_is_announced_once(simulation: Any) -> None:
    encrypted, holder = simulation.encrypted, simulation.encrypted.holder
    first = encrypted.context(0)
    others = (
        replace(first, history=b"\1" * 32),
        replace(first, attempt=1),
        replace(first, round=1),
        replace(first, agreement=replace(first.agreement, session=b"another session.")),
    )
    contexts = (first, *others)
    twice = [(holder.announce_key(context), holder.announce_key(context)) for context in contexts]
    announced = [data for data, _ in twice]
    assert announced == [again for _, again in twice]
    assert len({decode_holder_key(data, context).key_id for data, context in zip(announced, contexts, strict=True)}) == len(contexts)
    keys = [holder._attempt_key(context) for context in contexts]
    assert len({key._ring_key.words().tobytes() for key in keys}) == len(contexts)
    assert len({key.encryption_key for key in keys}) == len(contexts)
    for data, context in zip(announced[1:], others, strict=True):
        with pytest.raises((RoundMismatchError, HistoryMismatchError)):
            decode_holder_key(data, first)
        with pytest.raises((RoundMismatchError, HistoryMismatchError)):
            decode_holder_key(announced[0], context)


def test_a_client_takes_one_key_that_the_agreed_holder_signed_and_encrypts_to_no_other(simulation: Any) -> None:
    encrypted, holder, site = simulation.encrypted, simulation.encrypted.holder, simulation.encrypted._site
    context, bank = encrypted.context(0), encrypted.participants["bank_0"]
    later = replace(context, attempt=1)
    for step in (bank.setup, bank.commit, bank.abort):
        with pytest.raises(OpeningRefusedError, match="key for this attempt at round 0 has not come to 'bank_0'; nothing was done"):
            step(context)
    announced = holder.announce_key(context)
    holder_key = decode_holder_key(announced, context)
    public_key, encryption_key = holder_key.public_key, holder_key.encryption_key
    for identity in (site.server, site.clients["bank_1"]):
        with pytest.raises(ValueError, match="an identity that the roster pins for HOLDER_KEY"):
            encode_holder_key(context, identity, public_key, encryption_key)
        with pytest.raises(InvalidMessageError):
            bank.take_key(context, announced[:-64] + identity.sign(announced[:-64]))
    flipped = bytearray(announced)
    flipped[-1000] ^= 1
    for wrong in (bytes(flipped), announced[:-1], b"", encode_setup(context, site.clients["bank_0"], bytes(16))):
        with pytest.raises(InvalidMessageError):
            bank.take_key(context, wrong)
    # Signed by the holder, and no key: another name than its own, a transparent one, one of small order, other lengths.
    for key_id, public, sealing in (
        (bytes(16), public_key, encryption_key),
        (None, bytes(len(public_key)), encryption_key),
        (None, public_key, bytes(32)),
        (None, public_key[:-1], encryption_key),
        (None, public_key, encryption_key[:-1]),
        (None, public_key, b""),
    ):
        signed = seal(context, site.holder, Kind.HOLDER_KEY, key_id=key_id or public_key_id(public), payload=public + sealing)
        with pytest.raises(InvalidMessageError):
            bank.take_key(context, signed)
    with pytest.raises(RoundMismatchError, match="attempt 1, and not to round 0, attempt 0"):
        bank.take_key(context, holder.announce_key(later))
    with pytest.raises(ValueError, match="expected a public key of 57344 bytes, got 3"):
        encode_holder_key(context, site.holder, b"abc", encryption_key)
    with pytest.raises(ValueError, match="expected an X25519 public key of 'key_holder', 32 bytes and not of small order"):
        encode_holder_key(context, site.holder, public_key, bytes(32))
    bank.take_key(context, announced)
    bank.take_key(context, announced)
    commit = bank.commit(context)
    other = encode_holder_key(context, site.holder, holder._attempt_key(context).public_key(), encryption_key)
    with pytest.raises(
        OpeningRefusedError, match="another key of the key holder for round 0 came to 'bank_0' before; this one was dropped"
    ):
        bank.take_key(context, other)
    assert bank.commit(context) == commit
    layout = context.agreement.layout
    update = Update(sender="bank_0", round=0, vector=PlainVector(layout=layout, values=np.zeros(layout.size)))
    with pytest.raises(RoundMismatchError, match="was made for another round or attempt; nothing was encrypted"):
        protect(update, later, round_key=decode_holder_key(announced, context))


def test_a_kept_key_that_was_damaged_is_refused_at_client_server_and_holder(simulation: Any) -> None:
    encrypted, holder = simulation.encrypted, simulation.encrypted.holder
    context, bank = encrypted.context(0), encrypted.participants["bank_0"]
    server = hold_until_upload(simulation, context)
    digest = server.close()
    for party in encrypted.participants.values():
        server.receive_approval(party.approve(context, digest))
    request = server.aggregate()

    kept = bank.session._outbox.path(f"{context.agreement.session.hex()}-0-0-key")
    kept.write_bytes(kept.read_bytes()[:-1])
    bank.session._holder_key = None
    with pytest.raises(DamagedFileError, match="key holder's key that 'bank_0' kept of round 0 is not what was written; nothing was done"):
        bank.approve(context, digest)

    spooled = server._spool.files.path(HOLDER_KEY)
    data = spooled.read_bytes()
    for damage in (lambda: spooled.write_bytes(data[:-1]), spooled.unlink):
        damage()
        with pytest.raises(DamagedFileError, match="spool of round 0 is damaged"):
            server.holder_key()

    announced = holder._outbox.path(_key_name(context))
    announced.write_bytes(data[:-1])
    for use in (lambda: holder.open(context, request, server.upload), lambda: holder.announce_key(context)):
        with pytest.raises(DamagedFileError, match="the public key that 'key_holder' announced for round 0 is not what was written"):
            use()
    announced.unlink()
    with pytest.raises(OpeningRefusedError, match="no key was announced for attempt 0 at round 0; nothing was decrypted"):
        holder.open(context, request, server.upload)
    announced.write_bytes(data)
    assert decode_opened(holder.open(context, request, server.upload), context, decode_holder_key(data, context).key_id)


def test_a_server_hands_on_one_key_and_takes_setups_for_it_alone(simulation: Any) -> None:
    encrypted, holder, site = simulation.encrypted, simulation.encrypted.holder, simulation.encrypted._site
    context = encrypted.context(0)
    server, bank = server_of(simulation, context), encrypted.participants["bank_0"]
    announced = holder.announce_key(context)
    bank.take_key(context, announced)
    with pytest.raises(CohortError, match="has announced no key for round 0"):
        server.receive_setup(bank.setup(context))
    with pytest.raises(InvalidMessageError):
        server.receive_holder_key(announced[:-1])
    server.receive_holder_key(announced)
    server.receive_holder_key(announced)
    key = holder._attempt_key(context)
    with pytest.raises(CohortError, match="another key of the key holder came before; this one was dropped"):
        server.receive_holder_key(encode_holder_key(context, site.holder, key.public_key(), key.encryption_key))
    assert server.holder_key() == announced
    with pytest.raises(RoundMismatchError, match="'bank_1' belongs to another key"):
        server.receive_setup(encode_setup(context, site.clients["bank_1"], bytes(16)))
    assert server.receive_setup(bank.setup(context)) == "bank_0"


def test_a_history_that_a_server_made_up_takes_no_key_from_the_right_one(simulation: Any) -> None:
    simulation.encrypted.holder.announce_key(replace(simulation.encrypted.context(0), history=b"\1" * 32))
    assert simulation.run(rounds=1).grid_error_max == 0


def keys_kept(simulation: Any) -> int:
    return len(simulation.encrypted.holder._outbox.names("key-"))


def test_of_the_holder_s_keys_those_of_attempts_that_are_over_are_dropped_and_are_not_announced_again(simulation: Any) -> None:
    """A request for one is short, and a server could have the holder's disk filled with them."""
    holder, agreement = simulation.encrypted.holder, simulation.encrypted.context(0).agreement
    places = [(0, 0), (0, 1), (1, 0), (9, 0), (10, 0), (10, 11)]
    contexts = [RoundContext(agreement=agreement, round=number, attempt=attempt, history=bytes(32)) for number, attempt in places]
    for context in contexts:
        announced = holder.announce_key(context)
        assert keys_kept(simulation) == 1
    assert holder.announce_key(contexts[-1]) == announced
    for context in contexts[:-1]:
        with pytest.raises(RoundMismatchError, match="came after one for a later round or attempt; nothing was done"):
            holder.announce_key(context)
    assert keys_kept(simulation) == 1


def test_of_one_attempt_the_holder_keeps_the_keys_of_a_few_histories_and_refuses_more(simulation: Any) -> None:
    holder, agreement = simulation.encrypted.holder, simulation.encrypted.context(0).agreement
    contexts = [RoundContext(agreement=agreement, round=3, attempt=0, history=bytes([number]) * 32) for number in range(17)]
    announced = [holder.announce_key(context) for context in contexts[:16]]
    with pytest.raises(OpeningRefusedError, match="keys of 16 histories were announced for attempt 0 at round 3; nothing was done; begin"):
        holder.announce_key(contexts[16])
    assert keys_kept(simulation) == 16
    assert [holder.announce_key(context) for context in contexts[:16]] == announced
    holder.announce_key(replace(contexts[16], attempt=1))
    assert keys_kept(simulation) == 1


def test_keys_of_another_session_in_the_same_folder_are_left_alone(simulation: Any) -> None:
    holder, agreement = simulation.encrypted.holder, simulation.encrypted.context(0).agreement
    other = RoundContext(agreement=replace(agreement, session=bytes(16)), round=7, attempt=0, history=bytes(32))
    holder.announce_key(other)
    holder.announce_key(RoundContext(agreement=agreement, round=0, attempt=0, history=bytes(32)))
    assert keys_kept(simulation) == 2
