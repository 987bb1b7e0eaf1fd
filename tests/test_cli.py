import json
import subprocess
import sys

import pytest


def privfed(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "privfed", *arguments], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def demo() -> "subprocess.CompletedProcess[str]":
    return privfed("demo", "--quick", "--json")


def test_the_quick_demo_prints_one_json_object_and_nothing_else(demo: "subprocess.CompletedProcess[str]") -> None:
    assert demo.returncode == 0, demo.stderr
    result = json.loads(demo.stdout)
    assert result["rounds"] == len(result["pr_auc"]) == 3
    assert set(result["epsilon"]) == {"bank_a", "bank_b", "bank_c"}
    assert all(0 < epsilon <= result["budget"]["epsilon"] for epsilon in result["epsilon"].values())
    assert result["delta"] == 1e-5
    assert result["he_error_max"] == 0
    assert result["mode"] == "SharedKey"
    assert result["audit"] == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/<pid>/mem")
def test_the_demo_searched_the_memory_of_its_server(demo: "subprocess.CompletedProcess[str]") -> None:
    assert json.loads(demo.stdout)["server_has_secret_key"] is False


def test_bytes_of_the_demo_are_those_of_one_ciphertext(demo: "subprocess.CompletedProcess[str]") -> None:
    result = json.loads(demo.stdout)
    one_ciphertext = (4096 * 7 + 64) / result["parameters"]
    assert one_ciphertext < result["bytes_up_per_parameter"] < 1.1 * one_ciphertext


def test_help_teaches_and_does_not_load_torch() -> None:
    program = (
        "import sys; from typer.testing import CliRunner; from privfed.cli import app; "
        "print(CliRunner().invoke(app, ['demo', '--help']).output); raise SystemExit('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0
    assert "--quick" in result.stdout
    assert "DP-SGD at each bank" in result.stdout
