import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from privfed.aggregation.server_optimizer import FedAdam
from privfed.consortium import Consortium, Plaintext
from privfed.contribution.cosine import Cgsv
from privfed.data.samples import Samples
from privfed.engines.local import Simulation, simulate
from privfed.engines.plain_site import PlainSite
from privfed.engines.plaintext import PlaintextRounds
from privfed.errors import AgreementMismatchError, DamagedFileError, FolderInUseError
from privfed.policy import OpeningPolicy
from privfed.training.loss import BinaryCrossEntropy, binary_cross_entropy, cross_entropy
from privfed.training.scaffold import Scaffold
from privfed.update import Layout, PlainVector

Make = Callable[..., Consortium]
OPTIONS: dict[str, Any] = {
    "count": 4,
    "keys": Plaintext(),
    "rule": Cgsv(length=0.05),
    "server_optimizer": FedAdam(learning_rate=0.05),
    "policy": OpeningPolicy(min_clients=2, max_share=0.999, min_effective_clients=1.0),
}


@pytest.fixture
def consortium(non_private: Make) -> Consortium:
    return non_private(**OPTIONS)


def run(consortium: Consortium, model: torch.nn.Module, rounds: int, folder: Path | None) -> tuple[np.ndarray, dict[str, float], int]:
    """The model, the scores, and how many rounds were held just now."""
    held: list[object] = []
    with Simulation(consortium, model, directory=folder) as simulation:
        rng = np.random.default_rng(3)
        history = simulation.run(rounds=rounds, fraction=0.5, rng=rng, progress=held.append)
        assert len(history.rounds) == rounds
        assert isinstance(simulation._rounds, PlaintextRounds)
        return history.model.values, dict(simulation._rounds.state.scores), len(held)


def test_a_run_in_the_clear_goes_on_with_model_optimiser_and_scores_as_if_it_had_not_stopped(
    consortium: Consortium, model: torch.nn.Module, tmp_path: Path
) -> None:
    whole, scores, _ = run(consortium, model, 5, None)
    run(consortium, model, 3, tmp_path / "run")
    values, kept, held = run(consortium, model, 5, tmp_path / "run")
    assert held == 2
    assert np.array_equal(values, whole)
    assert kept == scores
    assert len(scores) == 4
    again, _, held = run(consortium, model, 5, tmp_path / "run")
    assert held == 0
    assert np.array_equal(again, whole)


def test_a_round_that_a_crash_kept_from_the_log_is_held_again_and_counted_once(
    consortium: Consortium, model: torch.nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, scores, _ = run(consortium, model, 4, None)
    run(consortium, model, 2, tmp_path / "run")

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Simulation, "_evaluate", crash)  # the third round is stored, and not in the log yet
    with pytest.raises(KeyboardInterrupt):
        run(consortium, model, 3, tmp_path / "run")
    assert (tmp_path / "run" / "model-2.npz").exists()
    monkeypatch.undo()
    values, kept, held = run(consortium, model, 4, tmp_path / "run")
    assert held == 2
    assert np.array_equal(values, whole)
    assert kept == scores


def test_only_the_last_states_are_kept(consortium: Consortium, model: torch.nn.Module, tmp_path: Path) -> None:
    run(consortium, model, 4, tmp_path)
    assert sorted(path.name for path in tmp_path.glob("model-*")) == ["model-2.npz", "model-3.npz"]
    assert {path.stat().st_mode & 0o077 for path in tmp_path.iterdir()} == {0}


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"rule": Cgsv(length=0.1)}, "rule"),
        ({"server_optimizer": FedAdam(learning_rate=0.1)}, "rule"),
        ({"count": 5}, "list of clients and another training and another set of records"),
        ({"policy": OpeningPolicy(min_clients=3)}, "policy"),
        ({"keys": Plaintext(train_together=True)}, "way of training"),
        ({"loss": BinaryCrossEntropy(positive_weight=2.0)}, "loss"),
    ],
)
def test_a_folder_of_another_run_is_refused_and_left_as_it_is(
    non_private: Make, model: torch.nn.Module, tmp_path: Path, change: dict[str, Any], part: str
) -> None:
    run(non_private(**OPTIONS), model, 1, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(AgreementMismatchError, match=f"a run with another {part}; nothing was changed"):
        run(non_private(**(OPTIONS | change)), model, 2, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    run(non_private(**OPTIONS), model, 2, tmp_path)


@pytest.mark.parametrize("change", ["a value", "a label", "groups", "a record less"])
def test_other_records_are_refused(consortium: Consortium, model: torch.nn.Module, tmp_path: Path, change: str) -> None:
    run(consortium, model, 1, tmp_path)
    data = consortium.clients[2].data
    features, labels, groups = np.array(data.features), np.array(data.labels), data.groups
    if change == "a value":
        features[7, 1] = np.nextafter(features[7, 1], np.float32(9))
    elif change == "a label":
        labels[7] = 1 - labels[7]
    elif change == "groups":
        groups = np.arange(len(labels))
    else:
        features, labels = features[1:], labels[1:]
    other = replace(consortium.clients[2], data=Samples(features=features, labels=labels, groups=groups, columns=data.columns))
    clients = [*consortium.clients[:2], other, *consortium.clients[3:]]
    with pytest.raises(AgreementMismatchError, match="another set of records; nothing was changed"):
        run(replace(consortium, clients=clients), model, 2, tmp_path)
    run(consortium, model, 2, tmp_path)


@pytest.mark.parametrize(
    ("loss", "other"),
    [
        (binary_cross_entropy, BinaryCrossEntropy(positive_weight=1.0)),
        (BinaryCrossEntropy(positive_weight=2.0), BinaryCrossEntropy(positive_weight=3.0)),
        (cross_entropy, binary_cross_entropy),
    ],
)
def test_a_loss_is_the_same_after_a_restart_and_another_one_is_not(consortium: Consortium, tmp_path: Path, loss: Any, other: Any) -> None:
    start = PlainVector(layout=Layout(names=("w",), shapes=((3,),)), values=[0.0, 0.0, 0.0])
    again = copy.copy(loss) if isinstance(loss, BinaryCrossEntropy) else loss
    for given in (loss, again):
        PlainSite(tmp_path, consortium=replace(consortium, loss=given), initial=start).close()
    with pytest.raises(AgreementMismatchError, match="another loss"):
        PlainSite(tmp_path, consortium=replace(consortium, loss=other), initial=start)


class Halved:
    """A loss that is neither a function nor a dataclass."""

    def __call__(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return binary_cross_entropy(outputs, labels) / 2


def test_a_loss_that_is_an_object_is_known_by_its_class(consortium: Consortium, tmp_path: Path) -> None:
    start = PlainVector(layout=Layout(names=("w",), shapes=((3,),)), values=[0.0, 0.0, 0.0])
    for _ in range(2):
        PlainSite(tmp_path, consortium=replace(consortium, loss=Halved()), initial=start).close()
    with pytest.raises(AgreementMismatchError, match="another loss"):
        PlainSite(tmp_path, consortium=consortium, initial=start)


def test_another_start_is_refused(consortium: Consortium, model: torch.nn.Module, tmp_path: Path) -> None:
    run(consortium, model, 1, tmp_path)
    with torch.no_grad():
        next(model.parameters()).add_(1)
    with pytest.raises(AgreementMismatchError, match="another start"):
        run(consortium, model, 2, tmp_path)


@pytest.mark.parametrize("lost", ["model-1.npz", "rounds.jsonl", "terms.json"])
def test_a_folder_from_which_a_file_was_taken_is_refused(consortium: Consortium, model: torch.nn.Module, tmp_path: Path, lost: str) -> None:
    run(consortium, model, 2, tmp_path)
    (tmp_path / lost).unlink()
    with pytest.raises(DamagedFileError, match="nothing was changed"):
        run(consortium, model, 3, tmp_path)


@pytest.mark.parametrize("damaged", ["model-1.npz", "terms.json"])
def test_a_damaged_file_is_refused(consortium: Consortium, model: torch.nn.Module, tmp_path: Path, damaged: str) -> None:
    run(consortium, model, 2, tmp_path)
    (tmp_path / damaged).write_bytes(b"{}")
    with pytest.raises(DamagedFileError):
        run(consortium, model, 3, tmp_path)


def test_an_older_state_under_the_name_of_the_last_one_is_refused(consortium: Consortium, model: torch.nn.Module, tmp_path: Path) -> None:
    run(consortium, model, 2, tmp_path)
    (tmp_path / "model-0.npz").replace(tmp_path / "model-1.npz")
    with pytest.raises(DamagedFileError, match=r"model-1\.npz is missing or damaged"):
        run(consortium, model, 3, tmp_path)


def test_a_folder_with_other_files_or_in_use_is_refused(consortium: Consortium, model: torch.nn.Module, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(DamagedFileError, match=r"holds notes\.txt and no terms\.json"):
        run(consortium, model, 1, tmp_path)
    with Simulation(consortium, model, directory=tmp_path / "run"), pytest.raises(FolderInUseError):
        run(consortium, model, 1, tmp_path / "run")
    run(consortium, model, 1, tmp_path / "run")


def test_scaffold_in_the_clear_takes_no_folder(non_private: Make, model: torch.nn.Module, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no directory for a plaintext run with SCAFFOLD"):
        simulate(non_private(keys=Plaintext(), correction=Scaffold(clients=3)), model, rounds=1, directory=tmp_path)
    assert list(tmp_path.iterdir()) == []
