import math
from dataclasses import replace

import numpy as np
import pytest

from privfed.dp.mechanism import NonPrivateRelease, PoissonSampledGaussian
from privfed.training.mechanism import DpSgd, NonPrivate, TrainingResult
from privfed.update import Layout, PlainVector

DP_SGD = DpSgd(noise_multiplier=1.1, max_grad_norm=0.5, sample_rate=0.01, expected_batch_size=256, steps=100, learning_rate=0.1)
NON_PRIVATE = NonPrivate(learning_rate=0.1, batch_size=32, steps=10, seed=0)


@pytest.mark.parametrize("name", ["noise_multiplier", "max_grad_norm", "sample_rate", "learning_rate"])
@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_dp_sgd_refuses_numbers_that_are_not_positive_and_finite(name: str, bad: float) -> None:
    with pytest.raises(ValueError, match=f"expected {name}"):
        replace(DP_SGD, **{name: bad})


@pytest.mark.parametrize("name", ["expected_batch_size", "steps", "max_records"])
@pytest.mark.parametrize("bad", [0, -1, 1.5])
def test_dp_sgd_refuses_counts_below_one_and_fractions(name: str, bad: float) -> None:
    with pytest.raises(ValueError, match=f"expected {name}"):
        replace(DP_SGD, **{name: bad})


def test_dp_sgd_refuses_a_sample_rate_above_one() -> None:
    assert replace(DP_SGD, sample_rate=1.0).sample_rate == 1.0
    with pytest.raises(ValueError, match="at most 1"):
        replace(DP_SGD, sample_rate=1.0001)


@pytest.mark.parametrize(
    ("name", "bad"),
    [("learning_rate", 0.0), ("learning_rate", math.nan), ("batch_size", 0), ("steps", 0), ("seed", -1), ("seed", 0.5)],
)
def test_non_private_refuses_numbers_out_of_range(name: str, bad: float) -> None:
    with pytest.raises(ValueError, match=f"expected {name}"):
        replace(NON_PRIVATE, **{name: bad})


def test_the_events_state_what_is_executed() -> None:
    assert DP_SGD.event() == PoissonSampledGaussian(noise_multiplier=1.1, sample_rate=0.01, steps=100)
    assert NON_PRIVATE.event() == NonPrivateRelease()


def test_the_record_limit_follows_from_the_declared_batch_size_and_rate() -> None:
    assert replace(DP_SGD, max_records=7).record_limit == 7
    assert replace(DP_SGD, sample_rate=0.3).record_limit == 854
    for records in range(256, 60001, 97):
        assert replace(DP_SGD, sample_rate=256 / records).record_limit == records


def test_the_release_grid_is_one_grid_step_of_the_noised_sum_in_units_of_a_weight() -> None:
    assert DP_SGD.release_grid == pytest.approx(2**-20 * 0.1 * 0.5 / 256, rel=1e-15)


def test_a_result_does_not_print_what_is_private() -> None:
    values = PlainVector(layout=Layout(names=("weight",), shapes=((2,),)), values=np.array([0.125, 4.0]))
    result = TrainingResult(update_values=values, steps=3, private_randomness=True, zeroed_gradients=77)
    assert repr(result) == "TrainingResult(update_values=PlainVector(size=2), steps=3, private_randomness=True)"
