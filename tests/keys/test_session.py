"""Rounds with a key that is erased behind them: restarts, missed rounds and stolen files."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from privfed import files
from privfed.aggregation.rules import FedAvg
from privfed.agreement import Agreement, RoundContext
from privfed.client import Client, Trainer
from privfed.errors import KeyErasedError, LedgerError
from privfed.he.params import CkksParams
from privfed.identity import Identity
from privfed.journal import Journal
from privfed.keyholder import KeyHolder
from privfed.keys.chain import KeyChain, read_facts
from privfed.keys.roster import PinnedRoster
from privfed.protect import round_key
from privfed.round import Participant, run_round
from privfed.round_record import Stage
from privfed.server import Server
from privfed.session import ClientSession
from privfed.training.loss import binary_cross_entropy
from privfed.training.mechanism import NonPrivate
from privfed.training.model import mlp, values_of
from tests.engines.conftest import table
from tests.keys.conftest import new_party

NAMES = ("bank_a", "bank_b", "bank_c")


class Banks:
    """Three banks with their folders, and a server, which can all be started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.parties = {name: new_party(name) for name in NAMES}
        self.server = Identity.generate("hub")
        self.roster = PinnedRoster(server=self.server.public, members=tuple(party.public for party in self.parties.values()))
        torch.manual_seed(3)
        self.model = mlp(inputs=4, hidden=(4,))
        self.start = values_of(self.model)
        chain = KeyChain.generate(self.roster)
        for name in NAMES:
            (folder / name).mkdir()
            chain.save(self.key(name))
        self.agreement = Agreement(
            session=chain.facts.session,
            roster=self.roster.parties,
            params=CkksParams.standard(),
            layout=self.start.layout,
            start=self.start.digest,
            weights=dict.fromkeys(NAMES, 1.0),
            rule=FedAvg(),
        )
        self.contexts: list[RoundContext] = []
        self.history = RoundContext(agreement=self.agreement, round=0).history
        self.clients: dict[str, Participant] = {}
        self.restart(*NAMES)

    def key(self, name: str) -> Path:
        return self.folder / name / "shared.key"

    def restart(self, *names: str) -> None:
        for name in names:
            if name in self.clients:
                self.clients[name].session.close()
            self.clients[name] = self.open(name)

    def open(self, name: str) -> Participant:
        training = NonPrivate(learning_rate=0.1, batch_size=10, steps=2, seed=1)
        trainer = Trainer(
            client=Client(name, table(60, seed=NAMES.index(name)), training=training),
            model=self.model,
            start=self.start,
            loss=binary_cross_entropy,
            params=self.agreement.params,
        )
        session = ClientSession(
            trainer=trainer,
            identity=self.parties[name]._identity,
            agreement=self.agreement,
            keys=KeyChain.load(self.key(name), roster=self.roster),
            start=self.start,
            directory=self.folder / name,
        )
        return Participant(session)

    def serve(self, context: RoundContext) -> Server:
        return Server(context=context, identity=self.server, selected=NAMES, spool=self.folder / "spool")

    def hold(self, number: int, silent: Mapping[str, Stage] = {}) -> None:
        context = RoundContext(agreement=self.agreement, round=number, history=self.history)
        selected = [name for name in NAMES if silent.get(name) is not Stage.SETUP]
        server = Server(context=context, identity=self.server, selected=selected, spool=self.folder / "spool")
        record = run_round(server=server, clients=self.clients, context=context, selected=selected, silent=silent)
        self.contexts.append(context)
        self.history = bytes.fromhex(record.history)

    def next_rounds(self) -> dict[str, int]:
        return {name: read_facts(self.key(name)).next_round for name in NAMES}

    def models(self) -> set[bytes]:
        return {client.session.state.values.values.tobytes() for client in self.clients.values()}


@pytest.fixture
def banks(tmp_path: Path) -> Banks:
    return Banks(tmp_path)


def test_each_round_is_erased_when_it_is_in_the_model_and_a_stolen_file_opens_none_of_them(banks: Banks, tmp_path: Path) -> None:
    before = banks.key("bank_a").read_bytes()
    for number in range(3):
        banks.hold(number)
        assert banks.next_rounds() == dict.fromkeys(NAMES, number + 1)
    assert len(banks.models()) == 1
    thief = KeyChain.load(banks.key("bank_a"), roster=banks.roster)
    for context in banks.contexts:
        with pytest.raises(KeyErasedError):
            round_key(thief, context)
        with pytest.raises(KeyErasedError):  # nor does the session itself keep the key of the last round
            banks.clients["bank_a"].session.round_key(context)
    files.create(tmp_path / "stolen before", before)
    # The positive control: with the file as it was before, what the server kept opens to what went into the models.
    early, total = KeyChain.load(tmp_path / "stolen before", roster=banks.roster), banks.start.values.copy()
    for context in banks.contexts:
        holder = KeyHolder(context=context, round_key=round_key(early, context), journal=Journal(tmp_path / "thief.sqlite"))
        total += holder.open(banks.serve(context).aggregate()).vector.values
    assert {total.tobytes()} == banks.models()


def test_a_client_that_missed_rounds_opens_them_in_their_order_and_erases_them(banks: Banks) -> None:
    banks.hold(0)
    banks.hold(1, silent={"bank_c": Stage.OPENING})
    # Two banks would be too few for the policy, so the client is away from the opening alone.
    assert banks.next_rounds() == {"bank_a": 2, "bank_b": 2, "bank_c": 1}
    banks.restart("bank_c")  # it comes back on its folder
    banks.clients["bank_c"].open(banks.contexts[1], banks.serve(banks.contexts[1]).aggregate())
    assert banks.next_rounds() == dict.fromkeys(NAMES, 2)
    assert len(banks.models()) == 1
    banks.hold(2)
    assert banks.next_rounds() == dict.fromkeys(NAMES, 3)


def test_a_round_that_was_given_up_is_erased_with_the_next_one(banks: Banks) -> None:
    banks.hold(0)
    banks.hold(4)  # rounds 1 to 3 failed, and their numbers are gone
    assert banks.next_rounds() == dict.fromkeys(NAMES, 5)
    assert len(banks.models()) == 1


def test_a_crash_between_storing_and_erasing_is_made_good_at_the_next_start(banks: Banks, monkeypatch: pytest.MonkeyPatch) -> None:
    banks.hold(0)
    context = RoundContext(agreement=banks.agreement, round=1, history=banks.history)

    def crash(*_: object) -> None:
        raise ConnectionError("the power is gone")

    with monkeypatch.context() as patch:
        patch.setattr("privfed.files.replace", crash)
        with pytest.raises(ConnectionError):
            banks.hold(1)
    assert banks.next_rounds() == dict.fromkeys(NAMES, 1)
    assert read_state(banks, "bank_a") == (0, 1)  # bank_a had stored the round
    banks.restart(*NAMES)
    assert banks.next_rounds() == {"bank_a": 2, "bank_b": 1, "bank_c": 1}
    banks.hold(1)  # goes on where it stopped: the others open, bank_a has
    assert banks.contexts[-1] == context
    assert banks.next_rounds() == dict.fromkeys(NAMES, 2)
    assert len(banks.models()) == 1


def test_a_crash_before_storing_leaves_the_key_of_the_round(banks: Banks, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object, **__: object) -> None:
        raise ConnectionError("the power is gone")

    with monkeypatch.context() as patch:
        patch.setattr("privfed.state.ModelStore.save", crash)
        with pytest.raises(ConnectionError):
            banks.hold(0)
    assert banks.next_rounds() == dict.fromkeys(NAMES, 0)
    banks.restart(*NAMES)
    banks.hold(0)
    assert banks.next_rounds() == dict.fromkeys(NAMES, 1)
    assert not np.array_equal(banks.clients["bank_a"].session.state.values.values, banks.start.values)


def read_state(banks: Banks, name: str) -> tuple[int, ...]:
    with np.load(banks.folder / name / "model.npz") as file:
        return tuple(file["rounds"].tolist())


def test_an_error_behind_the_stored_model_is_told_as_it_is_and_as_no_abort(banks: Banks, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise LedgerError("the disk is full")

    monkeypatch.setattr(banks.clients["bank_a"].session, "keep_countersignatures", full)
    with pytest.raises(LedgerError, match="the disk is full"):
        banks.hold(0)
    assert banks.clients["bank_a"].session.state.rounds == (0,)
    assert not list((banks.folder / "spool").rglob("abort-*"))
