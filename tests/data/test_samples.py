import pickle

import numpy as np
import pytest

from privfed.data.samples import Samples


def make(**changes):
    values = {"features": [[0.5, 1.0], [0.25, 2.0], [0.0, 3.0]], "labels": [0, 2, 1], "groups": [7, 7, 9], "columns": ("hour", "amount")}
    return Samples(**{**values, **changes})


def test_samples_have_the_types_that_training_takes():
    samples = make()
    assert samples.features.dtype == np.float32
    assert samples.labels.dtype == samples.groups.dtype == np.int64
    assert len(samples) == 3
    assert samples.classes == 3


def test_samples_are_read_only_copies():
    features, labels, groups = np.zeros((3, 2), dtype=np.float32), np.array([0, 1, 1]), np.array([0, 1, 1])
    samples = make(features=features, labels=labels, groups=groups)
    features[:], labels[:], groups[:] = 5, 5, 5
    assert samples.features.max() == 0
    assert samples.labels.max() == samples.groups.max() == 1
    for array in (samples.features, samples.labels, samples.groups):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_samples_are_silent_about_what_they_hold():
    assert repr(make()) == str(make()) == "Samples(columns=2)"


@pytest.mark.parametrize(
    "changes",
    [
        {"features": np.zeros((0, 2)), "labels": np.zeros(0, dtype=int), "groups": None},
        {"features": np.zeros((3, 0)), "columns": ()},
        {"features": np.zeros(3)},
        {"features": np.zeros((3, 3))},
        {"columns": ("hour", "hour")},
        {"labels": [0, 1]},
        {"labels": [[0, 1, 1]]},
        {"labels": [0, -1, 1]},
        {"labels": [0.0, 1.0, 1.0]},
        {"groups": [1, 2]},
        {"groups": [1.0, 2.0, 3.0]},
        {"groups": np.array([1, 2, 2**63], dtype=np.uint64)},
    ],
)
def test_samples_refuse_what_is_no_table_of_labelled_records(changes):
    with pytest.raises(ValueError, match="expected"):
        make(**changes)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e39])
def test_samples_refuse_features_that_are_not_finite_in_float32_and_do_not_say_which(bad):
    with pytest.raises(ValueError, match="expected finite features") as caught:
        make(features=[[0.5, 1.0], [0.25, bad], [0.0, 3.0]])
    assert not any(character.isdigit() for character in str(caught.value).replace("float32", ""))


def test_take_keeps_records_labels_and_groups_together_in_the_order_asked():
    taken = make().take([2, 0])
    assert taken.features.tolist() == [[0.0, 3.0], [0.5, 1.0]]
    assert taken.labels.tolist() == [1, 0]
    assert taken.groups.tolist() == [9, 7]
    assert taken.columns == ("hour", "amount")
    assert make(groups=None).take([1]).groups is None


@pytest.mark.parametrize("indices", [[], [-1], [3], [0.0], [True, False, True], [[0, 1]], 1])
def test_take_refuses_what_are_no_positions(indices):
    with pytest.raises(ValueError, match="expected"):
        make().take(indices)


def test_samples_reach_a_spawned_process_unchanged():
    copy = pickle.loads(pickle.dumps(make()))
    assert np.array_equal(copy.features, make().features)
    assert np.array_equal(copy.groups, make().groups)


def test_the_first_records_of_each_group_are_kept_in_the_order_of_the_table():
    samples = Samples(features=np.arange(6)[:, None], labels=[0, 1, 2, 3, 4, 5], groups=[9, 4, 9, 9, 4, 1], columns=("place",))
    assert samples.first_of_groups(1).labels.tolist() == [0, 1, 5]
    assert samples.first_of_groups(2).labels.tolist() == [0, 1, 2, 4, 5]
    assert samples.first_of_groups(3).groups.tolist() == [9, 4, 9, 9, 4, 1]


def test_which_records_of_a_group_are_kept_does_not_depend_on_other_groups():
    rng = np.random.default_rng(0)
    samples = Samples(features=np.arange(200)[:, None], labels=np.arange(200), groups=rng.integers(0, 30, 200), columns=("place",))
    kept = samples.first_of_groups(3)
    for group in range(30):
        without = samples.take(np.flatnonzero(samples.groups != group)).first_of_groups(3)
        assert without.labels.tolist() == kept.take(np.flatnonzero(kept.groups != group)).labels.tolist()


def test_records_without_groups_and_a_number_below_one_are_refused():
    for samples, most in ((make(groups=None), 1), (make(), 0)):
        with pytest.raises(ValueError, match="at least one record of each"):
            samples.first_of_groups(most)
