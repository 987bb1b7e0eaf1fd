import math

import pytest
import torch
from torch import nn

from privfed.training.objective import FedProx, add_correction, flat


@pytest.mark.parametrize("bad", [-0.1, math.nan, math.inf])
def test_fedprox_refuses_a_strength_that_is_negative_or_not_finite(bad: float) -> None:
    with pytest.raises(ValueError, match="proximal_weight"):
        FedProx(proximal_weight=bad)


def test_fedprox_is_the_gradient_of_the_proximal_term() -> None:
    weights = torch.tensor([1.0, -2.0, 0.5], requires_grad=True)
    start = torch.tensor([0.0, 1.0, 0.5])
    (0.3 / 2 * (weights - start).square().sum()).backward()
    assert weights.grad is not None
    assert FedProx(proximal_weight=0.3).gradient(weights.detach(), start).tolist() == pytest.approx(weights.grad.tolist())


def test_a_correction_is_added_to_existing_gradients_and_stands_for_missing_ones() -> None:
    parameters = [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(1))]
    parameters[0].grad = torch.full((2, 2), 10.0)
    add_correction(parameters, torch.arange(5.0), FedProx(proximal_weight=2.0))
    assert parameters[0].grad.tolist() == [[12.0, 10.0], [8.0, 6.0]]
    assert parameters[1].grad is not None
    assert parameters[1].grad.tolist() == [-6.0]


def test_a_correction_of_another_shape_is_refused() -> None:
    class Short:
        def gradient(self, weights: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
            return weights[1:]

    with pytest.raises(ValueError, match=r"expected a correction of shape \(3,\), got \(2,\)"):
        add_correction([nn.Parameter(torch.ones(3))], torch.zeros(3), Short())


def test_flat_is_a_copy() -> None:
    parameter = nn.Parameter(torch.ones(3))
    flat([parameter]).add_(1.0)
    assert parameter.tolist() == [1.0, 1.0, 1.0]
