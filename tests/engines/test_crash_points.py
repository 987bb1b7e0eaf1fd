"""A crash before and after every durable step of a run, one at a time, and a restart on the folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from privfed.consortium import Consortium
from privfed.dp.ledger import Ledger
from privfed.engines.local import Simulation
from privfed.engines.site import Site
from privfed.he.secret import SharedKey
from privfed.journal import Journal
from privfed.spool import Spool
from privfed.state import ModelStore
from privfed.training.randomness import _SeededRandomness

Make = Callable[..., Consortium]
DURABLE = (
    (Spool, "put"),
    (Journal, "approve"),
    (Journal, "begin"),
    (Journal, "finish"),
    (ModelStore, "save"),
    (Ledger, "reserve"),
    (Ledger, "commit"),
    (Site, "log"),
)


class Crash(BaseException):
    pass


class Fuse:
    """Counts the moments before and after durable steps, and burns through at one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, at: int | None) -> None:
        self.moments = 0
        self._at = at
        for owner, name in DURABLE:
            monkeypatch.setattr(owner, name, self._wrapped(getattr(owner, name)))

    def _wrapped(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            self._moment()
            result = step(*arguments, **options)
            self._moment()
            return result

        return wrapped

    def _moment(self) -> None:
        self.moments += 1
        if self.moments == self._at:
            raise Crash


def run(consortium: Consortium, model: torch.nn.Module, directory: Path) -> np.ndarray:
    def randomness(name: str, number: int) -> _SeededRandomness:
        return _SeededRandomness(100 * number + int(name[-1]))

    with Simulation(consortium, model, directory=directory, _randomness=randomness) as simulation:
        values = simulation.run(rounds=2).model.values
        assert all(participant.opened_rounds() == (0, 1) for participant in simulation.encrypted.participants.values())
    return values


def moments(private: Make, model: torch.nn.Module, directory: Path) -> tuple[int, np.ndarray]:
    with pytest.MonkeyPatch.context() as patch:
        fuse = Fuse(patch, at=None)
        values = run(private(), model, directory)
    return fuse.moments, values


def crash_and_resume(make: Make, model: torch.nn.Module, directory: Path, *, at: int) -> tuple[np.ndarray, Consortium]:
    consortium = make(keys=SharedKey.generate())
    with pytest.MonkeyPatch.context() as patch:
        Fuse(patch, at=at)
        with pytest.raises(Crash):
            run(consortium, model, directory)
    return run(consortium, model, directory), consortium


def check(tmp_path: Path, make: Make, model: torch.nn.Module, *, stride: int) -> None:
    count, undisturbed = moments(make, model, tmp_path / "undisturbed")
    assert count > 100  # the fuse is really in the way
    for at in range(1, count + 1, stride):
        values, consortium = crash_and_resume(make, model, tmp_path / f"crash_{at}", at=at)
        assert np.array_equal(values, undisturbed), f"another model after a crash at moment {at} of {count}"
        for client in consortium.clients:
            assert client.ledger is not None
            assert len(client.ledger.events()) in (2, 3), f"{client.name} after a crash at moment {at} of {count}"


@pytest.fixture
def fresh(private: Make, tmp_path: Path) -> Make:
    """Like `private`, with new ledgers each time."""
    made = 0

    def make(**options: Any) -> Consortium:
        nonlocal made
        made += 1
        return private(folder=tmp_path / f"ledgers_{made}", **options)

    return make


def test_a_crash_at_any_durable_step_changes_nothing_and_forgets_no_charge(tmp_path: Path, fresh: Make, model: torch.nn.Module) -> None:
    check(tmp_path, fresh, model, stride=13)


@pytest.mark.nightly
def test_a_crash_at_every_durable_step(tmp_path: Path, fresh: Make, model: torch.nn.Module) -> None:
    check(tmp_path, fresh, model, stride=1)
