from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from privfed.digest import RoundDigest, hash_message
from privfed.errors import AlreadyOpenedError, DecryptionError, InvalidMessageError, OpeningRefusedError, RoundMismatchError
from privfed.he.additive import CkksVector, weighted_sum
from privfed.he.secret import SharedKey
from privfed.keyholder import KeyHolder
from privfed.protect import round_key
from privfed.wire import decode_aggregate, decode_upload, encode_aggregate, encode_approval, encode_digest


@pytest.fixture
def joint(parties: Any) -> Any:
    return parties.round()


def uploaded(joint: Any, names: Sequence[str]) -> list[CkksVector]:
    return [decode_upload(joint.uploads[name], joint.context, joint.new_key().key_id).vector for name in names]


def forged(
    joint: Any,
    names: Sequence[str],
    coefficients: Sequence[int],
    *,
    vector: CkksVector | None = None,
    approved_by: Sequence[str] | None = None,
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
    vector = vector or weighted_sum(uploaded(joint, [name for name, _ in positive]), [coefficient for _, coefficient in positive])
    server = joint.parties.server
    return encode_aggregate(joint.context, server, encode_digest(joint.context, server, digest), approvals, vector)


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
    refuses(joint, forged(joint, names, [1] * len(names)), "the policy demands 3; nothing was opened")


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
    other = forged(joint, joint.selected, [1, 1, 1, 1], vector=weighted_sum(uploaded(joint, ["bank_00"]), [1]))
    with pytest.raises(AlreadyOpenedError, match="with another aggregate"):
        joint.key_holder("bank_00").open(other)
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


def test_a_sum_of_other_uploads_does_not_decrypt_and_uses_up_the_round(joint: Any) -> None:
    joint.setup().upload()
    wrong = forged(joint, joint.selected, [1, 1, 1, 1], vector=weighted_sum(uploaded(joint, ["bank_00"]), [1]))
    holder = joint.key_holder("bank_00")
    with pytest.raises(DecryptionError, match="nothing was opened"):
        holder.open(wrong)
    with pytest.raises(OpeningRefusedError):
        holder.finish()
    with pytest.raises(AlreadyOpenedError, match="with another aggregate"):
        holder.open(forged(joint, joint.selected, [1, 1, 1, 1]))


def test_a_corrupted_sum_does_not_decrypt(joint: Any) -> None:
    joint.setup().upload()
    right = weighted_sum(uploaded(joint, joint.selected), [1, 1, 1, 1])
    chunk = bytearray(right.chunks[0])
    chunk[3] ^= 1
    with pytest.raises(DecryptionError):
        joint.key_holder("bank_00").open(forged(joint, joint.selected, [1] * 4, vector=replace(right, chunks=(bytes(chunk),))))


def test_nothing_is_finished_before_it_was_opened(joint: Any) -> None:
    with pytest.raises(OpeningRefusedError, match="no aggregate of round 0 was opened here"):
        joint.key_holder("bank_00").finish()


def test_no_text_shows_a_value_or_a_key(joint: Any) -> None:
    holder = joint.key_holder("bank_00")
    aggregate = holder.open(joint.run())
    assert repr(aggregate) == "Aggregate(round=0, vector=PlainVector, clients=4)"
    assert "key" not in repr(holder).lower().replace("keyholder", "")
