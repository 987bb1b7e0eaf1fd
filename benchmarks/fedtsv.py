"""FedTSV and its rivals in the setting of its paper, on MNIST. `python -m benchmarks.fedtsv --help` says the rest.

A hundred clients: 70 with records of all digits, 10 with few digits each (Dirichlet 0.1), 20 whose labels are renamed by one fixed
permutation. Five are selected per round, train one epoch, and are combined by the rule under test. A validator with records of its
own trains as long and provides the reference. All rules see the same clients in the same order.
"""

import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from benchmarks.experiment import DOSSIER, UNUSABLE, Cache, FinishedRuns, Output, round_bar, wide_console
from privfed.aggregation.coordinatewise import CoordinateMedian, TrimmedMean
from privfed.aggregation.gram import gram
from privfed.aggregation.mixture import Mixture
from privfed.aggregation.robust import FLTrust, GeometricMedian
from privfed.aggregation.rules import CumulativeRule, FedAvg, GramRule, MultiKrum, PlaintextRule
from privfed.attacks.poisoning import LabelShuffle
from privfed.contribution.cosine import Cgsv
from privfed.contribution.leave_one_out import LeaveOneOut, leave_one_out_by_utility
from privfed.contribution.trajectory import Angular, FedTsv, TrajectoryGame, added
from privfed.data.samples import Samples
from privfed.errors import CohortError
from privfed.selection import select_clients
from privfed.training.batched import train_together
from privfed.training.loss import cross_entropy
from privfed.training.mechanism import NonPrivate
from privfed.training.model import mlp, scores, values_of
from privfed.update import PlainVector

FILE = "mnist.npz"
IID, SKEWED, MALICIOUS = "all digits", "few digits", "malicious"
KINDS = {IID: 70, SKEWED: 10, MALICIOUS: 20}
SELECTED, ALPHA, CLASSES, HIDDEN, TOTAL = 5, 0.1, 10, 64, 4096
WITHIN, ABOVE, MOST_WEIGHT = 0.02, 0.03, 0.03
MISSED = 1
WITHOUT, PLAIN, OURS = "without malicious clients", "FedAvg", "FedTSV"


@dataclass(frozen=True, slots=True, kw_only=True)
class ByValidationLoss:
    """Leave-one-out by the loss on the validator's records: for comparison, it evaluates a model per client and round."""

    @property
    def name(self) -> str:
        return "ByValidationLoss"


METHODS: Mapping[str, Any] = {
    WITHOUT: FedAvg(),
    PLAIN: FedAvg(),
    OURS: FedTsv(),
    "FedTSV, by angle": FedTsv(game=TrajectoryGame(distance=Angular())),
    "FedTSV, as published": FedTsv.published(),
    "leave-one-out": LeaveOneOut(),
    "leave-one-out, loss": ByValidationLoss(),
    "CGSV": Cgsv(length=0.5),
    "FLTrust": FLTrust(),
    "Multi-Krum": MultiKrum(byzantine=1, keep=4),
    "geometric median": GeometricMedian(),
    "median": CoordinateMedian(),
    "trimmed mean": TrimmedMean(byzantine=1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How long the experiment takes."""

    seeds: tuple[int, ...]
    rounds: int
    every: int
    records: int
    validation: int
    batch: int
    learning_rate: float

    @property
    def steps(self) -> int:
        """Of one epoch."""
        return self.records // self.batch


FULL = Size(seeds=(0, 1, 2), rounds=400, every=5, records=576, validation=2000, batch=32, learning_rate=0.05)
QUICK = Size(seeds=(0,), rounds=30, every=5, records=96, validation=200, batch=32, learning_rate=0.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """Training and test records, where they come from, and what learns from them, with weights from torch's global generator."""

    train: Samples
    test: Samples
    source: str
    network: Callable[[], nn.Module]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One rule, one seed. Shares are means over the rounds in which there was a weighted mean, by kind of client.

    In skipped rounds the rule found nobody to take an update from, and the model stayed as it was.
    """

    method: str
    seed: int
    accuracy: tuple[float, ...]
    share: Mapping[str, float]
    share_late: Mapping[str, float]
    scores: Mapping[str, float]
    seconds: float
    skipped: int = 0

    @property
    def final(self) -> float:
        """Mean accuracy over the last quarter of the rounds: after a single round of five clients it jumps."""
        return float(np.mean(self.accuracy[-max(1, len(self.accuracy) // 4) :]))


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The clients of one seed."""

    clients: Mapping[str, Samples] = field(repr=False)
    kinds: Mapping[str, str]
    validator: Samples = field(repr=False)
    model: nn.Module = field(repr=False)


def load(data: Path | None, *, quick: bool) -> Records:
    """MNIST; for a quick run without the file, scikit-learn's digits.

    Raises:
        FileNotFoundError: If there is no file and digits would not do.
    """
    folder = Path(os.environ.get("PRIVFED_DATA") or Path(__file__).parents[2] / "shared" / "data")
    path = data or folder / FILE
    if path.is_file():
        with np.load(path, allow_pickle=False) as file:
            sides = [
                (file[f"x_{side}"].reshape(-1, 784) / np.float32(255), file[f"y_{side}"].astype(np.int64)) for side in ("train", "test")
            ]
        source = f"{path.name}, SHA-256 {hashlib.sha256(path.read_bytes()).hexdigest()}"
    elif quick:
        digits = load_digits()
        order = np.random.default_rng(0).permutation(len(digits.target))
        features, labels = (digits.data / 16).astype(np.float32)[order], digits.target[order]
        sides = [(features[:1400], labels[:1400]), (features[1400:], labels[1400:])]
        source = "scikit-learn's digits"
    else:
        raise FileNotFoundError(f"no {FILE} found: set PRIVFED_DATA to the folder that holds it, or give it with --data")
    train, test = (_samples(features, labels) for features, labels in sides)
    inputs = train.features.shape[1]
    return Records(train=train, test=test, source=source, network=lambda: mlp(inputs, hidden=(HIDDEN,), outputs=CLASSES))


def _samples(features: NDArray[np.float32], labels: NDArray[np.int64]) -> Samples:
    return Samples(features=features, labels=labels, groups=None, columns=tuple(f"p{index}" for index in range(features.shape[1])))


def make_world(table: Records, size: Size, seed: int) -> World:
    """Deals records to the clients. On MNIST no record is dealt twice; digits are too few for that."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(table.train))
    validator, pool = table.train.take(order[: size.validation]), order[size.validation :]
    needed = sum(KINDS.values()) * size.records
    distinct = len(pool) >= needed
    left = {label: list(pool[table.train.labels[pool] == label]) for label in range(CLASSES)}
    shuffle = LabelShuffle.drawn(CLASSES, rng=rng)
    clients: dict[str, Samples] = {}
    kinds: dict[str, str] = {}
    # The skewed ones first, while there are enough records of every class for them.
    for kind in (SKEWED, IID, MALICIOUS):
        for index in range(KINDS[kind]):
            if kind == SKEWED:
                places = _skewed(left, rng.dirichlet(np.full(CLASSES, ALPHA)), size.records, rng, distinct=distinct)
            else:
                places = _even(left, size.records, rng, distinct=distinct)
            name = f"{kind.replace(' ', '_')}_{index:02}"
            samples = table.train.take(places)
            clients[name] = shuffle.poison(samples, rng=rng) if kind == MALICIOUS else samples
            kinds[name] = kind
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = table.network()
    return World(clients=clients, kinds=kinds, validator=validator, model=model)


def _skewed(
    left: Mapping[int, list[int]], shares: NDArray[np.float64], records: int, rng: np.random.Generator, *, distinct: bool
) -> list[int]:
    counts = rng.multinomial(records, shares)
    places: list[int] = []
    for label, count in enumerate(counts):
        if distinct:
            places += [left[label].pop() for _ in range(min(count, len(left[label])))]
        else:
            places += rng.choice(left[label], size=count).tolist()
    return places


def _even(left: Mapping[int, list[int]], records: int, rng: np.random.Generator, *, distinct: bool) -> list[int]:
    everything = [(label, place) for label, places in left.items() for place in range(len(places))]
    chosen = [everything[index] for index in rng.choice(len(everything), size=records, replace=not distinct)]
    if not distinct:
        return [left[label][place] for label, place in chosen]
    taken = {label: {place for other, place in chosen if other == label} for label in left}
    places = [left[label][place] for label, place in chosen]
    for label in left:
        left[label][:] = [record for place, record in enumerate(left[label]) if place not in taken[label]]
    return places


def run(world: World, table: Records, method: str, *, size: Size, seed: int, tick: Callable[[], None]) -> Outcome:
    """Trains under one rule."""
    start, rule = time.perf_counter(), METHODS[method]
    names = [name for name, kind in world.kinds.items() if method != WITHOUT or kind != MALICIOUS]
    mechanism = NonPrivate(learning_rate=size.learning_rate, batch_size=size.batch, steps=size.steps, seed=seed)
    values, cumulative = values_of(world.model), dict[str, float]()
    accuracy: list[float] = []
    skipped = 0
    shares = {name: np.zeros(2) for name in names}
    rounds_counted = np.zeros(2)
    for number in range(size.rounds):
        chosen = select_clients(names, fraction=SELECTED / len(names), rng=np.random.default_rng((seed, number)), minimum=SELECTED)
        records = [*(world.clients[name] for name in chosen), world.validator]
        results = train_together(world.model, values, records, mechanism=mechanism, loss=cross_entropy, round=number)
        updates = {name: result.update_values for name, result in zip(chosen, results, strict=False)}
        try:
            movement, mixture, cumulative = combine(
                rule, updates, reference=results[-1].update_values, cumulative=cumulative, world=world, values=values
            )
        except CohortError:
            movement, mixture = PlainVector(layout=values.layout, values=np.zeros(values.layout.size)), None
            skipped += 1
        values = PlainVector(layout=values.layout, values=values.values + movement.values)
        if mixture is not None:
            late = np.array([1.0, float(number >= size.rounds // 2)])
            rounds_counted += late
            for name, share in mixture.shares.items():
                shares[name] += share * late
        if (number + 1) % size.every == 0:
            predicted = scores(world.model, values, table.test.features).argmax(axis=1)
            accuracy.append(float((predicted == table.test.labels).mean()))
        tick()
    by_kind = {kind: sum((shares[name] for name in names if world.kinds[name] == kind), np.zeros(2)) for kind in KINDS}
    whole, late = (
        {kind: float(total[place] / rounds_counted[place]) if rounds_counted[place] else math.nan for kind, total in by_kind.items()}
        for place in (0, 1)
    )
    return Outcome(
        method=method,
        seed=seed,
        accuracy=tuple(accuracy),
        share=whole,
        share_late=late,
        scores=cumulative,
        seconds=time.perf_counter() - start,
        skipped=skipped,
    )


def combine(
    rule: FedAvg | GramRule | CumulativeRule | PlaintextRule | ByValidationLoss,
    updates: Mapping[str, PlainVector],
    *,
    reference: PlainVector,
    cumulative: dict[str, float],
    world: World,
    values: PlainVector,
) -> tuple[PlainVector, Mixture | None, dict[str, float]]:
    """How the model moves, the proportions if there are any, and cumulative scores if the rule keeps some."""
    weights = dict.fromkeys(updates, 1.0)
    if isinstance(rule, PlaintextRule):
        return rule.aggregate(updates), None, cumulative
    if isinstance(rule, FedAvg):
        mixture = Mixture(weights=weights)
    elif isinstance(rule, ByValidationLoss):
        cumulative = added(cumulative, leave_one_out_by_utility(updates, lambda moved: -validation_loss(world, values, moved)))
        positive = {name: max(cumulative[name], 0.0) for name in updates}
        mixture = Mixture(weights=positive if any(positive.values()) else weights)
    elif isinstance(rule, CumulativeRule):
        cumulative, mixture = rule.step(cumulative, gram(updates, reference=reference))
    else:
        mixture = rule.mixture(weights, gram(updates, reference=reference))
    coefficients = mixture.coefficients(total=TOTAL)
    total = sum(coefficient * updates[name].values for name, coefficient in coefficients.items())
    mean = PlainVector(layout=values.layout, values=total / sum(coefficients.values()))
    return mixture.moved(mean, reference), mixture, cumulative


def validation_loss(world: World, values: PlainVector, moved: PlainVector) -> float:
    """Mean cross-entropy on the validator's records after a movement."""
    outputs = scores(world.model, PlainVector(layout=values.layout, values=values.values + moved.values), world.validator.features)
    return float(functional.cross_entropy(torch.from_numpy(outputs), torch.from_numpy(np.array(world.validator.labels))))


def collect(table: Records, size: Size, cache: Path | None) -> list[Outcome]:
    """All runs, with progress on stderr; those that are in the cache, from there."""
    finished = FinishedRuns(folder=cache)
    outcomes: list[Outcome] = []
    with round_bar() as bar:
        task = bar.add_task("", total=len(size.seeds) * len(METHODS) * size.rounds)
        for seed in size.seeds:
            world = make_world(table, size, seed)
            for method, rule in METHODS.items():
                bar.update(task, description=f"{method}, seed {seed}")
                key = ("fedtsv", size, KINDS, SELECTED, ALPHA, table.source, method, rule.name, seed)
                one = partial(run, world, table, method, size=size, seed=seed, tick=lambda: bar.advance(task))
                outcomes.append(finished.take(Outcome, *key, run=one, spared=lambda: bar.advance(task, size.rounds)))
    return outcomes


def of(outcomes: Sequence[Outcome], method: str) -> list[Outcome]:
    """The outcomes of one rule, by seed."""
    return [outcome for outcome in outcomes if outcome.method == method]


def judge(outcomes: Sequence[Outcome]) -> list[str]:
    """Requirements that are not met, in words."""
    final = {method: float(np.mean([outcome.final for outcome in of(outcomes, method)])) for method in METHODS}
    share = {kind: float(np.mean([outcome.share[kind] for outcome in of(outcomes, OURS)])) for kind in KINDS}
    failures = []
    if final[OURS] < final[WITHOUT] - WITHIN:
        failures.append(f"{OURS} ends at {final[OURS]:.3f}, more than {WITHIN} below {final[WITHOUT]:.3f} without malicious clients")
    if final[OURS] < final[PLAIN] + ABOVE:
        failures.append(f"{OURS} ends at {final[OURS]:.3f}, less than {ABOVE} above {PLAIN} at {final[PLAIN]:.3f}")
    if share[MALICIOUS] >= MOST_WEIGHT:
        failures.append(f"malicious clients hold {share[MALICIOUS]:.1%} of the weight, required are less than {MOST_WEIGHT:.0%}")
    each = {kind: share[kind] / clients for kind, clients in KINDS.items()}
    if each[SKEWED] <= each[MALICIOUS]:
        failures.append(f"a client with few digits holds {each[SKEWED]:.3%} of the weight, and a malicious client {each[MALICIOUS]:.3%}")
    return failures


def print_table(outcomes: Sequence[Outcome], failures: Sequence[str], *, classes: str = "digits") -> None:
    """The results for a reader."""
    table = Table(title="Accuracy in the end, and the weight of each kind of client over all rounds")
    for column in ("rule", "accuracy", "spread", *(kind.replace("digits", classes) for kind in KINDS), "malicious, second half", "s"):
        table.add_column(column, justify="left" if column == "rule" else "right")
    for row in rows_of(outcomes):
        table.add_row(*row)
    console = wide_console()
    console.print(table)
    for failure in failures:
        console.print(f"missed: {failure}")


def rows_of(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """A row of cells per rule."""
    rows = []
    for method in METHODS:
        runs = of(outcomes, method)
        final = [outcome.final for outcome in runs]
        cells = [method, f"{np.mean(final):.3f}", f"{min(final):.3f} to {max(final):.3f}"]
        for share, kinds in (("share", tuple(KINDS)), ("share_late", (MALICIOUS,))):
            for kind in kinds:
                mean = float(np.mean([getattr(outcome, share)[kind] for outcome in runs]))
                cells.append("" if math.isnan(mean) else f"{mean:.1%}")
        rows.append([*cells, f"{np.mean([outcome.seconds for outcome in runs]):.0f}"])
    return rows


def dossier(outcomes: Sequence[Outcome], table: Records, size: Size, failures: Sequence[str], command: str) -> str:
    """The page."""
    seconds = sum(outcome.seconds for outcome in outcomes)
    versions = ", ".join(f"{package} {version(package)}" for package in ("numpy", "torch"))
    final = {method: float(np.mean([outcome.final for outcome in of(outcomes, method)])) for method in METHODS}
    last = {method: float(np.mean([outcome.accuracy[-5:] for outcome in of(outcomes, method)])) for method in METHODS}
    lines = [
        "# FedTSV on MNIST",
        "",
        f"`{command}` made this page. Data: {table.source}.",
        "",
        f"FedTSV ends at an accuracy of {final[OURS]:.3f}, FedAvg at {final[PLAIN]:.3f}, and FedAvg without the malicious clients at "
        f"{final[WITHOUT]:.3f} (mean of {len(size.seeds)} seeds, over the last quarter of the rounds; over the last five evaluations alone "
        f"{last[OURS]:.3f}, {last[PLAIN]:.3f} and {last[WITHOUT]:.3f}).",
        "",
        *_weights(outcomes),
        "",
        *([f"* Missed: {failure}." for failure in failures] or ["All of this is met."]),
        "",
        "| rule | accuracy | lowest to highest seed | all digits | few digits | malicious | malicious, second half | seconds per run |",
        "|---|---|---|---|---|---|---|---|",
        *("| " + " | ".join(cells) + " |" for cells in rows_of(outcomes)),
        "",
        f"In {sum(outcome.skipped for outcome in outcomes)} rounds of all runs ({_skippers(outcomes)}) a rule found nobody to take an "
        "update from, and the model stayed as it was.",
        "",
        "The middle columns are the weight of each kind of client in the mean, over all rounds; of 100 clients, 70, 10 and 20 are of "
        "these kinds. Rules that sort coordinates have no weights.",
        "",
        "![Accuracy and weights](fedtsv.svg)",
        "",
        "## What was compared",
        "",
        f"* {KINDS[IID]} clients have {size.records} records drawn evenly, {KINDS[SKEWED]} have as many with shares of the digits drawn "
        f"from Dirichlet({ALPHA}), and {KINDS[MALICIOUS]} have evenly drawn records whose labels one fixed permutation renames. No "
        "record is dealt twice.",
        f"* {SELECTED} clients are selected per round, the same for all rules, and train one epoch: {size.steps} steps of {size.batch} "
        f"records at a learning rate of {size.learning_rate:g}. The network has one hidden layer of {HIDDEN}. {size.rounds} rounds.",
        f"* The reference of FedTSV, leave-one-out and FLTrust is what a validator with {size.validation} other records gets from as many "
        "steps.",
        f"* Accuracy is on the test records, every {size.every} rounds; the table has the mean of the last quarter of the evaluations.",
        "* Multi-Krum and the trimmed mean expect one malicious client in five, which is the mean; in some rounds there are more.",
        "* The seeds change partition, permutation, selection and first weights. Learning rate, batch and validation size were fixed "
        "beforehand and are the same for all rules.",
        "",
        f"All runs together took {seconds / 60:.1f} minutes on one core. Python {platform.python_version()}, {versions}.",
    ]
    return "\n".join(lines) + "\n"


def _weights(outcomes: Sequence[Outcome]) -> list[str]:
    """What the malicious and the skewed clients hold under FedTSV, and the reason for what is left."""
    share = {
        method: {kind: float(np.mean([outcome.share[kind] for outcome in of(outcomes, method)])) for kind in KINDS}
        for method in (OURS, "FedTSV, by angle")
    }
    return [
        f"What is required: within {WITHIN} of the run without malicious clients, {ABOVE} above FedAvg, less than {MOST_WEIGHT:.0%} of the "
        "weight for malicious clients together, and more for a client with few digits than for a malicious one.",
        "",
        f"Under FedTSV the {KINDS[MALICIOUS]} malicious clients hold {share[OURS][MALICIOUS]:.2%} of the weight and the {KINDS[SKEWED]} "
        f"with few digits {share[OURS][SKEWED]:.2%}. By Euclidean distance, what a client with few digits sends is often further away "
        f"from the reference than no update at all; by angle these clients hold {share['FedTSV, by angle'][SKEWED]:.2%} and the "
        f"malicious ones {share['FedTSV, by angle'][MALICIOUS]:.2%}. Malicious clients hold anything only because of rounds in which "
        "none of the five has a positive score: then all five count alike. "
        "Counted in total and not per client, the two kinds hold about the same under FedTSV: the last requirement is met narrowly, and "
        "who has many clients with unusual data should take the angle.",
    ]


def _skippers(outcomes: Sequence[Outcome]) -> str:
    return ", ".join(sorted({outcome.method for outcome in outcomes if outcome.skipped})) or "none"


def draw(outcomes: Sequence[Outcome], size: Size, path: Path, *, classes: str = "digits") -> None:
    """Accuracy by round, and cumulative scores by kind of client; the same outcomes give the same bytes."""
    import matplotlib as mpl  # noqa: PLC0415 # only those who write the figure need it
    from matplotlib.figure import Figure  # noqa: PLC0415

    with mpl.rc_context({"svg.hashsalt": "fedtsv", "font.size": 9}):
        figure = Figure(figsize=(10, 4), layout="constrained")
        curves, weights = figure.subplots(1, 2, width_ratios=(3, 2))
        rounds = np.arange(1, size.rounds // size.every + 1) * size.every
        for index, method in enumerate(METHODS):
            runs = np.array([outcome.accuracy for outcome in of(outcomes, method)])
            style = {"color": f"C{index % 10}", "linestyle": "--" if index >= 10 else "-", "linewidth": 2.2 if method == OURS else 1.0}
            if method == WITHOUT:
                style = {"color": "0.2", "linestyle": ":", "linewidth": 2.0}
            curves.plot(rounds, runs.mean(axis=0), label=method, **style)
            if method in (WITHOUT, PLAIN, OURS):
                curves.fill_between(rounds, runs.min(axis=0), runs.max(axis=0), color=style["color"], alpha=0.1, linewidth=0)
        curves.set(
            xlabel="round",
            ylabel="accuracy on test records",
            ylim=(0, 1 if classes == "digits" else None),
            title="mean of the seeds; band: lowest to highest",
        )
        curves.grid(alpha=0.25)
        curves.legend(loc="lower right", frameon=False, ncols=2, fontsize=7)
        groups = [
            [score for outcome in of(outcomes, OURS) for name, score in outcome.scores.items() if name.startswith(kind.replace(" ", "_"))]
            for kind in KINDS
        ]
        weights.boxplot(groups, tick_labels=[kind.replace("digits", classes) for kind in KINDS], whis=(0, 100))
        weights.axhline(0, color="0.6", linewidth=0.8)
        weights.set(ylabel="cumulative trajectory Shapley value", title="FedTSV: below 0 is no weight")
        figure.savefig(path, metadata={"Date": None})


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def main(
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Seconds instead of minutes; not judged; writes no page.")] = False,
    as_json: AsJson = False,
    data: Annotated[Path | None, typer.Option(help="MNIST as an npz file; by default that of the folder PRIVFED_DATA.")] = None,
    output: Output = None,
    cache: Cache = None,
) -> None:
    """Compares FedTSV with other rules on MNIST with malicious clients.

    Exit status: 1 if a requirement is missed (but for --quick), 2 if there are no data.
    """
    torch.set_num_threads(1)
    size, folder = (QUICK if quick else FULL), output or (None if quick else DOSSIER)
    try:
        table = load(data, quick=quick)
    except FileNotFoundError as error:
        typer.echo(f"{error}; nothing was run", err=True)
        raise typer.Exit(UNUSABLE) from error
    outcomes = collect(table, size, cache)
    failures = judge(outcomes)
    if as_json:
        typer.echo(
            json.dumps({"source": table.source, "size": asdict(size), "outcomes": [asdict(o) for o in outcomes], "missed": failures})
        )
    else:
        print_table(outcomes, failures)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        draw(outcomes, size, folder / "fedtsv.svg")
        (folder / "fedtsv.md").write_text(
            dossier(outcomes, table, size, failures, "python -m benchmarks.fedtsv" + (" --quick" if quick else "")), encoding="utf-8"
        )
    if failures and not quick:
        raise typer.Exit(MISSED)


if __name__ == "__main__":
    typer.run(main)
