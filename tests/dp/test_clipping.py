import math
from typing import Any

import numpy as np
import pytest

from privfed.dp.clipping import AdaptiveClipping


def clipping(**changes: Any) -> AdaptiveClipping:
    usual: dict[str, Any] = {"initial_norm": 1.0, "target_quantile": 0.5, "learning_rate": 0.2, "count_noise": 10.0}
    return AdaptiveClipping(**(usual | changes))


@pytest.mark.parametrize("target", [0.3, 0.5, 0.8])
def test_the_norm_finds_the_quantile_of_the_gradients_from_both_sides(target: float) -> None:
    rng = np.random.default_rng(0)
    for start in (0.01, 100.0):
        rule = clipping(target_quantile=target, initial_norm=start)
        norm = rule.initial_norm
        for _ in range(300):
            norms = rng.lognormal(0.5, 0.7, rng.poisson(500))
            count = np.where(norms <= norm, 0.5, -0.5).sum() + rng.normal(0, rule.count_noise)
            norm = rule.next_norm(norm, noised_count=float(count), expected_batch_size=500)
        reached = np.mean(rng.lognormal(0.5, 0.7, 100_000) <= norm)
        assert reached == pytest.approx(target, abs=0.06)


def test_a_step_moves_the_norm_by_what_the_paper_says_and_noise_cannot_move_it_further() -> None:
    rule = clipping(target_quantile=0.4)
    assert rule.next_norm(2.0, noised_count=-150.0, expected_batch_size=500) == pytest.approx(2.0 * math.exp(-0.2 * (0.2 - 0.4)))
    assert rule.next_norm(2.0, noised_count=1e9, expected_batch_size=500) == pytest.approx(2.0 * math.exp(-0.2 * 0.6))
    assert rule.next_norm(2.0, noised_count=-1e9, expected_batch_size=500) == pytest.approx(2.0 * math.exp(0.2 * 0.4))
    # An empty batch counts as half.
    assert rule.next_norm(2.0, noised_count=0.0, expected_batch_size=500) == pytest.approx(2.0 * math.exp(-0.2 * 0.1))


def test_a_count_that_costs_as_much_as_everything_is_refused() -> None:
    for noise_multiplier in (20.0, 21.0):
        with pytest.raises(ValueError, match="count_noise above half"):
            clipping().sum_noise_multiplier(noise_multiplier)
    assert clipping().sum_noise_multiplier(19.9) > 19.9


@pytest.mark.parametrize(
    "wrong",
    [
        {"initial_norm": 0.0},
        {"initial_norm": math.inf},
        {"learning_rate": -1.0},
        {"count_noise": math.nan},
        {"target_quantile": 0.0},
        {"target_quantile": 1.0},
        {"target_quantile": np.float32(0.5)},
        {"initial_norm": 1e-300},
        {"initial_norm": np.float32(1.0)},
        {"learning_rate": 1e3},
        {"learning_rate": True},
        {"count_noise": 1e-300},
        {"count_noise": np.int64(3)},
    ],
)
def test_a_rule_out_of_its_range_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        clipping(**wrong)
