import numpy as np
import pytest
import torch
from torch import nn

from privfed.attacks.imprinting import imprint
from privfed.errors import ModelMismatchError, UnsupportedModelError
from privfed.training.model import mlp, values_of
from privfed.training.received import check_received, imprint_signs
from privfed.update import PlainVector

ROWS = np.random.default_rng(0).normal(size=(1000, 30)) * np.exp(np.random.default_rng(1).normal(size=30))


def fresh(seed: int, *, inputs: int = 30, hidden: tuple[int, ...] = (64, 32), outputs: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return mlp(inputs, hidden=hidden, outputs=outputs)


def trained(seed: int, *, epochs: int) -> nn.Module:
    """Learnt until it remembers: neurons die and align as far as they ever do."""
    model = fresh(seed)
    rows, labels = torch.tensor(ROWS, dtype=torch.float32), torch.tensor(ROWS[:, 0] + ROWS[:, 1] ** 2 > 1).float()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
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
    weight = rng.normal(size=tensors["0.weight"].shape) / ROWS.std(axis=0)
    projections = ROWS @ weight.T
    tensors |= {"0.weight": weight, "0.bias": -np.quantile(projections, 0.996, axis=0)}
    return start.layout.flatten(tensors)


def test_fresh_and_trained_networks_show_no_sign() -> None:
    shapes = [{}, {"inputs": 4, "hidden": (256, 32)}, {"hidden": (512,), "outputs": 10}, {"inputs": 200, "hidden": (16, 16, 16)}]
    for seed in range(10):
        for shape in shapes:
            assert imprint_signs(values_of(fresh(seed, **shape))) == ()
        assert imprint_signs(values_of(fresh(seed)), rows=ROWS) == ()
    for epochs in (1, 40):
        assert imprint_signs(values_of(trained(0, epochs=epochs)), rows=ROWS) == ()
    torch.manual_seed(0)
    images = nn.Sequential(nn.Unflatten(1, (1, 6, 6)), nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 10))
    assert imprint_signs(values_of(images)) == ()


@pytest.mark.parametrize("hidden", [(64, 32), (256, 16), (64,)])
def test_an_imprinted_layer_shows(hidden: tuple[int, ...]) -> None:
    model = imprint(values_of(fresh(0, hidden=hidden)), ROWS, rng=np.random.default_rng(0))
    assert imprint_signs(model)


def test_trap_weights_show_to_whoever_has_records() -> None:
    model = trapped(fresh(0))
    assert imprint_signs(model) == ()
    assert imprint_signs(model, rows=ROWS[:100]) == ()
    assert imprint_signs(model, rows=ROWS) == ("many neurons of 0.weight fire for hardly any record",)


def test_a_client_trains_on_the_agreed_model_and_refuses_any_other() -> None:
    agreed = values_of(fresh(0))
    check_received(agreed, pinned=agreed.digest, rows=ROWS)
    nudged = agreed.values.copy()
    nudged[5] = np.nextafter(nudged[5], 1.0)
    for other in (values_of(fresh(1)), PlainVector(layout=agreed.layout, values=nudged)):
        with pytest.raises(ModelMismatchError, match="not the one that was agreed on; nothing was trained"):
            check_received(other, pinned=agreed.digest)


def test_a_client_refuses_an_agreed_model_that_looks_made_to_read_records() -> None:
    made = imprint(values_of(fresh(0)), ROWS, rng=np.random.default_rng(0))
    with pytest.raises(UnsupportedModelError, match="made to read records: neurons of 0.weight compare the same number"):
        check_received(made, pinned=made.digest)
    trap = trapped(fresh(0))
    check_received(trap, pinned=trap.digest)
    with pytest.raises(UnsupportedModelError, match="fire for hardly any record"):
        check_received(trap, pinned=trap.digest, rows=ROWS)
