import math
from typing import Any

import numpy as np
import pytest

from privfed.aggregation.coordinatewise import CoordinateMedian
from privfed.aggregation.gram import gram
from privfed.attacks.poisoning import (
    Alie,
    Backdoor,
    Duplicate,
    InnerProductManipulation,
    Knowledge,
    LabelFlip,
    LabelShuffle,
    PureNoise,
    Replay,
    Scaling,
    Sleeper,
    sign_flip,
)
from privfed.contribution.checks import Suspicion, check_round
from privfed.data.samples import Samples
from privfed.errors import LayoutMismatchError
from privfed.update import Layout, PlainVector

SIZE = 400


def records(count: int = 60, classes: int = 4) -> Samples:
    rng = np.random.default_rng(0)
    return Samples(
        features=rng.normal(size=(count, 5)), labels=rng.integers(0, classes, count), groups=np.arange(count) // 2, columns=tuple("abcde")
    )


def plain(row: Any) -> PlainVector:
    return PlainVector(layout=Layout(names=("w",), shapes=((len(row),),)), values=row)


def knowledge(seed: int = 0, honest: int = 7, number: int = 3) -> Knowledge:
    rng = np.random.default_rng(seed)
    base, turn = rng.normal(size=SIZE), rng.normal(size=SIZE)
    # Clients that had the last aggregate alone in common would be spared, with whoever replays it in noise.
    vectors = [plain(base + turn + rng.normal(size=SIZE)) for _ in range(honest + 1)]
    return Knowledge(own=vectors[0], honest=vectors[1:], last=plain(base + 0.3 * rng.normal(size=SIZE)), round=number)


def rng() -> np.random.Generator:
    return np.random.default_rng(1)


def test_a_label_flip_renames_one_class_and_nothing_else() -> None:
    samples = records()
    bad = LabelFlip(source=1, target=0).poison(samples, rng=rng())
    np.testing.assert_array_equal(bad.labels, np.where(samples.labels == 1, 0, samples.labels))
    assert (bad.labels != samples.labels).sum() == (samples.labels == 1).sum() > 0
    np.testing.assert_array_equal(bad.features, samples.features)
    np.testing.assert_array_equal(bad.groups, samples.groups)


def test_a_label_shuffle_is_the_same_for_every_record_and_leaves_no_class_its_name() -> None:
    samples = records()
    attack = LabelShuffle.drawn(4, rng=rng())
    bad = attack.poison(samples, rng=rng())
    assert (bad.labels != samples.labels).all()
    for label in range(4):
        assert set(bad.labels[samples.labels == label].tolist()) == {attack.permutation[label]}
    np.testing.assert_array_equal(attack.poison(samples, rng=np.random.default_rng(99)).labels, bad.labels)


def test_every_shuffle_without_a_fixed_class_is_drawn() -> None:
    generator = rng()
    drawn = {LabelShuffle.drawn(3, rng=generator).permutation for _ in range(60)}
    assert drawn == {(1, 2, 0), (2, 0, 1)}  # missing one of the two has probability 2^-59


def test_a_backdoor_stamps_its_share_of_the_records_and_calls_them_the_target() -> None:
    samples = records(classes=3)
    attack = Backdoor(columns=(4, 1), values=(9.0, -9.0), target=2, share=0.25)
    bad = attack.poison(samples, rng=rng())
    stamped = (bad.features[:, [4, 1]] == [9.0, -9.0]).all(axis=1)
    assert stamped.sum() == 15
    assert (bad.labels[stamped] == 2).all()
    np.testing.assert_array_equal(bad.features[~stamped], samples.features[~stamped])
    np.testing.assert_array_equal(bad.labels[~stamped], samples.labels[~stamped])
    np.testing.assert_array_equal(bad.features[:, [0, 2, 3]], samples.features[:, [0, 2, 3]])


def test_a_backdoor_succeeds_by_the_records_of_other_classes_alone() -> None:
    attack = Backdoor(columns=(0,), values=(1.0,), target=2)
    assert attack.success_rate(np.array([2, 2, 0, 2]), np.array([0, 2, 1, 1])) == pytest.approx(2 / 3)
    assert math.isnan(attack.success_rate(np.array([2]), np.array([2])))
    with pytest.raises(ValueError, match="one prediction per label"):
        attack.success_rate(np.array([2]), np.array([2, 1]))


@pytest.mark.parametrize(
    "attack",
    [LabelFlip(source=1, target=0), LabelShuffle(permutation=(1, 2, 3, 0)), Backdoor(columns=(0,), values=(1.0,), target=1)],
    ids=lambda attack: type(attack).__name__,
)
def test_data_attacks_change_a_copy(attack: Any) -> None:
    samples = records()
    before = samples.features.copy(), samples.labels.copy()
    attack.poison(samples, rng=rng())
    np.testing.assert_array_equal(samples.features, before[0])
    np.testing.assert_array_equal(samples.labels, before[1])


def test_scaling_and_sign_flip_multiply_the_own_update() -> None:
    known = knowledge()
    np.testing.assert_array_equal(Scaling(factor=10.0).poison(known, rng=rng()).values, 10 * known.own.values)
    np.testing.assert_array_equal(sign_flip(3.0).poison(known, rng=rng()).values, -3 * known.own.values)


def test_a_little_is_enough_stays_within_the_spread_of_the_honest_and_moves_the_median() -> None:
    known = knowledge(honest=7)
    attack = Alie.against(clients=10, byzantine=3)
    bad = attack.poison(known, rng=rng()).values
    mean, deviation = known.known.mean(axis=0), known.known.std(axis=0)
    np.testing.assert_allclose((mean - bad) / deviation, attack.deviations)
    # No honest update is closer to the mean in all coordinates; by distance the attackers look like one of them.
    assert np.linalg.norm(bad - mean) < max(np.linalg.norm(row - mean) for row in known.known)
    honest = {f"h{index}": vector for index, vector in enumerate(known.honest)}
    attacked = honest | {f"x{index}": plain(bad) for index in range(3)}
    moved = CoordinateMedian().aggregate(attacked).values - CoordinateMedian().aggregate(honest).values
    assert moved.mean() < 0


@pytest.mark.parametrize(("clients", "byzantine", "expected"), [(50, 12, 0.3360), (50, 24, 1.4261)])
def test_the_deviations_are_those_of_the_published_formula(clients: int, byzantine: int, expected: float) -> None:
    # Baruch et al., 2019, section 3.2: s = floor(n / 2 + 1) - m, z = the quantile of (n - m - s) / (n - m).
    # Of 50 clients: s = 14, 24 / 38 = 0.632; s = 2, 24 / 26 = 0.923. Quantiles from a table of the normal distribution.
    assert Alie.against(clients=clients, byzantine=byzantine).deviations == pytest.approx(expected, abs=2e-3)


def test_inner_product_manipulation_turns_the_aggregate_around() -> None:
    known = knowledge(honest=4)
    mean = known.known.mean(axis=0)
    bad = InnerProductManipulation(factor=2.0).poison(known, rng=rng()).values
    np.testing.assert_allclose(bad, -2.0 * mean)
    assert float((known.known.sum(axis=0) + 3 * bad) @ mean) < 0


def test_a_sleeper_is_honest_until_it_wakes() -> None:
    attack = Sleeper(wakes=3, attack=sign_flip())
    for number in range(6):
        known = knowledge(number=number)
        sent = attack.poison(known, rng=rng()).values
        np.testing.assert_array_equal(sent, known.own.values if number < 3 else -known.own.values)


def test_free_riders_send_what_they_are_named_for() -> None:
    known = knowledge()
    assert known.last is not None
    assert not Replay(factor=0.0).poison(known, rng=rng()).values.any()
    np.testing.assert_array_equal(Replay(factor=2.0).poison(known, rng=rng()).values, 2 * known.last.values)
    np.testing.assert_array_equal(Duplicate().poison(known, rng=rng()).values, known.honest[0].values)
    hidden = Replay(noise=0.5).poison(known, rng=rng()).values - known.last.values
    # Relative standard deviation of the norm of 400 normal numbers: sqrt(1 / 800) = 0.035; six of them.
    assert np.linalg.norm(hidden) / np.linalg.norm(known.last.values) == pytest.approx(0.5, rel=0.22)
    assert np.linalg.norm(PureNoise(norm=3.0).poison(known, rng=rng()).values) == pytest.approx(3.0, rel=0.22)


def test_before_the_first_aggregate_there_is_nothing_to_replay() -> None:
    first = Knowledge(own=knowledge().own)
    assert not Replay(noise=0.5).poison(first, rng=rng()).values.any()
    with pytest.raises(ValueError, match="to know an update to copy"):
        Duplicate().poison(first, rng=rng())


@pytest.mark.parametrize(
    ("attack", "suspicion"),
    [
        (Replay(factor=0.0), Suspicion.ZERO),
        (Replay(), Suspicion.REPLAY),
        (Replay(factor=0.1), Suspicion.REPLAY),
        (Replay(noise=0.5), Suspicion.UNRELATED),
        (PureNoise(norm=20.0), Suspicion.UNRELATED),
        (Duplicate(), Suspicion.DUPLICATE),
    ],
    ids=lambda value: str(value)[:30],
)
def test_the_checks_of_a_round_know_these_free_riders(attack: Any, suspicion: Suspicion) -> None:
    known = knowledge()
    updates = {f"h{index}": vector for index, vector in enumerate(known.honest)} | {"rider": attack.poison(known, rng=rng())}
    matrix = gram(updates, reference=known.last)
    assert check_round(matrix, last=matrix.reference).suspicions["rider"] == {suspicion}
    assert not check_round(gram(dict(list(updates.items())[:-1])), last=None).flagged


@pytest.mark.parametrize(
    "attack",
    [Scaling(factor=2.0), Alie(deviations=1.0), InnerProductManipulation(), Replay(noise=1.0), PureNoise(norm=1.0), Duplicate()],
    ids=lambda attack: type(attack).__name__,
)
def test_the_same_generator_gives_the_same_attack_and_nothing_known_is_changed(attack: Any) -> None:
    known = knowledge()
    before = known.known.copy()
    np.testing.assert_array_equal(attack.poison(known, rng=rng()).values, attack.poison(known, rng=rng()).values)
    np.testing.assert_array_equal(known.known, before)


def test_vectors_of_different_models_are_refused() -> None:
    with pytest.raises(LayoutMismatchError, match="nothing was poisoned"):
        Knowledge(own=plain([1.0]), last=plain([1.0, 2.0]))


@pytest.mark.parametrize(
    "make",
    [
        lambda: LabelFlip(source=1, target=1),
        lambda: LabelFlip(source=-1, target=1),
        lambda: LabelShuffle(permutation=(0, 0)),
        lambda: LabelShuffle.drawn(1, rng=rng()),
        lambda: LabelShuffle(permutation=(1, 0)).poison(records(classes=4), rng=rng()),
        lambda: Backdoor(columns=(), values=(), target=0),
        lambda: Backdoor(columns=(0,), values=(1.0, 2.0), target=0),
        lambda: Backdoor(columns=(0, 0), values=(1.0, 2.0), target=0),
        lambda: Backdoor(columns=(0,), values=(math.nan,), target=0),
        lambda: Backdoor(columns=(-1,), values=(1.0,), target=0),
        lambda: Backdoor(columns=(0,), values=(1.0,), target=-1),
        lambda: Backdoor(columns=(0,), values=(1.0,), target=0, share=0.0),
        lambda: Backdoor(columns=(9,), values=(1.0,), target=0).poison(records(), rng=rng()),
        lambda: Scaling(factor=math.nan),
        lambda: sign_flip(0.0),
        lambda: sign_flip(-1.0),
        lambda: Alie(deviations=0.0),
        lambda: Alie.against(clients=10, byzantine=5),
        lambda: Alie.against(clients=10, byzantine=0),
        lambda: InnerProductManipulation(factor=-1.0),
        lambda: Sleeper(wakes=-1, attack=sign_flip()),
        lambda: Replay(noise=-1.0),
        lambda: Replay(factor=math.inf),
        lambda: PureNoise(norm=0.0),
    ],
)
def test_numbers_out_of_range_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        make()
