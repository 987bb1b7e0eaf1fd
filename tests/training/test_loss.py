import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from privfed.errors import UnsupportedDataError, UnsupportedModelError
from privfed.training.loss import (
    BinaryCrossEntropy,
    PerSampleLoss,
    binary_cross_entropy,
    check_loss,
    cross_entropy,
    derivative_of,
    unchecked,
)
from privfed.training.model import mlp, values_of
from privfed.training.probe import perturbed_copy, synthetic_records

torch.set_num_threads(1)
LABELS = np.array([0, 1, 0])


def test_binary_cross_entropy_is_minus_the_log_probability_of_each_label() -> None:
    logits = torch.tensor([0.3, -2.0, 5.0])
    labels = torch.tensor([1, 1, 0])
    expected = [math.log1p(math.exp(-0.3)), math.log1p(math.exp(2.0)), math.log1p(math.exp(5.0))]
    assert binary_cross_entropy(logits, labels).tolist() == pytest.approx(expected, rel=1e-6)
    assert torch.equal(binary_cross_entropy(logits[:, None], labels), binary_cross_entropy(logits, labels))


def test_a_positive_weight_multiplies_the_loss_of_positive_records_only() -> None:
    logits, labels = torch.tensor([0.3, -2.0, 5.0]), torch.tensor([1, 0, 1])
    weighted = BinaryCrossEntropy(positive_weight=40.0)(logits, labels)
    assert weighted.tolist() == pytest.approx((binary_cross_entropy(logits, labels) * torch.tensor([40.0, 1.0, 40.0])).tolist(), rel=1e-6)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_positive_weight_that_is_not_positive_and_finite_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="positive_weight"):
        BinaryCrossEntropy(positive_weight=bad)


def test_cross_entropy_is_minus_the_log_probability_of_each_label() -> None:
    logits, labels = torch.tensor([[1.0, 2.0, 0.0], [0.0, 0.0, 0.0]]), torch.tensor([1, 2])
    expected = [math.log(math.e + math.e**2 + 1) - 2.0, math.log(3.0)]
    assert cross_entropy(logits, labels).tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("loss", "shape"), [(binary_cross_entropy, (3, 2)), (binary_cross_entropy, (1, 3)), (cross_entropy, (3,)), (cross_entropy, (3, 1))]
)
def test_outputs_of_another_shape_are_refused(loss: PerSampleLoss, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected"):
        loss(torch.zeros(shape), torch.tensor(LABELS))


@pytest.mark.parametrize(("loss", "outputs", "bad"), [(binary_cross_entropy, 1, 2), (binary_cross_entropy, 1, -1), (cross_entropy, 3, 3)])
def test_labels_that_a_loss_does_not_take_are_refused_without_saying_them(loss: PerSampleLoss, outputs: int, bad: int) -> None:
    with pytest.raises(UnsupportedDataError, match="nothing was trained") as refusal:
        check_loss(mlp(4, outputs=outputs), loss, inputs=4, labels=np.array([0, 1, bad, 1]))
    assert f"{bad}" not in str(refusal.value).replace("0 to 2", "")


def test_labels_that_a_foreign_loss_does_not_take_are_refused_without_saying_them() -> None:
    def foreign(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.nll_loss(functional.log_softmax(outputs, dim=1), labels, reduction="none")

    check_loss(mlp(4, outputs=2), foreign, inputs=4, labels=LABELS)
    with pytest.raises(UnsupportedDataError, match="nothing was trained") as refusal:
        check_loss(mlp(4, outputs=2), foreign, inputs=4, labels=np.array([0, 1, 613]))
    assert "613" not in str(refusal.value)
    assert refusal.value.__cause__ is None
    assert refusal.value.__suppress_context__


@pytest.mark.parametrize(
    ("loss", "outputs"), [(binary_cross_entropy, 1), (BinaryCrossEntropy(positive_weight=100.0), 1), (cross_entropy, 2), (cross_entropy, 5)]
)
def test_the_losses_of_the_library_are_accepted(loss: PerSampleLoss, outputs: int) -> None:
    check_loss(mlp(4, outputs=outputs), loss, inputs=4, labels=LABELS)


def normalised_weights(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    weight = torch.tensor([1.0, 100.0])
    return functional.cross_entropy(outputs, labels, weight=weight, reduction="none") / weight[labels].sum()


def focal_on_batch_mean(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    losses = functional.cross_entropy(outputs, labels, reduction="none")
    return losses * losses.detach().mean()


def shifted(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(torch.roll(outputs, 1, dims=0), labels)


@pytest.mark.parametrize("loss", [normalised_weights, focal_on_batch_mean, shifted])
def test_a_loss_that_depends_on_other_records_is_refused(loss: PerSampleLoss) -> None:
    with pytest.raises(UnsupportedModelError, match="depends on the other records"):
        check_loss(mlp(4, outputs=2), loss, inputs=4, labels=LABELS)


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(reduction="sum"),
        lambda outputs, labels: cross_entropy(outputs, labels)[:, None],
        lambda outputs, labels: outputs,
        lambda outputs, labels: cross_entropy(outputs, labels)[1:],
    ],
    ids=["mean", "sum", "column", "matrix", "one short"],
)
def test_anything_but_one_loss_per_record_is_refused(loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(UnsupportedModelError, match="one loss per record"):
        check_loss(mlp(4, outputs=2), loss, inputs=4, labels=LABELS)


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.layer(features - features.mean(dim=0))


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.layer(features + 1e-9 * torch.randn_like(features))


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("module", [Centred(), nn.Sequential(nn.Linear(4, 1), nn.Softmax(dim=0))])
def test_a_model_that_mixes_records_is_refused_even_with_weights_of_zero(module: nn.Module, zero: bool) -> None:
    if zero:
        for parameter in module.parameters():
            nn.init.zeros_(parameter)
    with pytest.raises(UnsupportedModelError, match="depends on the other records"):
        check_loss(module, binary_cross_entropy, inputs=4, labels=LABELS)


@pytest.mark.parametrize("module", [nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1)), Noisy()])
def test_a_model_that_draws_from_torch_s_generator_is_refused_and_the_generator_is_put_back(module: nn.Module) -> None:
    before = torch.random.get_rng_state()
    with pytest.raises(UnsupportedModelError, match="generator"):
        check_loss(module, binary_cross_entropy, inputs=4, labels=LABELS)
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_model_of_another_width_than_the_data_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="5 columns"):
        check_loss(mlp(4), binary_cross_entropy, inputs=5, labels=LABELS)


def test_a_model_of_two_outputs_under_a_loss_of_one_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedModelError, match=r"of 4 columns: expected one output per record, .* got \(6, 2\); nothing"):
        check_loss(torch.nn.Linear(4, 2), binary_cross_entropy, inputs=4, labels=LABELS)


def test_checking_changes_neither_the_model_nor_its_mode() -> None:
    module = mlp(4).eval()
    before = values_of(module).values.tolist()
    check_loss(module, binary_cross_entropy, inputs=4, labels=LABELS)
    assert values_of(module).values.tolist() == before
    assert not module.training


def test_a_perturbed_copy_trains_has_other_weights_and_the_same_frozen_ones() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).eval()
    module[0].requires_grad_(False)
    model = perturbed_copy(module)
    assert model.training
    assert torch.equal(model[0].weight, module[0].weight)
    assert not torch.equal(model[1].weight, module[1].weight)


def test_synthetic_records_are_the_same_every_time_and_all_different() -> None:
    features, labels = synthetic_records(3)
    assert torch.equal(features, synthetic_records(3)[0])
    assert len(torch.unique(features, dim=0)) == len(labels) == 6


@pytest.mark.parametrize(("loss", "outputs"), [(binary_cross_entropy, 1), (BinaryCrossEntropy(positive_weight=3.0), 1), (cross_entropy, 3)])
def test_an_unchecked_loss_is_the_same_loss_for_labels_that_it_takes_and_keeps_its_check_of_shapes(
    loss: PerSampleLoss, outputs: int
) -> None:
    logits, labels = torch.arange(3.0 * outputs).cos().view(3, outputs), torch.tensor(LABELS)
    assert torch.equal(unchecked(loss)(logits, labels), loss(logits, labels))
    with pytest.raises(UnsupportedDataError):
        loss(logits, labels + 5)
    with pytest.raises((ValueError, IndexError)):
        unchecked(loss)(logits[:2], labels)


def test_a_loss_from_elsewhere_is_not_touched_by_unchecking() -> None:
    loss = nn.BCEWithLogitsLoss(reduction="none")
    assert unchecked(loss) is loss


@pytest.mark.parametrize(
    ("loss", "shape"),
    [
        (binary_cross_entropy, (6,)),
        (binary_cross_entropy, (6, 1)),
        (BinaryCrossEntropy(positive_weight=7.0), (6, 1)),
        (cross_entropy, (6, 3)),
        (lambda outputs, labels: 2 * cross_entropy(outputs, labels), (6, 3)),
    ],
    ids=["binary", "binary column", "weighted", "classes", "foreign"],
)
def test_the_derivative_of_a_loss_is_that_of_torch(loss: PerSampleLoss, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    outputs = (
        torch.randn(shape, generator=generator) * torch.tensor([0.1, 1, 10, 50, 90, 1e3]).view(6, *[1] * (len(shape) - 1))
    ).requires_grad_()
    labels = torch.tensor([0, 1, 1, 0, 1, 0])
    expected = torch.autograd.grad(loss(outputs, labels).sum(), outputs)[0]
    found = derivative_of(loss)(outputs.detach(), labels)
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= 8 * 2**-24 * float(expected.abs().max())


class OfItsBatch(torch.nn.Module):
    """A model that mixes records, but only in batches that are large, or hold large values."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = torch.nn.Linear(3, 1), how
        torch.nn.init.ones_(self.layer.weight)  # small random weights could hide what the model does

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "large batches" and len(x) > 16:
            x = x - x.mean(0)
        if self.how == "large values":
            x = x / x.abs().max().clamp(min=4)
        return self.layer(x)


def of_its_largest(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    losses = binary_cross_entropy(outputs, labels)
    return losses / losses.max().clamp(min=2).detach()


@pytest.mark.parametrize(
    ("model", "loss"),
    [
        (OfItsBatch("large batches"), binary_cross_entropy),
        (OfItsBatch("large values"), binary_cross_entropy),
        (torch.nn.Linear(3, 1), of_its_largest),
    ],
    ids=["large batches", "large values", "large losses"],
)
def test_records_that_mix_only_in_large_batches_or_with_large_values_are_noticed(model: torch.nn.Module, loss: Any) -> None:
    labels = np.array([0, 1])
    check_loss(OfItsBatch("never"), binary_cross_entropy, inputs=3, labels=labels)
    with pytest.raises(UnsupportedModelError, match="depends on the other records of its batch"):
        check_loss(model, loss, inputs=3, labels=labels)
