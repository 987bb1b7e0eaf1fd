"""Distance rules under DP-SGD, with the declared noise taken out of the distances and with it left in. `--help` says the rest.

The clients are those of `benchmarks.fedtsv`, on MNIST at half its resolution, and all of them train with DP-SGD. Its noise makes every
update long and every distance alike; how long the noise is follows from what the clients declare.
"""

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import fedtsv
from benchmarks.experiment import DOSSIER, UNUSABLE, Output, print_table
from benchmarks.fedtsv import CLASSES, MALICIOUS, SELECTED, AsJson, Records, World, make_world
from privfed.aggregation.gram import gram, noise_energy
from privfed.aggregation.mixture import Mixture
from privfed.aggregation.robust import GeometricMedian
from privfed.aggregation.rules import CumulativeRule, MultiKrum
from privfed.contribution.trajectory import FedTsv
from privfed.data.samples import Samples
from privfed.selection import select_clients
from privfed.training.dpsgd import train
from privfed.training.loss import cross_entropy
from privfed.training.mechanism import DpSgd, NonPrivate
from privfed.training.model import mlp, scores, values_of
from privfed.update import PlainVector

HIDDEN, SIDE = 32, 14
RULES: Mapping[str, Any] = {"FedTSV": FedTsv(), "geometric median": GeometricMedian(), "Multi-Krum": MultiKrum(byzantine=1, keep=4)}
MEAN = "plain mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How long the experiment takes, and how the clients train."""

    seeds: tuple[int, ...]
    rounds: int
    every: int
    records: int = 288
    validation: int = 2000
    steps: int = 9
    batch: int = 32
    learning_rate: float = 0.1
    noise_multipliers: tuple[float, ...] = (1.0, 4.0)
    max_grad_norm: float = 1.0

    def mechanism(self, noise_multiplier: float) -> DpSgd:
        """How every client trains; a malicious one too, on records with wrong labels."""
        return DpSgd(
            noise_multiplier=noise_multiplier,
            max_grad_norm=self.max_grad_norm,
            sample_rate=self.batch / self.records,
            expected_batch_size=self.batch,
            steps=self.steps,
            learning_rate=self.learning_rate,
            max_records=self.records,
        )

    def energy(self, coordinates: int, noise_multiplier: float) -> float:
        """Expected squared norm of the noise in an update."""
        return noise_energy(
            coordinates,
            steps=self.steps,
            learning_rate=self.learning_rate,
            noise_multiplier=noise_multiplier,
            max_grad_norm=self.max_grad_norm,
            expected_batch_size=self.batch,
        )


FULL = Size(seeds=(0, 1), rounds=80, every=4)
QUICK = Size(seeds=(0,), rounds=2, every=1, records=64, validation=64, steps=2, noise_multipliers=(4.0,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One rule, one seed. `malicious` is the mean weight of the malicious clients together."""

    noise_multiplier: float
    rule: str
    debiased: bool
    seed: int
    accuracy: tuple[float, ...]
    malicious: float

    @property
    def final(self) -> float:
        """Mean accuracy over the last quarter of the evaluations."""
        return float(np.mean(self.accuracy[-max(1, len(self.accuracy) // 4) :]))


def halved(samples: Samples) -> Samples:
    """Pictures of 28 x 28 pixels at half the resolution; others as they are."""
    if samples.features.shape[1] != 4 * SIDE**2:
        return samples
    features: NDArray[np.float32] = samples.features.reshape(-1, SIDE, 2, SIDE, 2).mean(axis=(2, 4)).reshape(len(samples), -1)
    columns = tuple(f"p{index}" for index in range(SIDE**2))
    return Samples(features=features, labels=samples.labels, groups=None, columns=columns)


def load(data: Path | None, *, quick: bool) -> Records:
    """As `fedtsv.load`, at half the resolution.

    Raises:
        FileNotFoundError: As there.
    """
    table = fedtsv.load(data, quick=quick)
    train_side, test = halved(table.train), halved(table.test)
    inputs = test.features.shape[1]
    return replace(table, train=train_side, test=test, network=lambda: mlp(inputs, hidden=(HIDDEN,), outputs=CLASSES))


def run(
    world: World,
    table: Records,
    rule: Any,
    *,
    debiased: bool,
    noise_multiplier: float,
    size: Size,
    seed: int,
    tick: Callable[[], None],
) -> tuple[list[float], float]:
    """Accuracies, and the weight of the malicious clients."""
    names = list(world.kinds)
    values, cumulative = values_of(world.model), dict[str, float]()
    energy = size.energy(values.layout.size, noise_multiplier)
    mechanism = size.mechanism(noise_multiplier)
    # The validator's records are its own, and public here, so it adds no noise.
    reference_training = NonPrivate(learning_rate=size.learning_rate, batch_size=size.batch, steps=size.steps, seed=seed)
    accuracy, weights = list[float](), list[float]()
    for number in range(size.rounds):
        chosen = select_clients(names, fraction=SELECTED / len(names), rng=np.random.default_rng((seed, number)), minimum=SELECTED)
        updates = {
            name: train(world.model, values, world.clients[name], mechanism=mechanism, loss=cross_entropy).update_values for name in chosen
        }
        mixture = Mixture(weights=dict.fromkeys(chosen, 1.0))
        if rule is not None:
            reference = train(
                world.model, values, world.validator, mechanism=reference_training, loss=cross_entropy, round=number
            ).update_values
            declared = dict.fromkeys(chosen, energy) if debiased else None
            matrix = gram(updates, reference=reference, noise_energy=declared)
            if isinstance(rule, CumulativeRule):
                cumulative, mixture = rule.step(cumulative, matrix)
            else:
                mixture = rule.mixture(dict.fromkeys(chosen, 1.0), matrix)
        mean = sum(share * updates[name].values for name, share in mixture.shares.items())
        values = PlainVector(layout=values.layout, values=values.values + mixture.scale * mean)
        weights.append(sum(share for name, share in mixture.shares.items() if world.kinds[name] == MALICIOUS))
        if (number + 1) % size.every == 0:
            predicted = scores(world.model, values, table.test.features).argmax(axis=1)
            accuracy.append(float((predicted == table.test.labels).mean()))
        tick()
    return accuracy, float(np.mean(weights))


def collect(table: Records, size: Size) -> list[Outcome]:
    """All runs, with progress on stderr."""
    ways = [(MEAN, None, False), *((name, rule, debiased) for name, rule in RULES.items() for debiased in (False, True))]
    outcomes: list[Outcome] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("rounds"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=len(size.seeds) * len(size.noise_multipliers) * len(ways) * size.rounds)
        dealt = fedtsv.Size(
            seeds=size.seeds,
            rounds=size.rounds,
            every=size.every,
            records=size.records,
            validation=size.validation,
            batch=size.batch,
            learning_rate=size.learning_rate,
        )
        for seed in size.seeds:
            world = make_world(table, dealt, seed)
            for noise, (name, rule, debiased) in product(size.noise_multipliers, ways):
                bar.update(task, description=f"{name}{', de-biased' if debiased else ''}, noise {noise:g}, seed {seed}")
                accuracy, malicious = run(
                    world, table, rule, debiased=debiased, noise_multiplier=noise, size=size, seed=seed, tick=lambda: bar.advance(task)
                )
                outcomes.append(
                    Outcome(noise_multiplier=noise, rule=name, debiased=debiased, seed=seed, accuracy=tuple(accuracy), malicious=malicious)
                )
    return outcomes


def of(outcomes: Sequence[Outcome], noise_multiplier: float, rule: str, *, debiased: bool) -> list[Outcome]:
    """The outcomes of one way, by seed."""
    wanted = (noise_multiplier, rule, debiased)
    return [outcome for outcome in outcomes if (outcome.noise_multiplier, outcome.rule, outcome.debiased) == wanted]


def rows_of(outcomes: Sequence[Outcome], size: Size) -> list[list[str]]:
    """A row of cells per noise and rule: accuracy and malicious weight with the noise left in, and with it taken out."""
    rows = []
    for noise, name in product(size.noise_multipliers, (MEAN, *RULES)):
        cells = [f"{noise:g}", name]
        for debiased in (False, True):
            runs = of(outcomes, noise, name, debiased=debiased)
            if not runs:
                cells += ["", "", ""]
                continue
            final = [outcome.final for outcome in runs]
            cells += [f"{np.mean(final):.3f}", f"{min(final):.3f} to {max(final):.3f}"]
            cells.append(f"{np.mean([outcome.malicious for outcome in runs]):.1%}")
        rows.append(cells)
    return rows


_HEAD = ("noise", "rule", "accuracy, as sent", "seeds", "malicious", "accuracy, de-biased", "seeds", "malicious")


def dossier(outcomes: Sequence[Outcome], table: Records, size: Size, command: str) -> str:
    """The page."""
    coordinates = values_of(table.network()).layout.size
    changes = []
    for noise, rule in product(size.noise_multipliers, RULES):
        before, after = (of(outcomes, noise, rule, debiased=debiased) for debiased in (False, True))
        accuracies = " to ".join(f"{np.mean([run.final for run in runs]):.3f}" for runs in (before, after))
        weights = " to ".join(f"{np.mean([run.malicious for run in runs]):.1%}" for runs in (before, after))
        changes.append(f"* {rule} at noise multiplier {noise:g}: accuracy {accuracies}, weight of malicious clients {weights}.")
    energies = " and ".join(f"{size.energy(coordinates, noise):.2f} at {noise:g}" for noise in size.noise_multipliers)
    versions = ", ".join(f"{package} {version(package)}" for package in ("numpy", "torch", "opacus"))
    lines = [
        "# Distance rules under DP-SGD noise",
        "",
        f"`{command}` made this page. Data: {table.source}, at half the resolution.",
        "",
        f"From noise left in to noise taken out of the distances, mean of {len(size.seeds)} seeds:",
        "",
        *changes,
        "",
        f"| {' | '.join(_HEAD)} |",
        f"|{'---|' * len(_HEAD)}",
        *(f"| {' | '.join(row)} |" for row in rows_of(outcomes, size)),
        "",
        "![Accuracy by round](debiasing.svg)",
        "",
        f"An update has {coordinates:,} coordinates, and its noise an expected squared norm of {energies}. De-biasing takes that out of "
        f"the norms of the Gram matrix before distances are formed. What it cannot take out is chance: a norm varies by a share of "
        f"{np.sqrt(2 / coordinates):.1%} of that energy, and where the updates themselves are shorter, distances between them stay hidden. "
        "It needs nothing but what clients declare, and it holds for plain gradient descent only. Who declares more noise than it adds "
        "would look nearer to the others than it is; so in a run nobody is believed more than the median of what all declare. Multi-Krum "
        "compares sums of distances, and noise that all declare alike adds the same to each of them: here it chooses the same either way, "
        "and its two columns differ by the noise of the runs alone.",
        "",
        "## What was compared",
        "",
        f"* 100 clients as on the page about MNIST, with {size.records} records each, of whom 20 rename all labels; {SELECTED} per round, "
        f"{size.rounds} rounds. **This is a small run**: it tells rules apart, and no accuracy here is the best that can be had.",
        f"* All clients train with DP-SGD: clipping norm {size.max_grad_norm:g}, {size.steps} steps of {size.batch} expected records at a "
        f"learning rate of {size.learning_rate:g}. The noise has no seed: another run gives other last digits.",
        "* The validator's records are public here; its reference has no noise.",
        "",
        f"Python {platform.python_version()}, {versions}.",
    ]
    return "\n".join(lines) + "\n"


def draw(outcomes: Sequence[Outcome], size: Size, path: Path) -> None:
    """Accuracy by round, a panel per rule."""
    import matplotlib as mpl  # noqa: PLC0415 # only those who write the figure need it
    from matplotlib.figure import Figure  # noqa: PLC0415

    with mpl.rc_context({"svg.hashsalt": "debiasing", "font.size": 9}):
        figure = Figure(figsize=(10, 2.9 * len(size.noise_multipliers)), layout="constrained")
        panels = figure.subplots(len(size.noise_multipliers), len(RULES), sharex=True, sharey=True, squeeze=False)
        rounds = np.arange(1, size.rounds // size.every + 1) * size.every
        ways = ((MEAN, False, ":", "0.4", MEAN), ("", False, "--", "tab:orange", "as sent"), ("", True, "-", "tab:blue", "de-biased"))
        for panel, (noise, rule) in zip(panels.ravel(), product(size.noise_multipliers, RULES), strict=True):
            for name, debiased, style, colour, label in ways:
                runs = np.array([run.accuracy for run in of(outcomes, noise, name or rule, debiased=debiased)])
                panel.plot(rounds, runs.mean(axis=0), style, color=colour, label=label)
                panel.fill_between(rounds, runs.min(axis=0), runs.max(axis=0), color=colour, alpha=0.12, linewidth=0)
            panel.set(title=f"{rule}, noise multiplier {noise:g}")
            panel.grid(alpha=0.25)
        for panel in panels[-1]:
            panel.set_xlabel("round")
        for panel in panels[:, 0]:
            panel.set_ylabel("accuracy on test records")
        panels[0, 0].legend(loc="upper left", frameon=False)
        figure.savefig(path, metadata={"Date": None})


def main(
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Seconds instead of minutes; writes no page.")] = False,
    as_json: AsJson = False,
    data: Annotated[Path | None, typer.Option(help="MNIST as an npz file; by default that of the folder PRIVFED_DATA.")] = None,
    output: Output = None,
) -> None:
    """Compares distance rules under DP-SGD with and without de-biasing.

    Exit status: 2 if there are no data.
    """
    torch.set_num_threads(1)
    size, folder = (QUICK if quick else FULL), output or (None if quick else DOSSIER)
    try:
        table = load(data, quick=quick)
    except FileNotFoundError as error:
        typer.echo(f"{error}; nothing was run", err=True)
        raise typer.Exit(UNUSABLE) from error
    outcomes = collect(table, size)
    if as_json:
        typer.echo(json.dumps({"source": table.source, "size": asdict(size), "outcomes": [asdict(outcome) for outcome in outcomes]}))
    else:
        print_table("Accuracy in the end, and the weight of malicious clients", _HEAD, rows_of(outcomes, size))
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        draw(outcomes, size, folder / "debiasing.svg")
        page = dossier(outcomes, table, size, "python -m benchmarks.debiasing" + (" --quick" if quick else ""))
        (folder / "debiasing.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
