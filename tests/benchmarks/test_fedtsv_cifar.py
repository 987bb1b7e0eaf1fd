from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import fedtsv, fedtsv_cifar
from benchmarks.fedtsv_cifar import QUICK
from privfed.training.model import layout_of

torch.set_num_threads(1)


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PRIVFED_DATA", str(tmp_path))


@pytest.mark.usefixtures("no_data")
def test_without_the_file_only_a_quick_run_is_made() -> None:
    assert fedtsv_cifar.load(None, quick=True).source == "made-up pictures"
    with pytest.raises(FileNotFoundError, match=r"no cifar10_12k\.npz found"):
        fedtsv_cifar.load(None, quick=False)


def test_a_picture_becomes_a_row_that_the_network_unfolds_again(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    sides = {f"{kind}_{side}": value for side in ("train", "test") for kind, value in (("x", pictures), ("y", np.arange(3)))}
    np.savez(tmp_path / "some.npz", **sides)
    table = fedtsv_cifar.load(tmp_path / "some.npz", quick=False)
    unfolded = fedtsv_cifar.network()[0](torch.from_numpy(np.array(table.train.features)))  # type: ignore[index]
    back = np.rint((unfolded.numpy().transpose(0, 2, 3, 1) + 1) * 127.5)
    np.testing.assert_array_equal(back, pictures)
    assert layout_of(table.network()).size == 26_346


@pytest.mark.usefixtures("no_data")
def test_rules_run_on_pictures_and_the_page_says_that_the_run_is_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {method: fedtsv.METHODS[method] for method in ("without malicious clients", "FedAvg", "FedTSV", "median")}
    for module in (fedtsv, fedtsv_cifar):
        monkeypatch.setattr(module, "METHODS", few)
    size = replace(QUICK, rounds=2, every=1)
    table = fedtsv_cifar.load(None, quick=True)
    outcomes = fedtsv.collect(table, size, None)
    assert [len(outcome.accuracy) for outcome in outcomes] == [2] * 4
    page = fedtsv_cifar.dossier(outcomes, table, size, "command")
    assert "**This is a small run:** 4,000 of the 50,000 training records, 2 rounds and 1 seeds" in page
    assert "digits" not in page
    fedtsv.draw(outcomes, size, tmp_path / "figure.svg", classes="classes")
    assert (tmp_path / "figure.svg").stat().st_size > 1000
