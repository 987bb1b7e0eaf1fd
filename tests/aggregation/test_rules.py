from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from privfed.aggregation.gram import Gram, gram
from privfed.aggregation.mixture import Mixture
from privfed.aggregation.robust import GeometricMedian
from privfed.aggregation.rules import FedAvg, MultiKrum, NearestNeighbourMixing
from privfed.update import Layout, PlainVector


def matrix_of(rows: np.ndarray, names: str | list[str] | None = None, **noise: float) -> Gram:
    layout = Layout(names=("w",), shapes=((rows.shape[1],),))
    labels = names or [f"c{index:02}" for index in range(len(rows))]
    updates = {name: PlainVector(layout=layout, values=row) for name, row in zip(labels, rows, strict=True)}
    return gram(updates, noise_energy={name: noise.get(name, 0.0) for name in updates} if noise else None)


def equal_weights(matrix: Gram) -> dict[str, float]:
    return dict.fromkeys(matrix.names, 1.0)


def kept(rule: MultiKrum, matrix: Gram) -> list[str]:
    return [name for name, weight in rule.mixture(equal_weights(matrix), matrix).weights.items() if weight]


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
    matrix = matrix_of(rows)
    chosen = kept(MultiKrum(byzantine=byzantine, keep=keep), matrix)
    assert {matrix.names.index(name) for name in chosen} == krum_by_definition(rows, byzantine=byzantine, keep=keep)


@pytest.mark.parametrize("attack", [1e6, -1e6, 30.0])
def test_multikrum_keeps_no_far_attacker_even_when_the_attackers_agree(attack: float) -> None:
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(9, 20))
    rows[[1, 4, 7]] = attack
    matrix = matrix_of(rows)
    weights = MultiKrum(byzantine=3, keep=6).mixture(equal_weights(matrix), matrix).coefficients(total=4096)
    assert weights == {f"c{index:02}": int(index not in (1, 4, 7)) for index in range(9)}


def test_attackers_beyond_the_declared_number_do_win() -> None:
    # The positive control of the test above: five of nine that agree are the nearest neighbours of each other.
    rows = np.random.default_rng(3).normal(size=(9, 20))
    rows[[0, 1, 2, 3, 4]] = 1e6
    assert kept(MultiKrum(byzantine=3, keep=5), matrix_of(rows)) == ["c00", "c01", "c02", "c03", "c04"]


def test_equal_scores_go_to_the_names_that_sort_first() -> None:
    assert kept(MultiKrum(byzantine=1, keep=2), matrix_of(np.ones((5, 3)), "edcba")) == ["b", "a"]


def test_keeping_nobody_is_refused() -> None:
    with pytest.raises(ValueError, match="expected byzantine from 0 and keep from 1"):
        MultiKrum(byzantine=0, keep=0)


def test_multikrum_does_not_prefer_a_client_for_its_declared_noise_nor_for_leaving_it_out() -> None:
    # Eight honest clients differ in the noise that they declare and add; two attackers add none and stand apart.
    rng = np.random.default_rng(4)
    size, noise = 40_000, [0.0, 30.0] * 4
    rows = np.zeros((10, size))
    rows[:8] = 1 / np.sqrt(size) + rng.normal(size=(8, size)) * np.sqrt(np.array(noise) / size)[:, np.newaxis]
    rows[8:] = -1 / np.sqrt(size)
    declared = {f"c{index:02}": energy for index, energy in enumerate(noise)}
    rule = MultiKrum(byzantine=2, keep=8)
    assert kept(rule, matrix_of(rows, **declared)) == [f"c{index:02}" for index in range(8)]
    assert kept(rule, matrix_of(rows)) != [f"c{index:02}" for index in range(8)]  # without de-biasing the noisy ones are far away


def mixing_by_definition(rows: np.ndarray, *, byzantine: int) -> np.ndarray:
    """Allouah et al., 2023, algorithm 2: the mean of the n - f nearest, itself among them."""
    near = [np.argsort(((rows - row) ** 2).sum(axis=1), kind="stable")[: len(rows) - byzantine] for row in rows]
    return np.stack([rows[rows_near].mean(axis=0) for rows_near in near])


@given(st.integers(0, 10_000), st.integers(0, 3))
def test_mixing_hands_the_mixed_updates_to_its_rule(seed: int, byzantine: int) -> None:
    rows = np.random.default_rng(seed).normal(size=(9, 5))
    mixed = mixing_by_definition(rows, byzantine=byzantine)
    inner = GeometricMedian()
    mixed_matrix = matrix_of(mixed)
    expected = np.array(list(inner.mixture(equal_weights(mixed_matrix), mixed_matrix).shares.values())) @ mixed
    matrix = matrix_of(rows)
    shares = NearestNeighbourMixing(byzantine=byzantine, rule=inner).mixture(equal_weights(matrix), matrix).shares
    # The shares are the fixed point of an iteration that stops at a change of 1e-10; rows have norms below 10.
    np.testing.assert_allclose(np.array(list(shares.values())) @ rows, expected, atol=1e-7)


def test_mixing_takes_declared_noise_out_before_it_mixes() -> None:
    rng = np.random.default_rng(5)
    size, energy = 40_000, 9.0
    signal = rng.normal(size=(7, 3)) @ np.linalg.qr(rng.normal(size=(size, 3)))[0].T
    noisy = signal + rng.normal(size=signal.shape) * np.sqrt(energy / size)
    rule = NearestNeighbourMixing(byzantine=2, rule=GeometricMedian(smoothing=0.1))
    clean, de_biased = matrix_of(signal), matrix_of(noisy, **{f"c{index:02}": energy for index in range(7)})
    expected = np.array(list(rule.mixture(equal_weights(clean), clean).shares.values()))
    got = np.array(list(rule.mixture(equal_weights(de_biased), de_biased).shares.values()))
    blind = np.array(list(rule.mixture(equal_weights(clean), matrix_of(noisy)).shares.values()))
    assert np.abs(got - expected).max() < np.abs(blind - expected).max()


def test_mixing_needs_a_reference_where_its_rule_does() -> None:
    assert not NearestNeighbourMixing(byzantine=1, rule=GeometricMedian()).needs_reference
    from privfed.aggregation.robust import FLTrust

    assert NearestNeighbourMixing(byzantine=1, rule=FLTrust()).needs_reference


def noisy(rng: np.random.Generator, *, energy: float, attacker: int) -> tuple[Gram, Gram]:
    """Five updates under heavy noise: as they were sent, and with the noise declared."""
    size = 2000
    rows = np.ones((5, size)) / np.sqrt(size)
    rows[attacker] *= -1
    rows += rng.normal(size=rows.shape) * np.sqrt(energy / size)
    return matrix_of(rows), matrix_of(rows, **{f"c{index:02}": energy for index in range(5)})


def test_noise_that_all_declare_alike_changes_no_choice_however_heavy_it_is() -> None:
    # It adds the same to every distance between two clients, so the order of the scores is that of the distances as they were sent.
    rng, rule = np.random.default_rng(6), MultiKrum(byzantine=1, keep=3)
    for energy in (1.0, 100.0, 1e4):
        for attacker in range(5):
            sent, declared = noisy(rng, energy=energy, attacker=attacker)
            assert kept(rule, declared) == kept(rule, sent)


def test_under_heavy_noise_no_name_is_chosen_more_often_than_another() -> None:
    # All five are alike, so each is kept in 3 of 5 rounds: 240 of 400, with a standard deviation of 9.8.
    rng, counts = np.random.default_rng(7), dict.fromkeys([f"c{index:02}" for index in range(5)], 0)
    energy, size = 1e4, 500
    for _ in range(400):
        rows = 1 / np.sqrt(size) + rng.normal(size=(5, size)) * np.sqrt(energy / size)
        for name in kept(MultiKrum(byzantine=1, keep=3), matrix_of(rows, **dict.fromkeys(counts, energy))):
            counts[name] += 1
    assert max(abs(count - 240) for count in counts.values()) < 5 * 9.8


def test_an_update_is_always_among_those_that_are_mixed_into_it() -> None:
    class Itself(GeometricMedian):
        """Takes the mixed update of one client."""

        def mixture(self, weights: Any, gram: Gram) -> Mixture:
            return Mixture(weights={name: float(name == "c04") for name in gram.names})

    rng = np.random.default_rng(8)
    for _ in range(20):
        _, declared = noisy(rng, energy=1e4, attacker=0)
        shares = NearestNeighbourMixing(byzantine=2, rule=Itself()).mixture(equal_weights(declared), declared).shares
        assert shares["c04"] == pytest.approx(1 / 3)
