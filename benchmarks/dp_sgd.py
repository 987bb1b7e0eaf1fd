"""What a step of DP-SGD costs beside a step of plain SGD, and beside Opacus as it is shipped.

An MLP 30-128-64-1 in batches of 512 of 100,000 rows, and a small convolutional network on images. Ours is `privfed.training.dpsgd.train`
with all it does in production: noise from AES, Poisson samples, float64 sums, rounding to the grid. Times are CPU time of one thread;
contenders take turns, and the fastest turn of each counts. `python -m benchmarks.dp_sgd --help` says the rest.
"""

import itertools
import json
import logging
import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from opacus import PrivacyEngine
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.experiment import wide_console
from privfed.data.samples import Samples
from privfed.training.compiled import CompiledSum, compile_sum
from privfed.training.dpsgd import train
from privfed.training.loss import PerSampleLoss, binary_cross_entropy, cross_entropy
from privfed.training.mechanism import DpSgd
from privfed.training.model import mlp, values_of
from privfed.training.randomness import OperatingSystemRandomness, Randomness

EAGER_LIMIT, COMPILED_LIMIT, HOOKS_LIMIT, CNN_LIMIT = 1.75, 1.3, 8.0, 1.0
LEARNING_RATE = 0.1
WARM_UP = 3
TOO_SLOW = 1

Segment = Callable[[int], list[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model, the records that it is trained on, and how often it is timed: in so many turns, of so many steps each."""

    name: str
    rows: int
    batch: int
    columns: int
    turns: int
    steps: int
    loss: PerSampleLoss

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        if self.name == "mlp":
            return mlp(self.columns, hidden=(128, 64))
        # The network of Papernot et al., 2021, "Tempered sigmoid activations", table 1, with ReLU.
        return nn.Sequential(
            nn.Unflatten(1, (1, 28, 28)),
            nn.Conv2d(1, 16, 8, stride=2, padding=3),
            nn.ReLU(),
            nn.MaxPool2d(2, 1),
            nn.Conv2d(16, 32, 4, stride=2),
            nn.ReLU(),
            nn.MaxPool2d(2, 1),
            nn.Flatten(),
            nn.Linear(512, 32),
            nn.ReLU(),
            nn.Linear(32, 10),
        )

    def samples(self) -> Samples:
        rng = np.random.default_rng(0)
        features = rng.standard_normal((self.rows, self.columns), dtype=np.float32)
        labels = rng.integers(0, 2 if self.name == "mlp" else 10, size=self.rows)
        return Samples(features=features, labels=labels, groups=None, columns=tuple(f"column_{i}" for i in range(self.columns)))

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Features and labels as torch's criterion wants them."""
        samples = self.samples()
        labels = torch.tensor(samples.labels)
        return torch.tensor(samples.features), labels.float()[:, None] if self.name == "mlp" else labels

    def criterion(self) -> nn.Module:
        return nn.BCEWithLogitsLoss() if self.name == "mlp" else nn.CrossEntropyLoss()

    def mechanism(self, steps: int) -> DpSgd:
        return DpSgd(
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            sample_rate=self.batch / self.rows,
            expected_batch_size=self.batch,
            steps=steps,
            learning_rate=LEARNING_RATE,
        )


FULL = (
    Workload(name="mlp", rows=100_000, batch=512, columns=30, turns=40, steps=12, loss=binary_cross_entropy),
    Workload(name="cnn", rows=10_000, batch=256, columns=784, turns=8, steps=4, loss=cross_entropy),
)
QUICK = (
    Workload(name="mlp", rows=5_000, batch=128, columns=30, turns=2, steps=5, loss=binary_cross_entropy),
    Workload(name="cnn", rows=500, batch=16, columns=784, turns=2, steps=3, loss=cross_entropy),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a contender takes: `ratio` is to plain SGD on indexed tensors; memory beyond the data, or None if it was not measured."""

    model: str
    contender: str
    milliseconds_per_step: float
    ratio: float
    peak_megabytes: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The numbers that are promised. `accepted` is None in a quick run, which is too short to be judged."""

    eager_ratio: float
    compiled_ratio: float | None
    opacus_hooks_over_ours: float
    cnn_ours_over_opacus_hooks: float
    accepted: bool | None


def seconds_per_step(batches: Iterator[Any], step: Callable[[Any], None], steps: int) -> list[float]:
    """CPU seconds of each step, the fetching of its batch included, after a few that do not count."""
    stamps: list[float] = []
    for batch in itertools.islice(batches, WARM_UP + steps):
        step(batch)
        stamps.append(time.process_time())
    return np.diff(stamps)[WARM_UP - 1 :].tolist()


def again_and_again(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def plain(workload: Workload, batches: Callable[[torch.Tensor, torch.Tensor], Iterator[Any]]) -> Segment:
    features, labels = workload.tensors()

    def segment(steps: int) -> list[float]:
        model, criterion = workload.model(), workload.criterion()
        optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)

        def step(batch: Any) -> None:
            optimizer.zero_grad()
            criterion(model(batch[0]), batch[1]).backward()
            optimizer.step()

        return seconds_per_step(batches(features, labels), step, steps)

    return segment


def plain_tensors(workload: Workload) -> Segment:
    def batches(features: torch.Tensor, labels: torch.Tensor) -> Iterator[Any]:
        while True:
            for indices in torch.randperm(workload.rows).split(workload.batch):
                if len(indices) == workload.batch:
                    yield features[indices], labels[indices]

    return plain(workload, batches)


def plain_loader(workload: Workload) -> Segment:
    return plain(
        workload, lambda *data: again_and_again(DataLoader(TensorDataset(*data), batch_size=workload.batch, shuffle=True, drop_last=True))
    )


def opacus(workload: Workload, *, mode: str) -> Segment:
    features, labels = workload.tensors()

    def segment(steps: int) -> list[float]:
        model, criterion = workload.model(), workload.criterion()
        made = PrivacyEngine(accountant="rdp").make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), LEARNING_RATE),
            data_loader=DataLoader(TensorDataset(features, labels), batch_size=workload.batch),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            grad_sample_mode=mode,
            **({"criterion": criterion} if mode == "ghost" else {}),
        )
        private, optimizer, *criteria, loader = made
        measure = criteria[0] if criteria else criterion

        def step(batch: Any) -> None:
            optimizer.zero_grad()
            # Ghost clipping wants losses of shape (batch,).
            outputs, targets = (tensor.squeeze(-1) if workload.name == "mlp" else tensor for tensor in (private(batch[0]), batch[1]))
            measure(outputs, targets).backward()
            optimizer.step()

        return seconds_per_step(again_and_again(loader), step, steps)

    return segment


class Stamped(Randomness):
    """The operating system's randomness, which notes when a step asks for its batch. Named not private, because it is no seam of ours."""

    private = False

    def __init__(self) -> None:
        self.stamps: list[float] = []
        self._source = OperatingSystemRandomness()

    def _stream(self, count: int) -> bytes:
        return self._source._stream(count)

    def poisson_batches(self, records: int, *, sample_rate: float, steps: int) -> Iterator[NDArray[np.int64]]:
        for batch in super().poisson_batches(records, sample_rate=sample_rate, steps=steps):
            self.stamps.append(time.process_time())
            yield batch


def ours(workload: Workload, *, compiled: CompiledSum | None = None) -> Segment:
    model, samples = workload.model(), workload.samples()
    start = values_of(model)

    def segment(steps: int) -> list[float]:
        stamped = Stamped()
        # One step more, because a step ends where the next one begins.
        mechanism = workload.mechanism(WARM_UP + steps + 1)
        train(model, start, samples, mechanism=mechanism, loss=workload.loss, randomness=stamped, compiled=compiled)
        return np.diff(stamped.stamps)[WARM_UP:].tolist()

    return segment


def ours_compiled(workload: Workload) -> Segment:
    compiled = compile_sum(workload.model(), mechanism=workload.mechanism(1), loss=workload.loss, inputs=workload.columns)
    return ours(workload, compiled=compiled)


BASELINE, EAGER, COMPILED, HOOKS = "plain SGD, indexed tensors", "privfed", "privfed, compiled", "Opacus hooks"
CONTENDERS: dict[str, Callable[[Workload], Segment]] = {
    BASELINE: plain_tensors,
    "plain SGD, DataLoader": plain_loader,
    HOOKS: lambda workload: opacus(workload, mode="hooks"),
    "Opacus ghost": lambda workload: opacus(workload, mode="ghost"),
    "Opacus functorch": lambda workload: opacus(workload, mode="functorch"),
    EAGER: ours,
    COMPILED: ours_compiled,
}


def peak_megabytes(workload: Workload, contender: str) -> float:
    """Memory at its highest in a segment, beyond what the process held before. To be run in a process of its own."""
    quieten()
    CONTENDERS[contender](replace(workload, batch=8))(1)  # what is loaded on first use is not of the step
    segment = CONTENDERS[contender](workload)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before = _memory("VmRSS")
    segment(3)
    return (_memory("VmHWM") - before) / 1024


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def quieten() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)  # Opacus warns of its noise, which is what this compares with


def measure(workload: Workload, *, compiled: bool, memory: bool) -> list[Cost]:
    names = [name for name in CONTENDERS if name != COMPILED or (compiled and workload.name == "mlp")]
    segments = {name: CONTENDERS[name](workload) for name in names}
    best = dict.fromkeys(names, float("inf"))
    for _ in range(workload.turns):
        for name, segment in segments.items():
            best[name] = min(best[name], float(np.mean(segment(workload.steps))))
    peaks: dict[str, float] = {}
    if memory:
        with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
            peaks = {name: pool.apply(peak_megabytes, (workload, name)) for name in names}
    return [
        Cost(
            model=workload.name,
            contender=name,
            milliseconds_per_step=1e3 * best[name],
            ratio=best[name] / best[BASELINE],
            peak_megabytes=peaks.get(name),
        )
        for name in names
    ]


def summarise(costs: list[Cost], *, judge: bool) -> Summary:
    ratio = {(cost.model, cost.contender): cost.ratio for cost in costs}
    compiled = ratio.get(("mlp", COMPILED))
    over_ours = ratio["mlp", HOOKS] / ratio["mlp", EAGER]
    cnn = ratio["cnn", EAGER] / ratio["cnn", HOOKS]
    kept = ratio["mlp", EAGER] <= EAGER_LIMIT and over_ours >= HOOKS_LIMIT and cnn <= CNN_LIMIT
    return Summary(
        eager_ratio=ratio["mlp", EAGER],
        compiled_ratio=compiled,
        opacus_hooks_over_ours=over_ours,
        cnn_ours_over_opacus_hooks=cnn,
        accepted=(kept and compiled is not None and compiled <= COMPILED_LIMIT) if judge else None,
    )


def main(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line: a cost each, the summary last.")] = False,  # noqa: FBT002
    quick: Annotated[bool, typer.Option("--quick", help="Small, short, not compiled, without memory: does it run?")] = False,  # noqa: FBT002
) -> None:
    """Times DP-SGD. Leaves with code 1 if a promise is not kept."""
    quieten()
    costs = [cost for workload in (QUICK if quick else FULL) for cost in measure(workload, compiled=not quick, memory=not quick)]
    summary = summarise(costs, judge=not quick)
    if as_json:
        for line in (*costs, summary):
            print(json.dumps(asdict(line)))
    else:
        show(costs, summary)
    if summary.accepted is False:
        raise typer.Exit(TOO_SLOW)


def show(costs: list[Cost], summary: Summary) -> None:
    table = Table("model", "contender", "ms per step", "x plain SGD", "peak MB")
    for cost in costs:
        peak = "" if cost.peak_megabytes is None else f"{cost.peak_megabytes:.0f}"
        table.add_row(cost.model, cost.contender, f"{cost.milliseconds_per_step:.3f}", f"{cost.ratio:.2f}", peak)
    console = wide_console()
    console.print(table)
    for name, value in asdict(summary).items():
        console.print(f"{name}: {f'{value:.2f}' if isinstance(value, float) else value}")


if __name__ == "__main__":
    typer.run(main)
