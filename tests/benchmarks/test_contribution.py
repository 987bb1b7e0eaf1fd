import json
import math
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from benchmarks import contribution
from benchmarks.contribution import Scoring, Speed
from privfed.contribution.estimators import Exact
from privfed.contribution.game import EuclideanUtility, Game

APP = typer.Typer()
APP.command()(contribution.main)


def test_averaging_again_and_the_gram_way_are_the_same_values() -> None:
    rows, reference = contribution.made_up_updates(7, 300, seed=3)
    exact = contribution.exact_by_averaging_again(rows, reference)
    wide, unit = rows.astype(np.float64), float(reference.astype(np.float64) @ reference)
    game = Game(products=wide @ wide.T, linear=wide @ reference, utility=EuclideanUtility(reference_square=unit, unit=unit), empty=0.5)
    # float32 sums of 300 numbers
    np.testing.assert_allclose(exact, Exact().values(game), atol=1e-5)
    orders = np.stack([np.random.default_rng(seed).permutation(7) for seed in range(3000)])
    sampled = contribution.sampled_by_averaging_again(rows, reference, orders)
    assert np.abs(sampled - exact).max() < 0.1 * np.ptp(exact)
    assert math.isclose(sampled.sum(), exact.sum(), abs_tol=1e-5)


def speed(**changes: Any) -> Speed:
    fields = {"way": "exact", "clients": 10, "size": 100_000, "gram_seconds": 0.0, "values_seconds": 0.0, "again_seconds": 0.0}
    return Speed(**(fields | {"extrapolated": False, "factor": 100.0, "largest_difference": 0.0} | changes))


def test_what_is_too_slow_is_named() -> None:
    fast, slow = Scoring(name="FedTSV", clients=100, milliseconds=2.0), Scoring(name="FedTSV", clients=100, milliseconds=11.0)
    assert contribution.missed([speed(), speed(way="1000 permutations", clients=100)], [fast]) == []
    assert "39 times faster, required are 40" in contribution.missed([speed(factor=39.0)], [fast])[0]
    assert "59 times faster, required are 60" in contribution.missed([speed(way="1000 permutations", factor=59.0)], [fast])[0]
    assert "11.0 ms" in contribution.missed([speed()], [slow])[0]


@pytest.mark.nightly
def test_a_quick_run_prints_one_json_object_in_which_every_free_rider_is_found() -> None:
    result = CliRunner().invoke(APP, ["--quick", "--json"])
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert {detection["found"] for detection in report["detection"]} == {1.0}
    assert {alarm["flagged"] for alarm in report["false_alarms"] if alarm["noise_ratio"] == 0} == {0.0}


def test_the_page_has_every_number_and_says_what_is_missed() -> None:
    numbers = ([speed(factor=123.4)], [Scoring(name="FedTSV", clients=100, milliseconds=1.25)])
    found = [contribution.Detection(kind="replay", found=0.5, riders=8)]
    alarms = [contribution.FalseAlarms(alpha=0.1, noise_ratio=10.0, flagged=0.125, clients=16)]
    page = contribution.dossier(*numbers, found, alarms, 0.91, failures=[], command="command")
    assert "| 123 |" in page
    assert "| FedTSV | 1.25 |" in page
    assert "| replay | 50.0% | 8 |" in page
    assert "| 0.1 | 10 | 12.5% | 16 |" in page
    assert "All of this is met." in page
    assert "Missed: slow." in contribution.dossier(*numbers, found, alarms, 0.91, failures=["slow"], command="command")
