import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from privfed.aggregation import gram as module
from privfed.aggregation.gram import Gram, Reference, gram, noise_energy
from privfed.errors import LayoutMismatchError
from privfed.update import Layout, PlainVector


def vectors(rows: np.ndarray) -> dict[str, PlainVector]:
    layout = Layout(names=("w",), shapes=((rows.shape[1],),))
    return {f"c{index}": PlainVector(layout=layout, values=row) for index, row in enumerate(rows)}


@given(hnp.arrays(np.int64, st.tuples(st.integers(1, 6), st.integers(1, 30)), elements=st.integers(-1000, 1000)))
def test_the_matrix_holds_all_inner_products(rows: np.ndarray) -> None:
    # Sums of 30 products of at most 10^6 are exact in float64, whatever the order.
    matrix = gram(vectors(rows))
    assert matrix.products.tolist() == [[sum(map(int, a * b)) for b in rows] for a in rows]
    assert (matrix.names, matrix.size) == (tuple(f"c{index}" for index in range(len(rows))), rows.shape[1])


@given(hnp.arrays(np.int64, st.tuples(st.integers(2, 6), st.integers(1, 30)), elements=st.integers(-1000, 1000)))
def test_the_reference_holds_its_inner_products_with_the_updates(rows: np.ndarray) -> None:
    *_, reference = vectors(rows).values()
    matrix = gram(vectors(rows[:-1]), reference=reference)
    assert matrix.known_reference().products.tolist() == [sum(map(int, row * rows[-1])) for row in rows[:-1]]
    assert matrix.known_reference().square == sum(map(int, rows[-1] ** 2))
    assert matrix.products.tolist() == gram(vectors(rows[:-1])).products.tolist()


def test_blocks_of_coordinates_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.random.default_rng(0).integers(-1000, 1000, (3, 101))
    whole = gram(vectors(rows))
    monkeypatch.setattr(module, "_BLOCK", 10)
    np.testing.assert_array_equal(gram(vectors(rows)).products, whole.products)


def test_the_matrix_is_symmetric_and_accurate_to_float64() -> None:
    rows = np.random.default_rng(1).normal(size=(7, 70_000))
    products = gram(vectors(rows)).products
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
    assert abs(distance(gram(vectors(deltas)).products) / exact - 1) < 1e-12
    assert abs(distance(models @ models.T) / exact - 1) > 0.01


def test_no_update_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one update"):
        gram({})


def test_mixed_layouts_are_refused() -> None:
    updates = vectors(np.ones((1, 2)))
    stranger = vectors(np.ones((1, 3)))["c0"]
    with pytest.raises(LayoutMismatchError, match="nothing was computed"):
        gram({**updates, "c1": stranger})
    with pytest.raises(LayoutMismatchError, match="nothing was computed"):
        gram(updates, reference=stranger)


def test_an_overflow_is_refused() -> None:
    with pytest.raises(ValueError, match="overflow"):
        gram(vectors(np.array([[1e200], [1.0]])))


@pytest.mark.parametrize(
    "matrix",
    [
        np.eye(4),
        np.ones(5),
        np.full((5, 5), np.nan),
        np.diag([1.0, 1, 1, 1, np.inf]),
        np.triu(np.ones((5, 5))),
        np.eye(5) * 1e308,
        np.diag([1.0, 1, 1, 1, -1e-3]),
    ],
    ids=["other size", "vector", "NaN", "infinity", "not symmetric", "distances overflow", "negative norm"],
)
def test_what_is_not_a_finite_gram_matrix_cannot_be_made(matrix: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"expected a .*Gram matrix"):
        Gram(names=tuple("abcde"), size=3, products=matrix)


@pytest.mark.parametrize("noise", [[-1.0, 0], [np.nan, 0], [np.inf, 0], [1.0]])
def test_a_noise_energy_that_cannot_be_is_refused(noise: list[float]) -> None:
    with pytest.raises(ValueError, match="expected 2 finite noise energies"):
        Gram(names=("a", "b"), size=3, products=np.eye(2), noise_energy=np.array(noise))


@pytest.mark.parametrize(
    ("products", "square"), [([np.nan, 0], 1), ([0.0, np.inf], 1), ([[0.0, 0]], 1), ([0.0, 0], -1), ([0.0, 0], np.nan)]
)
def test_a_reference_that_cannot_be_is_refused(products: list[float], square: float) -> None:
    with pytest.raises(ValueError, match="finite inner products and a finite squared norm"):
        Reference(products=np.array(products), square=square)


def test_a_reference_of_other_updates_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 2 inner products with the reference, got 3"):
        Gram(names=("a", "b"), size=3, products=np.eye(2), reference=Reference(products=np.zeros(3), square=1.0))


@pytest.mark.parametrize(("names", "size"), [((), 1), (("a", "a"), 1), (("a", "b"), 0)])
def test_names_that_repeat_and_updates_of_nothing_are_refused(names: tuple[str, ...], size: int) -> None:
    with pytest.raises(ValueError, match="each name once"):
        Gram(names=names, size=size, products=np.eye(len(names)))


def test_it_says_nothing_of_its_values_and_cannot_be_written_to() -> None:
    matrix = gram(vectors(np.full((2, 3), 7.25)))
    assert repr(matrix) == "Gram(clients=2, reference=False)"
    with pytest.raises(ValueError, match="read-only"):
        matrix.products[0, 0] = 1.0
    with pytest.raises(ValueError, match="expected a Gram matrix with a reference"):
        matrix.known_reference()


def test_some_of_the_clients_in_another_order() -> None:
    rows = np.random.default_rng(3).integers(-9, 9, (4, 5))
    reference = vectors(rows)["c3"]
    noise = {"c0": 1.0, "c1": 2.0, "c2": 3.0}
    part = gram(vectors(rows[:3]), reference=reference, noise_energy=noise).take(["c2", "c0"])
    assert part.products.tolist() == (rows[[2, 0]] @ rows[[2, 0]].T).tolist()
    assert part.known_reference().products.tolist() == (rows[[2, 0]] @ rows[3]).tolist()
    assert part.declared_noise.tolist() == [3.0, 1.0]
    with pytest.raises(ValueError, match=r"got \['c9'\]"):
        part.take(["c9"])


def test_declared_noise_is_taken_out_of_norms_and_distances() -> None:
    rng = np.random.default_rng(4)
    size, signal = 20_000, rng.normal(size=(3, 1))
    rows = np.tile(signal, size) / math.sqrt(size)
    noise = np.array([0.0, 4.0, 9.0])
    noisy = rows + rng.normal(size=rows.shape) * np.sqrt(noise / size)[:, np.newaxis]
    matrix = gram(vectors(noisy), noise_energy=dict(zip(("c0", "c1", "c2"), noise, strict=True)))
    clean = gram(vectors(rows))
    # Squared norm of noise: standard deviation 9 sqrt(2/d); cross terms: 2 |signal| sqrt(9/d) each. Six of all these together.
    tolerance = 6 * (9 * math.sqrt(2 / size) + 4 * float(np.abs(signal).max()) * math.sqrt(9 / size) + 2 * 6 / math.sqrt(size))
    np.testing.assert_allclose(matrix.without_noise().squared_norms, clean.squared_norms, atol=tolerance)
    np.testing.assert_allclose(matrix.squared_distances(), clean.squared_distances(), atol=tolerance)
    assert matrix.squared_norms[2] > 9 - tolerance  # as it was sent, with the noise
    assert matrix.without_noise().declared_noise.tolist() == [0.0, 0.0, 0.0]
    np.testing.assert_allclose(matrix.resolution, noise * math.sqrt(2 / size))


def test_a_norm_below_its_declared_noise_becomes_zero_and_not_negative() -> None:
    matrix = Gram(names=("a", "b"), size=100, products=np.eye(2), noise_energy=np.array([2.0, 0.0]))
    assert matrix.without_noise().squared_norms.tolist() == [0.0, 1.0]


def test_distances_without_noise_have_no_bias_and_as_sent_are_never_negative() -> None:
    rng = np.random.default_rng(5)
    size, energy, rounds = 200, 100.0, 400
    found = []
    for _ in range(rounds):
        rows = rng.normal(size=(2, size)) * math.sqrt(energy / size)
        rows[0, 0] += 1.0
        found.append(gram(vectors(rows), noise_energy={"c0": energy, "c1": energy}).squared_distances()[0, 1])
    # The noise of a difference has an energy of 200, of which a standard deviation is 200 sqrt(2/d) = 20 per round; that of the cross term,
    # 2 sqrt(200/d) = 2, hardly adds to it. Raised to zero, the mean of the distances would be 8.5 and not 1.
    assert abs(np.mean(found) - 1.0) < 5 * math.hypot(20, 2) / math.sqrt(rounds)
    assert min(found) < 0
    same = gram(vectors(np.tile(rng.normal(size=size) * 1e3, (4, 1))))
    assert same.squared_distances().min() == 0.0


def test_noise_energy_is_the_expected_squared_norm_of_the_noise_of_dp_sgd() -> None:
    rng = np.random.default_rng(5)
    size, steps, rate, multiplier, clip, batch = 5000, 7, 0.3, 1.5, 2.0, 64
    expected = noise_energy(
        size, steps=steps, learning_rate=rate, noise_multiplier=multiplier, max_grad_norm=clip, expected_batch_size=batch
    )
    noise = rate / batch * rng.normal(scale=multiplier * clip, size=(steps, size)).sum(axis=0)
    # Relative standard deviation sqrt(2/5000) = 0.02. Six of them accept the right one; one step more or less is 0.14 away.
    assert abs(float(noise @ noise) / expected - 1) < 0.12
    assert abs(float(noise @ noise) / (expected * (steps + 1) / steps) - 1) > 0.08
    with pytest.raises(ValueError, match="positive"):
        noise_energy(size, steps=steps, learning_rate=rate, noise_multiplier=0.0, max_grad_norm=clip, expected_batch_size=batch)
