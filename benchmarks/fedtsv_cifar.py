"""FedTSV and its rivals on CIFAR-10 with a small convolutional network. `python -m benchmarks.fedtsv_cifar --help` says the rest.

The clients, the rules and the selection are those of `benchmarks.fedtsv`; records, network and length are others.
"""

import hashlib
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from torch import nn

from benchmarks.experiment import DOSSIER, UNUSABLE, Cache, Output
from benchmarks.fedtsv import (
    ALPHA,
    CLASSES,
    KINDS,
    MALICIOUS,
    METHODS,
    OURS,
    PLAIN,
    SELECTED,
    SKEWED,
    WITHOUT,
    AsJson,
    Outcome,
    Records,
    Size,
    collect,
    draw,
    of,
    print_table,
    rows_of,
)
from privfed.data.samples import Samples

FILE = "cifar10_12k.npz"
SIDE, CHANNELS = 32, 3
FULL = Size(seeds=(0, 1), rounds=150, every=5, records=96, validation=400, batch=32, learning_rate=0.05)
QUICK = Size(seeds=(0,), rounds=4, every=2, records=32, validation=64, batch=32, learning_rate=0.05)


def network() -> nn.Module:
    """Two convolutions and a layer of scores: 26,346 weights, and no layer that mixes records."""
    return nn.Sequential(
        nn.Unflatten(1, (CHANNELS, SIDE, SIDE)),
        nn.Conv2d(CHANNELS, 16, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 8 * 8, CLASSES),
    )


def load(data: Path | None, *, quick: bool) -> Records:
    """The subset of CIFAR-10; for a quick run without the file, noise in which each class has a brighter stripe.

    Raises:
        FileNotFoundError: If there is no file and made-up pictures would not do.
    """
    folder = Path(os.environ.get("PRIVFED_DATA") or Path(__file__).parents[2] / "shared" / "data")
    path = data or folder / FILE
    if path.is_file():
        with np.load(path, allow_pickle=False) as file:
            sides = [(file[f"x_{side}"], file[f"y_{side}"].astype(np.int64)) for side in ("train", "test")]
        source = f"{path.name}, SHA-256 {hashlib.sha256(path.read_bytes()).hexdigest()}"
    elif quick:
        sides = [_made_up(count, seed) for seed, count in enumerate((4000, 300))]
        source = "made-up pictures"
    else:
        raise FileNotFoundError(f"no {FILE} found: set PRIVFED_DATA to the folder that holds it, or give it with --data")
    train, test = (_samples(pictures, labels) for pictures, labels in sides)
    return Records(train=train, test=test, source=source, network=network)


def _made_up(count: int, seed: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, count)
    pictures = rng.integers(0, 128, (count, SIDE, SIDE, CHANNELS), dtype=np.uint8)
    pictures[np.arange(count), 3 * labels] += 100
    return pictures, labels


def _samples(pictures: NDArray[np.uint8], labels: NDArray[np.int64]) -> Samples:
    """Pictures as rows, channel by channel, from -1 to 1: a range that is known without looking at anybody's records."""
    features = (pictures.transpose(0, 3, 1, 2).reshape(len(pictures), -1) / np.float32(127.5) - 1).astype(np.float32)
    return Samples(features=features, labels=labels, groups=None, columns=tuple(f"p{index}" for index in range(features.shape[1])))


def dossier(outcomes: Sequence[Outcome], table: Records, size: Size, command: str) -> str:
    """The page."""
    final = {method: float(np.mean([outcome.final for outcome in of(outcomes, method)])) for method in METHODS}
    share = {kind: float(np.mean([outcome.share[kind] for outcome in of(outcomes, OURS)])) for kind in KINDS}
    versions = ", ".join(f"{package} {version(package)}" for package in ("numpy", "torch"))
    seeds, minutes = len(size.seeds), sum(outcome.seconds for outcome in outcomes) / 60
    lines = [
        "# FedTSV on CIFAR-10",
        "",
        f"`{command}` made this page. Data: {table.source}.",
        "",
        f"**This is a small run:** {len(table.train):,} of the 50,000 training records, {size.rounds} rounds and {seeds} seeds, where the "
        "paper has ResNet-20, all records and 1000 rounds. Accuracies are of rules beside each other and not of what can be learnt.",
        "",
        f"FedTSV ends at an accuracy of {final[OURS]:.3f}, FedAvg at {final[PLAIN]:.3f}, and FedAvg without the malicious clients at "
        f"{final[WITHOUT]:.3f} (mean of {seeds} seeds, over the last quarter of the evaluations). Under FedTSV the {KINDS[MALICIOUS]} "
        f"malicious clients hold {share[MALICIOUS]:.1%} of the weight and the {KINDS[SKEWED]} with few classes {share[SKEWED]:.1%}.",
        "",
        "| rule | accuracy | lowest to highest seed | all classes | few classes | malicious | malicious, second half | seconds per run |",
        f"|{'---|' * 8}",
        *(f"| {' | '.join(row)} |" for row in rows_of(outcomes)),
        "",
        "The middle columns are the weight of each kind of client in the mean, over all rounds; of 100 clients, 70, 10 and 20 are of "
        "these kinds. Rules that sort coordinates have no weights.",
        "",
        "![Accuracy and weights](fedtsv_cifar.svg)",
        "",
        "## What was compared",
        "",
        f"* The clients are dealt as on the page about MNIST: {size.records} records each, no record twice, few classes by "
        f"Dirichlet({ALPHA}), and one fixed renaming of the labels for the malicious ones.",
        f"* {SELECTED} clients are selected per round, the same for all rules, and train one epoch: {size.steps} steps of {size.batch} "
        f"records at a learning rate of {size.learning_rate:g}. The reference is a validator's with {size.validation} other records.",
        "* The network has two convolutions and one layer of scores. Nothing was tuned for any of the rules.",
        "",
        f"All runs together took {minutes:.1f} minutes on one core. Python {platform.python_version()}, {versions}.",
    ]
    return "\n".join(lines) + "\n"


def main(
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Seconds instead of minutes; writes no page.")] = False,
    as_json: AsJson = False,
    data: Annotated[Path | None, typer.Option(help="The subset as an npz file; by default that of the folder PRIVFED_DATA.")] = None,
    output: Output = None,
    cache: Cache = None,
) -> None:
    """Compares FedTSV with other rules on CIFAR-10 with malicious clients.

    Exit status: 2 if there are no data.
    """
    torch.set_num_threads(1)
    size, folder = (QUICK if quick else FULL), output or (None if quick else DOSSIER)
    try:
        table = load(data, quick=quick)
    except FileNotFoundError as error:
        typer.echo(f"{error}; nothing was run", err=True)
        raise typer.Exit(UNUSABLE) from error
    outcomes = collect(table, size, cache)
    if as_json:
        typer.echo(json.dumps({"source": table.source, "size": asdict(size), "outcomes": [asdict(outcome) for outcome in outcomes]}))
    else:
        print_table(outcomes, [], classes="classes")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        draw(outcomes, size, folder / "fedtsv_cifar.svg", classes="classes")
        page = dossier(outcomes, table, size, "python -m benchmarks.fedtsv_cifar" + (" --quick" if quick else ""))
        (folder / "fedtsv_cifar.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
