import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from privfed.aggregation.coordinatewise import CoordinateMedian, Krum
from privfed.aggregation.mixture import Mixture
from privfed.aggregation.robust import CenteredClipping, FLTrust, GeometricMedian, NormBound
from privfed.aggregation.rules import FedAvg, MultiKrum, NearestNeighbourMixing
from privfed.agreement import Validator
from privfed.consortium import Consortium, Plaintext
from privfed.contribution.cosine import Cgsv
from privfed.contribution.leave_one_out import LeaveOneOut
from privfed.contribution.trajectory import Angular, FedTsv, TrajectoryGame
from privfed.decision import Fallback, decide
from privfed.engines.local import simulate
from privfed.engines.plaintext import Combined, combine
from privfed.errors import CohortError, OpeningRefusedError, RoundSkippedError, UnsupportedInThisModeError
from privfed.he.codec import dequantise, quantise
from privfed.he.params import CkksParams
from privfed.he.product_params import ProductParams
from privfed.policy import OpeningPolicy
from privfed.update import Layout

PARAMS = CkksParams.standard(bound=1.0)
LAYOUT = Layout(names=("w",), shapes=((50,),))
Make = Callable[..., Consortium]


def some_rows(count: int = 5) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {f"bank_{index}": rng.uniform(-1, 1, LAYOUT.size) for index in range(count)}


def combined(rows: Mapping[str, np.ndarray], rule: Any, **changes: Any) -> Combined:
    grids = {name: quantise(row, PARAMS)[0] for name, row in rows.items()}
    terms: dict[str, Any] = {"layout": LAYOUT, "weights": dict.fromkeys(rows, 1.0), "policy": OpeningPolicy(), "params": PARAMS, "round": 3}
    return combine(grids, rule=rule, **(terms | changes))


def test_real_proportions_become_integer_coefficients_that_use_the_whole_sum() -> None:
    result = combined(some_rows(), GeometricMedian())
    assert sum(result.coefficients.values()) == PARAMS.weight_sum
    assert result.aggregate is not None
    assert result.aggregate.coefficients == result.coefficients
    np.testing.assert_array_equal(result.movement.values, result.aggregate.vector.values)


def test_a_rule_that_shortens_moves_the_model_by_less_than_the_mean_that_is_opened() -> None:
    rows = some_rows()
    result = combined(rows, NormBound(max_norm=0.5))
    shortened = [row * 0.5 / np.linalg.norm(row) for row in rows.values()]
    # A share is off by 1/4096, a coordinate of an update by half a step; coordinates are at most one, and the sum is of five.
    np.testing.assert_allclose(result.movement.values, np.mean(shortened, axis=0), atol=5 * (1 / 4096 + PARAMS.step))
    assert result.aggregate is not None
    assert np.abs(result.movement.values).max() < 0.5 * np.abs(result.aggregate.vector.values).max()


def test_a_rule_that_sees_every_update_has_no_aggregate_that_could_be_opened() -> None:
    rows = some_rows()
    result = combined(rows, CoordinateMedian())
    assert result.aggregate is None
    assert result.coefficients == dict.fromkeys(rows, 1)
    np.testing.assert_allclose(result.movement.values, np.median(list(rows.values()), axis=0), atol=PARAMS.step)


def test_scores_go_in_and_come_out() -> None:
    result = combined(some_rows(), Cgsv(), scores={"absent": 0.5, "bank_0": 0.7})
    assert result.scores["absent"] == 0.5
    assert result.scores["bank_0"] != 0.7
    assert combined(some_rows(), FedAvg(), scores={"absent": 0.5}).scores == {"absent": 0.5}


def test_the_policy_holds_for_real_proportions() -> None:
    rows = dict(list(some_rows().items())[:3])
    combined(rows, GeometricMedian())
    with pytest.raises(RoundSkippedError, match="the rule leaves .* effective clients.*; nothing was summed"):
        combined(rows, GeometricMedian(), policy=OpeningPolicy(min_effective_clients=3.5))
    with pytest.raises(OpeningRefusedError, match="one client would be more"):
        combined(rows, FedAvg(), weights={"bank_0": 9.0, "bank_1": 1.0, "bank_2": 1.0})


# ---------------------------------------------------------------- the same decisions as under encryption

SEALED = ProductParams.exact(bound=2.0)
NAMES = tuple(f"bank_{index:02}" for index in range(6))
SCORED: tuple[Any, ...] = (
    MultiKrum(byzantine=1, keep=3),
    MultiKrum(byzantine=1, keep=1),
    MultiKrum(byzantine=2, keep=3),
    NearestNeighbourMixing(byzantine=1, rule=GeometricMedian()),
    GeometricMedian(),
    NormBound(max_norm=0.3),
    FLTrust(),
    Cgsv(),
    FedTsv(),
    FedTsv.published(),
    FedTsv(game=TrajectoryGame(distance=Angular())),
    LeaveOneOut(),
)


def ordinary() -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.normal(size=LAYOUT.size) / 10 + rng.normal(size=(6, LAYOUT.size)) / 20


def changed(rows: Any, change: np.ndarray) -> np.ndarray:
    values = ordinary()
    values[rows] = change
    return values


SITUATIONS: Mapping[str, Callable[[], np.ndarray]] = {
    "an ordinary round": ordinary,
    "one sends nothing": lambda: changed(0, np.zeros(LAYOUT.size)),
    "one sends little": lambda: changed(0, 0.03 * ordinary()[1]),
    "one sends next to nothing": lambda: changed(0, 1e-4 * ordinary()[1]),
    "two send little": lambda: changed([0, 1], ordinary()[1:3] * [[3e-3], [6e-3]]),
    "one sends much": lambda: changed(0, 1.9 * ordinary()[1] / np.linalg.norm(ordinary()[1])),
    "two send the same": lambda: changed(0, ordinary()[1]),
    "one alone goes the way of the reference": lambda: changed(slice(1, 5), -0.9 * ordinary()[1:5]),
    "all go against the reference": lambda: changed(slice(0, 5), -ordinary()[:5]),
    "most send nothing": lambda: changed(slice(1, 5), np.zeros((4, LAYOUT.size))),
    "nobody sends anything": lambda: np.zeros((6, LAYOUT.size)),
}
POLICIES = (OpeningPolicy(), OpeningPolicy(max_share=0.3), OpeningPolicy(min_effective_clients=4.6))
BEFORE: tuple[dict[str, float], ...] = ({}, dict.fromkeys(NAMES[:5], 0.2) | {"bank_01": 0.05})


@pytest.mark.parametrize("rule", SCORED, ids=lambda rule: rule.name[:60])
def test_a_round_in_the_clear_and_an_encrypted_one_decide_the_same(meet: Any, rule: Any) -> None:
    validator = "bank_05" if rule.needs_reference else None
    named = None if validator is None else Validator(name=validator, commitment=bytes(32), public=True)
    seen = set()
    opening = np.random.default_rng(1)
    for policy in POLICIES:
        agreement = meet(count=6, rule=rule, validator=named, params=SEALED, policy=policy, layout=LAYOUT).agreement
        for (situation, make), before in itertools.product(SITUATIONS.items(), BEFORE):
            grids = {name: quantise(row, SEALED)[0] for name, row in zip(NAMES, make(), strict=True)}
            rows = np.stack([dequantise(grid, 1, SEALED) for grid in grids.values()])
            # What is opened is rounded.
            error = opening.uniform(-1, 1, (6, 6)) * SEALED.scalar_error(LAYOUT.size)
            products = rows @ rows.T + np.triu(error) + np.triu(error, 1).T
            sealed = decide(agreement, NAMES, products, scores=before, assurance="RECOMPUTED", digest=bytes(32))
            try:
                clear = combine(
                    grids,
                    layout=LAYOUT,
                    weights=dict.fromkeys(NAMES, 1.0),
                    rule=rule,
                    policy=policy,
                    params=SEALED,
                    round=0,
                    scores=before,
                    validator=validator,
                )
            except RoundSkippedError:
                clear = None
            where = (rule.name, situation, policy, bool(before))
            if isinstance(rule, FedTsv) and isinstance(rule.game.distance, Angular) and {"little", "next"} & set(situation.split()):
                continue  # an angle counts in full, and of a short update the opening shows it in part
            fallback = Fallback.SKIPPED if clear is None or clear.fallback is None else clear.fallback
            assert sealed.fallback is fallback, (where, sealed.reason)
            seen.add(fallback)
            if clear is not None:
                assert max(abs(sealed.coefficients[name] - clear.coefficients[name]) for name in NAMES) <= 1, where
                assert sealed.scores == pytest.approx(dict(clear.scores), abs=1e-6), where
    assert Fallback.SKIPPED in seen or isinstance(rule, NearestNeighbourMixing)  # the situations tell decisions apart


def test_a_round_in_the_clear_that_may_not_be_combined_is_skipped_and_the_next_one_is_held(
    model: torch.nn.Module, non_private: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    real = OpeningPolicy.check_chosen

    def first(self: OpeningPolicy, coefficients: Any) -> None:
        calls.append(coefficients)
        real(OpeningPolicy(min_effective_clients=100.0) if len(calls) == 1 else self, coefficients)

    monkeypatch.setattr(OpeningPolicy, "check_chosen", first)
    history = simulate(non_private(count=5, keys=Plaintext(), rule=GeometricMedian()), model, rounds=2)
    assert [(lost.round, "nothing was summed" in lost.reason) for lost in history.failed] == [(0, True)]
    assert [(summary.record.round, summary.record.fallback) for summary in history.rounds] == [(1, "NONE")]


def test_without_its_reference_a_round_in_the_clear_is_not_held() -> None:
    rows = some_rows()
    assert combined(rows, NormBound(max_norm=1.0), validator="bank_4").coefficients["bank_4"] == 0
    with pytest.raises(CohortError, match="the reference of 'bank_9' is missing; nothing was summed"):
        combined(rows, FLTrust(), validator="bank_9")
    with pytest.raises(CohortError, match="demands 5 clients, and 4 contribute"):
        combined(rows, FLTrust(), validator="bank_4", policy=OpeningPolicy(min_clients=5))


def test_a_rule_about_a_centre_moves_the_model_by_its_share_of_the_reference() -> None:
    rows = some_rows()
    result = combined(rows, CenteredClipping(radius=1e-6), validator="bank_4")
    # All differences are cut to a millionth: what is left is the centre.
    np.testing.assert_allclose(result.movement.values, rows["bank_4"], atol=1e-6 + PARAMS.step)


def test_estimators_in_the_clear_draw_anew_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(Cgsv, "step", lambda self, scores, matrix: seeds.append(matrix.seed) or ({}, uniform(matrix)))
    uniform = lambda matrix: Mixture(weights=dict.fromkeys(matrix.names, 1.0))  # noqa: E731
    for number in (3, 4):
        combined(some_rows(), Cgsv(), round=number)
    assert seeds == [3, 4]


@pytest.mark.parametrize(
    "rule",
    [NormBound(max_norm=0.1), GeometricMedian(), CoordinateMedian(), Krum(byzantine=1), Cgsv(length=0.05)],
    ids=lambda rule: rule.name,
)
def test_a_run_in_the_clear_takes_every_kind_of_rule(model: torch.nn.Module, non_private: Make, rule: Any) -> None:
    history = simulate(non_private(count=5, keys=Plaintext(), rule=rule), model, rounds=2)
    assert history.rule == rule.name
    assert not np.array_equal(history.model.values, history.initial.values)
    assert history.grid_error_max == (None if isinstance(rule, CoordinateMedian | Krum) else 0)


@pytest.mark.parametrize(
    "rule", [GeometricMedian(), CoordinateMedian(), Krum(byzantine=1), FedTsv(), Cgsv()], ids=lambda rule: rule.name[:20]
)
def test_an_encrypted_run_takes_none_that_looks_at_updates(non_private: Make, rule: Any) -> None:
    with pytest.raises(UnsupportedInThisModeError, match="nothing was started; take"):
        non_private(count=5, rule=rule)


@pytest.mark.parametrize("rule", [FLTrust(), FedTsv()], ids=lambda rule: rule.name[:20])
def test_a_rule_about_a_reference_that_nobody_provides_is_refused(non_private: Make, rule: Any) -> None:
    with pytest.raises(
        UnsupportedInThisModeError, match="needs a reference, which nobody in this consortium provides; nothing was started"
    ):
        non_private(count=5, rule=rule, keys=Plaintext())


def test_declared_noise_is_taken_out_of_the_distances_by_which_a_rule_chooses() -> None:
    """Clients with noise around the common update, two of them with much: without declarations, the geometric median turns from these."""
    rng = np.random.default_rng(1)
    noise = {f"bank_{index}": 0.05 if index < 3 else 0.2 for index in range(5)}
    rows = {name: np.full(LAYOUT.size, 0.1) + rng.normal(0, deviation, LAYOUT.size) for name, deviation in noise.items()}
    declared = dict.fromkeys(noise, 0.2**2 * LAYOUT.size)
    share = {}
    for energies in ({}, declared):
        result = combined(rows, GeometricMedian(), noise_energy=energies)
        share[len(energies)] = sum(result.coefficients[name] for name in ("bank_3", "bank_4")) / sum(result.coefficients.values())
    assert share[0] < 0.2
    assert share[5] > 1.3 * share[0]
