import math

import numpy as np
import pytest

from privfed.aggregation.gram import Gram, gram
from privfed.contribution.cosine import Cgsv, gradient_reward
from privfed.update import Layout, PlainVector

SIZE = 20


def matrix_of(rows: dict[str, np.ndarray]) -> Gram:
    layout = Layout(names=("w", "b"), shapes=((SIZE - 1,), (1,)))  # a layer of one element among them
    return gram({name: PlainVector(layout=layout, values=row) for name, row in rows.items()})


def rounds(count: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    base = rng.normal(size=SIZE)
    strengths = {"a": 0.2, "b": 1.0, "c": 3.0, "d": 3.0}
    return [{name: base + strength * rng.normal(size=SIZE) for name, strength in strengths.items()} for _ in range(count)]


def test_importances_and_the_aggregate_are_those_of_the_published_algorithm() -> None:
    rule = Cgsv(length=0.5, decay=0.95)
    scores: dict[str, float] = {}
    importance = np.zeros(4)  # the published code, line by line, on vectors
    for number, rows in enumerate(rounds(12)):
        normalised = np.stack([0.5 * row / np.linalg.norm(row) for row in rows.values()])
        weights = np.full(4, 0.25) if number == 0 else importance
        aggregate = weights @ normalised
        cosines = normalised @ aggregate / (np.linalg.norm(normalised, axis=1) * np.linalg.norm(aggregate))
        importance = np.maximum(0.95 * importance + 0.05 * cosines, 1e-3)
        importance /= importance.sum()
        scores, mixture = rule.step(scores, matrix_of(rows))
        assert list(scores.values()) == pytest.approx(importance.tolist(), rel=1e-10)
        mean = np.array(list(mixture.shares.values())) @ np.stack(list(rows.values()))
        np.testing.assert_allclose(mixture.scale * mean, aggregate, atol=1e-13)


def test_the_length_of_an_update_buys_no_importance() -> None:
    rule = Cgsv()
    rows = rounds(1)[0]
    scores, _ = rule.step({}, matrix_of(rows))
    longer, mixture = rule.step({}, matrix_of({**rows, "c": rows["c"] * 1e6}))
    assert longer == pytest.approx(scores, rel=1e-10)
    assert mixture.shares["c"] < 1e-5  # so that its share of the sum is that of the others


def test_with_full_participation_importances_sum_to_one_and_with_less_they_keep_their_sum() -> None:
    rule = Cgsv()
    scores, _ = rule.step({}, matrix_of(rounds(1)[0]))
    assert math.fsum(scores.values()) == pytest.approx(1)
    some = {name: row for name, row in rounds(2)[1].items() if name != "a"}
    after, _ = rule.step(scores, matrix_of(some))
    assert after["a"] == scores["a"]
    assert math.fsum(after.values()) == pytest.approx(1)


def test_a_client_that_opposes_the_others_falls_to_the_least_importance_and_not_below() -> None:
    rule, scores = Cgsv(decay=0.5), {}
    for rows in rounds(20):
        scores, mixture = rule.step(scores, matrix_of({**rows, "e": -rows["a"]}))
    assert 0 < scores["e"] < 2e-3
    assert mixture.shares["e"] < 2e-3


def test_a_newcomer_starts_with_the_mean_importance_of_the_others() -> None:
    scores = {"a": 0.5, "b": 0.3}
    rows = rounds(1)[0]
    _, mixture = Cgsv().step(scores, matrix_of({name: row / np.linalg.norm(row) for name, row in rows.items()}))
    assert mixture.shares == pytest.approx({"a": 0.5 / 1.6, "b": 0.3 / 1.6, "c": 0.4 / 1.6, "d": 0.4 / 1.6})


def test_a_newcomer_that_sends_what_the_others_send_keeps_the_importance_it_starts_with() -> None:
    update = rounds(1)[0]["a"]
    scores: dict[str, float] = {}
    for _ in range(5):
        scores, _ = Cgsv().step(scores, matrix_of(dict.fromkeys("abcd", update)))
    for _ in range(5):
        scores, mixture = Cgsv().step(scores, matrix_of(dict.fromkeys("abcde", update)))
        assert scores["e"] == pytest.approx(scores["a"])
        assert mixture.shares["e"] == pytest.approx(0.2)


def test_a_round_of_zero_updates_changes_no_importance() -> None:
    scores, mixture = Cgsv().step({"a": 0.9, "b": 0.1}, matrix_of(dict.fromkeys("ab", np.zeros(SIZE))))
    assert scores == {"a": 0.9, "b": 0.1}
    assert mixture.moved(PlainVector(layout=Layout(names=("w",), shapes=((2,),)), values=[0, 0])).values.tolist() == [0, 0]


def test_a_reward_of_a_layer_of_one_element_is_no_accident() -> None:
    # The published code takes the largest min(k, n - 1) of n magnitudes, and of one element that is none: it crashes.
    layout = Layout(names=("weight", "bias"), shapes=((2, 3), (1,)))
    aggregate = PlainVector(layout=layout, values=[1, -6, 3, 2, -5, 4, 0.5])
    assert gradient_reward(aggregate, share=0.5).values.tolist() == [0, -6, 0, 0, -5, 4, 0.5]
    assert gradient_reward(aggregate, share=1).values.tolist() == aggregate.values.tolist()
    assert gradient_reward(aggregate, share=0).values.tolist() == [0.0] * 7
    assert gradient_reward(aggregate, share=1e-9).values.tolist() == [0, -6, 0, 0, 0, 0, 0.5]  # rounded up, one of each layer


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="share from 0 to 1"):
        gradient_reward(PlainVector(layout=Layout(names=("w",), shapes=((1,),)), values=[1]), share=share)


def test_numbers_out_of_range_are_refused() -> None:
    for length in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="length to be positive"):
            Cgsv(length=length)
    for decay in (-0.1, 1.0, math.nan):
        with pytest.raises(ValueError, match="decay from 0 to below 1"):
            Cgsv(decay=decay)
