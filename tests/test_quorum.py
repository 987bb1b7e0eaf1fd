"""`ThresholdKey` in whole rounds over wire bytes: who can open what, who is named, and what a lying server gets."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from privfed.aggregation.private_weights import PrivateWeights
from privfed.aggregation.rules import MultiKrum
from privfed.agreement import Agreement
from privfed.dp.silo import SiloNoise
from privfed.errors import (
    AlreadyOpenedError,
    CohortError,
    DecryptionError,
    InvalidMessageError,
    OpeningRefusedError,
    PrivFedError,
    RoundMismatchError,
    ShareRefusedError,
    UnsupportedInThisModeError,
)
from privfed.he.params import CkksParams
from privfed.he.secret import SharedKey
from privfed.he.threshold import OnePolynomialVector, add_up, key_id
from privfed.he.threshold_key import ThresholdKey
from privfed.he.threshold_secret import SummandKey, open_sum
from privfed.identity import Identity
from privfed.journal import Journal
from privfed.keys.party import seal
from privfed.message import Kind, write_text
from privfed.message import seal as seal_message
from privfed.policy import OpeningPolicy
from privfed.protect import protect
from privfed.server_sum import encrypted_sum
from privfed.sharing import answer, check_shares
from privfed.trust import EscrowTrust, ThresholdTrust
from privfed.update import PlainVector, Update
from privfed.wire import decode_upload, encode_upload
from privfed.wire_aggregate import encode_aggregate
from privfed.wire_digest import approval_answer, decode_approval, decode_digest, encode_approval
from privfed.wire_shares import decode_dealt_setup, decode_relay, encode_dealt_setup, encode_relay, encode_share
from privfed.written_agreement import decode_agreement, encode_agreement
from tests.keys.conftest import new_party
from tests.quorums import LAYOUT, QuorumRound, terms

Hold = Callable[..., QuorumRound]
FIVE = ThresholdKey(clients=5, corrupted=1, dropouts=1)


@pytest.fixture
def hold(tmp_path: Path) -> Hold:
    return lambda key=FIVE, **options: QuorumRound(tmp_path, key, **options)


@pytest.mark.parametrize("before", [(), ("bank_3",)])
@pytest.mark.parametrize("after", [(), ("bank_0",), ("bank_0", "bank_4")])
def test_dropouts_before_and_after_the_upload_leave_an_exact_mean(hold: Hold, before: tuple[str, ...], after: tuple[str, ...]) -> None:
    joint = hold(ThresholdKey(clients=7, corrupted=0, dropouts=3)).setup()
    participants = [name for name in joint.parties if name not in before]
    joint.upload(*participants).approve_by(*(name for name in participants if name not in after))
    message = joint.server.aggregate()
    for name in ("bank_0", "bank_3"):
        aggregate = joint.opener(name).open(message)
        assert np.array_equal(aggregate.vector.values, joint.expected_mean(participants))


def test_a_client_that_is_silent_at_the_setup_opens_what_the_others_made(hold: Hold) -> None:
    joint = hold().setup("bank_0", "bank_1", "bank_2", "bank_4").upload().approve_by()
    aggregate = joint.opener("bank_3").open(joint.server.aggregate())
    assert np.array_equal(aggregate.vector.values, joint.expected_mean(("bank_0", "bank_1", "bank_2", "bank_4")))


def test_one_dropout_too_many_ends_the_round_unopened(hold: Hold) -> None:
    with pytest.raises(CohortError, match="the quorum is 4 clients, and there are 3 setup messages"):
        hold().setup("bank_0", "bank_1", "bank_2")
    joint = hold(attempt=1).setup().upload("bank_0", "bank_1", "bank_2")
    with pytest.raises(CohortError, match="the quorum is 4 clients, and there are 3 uploads; nothing was summed"):
        joint.server.close()
    joint.upload("bank_3", "bank_4").approve_by("bank_0", "bank_1", "bank_2")
    with pytest.raises(CohortError, match=r"approvals of \['bank_3', 'bank_4'\] are missing; nothing was summed"):
        joint.server.aggregate()


def test_a_client_answers_once_in_a_round_and_for_the_signed_set_alone(hold: Hold) -> None:
    joint = hold().setup().upload()
    everybody, fewer = joint.announce(joint.parties), joint.announce([name for name in joint.parties if name != "bank_4"])
    given = joint.approve("bank_0", everybody)
    assert joint.approve("bank_0", everybody) == given
    with pytest.raises(AlreadyOpenedError, match="promised to another digest"):
        joint.approve("bank_0", fewer)
    params = joint.context.agreement.params
    assert approval_answer(given, joint.context) == answer(
        joint.relayed["bank_0"], joint.context, joint.parties["bank_0"], participants=tuple(joint.parties)
    )
    assert len(approval_answer(given, joint.context)) == params.polynomial_bytes
    with pytest.raises(OpeningRefusedError, match="'bank_4' is not in the digest"):
        joint.approve("bank_4", fewer)


def test_a_promise_to_one_attempt_holds_against_every_other_attempt(hold: Hold) -> None:
    first = hold().setup().upload()
    first.approve("bank_0", first.announce(first.parties))
    second = hold(attempt=1, server_identity=first.server_identity, parties=first.parties).setup().upload()
    assert second.uploads["bank_0"] != first.uploads["bank_0"]
    with pytest.raises(AlreadyOpenedError, match="of attempt 0"):
        second.approve("bank_0", second.announce(second.parties))


def test_corrupted_clients_below_the_bound_and_a_server_that_announces_two_sets_open_nothing_twice(hold: Hold, tmp_path: Path) -> None:
    """However the honest clients are told one set or the other, at most one sum opens; beyond the bound both do, and give one away."""
    assert _sets_opened_at_most(hold(), tmp_path) == 1
    beyond = ThresholdKey(clients=5, corrupted=1, dropouts=1)
    object.__setattr__(beyond, "dropouts", 2)  # the type refuses it: a quorum of 3 of 5 with 1 corrupted
    assert _sets_opened_at_most(hold(beyond, attempt=1), tmp_path) == 2


def _sets_opened_at_most(joint: QuorumRound, folder: Path) -> int:
    joint.setup().upload()
    context, params = joint.context, joint.context.agreement.params
    everybody, fewer = tuple(joint.parties), tuple(joint.parties)[:-1]
    sets = {participants: joint.announce(participants) for participants in (everybody, fewer)}
    corrupted, honest = "bank_0", fewer[1:]
    most = 0
    for number, told in enumerate(product(sets, repeat=len(honest))):
        answers: dict[tuple[str, ...], dict[int, bytes]] = {participants: {} for participants in sets}
        for participants, digest in sets.items():
            forgetful = Journal(folder / f"{corrupted}-{joint.attempt}-{number}-{len(participants)}.journal")
            message = joint.approve(corrupted, digest, journal=forgetful)
            answers[participants][1] = approval_answer(message, context)
        for index, (name, first) in enumerate(zip(honest, told, strict=True), start=2):
            journal = Journal(folder / f"{name}-{joint.attempt}-{number}.journal")
            answers[first][index] = approval_answer(joint.approve(name, sets[first], journal=journal), context)
            (second,) = (participants for participants in sets if participants != first)
            with pytest.raises(AlreadyOpenedError):
                joint.approve(name, sets[second], journal=journal)
        # The client that is left out of the smaller set can answer for the other one only.
        journal = Journal(folder / f"{everybody[-1]}-{joint.attempt}-{number}.journal")
        answers[everybody][5] = approval_answer(joint.approve(everybody[-1], sets[everybody], journal=journal), context)
        opened = {}
        for participants, given in answers.items():
            vectors = [decode_upload(joint.uploads[name], context, key_id(context.digest)).vector for name in participants]
            total = add_up([vector for vector in vectors if isinstance(vector, OnePolynomialVector)])
            try:
                opened[participants] = open_sum(total, context.digest, given, summands=len(participants), quorum=joint.key.quorum)
            except ValueError:
                with pytest.raises(DecryptionError):
                    open_sum(total, context.digest, given, summands=len(participants), quorum=len(given))
        if len(opened) == 2:
            single = (opened[everybody] - opened[fewer]) * params.step / float(context.agreement.weighting.divisor([everybody[-1]]))
            assert np.abs(single - joint.updates[everybody[-1]]).max() < 1e-6
        most = max(most, len(opened))
    return most


def test_a_share_that_its_sender_did_not_sign_names_the_sender(hold: Hold) -> None:
    joint = hold().setup()
    shares = dict(decode_relay(joint.relayed["bank_0"], joint.context))
    damaged = bytearray(shares["bank_2"])
    damaged[-100] ^= 1
    others = {
        "flipped": bytes(damaged),
        "of another": shares["bank_3"],
        "for another": decode_relay(joint.relayed["bank_1"], joint.context)["bank_2"],
        "nothing": b"",
    }
    for share in others.values():
        relayed = encode_relay(joint.context, joint.server_identity, shares | {"bank_2": share})
        with pytest.raises(ShareRefusedError, match="the share that came as that of 'bank_2' is not signed by it for 'bank_0'"):
            check_shares(relayed, joint.context, joint.parties["bank_0"])


@pytest.mark.parametrize("fault", ["other recipient", "other attempt", "no polynomial"])
def test_a_signed_share_that_cannot_be_used_names_the_sender(hold: Hold, fault: str) -> None:
    joint = hold().setup()
    shares = dict(decode_relay(joint.relayed["bank_0"], joint.context))
    context, params = joint.context, joint.context.agreement.params
    recipient = joint.parties["bank_1" if fault == "other recipient" else "bank_0"].public
    other = replace(context, attempt=9) if fault == "other attempt" else context
    info = b"privfed share v1\n" + other.digest + write_text("bank_2") + write_text("bank_0")
    share = (b"\xff" if fault == "no polynomial" else b"\x00") * params.polynomial_bytes
    message = encode_share(context, joint.identity("bank_2"), recipient="bank_0", sealed=seal(share, recipient, info=info))
    relayed = encode_relay(context, joint.server_identity, shares | {"bank_2": message})
    with pytest.raises(ShareRefusedError, match="the share of 'bank_2' for 'bank_0' is signed by it and cannot be used"):
        check_shares(relayed, context, joint.parties["bank_0"])


def test_an_answer_for_a_client_whose_share_never_came_is_refused(hold: Hold) -> None:
    joint = hold().setup("bank_0", "bank_1", "bank_2", "bank_3")
    with pytest.raises(ShareRefusedError, match="no share of 'bank_4' came to 'bank_0'"):
        answer(joint.relayed["bank_0"], joint.context, joint.parties["bank_0"], participants=tuple(joint.parties))


def test_sums_that_do_not_fit_each_other_stop_the_opening_and_blame_nobody(hold: Hold) -> None:
    joint = hold().setup().upload()
    digest = joint.server.close()
    wrong = joint.approve("bank_1", digest, journal=Journal(joint.folder / "liar"))
    announced = decode_digest(digest, joint.context, key_id(joint.context.digest))
    lie = encode_approval(joint.context, joint.identity("bank_1"), announced, answer=bytes(joint.context.agreement.params.polynomial_bytes))
    assert wrong != lie
    joint.server.receive_approval(lie)
    for name in ("bank_0", "bank_2", "bank_3"):
        joint.server.receive_approval(joint.approve(name, digest))
    opener = joint.opener("bank_0")
    with pytest.raises(DecryptionError, match="nobody can tell which; nothing was opened") as caught:
        opener.open(joint.server.aggregate())
    assert not any(name in str(caught.value) for name in joint.parties)


def test_an_aggregate_with_too_few_or_repeated_answers_is_not_opened(hold: Hold) -> None:
    joint = hold().setup().upload().approve_by()
    data = joint.server.aggregate()
    digest = joint.server.close()
    approvals = [joint.approve(name, digest) for name in joint.parties]
    total = encrypted_sum(joint.server._spool, joint.server._spool.digest())
    for chosen in (approvals[:3], [*approvals[:3], approvals[0]], approvals[::-1]):
        message = encode_aggregate(joint.context, joint.server_identity, digest, chosen, uploads=(), total=total)
        with pytest.raises(OpeningRefusedError, match="expected the answers of 4 participants or more, each once"):
            joint.opener("bank_0").open(message)
    joint.opener("bank_0").open(data)


def test_an_aggregate_is_opened_once(hold: Hold) -> None:
    joint = hold().setup().upload().approve_by()
    data = joint.server.aggregate()
    for _ in range(2):  # as after a crash
        opener = joint.opener("bank_1")
        opener.open(data)
    opener.finish()
    with pytest.raises(AlreadyOpenedError):
        joint.opener("bank_1").open(data)


def test_a_server_that_was_restarted_goes_on_and_relays_the_same_bytes(hold: Hold) -> None:
    joint = hold().setup().upload()
    joint.server = joint.new_server()
    assert joint.server.relay("bank_2") == joint.relayed["bank_2"]
    joint.approve_by()
    data = joint.server.aggregate()
    joint.server = joint.new_server()
    assert joint.server.aggregate() == data


def test_the_server_relays_to_the_clients_of_the_round_after_the_setup(hold: Hold) -> None:
    joint = hold()
    with pytest.raises(CohortError, match="still in its setup"):
        joint.server.relay("bank_0")
    joint.setup("bank_0", "bank_1", "bank_2", "bank_3")
    with pytest.raises(CohortError, match="'bank_4' took no part"):
        joint.server.relay("bank_4")


def test_a_setup_message_with_shares_of_another_or_for_another_is_dropped(hold: Hold) -> None:
    joint = hold()
    setups = {name: dict(decode_dealt_setup(joint.setup_message(name), joint.context)[2]) for name in ("bank_0", "bank_1")}
    own = setups["bank_0"]
    swapped = own | {"bank_2": own["bank_3"], "bank_3": own["bank_2"]}
    for shares in (swapped, own | {"bank_2": setups["bank_1"]["bank_2"]}):
        with pytest.raises(InvalidMessageError):
            joint.server.receive_setup(encode_dealt_setup(joint.context, joint.identity("bank_0"), shares))
    joint.server.receive_setup(encode_dealt_setup(joint.context, joint.identity("bank_0"), own))
    with pytest.raises(ValueError, match="one share for every client"):
        encode_dealt_setup(joint.context, joint.identity("bank_0"), {})
    with pytest.raises(ValueError, match="expected an encrypted share"):
        encode_share(joint.context, joint.identity("bank_0"), recipient="bank_1", sealed=b"")


def test_an_upload_travels_in_the_form_of_the_trust_mode_or_not_at_all(hold: Hold, parties: object) -> None:
    joint = hold().setup()
    update = Update(sender="bank_0", round=3, vector=PlainVector(layout=LAYOUT, values=joint.updates["bank_0"]))
    with pytest.raises(TypeError, match="encrypted"):
        encode_upload(joint.context, joint.identity("bank_0"), update)  # pyright: ignore[reportArgumentType]
    shared = replace(joint.context, agreement=replace(joint.context.agreement, trust=None))
    own = protect(update, joint.context, round_key=joint.secrets["bank_0"]).update
    with pytest.raises(ValueError, match="trust mode"):
        encode_upload(shared, joint.identity("bank_0"), own)
    message = encode_upload(joint.context, joint.identity("bank_0"), own)
    with pytest.raises(PrivFedError):  # longer than any upload of so few coordinates under a shared key
        decode_upload(message, shared, key_id(joint.context.digest))
    own_key = key_id(joint.context.digest)
    foreign = seal_message(shared, joint.identity("bank_0"), Kind.UPLOAD, key_id=own_key, payload=bytes(200))
    with pytest.raises(PrivFedError, match="another idea of the trust mode"):
        decode_upload(foreign, joint.context, own_key)
    with pytest.raises(RoundMismatchError, match="another round or attempt"):
        protect(update, replace(joint.context, attempt=1), round_key=SummandKey(params=joint.context.agreement.params, binding=bytes(32)))


def test_an_approval_without_its_answer_or_with_one_too_many_is_refused(hold: Hold) -> None:
    joint = hold().setup().upload()
    data = joint.server.close()
    digest = decode_digest(data, joint.context, key_id(joint.context.digest))
    with pytest.raises(ValueError, match="expected an answer of 20480 bytes"):
        encode_approval(joint.context, joint.identity("bank_0"), digest)
    beyond = b"\xff" * joint.context.agreement.params.polynomial_bytes
    with pytest.raises(InvalidMessageError):
        decode_approval(encode_approval(joint.context, joint.identity("bank_0"), digest, answer=beyond), joint.context, digest)


def test_what_the_mode_does_not_have_is_refused_by_type_before_anything_is_agreed() -> None:
    server, banks = Identity.generate("server"), {name: new_party(name) for name in ("a", "b", "c", "d", "e")}
    agreed = terms(FIVE, server, banks)
    weights = dict.fromkeys(banks, 1)
    silo = SiloNoise(weights=weights, clip_steps=10, noise_multiplier=1.0, coordinates=LAYOUT.size)
    refused: tuple[tuple[str, dict[str, object]], ...] = (
        ("clients that pre-scale", {"params": CkksParams.standard()}),
        ("no weighting after the noise of a silo", {"silo": silo, "weights": weights}),
        ("no private weight", {"private_weights": PrivateWeights(largest=5), "weights": weights}),
        ("needs inner products", {"rule": MultiKrum(byzantine=1, keep=2)}),
    )
    for text, changes in refused:
        with pytest.raises(UnsupportedInThisModeError, match=text):
            Agreement(**(agreed | changes))
    with pytest.raises(OpeningRefusedError, match="fewer than the quorum of 4"):
        Agreement(**agreed).coefficients(("a", "b", "c"))
    trust = agreed["trust"]
    with pytest.raises(ValueError, match="expected 5 clients, for which the quorum was solved, got 4"):
        ThresholdTrust(key=FIVE, encryption_keys=dict(list(trust.encryption_keys.items())[:4]))
    with pytest.raises(ValueError, match="none twice"):
        ThresholdTrust(key=FIVE, encryption_keys=dict.fromkeys(banks, bytes(32)))
    with pytest.raises(ValueError, match="of every client of the roster, and of nobody else"):
        Agreement(
            **(
                agreed
                | {"trust": ThresholdTrust(key=FIVE, encryption_keys={f"x{name}": key for name, key in trust.encryption_keys.items()})}
            )
        )


def test_an_agreement_names_the_quorum_and_the_keys_and_can_be_written_and_read() -> None:
    server, banks = Identity.generate("server"), {name: new_party(name) for name in ("a", "b", "c", "d", "e")}
    agreement = Agreement(**terms(FIVE, server, banks))
    assert (agreement.mode, agreement.least_participants) == ("ThresholdKey", 4)
    again = decode_agreement(encode_agreement(agreement))
    assert again.digest == agreement.digest
    assert again.trust == agreement.trust
    keys = dict(agreement.trust.encryption_keys)
    for other in (
        ThresholdTrust(key=ThresholdKey(clients=5, corrupted=0, dropouts=1), encryption_keys=keys),
        ThresholdTrust(key=FIVE, encryption_keys=keys | {"a": keys["b"], "b": keys["a"]}),
    ):
        differing = [part for part, digest in replace(agreement, trust=other).parts.items() if digest != agreement.parts[part]]
        assert differing == ["trust mode"]
    with pytest.raises(ValueError, match="of 'a', 32 bytes and not of small order"):
        ThresholdTrust(key=FIVE, encryption_keys=keys | {"a": bytes(32)})
    with pytest.raises(ValueError, match="of 'a', 32 bytes and not of small order"):
        EscrowTrust(holder=server.public, encryption_keys=keys | {"a": bytes(32)})
    text = encode_agreement(agreement)
    with pytest.raises(ValueError, match="expected an agreement as encode_agreement writes it"):
        decode_agreement(text.replace('"mode": "ThresholdKey"', '"mode": "SharedKey"'))
    assert Agreement(**(terms(FIVE, server, banks) | {"policy": OpeningPolicy(min_clients=5)})).least_participants == 5


def test_a_shared_key_is_no_way_into_a_round_without_one(hold: Hold) -> None:
    """There is no key to derive: what a shared key encrypts is not accepted."""
    from privfed.protect import round_key

    joint = hold().setup()
    update = Update(sender="bank_0", round=3, vector=PlainVector(layout=LAYOUT, values=joint.updates["bank_0"]))
    protected = protect(update, joint.context, round_key=round_key(SharedKey.generate(), joint.context))
    with pytest.raises(ValueError, match="trust mode"):
        encode_upload(joint.context, joint.identity("bank_0"), protected.update)
