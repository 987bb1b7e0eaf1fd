import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from privfed.aggregation import coordinatewise as module
from privfed.aggregation.coordinatewise import BucketedMedian, Bulyan, CoordinateMedian, Krum, TrimmedMean
from privfed.aggregation.rules import PlaintextRule
from privfed.update import Layout, PlainVector


def updates_of(rows: np.ndarray) -> dict[str, PlainVector]:
    layout = Layout(names=("w",), shapes=((rows.shape[1],),))
    return {f"c{index:02}": PlainVector(layout=layout, values=row) for index, row in enumerate(rows)}


def aggregate(rule: PlaintextRule, rows: np.ndarray) -> np.ndarray:
    return rule.aggregate(updates_of(rows)).values


def krum_scores(rows: np.ndarray, neighbours: int) -> list[float]:
    """Blanchard et al., 2017, section 4, from the vectors."""
    return [
        sum(sorted(float(((row - other) ** 2).sum()) for j, other in enumerate(rows) if j != i)[:neighbours]) for i, row in enumerate(rows)
    ]


@given(st.integers(0, 10_000), st.integers(0, 3), st.data())
def test_krum_gives_the_update_of_its_definition(seed: int, byzantine: int, data: st.DataObject) -> None:
    rows = np.random.default_rng(seed).normal(size=(data.draw(st.integers(2 * byzantine + 3, 12)), 5))
    best = int(np.argmin(krum_scores(rows, len(rows) - byzantine - 2)))
    np.testing.assert_array_equal(aggregate(Krum(byzantine=byzantine), rows), rows[best])


@given(st.integers(0, 10_000), st.integers(1, 11), st.integers(0, 5))
def test_median_and_trimmed_mean_are_those_of_each_coordinate(seed: int, count: int, byzantine: int) -> None:
    rows = np.random.default_rng(seed).normal(size=(count, 7))
    np.testing.assert_allclose(aggregate(CoordinateMedian(), rows), np.median(rows, axis=0), atol=1e-15)
    if count > 2 * byzantine:
        kept = np.sort(rows, axis=0)[byzantine : count - byzantine]
        np.testing.assert_allclose(aggregate(TrimmedMean(byzantine=byzantine), rows), kept.mean(axis=0), atol=1e-15)


def test_blocks_of_coordinates_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.random.default_rng(0).normal(size=(5, 101))
    whole = aggregate(CoordinateMedian(), rows)
    monkeypatch.setattr(module, "_BLOCK", 10)
    np.testing.assert_array_equal(aggregate(CoordinateMedian(), rows), whole)


def test_the_trimmed_mean_of_nine_cuts_one_at_each_end() -> None:
    # A share of a tenth of nine clients is int(0.9) = 0: such a mean cuts nothing, and the attacker owns it.
    rows = np.ones((9, 3))
    rows[4] = 1e9
    np.testing.assert_array_equal(aggregate(TrimmedMean(byzantine=1), rows), np.ones(3))
    assert aggregate(TrimmedMean(byzantine=0), rows).min() > 1e8  # what cutting nothing does


def bulyan_by_definition(rows: np.ndarray, byzantine: int) -> np.ndarray:
    """El Mhamdi et al., 2018, section 4: Krum is run anew on what is left until n - 2f are chosen."""
    left, chosen = list(range(len(rows))), []
    for _ in range(len(rows) - 2 * byzantine):
        scores = krum_scores(rows[left], max(1, len(left) - byzantine - 2))
        chosen.append(left.pop(int(np.argmin(scores))))
    values = rows[chosen]
    keep = len(chosen) - 2 * byzantine
    result = np.empty(rows.shape[1])
    for column in range(rows.shape[1]):
        median = np.median(values[:, column])
        result[column] = np.mean(sorted(values[:, column], key=lambda value: abs(value - median))[:keep])
    return result


@given(st.integers(0, 10_000), st.integers(1, 2), st.data())
def test_bulyan_is_its_definition(seed: int, byzantine: int, data: st.DataObject) -> None:
    rows = np.random.default_rng(seed).normal(size=(data.draw(st.integers(4 * byzantine + 3, 13)), 5))
    np.testing.assert_allclose(aggregate(Bulyan(byzantine=byzantine), rows), bulyan_by_definition(rows, byzantine), atol=1e-12)


def test_bulyan_chooses_again_and_again_and_not_all_at_once() -> None:
    differ = 0
    for seed in range(30):
        rows = np.random.default_rng(seed).normal(size=(11, 4))
        iterated = set(Bulyan(byzantine=2).select(updates_of(rows)))
        at_once = {f"c{index:02}" for index in np.argsort(krum_scores(rows, 7))[:7]}
        differ += iterated != at_once
        assert len(iterated) == 7
    assert differ > 5


def test_bulyan_of_a_hidden_attack_on_one_coordinate_stays_with_the_honest() -> None:
    # El Mhamdi et al., section 3: in many dimensions one coordinate can be far off without standing out by distance.
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(11, 400))
    rows[:2] = rows[2:].mean(axis=0)
    rows[:2, 0] = 15.0
    assert Krum(byzantine=2).aggregate(updates_of(rows)).values[0] == 15.0
    assert abs(aggregate(Bulyan(byzantine=2), rows)[0]) < 2


@given(st.integers(0, 10_000))
def test_the_bucketed_median_is_the_median_of_the_groups_means(seed: int) -> None:
    rows = np.random.default_rng(seed).normal(size=(10, 6))
    rule = BucketedMedian.of(list(updates_of(rows)), size=3, byzantine=1)
    assert [len(group) for group in rule.groups] == [3, 3, 4]
    means = np.stack([rows[:3].mean(axis=0), rows[3:6].mean(axis=0), rows[6:].mean(axis=0)])
    np.testing.assert_allclose(aggregate(rule, rows), np.median(means, axis=0), atol=1e-15)


def test_the_groups_of_a_bucketed_median_stay_as_they_are_when_clients_are_absent() -> None:
    rows = np.arange(12.0)[:, np.newaxis]
    rule = BucketedMedian.of(list(updates_of(rows)), size=3, byzantine=1)
    present = {name: vector for name, vector in updates_of(rows).items() if name not in ("c00", "c03", "c04", "c05")}
    assert rule.aggregate(present).values.tolist() == [7.0]  # of 1.5, 7 and 10
    with pytest.raises(ValueError, match="needs at least 3 groups, got 2"):
        rule.aggregate({name: vector for name, vector in present.items() if name < "c09"})


def test_one_attacked_group_does_not_move_the_bucketed_median_far() -> None:
    rows = np.random.default_rng(2).normal(size=(9, 5))
    rule = BucketedMedian.of(list(updates_of(rows)), size=3, byzantine=1)
    rows[4] = 1e9
    assert np.abs(aggregate(rule, rows)).max() < 4
    rows[7] = 1e9  # the positive control: two attackers in two groups
    assert np.abs(aggregate(rule, rows)).max() > 1e8


def test_groups_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="every client in one group"):
        BucketedMedian(groups=(("a", "b"), ("b",)), byzantine=0)
    with pytest.raises(ValueError, match="every client in one group"):
        BucketedMedian(groups=(("a",), ()), byzantine=0)
    with pytest.raises(ValueError, match=r"byzantine=1 needs at least 3 groups, got 2"):
        BucketedMedian.of("abcdef", size=3, byzantine=1)
    with pytest.raises(ValueError, match="expected a size from 1 to 2"):
        BucketedMedian.of("ab", size=3, byzantine=0)
    with pytest.raises(ValueError, match=r"expected clients of the groups, got \['c01'\]"):
        BucketedMedian(groups=(("c00",),), byzantine=0).aggregate(updates_of(np.ones((2, 3))))
