import json
import math
from dataclasses import FrozenInstanceError, asdict
from typing import get_args

import pytest

from privfed.dp.mechanism import (
    Budget,
    Event,
    GaussianRelease,
    NonPrivateRelease,
    PoissonSampledGaussian,
    decode_event,
    encode_event,
)

ONE_OF_EACH = {
    PoissonSampledGaussian: PoissonSampledGaussian(noise_multiplier=1.1, sample_rate=256 / 60_000, steps=7),
    GaussianRelease: GaussianRelease(noise_multiplier=0.1 + 0.2, count=3),
    NonPrivateRelease: NonPrivateRelease(),
}
BAD_NOISE = [0.0, -1.0, math.nan, math.inf]
BAD_NUMBERS = [0, -1, 1.5, True, "3"]
BAD_DELTAS = [0.0, 1.0, -1e-9, 2.0, math.nan]


def test_every_event_type_has_an_example_here() -> None:
    assert set(ONE_OF_EACH) == set(get_args(Event))


@pytest.mark.parametrize("event", ONE_OF_EACH.values(), ids=lambda event: type(event).__name__)
def test_every_event_survives_json_bit_by_bit(event: Event) -> None:
    assert decode_event(json.loads(json.dumps(encode_event(event)))) == event


@pytest.mark.parametrize("event", ONE_OF_EACH.values(), ids=lambda event: type(event).__name__)
def test_every_event_is_frozen(event: Event) -> None:
    for name in asdict(event):
        with pytest.raises(FrozenInstanceError):
            setattr(event, name, 1)


@pytest.mark.parametrize("event", ONE_OF_EACH.values(), ids=lambda event: type(event).__name__)
def test_an_encoded_event_with_a_missing_or_an_extra_field_or_another_kind_is_refused(event: Event) -> None:
    encoded = encode_event(event)
    for name in encoded:
        with pytest.raises(ValueError, match="expected"):
            decode_event({key: value for key, value in encoded.items() if key != name})
    with pytest.raises(ValueError, match="exactly the fields"):
        decode_event({**encoded, "discount": 2})
    with pytest.raises(ValueError, match="known kind"):
        decode_event({**encoded, "kind": "laplace"})


@pytest.mark.parametrize(
    "encoded",
    [None, [], "gaussian release", {}, {"kind": ["gaussian release"]}, {"kind": "gaussian release", "noise_multiplier": "1", "count": 1}],
)
def test_an_encoded_event_that_is_something_else_is_refused(encoded: object) -> None:
    with pytest.raises(ValueError, match="expected"):
        decode_event(encoded)


def test_an_encoded_event_outside_its_ranges_is_refused() -> None:
    with pytest.raises(ValueError, match="noise_multiplier"):
        decode_event({"kind": "gaussian release", "noise_multiplier": -1.0, "count": 1})
    with pytest.raises(ValueError, match="numbers"):
        decode_event({"kind": "gaussian release", "noise_multiplier": 1.0, "count": True})


def test_what_is_no_event_is_not_encoded() -> None:
    with pytest.raises(TypeError, match="expected an event"):
        encode_event("gaussian release")  # type: ignore[arg-type]


@pytest.mark.parametrize("noise_multiplier", BAD_NOISE)
def test_events_refuse_a_noise_multiplier_that_is_not_positive_and_finite(noise_multiplier: float) -> None:
    with pytest.raises(ValueError, match="noise_multiplier"):
        GaussianRelease(noise_multiplier=noise_multiplier)
    with pytest.raises(ValueError, match="noise_multiplier"):
        PoissonSampledGaussian(noise_multiplier=noise_multiplier, sample_rate=0.1, steps=1)


@pytest.mark.parametrize("sample_rate", [0.0, -0.1, 1.0000001, math.nan])
def test_events_refuse_a_sample_rate_that_is_no_probability_above_zero(sample_rate: float) -> None:
    with pytest.raises(ValueError, match="sample_rate"):
        PoissonSampledGaussian(noise_multiplier=1.0, sample_rate=sample_rate, steps=1)


@pytest.mark.parametrize("number", BAD_NUMBERS)
def test_events_refuse_a_number_of_steps_or_releases_below_one_or_not_whole(number: int) -> None:
    with pytest.raises(ValueError, match="steps"):
        PoissonSampledGaussian(noise_multiplier=1.0, sample_rate=0.1, steps=number)
    with pytest.raises(ValueError, match="count"):
        GaussianRelease(noise_multiplier=1.0, count=number)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.nan, math.inf])
def test_a_budget_needs_a_positive_finite_epsilon(epsilon: float) -> None:
    with pytest.raises(ValueError, match="epsilon"):
        Budget(epsilon=epsilon, delta=1e-5)


@pytest.mark.parametrize("delta", BAD_DELTAS)
def test_every_budget_needs_a_delta_between_zero_and_one(delta: float) -> None:
    with pytest.raises(ValueError, match="delta"):
        Budget(epsilon=1.0, delta=delta)
    with pytest.raises(ValueError, match="delta"):
        Budget.unlimited(delta=delta)


def test_only_the_named_budget_has_no_limit() -> None:
    assert Budget(epsilon=1.0, delta=1e-5).limited
    unlimited = Budget.unlimited(delta=1e-5)
    assert not unlimited.limited
    assert unlimited.epsilon == math.inf
    assert unlimited == Budget.unlimited(delta=1e-5) != Budget(epsilon=1e300, delta=1e-5)
