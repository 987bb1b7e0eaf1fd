import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from privfed.aggregation.linear import apportion, integer_weights, weighted_sum_plain
from privfed.errors import LayoutMismatchError
from privfed.update import Layout, PlainVector

TOTAL = 4096
NAMES = st.text("abcdefghij", min_size=1, max_size=4)
# A ratio of at most 64 between any two, and at most 20 of them: every share is above 1/4096.
WEIGHTS = st.dictionaries(NAMES, st.floats(0.25, 16.0), min_size=1, max_size=20)


def vector(*values: float) -> PlainVector:
    return PlainVector(layout=Layout(names=("w",), shapes=((len(values),),)), values=values)


def test_integers_that_fit_stay_as_they_are() -> None:
    assert integer_weights({"a": 4000, "b": 95.0, "c": 1}, total=TOTAL) == {"a": 4000, "b": 95, "c": 1}


def test_integers_that_do_not_fit_are_apportioned() -> None:
    assert integer_weights({"a": 30_000, "b": 10_000}, total=TOTAL) == {"a": 3072, "b": 1024}


def test_fractions_are_apportioned_by_largest_remainder() -> None:
    # Quotas 5.0, 3.0 and 2.0 would be exact; at a total of 7 they are 3.5, 2.1 and 1.4, and the largest remainder is that of a.
    assert integer_weights({"a": 0.5, "b": 0.3, "c": 0.2}, total=7) == {"a": 4, "b": 2, "c": 1}


def test_equal_remainders_go_to_the_names_that_sort_first() -> None:
    assert integer_weights({"d": 0.5, "c": 0.5, "b": 0.5, "a": 0.5}, total=6) == {"a": 2, "b": 2, "c": 1, "d": 1}


def test_weights_beyond_the_range_of_a_float_sum_do_not_overflow() -> None:
    assert integer_weights({"a": 1.7e308, "b": 1.7e308}, total=TOTAL) == {"a": 2048, "b": 2048}


@given(WEIGHTS.filter(lambda weights: any(weight != int(weight) for weight in weights.values())))
def test_every_share_is_off_by_less_than_one_over_total(weights: dict[str, float]) -> None:
    coefficients = integer_weights(weights, total=TOTAL)
    assert sum(coefficients.values()) == TOTAL
    whole = sum(map(Fraction, weights.values()))
    for name, weight in weights.items():
        assert abs(Fraction(coefficients[name], TOTAL) - Fraction(weight) / whole) < Fraction(1, TOTAL)


@given(WEIGHTS, st.randoms(use_true_random=False))
def test_every_party_gets_the_same_coefficients_whatever_the_order_of_its_mapping(weights: dict[str, float], random: object) -> None:
    names = list(weights)
    random.shuffle(names)
    assert integer_weights({name: weights[name] for name in names}, total=TOTAL) == integer_weights(weights, total=TOTAL)


@given(st.dictionaries(NAMES, st.floats(1e-3, 1e3), min_size=2, max_size=12), st.data())
def test_weights_that_are_accepted_among_all_clients_are_accepted_among_any_of_them(weights: dict[str, float], data: st.DataObject) -> None:
    try:
        integer_weights(weights, total=64)
    except ValueError:
        return
    some = data.draw(st.sets(st.sampled_from(sorted(weights)), min_size=1))
    coefficients = integer_weights({name: weights[name] for name in weights if name in some}, total=64)
    assert min(coefficients.values()) >= 1


@pytest.mark.parametrize("weight", [0, 0.0, -1.0, math.nan, math.inf])
def test_a_weight_that_is_not_positive_and_finite_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="positive, finite weight for 'b'"):
        integer_weights({"a": 1.0, "b": weight}, total=TOTAL)


def test_a_weight_that_would_round_to_nothing_is_refused() -> None:
    assert integer_weights({"a": 4095.5, "b": 1.1}, total=TOTAL) == {"a": 4095, "b": 1}
    with pytest.raises(ValueError, match=r"at least 1/4096 of the sum, got 0\.9 for 'b'"):
        integer_weights({"a": 4095.5, "b": 0.9}, total=TOTAL)


@pytest.mark.parametrize("weights", [{}, {str(index): 1.0 for index in range(5)}])
def test_no_client_and_more_clients_than_coefficients_are_refused(weights: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="from 1 to 4 clients"):
        integer_weights(weights, total=4)


@given(st.lists(st.tuples(st.integers(0, 100), st.lists(st.integers(-1000, 1000), min_size=3, max_size=3)), min_size=1, max_size=6))
def test_the_plain_sum_is_the_linear_combination(terms: list[tuple[int, list[int]]]) -> None:
    if not any(coefficient for coefficient, _ in terms):
        return
    total = weighted_sum_plain([vector(*values) for _, values in terms], [coefficient for coefficient, _ in terms])
    # Integers of this size are exact in float64, so the comparison is too.
    assert total.values.tolist() == [sum(coefficient * values[index] for coefficient, values in terms) for index in range(3)]


def test_the_plain_sum_changes_no_argument() -> None:
    first, second = vector(1.0, 2.0), vector(3.0, 4.0)
    weighted_sum_plain([first, second], [2, 1])
    assert (first.values.tolist(), second.values.tolist()) == ([1.0, 2.0], [3.0, 4.0])


@pytest.mark.parametrize("coefficients", [[], [1], [1, -1], [0, 0], [1, 1, 1]])
def test_the_plain_sum_refuses_other_coefficients(coefficients: list[int]) -> None:
    with pytest.raises(ValueError, match=r"expected (one coefficient|non-negative)"):
        weighted_sum_plain([vector(1.0), vector(2.0)], coefficients)


def test_the_plain_sum_refuses_no_vector() -> None:
    with pytest.raises(ValueError, match="at least one vector"):
        weighted_sum_plain([], [])


def test_the_plain_sum_refuses_mixed_layouts() -> None:
    with pytest.raises(LayoutMismatchError, match="nothing was summed"):
        weighted_sum_plain([vector(1.0), vector(1.0, 2.0)], [1, 1])


def test_the_plain_sum_refuses_an_overflow() -> None:
    with pytest.raises(ValueError, match="finite"):
        weighted_sum_plain([vector(1.7e308), vector(1.7e308)], [1, 1])


REALS = st.dictionaries(NAMES, st.floats(0.0, 1e6), min_size=1, max_size=20).filter(lambda weights: any(weights.values()))


@given(REALS)
def test_what_a_rule_computed_is_apportioned_within_its_stated_error(weights: dict[str, float]) -> None:
    coefficients = apportion(weights, total=TOTAL)
    whole = sum(map(Fraction, weights.values()))
    bound = Fraction(1, TOTAL) + Fraction(len(weights), 2**24)
    for name, weight in weights.items():
        assert abs(Fraction(coefficients[name], sum(coefficients.values())) - Fraction(weight) / whole) < bound
        assert coefficients[name] >= 0
    assert list(coefficients) == list(weights)


@given(REALS, st.randoms(use_true_random=False))
def test_apportioning_does_not_depend_on_the_order(weights: dict[str, float], random: object) -> None:
    names = list(weights)
    random.shuffle(names)
    assert apportion({name: weights[name] for name in names}, total=TOTAL) == apportion(weights, total=TOTAL)


def test_last_digits_of_a_processor_do_not_change_a_coefficient() -> None:
    # Three equal shares of 4096: the odd ones go by name, and not to whoever is 1e-16 ahead.
    third = 1 / 3
    digits = {"a": math.nextafter(third, 0), "b": third, "c": math.nextafter(third, 1)}
    assert apportion(digits, total=TOTAL) == apportion(dict.fromkeys("abc", third), total=TOTAL) == {"a": 1366, "b": 1365, "c": 1365}


def test_integers_of_a_rule_stay_as_they_are() -> None:
    assert apportion({"a": 1.0, "b": 0.0, "c": 1}, total=TOTAL) == {"a": 1, "b": 0, "c": 1}
    assert apportion({"a": 3.0, "b": 1.0}, total=2) == {"a": 2, "b": 0}  # quotas 1.5 and 0.5: the odd one goes by name


@pytest.mark.parametrize("weights", [{}, {"a": 0.0}, {"a": -1.0, "b": 2.0}, {"a": math.nan}, {"a": math.inf}])
def test_what_is_no_weight_is_not_apportioned(weights: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected finite weights from 0"):
        apportion(weights, total=TOTAL)


def test_a_total_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="a total of at least 1"):
        apportion({"a": 1.0}, total=0)
