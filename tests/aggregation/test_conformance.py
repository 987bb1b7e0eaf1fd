"""One suite for every rule of the package. The rules are found, not listed: a new one fails here until it has an example."""

import importlib
import inspect
import math
import pkgutil
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

import privfed.aggregation
from privfed.aggregation.coordinatewise import BucketedMedian, Bulyan, CoordinateMedian, Krum, TrimmedMean
from privfed.aggregation.gram import Gram, Reference, gram
from privfed.aggregation.robust import CenteredClipping, FLTrust, GeometricMedian, NormBound
from privfed.aggregation.rules import FedAvg, MultiKrum, NearestNeighbourMixing, PlaintextRule
from privfed.errors import LayoutMismatchError
from privfed.update import Layout, PlainVector

CLIENTS, SIZE, TOTAL = 11, 12, 4096
NAMES = tuple(f"c{index:02}" for index in range(CLIENTS))

EXAMPLES: tuple[Any, ...] = (
    FedAvg(),
    NormBound(max_norm=3.0),
    MultiKrum(byzantine=2, keep=5),
    MultiKrum(byzantine=0, keep=1),
    GeometricMedian(),
    GeometricMedian(smoothing=0.1),
    NearestNeighbourMixing(byzantine=2, rule=GeometricMedian()),
    NearestNeighbourMixing(byzantine=3, rule=MultiKrum(byzantine=3, keep=4)),
    CenteredClipping(radius=3.0),
    FLTrust(),
    Krum(byzantine=2),
    CoordinateMedian(),
    TrimmedMean(byzantine=2),
    Bulyan(byzantine=2),
    BucketedMedian.of(NAMES, size=3, byzantine=1),
)
PLAINTEXT = tuple(rule for rule in EXAMPLES if isinstance(rule, PlaintextRule))
ON_GRAM = tuple(rule for rule in EXAMPLES if hasattr(rule, "mixture"))
# A rule that is told a length is told it in the unit of the updates.
LENGTHS = {NormBound: "max_norm", CenteredClipping: "radius"}
# These follow the agreed weights; all others count every client once.
WEIGHTED = (FedAvg, NormBound)

every_rule = pytest.mark.parametrize("rule", EXAMPLES, ids=lambda rule: rule.name[:60])
gram_rule = pytest.mark.parametrize("rule", ON_GRAM, ids=lambda rule: rule.name[:60])
plaintext_rule = pytest.mark.parametrize("rule", PLAINTEXT, ids=lambda rule: rule.name[:60])


def found() -> set[type]:
    modules = [
        importlib.import_module(f"{privfed.aggregation.__name__}.{info.name}")
        for info in pkgutil.iter_modules(privfed.aggregation.__path__)
    ]
    classes = {value for module in modules for _, value in inspect.getmembers(module, inspect.isclass)}
    methods = {"mixture", "aggregate", "coefficients"}
    ours = {value for value in classes if value.__module__.startswith("privfed.aggregation.") and not getattr(value, "_is_protocol", False)}
    return {value for value in ours if hasattr(value, "name") and any(hasattr(value, method) for method in methods)}


def plain(row: Any) -> PlainVector:
    return PlainVector(layout=Layout(names=("w",), shapes=((len(row),),)), values=row)


def some_round(seed: int = 0, clients: int = CLIENTS) -> tuple[dict[str, float], dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(seed)
    weights = {name: float(rng.uniform(1, 5)) for name in NAMES[:clients]}
    reference = rng.normal(size=SIZE)
    return weights, {name: reference + rng.normal(size=SIZE) for name in weights}, reference


def matrix_of(updates: Mapping[str, np.ndarray], reference: np.ndarray) -> Gram:
    return gram({name: plain(row) for name, row in updates.items()}, reference=plain(reference))


def result(rule: Any, weights: Mapping[str, float], updates: Mapping[str, np.ndarray], reference: np.ndarray) -> np.ndarray:
    """How the model moves, with integer coefficients as a round has them."""
    vectors = {name: plain(row) for name, row in updates.items()}
    if isinstance(rule, PlaintextRule):
        return rule.aggregate(vectors).values
    if rule.needs_gram:
        mixture = rule.mixture(weights, matrix_of(updates, reference))
        coefficients = mixture.coefficients(total=TOTAL)
        mean = sum(coefficients[name] * row for name, row in updates.items()) / sum(coefficients.values())
        return mixture.moved(plain(mean), plain(reference)).values
    coefficients = rule.coefficients(weights, total=TOTAL)
    return np.asarray(sum(coefficients[name] * row for name, row in updates.items()) / sum(coefficients.values()))


def test_no_rule_escapes_this_suite() -> None:
    assert found() == {type(rule) for rule in EXAMPLES}
    assert len(found()) == 12


def test_names_hold_every_parameter() -> None:
    assert len({rule.name for rule in EXAMPLES}) == len(EXAMPLES)
    for rule in EXAMPLES:
        for value in (getattr(rule, field.name) for field in fields(rule)):
            assert getattr(value, "name", repr(value)) in rule.name


@gram_rule
def test_coefficients_are_integers_within_the_total_for_every_client(rule: Any) -> None:
    weights, updates, reference = some_round()
    coefficients = rule.mixture(weights, matrix_of(updates, reference)).coefficients(total=TOTAL)
    assert list(coefficients) == list(weights)
    assert all(type(coefficient) is int and coefficient >= 0 for coefficient in coefficients.values())
    assert 0 < sum(coefficients.values()) <= TOTAL


@every_rule
@pytest.mark.parametrize("seed", range(5))
def test_a_permutation_of_the_clients_changes_nothing(rule: Any, seed: int) -> None:
    weights, updates, reference = some_round(seed)
    names = [NAMES[index] for index in np.random.default_rng(seed + 100).permutation(CLIENTS)]
    shuffled = result(rule, {name: weights[name] for name in names}, {name: updates[name] for name in names}, reference)
    # The same integer coefficients; the order of a sum of eleven moves its last digits.
    np.testing.assert_allclose(shuffled, result(rule, weights, updates, reference), rtol=0, atol=11 * 2.0**-52 * 4)
    if rule in ON_GRAM:
        matrix = matrix_of(updates, reference)
        assert rule.mixture(weights, matrix).coefficients(total=TOTAL) == rule.mixture(
            {name: weights[name] for name in names}, matrix.take(names)
        ).coefficients(total=TOTAL)


@every_rule
@pytest.mark.parametrize("scale", [2.0**-30, 8.0, 2.0**-332, 2.0**332])  # the last two are 1e-100 and 1e100
def test_a_common_scale_of_the_updates_scales_the_result(rule: Any, scale: float) -> None:
    weights, updates, reference = some_round()
    length = LENGTHS.get(type(rule))
    scaled = rule if length is None else replace(rule, **{length: getattr(rule, length) * scale})
    # Powers of two are exact, so nothing may differ.
    expected = result(rule, weights, updates, reference) * scale
    got = result(scaled, weights, {name: row * scale for name, row in updates.items()}, reference * scale)
    np.testing.assert_allclose(got, expected, rtol=1e-12)


@every_rule
def test_equal_updates_give_that_update(rule: Any) -> None:
    weights, _, reference = some_round()
    if type(rule) in LENGTHS:
        rule = replace(rule, **{LENGTHS[type(rule)]: 1e3})  # a length beyond which nothing is
    same = dict.fromkeys(NAMES, reference)
    np.testing.assert_allclose(result(rule, weights, same, reference), reference, rtol=1e-12)


@every_rule
def test_duplicates_get_what_their_client_gets(rule: Any) -> None:
    weights, updates, reference = some_round(clients=10)
    weights = dict.fromkeys(NAMES, 1.0)
    updates = {**updates, NAMES[10]: updates[NAMES[0]].copy()}
    if rule not in ON_GRAM:
        swapped = {**updates, NAMES[0]: updates[NAMES[10]], NAMES[10]: updates[NAMES[0]]}
        np.testing.assert_array_equal(result(rule, weights, updates, reference), result(rule, weights, swapped, reference))
        return
    got = rule.mixture(weights, matrix_of(updates, reference)).weights
    if "MultiKrum" in rule.name:
        assert got[NAMES[0]] >= got[NAMES[10]]  # one of two equals may be the last one that is kept
    else:
        assert math.isclose(got[NAMES[0]], got[NAMES[10]], rel_tol=1e-9)


@every_rule
def test_a_client_of_nothing_and_a_round_of_nothing_are_no_accident(rule: Any) -> None:
    weights, updates, reference = some_round()
    zero = np.zeros(SIZE)
    assert np.isfinite(result(rule, weights, {**updates, NAMES[4]: zero}, reference)).all()
    if not isinstance(rule, FLTrust):  # no update points anywhere: see its own test
        moved = result(rule, weights, dict.fromkeys(NAMES, zero), zero)
        np.testing.assert_array_equal(moved, zero)


@gram_rule
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_client_that_sends_nan_or_infinity_is_refused_before_any_rule_sees_it(rule: Any, bad: float) -> None:
    weights, updates, reference = some_round()
    with pytest.raises(ValueError, match="finite"):
        matrix_of({**updates, NAMES[0]: np.full(SIZE, bad)}, reference)
    products = matrix_of(updates, reference).products.copy()
    products[0, :] = products[:, 0] = bad
    with pytest.raises(ValueError, match="finite entries"):
        rule.mixture(weights, Gram(names=NAMES, size=SIZE, products=products, reference=Reference(products=np.zeros(CLIENTS), square=1.0)))


@plaintext_rule
def test_a_plaintext_rule_gets_no_nan_and_refuses_mixed_layouts(rule: Any) -> None:
    _, updates, reference = some_round()
    with pytest.raises(ValueError, match="finite"):
        result(rule, {}, {**updates, NAMES[0]: np.full(SIZE, math.nan)}, reference)
    with pytest.raises(LayoutMismatchError, match="nothing was"):
        rule.aggregate({name: plain(row) for name, row in updates.items()} | {NAMES[3]: plain(np.zeros(SIZE + 1))})


@gram_rule
def test_a_matrix_of_other_clients_is_refused(rule: Any) -> None:
    weights, updates, reference = some_round()
    matrix = matrix_of(updates, reference)
    with pytest.raises(ValueError, match="of other clients"):
        rule.mixture(dict(reversed(weights.items())), matrix)
    with pytest.raises(ValueError, match=r"of other clients|needs at least"):
        rule.mixture({name: weights[name] for name in NAMES[:-1]}, matrix)


@every_rule
def test_arguments_are_not_changed(rule: Any) -> None:
    weights, updates, reference = some_round()
    before = (dict(weights), {name: row.copy() for name, row in updates.items()}, reference.copy())
    result(rule, weights, updates, reference)
    assert weights == before[0]
    np.testing.assert_array_equal(np.stack(list(updates.values())), np.stack(list(before[1].values())))
    np.testing.assert_array_equal(reference, before[2])


@every_rule
def test_a_weight_that_a_client_reports_buys_no_influence(rule: Any) -> None:
    weights, updates, reference = some_round()
    if isinstance(rule, PlaintextRule):
        assert "weights" not in inspect.signature(rule.aggregate).parameters
        return
    bought = result(rule, weights | {NAMES[0]: 900.0}, updates, reference)
    assert np.array_equal(bought, result(rule, weights, updates, reference)) != isinstance(rule, WEIGHTED)


@pytest.mark.parametrize(
    ("rule", "least"),
    [
        (MultiKrum(byzantine=3, keep=2), 9),
        (MultiKrum(byzantine=1, keep=8), 9),
        (NearestNeighbourMixing(byzantine=4, rule=GeometricMedian()), 9),
        (NearestNeighbourMixing(byzantine=2, rule=MultiKrum(byzantine=3, keep=2)), 9),
        (Krum(byzantine=3), 9),
        (TrimmedMean(byzantine=4), 9),
        (Bulyan(byzantine=2), 11),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_too_few_clients_for_the_attackers_are_refused_with_the_bound(rule: Any, least: int) -> None:
    weights, updates, reference = some_round(clients=least)
    result(rule, weights, updates, reference)
    few = {name: updates[name] for name in NAMES[: least - 1]}
    with pytest.raises(ValueError, match=rf"needs at least {least} clients, got {least - 1}"):
        result(rule, {name: weights[name] for name in few}, few, reference)


@plaintext_rule
def test_no_client_at_all_is_refused(rule: Any) -> None:
    with pytest.raises(ValueError, match=r"needs at least \d+ (clients|groups), got 0"):
        rule.aggregate({})


@pytest.mark.parametrize(
    "make", [MultiKrum, NearestNeighbourMixing, Krum, TrimmedMean, Bulyan, BucketedMedian], ids=lambda make: make.__name__
)
def test_a_negative_number_of_attackers_is_refused(make: Any) -> None:
    others = {"keep": 1, "rule": GeometricMedian(), "groups": (("a",),)}
    needed = {field.name: others[field.name] for field in fields(make) if field.name in others}
    with pytest.raises(ValueError, match="expected byzantine from 0"):
        make(byzantine=-1, **needed)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_lengths_that_are_none_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="max_norm to be positive"):
        NormBound(max_norm=bad)
    with pytest.raises(ValueError, match="radius to be positive"):
        CenteredClipping(radius=bad)
    with pytest.raises(ValueError, match="smoothing between 0 and 1"):
        GeometricMedian(smoothing=bad)
