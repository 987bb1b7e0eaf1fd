from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from privfed.attacks.key_recovery import craft_sum
from privfed.digest import RoundDigest, abridge, hash_message
from privfed.errors import (
    AlreadyOpenedError,
    DecryptionError,
    InvalidMessageError,
    OpeningRefusedError,
    PrivFedError,
    RoundMismatchError,
    TamperedAggregateError,
)
from privfed.he.additive import CkksVector, SeededSum, seeded_sum, weighted_sum
from privfed.he.params import CkksParams
from privfed.he.secret import SharedKey
from privfed.keyholder import KeyHolder
from privfed.message import Kind
from privfed.protect import round_key
from privfed.update import Layout
from privfed.wire import decode_upload, encode_abort
from privfed.wire_aggregate import decode_aggregate, encode_aggregate
from privfed.wire_digest import encode_approval, encode_digest


@pytest.fixture
def joint(parties: Any) -> Any:
    return parties.round()


def uploaded(joint: Any, names: Sequence[str]) -> list[CkksVector]:
    return [decode_upload(joint.uploads[name], joint.context, joint.new_key().key_id).vector for name in names]


def summed(vectors: Sequence[CkksVector], coefficients: Sequence[int]) -> CkksVector | SeededSum:
    params = vectors[0].params
    return (seeded_sum if params.seeded_sums else weighted_sum)(vectors, params.multipliers(coefficients))


def forged(
    joint: Any,
    names: Sequence[str],
    coefficients: Sequence[int],
    *,
    total: CkksVector | SeededSum | None = None,
    approved_by: Sequence[str] | None = None,
    uploads: Sequence[bytes] | None = None,
) -> bytes:
    """What a malicious server sends that got these clients to sign: they check nothing."""
    digest = RoundDigest(
        participants=tuple(names),
        coefficients=tuple(coefficients),
        upload_hashes=tuple(hash_message(joint.uploads[name]) for name in names),
        rule="FedAvg",
        key_id=joint.new_key().key_id,
    )
    approvals = [
        encode_approval(joint.context, joint.parties.clients[name], digest) for name in (names if approved_by is None else approved_by)
    ]
    positive = [(name, coefficient) for name, coefficient in zip(names, coefficients, strict=True) if coefficient]
    if total is None:
        total = summed(uploaded(joint, [name for name, _ in positive]), [coefficient for _, coefficient in positive])
    if isinstance(total, SeededSum) and len(total.seeds) < len(names):  # a format without room for fewer
        total = replace(total, seeds=(*total.seeds, *total.seeds[:1] * (len(names) - len(total.seeds))))
    uploads = [abridge(joint.uploads[name]) for name in names] if uploads is None else uploads
    server = joint.parties.server
    announced = encode_digest(joint.context, server, digest)
    return encode_aggregate(joint.context, server, announced, approvals, uploads=uploads, total=total)


def refuses(joint: Any, message: bytes, text: str) -> None:
    """Refused, and the journal did not even begin: the honest aggregate can still be opened."""
    with pytest.raises(OpeningRefusedError, match=text):
        joint.key_holder("bank_00").open(message)
    joint.parties.journal("bank_00").begin(joint.context, bytes(32), aggregate=bytes(32))


def test_every_participant_and_every_other_holder_of_the_key_opens_the_same_mean(joint: Any) -> None:
    joint.setup()
    updates = joint.some_updates(["bank_00", "bank_01", "bank_02"])
    message = joint.upload(updates).approve_all().server.aggregate()
    for name in joint.parties.clients:
        aggregate = joint.key_holder(name).open(message)
        assert aggregate.round == 0
        assert aggregate.coefficients == {"bank_00": 1, "bank_01": 1, "bank_02": 1}
        np.testing.assert_array_equal(aggregate.vector.values, joint.expected_mean(updates, aggregate.coefficients))


def test_the_key_holder_refuses_a_masked_single_client(joint: Any) -> None:
    joint.setup().upload()
    refuses(joint, forged(joint, ["bank_00", "bank_01", "bank_02"], [1, 0, 0]), "do not follow from the agreed weights")


def test_the_key_holder_refuses_a_nearly_single_client(joint: Any) -> None:
    joint.setup().upload()
    refuses(joint, forged(joint, ["bank_00", "bank_01", "bank_02"], [4094, 1, 1]), "do not follow from the agreed weights")


@pytest.mark.parametrize("names", [["bank_00"], ["bank_00", "bank_01"]])
def test_the_key_holder_refuses_fewer_clients_than_the_policy_demands(joint: Any, names: list[str]) -> None:
    joint.setup().upload()
    refuses(joint, forged(joint, names, [1] * len(names)), r"the policy demands 3 \(min_clients\); nothing was opened")


def test_the_key_holder_refuses_shares_beyond_the_policy(meet: Callable[..., Any]) -> None:
    parties = meet(count=5, weights={"bank_00": 12, "bank_01": 1, "bank_02": 1, "bank_03": 2, "bank_04": 2})
    joint = parties.round().setup().upload()
    refuses(joint, forged(joint, ["bank_00", "bank_01", "bank_02"], [12, 1, 1]), "more than 75%")


@pytest.mark.parametrize(
    ("approved_by", "missing"),
    [
        ([], r"\['bank_00', 'bank_01', 'bank_02'\]"),
        (["bank_00", "bank_02"], r"\['bank_01'\]"),
        (["bank_00", "bank_01", "bank_01"], r"\['bank_02'\]"),
        (["bank_00", "bank_01", "bank_03"], r"\['bank_02'\]"),
        (["bank_00", "bank_01", "bank_02", "bank_02"], r"\[\]"),
        (["bank_00", "bank_01", "bank_02", "bank_03"], r"\[\]"),
    ],
    ids=["none", "one missing", "one twice", "another client", "one too many", "an outsider too many"],
)
def test_the_key_holder_demands_the_approval_of_every_participant_once(joint: Any, approved_by: list[str], missing: str) -> None:
    joint.setup().upload()
    message = forged(joint, ["bank_00", "bank_01", "bank_02"], [1, 1, 1], approved_by=approved_by)
    refuses(joint, message, f"approval of every participant, once; missing {missing}; nothing was decrypted")


def test_the_key_holder_refuses_what_another_than_the_server_signed(joint: Any) -> None:
    message = bytearray(joint.run())
    message[-1] ^= 1
    with pytest.raises(InvalidMessageError):
        joint.key_holder("bank_00").open(bytes(message))


def test_a_holder_of_another_key_opens_nothing(joint: Any) -> None:
    message = joint.run()
    stranger = KeyHolder(
        context=joint.context, round_key=round_key(SharedKey.generate(), joint.context), journal=joint.parties.journal("bank_00")
    )
    with pytest.raises(RoundMismatchError, match="another key"):
        stranger.open(message)


def test_an_aggregate_of_another_round_or_attempt_is_refused(joint: Any) -> None:
    message = joint.run()
    for other in (joint.parties.round(1), joint.parties.round(0, attempt=1)):
        with pytest.raises(RoundMismatchError, match="belongs to round 0, attempt 0"):
            other.key_holder("bank_00").open(message)


def test_a_finished_round_is_never_opened_again(joint: Any) -> None:
    message = joint.run()
    holder = joint.key_holder("bank_00")
    holder.open(message)
    holder.finish()
    for again in (holder, joint.key_holder("bank_00")):
        with pytest.raises(AlreadyOpenedError, match="round 0 was already opened; nothing was decrypted"):
            again.open(message)


def test_a_crash_after_the_decryption_allows_the_same_bytes_once_more_and_no_others(joint: Any) -> None:
    message = joint.run()
    first = joint.key_holder("bank_00").open(message)  # and the model was never stored
    # An honest server has no other bytes; one that signs the same again with another nonce has.
    with pytest.raises(AlreadyOpenedError, match="with another aggregate"):
        joint.parties.journal("bank_00").begin(joint.context, digest_of(joint, message), aggregate=bytes(32))
    restarted = joint.key_holder("bank_00")
    np.testing.assert_array_equal(restarted.open(message).vector.values, first.vector.values)
    restarted.finish()


def test_the_opening_is_recorded_before_anything_is_decrypted(joint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    message = joint.run()

    def crash(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("privfed.keyholder.open_sum", crash)
        with pytest.raises(KeyboardInterrupt):
            joint.key_holder("bank_00").open(message)
    digest = decode_aggregate(message, joint.context, joint.new_key().key_id).digest.digest(joint.context)
    with pytest.raises(AlreadyOpenedError, match="with another aggregate"):
        joint.parties.journal("bank_00").begin(joint.context, digest, aggregate=bytes(32))
    joint.key_holder("bank_00").open(message)


def test_a_second_digest_of_an_opened_round_is_refused_by_every_opener(joint: Any) -> None:
    message = joint.run()
    joint.key_holder("bank_00").open(message)
    subset = forged(joint, ["bank_00", "bank_01", "bank_02"], [1, 1, 1])
    with pytest.raises(AlreadyOpenedError, match="promised to another digest"):
        joint.key_holder("bank_00").open(subset)
    # bank_01 has opened nothing yet, but it approved the first digest: it opens that one or none.
    with pytest.raises(AlreadyOpenedError, match="promised to another digest"):
        joint.key_holder("bank_01").open(subset)
    joint.key_holder("bank_01").open(message)


def test_a_later_attempt_of_an_opened_round_is_refused(joint: Any) -> None:
    joint.key_holder("bank_00").open(joint.run())
    later = joint.parties.round(attempt=1).setup().upload()
    with pytest.raises(AlreadyOpenedError, match="of attempt 0"):
        later.key_holder("bank_00").open(forged(later, ["bank_01", "bank_02", "bank_03"], [1, 1, 1]))


WHOLE = replace(CkksParams.standard(), seeded_sums=False)
EVERY = {
    "standard": CkksParams.standard(),
    "standard, whole": WHOLE,
    "compact": CkksParams.compact(),
    "parity": CkksParams.parity(clients=4),
    "parity, whole": replace(CkksParams.parity(clients=4), seeded_sums=False),
    "compatible": CkksParams.compatible(clients=4),
}


@pytest.fixture(params=EVERY.values(), ids=EVERY.keys())
def ready(meet: Callable[..., Any], request: pytest.FixtureRequest) -> Any:
    """A round of two chunks in which everybody uploaded and approved, under every kind of parameters."""
    layout = Layout(names=("w",), shapes=((request.param.chunk_coordinates + 10,),))
    return meet(params=request.param, layout=layout).round().setup().upload().approve_all()


def is_tampered(joint: Any, message: bytes) -> None:
    """Refused in the one way, and neither decrypted nor recorded: the right aggregate can still be opened."""
    with pytest.raises(TamperedAggregateError) as caught:
        joint.key_holder("bank_00").open(message)
    assert str(caught.value) == str(TamperedAggregateError())
    joint.parties.journal("bank_00").begin(joint.context, digest_of(joint, joint.server.aggregate()), aggregate=bytes(32))


def digest_of(joint: Any, message: bytes) -> bytes:
    return decode_aggregate(message, joint.context, joint.key_id).digest.digest(joint.context)


def right_total(joint: Any) -> CkksVector | SeededSum:
    return decode_aggregate(joint.server.aggregate(), joint.context, joint.key_id).total


def test_the_honest_aggregate_opens_under_every_kind_of_parameters(ready: Any) -> None:
    aggregate = ready.key_holder("bank_00").open(ready.server.aggregate())
    updates = ready.some_updates()
    np.testing.assert_array_equal(aggregate.vector.values, ready.expected_mean(updates, aggregate.coefficients))
    clipped = sum(np.clip(values, -1, 1) for values in updates.values()) / 4
    assert np.abs(aggregate.vector.values - clipped).max() <= ready.context.agreement.params.max_error


def test_a_flipped_bit_is_refused_before_anything_is_decrypted(ready: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("privfed.keyholder.open_sum", lambda *_, **__: pytest.fail("something was decrypted"))
    total = right_total(ready)
    for place in range(2):
        chunk = bytearray(total.chunks[place])
        chunk[3] ^= 1
        chunks = list(total.chunks)
        chunks[place] = bytes(chunk)
        is_tampered(ready, forged(ready, ready.selected, [1] * 4, total=replace(total, chunks=tuple(chunks))))
        break_journal(ready)


def break_journal(joint: Any) -> None:
    """`is_tampered` began an opening to see that none was begun; forget it."""
    for path in joint.parties.directory.glob("bank_00.journal*"):
        path.unlink()


@pytest.mark.parametrize("names", [["bank_00"], ["bank_00", "bank_01", "bank_02"], ["bank_00", "bank_01", "bank_02", "bank_02"]])
def test_a_sum_of_one_client_of_fewer_or_with_one_twice_is_refused(ready: Any, names: list[str]) -> None:
    is_tampered(ready, forged(ready, ready.selected, [1] * 4, total=summed(uploaded(ready, names), [1] * len(names))))


@pytest.mark.parametrize("params", [CkksParams.standard(), WHOLE, CkksParams.compact()])
def test_a_sum_with_other_weights_is_refused(meet: Callable[..., Any], params: CkksParams) -> None:
    joint = meet(params=params).round().setup().upload().approve_all()
    for weights in ([2, 1, 1, 1], [2, 2, 2, 2], [40, 1, 1, 1]):
        is_tampered(joint, forged(joint, joint.selected, [1] * 4, total=summed(uploaded(joint, joint.selected), weights)))
        break_journal(joint)


def test_a_substituted_or_repeated_chunk_is_refused(ready: Any) -> None:
    total = right_total(ready)
    alone = summed(uploaded(ready, ["bank_00"] * 4), [1] * 4)
    alike = len(total.chunks[0]) == len(total.chunks[1])  # else the last one is cut, and none of the others takes its place
    moved = [(total.chunks[0],) * 2, total.chunks[::-1]] if alike else []
    for chunks in ((alone.chunks[0], total.chunks[1]), (total.chunks[0], alone.chunks[1]), *moved):
        is_tampered(ready, forged(ready, ready.selected, [1] * 4, total=replace(total, chunks=chunks)))
        break_journal(ready)


def test_the_sum_of_an_old_round_is_refused(ready: Any) -> None:
    later = ready.parties.round(1).setup().upload().approve_all()
    total = replace(right_total(ready), key_id=later.key_id)
    is_tampered(later, forged(later, later.selected, [1] * 4, total=total))
    # With the old uploads beside it, they are not what was signed.
    old = [abridge(ready.uploads[name]) for name in ready.selected]
    break_journal(ready)
    is_tampered(later, forged(later, later.selected, [1] * 4, total=total, uploads=old))


def test_the_upload_of_a_crashed_attempt_is_no_substitute_for_the_signed_one(ready: Any) -> None:
    """A client that crashed after it sent an upload, and before it stored it, encrypts again under the same key."""
    spare = ready.encode("bank_00", ready.some_updates()["bank_00"] / 2)
    vectors = [decode_upload(spare, ready.context, ready.key_id).vector, *uploaded(ready, ready.selected[1:])]
    uploads = [abridge(spare), *(abridge(ready.uploads[name]) for name in ready.selected[1:])]
    # Its tags are right, and it is not what bank_00 approved.
    is_tampered(ready, forged(ready, ready.selected, [1] * 4, total=summed(vectors, [1] * 4), uploads=uploads))


@pytest.mark.parametrize("change", [lambda uploads: uploads[::-1], lambda uploads: [uploads[0]] * 4, lambda uploads: [bytes(124)] * 4])
def test_abridged_uploads_that_are_not_the_announced_ones_are_refused(ready: Any, change: Callable[[Any], Any]) -> None:
    uploads = change([abridge(ready.uploads[name]) for name in ready.selected])
    is_tampered(ready, forged(ready, ready.selected, [1] * 4, uploads=uploads))


def test_a_client_that_seals_anything_else_is_noticed(meet: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    joint = meet().round().setup()
    from privfed.he.tags import TagKey

    with monkeypatch.context() as patch:
        patch.setattr(TagKey, "seal", lambda *_, **__: bytes(92))
        joint.upload(joint.some_updates(["bank_00"]))
    joint.upload(joint.some_updates(["bank_01", "bank_02", "bank_03"])).approve_all()
    is_tampered(joint, joint.server.aggregate())


def test_a_chosen_ciphertext_that_opens_to_the_key_is_refused(meet: Callable[..., Any]) -> None:
    joint = meet(params=WHOLE).round().setup().upload().approve_all()
    evil = craft_sum(right_total(joint), [1] * 4, np.random.default_rng(0))
    is_tampered(joint, forged(joint, joint.selected, [1] * 4, total=evil))


def test_what_the_server_hears_of_a_failure_is_the_same_bytes_whatever_it_was(ready: Any) -> None:
    """Signed and bound to the round: the only thing that differs between two of them is the round."""
    ready.server.aggregate()
    said: set[bytes] = set()
    for message in (b"noise", forged(ready, ready.selected, [1] * 4, uploads=[bytes(188)] * 4)):
        with pytest.raises(PrivFedError):
            ready.key_holder("bank_00").open(message)
        said.add(encode_abort(ready.context, ready.parties.clients["bank_00"], ready.key_id))
    (word,) = said
    assert ready.server.receive_abort(word) == "bank_00"
    assert ready.server.received(Kind.ABORT) == ("bank_00",)


def test_a_holder_of_another_shared_key_notices_that_the_tags_are_not_its_own(joint: Any) -> None:
    message = joint.run()
    stranger = round_key(SharedKey.generate(), joint.context)
    stranger._key_id = joint.key_id  # it claims to be the right one
    holder = KeyHolder(context=joint.context, round_key=stranger, journal=joint.parties.journal("bank_00"))
    with pytest.raises(TamperedAggregateError):
        holder.open(message)


def test_a_sum_that_does_not_decrypt_uses_up_the_round(joint: Any) -> None:
    """It takes more than a server: what is decrypted has passed the tags. A key that is damaged in memory, for example."""
    message = joint.run()
    holder = joint.key_holder("bank_00")
    other = round_key(SharedKey.generate(), joint.context)
    holder._round_key._ring_key = other._ring_key
    with pytest.raises(DecryptionError, match="wrong key, other coefficients, or corrupted; nothing was opened"):
        holder.open(message)
    with pytest.raises(OpeningRefusedError):
        holder.finish()
    with pytest.raises(AlreadyOpenedError, match="with another aggregate"):
        joint.parties.journal("bank_00").begin(joint.context, digest_of(joint, message), aggregate=bytes(32))
    joint.key_holder("bank_00").open(message)


def test_nothing_is_finished_before_it_was_opened(joint: Any) -> None:
    with pytest.raises(OpeningRefusedError, match="no aggregate of round 0 was opened here"):
        joint.key_holder("bank_00").finish()


def test_no_text_shows_a_value_or_a_key(joint: Any) -> None:
    holder = joint.key_holder("bank_00")
    aggregate = holder.open(joint.run())
    assert repr(aggregate) == "Aggregate(round=0, vector=PlainVector, clients=4)"
    assert "key" not in repr(holder).lower().replace("keyholder", "")
