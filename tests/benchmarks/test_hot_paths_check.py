import json
import math
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import hot_paths
from benchmarks.hot_paths import BASELINE, REFERENCE, SUITE, compare, ratios

APP = typer.Typer()
APP.command()(hot_paths.main)


def report(path: Path, **seconds: float) -> Path:
    """What pytest-benchmark would write of these fastest times."""
    entries = [{"name": name, "stats": {"min": value, "mean": 10 * value}} for name, value in seconds.items()]
    path.write_text(json.dumps({"benchmarks": entries}))
    return path


@pytest.fixture
def baseline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "baseline.json"
    path.write_text(json.dumps({"test_a": 2.0, "test_b": 4.0}))
    monkeypatch.setattr(hot_paths, "BASELINE", path)
    return path


def test_a_machine_that_is_slower_throughout_has_no_drift(baseline: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(APP, ["--json", "--report", str(report(tmp_path / "r", test_reference=7.0, test_a=14.0, test_b=28.0))])
    assert done.exit_code == 0
    assert [json.loads(line)["drift"] for line in done.stdout.splitlines()] == [1.0, 1.0]


@pytest.mark.parametrize(("seconds", "status"), [(4.0, 0), (4.1, 1), (0.5, 0)])
def test_a_path_that_takes_more_than_twice_its_ratio_fails(seconds: float, status: int, baseline: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(APP, ["--report", str(report(tmp_path / "r", test_reference=1.0, test_a=seconds, test_b=4.0))])
    assert done.exit_code == status
    assert ("SLOWER" in done.stdout) == bool(status)


def test_a_path_without_a_baseline_and_one_that_was_not_measured_fail(baseline: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(APP, ["--report", str(report(tmp_path / "r", test_reference=1.0, test_a=2.0, test_c=1.0))])
    assert done.exit_code == 1
    assert "no baseline" in done.stdout
    assert "not measured" in done.stdout


def test_a_path_is_shown_with_what_it_was_measured_for(baseline: Path, tmp_path: Path) -> None:
    written = report(tmp_path / "r", test_reference=1.0, **{"test_a[plain]": 2.0})
    assert "test_a[plain]" in CliRunner().invoke(APP, ["--report", str(written)]).stdout


def test_a_new_baseline_is_stored_on_request_only(baseline: Path, tmp_path: Path) -> None:
    arguments = ["--report", str(report(tmp_path / "r", test_reference=2.0, test_a=3.0))]
    before = baseline.read_text()
    assert CliRunner().invoke(APP, arguments).exit_code == 1
    assert baseline.read_text() == before
    assert CliRunner().invoke(APP, [*arguments, "--update"]).exit_code == 0
    assert json.loads(baseline.read_text()) == {"test_a": 1.5}


def test_a_report_without_the_reference_is_refused(baseline: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(APP, ["--report", str(report(tmp_path / "r", test_a=3.0))])
    assert done.exit_code == 2
    assert "nothing was compared" in done.stderr


def test_ratios_are_of_the_fastest_times() -> None:
    entries = {"benchmarks": [{"name": name, "stats": {"min": value}} for name, value in ((REFERENCE, 0.5), ("test_a", 2.0))]}
    assert ratios(entries) == {"test_a": 4.0}
    assert math.isnan(compare({"test_a": 4.0}, {})[0].drift)


def test_every_hot_path_has_a_baseline_and_every_baseline_a_path() -> None:
    suite = set(re.findall(r"^def (test_\w+)", SUITE.read_text(encoding="utf-8"), flags=re.MULTILINE)) - {REFERENCE}
    stored = json.loads(BASELINE.read_text(encoding="utf-8"))
    assert {name.partition("[")[0] for name in stored} == suite
    assert all(ratio > 0 for ratio in stored.values())
