"""How unlike the banks' labels may be: Dirichlet alpha 0.1, 0.5 and 1.0 under FedAvg, FedProx and SCAFFOLD on PaySim.

All methods see the same banks, first weights and seeds. Runs are in the clear and without differential privacy: an encrypted run of the
same updates gives the same model, bit for bit. `python -m benchmarks.alpha_sweep --help` says the rest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import typer

from benchmarks import drift
from benchmarks.drift import BANKS, BATCH_SIZE, LEARNING_RATE, METHODS, POSITIVE_WEIGHT, PROXIMAL_WEIGHT, banks_of
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
    prepare,
    print_lines,
    print_table,
    round_bar,
    signed,
    t_interval,
    versions_of,
)
from privfed.data.divergence import divergence_table
from privfed.data.partition import CONSORTIUM, EXTREME, MODERATE
from privfed.data.paysim import PRE, features, grouped_split
from privfed.data.samples import Samples

ALPHAS = (EXTREME, CONSORTIUM, MODERATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How long the experiment takes: `local_steps` steps at every bank in each round."""

    seeds: tuple[int, ...]
    rounds: int
    local_steps: int


FULL = Size(seeds=(0, 1, 2, 3, 4), rounds=40, local_steps=20)
QUICK = Size(seeds=(0, 1), rounds=2, local_steps=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run. `pr_auc` has a value per round; drift is how far the banks' updates are from their mean, relative to it.

    Divergences are those of each bank's labels from all labels: in nats, and from 0 to 1.
    """

    alpha: float
    method: str
    seed: int
    pr_auc: tuple[float, ...]
    drift: float
    bank_records: tuple[int, ...]
    bank_frauds: tuple[int, ...]
    kl_divergence: tuple[float, ...]
    total_variation: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A method at one alpha over all seeds, and how it differs from FedAvg on the same seeds."""

    alpha: float
    method: str
    pr_auc: Interval
    gain: Interval
    drift: Interval
    kl_divergence: float
    total_variation: float


def run(table: pd.DataFrame, source: Source, size: Size, finished: FinishedRuns) -> list[Outcome]:
    """All runs, with progress on stderr; those that are finished, from where they are kept."""
    outcomes: list[Outcome] = []
    with round_bar() as bar:
        task = bar.add_task("", total=len(size.seeds) * len(ALPHAS) * len(METHODS) * size.rounds)
        for seed in size.seeds:
            training, test = grouped_split(features(table, PRE), test_share=TEST_SHARE, rng=np.random.default_rng(seed))
            for alpha in ALPHAS:
                banks = banks_of(training, np.random.default_rng((seed, round(100 * alpha))), alpha=alpha)
                for method in METHODS:
                    bar.update(task, description=f"seed {seed}, alpha {alpha:g}, {method}")
                    key = ("alpha sweep", source.name, size.rounds, size.local_steps, seed, alpha, method)
                    one = partial(train_one, banks, test, alpha=alpha, method=method, seed=seed, size=size, tick=lambda: bar.advance(task))
                    outcomes.append(finished.take(Outcome, *key, run=one, spared=lambda: bar.advance(task, size.rounds)))
    return outcomes


def train_one(
    banks: Sequence[Samples], test: Samples, *, alpha: float, method: str, seed: int, size: Size, tick: Callable[[], object]
) -> Outcome:
    """One method on one deal of the records; `tick` is called after each round."""
    steps = drift.Size(seeds=(seed,), steps=size.rounds * size.local_steps, local_steps=(size.local_steps,))
    done = drift.train(banks, test, method=method, private=False, local_steps=size.local_steps, seed=seed, size=steps, tick=tick)
    divergence = divergence_table([bank.labels for bank in banks])
    return Outcome(
        alpha=alpha,
        method=method,
        seed=seed,
        pr_auc=done.pr_auc,
        drift=done.drift,
        bank_records=done.bank_records,
        bank_frauds=done.bank_frauds,
        kl_divergence=tuple(divergence["kl_divergence"].tolist()),
        total_variation=tuple(divergence["total_variation"].tolist()),
    )


def summarise(outcomes: Sequence[Outcome]) -> list[Summary]:
    """Means over seeds. The gain is over FedAvg with the same seed and alpha; divergences are means over banks and seeds."""
    summaries: list[Summary] = []
    for alpha in ALPHAS:
        here = [outcome for outcome in outcomes if outcome.alpha == alpha]
        base = {outcome.seed: outcome.pr_auc[-1] for outcome in here if outcome.method == "FedAvg"}
        for method in METHODS:
            runs = [outcome for outcome in here if outcome.method == method]
            summaries.append(
                Summary(
                    alpha=alpha,
                    method=method,
                    pr_auc=t_interval([run.pr_auc[-1] for run in runs]),
                    gain=t_interval([run.pr_auc[-1] - base[run.seed] for run in runs]),
                    drift=t_interval([run.drift for run in runs]),
                    kl_divergence=float(np.mean([run.kl_divergence for run in runs])),
                    total_variation=float(np.mean([run.total_variation for run in runs])),
                )
            )
    return summaries


_HEAD = ("alpha", "method", "PR-AUC", "gain over FedAvg", "drift", "KL", "TVD")


def cells(summary: Summary) -> tuple[str, ...]:
    """A summary as a row of `_HEAD`."""
    gain = signed(summary.gain) if summary.method != "FedAvg" else "-"
    drifted = f"{summary.drift.estimate:.2f} ({summary.drift.low:.2f} to {summary.drift.high:.2f})"
    divergences = f"{summary.kl_divergence:.5f}", f"{summary.total_variation:.5f}"
    return f"{summary.alpha:g}", summary.method, str(summary.pr_auc), gain, drifted, *divergences


def verdict(summary: Summary) -> str:
    """What the interval of the gain says, in a sentence."""
    where = f"alpha {summary.alpha:g}, {summary.method}"
    if summary.gain.low > 0:
        return f"{where}: better than FedAvg by {summary.gain.estimate:.3f}."
    if summary.gain.high < 0:
        return f"{where}: worse than FedAvg by {-summary.gain.estimate:.3f}."
    return f"{where}: no difference from FedAvg that {summary.gain.low:+.3f} to {summary.gain.high:+.3f} would show."


def dossier(summaries: Sequence[Summary], outcomes: Sequence[Outcome], size: Size, source: Source, command: str) -> str:
    """The experiment as a Markdown page."""
    banks = [outcome for outcome in outcomes if outcome.method == "FedAvg"]
    lines = [
        "# Unlike banks: alpha 0.1, 0.5 and 1.0",
        "",
        f"Made by `{command}`, which writes this page and its figure; do not edit them.",
        "",
        f"Data: {source.name}. **{source.origin}** Training is plain SGD without differential privacy.",
        "",
        "## Result",
        "",
        *(f"* {verdict(summary)}" for summary in summaries if summary.method != "FedAvg"),
        "",
        f"PR-AUC on held-out transactions after {size.rounds} rounds of {size.local_steps} steps at every bank, mean of {len(size.seeds)} "
        "seeds with its 95 % t-interval. The gain is the mean of the differences to FedAvg on the same seed and banks, with its 95 % "
        "t-interval. Drift is the mean distance of the banks' updates from their mean, divided by the length of that mean, over the second "
        "half of the rounds. KL (nats) and TVD (from 0 to 1) are those of a bank's labels from all labels, means over banks and seeds: "
        "with so few frauds both are small at every alpha, though most frauds may be at one bank.",
        "",
        f"| {' | '.join(_HEAD)} |",
        f"|{'---|' * len(_HEAD)}",
        *(f"| {' | '.join(cells(summary))} |" for summary in summaries),
        "",
        "All seeds split the same file, so their results are not independent. The intervals show the spread between splits, partitions and "
        "first weights, not what another file would give.",
        "",
        "![PR-AUC after each round](alpha_sweep.svg)",
        "",
        "## What was compared",
        "",
        f"* {BANKS} banks by label, Dirichlet with each alpha, drawn anew until each has a hundredth of the records; a bank may have no "
        "fraud. Equal weights, because SCAFFOLD's variates follow from the opened mean only if all weigh the same.",
        f"* Features `pre`; hidden layers of {HIDDEN[0]} and {HIDDEN[1]}. Batches of {BATCH_SIZE}, frauds weighted {POSITIVE_WEIGHT:g} "
        f"times, learning rate {LEARNING_RATE:g}, proximal weight {PROXIMAL_WEIGHT:g}: chosen beforehand and the same for all; nothing was "
        "tuned for any of them.",
        f"* {100 * TEST_SHARE:.0f} % of the records are held out, and the two legs of a fraud stay on one side and at one bank.",
        "",
        "## Banks",
        "",
        "| alpha | seed | records per bank | frauds per bank | KL per bank | TVD per bank |",
        "|---|---|---|---|---|---|",
        *(
            f"| {run.alpha:g} | {run.seed} | {', '.join(map(str, run.bank_records))} | {', '.join(map(str, run.bank_frauds))} "
            f"| {', '.join(f'{value:.4f}' for value in run.kl_divergence)} | {', '.join(f'{value:.4f}' for value in run.total_variation)} |"
            for run in sorted(banks, key=lambda run: (run.alpha, run.seed))
        ),
        "",
        f"Versions: {versions_of('privfed', 'torch', 'numpy')}.",
        "",
    ]
    return "\n".join(lines)


def draw(outcomes: Sequence[Outcome], size: Size, path: Path) -> None:
    """Mean PR-AUC after each round with its 95 % interval, a panel per alpha."""
    import matplotlib as mpl  # noqa: PLC0415 # only those who write the figure need it
    from matplotlib.figure import Figure  # noqa: PLC0415

    with mpl.rc_context({"svg.hashsalt": "alpha_sweep", "font.size": 9}):
        figure = Figure(figsize=(9, 3.3), layout="constrained")
        panels = figure.subplots(1, len(ALPHAS), sharey=True)
        rounds = np.arange(1, size.rounds + 1)
        for panel, alpha in zip(panels, ALPHAS, strict=True):
            for method, style, colour in zip(METHODS, ("--", ":", "-"), ("tab:orange", "tab:green", "tab:blue"), strict=True):
                curves = [run.pr_auc for run in outcomes if (run.alpha, run.method) == (alpha, method)]
                intervals = [t_interval(values) for values in zip(*curves, strict=True)]
                panel.plot(rounds, [interval.estimate for interval in intervals], style, color=colour, label=method)
                low, high = (np.clip([getattr(interval, end) for interval in intervals], 0, 1) for end in ("low", "high"))
                panel.fill_between(rounds, low, high, color=colour, alpha=0.12, linewidth=0)
            panel.set(title=f"alpha {alpha:g}", xlabel="round", ylim=(0, 1.03))
            panel.grid(alpha=0.25)
        panels[0].set_ylabel("PR-AUC, held-out transactions")
        panels[-1].legend(loc="lower right", frameon=False)
        figure.suptitle(f"PaySim, {BANKS} banks: mean of {len(size.seeds)} seeds, 95 % t-interval")
        figure.savefig(path, metadata={"Date": None})


def main(*, quick: Quick = False, as_json: AsJson = False, data: Data = None, output: Output = None, cache: Cache = None) -> None:
    """Shows how FedAvg, FedProx and SCAFFOLD fare as the banks' labels become more alike.

    Exit status: 2 if there are no data or no matplotlib for the figure.
    """
    size = QUICK if quick else FULL
    folder = output or (None if quick else DOSSIER)
    table, source = prepare(data, quick=quick, folder=folder)
    outcomes = run(table, source, size, FinishedRuns(folder=cache))
    summaries = summarise(outcomes)
    if as_json:
        print_lines(source, run=outcomes, summary=summaries)
    else:
        title = f"PR-AUC on held-out transactions: mean of {len(size.seeds)} seeds (95 % interval)"
        print_table(title, _HEAD, map(cells, summaries), caption=source.origin)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        command = "python -m benchmarks.alpha_sweep" + (f" --data {data.name}" if data else "")
        draw(outcomes, size, folder / "alpha_sweep.svg")
        (folder / "alpha_sweep.md").write_text(dossier(summaries, outcomes, size, source, command), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
