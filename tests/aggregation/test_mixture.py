import math

import numpy as np
import pytest

from privfed.aggregation.mixture import Mixture
from privfed.errors import CohortError, LayoutMismatchError
from privfed.update import Layout, PlainVector


def vector(*values: float) -> PlainVector:
    return PlainVector(layout=Layout(names=("w",), shapes=((len(values),),)), values=values)


def test_shares_sum_to_one_at_any_magnitude() -> None:
    for unit in (1e-300, 1.0, 1e300):
        shares = Mixture(weights={"a": 3 * unit, "b": unit, "c": 0.0}).shares
        assert shares == pytest.approx({"a": 0.75, "b": 0.25, "c": 0.0})


def test_the_model_moves_by_the_scaled_mean_and_a_share_of_the_reference() -> None:
    mean, reference = vector(1.0, 2.0), vector(10.0, 0.0)
    assert Mixture(weights={"a": 1}).moved(mean) is mean
    assert Mixture(weights={"a": 1}, scale=0.5).moved(mean).values.tolist() == [0.5, 1.0]
    assert Mixture(weights={"a": 1}, scale=0.5, reference_share=0.5).moved(mean, reference).values.tolist() == [5.5, 1.0]


def test_a_share_of_a_missing_or_other_reference_is_refused() -> None:
    mixture = Mixture(weights={"a": 1}, reference_share=0.5)
    with pytest.raises(ValueError, match="expected the reference"):
        mixture.moved(vector(1.0))
    with pytest.raises((LayoutMismatchError, ValueError)):
        mixture.moved(vector(1.0), vector(1.0, 2.0))


def test_clients_that_are_taken_out_have_no_weight_and_the_others_keep_theirs() -> None:
    mixture = Mixture(weights={"a": 1, "b": 2, "c": 3}, scale=0.5)
    assert dict(mixture.without({"b"}).weights) == {"a": 1, "b": 0, "c": 3}
    assert mixture.without({"b"}).scale == 0.5
    assert dict(mixture.weights) == {"a": 1, "b": 2, "c": 3}
    with pytest.raises(CohortError, match="nothing was summed"):
        mixture.without({"a", "b", "c"})


@pytest.mark.parametrize("weights", [{}, {"a": 0.0}, {"a": -1.0, "b": 2.0}, {"a": math.nan}, {"a": math.inf}])
def test_what_is_no_weight_is_refused(weights: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected finite weights from 0"):
        Mixture(weights=weights)


@pytest.mark.parametrize("changes", [{"scale": -1.0}, {"scale": math.nan}, {"scale": math.inf}, {"reference_share": math.nan}])
def test_factors_that_are_none_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected a finite scale"):
        Mixture(weights={"a": 1.0}, **changes)


def test_it_does_not_change_with_the_mapping_it_was_made_from() -> None:
    weights = {"a": 1.0}
    mixture = Mixture(weights=weights)
    weights["a"] = 2.0
    assert dict(mixture.weights) == {"a": 1.0}
    np.testing.assert_equal(mixture.coefficients(total=8), {"a": 1})
