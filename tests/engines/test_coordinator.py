"""Whole runs of parties with folders of their own, beside the same run in `engines.local`; and parties that fall silent or come back."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from privfed.aggregation.robust import NormBound
from privfed.dp.ledger import Ledger
from privfed.engines.coordinator import coordinate
from privfed.engines.envelope import Answer, open_answer, open_request, seal_answer
from privfed.engines.exchange import TimeOuts
from privfed.errors import AgreementMismatchError, CohortError, DamagedFileError, FolderInUseError, OpeningRefusedError
from privfed.files import FolderLock
from privfed.he.codec import pack_words
from privfed.he.escrow import WholeVector, seal_vector
from privfed.he.escrow_secret import EscrowKey
from privfed.he.params import CkksParams
from privfed.he.product_params import ProductParams
from privfed.he.secret import SharedKey
from privfed.he.threshold_key import ThresholdKey
from privfed.identity import Identity
from privfed.message import Kind, seal, unseal
from privfed.phases import Step
from privfed.protect import Protected, protect
from privfed.round_record import RoundRecord, Stage
from tests.engines.deployed import ROUNDS, SERVER, Deployed, deploy, simulated
from tests.engines.exchanges import LocalExchange, changing, dropping

MODES: dict[str, Callable[[], dict[str, Any]]] = {
    "SharedKey": lambda: {"keys": SharedKey.generate()},
    "KeyChain": lambda: {"chain": True},
    "ThresholdKey": lambda: {"keys": ThresholdKey(clients=4, corrupted=1, dropouts=0), "count": 4},
    "EscrowKey": lambda: {"keys": EscrowKey.generate(), "params": CkksParams.escrow()},
}


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> dict[str, Any]:
    return MODES[request.param]()


def run(deployed: Deployed, exchange: LocalExchange, *, rounds: int = ROUNDS, **options: Any) -> tuple[RoundRecord, ...]:
    return coordinate(deployed.folder(SERVER), exchange, rounds=rounds, **options).rounds


def lines(deployed: Deployed, name: str, file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (deployed.folder(name) / file).read_text().splitlines()]


def events(deployed: Deployed, name: str) -> list[dict[str, Any]]:
    return lines(deployed, name, "events.jsonl")


def charges(deployed: Deployed) -> dict[str, int]:
    """Reservations in each bank's ledger."""
    counted = {}
    for name in deployed.names:
        copy = deployed.root.parent / f"{deployed.root.name}-{name}-copy"
        shutil.copytree(deployed.folder(name), copy)
        with Ledger.read(copy / "records.ledger") as ledger:
            counted[name] = sum(row.kind == "reserve" for row in ledger.rows())
        shutil.rmtree(copy)
    return counted


def models(deployed: Deployed) -> set[bytes]:
    return {deployed.state(name).values.values.tobytes() for name in deployed.names}


def test_a_run_of_parties_with_folders_of_their_own_ends_with_the_integers_of_the_local_engine(tmp_path: Path, mode: Any) -> None:
    deployed = deploy(tmp_path / "parties", **mode)
    with LocalExchange(deployed) as exchange:
        records = run(deployed, exchange)
    history = simulated(deployed, tmp_path / "local")
    assert [record.coefficients for record in records] == [summary.record.coefficients for summary in history.rounds]
    (values,) = models(deployed)
    assert np.array_equal(np.frombuffer(values), history.model.values)
    assert history.grid_error_max == 0


@pytest.mark.parametrize("step", [Step.STATUS, Step.SETUP, Step.UPLOAD, Step.OPEN])
def test_a_round_goes_on_without_who_is_silent_and_that_client_catches_up(tmp_path: Path, step: Step) -> None:
    deployed = deploy(tmp_path, count=4)
    with LocalExchange(deployed, fault=dropping(("bank_3", step, 1))) as exchange:
        first, second, third = run(deployed, exchange)
        asked = exchange.asked
    assert second.silent == {"bank_3": step.stage}
    assert second.participants == ("bank_0", "bank_1", "bank_2", *(("bank_3",) if step is Step.OPEN else ()))
    assert first.participants == third.participants == deployed.names
    assert len(models(deployed)) == 1
    assert deployed.state("bank_3").rounds == (0, 1, 2)
    # What it missed came before it was asked to take part in the next round.
    caught_up = max(place for place, entry in enumerate(asked) if entry == ("bank_3", Step.OPEN, 1))
    assert asked.index(("bank_3", Step.STATUS, 2)) < caught_up < asked.index(("bank_3", Step.SETUP, 2))


def test_a_client_that_missed_two_rounds_opens_them_in_their_order(tmp_path: Path) -> None:
    deployed = deploy(tmp_path, count=4)
    with LocalExchange(deployed, names=("bank_0", "bank_1", "bank_2")) as exchange:
        run(deployed, exchange, rounds=2)
        exchange.start("bank_3")
        records = run(deployed, exchange, rounds=3)
        opened = [number for name, step, number in exchange.asked if (name, step) == ("bank_3", Step.OPEN)]
    assert opened == [0, 1, 2]
    assert records[2].participants == deployed.names
    assert len(models(deployed)) == 1


def test_a_client_whose_missed_round_the_server_has_lost_is_left_out_with_the_reason(tmp_path: Path) -> None:
    deployed = deploy(tmp_path, count=4)
    with LocalExchange(deployed, names=("bank_0", "bank_1", "bank_2")) as exchange:
        run(deployed, exchange, rounds=1)
        (lost,) = (deployed.folder(SERVER) / "spool").iterdir()
        shutil.rmtree(lost)
        exchange.start("bank_3")
        _, record = run(deployed, exchange, rounds=2)
    assert record.selected == record.participants == ("bank_0", "bank_1", "bank_2")
    assert any("missed round 0, which this server has lost" in event.get("reason", "") for event in events(deployed, SERVER))


def test_too_few_replies_fail_the_round_with_nothing_opened_and_the_next_one_is_held(tmp_path: Path) -> None:
    deployed = deploy(tmp_path)
    with LocalExchange(deployed, fault=dropping(("bank_1", Step.APPROVE, 0), ("bank_2", Step.SETUP, 1))) as exchange:
        result = coordinate(deployed.folder(SERVER), exchange, rounds=3)
        assert not any(step is Step.OPEN and number < 2 for _, step, number in exchange.asked)
    assert [failed.round for failed in result.failed] == [0, 1]
    assert [failed.silent for failed in result.failed] == [{"bank_1": Stage.APPROVAL}, {"bank_2": Stage.SETUP}]
    assert "nothing was summed" in result.failed[0].reason
    assert [record.round for record in result.rounds] == [2]
    assert {deployed.state(name).rounds for name in deployed.names} == {(2,)}


def test_a_run_without_a_round_that_could_be_held_is_an_error_and_every_round_is_recorded(tmp_path: Path) -> None:
    deployed = deploy(tmp_path)
    with (
        LocalExchange(deployed, names=("bank_0", "bank_1")) as exchange,
        pytest.raises(CohortError, match="none of 2 rounds could be held"),
    ):
        run(deployed, exchange, rounds=2)
    assert [entry["failed"]["round"] for entry in lines(deployed, SERVER, "rounds.jsonl") if "failed" in entry] == [0, 1]


def test_a_client_with_another_key_is_left_out_and_the_round_is_held_in_another_attempt(tmp_path: Path) -> None:
    deployed = deploy(tmp_path, count=4)
    key = deployed.folder("bank_3") / "shared.key"
    key.unlink()
    SharedKey.generate().save(key)
    with LocalExchange(deployed) as exchange:
        (record,) = run(deployed, exchange, rounds=1)
    assert (record.attempt, record.participants, record.silent) == (1, ("bank_0", "bank_1", "bank_2"), {"bank_3": Stage.SETUP})


def test_a_client_whose_budget_does_not_cover_the_round_is_told_apart_from_a_silent_one(tmp_path: Path) -> None:
    deployed = deploy(tmp_path, count=5, epsilons={4: 0.1})
    with LocalExchange(deployed, fault=dropping(("bank_0", Step.UPLOAD, 0))) as exchange:
        (record,) = run(deployed, exchange, rounds=1)
    assert record.refused == ("bank_4",)
    assert record.silent == {"bank_0": Stage.UPLOAD}
    assert record.participants == ("bank_1", "bank_2", "bank_3")


@pytest.mark.parametrize("place", [5, 60, -80, -1])
def test_a_tampered_answer_counts_as_none(tmp_path: Path, place: int) -> None:
    def flip(reply: bytes) -> bytes:
        damaged = bytearray(reply)
        damaged[place] ^= 1
        return bytes(damaged)

    deployed = deploy(tmp_path, count=4)
    with LocalExchange(deployed, fault=changing("bank_3", Step.UPLOAD, 0, flip)) as exchange:
        (record,) = run(deployed, exchange, rounds=1)
    assert record.silent == {"bank_3": Stage.UPLOAD}
    assert record.participants == ("bank_0", "bank_1", "bank_2")
    assert any(event["event"] == "dropped" and event["of"] == "bank_3" for event in events(deployed, SERVER))


def test_an_answer_that_comes_a_round_late_is_refused_and_nothing_of_it_is_counted(tmp_path: Path) -> None:
    late: list[bytes] = []

    def fault(name: str, step: Step, number: int, _: bytes, honest: Callable[[], bytes]) -> bytes | None:
        if (name, step) != ("bank_3", Step.UPLOAD):
            return honest()
        late.append(honest())
        return None if number == 0 else late[0]

    deployed = deploy(tmp_path, count=4)
    with LocalExchange(deployed, fault=fault) as exchange:
        records = run(deployed, exchange, rounds=2)
    assert len(late) == 2
    assert all(record.participants == ("bank_0", "bank_1", "bank_2") for record in records)
    assert all(record.silent == {"bank_3": Stage.UPLOAD} for record in records)


def test_requests_that_arrive_twice_change_nothing(tmp_path: Path) -> None:
    def twice(name: str, step: Step, number: int, _: bytes, honest: Callable[[], bytes]) -> bytes | None:
        first = honest()
        assert honest() == first or step is Step.STATUS
        return first

    deployed = deploy(tmp_path / "parties")
    with LocalExchange(deployed, fault=twice) as exchange:
        run(deployed, exchange)
    history = simulated(deployed, tmp_path / "local")
    (values,) = models(deployed)
    assert np.array_equal(np.frombuffer(values), history.model.values)
    assert charges(deployed) == dict.fromkeys(deployed.names, ROUNDS)


def test_an_answer_signed_by_a_stranger_counts_as_none(tmp_path: Path) -> None:
    deployed = deploy(tmp_path, count=4)
    stranger = Identity.generate("bank_3")

    def forge(reply: bytes) -> bytes:
        return reply[:-64] + stranger.sign(reply[:-64])

    with LocalExchange(deployed, fault=changing("bank_3", Step.STATUS, 0, forge)) as exchange:
        (record,) = run(deployed, exchange, rounds=1)
    assert record.silent == {"bank_3": Stage.SETUP}


def test_a_digest_that_a_client_does_not_approve_stops_the_run_before_another_round_is_charged(tmp_path: Path) -> None:
    deployed = deploy(tmp_path)
    with LocalExchange(deployed) as exchange:
        run(deployed, exchange, rounds=1)
        exchange.stop("bank_1")
        for path in deployed.folder("bank_1").glob("records.ledger*"):
            path.unlink()
        # The bank itself would notice; here it hides from itself that anything was ever charged.
        for path in (deployed.folder("bank_1") / "state" / "outbox").iterdir():
            path.unlink()
        exchange.start("bank_1")
        with pytest.raises(OpeningRefusedError, match="not approved or opened by bank_0, bank_2"):
            run(deployed, exchange)
    assert charges(deployed) == {"bank_0": 2, "bank_1": 1, "bank_2": 2}
    reasons = [event["reason"] for event in events(deployed, "bank_0") if event["event"] == "refused"]
    assert any("ledger" in reason for reason in reasons)


def test_a_bank_whose_approval_never_comes_makes_fewer_and_fewer_rounds_of_the_others_fail(tmp_path: Path) -> None:
    """Each of these rounds was paid for by all others, in vain."""
    deployed = deploy(tmp_path, count=4)

    def fault(name: str, step: Step, _: int, __: bytes, honest: Callable[[], bytes]) -> bytes | None:
        return None if (name, step) == ("bank_3", Step.APPROVE) else honest()

    with LocalExchange(deployed, fault=fault) as exchange:
        run(deployed, exchange, rounds=3)  # a restart forgets nothing of it
        held = run(deployed, exchange, rounds=9)
        assert [record.round for record in held] == [1, 3, 4, 5, 7, 8]
        assert all(record.participants == ("bank_0", "bank_1", "bank_2") for record in held)
        assert charges(deployed) == {"bank_0": 9, "bank_1": 9, "bank_2": 9, "bank_3": 3}
        reasons = [event["reason"] for event in events(deployed, SERVER) if event["event"] == "left out" and event["of"] == "bank_3"]
        assert reasons == ["an earlier round failed for want of its approval"] * 6
    assert len(models(deployed)) == 1


def test_a_bank_whose_approval_did_not_come_takes_part_where_the_others_are_too_few(tmp_path: Path) -> None:
    deployed = deploy(tmp_path, private=False)
    with LocalExchange(deployed, fault=dropping(("bank_1", Step.APPROVE, 0))) as exchange:
        (record,) = run(deployed, exchange, rounds=2)
    assert record.participants == deployed.names


def test_who_says_that_it_does_not_approve_is_not_left_out_of_the_next_round(tmp_path: Path) -> None:
    """Else a client could have another one left out, by stating what that one alone refuses."""
    deployed = deploy(tmp_path, private=False, count=4)

    def fault(name: str, step: Step, number: int, data: bytes, honest: Callable[[], bytes]) -> bytes | None:
        if (name, step, number) != ("bank_3", Step.APPROVE, 0):
            return honest()
        return seal_answer(
            Answer(name=name, refusal="PrivFedError"), data, Identity.load(deployed.folder(name) / "identity.pem", name=name)
        )

    with LocalExchange(deployed, fault=fault) as exchange:
        with pytest.raises(OpeningRefusedError, match="not approved or opened by bank_3"):
            run(deployed, exchange, rounds=2)
        (record,) = run(deployed, exchange, rounds=2)
    assert record.participants == deployed.names


def test_an_aggregate_that_everybody_refuses_is_offered_once_more_and_then_the_next_round_is_held(tmp_path: Path) -> None:
    """One bank can make it so that nobody opens; it must not be in the way of all rounds to come."""
    deployed = deploy(tmp_path, keys=ThresholdKey(clients=4, corrupted=1, dropouts=0), count=4)
    bank = Identity.load(deployed.folder("bank_3") / "identity.pem", name="bank_3")

    def fault(name: str, step: Step, number: int, data: bytes, honest: Callable[[], bytes]) -> bytes | None:
        reply = honest()
        if (name, step, number) != ("bank_3", Step.UPLOAD, 0):
            return reply
        answer, context = (
            open_answer(reply, data, bank.public, agreement=deployed.agreement),
            open_request(data, deployed.agreement).context,
        )
        frame = unseal(answer.payload, context, Kind.UPLOAD, max_payload=len(answer.payload))
        # An upload that is no encryption under this round's key, signed all the same.
        payload = bytes(frame.payload)
        payload = payload[:-4096] + bytes(4096)
        false = seal(context, bank, Kind.UPLOAD, key_id=frame.key_id, payload=payload)
        stored = exchange.nodes[name]._party._session._outbox  # type: ignore[union-attr]
        for file in stored.names(f"{deployed.agreement.session.hex()}-0-0"):
            if not file:
                stored.path(f"{deployed.agreement.session.hex()}-0-0").write_bytes(false)
        return seal_answer(replace(answer, payload=false), data, bank)

    with LocalExchange(deployed, fault=fault) as exchange:
        for _ in range(2):
            with pytest.raises(OpeningRefusedError, match="refused the aggregate of round 0"):
                run(deployed, exchange, rounds=2)
        assert charges(deployed) == dict.fromkeys(deployed.names, 1)
        (record,) = run(deployed, exchange, rounds=2)
    assert (record.round, record.participants) == (1, deployed.names)
    assert len(models(deployed)) == 1


@pytest.mark.parametrize("lacking", [5, "bank_0", {"bank_0": 1}, [["bank_0"]], [5]])
def test_nonsense_about_what_the_key_holder_lacks_fails_the_round_and_nothing_else(tmp_path: Path, lacking: Any) -> None:
    deployed = deploy(tmp_path, **MODES["EscrowKey"](), private=False)
    holder = Identity.load(deployed.folder("key_holder") / "identity.pem", name="key_holder")

    def fault(_: str, step: Step, number: int, data: bytes, honest: Callable[[], bytes]) -> bytes | None:
        if (step, number) != (Step.HOLD, 0):
            return honest()
        return seal_answer(Answer(name=holder.name, facts={"lacking": lacking}), data, holder)

    with LocalExchange(deployed, fault=fault) as exchange:
        (record,) = run(deployed, exchange, rounds=2)
    assert record.round == 1


@pytest.mark.parametrize("keys", ["SharedKey", "EscrowKey"])
def test_scored_rounds_weigh_as_the_local_engine_does(tmp_path: Path, keys: str) -> None:
    shared = keys == "SharedKey"
    params = ProductParams.exact(bound=2.0) if shared else ProductParams.escrow(bound=2.0)
    rule_file = """
    from privfed.aggregation.robust import NormBound

    def rule():
        return NormBound(max_norm=0.3)
    """
    deployed = deploy(
        tmp_path / "parties",
        keys=SharedKey.generate() if shared else EscrowKey.generate(),
        params=params,
        private=False,
        rule=NormBound(max_norm=0.3),
        rule_file=rule_file,
    )
    with LocalExchange(deployed, fault=dropping(("bank_2", Step.OPEN, 0))) as exchange:
        # Who missed the opening weighs, if that is its part, and opens before the next round.
        records = run(deployed, exchange, rounds=2)
    history = simulated(deployed, tmp_path / "local", rounds=2, rule=NormBound(max_norm=0.3))
    for record, summary in zip(records, history.rounds, strict=True):
        assert record.coefficients == summary.record.coefficients
        assert (record.disclosed, record.assurance, record.fallback) == (6, summary.record.assurance, "NONE")
    (values,) = models(deployed)
    np.testing.assert_allclose(np.frombuffer(values), history.model.values, rtol=0, atol=1e-6)


def test_scaffold_keeps_its_variates_as_in_the_local_engine(tmp_path: Path) -> None:
    site = """
    def correction():
        return Scaffold(clients=3)
    """
    deployed = deploy(tmp_path / "parties", weights=dict.fromkeys(("bank_0", "bank_1", "bank_2"), 1.0), site=site)
    with LocalExchange(deployed) as exchange:
        run(deployed, exchange, rounds=1)
        exchange.restart("bank_1")
        run(deployed, exchange)
    history = simulated(deployed, tmp_path / "local")
    (values,) = models(deployed)
    assert np.array_equal(np.frombuffer(values), history.model.values)


def test_nobody_trains_while_the_key_holder_is_away(tmp_path: Path) -> None:
    deployed = deploy(tmp_path, **MODES["EscrowKey"]())
    with LocalExchange(deployed, names=("bank_0", "bank_1", "bank_2")) as exchange:
        with pytest.raises(CohortError, match="key holder does not answer"):
            run(deployed, exchange, rounds=1)
        assert {step for _, step, _ in exchange.asked} == {Step.STATUS}
        assert charges(deployed) == dict.fromkeys(deployed.names, 0)
        exchange.start("key_holder")
        assert [record.round for record in run(deployed, exchange, rounds=2)] == [1]


@pytest.mark.parametrize("broken_at", ["ciphertext", "seal"])
def test_an_upload_that_the_key_holder_cannot_open_stops_the_run_before_another_round_is_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken_at: str
) -> None:
    """Whose it was the sum does not say: a client whose upload is no encryption would have every round of the others charged in vain."""

    def broken(update: Any, context: Any, **keys: Any) -> Protected:
        protected = protect(update, context, **keys)
        if (update.sender, update.round) != ("bank_1", 0):
            return protected
        vector: Any = protected.update.vector
        if broken_at == "seal":
            sealed = replace(vector, chunks=tuple(bytes(len(chunk)) for chunk in vector.chunks))
        else:
            words = np.random.default_rng(0).integers(1, vector.params.modulus, 2 * vector.params.poly_modulus_degree).astype(np.uint64)
            chunks = (pack_words(words, vector.params),) * len(vector.chunks)
            whole = WholeVector(layout=vector.layout, params=vector.params, key_id=vector.key_id, chunks=chunks)
            sealed = seal_vector(whole, keys["round_key"], sender=update.sender)
        return replace(protected, update=replace(protected.update, vector=sealed))

    monkeypatch.setattr("privfed.escrow_session.protect", broken)
    deployed = deploy(tmp_path, **MODES["EscrowKey"]())
    with LocalExchange(deployed) as exchange:
        with pytest.raises(OpeningRefusedError, match="round 0 was not approved or opened by key_holder; nothing was opened"):
            run(deployed, exchange)
        assert charges(deployed) == dict.fromkeys(deployed.names, 1)
        (reason,) = (event["kind"] for event in events(deployed, "key_holder") if event["event"] == "refused")
        assert reason == "DecryptionError"
        lent = deployed.folder("key_holder") / "state" / "uploads"
        assert len(list(lent.iterdir())) == 3
        unfinished = lent / ".unfinished"  # as a crash leaves it
        unfinished.touch()
        assert [record.round for record in run(deployed, exchange, rounds=2)] == [1]
        assert list(lent.iterdir()) == [unfinished]


def test_a_server_folder_of_another_server_is_refused(tmp_path: Path) -> None:
    deployed = deploy(tmp_path)
    identity = deployed.folder(SERVER) / "identity.pem"
    identity.unlink()
    Identity.generate(SERVER).save(identity)
    with LocalExchange(deployed, names=()) as exchange, pytest.raises(AgreementMismatchError, match="of nobody whom the agreement pins"):
        run(deployed, exchange)


def test_two_coordinators_do_not_work_in_one_folder(tmp_path: Path) -> None:
    deployed = deploy(tmp_path)
    lock = FolderLock(deployed.folder(SERVER))
    with LocalExchange(deployed, names=()) as exchange, pytest.raises(FolderInUseError):
        run(deployed, exchange)
    lock.release()


def test_a_record_of_rounds_that_is_gone_or_damaged_is_refused(tmp_path: Path) -> None:
    deployed = deploy(tmp_path)
    path = deployed.folder(SERVER) / "rounds.jsonl"
    with LocalExchange(deployed) as exchange:
        run(deployed, exchange, rounds=1)
        written = path.read_bytes()
        for damaged in (None, b"{}\n", b"[]\n", b"no JSON\n", written + written, written.replace(b'"round": 0', b'"round": 4')):
            path.unlink(missing_ok=True)
            if damaged is not None:
                path.write_bytes(damaged)
            with pytest.raises(DamagedFileError):
                run(deployed, exchange, rounds=2)
        path.write_bytes(written)
        assert len(run(deployed, exchange, rounds=2)) == 2


@pytest.mark.parametrize("seconds", [0, -1.0, float("inf"), float("nan"), True, "60"])
def test_a_time_out_is_a_number_of_seconds(seconds: Any) -> None:
    with pytest.raises(ValueError, match="expected training to be a number of seconds above 0"):
        TimeOuts(training=seconds)


def test_every_step_has_its_time_out() -> None:
    given = TimeOuts(status=1, setup=2, training=3, approval=4, weighing=5, holder=6, opening=7)
    assert [given.of(step) for step in Step] == [1, 2, 3, 3, 4, 5, 7, 6, 6, 2, 7]


def test_rounds_are_at_least_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected at least 1 round, got 0"):
        coordinate(tmp_path, LocalExchange.__new__(LocalExchange), rounds=0)
