import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize

from privfed.aggregation.gram import Gram, gram
from privfed.aggregation.robust import CenteredClipping, FLTrust, GeometricMedian, NormBound
from privfed.aggregation.rules import GramRule, MultiKrum
from privfed.contribution.cosine import Cgsv
from privfed.errors import CohortError, OpeningRefusedError
from privfed.policy import OpeningPolicy
from privfed.update import Layout, PlainVector

SIZE = 6


def plain(row: np.ndarray) -> PlainVector:
    return PlainVector(layout=Layout(names=("w",), shapes=((len(row),),)), values=row)


def matrix_of(rows: np.ndarray, reference: np.ndarray | None = None, *, noise: np.ndarray | None = None) -> Gram:
    updates = {f"c{index:02}": plain(row) for index, row in enumerate(rows)}
    return gram(
        updates,
        reference=None if reference is None else plain(reference),
        noise_energy=None if noise is None else dict(zip(updates, noise.tolist(), strict=True)),
    )


def moved(
    rule: GramRule, rows: np.ndarray, reference: np.ndarray | None = None, weights: np.ndarray | None = None, **options: np.ndarray
) -> np.ndarray:
    """How the model moves with real weights."""
    matrix = matrix_of(rows, reference, **options)
    public = dict(zip(matrix.names, np.ones(len(rows)) if weights is None else weights, strict=True))
    mixture = rule.mixture(public, matrix)
    mean = np.array(list(mixture.shares.values())) @ rows
    return mixture.moved(plain(mean), None if reference is None else plain(reference)).values


seeds = st.integers(0, 10_000)


def spread_round(seed: int, clients: int = 8) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(clients, SIZE)) * rng.uniform(0.1, 5, size=(clients, 1))
    return rows, rng.normal(size=SIZE), rng.uniform(1, 4, size=clients)


@given(seeds)
def test_norm_bounding_is_the_weighted_mean_of_shortened_updates(seed: int) -> None:
    rows, _, weights = spread_round(seed)
    shortened = rows * np.minimum(1, 2.0 / np.linalg.norm(rows, axis=1, keepdims=True))
    expected = weights @ shortened / weights.sum()
    np.testing.assert_allclose(moved(NormBound(max_norm=2.0), rows, weights=weights), expected, atol=1e-13)


def test_norm_bounding_lets_nobody_move_the_model_by_more_than_its_share_of_the_bound() -> None:
    rows = np.zeros((4, SIZE))
    rows[1] = 1e9
    assert np.linalg.norm(moved(NormBound(max_norm=2.0), rows)) == pytest.approx(2.0 / 4)


@pytest.mark.parametrize("weight", [0.0, -1.0, np.nan, np.inf])
def test_norm_bounding_refuses_what_is_no_weight(weight: float) -> None:
    rows, _, weights = spread_round(0)
    weights[2] = weight
    with pytest.raises(ValueError, match="expected positive, finite weights"):
        moved(NormBound(max_norm=2.0), rows, weights=weights)


@given(seeds)
def test_centered_clipping_is_one_step_of_its_definition(seed: int) -> None:
    rows, centre, _ = spread_round(seed)
    differences = rows - centre
    expected = centre + (differences * np.minimum(1, 2.0 / np.linalg.norm(differences, axis=1, keepdims=True))).mean(axis=0)
    np.testing.assert_allclose(moved(CenteredClipping(radius=2.0), rows, centre), expected, atol=1e-12)


def test_centered_clipping_lets_nobody_move_the_result_by_more_than_the_radius_over_n() -> None:
    rows, centre, _ = spread_round(1)
    attacked = rows.copy()
    attacked[3] = 1e9
    distance = np.linalg.norm(moved(CenteredClipping(radius=0.5), attacked, centre) - centre)
    assert distance <= 0.5
    without = CenteredClipping(radius=0.5)
    # The attacker's term has norm radius / n, and so has the honest one it replaces.
    assert np.linalg.norm(moved(without, attacked, centre) - moved(without, rows, centre)) <= 2 * 0.5 / len(rows) + 1e-6


@given(seeds)
def test_fltrust_is_its_definition(seed: int) -> None:
    rows, reference, _ = spread_round(seed)
    norms, length = np.linalg.norm(rows, axis=1), np.linalg.norm(reference)
    rows *= np.maximum(1, 0.34 * np.median(norms) / norms)[:, np.newaxis]  # none that is shorter than a third of the median
    norms = np.linalg.norm(rows, axis=1)
    trust = np.maximum(rows @ reference / (norms * length), 0)
    if not trust.any():
        return
    expected = (trust * length / norms) @ rows / trust.sum()
    np.testing.assert_allclose(moved(FLTrust(), rows, reference), expected, atol=1e-12)


@pytest.mark.parametrize("norm", [0.3, 1e-2, 1e-5, 1e-9, 1e-150])
@pytest.mark.parametrize("rule", [FLTrust(), Cgsv()], ids=lambda rule: rule.name[:7])
def test_a_very_short_update_gets_no_more_than_three_times_the_weight_of_a_median_one(rule: FLTrust | Cgsv, norm: float) -> None:
    towards = np.ones(SIZE) / np.sqrt(SIZE)
    rows = np.outer([norm, 1.0, 1.0, 1.0], towards)
    matrix = matrix_of(rows, towards)
    mixture = rule.step({}, matrix)[1] if isinstance(rule, Cgsv) else rule.mixture(dict.fromkeys(matrix.names, 1.0), matrix)
    assert mixture.weights["c00"] <= 3 * (1 + 1e-12) * mixture.weights["c01"]
    OpeningPolicy().check_chosen(mixture.coefficients(total=1024))
    # What it moves the model by goes to nothing with its norm.
    assert mixture.shares["c00"] * norm <= min(1.0, (3 * norm) ** 2) * mixture.shares["c01"] * (1 + 1e-12)


@pytest.mark.parametrize("rule", [FLTrust(), Cgsv()], ids=lambda rule: rule.name[:7])
def test_of_the_fewest_clients_a_short_one_leaves_as_many_effective_as_the_policy_demands(rule: FLTrust | Cgsv) -> None:
    towards = np.ones(SIZE) / np.sqrt(SIZE)
    matrix = matrix_of(np.outer([1 / 3, 1.0, 1.0], towards), towards)  # at a third, length buys most
    mixture = rule.step({}, matrix)[1] if isinstance(rule, Cgsv) else rule.mixture(dict.fromkeys(matrix.names, 1.0), matrix)
    OpeningPolicy().check_chosen(mixture.coefficients(total=1024))
    with pytest.raises(OpeningRefusedError, match="effective clients"):  # what the rule's definition would have made of an eighth
        OpeningPolicy(max_share=0.9).check_chosen({"c00": 8, "c01": 1, "c02": 1})


def test_lengths_are_norms_but_at_least_a_third_of_the_median_of_those_that_are_not_zero() -> None:
    rows = np.diag([0.0, 0.0, 0.0, 0.1, 3.0, 9.0])
    assert matrix_of(rows).lengths.tolist() == [1.0, 1.0, 1.0, 1.0, 3.0, 9.0]
    assert matrix_of(np.zeros((3, SIZE))).lengths.tolist() == [0.0] * 3


def test_fltrust_without_any_update_that_points_the_way_of_the_reference_is_refused() -> None:
    reference = np.ones(SIZE)
    with pytest.raises(CohortError, match="nothing was summed"):
        moved(FLTrust(), -np.ones((3, SIZE)), reference)
    with pytest.raises(CohortError, match="nothing was summed"):
        moved(FLTrust(), np.zeros((3, SIZE)), reference)
    with pytest.raises(ValueError, match="a reference that is not zero"):
        moved(FLTrust(), np.ones((3, SIZE)), np.zeros(SIZE))


@pytest.mark.parametrize("rule", [FLTrust(), CenteredClipping(radius=1.0)], ids=lambda rule: rule.name)
def test_a_rule_about_a_reference_refuses_a_matrix_without_one(rule: GramRule) -> None:
    assert rule.needs_reference
    with pytest.raises(ValueError, match="with a reference, got one without"):
        moved(rule, np.ones((3, SIZE)))


def smoothed(point: np.ndarray, rows: np.ndarray, closest: float) -> float:
    """What smoothed Weiszfeld minimises: the distance, below `closest` a parabola with the same value and slope there."""
    distances = np.linalg.norm(rows - point, axis=1)
    return float(np.where(distances > closest, distances, distances**2 / (2 * closest) + closest / 2).sum())


@pytest.mark.parametrize("smoothing", [1e-3, 0.3])
@pytest.mark.parametrize("seed", range(5))
def test_the_geometric_median_has_the_least_sum_of_smoothed_distances(seed: int, smoothing: float) -> None:
    rows, _, _ = spread_round(seed)
    closest = smoothing * float(np.median(np.linalg.norm(rows, axis=1)))
    best = minimize(smoothed, rows.mean(axis=0), args=(rows, closest), method="BFGS", options={"gtol": 1e-9})
    point = moved(GeometricMedian(smoothing=smoothing), rows)
    # Convex and Lipschitz: at the minimum the two values agree to the optimiser's own accuracy, the mean's value is far above.
    assert smoothed(point, rows, closest) <= best.fun + 1e-7
    assert smoothed(rows.mean(axis=0), rows, closest) > best.fun + 1e-2


def test_the_geometric_median_of_small_updates_is_not_their_mean() -> None:
    # byzfl's nu = 0.1 is a length: below it all distances count alike, and the attackers' mean wins.
    rng = np.random.default_rng(6)
    rows = 1e-4 * (np.ones(SIZE) + 0.1 * rng.normal(size=(10, SIZE)))
    rows[:3] = -1e-3
    honest = rows[3:].mean(axis=0)
    away = np.linalg.norm(moved(GeometricMedian(), rows) - honest)
    assert away < 0.5 * np.linalg.norm(honest)
    assert np.linalg.norm(rows.mean(axis=0) - honest) > 2 * np.linalg.norm(honest)
    fixed = 1 / np.maximum(np.linalg.norm(rows - rows.mean(axis=0), axis=1), 0.1)
    np.testing.assert_allclose(fixed / fixed.sum(), 1 / len(rows))  # the fault itself: equal weights


def test_a_minority_cannot_carry_the_geometric_median_away() -> None:
    rows = np.random.default_rng(7).normal(size=(11, SIZE))
    for length in (1e3, 1e6, 1e9):
        attacked = rows.copy()
        attacked[:5] = length
        assert np.linalg.norm(moved(GeometricMedian(), attacked)) < 20
    attacked = rows.copy()
    attacked[:6] = 1e6  # the positive control: a majority does
    assert np.linalg.norm(moved(GeometricMedian(), attacked)) > 1e5


def test_the_geometric_median_of_mostly_nothing_is_nothing() -> None:
    rows = np.zeros((5, SIZE))
    rows[:2] = 1.0
    np.testing.assert_array_equal(moved(GeometricMedian(), rows), np.zeros(SIZE))


def test_de_biasing_lets_distance_rules_see_through_declared_noise() -> None:
    # Seven honest, three attackers, all with noise of 25 times their energy: raw distances are all alike.
    rng = np.random.default_rng(8)
    size, energy = 20_000, 100.0
    signal = np.zeros((10, size))
    signal[:, :4] = 1.0
    signal[7:, :4] = -1.0
    rows = signal + rng.normal(size=signal.shape) * np.sqrt(energy / size)
    noise = np.full(10, energy)
    names = matrix_of(rows).names

    def attackers_share(rule: GramRule, matrix: Gram) -> float:
        shares = rule.mixture(dict.fromkeys(names, 1.0), matrix).shares
        return sum(shares[name] for name in names[7:])

    blind, de_biased = matrix_of(rows), matrix_of(rows, noise=noise)
    assert attackers_share(GeometricMedian(), blind) > 0.28  # of a fair 0.3
    assert attackers_share(GeometricMedian(), de_biased) < 0.2
    assert attackers_share(MultiKrum(byzantine=3, keep=7), de_biased) == 0.0
    reference = signal[0]
    with_noise, without = matrix_of(rows, reference, noise=noise), matrix_of(rows, reference)
    weights = dict.fromkeys(names, 1.0)
    assert FLTrust().mixture(weights, with_noise).weights == FLTrust().mixture(weights, without).weights  # cosine rules are left alone
