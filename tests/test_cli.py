import errno
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import typer
from rich.console import Console
from rich.progress import Progress
from typer.testing import CliRunner, Result

from privfed.cli import app
from privfed.cli.refusals import Refusing
from privfed.cli.simulate import FEWEST_DECLARED
from privfed.cli.terminal import RoundProgress, bytes_of, duration, epsilon_of, number, printable, table
from privfed.data.divergence import divergence_table
from privfed.data.paysim import NOBAL, features, load_paysim
from privfed.data.transactions import generate_transactions
from privfed.deal import deal
from privfed.dp.countersign import HeadMemory, read_statement, state_head
from privfed.dp.ledger import Ledger
from privfed.dp.mechanism import Budget, GaussianRelease, NonPrivateRelease, PoissonSampledGaussian
from privfed.errors import BudgetExceededError
from privfed.identity import Identity
from privfed.scenario import _DECLARED_IN, _declared
from privfed.strict_json import checksum


def privfed(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "privfed", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"},
    )


def here(*arguments: str) -> Result:
    """The command in this process: the same code without the seconds that a new process takes to load it."""
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "100"})


def refusal(result: Result) -> str:
    """The reason, if the result is what a refusal looks like: one line on stderr, nothing on stdout, exit code 2."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert lines[-1].startswith("refused: ")
    assert "Traceback" not in result.stderr
    return lines[-1].removeprefix("refused: ")


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's own file: a few thousand made-up transactions, dealt to two branches."""
    path = tmp_path_factory.mktemp("data") / "log.csv"
    transactions = generate_transactions(rows=3000, fraud_rate=0.03, rng=np.random.default_rng(5)).drop(columns="group")
    transactions.assign(branch=np.where(transactions["step"] % 2 == 0, "north", "[red]south\x1b[31m")).to_csv(path, index=False)
    return path


# --- demo


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> "subprocess.CompletedProcess[str]":
    return privfed("demo", "--quick", "--json", "--out", str(tmp_path_factory.mktemp("demo")))


def test_the_quick_demo_prints_one_json_object_and_nothing_else(demo: "subprocess.CompletedProcess[str]") -> None:
    assert demo.returncode == 0, demo.stderr
    assert demo.stderr == ""
    result = json.loads(demo.stdout)
    assert result["rounds"] == len(result["pr_auc"]) == 3
    assert set(result["epsilon"]) == {"bank_1", "bank_2", "bank_3"}
    assert all(0 < epsilon <= result["budget"]["epsilon"] for epsilon in result["epsilon"].values())
    assert result["delta"] == 1e-6
    assert result["he_error_max"] == 0
    assert result["mode"] == "SharedKey"
    assert {finding["adversary"] for finding in result["audit"]} >= {"the server", "the server, given the key"}
    assert "--quick" in Path(result["report"]).read_text(encoding="utf-8")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/<pid>/mem")
def test_the_demo_searched_the_memory_of_its_server(demo: "subprocess.CompletedProcess[str]") -> None:
    assert json.loads(demo.stdout)["server_has_secret_key"] is False


def test_the_demo_refuses_a_file_in_place_of_its_folder_before_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "report"
    file.write_text("mine")
    monkeypatch.setattr("privfed.demo.run_demo", lambda *_, **__: pytest.fail("it ran"))
    assert f"expected --out to name a folder, and {file} is a file" in refusal(here("demo", "--quick", "--out", str(file)))
    assert file.read_text() == "mine"


def test_bytes_of_the_demo_are_those_of_its_parameters(demo: "subprocess.CompletedProcess[str]") -> None:
    result = json.loads(demo.stdout)
    update = (7 * result["parameters"] + 64) / result["parameters"]
    assert update < result["bytes_up_per_parameter"] < 1.1 * update


# --- simulate


@pytest.fixture(scope="module")
def simulated(log: Path, tmp_path_factory: pytest.TempPathFactory) -> "tuple[subprocess.CompletedProcess[str], Path]":
    out = tmp_path_factory.mktemp("runs") / "nested" / "run"
    return privfed("simulate", str(log), "--quick", "--banks", "3", "--seed", "4", "--json", "--out", str(out)), out


def test_simulate_prints_one_json_object_that_is_also_its_history_file(
    simulated: "tuple[subprocess.CompletedProcess[str], Path]",
) -> None:
    process, out = simulated
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""
    result = json.loads(process.stdout)
    kept = json.loads((out / "history.json").read_text())
    assert kept.pop("checksum") == checksum(kept)
    assert kept.pop("command").startswith("privfed simulate ")
    assert kept.pop("demonstration") is False
    for file in ("model", "initial"):
        assert kept.pop(f"{file}_sha256") == hashlib.sha256((out / f"{file}.npz").read_bytes()).hexdigest()
    assert list(kept.pop("setup")["clients"]) == ["bank_1", "bank_2", "bank_3"]
    assert result == kept
    assert result["scope"] == "simulation only"
    assert result["private"] is True
    assert len(result["rounds"]) == len(result["pr_auc"]) == 2
    assert [bank["name"] for bank in result["banks"]] == ["bank_1", "bank_2", "bank_3"]
    assert all(0 < bank["epsilon"] <= 4 and bank["mechanism"] == "DpSgd" for bank in result["banks"])
    assert 2225 <= sum(bank["records"] for bank in result["banks"]) <= 2275  # three quarters of 3000, within a fraud's two legs per class
    sent = sum(summary["record"]["bytes_up"]["bank_1"] for summary in result["rounds"])
    assert result["banks"][0]["bytes_up"] == sent > 2 * 7 * result["parameters"]


def test_simulate_writes_a_model_without_pickles(simulated: "tuple[subprocess.CompletedProcess[str], Path]") -> None:
    process, out = simulated
    with np.load(out / "model.npz", allow_pickle=False) as model:
        assert sum(model[name].size for name in model.files) == json.loads(process.stdout)["parameters"]
        assert {model[name].dtype for name in model.files} == {np.dtype(np.float32)}
        assert model["0.weight"].shape == (64, 10)


def test_simulate_leaves_ledgers_that_show_what_it_said(simulated: "tuple[subprocess.CompletedProcess[str], Path]") -> None:
    process, out = simulated
    for bank in json.loads(process.stdout)["banks"]:
        shown = json.loads(here("ledger", "show", str(out / f"{bank['name']}.ledger"), "--json").stdout)
        assert shown["spent"] == pytest.approx(bank["epsilon"], rel=1e-9)
        assert [charge["round"] for charge in shown["charges"]] == [0, 1]
        assert all(charge["committed"] for charge in shown["charges"])


def test_simulate_overwrites_nothing(simulated: "tuple[subprocess.CompletedProcess[str], Path]", log: Path) -> None:
    _, out = simulated
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert "new or empty folder; nothing was read or overwritten" in refusal(here("simulate", str(log), "--quick", "--out", str(out)))
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_simulate_shows_rounds_banks_and_bytes_to_people(log: Path) -> None:
    result = here("simulate", str(log), "--quick", "--banks", "3", "--features", "nobal")
    assert result.exit_code == 0, result.output
    shown = " ".join(result.stdout.split())
    for text in ("PR-AUC", "simulation only", "epsilon spent", "bank_3", "bytes per parameter up", "Trust mode SharedKey"):
        assert text in shown
    assert re.search(r"Delta 1e-05 was chosen: a power of ten below 1 / \(10 x [12],000\)", shown)
    assert "2/2" in result.stderr
    assert max(len(line) for line in result.stdout.splitlines()) <= 100


def test_simulate_says_which_banks_are_too_small_and_what_was_done_so_that_none_is_empty(log: Path) -> None:
    result = here("simulate", str(log), "--quick", "--banks", "5", "--alpha", "0.05", "--json")
    outcome = json.loads(result.stdout)
    small = [bank["name"] for bank in outcome["banks"] if bank["records"] < 512]
    assert small
    assert any(note.startswith(f"{', '.join(small)} ha") and "hardly more than noise" in note for note in outcome["notes"])
    assert outcome["moved"] > 0
    assert any(f"drawn anew 100 times and then {outcome['moved']} records were moved" in note for note in outcome["notes"])


def test_simulate_shows_a_small_epsilon_to_its_digits(log: Path) -> None:
    shown = here("simulate", str(log), "--quick", "--banks", "3", "--epsilon", "0.0012").stdout
    assert "0.0012" in shown
    assert "0.00 " not in shown


def test_what_simulate_says_comes_next_is_a_command_that_runs(
    simulated: "tuple[subprocess.CompletedProcess[str], Path]", log: Path
) -> None:
    out = simulated[1].with_name("a run with spaces")
    shown = here("simulate", str(log), "--quick", "--banks", "3", "--out", str(out)).stdout
    commands = [shlex.split(line) for line in shown.partition("Next:")[2].splitlines() if line]
    assert [command[:-1] for command in commands] == [["privfed", "audit"], ["privfed", "report"], ["privfed", "ledger", "show"]]
    assert here(*commands[2][1:]).exit_code == 0
    assert {Path(commands[0][-1]), Path(commands[1][-1])} == {out}


def test_a_delta_that_no_bank_can_use_is_refused_before_the_file_is_opened(tmp_path: Path) -> None:
    assert FEWEST_DECLARED == _DECLARED_IN == _declared(1)
    for delta in ("0.5", "0.001"):
        reason = refusal(here("simulate", str(tmp_path / "absent.csv"), "--delta", delta))
        assert f"expected --delta to be above 0 and below 0.001, got {delta}: every bank declares 1,000 records or more" in reason
        assert "leave --delta out" in reason
        assert reason.endswith("nothing was read")
    reason = refusal(here("simulate", str(tmp_path / "absent.csv"), "--banks", "2"))
    assert "expected --banks from 3" in reason


def test_simulate_refuses_a_delta_of_no_use_before_it_makes_a_ledger(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    generate_transactions(rows=6000, fraud_rate=0.02, rng=np.random.default_rng(0)).to_csv(log, index=False)
    reason = refusal(here("simulate", str(log), "--quick", "--banks", "3", "--delta", "0.0009", "--out", str(tmp_path / "run")))
    assert re.search(r"one over the \d000 records that 'bank_\d' declares at most, got 0.0009", reason)
    assert "nothing was charged" in reason
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]


def test_simulate_without_noise_says_so_and_claims_nothing(log: Path) -> None:
    result = here("simulate", str(log), "--quick", "--banks", "3", "--non-private", "--json")
    outcome = json.loads(result.stdout)
    assert outcome["private"] is False
    assert outcome["notes"][0] == "no differential privacy: the banks trained without noise; for comparison only"
    assert outcome["budget"]["epsilon"] is None
    assert {bank["epsilon"] for bank in outcome["banks"]} == {None}
    assert {bank["mechanism"] for bank in outcome["banks"]} == {"NonPrivate"}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--banks", "2"), "expected --banks from 3, got 2, because an aggregate of fewer"),
        (("--alpha", "0"), "expected --alpha to be a finite number above 0"),
        (("--alpha", "nan"), "expected --alpha to be a finite number above 0, got nan"),
        (("--rounds", "0"), "expected --rounds from 1, got 0"),
        (("--seed", "-1"), "expected --seed from 0, got -1"),
        (("--epsilon", "0"), "expected --epsilon to be a finite number above 0, got 0"),
        (("--epsilon", "inf"), "expected --epsilon to be a finite number above 0, got inf; nothing was read"),
        (("--delta", "1"), "expected --delta to be above 0 and below 0.001"),
        (("--non-private", "--delta", "0"), "expected --delta to be above 0 and below 0.001"),
        (("--non-private", "--epsilon", "3"), "expected --non-private without --epsilon"),
        (("--quick", "--rounds", "3"), "expected --quick without --rounds: it has 2 rounds"),
        (("--banks", "80"), "too few frauds for 80 banks"),
        (("--corrupted", "1"), "expected --keys shared without --corrupted: they decide the quorum that opens sums with --keys threshold"),
        (("--keys", "escrow", "--corrupted", "0", "--dropouts", "1"), "expected --keys escrow without --corrupted and --dropouts"),
        (("--keys", "threshold", "--dropouts", "-1"), "expected --dropouts from 0, got -1; nothing was read"),
        (
            ("--keys", "threshold", "--dropouts", "2", "--corrupted", "1"),
            "in corrupted clients alone, which answer twice, and a lying server would have two sums opened; nearest that can be solved: "
            "dropouts=1 (a quorum of 4), or corrupted=0 (a quorum of 3), or clients=6 (a quorum of 4) (--banks, --corrupted, --dropouts); "
            "nothing was read",
        ),
        (("--keys", "threshold", "--banks", "3", "--corrupted", "2"), "corrupted=1 (a quorum of 3), or clients=4 (a quorum of 4)"),
        (
            ("--banks", "3", "--epsilon", "0.0001"),
            "got 0.0001, too small for 20 rounds; nothing was trained; raise it, or take fewer rounds",
        ),
    ],
)
def test_simulate_refuses_what_it_cannot_do_in_one_line(options: tuple[str, ...], reason: str, log: Path) -> None:
    assert reason in refusal(here("simulate", str(log), *options))


@pytest.mark.parametrize("options", [("--banks", "80"), ("--banks", "3", "--epsilon", "0.0001")])
def test_a_refused_simulation_leaves_no_folder_and_does_not_say_that_it_trains(options: tuple[str, ...], log: Path, tmp_path: Path) -> None:
    result = here("simulate", str(log), *options, "--out", str(tmp_path / "runs" / "run1"))
    refusal(result)
    assert "Training" not in result.stderr
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    refusal(here("simulate", str(log), *options, "--out", str(tmp_path / "mine")))
    assert list(tmp_path.iterdir()) == [tmp_path / "mine"]


def test_simulate_says_when_noise_drowns_what_is_learned_and_when_delta_is_large(log: Path) -> None:
    loud = json.loads(here("simulate", str(log), "--quick", "--banks", "3", "--epsilon", "0.01", "--delta", "0.0003", "--json").stdout)
    assert any("times the most that a record adds to a step: hardly anything is learned" in note for note in loud["notes"])
    assert any("delta 0.0003 is large: times the" in note for note in loud["notes"])
    calm = json.loads(here("simulate", str(log), "--quick", "--banks", "3", "--json").stdout)
    assert not any("hardly anything" in note or "is large" in note for note in calm["notes"])


@pytest.mark.nightly  # each of the two is audited, which takes the better part of a minute
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--keys", "escrow"), ("EscrowKey", "one key holder beside banks and server opens the sums", "the key holder")),
        (
            ("--keys", "threshold", "--corrupted", "1", "--banks", "5", "--dropouts", "1"),
            (
                "ThresholdKey",
                "nobody holds a key, any 4 of 5 banks open a sum together, and the server learns it",
                "the server, which learns every sum",
            ),
        ),
    ],
    ids=["escrow", "threshold"],
)
def test_simulate_under_other_keys_says_who_holds_them_and_is_audited_and_reported_likewise(
    options: tuple[str, ...], words: tuple[str, str, str], log: Path, tmp_path: Path
) -> None:
    mode, held, reader = words
    run = tmp_path / "run"
    shown = here("simulate", str(log), "--quick", "--banks", "3", *options, "--out", str(run))
    assert shown.exit_code == 0, shown.output
    assert f"Trust mode {mode}: {held}" in " ".join(shown.stdout.split())
    written = json.loads((run / "history.json").read_text())
    assert (written["mode"], written["keys"]["mode"]) == (mode, mode)
    audited = here("audit", str(run), "--quick", "--json")
    assert audited.exit_code in (0, 3), audited.output
    found = json.loads(audited.stdout)
    assert found["mode"] == mode
    assert reader in audited.stdout
    reported = here("report", str(run))
    assert reported.exit_code == 0, reported.output
    assert mode in (run / "report.md").read_text()
    edited = written | {"keys": written["keys"] | {"mode": "SharedKey", "corrupted": 0, "dropouts": 0}}
    (run / "history.json").write_text(json.dumps(edited))
    assert "the mode" in refusal(here("audit", str(run)))


def test_a_misspelled_command_is_corrected_once() -> None:
    for arguments in (("simulat",), ("ledger", "sho"), ("keys", "ini")):
        assert here(*arguments).stderr.count("Did you mean") == 1


def test_simulate_refuses_a_folder_that_is_a_file(log: Path) -> None:
    assert f"expected --out to name a folder, and {log} is a file" in refusal(here("simulate", str(log), "--quick", "--out", str(log)))


@pytest.mark.parametrize("options", [("--features", "raw"), ("--noise-seed", "1"), ("--banks", "three"), ("--keys", "none")])
def test_simulate_has_no_such_option(options: tuple[str, ...], log: Path) -> None:
    result = here("simulate", str(log), *options)
    assert result.exit_code == 2
    assert result.stdout == ""


# --- partition


def test_partition_shows_what_the_library_computes(log: Path) -> None:
    process = privfed("partition", str(log), "--banks", "4", "--alpha", "0.7", "--seed", "3", "--json")
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout)
    dealt = deal(features(load_paysim(log), NOBAL), banks=4, alpha=0.7, seed=3)
    labels = [shard.labels for shard in dealt.banks.values()]
    expected = divergence_table(labels)
    rows = pd.DataFrame(result["banks"])
    assert rows["bank"].tolist() == list(dealt.banks)
    assert rows["records"].tolist() == [len(own) for own in labels]
    assert rows["frauds"].tolist() == [int(own.sum()) for own in labels]
    assert rows["kl_divergence"].to_numpy() == pytest.approx(expected["kl_divergence"].to_numpy(), rel=1e-12)
    assert rows["total_variation"].to_numpy() == pytest.approx(expected["total_variation"].to_numpy(), rel=1e-12)
    assert result["deviation"] == dealt.partition.deviation
    assert result["set_aside"] == {"records": len(dealt.test), "frauds": int(dealt.test.labels.sum())}
    assert result["scope"] == "simulation only"


def test_partition_shows_the_banks_that_simulate_trains(simulated: "tuple[subprocess.CompletedProcess[str], Path]", log: Path) -> None:
    shown = json.loads(here("partition", str(log), "--banks", "3", "--seed", "4", "--json").stdout)
    trained = json.loads(simulated[0].stdout)
    for key in ("alpha", "seed", "deviation", "redraws", "moved"):
        assert shown[key] == trained[key]
    own = [(bank["bank"], bank["records"], bank["frauds"]) for bank in shown["banks"]]
    assert own == [(bank["name"], bank["records"], bank["frauds"]) for bank in trained["banks"]]


def test_partition_shows_a_table_with_its_totals(log: Path) -> None:
    result = here("partition", str(log), "--banks", "3", "--alpha", "1")
    assert result.exit_code == 0
    shown = " ".join(result.stdout.split())
    for text in ("log.csv dealt to 3 banks, alpha 1", "bank_3", "KL", "TVD", "Simulation only", "drawn share"):
        assert text in shown
    together = re.search(r"All together: ([\d,]+) records, (\d+) frauds. Set aside for evaluation, .*?: (\d+) records, (\d+) frauds", shown)
    assert together
    records, frauds, aside, aside_frauds = (int(number.replace(",", "")) for number in together.groups())
    assert (records + aside, frauds + aside_frauds) == (3000, 90)


def test_partition_says_what_was_done_so_that_no_bank_is_empty(log: Path) -> None:
    gentle = here("partition", str(log), "--banks", "3", "--alpha", "50").stdout
    extreme = " ".join(here("partition", str(log), "--banks", "5", "--alpha", "0.05").stdout.split())
    assert "Note:" not in gentle
    assert re.search(r"Note: so that every bank .* drawn anew 100 times and then \d+ records were moved", extreme)


def test_partition_by_a_column_names_banks_and_obeys_no_cell(log: Path) -> None:
    result = here("partition", str(log), "--column", "branch")
    assert result.exit_code == 0
    assert "north" in result.stdout
    assert "[red]south" in result.stdout  # shown, not obeyed
    assert "\x1b" not in result.stdout
    by_column = json.loads(here("partition", str(log), "--column", "branch", "--json").stdout)
    steps = pd.read_csv(log)["step"] % 2
    assert {bank["bank"]: bank["records"] for bank in by_column["banks"]} == {
        "north": int((steps == 0).sum()),
        "[red]south\x1b[31m": int((steps == 1).sum()),
    }


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--banks", "0"), "expected --banks from 1, got 0"),
        (("--alpha", "-1"), "expected --alpha to be a finite number above 0"),
        (
            ("--column", "branch", "--alpha", "1"),
            "expected --column without --alpha: the column alone says who gets what; nothing was read",
        ),
        (("--column", "branch", "--banks", "3", "--seed", "1"), "expected --column without --banks and --seed"),
        (("--column", "Branch"), "no column Branch; 'branch' is similar"),
        (("--column", "amount"), "more than 1000 values in amount; nothing was split"),
        (("--banks", "100000"), "fewer"),
    ],
)
def test_partition_refuses_what_it_cannot_do_in_one_line(options: tuple[str, ...], reason: str, log: Path) -> None:
    assert reason in refusal(here("partition", str(log), *options))


# --- ledger

STEPS = PoissonSampledGaussian(noise_multiplier=1.25, sample_rate=0.01, steps=30)


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    path = tmp_path / "bank.ledger"
    with Ledger.open(path, population="[bold]bank", budget=Budget(epsilon=8.0, delta=1e-6)) as opened:
        for round_number in range(2):
            opened.commit(opened.reserve(STEPS, session=b"session", round=round_number, attempt=0))
        opened.reserve(GaussianRelease(noise_multiplier=4.0, count=2), session=b"session", round=2, attempt=0)
    return path


def test_ledger_show_gives_every_charge_and_what_is_spent(ledger: Path) -> None:
    process = privfed("ledger", "show", str(ledger), "--json")
    assert process.returncode == 0, process.stderr
    shown = json.loads(process.stdout)
    with Ledger.reopen(ledger) as opened:
        assert shown["spent"] == opened.spent()
        assert shown["head"] == opened.head.hex()
    assert shown["budget"] == {"epsilon": 8.0, "delta": 1e-6}
    assert shown["population"] == "[bold]bank"
    assert [(charge["round"], charge["committed"]) for charge in shown["charges"]] == [(0, True), (1, True), (2, False)]
    assert shown["charges"][0]["event"] == {
        "kind": "poisson sampled gaussian",
        "noise_multiplier": 1.25,
        "sample_rate": 0.01,
        "steps": 30,
    }
    assert bytes.fromhex(shown["charges"][0]["session"]) == b"session"


def test_ledger_show_sums_up_each_session_for_people_and_counts_rounds_from_1(ledger: Path) -> None:
    result = here("ledger", "show", str(ledger))
    assert result.exit_code == 0
    shown = " ".join(result.stdout.split())
    for text in (
        "Ledger of [bold]bank",
        "rounds 1 to 2, 2 charges, all done. Each: 30 noisy training steps",
        "noise multiplier 1.25.",
        "round 3, 1 charge, 1 of them never finished, which counts as well. Each: 2 noisy sums over all records",
        "of 8, at delta 1e-06",
        "Head: ",
    ):
        assert text in shown
    assert "opened" not in shown
    assert max(len(line) for line in result.stdout.splitlines()) <= 100


def test_ledger_show_all_gives_every_charge_and_every_other_row(ledger: Path) -> None:
    with Ledger.reopen(ledger) as opened:
        opened.reserve(STEPS, session=b"session", round=2, attempt=1)
        opened.record_countersignatures(rows=1, context=bytes(32), start=0, signature=b"", hashes=(), signatures={"peer": bytes(64)})
    shown = " ".join(here("ledger", "show", str(ledger), "--all").stdout.split())
    for text in (
        "opened",
        "round 1: 30 noisy",
        "round 2: 30 noisy",
        "round 3: 2 noisy",
        "round 3, attempt 2: 30 noisy",
        "head of 1 rows countersigned by peer",
    ):
        assert shown.count(text) == 1
    assert shown.count("; done") == 2
    assert shown.count("never finished") == 2


def test_ledger_show_states_what_the_silo_spent(tmp_path: Path) -> None:
    path = tmp_path / "silo.ledger"
    budget = Budget(epsilon=8.0, delta=1e-6)
    with Ledger.open(path, population="bank", budget=budget, silo_budget=Budget(epsilon=3.0, delta=1e-9)):
        pass
    assert "epsilon 0.00 of 3, at delta 1e-09. Protected: one silo" in " ".join(here("ledger", "show", str(path)).stdout.split())
    assert json.loads(here("ledger", "show", str(path), "--json").stdout)["silo_budget"] == {"epsilon": 3.0, "delta": 1e-9}


def test_ledger_show_of_an_unlimited_budget_shows_infinity_and_no_invalid_json(tmp_path: Path) -> None:
    path = tmp_path / "free.ledger"
    with Ledger.open(path, population="free", budget=Budget.unlimited(delta=1e-6)) as opened:
        opened.reserve(NonPrivateRelease(), session=b"s", round=0, attempt=0)
    assert "epsilon infinite without a limit, at delta 1e-06" in here("ledger", "show", str(path)).stdout
    shown = json.loads(here("ledger", "show", str(path), "--json").stdout)
    assert shown["spent"] is None
    assert shown["budget"]["epsilon"] is None


def test_ledger_verify_says_what_was_verified_and_what_was_not(ledger: Path) -> None:
    process = privfed("ledger", "verify", str(ledger))
    assert process.returncode == 0, process.stderr
    assert "Checked: all 6 rows of the ledger of [bold]bank are as they were written" in process.stdout
    assert "Not checked: whose ledger this is. Give --population" in process.stdout
    assert "Not checked: whether all its files were set back to an older copy or exchanged together. Give --head" in process.stdout
    verified = json.loads(here("ledger", "verify", str(ledger), "--json").stdout)
    assert verified["verified"] is True
    assert verified["rows"] == 6
    assert (verified["population_checked"], verified["rows_since_head"]) == (False, None)
    assert f"Head: {verified['head']}" in process.stdout


def test_ledger_verify_with_population_and_head_leaves_nothing_unchecked(ledger: Path, tmp_path: Path) -> None:
    head = tmp_path / "then.txt"
    head.write_text(here("ledger", "verify", str(ledger)).stdout)
    with Ledger.reopen(ledger) as opened:
        opened.reserve(STEPS, session=b"session", round=7, attempt=0)
    result = here("ledger", "verify", str(ledger), "--population", "[bold]bank", "--head", str(head))
    assert result.exit_code == 0, result.output
    assert "Not checked" not in result.stdout
    assert "it extends the head that you remember, by 1 rows" in result.stdout
    digits = re.findall(r"[0-9a-f]{64}", head.read_text())[0]
    by_digits = json.loads(here("ledger", "verify", str(ledger), "--population", "[bold]bank", "--head", digits.upper(), "--json").stdout)
    assert (by_digits["population_checked"], by_digits["rows_since_head"]) == (True, 1)


def test_ledger_verify_refuses_another_banks_ledger_and_an_older_copy(ledger: Path, tmp_path: Path) -> None:
    older = tmp_path / "older" / ledger.name
    older.parent.mkdir()
    for suffix in ("", ".head"):
        shutil.copy(ledger.with_name(ledger.name + suffix), older.with_name(older.name + suffix))
    with Ledger.reopen(ledger) as opened:
        opened.reserve(STEPS, session=b"session", round=7, attempt=0)
        head = opened.head.hex()
    assert here("ledger", "verify", str(older)).exit_code == 0  # by itself it holds
    assert "does not extend the head that is remembered" in refusal(here("ledger", "verify", str(older), "--head", head))
    assert "is the ledger of '[bold]bank', not of 'other'" in refusal(here("ledger", "verify", str(ledger), "--population", "other"))


def test_ledger_verify_takes_the_head_from_the_memory_of_a_peer(ledger: Path, tmp_path: Path) -> None:
    peer, owner, memory = Identity.generate("peer"), Identity.generate("owner"), HeadMemory(tmp_path / "heads.sqlite")
    older = {suffix: ledger.with_name(ledger.name + suffix).read_bytes() for suffix in ("", ".head")}
    with Ledger.reopen(ledger) as opened:
        opened.reserve(STEPS, session=b"session", round=7, attempt=0)
        statement = state_head(opened, owner, context=bytes(32), peers=("peer",))
    memory.countersign([read_statement(statement, owner=owner.public, population="[bold]bank", context=bytes(32))], signer=peer)
    before = (tmp_path / "heads.sqlite").read_bytes()
    arguments = ("ledger", "verify", str(ledger), "--head", str(tmp_path / "heads.sqlite"))
    assert "has not grown since" in here(*arguments).stdout
    for suffix, content in older.items():
        ledger.with_name(ledger.name + suffix).write_bytes(content)
    assert "does not extend the head that is remembered" in refusal(here(*arguments))
    assert (tmp_path / "heads.sqlite").read_bytes() == before


@pytest.mark.parametrize(
    ("content", "reason"),
    [("no head here", "exactly one such number, got 0 in head.txt"), (f"{'ab' * 32} {'cd' * 32}", "got 2 in head.txt")],
)
def test_ledger_verify_refuses_a_file_that_says_no_head(content: str, reason: str, ledger: Path, tmp_path: Path) -> None:
    (tmp_path / "head.txt").write_text(content)
    assert reason in refusal(here("ledger", "verify", str(ledger), "--head", str(tmp_path / "head.txt")))
    for head in ("00ff", "abc", "0" * 63, str(tmp_path)):
        reason = refusal(here("ledger", "verify", str(tmp_path / "no.ledger"), "--head", head))
        assert f"got {head!r}, {len(head)} characters and no file; nothing was checked" in reason
        assert "give the head that privfed ledger verify printed then" in reason


@pytest.mark.parametrize("command", ["show", "verify"])
def test_looking_at_a_ledger_writes_to_no_file(command: str, ledger: Path) -> None:
    def files() -> dict[str, tuple[bytes, int]]:
        return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in ledger.parent.iterdir()}

    before = files()
    assert here("ledger", command, str(ledger)).exit_code == 0
    assert files() == before


@pytest.mark.parametrize("command", ["show", "verify"])
def test_a_tampered_ledger_is_refused(command: str, ledger: Path) -> None:
    content = bytearray(ledger.read_bytes())
    content[content.index(b'"round":1') + 8] = ord("7")
    ledger.write_bytes(content)
    assert re.search(r"bank\.ledger is not the ledger that was written: row \d is not", refusal(here("ledger", command, str(ledger))))


def test_a_tampered_ledger_is_refused_by_a_process_of_its_own(ledger: Path) -> None:
    ledger.with_name("bank.ledger.head").unlink()
    process = privfed("ledger", "verify", str(ledger))
    assert process.returncode == 2
    assert process.stdout == ""
    assert process.stderr.startswith("refused: the head file bank.ledger.head is missing or damaged")
    assert "restore it with bank.ledger" in process.stderr
    assert len(process.stderr.splitlines()) == 1
    assert [path.name for path in ledger.parent.iterdir()] == ["bank.ledger"]


@pytest.mark.parametrize("command", ["show", "verify"])
def test_a_ledger_that_is_open_elsewhere_is_refused(command: str, ledger: Path) -> None:
    with Ledger.reopen(ledger):
        assert "is open in another process" in refusal(here("ledger", command, str(ledger)))


@pytest.mark.parametrize("command", ["show", "verify"])
def test_what_is_no_ledger_is_refused_and_gets_no_files_beside_it(command: str, tmp_path: Path) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("not a ledger")
    assert "notes.txt is no ledger: it is not a database, and no notes.txt.head lies beside it" in refusal(
        here("ledger", command, str(other))
    )
    assert "Is a directory" in refusal(here("ledger", command, str(tmp_path)))
    assert "found none" in refusal(here("ledger", command, str(tmp_path / "absent")))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


# --- every command


def commands() -> Iterator[tuple[str, typer.core.TyperCommand]]:
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from ((f"{name} {inner}", each) for inner, each in command.commands.items())
        else:
            yield name, command


@pytest.mark.parametrize(("name", "command"), list(commands()), ids=[name for name, _ in commands()])
def test_every_command_teaches_with_examples_that_parse(name: str, command: typer.core.TyperCommand) -> None:
    examples = re.findall(rf"^ *privfed {name}\b(.*)$", command.help or "", re.MULTILINE)
    assert examples
    for example in examples:
        command.make_context(name, shlex.split(example))
    shown = here(*name.split(), "--help")
    assert shown.exit_code == 0
    assert f"privfed {name}{examples[0]}" in shown.stdout


def test_help_does_not_wait_for_torch_or_pandas() -> None:
    program = (
        "import sys; from typer.testing import CliRunner; from privfed.cli import app; "
        "[CliRunner().invoke(app, [*name.split(), '--help']) for name in sys.argv[1:]]; "
        "raise SystemExit(bool({'torch', 'pandas', 'scipy', 'tenseal'} & set(sys.modules)))"
    )
    names = [name for name, _ in commands()]
    keys = ["init", "wrap", "unwrap", "rotate", "show", "scan"]
    deploy = [f"deploy {name}" for name in ("init", "certificates", "check")]
    groups = ["history show", "ledger show", "ledger verify", *(f"keys {name}" for name in keys), *deploy]
    assert names == ["demo", "simulate", "partition", "audit", "report", *groups]
    assert subprocess.run([sys.executable, "-c", program, *names], check=False).returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("simulate", "absent.csv"),
        ("simulate", "absent.csv", "--rounds", "0"),
        ("simulate", "absent.csv", "--epsilon", "-1"),
        ("simulate", __file__, "--quick", "--rounds", "1"),
        ("simulate", __file__, "--dropouts", "1"),
        ("simulate", __file__, "--keys", "threshold", "--dropouts", "3"),
        ("simulate", __file__, "--out", __file__),
        ("partition", "absent.csv"),
        ("partition", __file__, "--column", "a", "--alpha", "1"),
        ("audit", "absent"),
        ("report", "absent"),
        ("report", "absent", "--no-audit", "--quick"),
        ("demo", "--out", __file__),
        ("ledger", "verify", "absent"),
    ],
    ids=" ".join,
)
def test_a_bad_argument_is_refused_before_torch_or_pandas_is_loaded(arguments: tuple[str, ...]) -> None:
    program = (
        "import sys; from typer.testing import CliRunner; from privfed.cli import app; "
        "result = CliRunner().invoke(app, sys.argv[1:]); print(result.output); "
        "raise SystemExit(result.exit_code != 2 or bool({'torch', 'pandas'} & set(sys.modules)))"
    )
    process = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout
    assert process.stdout.startswith("refused: ")


def test_the_version_is_shown() -> None:
    assert here("--version").stdout == f"privfed {version('privfed')}\n"


def test_the_command_alone_shows_what_there_is() -> None:
    process = privfed()
    assert "privfed demo" in process.stdout + process.stderr
    assert "simulate" in process.stdout + process.stderr


def failing(error: BaseException) -> Result:
    probe = typer.Typer(cls=Refusing, pretty_exceptions_enable=False)
    probe.callback()(lambda: None)

    def fail() -> None:
        raise error

    probe.command("fail")(fail)
    inner = typer.Typer()
    inner.command("fail")(fail)
    inner.callback()(lambda: None)
    probe.add_typer(inner, name="inner")
    direct, nested = CliRunner().invoke(probe, ["fail"]), CliRunner().invoke(probe, ["inner", "fail"])
    assert (direct.exit_code, direct.stderr) == (nested.exit_code, nested.stderr)
    return direct


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (BudgetExceededError("over the budget;\n nothing was spent"), "over the budget; nothing was spent"),
        (ValueError("expected 3, got 2"), "expected 3, got 2"),
        (FileNotFoundError("expected a ledger at x, found none"), "expected a ledger at x, found none"),
        (OSError(errno.ENOSPC, "No space left on device", "out"), "out: No space left on device; nothing was done"),
    ],
)
def test_what_the_library_refuses_is_one_line_and_exit_code_2(error: Exception, line: str) -> None:
    assert refusal(failing(error)) == line


@pytest.mark.parametrize("error", [RuntimeError("a mistake of ours"), TypeError("another"), BrokenPipeError(errno.EPIPE, "Broken pipe")])
def test_what_is_no_refusal_is_not_dressed_up_as_one(error: Exception) -> None:
    result = failing(error)
    assert result.exit_code == 1
    assert "refused" not in result.stderr


def test_a_traceback_shows_no_variables() -> None:
    program = (
        "import privfed.data.paysim as paysim; from privfed.cli import app\n"
        "def broken(path):\n    secret = 'private ' + 'row'\n    raise RuntimeError('broken')\n"
        "paysim.load_paysim = broken\n"
        f"app(['partition', {__file__!r}])"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert process.returncode == 1
    assert "RuntimeError: broken" in process.stderr
    assert "private row" not in process.stderr


# --- terminal


@pytest.mark.parametrize(
    ("call", "shown"),
    [
        (lambda: number(float("nan")), "-"),
        (lambda: number(0.12345), "0.123"),
        (lambda: epsilon_of(3.996), "4.00"),
        (lambda: epsilon_of(0.00123), "0.0012"),
        (lambda: epsilon_of(0.0), "0.00"),
        (lambda: epsilon_of(float("inf")), "infinite"),
        (lambda: duration(99.4), "99 s"),
        (lambda: duration(200), "3 min"),
        (lambda: bytes_of(999), "999 B"),
        (lambda: bytes_of(30_000), "30.0 kB"),
        (lambda: bytes_of(2_345_678), "2.3 MB"),
        (lambda: bytes_of(5e12), "5000.0 GB"),
        (lambda: printable("a\x1b[31m\nb"), "a\ufffd[31m\ufffdb"),
        (lambda: len(printable("x" * 1000)), 80),
    ],
)
def test_numbers_and_names_are_shown_plainly(call: Callable[[], object], shown: object) -> None:
    assert call() == shown


def test_progress_says_how_long_the_other_rounds_will_take(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 160.0, 220.0])
    monkeypatch.setattr("privfed.cli.terminal.time.monotonic", lambda: next(clock))
    bar = Progress(disable=True)
    progress = RoundProgress(bar)
    progress.training(3, banks=40)
    assert bar.tasks[0].description == "Training 40 banks in rounds"
    for number_, left in ((0, "2 min left"), (1, "60 s left"), (2, "3/3")):
        progress.round(SimpleNamespace(record=SimpleNamespace(round=number_), evaluation=None))
        assert bar.tasks[0].fields["state"].endswith(left)


def test_a_long_cell_is_wrapped_and_not_cut_off(capsys: pytest.CaptureFixture[str]) -> None:
    cell = "76% of the values right (guessing: 70%); 1.0 of 3 records certified; 2 certificates were false [70% to 82%]"
    Console(width=80).print(table("Title", ("party", "finding"), rows=[("the server", cell)], left=2))
    shown = capsys.readouterr().out
    assert "\u2026" not in shown
    words = re.sub(r"[^\w%:;.()\[\] ]", " ", shown).split()
    assert [word for word in cell.split() if word in words] == cell.split()


def test_a_table_shows_markup_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    Console(width=60).print(table("[i]title", ("bank", "records"), rows=[("[red]x[/red]", "1")], caption="[b]caption"))
    shown = capsys.readouterr().out
    for text in ("[i]title", "[red]x[/red]", "[b]caption"):
        assert text in shown


def test_a_shell_completes_commands() -> None:
    asked = {"_PRIVFED_COMPLETE": "complete_bash", "COMP_WORDS": "privfed si", "COMP_CWORD": "1"}
    result = subprocess.run(
        [sys.executable, "-c", "from privfed.cli import app; app(prog_name='privfed')"],
        env=os.environ | asked,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.split() == ["simulate"]
