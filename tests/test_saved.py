"""A run of a Python program in a folder: what the commands make of it, and what is refused."""

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import privfed as pf
from privfed.aggregation.private_weights import PrivateWeights
from privfed.aggregation.robust import GeometricMedian
from privfed.aggregation.server_optimizer import FedAdam
from privfed.attacks.facts import Continuous, OneHot, TableSchema
from privfed.data.paysim import NOBAL
from privfed.data.transactions import generate_transactions
from privfed.errors import LedgerError, UnsupportedDataError, UnsupportedInThisModeError, UnsupportedModelError
from privfed.history import History
from privfed.run_setup import Setup
from privfed.saved import SavedRun
from privfed.scenario import Scenario, run_scenario
from privfed.training.loss import binary_cross_entropy, cross_entropy
from privfed.training.model import values_of

torch.set_num_threads(1)

BUDGET = pf.Budget(epsilon=3.0, delta=1e-5)
COLUMNS = ("income", "hour", "branch", "online")
SCHEMA = TableSchema(
    columns=(
        Continuous(name="income", low=-1.0, high=1.0),
        Continuous(name="hour", low=-1.0, high=1.0),
        OneHot(name="channel", categories=("branch", "online")),
    )
)
NAMES = ("north", "south", "west", "east", "isle")
FILES = {"history.json", "initial.npz", "model.npz"}


@dataclass(frozen=True)
class Run:
    folder: Path
    consortium: pf.Consortium
    model: nn.Module
    history: History
    ledgers: ExitStack

    def save(self, folder: Path | None = None, **changes: Any) -> SavedRun:
        given: dict[str, Any] = {"history": self.history, "consortium": self.consortium, "model": self.model, "schema": SCHEMA}
        return pf.save_run(**(given | changes), folder=folder or self.folder)


def records(seed: int) -> pf.Samples:
    rng = np.random.default_rng(seed)
    channel = np.eye(2)[rng.integers(2, size=200)]
    rows = np.column_stack([rng.uniform(-1, 1, (200, 2)), channel]).astype(np.float32)
    return pf.Samples(features=rows, labels=(rows[:, 0] > 0.3).astype(np.int64), groups=None, columns=COLUMNS)


def clients(folder: Path, stack: ExitStack, *, names: tuple[str, ...] = NAMES[:3], weights: Mapping[str, float] | None = None) -> list[Any]:
    training = pf.DpSgd.for_budget(BUDGET, rounds=3, max_records=300, expected_batch_size=60, steps=3, learning_rate=0.5)
    found = []
    for number, name in enumerate(names):
        ledger = stack.enter_context(pf.Ledger.open(folder / f"{name}.ledger", population=name, budget=BUDGET))
        weight = 1 if weights is None else weights[name]
        found.append(pf.Client(name, records(number), training=training, ledger=ledger, weight=weight))
    return found


def run(folder: Path, **consortium: Any) -> Run:
    stack = ExitStack()
    names = NAMES if "rule" in consortium else NAMES[:3]
    weights = {name: 1.0 + number for number, name in enumerate(names)}
    settings: dict[str, Any] = {"keys": pf.SharedKey.generate(), "loss": pf.BinaryCrossEntropy(positive_weight=3.0)}
    made = pf.Consortium(clients(folder, stack, names=names, weights=weights), **(settings | consortium))
    model = pf.mlp(4, hidden=(32,))
    return Run(folder, made, model, pf.simulate(made, model, rounds=2, evaluation=records(9)), stack)


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[Run]:
    made = run(tmp_path)
    with made.ledgers:
        yield made


def privfed(*arguments: object) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    command = [sys.executable, "-m", "privfed", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_the_commands_read_a_run_that_a_program_saved(mine: Run) -> None:
    saved = mine.save()
    mine.ledgers.close()
    audited = privfed("audit", mine.folder, "--quick", "--tier", "0", "--json")
    assert audited.returncode == 0, audited.stderr
    found = json.loads(audited.stdout)
    assert found["training_verdict"].startswith("As declared: the noise and the clipping of north, south, west")
    assert {finding["control"] for finding in found["findings"]} == {True, False}
    gains = [finding["score"] - finding["baseline"] for finding in found["findings"] if finding["control"] and finding["score"] is not None]
    assert max(gains) > 0.2
    reported = privfed("report", mine.folder)
    assert reported.returncode == 0, reported.stderr
    page = (mine.folder / "report.md").read_text(encoding="utf-8")
    assert "north" in page
    shown = privfed("history", "show", mine.folder)
    assert shown.stdout.count("north, south, west") == 2
    assert [statement.epsilon for statement in saved.statements()] == pytest.approx(list(mine.history.epsilon.values()))


def test_a_run_is_read_as_it_was(mine: Run) -> None:
    written = mine.save()
    read = pf.load_run(str(mine.folder))
    assert read.setup == written.setup
    for again in (written, read):
        history = again.history
        assert (history.mode, history.rule, history.policy, history.params) == (
            "SharedKey",
            "FedAvg",
            pf.OpeningPolicy(),
            mine.history.params,
        )
        assert (history.training, history.budget, history.delta) == (mine.history.training, mine.history.budget, mine.history.delta)
        assert (history.rounds, history.private) == (mine.history.rounds, True)
        for values, kept in ((history.model, mine.history.model), (history.initial, mine.history.initial)):
            assert np.array_equal(values.values, kept.values.astype(np.float32))
        assert [account.weight for account in again.setup.accounts.values()] == [1.0, 2.0, 3.0]
        assert again.setup.loss == pf.BinaryCrossEntropy(positive_weight=3.0)
    with torch.inference_mode():
        rows = torch.tensor(records(0).features)
        assert torch.equal(read.setup.module_with(read.history.initial)(rows), mine.model(rows))


def test_a_program_saves_what_simulate_saves_of_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_program, by_command, of = tmp_path / "program", tmp_path / "command", Setup.of
    by_program.mkdir()
    taken: list[tuple[Any, ...]] = []

    def taking(consortium: pf.Consortium, model: nn.Module, *, schema: TableSchema, history: History) -> Setup:
        if not taken:  # else it is save_run that asks
            taken.append((consortium, model))
            pf.save_run(history, by_program, consortium=consortium, model=model, schema=schema)
        return of(consortium, model, schema=schema, history=history)

    monkeypatch.setattr(Setup, "of", taking)
    table = generate_transactions(rows=4000, fraud_rate=0.02, rng=np.random.default_rng(2))
    outcome = run_scenario(table, Scenario(banks=3, rounds=2, steps=5, feature_set=NOBAL, epsilon=3.0), ledgers=by_program)
    shutil.copytree(by_program, by_command, ignore=lambda *_: FILES)
    outcome.save(by_command)
    program, command = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in (by_program, by_command))
    assert {name for name in program if program[name] != command[name]} == {"history.json"}
    said, more = json.loads(program["history.json"]), json.loads(command["history.json"])
    assert {name for name in said if name not in {"banks", "checksum"} and said[name] != more[name]} == set()
    # What only a simulation may say: how many records and frauds each bank has, and how they were dealt out.
    assert set(more["banks"][0]) - set(said["banks"][0]) == {"records", "frauds"}
    assert SavedRun.load(by_program).setup == SavedRun.load(by_command).setup


def test_the_files_are_their_owners_alone_and_hold_no_record_and_no_number_of_records(mine: Run) -> None:
    before = set(mine.folder.iterdir())
    mine.save()
    written = {path.name: path for path in set(mine.folder.iterdir()) - before}
    assert set(written) == FILES
    assert {stat.S_IMODE(path.stat().st_mode) for path in written.values()} == {0o600}
    content = json.loads(written["history.json"].read_text())
    for summary in content["rounds"]:  # what was computed from the evaluation's records, as the docstring says
        summary.pop("evaluation")
    keys, numbers = set[str](), set[object]()

    def collect(value: object) -> None:
        if isinstance(value, dict):
            keys.update(value)
            value = list(value.values())
        if isinstance(value, list):
            for item in value:
                collect(item)
        else:
            numbers.add(value)

    collect(content)
    assert not keys & {"records", "frauds", "secret", "key", "features", "labels"}
    assert 60 in numbers  # what is declared is there: the size of a batch
    assert 200 not in numbers  # what each client really has is not


def test_charges_of_an_earlier_run_are_told_from_those_of_this_one(mine: Run) -> None:
    later = replace(mine, history=pf.simulate(mine.consortium, mine.model, rounds=1))
    saved = later.save()
    mine.ledgers.close()
    assert {account.earlier_charges for account in saved.setup.accounts.values()} == {2}
    assert [statement.epsilon for statement in pf.load_run(mine.folder).statements()] == pytest.approx(list(later.history.epsilon.values()))


def test_nothing_is_overwritten(mine: Run) -> None:
    for name in FILES:
        (mine.folder / name).write_text("mine")
        before = set(mine.folder.iterdir())
        with pytest.raises(FileExistsError, match="there already, and nothing was written"):
            mine.save()
        assert set(mine.folder.iterdir()) == before
        (mine.folder / name).unlink()
    mine.save()
    with pytest.raises(FileExistsError):
        mine.save()


@pytest.mark.parametrize(
    ("mode", "keys", "settings"),
    [
        ("EscrowKey", pf.EscrowKey.generate, {"params": pf.CkksParams.escrow(), "correction": pf.FedProx(proximal_weight=0.1)}),
        ("ThresholdKey", lambda: pf.ThresholdKey(clients=3, corrupted=1, dropouts=0), {"params": pf.CkksParams.threshold(clients=3)}),
        ("SharedKey", pf.SharedKey.generate, {"params": pf.ProductParams.exact(bound=3.0), "rule": pf.MultiKrum(byzantine=1, keep=3)}),
        ("SharedKey", pf.SharedKey.generate, {"loss": binary_cross_entropy, "policy": pf.OpeningPolicy(min_clients=2, max_share=0.8)}),
    ],
)
def test_every_mode_and_rule_that_is_saved_is_read_as_it_was_and_can_be_audited(
    tmp_path: Path, mode: str, keys: Callable[[], Any], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = run(tmp_path, keys=keys(), **settings)
    made.save()
    made.ledgers.close()
    saved, audited = pf.load_run(tmp_path), []

    def auditing(*arguments: Any, **options: Any) -> Any:
        audited.extend((*arguments, options["schema"]))
        return pf.run_audit(*arguments, **options)

    monkeypatch.setattr("privfed.saved.run_audit", auditing)
    assert {training.client for training in saved.audit(repeats=2).trainings} == set(made.history.training)
    again, model, schema = audited
    assert schema == SCHEMA
    assert np.array_equal(values_of(model).values, made.history.initial.values)
    for client, before in zip(again.clients, made.consortium.clients, strict=True):
        assert (client.name, client.weight, client.training) == (before.name, before.weight, before.training)
        assert client.data.columns == before.data.columns
    assert again.mode == mode == saved.history.mode
    for name in ("params", "rule", "policy", "correction", "loss"):
        assert getattr(again, name) == getattr(made.consortium, name), name
    if mode == "ThresholdKey":
        assert again.keys == made.consortium.keys


def test_a_network_of_several_classes_and_a_linear_one_are_saved(tmp_path: Path) -> None:
    for number, (model, loss) in enumerate(((pf.mlp(4, hidden=(5, 3), outputs=2), cross_entropy), (pf.mlp(4, hidden=()), None))):
        folder = tmp_path / str(number)
        folder.mkdir()
        with ExitStack() as stack:
            members = clients(folder, stack)
            consortium = pf.Consortium(members, keys=pf.SharedKey.generate(), loss=loss or binary_cross_entropy)
            pf.save_run(pf.simulate(consortium, model, rounds=1), folder, consortium=consortium, model=model, schema=SCHEMA)
        module = pf.load_run(folder).setup.module()
        assert [tuple(tensor.shape) for tensor in module.parameters()] == [tuple(tensor.shape) for tensor in model.parameters()]


def sequential(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


class Own(nn.Sequential):
    """Layers of an mlp, put to another use."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


MODELS = {
    "another activation": lambda: sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)),
    "no bias": lambda: sequential(nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Linear(6, 1)),
    "an activation at the end": lambda: sequential(nn.Linear(4, 1), nn.ReLU()),
    "a class of its own": lambda: Own(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1)),
    "no Sequential": lambda: nn.Linear(4, 1),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_others_could_not_make_is_refused(mine: Run, name: str) -> None:
    with pytest.raises(UnsupportedModelError, match="only a model as privfed.mlp makes it can be saved.*; nothing was written"):
        mine.save(model=MODELS[name]())
    assert not FILES & {path.name for path in mine.folder.iterdir()}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "plaintext": ({"keys": pf.Plaintext()}, "no encryption"),
    "rule": ({"keys": pf.Plaintext(), "rule": GeometricMedian()}, "no encryption and the rule GeometricMedian"),
    "server optimiser": ({"server_optimizer": FedAdam(learning_rate=0.1)}, "a server optimiser"),
    "private weights": ({"private_weights": PrivateWeights(largest=10)}, "private weights"),
    "loss": ({"loss": torch.nn.functional.binary_cross_entropy_with_logits}, "a loss of its own"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_files_cannot_say_of_a_consortium_is_refused(mine: Run, name: str) -> None:
    changes, words = REFUSED[name]
    with pytest.raises(UnsupportedInThisModeError, match=f"a run with {words}.* cannot be saved; nothing was written; audit it with"):
        mine.save(consortium=replace(mine.consortium, **changes))
    assert not FILES & {path.name for path in mine.folder.iterdir()}


def test_rounds_that_were_not_held_are_refused(mine: Run) -> None:
    from privfed.round_record import FailedRound

    failed = replace(mine.history, failed=(FailedRound(round=2, silent={}, reason="nobody was there"),))
    with pytest.raises(UnsupportedInThisModeError, match="1 rounds were not held cannot be saved; nothing was written"):
        mine.save(history=failed)


def test_a_history_of_another_consortium_or_model_is_refused(mine: Run) -> None:
    another = [replace(client, training=replace(client.training, learning_rate=0.1)) for client in mine.consortium.clients]
    others = (
        {"consortium": replace(mine.consortium, clients=another)},
        {"consortium": replace(mine.consortium, policy=pf.OpeningPolicy(max_share=0.6))},
        {"consortium": replace(mine.consortium, params=pf.CkksParams.standard(bound=2.0))},
        {"model": pf.mlp(4, hidden=(7,))},
    )
    for changes in others:
        with pytest.raises(ValueError, match="expected the history of a run of this consortium and this model"):
            mine.save(**changes)
    with pytest.raises(ValueError, match="expected a schema and a model of 4 columns"):
        mine.save(schema=TableSchema(columns=SCHEMA.columns[:2]))


def test_a_folder_without_the_ledgers_of_the_run_is_refused(mine: Run, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for _ in range(2):
        with pytest.raises(LedgerError, match="the ledger of 'north' is not .*north.ledger; nothing was written; give the folder in which"):
            mine.save(elsewhere)
        with ExitStack() as stack:
            clients(elsewhere, stack)  # ledgers of the same names that nobody charged
    assert not FILES & {path.name for path in elsewhere.iterdir()}


def test_a_run_is_saved_before_the_next_one_or_not_at_all(mine: Run) -> None:
    pf.simulate(mine.consortium, mine.model, rounds=1)
    with pytest.raises(LedgerError, match="its epsilon is another than the run's; nothing was written; save a run before the next one"):
        mine.save()


def test_clients_without_a_ledger_are_refused(mine: Run) -> None:
    plain = pf.NonPrivate(learning_rate=0.1, batch_size=20, steps=2, seed=0)
    open_clients = [pf.Client(client.name, client.data, training=plain) for client in mine.consortium.clients]
    consortium = replace(mine.consortium, clients=open_clients)
    with pytest.raises(LedgerError, match="'north' has no ledger.*; nothing was written"):
        mine.save(consortium=consortium, history=pf.simulate(consortium, mine.model, rounds=1))


def test_a_saved_run_that_was_edited_is_refused(mine: Run) -> None:
    mine.save()
    path = mine.folder / "history.json"
    path.write_text(path.read_text().replace('"positive_weight": 3.0', '"positive_weight": 2.0'))
    with pytest.raises(UnsupportedDataError, match="the checksum in it is not what follows from the rest; nothing was done"):
        pf.load_run(mine.folder)
    process = privfed("audit", mine.folder)
    assert (process.returncode, process.stdout) == (2, "")
    assert "the checksum in it is not what follows" in process.stderr
