"""False alarms about received models, on tables, widths, seeds and ways of training that had no say in where the limits are."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.audit_grid import public_table
from privfed.attacks.imprinting import imprint
from privfed.data.samples import Samples
from privfed.training.dpsgd import train
from privfed.training.loss import PerSampleLoss, binary_cross_entropy, cross_entropy
from privfed.training.mechanism import DpSgd, NonPrivate
from privfed.training.model import mlp, values_of
from privfed.training.received import imprint_signs
from privfed.update import PlainVector

RECORDS, BATCH, EPOCHS = 2000, 100, 20
WIDTHS = ((16,), (48, 24), (200, 40), (600,))
SEEDS = (101, 102, 103)


@dataclass(frozen=True, kw_only=True, eq=False)
class Data:
    samples: Samples
    outputs: int

    @property
    def loss(self) -> PerSampleLoss:
        return binary_cross_entropy if self.outputs == 1 else cross_entropy


def data_of(rows: np.ndarray, labels: np.ndarray, *, outputs: int) -> Data:
    names = tuple(f"column {index}" for index in range(rows.shape[1]))
    taken = slice(0, RECORDS)
    return Data(
        samples=Samples(features=rows[taken].astype(np.float32), labels=labels[taken].astype(np.int64), groups=None, columns=names),
        outputs=outputs,
    )


def load(name: str, folder: Path) -> Data:
    if name == "MNIST":
        with np.load(folder / "mnist.npz") as pixels:
            return data_of(pixels["x_train"][:RECORDS].reshape(RECORDS, -1) / 255.0, pixels["y_train"], outputs=10)
    if name == "Adult":
        table = public_table(folder / "adult.csv.gz", label="income", positive=">50K")
    else:
        table = public_table(folder / "german_credit.csv.gz", label="CLASSIFICATION", positive="0")
    return data_of(table.rows, table.labels, outputs=1)


def by_torch(kind: Callable[..., torch.optim.Optimizer], **options: float) -> Callable[[nn.Module, Data, int], PlainVector]:
    def run(model: nn.Module, data: Data, seed: int) -> PlainVector:
        optimizer = kind(model.parameters(), **options)
        rows, labels = torch.tensor(data.samples.features), torch.tensor(data.samples.labels)
        order = torch.Generator().manual_seed(seed)
        for _ in range(EPOCHS):
            for part in torch.randperm(len(rows), generator=order).split(BATCH):
                optimizer.zero_grad()
                data.loss(model(rows[part]), labels[part]).mean().backward()
                optimizer.step()
        return values_of(model)

    return run


def by_privfed(mechanism: Callable[[int, int], DpSgd | NonPrivate]) -> Callable[[nn.Module, Data, int], PlainVector]:
    def run(model: nn.Module, data: Data, seed: int) -> PlainVector:
        start, steps = values_of(model), EPOCHS * len(data.samples) // BATCH
        update = train(model, start, data.samples, mechanism=mechanism(steps, seed), loss=data.loss).update_values
        return PlainVector(layout=start.layout, values=start.values + update.values)

    return run


def dp_sgd(noise_multiplier: float) -> Callable[[int, int], DpSgd]:
    def mechanism(steps: int, seed: int) -> DpSgd:
        rate = BATCH / RECORDS
        facts = {"sample_rate": rate, "expected_batch_size": BATCH, "steps": steps, "max_records": RECORDS}
        return DpSgd(noise_multiplier=noise_multiplier, max_grad_norm=1.0, learning_rate=0.5, **facts)

    return mechanism


def plain(steps: int, seed: int) -> NonPrivate:
    return NonPrivate(learning_rate=0.1, batch_size=BATCH, steps=steps, seed=seed)


TRAININGS = {
    "SGD": by_privfed(plain),
    "momentum": by_torch(torch.optim.SGD, lr=0.1, momentum=0.9),
    "momentum and weak decay": by_torch(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=5e-4),
    "momentum and strong decay": by_torch(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-2),
    "AdamW": by_torch(torch.optim.AdamW, lr=1e-3, weight_decay=1e-2),
    "DP-SGD, noise 1": by_privfed(dp_sgd(1.0)),
    "DP-SGD, noise 4": by_privfed(dp_sgd(4.0)),
}


def digits_network() -> nn.Module:
    first = nn.Sequential(nn.Unflatten(1, (1, 28, 28)), nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU())
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(400, 48), nn.ReLU(), nn.Linear(48, 10))


def networks(name: str, data: Data) -> Iterator[Callable[[], nn.Module]]:
    for hidden in WIDTHS:
        yield lambda hidden=hidden: mlp(data.samples.features.shape[1], hidden=hidden, outputs=data.outputs)
    if name == "MNIST":
        yield digits_network


def trapped(start: PlainVector, rows: np.ndarray) -> PlainVector:
    """Every neuron of the first layer fires for some four records of a thousand."""
    tensors = start.layout.unflatten(start)
    bias = -np.quantile(rows @ tensors["0.weight"].T, 0.996, axis=0)
    return start.layout.flatten(tensors | {"0.bias": bias})


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["Adult", "German credit", "MNIST"])
def test_ordinary_models_raise_no_alarm_and_made_ones_do(name: str, shared_data: Path) -> None:
    data = load(name, shared_data)
    rows = data.samples.features
    ordinary, alarms, made, found = 0, Counter[str](), 0, 0
    for number, network in enumerate(networks(name, data)):
        for seed in SEEDS:
            for how, training in TRAININGS.items():
                with torch.random.fork_rng():
                    torch.manual_seed(seed)
                    model = training(network(), data, seed)
                ordinary += 1
                alarms[how] += bool(imprint_signs(model, rows=rows))
                if number < len(WIDTHS) and how == "SGD":
                    rng = np.random.default_rng(seed)
                    for bad in (imprint(model, rows.astype(np.float64), rng=rng), trapped(model, rows.astype(np.float64))):
                        made, found = made + 1, found + bool(imprint_signs(bad, rows=rows))
    print(f"{name}: {alarms.total()} of {ordinary} ordinary models raised an alarm {dict(+alarms)}; {found} of {made} made ones did")
    assert alarms.total() == 0
    assert found == made
