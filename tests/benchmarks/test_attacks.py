import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks.attacks import __main__ as attacks
from benchmarks.attacks.cases import cases
from benchmarks.attacks.images import find_images, image_cases
from benchmarks.attacks.outcome import Case, Missing, Trial, outcome
from benchmarks.attacks.servers import server_cases

torch.set_num_threads(1)
APP = typer.Typer()
APP.command()(attacks.main)


def case(**changes: object) -> Case:
    facts = {"attack": "guess", "setting": "anything", "measure": "rows exact", "run": trial, "repeats": 4}
    return Case(**(facts | changes))


def trial(seed: int) -> Trial:
    return Trial(score=float(seed % 2), baseline=0.25, seconds=0.1 * seed)


TRIALS = [trial(seed) for seed in range(4)]


def test_shares_of_successes_have_exact_intervals_and_others_students() -> None:
    found = outcome(case(), TRIALS, judge=True)
    assert (found.score, found.baseline, found.seeds) == (0.5, 0.25, 4)
    assert (found.low, found.high) == pytest.approx((0.0676, 0.9324), abs=1e-4)  # Clopper and Pearson, 2 of 4
    assert found.advantage == pytest.approx(1 / 3)
    others = outcome(case(), [Trial(score=value, baseline=0.0, seconds=0.1) for value in (0.25, 0.5, 0.75)], judge=True)
    # Student's quantile for two degrees of freedom, times 0.25 / sqrt(3).
    assert others.high == pytest.approx(0.5 + 4.3027 * 0.25 / np.sqrt(3), abs=1e-3)
    assert outcome(case(measure="PSNR in dB"), TRIALS, judge=True).advantage is None


@pytest.mark.parametrize(
    ("promise", "kept"),
    [
        ({"least": 0.5}, True),
        ({"least": 0.6}, False),
        ({"near": 0.3}, True),
        ({"near": 0.2}, False),
        ({"bound": 0.4}, True),
        ({"bound": 0.01}, False),
        ({"seconds": 0.2}, True),
        ({"seconds": 0.1}, False),
        ({"least": 0.5, "seconds": 0.1}, False),
    ],
)
def test_a_promise_is_kept_or_not(promise: dict[str, float], kept: bool) -> None:
    assert outcome(case(**promise), TRIALS, judge=True).kept is kept
    assert outcome(case(**promise), TRIALS, judge=False).kept is None


def test_a_false_certificate_breaks_every_promise() -> None:
    trials = [Trial(score=1.0, baseline=0.0, seconds=0.0, false=1), *TRIALS]
    found = outcome(case(least=0.1), trials, judge=True)
    assert found.false == 1
    assert found.kept is False


def test_attacks_are_no_worse_than_guesses_in_the_quick_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attacks, "find_images", lambda: None)
    printed = CliRunner().invoke(APP, ["--quick", "--json", "--only", "analytic"])
    assert printed.exit_code == 0
    lines = [json.loads(line) for line in printed.stdout.splitlines()]
    assert [line["attack"] for line in lines] == ["analytic", "analytic", "images"]
    assert all(line["score"] > line["baseline"] for line in lines[:2])
    assert all(line["kept"] is None and line["promised"] and line["seeds"] == 3 for line in lines[:2])
    assert "no cifar10_12k.npz" in lines[2]["missing"]


@pytest.mark.parametrize("name", ["imprinting", "disaggregation", "label distribution", "Dirac-row"])
def test_what_is_read_by_servers_and_found_by_auditors_is_more_than_guessed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for one in server_cases():
        if name in one.attack:
            told = one.run(0)
            assert told.score > told.baseline or ("right client" in one.setting and told.score == 1.0)


def test_a_broken_promise_is_the_exit_status_and_stands_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attacks, "find_images", lambda: None)
    monkeypatch.setattr(attacks, "server_cases", lambda: ())
    monkeypatch.setattr(attacks, "cases", lambda: (case(least=0.6),))
    printed = CliRunner().invoke(APP, [])
    assert printed.exit_code == 1
    assert "NO" in printed.stdout
    monkeypatch.setattr(attacks, "cases", lambda: (case(least=0.5),))
    assert CliRunner().invoke(APP, []).exit_code == 0


def test_a_peer_that_cannot_be_installed_or_does_not_run_is_told_with_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(attacks.venv, "create", lambda *_, **__: None)

    def refused(*_: object, **__: object) -> None:
        raise subprocess.CalledProcessError(1, "pip", stderr="looked everywhere\nno such package")

    monkeypatch.setattr(attacks.subprocess, "run", refused)
    told = attacks.beside(tmp_path)
    assert isinstance(told, Missing)
    assert told.missing == "it could not be installed: no such package"
    done = subprocess.CompletedProcess([], 1, stdout="", stderr="Traceback\nRuntimeError: operator does not exist")
    monkeypatch.setattr(attacks.subprocess, "run", lambda *_, **__: done)
    told = attacks.beside(tmp_path)
    assert isinstance(told, Missing)
    assert told.missing == "it was installed and does not run: RuntimeError: operator does not exist"


def test_every_case_has_a_name_of_its_own_and_is_judged_on_several_seeds(tmp_path: Path) -> None:
    every = [*cases(), *server_cases(), *image_cases(tmp_path)]
    assert len({(one.attack, one.setting) for one in every}) == len(every)
    assert all(one.repeats >= 3 for one in every)
    assert all(one.repeats >= 10 for one in every if one.least is not None and "photo" not in one.setting)


def test_where_photos_are_they_are_found(shared_data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PRIVFED_DATA", str(shared_data))
    assert find_images() == shared_data / "cifar10_12k.npz"
    monkeypatch.setenv("PRIVFED_DATA", str(tmp_path))
    assert find_images() is None
