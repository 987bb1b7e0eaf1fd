import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from privfed.selection import select_clients

NAMES = tuple(f"bank_{index:02}" for index in range(30))


def select(fraction: float, *, seed: int = 0, minimum: int = 1, count: int = 30) -> tuple[str, ...]:
    return select_clients(NAMES[:count], fraction=fraction, rng=np.random.default_rng(seed), minimum=minimum)


@given(st.integers(1, 30), st.integers(1, 100), st.integers(1, 30), st.integers(0, 100))
def test_the_number_is_the_fraction_rounded_up_and_at_least_the_minimum(count: int, percent: int, minimum: int, seed: int) -> None:
    minimum = min(minimum, count)
    chosen = select(percent / 100, seed=seed, minimum=minimum, count=count)
    assert len(chosen) == max(minimum, -(-percent * count // 100))
    assert list(chosen) == [name for name in NAMES[:count] if name in chosen]


def test_a_fraction_is_read_as_the_decimal_that_was_written() -> None:
    assert math.ceil(0.1 * 30) == 3
    assert math.ceil(0.07 * 100) == 8  # what floating point makes of 7
    hundred = [str(index) for index in range(100)]
    assert len(select_clients(hundred, fraction=0.07, rng=np.random.default_rng(0))) == 7


def test_the_whole_fraction_takes_everyone() -> None:
    assert select(1.0) == NAMES


def test_the_generator_decides_alone() -> None:
    assert select(0.3, seed=1) == select(0.3, seed=1)
    assert select(0.3, seed=1) != select(0.3, seed=2)


def test_the_choice_is_uniform() -> None:
    rng = np.random.default_rng(0)
    draws = 2000
    counts = dict.fromkeys(NAMES[:5], 0)
    for _ in range(draws):
        for name in select_clients(NAMES[:5], fraction=0.4, rng=rng):
            counts[name] += 1
    # Each count is binomial(2000, 2/5): five standard deviations are 110. A choice of the first two would give 2000 and 0.
    assert all(abs(count - draws * 0.4) < 5 * math.sqrt(draws * 0.4 * 0.6) for count in counts.values())


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.01, math.nan])
def test_a_fraction_out_of_range_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match="above 0 and up to 1"):
        select(fraction)


@pytest.mark.parametrize("minimum", [0, 31])
def test_a_minimum_out_of_range_is_refused(minimum: int) -> None:
    with pytest.raises(ValueError, match="minimum from 1 to 30"):
        select(0.5, minimum=minimum)


def test_a_repeated_name_is_refused() -> None:
    with pytest.raises(ValueError, match="every name once"):
        select_clients(["a", "a"], fraction=1.0, rng=np.random.default_rng(0))
