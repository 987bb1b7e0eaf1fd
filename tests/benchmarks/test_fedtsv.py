import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import fedtsv
from benchmarks.fedtsv import IID, KINDS, MALICIOUS, METHODS, OURS, PLAIN, QUICK, SKEWED, WITHOUT, Outcome, Records
from privfed.data.samples import Samples
from privfed.training.model import mlp

torch.set_num_threads(1)
TINY = replace(QUICK, rounds=4, every=2, records=32, validation=100)


def records(count: int = 6000) -> Records:
    """Ten classes that a linear model can tell apart."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, count)
    features = np.eye(10, dtype=np.float32)[labels] + 0.3 * rng.normal(size=(count, 10)).astype(np.float32)
    columns = tuple(f"p{index}" for index in range(10))
    cut = count - 500
    sides = [Samples(features=features[part], labels=labels[part], groups=None, columns=columns) for part in (slice(cut), slice(cut, None))]
    return Records(train=sides[0], test=sides[1], source="made up", network=lambda: mlp(10, hidden=(64,), outputs=10))


def test_the_world_has_the_clients_of_the_paper_and_deals_no_record_twice() -> None:
    table = records()
    world = fedtsv.make_world(table, TINY, seed=1)
    assert Counter(world.kinds.values()) == KINDS
    assert {len(samples) for samples in world.clients.values()} == {TINY.records}
    dealt = np.concatenate([world.validator.features, *(samples.features for samples in world.clients.values())])
    assert len(np.unique(dealt, axis=0)) == len(dealt)
    truth = {row.tobytes(): label for row, label in zip(table.train.features, table.train.labels.tolist(), strict=True)}
    wrong = {
        kind: np.mean(
            [
                [truth[row.tobytes()] != label for row, label in zip(samples.features, samples.labels.tolist(), strict=True)]
                for name, samples in world.clients.items()
                if world.kinds[name] == kind
            ]
        )
        for kind in KINDS
    }
    assert wrong == {IID: 0.0, SKEWED: 0.0, MALICIOUS: 1.0}
    largest = {
        kind: np.mean([np.bincount(samples.labels).max() for name, samples in world.clients.items() if world.kinds[name] == kind])
        for kind in KINDS
    }
    assert largest[SKEWED] > 1.5 * largest[IID]


def test_every_rule_runs_and_a_finished_run_is_taken_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = records()
    outcomes = fedtsv.collect(table, TINY, tmp_path)
    assert [outcome.method for outcome in outcomes] == list(METHODS)
    assert len(list(tmp_path.iterdir())) == len(METHODS)
    for outcome in outcomes:
        assert len(outcome.accuracy) == 2
        if not math.isnan(outcome.share[IID]):
            assert math.fsum(outcome.share.values()) == pytest.approx(1)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(fedtsv, "run", fail)
    again = fedtsv.collect(table, TINY, tmp_path)
    assert [(outcome.accuracy, outcome.scores) for outcome in again] == [(outcome.accuracy, outcome.scores) for outcome in outcomes]
    with pytest.raises(RuntimeError):
        fedtsv.collect(table, replace(TINY, rounds=6), tmp_path)  # of another experiment nothing is taken
    page = fedtsv.dossier(outcomes, table, TINY, ["something"], "command")
    assert "Missed: something." in page
    fedtsv.draw(outcomes, TINY, tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").stat().st_size > 1000


def outcome(method: str, accuracy: float, malicious: float = 0.0, skewed: float = 0.1) -> Outcome:
    share = {IID: 1 - malicious - skewed, SKEWED: skewed, MALICIOUS: malicious}
    return Outcome(method=method, seed=0, accuracy=(accuracy,) * 5, share=share, share_late=share, scores={}, seconds=1.0)


def judged(**changes: Outcome) -> list[str]:
    good = {method: outcome(method, 0.9) for method in METHODS} | {PLAIN: outcome(PLAIN, 0.85), WITHOUT: outcome(WITHOUT, 0.91)}
    return fedtsv.judge(list((good | changes).values()))


def test_what_is_missed_is_named() -> None:
    assert judged() == []
    assert "below 0.930 without" in judged(**{WITHOUT: outcome(WITHOUT, 0.93)})[0]
    assert "above FedAvg at 0.880" in judged(**{PLAIN: outcome(PLAIN, 0.88)})[0]
    assert "malicious clients hold 4.0%" in judged(**{OURS: outcome(OURS, 0.9, malicious=0.04)})[0]
    assert judged(**{OURS: outcome(OURS, 0.9, malicious=0.019, skewed=0.01)}) == []  # twice as many clients hold less than twice as much
    assert "a client with few digits holds 0.100%" in judged(**{OURS: outcome(OURS, 0.9, malicious=0.021, skewed=0.01)})[0]


def test_the_end_is_the_last_quarter() -> None:
    run = replace(outcome(OURS, 0.0), accuracy=tuple(range(40)))
    assert run.final == np.mean(range(30, 40))
