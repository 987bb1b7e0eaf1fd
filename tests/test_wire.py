from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from privfed.digest import ABRIDGED_BYTES, RoundDigest, abridge, hash_abridged, hash_message, sealed_tags
from privfed.errors import InvalidMessageError, RoundMismatchError
from privfed.he.additive import CkksVector, SeededSum, seeded_sum, weighted_sum
from privfed.he.params import CkksParams
from privfed.identity import SIGNATURE_BYTES
from privfed.message import Kind, seal
from privfed.update import Layout, PlainVector, Update
from privfed.wire import decode_abort, decode_setup, decode_upload, encode_abort, encode_setup, encode_upload, upload_chunk
from privfed.wire_aggregate import decode_aggregate, encode_aggregate
from privfed.wire_digest import decode_approval, decode_digest, encode_approval, encode_digest, read_digest

LARGE = Layout(names=("w",), shapes=((9000,),))


@pytest.fixture
def joint(parties: Any) -> Any:
    return parties.round()


def encrypted(joint: Any, name: str = "bank_00", key: Any = None) -> Update[CkksVector]:
    """The update that a client would send, as the receiver reads it."""
    key = key or joint.new_key()
    return decode_upload(joint.encode(name, np.zeros(joint.context.agreement.layout.size), key), joint.context, key.key_id)


def some_digest(joint: Any, **changes: Any) -> RoundDigest:
    names = joint.context.agreement.roster.names[:3]
    fields = {
        "participants": names,
        "coefficients": (1, 2, 3),
        "upload_hashes": tuple(hash_message(name.encode()) for name in names),
        "rule": "FedAvg",
        "key_id": joint.new_key().key_id,
    }
    return RoundDigest(**(fields | changes))


def test_setup_round_trips(joint: Any) -> None:
    message = encode_setup(joint.context, joint.parties.clients["bank_01"], bytes(range(16)))
    assert decode_setup(message, joint.context) == ("bank_01", bytes(range(16)))


@pytest.mark.parametrize("length", [0, 15, 17])
def test_a_key_id_of_another_length_is_not_sent(joint: Any, length: int) -> None:
    with pytest.raises(ValueError, match="key id of 16 bytes"):
        encode_setup(joint.context, joint.parties.clients["bank_01"], bytes(length))


@pytest.mark.parametrize("values", [np.arange(8), [0.0] * 8])
def test_an_update_that_was_not_encrypted_cannot_be_encoded(joint: Any, values: Any) -> None:
    layout = joint.context.agreement.layout
    plain = Update(sender="bank_00", round=0, vector=PlainVector(layout=layout, values=values))
    with pytest.raises(TypeError, match="encrypted, got one that holds a PlainVector; nothing was encoded"):
        encode_upload(joint.context, joint.parties.clients["bank_00"], plain)


@pytest.mark.parametrize("thing", [b"\0" * 28736, None, np.zeros(8)], ids=["bytes", "None", "array"])
def test_nothing_else_passes_for_an_encrypted_vector(joint: Any, thing: object) -> None:
    with pytest.raises(TypeError, match="nothing was encoded"):
        encode_upload(joint.context, joint.parties.clients["bank_00"], Update(sender="bank_00", round=0, vector=thing))


def test_a_vector_that_looks_like_an_encrypted_one_is_not_encoded(joint: Any) -> None:
    class Lookalike:
        vector = encrypted(joint).vector
        layout, params, key_id, fresh = vector.layout, vector.params, vector.key_id, True
        chunks = (b"plaintext",)

    with pytest.raises(TypeError, match="Lookalike"):
        encode_upload(joint.context, joint.parties.clients["bank_00"], Update(sender="bank_00", round=0, vector=Lookalike()))


def test_an_upload_round_trips(joint: Any) -> None:
    update = encrypted(joint)
    again = decode_upload(encode_upload(joint.context, joint.parties.clients["bank_00"], update), joint.context, update.vector.key_id)
    assert again == update
    assert again.vector.fresh


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 8199, LARGE.size])
def test_a_single_chunk_can_be_read_from_an_upload(meet: Callable[..., Any], size: int) -> None:
    joint = meet(layout=Layout(names=("w",), shapes=((size,),))).round()
    key = joint.new_key()
    message = joint.encode("bank_00", np.zeros(size), key)
    chunks = decode_upload(message, joint.context, key.key_id).vector.chunks
    assert sum(map(len, chunks)) == 7 * size + 64 * len(chunks)
    assert len(chunks) == -(-size // 4096)
    assert tuple(message[upload_chunk(len(message), joint.context, index)] for index in range(len(chunks))) == chunks


@pytest.mark.parametrize("size", [1, 4095, 4097, 8199])
@pytest.mark.parametrize("seeded", [True, False])
def test_a_sum_is_read_whatever_of_its_last_chunk_travels_and_no_byte_more_or_less(
    meet: Callable[..., Any], size: int, seeded: bool
) -> None:
    layout, params = Layout(names=("w",), shapes=((size,),)), replace(CkksParams.standard(), seeded_sums=seeded)
    joint = meet(layout=layout, params=params).round()
    digest, key = some_digest(joint), joint.new_key()
    upload = joint.encode("bank_00", np.zeros(size), key)
    vector = decode_upload(upload, joint.context, key.key_id).vector
    total = (seeded_sum if seeded else weighted_sum)([vector] * 3, [1, 1, 1])
    message = aggregate_message(joint, digest=digest, total=total)
    assert decode_aggregate(message, joint.context, digest.key_id).total == total
    for chunks in ((*total.chunks[:-1], total.chunks[-1][:-1]), (*total.chunks[:-1], total.chunks[-1] + b"\0"), (*total.chunks, b"\0" * 7)):
        other = copy(total)
        object.__setattr__(other, "chunks", chunks)
        with pytest.raises(InvalidMessageError):
            decode_aggregate(aggregate_message(joint, digest=digest, total=other), joint.context, digest.key_id)


def test_an_update_of_another_sender_or_round_is_not_encoded(joint: Any) -> None:
    update = encrypted(joint)
    for other in (replace(update, sender="bank_01"), replace(update, round=1)):
        with pytest.raises(ValueError, match="expected an update of 'bank_00' for round 0"):
            encode_upload(joint.context, joint.parties.clients["bank_00"], other)


def test_a_sum_or_a_vector_of_other_parameters_is_not_encoded(joint: Any) -> None:
    update = encrypted(joint)
    others = (
        weighted_sum([update.vector], [1]),
        replace(update.vector, params=CkksParams.standard(bound=2.0)),
        replace(update.vector, layout=Layout(names=("x",), shapes=((8,),))),
    )
    for vector in others:
        with pytest.raises(ValueError, match="a fresh vector with the layout and the parameters of the session"):
            encode_upload(joint.context, joint.parties.clients["bank_00"], replace(update, vector=vector))


def test_an_upload_under_another_key_is_refused(joint: Any) -> None:
    key = joint.new_key()
    message = joint.encode("bank_00", np.zeros(8), key)
    with pytest.raises(RoundMismatchError, match="'bank_00' belongs to another key; it was dropped"):
        decode_upload(message, joint.context, bytes(16))


@pytest.mark.parametrize("size", [0, 91, 93])
def test_a_signed_upload_without_whole_sealed_tags_is_refused(joint: Any, size: int) -> None:
    vector = encrypted(joint).vector
    payload = vector.chunks[0] + (vector.sealed_tags + b"x")[:size]
    message = seal(joint.context, joint.parties.clients["bank_00"], Kind.UPLOAD, key_id=vector.key_id, payload=payload)
    with pytest.raises(InvalidMessageError):
        decode_upload(message, joint.context, vector.key_id)


def test_the_hash_of_a_message_is_that_of_its_abridgement_which_shows_the_sealed_tags(joint: Any) -> None:
    key = joint.new_key()
    message = joint.encode("bank_00", np.zeros(8), key)
    abridged = abridge(message)
    assert len(abridged) == ABRIDGED_BYTES
    assert hash_message(message) == hash_abridged(abridged)
    assert sealed_tags(abridged) == decode_upload(message, joint.context, key.key_id).vector.sealed_tags
    places = (0, 400, -157, -156, -65, -64, -1)
    changed = {hash_message(message[:place] + bytes([message[place] ^ 1]) + message[place + 1 :]) for place in places}
    assert len(changed | {hash_message(message)}) == 8


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 155, 156, 157])
def test_short_messages_have_hashes_of_their_own(size: int) -> None:
    messages = {b"a" * size, b"a" * size + b"b", b"b" + b"a" * size, b"c" * 400}
    assert len({hash_message(message) for message in messages}) == len(messages)


@pytest.mark.parametrize("where", [6, 8 * 7 - 1])
def test_a_signed_upload_with_a_word_beyond_the_modulus_is_refused(joint: Any, where: int) -> None:
    key = joint.new_key()
    chunk = bytearray(encrypted(joint, key=key).vector.chunks[0])
    chunk[where] = 0xFF  # the highest byte of a word; the modulus has 54 of 56 bits
    payload = bytes(4) + bytes(chunk) + bytes(92)
    message = seal(joint.context, joint.parties.clients["bank_00"], Kind.UPLOAD, key_id=key.key_id, payload=payload)
    with pytest.raises(InvalidMessageError):
        decode_upload(message, joint.context, key.key_id)


def test_a_digest_round_trips(joint: Any) -> None:
    digest = some_digest(joint)
    assert decode_digest(encode_digest(joint.context, joint.parties.server, digest), joint.context, digest.key_id) == digest


def test_a_digest_of_another_key_is_refused(joint: Any) -> None:
    message = encode_digest(joint.context, joint.parties.server, some_digest(joint))
    with pytest.raises(RoundMismatchError, match="another key"):
        decode_digest(message, joint.context, bytes(16))


@pytest.mark.parametrize(
    "participants",
    [
        ("bank_00", "bank_00", "bank_01"),
        ("bank_01", "bank_00", "bank_02"),
        ("bank_00", "bank_01", "stranger"),
        ("server", "bank_00", "bank_01"),
        ("bank_00", "bank_01", ""),
    ],
    ids=["twice", "out of order", "stranger", "server", "empty"],
)
def test_a_digest_names_pinned_clients_once_and_in_order(joint: Any, participants: tuple[str, ...]) -> None:
    digest = some_digest(joint, participants=participants)
    with pytest.raises(InvalidMessageError):
        decode_digest(encode_digest(joint.context, joint.parties.server, digest), joint.context, digest.key_id)


@pytest.mark.parametrize("count", [0, 2, 4, 2**32 - 1])
def test_a_digest_with_a_wrong_count_is_refused(joint: Any, count: int) -> None:
    digest = some_digest(joint)
    payload = digest.payload.replace((3).to_bytes(4, "big"), count.to_bytes(4, "big"), 1)
    message = seal(joint.context, joint.parties.server, Kind.DIGEST, key_id=digest.key_id, payload=payload)
    with pytest.raises(InvalidMessageError):
        decode_digest(message, joint.context, digest.key_id)


@pytest.mark.parametrize("changes", [{"participants": ()}, {"coefficients": (1, 2)}, {"upload_hashes": (bytes(32),)}])
def test_a_digest_without_an_entry_per_participant_cannot_be_made(joint: Any, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="one coefficient and one upload hash"):
        some_digest(joint, **changes)


def test_the_hash_of_a_digest_changes_with_everything_in_it(joint: Any) -> None:
    digest = some_digest(joint)
    names = joint.context.agreement.roster.names
    variants = [
        digest,
        replace(digest, participants=names[1:4]),
        replace(digest, coefficients=(1, 2, 4)),
        replace(digest, upload_hashes=(*digest.upload_hashes[:2], bytes(32))),
        replace(digest, rule="Other"),
        replace(digest, key_id=bytes(16)),
    ]
    contexts = [joint.context, replace(joint.context, round=1), replace(joint.context, attempt=1)]
    contexts.append(replace(joint.context, agreement=replace(joint.context.agreement, session=bytes(16))))
    assert len({variant.digest(context) for variant in variants for context in contexts}) == len(variants) * len(contexts)


def test_an_approval_round_trips(joint: Any) -> None:
    digest = some_digest(joint)
    assert decode_approval(encode_approval(joint.context, joint.parties.clients["bank_02"], digest), joint.context, digest) == "bank_02"


def test_an_approval_of_another_digest_is_refused(joint: Any) -> None:
    digest = some_digest(joint)
    message = encode_approval(joint.context, joint.parties.clients["bank_02"], digest)
    with pytest.raises(RoundMismatchError, match="'bank_02' approved another digest"):
        decode_approval(message, joint.context, replace(digest, coefficients=(1, 2, 4)))


def some_total(joint: Any, count: int = 3) -> SeededSum:
    return seeded_sum([encrypted(joint, joint.selected[index]).vector for index in range(count)], [1, 2, 3][:count])


def aggregate_message(joint: Any, *, approvals: Any = None, digest: Any = None, total: Any = None, announced: Any = None) -> bytes:
    digest = digest or some_digest(joint)
    total = total or replace(some_total(joint), key_id=digest.key_id)
    if approvals is None:
        approvals = [encode_approval(joint.context, joint.parties.clients[name], digest) for name in digest.participants]
    announced = announced or encode_digest(joint.context, joint.parties.server, digest)
    uploads = [bytes([index]) * ABRIDGED_BYTES for index in range(len(digest.participants))]
    return encode_aggregate(joint.context, joint.parties.server, announced, approvals, uploads=uploads, total=total)


def test_an_aggregate_round_trips(joint: Any) -> None:
    digest, total = some_digest(joint), some_total(joint)
    message = decode_aggregate(aggregate_message(joint, digest=digest, total=total), joint.context, digest.key_id)
    assert (message.digest, message.approved_by, message.total) == (digest, digest.participants, total)
    assert message.uploads == (bytes(124), b"\1" * 124, b"\2" * 124)


def test_a_whole_aggregate_round_trips_where_the_parameters_say_so(meet: Callable[..., Any]) -> None:
    joint = meet(params=replace(CkksParams.standard(), seeded_sums=False)).round()
    digest = some_digest(joint)
    total = weighted_sum([encrypted(joint).vector], [1])
    message = decode_aggregate(aggregate_message(joint, digest=digest, total=total), joint.context, digest.key_id)
    assert message.total == total
    with pytest.raises(ValueError, match="got the other kind"):
        aggregate_message(joint, digest=digest, total=some_total(joint))


def test_a_whole_sum_is_not_sent_where_seeds_are_expected(joint: Any) -> None:
    with pytest.raises(ValueError, match="got the other kind"):
        aggregate_message(joint, total=weighted_sum([encrypted(joint).vector], [1]))


def test_an_aggregate_with_an_approval_of_another_digest_is_refused(joint: Any) -> None:
    digest = some_digest(joint)
    approvals = [encode_approval(joint.context, joint.parties.clients["bank_00"], replace(digest, coefficients=(3, 2, 1)))]
    with pytest.raises(InvalidMessageError):
        decode_aggregate(aggregate_message(joint, digest=digest, approvals=approvals), joint.context, digest.key_id)


def test_an_aggregate_with_an_approval_of_another_attempt_is_refused(joint: Any) -> None:
    digest = some_digest(joint)
    for changes in ({"attempt": 1}, {"round": 1}, {"history": b"h" * 32}):
        approvals = [encode_approval(replace(joint.context, **changes), joint.parties.clients["bank_00"], digest)]
        with pytest.raises(InvalidMessageError):
            decode_aggregate(aggregate_message(joint, digest=digest, approvals=approvals), joint.context, digest.key_id)


def test_an_aggregate_with_a_forged_approval_or_with_approvals_of_what_it_does_not_say_is_refused(joint: Any) -> None:
    digest = some_digest(joint)
    approval = encode_approval(joint.context, joint.parties.clients["bank_00"], digest)
    forged = approval[:-1] + bytes([approval[-1] ^ 1])
    other = encode_digest(joint.context, joint.parties.server, replace(digest, coefficients=(1, 2, 4)))
    for announced, approvals in ((None, [forged]), (other, [approval])):
        message = aggregate_message(joint, digest=digest, announced=announced, approvals=approvals)
        with pytest.raises(InvalidMessageError):
            decode_aggregate(message, joint.context, digest.key_id)
    decode_aggregate(aggregate_message(joint, digest=digest, approvals=[approval]), joint.context, digest.key_id)


def test_an_aggregate_of_another_key_is_refused(joint: Any) -> None:
    with pytest.raises(RoundMismatchError, match="another key"):
        decode_aggregate(aggregate_message(joint), joint.context, bytes(16))


def test_an_aggregate_without_the_seeds_of_every_participant_is_refused(joint: Any) -> None:
    digest, total = some_digest(joint), some_total(joint)
    for seeds in (total.seeds[:2], (*total.seeds, total.seeds[0])):
        with pytest.raises(InvalidMessageError):
            decode_aggregate(aggregate_message(joint, digest=digest, total=replace(total, seeds=seeds)), joint.context, digest.key_id)


@pytest.mark.parametrize("seeded", [True, False])
def test_an_aggregate_with_a_word_beyond_the_modulus_is_refused(meet: Callable[..., Any], seeded: bool) -> None:
    joint = meet(params=replace(CkksParams.standard(), seeded_sums=seeded)).round()
    digest = some_digest(joint)
    total = some_total(joint) if seeded else weighted_sum([encrypted(joint).vector], [1])
    chunk = b"\xff" * 7 + total.chunks[0][7:]
    with pytest.raises(InvalidMessageError):
        decode_aggregate(aggregate_message(joint, digest=digest, total=replace(total, chunks=(chunk,))), joint.context, digest.key_id)


def test_a_single_upload_does_not_pass_for_a_sum(meet: Callable[..., Any]) -> None:
    joint = meet(params=replace(CkksParams.standard(), seeded_sums=False)).round()
    fresh = encrypted(joint).vector
    with pytest.raises(InvalidMessageError):
        decode_aggregate(aggregate_message(joint, total=fresh), joint.context, fresh.key_id)


def test_an_abort_says_who_and_when_and_nothing_else(joint: Any) -> None:
    message = encode_abort(joint.context, joint.parties.clients["bank_02"], bytes(16))
    assert decode_abort(message, joint.context, bytes(16)) == "bank_02"
    assert message == encode_abort(joint.context, joint.parties.clients["bank_02"], bytes(16))
    with pytest.raises(RoundMismatchError):
        decode_abort(message, replace(joint.context, attempt=1), bytes(16))
    with pytest.raises(RoundMismatchError, match="another key"):
        decode_abort(message, joint.context, b"\1" * 16)
    with pytest.raises(ValueError, match="ABORT"):
        encode_abort(joint.context, joint.parties.server, bytes(16))
    for payload in (b"", b"because", b"abort: tags", b"Abort"):
        other = seal(joint.context, joint.parties.clients["bank_02"], Kind.ABORT, key_id=bytes(16), payload=payload)
        with pytest.raises(InvalidMessageError):
            decode_abort(other, joint.context, bytes(16))


@pytest.fixture
def keeping(meet: Callable[..., Any]) -> Any:
    """A round in which two of three banks keep ledgers."""
    return meet(count=3, populations={"bank_00": "accounts", "bank_01": "cards"}).round()


def test_who_keeps_an_agreed_ledger_states_its_head_and_nobody_else_does(keeping: Any) -> None:
    clients = keeping.parties.clients
    for name, statement in (("bank_00", b""), ("bank_02", b"a head"), ("bank_00", bytes(2**20 + 1))):
        update = encrypted(keeping, name)
        with pytest.raises(ValueError, match="of whoever keeps an agreed ledger, and of nobody else"):
            encode_upload(keeping.context, clients[name], update, statement=statement)


def test_an_upload_without_the_head_of_an_agreed_ledger_is_dropped_even_when_signed(keeping: Any) -> None:
    vector = encrypted(keeping).vector
    for statement in (b"", b"x"):
        for length in (len(statement), len(statement) + 1):
            payload = b"".join((statement, length.to_bytes(4, "big"), *vector.chunks, vector.sealed_tags))
            message = seal(keeping.context, keeping.parties.clients["bank_00"], Kind.UPLOAD, key_id=vector.key_id, payload=payload)
            if statement and length == len(statement):
                assert decode_upload(message, keeping.context, vector.key_id).sender == "bank_00"
            else:
                with pytest.raises(InvalidMessageError):
                    decode_upload(message, keeping.context, vector.key_id)


def test_an_announcement_without_the_heads_of_agreed_ledgers_is_dropped(keeping: Any) -> None:
    digest = replace(some_digest(keeping), participants=("bank_00", "bank_01", "bank_02"))
    server = keeping.parties.server
    heads = {"bank_00": b"head", "bank_01": b"other head"}
    message = encode_digest(keeping.context, server, digest, heads)
    assert read_digest(message, keeping.context, digest.key_id) == (digest, heads)
    for wrong in ({}, {"bank_00": b"head"}, heads | {"bank_02": b"of nothing"}):
        with pytest.raises(InvalidMessageError):
            decode_digest(encode_digest(keeping.context, server, digest, wrong), keeping.context, digest.key_id)


def test_an_approval_carries_one_countersignature_where_a_participant_keeps_a_ledger(keeping: Any, joint: Any) -> None:
    digest = replace(some_digest(keeping), participants=("bank_00", "bank_01", "bank_02"))
    bank = keeping.parties.clients["bank_00"]
    assert decode_approval(encode_approval(keeping.context, bank, digest, bytes(64)), keeping.context, digest) == "bank_00"
    for wrong in (b"", bytes(63), bytes(128)):
        with pytest.raises(ValueError, match=f"expected a countersignature of 64 bytes in this round, got {len(wrong)}"):
            encode_approval(keeping.context, bank, digest, wrong)
    with pytest.raises(ValueError, match="expected a countersignature of 0 bytes in this round, got 64"):
        encode_approval(joint.context, joint.parties.clients["bank_00"], some_digest(joint), bytes(64))
    for payload in (digest.digest(keeping.context), digest.digest(keeping.context) + bytes(128)):
        with pytest.raises(InvalidMessageError):
            decode_approval(seal(keeping.context, bank, Kind.APPROVAL, key_id=digest.key_id, payload=payload), keeping.context, digest)


def test_an_authentic_approval_or_aggregate_that_names_another_key_in_its_frame_is_refused(joint: Any) -> None:
    digest = some_digest(joint)
    bank, server, other = joint.parties.clients["bank_00"], joint.parties.server, bytes(16)
    approval = seal(joint.context, bank, Kind.APPROVAL, key_id=other, payload=digest.digest(joint.context))
    with pytest.raises(RoundMismatchError, match="another key"):
        decode_approval(approval, joint.context, digest)
    whole = aggregate_message(joint, digest=digest)
    empty = seal(joint.context, server, Kind.AGGREGATE, key_id=digest.key_id, payload=b"")
    payload = whole[len(empty) - SIGNATURE_BYTES : -SIGNATURE_BYTES]
    decode_aggregate(seal(joint.context, server, Kind.AGGREGATE, key_id=digest.key_id, payload=payload), joint.context, digest.key_id)
    with pytest.raises(RoundMismatchError, match="another key"):
        decode_aggregate(seal(joint.context, server, Kind.AGGREGATE, key_id=other, payload=payload), joint.context, digest.key_id)
