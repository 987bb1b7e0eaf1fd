import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from privfed.data.partition import (
    CONSORTIUM,
    EXTREME,
    MODERATE,
    Partition,
    dirichlet_partition,
    iid_partition,
    partition_by,
    share_partition,
    stratified_partition,
)
from privfed.data.samples import Samples
from privfed.errors import UnsupportedDataError


def table(labels, groups=None):
    labels = np.asarray(labels)
    return Samples(features=np.zeros((len(labels), 1)), labels=labels, groups=groups, columns=("x",))


def counts(partition, labels):
    """Records of each class at each client, of shape (classes, clients)."""
    labels = np.asarray(labels)
    return np.array([np.bincount(labels[part], minlength=labels.max() + 1) for part in partition.indices]).T


def covers(partition, records):
    return np.array_equal(np.sort(np.concatenate(partition.indices)), np.arange(records))


def rng(seed=0):
    return np.random.default_rng(seed)


class FixedShares(np.random.Generator):
    """Deals as usual, but draws the shares that the test says."""

    def __init__(self, *draws):
        super().__init__(np.random.PCG64(3))
        self.draws = list(draws)

    def dirichlet(self, alpha, size=None):
        return np.array(self.draws.pop(0) if len(self.draws) > 1 else self.draws[0], dtype=float)


def test_counts_are_the_shares_rounded_by_largest_remainder():
    # 10 records at 0.46/0.27/0.27 are 4.6/2.7/2.7: floors 4/2/2, two left, largest remainders .7 and .7.
    labels = [0] * 10 + [1] * 7
    partition = dirichlet_partition(table(labels), alpha=1.0, rng=FixedShares([[0.46, 0.27, 0.27], [1.0, 0.0, 0.0]]))
    assert counts(partition, labels).tolist() == [[4, 3, 3], [7, 0, 0]]
    assert partition.deviation == 0
    assert partition.redraws == partition.moved == 0


@settings(deadline=None, max_examples=80)
@given(
    labels=st.lists(st.integers(0, 3), min_size=12, max_size=200),
    clients=st.integers(1, 6),
    alpha=st.sampled_from([0.01, EXTREME, CONSORTIUM, MODERATE, 1e6]),
    seed=st.integers(0, 2**32 - 1),
)
def test_dirichlet_shards_are_disjoint_and_cover_and_none_is_empty(labels, clients, alpha, seed):
    partition = dirichlet_partition(table(labels), clients=clients, alpha=alpha, rng=rng(seed))
    assert len(partition.indices) == clients
    assert covers(partition, len(labels))
    assert min(len(part) for part in partition.indices) >= 1
    assert counts(partition, labels).sum(axis=1).tolist() == np.bincount(labels).tolist()


@settings(deadline=None, max_examples=80)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2)), min_size=4, max_size=80),
    clients=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
)
def test_groups_of_one_class_stay_whole_and_counts_are_within_one_group_of_their_share(sizes, clients, seed):
    labels = np.repeat([label for _, label in sizes], [size for size, _ in sizes])
    groups = np.repeat(np.arange(len(sizes)), [size for size, _ in sizes])
    shuffled = rng(seed).permutation(len(labels))
    labels, groups = labels[shuffled], groups[shuffled]
    shares = rng(seed).dirichlet(np.full(clients, 5.0), size=labels.max() + 1)
    partition = dirichlet_partition(table(labels, groups), clients=clients, alpha=1.0, rng=FixedShares(shares))
    assert covers(partition, len(labels))
    owners = [set(groups[part]) for part in partition.indices]
    assert sum(len(owner) for owner in owners) == len(sizes)
    if partition.moved == 0:
        for label in range(labels.max() + 1):
            if largest := max((size for size, own in sizes if own == label), default=0):
                distance = np.abs(counts(partition, labels)[label] - shares[label] * (labels == label).sum())
                assert distance.max() <= largest + 1e-9
                assert partition.deviation >= distance.max() - 1e-9 or distance.max() < 1


def test_single_records_are_exact_even_where_another_class_has_groups():
    labels = np.array([1] * 40 + [0] * 1000)
    groups = np.array([i // 2 for i in range(40)] + list(range(100, 1100)))
    shares = [[0.2503, 0.2501, 0.4996], [0.3, 0.3, 0.4]]
    partition = dirichlet_partition(table(labels, groups), alpha=1.0, rng=FixedShares(shares))
    assert counts(partition, labels)[0].tolist() == [250, 250, 500]


def test_a_mixed_group_goes_with_its_rarest_class_and_the_rest_shows_in_the_deviation():
    # 20 groups of one fraud and three honest records: class 1 decides, so all go where the frauds go.
    labels = np.array([1, 0, 0, 0] * 20 + [0] * 100)
    groups = np.array([i // 4 for i in range(80)] + list(range(100, 200)))
    partition = dirichlet_partition(table(labels, groups), clients=2, alpha=1.0, rng=FixedShares([[1.0, 0.0], [0.25, 0.75]]))
    assert counts(partition, labels)[1].tolist() == [5, 15]
    assert counts(partition, labels)[0].tolist() == [115, 45]
    assert partition.deviation == 45


@pytest.mark.parametrize(("factor", "accepted"), [(2 / 3, False), (1, True), (3 / 2, False)])
def test_shares_follow_the_dirichlet_distribution_and_no_other(factor, accepted):
    # The share of one client is Beta(alpha, (K - 1) alpha). Two classes, so that hardly any draw leaves a client empty, which would
    # be drawn anew. Rounding to 1/4000 shifts the distribution function by at most P(share < 1/8000) = sqrt(1/8000) = 0.011; the
    # test resolves 1.95 / sqrt(2400) = 0.040.
    labels, generator = np.array([0, 1] * 4000), rng(11)
    draws = [counts(dirichlet_partition(table(labels), alpha=0.5, rng=generator), labels)[:, 0] / 4000 for _ in range(1200)]
    p_value = stats.kstest(np.ravel(draws), stats.beta(0.5 * factor, 2 * 0.5 * factor).cdf).pvalue
    assert p_value > 1e-3 if accepted else p_value < 1e-6


def test_classes_are_drawn_independently():
    labels, generator = np.array([0] * 500 + [1] * 500), rng(5)
    drawn = np.array([counts(dirichlet_partition(table(labels), alpha=1.0, rng=generator), labels)[:, 0] for _ in range(400)])
    assert abs(np.corrcoef(drawn.T)[0, 1]) < 4 / np.sqrt(400)


def test_who_gets_which_record_is_random_and_depends_on_nothing_but_the_generator():
    labels = np.zeros(1000, dtype=int)
    first = dirichlet_partition(table(labels), alpha=1.0, rng=rng(1))
    again = dirichlet_partition(table(labels), alpha=1.0, rng=rng(1))
    other = dirichlet_partition(table(labels), alpha=1.0, rng=rng(2))
    assert all(np.array_equal(a, b) for a, b in zip(first.indices, again.indices, strict=True))
    assert not np.array_equal(first.indices[0], other.indices[0])
    # A random subset of size n of 0..999 has a mean of 499.5 and a standard error below 1000 / sqrt(12 n).
    for part in first.indices:
        assert abs(part.mean() - 499.5) < 5 * 1000 / np.sqrt(12 * len(part))


def test_a_smaller_alpha_is_more_skewed():
    labels = np.array([0, 1] * 1000)

    def skew(alpha):
        spread = [counts(dirichlet_partition(table(labels), alpha=alpha, rng=rng(seed)), labels) / 1000 for seed in range(40)]
        return np.mean([np.abs(each - 1 / 3).mean() for each in spread])

    assert skew(EXTREME) > skew(CONSORTIUM) > skew(MODERATE) > 5 * skew(1e4)


def test_guards_redraw_before_they_move():
    labels = [0] * 100 + [1] * 10
    poor, fine = [[0.5, 0.5, 0.0]] * 2, [[0.4, 0.3, 0.3]] * 2
    partition = dirichlet_partition(table(labels), alpha=1.0, rng=FixedShares(poor, poor, fine), min_positive=2)
    assert partition.redraws == 2
    assert partition.moved == 0
    assert partition.deviation == 0
    assert counts(partition, labels).tolist() == [[40, 30, 30], [4, 3, 3]]


def test_guards_move_when_no_draw_is_enough_and_report_the_deviation():
    labels = np.array([0] * 100 + [1] * 10)
    partition = dirichlet_partition(table(labels), alpha=1.0, rng=FixedShares([[1.0, 0.0, 0.0]] * 2), min_samples=7, min_positive=2)
    held = counts(partition, labels)
    assert covers(partition, 110)
    assert held[1].tolist() == [6, 2, 2]
    assert held.sum(axis=0).tolist() == [96, 7, 7]
    assert partition.redraws == 100
    assert partition.moved == 4 + 10
    assert partition.deviation == 10  # class 0: 5 moved to each, so 90 of 100 where 100 were drawn


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    clients=st.integers(2, 5),
    min_positive=st.integers(0, 4),
    min_samples=st.integers(1, 30),
    alpha=st.sampled_from([0.02, EXTREME, MODERATE]),
)
def test_guards_hold_with_twins_at_every_alpha(seed, clients, min_positive, min_samples, alpha):
    labels = np.array([1] * 40 + [0] * 400)
    groups = np.array([i // 2 for i in range(40)] + list(range(100, 500)))
    partition = dirichlet_partition(
        table(labels, groups), clients=clients, alpha=alpha, rng=rng(seed), min_samples=min_samples, min_positive=min_positive
    )
    held = counts(partition, labels)
    assert covers(partition, 440)
    assert held[1].min() >= min_positive
    assert held.sum(axis=0).min() >= min_samples
    assert not (held[1] % 2).any()  # twins are whole


def positives_only(clients, min_positive, min_samples):
    """Every record is positive, and the first deal gives all of them to one client."""
    records = clients * max(min_positive, min_samples)
    draws = FixedShares([[1.0] + [0.0] * (clients - 1)] * 2)
    return dirichlet_partition(
        table([1] * records), clients=clients, alpha=1.0, rng=draws, min_positive=min_positive, min_samples=min_samples
    )


@pytest.mark.parametrize(("min_positive", "min_samples"), [(1, 3), (3, 1), (2, 2)])
def test_guards_hold_where_there_is_no_negative_record_left_to_move(min_positive, min_samples):
    partition = positives_only(4, min_positive, min_samples)
    assert [len(part) for part in partition.indices] == [max(min_positive, min_samples)] * 4
    assert partition.moved > 0


@settings(deadline=None, max_examples=60)
@given(
    clients=st.integers(1, 6),
    min_positive=st.integers(0, 5),
    min_samples=st.integers(1, 8),
    more=st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 3)),
    alpha=st.sampled_from([0.005, EXTREME, MODERATE, 50.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_single_records_are_split_whenever_there_are_enough_of_them(clients, min_positive, min_samples, more, alpha, seed):  # noqa: PLR0917
    positives = clients * min_positive + more[0]
    records = max(clients * max(min_positive, min_samples), positives) + more[1]
    labels = np.concatenate([1 + np.arange(positives) % more[2], np.zeros(records - positives, dtype=int)])
    partition = dirichlet_partition(
        table(labels), clients=clients, alpha=alpha, rng=rng(seed), min_samples=min_samples, min_positive=min_positive
    )
    assert covers(partition, records)
    assert min(len(part) for part in partition.indices) >= min_samples
    assert min(np.count_nonzero(labels[part]) for part in partition.indices) >= min_positive
    for fewer in ({"min_samples": records // clients + 1}, {"min_positive": positives // clients + 1}):
        with pytest.raises(UnsupportedDataError, match="nothing was split"):
            dirichlet_partition(table(labels), clients=clients, alpha=alpha, rng=rng(seed), **fewer)


@settings(deadline=None, max_examples=150)
@given(
    groups=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=2, max_size=40),
    clients=st.integers(2, 5),
    min_positive=st.integers(0, 4),
    alpha=st.sampled_from([0.005, EXTREME, MODERATE]),
    seed=st.integers(0, 2**32 - 1),
)
def test_groups_are_split_whenever_there_are_as_many_records_as_the_documentation_says(groups, clients, min_positive, alpha, seed):
    labels = np.concatenate(groups)
    owner = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    most = max(len(group) for group in groups)
    clients = min(clients, len(groups), len(labels) // most)
    enough = min(np.count_nonzero(labels) // clients - most + 1, len(labels) // clients // most)
    min_positive = max(0, min(min_positive, enough))
    min_samples = len(labels) // clients - most + 1
    partition = dirichlet_partition(
        table(labels, owner), clients=clients, alpha=alpha, rng=rng(seed), min_samples=min_samples, min_positive=min_positive
    )
    held = np.empty(len(labels), dtype=int)
    for client, part in enumerate(partition.indices):
        held[part] = client
    assert all(len(set(held[owner == group])) == 1 for group in range(len(groups)))
    assert np.bincount(held, minlength=clients).min() >= min_samples
    assert np.bincount(held, weights=labels > 0, minlength=clients).min() >= min_positive


def test_what_moves_is_random():
    labels = np.zeros(1000, dtype=int)
    partition = dirichlet_partition(table(labels), clients=2, alpha=1.0, rng=FixedShares([[1.0, 0.0]]), min_samples=100)
    assert abs(partition.indices[1].mean() - 499.5) < 5 * 1000 / np.sqrt(12 * 100)


@pytest.mark.parametrize("guards", [{"min_positive": 2}, {"min_samples": 50}])
def test_a_guard_that_the_data_cannot_meet_names_the_client_and_the_remedy(guards):
    with pytest.raises(UnsupportedDataError, match=r"client \d would have fewer records than .* nothing was split; lower") as caught:
        dirichlet_partition(table([0] * 100 + [1] * 5), alpha=1.0, rng=rng(), **guards)
    assert "105" not in str(caught.value)


def test_a_bare_seed_is_refused_with_what_to_write():
    words = r"expected rng to be a NumPy generator, as np.random.default_rng\(1\) makes it, got int"
    with pytest.raises(TypeError, match=words):
        dirichlet_partition(table([0, 1, 0, 1]), alpha=1.0, rng=1)
    with pytest.raises(TypeError, match=words):
        iid_partition(table([0, 1, 0, 1]), clients=2, rng=1)


def test_more_clients_than_groups_are_refused():
    with pytest.raises(UnsupportedDataError, match="clients=4; nothing was split"):
        dirichlet_partition(table([0, 0, 0]), clients=4, alpha=1.0, rng=rng())
    with pytest.raises(UnsupportedDataError, match="fewer groups"):
        iid_partition(table([1, 1, 1, 1], groups=[0, 0, 1, 1]), clients=3, rng=rng())


@pytest.mark.parametrize("alpha", [0, -1, np.nan, np.inf, 1e308])
def test_an_alpha_without_a_distribution_is_refused(alpha):
    with pytest.raises(ValueError, match="alpha"):
        dirichlet_partition(table([0] * 9), alpha=alpha, rng=rng())


@pytest.mark.parametrize("arguments", [{"clients": 0}, {"clients": -1}, {"min_samples": 0}, {"min_positive": -1}])
def test_wrong_numbers_are_refused(arguments):
    with pytest.raises(ValueError, match="expected"):
        dirichlet_partition(table([0] * 9), **{"alpha": 1.0, "rng": rng(), **arguments})


def test_iid_clients_are_of_equal_size_and_differ_by_chance_only():
    labels = rng().permutation(np.array([0] * 9000 + [1] * 1000))
    partition = iid_partition(table(labels), clients=3, rng=rng(4))
    assert sorted(len(part) for part in partition.indices) == [3333, 3333, 3334]
    positives = counts(partition, labels)[1]
    # Hypergeometric: standard deviation sqrt(n p (1 - p) (1 - n/N)), about 14.1.
    assert np.abs(positives - 1000 / 3).max() < 4.5 * 14.2
    assert np.ptp(positives) > 0  # chance, not stratification
    assert covers(partition, 10_000)


def test_iid_needs_a_client():
    with pytest.raises(ValueError, match="clients >= 1, got 0"):
        iid_partition(table([0]), clients=0, rng=rng())


def test_share_partition_gives_each_client_its_share():
    shares = (0.24, 0.21, 0.20, 0.18, 0.17)
    partition = share_partition(table(rng().integers(2, size=10_000)), shares=shares, rng=rng())
    assert [len(part) for part in partition.indices] == [2400, 2100, 2000, 1800, 1700]
    assert partition.deviation == 0


def test_share_partition_keeps_groups_whole_and_mixes_them():
    labels = np.array([1] * 2000 + [0] * 2000)
    groups = np.array([i // 2 for i in range(2000)] + list(range(1000, 3000)))
    partition = share_partition(table(labels, groups), shares=(0.7, 0.3), rng=rng())
    assert not set(groups[partition.indices[0]]) & set(groups[partition.indices[1]])
    assert abs(len(partition.indices[0]) - 2800) <= 2
    # 1,000 twins at 0.7: binomial standard deviation of at most 2 sqrt(1000 * 0.7 * 0.3) = 29 records.
    assert abs(counts(partition, labels)[1][0] - 1400) < 5 * 29


def test_stratified_partition_gives_each_client_its_share_of_every_class():
    labels = rng().permutation(np.array([0] * 900 + [1] * 90 + [2] * 10))
    partition = stratified_partition(table(labels), shares=(0.5, 0.3, 0.2), rng=rng())
    assert counts(partition, labels).tolist() == [[450, 270, 180], [45, 27, 18], [5, 3, 2]]


@pytest.mark.parametrize("shares", [(), (0.5, 0.4), (0.6, 0.6), (1.5, -0.5), (1.0, 0.0), (np.nan, 1.0), ((0.5, 0.5),)])
@pytest.mark.parametrize("partition", [share_partition, stratified_partition])
def test_shares_that_do_not_sum_to_one_are_refused(partition, shares):
    with pytest.raises(ValueError, match="sum to 1"):
        partition(table([0] * 9), shares=shares, rng=rng())


def test_a_client_that_would_be_empty_is_refused():
    with pytest.raises(UnsupportedDataError, match="client 1 would have no record; nothing was split"):
        share_partition(table([0] * 10), shares=(0.99, 0.01), rng=rng())


def test_partition_by_makes_one_client_per_value_in_ascending_order():
    partition = partition_by(np.array(["c", "a", "b", "a"]))
    assert [part.tolist() for part in partition.indices] == [[1, 3], [2], [0]]
    assert [part.tolist() for part in partition_by([5, -1, 5]).indices] == [[1], [0, 2]]


@pytest.mark.parametrize("values", [[], [[1], [2]], [1.0, np.nan], np.array(["a", None], dtype=object)])
def test_partition_by_refuses_missing_values(values):
    with pytest.raises(ValueError, match="none missing"):
        partition_by(values)


def test_split_gives_each_client_its_own_records():
    samples = Samples(features=np.arange(6.0)[:, None], labels=[0, 1, 0, 1, 0, 1], groups=None, columns=("x",))
    first, second = partition_by([0, 1, 0, 0, 1, 1]).split(samples)
    assert first.features.ravel().tolist() == [0, 2, 3]
    assert second.labels.tolist() == [1, 0, 1]
    with pytest.raises(ValueError, match="another number of records"):
        partition_by([0, 1]).split(samples)


@pytest.mark.parametrize("indices", [(), ([0, 1], []), ([0, 1], [1]), ([0], [2]), ([-1, 0], [1]), ([[0, 1]],)])
def test_a_partition_is_disjoint_and_covers_or_is_refused(indices):
    with pytest.raises(ValueError, match="expected"):
        Partition(indices=tuple(np.array(part, dtype=np.int64) for part in indices))


def test_a_partition_is_silent_about_sizes_and_read_only():
    partition = partition_by([0, 1, 0])
    assert repr(partition) == "Partition(clients=2)"
    with pytest.raises(ValueError, match="read-only"):
        partition.indices[0][0] = 1
