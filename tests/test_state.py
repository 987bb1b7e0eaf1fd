import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from privfed.aggregation.server_optimizer import FedAdam, ServerSgd
from privfed.errors import DamagedFileError, LayoutMismatchError
from privfed.state import ModelState, ModelStore
from privfed.update import Layout, PlainVector

LAYOUT = Layout(names=("weight",), shapes=((3,),))


def state(*values: float, rounds: tuple[int, ...] = ()) -> ModelState:
    return ModelState(values=PlainVector(layout=LAYOUT, values=values), rounds=rounds)


def vector(*values: float) -> PlainVector:
    return PlainVector(layout=LAYOUT, values=values)


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

    monkeypatch.setattr("privfed.files.os.replace", full)
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


def test_the_state_is_synchronised_before_it_takes_the_place_of_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    sync, exchange = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (done.append("sync"), sync(descriptor)))
    monkeypatch.setattr(os, "replace", lambda source, target: (done.append("replace"), exchange(source, target)))
    ModelStore(tmp_path / "model.npz", layout=LAYOUT).save(state(1, 2, 3))
    assert done == ["sync", "replace", "sync"]


@pytest.mark.parametrize("change", ["values", "rounds", "history", "NaN", "descending", "short history", "pickled", "text"])
def test_what_is_no_model_of_a_session_is_refused(tmp_path: Path, change: str) -> None:
    path = tmp_path / "model.npz"
    parts = {"values": np.ones(3), "rounds": np.array([0, 1]), "history": np.zeros(32, dtype=np.uint8)}
    changed = {
        "NaN": {"values": np.full(3, np.nan)},
        "descending": {"rounds": np.array([1, 0])},
        "short history": {"history": np.zeros(31, dtype=np.uint8)},
        "pickled": {"values": np.array([object()] * 3)},
        "text": {"rounds": np.array(["one"])},
    }
    parts |= changed.get(change, {})
    np.savez(path, **{name: part for name, part in parts.items() if name != change})
    before = path.read_bytes()
    with pytest.raises(DamagedFileError, match=r"model\.npz is damaged or no model of a session; nothing was done"):
        ModelStore(path, layout=LAYOUT).load()
    assert path.read_bytes() == before


def test_no_flipped_byte_gives_another_state(tmp_path: Path) -> None:
    path = tmp_path / "model.npz"
    store = ModelStore(path, layout=LAYOUT)
    saved = state(0.1, 0.2, 0.3, rounds=(0, 2))
    store.save(saved)
    whole = path.read_bytes()
    refused = 0
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x11]) + whole[place + 1 :])
        try:
            loaded = store.load()
        except DamagedFileError:
            refused += 1
            continue
        assert loaded is not None
        assert (loaded.rounds, loaded.history) == (saved.rounds, saved.history)
        assert loaded.values.values.tobytes() == saved.values.values.tobytes()
    assert refused > 3 * 8 + 2 * 8 + 32  # at least every byte of what is stored


def test_the_state_of_an_optimiser_and_scores_are_loaded_bit_for_bit(tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "model.npz", layout=LAYOUT)
    moments = {"momentum": vector(0.1, -1e-300, 3), "second_moment": vector(1 / 3, 2, 5e-324)}
    store.save(replace(state(1, 2, 3, rounds=(0,)), optimizer=moments, scores={"bank_0": 0.1 + 0.2, "bank_1": -1e-17}))
    loaded = store.load()
    assert loaded is not None
    assert {name: moment.values.tobytes() for name, moment in loaded.optimizer.items()} == {
        name: moment.values.tobytes() for name, moment in moments.items()
    }
    assert dict(loaded.scores) == {"bank_0": 0.1 + 0.2, "bank_1": -1e-17}


def test_the_next_state_is_what_the_optimiser_makes_of_the_movement() -> None:
    optimizer = FedAdam(learning_rate=0.1)
    first = state(1, 2, 3).after(vector(0.5, -0.5, 0), round=4, optimizer=optimizer, history=bytes(range(32)), scores={"a": 1.0})
    kept, moved = optimizer.step({}, vector(0.5, -0.5, 0))
    assert first.values.values.tolist() == (np.array([1, 2, 3]) + moved.values).tolist()
    assert first.optimizer.keys() == kept.keys() == {"momentum", "second_moment"}
    assert (first.rounds, first.history, dict(first.scores)) == ((4,), bytes(range(32)), {"a": 1.0})
    second = first.after(vector(0.5, -0.5, 0), round=5, optimizer=optimizer)
    again = state(*first.values.values, rounds=(4,)).values.values + optimizer.step(kept, vector(0.5, -0.5, 0))[1].values
    assert second.values.values.tolist() == again.tolist()
    assert dict(second.scores) == {"a": 1.0}
    plain = state(1, 2, 3).after(vector(0.5, -0.5, 0), round=0, optimizer=ServerSgd())
    assert (plain.values.values.tolist(), dict(plain.optimizer)) == ([1.5, 1.5, 3.0], {})


def test_a_state_is_not_advanced_by_what_does_not_follow_it() -> None:
    with pytest.raises(LayoutMismatchError, match="the model is as it was"):
        state(1, 2, 3).after(PlainVector(layout=Layout(names=("w",), shapes=((3,),)), values=[1, 2, 3]), round=0, optimizer=ServerSgd())
    with pytest.raises(ValueError, match="ascending"):
        state(1, 2, 3, rounds=(2,)).after(vector(1, 1, 1), round=2, optimizer=ServerSgd())
    with pytest.raises(DamagedFileError, match="lacks the state of the server optimiser; the model is as it was"):
        state(1, 2, 3, rounds=(2,)).after(vector(1, 1, 1), round=3, optimizer=ServerSgd(momentum=0.9))
    with pytest.raises(ValueError, match="finite scores"):
        replace(state(1, 2, 3), scores={"a": np.inf})


@pytest.mark.parametrize("part", [{"scores": np.frombuffer(b"[1]", dtype=np.uint8)}, {"optimizer_momentum": np.full(3, np.nan)}])
def test_what_is_no_state_of_an_optimiser_and_no_scores_is_refused(tmp_path: Path, part: dict[str, np.ndarray]) -> None:
    path = tmp_path / "model.npz"
    np.savez(path, values=np.ones(3), rounds=np.array([0]), history=np.zeros(32, dtype=np.uint8), **part)
    with pytest.raises(DamagedFileError, match="nothing was done"):
        ModelStore(path, layout=LAYOUT).load()
