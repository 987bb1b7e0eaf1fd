import inspect
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from privfed.aggregation import rules
from privfed.aggregation.gram import gram
from privfed.aggregation.rules import FedAvg, MultiKrum, Rule
from privfed.update import Layout, PlainVector

CLIENTS = 7
RULES = (FedAvg(), MultiKrum(byzantine=2, keep=3), MultiKrum(byzantine=0, keep=1))
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)


def products(rows: np.ndarray) -> np.ndarray:
    layout = Layout(names=("w",), shapes=((rows.shape[1],),))
    return gram([PlainVector(layout=layout, values=row) for row in rows])


def apply(rule: Rule, weights: Mapping[str, float], rows: np.ndarray) -> dict[str, int]:
    if rule.needs_gram is True:
        return rule.coefficients(weights, products(rows))
    return rule.coefficients(weights, total=4096)


def some_clients(seed: int = 0) -> tuple[dict[str, float], np.ndarray]:
    rng = np.random.default_rng(seed)
    return {f"c{index}": float(rng.uniform(1, 5)) for index in range(CLIENTS)}, rng.normal(size=(CLIENTS, 12))


def test_no_rule_escapes_this_suite() -> None:
    classes = [value for _, value in inspect.getmembers(rules, inspect.isclass) if value.__module__ == rules.__name__]
    defined = {value for value in classes if not getattr(value, "_is_protocol", False)}
    assert defined == {type(rule) for rule in RULES}


def test_names_hold_every_parameter() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert MultiKrum(byzantine=1, keep=2).name != MultiKrum(byzantine=2, keep=1).name


@every_rule
def test_coefficients_are_integers_for_every_client_and_some_are_positive(rule: Rule) -> None:
    weights, rows = some_clients()
    coefficients = apply(rule, weights, rows)
    assert list(coefficients) == list(weights)
    assert all(type(coefficient) is int and coefficient >= 0 for coefficient in coefficients.values())
    assert any(coefficients.values())


@every_rule
@pytest.mark.parametrize("seed", range(5))
def test_a_permutation_of_the_clients_permutes_the_coefficients(rule: Rule, seed: int) -> None:
    weights, rows = some_clients(seed)
    order = np.random.default_rng(seed + 100).permutation(CLIENTS)
    names = [list(weights)[index] for index in order]
    assert apply(rule, {name: weights[name] for name in names}, rows[order]) == apply(rule, weights, rows)


@every_rule
@pytest.mark.parametrize("scale", [2.0**-30, 8.0])
def test_a_common_scale_of_the_updates_changes_nothing(rule: Rule, scale: float) -> None:
    weights, rows = some_clients()
    assert apply(rule, weights, rows * scale) == apply(rule, weights, rows)


@every_rule
def test_arguments_are_not_changed(rule: Rule) -> None:
    weights, rows = some_clients()
    weights_before, rows_before = dict(weights), rows.copy()
    apply(rule, weights, rows)
    assert weights == weights_before
    np.testing.assert_array_equal(rows, rows_before)


def test_fedavg_follows_the_weights() -> None:
    assert FedAvg().coefficients({"a": 0.5, "b": 0.25, "c": 0.25}, total=8) == {"a": 4, "b": 2, "c": 2}


def krum_by_definition(rows: np.ndarray, *, byzantine: int, keep: int) -> set[int]:
    """Blanchard et al., 2017, section 4: the score of i sums the squared distances to its n - f - 2 closest vectors."""
    scores = []
    for i, row in enumerate(rows):
        distances = sorted(float(((row - other) ** 2).sum()) for j, other in enumerate(rows) if j != i)
        scores.append(sum(distances[: len(rows) - byzantine - 2]))
    return set(np.argsort(scores)[:keep].tolist())


@given(st.integers(0, 10_000), st.integers(0, 3), st.data())
def test_multikrum_keeps_what_the_definition_keeps(seed: int, byzantine: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(2 * byzantine + 3, 12))
    keep = data.draw(st.integers(1, count - byzantine))
    rows = np.random.default_rng(seed).normal(size=(count, 5))  # ties have probability zero
    names = [f"c{index:02}" for index in range(count)]
    coefficients = MultiKrum(byzantine=byzantine, keep=keep).coefficients(dict.fromkeys(names, 1.0), products(rows))
    assert {index for index, name in enumerate(names) if coefficients[name]} == krum_by_definition(rows, byzantine=byzantine, keep=keep)


@pytest.mark.parametrize("attack", [1e6, -1e6, 30.0])
def test_multikrum_keeps_no_far_attacker_even_when_the_attackers_agree(attack: float) -> None:
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(9, 20))
    rows[[1, 4, 7]] = attack
    coefficients = MultiKrum(byzantine=3, keep=6).coefficients({f"c{index}": 1.0 for index in range(9)}, products(rows))
    assert coefficients == {f"c{index}": int(index not in (1, 4, 7)) for index in range(9)}


def test_attackers_beyond_the_declared_number_do_win() -> None:
    # The positive control of the test above: five of nine that agree are the nearest neighbours of each other.
    rows = np.random.default_rng(3).normal(size=(9, 20))
    rows[[0, 1, 2, 3, 4]] = 1e6
    coefficients = MultiKrum(byzantine=3, keep=5).coefficients({f"c{index}": 1.0 for index in range(9)}, products(rows))
    assert [name for name, coefficient in coefficients.items() if coefficient] == ["c0", "c1", "c2", "c3", "c4"]


def test_weights_buy_no_influence_in_multikrum() -> None:
    weights, rows = some_clients()
    rule = MultiKrum(byzantine=2, keep=3)
    assert apply(rule, weights, rows) == apply(rule, weights | {"c0": 1e9}, rows)


def test_equal_scores_go_to_the_names_that_sort_first() -> None:
    rows = np.ones((5, 3))
    coefficients = MultiKrum(byzantine=1, keep=2).coefficients(dict.fromkeys("edcba", 1.0), products(rows))
    assert coefficients == {"e": 0, "d": 0, "c": 0, "b": 1, "a": 1}


def test_too_few_clients_for_the_attackers_are_refused_with_the_bound() -> None:
    with pytest.raises(ValueError, match=r"MultiKrum\(byzantine=1, keep=3\) needs at least 5 clients, got 4"):
        MultiKrum(byzantine=1, keep=3).coefficients(dict.fromkeys("abcd", 1.0), np.eye(4))


def test_keeping_more_updates_than_honest_clients_is_refused() -> None:
    with pytest.raises(ValueError, match="needs at least 6 clients, got 5"):
        MultiKrum(byzantine=1, keep=5).coefficients(dict.fromkeys("abcde", 1.0), np.eye(5))


@pytest.mark.parametrize(
    "matrix",
    [np.eye(4), np.ones(5), np.full((5, 5), np.nan), np.diag([1.0, 1, 1, 1, np.inf]), np.triu(np.ones((5, 5))), np.eye(5) * 1e308],
    ids=["other size", "vector", "NaN", "infinity", "not symmetric", "distances overflow"],
)
def test_nothing_is_scored_on_a_matrix_that_is_not_a_finite_gram_matrix(matrix: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"expected a .*Gram matrix"):
        MultiKrum(byzantine=1, keep=2).coefficients(dict.fromkeys("abcde", 1.0), matrix)


@pytest.mark.parametrize(("byzantine", "keep"), [(-1, 1), (0, 0)])
def test_parameters_out_of_range_are_refused(byzantine: int, keep: int) -> None:
    with pytest.raises(ValueError, match="expected byzantine from 0 and keep from 1"):
        MultiKrum(byzantine=byzantine, keep=keep)
