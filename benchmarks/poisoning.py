"""Which rule withstands which attack, on fraud data. `python -m benchmarks.poisoning --help` says the rest.

Ten banks of unequal data train a fraud model, and two of them attack: by their records, by their updates, or by sending nothing of
their own. Every attack meets every rule, from the same start and with the same batches.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import typer
from numpy.typing import NDArray
from torch import nn

from benchmarks.experiment import (
    DOSSIER,
    TEST_SHARE,
    AsJson,
    Cache,
    Data,
    FinishedRuns,
    Output,
    Quick,
    Source,
    finite,
    first_model,
    pr_auc,
    prepare,
    print_table,
    round_bar,
    versions_of,
)
from benchmarks.fedtsv import combine
from privfed.aggregation.coordinatewise import CoordinateMedian, Krum, TrimmedMean
from privfed.aggregation.robust import CenteredClipping, FLTrust, GeometricMedian, NormBound
from privfed.aggregation.rules import FedAvg, MultiKrum
from privfed.attacks.poisoning import (
    Alie,
    Backdoor,
    DataAttack,
    Duplicate,
    InnerProductManipulation,
    Knowledge,
    LabelFlip,
    LabelShuffle,
    Replay,
    Scaling,
    Sleeper,
    UpdateAttack,
    sign_flip,
)
from privfed.contribution.cosine import Cgsv
from privfed.contribution.leave_one_out import LeaveOneOut
from privfed.contribution.trajectory import FedTsv
from privfed.data.partition import CONSORTIUM, dirichlet_partition
from privfed.data.paysim import PRE, features, grouped_split
from privfed.data.samples import Samples
from privfed.errors import CohortError
from privfed.training.batched import train_together
from privfed.training.loss import BinaryCrossEntropy
from privfed.training.mechanism import NonPrivate
from privfed.training.model import scores, values_of
from privfed.update import PlainVector

BANKS, BYZANTINE = 10, 2
LOSS = BinaryCrossEntropy(positive_weight=10.0)
VALIDATION_SHARE, EVERY = 0.05, 2
FALSE_ALARMS = 0.01
MAX_NORM, RADIUS = 1.0, 1.0
FRAUD, HONEST = 1, 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """What the attackers do, to their records, to their updates, or to both.

    `rides` says that they want weight without work: success is the weight that they get.
    """

    data: DataAttack | None = None
    update: UpdateAttack | None = None
    rides: bool = False


def backdoor(columns: Sequence[str]) -> Backdoor:
    """An hour that no clock shows, on which a fraud is to pass."""
    places = tuple(columns.index(name) for name in ("hour_sin", "hour_cos"))
    return Backdoor(columns=places, values=(1.5, 1.5), target=HONEST)


def attacks(size: "Size", columns: Sequence[str]) -> dict[str, Attack]:
    """All attacks, by name; the first is none."""
    flip = LabelFlip(source=FRAUD, target=HONEST)
    return {
        "none": Attack(),
        "label flip": Attack(data=flip),
        "label shuffle": Attack(data=LabelShuffle(permutation=(1, 0))),
        "sign flip": Attack(update=sign_flip()),
        "scaling": Attack(data=flip, update=Scaling(factor=float(BANKS))),
        "ALIE": Attack(update=Alie(deviations=1.5)),
        "IPM": Attack(update=InnerProductManipulation(factor=0.5)),
        "sleeper": Attack(update=Sleeper(wakes=size.rounds // 2, attack=sign_flip(5.0))),
        "backdoor": Attack(data=backdoor(columns)),
        "rider: nothing": Attack(update=Replay(factor=0.0), rides=True),
        "rider: replay": Attack(update=Replay(), rides=True),
        "rider: copy": Attack(update=Duplicate(), rides=True),
    }


RULES: Mapping[str, Any] = {
    "FedAvg": FedAvg(),
    "NormBound": NormBound(max_norm=MAX_NORM),
    "Krum": Krum(byzantine=BYZANTINE),
    "Multi-Krum": MultiKrum(byzantine=BYZANTINE, keep=BANKS - BYZANTINE),
    "geometric median": GeometricMedian(),
    "median": CoordinateMedian(),
    "trimmed mean": TrimmedMean(byzantine=BYZANTINE),
    "CenteredClipping": CenteredClipping(radius=RADIUS),
    "FLTrust": FLTrust(),
    "FedTSV": FedTsv(),
    "CGSV": Cgsv(length=0.5),
    "leave-one-out": LeaveOneOut(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How long the experiment takes."""

    seeds: tuple[int, ...]
    rounds: int
    steps: int
    batch: int = 256
    learning_rate: float = 0.5


FULL = Size(seeds=(0, 1), rounds=20, steps=10)
QUICK = Size(seeds=(0,), rounds=2, steps=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The banks of one seed; the last `BYZANTINE` of them attack."""

    banks: Sequence[Samples]
    validator: Samples
    test: Samples
    model: nn.Module

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the banks."""
        return tuple(f"bank_{place}" for place in range(BANKS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One attack on one rule. `missed` is the share of caught frauds that pass with the trigger, `weight` what the attackers hold."""

    attack: str
    rule: str
    seed: int
    pr_auc: float
    missed: float
    weight: float
    skipped: int


def make_world(table: pd.DataFrame, seed: int) -> World:
    """Splits records among test, validator and banks."""
    rng = np.random.default_rng(seed)
    training, test = grouped_split(features(table, PRE), test_share=TEST_SHARE, rng=rng)
    pool, validator = grouped_split(training, test_share=VALIDATION_SHARE, rng=rng)
    banks = dirichlet_partition(pool, clients=BANKS, alpha=CONSORTIUM, rng=rng, min_samples=len(pool) // 100).split(pool)
    return World(banks=banks, validator=validator, test=test, model=first_model(test.columns, seed=seed))


def run(world: World, attack: Attack, rule: Any, *, size: Size, seed: int, tick: Callable[[], None]) -> tuple[float, float, float, int]:
    """PR-AUC in the end, share of frauds that pass with the trigger, weight of the attackers, and rounds without an aggregate."""
    rng = np.random.default_rng((seed, 1))
    bad = world.names[-BYZANTINE:]
    records = list(world.banks)
    if attack.data is not None:
        records[-BYZANTINE:] = [attack.data.poison(samples, rng=rng) for samples in records[-BYZANTINE:]]
    values = values_of(world.model)
    last: PlainVector | None = None
    zero = PlainVector(layout=values.layout, values=np.zeros(values.layout.size))
    mechanism = NonPrivate(learning_rate=size.learning_rate, batch_size=size.batch, steps=size.steps, seed=seed)
    seeds = [BANKS * seed + place for place in range(BANKS + 1)]
    cumulative, curve, weights, skipped = dict[str, float](), list[float](), list[float](), 0
    for number in range(size.rounds):
        results = train_together(
            world.model, values, [*records, world.validator], mechanism=mechanism, loss=LOSS, round=number, seeds=seeds
        )
        updates = {name: result.update_values for name, result in zip(world.names, results, strict=False)}
        if attack.update is not None:
            honest = [update for name, update in updates.items() if name not in bad]
            for place, name in enumerate(bad):
                known = Knowledge(own=updates[name], honest=honest[place:], last=last, round=number)
                updates[name] = attack.update.poison(known, rng=rng)
        centre = isinstance(rule, CenteredClipping)
        reference = (last or zero) if centre else results[-1].update_values
        try:
            movement, mixture, cumulative = combine(
                rule,
                updates,
                reference=reference,
                cumulative=cumulative,
                world=world,  # type: ignore[arg-type] # only leave-one-out by loss looks at it
                values=values,
            )
        except CohortError:
            movement, mixture = zero, None
            skipped += 1
        values, last = PlainVector(layout=values.layout, values=values.values + movement.values), movement
        if mixture is not None:
            weights.append(math.fsum(mixture.shares[name] for name in bad))
        if (number + 1) % EVERY == 0:
            curve.append(pr_auc(world.model, values, world.test))
        tick()
    end = float(np.mean(curve[-max(1, len(curve) // 4) :]))
    return end, frauds_that_pass(world, values), float(np.mean(weights)) if weights else math.nan, skipped


def outcome_of(
    world: World, attack_name: str, attack: Attack, rule_name: str, rule: Any, *, size: Size, seed: int, tick: Callable[[], None]
) -> Outcome:
    """One run under the names of its attack and rule."""
    end, missed, weight, skipped = run(world, attack, rule, size=size, seed=seed, tick=tick)
    return Outcome(attack=attack_name, rule=rule_name, seed=seed, pr_auc=end, missed=missed, weight=weight, skipped=skipped)


def frauds_that_pass(world: World, values: PlainVector) -> float:
    """Of the test frauds that are caught at a false alarm rate of 1 %, the share that is not caught with the trigger; NaN if none is."""
    test = world.test
    plain = scores(world.model, values, test.features).ravel()
    threshold = float(np.quantile(plain[test.labels == HONEST], 1 - FALSE_ALARMS))
    caught = (test.labels == FRAUD) & (plain > threshold)
    if not caught.any():
        return math.nan
    stamped = scores(world.model, values, backdoor(test.columns).stamped(test.features[caught])).ravel()
    return float((stamped <= threshold).mean())


def collect(table: pd.DataFrame, source: Source, size: Size, finished: FinishedRuns) -> list[Outcome]:
    """All runs, with progress on stderr; those that are finished, from where they are kept."""
    named = attacks(size, features(table, PRE).columns)
    outcomes: list[Outcome] = []
    with round_bar() as bar:
        task = bar.add_task("", total=len(size.seeds) * len(named) * len(RULES) * size.rounds)
        for seed in size.seeds:
            world = make_world(table, seed)
            for attack_name, attack in named.items():
                for rule_name, rule in RULES.items():
                    bar.update(task, description=f"seed {seed}, {attack_name}, {rule_name}")
                    key = (size, source.name, seed, attack, rule.name, BANKS, BYZANTINE)
                    one = partial(
                        outcome_of, world, attack_name, attack, rule_name, rule, size=size, seed=seed, tick=lambda: bar.advance(task)
                    )
                    outcomes.append(finished.take(Outcome, *key, run=one, spared=lambda: bar.advance(task, size.rounds)))
    return outcomes


def grids(outcomes: Sequence[Outcome], named: Mapping[str, Attack]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """PR-AUC and attack success, of shape (rules, attacks), means over seeds.

    Success is the weight that free riders get; of a backdoor, the share of caught frauds that pass with the trigger; of all others,
    the share of FedAvg's PR-AUC without an attack that is lost, at least 0.
    """
    clean = {outcome.seed: outcome.pr_auc for outcome in outcomes if (outcome.attack, outcome.rule) == ("none", "FedAvg")}
    quality, success = np.full((len(RULES), len(named)), np.nan), np.full((len(RULES), len(named)), np.nan)
    for row, rule in enumerate(RULES):
        for column, (name, attack) in enumerate(named.items()):
            runs = [outcome for outcome in outcomes if (outcome.rule, outcome.attack) == (rule, name)]
            quality[row, column] = np.mean([outcome.pr_auc for outcome in runs])
            if attack.rides:
                reached = [outcome.weight for outcome in runs]
            elif isinstance(attack.data, Backdoor):
                reached = [outcome.missed for outcome in runs]
            else:
                reached = [max(0.0, 1 - outcome.pr_auc / clean[outcome.seed]) for outcome in runs]
            success[row, column] = np.mean(reached)
    return quality, success


def rows_of(grid: NDArray[np.float64]) -> list[list[str]]:
    """A row of cells per rule."""
    return [[rule, *("" if math.isnan(cell) else f"{cell:.2f}" for cell in row)] for rule, row in zip(RULES, grid.tolist(), strict=True)]


def dossier(outcomes: Sequence[Outcome], named: Mapping[str, Attack], size: Size, source: Source, command: str) -> str:
    """The experiment as a Markdown page."""
    quality, success = grids(outcomes, named)
    pure = [outcome.missed for outcome in outcomes if outcome.attack == "none"]
    skipping = sorted({f"{outcome.rule} ({outcome.attack})" for outcome in outcomes if outcome.skipped})
    head = [f"| rule | {' | '.join(named)} |", f"|{'---|' * (len(named) + 1)}"]
    worst = {rule: float(np.nanmin(row)) for rule, row in zip(RULES, quality, strict=True)}
    best = sorted(worst, key=lambda rule: -worst[rule])[:3]
    lines = [
        "# Attacks and rules on fraud data",
        "",
        f"`{command}` made this page and its figure; do not edit them. Data: {source.name}. **{source.origin}**",
        "",
        f"{BYZANTINE} of {BANKS} banks attack. At the worst of the attacks, PR-AUC is highest with "
        + ", ".join(f"{rule} ({worst[rule]:.2f})" for rule in best)
        + f"; with FedAvg it is {worst['FedAvg']:.2f}.",
        "",
        f"## PR-AUC in the end, mean of {len(size.seeds)} seeds",
        "",
        *head,
        *(f"| {' | '.join(row)} |" for row in rows_of(quality)),
        "",
        "## Success of the attack, from 0 to 1",
        "",
        *head,
        *(f"| {' | '.join(row)} |" for row in rows_of(success)),
        "",
        "Success is, for free riders, the weight that the two get together, where a fair share would be "
        f"{BYZANTINE / BANKS:g}; for the backdoor, the share of frauds that are caught at {FALSE_ALARMS:.0%} false alarms and pass once "
        f"they have the trigger ({np.nanmean(pure):.2f} without any attack); for all others, the "
        "share of FedAvg's PR-AUC without an attack that is lost. Rules that sort coordinates or take one update have no weights.",
        "",
        "![PR-AUC and success of the attack](poisoning.svg)",
        "",
        "## What was compared",
        "",
        f"* {BANKS} banks by label, Dirichlet alpha {CONSORTIUM:g}; a validator with {VALIDATION_SHARE:.0%} of the training records makes "
        "the reference of FLTrust, FedTSV and leave-one-out. CenteredClipping's centre is the last movement of the model.",
        f"* All banks take part in {size.rounds} rounds of {size.steps} steps of {size.batch} records at a learning rate of "
        f"{size.learning_rate:g}; frauds weigh {LOSS.positive_weight:g} times. NormBound {MAX_NORM:g}, radius {RADIUS:g}. Nothing was "
        "tuned for any rule or attack, and no attack adapts to the rule.",
        "* Label flip calls frauds honest, label shuffle swaps the two; scaling sends ten times the update of flipped labels; ALIE stays "
        f"1.5 standard deviations below the mean; IPM sends minus half the honest mean; the sleeper flips signs, five times, from round "
        f"{size.rounds // 2}; ALIE, IPM and copies know all honest updates.",
        f"* Rounds in which a rule found nobody to take an update from: {', '.join(skipping) or 'none'}.",
        "",
        f"Versions: {versions_of('numpy', 'torch')}.",
        "",
    ]
    return "\n".join(lines)


def draw(outcomes: Sequence[Outcome], named: Mapping[str, Attack], path: Path) -> None:
    """Both grids as heat maps."""
    import matplotlib as mpl  # noqa: PLC0415 # only those who write the figure need it
    from matplotlib.figure import Figure  # noqa: PLC0415

    with mpl.rc_context({"svg.hashsalt": "poisoning", "font.size": 8}):
        figure = Figure(figsize=(12, 4.8), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        titles = ("PR-AUC in the end", "success of the attack")
        for panel, grid, title, colours in zip(panels, grids(outcomes, named), titles, ("viridis", "Reds"), strict=True):
            image = panel.imshow(grid, vmin=0, vmax=1, cmap=colours, aspect="auto")
            for (row, column), cell in np.ndenumerate(grid):
                if not math.isnan(cell):
                    dark = cell < 0.5 if colours == "viridis" else cell > 0.6
                    panel.text(column, row, f"{cell:.2f}", ha="center", va="center", color="white" if dark else "black", fontsize=7)
            panel.set(title=title)
            panel.set_xticks(range(len(named)), list(named), rotation=40, ha="right")
            panel.set_yticks(range(len(RULES)), list(RULES))
            figure.colorbar(image, ax=panel, fraction=0.03)
        figure.savefig(path, metadata={"Date": None})


def main(
    *,
    quick: Quick = False,
    as_json: AsJson = False,
    data: Data = None,
    output: Output = None,
    cache: Cache = None,
) -> None:
    """Every attack against every rule, on PaySim-shaped records.

    Exit status: 2 if there are no data or no matplotlib for the figure.
    """
    size = QUICK if quick else FULL
    folder = output or (None if quick else DOSSIER)
    table, source = prepare(data, quick=quick, folder=folder)
    outcomes = collect(table, source, size, FinishedRuns(folder=cache))
    named = attacks(size, features(table, PRE).columns)
    if as_json:
        for outcome in outcomes:
            typer.echo(json.dumps(finite(asdict(outcome)), allow_nan=False))
    else:
        for title, grid in zip(("PR-AUC in the end", "Success of the attack"), grids(outcomes, named), strict=True):
            print_table(title, ("rule", *named), rows_of(grid), caption=source.origin)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        draw(outcomes, named, folder / "poisoning.svg")
        page = dossier(outcomes, named, size, source, "python -m benchmarks.poisoning" + (f" --data {data.name}" if data else ""))
        (folder / "poisoning.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
