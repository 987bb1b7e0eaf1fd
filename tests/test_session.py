from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from privfed.aggregation.rules import FedAvg
from privfed.agreement import Agreement, OpeningPolicy, RoundContext
from privfed.client import Client, Trainer
from privfed.dp.ledger import Ledger
from privfed.dp.mechanism import Budget
from privfed.errors import AgreementMismatchError, BudgetExceededError, HistoryMismatchError, InvalidMessageError, OpeningRefusedError
from privfed.he.params import CkksParams
from privfed.he.secret import SharedKey
from privfed.identity import Identity, Roster
from privfed.session import ClientSession
from privfed.training.loss import binary_cross_entropy
from privfed.training.model import mlp, values_of
from privfed.update import Aggregate, PlainVector, Update
from tests.engines.conftest import MECHANISM, table


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

    def ledger(self) -> Ledger:
        return Ledger.open(self.directory / "bank_a.ledger", population="bank_a", budget=Budget(epsilon=self.epsilon, delta=1e-5))

    def session(self, ledger: Ledger) -> ClientSession:
        client = Client("bank_a", table(60, seed=1), training=MECHANISM, ledger=ledger)
        trainer = Trainer(
            client=client,
            model=self.model,
            start=self.start,
            loss=binary_cross_entropy,
            params=self.agreement.params,
            witness=self.trained.append,
        )
        return ClientSession(
            trainer=trainer,
            identity=self.identities[0],
            agreement=self.agreement,
            keys=self.keys,
            start=self.start,
            directory=self.directory / "bank_a",
        )

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
        assert bank.session(ledger).upload(bank.round()) == first
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
    step = PlainVector(layout=bank.start.layout, values=np.full(bank.start.layout.size, 0.25))
    aggregate = Aggregate(round=0, vector=step, coefficients={"bank_a": 1, "bank_b": 1, "bank_c": 1})
    with bank.ledger() as ledger:
        session = bank.session(ledger)
        session.apply(aggregate, digest=b"h" * 32)
        with pytest.raises(ValueError, match="ascending"):
            session.apply(aggregate, digest=b"h" * 32)
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
        with bank.ledger() as ledger, pytest.raises(AgreementMismatchError, match="do not name the same privacy ledger; nothing was done"):
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
