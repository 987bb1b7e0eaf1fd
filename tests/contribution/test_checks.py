import math
from collections.abc import Mapping

import numpy as np
import pytest

from privfed.aggregation.gram import Gram, Reference, gram
from privfed.aggregation.mixture import Mixture
from privfed.contribution.checks import (
    Suspicion,
    check_round,
    clients_without_noise,
    duplicate_clients,
    replaying_clients,
    unrelated_clients,
    zero_clients,
)
from privfed.update import Layout, PlainVector

SIZE = 5000


def matrix_of(rows: Mapping[str, np.ndarray], last: np.ndarray | None = None, noise: float = 0.0) -> tuple[Gram, Reference | None]:
    layout = Layout(names=("w",), shapes=((len(next(iter(rows.values()))),),))
    updates = {name: PlainVector(layout=layout, values=row) for name, row in rows.items()}
    matrix = gram(
        updates,
        reference=None if last is None else PlainVector(layout=layout, values=last),
        noise_energy=dict.fromkeys(rows, noise) if noise else None,
    )
    return matrix, matrix.reference


def honest(seed: int = 0, count: int = 6, common: float = 0.6) -> tuple[dict[str, np.ndarray], np.ndarray, np.random.Generator]:
    """Updates with cosines of about common^2 / (1 + common^2), and a last aggregate that has some of what they have in common."""
    rng = np.random.default_rng(seed)
    direction = rng.normal(size=SIZE)
    rows = {f"c{index}": common * direction + rng.normal(size=SIZE) for index in range(count)}
    return rows, direction + rng.normal(size=SIZE), rng


def suspicions(rows: Mapping[str, np.ndarray], last: np.ndarray | None = None) -> dict[str, set[Suspicion]]:
    matrix, reference = matrix_of(rows, last)
    return {name: set(kinds) for name, kinds in check_round(matrix, last=reference).suspicions.items()}


def test_honest_clients_are_not_suspected() -> None:
    for seed in range(20):
        rows, last, _ = honest(seed)
        assert not any(suspicions(rows, last).values())


def test_each_free_rider_is_found_and_nobody_else() -> None:
    rows, last, rng = honest()
    noise = rng.normal(size=(3, SIZE))
    cases: dict[Suspicion, list[np.ndarray]] = {
        Suspicion.ZERO: [np.zeros(SIZE), 1e-8 * noise[0]],
        Suspicion.REPLAY: [last, 3.7 * last, 1e-3 * last, np.rint(last * 1e4) / 1e4, -last, -0.2 * last],
        Suspicion.UNRELATED: [noise[0], 0.01 * noise[1], last + 0.1 * noise[2], 5 * last + 2 * noise[0], 0.3 * noise[1] - last],
    }
    for kind, updates in cases.items():
        for update in updates:
            assert suspicions({**rows, "rider": update}, last) == {**{name: set() for name in rows}, "rider": {kind}}


def test_duplicates_are_found_both_and_whatever_their_length() -> None:
    rows, last, _ = honest()
    for factor in (1.0, 0.01, 40.0):
        found = suspicions({**rows, "copy": factor * rows["c2"]}, last)
        assert {name for name, kinds in found.items() if kinds} == {"c2", "copy"}
        assert found["copy"] == {Suspicion.DUPLICATE}
    assert not any(suspicions({**rows, "mirror": -rows["c2"]}, last).values())  # no copy, but what an attacker sends; not for these checks


def test_replays_with_different_factors_are_replays_and_duplicates() -> None:
    rows, last, _ = honest()
    found = suspicions({**rows, "r1": last, "r2": 2 * last}, last)
    assert found["r1"] == found["r2"] == {Suspicion.REPLAY, Suspicion.DUPLICATE}


def test_without_the_last_aggregate_a_noisy_replay_passes_for_an_update() -> None:
    # What the check needs the last aggregate for: it has a direction in common with honest updates.
    rows, last, rng = honest()
    replay = last + 0.1 * rng.normal(size=SIZE)
    assert suspicions({**rows, "rider": replay}, last)["rider"] == {Suspicion.UNRELATED}
    assert suspicions({**rows, "rider": replay})["rider"] == set()


def near_the_last_aggregate(seed: int, common: float, count: int = 10) -> tuple[dict[str, np.ndarray], np.ndarray, np.random.Generator]:
    """Clients whose data are alike, late in training: their updates are the last aggregate, some common turn, and sampling noise."""
    rng = np.random.default_rng(seed)
    last, turn = rng.normal(size=(2, SIZE))
    return {f"c{index}": last + common * turn + 0.5 * rng.normal(size=SIZE) for index in range(count)}, last, rng


@pytest.mark.parametrize("common", [0.0, 0.02, 0.05, 0.1, 0.3])
def test_honest_clients_whose_data_are_alike_are_not_noise_when_the_model_hardly_turns(common: float) -> None:
    flagged = 0
    for seed in range(20):
        rows, last, _ = near_the_last_aggregate(seed, common)
        matrix, reference = matrix_of(rows, last)
        flagged += len(unrelated_clients(matrix, last=reference))
    # Of 200, each at most with the level of 1e-3: more than five of them happen once in 15000.
    assert flagged <= 5


def test_noise_is_found_among_clients_who_send_little_but_the_last_aggregate_and_a_replay_in_noise_is_found_once_they_turn() -> None:
    for common, found in ((0.0, {"noise"}), (0.3, {"noise", "rider"})):
        rows, last, rng = near_the_last_aggregate(0, common)
        riders = {"noise": rng.normal(size=SIZE), "rider": last + 0.5 * rng.normal(size=SIZE)}
        matrix, reference = matrix_of({**rows, **riders}, last)
        assert unrelated_clients(matrix, last=reference) == found


def test_under_heavy_noise_honest_clients_are_not_called_noise() -> None:
    for seed in range(10):
        rows, last, rng = honest(seed, count=10)
        noisy = {name: row + 10 * rng.normal(size=SIZE) for name, row in rows.items()}
        matrix, reference = matrix_of(noisy, last)
        assert unrelated_clients(matrix, last=reference) == frozenset()


def test_several_who_send_noise_are_found_all() -> None:
    rows, last, rng = honest()
    riders = {f"r{index}": rng.normal(size=SIZE) for index in range(4)}
    found = suspicions({**rows, **riders}, last)
    assert {name for name, kinds in found.items() if Suspicion.UNRELATED in kinds} == set(riders)


def test_noise_escapes_with_the_stated_probability() -> None:
    rows, last, rng = honest(count=4)
    escaped = 0
    for _ in range(400):
        matrix, reference = matrix_of({**rows, "rider": rng.normal(size=SIZE)}, last)
        escaped += "rider" not in unrelated_clients(matrix, last=reference, level=0.05)
    # Binomial(400, 0.05): mean 20, standard deviation 4.4. Six of them to either side, and zero is not among them.
    assert 0 < escaped < 20 + 6 * 4.4


def test_fewer_than_three_clients_are_not_called_noise() -> None:
    _, _, rng = honest()
    assert unrelated_clients(matrix_of({"a": rng.normal(size=SIZE), "b": rng.normal(size=SIZE)})[0]) == frozenset()


def test_rounds_of_nothing_are_no_accident() -> None:
    rows = dict.fromkeys("abcd", np.zeros(SIZE))
    matrix, reference = matrix_of(rows, np.zeros(SIZE))
    findings = check_round(matrix, last=reference)
    assert findings.flagged == set("abcd")
    assert set(findings.suspicions.values()) == {frozenset({Suspicion.ZERO})}


def test_flagged_clients_can_be_left_out_of_the_mean() -> None:
    rows, last, _ = honest(count=3)
    matrix, reference = matrix_of({**rows, "rider": last}, last)
    mixture = Mixture(weights=dict.fromkeys(matrix.names, 1.0)).without(check_round(matrix, last=reference).flagged)
    assert dict(mixture.weights) == {"c0": 1, "c1": 1, "c2": 1, "rider": 0}


def noisy_norms(rng: np.random.Generator, clients: int, size: int, energy: float, signal: float = 0.0) -> np.ndarray:
    """Squared norms of a signal in noise of the given expected energy."""
    rows = rng.normal(size=(clients, size)) * math.sqrt(energy / size)
    rows[:, 0] += signal
    return (rows**2).sum(axis=1)


def norms_only(norms: np.ndarray, size: int, energy: float) -> Gram:
    return Gram(
        names=tuple(f"c{index}" for index in range(len(norms))),
        size=size,
        products=np.diag(norms),
        noise_energy=np.full(len(norms), energy),
    )


@pytest.mark.parametrize("signal", [0.0, 1.0])
def test_honest_noise_is_called_missing_in_no_more_rounds_than_the_level(signal: float) -> None:
    rng = np.random.default_rng(0)
    level, size, energy, trials = 0.1, 2000, 9.0, 1000
    false = sum(
        bool(clients_without_noise(norms_only(noisy_norms(rng, 8, size, energy, signal), size, energy), level=level)) for _ in range(trials)
    )
    # Binomial(1000, at most 0.1): at most 100 plus six standard deviations of 9.5. Without a signal the level is nearly reached.
    assert false < 100 + 57
    assert false > 50 or signal > 0


@pytest.mark.parametrize(("share", "found"), [(1.0, False), (0.8, True), (0.25, True), (0.0, True)])
def test_noise_of_less_than_what_was_declared_is_found(share: float, found: bool) -> None:
    # 20000 coordinates: one standard deviation is 1 %, and the threshold of eight clients at one in a thousand 3.7 of them.
    rng = np.random.default_rng(1)
    norms = noisy_norms(rng, 8, 20_000, 9.0)
    norms[3] = noisy_norms(rng, 1, 20_000, 9.0 * share)[0]
    assert clients_without_noise(norms_only(norms, 20_000, 9.0)) == (frozenset({"c3"}) if found else frozenset())


def test_a_long_signal_hides_missing_noise_so_that_no_flag_proves_nothing() -> None:
    norms = np.full(4, 9.0)
    assert clients_without_noise(norms_only(norms, 20_000, 9.0)) == frozenset()


def test_without_declared_noise_nothing_is_missing() -> None:
    rows, last, _ = honest()
    matrix, _ = matrix_of(rows, last)
    assert clients_without_noise(matrix) == frozenset()


@pytest.mark.parametrize("level", [0.0, 1.0, -1.0, math.nan])
def test_a_level_that_is_none_is_refused(level: float) -> None:
    matrix, _ = matrix_of(honest()[0])
    for check in (check_round, unrelated_clients, clients_without_noise):
        with pytest.raises(ValueError, match="level between 0 and 1"):
            check(matrix, level=level)


def test_a_last_aggregate_of_other_clients_is_refused() -> None:
    matrix, _ = matrix_of(honest()[0])
    other = Reference(products=np.zeros(2), square=1.0)
    with pytest.raises(ValueError, match="expected 6 inner products with the last aggregate, got 2"):
        replaying_clients(matrix, other)
    with pytest.raises(ValueError, match="expected 6 inner products with the last aggregate, got 2"):
        unrelated_clients(matrix, last=other)


def test_checks_do_not_depend_on_the_order_of_the_clients() -> None:
    rows, last, rng = honest()
    rows |= {"z": np.zeros(SIZE), "r": 2 * last, "n": rng.normal(size=SIZE), "d": rows["c0"]}
    matrix, reference = matrix_of(rows, last)
    order = list(reversed(matrix.names))
    assert check_round(matrix.take(order), last=matrix.take(order).reference) == check_round(matrix, last=reference)
    assert zero_clients(matrix) == {"z"}
    assert duplicate_clients(matrix) == {"c0", "d"}
