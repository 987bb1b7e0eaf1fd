import json
import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError, asdict, replace
from typing import get_args

import pytest

from privfed.dp.mechanism import (
    AdaptivelyClippedGaussian,
    Budget,
    CappedPoissonSampledGaussian,
    CustomerSampledGaussian,
    DiscreteGaussianSum,
    Event,
    GaussianRelease,
    NonPrivateRelease,
    PoissonSampledGaussian,
    Unit,
    check_unit,
    decode_event,
    describe_event,
    encode_event,
)

ONE_OF_EACH = {
    PoissonSampledGaussian: PoissonSampledGaussian(noise_multiplier=1.1, sample_rate=256 / 60_000, steps=7),
    CappedPoissonSampledGaussian: CappedPoissonSampledGaussian(
        noise_multiplier=1.1, sample_rate=0.01, capacity=320, max_records=25_600, steps=7
    ),
    CustomerSampledGaussian: CustomerSampledGaussian(noise_multiplier=1.1, sample_rate=0.01, records_per_customer=4, steps=7),
    AdaptivelyClippedGaussian: AdaptivelyClippedGaussian(noise_multiplier=1.1, count_noise=12.8, sample_rate=0.01, steps=7),
    GaussianRelease: GaussianRelease(noise_multiplier=0.1 + 0.2, count=3),
    DiscreteGaussianSum: DiscreteGaussianSum(
        share_variance=2048, shares=8, l2_sensitivity=32, l1_sensitivity=1024, coordinates=12_000, count=5
    ),
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


WRONG = {"noise_multiplier": BAD_NOISE, "count_noise": BAD_NOISE, "sample_rate": [0.0, -0.1, 1.0000001, math.nan]}


@pytest.mark.parametrize("event", ONE_OF_EACH.values(), ids=lambda event: type(event).__name__)
def test_every_field_of_every_event_refuses_what_is_out_of_its_range(event: Event) -> None:
    for name in asdict(event):
        for wrong in WRONG.get(name, BAD_NUMBERS):
            with pytest.raises(ValueError, match=name):
                replace(event, **{name: wrong})


def test_the_sum_of_absolute_values_is_never_below_the_euclidean_norm() -> None:
    with pytest.raises(ValueError, match="at least l2_sensitivity"):
        replace(ONE_OF_EACH[DiscreteGaussianSum], l1_sensitivity=31)


@pytest.mark.parametrize("event", ONE_OF_EACH.values(), ids=lambda event: type(event).__name__)
def test_every_event_has_words_that_name_all_of_its_numbers(event: Event) -> None:
    words = describe_event(event)
    assert words
    left_out = {"l1_sensitivity", "coordinates"}  # they matter to the accountant alone
    assert all(f"{value:g}" in words for name, value in asdict(event).items() if name not in left_out)


def test_no_two_events_have_the_same_words() -> None:
    assert len({describe_event(event) for event in ONE_OF_EACH.values()}) == len(ONE_OF_EACH)


UNITS: dict[type, set[Unit]] = {
    PoissonSampledGaussian: {Unit.RECORD},
    CappedPoissonSampledGaussian: {Unit.RECORD},
    CustomerSampledGaussian: {Unit.CUSTOMER},
    AdaptivelyClippedGaussian: {Unit.RECORD},
    GaussianRelease: set(Unit),
    DiscreteGaussianSum: {Unit.SILO},
    NonPrivateRelease: set(Unit),
}


@pytest.mark.parametrize("event", ONE_OF_EACH.values(), ids=lambda event: type(event).__name__)
@pytest.mark.parametrize("unit", Unit)
def test_an_event_speaks_of_its_own_unit_only(unit: Unit, event: Event) -> None:
    if unit in UNITS[type(event)]:
        check_unit(event, unit)
    else:
        with pytest.raises(ValueError, match=f"about one {unit.name.lower()}"):
            check_unit(event, unit)


@pytest.mark.parametrize("what", [describe_event, lambda event: check_unit(event, Unit.RECORD)])
def test_what_is_no_event_has_no_words_and_no_unit(what: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match="expected an event"):
        what("gaussian release")


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
