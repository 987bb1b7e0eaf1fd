from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from privfed.aggregation.rules import FedAvg
from privfed.agreement import Agreement, RoundContext
from privfed.client import Client, Trainer
from privfed.dp.countersign import countersigned, hashes_of, read_statement, state_head
from privfed.dp.ledger import Ledger
from privfed.dp.mechanism import Budget
from privfed.dp.silo import SiloNoise
from privfed.errors import (
    AgreementMismatchError,
    BudgetExceededError,
    DamagedFileError,
    FolderInUseError,
    HistoryMismatchError,
    InvalidMessageError,
    LayoutMismatchError,
    LedgerError,
    OpeningRefusedError,
    TamperedAggregateError,
)
from privfed.he.params import CkksParams
from privfed.he.secret import SharedKey
from privfed.identity import Identity, Roster
from privfed.keys.chain import KeyChain
from privfed.keys.roster import PinnedRoster
from privfed.policy import OpeningPolicy
from privfed.protect import protect, round_key
from privfed.round import Participant
from privfed.session import ClientSession
from privfed.training.loss import binary_cross_entropy
from privfed.training.model import mlp, values_of
from privfed.update import Aggregate, Layout, PlainVector, Update
from privfed.wire import encode_upload, upload_statement
from privfed.wire_approved import SignedHeads
from tests.engines.conftest import MECHANISM, table
from tests.keys.conftest import new_party


class Bank:
    """One bank with its files, that can be opened again as after a crash."""

    def __init__(self, directory: Path, *, epsilon: float = 20.0) -> None:
        torch.manual_seed(1)
        self.model = mlp(inputs=4, hidden=(4,))
        self.start = values_of(self.model)
        self.directory = directory
        self.identities = [Identity.generate(name) for name in ("bank_a", "bank_b", "bank_c")]
        self.agreement = Agreement(
            session=b"session of banks",
            roster=Roster(server=Identity.generate("server").public, clients=tuple(identity.public for identity in self.identities)),
            params=CkksParams.standard(),
            layout=self.start.layout,
            start=self.start.digest,
            weights={identity.name: 1.0 for identity in self.identities},
            rule=FedAvg(),
            policy=OpeningPolicy(),
            populations={"bank_a": "bank_a"},
        )
        self.keys = SharedKey.generate()
        self.epsilon = epsilon
        self.trained: list[Update[PlainVector]] = []
        self.last: ClientSession | None = None

    def ledger(self) -> Ledger:
        return Ledger.open(self.directory / "bank_a.ledger", population="bank_a", budget=Budget(epsilon=self.epsilon, delta=1e-5))

    def session(self, ledger: Ledger, **changes: Any) -> ClientSession:
        """A new session object on the bank's folder, in place of an earlier one."""
        if self.last is not None:
            self.last.close()
        parts: dict[str, Any] = {
            "trainer": self.trainer(ledger),
            "identity": self.identities[0],
            "agreement": self.agreement,
            "keys": self.keys,
            "start": self.start,
            "directory": self.directory / "bank_a",
        }
        self.last = ClientSession(**(parts | changes))
        return self.last

    def trainer(self, ledger: Ledger, **changes: Any) -> Trainer:
        terms: dict[str, Any] = {
            "client": Client("bank_a", table(60, seed=1), training=MECHANISM, ledger=ledger),
            "model": self.model,
            "start": self.start,
            "loss": binary_cross_entropy,
            "params": self.agreement.params,
            "witness": self.trained.append,
        }
        return Trainer(**(terms | changes))

    def round(self, number: int = 0) -> RoundContext:
        return RoundContext(agreement=self.agreement, round=number)


@pytest.fixture
def bank(tmp_path: Path) -> Bank:
    return Bank(tmp_path)


def test_an_upload_is_trained_encrypted_and_charged_once_however_often_it_is_asked_for(bank: Bank) -> None:
    with bank.ledger() as ledger:
        session = bank.session(ledger)
        first = session.upload(bank.round())
        assert session.upload(bank.round()) == first
        session = bank.session(ledger)
        assert session.upload(bank.round()) == first
        assert (len(bank.trained), len(ledger.events())) == (1, 1)
        assert session.upload(bank.round(1)) != first
        assert (len(bank.trained), len(ledger.events())) == (2, 2)


def test_a_crash_before_the_upload_is_stored_stays_charged_and_the_retry_reserves_anew(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    with bank.ledger() as ledger:
        session = bank.session(ledger)

        def crash(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(session._outbox, "put", crash)
            with pytest.raises(KeyboardInterrupt):
                session.upload(bank.round())
        spent = ledger.spent()
    with bank.ledger() as ledger:
        assert ledger.spent() == spent > 0
        bank.session(ledger).upload(bank.round())
        assert len(ledger.events()) == 2
        assert ledger.spent() > spent
        committed = [
            reservation.committed
            for attempt in (0, 1)
            if (reservation := ledger.reservation(session=bank.agreement.session, round=0, attempt=attempt))
        ]
        assert committed == [False, True]


def test_a_crash_after_the_upload_is_stored_costs_nothing_more(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    with bank.ledger() as ledger:
        session = bank.session(ledger)

        def crash(**_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(session._trainer, "commit", crash)
        with pytest.raises(KeyboardInterrupt):
            session.upload(bank.round())
    with bank.ledger() as ledger:
        session = bank.session(ledger)
        data = session.upload(bank.round())
        assert session.upload(bank.round()) == data
        assert (len(bank.trained), len(ledger.events())) == (1, 1)
        reservation = ledger.reservation(session=bank.agreement.session, round=0, attempt=0)
        assert reservation is not None
        assert reservation.committed


def test_a_round_over_budget_is_refused_before_training(tmp_path: Path) -> None:
    bank = Bank(tmp_path, epsilon=0.5)
    with bank.ledger() as ledger:
        session = bank.session(ledger)
        with pytest.raises(BudgetExceededError):
            session.upload(bank.round())
        assert not bank.trained
        assert not ledger.events()
        assert not (bank.directory / "bank_a" / "outbox").joinpath(f"{bank.agreement.session.hex()}-0-0").exists()


def test_an_aggregate_enters_the_model_once_and_survives_a_restart(bank: Bank) -> None:
    aggregate = step(bank)
    with bank.ledger() as ledger:
        session = bank.session(ledger)
        open_round(session, bank)
        with pytest.raises(ValueError, match="ascending"):
            session.apply(aggregate, history=b"h" * 32)
        restarted = bank.session(ledger)
    for state in (session.state, restarted.state):
        assert (state.rounds, state.history) == ((0,), b"h" * 32)
        assert np.array_equal(state.values.values, bank.start.values + 0.25)


def test_a_client_that_missed_a_round_trains_nothing_on_what_it_has(bank: Bank) -> None:
    later = RoundContext(agreement=bank.agreement, round=1, history=b"h" * 32)
    with bank.ledger() as ledger:
        session = bank.session(ledger)
        for step in (session.setup, session.upload):
            with pytest.raises(HistoryMismatchError, match="nothing was done"):
                step(later)
        assert not bank.trained
        assert not ledger.events()


def test_a_client_with_dp_sgd_and_no_ledger_is_refused() -> None:
    with pytest.raises(ValueError, match="ledger"):
        Client("bank_a", table(10, seed=0), training=MECHANISM)


def test_data_larger_than_declared_are_refused_before_anything_is_charged(bank: Bank) -> None:
    from privfed.errors import UnsupportedDataError

    with bank.ledger() as ledger:
        client = Client("bank_a", table(201, seed=1), training=MECHANISM, ledger=ledger)
        with pytest.raises(UnsupportedDataError, match="declared limit of 200"):
            Trainer(client=client, model=bank.model, start=bank.start, loss=binary_cross_entropy, params=bank.agreement.params)
        assert not ledger.events()


def test_a_client_whose_ledger_is_not_the_agreed_one_does_not_take_part(bank: Bank) -> None:
    for populations in ({}, {"bank_a": "another population"}):
        bank.agreement = replace(bank.agreement, populations=populations)
        with (
            bank.ledger() as ledger,
            pytest.raises(
                AgreementMismatchError, match="'bank_a' has another privacy ledger than the agreement names for it; nothing was done"
            ),
        ):
            bank.session(ledger)
    assert not (bank.directory / "bank_a").exists()


def test_what_is_charged_names_the_data_it_was_charged_for(bank: Bank) -> None:
    with bank.ledger() as ledger:
        bank.session(ledger).upload(bank.round())
        reservation = ledger.reservation(session=bank.agreement.session, round=0, attempt=0)
        data = table(60, seed=1)
        assert reservation is not None
        assert reservation.fingerprint == ledger.fingerprint(data.features, data.labels)
        assert reservation.fingerprint != ledger.fingerprint(data.features[1:], data.labels[1:])


@pytest.mark.parametrize("digest", [b"", b"garbage"])
def test_nothing_is_trained_or_charged_for_an_approval(bank: Bank, digest: bytes) -> None:
    with bank.ledger() as ledger:
        session = bank.session(ledger)
        with pytest.raises(OpeningRefusedError, match="has uploaded nothing in round 0; nothing was approved"):
            session.approve(bank.round(), digest)
        assert (len(bank.trained), len(ledger.events())) == (0, 0)
        session.upload(bank.round())
        with pytest.raises(InvalidMessageError):
            session.approve(bank.round(), digest)
        assert (len(bank.trained), len(ledger.events())) == (1, 1)


def test_what_is_not_as_agreed_is_refused_before_anything_is_written(bank: Bank) -> None:
    other_start = PlainVector(layout=bank.start.layout, values=bank.start.values + 1)
    other_model = mlp(inputs=4, hidden=(5,))
    silo = SiloNoise(weights={"bank_a": 1}, clip_steps=10, noise_multiplier=1.0, coordinates=bank.start.layout.size)
    with bank.ledger() as ledger:
        changes: dict[str, dict[str, Any]] = {
            "identity": {"identity": Identity.generate("bank_a")},
            "start": {"start": other_start},
            "encryption parameters": {"agreement": replace(bank.agreement, params=CkksParams.standard(bound=4.0))},
            "weight": {"agreement": replace(bank.agreement, weights={"bank_a": 2, "bank_b": 1, "bank_c": 1})},
            "silo noise": {"trainer": bank.trainer(ledger, silo=silo)},
            "layout of the model": {"trainer": bank.trainer(ledger, model=other_model, start=values_of(other_model))},
        }
        for part, change in changes.items():
            with pytest.raises(AgreementMismatchError, match=f"has another {part} than the agreement names for it; nothing was done"):
                bank.session(ledger, **change)
        both = {"identity": Identity.generate("bank_a"), "start": other_start}
        with pytest.raises(AgreementMismatchError, match="another identity and another start than"):
            bank.session(ledger, **both)
        assert not (bank.directory / "bank_a").exists()
        bank.session(ledger)


def test_one_object_at_a_time_holds_a_clients_folder(bank: Bank) -> None:
    with bank.ledger() as ledger:
        session = bank.session(ledger)
        bank.last = None
        with pytest.raises(FolderInUseError, match="the folder 'bank_a' is in use by another process, or by another object"):
            bank.session(ledger)
        session.close()
        session.close()
        bank.session(ledger)


def test_a_refused_folder_is_not_held(bank: Bank) -> None:
    with bank.ledger() as ledger:
        bank.session(ledger).upload(bank.round())
        journal = bank.directory / "bank_a" / "journal.sqlite"
        whole = journal.read_bytes()
        journal.unlink()
        with pytest.raises(DamagedFileError):
            bank.session(ledger)
        journal.write_bytes(whole)
        bank.last = None
        bank.session(ledger)


@pytest.mark.parametrize("name", ["journal.sqlite", "heads.sqlite"])
@pytest.mark.parametrize("beside", ["upload", "model"])
def test_a_client_that_forgot_its_promises_does_not_go_on(bank: Bank, name: str, beside: str) -> None:
    with bank.ledger() as ledger:
        session = bank.session(ledger)
        if beside == "upload":
            session.upload(bank.round())
        else:
            open_round(session, bank)
        (bank.directory / "bank_a" / name).unlink()
        with pytest.raises(DamagedFileError, match=f"{name} are missing beside the uploads or the model of 'bank_a'; nothing was done"):
            bank.session(ledger)
        assert not (bank.directory / "bank_a" / name).exists()


@pytest.mark.parametrize("name", ["journal.sqlite", "heads.sqlite", "model.npz"])
@pytest.mark.parametrize("damage", ["emptied", "cut", "junk"])
def test_a_damaged_file_of_a_client_is_refused_and_left_as_it_is(bank: Bank, name: str, damage: str) -> None:
    path = bank.directory / "bank_a" / name
    with bank.ledger() as ledger:
        open_round(bank.session(ledger), bank)
        data = path.read_bytes()
        damaged = {"emptied": b"", "cut": data[: len(data) // 2], "junk": b"\xff{[junk" * 500}[damage]
        path.write_bytes(damaged)
        with pytest.raises(DamagedFileError, match=f"{name} is .*nothing was done"):
            bank.session(ledger)
        assert path.read_bytes() == damaged


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied"])
def test_a_stored_upload_that_is_not_what_was_written_is_not_sent(bank: Bank, damage: str) -> None:
    with bank.ledger() as ledger:
        data = bank.session(ledger).upload(bank.round())
        (path,) = (bank.directory / "bank_a" / "outbox").iterdir()
        path.write_bytes({"cut": data[:-1], "flipped": data[:-1] + bytes([data[-1] ^ 1]), "emptied": b""}[damage])
        with pytest.raises(DamagedFileError, match="stored upload of 'bank_a' for round 0 is not what was written; nothing was sent"):
            bank.session(ledger).upload(bank.round())
        assert len(ledger.events()) == 1


def test_what_a_crash_left_unfinished_is_swept_away(bank: Bank) -> None:
    with bank.ledger() as ledger:
        bank.session(ledger).upload(bank.round())
        folder = bank.directory / "bank_a"
        for path in (folder / ".unfinished-abc", folder / "outbox" / ".unfinished-def"):
            path.write_bytes(b"half")
        bank.session(ledger)
        assert not [path for path in folder.rglob(".*") if path.name != ".lock"]


def test_a_model_that_could_not_be_stored_is_not_taken_for_stored(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space")

    with bank.ledger() as ledger:
        session = bank.session(ledger)
        monkeypatch.setattr(session._store, "save", full)
        with pytest.raises(OSError, match="no space"):
            session.apply(step(bank), history=b"h" * 32)
        assert session.state.rounds == ()
        assert np.array_equal(session.state.values.values, bank.start.values)


def test_an_opening_is_finished_after_the_model_is_stored_and_the_countersignatures_are_kept(
    bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    class Holder:
        history, heads, decision = b"h" * 32, None, None

        def __init__(self, **_: object) -> None: ...

        def open(self, data: bytes) -> Aggregate[PlainVector]:
            done.append("open")
            return step(bank)

        def finish(self) -> None:
            done.append("finish")

    with bank.ledger() as ledger:
        session = bank.session(ledger)
        monkeypatch.setattr("privfed.round.KeyHolder", Holder)
        monkeypatch.setattr(session, "apply", lambda *_, **__: done.append("apply"))
        monkeypatch.setattr(session, "keep_countersignatures", lambda *_: done.append("keep"))
        monkeypatch.setattr(session.journal, "settle", lambda *_: done.append("settle"))
        Participant(session).open(bank.round(), b"")
        assert done == ["open", "apply", "keep", "finish"]
        session._state = replace(session.state, rounds=(0,))
        Participant(session).open(bank.round(), b"")  # stored, and the crash came before the opening was finished
        assert done[4:] == ["settle"]


def open_round(session: ClientSession, bank: Bank, *, finish: bool = True) -> None:
    session.journal.begin(bank.round(), b"h" * 32, aggregate=b"a" * 32)
    session.apply(step(bank), history=b"h" * 32)
    if finish:
        session.journal.finish(bank.round(), aggregate=b"a" * 32)


def step(bank: Bank) -> Aggregate[PlainVector]:
    """An opened aggregate of round 0 that adds 1/4 to every weight."""
    vector = PlainVector(layout=bank.start.layout, values=np.full(bank.start.layout.size, 0.25))
    return Aggregate(round=0, vector=vector, coefficients={"bank_a": 1, "bank_b": 1, "bank_c": 1})


@pytest.mark.parametrize("finish", [False, True], ids=["crashed before it was finished", "finished"])
@pytest.mark.parametrize("older", ["journal.sqlite", "model.npz"])
def test_a_journal_and_a_model_of_different_times_are_refused(bank: Bank, older: str, finish: bool) -> None:
    path = bank.directory / "bank_a" / older
    with bank.ledger() as ledger:
        session = bank.session(ledger)
        session.upload(bank.round())
        before = path.read_bytes() if path.exists() else None
        open_round(session, bank, finish=finish)
        newest = path.read_bytes()
        path.unlink()
        if before is not None:
            path.write_bytes(before)
            path.chmod(0o600)
        if older == "model.npz" and not finish:
            # As after a crash between the opening and the storing of the model: it is opened again.
            assert bank.session(ledger).state.rounds == ()
        else:
            with pytest.raises(DamagedFileError, match="do not hold the same rounds"):
                bank.session(ledger)
        path.write_bytes(newest)
        assert bank.session(ledger).state.rounds == (0,)


def test_an_upload_that_was_stored_and_is_gone_is_not_trained_or_charged_again(bank: Bank) -> None:
    with bank.ledger() as ledger:
        session = bank.session(ledger)
        session.upload(bank.round())
        (path,) = (bank.directory / "bank_a" / "outbox").iterdir()
        path.unlink()
        for again in (session, bank.session(ledger)):
            bank.last = again
            with pytest.raises((DamagedFileError, FolderInUseError)):
                again.upload(bank.round())
        assert (len(bank.trained), len(ledger.events())) == (1, 1)


def test_a_disk_that_was_full_costs_one_charge_and_the_next_try_sends(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space")

    with bank.ledger() as ledger:
        session = bank.session(ledger)
        with monkeypatch.context() as patch:
            patch.setattr(session._outbox, "put", full)
            with pytest.raises(OSError, match="no space"):
                session.upload(bank.round())
        assert session.upload(bank.round())
        assert (len(bank.trained), len(ledger.events())) == (2, 2)


def test_the_stored_upload_of_another_client_is_not_sent(bank: Bank) -> None:
    with bank.ledger() as ledger:
        session = bank.session(ledger)
        session.upload(bank.round())
        (path,) = (bank.directory / "bank_a" / "outbox").iterdir()
        layout = bank.agreement.layout
        update = Update(sender="bank_b", round=0, vector=PlainVector(layout=layout, values=np.zeros(layout.size)))
        protected = protect(update, bank.round(), round_key=round_key(bank.keys, bank.round()))
        path.write_bytes(encode_upload(bank.round(), bank.identities[1], protected.update))
        with pytest.raises(DamagedFileError, match="is not what was written; nothing was sent"):
            session.upload(bank.round())


def test_a_ledger_whose_head_does_not_fit_into_a_message_is_refused_before_anything_is_charged(
    bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("privfed.session_heads.MAX_STATEMENT_BYTES", 4096)
    with bank.ledger() as ledger:
        with pytest.raises(LedgerError, match="than one message shows; nothing was charged"):
            bank.session(ledger).upload(bank.round())
        assert not bank.trained
        assert not ledger.events()


def test_a_round_that_is_not_later_than_all_in_the_model_is_refused(bank: Bank) -> None:
    with bank.ledger() as ledger:
        session = bank.session(ledger)
        open_round(session, bank)
        for number in (0,):
            context = RoundContext(agreement=bank.agreement, round=number, history=b"h" * 32)
            for ask in (session.setup, session.upload, lambda context: session.approve(context, b"")):
                with pytest.raises(HistoryMismatchError):
                    ask(context)
        assert not ledger.events()


def test_a_client_that_opened_another_round_approves_nothing(bank: Bank) -> None:
    with bank.ledger() as ledger:
        session = bank.session(ledger)
        session.upload(bank.round(1))
        open_round(session, bank)
        with pytest.raises(HistoryMismatchError):
            session.approve(bank.round(1), b"")


def test_an_aggregate_of_another_layout_does_not_enter_the_model(bank: Bank) -> None:
    layout = Layout(names=("one",), shapes=((1,),))
    aggregate = Aggregate(round=0, vector=PlainVector(layout=layout, values=[1.0]), coefficients={"bank_a": 1, "bank_b": 1, "bank_c": 1})
    with bank.ledger() as ledger:
        session = bank.session(ledger)
        with pytest.raises(LayoutMismatchError):
            session.apply(aggregate, history=b"h" * 32)
        assert np.array_equal(session.state.values.values, bank.start.values)


def test_a_session_that_let_its_folder_go_does_nothing_more(bank: Bank) -> None:
    with bank.ledger() as ledger:
        session = bank.session(ledger)
        session.close()
        for do in (
            lambda: session.setup(bank.round()),
            lambda: session.upload(bank.round()),
            lambda: session.approve(bank.round(), b""),
            lambda: session.apply(step(bank), history=b"h" * 32),
            lambda: Participant(session).open(bank.round(), b""),
        ):
            with pytest.raises(FolderInUseError, match="is not held here any more"):
                do()
        assert not ledger.events()


def test_a_statement_that_this_client_never_made_is_refused_before_the_model_changes(bank: Bank) -> None:
    with bank.ledger() as ledger:
        session = bank.session(ledger)
        own = upload_statement(session.upload(bank.round()), bank.round())
        session.check_heads(bank.round(), SignedHeads(statements={"bank_a": own}, countersignatures={}))
        session.check_heads(bank.round(), SignedHeads(statements={}, countersignatures={}))
        for other in (b"", own[:-1], own + b"x", bytes(len(own))):
            with pytest.raises(TamperedAggregateError):
                session.check_heads(bank.round(), SignedHeads(statements={"bank_a": other}, countersignatures={}))


def test_heads_that_this_client_did_not_countersign_are_refused_before_the_model_changes(bank: Bank) -> None:
    """Else a server that changes the head of another owner for it keeps it from recording who countersigned its own."""
    with bank.ledger() as ledger:
        session, context = bank.session(ledger), bank.round()
        own = upload_statement(session.upload(context), context)
        statements = {"bank_a": own, "bank_b": b"as it was announced"}
        mine = bank.identities[0].sign(countersigned(context.digest, hashes_of(statements)))
        session.check_heads(context, SignedHeads(statements=statements, countersignatures={"bank_a": mine, "bank_b": bytes(64)}))
        for changed in ({"bank_a": own}, statements | {"bank_b": b"another"}, dict(reversed(statements.items())), {}):
            with pytest.raises(TamperedAggregateError):
                session.check_heads(context, SignedHeads(statements=changed, countersignatures={"bank_a": mine}))
        with pytest.raises(TamperedAggregateError):
            session.check_heads(context, SignedHeads(statements=statements, countersignatures={"bank_a": bytes(64)}))


def test_a_key_chain_of_another_session_is_refused_and_not_moved_on(bank: Bank) -> None:
    people = [new_party(name) for name in ("bank_a", "bank_b", "bank_c")]
    roster = PinnedRoster(server=Identity.generate("hub").public, members=tuple(party.public for party in people))
    chain = KeyChain.generate(roster)
    with bank.ledger() as ledger:
        open_round(bank.session(ledger), bank)
        with pytest.raises(AgreementMismatchError, match="has another shared key than the agreement names for it"):
            bank.session(ledger, keys=chain)
    assert chain.facts.next_round == 0


def test_a_new_attempt_is_charged_anew_after_a_crash_in_an_earlier_one(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space")

    first, second = (replace(bank.round(), attempt=attempt) for attempt in (0, 1))
    with bank.ledger() as ledger:
        session = bank.session(ledger)
        with monkeypatch.context() as patch:
            patch.setattr(session._outbox, "put", full)
            for _ in range(2):
                with pytest.raises(OSError, match="no space"):
                    session.upload(first)
        session.upload(second)
        assert len(ledger.events()) == 3
        place = {"session": bank.agreement.session, "round": 0}
        assert session._trainer.committed(**place, attempt=1)
        assert not session._trainer.committed(**place, attempt=0)
        session.upload(first)
        assert len(ledger.events()) == 4


def test_what_was_opened_is_told_to_training_with_its_attempt(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    with bank.ledger() as ledger:
        session = bank.session(ledger)
        monkeypatch.setattr(session._trainer, "opened", lambda _, attempt: told.append(attempt))
        session.apply(step(bank), history=b"h" * 32, attempt=7)

    class Holder:
        history, heads, decision = b"h" * 32, SignedHeads(statements={}, countersignatures={}), None

        def __init__(self, **_: object) -> None: ...
        def open(self, data: bytes) -> Aggregate[PlainVector]:
            return replace(step(bank), round=1)

        def finish(self) -> None: ...

    with bank.ledger() as ledger:
        session = bank.session(ledger, directory=bank.directory / "elsewhere")
        monkeypatch.setattr("privfed.round.KeyHolder", Holder)
        monkeypatch.setattr(session._trainer, "opened", lambda _, attempt: told.append(attempt))
        Participant(session).open(replace(bank.round(1), attempt=5), b"")
    assert told == [7, 5]


def test_a_folder_that_a_crash_left_half_made_is_made_whole(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with bank.ledger() as ledger:
        for part in ("HeadMemory", "Journal"):
            with monkeypatch.context() as patch:
                patch.setattr(f"privfed.session.{part}", crash)
                with pytest.raises(KeyboardInterrupt):
                    bank.session(ledger)
        assert bank.session(ledger).upload(bank.round())


def test_a_journal_that_is_lost_beside_remembered_heads_is_not_made_anew(bank: Bank) -> None:
    with bank.ledger() as ledger:
        session = bank.session(ledger)
        other = bank.directory / "other.ledger"
        with Ledger.open(other, population="bank_b", budget=Budget(epsilon=1.0, delta=1e-5)) as peer:
            statement = state_head(peer, bank.identities[1], context=bytes(32), peers=("bank_a",))
        stated = read_statement(statement, owner=bank.identities[1].public, population="bank_b", context=bytes(32))
        session._heads.memory.countersign([stated], signer=bank.identities[0])
        (bank.directory / "bank_a" / "journal.sqlite").unlink()
        with pytest.raises(DamagedFileError, match=r"journal\.sqlite are missing beside"):
            bank.session(ledger)
