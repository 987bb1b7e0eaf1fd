import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from benchmarks import dp_sgd
from benchmarks.dp_sgd import BASELINE, COMPILED, CONTENDERS, EAGER, HOOKS, Cost, summarise

ROOT = Path(dp_sgd.__file__).parents[1]


def cost(model: str, contender: str, ratio: float) -> Cost:
    return Cost(model=model, contender=contender, milliseconds_per_step=ratio, ratio=ratio, peak_megabytes=None)


def costs(*, eager: float = 1.7, compiled: float | None = 1.2, hooks: float = 14.0, cnn: float = 1.8) -> list[Cost]:
    mlp = {BASELINE: 1.0, EAGER: eager, HOOKS: hooks} | ({} if compiled is None else {COMPILED: compiled})
    return [cost("mlp", name, ratio) for name, ratio in mlp.items()] + [cost("cnn", EAGER, cnn), cost("cnn", HOOKS, 1.9)]


def test_a_run_is_accepted_if_every_promise_is_kept_and_refused_if_one_is_not() -> None:
    assert summarise(costs(), judge=True).accepted is True
    for broken in (costs(eager=1.76, hooks=20.0), costs(compiled=1.31), costs(compiled=None), costs(hooks=13.0), costs(cnn=1.91)):
        assert summarise(broken, judge=True).accepted is False
    assert summarise(costs(eager=9.0), judge=False).accepted is None


def test_the_summary_compares_what_its_names_say() -> None:
    summary = summarise(costs(), judge=True)
    assert (summary.eager_ratio, summary.compiled_ratio) == (1.7, 1.2)
    assert summary.opacus_hooks_over_ours == pytest.approx(14.0 / 1.7)
    assert summary.cnn_ours_over_opacus_hooks == pytest.approx(1.8 / 1.9)


def test_a_quick_run_times_every_contender_and_prints_one_json_object_per_line() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.dp_sgd", "--quick", "--json"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert run.returncode == 0, run.stderr
    *lines, summary = [json.loads(line) for line in run.stdout.splitlines()]
    assert all(set(line) == {field.name for field in fields(Cost)} for line in lines)
    timed: dict[str, list[dict[str, Any]]] = {model: [line for line in lines if line["model"] == model] for model in ("mlp", "cnn")}
    for entries in timed.values():
        assert {entry["contender"] for entry in entries} == set(CONTENDERS) - {COMPILED}
        baseline = next(entry for entry in entries if entry["contender"] == BASELINE)
        assert baseline["ratio"] == 1.0
        for entry in entries:
            assert entry["ratio"] == pytest.approx(entry["milliseconds_per_step"] / baseline["milliseconds_per_step"])
            assert entry["milliseconds_per_step"] > 0
    assert summary["accepted"] is None
    assert summary["compiled_ratio"] is None
