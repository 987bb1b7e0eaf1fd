import json
import subprocess
import sys

import pytest


def test_killed_parties_go_on_where_they_stood_and_nothing_is_spent_twice_or_forgotten() -> None:
    command = [sys.executable, "-m", "tests.kill.run", "--kills", "3", "--seed", "7"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    outcome = json.loads(result.stdout)
    assert outcome["kills"] >= 3
    assert all(charged >= outcome["rounds"] for charged in outcome["charged"].values())


@pytest.mark.nightly
def test_two_hundred_kills() -> None:
    result = subprocess.run([sys.executable, "-m", "tests.kill.run", "--kills", "200"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["kills"] >= 200
