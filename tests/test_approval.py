from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from privfed.approval import approve, check_digest
from privfed.digest import RoundDigest, hash_message
from privfed.errors import AlreadyOpenedError, InvalidMessageError, LedgerTamperedError, OpeningRefusedError, RoundMismatchError
from privfed.wire_digest import decode_approval, decode_digest, encode_digest


@pytest.fixture
def joint(parties: Any) -> Any:
    """A round whose uploads are in and whose digest is announced."""
    return parties.round().setup().upload()


def announced(joint: Any) -> RoundDigest:
    return decode_digest(joint.server.close(), joint.context, joint.new_key().key_id)


def altered(joint: Any, **changes: Any) -> bytes:
    """What a server signs that wants something else."""
    return encode_digest(joint.context, joint.parties.server, replace(announced(joint), **changes))


def test_a_participant_approves_the_digest_of_its_own_round(joint: Any) -> None:
    message = joint.approve("bank_00", joint.server.close())
    assert decode_approval(message, joint.context, announced(joint)) == "bank_00"


def test_the_same_digest_again_gets_the_same_bytes(joint: Any) -> None:
    assert joint.approve("bank_00", joint.server.close()) == joint.approve("bank_00", joint.server.close())


def test_a_participant_refuses_a_digest_without_itself(joint: Any) -> None:
    digest = announced(joint)
    data = altered(joint, participants=digest.participants[1:], coefficients=(1, 1, 1), upload_hashes=digest.upload_hashes[1:])
    with pytest.raises(OpeningRefusedError, match="'bank_00' is not in the digest; nothing was approved"):
        joint.approve("bank_00", data)


def test_a_participant_refuses_another_upload_in_its_name(joint: Any) -> None:
    hashes = (hash_message(b"something else"), *announced(joint).upload_hashes[1:])
    with pytest.raises(OpeningRefusedError, match="another upload of 'bank_00' than the one that it sent"):
        joint.approve("bank_00", altered(joint, upload_hashes=hashes))
    joint.approve("bank_01", altered(joint, upload_hashes=hashes))  # only bank_00 can know


@pytest.mark.parametrize("coefficients", [(2, 1, 1, 1), (1, 1, 1, 0), (4090, 1, 1, 1), (2, 2, 2, 2), (2**40, 1, 1, 1)])
def test_a_participant_refuses_coefficients_that_do_not_follow_from_the_weights(joint: Any, coefficients: tuple[int, ...]) -> None:
    with pytest.raises(OpeningRefusedError, match="do not follow from the agreed weights"):
        joint.approve("bank_00", altered(joint, coefficients=coefficients))


def test_a_participant_refuses_another_rule(joint: Any) -> None:
    with pytest.raises(OpeningRefusedError, match="another rule than FedAvg"):
        joint.approve("bank_00", altered(joint, rule="MultiKrum(byzantine=1, keep=1)"))


def test_a_participant_refuses_too_few_participants(joint: Any) -> None:
    digest = announced(joint)
    data = altered(joint, participants=digest.participants[:2], coefficients=(1, 1), upload_hashes=digest.upload_hashes[:2])
    with pytest.raises(OpeningRefusedError, match=r"policy demands 3 \(min_clients\); nothing was opened"):
        joint.approve("bank_00", data)


def test_a_participant_refuses_an_aggregate_that_is_mostly_one_client(meet: Callable[..., Any]) -> None:
    # Among all five the heavy one has 12/18; among the first three it would have 12/14.
    parties = meet(count=5, weights={"bank_00": 12, "bank_01": 1, "bank_02": 1, "bank_03": 2, "bank_04": 2})
    joint = parties.round().setup().upload()
    digest = announced(joint)
    data = altered(joint, participants=digest.participants[:3], coefficients=(12, 1, 1), upload_hashes=digest.upload_hashes[:3])
    with pytest.raises(OpeningRefusedError, match="more than 75%"):
        joint.approve("bank_00", data)


def test_a_refused_digest_promises_nothing(joint: Any) -> None:
    with pytest.raises(OpeningRefusedError):
        joint.approve("bank_00", altered(joint, coefficients=(2, 1, 1, 1)))
    joint.approve("bank_00", joint.server.close())


def test_a_second_digest_of_the_round_is_refused(joint: Any) -> None:
    digest = announced(joint)
    joint.approve("bank_00", joint.server.close())
    second = altered(joint, participants=digest.participants[:3], coefficients=(1, 1, 1), upload_hashes=digest.upload_hashes[:3])
    with pytest.raises(AlreadyOpenedError, match="promised to another digest"):
        joint.approve("bank_00", second)


def test_a_digest_of_a_later_attempt_is_refused_after_an_approval_and_approved_without_one(joint: Any) -> None:
    joint.approve("bank_00", joint.server.close())
    later = joint.parties.round(attempt=1).setup().upload()
    with pytest.raises(AlreadyOpenedError, match="of attempt 0"):
        later.approve("bank_00", later.server.close())
    later.approve("bank_01", later.server.close())
    with pytest.raises(AlreadyOpenedError, match="of attempt 1"):  # and from then on it is the earlier one that is refused
        joint.approve("bank_01", joint.server.close())


def test_a_digest_that_the_server_did_not_sign_is_refused(joint: Any) -> None:
    data = bytearray(joint.server.close())
    data[-1] ^= 1
    with pytest.raises(InvalidMessageError):
        joint.approve("bank_00", bytes(data))


def test_a_digest_of_another_key_is_refused(joint: Any) -> None:
    with pytest.raises(RoundMismatchError, match="another key"):
        approve(
            joint.context,
            joint.parties.clients["bank_00"],
            joint.server.close(),
            key_id=bytes(16),
            upload_hash=hash_message(joint.uploads["bank_00"]),
            journal=joint.parties.journal("bank_00"),
        )


def test_the_approval_is_recorded_before_it_is_signed(joint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object, **options: object) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("privfed.approval.encode_approval", crash)
        with pytest.raises(KeyboardInterrupt):
            joint.approve("bank_00", joint.server.close())
    with pytest.raises(AlreadyOpenedError):
        joint.parties.journal("bank_00").approve(joint.context, bytes(32))
    joint.approve("bank_00", joint.server.close())


def test_check_digest_accepts_what_the_agreement_makes_of_the_participants(joint: Any) -> None:
    check_digest(joint.context, announced(joint))


def test_where_ledgers_are_agreed_nobody_approves_without_a_witness(meet: Callable[..., Any]) -> None:
    joint = meet(populations={"bank_00": "accounts"}).round().setup().upload()
    arguments = {
        "key_id": joint.new_key().key_id,
        "upload_hash": hash_message(joint.uploads["bank_01"]),
        "journal": joint.parties.journal("bank_01"),
    }
    with pytest.raises(ValueError, match="expected a witness of the ledgers that the agreement names; nothing was approved"):
        approve(joint.context, joint.parties.clients["bank_01"], joint.server.close(), **arguments)
    joint.parties.journal("bank_01").approve(joint.context, bytes(32))  # no digest was promised


def test_a_digest_that_the_witness_refuses_is_not_promised(meet: Callable[..., Any]) -> None:
    joint = meet(populations={"bank_00": "accounts"}).round().setup().upload()

    def refuse(_: object) -> dict[str, bytes]:
        raise LedgerTamperedError("it was set back")

    with pytest.raises(LedgerTamperedError):
        approve(
            joint.context,
            joint.parties.clients["bank_01"],
            joint.server.close(),
            key_id=joint.new_key().key_id,
            upload_hash=hash_message(joint.uploads["bank_01"]),
            journal=joint.parties.journal("bank_01"),
            witness=refuse,
        )
    joint.parties.journal("bank_01").approve(joint.context, bytes(32))


def test_a_digest_with_another_statement_of_the_participants_own_ledger_is_not_approved(meet: Callable[..., Any]) -> None:
    joint = meet(populations={"bank_00": "accounts"}).round().setup().upload()
    data = encode_digest(joint.context, joint.parties.server, announced(joint), {"bank_00": b"something else"})
    with pytest.raises(OpeningRefusedError, match="another statement of the ledger of 'bank_00' than the one that it sent"):
        joint.approve("bank_00", data)
    joint.approve("bank_01", data)  # only bank_00 can know


def test_asked_again_a_participant_gives_what_it_gave_and_asks_its_witness_for_nothing(meet: Callable[..., Any]) -> None:
    joint = meet(populations={"bank_00": "accounts"}).round().setup().upload()
    asked: list[object] = []

    def approve_once() -> bytes:
        return approve(
            joint.context,
            joint.parties.clients["bank_01"],
            joint.server.close(),
            key_id=joint.new_key().key_id,
            upload_hash=hash_message(joint.uploads["bank_01"]),
            journal=joint.parties.journal("bank_01"),
            witness=lambda heads: asked.append(heads) or bytes(64),
        )

    assert approve_once() == approve_once()
    assert len(asked) == 1
