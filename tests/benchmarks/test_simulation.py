from pathlib import Path

import numpy as np
import torch

from benchmarks.simulation import __main__ as simulation
from benchmarks.simulation.__main__ import ALONE, FLOWER, TOGETHER, Outcome
from benchmarks.simulation.task import Task
from privfed.training.model import values_of

torch.set_num_threads(1)


def test_both_of_our_ways_end_in_the_same_model_and_time_every_round() -> None:
    task = Task(clients=5, rounds=2)
    (together, first), (alone, second) = (simulation.ours(task, together=way) for way in (True, False))
    assert len(together) == len(alone) == 2
    # Two roundings of 2^-24 in some hundred sums; the updates are thousands of times larger.
    assert np.abs(first.values - second.values).max() < 1e-4
    assert np.abs(first.values - values_of(task.model()).values).max() > 0.1


def test_what_the_other_engine_is_handed_is_the_task(tmp_path: Path) -> None:
    task = Task(clients=3, rounds=2)
    task.save(tmp_path / "task.npz")
    with np.load(tmp_path / "task.npz", allow_pickle=False) as made:
        assert made["features"].shape == (3, task.records, 10)
        np.testing.assert_array_equal(made["labels"][1], task.tables()[0][1].labels)
        np.testing.assert_array_equal(made["start"], values_of(task.model()).values)
        assert int(made["steps"]) == task.steps


def outcome(engine: str, seconds: float, accuracy: float = 0.9) -> Outcome:
    return Outcome(engine=engine, seconds_per_round=seconds, accuracy=accuracy, farthest_weight=0.0, rounds=(seconds,))


def test_what_is_too_slow_or_another_model_is_named() -> None:
    ours = [outcome(TOGETHER, 0.05), outcome(ALONE, 1.0)]
    assert simulation.judge([*ours, outcome(FLOWER.name, 0.51)]) == []
    assert "9.8 times faster than Flower's, required are 10" in simulation.judge([*ours, outcome(FLOWER.name, 0.49)])[0]
    assert "should be the same" in simulation.judge([*ours, outcome(FLOWER.name, 0.6, accuracy=0.89)])[0]
    assert simulation.judge(ours) == []


def test_the_page_says_whether_what_is_required_is_met() -> None:
    outcomes = [outcome(TOGETHER, 0.05), outcome(FLOWER.name, 0.51)]
    assert "This is met." in simulation.dossier(Task(), outcomes, {"torch": "2"}, failures=[], command="command")
    assert "Missed: too slow." in simulation.dossier(Task(), outcomes, {"torch": "2"}, failures=["too slow"], command="command")
