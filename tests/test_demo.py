import json
import sys
from pathlib import Path

import pytest
import torch

from privfed.demo import BANKS, BUDGET, FULL, QUICK, DemoResult, Size, run_demo
from privfed.history import RoundSummary

torch.set_num_threads(1)

TINY = Size(rows=8_000, rounds=2, steps=4, repeats=2)


@pytest.fixture(scope="module")
def progress() -> list[object]:
    return []


@pytest.fixture(scope="module")
def result(progress: list[object]) -> DemoResult:
    return run_demo(TINY, progress=progress.append, auditing=progress.append)


def test_progress_tells_every_round_and_every_repeat(result: DemoResult, progress: list[object]) -> None:
    assert [type(step) for step in progress] == [RoundSummary, RoundSummary, int, int]
    assert progress[2:] == [1, 2]


def test_the_result_is_one_json_object(result: DemoResult) -> None:
    values = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert values["rounds"] == len(values["pr_auc"]) == 2
    assert set(values["epsilon"]) == set(BANKS)
    assert all(0 < epsilon <= BUDGET.epsilon for epsilon in values["epsilon"].values())
    assert (values["delta"], values["mode"], values["he_error_max"]) == (1e-6, "SharedKey", 0)


def test_the_audit_shows_nothing_readable_at_the_server(result: DemoResult) -> None:
    findings = [finding for finding in result.to_json()["audit"] if finding["adversary"] == "the server"]
    assert findings
    for finding in findings:
        assert finding["applicable"] is False
        assert finding["score"] is None
        assert finding["bytes_of_ciphertext"] > 100_000


def test_the_audit_certifies_rows_of_an_unprotected_update_and_none_under_protection(result: DemoResult) -> None:
    findings = result.to_json()["audit"]
    for party in ("the server, given the key", "the server of a run without encryption"):
        best = max(finding["certified"] for finding in findings if finding["adversary"] == party)
        assert best >= 2
    audited = [finding for finding in findings if not finding["control"] and finding["applicable"]]
    assert len(audited) == 9
    assert all(finding["certified"] == 0 and finding["false_certificates"] == 0 for finding in audited)
    # 48 cells at the least, numbers and categories: within four standard errors of what guessing reaches.
    rows = [finding for finding in audited if finding["measure"] == "of cells right"]
    assert all(abs(finding["score"] - finding["baseline"]) < 4 * 0.5 / 48**0.5 for finding in rows)
    assert all("DP-SGD with noise multiplier" in finding["protection"] for finding in audited)


def test_statements_are_about_every_bank_and_hold(result: DemoResult) -> None:
    assert [statement.population for statement in result.statements] == list(BANKS)
    for statement in result.statements:
        assert statement.private
        assert statement.recompute() == pytest.approx(result.epsilon[statement.population], rel=1e-6)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/<pid>/mem")
def test_the_servers_memory_was_searched_and_the_report_says_so(result: DemoResult, tmp_path: Path) -> None:
    assert result.server_has_secret_key is False
    page = result.write_report(tmp_path).read_text(encoding="utf-8")
    assert "its memory was searched for the shared key and the key of every round: not found" in page


def test_what_could_not_be_searched_is_reported_as_not_tested(result: DemoResult, tmp_path: Path) -> None:
    unsearched = DemoResult(history=result.history, audit=result.audit, statements=result.statements, server_has_secret_key=None)
    values = json.loads(unsearched.write_report(tmp_path).with_suffix(".json").read_text(encoding="utf-8"))
    assert [check["holds"] for check in values["checks"] if "no secret key" in check["claim"]] == [None]


def test_the_report_is_written_in_three_layouts(result: DemoResult, tmp_path: Path) -> None:
    path = result.write_report(tmp_path / "out", command="privfed demo --quick")
    assert path == tmp_path / "out" / "report.html"
    assert sorted(file.name for file in path.parent.iterdir()) == ["report.html", "report.json", "report.md"]
    assert "privfed demo --quick" in path.read_text(encoding="utf-8")


def test_delta_is_below_a_tenth_of_one_over_all_records() -> None:
    assert BUDGET.delta * FULL.rows < 0.1


def test_the_quick_demo_is_smaller() -> None:
    assert QUICK.rows <= 20_000
    assert QUICK.repeats >= 2
