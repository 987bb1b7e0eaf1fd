"""The operator's command over Flower where `flwr` itself cannot be had, hangs, or answers something else."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install privfed[flower]")

from privfed.engines.flower import control

Make = Callable[[str], None]


@pytest.fixture
def flwr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Puts a shell script on the path as `flwr`."""

    def make(text: str) -> None:
        script = tmp_path / "flwr"
        script.write_text(f"#!/bin/sh\n{text}\n")
        script.chmod(0o700)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return make


def reason(*arguments: str) -> str:
    """With which the command ends; the exit code of a text is 1."""
    with pytest.raises(SystemExit) as end:
        control.main(arguments)
    assert isinstance(end.value.code, str)
    assert "\n" not in end.value.code
    return end.value.code


def test_a_flwr_that_does_not_end_is_stopped_and_said_to_be(flwr: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_COMMAND_SECONDS", 0.3)
    flwr("exec sleep 60")
    text = reason("run", str(tmp_path), "--rounds", "1")
    assert text.startswith("privfed: flwr run did not end within 0.3 s and was stopped; what it asked for may have been done; see whether")
    (tmp_path / "bank_a.pub").touch()
    assert "flwr list did not end within 0.3 s" in reason("register", str(tmp_path), "--seconds", "0")


def test_no_flwr_on_the_path_is_said_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    expected = "flwr cannot be started .*; nothing was done; install privfed.flower., and put the folder that holds its flwr on the PATH"
    assert re.search(expected, reason("run", str(tmp_path), "--rounds", "1"))
    (tmp_path / "flwr").write_text("no program")  # and one that cannot be executed
    assert re.search(expected, reason("run", str(tmp_path), "--rounds", "1"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("printf '\\377\\376 no JSON'", "flwr run gave no answer"),
        ("""echo '{"success": true}'""", "flwr run gave no number of a run"),
        ("""echo '{"success": true, "run-id": 7}'""", "flwr list does not say how run 7 stands"),
        ("""echo '{"success": true, "run-id": 7, "runs": []}'""", "flwr list does not say how run 7 stands"),
        ("""echo '{"success": true, "run-id": 7, "runs": [{}]}'""", "flwr list does not say how run 7 stands"),
        ("""echo '{"success": true, "run-id": 7, "runs": [{"status": "finished:failed"}]}'""", "the run ended as finished:failed"),
    ],
)
def test_an_answer_of_another_form_is_an_error_that_says_what_is_missing(flwr: Make, tmp_path: Path, text: str, expected: str) -> None:
    flwr(text)
    assert expected in reason("run", str(tmp_path), "--rounds", "1")


def test_a_command_that_is_interrupted_says_in_one_line_that_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(control, "run", interrupted)
    assert (
        reason("run", str(tmp_path), "--rounds", "1")
        == "privfed: stopped waiting; a run that was started goes on; see flwr list consortium"
    )
