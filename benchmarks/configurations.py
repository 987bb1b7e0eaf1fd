"""What each protection costs on PaySim: from local-only and central training to privacy, encryption and a robust rule together.

Per seed and feature set, every configuration sees the same banks and starts from the same network, and every bank takes the same number of
gradient steps. `python -m benchmarks.configurations --help` says the rest.
"""

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import typer
from torch import nn

from benchmarks.experiment import (
    DOSSIER,
    HIDDEN,
    TEST_SHARE,
    AsJson,
    Cache,
    Data,
    FinishedRuns,
    Interval,
    Output,
    Quick,
    Source,
    bank_lines,
    first_model,
    prepare,
    print_lines,
    print_table,
    round_bar,
    t_interval,
    versions_of,
)
from benchmarks.paysim import BANKS, BATCH_SIZE, POLICY, POSITIVE_WEIGHT, declared_weights, split_among_banks
from privfed.aggregation.robust import GeometricMedian
from privfed.aggregation.rules import FedAvg
from privfed.client import Client
from privfed.consortium import Consortium, Plaintext
from privfed.data.partition import CONSORTIUM
from privfed.data.paysim import NOBAL, PRE, features, grouped_split
from privfed.data.samples import Samples
from privfed.dp.ledger import Ledger
from privfed.dp.mechanism import Budget
from privfed.engines.local import Simulation
from privfed.he.params import CkksParams
from privfed.he.product_params import ProductParams
from privfed.he.secret import SharedKey
from privfed.he.threshold_key import ThresholdKey
from privfed.training.dpsgd import train
from privfed.training.evaluate import EvaluationScope, evaluate
from privfed.training.loss import BinaryCrossEntropy
from privfed.training.mechanism import DpSgd, NonPrivate
from privfed.training.model import scores, values_of
from privfed.training.objective import FedProx
from privfed.update import PlainVector

FEATURE_SETS = (PRE, NOBAL)
MAX_GRAD_NORM, PROXIMAL_WEIGHT = 1.0, 0.1
# Clipped sums are divided by the batch, so that a step with DP is shorter than one without at the same learning rate: each kind of
# training gets its own, chosen on a split that no row of the page is from.
TUNING_SEED = 100
PLAIN_RATES, PRIVATE_RATES = (0.3, 1.0, 2.0), (0.3, 2.0, 6.0, 12.0)
DELTA = 1e-6
BOUND = 8.0
# Where the clients multiply by their weights before they encrypt, as with `ThresholdKey`, nobody may have more than half of them.
MAX_SHARE = 0.5
THRESHOLD = ThresholdKey(clients=BANKS, corrupted=1, dropouts=1)
LOSS = BinaryCrossEntropy(positive_weight=POSITIVE_WEIGHT)
METRICS = ("pr_auc", "recall_at_1_percent_fpr", "recall_at_01_percent_fpr")


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One way to train: `keys` says who can open what. The budget is the epsilon of each bank over all rounds; None without privacy."""

    name: str
    keys: str = "none"
    epsilon: float | None = None
    proximal: bool = False
    robust: bool = False


LOCAL, CENTRAL, FED_AVG = (Configuration(name=name) for name in ("local-only", "central", "FedAvg"))
LEAST_NOISE, MOST_NOISE = (Configuration(name=f"FedAvg + DP, epsilon {epsilon}", epsilon=float(epsilon)) for epsilon in (8, 1))
CONFIGURATIONS = (
    LOCAL,
    CENTRAL,
    FED_AVG,
    Configuration(name="FedProx", proximal=True),
    LEAST_NOISE,
    Configuration(name="FedAvg + DP, epsilon 3", epsilon=3.0),
    MOST_NOISE,
    Configuration(name="FedAvg + HE", keys="shared"),
    Configuration(name="FedAvg + DP + HE, epsilon 3", keys="shared", epsilon=3.0),
    Configuration(name="ThresholdKey", keys="threshold"),
    Configuration(name="DP + HE + geometric median, epsilon 3", keys="shared", epsilon=3.0, robust=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How long the experiment takes: every bank takes `steps` steps in each round."""

    seeds: tuple[int, ...]
    rounds: int
    steps: int
    feature_sets: tuple[str, ...] = tuple(one.name for one in FEATURE_SETS)
    plain_rates: tuple[float, ...] = PLAIN_RATES
    private_rates: tuple[float, ...] = PRIVATE_RATES


FULL = Size(seeds=(0, 1, 2, 3, 4), rounds=15, steps=60)
QUICK = Size(seeds=(0, 1), rounds=2, steps=5, feature_sets=(PRE.name,), plain_rates=(1.0,), private_rates=(6.0,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run, measured on held-out records after the last round; of local-only training, means over the banks.

    Args:
        configuration: Name of the configuration.
        feature_set: Name of the feature set.
        seed: Of split, banks, first network and, without privacy, order of records.
        learning_rate: Of every bank.
        pr_auc: Average precision.
        recall_at_1_percent_fpr: Recall at a false positive rate of 0.01.
        recall_at_01_percent_fpr: Recall at a false positive rate of 0.001.
        epsilon: Largest epsilon that a bank had spent in the end, at `DELTA`; infinite without privacy.
        bytes_up: Mean bytes that a bank sent in a round. In the clear, what float32 weights take; none where nothing is sent.
        bytes_down: Mean bytes that a bank received in a round, likewise.
        seconds_per_round: Mean seconds of a round, all banks one after the other; of central and local-only training, of as many steps.
        bank_records: Records per bank.
        bank_frauds: Frauds per bank.
    """

    configuration: str
    feature_set: str
    seed: int
    learning_rate: float
    pr_auc: float
    recall_at_1_percent_fpr: float
    recall_at_01_percent_fpr: float
    epsilon: float
    bytes_up: float
    bytes_down: float
    seconds_per_round: float
    bank_records: tuple[int, ...]
    bank_frauds: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A configuration on a feature set over all seeds, and how its PR-AUC differs from FedAvg's on the same seeds."""

    configuration: str
    feature_set: str
    pr_auc: Interval
    gain: Interval
    recall_at_1_percent_fpr: Interval
    recall_at_01_percent_fpr: Interval
    epsilon: float
    bytes_up: float
    bytes_down: float
    seconds_per_round: float


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What all configurations of a seed and a feature set share."""

    banks: tuple[Samples, ...]
    training: Samples
    test: Samples
    model: nn.Module
    seed: int
    size: Size


def make_world(table: pd.DataFrame, feature_set: str, *, seed: int, size: Size) -> World:
    """Splits the records, and deals them to the banks; both feature sets get the same records at the same banks."""
    rng = np.random.default_rng(seed)
    chosen = next(one for one in FEATURE_SETS if one.name == feature_set)
    training, test = grouped_split(features(table, chosen), test_share=TEST_SHARE, rng=rng)
    banks = split_among_banks(training, rng)
    return World(banks=tuple(banks), training=training, test=test, model=first_model(test.columns, seed=seed), seed=seed, size=size)


def metrics(world: World, values: PlainVector) -> dict[str, float]:
    """The metrics of a model on the held-out records."""
    evaluation = evaluate(world.test.labels, scores(world.model, values, world.test.features), scope=EvaluationScope.SIMULATION_ONLY)
    return {name: getattr(evaluation, name) for name in METRICS}


def alone(
    world: World, data: Samples, *, steps: int, seed: int, learning_rate: float, tick: Callable[[], None]
) -> tuple[PlainVector, float]:
    """Weights after `steps` steps of plain SGD on these records in each round, and seconds per round."""
    values = values_of(world.model)
    mechanism = NonPrivate(learning_rate=learning_rate, batch_size=BATCH_SIZE, steps=steps, seed=seed)
    start = time.perf_counter()
    for number in range(world.size.rounds):
        moved = train(world.model, values, data, mechanism=mechanism, loss=LOSS, round=number).update_values
        values = PlainVector(layout=values.layout, values=values.values + moved.values)
        tick()
    return values, (time.perf_counter() - start) / world.size.rounds


@functools.cache
def private_training(declared: int, *, epsilon: float, rounds: int, steps: int, learning_rate: float) -> DpSgd:
    """DP-SGD that spends the whole budget in all rounds."""
    budget = Budget(epsilon=epsilon, delta=DELTA)
    return DpSgd.for_budget(
        budget,
        rounds=rounds,
        max_records=declared,
        expected_batch_size=min(BATCH_SIZE, declared),
        steps=steps,
        learning_rate=learning_rate,
        max_grad_norm=MAX_GRAD_NORM,
    )


def federated(world: World, configuration: Configuration, *, learning_rate: float, tick: Callable[[], None]) -> dict[str, Any]:
    """The fields of an `Outcome` of a federated run that are not known beforehand."""
    size, epsilon = world.size, configuration.epsilon
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="privfed-configurations-")))
        clients = []
        weights = declared_weights([len(data) for data in world.banks], max_share=MAX_SHARE)
        for number, (data, weight) in enumerate(zip(world.banks, weights, strict=True)):
            name, ledger = f"bank_{number}", None
            training: DpSgd | NonPrivate = NonPrivate(
                learning_rate=learning_rate, batch_size=BATCH_SIZE, steps=size.steps, seed=BANKS * world.seed + number
            )
            if epsilon is not None:
                # A bank declares its size in whole hundreds, rounded up: what it would say in public.
                declared = 100 * math.ceil(len(data) / 100)
                training = private_training(declared, epsilon=epsilon, rounds=size.rounds, steps=size.steps, learning_rate=learning_rate)
                budget = Budget(epsilon=epsilon, delta=DELTA)
                ledger = stack.enter_context(Ledger.open(folder / f"{number}.ledger", population=name, budget=budget))
            clients.append(Client(name, data, training=training, weight=weight, ledger=ledger))
        keys: Mapping[str, Callable[[], Any]] = {"none": Plaintext, "shared": SharedKey.generate, "threshold": lambda: THRESHOLD}
        params = CkksParams.threshold(clients=BANKS, bound=BOUND) if configuration.keys == "threshold" else CkksParams.standard(bound=BOUND)
        consortium = Consortium(
            clients,
            keys=keys[configuration.keys](),
            rule=GeometricMedian() if configuration.robust else FedAvg(),
            policy=POLICY,
            params=ProductParams.exact(bound=BOUND) if configuration.robust else params,
            loss=LOSS,
            correction=FedProx(proximal_weight=PROXIMAL_WEIGHT) if configuration.proximal else None,
        )
        with Simulation(consortium, world.model) as simulation:
            history = simulation.run(rounds=size.rounds, progress=lambda _: tick())
    parameters = history.model.layout.size
    up, down = history.bytes_up_per_parameter * parameters, history.bytes_down_per_parameter * parameters
    if not consortium.encrypted:
        up = down = 4.0 * parameters
    seconds = sum(sum(summary.record.seconds.values()) for summary in history.rounds) / len(history.rounds)
    return metrics(world, history.model) | {
        "epsilon": max(history.epsilon.values()),
        "bytes_up": up,
        "bytes_down": down,
        "seconds_per_round": seconds,
    }


def train_one(world: World, configuration: Configuration, *, feature_set: str, learning_rate: float, tick: Callable[[], None]) -> Outcome:
    """One run of one configuration."""
    nothing_sent = {"epsilon": math.inf, "bytes_up": 0.0, "bytes_down": 0.0}
    fields: dict[str, Any]
    if configuration == CENTRAL:
        steps = world.size.steps * BANKS
        values, seconds = alone(world, world.training, steps=steps, seed=world.seed, learning_rate=learning_rate, tick=tick)
        fields = metrics(world, values) | nothing_sent | {"seconds_per_round": seconds}
    elif configuration == LOCAL:
        runs = [
            alone(
                world,
                data,
                steps=world.size.steps,
                seed=BANKS * world.seed + number,
                learning_rate=learning_rate,
                tick=tick if number == 0 else lambda: None,
            )
            for number, data in enumerate(world.banks)
        ]
        measured = [metrics(world, values) for values, _ in runs]
        fields = {name: float(np.mean([each[name] for each in measured])) for name in METRICS} | nothing_sent
        fields["seconds_per_round"] = sum(seconds for _, seconds in runs)
    else:
        fields = federated(world, configuration, learning_rate=learning_rate, tick=tick)
    return Outcome(
        configuration=configuration.name,
        feature_set=feature_set,
        seed=world.seed,
        learning_rate=learning_rate,
        bank_records=tuple(len(data) for data in world.banks),
        bank_frauds=tuple(int(data.labels.sum()) for data in world.banks),
        **fields,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """The runs of the page, and those on `TUNING_SEED` by which the learning rates were chosen: none where there was no choice."""

    runs: tuple[Outcome, ...]
    tuning: tuple[Outcome, ...]


def best_rate(tuning: Sequence[Outcome]) -> float:
    """The learning rate with the highest mean PR-AUC, of those the same budgets and features were tried with."""
    rates = dict.fromkeys(outcome.learning_rate for outcome in tuning)
    return max(rates, key=lambda rate: float(np.mean([outcome.pr_auc for outcome in tuning if outcome.learning_rate == rate])))


def run(table: pd.DataFrame, source: Source, size: Size, finished: FinishedRuns) -> Results:
    """All runs, with progress on stderr; those that are finished, from where they are kept."""
    kinds = ((FED_AVG,), size.plain_rates), ((LEAST_NOISE, MOST_NOISE), size.private_rates)
    tried = sum(len(tuned) * len(rates) for tuned, rates in kinds if len(rates) > 1)
    with round_bar() as bar:
        task = bar.add_task("", total=len(size.feature_sets) * (len(size.seeds) * len(CONFIGURATIONS) + tried) * size.rounds)

        def one(world: World, configuration: Configuration, feature_set: str, rate: float) -> Outcome:
            bar.update(task, description=f"seed {world.seed}, {feature_set}, {configuration.name}")
            key = ("configurations", source.name, size.rounds, size.steps, world.seed, feature_set, rate, configuration)
            made = partial(train_one, world, configuration, feature_set=feature_set, learning_rate=rate, tick=lambda: bar.advance(task))
            return finished.take(Outcome, *key, run=made, spared=lambda: bar.advance(task, size.rounds))

        chosen, tuning = list[float](), list[Outcome]()
        for tuned, rates in kinds:
            if len(rates) == 1:
                chosen.append(rates[0])
                continue
            trials = list[Outcome]()
            for feature_set in size.feature_sets:
                world = make_world(table, feature_set, seed=TUNING_SEED, size=size)
                trials += [one(world, configuration, feature_set, rate) for configuration in tuned for rate in rates]
            chosen.append(best_rate(trials))
            tuning += trials
        plain, private = chosen
        runs = list[Outcome]()
        for seed in size.seeds:
            for feature_set in size.feature_sets:
                world = make_world(table, feature_set, seed=seed, size=size)
                for configuration in CONFIGURATIONS:
                    runs.append(one(world, configuration, feature_set, plain if configuration.epsilon is None else private))
    return Results(runs=tuple(runs), tuning=tuple(tuning))


def summarise(outcomes: Sequence[Outcome]) -> list[Summary]:
    """Means over seeds, in the order of the configurations. The gain is over FedAvg with the same seed and features."""
    summaries: list[Summary] = []
    for feature_set in dict.fromkeys(outcome.feature_set for outcome in outcomes):
        here = [outcome for outcome in outcomes if outcome.feature_set == feature_set]
        base = {outcome.seed: outcome.pr_auc for outcome in here if outcome.configuration == "FedAvg"}
        for configuration in CONFIGURATIONS:
            runs = [outcome for outcome in here if outcome.configuration == configuration.name]
            summaries.append(
                Summary(
                    configuration=configuration.name,
                    feature_set=feature_set,
                    pr_auc=t_interval([run.pr_auc for run in runs]),
                    gain=t_interval([run.pr_auc - base[run.seed] for run in runs]),
                    recall_at_1_percent_fpr=t_interval([run.recall_at_1_percent_fpr for run in runs]),
                    recall_at_01_percent_fpr=t_interval([run.recall_at_01_percent_fpr for run in runs]),
                    epsilon=max(run.epsilon for run in runs),
                    bytes_up=float(np.mean([run.bytes_up for run in runs])),
                    bytes_down=float(np.mean([run.bytes_down for run in runs])),
                    seconds_per_round=float(np.mean([run.seconds_per_round for run in runs])),
                )
            )
    return summaries


_HEAD = ("configuration", "PR-AUC", "gain over FedAvg", "recall at 1 % FPR", "recall at 0.1 % FPR", "epsilon")
_COST_HEAD = ("configuration", "bytes up", "bytes down", "seconds per round")


def cells(summary: Summary) -> tuple[str, ...]:
    """A summary as a row of `_HEAD`."""
    gain = (
        "-" if summary.configuration == "FedAvg" else f"{summary.gain.estimate:+.3f} ({summary.gain.low:+.3f} to {summary.gain.high:+.3f})"
    )
    epsilon = f"{summary.epsilon:.2f}" if math.isfinite(summary.epsilon) else "-"
    recalls = str(summary.recall_at_1_percent_fpr), str(summary.recall_at_01_percent_fpr)
    return summary.configuration, str(summary.pr_auc), gain, *recalls, epsilon


def cost_cells(summary: Summary) -> tuple[str, ...]:
    """A summary as a row of `_COST_HEAD`."""
    sent = (f"{count:,.0f}" if count else "-" for count in (summary.bytes_up, summary.bytes_down))
    return summary.configuration, *sent, f"{summary.seconds_per_round:.2f}"


_TUNING_HEAD = ("configuration", "features", "learning rate", "PR-AUC")


def tuning_lines(results: Results) -> list[str]:
    """How the learning rates were chosen, for a page."""
    plain, private = (next(run.learning_rate for run in results.runs if math.isinf(run.epsilon) is without) for without in (True, False))
    if not results.tuning:
        return [f"Learning rate {plain:g} without DP and {private:g} with it.", ""]
    return [
        f"Without DP {plain:g}, with DP {private:g}: the one with the highest mean of its kind below, each on the split, the banks and the "
        f"first weights of seed {TUNING_SEED}, of which no other number on this page is. A step with DP goes along a mean of clipped "
        "gradients, which is short, so that it wants a larger rate. A consortium that chooses on its own records pays for every trial "
        "with budget, and chooses on made-up records instead.",
        "",
        f"| {' | '.join(_TUNING_HEAD)} |",
        f"|{'---|' * len(_TUNING_HEAD)}",
        *(f"| {run.configuration} | {run.feature_set} | {run.learning_rate:g} | {run.pr_auc:.3f} |" for run in results.tuning),
        "",
    ]


def dossier(summaries: Sequence[Summary], results: Results, size: Size, source: Source, command: str) -> str:
    """The experiment as a Markdown page."""
    banks = {outcome.seed: outcome for outcome in results.runs}
    lines = [
        "# What each protection costs",
        "",
        f"Made by `{command}`, which writes this page and its figure; do not edit them.",
        "",
        f"Data: {source.name}. **{source.origin}**",
        "",
        f"After {size.rounds} rounds of {size.steps} steps at each of {BANKS} banks, on held-out transactions: mean of {len(size.seeds)} "
        "seeds with its 95 % t-interval. The gain is the mean of the differences to FedAvg's PR-AUC on the same seed, with its 95 % "
        "t-interval. An interval of a few seeds may reach beyond 1 or below 0.",
        "",
    ]
    for feature_set in size.feature_sets:
        here = [summary for summary in summaries if summary.feature_set == feature_set]
        lines += [
            f"## Features `{feature_set}`",
            "",
            f"| {' | '.join(_HEAD)} |",
            f"|{'---|' * len(_HEAD)}",
            *(f"| {' | '.join(cells(summary))} |" for summary in here),
            "",
        ]
    first = [summary for summary in summaries if summary.feature_set == size.feature_sets[0]]
    lines += [
        "All seeds split the same file, so their results are not independent. The intervals show the spread between splits, partitions and "
        "first weights, not what another file would give.",
        "",
        "![PR-AUC by configuration](configurations.svg)",
        "",
        f"## Bytes and seconds, features `{size.feature_sets[0]}`",
        "",
        f"| {' | '.join(_COST_HEAD)} |",
        f"|{'---|' * len(_COST_HEAD)}",
        *(f"| {' | '.join(cost_cells(summary))} |" for summary in first),
        "",
        "Bytes are those of one bank in one round, means over banks; in the clear, those of the weights as float32. Seconds are those of "
        "all banks, one after the other, on the machine that made this page; other work on it counts. "
        "`python -m benchmarks.round` measures a round by its parts.",
        "",
        "## Learning rates",
        "",
        *tuning_lines(results),
        "## What was compared",
        "",
        "* `nobal` knows type, hour and amount; `pre` also the balances before the transaction. Scaling is a public function of each row.",
        f"* {BANKS} banks by label, Dirichlet alpha {CONSORTIUM:g}, drawn anew until each has a fiftieth of the records; a bank may have "
        "no fraud. Weights are declared, as on the page about PaySim.",
        f"* Every bank takes {size.rounds * size.steps:,} steps of {BATCH_SIZE} records in every configuration, and central training as "
        f"many as all banks together, {size.rounds * size.steps * BANKS:,}, in one sequence. Local-only is the mean over the banks, each "
        "of which scores all held-out records with its own model.",
        f"* Hidden layers of {HIDDEN[0]} and {HIDDEN[1]}, frauds weighted {POSITIVE_WEIGHT:g} times, proximal "
        f"weight {PROXIMAL_WEIGHT:g}, clipping norm {MAX_GRAD_NORM:g}: chosen beforehand and the same for all; nothing but the learning "
        "rates was tuned.",
        f"* With DP, every bank has the epsilon of the name for all rounds, at delta {DELTA:g}, for each of its records. A bank declares "
        "its size in whole hundreds; a small bank draws a larger share of its records in a batch, and so adds more noise.",
        "* HE is `SharedKey`: equal updates give the same model in the clear and encrypted, bit for bit. With DP, noise is drawn anew in "
        f"every run, so two runs differ by chance. `ThresholdKey` has {THRESHOLD.corrupted} corrupted bank and {THRESHOLD.dropouts} "
        f"dropout, opens with {THRESHOLD.quorum} banks, and rounds updates after they are weighted.",
        "* The last configuration takes the geometric median of the updates, from their inner products, which are computed on ciphertexts. "
        f"Its updates are shortened to a norm of {BOUND:g} in all; those of the others saturate at {BOUND:g} per coordinate.",
        "",
        *bank_lines(banks),
        "",
        f"Versions: {versions_of('privfed', 'torch', 'opacus', 'tenseal', 'numpy')}; torch on one thread.",
        "",
    ]
    return "\n".join(lines)


def draw(summaries: Sequence[Summary], size: Size, path: Path) -> None:
    """PR-AUC with its interval, a panel per feature set."""
    import matplotlib as mpl  # noqa: PLC0415 # only those who write the figure need it
    from matplotlib.figure import Figure  # noqa: PLC0415

    with mpl.rc_context({"svg.hashsalt": "configurations", "font.size": 9}):
        figure = Figure(figsize=(9, 3.8), layout="constrained")
        panels = figure.subplots(1, len(size.feature_sets), sharey=True, squeeze=False)[0]
        for panel, feature_set in zip(panels, size.feature_sets, strict=True):
            here = [summary for summary in summaries if summary.feature_set == feature_set][::-1]
            places = np.arange(len(here))
            centres = np.array([summary.pr_auc.estimate for summary in here])
            ends = np.clip([(summary.pr_auc.low, summary.pr_auc.high) for summary in here], 0, 1).T
            panel.hlines(places, *ends, color="tab:blue", alpha=0.35, linewidth=5)
            panel.plot(centres, places, "o", color="tab:blue", markersize=4)
            panel.set_yticks(places, [summary.configuration for summary in here])
            panel.set(title=f"features {feature_set}", xlabel="PR-AUC, held-out transactions", xlim=(0, 1))
            panel.grid(alpha=0.25, axis="x")
        figure.suptitle(f"PaySim, {BANKS} banks: mean of {len(size.seeds)} seeds, 95 % t-interval")
        figure.savefig(path, metadata={"Date": None})


def main(*, quick: Quick = False, as_json: AsJson = False, data: Data = None, output: Output = None, cache: Cache = None) -> None:
    """Compares training without and with differential privacy, encryption, a threshold of key holders, and a robust rule.

    Exit status: 2 if there are no data or no matplotlib for the figure.
    """
    size = QUICK if quick else FULL
    folder = output or (None if quick else DOSSIER)
    table, source = prepare(data, quick=quick, folder=folder)
    results = run(table, source, size, FinishedRuns(folder=cache))
    summaries = summarise(results.runs)
    if as_json:
        print_lines(source, run=results.runs, tuning=results.tuning, summary=summaries)
    else:
        for feature_set in size.feature_sets:
            rows = [(*cells(summary), *cost_cells(summary)[1:]) for summary in summaries if summary.feature_set == feature_set]
            title = f"Features {feature_set}: mean of {len(size.seeds)} seeds (95 % interval)"
            print_table(title, (*_HEAD, *_COST_HEAD[1:]), rows, caption=source.origin)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        command = "python -m benchmarks.configurations" + (f" --data {data.name}" if data else "")
        draw(summaries, size, folder / "configurations.svg")
        (folder / "configurations.md").write_text(dossier(summaries, results, size, source, command), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
