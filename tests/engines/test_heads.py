"""Privacy ledgers whose heads the peers countersign in every round."""

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from privfed.client import Client, Trainer
from privfed.consortium import Consortium
from privfed.data.samples import Samples
from privfed.dp.ledger import Ledger
from privfed.dp.mechanism import Budget
from privfed.engines.local import simulate
from privfed.errors import AgreementMismatchError, BudgetExceededError, LedgerTamperedError
from privfed.he.secret import SharedKey
from privfed.round_record import Stage
from tests.engines.conftest import MECHANISM, table
from tests.engines.test_faults import Script

Make = Callable[..., Consortium]


class Banks:
    """Three banks with their ledgers and the folder of their run, started anew for each stretch of rounds."""

    def __init__(self, folder: Path, model: torch.nn.Module) -> None:
        self.folder, self.model, self.keys = folder, model, SharedKey.generate()
        self.populations = {f"bank_{index}": f"accounts of bank_{index}" for index in range(3)}

    def run(self, rounds: int, **options: object) -> None:
        with ExitStack() as stack:
            clients = []
            for index, (name, population) in enumerate(self.populations.items()):
                budget = Budget(epsilon=50.0, delta=1e-5)
                ledger = stack.enter_context(Ledger.open(self.ledger(name), population=population, budget=budget))
                clients.append(Client(name, table(60 + 20 * index, seed=index), training=MECHANISM, ledger=ledger))
            consortium = Consortium(clients, keys=self.keys)
            simulate(consortium, self.model, rounds=rounds, directory=self.folder / "run", **options)  # type: ignore[arg-type]

    def ledger(self, name: str) -> Path:
        return self.folder / f"{name}.ledger"

    def files(self, name: str) -> list[Path]:
        """Everything that a bank has: its ledger, and its folder of the run."""
        return [*self.folder.glob(f"{name}.ledger*"), self.folder / "run" / "clients" / name]

    def copy(self, name: str, to: Path) -> None:
        to.mkdir()
        for path in self.files(name):
            (shutil.copytree if path.is_dir() else shutil.copy2)(path, to / path.name)

    def set_back(self, name: str, copy: Path) -> None:
        for path in self.files(name):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for path in copy.iterdir():
            target = self.folder / "run" / "clients" / name if path.is_dir() else self.folder / path.name
            (shutil.copytree if path.is_dir() else shutil.copy2)(path, target)


@pytest.fixture
def banks(tmp_path: Path, model: torch.nn.Module) -> Banks:
    return Banks(tmp_path, model)


def test_every_round_that_is_opened_leaves_the_countersignatures_of_all_peers_in_the_ledger(banks: Banks) -> None:
    banks.run(2)
    with Ledger.reopen(banks.ledger("bank_1")) as ledger:
        # The reservation is row 1 and in the head; the commit, row 2, comes after the upload.
        assert [row.text for row in ledger.rows() if row.kind == "countersign"] == [
            "head of 2 rows countersigned by bank_0, bank_2",
            "head of 5 rows countersigned by bank_0, bank_2",
        ]


def test_restoring_every_file_of_a_bank_to_an_older_state_is_noticed_by_itself_when_it_catches_up(banks: Banks, tmp_path: Path) -> None:
    banks.run(1)
    banks.copy("bank_1", tmp_path / "copy")
    banks.run(2)
    banks.set_back("bank_1", tmp_path / "copy")
    with pytest.raises(LedgerTamperedError, match="does not extend the one that its owner showed"):
        banks.run(3)


def test_restoring_every_file_of_a_bank_to_an_older_state_is_refused_by_its_peers_in_the_next_round(
    banks: Banks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the bank does not look at its own statements any more."""
    banks.run(1)
    banks.copy("bank_1", tmp_path / "copy")
    banks.run(2)
    banks.set_back("bank_1", tmp_path / "copy")
    with Ledger.reopen(banks.ledger("bank_1")) as ledger:
        assert len(ledger.events()) == 1  # the files belong together
    for look in ("record_head", "check_head"):
        monkeypatch.setattr(Trainer, look, lambda *_, **__: None)
    with pytest.raises(LedgerTamperedError, match=r"'bank_1'.*does not extend.*nothing was countersigned"):
        banks.run(3)
    with Ledger.reopen(banks.ledger("bank_0")) as ledger:
        assert len(ledger.events()) == 3  # what was reserved stays charged
    with pytest.raises(LedgerTamperedError, match="does not extend"):
        banks.run(3)


def test_a_bank_that_is_not_set_back_goes_on(banks: Banks, tmp_path: Path) -> None:
    """The control of the test above: the same steps, with the copy of the present."""
    banks.run(2)
    banks.copy("bank_1", tmp_path / "copy")
    banks.set_back("bank_1", tmp_path / "copy")
    banks.run(3)
    with Ledger.reopen(banks.ledger("bank_1")) as ledger:
        assert len(ledger.events()) == 3


def test_a_round_that_is_not_opened_leaves_no_countersignature_and_the_next_one_shows_all_rows_since(banks: Banks) -> None:
    banks.run(3, absences=Script(round_1={"bank_2": Stage.APPROVAL}))
    with Ledger.reopen(banks.ledger("bank_0")) as ledger:
        heads = [row.text for row in ledger.rows() if row.kind == "countersign"]
        assert heads == ["head of 2 rows countersigned by bank_1, bank_2", "head of 7 rows countersigned by bank_1, bank_2"]


def test_another_ledger_in_the_place_of_the_agreed_one_is_refused(banks: Banks) -> None:
    banks.run(1)
    banks.populations["bank_1"] = "savings of bank_1"
    banks.ledger("bank_1").rename(banks.folder / "put away")
    (banks.folder / "bank_1.ledger.head").unlink()
    with pytest.raises(AgreementMismatchError, match="populations"):
        banks.run(2)


def test_a_row_appended_to_the_data_does_not_open_a_fresh_budget(model: torch.nn.Module, tmp_path: Path) -> None:
    one_round_each = 4.0  # epsilon of one round is about 3, of two about 4.4

    def run(data: Samples) -> float:
        with ExitStack() as stack:
            clients = []
            for index in range(3):
                limit = Budget(epsilon=one_round_each if index == 0 else 50.0, delta=1e-5)
                ledger = stack.enter_context(Ledger.open(tmp_path / f"{index}.ledger", population=f"bank_{index}", budget=limit))
                rows = data if index == 0 else table(80, seed=index)
                clients.append(Client(f"bank_{index}", rows, training=MECHANISM, ledger=ledger))
            simulate(Consortium(clients, keys=SharedKey.generate()), model, rounds=1)
            ledger = clients[0].ledger
            assert ledger is not None
            return ledger.spent()

    before = table(60, seed=0)
    more = table(1, seed=9)
    longer = Samples(
        features=np.concatenate([before.features, more.features]),
        labels=np.concatenate([before.labels, more.labels]),
        groups=None,
        columns=before.columns,
    )
    assert 0.6 * one_round_each < run(before) < one_round_each
    with pytest.raises(BudgetExceededError, match="the budget of bank_0 covers 0 of 1 round, .*; nothing was trained"):
        run(longer)
