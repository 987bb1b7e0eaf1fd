import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from privfed.errors import LayoutMismatchError
from privfed.update import Aggregate, Layout, PlainVector, Update, effective_clients

LAYOUT = Layout(names=("weight", "bias", "scale"), shapes=((2, 3), (2,), ()))
SHAPES = st.lists(st.lists(st.integers(1, 3), max_size=3).map(tuple), min_size=1, max_size=5).map(tuple)


def vector(*values: float) -> PlainVector:
    return PlainVector(layout=Layout(names=("w",), shapes=((len(values),),)), values=values)


@given(SHAPES, st.integers(0, 100))
def test_tensors_survive_flatten_and_unflatten(shapes: tuple[tuple[int, ...], ...], seed: int) -> None:
    layout = Layout(names=tuple(f"t{index}" for index in range(len(shapes))), shapes=shapes)
    rng = np.random.default_rng(seed)
    tensors = {name: rng.normal(size=shape) for name, shape in zip(layout.names, shapes, strict=True)}
    flat = layout.flatten(dict(reversed(tensors.items())))
    assert flat.values.shape == (layout.size,)
    restored = layout.unflatten(flat)
    assert list(restored) == list(layout.names)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(restored[name], tensor)


def test_a_tensor_that_unflatten_returns_is_a_copy() -> None:
    flat = PlainVector(layout=LAYOUT, values=np.arange(9))
    LAYOUT.unflatten(flat)["weight"][0, 0] = 99
    assert flat.values[0] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bias": None}, r"missing \['bias'\]"),
        ({"other": np.zeros(2)}, r"not in the layout \['other'\]"),
        ({"bias": np.zeros(3)}, r"'bias' of shape \(2,\), got \(3,\)"),
        ({"weight": np.zeros((3, 2))}, r"'weight' of shape \(2, 3\), got \(3, 2\)"),
    ],
)
def test_tensors_that_are_not_those_of_the_layout_are_refused(changes: dict[str, object], message: str) -> None:
    tensors = {"weight": np.zeros((2, 3)), "bias": np.zeros(2), "scale": np.zeros(())} | changes
    with pytest.raises(LayoutMismatchError, match=message):
        LAYOUT.flatten({name: tensor for name, tensor in tensors.items() if tensor is not None})


def test_a_vector_of_another_layout_is_not_unflattened() -> None:
    with pytest.raises(LayoutMismatchError):
        LAYOUT.unflatten(vector(*range(9)))


@pytest.mark.parametrize(
    ("names", "shapes"),
    [((), ()), (("a",), ()), (("a", "a"), ((1,), (1,))), (("a",), ((0,),)), (("a",), ((2, -1),))],
    ids=["no tensor", "no shape", "repeated name", "empty tensor", "negative dimension"],
)
def test_an_impossible_layout_is_refused(names: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Layout(names=names, shapes=shapes)


def test_a_layout_digest_changes_with_names_order_and_shapes() -> None:
    layouts = [
        Layout(names=("a", "b"), shapes=((2,), (3,))),
        Layout(names=("b", "a"), shapes=((2,), (3,))),
        Layout(names=("a", "b"), shapes=((3,), (2,))),
        Layout(names=("a", "b"), shapes=((2, 1), (3,))),
        Layout(names=("a", "b"), shapes=((), (3,))),
        Layout(names=("ab", ""), shapes=((2,), (3,))),
        Layout(names=("a",), shapes=((5,),)),
    ]
    assert len({layout.digest for layout in layouts}) == len(layouts)
    assert layouts[0].digest == Layout(names=("a", "b"), shapes=((2,), (3,))).digest


def test_values_are_copied_and_read_only() -> None:
    source = np.array([1.0, 2.0])
    kept = vector(*source)
    mine = PlainVector(layout=kept.layout, values=source)
    source[0] = 9.0
    assert mine.values.tolist() == [1.0, 2.0]
    with pytest.raises(ValueError, match="read-only"):
        mine.values[0] = 9.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_refused_without_a_word_about_the_others(value: float) -> None:
    with pytest.raises(ValueError, match=r"^expected finite values, got NaN or infinity; nothing was kept$"):
        vector(0.123456, value)


@pytest.mark.parametrize("values", [[1.0], [1.0, 2.0, 3.0], [[1.0, 2.0]], 1.0])
def test_values_of_another_shape_are_refused(values: object) -> None:
    with pytest.raises(LayoutMismatchError, match="nothing was kept"):
        PlainVector(layout=vector(0.0, 0.0).layout, values=values)


def test_no_text_of_a_vector_an_update_or_an_aggregate_shows_a_value() -> None:
    secret = vector(0.123456, -7.89)
    texts = (
        secret,
        Update(sender="bank", round=1, vector=secret),
        Aggregate(round=1, vector=secret, coefficients={"bank": 123456, "other": 1}),
    )
    for text in map(repr, texts):
        assert "123456" not in text
        assert "7.89" not in text
    assert repr(texts[1]) == "Update(sender='bank', round=1, vector=PlainVector)"


def test_an_aggregate_keeps_its_coefficients_whatever_the_caller_does() -> None:
    coefficients = {"a": 1, "b": 2}
    aggregate = Aggregate(round=0, vector=vector(0.0), coefficients=coefficients)
    coefficients["a"] = 99
    assert aggregate.coefficients == {"a": 1, "b": 2}
    with pytest.raises(TypeError):
        aggregate.coefficients["a"] = 99


def test_an_aggregate_reports_effective_clients_and_the_largest_share() -> None:
    aggregate = Aggregate(round=0, vector=vector(0.0), coefficients={"a": 5, "b": 3, "c": 2, "d": 0})
    assert aggregate.effective_clients == pytest.approx(100 / 38)
    assert aggregate.max_share == 0.5


@pytest.mark.parametrize("coefficients", [{}, {"a": 0}, {"a": -1, "b": 2}])
def test_impossible_coefficients_are_refused(coefficients: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="non-negative coefficients with at least one positive"):
        Aggregate(round=0, vector=vector(0.0), coefficients=coefficients)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=20).filter(any))
def test_effective_clients_lie_between_one_and_those_that_count(coefficients: list[int]) -> None:
    effective = effective_clients(coefficients)
    # One division of exact integers, correctly rounded: the bounds hold without a tolerance.
    assert 1 <= effective <= sum(coefficient > 0 for coefficient in coefficients)
    assert effective_clients([7 * coefficient for coefficient in coefficients]) == effective
