import itertools
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from privfed.dp.accounting import epsilon
from privfed.dp.clipping import AdaptiveClipping
from privfed.dp.mechanism import Budget, NonPrivateRelease, PoissonSampledGaussian
from privfed.training.mechanism import DpSgd, NonPrivate, TrainingResult
from privfed.update import Layout, PlainVector

DP_SGD = DpSgd(noise_multiplier=1.1, max_grad_norm=0.5, sample_rate=0.01, expected_batch_size=256, steps=100, learning_rate=0.1)
CLIPPING = AdaptiveClipping(initial_norm=0.25, target_quantile=0.5, learning_rate=0.2, count_noise=10.0)
NON_PRIVATE = NonPrivate(learning_rate=0.1, batch_size=32, steps=10, seed=0)


@pytest.mark.parametrize("name", ["noise_multiplier", "max_grad_norm", "sample_rate", "learning_rate"])
@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, np.float32(0.1), np.int64(1), True, "0.1", None, 1e-300, Fraction(1, 2)])
def test_dp_sgd_refuses_numbers_that_are_not_positive_and_finite(name: str, bad: float) -> None:
    with pytest.raises(ValueError, match=f"expected {name}"):
        replace(DP_SGD, **{name: bad})


@pytest.mark.parametrize("name", ["expected_batch_size", "steps", "max_records", "batch_capacity", "records_per_customer"])
@pytest.mark.parametrize("bad", [0, -1, 1.5, np.int64(5), np.float32(5), True, "5", 10**13])
def test_dp_sgd_refuses_counts_below_one_and_fractions(name: str, bad: float) -> None:
    with pytest.raises(ValueError, match=f"expected {name}"):
        replace(DP_SGD, **{name: bad})


def test_a_budget_that_is_a_number_or_has_texts_for_numbers_is_refused() -> None:
    with pytest.raises(TypeError, match=r"expected a Budget\(epsilon=..., delta=...\), got float"):
        DpSgd.for_budget(4.0, rounds=1, max_records=1000, expected_batch_size=100, steps=1, learning_rate=0.1)
    with pytest.raises(ValueError, match="expected epsilon to be a float, got str"):
        Budget(epsilon="4", delta=1e-5)


def test_dp_sgd_refuses_a_sample_rate_above_one() -> None:
    assert replace(DP_SGD, sample_rate=1.0).sample_rate == 1.0
    with pytest.raises(ValueError, match="sample_rate from 1e-15 to 1, got"):
        replace(DP_SGD, sample_rate=1.0001)


@pytest.mark.parametrize(
    ("name", "bad"),
    [("learning_rate", 0.0), ("learning_rate", math.nan), ("batch_size", 0), ("steps", 0), ("seed", -1), ("seed", 0.5), ("seed", True)],
)
def test_non_private_refuses_numbers_out_of_range(name: str, bad: float) -> None:
    with pytest.raises(ValueError, match=f"expected {name}"):
        replace(NON_PRIVATE, **{name: bad})


def test_the_events_state_what_is_executed() -> None:
    assert DP_SGD.event() == PoissonSampledGaussian(noise_multiplier=1.1, sample_rate=0.01, steps=100)
    assert NON_PRIVATE.event() == NonPrivateRelease()


def test_variants_of_dp_sgd_that_were_not_proved_together_are_refused() -> None:
    variants = {"batch_capacity": 300, "records_per_customer": 2, "adaptive_clipping": CLIPPING}
    for one, other in itertools.combinations(variants, 2):
        with pytest.raises(ValueError, match=f"got {one} and {other}"):
            replace(DP_SGD, **{name: variants[name] for name in (one, other)})
        assert replace(DP_SGD, **{one: variants[one]}).event() != DP_SGD.event()


def test_adaptive_clipping_must_begin_within_its_bound_and_leave_something_for_the_sum() -> None:
    with pytest.raises(ValueError, match="initial_norm to be at most max_grad_norm"):
        replace(DP_SGD, adaptive_clipping=replace(CLIPPING, initial_norm=0.51))
    with pytest.raises(ValueError, match="count_noise above half"):
        replace(DP_SGD, adaptive_clipping=replace(CLIPPING, count_noise=0.5))
    assert replace(DP_SGD, adaptive_clipping=CLIPPING).initial_norm == 0.25
    assert DP_SGD.initial_norm == 0.5


@pytest.mark.parametrize("variant", [{}, {"batch_capacity": 300}, {"records_per_customer": 2}, {"adaptive_clipping": CLIPPING}])
def test_a_mechanism_for_a_budget_spends_just_less_than_it_in_every_variant(variant: dict[str, object]) -> None:
    budget = Budget(epsilon=3.0, delta=1e-5)
    mechanism = DpSgd.for_budget(budget, rounds=10, max_records=20_000, expected_batch_size=256, steps=20, learning_rate=0.5, **variant)
    spent = epsilon([mechanism.event()] * 10, delta=1e-5)
    assert 0.99 * 3.0 <= spent <= 3.0
    # Rounds count: with one more, the budget is exceeded, and for one alone there is less noise.
    assert epsilon([mechanism.event()] * 11, delta=1e-5) > 3.0
    once = DpSgd.for_budget(budget, rounds=1, max_records=20_000, expected_batch_size=256, steps=20, learning_rate=0.5, **variant)
    assert once.noise_multiplier < 0.9 * mechanism.noise_multiplier
    assert 0.99 * 3.0 <= epsilon([once.event()], delta=1e-5) <= 3.0
    assert all(getattr(mechanism, name) == value for name, value in variant.items())


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
