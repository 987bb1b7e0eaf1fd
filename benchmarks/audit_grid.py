"""What defences leave to be read: the same attacks on the same batches of records, under every defence. `--help` says the rest.

One client's update of a fresh network with a first layer of 256, one step over 4 records unless the defence says otherwise, rounded to
the grid of the encryption, as whoever may open it sees it. The records are held back from what the attacker knows of such records.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr
from torch import nn

from benchmarks.experiment import DOSSIER, print_table
from privfed.attacks.facts import Activation, BinaryLoss, Continuous, GaussianNoise, OneHot, Sgd, SoftmaxLoss, TableSchema, TrainingFacts
from privfed.attacks.most_likely import MostLikelyRows
from privfed.attacks.observation import NotApplicable, Observation, Reconstruction
from privfed.attacks.prior import Prior
from privfed.attacks.scoring import interval
from privfed.attacks.spear import spear
from privfed.audit.background import Background, LineUp
from privfed.audit.canaries import Canaries, transaction_schema
from privfed.audit.suite import SUITE, AuditAttack, PickAttack, RowAttack, Score, score_records
from privfed.compression import Compressor, Sign, StochasticQuantisation, TopK
from privfed.data.paysim import PRE, features
from privfed.data.samples import Samples
from privfed.data.transactions import generate_transactions
from privfed.he.codec import dequantise, quantise
from privfed.he.params import CkksParams
from privfed.training.dpsgd import train
from privfed.training.loss import PerSampleLoss, binary_cross_entropy, cross_entropy
from privfed.training.mechanism import DpSgd, NonPrivate, TrainingMechanism
from privfed.training.model import mlp, values_of
from privfed.update import PlainVector

ROWS, EVERY_ROW, HIDDEN, LEARNING_RATE, MAX_GRAD_NORM, DELTA = 4, 8, (256, 32), 0.1, 1.0, 1e-5
POOL, SEEDS, PARAMS = 1000, 8, CkksParams.standard()
_BINARY = BinaryLoss()
_LEFT_OUT = ("fnlwgt", "split", "native-country")  # of Adult: weights of the census, and a category of 41 values


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How an update is made. `group` and `value` place it in a figure.

    Args:
        name: For the table.
        group: The figure that it is part of.
        value: Its place on the axis.
        clients: Clients in the sum.
        rows: Records of each.
        batch_size: Records of a step.
        steps: Steps of each client.
        epsilon: Of the whole update at `DELTA`; infinite for clipping alone, None without either.
        update_norm: Bound on the norm of the whole update; None for none.
        compressor: What the update is compressed with.
        learning_rate: Of each client.
        likeliest: Whether the slow attack is run, too.
    """

    name: str
    group: str
    value: float = 0.0
    clients: int = 1
    rows: int = ROWS
    batch_size: int = ROWS
    steps: int = 1
    epsilon: float | None = None
    update_norm: float | None = None
    compressor: Compressor | None = None
    learning_rate: float = LEARNING_RATE
    likeliest: bool = False


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def defences(plain: Setting, *, of: str) -> tuple[Setting, ...]:
    """A setting without and with each defence but noise; `of` names what is clipped one by one."""
    compressors = (TopK(share=0.1), TopK(share=0.01), Sign(), StochasticQuantisation(levels=15))
    return (
        plain,
        replace(plain, name=f"{of} clipped, no noise", epsilon=math.inf),
        replace(plain, name="update clipped to half its length", update_norm=0.5),
        *(replace(plain, name=f"compressed: {compressor.name}", compressor=compressor) for compressor in compressors),
    )


def noisy(plain: Setting) -> tuple[Setting, ...]:
    """A setting under differential privacy at each epsilon."""
    return tuple(replace(plain, name=f"epsilon {epsilon}", group="epsilon", value=epsilon, epsilon=epsilon) for epsilon in (1, 3, 8, 100))


PLAIN = Setting(name="plain", group="defence", likeliest=True)
DEFENCES = defences(PLAIN, of="records")
EPSILONS = noisy(PLAIN)
BATCHES = tuple(
    Setting(name=f"batch of {size}", group="batch size", value=size, rows=size, batch_size=size) for size in (1, 2, 4, 8, 16, 32, 64)
)
EPOCHS = tuple(
    Setting(name=_count(epochs, "local epoch"), group="local epochs", value=epochs, rows=EVERY_ROW, steps=2 * epochs)
    for epochs in (1, 2, 5, 10)
)
SUMS = tuple(
    Setting(
        name=f"sum of {_count(count, 'client')}",
        group="clients in the sum",
        value=count,
        clients=count,
        rows=2,
        batch_size=2,
    )
    for count in (1, 2, 3, 5, 10)
)
GRID = (*DEFENCES, *EPSILONS, *BATCHES, *EPOCHS, *SUMS)
_QUICK = (PLAIN, DEFENCES[1], DEFENCES[3], EPSILONS[0], EPSILONS[3], *BATCHES[::3], EPOCHS[0], EPOCHS[2], SUMS[0], SUMS[4])
QUICK_GRID = tuple(setting for setting in GRID if setting in _QUICK)
_WORDS = {
    "batch size": "records in the batch",
    "local epochs": f"passes over {EVERY_ROW} records, in steps of {ROWS}",
    "clients in the sum": "clients in the sum, with 2 records each",
    "epsilon": "epsilon of the update (no noise at the right)",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Likeliest:
    """`MostLikelyRows` with half the effort of the audit's."""

    name: str = "likeliest"
    measure: str = "of cells right"

    def run(self, observation: Observation, background: Background) -> Reconstruction | NotApplicable:
        pool = background.pool
        prior = Prior(rows=pool.rows, labels=pool.labels, schema=pool.schema)
        return MostLikelyRows(module=background.module, prior=prior, restarts=2, iterations=200).attack(observation)

    def score(self, found: Reconstruction, truth: Canaries, background: Background, rng: np.random.Generator) -> Score:
        return score_records(found, truth, background, rng)


CERTAIN, GUESS = SUITE[0], SUITE[1]
FAST: tuple[AuditAttack[Any], ...] = (
    replace(CERTAIN, name="certificate"),  # pyright: ignore[reportArgumentType] -- a dataclass, by its protocol
    replace(GUESS, name="quotients"),  # pyright: ignore[reportArgumentType]
    RowAttack(name="SPEAR", read=partial(spear, starts=4000)),
)
PICK = PickAttack(name="pick")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One attack in one setting on one batch. `bound` is that of picks."""

    table: str
    setting: str
    attack: str
    seed: int
    score: float
    baseline: float
    bound: float | None
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One attack in one setting over all seeds. The score has a 95 % t-interval."""

    table: str
    setting: str
    attack: str
    score: float
    low: float
    high: float
    baseline: float
    advantage: float
    bound: float | None
    seeds: int


def paysim() -> Canaries:
    """Made-up transactions with the columns of PaySim."""
    table = generate_transactions(rows=4000, fraud_rate=0.05, rng=np.random.default_rng(0))
    samples = features(table, PRE)
    return Canaries(rows=samples.features.astype(np.float64), labels=samples.labels, schema=transaction_schema(PRE))


def public_table(path: Path, *, label: str, positive: str, drop: Sequence[str] = ()) -> Canaries:
    """A table with its numbers scaled to -1 and 1 by their ranges, and its categories as one-hot blocks."""
    table = pd.read_csv(path, skipinitialspace=True).drop(columns=list(drop)).sample(4000, replace=True, random_state=0).drop_duplicates()
    labels = (table.pop(label).astype(str) == positive).to_numpy(np.int64)
    columns, parts = list[Continuous | OneHot](), list[NDArray[np.float64]]()
    for name in table.columns:
        cells = table[name]
        if pd.api.types.is_numeric_dtype(cells) and cells.nunique() > 2:
            values = cells.to_numpy(np.float64)
            low, high = values.min(), values.max()
            parts.append((2 * (values - low) / (high - low) - 1)[:, None])
            columns.append(Continuous(name=name, low=-1.0, high=1.0))
        elif cells.nunique() > 1:
            codes, kinds = pd.factorize(cells.astype(str), sort=True)
            parts.append(np.eye(len(kinds))[codes])
            columns.append(OneHot(name=name, categories=tuple(map(str, kinds))))
    rows = np.concatenate(parts, axis=1).astype(np.float32).astype(np.float64)
    return Canaries(rows=rows, labels=labels, schema=TableSchema(columns=tuple(columns)))


def tables(*, quick: bool) -> dict[str, Canaries]:
    """Every table that is there: the made-up one, and those in the folder that PRIVFED_DATA names."""
    found = {"PaySim-shaped": paysim()}
    folder = Path(os.environ.get("PRIVFED_DATA", Path(__file__).parents[2] / "shared" / "data"))
    known = {
        "Adult": partial(public_table, folder / "adult.csv.gz", label="income", positive=">50K", drop=_LEFT_OUT),
        "German credit": partial(public_table, folder / "german_credit.csv.gz", label="CLASSIFICATION", positive="0"),
    }
    files = {"Adult": folder / "adult.csv.gz", "German credit": folder / "german_credit.csv.gz"}
    return found if quick else found | {name: load() for name, load in known.items() if files[name].exists()}


def part_of(table: Canaries, positions: NDArray[np.intp]) -> Canaries:
    return Canaries(rows=table.rows[positions], labels=table.labels[positions], schema=table.schema)


def noise_for(epsilon: float) -> float:
    """Noise multiplier of a single Gaussian release (Balle and Wang, 2018, arXiv:1805.06530, theorem 8)."""

    def excess(log_noise: float) -> float:
        mean = math.exp(-log_noise)
        return float(ndtr(mean / 2 - epsilon / mean) - math.exp(epsilon + log_ndtr(-mean / 2 - epsilon / mean))) - DELTA

    return math.exp(brentq(excess, math.log(1e-2), math.log(1e2)))


def mechanism(setting: Setting, *, seed: int) -> tuple[TrainingMechanism, GaussianNoise | None]:
    """How a client trains, and what is known of its noise."""
    if setting.epsilon is None:
        return NonPrivate(learning_rate=setting.learning_rate, batch_size=setting.batch_size, steps=setting.steps, seed=seed), None
    noise = 0.0
    if math.isfinite(setting.epsilon):
        noise = math.sqrt(setting.steps) * noise_for(setting.epsilon)
    training = DpSgd(
        noise_multiplier=max(noise, 1e-9),  # the least that there is: nothing beside the grid
        max_grad_norm=MAX_GRAD_NORM,
        sample_rate=1.0,
        expected_batch_size=setting.batch_size,
        steps=setting.steps,
        learning_rate=setting.learning_rate,
    )
    return training, GaussianNoise(noise_multiplier=noise, max_grad_norm=MAX_GRAD_NORM)


def update_of(
    setting: Setting, model: nn.Module, batch: Canaries, *, loss: PerSampleLoss, seed: int
) -> tuple[NDArray[np.float64], GaussianNoise | None]:
    """What one client sends, on the grid, and what is known of its noise."""
    training, noise = mechanism(setting, seed=seed)
    columns = tuple(f"column {number}" for number in range(batch.schema.width))
    data = Samples(features=batch.rows.astype(np.float32), labels=batch.labels, groups=None, columns=columns)
    values = train(model, values_of(model), data, mechanism=training, loss=loss).update_values.values
    if setting.update_norm is not None:
        values = values * setting.update_norm
    if setting.compressor is not None:
        values = setting.compressor.compress(values, np.random.default_rng(seed))
    return dequantise(quantise(values, PARAMS)[0], 1, PARAMS), noise


def seen(
    setting: Setting, model: nn.Module, shards: Sequence[Canaries], *, loss: BinaryLoss | SoftmaxLoss = _BINARY, seed: int
) -> Observation:
    """What whoever may open the sum of the clients' updates sees."""
    start, minimised = values_of(model), binary_cross_entropy if isinstance(loss, BinaryLoss) else cross_entropy
    sent = [update_of(setting, model, shard, loss=minimised, seed=seed) for shard in shards]
    return Observation(
        layout=start.layout,
        model=start,
        seen=PlainVector(layout=start.layout, values=np.mean([values for values, _ in sent], axis=0)),
        coefficients=(1,) * setting.clients,
        training=TrainingFacts(
            optimizer=Sgd(learning_rate=setting.learning_rate),
            loss=loss,
            steps=setting.steps,
            batch_size=setting.batch_size,
            noise=sent[0][1],
        ),
        activation=Activation.RELU,
        schema=shards[0].schema,
        rounding_step=PARAMS.step,
    )


def attack_once(table: Canaries, name: str, setting: Setting, *, seed: int) -> Iterator[Outcome]:
    """All attacks on one batch in one setting. Batches, and first models, are the same in all settings of a seed as far as they go."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(table))
    known = min(POOL, len(table) // 2)
    pool, private = part_of(table, order[:known]), order[known:]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = mlp(table.schema.width, hidden=HIDDEN)
    shards = [private[n * setting.rows : (n + 1) * setting.rows] for n in range(setting.clients)]
    observation = seen(setting, model, [part_of(table, shard) for shard in shards], seed=seed)
    truth = part_of(table, np.concatenate(shards))
    line_ups = tuple(LineUp.of(truth, position, pool=pool, rng=rng) for position in range(setting.rows))
    background = Background(pool=pool, module=model, pulls=None, line_ups=line_ups)
    picks = (PICK,) if setting.epsilon is not None else ()
    for attack in (*FAST, *([Likeliest()] if setting.likeliest else []), *picks):
        before = os.times()
        found = attack.run(observation, background)
        spent = os.times()
        if isinstance(found, NotApplicable):
            continue
        score = attack.score(found, truth, background, np.random.default_rng(seed))
        stronger = max(score.baseline, key=lambda kind: score.baseline[kind])
        yield Outcome(
            table=name,
            setting=setting.name,
            attack=attack.name,
            seed=seed,
            score=score.value[stronger],
            baseline=score.baseline[stronger],
            bound=score.bound,
            seconds=spent.user + spent.system - before.user - before.system,
        )


def summarise(outcomes: Sequence[Outcome]) -> list[Summary]:
    """Means over seeds with 95 % t-intervals, in the order of the runs. An attack that did not apply to some batch is left out."""
    runs: dict[tuple[str, str, str], list[Outcome]] = {}
    for outcome in outcomes:
        runs.setdefault((outcome.table, outcome.setting, outcome.attack), []).append(outcome)
    seeds = len({outcome.seed for outcome in outcomes})
    summaries: list[Summary] = []
    for (table, setting, attack), found in runs.items():
        if len(found) < seeds:
            continue
        score, baseline = interval([outcome.score for outcome in found]), float(np.mean([outcome.baseline for outcome in found]))
        summaries.append(
            Summary(
                table=table,
                setting=setting,
                attack=attack,
                score=score.mean,
                low=score.low,
                high=score.high,
                baseline=baseline,
                advantage=(score.mean - baseline) / (1 - baseline),
                bound=found[0].bound,
                seeds=seeds,
            )
        )
    return summaries


def strongest(summaries: Sequence[Summary], table: str, setting: str) -> Summary:
    """The attack on records with the best score."""
    return max(
        (one for one in summaries if (one.table, one.setting) == (table, setting) and one.attack != PICK.name), key=lambda one: one.score
    )


def run(found: Mapping[str, Canaries], grid: Sequence[Setting], *, seeds: int, tick: Callable[[str], None]) -> list[Outcome]:
    """Every attack, setting, table and seed."""
    outcomes: list[Outcome] = []
    for name, table in found.items():
        for setting in grid:
            for seed in range(seeds):
                outcomes += attack_once(table, name, setting, seed=seed)
                tick(f"{name}, {setting.name}")
    return outcomes


_HEAD = ("table", "setting", "cells right, best attack", "guessing", "advantage", "attack", "picks right", "at most")


def cells(summaries: Sequence[Summary], table: str, setting: str) -> tuple[str, ...]:
    """A setting as a row of `_HEAD`."""
    best = strongest(summaries, table, setting)
    picks = next((one for one in summaries if (one.table, one.setting, one.attack) == (table, setting, PICK.name)), None)
    shown = ("-", "-") if picks is None or picks.bound is None else (f"{picks.score:.0%}", f"{picks.bound:.0%}")
    read = f"{best.score:.0%} ({max(0.0, best.low):.0%} to {min(1.0, best.high):.0%})"
    return table, setting, read, f"{best.baseline:.0%}", f"{best.advantage:.2f}", best.attack, *shown


def dossier(summaries: Sequence[Summary], grid: Sequence[Setting], *, seeds: int, command: str) -> str:
    """The experiment as a Markdown page."""
    names = list(dict.fromkeys(one.table for one in summaries))
    lines = [
        "# What defences leave to be read",
        "",
        f"Made by `{command}`, which writes this page and its figure; do not edit them.",
        "",
        f"Of {seeds} batches of each table, none known to the attacker: the share of cells that the best of several attacks had right, "
        "with its 95 % t-interval, beside what guessing reaches on the same batches (the mean record, or one drawn at public "
        "frequencies). The advantage is the share of what guessing leaves open: 1 everything, 0 nothing. The best of several attacks is "
        "chosen by the score itself, so where all only guess it is a little above guessing by chance; an attack that found "
        "nothing says what guessing says, and has an advantage of 0.",
        "",
        "![Cells read](audit.svg)",
        "",
        "Where lines cover each other, the tables are read alike.",
        "",
        f"| {' | '.join(_HEAD)} |",
        f"|{'---|' * len(_HEAD)}",
        *(f"| {' | '.join(cells(summaries, name, setting.name))} |" for name in names for setting in grid),
        "",
        "## How to read it",
        "",
        "* Encryption is not in the table: it hides the update from who has no key, and changes nothing for who may open it. Who that is "
        "in which trust mode is what `privfed audit` measures, on real encrypted rounds.",
        "* Clipping, of records or of the whole update, is no defence without noise: it scales what is read, and rows do not depend on "
        "the scale.",
        "* Compression is measured in a first round, before error feedback sends what was left out. It makes some attacks fail, and "
        "promises nothing about others.",
        "* A sum, or a larger batch, stops exact attacks once it has about as many records as the table has columns, or more than the "
        "search can separate. Below that, all records of all clients are read at once, and more local epochs hide nothing.",
        "* Picks: how often the attacker that differential privacy is about, who knows every other record, is right about which of 10 "
        "records took part; and how often anybody can be at most (reconstruction robustness: Hayes et al., 2023, "
        f"arXiv:2302.07225). A share of {seeds * ROWS} picks has a standard error of up to {0.5 / math.sqrt(seeds * ROWS):.0%}, so some "
        "are above it by chance.",
        "",
        "## What was attacked",
        "",
        f"* A fresh network with hidden layers of {HIDDEN[0]} and {HIDDEN[1]}, one step over {ROWS} records unless the setting says "
        f"otherwise, learning rate {LEARNING_RATE:g}, the update rounded to the grid of the encryption ({PARAMS.step:.2g}).",
        f"* Epsilon is that of the whole update, at delta {DELTA:g}, with records clipped to {MAX_GRAD_NORM:g}: one step over all records. "
        "Real training samples records, and spends its epsilon over hundreds of steps, each of which says less.",
        "* Attacks: certificate (`analytic`), quotients, SPEAR with 4,000 starts, and in the settings of the first kind and of epsilon the "
        "likeliest rows under the known noise, with two starts of 200 steps.",
        f"* The attacker knows {POOL} other records of the table, or half of a smaller one. A number is right within 5 % of its column's "
        "range.",
        "* PaySim-shaped: `generate_transactions`, 10 inputs. Adult without `fnlwgt` and `native-country`, and German credit: the public "
        "tables.",
        "",
        f"Versions: {', '.join(f'{name} {version(name)}' for name in ('privfed', 'torch', 'numpy'))}.",
        "",
    ]
    return "\n".join(lines)


def draw(summaries: Sequence[Summary], grid: Sequence[Setting], path: Path) -> None:
    """The best attack by epsilon, batch size, local epochs and number of clients."""
    import matplotlib as mpl  # noqa: PLC0415 # only those who write the figure need it
    from matplotlib.figure import Figure  # noqa: PLC0415

    names = list(dict.fromkeys(one.table for one in summaries))
    colours = dict(zip(names, ("tab:blue", "tab:orange", "tab:green"), strict=False))
    with mpl.rc_context({"svg.hashsalt": "audit", "font.size": 9}):
        figure = Figure(figsize=(8.4, 5.6), layout="constrained")
        panels = figure.subplots(2, 2, sharey=True).ravel()
        for panel, group in zip(panels, ("epsilon", "batch size", "local epochs", "clients in the sum"), strict=True):
            settings = [setting for setting in grid if setting.group == group]
            ticks = [f"{setting.value:g}" for setting in settings]
            if group == "epsilon":
                settings, ticks = [*settings, next(one for one in grid if one.name == PLAIN.name)], [*ticks, "none"]
            places = np.arange(len(settings))
            for name in names:
                best = [strongest(summaries, name, setting.name) for setting in settings]
                scores = np.array([one.score for one in best])
                low, high = scores - [max(0.0, one.low) for one in best], np.array([min(1.0, one.high) for one in best]) - scores
                panel.errorbar(places, scores, yerr=np.maximum(0, [low, high]), marker="o", capsize=2, color=colours[name], label=name)
                panel.plot(places, [one.baseline for one in best], ":", color=colours[name])
            panel.set(xlabel=_WORDS[group], ylim=(0, 1.04), xlim=(-0.3, len(settings) - 0.7))
            panel.set_xticks(places, ticks)
            panel.grid(alpha=0.25)
        for panel in panels[::2]:
            panel.set_ylabel("cells right, best attack")
        panels[0].legend(loc="upper left", frameon=False, title="dotted: guessing")
        figure.savefig(path, metadata={"Date": None})


def main(
    *,
    quick: Annotated[bool, typer.Option("--quick", help="One table, a dozen settings, two batches; writes nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line: every run, then every mean.")] = False,
    seeds: Annotated[int, typer.Option(min=2, help="Batches of each table in each setting.")] = SEEDS,
    output: Annotated[Path | None, typer.Option(help="Folder for the page and the figure.")] = None,
) -> None:
    """Attacks the same batches under every defence: noise, clipping, compression, sums, more records and more local epochs."""
    torch.set_num_threads(1)
    folder = output or (None if quick else DOSSIER)
    grid, seeds = (QUICK_GRID, 2) if quick else (GRID, seeds)
    found = tables(quick=quick)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=len(found) * len(grid) * seeds)
        outcomes = run(found, grid, seeds=seeds, tick=lambda words: bar.update(task, advance=1, description=words))
    summaries = summarise(outcomes)
    if as_json:
        for kind, things in (("run", outcomes), ("summary", summaries)):
            for thing in things:
                typer.echo(json.dumps({"kind": kind} | asdict(thing), allow_nan=False))
    else:
        rows = [cells(summaries, name, setting.name) for name in found for setting in grid]
        print_table(f"What the best attack read, mean of {seeds} batches (95 % interval)", _HEAD, rows)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        command = "python -m benchmarks.audit_grid" + (" --quick" if quick else "" if seeds == SEEDS else f" --seeds {seeds}")
        draw(summaries, grid, folder / "audit.svg")
        (folder / "audit.md").write_text(dossier(summaries, grid, seeds=seeds, command=command), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
