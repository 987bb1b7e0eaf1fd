from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from privfed.aggregation.rules import FedAvg
from privfed.aggregation.weighting import Weighting
from privfed.he.params import CkksParams

SERVER, CLIENTS = CkksParams.standard(), CkksParams.parity(clients=5)


def weighting(weights, params):
    return Weighting(weights=weights, rule=FedAvg(), params=params)


def test_where_the_server_weights_coefficients_are_apportioned_among_those_who_answer():
    terms = weighting({"a": 0.5, "b": 0.25, "c": 0.125, "d": 0.125}, SERVER)
    assert terms.coefficients(["c", "a", "b"]) == {"a": 2341, "b": 1170, "c": 585}
    assert terms.divisor(["a", "b", "c"]) == 4096
    assert terms.share("a") is None


def test_where_clients_pre_scale_weights_are_fixed_before_who_answers_is_known():
    terms = weighting({"a": 0.5, "b": 0.25, "c": 0.125, "d": 0.125}, CLIENTS)
    everybody = terms.coefficients(["a", "b", "c", "d"])
    assert everybody == {"a": 2**31, "b": 2**30, "c": 2**29, "d": 2**29}
    for participants in (["a"], ["b", "d"], ["d", "c", "b"]):
        assert terms.coefficients(participants) == {name: everybody[name] for name in everybody if name in participants}
        assert terms.divisor(participants) == sum(terms.share(name) for name in participants)


def test_integer_weights_stay_as_they_are_and_thirds_are_exact():
    terms = weighting({"a": 1, "b": 1, "c": 1}, CLIENTS)
    assert terms.coefficients("abc") == {"a": 1, "b": 1, "c": 1}
    assert terms.share("a") == Fraction(1, 3)
    assert terms.divisor("ab") == Fraction(2, 3)


@given(st.lists(st.integers(1, 1000) | st.floats(0.01, 100), min_size=2, max_size=5).filter(lambda drawn: 2.01 * max(drawn) < sum(drawn)))
def test_shares_of_all_clients_sum_to_one(drawn):
    terms = weighting(dict(zip("abcde", drawn, strict=False)), CLIENTS)
    assert sum(terms.share(name) for name in terms.weights) == 1 == terms.divisor(list(terms.weights))


def test_a_client_with_more_than_half_of_all_weights_is_refused_where_clients_pre_scale():
    with pytest.raises(ValueError, match=r"expected at most half of all weights for 'b'.*CkksParams\.standard"):
        weighting({"a": 1, "b": 3, "c": 1}, CLIENTS)
    assert weighting({"a": 1, "b": 2, "c": 1}, CLIENTS).share("b") == Fraction(1, 2)
    assert weighting({"a": 1, "b": 3, "c": 1}, SERVER).share("b") is None


def test_more_clients_than_the_parameters_have_room_for_are_refused():
    with pytest.raises(ValueError, match="expected at most 5 clients for these parameters, got 6"):
        weighting(dict.fromkeys("abcdef", 1), CLIENTS)


@pytest.mark.parametrize("weights", [{}, {"a": 1, "b": 0}, {"a": 1, "b": -1}])
def test_weights_that_the_rule_cannot_express_are_refused(weights):
    for params in (SERVER, CLIENTS):
        with pytest.raises(ValueError, match="expected"):
            weighting(weights, params).coefficients(list(weights))
