import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import audit_grid
from benchmarks.audit_grid import BATCHES, DEFENCES, DELTA, EPSILONS, GRID, PICK, PLAIN, QUICK_GRID, SUMS, Outcome, Setting
from privfed.dp.accounting import epsilon
from privfed.dp.mechanism import PoissonSampledGaussian

APP = typer.Typer()
APP.command()(audit_grid.main)
SETTINGS = tuple(replace(setting, likeliest=False) for setting in (PLAIN, DEFENCES[1], DEFENCES[2], EPSILONS[0], BATCHES[5], SUMS[3]))


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    torch.set_num_threads(1)
    return audit_grid.run({"PaySim-shaped": audit_grid.paysim()}, SETTINGS, seeds=2, tick=lambda _: None)


def best(outcomes: list[Outcome], setting: Setting) -> audit_grid.Summary:
    return audit_grid.strongest(audit_grid.summarise(outcomes), "PaySim-shaped", setting.name)


def test_clipping_alone_protects_nothing_and_noise_leaves_guessing(outcomes: list[Outcome]) -> None:
    plain, records, update, noise, large, _ = (best(outcomes, setting) for setting in SETTINGS)
    assert plain.score == records.score == update.score == 1
    assert plain.baseline < 0.6
    assert abs(noise.advantage) < 0.2
    assert large.advantage < 0.5


def test_picks_are_made_where_records_are_clipped_beside_what_the_noise_allows(outcomes: list[Outcome]) -> None:
    picks = {outcome.setting: outcome for outcome in outcomes if outcome.attack == PICK.name}
    assert set(picks) == {DEFENCES[1].name, EPSILONS[0].name}
    assert (picks[DEFENCES[1].name].score, picks[DEFENCES[1].name].bound) == (1, 1)
    assert 0.1 < (picks[EPSILONS[0].name].bound or 0) < 0.25


@pytest.mark.parametrize("setting", EPSILONS, ids=lambda setting: setting.name)
def test_the_noise_of_a_setting_spends_its_epsilon(setting: Setting) -> None:
    assert setting.epsilon is not None
    noise = audit_grid.noise_for(setting.epsilon)
    # Its noise multiplier is what one finds in the literature, to the digits given there.
    known = {1: 3.7306, 8: 0.6002, 100: 0.0947}
    if setting.value in known:
        assert noise == pytest.approx(known[int(setting.value)], abs=6e-5)
    if noise > 0.1:
        event = PoissonSampledGaussian(noise_multiplier=noise, sample_rate=1.0, steps=1)
        assert epsilon((event,), delta=DELTA) == pytest.approx(setting.epsilon, rel=5e-3)


def test_every_setting_has_a_name_of_its_own_and_the_quick_grid_is_part_of_the_grid() -> None:
    assert len({setting.name for setting in GRID}) == len(GRID)
    assert {setting.name for setting in QUICK_GRID} < {setting.name for setting in GRID}
    assert {setting.group for setting in QUICK_GRID} == {setting.group for setting in GRID}


def test_an_attack_that_did_not_apply_to_every_batch_has_no_mean(outcomes: list[Outcome]) -> None:
    partly = [outcome for outcome in outcomes if not (outcome.attack == "quotients" and outcome.seed == 1)]
    assert "quotients" not in {summary.attack for summary in audit_grid.summarise(partly)}


def test_categories_and_numbers_of_a_public_table_become_a_schema_that_its_rows_keep(tmp_path: Path) -> None:
    lines = ["age,kind,twofold,constant,label", *(f"{20 + number},{'abc'[number % 3]},{number % 2},1,{number % 4}" for number in range(40))]
    path = tmp_path / "table.csv"
    path.write_text("\n".join(lines))
    table = audit_grid.public_table(path, label="label", positive="3", drop=())
    assert table.schema.width == 1 + 3 + 2
    assert table.rows.min() == -1
    assert all((table.rows[:, block].sum(axis=1) == 1).all() for block in table.schema.blocks)
    assert 0 < table.labels.mean() < 0.5


def test_no_attack_breaks_down_on_a_compressed_update() -> None:
    table = audit_grid.paysim()
    for setting in DEFENCES[3:]:
        for seed in range(12):
            outcomes = list(audit_grid.attack_once(table, "t", replace(setting, likeliest=False), seed=seed))
            assert {"certificate", "quotients"} <= {outcome.attack for outcome in outcomes}


def test_the_page_and_the_figure_are_made_from_the_runs(tmp_path: Path) -> None:
    def made(setting: Setting, seed: int) -> Outcome:
        shared = {"table": "t", "setting": setting.name, "seed": seed, "baseline": 0.4, "seconds": 0.0}
        return Outcome(**shared, attack="SPEAR", score=0.5 + 0.1 * seed, bound=None)  # type: ignore[arg-type]

    summaries = audit_grid.summarise([made(setting, seed) for setting in GRID for seed in range(3)])
    page = audit_grid.dossier(summaries, GRID, seeds=3, command="python -m benchmarks.audit_grid")
    assert page.count("| t |") == len(GRID)
    assert "60% (35% to 85%)" in page
    audit_grid.draw(summaries, GRID, tmp_path / "audit.svg")
    assert "clients in the sum" in (tmp_path / "audit.svg").read_text()


def test_the_quick_form_prints_json_and_writes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(audit_grid, "QUICK_GRID", SETTINGS[:2])
    monkeypatch.setattr(audit_grid, "DOSSIER", tmp_path)
    done = CliRunner().invoke(APP, ["--quick", "--json"])
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {line["kind"] for line in lines} == {"run", "summary"}
    assert all(math.isfinite(line["score"]) for line in lines)
    assert not list(tmp_path.iterdir())


def test_batches_are_held_back_from_what_the_attacker_knows() -> None:
    table = audit_grid.paysim()
    seen: list[np.ndarray] = []

    class Watching:
        name, measure = "watching", "of nothing"

        def run(self, observation: object, background: object) -> object:
            seen.append(background.pool.rows)  # type: ignore[attr-defined]
            return audit_grid.NotApplicable(reason="it only looks")

        def score(self, *arguments: object) -> None: ...

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit_grid, "FAST", (Watching(),))
        list(audit_grid.attack_once(table, "t", SETTINGS[0], seed=3))
    order = np.random.default_rng(3).permutation(len(table))
    (pool,) = seen
    assert len(pool) == audit_grid.POOL
    assert np.array_equal(pool, table.rows[order[: audit_grid.POOL]])
