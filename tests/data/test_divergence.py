import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.spatial import distance

from privfed.data.divergence import divergence_table, kl_divergence, label_distribution, total_variation


def distributions(classes):
    counts = st.lists(st.integers(0, 1000), min_size=classes, max_size=classes).filter(any)
    return counts.map(lambda values: np.array(values) / sum(values))


@settings(deadline=None)
@given(st.integers(1, 6).flatmap(lambda classes: st.tuples(distributions(classes), distributions(classes))))
def test_kl_divergence_is_that_of_scipy_where_both_have_all_classes(pair):
    p, q = ((values + 0.01) / (values + 0.01).sum() for values in pair)
    # |d/d eps| of the formula is at most sum_c p_c |1/p_c - 1/q_c|, below 6 + 1/min q < 1000.
    assert kl_divergence(p, q) == pytest.approx(stats.entropy(p, q), abs=1000 * 1e-12 + 1e-12)


@settings(deadline=None)
@given(st.integers(1, 6).flatmap(lambda classes: st.tuples(distributions(classes), distributions(classes))))
def test_kl_divergence_is_the_smoothed_formula_for_any_pair(pair):
    p, q = pair
    expected = stats.entropy(p + 1e-12, q + 1e-12, base=None)  # scipy normalises both by 1 + classes * eps
    assert kl_divergence(p, q) == pytest.approx(expected, abs=1e-9)
    assert kl_divergence(p, p) == 0
    assert -1e-10 < kl_divergence(p, q) <= np.log((1 + 1e-12) / 1e-12)


def test_kl_divergence_uses_eps_where_the_whole_lacks_a_class():
    assert kl_divergence([1.0, 0.0], [0.0, 1.0]) == pytest.approx(np.log((1 + 1e-12) / 1e-12), rel=1e-12)
    assert kl_divergence([1.0, 0.0], [0.0, 1.0], eps=0.5) == pytest.approx(np.log(3), rel=1e-12)


@settings(deadline=None)
@given(st.integers(1, 6).flatmap(lambda classes: st.tuples(distributions(classes), distributions(classes))))
def test_total_variation_is_half_the_cityblock_distance_of_scipy(pair):
    p, q = pair
    assert total_variation(p, q) == pytest.approx(distance.cityblock(p, q) / 2, abs=1e-15)
    assert 0 <= total_variation(p, q) <= 1 + 1e-12


def test_total_variation_is_0_for_equal_and_1_for_disjoint_distributions():
    assert total_variation([0.3, 0.7], [0.3, 0.7]) == 0
    assert total_variation([1.0, 0.0], [0.0, 1.0]) == 1


@pytest.mark.parametrize("measure", [kl_divergence, total_variation])
@pytest.mark.parametrize(
    ("p", "q"),
    [([1.0], [0.5, 0.5]), ([[1.0]], [[1.0]]), ([0.5, 0.4], [0.5, 0.5]), ([0.5, 0.5], [1.5, -0.5]), ([np.nan, 1.0], [0.5, 0.5]), ([], [])],
)
def test_what_is_no_distribution_is_refused(measure, p, q):
    with pytest.raises(ValueError, match="expected"):
        measure(p, q)


@pytest.mark.parametrize("eps", [0, -1e-12, np.nan, np.inf])
def test_eps_must_be_positive(eps):
    with pytest.raises(ValueError, match="expected eps"):
        kl_divergence([1.0], [1.0], eps=eps)


def test_label_distribution_counts_absent_classes_as_zero():
    assert label_distribution([0, 0, 2, 0], classes=4).tolist() == [0.75, 0, 0.25, 0]


@pytest.mark.parametrize("labels", [[], [0.0], [-1], [2], [[0]]])
def test_label_distribution_refuses_what_are_no_labels(labels):
    with pytest.raises(ValueError, match="expected"):
        label_distribution(labels, classes=2)


def test_the_table_has_one_row_per_client_and_compares_with_all_labels():
    table = divergence_table([np.array([0, 0, 1, 2]), np.array([0, 0]), np.array([2, 2, 2, 1, 0, 0])])
    assert table.columns.tolist() == ["records", "class_0", "class_1", "class_2", "kl_divergence", "total_variation"]
    assert table["records"].tolist() == [4, 2, 6]
    whole = np.array([6, 2, 4]) / 12
    for row, own in zip(table.itertuples(), ([0.5, 0.25, 0.25], [1, 0, 0], [2 / 6, 1 / 6, 3 / 6]), strict=True):
        assert [row.class_0, row.class_1, row.class_2] == own
        assert row.kl_divergence == pytest.approx(stats.entropy(own, whole), abs=1e-9)
        assert row.total_variation == pytest.approx(distance.cityblock(own, whole) / 2, abs=1e-12)


@pytest.mark.parametrize("labels", [[], [[0, 1], []], [[0.5]], [[-1, 0]]])
def test_the_table_refuses_a_client_without_labels(labels):
    with pytest.raises(ValueError, match="expected"):
        divergence_table(labels)
