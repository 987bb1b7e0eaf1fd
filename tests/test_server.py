import os
import stat
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from privfed.digest import abridge, hash_message
from privfed.errors import CohortError, DamagedFileError, InvalidMessageError, ParametersMismatchError, RoundMismatchError
from privfed.he.additive import SeededSum
from privfed.he.params import CkksParams
from privfed.identity import Identity
from privfed.message import Kind
from privfed.policy import OpeningPolicy
from privfed.server import Server
from privfed.server_spool import Phase
from privfed.update import Layout
from privfed.wire import encode_abort, encode_setup
from privfed.wire_aggregate import decode_aggregate
from privfed.wire_digest import decode_digest, encode_approval


@pytest.fixture
def joint(parties: Any) -> Any:
    return parties.round()


def check_opens(joint: Any, message: bytes, updates: Any) -> None:
    """The sum of exactly these updates, bit for bit."""
    aggregate = joint.key_holder("bank_00").open(message)
    assert set(aggregate.coefficients) == set(updates)
    np.testing.assert_array_equal(aggregate.vector.values, joint.expected_mean(updates, aggregate.coefficients))


def test_the_server_sums_what_all_selected_clients_sent(joint: Any) -> None:
    check_opens(joint, joint.run(), joint.some_updates())


def test_the_phases_follow_each_other(joint: Any) -> None:
    assert joint.server.phase is Phase.SETUP
    joint.setup()
    assert joint.server.phase is Phase.UPLOAD
    joint.upload()
    assert joint.server.phase is Phase.UPLOAD
    joint.server.close()
    assert joint.server.phase is Phase.APPROVAL
    joint.approve_all()
    assert joint.server.phase is Phase.APPROVAL
    joint.server.aggregate()
    assert joint.server.phase is Phase.DONE


def test_the_server_says_what_it_received(joint: Any) -> None:
    joint.setup("bank_02", "bank_00", "bank_03")
    assert joint.server.received(Kind.SETUP) == ("bank_00", "bank_02", "bank_03")
    assert joint.server.received(Kind.UPLOAD) == ()


def test_clients_may_drop_out_after_setup_and_the_others_go_on(joint: Any) -> None:
    joint.setup()
    updates = joint.some_updates(["bank_00", "bank_01", "bank_03"])
    check_opens(joint, joint.upload(updates).approve_all().server.aggregate(), updates)


def test_clients_that_were_not_selected_take_no_part(parties: Any) -> None:
    joint = parties.round(selected=["bank_00", "bank_01", "bank_02"])
    with pytest.raises(CohortError, match="'bank_03' takes no part in round 0; its SETUP message was dropped"):
        joint.server.receive_setup(joint.setup_message("bank_03"))
    joint.setup("bank_00", "bank_01", "bank_02")
    with pytest.raises(CohortError, match="its UPLOAD message was dropped"):
        joint.server.receive_upload(joint.encode("bank_03", np.zeros(8)))
    assert joint.server.received(Kind.UPLOAD) == ()


def test_a_selected_client_that_missed_the_setup_cannot_upload(joint: Any) -> None:
    joint.setup("bank_00", "bank_01", "bank_02")
    with pytest.raises(CohortError, match="'bank_03' takes no part"):
        joint.server.receive_upload(joint.encode("bank_03", np.zeros(8)))


def test_only_the_pinned_server_runs_a_round(parties: Any, tmp_path: Path) -> None:
    context = parties.round().context
    for identity in (Identity.generate("server"), parties.clients["bank_00"]):
        with pytest.raises(ValueError, match="identity of the roster's server"):
            Server(context=context, identity=identity, selected=tuple(parties.clients), spool=tmp_path)


def test_strangers_and_too_few_clients_cannot_be_selected(parties: Any) -> None:
    with pytest.raises(ValueError, match=r"clients of the roster, got \['stranger'\]"):
        parties.round(selected=[*parties.clients, "stranger"])
    with pytest.raises(CohortError, match="demands 3 clients, and there are 2 selected clients; nothing was summed"):
        parties.round(selected=["bank_00", "bank_01"])


def test_key_ids_that_differ_stop_the_round_and_name_the_minority(joint: Any) -> None:
    for name in ("bank_00", "bank_01", "bank_03"):
        joint.server.receive_setup(joint.setup_message(name))
    joint.server.receive_setup(encode_setup(joint.context, joint.parties.clients["bank_02"], bytes(16)))
    expected = r"\['bank_02'\] derived another key than \['bank_00', 'bank_01', 'bank_03'\]; nothing was started.*transport the key"
    with pytest.raises(ParametersMismatchError, match=expected):
        joint.server.start_uploads()
    assert joint.server.phase is Phase.SETUP


def test_uploads_do_not_start_before_enough_clients_are_there(joint: Any) -> None:
    joint.server.receive_setup(joint.setup_message("bank_00"))
    joint.server.receive_setup(joint.setup_message("bank_01"))
    with pytest.raises(CohortError, match="there are 2 setup messages"):
        joint.server.start_uploads()
    joint.server.receive_setup(joint.setup_message("bank_02"))
    assert joint.server.start_uploads() == ("bank_00", "bank_01", "bank_02")


def test_too_few_uploads_are_not_summed_and_more_may_come(joint: Any) -> None:
    joint.setup()
    updates = joint.some_updates(["bank_00", "bank_01"])
    joint.upload(updates)
    with pytest.raises(CohortError, match="there are 2 uploads; nothing was summed"):
        joint.server.close()
    assert joint.server.phase is Phase.UPLOAD
    updates |= {"bank_02": np.ones(8)}
    joint.upload({"bank_02": updates["bank_02"]})
    check_opens(joint, joint.approve_all().server.aggregate(), updates)


def test_uploads_that_are_mostly_one_client_are_not_summed(meet: Callable[..., Any]) -> None:
    joint = meet(count=5, weights={"bank_00": 12, "bank_01": 1, "bank_02": 1, "bank_03": 2, "bank_04": 2}).round().setup()
    joint.upload(joint.some_updates(["bank_00", "bank_01", "bank_02"]))
    with pytest.raises(CohortError, match=r"more than 75%.*nothing was summed"):
        joint.server.close()
    assert joint.server.phase is Phase.UPLOAD


def test_uploads_that_are_mostly_one_client_are_not_summed_where_clients_pre_scale_either(meet: Callable[..., Any]) -> None:
    """The server multiplies by 1 then; the policy looks at the weights."""
    weights = {"bank_00": 8, "bank_01": 1, "bank_02": 1, "bank_03": 3, "bank_04": 3}
    joint = meet(count=5, params=CkksParams.parity(clients=5), weights=weights).round().setup()
    joint.upload(joint.some_updates(["bank_00", "bank_01", "bank_02"]))
    with pytest.raises(CohortError, match=r"more than 75%.*nothing was summed"):
        joint.server.close()
    updates = {**joint.some_updates(["bank_00", "bank_01", "bank_02"]), "bank_03": np.ones(8)}
    joint.upload({"bank_03": updates["bank_03"]})
    message = joint.approve_all().server.aggregate()
    digest = decode_aggregate(message, joint.context, joint.key_id).digest
    assert digest.by_name == {"bank_00": 8, "bank_01": 1, "bank_02": 1, "bank_03": 3}
    check_opens(joint, message, updates)


def test_weights_do_not_follow_who_answers_where_clients_pre_scale(meet: Callable[..., Any]) -> None:
    weights = {"bank_00": 0.5, "bank_01": 0.25, "bank_02": 0.125, "bank_03": 0.125}
    joint = meet(params=CkksParams.parity(clients=4), weights=weights).round().setup()
    updates = joint.some_updates(["bank_00", "bank_01", "bank_02"])
    message = joint.upload(updates).approve_all().server.aggregate()
    digest = decode_aggregate(message, joint.context, joint.key_id).digest
    assert digest.by_name == {"bank_00": 2**31, "bank_01": 2**30, "bank_02": 2**29}
    check_opens(joint, message, updates)
    mean = joint.key_holder("bank_01").open(message).vector.values
    exact = sum(weights[name] * values for name, values in updates.items()) / 0.875
    assert np.abs(mean - exact).max() <= joint.context.agreement.params.mean_error(3, joint.context.agreement.weighting.divisor(updates))


def test_coefficients_are_apportioned_among_those_that_answered(meet: Callable[..., Any]) -> None:
    joint = meet(weights={"bank_00": 0.5, "bank_01": 0.25, "bank_02": 0.125, "bank_03": 0.125}).round().setup()
    joint.upload(joint.some_updates(["bank_00", "bank_01", "bank_02"]))
    digest = decode_digest(joint.server.close(), joint.context, joint.new_key().key_id)
    # 4/7, 2/7 and 1/7 of 4096: 2340.57, 1170.29 and 585.14, and the remainder goes to the first.
    assert digest.by_name == {"bank_00": 2341, "bank_01": 1170, "bank_02": 585}


def test_an_identical_resend_is_fine_in_every_phase(joint: Any) -> None:
    setup = joint.setup_message("bank_00")
    joint.server.receive_setup(setup)
    assert joint.server.receive_setup(setup) == "bank_00"
    joint.setup().upload()
    upload = joint.uploads["bank_00"]
    assert joint.server.receive_upload(upload) == "bank_00"
    assert joint.server.receive_setup(setup) == "bank_00"
    approval = joint.approve("bank_00", joint.server.close())
    joint.approve_all().server.aggregate()
    for resend, message in (
        (joint.server.receive_setup, setup),
        (joint.server.receive_upload, upload),
        (joint.server.receive_approval, approval),
    ):
        assert resend(message) == "bank_00"


def test_a_second_different_upload_is_refused_and_the_first_one_counts(joint: Any) -> None:
    updates = joint.setup().some_updates()
    joint.upload(updates)
    for values in (updates["bank_00"], np.zeros(8)):  # encrypted anew, the same values make other bytes
        with pytest.raises(CohortError, match="'bank_00' sent another UPLOAD message before; this one was dropped"):
            joint.server.receive_upload(joint.encode("bank_00", values))
    check_opens(joint, joint.approve_all().server.aggregate(), updates)


def test_a_second_different_setup_is_refused(joint: Any) -> None:
    joint.server.receive_setup(joint.setup_message("bank_00"))
    with pytest.raises(CohortError, match="another SETUP message before"):
        joint.server.receive_setup(encode_setup(joint.context, joint.parties.clients["bank_00"], bytes(16)))


def test_messages_before_their_phase_are_refused(joint: Any) -> None:
    with pytest.raises(CohortError, match="still in its setup"):
        joint.server.receive_upload(b"not looked at")
    with pytest.raises(CohortError, match="still in its setup"):
        joint.server.close()
    for call in (joint.server.aggregate, lambda: joint.server.receive_approval(b"not looked at")):
        with pytest.raises(CohortError, match="has no digest yet"):
            call()
    joint.setup().upload()
    for call in (joint.server.aggregate, lambda: joint.server.receive_approval(b"not looked at")):
        with pytest.raises(CohortError, match="has no digest yet"):
            call()


def test_messages_after_their_phase_are_refused(joint: Any) -> None:
    joint.setup("bank_00", "bank_01", "bank_02", "bank_03")
    joint.upload(joint.some_updates(["bank_00", "bank_01", "bank_02"]))
    joint.server.close()
    with pytest.raises(CohortError, match="UPLOAD message of 'bank_03' came in the phase APPROVAL; it was dropped"):
        joint.server.receive_upload(joint.encode("bank_03", np.zeros(8)))
    late = joint.parties.round(1)
    late.setup("bank_00", "bank_01", "bank_02")
    with pytest.raises(CohortError, match="SETUP message of 'bank_03' came in the phase UPLOAD"):
        late.server.receive_setup(late.setup_message("bank_03"))


def test_messages_of_another_round_or_attempt_are_refused(joint: Any) -> None:
    joint.setup()
    for other in (joint.parties.round(1), joint.parties.round(0, attempt=1)):
        with pytest.raises(RoundMismatchError, match="not to round 0, attempt 0"):
            joint.server.receive_upload(other.encode("bank_00", np.zeros(8)))
    assert joint.server.received(Kind.UPLOAD) == ()


def test_an_upload_under_another_key_than_the_setup_named_is_refused(joint: Any) -> None:
    for name in joint.selected:
        joint.server.receive_setup(encode_setup(joint.context, joint.parties.clients[name], bytes(16)))
    joint.server.start_uploads()
    with pytest.raises(RoundMismatchError, match="another key"):
        joint.server.receive_upload(joint.encode("bank_00", np.zeros(8)))
    assert joint.server.received(Kind.UPLOAD) == ()


def test_hostile_bytes_change_nothing(joint: Any) -> None:
    with pytest.raises(InvalidMessageError):
        joint.server.receive_setup(b"\0" * 700)
    joint.setup().upload(joint.some_updates(["bank_00", "bank_01", "bank_02"]))
    upload = bytearray(joint.encode("bank_03", np.zeros(8)))
    upload[len(upload) // 2] ^= 1
    with pytest.raises(InvalidMessageError):
        joint.server.receive_upload(bytes(upload))
    assert joint.server.received(Kind.UPLOAD) == ("bank_00", "bank_01", "bank_02")


def test_nothing_is_summed_before_every_participant_approved(joint: Any) -> None:
    joint.setup().upload()
    announced = joint.server.close()
    for name in ("bank_00", "bank_02"):
        joint.server.receive_approval(joint.approve(name, announced))
    with pytest.raises(CohortError, match=r"approvals of \['bank_01', 'bank_03'\] are missing; nothing was summed"):
        joint.server.aggregate()
    assert joint.server.phase is Phase.APPROVAL
    check_opens(joint, joint.approve_all().server.aggregate(), joint.some_updates())


def test_an_approval_of_another_digest_or_of_an_outsider_is_refused(joint: Any) -> None:
    joint.setup().upload(joint.some_updates(["bank_00", "bank_01", "bank_02"]))
    digest = decode_digest(joint.server.close(), joint.context, joint.new_key().key_id)
    with pytest.raises(CohortError, match="'bank_03' takes no part"):
        joint.server.receive_approval(encode_approval(joint.context, joint.parties.clients["bank_03"], digest))
    other = type(digest)(
        participants=digest.participants,
        coefficients=(2, 2, 2),
        upload_hashes=digest.upload_hashes,
        rule=digest.rule,
        key_id=digest.key_id,
    )
    with pytest.raises(RoundMismatchError, match="approved another digest"):
        joint.server.receive_approval(encode_approval(joint.context, joint.parties.clients["bank_00"], other))


def test_close_and_aggregate_give_the_same_bytes_when_called_again(joint: Any) -> None:
    joint.setup().upload()
    announced = joint.server.close()
    assert joint.server.close() == announced
    message = joint.approve_all().server.aggregate()
    assert joint.server.aggregate() == message
    assert joint.server.close() == announced
    assert joint.server.start_uploads() == joint.selected


def test_a_server_that_restarts_after_every_message_ends_the_round_as_if_it_had_not(joint: Any) -> None:
    class Restarting:
        """Every call goes to a server that was made for it, from the files of the one before."""

        def __getattr__(self, name: str) -> Any:
            return getattr(joint.new_server(), name)

    joint.server = Restarting()
    message = joint.run()
    assert joint.new_server().phase is Phase.DONE
    assert joint.new_server().aggregate() == message
    check_opens(joint, message, joint.some_updates())


def test_a_restarted_server_announces_the_same_digest(joint: Any) -> None:
    announced = joint.setup().upload().server.close()
    assert joint.new_server().close() == announced


def test_a_crash_while_a_message_is_stored_loses_that_message_only(joint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    joint.setup()
    updates = joint.some_updates()
    upload = joint.encode("bank_00", updates["bank_00"])

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", crash)
        with pytest.raises(KeyboardInterrupt):
            joint.server.receive_upload(upload)
    joint.server = joint.new_server()
    assert joint.server.received(Kind.UPLOAD) == ()
    joint.upload(updates)
    check_opens(joint, joint.approve_all().server.aggregate(), updates)


def test_what_the_server_stores_are_the_signed_messages_for_its_owner_only(joint: Any) -> None:
    joint.run()
    files = [path for path in (joint.parties.directory / "spool").rglob("*") if path.is_file()]
    stored = {path.read_bytes() for path in files}
    assert set(joint.uploads.values()) < stored
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert len(files) == 3 * 4 + 3


def test_a_stored_upload_that_is_not_the_announced_one_is_not_summed(joint: Any) -> None:
    joint.setup().upload().approve_all()
    (path,) = (joint.parties.directory / "spool").rglob("upload-bank_02")
    path.write_bytes(joint.encode("bank_02", np.zeros(8)))
    with pytest.raises(DamagedFileError, match="spool of round 0 is damaged.*nothing was summed"):
        joint.server.aggregate()
    assert joint.server.phase is Phase.APPROVAL


@pytest.mark.parametrize("damage", ["lost", "cut", "flipped", "emptied"])
@pytest.mark.parametrize("name", ["key", "setup-bank_01", "upload-bank_01", "digest", "approval-bank_01", "aggregate"])
def test_what_the_server_kept_and_finds_damaged_is_never_used(joint: Any, name: str, damage: str) -> None:
    steps = (joint.setup, joint.upload, joint.approve_all, joint.server.aggregate)
    written = {"setup-bank_01": 0, "key": 1, "upload-bank_01": 2, "digest": 3, "approval-bank_01": 3, "aggregate": 4}[name]
    if name == "setup-bank_01":
        for party in joint.selected:
            joint.server.receive_setup(joint.setup_message(party))
    for step in steps[:written]:
        step()
    (path,) = (joint.parties.directory / "spool").rglob(name)
    data = path.read_bytes()
    changed = {"cut": data[:-1], "flipped": bytes([data[0] ^ 1]) + data[1:], "emptied": b""}
    path.unlink()
    if damage != "lost":
        path.write_bytes(changed[damage])

    def go_on() -> None:
        joint.server.start_uploads()
        for party, values in joint.some_updates().items():
            joint.server.receive_upload(joint.uploads.get(party) or joint.encode(party, values))
        joint.server.close()
        joint.server.aggregate()

    if damage == "lost" and name == "aggregate":  # made again from what is there, to the same bytes
        go_on()
        assert path.read_bytes() == data
        return
    with pytest.raises((DamagedFileError, CohortError, RoundMismatchError)) as refused:
        go_on()
    # What is lost is as if it had never come; an upload is compared with the one that is sent again, and a key of the right length with
    # that of the uploads.
    compared = damage == "lost" or (name, damage) == ("key", "flipped") or name == "upload-bank_01"
    assert compared or isinstance(refused.value, DamagedFileError)


def test_the_aggregate_carries_the_digest_and_all_approvals(joint: Any) -> None:
    message = decode_aggregate(joint.run(), joint.context, joint.new_key().key_id)
    assert message.approved_by == message.digest.participants == joint.selected
    assert message.digest.upload_hashes == tuple(hash_message(joint.uploads[name]) for name in joint.selected)


@pytest.mark.parametrize("seeded", [True, False], ids=["seeds", "whole"])
def test_memory_does_not_grow_with_the_number_of_clients(meet: Callable[..., Any], seeded: bool) -> None:
    layout = Layout(names=("w",), shapes=((40_000,),))
    peaks: dict[int, int] = {}
    params = replace(CkksParams.standard(), seeded_sums=seeded)
    parties = meet(count=12, layout=layout, params=params, policy=OpeningPolicy(min_clients=2))
    for number, count in enumerate((2, 12)):
        joint = parties.round(number, selected=tuple(parties.clients)[:count]).setup().upload().approve_all()
        tracemalloc.start()
        joint.server.aggregate()
        peaks[count] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    upload = len(joint.uploads["bank_00"])
    # Ten more clients are ten more approvals and names, far below one upload; ten uploads at once would be ten times that.
    assert peaks[12] - peaks[2] < upload / 4
    assert peaks[2] > upload  # the measurement sees what the sum itself takes


def test_the_aggregate_shows_the_end_of_every_upload(joint: Any) -> None:
    message = decode_aggregate(joint.run(), joint.context, joint.key_id)
    assert message.uploads == tuple(abridge(joint.uploads[name]) for name in joint.selected)


def test_a_sum_travels_as_seeds_or_whole_as_the_parameters_say(meet: Callable[..., Any]) -> None:
    seeded = meet(params=CkksParams.standard()).round()
    whole = meet(params=replace(CkksParams.standard(), seeded_sums=False)).round(1)
    sizes = []
    for joint in (seeded, whole):
        message = joint.run()
        sizes.append(len(message))
        assert isinstance(decode_aggregate(message, joint.context, joint.key_id).total, SeededSum) is (joint is seeded)
        check_opens(joint, message, joint.some_updates())
    assert sizes[1] - sizes[0] == 4096 * 7 - 4 * 64


def test_an_abort_is_stored_once_there_is_an_aggregate(joint: Any) -> None:
    word = encode_abort(joint.context, joint.parties.clients["bank_01"], joint.key_id)
    with pytest.raises(CohortError, match="still in its setup"):
        joint.server.receive_abort(word)
    joint.setup().upload().approve_all()
    with pytest.raises(CohortError, match="came in the phase APPROVAL"):
        joint.server.receive_abort(word)
    joint.server.aggregate()
    assert joint.server.receive_abort(word) == "bank_01"
    assert joint.new_server().received(Kind.ABORT) == ("bank_01",)


def test_the_server_and_all_that_it_imports_know_no_secret_key() -> None:
    script = (
        "import sys; import privfed.server; "
        "ends = ('.secret', '_seal_secret', 'he.tags', 'privfed.protect', 'privfed.keyholder'); "
        "print([name for name in sys.modules if name.endswith(ends)])"
    )
    root = Path(__file__).parents[1]
    shown = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
