import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from privfed.aggregation import gram as module
from privfed.aggregation.gram import gram
from privfed.errors import LayoutMismatchError
from privfed.update import Layout, PlainVector


def vectors(rows: np.ndarray) -> list[PlainVector]:
    layout = Layout(names=("w",), shapes=((rows.shape[1],),))
    return [PlainVector(layout=layout, values=row) for row in rows]


@given(hnp.arrays(np.int64, st.tuples(st.integers(1, 6), st.integers(1, 30)), elements=st.integers(-1000, 1000)))
def test_the_matrix_holds_all_inner_products(rows: np.ndarray) -> None:
    # Sums of 30 products of at most 10^6 are exact in float64, whatever the order.
    assert gram(vectors(rows)).tolist() == [[sum(map(int, a * b)) for b in rows] for a in rows]


def test_blocks_of_coordinates_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.random.default_rng(0).integers(-1000, 1000, (3, 101))
    whole = gram(vectors(rows))
    monkeypatch.setattr(module, "_BLOCK", 10)
    np.testing.assert_array_equal(gram(vectors(rows)), whole)


def test_the_matrix_is_symmetric_and_accurate_to_float64() -> None:
    rows = np.random.default_rng(1).normal(size=(7, 70_000))
    products = gram(vectors(rows))
    np.testing.assert_array_equal(products, products.T)
    # Higham, 2002, section 3.1: |error| <= n u / (1 - n u) * sum |a_i b_i|; float32 accumulation would miss it by 2^29.
    bound = 70_000 * 2.0**-53 * 1.01
    for i, j in ((0, 0), (0, 1), (5, 2)):
        exact = math.fsum(rows[i] * rows[j])  # each product rounded once, the sum once
        assert abs(products[i, j] - exact) <= (bound + 2.0**-52) * np.abs(rows[i] * rows[j]).sum()


def test_differences_keep_what_a_matrix_of_models_in_float32_has_lost() -> None:
    rng = np.random.default_rng(2)
    model = rng.normal(size=1000)
    deltas = np.stack([1e-4 * rng.normal(size=1000), 1e-4 * rng.normal(size=1000)])
    exact = float(sum(Fraction(a - b) ** 2 for a, b in zip(*deltas, strict=True)))

    def distance(products: np.ndarray) -> float:
        return float(products[0, 0] + products[1, 1] - 2 * products[0, 1])

    models = (model + deltas).astype(np.float32)
    assert abs(distance(gram(vectors(deltas))) / exact - 1) < 1e-12
    assert abs(distance(models @ models.T) / exact - 1) > 0.01


def test_no_vector_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one vector"):
        gram([])


def test_mixed_layouts_are_refused() -> None:
    with pytest.raises(LayoutMismatchError, match="nothing was computed"):
        gram([*vectors(np.ones((1, 2))), *vectors(np.ones((1, 3)))])


def test_an_overflow_is_refused() -> None:
    with pytest.raises(ValueError, match="overflow"):
        gram(vectors(np.array([[1e200], [1.0]])))
