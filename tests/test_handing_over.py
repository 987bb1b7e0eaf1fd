"""What a run hands over to other tools: its weights and its numbers."""

import json
import math
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from privfed.audit.canaries import Canaries
from privfed.engines.local import simulate
from privfed.export import save_safetensors
from privfed.history import History
from privfed.tracking import metrics, write_tensorboard
from privfed.training.model import load_values, values_of
from tests.consortia import COLUMNS, SCHEMA, consortium, network
from tests.test_history import a_history


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    test = Canaries.draw(SCHEMA, count=40, rng=np.random.default_rng(9)).samples(COLUMNS)
    with ExitStack() as stack:
        return simulate(consortium(stack, tmp_path_factory.mktemp("ledgers")), network(), rounds=2, evaluation=test)


def test_the_weights_come_back_from_safetensors_bit_for_bit(history: History, tmp_path: Path) -> None:
    torch_files = pytest.importorskip("safetensors.torch", reason="safetensors is an extra: pip install 'privfed[export]'")
    save_safetensors(history, str(tmp_path / "model.safetensors"))
    expected, model = network(), network()
    load_values(expected, history.model)
    assert (values_of(model).values != values_of(expected).values).any()
    torch_files.load_model(model, tmp_path / "model.safetensors")
    assert (values_of(model).values == values_of(expected).values).all()


def test_the_file_says_how_its_weights_came_about(history: History, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors", reason="safetensors is an extra: pip install 'privfed[export]'")
    save_safetensors(history, tmp_path / "model.safetensors")
    with safetensors.safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
        said = file.metadata()
    assert (said["mode"], said["rule"], said["rounds"], said["differentially_private"]) == ("SharedKey", "FedAvg", "2", "true")
    assert json.loads(said["epsilon"]) == history.epsilon


def test_every_finite_number_of_every_round_is_a_metric(history: History) -> None:
    found = {(metric.name, metric.round): metric.value for metric in metrics(history)}
    assert {number for _, number in found} == {0, 1}
    for summary in history.rounds:
        number = summary.record.round
        assert found["quality/pr_auc", number] == summary.evaluation.pr_auc
        assert found["round/participants", number] == 3
        assert found["round/grid_error_max", number] == 0
        for name in history.training:
            assert found[f"epsilon/{name}", number] == summary.epsilon[name]
            assert found[f"bytes_up/{name}", number] == summary.record.bytes_up[name]
    assert all(math.isfinite(value) for value in found.values())


def test_an_infinite_epsilon_is_left_out() -> None:
    assert not [metric for metric in metrics(a_history()) if metric.name.startswith("epsilon/")]


def test_tensorboard_reads_what_was_written(history: History, tmp_path: Path) -> None:
    accumulators = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed: pip install tensorboard"
    )
    write_tensorboard(history, tmp_path / "run")
    events = accumulators.EventAccumulator(str(tmp_path / "run")).Reload()
    read = [(event.step, event.value) for event in events.Scalars("quality/pr_auc")]
    assert [step for step, _ in read] == [0, 1]
    assert [value for _, value in read] == pytest.approx(history.pr_auc, rel=2**-23)  # float32
