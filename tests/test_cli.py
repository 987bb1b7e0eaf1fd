import errno
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import typer
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from privfed.cli import app
from privfed.cli.refusals import Refusing
from privfed.cli.terminal import bytes_of, number, printable, table
from privfed.data.divergence import divergence_table
from privfed.data.partition import dirichlet_partition
from privfed.data.paysim import NOBAL, features, load_paysim
from privfed.data.transactions import generate_transactions
from privfed.dp.ledger import Ledger
from privfed.dp.mechanism import Budget, GaussianRelease, NonPrivateRelease, PoissonSampledGaussian
from privfed.errors import BudgetExceededError


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
    assert set(result["epsilon"]) == {"bank_a", "bank_b", "bank_c"}
    assert all(0 < epsilon <= result["budget"]["epsilon"] for epsilon in result["epsilon"].values())
    assert result["delta"] == 1e-5
    assert result["he_error_max"] == 0
    assert result["mode"] == "SharedKey"
    assert {finding["adversary"] for finding in result["audit"]} >= {"the server", "the server, given the key"}
    assert "--quick" in Path(result["report"]).read_text(encoding="utf-8")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/<pid>/mem")
def test_the_demo_searched_the_memory_of_its_server(demo: "subprocess.CompletedProcess[str]") -> None:
    assert json.loads(demo.stdout)["server_has_secret_key"] is False


def test_bytes_of_the_demo_are_those_of_one_ciphertext(demo: "subprocess.CompletedProcess[str]") -> None:
    result = json.loads(demo.stdout)
    one_ciphertext = (4096 * 7 + 64) / result["parameters"]
    assert one_ciphertext < result["bytes_up_per_parameter"] < 1.1 * one_ciphertext


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
    assert result == json.loads((out / "history.json").read_text())
    assert result["scope"] == "simulation only"
    assert result["private"] is True
    assert len(result["rounds"]) == len(result["pr_auc"]) == 2
    assert [bank["name"] for bank in result["banks"]] == ["bank_1", "bank_2", "bank_3"]
    assert all(0 < bank["epsilon"] <= 4 and bank["mechanism"] == "DpSgd" for bank in result["banks"])
    assert 2225 <= sum(bank["records"] for bank in result["banks"]) <= 2275  # three quarters of 3000, within a fraud's two legs per class
    sent = sum(summary["record"]["bytes_up"]["bank_1"] for summary in result["rounds"])
    assert result["banks"][0]["bytes_up"] == sent > 2 * 4096 * 7


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
    result = here("simulate", str(log), "--quick", "--banks", "3", "--features", "nobal", "--delta", "0.01")
    assert result.exit_code == 0, result.output
    shown = " ".join(result.stdout.split())
    for text in ("PR-AUC", "simulation only", "epsilon spent", "bank_3", "bytes per parameter up", "Trust mode SharedKey"):
        assert text in shown
    assert "delta 0.01 is not below one over the records of bank_1" in shown
    assert "2/2" in result.stderr
    assert max(len(line) for line in result.stdout.splitlines()) <= 100


def test_simulate_without_noise_says_so_and_claims_nothing(log: Path) -> None:
    result = here("simulate", str(log), "--quick", "--banks", "3", "--non-private", "--json")
    outcome = json.loads(result.stdout)
    assert outcome["private"] is False
    assert outcome["notes"] == ["no differential privacy: the banks trained without noise; for comparison only"]
    assert outcome["budget"]["epsilon"] is None
    assert {bank["epsilon"] for bank in outcome["banks"]} == {None}
    assert {bank["mechanism"] for bank in outcome["banks"]} == {"NonPrivate"}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--banks", "2"), "expected at least 3 banks, got 2"),
        (("--alpha", "0"), "expected alpha to be a finite number above 0"),
        (("--alpha", "nan"), "expected alpha to be a finite number above 0"),
        (("--rounds", "0"), "expected rounds and steps from 1"),
        (("--seed", "-1"), "seed from 0"),
        (("--epsilon", "0"), "expected epsilon to be positive"),
        (("--epsilon", "inf"), "expected epsilon to be positive and finite"),
        (("--delta", "1"), "expected delta to be above 0 and below 1"),
        (("--non-private", "--delta", "0"), "expected delta to be above 0 and below 1"),
        (("--banks", "80"), "too few frauds for 80 banks"),
    ],
)
def test_simulate_refuses_what_it_cannot_do_in_one_line(options: tuple[str, ...], reason: str, log: Path) -> None:
    assert reason in refusal(here("simulate", str(log), *options))


def test_simulate_refuses_a_folder_that_is_a_file(log: Path) -> None:
    assert "exists" in refusal(here("simulate", str(log), "--quick", "--out", str(log))).lower()


@pytest.mark.parametrize("options", [("--features", "raw"), ("--noise-seed", "1"), ("--banks", "three")])
def test_simulate_has_no_such_option(options: tuple[str, ...], log: Path) -> None:
    result = here("simulate", str(log), *options)
    assert result.exit_code == 2
    assert result.stdout == ""


# --- partition


def test_partition_shows_what_the_library_computes(log: Path) -> None:
    process = privfed("partition", str(log), "--banks", "4", "--alpha", "0.7", "--seed", "3", "--json")
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout)
    samples = features(load_paysim(log), NOBAL)
    partition = dirichlet_partition(samples, clients=4, alpha=0.7, rng=np.random.default_rng(3))
    expected = divergence_table([samples.labels[part] for part in partition.indices])
    rows = pd.DataFrame(result["banks"])
    assert rows["records"].tolist() == [len(part) for part in partition.indices]
    assert rows["frauds"].tolist() == [int(samples.labels[part].sum()) for part in partition.indices]
    assert rows["kl_divergence"].to_numpy() == pytest.approx(expected["kl_divergence"].to_numpy(), rel=1e-12)
    assert rows["total_variation"].to_numpy() == pytest.approx(expected["total_variation"].to_numpy(), rel=1e-12)
    assert result["deviation"] == partition.deviation
    assert result["scope"] == "simulation only"


def test_partition_shows_a_table_with_its_totals(log: Path) -> None:
    result = here("partition", str(log), "--banks", "3", "--alpha", "1")
    assert result.exit_code == 0
    for text in ("log.csv dealt to 3 banks, alpha 1", "bank_3", "KL", "TVD", "Simulation only", "3,000 records, 90 frauds", "drawn share"):
        assert text in result.stdout


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
        (("--banks", "0"), "expected clients >= 1"),
        (("--alpha", "-1"), "expected alpha to be a finite number above 0"),
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


def test_ledger_show_prints_a_table_for_people(ledger: Path) -> None:
    result = here("ledger", "show", str(ledger))
    assert result.exit_code == 0
    for text in (
        "Ledger of [bold]bank",
        "poisson sampled gaussian",
        "gaussian release",
        "1.25",
        "yes",
        "no",
        "of 8, at delta 1e-06",
        "Head: ",
    ):
        assert text in result.stdout
    assert max(len(line) for line in result.stdout.splitlines()) <= 100


def test_ledger_show_of_an_unlimited_budget_shows_infinity_and_no_invalid_json(tmp_path: Path) -> None:
    path = tmp_path / "free.ledger"
    with Ledger.open(path, population="free", budget=Budget.unlimited(delta=1e-6)) as opened:
        opened.reserve(NonPrivateRelease(), session=b"s", round=0, attempt=0)
    assert "epsilon inf of an unlimited budget" in here("ledger", "show", str(path)).stdout
    shown = json.loads(here("ledger", "show", str(path), "--json").stdout)
    assert shown["spent"] is None
    assert shown["budget"]["epsilon"] is None


def test_ledger_verify_says_what_was_verified(ledger: Path) -> None:
    process = privfed("ledger", "verify", str(ledger))
    assert process.returncode == 0, process.stderr
    assert "all 6 rows of the ledger of [bold]bank are as they were written" in process.stdout
    verified = json.loads(here("ledger", "verify", str(ledger), "--json").stdout)
    assert verified["verified"] is True
    assert verified["rows"] == 6
    assert f"Head: {verified['head']}" in process.stdout


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
    assert process.stderr.startswith("refused: bank.ledger is not the ledger that was written")
    assert len(process.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", ["show", "verify"])
def test_a_ledger_that_is_open_elsewhere_is_refused(command: str, ledger: Path) -> None:
    with Ledger.reopen(ledger):
        assert "is open in another process" in refusal(here("ledger", command, str(ledger)))


@pytest.mark.parametrize("command", ["show", "verify"])
def test_what_is_no_ledger_is_refused_and_gets_no_files_beside_it(command: str, tmp_path: Path) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("not a ledger")
    assert "notes.txt is no ledger" in refusal(here("ledger", command, str(other)))
    assert "Is a directory" in refusal(here("ledger", command, str(tmp_path)))
    assert "No such file" in refusal(here("ledger", command, str(tmp_path / "absent")))
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
    assert names == ["demo", "simulate", "partition", "audit", "report", "ledger show", "ledger verify"]
    assert subprocess.run([sys.executable, "-c", program, *names], check=False).returncode == 0


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
        "app(['partition', 'log.csv'])"
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


def test_a_table_shows_markup_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    Console(width=60).print(table("[i]title", ("bank", "records"), rows=[("[red]x[/red]", "1")], caption="[b]caption"))
    shown = capsys.readouterr().out
    for text in ("[i]title", "[red]x[/red]", "[b]caption"):
        assert text in shown
