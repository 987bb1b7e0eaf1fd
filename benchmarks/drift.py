"""Client drift on PaySim at Dirichlet alpha 0.1: FedAvg, FedProx and SCAFFOLD, with and without DP-SGD. `--help` says the rest.

All methods see the same banks, first weights and seeds, and take the same number of local steps in all; what differs is how many of
them lie between two aggregations. Runs are in the clear: an encrypted run of the same updates gives the same model, bit for bit.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd
import typer

from benchmarks.experiment import (
    DOSSIER,
    TEST_SHARE,
    AsJson,
    Data,
    Interval,
    Output,
    Quick,
    Source,
    bank_lines,
    first_model,
    pr_auc,
    prepare,
    print_lines,
    print_table,
    round_bar,
    signed,
    t_interval,
    versions_of,
)
from benchmarks.paysim import PARAMS
from privfed.client import Client
from privfed.consortium import Consortium, Plaintext
from privfed.data.partition import EXTREME, dirichlet_partition
from privfed.data.paysim import PRE, features, grouped_split
from privfed.data.samples import Samples
from privfed.dp.ledger import Ledger
from privfed.dp.mechanism import Budget
from privfed.engines.local import Simulation
from privfed.policy import OpeningPolicy
from privfed.training.loss import BinaryCrossEntropy
from privfed.training.mechanism import DpSgd, NonPrivate, TrainingMechanism
from privfed.training.objective import FedProx
from privfed.training.scaffold import Scaffold

BANKS, BATCH_SIZE, POSITIVE_WEIGHT, PROXIMAL_WEIGHT = 5, 256, 10.0, 0.1
NOISE_MULTIPLIER, MAX_GRAD_NORM, LEARNING_RATE = 1.0, 1.0, 0.3
DELTA = 1e-6
METHODS: Mapping[str, FedProx | Scaffold | None] = {
    "FedAvg": None,
    "FedProx": FedProx(proximal_weight=PROXIMAL_WEIGHT),
    "SCAFFOLD": Scaffold(clients=BANKS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How long the experiment takes: every bank takes `steps` steps in all, `local_steps` of them per round."""

    seeds: tuple[int, ...]
    steps: int
    local_steps: tuple[int, ...]


FULL = Size(seeds=(0, 1, 2, 3, 4), steps=800, local_steps=(10, 100))
QUICK = Size(seeds=(0, 1), steps=20, local_steps=(10,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run. PR-AUC on held-out records after each round; drift is how far the banks' updates are from their mean, relative to it."""

    method: str
    private: bool
    local_steps: int
    seed: int
    bank_records: tuple[int, ...]
    bank_frauds: tuple[int, ...]
    pr_auc: tuple[float, ...]
    drift: float
    epsilon: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A method in one setting over all seeds, and how it differs from FedAvg on the same seeds."""

    method: str
    private: bool
    local_steps: int
    pr_auc: Interval
    gain: Interval
    drift: float
    epsilon: float


def banks_of(training: Samples, rng: np.random.Generator, *, alpha: float = EXTREME) -> list[Samples]:
    """Five banks by label, each with a hundredth of the records at least."""
    return dirichlet_partition(training, clients=BANKS, alpha=alpha, rng=rng, min_samples=len(training) // 100).split(training)


def mechanism(records: int, *, private: bool, local_steps: int, seed: int) -> TrainingMechanism:
    """How a bank trains. It declares its size in whole hundreds, rounded up: what a bank would say in public."""
    if not private:
        return NonPrivate(learning_rate=LEARNING_RATE, batch_size=BATCH_SIZE, steps=local_steps, seed=seed)
    declared = 100 * math.ceil(records / 100)
    return DpSgd(
        noise_multiplier=NOISE_MULTIPLIER,
        max_grad_norm=MAX_GRAD_NORM,
        sample_rate=min(1.0, BATCH_SIZE / declared),
        expected_batch_size=BATCH_SIZE,
        steps=local_steps,
        learning_rate=LEARNING_RATE,
        max_records=declared,
    )


def drift_of(simulation: Simulation) -> float:
    """How far the banks' updates of the last round are from their mean, relative to its length."""
    updates = np.stack([update.vector.values for update in simulation.updates.values()])
    mean = updates.mean(axis=0)
    return float(np.linalg.norm(updates - mean, axis=1).mean() / np.linalg.norm(mean))


def train(
    banks: Sequence[Samples],
    test: Samples,
    *,
    method: str,
    private: bool,
    local_steps: int,
    seed: int,
    size: Size,
    tick: Callable[[], None],
) -> Outcome:
    """One run of one method. The seed decides first weights and, without privacy, the order of records."""
    model = first_model(test.columns, seed=seed)
    curve, drifts = list[float](), list[float]()
    rounds = size.steps // local_steps
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="privfed-drift-")))
        clients = []
        for number, data in enumerate(banks):
            training = mechanism(len(data), private=private, local_steps=local_steps, seed=BANKS * seed + number)
            ledger = None
            if private:
                budget = Budget.unlimited(delta=DELTA)  # spent, and stated, but not what is compared
                ledger = stack.enter_context(Ledger.open(folder / f"{number}.ledger", population=f"bank_{number}", budget=budget))
            clients.append(Client(f"bank_{number}", data, training=training, ledger=ledger))
        loss = BinaryCrossEntropy(positive_weight=POSITIVE_WEIGHT)
        consortium = Consortium(clients, keys=Plaintext(), policy=OpeningPolicy(), params=PARAMS, loss=loss, correction=METHODS[method])
        simulation = stack.enter_context(Simulation(consortium, model))

        def note(_: object) -> None:
            curve.append(pr_auc(model, simulation.model_values, test))
            drifts.append(drift_of(simulation))
            tick()

        history = simulation.run(rounds=rounds, progress=note)
    return Outcome(
        method=method,
        private=private,
        local_steps=local_steps,
        seed=seed,
        bank_records=tuple(len(data) for data in banks),
        bank_frauds=tuple(int(data.labels.sum()) for data in banks),
        pr_auc=tuple(curve),
        drift=float(np.mean(drifts[len(drifts) // 2 :])),
        epsilon=max(history.epsilon.values()),
    )


def summarise(outcomes: Sequence[Outcome]) -> list[Summary]:
    """Means over seeds, in the order of the runs. The gain is over FedAvg with the same seed, privacy and local steps."""
    settings = dict.fromkeys((outcome.private, outcome.local_steps) for outcome in outcomes)
    summaries: list[Summary] = []
    for private, local_steps in settings:
        here = [outcome for outcome in outcomes if (outcome.private, outcome.local_steps) == (private, local_steps)]
        base = {outcome.seed: outcome.pr_auc[-1] for outcome in here if outcome.method == "FedAvg"}
        for method in METHODS:
            runs = [outcome for outcome in here if outcome.method == method]
            summaries.append(
                Summary(
                    method=method,
                    private=private,
                    local_steps=local_steps,
                    pr_auc=t_interval([run.pr_auc[-1] for run in runs]),
                    gain=t_interval([run.pr_auc[-1] - base[run.seed] for run in runs]),
                    drift=float(np.mean([run.drift for run in runs])),
                    epsilon=max(run.epsilon for run in runs),
                )
            )
    return summaries


def run(table: pd.DataFrame, size: Size) -> list[Outcome]:
    """All runs, with progress on stderr."""
    outcomes: list[Outcome] = []
    with round_bar() as bar:
        per_seed = 2 * len(METHODS) * sum(size.steps // local_steps for local_steps in size.local_steps)
        task = bar.add_task("", total=len(size.seeds) * per_seed)
        for seed in size.seeds:
            rng = np.random.default_rng(seed)
            training, test = grouped_split(features(table, PRE), test_share=TEST_SHARE, rng=rng)
            banks = banks_of(training, rng)
            for private in (False, True):
                for local_steps in size.local_steps:
                    for method in METHODS:
                        bar.update(task, description=f"seed {seed}, {method}{', DP-SGD' if private else ''}, {local_steps} steps")
                        setting = {"method": method, "private": private, "local_steps": local_steps, "seed": seed, "size": size}
                        outcomes.append(train(banks, test, **setting, tick=lambda: bar.advance(task)))  # type: ignore[arg-type]
    return outcomes


_HEAD = ("DP-SGD", "local steps", "method", "PR-AUC", "gain over FedAvg", "drift", "largest epsilon")


def cells(summary: Summary) -> tuple[str, ...]:
    """A summary as a row of `_HEAD`."""
    gain = signed(summary.gain) if summary.method != "FedAvg" else "-"
    epsilon = f"{summary.epsilon:.1f}" if summary.private else "-"
    private = "yes" if summary.private else "no"
    return private, str(summary.local_steps), summary.method, str(summary.pr_auc), gain, f"{summary.drift:.2f}", epsilon


def verdict(summary: Summary) -> str:
    """What the interval of the gain says, in a sentence."""
    where = f"{summary.method}, {summary.local_steps} local steps, {'with' if summary.private else 'without'} DP-SGD"
    if summary.gain.low > 0:
        return f"{where}: better than FedAvg by {summary.gain.estimate:.3f}."
    if summary.gain.high < 0:
        return f"{where}: worse than FedAvg by {-summary.gain.estimate:.3f}."
    return f"{where}: no difference from FedAvg that {summary.gain.low:+.3f} to {summary.gain.high:+.3f} would show."


def dossier(summaries: Sequence[Summary], outcomes: Sequence[Outcome], size: Size, source: Source, command: str) -> str:
    """The experiment as a Markdown page."""
    first = {outcome.seed: outcome for outcome in outcomes}
    versions = versions_of("privfed", "torch", "opacus", "numpy")
    lines = [
        "# Client drift: FedAvg, FedProx and SCAFFOLD at alpha 0.1",
        "",
        f"Made by `{command}`, which writes this page and its figure; do not edit them.",
        "",
        f"Data: {source.name}. **{source.origin}**",
        "",
        "## Result",
        "",
        *(f"* {verdict(summary)}" for summary in summaries if summary.method != "FedAvg"),
        "",
        f"PR-AUC on held-out transactions after {size.steps} steps at every bank, mean of {len(size.seeds)} seeds with its 95 % "
        "t-interval. The gain is the mean of the differences to FedAvg on the same seed, with its 95 % t-interval. Drift is the mean "
        "distance of the banks' updates from their mean, divided by the length of that mean, over the second half of the rounds: under "
        "DP-SGD most of it is noise.",
        "",
        f"| {' | '.join(_HEAD)} |",
        f"|{'---|' * len(_HEAD)}",
        *(f"| {' | '.join(cells(summary))} |" for summary in summaries),
        "",
        "![PR-AUC by local steps taken](drift.svg)",
        "",
        "## What was compared",
        "",
        f"* {BANKS} banks by label, Dirichlet alpha {EXTREME:g}, drawn anew until each has a hundredth of the records; a bank may have "
        "no fraud. Equal weights, because SCAFFOLD's variates follow from the opened mean only if all weigh the same.",
        f"* Features `pre`; the network has hidden layers of 64 and 32. Batches of {BATCH_SIZE}, frauds weighted {POSITIVE_WEIGHT:g} "
        f"times, learning rate {LEARNING_RATE:g}, proximal weight {PROXIMAL_WEIGHT:g}: chosen beforehand and the same for all methods; "
        "nothing was tuned for any of them.",
        f"* DP-SGD: noise multiplier {NOISE_MULTIPLIER:g}, clipping norm {MAX_GRAD_NORM:g}, Poisson batches of {BATCH_SIZE} expected. A "
        f"small bank draws a larger share of its records, so its epsilon (delta {DELTA:g}) is the largest one. Corrections are "
        "post-processing and cost nothing.",
        "* Banks with few records and no noise limit the privacy here, not the methods; epsilon is shown so that nobody takes these runs "
        "for a recommendation.",
        "",
        *bank_lines(first),
        "",
        f"Versions: {versions}.",
        "",
    ]
    return "\n".join(lines)


def draw(outcomes: Sequence[Outcome], size: Size, path: Path) -> None:
    """Mean PR-AUC by steps taken, a panel per setting."""
    import matplotlib as mpl  # noqa: PLC0415 # only those who write the figure need it
    from matplotlib.figure import Figure  # noqa: PLC0415

    settings = [(private, local_steps) for private in (False, True) for local_steps in size.local_steps]
    with mpl.rc_context({"svg.hashsalt": "drift", "font.size": 9}):
        figure = Figure(figsize=(8, 5.2), layout="constrained")
        panels = figure.subplots(2, len(size.local_steps), sharex=True, sharey=True, squeeze=False).ravel()
        for panel, (private, local_steps) in zip(panels, settings, strict=True):
            for method, style, colour in zip(METHODS, ("--", ":", "-"), ("tab:orange", "tab:green", "tab:blue"), strict=True):
                wanted = (method, private, local_steps)
                curves = [run.pr_auc for run in outcomes if (run.method, run.private, run.local_steps) == wanted]
                steps = local_steps * np.arange(1, len(curves[0]) + 1)
                panel.plot(steps, np.mean(curves, axis=0), style, color=colour, label=method)
            panel.set(title=f"{local_steps} local steps per round{', DP-SGD' if private else ''}", ylim=(0, 1.03))
            panel.grid(alpha=0.25)
        for panel in panels[-len(size.local_steps) :]:
            panel.set_xlabel("steps at each bank")
        for panel in panels[:: len(size.local_steps)]:
            panel.set_ylabel("PR-AUC")
        panels[0].legend(loc="lower right", frameon=False)
        figure.suptitle(f"PaySim, {BANKS} banks, Dirichlet alpha {EXTREME:g}: mean of {len(size.seeds)} seeds")
        figure.savefig(path, metadata={"Date": None})


def main(*, quick: Quick = False, as_json: AsJson = False, data: Data = None, output: Output = None) -> None:
    """Shows client drift at extreme label skew, and what FedProx and SCAFFOLD make of it.

    Exit status: 2 if there are no data or no matplotlib for the figure.
    """
    size = QUICK if quick else FULL
    folder = output or (None if quick else DOSSIER)
    table, source = prepare(data, quick=quick, folder=folder)
    outcomes = run(table, size)
    summaries = summarise(outcomes)
    if as_json:
        print_lines(source, run=outcomes, summary=summaries)
    else:
        title = f"PR-AUC on held-out transactions: mean of {len(size.seeds)} seeds (95 % interval)"
        print_table(title, _HEAD, map(cells, summaries), caption=source.origin)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        command = "python -m benchmarks.drift" + (f" --data {data.name}" if data else "")
        draw(outcomes, size, folder / "drift.svg")
        (folder / "drift.md").write_text(dossier(summaries, outcomes, size, source, command), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
