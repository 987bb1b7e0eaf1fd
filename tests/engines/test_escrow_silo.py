"""Noise for whole silos with a key holder: what it opens is the exact sum of what the clients made, noise and all, and nothing else."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from privfed.aggregation.rules import MultiKrum
from privfed.dp.silo import SiloNoise
from privfed.engines.local import Simulation
from privfed.errors import UnsupportedInThisModeError
from privfed.he.codec import dequantise
from privfed.he.escrow_secret import EscrowKey
from privfed.he.params import CkksParams
from privfed.he.product_params import ProductParams
from privfed.he.threshold_key import ThresholdKey
from privfed.round import Stage
from tests.engines.test_silo_rounds import OPEN, Silos
from tests.engines.test_threshold import Script


@pytest.fixture
def silos(tmp_path: Path, model: torch.nn.Module) -> Any:
    wide = torch.nn.Sequential(torch.nn.Linear(next(model.parameters()).shape[1], 600), torch.nn.Tanh(), torch.nn.Linear(600, 1))
    with ExitStack() as stack:
        yield Silos(stack, tmp_path, wide)


def terms() -> dict[str, Any]:
    return {"keys": EscrowKey.generate(), "params": CkksParams.escrow()}


def test_what_the_holder_opens_is_the_exact_sum_of_the_noised_updates_and_has_the_agreed_variance(
    silos: Silos, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chi-square on all coordinates: 1e-6 per side accepts the variance of three shares, and neither 2/3 nor 3/2 of it."""
    made: list[Any] = []
    real = SiloNoise.noised

    def noised(self: SiloNoise, *arguments: Any, **options: Any) -> Any:
        made.append(real(self, *arguments, **options))
        return made[-1]

    monkeypatch.setattr(SiloNoise, "noised", noised)
    consortium = silos.consortium(training=OPEN, noise_multiplier=50.0, silo_epsilon=50.0, **terms())
    assert consortium.silo is not None
    silo = SiloNoise(weights=consortium.silo.weights, clip_steps=1, noise_multiplier=50.0, coordinates=silos.size)
    consortium = replace(consortium, silo=silo)
    with Simulation(consortium, silos.model) as simulation:
        simulation.run(rounds=1)
        opened = [participant.opened for participant in simulation.encrypted.participants.values()]
    assert len(made) == len(opened) == 3
    for aggregate in opened:
        assert aggregate is not None
        assert np.array_equal(aggregate.vector.values, dequantise(np.sum(made, axis=0), silo.denominator, consortium.params))
    statistic, variance, size = float(np.sum(np.sum(made, axis=0) ** 2.0)), 3 * silo.share_variance, silos.size
    low, high = chi2.ppf([1e-6, 1 - 1e-6], size)
    # The clipped updates have a norm of one step each: nothing beside noise of 50 steps in every coordinate.
    assert low < statistic / variance < high
    assert statistic / (variance * 2 / 3) > high
    assert statistic / (variance * 3 / 2) < low
    for client in consortium.clients:
        assert client.ledger is not None
        assert client.ledger.silo_events() == (silo.event(),)


def test_too_few_arrivals_are_opened_by_no_holder(silos: Silos) -> None:
    consortium = silos.consortium(training=OPEN, **terms())
    with Simulation(consortium, silos.model) as simulation:
        history = simulation.run(rounds=2, absences=Script(round_0={"bank_2": Stage.UPLOAD}))
    assert [failed.round for failed in history.failed] == [0]
    assert [summary.record.round for summary in history.rounds] == [1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rule": MultiKrum(byzantine=0, keep=3), "params": ProductParams.escrow(bound=2.0)}, "its promise is for the sum"),
        (
            {"keys": ThresholdKey(clients=3, corrupted=0, dropouts=0), "params": CkksParams.threshold(clients=3)},
            "noise for whole silos, which is weighted before it is added",
        ),
    ],
    ids=["a rule that scores", "ThresholdKey"],
)
def test_noise_for_whole_silos_is_refused_where_more_than_the_sum_is_seen_or_weights_come_after_it(
    silos: Silos, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedInThisModeError, match=f"{words}.*nothing was started"):
        silos.consortium(training=OPEN, **terms() | options)
