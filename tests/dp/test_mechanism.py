import json
import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError, asdict, replace
from decimal import Decimal
from fractions import Fraction
from typing import get_args

import numpy as np
import pytest

from privfed.dp.accounting import epsilon
from privfed.dp.charges import Charges
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
    Relation,
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
# Not even a numpy float of another precision: it would be charged rounded, and could not be written down.
BAD_TYPES = [np.float32(0.5), np.float16(0.5), np.int64(1), np.bool_(True), True, "0.5", None, Fraction(1, 2), Decimal("0.5"), 0.5j]
BAD_NOISE = [0.0, -1.0, math.nan, math.inf, 1e-300, 1e-10, 1e300, 10**400, *BAD_TYPES]
BAD_NUMBERS = [0, -1, 1.5, 1.0, 10**40, *BAD_TYPES]
BAD_RATES = [0.0, -0.1, 1.0000001, math.nan, 1e-300, 1 - 1e-16, *BAD_TYPES]
BAD_DELTAS = [0.0, 1.0, -1e-9, 2.0, math.nan, 1e-300, *BAD_TYPES]


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


WRONG = {"noise_multiplier": BAD_NOISE, "count_noise": BAD_NOISE, "sample_rate": BAD_RATES}


@pytest.mark.parametrize("event", ONE_OF_EACH.values(), ids=lambda event: type(event).__name__)
def test_every_field_of_every_event_refuses_what_is_out_of_its_range(event: Event) -> None:
    for name in asdict(event):
        for wrong in WRONG.get(name, BAD_NUMBERS):
            with pytest.raises(ValueError, match=name):
                replace(event, **{name: wrong})


EXTREMES: dict[str, list[float]] = {"noise_multiplier": [1e-9, 1e9], "count_noise": [1e-9, 1e9], "sample_rate": [1e-15, 1 - 1e-12, 1.0]}


@pytest.mark.parametrize("event", ONE_OF_EACH.values(), ids=lambda event: type(event).__name__)
def test_whatever_an_event_accepts_is_accounted_and_written_down(event: Event) -> None:
    """Each field at the ends of its range, the others as usual: a number at least 0, and the same event again from JSON."""
    for name in asdict(event):
        for extreme in EXTREMES.get(name, [1, 10**9 if name in {"steps", "count"} else 1000]):
            changes = {name: extreme, **({"l1_sensitivity": 10**12} if name == "l2_sensitivity" else {})}
            if name == "l1_sensitivity":
                changes["l2_sensitivity"] = 1
            if isinstance(event, CustomerSampledGaussian) and extreme == 1e-9:
                changes["records_per_customer"] = 1
            if name == "records_per_customer":
                changes["noise_multiplier"] = 1e-9 * extreme
            extended = replace(event, **changes)
            assert epsilon([extended], delta=1e-6) >= 0
            assert decode_event(json.loads(json.dumps(encode_event(extended)))) == extended


def test_a_customer_is_left_some_noise_for_each_record() -> None:
    with pytest.raises(ValueError, match="at least 1e-9 for each of the records_per_customer"):
        CustomerSampledGaussian(noise_multiplier=1e-9, sample_rate=0.5, records_per_customer=2, steps=1)
    # Whether any of so many records is drawn is certain but for less than a float can tell.
    for records in (20, 40, 60):
        crowded = CustomerSampledGaussian(noise_multiplier=float(records), sample_rate=0.5, records_per_customer=records, steps=1)
        assert epsilon([crowded], delta=1e-6) <= epsilon([GaussianRelease(noise_multiplier=1.0)], delta=1e-6)


@pytest.mark.parametrize("event", ONE_OF_EACH.values(), ids=lambda event: type(event).__name__)
def test_a_filter_accounts_the_least_noise_of_replaced_units_or_says_that_it_cannot(event: Event) -> None:
    fields = {name: 1e-9 for name in asdict(event) if name in {"noise_multiplier", "count_noise"}}
    for sample_rate in (0.5, 1.0):
        least = replace(event, **{name: value for name, value in {**fields, "sample_rate": sample_rate, "records_per_customer": 1}.items()
                                  if name in asdict(event)})  # fmt: skip
        try:
            assert Charges([least]).filtered_epsilon(delta=1e-6, relation=Relation.REPLACE_ONE) >= 0
        except ValueError as refusal:
            assert "known Renyi divergences" in str(refusal)  # noqa: PT017


def test_a_numpy_float_of_double_precision_is_a_float() -> None:
    event = GaussianRelease(noise_multiplier=np.float64(2.0))
    assert decode_event(json.loads(json.dumps(encode_event(event)))) == event == GaussianRelease(noise_multiplier=2.0)


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


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan, math.inf, 1e-300, *BAD_TYPES])
def test_a_budget_needs_a_positive_finite_epsilon(limit: float) -> None:
    with pytest.raises(ValueError, match="epsilon"):
        Budget(epsilon=limit, delta=1e-5)


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
