from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from privfed.data.samples import Samples
from privfed.errors import LayoutMismatchError, UnsupportedDataError, UnsupportedModelError
from privfed.training.batched import StackedClients, train_together
from privfed.training.dpsgd import train
from privfed.training.loss import BinaryCrossEntropy, PerSampleLoss, binary_cross_entropy, cross_entropy
from privfed.training.mechanism import NonPrivate
from privfed.training.model import mlp, values_of
from privfed.update import Layout, PlainVector

torch.set_num_threads(1)
INPUTS = 6
MECHANISM = NonPrivate(learning_rate=0.3, batch_size=16, steps=12, seed=5)
# Weights of at most some units in float32 after twelve steps of sums over 16 records: rounding of some 2^-24 * 16 * 12, amplified by
# the curvature of the loss a little. A wrong batch, step or weight moves updates by some 1e-2.
TOLERANCE = 2e-5


def smooth_model(outputs: int = 3) -> nn.Module:
    """Without a kink: of a ReLU, an input in the last digits around zero falls on one side or the other."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, 8), nn.Tanh(), nn.Linear(8, outputs))


def records(sizes: Sequence[int], classes: int = 3, inputs: int = INPUTS) -> list[Samples]:
    rng = np.random.default_rng(0)
    columns = tuple(f"x{index}" for index in range(inputs))
    return [
        Samples(features=rng.normal(size=(size, inputs)), labels=rng.integers(0, classes, size), groups=None, columns=columns)
        for size in sizes
    ]


@pytest.mark.parametrize(
    "loss", [cross_entropy, binary_cross_entropy, BinaryCrossEntropy(positive_weight=5.0)], ids=lambda loss: str(loss)[:30]
)
def test_clients_together_get_the_updates_that_each_gets_alone(loss: PerSampleLoss) -> None:
    model = smooth_model(3 if loss is cross_entropy else 1)
    clients = records([40, 100, 7, 1, 16, 33], classes=3 if loss is cross_entropy else 2)  # some fill no batch
    start = values_of(model)
    for number in (0, 4):
        together = train_together(model, start, clients, mechanism=MECHANISM, loss=loss, round=number)
        for result, samples in zip(together, clients, strict=True):
            alone = train(model, start, samples, mechanism=MECHANISM, loss=loss, round=number)
            assert result.steps == alone.steps
            assert result.private_randomness is False
            np.testing.assert_allclose(result.update_values.values, alone.update_values.values, atol=TOLERANCE)
            assert np.abs(alone.update_values.values).max() > 1000 * TOLERANCE
    other = train(model, start, clients[0], mechanism=MECHANISM, loss=loss, round=3)
    assert np.abs(together[0].update_values.values - other.update_values.values).max() > 100 * TOLERANCE  # another round is told apart


def test_layers_other_than_linear_are_stacked_too() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Unflatten(1, (1, 6, 6)), nn.Conv2d(1, 3, 3), nn.GroupNorm(1, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 3))
    clients = records([20, 30], inputs=36)
    start = values_of(model)
    for result, samples in zip(train_together(model, start, clients, mechanism=MECHANISM, loss=cross_entropy), clients, strict=True):
        alone = train(model, start, samples, mechanism=MECHANISM, loss=cross_entropy)
        np.testing.assert_allclose(result.update_values.values, alone.update_values.values, atol=5 * TOLERANCE)


def test_frozen_weights_stay_as_they_are_and_are_not_in_the_update() -> None:
    model = smooth_model()
    model[0].requires_grad_(False)  # type: ignore[index, operator]
    clients = records([20, 30])
    result = train_together(model, values_of(model), clients, mechanism=MECHANISM, loss=cross_entropy)[1]
    alone = train(model, values_of(model), clients[1], mechanism=MECHANISM, loss=cross_entropy)
    assert result.update_values.layout == alone.update_values.layout
    np.testing.assert_allclose(result.update_values.values, alone.update_values.values, atol=TOLERANCE)


def test_no_argument_is_changed() -> None:
    model = smooth_model().eval()
    clients = records([20, 30])
    before = values_of(model).values.copy()
    start = PlainVector(layout=values_of(model).layout, values=before + 1)
    features = clients[0].features.copy()
    state = torch.random.get_rng_state()
    train_together(model, start, clients, mechanism=MECHANISM, loss=cross_entropy)
    np.testing.assert_array_equal(values_of(model).values, before)
    np.testing.assert_array_equal(clients[0].features, features)
    assert not model.training
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_what_training_alone_refuses_is_refused() -> None:
    model, clients = smooth_model(), records([20, 30])
    start = values_of(model)
    with pytest.raises(UnsupportedModelError, match="nothing was trained"):
        train_together(nn.Sequential(nn.Linear(INPUTS, 3), nn.BatchNorm1d(3)), start, clients, mechanism=MECHANISM, loss=cross_entropy)
    with pytest.raises(UnsupportedDataError, match="nothing was trained"):
        train_together(model, start, records([20, 30], classes=5), mechanism=MECHANISM, loss=cross_entropy)
    small = PlainVector(layout=Layout(names=("w",), shapes=((1,),)), values=[0])
    with pytest.raises(LayoutMismatchError, match="nothing was trained"):
        train_together(model, small, clients, mechanism=MECHANISM, loss=cross_entropy)
    exploding = NonPrivate(learning_rate=1e30, batch_size=16, steps=12, seed=5)
    with pytest.raises(ValueError, match="weights stay finite"):
        train_together(mlp(INPUTS, outputs=3), values_of(mlp(INPUTS, outputs=3)), clients, mechanism=exploding, loss=cross_entropy)


def test_no_client_and_clients_of_different_columns_are_refused() -> None:
    model = smooth_model()
    for clients in ([], [*records([5]), *records([5], inputs=INPUTS + 1)]):
        with pytest.raises(ValueError, match="records of the same columns"):
            train_together(model, values_of(model), clients, mechanism=MECHANISM, loss=cross_entropy)


class LooksAtValues(nn.Module):
    """Takes another path for other records, which stacked records cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(INPUTS, 3)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.linear(features) if float(features.sum()) > -1e9 else self.linear(-features)


def test_a_model_that_cannot_be_stacked_is_refused() -> None:
    model = LooksAtValues()
    with pytest.raises(UnsupportedModelError, match="cannot be stacked; train its clients one by one"):
        train_together(model, values_of(model), records([20, 30]), mechanism=MECHANISM, loss=cross_entropy)


def test_clients_that_stay_stacked_train_in_each_round_as_they_do_when_stacked_anew() -> None:
    model, clients = smooth_model(), records([40, 7, 33])
    stacked = StackedClients(model, clients, mechanism=MECHANISM, loss=cross_entropy, seeds=[5, 6, 7])
    start = values_of(model)
    for number, among in ((0, [0, 1, 2]), (1, [2, 0])):
        some = stacked.train(start, round=number, among=among)
        chosen = [clients[place] for place in among]
        anew = train_together(
            model, start, chosen, mechanism=MECHANISM, loss=cross_entropy, round=number, seeds=[5 + place for place in among]
        )
        for result, expected in zip(some, anew, strict=True):
            np.testing.assert_array_equal(result.update_values.values, expected.update_values.values)
        start = PlainVector(layout=start.layout, values=start.values + some[0].update_values.values)
    alone = train(model, start, clients[2], mechanism=replace(MECHANISM, seed=7), loss=cross_entropy, round=4)
    np.testing.assert_allclose(stacked.train(start, round=4)[2].update_values.values, alone.update_values.values, atol=TOLERANCE)


def test_one_seed_for_each_client_is_demanded() -> None:
    model = smooth_model()
    with pytest.raises(ValueError, match="expected one seed for each of 2 clients, got 1"):
        train_together(model, values_of(model), records([20, 30]), mechanism=MECHANISM, loss=cross_entropy, seeds=[1])
