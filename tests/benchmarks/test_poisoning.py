import math
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import poisoning
from benchmarks.experiment import load
from benchmarks.poisoning import BANKS, BYZANTINE, QUICK, RULES, Outcome

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def world() -> poisoning.World:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRIVFED_DATA", "/nowhere")
        table, _ = load(None, quick=True)
    return poisoning.make_world(table, 0)


def test_the_banks_and_the_validator_share_no_record_with_the_test(world: poisoning.World) -> None:
    assert len(world.banks) == BANKS
    rows = {row.tobytes() for samples in (*world.banks, world.validator) for row in samples.features}
    # Rows of two customers may be equal by chance; records that are in both would be all of them.
    assert np.mean([row.tobytes() in rows for row in world.test.features]) < 0.1


def test_every_attack_meets_every_rule(world: poisoning.World) -> None:
    named = poisoning.attacks(QUICK, world.test.columns)
    assert len(named) == 12
    for attack in ("none", "scaling", "sleeper", "rider: replay"):
        for rule in RULES.values():
            end, missed, weight, skipped = poisoning.run(world, named[attack], rule, size=QUICK, seed=0, tick=lambda: None)
            assert 0 <= end <= 1
            assert math.isnan(missed) or 0 <= missed <= 1
            assert math.isnan(weight) or 0 <= weight <= 1
            assert 0 <= skipped <= QUICK.rounds


def test_the_same_seed_gives_the_same_run_and_an_attack_another_one(world: poisoning.World) -> None:
    named = poisoning.attacks(QUICK, world.test.columns)
    runs = {
        attack: [poisoning.run(world, named[attack], RULES["FedAvg"], size=QUICK, seed=0, tick=lambda: None)[0] for _ in range(2)]
        for attack in ("none", "scaling")
    }
    assert runs["none"][0] == runs["none"][1]
    assert runs["scaling"][0] == runs["scaling"][1] != runs["none"][0]


def outcome(attack: str, rule: str, pr_auc: float, **changes: float) -> Outcome:
    fields = {"attack": attack, "rule": rule, "seed": 0, "pr_auc": pr_auc, "missed": 0.1, "weight": 0.3, "skipped": 0}
    return Outcome(**(fields | changes))  # type: ignore[arg-type]


def test_success_is_what_each_kind_of_attack_is_after(world: poisoning.World, tmp_path: Path) -> None:
    named = poisoning.attacks(QUICK, world.test.columns)
    outcomes = [outcome(attack, rule, 0.8 if attack == "none" else 0.6) for attack in named for rule in RULES]
    outcomes = [
        outcome("backdoor", "FedTSV", 0.8, missed=0.9) if (some.attack, some.rule) == ("backdoor", "FedTSV") else some for some in outcomes
    ]
    quality, success = poisoning.grids(outcomes, named)
    row, columns = list(RULES).index("FedTSV"), list(named)
    assert quality[row, columns.index("none")] == 0.8
    assert success[row, columns.index("none")] == 0
    assert success[row, columns.index("label flip")] == pytest.approx(0.25)
    assert success[row, columns.index("backdoor")] == 0.9
    assert success[row, columns.index("rider: copy")] == 0.3
    from benchmarks.experiment import Source

    page = poisoning.dossier(outcomes, named, QUICK, Source(name="some", origin="Made up."), "command")
    assert f"{BYZANTINE} of {BANKS} banks attack." in page
    poisoning.draw(outcomes, named, tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").stat().st_size > 1000
