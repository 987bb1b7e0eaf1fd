import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from privfed.aggregation.gram import Gram, Reference, gram
from privfed.contribution.cosine import Cgsv
from privfed.contribution.estimators import Exact, MonteCarlo, Strata
from privfed.contribution.leave_one_out import LeaveOneOut
from privfed.contribution.trajectory import (
    Angular,
    AsSent,
    Euclidean,
    FedTsv,
    MedianNorm,
    Nothing,
    TrajectoryGame,
    ZeroUpdate,
    positive_mixture,
)
from privfed.update import Layout, PlainVector

SIZE = 30
RULES: tuple[Any, ...] = (
    FedTsv(),
    FedTsv.published(),
    FedTsv(game=TrajectoryGame(distance=Angular())),
    FedTsv(estimator=Strata()),
    FedTsv(estimator=MonteCarlo(permutations=20)),
    LeaveOneOut(),
    Cgsv(),
)
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name[:70])
tsv_rule = pytest.mark.parametrize("rule", RULES[:5], ids=lambda rule: rule.name[:70])


def plain(row: np.ndarray) -> PlainVector:
    return PlainVector(layout=Layout(names=("w",), shapes=((len(row),),)), values=row)


def some_updates(seed: int = 0, honest: int = 6, bad: int = 2) -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(seed)
    base = rng.normal(size=SIZE) / math.sqrt(SIZE)
    rows = {f"good_{index}": base + 0.7 * rng.normal(size=SIZE) / math.sqrt(SIZE) for index in range(honest)}
    rows |= {f"bad_{index}": -base + 0.7 * rng.normal(size=SIZE) / math.sqrt(SIZE) for index in range(bad)}
    return rows, base + 0.3 * rng.normal(size=SIZE) / math.sqrt(SIZE)


def matrix_of(rows: Mapping[str, np.ndarray], reference: np.ndarray | None = None, **options: Any) -> Gram:
    return gram({name: plain(row) for name, row in rows.items()}, reference=None if reference is None else plain(reference), **options)


def worth(mean: np.ndarray, reference: np.ndarray, rule: FedTsv, median: float) -> float:
    """The utility of arXiv:2605.30336, from the vectors."""
    if isinstance(rule.game.scale, MedianNorm):
        reference = reference * median / np.linalg.norm(reference)
    if isinstance(rule.game.distance, Angular):
        length = float(np.linalg.norm(mean) * np.linalg.norm(reference))
        return 1 / (1 + 2 * (1 - (float(mean @ reference) / length if length else 0.0)))
    return 1 / (1 + float((mean - reference) @ (mean - reference)) / float(reference @ reference))


def by_averaging_again(rows: Mapping[str, np.ndarray], reference: np.ndarray, rule: FedTsv) -> dict[str, float]:
    median = float(np.median([np.linalg.norm(row) for row in rows.values()]))
    nobody = 0.0 if isinstance(rule.game.nobody, Nothing) else worth(np.zeros(SIZE), reference, rule, median)
    values = {frozenset[str](): nobody}
    for size in range(1, len(rows) + 1):
        for some in itertools.combinations(rows, size):
            values[frozenset(some)] = worth(np.mean([rows[name] for name in some], axis=0), reference, rule, median)
    return {
        name: sum(
            (values[frozenset((*some, name))] - values[frozenset(some)]) / (len(rows) * math.comb(len(rows) - 1, len(some)))
            for size in range(len(rows))
            for some in itertools.combinations([other for other in rows if other != name], size)
        )
        for name in rows
    }


@pytest.mark.parametrize("rule", RULES[:3], ids=lambda rule: rule.name[:70])
@pytest.mark.parametrize("seed", range(3))
def test_scores_are_those_of_averaging_every_coalition_again(rule: FedTsv, seed: int) -> None:
    rows, reference = some_updates(seed)
    assert rule.scores(matrix_of(rows, reference)) == pytest.approx(by_averaging_again(rows, reference, rule), abs=1e-13)


@tsv_rule
def test_scores_of_a_round_sum_to_the_worth_of_all_minus_the_worth_of_nobody(rule: FedTsv) -> None:
    rows, reference = some_updates()
    game = rule.game.of(matrix_of(rows, reference))
    assert math.fsum(rule.scores(matrix_of(rows, reference)).values()) == pytest.approx(game.whole - game.empty, abs=1e-12)


def test_nobody_is_worth_what_the_zero_update_is_or_nothing() -> None:
    matrix = matrix_of(*some_updates())
    assert TrajectoryGame().of(matrix).empty == 1 / 2
    assert TrajectoryGame(distance=Angular()).of(matrix).empty == 1 / 3
    assert TrajectoryGame(nobody=Nothing()).of(matrix).empty == 0.0
    assert FedTsv.published().game == TrajectoryGame(distance=Euclidean(), scale=AsSent(), nobody=Nothing())
    assert FedTsv().game == TrajectoryGame(distance=Euclidean(), scale=MedianNorm(), nobody=ZeroUpdate())


@pytest.mark.parametrize("rule", [*RULES[:3], LeaveOneOut()], ids=lambda rule: rule.name[:70])
def test_equal_clients_have_equal_scores(rule: Any) -> None:
    rows, reference = some_updates()
    rows["good_3"] = rows["good_1"]
    scores = rule.scores(matrix_of(rows, reference))
    assert scores["good_3"] == pytest.approx(scores["good_1"], abs=1e-14)


@every_rule
@pytest.mark.parametrize("seed", range(3))
def test_a_permutation_of_the_clients_permutes_scores_and_weights(rule: Any, seed: int) -> None:
    rows, reference = some_updates(seed)
    order = [list(rows)[place] for place in np.random.default_rng(seed).permutation(len(rows))]
    before = {"good_0": 0.3, "bad_1": 0.1, "absent": 0.2}
    after, mixture = rule.step(before, matrix_of(rows, reference))
    shuffled, shuffled_mixture = rule.step(before, matrix_of({name: rows[name] for name in order}, reference))
    assert shuffled == pytest.approx(after, abs=1e-12)
    assert list(shuffled_mixture.weights) == order
    assert shuffled_mixture.coefficients(total=4096) == mixture.coefficients(total=4096)


@every_rule
@pytest.mark.parametrize("scale", [2.0**-30, 8.0, 2.0**-332, 2.0**332])  # the last two are 1e-100 and 1e100
def test_a_common_scale_changes_neither_scores_nor_weights(rule: Any, scale: float) -> None:
    rows, reference = some_updates()
    scores, mixture = rule.step({}, matrix_of(rows, reference))
    scaled, scaled_mixture = rule.step({}, matrix_of({name: row * scale for name, row in rows.items()}, reference * scale))
    assert scaled == pytest.approx(scores, abs=1e-12)
    assert scaled_mixture.shares == pytest.approx(dict(mixture.shares), abs=1e-12)


@pytest.mark.parametrize(
    "rule", [FedTsv(), FedTsv(game=TrajectoryGame(distance=Angular())), LeaveOneOut()], ids=lambda rule: rule.name[:70]
)
@pytest.mark.parametrize("scale", [2.0**-400, 2.0**400])
def test_the_length_of_the_reference_changes_nothing_however_far_from_that_of_the_updates(rule: Any, scale: float) -> None:
    rows, reference = some_updates()
    scores, _ = rule.step({}, matrix_of(rows, reference))
    scaled, _ = rule.step({}, matrix_of(rows, reference * scale))
    assert scaled == pytest.approx(scores, abs=1e-12)


@every_rule
def test_absent_clients_keep_their_scores(rule: Any) -> None:
    rows, reference = some_updates()
    after, mixture = rule.step({"absent": 0.25}, matrix_of(rows, reference))
    assert after["absent"] == 0.25
    assert set(after) == {"absent", *rows}
    assert set(mixture.weights) == set(rows)


@every_rule
def test_arguments_are_not_changed(rule: Any) -> None:
    rows, reference = some_updates()
    before = {"good_0": 0.5}
    matrix = matrix_of(rows, reference)
    products = matrix.products.copy()
    rule.step(before, matrix)
    assert before == {"good_0": 0.5}
    np.testing.assert_array_equal(matrix.products, products)


@every_rule
def test_clients_that_work_against_the_others_lose_their_weight(rule: Any) -> None:
    scores: dict[str, float] = {}
    for seed in range(60):
        rows, reference = some_updates(seed)
        scores, mixture = rule.step(scores, matrix_of(rows, reference))
    bad = mixture.shares["bad_0"] + mixture.shares["bad_1"]
    assert bad < (0.2 if "Nothing" in rule.name else 0.03)  # as published, they keep some
    assert min(mixture.shares[name] for name in rows if name.startswith("good")) > 0.05


def test_as_published_whoever_sends_anything_is_paid_and_by_default_not() -> None:
    rows, reference = some_updates(1)
    rng = np.random.default_rng(51)
    rows |= {name: rng.normal(size=SIZE) / math.sqrt(SIZE) for name in ("bad_0", "bad_1")}
    published = FedTsv.published().scores(matrix_of(rows, reference))
    default = FedTsv().scores(matrix_of(rows, reference))
    assert min(published["bad_0"], published["bad_1"]) > 0
    assert max(default["bad_0"], default["bad_1"]) < 0


def test_a_short_reference_pays_attackers_and_the_default_scale_does_not_care() -> None:
    rows, reference = some_updates(2)
    short = matrix_of(rows, reference * 0.2)

    def bad_share(scale: Any) -> float:
        _, mixture = FedTsv(game=TrajectoryGame(scale=scale)).step({}, short)
        return mixture.shares["bad_0"] + mixture.shares["bad_1"]

    assert bad_share(AsSent()) > 0.9
    assert bad_share(MedianNorm()) == 0.0
    assert FedTsv().scores(short) == pytest.approx(FedTsv().scores(matrix_of(rows, reference)), abs=1e-12)


@pytest.mark.parametrize("rule", [FedTsv(), LeaveOneOut()], ids=["FedTsv", "LeaveOneOut"])
def test_if_nobody_has_a_positive_score_all_count_alike(rule: Any) -> None:
    rows, reference = some_updates()
    opposite = matrix_of({name: -reference * (1 + index) for index, name in enumerate(rows)}, reference)
    _, mixture = rule.step(dict.fromkeys(rows, -100.0), opposite)
    assert set(mixture.shares.values()) == {1 / len(rows)}


def test_what_rounding_leaves_of_nothing_is_not_all_the_weight() -> None:
    matrix = matrix_of(dict.fromkeys(("a", "b"), np.ones(SIZE)))
    assert positive_mixture({"a": 1e-16, "b": -1e-16}, matrix).shares == {"a": 0.5, "b": 0.5}
    assert positive_mixture({"a": 1e-9, "b": -1e-16}, matrix).shares == {"a": 1.0, "b": 0.0}


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.needs_reference], ids=lambda rule: rule.name[:70])
def test_a_round_without_a_reference_or_with_an_empty_one_is_refused(rule: Any) -> None:
    rows, reference = some_updates()
    with pytest.raises(ValueError, match="with a reference"):
        rule.step({}, matrix_of(rows))
    with pytest.raises(ValueError, match="a reference that is not zero"):
        rule.step({}, matrix_of(rows, 0 * reference))


@every_rule
def test_a_client_of_nothing_and_a_round_of_nothing_are_no_accident(rule: Any) -> None:
    rows, reference = some_updates()
    scores, mixture = rule.step({}, matrix_of({**rows, "bad_0": np.zeros(SIZE)}, reference))
    assert all(map(math.isfinite, scores.values()))
    assert all(map(math.isfinite, mixture.shares.values()))
    scores, mixture = rule.step({}, matrix_of(dict.fromkeys(rows, np.zeros(SIZE)), reference))
    assert set(mixture.shares.values()) == {1 / len(rows)}


def test_a_single_client_gets_all_there_is() -> None:
    rows, reference = some_updates(honest=1, bad=0)
    matrix = matrix_of(rows, reference)
    game = TrajectoryGame().of(matrix)
    for rule in (FedTsv(), LeaveOneOut()):
        assert rule.scores(matrix) == pytest.approx({"good_0": game.whole - game.empty})


def test_leave_one_out_is_its_definition() -> None:
    rows, reference = some_updates(3)
    rule = LeaveOneOut()
    median = float(np.median([np.linalg.norm(row) for row in rows.values()]))
    whole = worth(np.mean(list(rows.values()), axis=0), reference, FedTsv(), median)
    expected = {
        name: whole - worth(np.mean([row for other, row in rows.items() if other != name], axis=0), reference, FedTsv(), median)
        for name in rows
    }
    assert rule.scores(matrix_of(rows, reference)) == pytest.approx(expected, abs=1e-14)


def test_leave_one_out_pays_nothing_for_what_another_client_sends_too_and_shapley_values_do() -> None:
    rng = np.random.default_rng(0)
    reference = rng.normal(size=SIZE)
    rows = dict.fromkeys(("a", "b", "c"), reference)
    matrix = matrix_of(rows, reference)
    assert LeaveOneOut().scores(matrix) == pytest.approx(dict.fromkeys(rows, 0.0), abs=1e-14)
    assert FedTsv().scores(matrix) == pytest.approx(dict.fromkeys(rows, 0.5 / 3), abs=1e-14)


def test_de_biasing_lets_scores_see_through_declared_noise() -> None:
    rng = np.random.default_rng(4)
    size, energy = 40_000, 36.0
    directions = np.linalg.qr(rng.normal(size=(size, 8)))[0].T
    rows, reference = some_updates(4)
    signal = {name: row[:8] @ directions * 3 for name, row in rows.items()}
    noisy = {name: row + rng.normal(size=size) * math.sqrt(energy / size) for name, row in signal.items()}
    clean_reference = reference[:8] @ directions
    truth = FedTsv().scores(matrix_of(signal, clean_reference))
    seen = FedTsv().scores(matrix_of(noisy, clean_reference, noise_energy=dict.fromkeys(rows, energy)))
    blind = FedTsv().scores(matrix_of(noisy, clean_reference))

    def error(scores: Mapping[str, float]) -> float:
        return max(abs(scores[name] - truth[name]) for name in rows)

    # Estimated norms are off by 36 sqrt(2/40000) = 0.25, where the shortest signal has a squared norm of about 2.
    assert error(seen) < 0.05
    assert error(blind) > 2 * error(seen)
    noise = dict.fromkeys(rows, energy)
    angular = FedTsv(game=TrajectoryGame(distance=Angular()))
    assert angular.scores(matrix_of(noisy, clean_reference, noise_energy=noise)) == angular.scores(matrix_of(noisy, clean_reference))


def test_names_hold_every_choice() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert FedTsv(estimator=Exact()).name != FedTsv().name


def test_scores_of_a_sampled_estimate_do_not_depend_on_the_order_of_the_rows() -> None:
    rows, reference = some_updates(5, honest=20, bad=5)
    rule = FedTsv(estimator=MonteCarlo(permutations=3))
    matrix = matrix_of(rows, reference)
    assert rule.scores(matrix.take(list(reversed(matrix.names)))) == pytest.approx(rule.scores(matrix), abs=1e-12)


def test_a_reference_can_be_made_from_what_an_opener_knows() -> None:
    matrix = Gram(
        names=("a", "b"),
        size=4,
        products=np.array([[1.0, 0.0], [0.0, 1.0]]),
        reference=Reference(products=np.array([1.0, 0.0]), square=1.0),
    )
    scores = FedTsv().scores(matrix)
    assert scores["a"] > scores["b"]
