from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from privfed.aggregation.coordinatewise import CoordinateMedian, Krum
from privfed.aggregation.robust import FLTrust, GeometricMedian, NormBound
from privfed.aggregation.rules import FedAvg
from privfed.agreement import OpeningPolicy
from privfed.consortium import Consortium, Plaintext
from privfed.contribution.cosine import Cgsv
from privfed.contribution.trajectory import FedTsv
from privfed.engines.local import simulate
from privfed.engines.plaintext import Combined, combine
from privfed.errors import OpeningRefusedError, UnsupportedInThisModeError
from privfed.he.codec import quantise
from privfed.he.params import CkksParams
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
    rows = some_rows()
    with pytest.raises(OpeningRefusedError, match="one client would be more"):
        combined(
            {"bank_0": rows["bank_0"] * 1e-3, **{name: rows[name] for name in list(rows)[1:3]}}, Cgsv(), policy=OpeningPolicy(max_share=0.5)
        )


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
