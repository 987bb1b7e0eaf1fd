import json
from dataclasses import replace

import pytest
from typer import Typer
from typer.testing import CliRunner

from benchmarks import accounting


@pytest.fixture(scope="module")
def app() -> Typer:
    made = Typer()
    made.command()(accounting.main)
    return made


def test_the_quick_benchmark_prints_one_json_object_with_values_and_times(app: Typer) -> None:
    result = CliRunner().invoke(app, ["--quick", "--json"])
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["ordered"] is True
    first = found["settings"][0]
    assert first["pld"] == pytest.approx(4.3772, abs=1e-3)
    assert first["rdp"] == pytest.approx(4.7285, abs=1e-3)
    assert all(setting[name] >= 0 for setting in found["settings"] for name in setting if name.endswith("seconds"))


def test_an_accountant_that_is_below_one_it_must_not_be_below_is_noticed() -> None:
    outcome = accounting.sampled(*accounting.QUICK[0])
    assert outcome.ordered
    assert outcome.prv is not None
    assert outcome.rdp is not None
    assert not replace(outcome, pld=outcome.rdp * 1.01).ordered
    assert not replace(outcome, prv=outcome.rdp + 0.02).ordered
