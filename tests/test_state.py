from pathlib import Path

import numpy as np
import pytest

from privfed.errors import LayoutMismatchError
from privfed.state import ModelState, ModelStore
from privfed.update import Layout, PlainVector

LAYOUT = Layout(names=("weight",), shapes=((3,),))


def state(*values: float, rounds: tuple[int, ...] = ()) -> ModelState:
    return ModelState(values=PlainVector(layout=LAYOUT, values=values), rounds=rounds)


def test_what_was_saved_is_loaded_bit_for_bit(tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "model.npz", layout=LAYOUT)
    assert store.load() is None
    store.save(state(0.1, -0.0, 1e-300, rounds=(0, 2)))
    store.save(state(0.1, 5e-324, 1e300, rounds=(0, 2, 3)))
    loaded = store.load()
    assert loaded is not None
    assert loaded.rounds == (0, 2, 3)
    assert loaded.values.values.tobytes() == np.array([0.1, 5e-324, 1e300]).tobytes()
    assert [path.name for path in tmp_path.iterdir()] == ["model.npz"]


def test_a_failed_save_leaves_the_old_state_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ModelStore(tmp_path / "model.npz", layout=LAYOUT)
    store.save(state(1, 2, 3))

    def full(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr("privfed.state.os.replace", full)
    with pytest.raises(OSError, match="no space"):
        store.save(state(4, 5, 6))
    loaded = store.load()
    assert loaded is not None
    assert loaded.values.values.tolist() == [1, 2, 3]
    assert [path.name for path in tmp_path.iterdir()] == ["model.npz"]


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    ModelStore(tmp_path / "model.npz", layout=LAYOUT).save(state(1, 2, 3))
    other = Layout(names=("weight",), shapes=((4,),))
    with pytest.raises(LayoutMismatchError):
        ModelStore(tmp_path / "model.npz", layout=other).load()


@pytest.mark.parametrize("rounds", [(1, 0), (2, 2)])
def test_rounds_that_are_not_ascending_are_refused(rounds: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        state(1, 2, 3, rounds=rounds)
