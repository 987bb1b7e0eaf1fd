import hashlib
import json
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from privfed.cli import app
from privfed.demo import BANKS, BUDGET, FULL, QUICK, DemoResult, Size, run_demo
from privfed.dp.ledger import Ledger
from privfed.dp.mechanism import GaussianRelease
from privfed.history import RoundSummary
from privfed.saved import SavedRun
from privfed.strict_json import checksum

torch.set_num_threads(1)

TINY = Size(rows=8_000, rounds=2, steps=4, repeats=2)
NAMES = ["bank_1", "bank_2", "bank_3"]
COMMAND = "privfed demo --quick"


@pytest.fixture(scope="module")
def progress() -> list[object]:
    return []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def result(folder: Path, progress: list[object]) -> DemoResult:
    return run_demo(TINY, folder, command=COMMAND, progress=progress.append, auditing=progress.append)


def contents(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def findings(result: DemoResult) -> list[dict[str, Any]]:
    audit: Any = result.to_json()["audit"]
    return audit


def test_progress_tells_every_round_and_every_repeat(result: DemoResult, progress: list[object]) -> None:
    assert [type(step) for step in progress] == [RoundSummary, RoundSummary, int, int]
    assert progress[2:] == [1, 2]


def test_the_result_is_one_json_object(result: DemoResult) -> None:
    values: dict[str, Any] = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert values["rounds"] == len(values["pr_auc"]) == 2
    assert list(values["epsilon"]) == NAMES
    assert len(NAMES) == BANKS
    assert all(0 < epsilon <= BUDGET.epsilon for epsilon in values["epsilon"].values())
    assert (values["delta"], values["mode"], values["he_error_max"]) == (1e-6, "SharedKey", 0)


def test_the_audit_shows_nothing_readable_at_the_server(result: DemoResult) -> None:
    at_server = [finding for finding in findings(result) if finding["adversary"] == "the server"]
    assert at_server
    for finding in at_server:
        assert finding["applicable"] is False
        assert finding["score"] is None
        assert finding["bytes_of_ciphertext"] > 100_000


def test_the_audit_certifies_rows_of_an_unprotected_update_and_none_under_protection(result: DemoResult) -> None:
    for party in ("the server, given the key", "the server of a run without encryption"):
        best = max(finding["certified"] for finding in findings(result) if finding["adversary"] == party)
        assert best >= 2
    audited = [finding for finding in findings(result) if not finding["control"] and finding["applicable"]]
    assert len(audited) == 9
    assert all(finding["certified"] == 0 and finding["false_certificates"] == 0 for finding in audited)
    # 48 cells at the least, numbers and categories: within four standard errors of what guessing reaches.
    rows = [finding for finding in audited if finding["measure"] == "of cells right"]
    assert all(abs(finding["score"] - finding["baseline"]) < 4 * 0.5 / 48**0.5 for finding in rows)
    assert all("DP-SGD with noise multiplier" in finding["protection"] for finding in audited)


def test_statements_are_about_every_bank_and_hold(result: DemoResult) -> None:
    assert [statement.population for statement in result.statements] == NAMES
    for statement in result.statements:
        assert statement.private
        assert statement.recompute() == pytest.approx(result.outcome.history.epsilon[statement.population], rel=1e-6)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/<pid>/mem")
def test_the_servers_memory_was_searched_and_the_report_says_so(result: DemoResult, folder: Path) -> None:
    assert result.server_has_secret_key is False
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "its memory was searched for the shared key and the key of every round: not found" in page


def test_what_could_not_be_searched_is_reported_as_not_tested(result: DemoResult, tmp_path: Path) -> None:
    unsearched = replace(result, server_has_secret_key=None)
    values = json.loads(unsearched.write_report(tmp_path).with_suffix(".json").read_text(encoding="utf-8"))
    assert [check["holds"] for check in values["checks"] if "no secret key" in check["claim"]] == [None]


@pytest.mark.usefixtures("result")
def test_the_folder_holds_a_saved_run_its_audit_and_a_report_in_three_layouts(result: DemoResult, folder: Path) -> None:
    ledgers = [f"{name}.ledger{suffix}" for name in NAMES for suffix in ("", ".head")]
    reports = ["report.html", "report.json", "report.md"]
    assert sorted(contents(folder)) == ["audit.json", *ledgers, "history.json", "initial.npz", "model.npz", *reports]
    run = SavedRun.load(folder)
    assert run.demonstration
    assert run.command == COMMAND
    assert [summary.record for summary in run.history.rounds] == [summary.record for summary in result.outcome.history.rounds]
    assert run.statements() == result.statements
    assert repr(run.kept_audit()) == repr(result.audit)  # not ==: an advantage may be NaN, where guessing reads all
    assert COMMAND in (folder / "report.html").read_text(encoding="utf-8")


def test_the_last_lines_name_the_audit_first_and_every_command_they_name_reads_the_folder(
    result: DemoResult, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "a demo with spaces"
    shutil.copytree(folder, out)
    monkeypatch.setattr("privfed.demo.run_demo", lambda *_, **__: result)
    shown = CliRunner().invoke(app, ["demo", "--out", str(out)], env={"COLUMNS": "100"})
    assert shown.exit_code == 0, shown.output
    commands = [shlex.split(line) for line in shown.stdout.partition("Next:")[2].splitlines() if line.startswith("  ")]
    assert [command[1:-1] for command in commands[:3]] == [["audit"], ["report"], ["ledger", "show"]]
    assert commands[3][1] == "simulate"
    before = contents(out)
    for command in (*(command[1:] for command in commands[:3]), ["history", "show", str(out)]):
        short = ["--batches", "2", "--tier", "0"] if command[0] == "audit" else []
        done = CliRunner().invoke(app, [*command, *short], env={"COLUMNS": "200"})
        assert done.exit_code == 0, done.output
        assert command[0] != "history" or done.stdout.count("bank_1, bank_2, bank_3") == TINY.rounds
    changed = {name for name, digest in contents(out).items() if before[name] != digest}
    assert changed == {"audit.json", "report.html", "report.json", "report.md"}


def test_a_demonstration_replaces_an_earlier_one_and_leaves_other_files_alone(
    result: DemoResult, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SavedRun, "audit", lambda *_, **__: result.audit)
    out = tmp_path / "demo"
    shutil.copytree(folder, out)
    (out / "notes.txt").write_text("mine")
    before = contents(out)
    again = run_demo(TINY, out)
    after = contents(out)
    assert {name for name in before if before[name] == after[name]} == {"notes.txt", "initial.npz"}  # which all start from
    assert set(before) == set(after)
    assert SavedRun.load(out).statements() == again.statements
    assert SavedRun.load(out).history.pr_auc == again.outcome.history.pr_auc


def saying(*, demonstration: bool, anew: bool) -> Callable[[Path], object]:
    """Writes another mark into a history."""

    def edit(folder: Path) -> None:
        content = json.loads((folder / "history.json").read_text())
        seal = content.pop("checksum")
        content["demonstration"] = demonstration
        (folder / "history.json").write_text(json.dumps(content | {"checksum": checksum(content) if anew else seal}))

    return edit


def charge(folder: Path) -> None:
    with Ledger.reopen(folder / "bank_2.ledger") as ledger:
        ledger.reserve(GaussianRelease(noise_multiplier=1000.0), session=b"another", round=0, attempt=0)


def only_ledger(folder: Path) -> None:
    for path in folder.iterdir():
        if not path.name.startswith("bank_1"):
            path.unlink()


def only_report(folder: Path) -> None:
    for path in folder.iterdir():
        if path.suffix != ".html":
            path.unlink()


def unmark(folder: Path) -> None:
    content = json.loads((folder / "history.json").read_text())
    del content["checksum"], content["demonstration"]
    (folder / "history.json").write_text(json.dumps(content | {"checksum": checksum(content)}))


MINE: dict[str, Callable[[Path], object]] = {
    "a simulation": saying(demonstration=False, anew=True),
    "a simulation of before there was a mark": unmark,
    "a mark that was edited": lambda folder: (
        saying(demonstration=False, anew=True)(folder),
        saying(demonstration=True, anew=False)(folder),
    ),
    "a ledger that was charged since": charge,
    "a missing ledger": lambda folder: (folder / "bank_3.ledger").unlink(),
    "a ledger of somebody else": lambda folder: (folder / "bank_1.ledger").write_bytes((folder / "bank_2.ledger").read_bytes()),
    "another model": lambda folder: (folder / "model.npz").write_bytes(b"another"),
    "a ledger alone": only_ledger,
    "a report alone": only_report,
}


@pytest.mark.usefixtures("result")
@pytest.mark.parametrize("name", MINE)
def test_a_folder_with_anything_but_a_whole_demonstration_is_refused_and_stays_as_it_is(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "mine"
    shutil.copytree(folder, out)
    MINE[name](out)
    before = contents(out)
    monkeypatch.setattr("privfed.demo.run_scenario", lambda *_, **__: pytest.fail("it ran"))
    refused = CliRunner().invoke(app, ["demo", "--quick", "--out", str(out)])
    assert refused.exit_code == 2
    assert refused.stdout == ""
    reason = refused.stderr.splitlines()[-1]
    assert reason == (
        f"refused: expected a new or empty folder, or one as privfed demo left it, got {out}, which holds something else; nothing was run "
        "or overwritten; take another --out"
    )
    assert contents(out) == before


@pytest.mark.usefixtures("result")
def test_a_demonstration_that_fails_leaves_an_earlier_one_whole(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(SavedRun, "audit", fail)
    before = contents(folder)
    for out in (folder, tmp_path):
        with pytest.raises(OSError, match="the disk is full"):
            run_demo(TINY, out)
    assert contents(folder) == before
    assert list(tmp_path.iterdir()) == []


def test_delta_is_below_a_tenth_of_one_over_all_records() -> None:
    assert BUDGET.delta * FULL.rows < 0.1


def test_the_quick_demo_is_smaller() -> None:
    assert QUICK.rows <= 20_000
    assert QUICK.repeats >= 2
