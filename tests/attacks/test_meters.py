import numpy as np
import pytest

from privfed.attacks.meters import Meter, correlation_meter, noise_meter, weight_meter

LEVEL = 1e-3


def faults(make, trials: int) -> int:
    rng = np.random.default_rng(0)
    return sum(make(rng).fault is not None for _ in range(trials))


def test_noise_as_declared_is_no_fault_but_once_in_a_thousand_times_and_other_noise_is() -> None:
    def meter(rng: np.random.Generator, factor: float = 1.0) -> Meter:
        return noise_meter(factor * 3.0 * rng.normal(size=1000), what="noise", declared=3.0, significance=LEVEL)

    # 3,000 meters have three faults on average; ten or more once in a thousand times.
    assert faults(meter, 3000) < 10
    assert faults(lambda rng: meter(rng, 2 / 3), 20) == faults(lambda rng: meter(rng, 3 / 2), 20) == 20


def test_a_fault_says_whether_there_is_less_noise_or_more() -> None:
    rng = np.random.default_rng(0)
    less, more = (noise_meter(scale * rng.normal(size=100), what="noise", declared=1.0, significance=LEVEL) for scale in (0.3, 3.0))
    assert less.fault.startswith("less noise than declared: noise is 0.")
    assert "one draw is used several times" in more.fault
    assert less.low < less.measured < less.high < 1 < more.low


def test_no_noise_at_all_is_a_fault() -> None:
    assert noise_meter(np.zeros(10), what="noise", declared=1e-9, significance=LEVEL).fault is not None


def test_a_weight_is_a_fault_outside_of_what_noise_explains() -> None:
    def meter(measured: float) -> Meter:
        return weight_meter(measured, what="weight", declared=1.0, deviation=0.1, significance=LEVEL)

    # The quantile of a normal number at one half in a thousand is 3.29.
    assert [meter(value).fault is None for value in (0.66, 0.68, 1.0, 1.32, 1.34)] == [False, True, True, True, False]
    assert meter(2.0).fault.startswith("records weigh more")
    assert meter(0.0).fault.startswith("records weigh less")


@pytest.mark.parametrize("shared", [0.3, -0.3, 1.0])
def test_noise_that_is_shared_in_part_is_found_and_independent_noise_is_not(shared: float) -> None:
    def meter(rng: np.random.Generator, part: float = 0.0) -> Meter:
        first, own = rng.normal(size=(2, 500))
        second = part * first + np.sqrt(1 - part**2) * own
        return correlation_meter(first, second, what="noise", significance=LEVEL)

    assert faults(meter, 3000) < 10
    assert faults(lambda rng: meter(rng, shared), 20) == 20


def test_noise_that_is_missing_is_no_correlation() -> None:
    assert correlation_meter(np.zeros(10), np.ones(10), what="noise", significance=LEVEL).fault is None
