import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from privfed.attacks.imprinting import imprint
from privfed.errors import UnsupportedModelError
from privfed.training import received
from privfed.training.model import mlp, values_of
from privfed.training.received import check_start, imprint_signs
from privfed.update import PlainVector

ROWS = (np.random.default_rng(0).normal(size=(1000, 30)) * np.exp(np.random.default_rng(1).normal(size=30))).astype(np.float32)
PUBLIC = ROWS.astype(np.float64)


def fresh(seed: int, *, inputs: int = 30, hidden: tuple[int, ...] = (64, 32), outputs: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return mlp(inputs, hidden=hidden, outputs=outputs)


def trained(seed: int, *, epochs: int, hidden: tuple[int, ...] = (64, 32), weight_decay: float = 0.0) -> nn.Module:
    """Learnt until it remembers, or with so strong a decay that most neurons do the same or nothing."""
    model = fresh(seed, hidden=hidden)
    rows, labels = torch.tensor(ROWS), torch.tensor(ROWS[:, 0] + ROWS[:, 1] ** 2 > 1).float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=weight_decay)
    for _ in range(epochs):
        for part in torch.randperm(len(rows)).split(100):
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(model(rows[part])[:, 0], labels[part]).backward()
            optimizer.step()
    return model


def trapped(model: nn.Module) -> PlainVector:
    """Trap weights: negative ones outweigh the positive ones, so that a neuron fires for hardly any record (Boenisch et al., section 4)."""
    start = values_of(model)
    tensors = start.layout.unflatten(start)
    rng = np.random.default_rng(0)
    weight = rng.normal(size=tensors["0.weight"].shape) / PUBLIC.std(axis=0)
    projections = PUBLIC @ weight.T
    tensors |= {"0.weight": weight, "0.bias": -np.quantile(projections, 0.996, axis=0)}
    return start.layout.flatten(tensors)


SHAPES: tuple[dict[str, Any], ...] = (
    {},
    {"inputs": 3, "hidden": (4096, 32)},
    {"inputs": 4, "hidden": (256, 32)},
    {"hidden": (512,), "outputs": 10},
    {"inputs": 200, "hidden": (16, 16, 16)},
)
INITIALISATIONS: tuple[Callable[[torch.Tensor], object], ...] = (
    nn.init.xavier_normal_,
    nn.init.kaiming_normal_,
    nn.init.orthogonal_,
    # Of three inputs, most neurons would have the same one only.
    lambda weight: nn.init.sparse_(weight, sparsity=0.5) if weight.shape[1] > 8 else weight,
    nn.init.zeros_,
)


@pytest.mark.parametrize("shape", SHAPES)
def test_fresh_networks_show_no_sign(shape: dict[str, Any]) -> None:
    for seed in range(10):
        model = fresh(seed, **shape)
        assert imprint_signs(values_of(model), rows=ROWS) == ()
        for initialise in INITIALISATIONS:
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    initialise(parameter.data)
                else:
                    nn.init.constant_(parameter, 0.1 * seed)
            assert imprint_signs(values_of(model), rows=ROWS) == ()


@pytest.mark.parametrize("weight_decay", [0.0, 1e-2])
def test_trained_networks_show_no_sign(weight_decay: float) -> None:
    for epochs in (1, 30):
        assert imprint_signs(values_of(trained(0, epochs=epochs, weight_decay=weight_decay)), rows=ROWS) == ()


@pytest.mark.nightly
@pytest.mark.parametrize("weight_decay", [0.0, 1e-3, 1e-2, 1e-1])
@pytest.mark.parametrize("hidden", [(64, 32), (256, 32), (128,)])
def test_networks_trained_for_long_show_no_sign(weight_decay: float, hidden: tuple[int, ...]) -> None:
    for seed in range(3):
        model = values_of(trained(seed, epochs=100, hidden=hidden, weight_decay=weight_decay))
        assert imprint_signs(model, rows=ROWS) == ()


def test_networks_of_images_show_no_sign() -> None:
    torch.manual_seed(0)
    images = nn.Sequential(nn.Unflatten(1, (1, 6, 5)), nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(96, 10))
    assert imprint_signs(values_of(images), rows=ROWS) == ()


def test_neurons_that_came_to_do_the_same_are_no_sign() -> None:
    """Copies of neurons, thresholds included, keep nothing apart."""
    start = values_of(fresh(0))
    tensors = start.layout.unflatten(start)
    tensors |= {name: np.repeat(tensors[name][::8], 8, axis=0) for name in ("0.weight", "0.bias")}
    assert imprint_signs(start.layout.flatten(tensors)) == ()
    tensors["0.bias"] = np.linspace(-1, 1, 64)
    assert imprint_signs(start.layout.flatten(tensors)) == ("neurons of 0.weight compare the same number of a record",)


@pytest.mark.parametrize("hidden", [(64, 32), (256, 16), (64,), (512, 512)])
def test_an_imprinted_layer_shows(hidden: tuple[int, ...]) -> None:
    for seed in range(5):
        model = imprint(values_of(fresh(seed, hidden=hidden)), PUBLIC, rng=np.random.default_rng(seed))
        assert "neurons of 0.weight compare the same number of a record" in imprint_signs(model)


def test_an_imprinted_layer_for_records_that_differ_by_less_than_hundredths_is_not_found() -> None:
    assert imprint_signs(imprint(values_of(fresh(0, hidden=(64,))), PUBLIC * 0.001, rng=np.random.default_rng(0))) == ()


@pytest.mark.parametrize(("share", "shows"), [(0.2, False), (0.35, True)])
def test_a_quarter_of_the_first_layer_is_enough(share: float, shows: bool) -> None:
    start = values_of(fresh(0, hidden=(1000, 8)))
    tensors = start.layout.unflatten(start)
    made = start.layout.unflatten(imprint(start, PUBLIC, rng=np.random.default_rng(0)))
    chosen = np.random.default_rng(1).permutation(1000)[: round(1000 * share)]
    for name in ("0.weight", "0.bias"):
        tensors[name] = tensors[name].copy()
        tensors[name][chosen] = made[name][chosen]
    found = {imprint_signs(start.layout.flatten(tensors)) != () for _ in range(20)}
    assert found == {shows}


def test_a_later_layer_that_is_imprinted_shows() -> None:
    start = values_of(fresh(0))
    tensors = start.layout.unflatten(start)
    tensors |= {"2.weight": np.tile(tensors["2.weight"][:1], (32, 1)), "2.bias": np.linspace(-1, 1, 32)}
    assert imprint_signs(start.layout.flatten(tensors)) == ("neurons of 2.weight compare the same number of a record",)


def test_of_large_layers_a_part_is_looked_at() -> None:
    """A million pairs of neurons would take gigabytes."""
    start = values_of(fresh(0, inputs=8, hidden=(60_000,)))
    tracemalloc.start()
    try:
        assert imprint_signs(start) == ()
        assert tracemalloc.get_traced_memory()[1] < 4 * 256 * 60_000 * 8
    finally:
        tracemalloc.stop()


def test_trap_weights_show_to_whoever_has_records() -> None:
    model = trapped(fresh(0))
    assert imprint_signs(model) == ()
    assert imprint_signs(model, rows=ROWS[:100]) == ()
    assert imprint_signs(model, rows=ROWS) == ("many neurons of 0.weight fire for hardly any record",)


def test_records_of_which_few_differ_are_no_sign() -> None:
    """Then half of any layer fires for hardly any of them."""
    rows = np.zeros((2000, 30), dtype=np.float32)
    rows[:10] = 10.0
    for seed in range(5):
        assert imprint_signs(values_of(fresh(seed)), rows=rows) == ()


def test_a_model_that_looks_made_to_read_records_is_refused_with_what_to_do() -> None:
    made = imprint(values_of(fresh(0)), PUBLIC, rng=np.random.default_rng(0))
    with pytest.raises(UnsupportedModelError, match="'bank_a' would train .* 0.weight compare the same .* nothing was trained"):
        check_start(made, client="'bank_a'")
    trap = trapped(fresh(0))
    check_start(trap, client="'bank_a'")
    with pytest.raises(UnsupportedModelError, match="fire for hardly any record"):
        check_start(trap, client="'bank_a'", rows=ROWS)


def test_of_many_random_directions_hardly_any_has_a_neighbour_above_the_threshold() -> None:
    rng = np.random.default_rng(0)
    for count, size in ((20_000, 3), (5000, 4), (300, 3)):
        units = rng.normal(size=(count, size))
        units /= np.linalg.norm(units, axis=1, keepdims=True)
        cosines = units[:2000] @ units.T
        cosines[np.arange(len(cosines)), np.arange(len(cosines))] = 0.0
        alike = (cosines.max(axis=1) > received._threshold(count, size)).mean()
        assert alike <= 0.01 + 3 * (0.01 / 2000) ** 0.5
        if count > 300:
            assert (cosines.max(axis=1) > 0.999).mean() > 0.05  # the control: a threshold that knows no size
