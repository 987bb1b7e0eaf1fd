import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import round as whole_round
from benchmarks.experiment import FinishedRuns
from benchmarks.round import BOTH, DP, HE, PARITY, PARTS, PLAIN, SCALED, THRESHOLD, UNMENDED, Cost, Report, Work, hold, ratios, verdicts
from privfed.training import gradients, steady

torch.set_num_threads(1)
APP = typer.Typer()
APP.command()(whole_round.main)
TINY = Work(clients=5, records=200, hidden=(4,), batch=20, steps=1, rounds=2, turns=1)


@pytest.fixture(scope="module")
def costs() -> list[Cost]:
    return [hold(way, TINY) for way in (PLAIN, DP, HE, BOTH, PARITY, THRESHOLD)]


def test_the_parts_of_a_round_add_up_to_it(costs: list[Cost]) -> None:
    for cost in costs:
        assert tuple(cost.parts) == PARTS
        assert sum(cost.parts.values()) == pytest.approx(cost.seconds)
        assert all(seconds >= 0 for seconds in cost.parts.values())
        assert cost.parts["train"] > 0
        assert cost.cpu_seconds > 0
        assert (cost.parts["protect"] > 0) == (cost.way not in {PLAIN.name, DP.name})


def test_bytes_in_the_clear_are_those_of_float32_and_parity_takes_fewer_than_the_default(costs: list[Cost]) -> None:
    by_way = {cost.way: cost for cost in costs}
    assert by_way[PLAIN.name].bytes_up == by_way[PLAIN.name].bytes_down == 4 * TINY.parameters
    assert by_way[PLAIN.name].bytes_up < by_way[PARITY.name].bytes_up < by_way[BOTH.name].bytes_up


def test_ratios_are_to_plain_training_of_the_same_run(costs: list[Cost]) -> None:
    made = [
        replace(cost, seconds=seconds, cpu_seconds=2.0 * seconds - 3, bytes_up=100.0 * seconds, bytes_down=0.0)
        for cost, seconds in zip(costs, range(2, 8), strict=True)
    ]
    found = ratios(made)
    assert found.seconds[PLAIN.name] == 1.0
    assert found.seconds[BOTH.name] == found.bytes[BOTH.name] == 2.5
    assert "2.50 times, **MORE** than the 1.3 times" in verdicts(found)[0]
    assert "DP takes 1.50 times the plain round, and HE 1.67 times the round with DP" in verdicts(found)[0]
    assert "of processor time it is 3.00 and 2.33, together 7.00." in verdicts(found)[0]
    met = replace(found, seconds=found.seconds | {BOTH.name: 1.3})
    assert "1.30 times, at most the 1.3 times" in verdicts(met)[0]


def test_a_model_is_looked_at_in_every_round_only_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[None] = []
    monkeypatch.setattr(gradients, "is_steady", lambda *rest, **named: (looks.append(None), steady.is_steady(*rest, **named))[1])
    hold(BOTH, TINY)
    assert len(looks) == TINY.clients
    looks.clear()
    hold(UNMENDED, TINY)
    assert len(looks) == TINY.clients * (1 + TINY.rounds)


def test_a_work_that_was_interrupted_is_measured_again_as_a_whole(
    costs: list[Cost], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Work] = []

    def measured(work: Work, ways: object, tick: object) -> list[Cost]:
        calls.append(work)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return costs

    monkeypatch.setattr(whole_round, "measure", measured)
    plan = [(TINY, SCALED), (replace(TINY, steps=2), SCALED)]
    with pytest.raises(KeyboardInterrupt):
        whole_round.run(plan, FinishedRuns(folder=tmp_path))
    assert whole_round.run(plan, FinishedRuns(folder=tmp_path)) == [costs, costs]
    assert [work.steps for work in calls] == [1, 2, 2]


def test_the_page_and_the_figure_are_made_from_the_costs(costs: list[Cost], tmp_path: Path) -> None:
    report = Report(works=(TINY,), rounds=(costs,), by_clients=(costs,), by_parameters=(costs, costs))
    page = whole_round.dossier(report, "python -m benchmarks.round")
    assert "`python -m benchmarks.round` made this page" in page
    assert f"| {THRESHOLD.name} |" in page
    whole_round.draw(report, tmp_path / "round.svg")
    assert "parameters" in (tmp_path / "round.svg").read_text()


def test_bytes_are_within_their_bounds_from_the_smallest_network_that_keeps_them_on(costs: list[Cost]) -> None:
    small, large = costs, [replace(cost, parameters=10**6, bytes_up=4e6, bytes_down=4e6) for cost in costs]
    lines = whole_round.within_bytes((small, large))
    assert "2 times the bytes are kept from 1,000,000 parameters on (+ DP + HE)" in lines[0]
    assert "are kept by none" in whole_round.within_bytes((small,))[0]
    # Of 5 clients 3 signatures, a hash and tags each, 5 frames, own tags, and 6 seeds for each chunk, against a twentieth of 8 bytes each.
    assert whole_round.least_beside(5, chunks=1) == 5 * (3 * 64 + 32 + 92) + 5 * 64 + 92 + 6 * 64
    assert whole_round.proven_least(5) == (5 * (3 * 64 + 32 + 92) + 5 * 64 + 92 + 2 * 6 * 64) / 0.4 == 6900


def test_no_round_has_fewer_bytes_than_are_proven_to_be_needed(costs: list[Cost]) -> None:
    parity = next(cost for cost in costs if cost.way == PARITY.name)
    beside = parity.bytes_up + parity.bytes_down - 2 * 4 * parity.parameters
    assert beside > whole_round.least_beside(5, chunks=1)


def test_the_quick_form_measures_in_processes_of_its_own_and_writes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(whole_round, "QUICK", ((TINY, (PLAIN, DP, BOTH, THRESHOLD)),))
    for name in ("QUICK_CLIENTS", "QUICK_PARAMETERS"):
        monkeypatch.setattr(whole_round, name, ())
    monkeypatch.setattr(whole_round, "DOSSIER", tmp_path)
    done = CliRunner().invoke(APP, ["--quick", "--json"])
    assert done.exit_code == 0
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [line["kind"] for line in lines] == ["cost"] * 4 + ["ratios"]
    assert all(line["peak_megabytes"] > 0 for line in lines if line["kind"] == "cost")
    assert not list(tmp_path.iterdir())
