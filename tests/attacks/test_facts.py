from typing import Any

import numpy as np
import pytest
import torch

from privfed.attacks.facts import BinaryLoss, Continuous, GaussianNoise, OneHot, Sgd, SoftmaxLoss, TableSchema, TrainingFacts

AMOUNT = Continuous(name="amount", low=-1.0, high=3.0)
KIND = OneHot(name="kind", categories=("a", "b", "c"))


def test_a_schema_places_columns_in_their_order() -> None:
    schema = TableSchema(columns=(KIND, AMOUNT, KIND, AMOUNT))
    assert schema.width == 8
    assert schema.continuous.tolist() == [3, 7]
    assert schema.blocks == (slice(0, 3), slice(4, 7))
    assert schema.low.tolist() == [0, 0, 0, -1, 0, 0, 0, -1]
    assert schema.high.tolist() == [1, 1, 1, 3, 1, 1, 1, 3]


@pytest.mark.parametrize(("low", "high"), [(1.0, 1.0), (2.0, 1.0), (float("nan"), 1.0), (0.0, float("inf"))])
def test_a_range_without_finite_ordered_ends_is_refused(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="finite ends low < high"):
        Continuous(name="amount", low=low, high=high)


def test_a_block_of_one_category_and_a_schema_without_columns_are_refused() -> None:
    with pytest.raises(ValueError, match="at least two categories"):
        OneHot(name="kind", categories=("a",))
    with pytest.raises(ValueError, match="at least one column"):
        TableSchema(columns=())


@pytest.mark.parametrize(
    "changes", [{"learning_rate": 0.0}, {"momentum": 1.0}, {"momentum": -0.1}, {"weight_decay": -1.0}, {"learning_rate": float("nan")}]
)
def test_impossible_optimisers_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="learning_rate > 0"):
        Sgd(**({"learning_rate": 0.1} | changes))


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (BinaryLoss, {"positive_weight": 0.0}),
        (GaussianNoise, {"noise_multiplier": -1.0, "max_grad_norm": 1.0}),
        (GaussianNoise, {"noise_multiplier": 1.0, "max_grad_norm": 0.0}),
        (TrainingFacts, {"optimizer": Sgd(learning_rate=0.1), "loss": SoftmaxLoss(), "steps": 0, "batch_size": 4}),
        (TrainingFacts, {"optimizer": Sgd(learning_rate=0.1), "loss": SoftmaxLoss(), "steps": 1, "batch_size": 0}),
    ],
)
def test_impossible_facts_are_refused(kind: type, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        kind(**arguments)


@pytest.mark.parametrize("steps", [1, 2, 7])
@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.0, 0.3), (0.9, 0.0), (0.9, 0.3)])
def test_decay_and_response_are_those_of_torch(steps: int, momentum: float, decay: float) -> None:
    for weight, gradient in ((1.0, 0.0), (0.0, 1.0)):
        parameter = torch.nn.Parameter(torch.tensor([weight], dtype=torch.float64))
        engine = torch.optim.SGD([parameter], lr=0.2, momentum=momentum, weight_decay=decay)
        for _ in range(steps):
            parameter.grad = torch.tensor([gradient], dtype=torch.float64)
            engine.step()
        sgd = Sgd(learning_rate=0.2, momentum=momentum, weight_decay=decay)
        expected = sgd.decayed(steps) if weight else -sgd.response(steps)
        np.testing.assert_allclose(parameter.item(), expected, rtol=1e-12)
