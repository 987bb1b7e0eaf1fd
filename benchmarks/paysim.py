"""Federated and encrypted against central training on PaySim: what federation costs, and that encryption costs nothing.

Five banks with skewed labels train a fraud model without differential privacy. Per seed and feature set, on one split that keeps
frauds whole: central training on the pooled records, the encrypted federated run, and the same run in the clear. The last two
must agree bit for bit. `python -m benchmarks.paysim --help` says the rest.
"""

import json
import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import typer
from rich.table import Table
from torch import nn

from benchmarks.experiment import (
    DOSSIER,
    FILE,
    HIDDEN,
    TEST_SHARE,
    AsJson,
    Data,
    Interval,
    Output,
    Quick,
    Source,
    finite,
    first_model,
    pr_auc,
    prepare,
    ratio_interval,
    round_bar,
    t_interval,
    versions_of,
    wide_console,
)
from privfed.client import Client
from privfed.consortium import Consortium, Plaintext
from privfed.data.partition import CONSORTIUM, dirichlet_partition
from privfed.data.paysim import NOBAL, PRE, FeatureSet, features, grouped_split
from privfed.data.samples import Samples
from privfed.engines.local import simulate
from privfed.he.params import CkksParams
from privfed.he.secret import SharedKey
from privfed.history import History
from privfed.policy import OpeningPolicy
from privfed.training.dpsgd import train
from privfed.training.loss import BinaryCrossEntropy
from privfed.training.mechanism import NonPrivate
from privfed.training.model import values_of
from privfed.update import PlainVector

FEATURE_SETS = (NOBAL, PRE)
BANKS = 5
BATCH_SIZE = 512
POSITIVE_WEIGHT = 10.0
POLICY = OpeningPolicy(min_clients=3, max_share=0.75)
PARAMS = CkksParams.standard(bound=8.0)
REQUIRED_RATIO = 0.9
# PaySim caps a transaction at ten million, thieves split what is above it, and a victim with an empty account pays nothing: frauds
# of these amounts are found by looking at the amount alone.
GIVEAWAYS = (0.0, 1e7)
BROKEN = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How long the experiment takes: `steps` are those of one bank in one round."""

    seeds: tuple[int, ...]
    rounds: int
    steps: int
    learning_rates: tuple[float, ...]


FULL = Size(seeds=(0, 1, 2, 3, 4), rounds=40, steps=50, learning_rates=(0.3, 1.0))
QUICK = Size(seeds=(0, 1), rounds=2, steps=20, learning_rates=(0.3, 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One seed and feature set. PR-AUC is average precision on the test records; curves have a value per round."""

    feature_set: str
    seed: int
    bank_records: tuple[int, ...]
    bank_frauds: tuple[int, ...]
    weights: tuple[int, ...]
    test_records: int
    test_frauds: int
    central_learning_rate: float
    federated_learning_rate: float
    central_pr_auc: tuple[float, ...]
    federated_pr_auc: tuple[float, ...]
    central_without_giveaways: float
    federated_without_giveaways: float
    exact: bool
    grid_error_max: int | None
    parameters: int
    bytes_up_per_parameter: float
    bytes_down_per_parameter: float
    seconds_per_round: float
    plaintext_seconds_per_round: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A feature set over all seeds. `accepted` is None in a quick run, which is too short to be judged."""

    feature_set: str
    seeds: int
    central: Interval
    federated: Interval
    ratio: Interval
    central_without_giveaways: Interval
    federated_without_giveaways: Interval
    ratio_without_giveaways: Interval
    exact: bool
    grid_error_max: int | None
    accepted: bool | None


def declared_weights(sizes: Sequence[int], *, max_share: float = POLICY.max_share) -> tuple[int, ...]:
    """What the banks agree on in public: their sizes in whole thousands, at least 1, and no share above the largest."""
    thousands = [max(1, round(size / 1000)) for size in sizes]
    others = sum(thousands) - max(thousands)
    ceiling = math.floor(others * max_share / (1 - max_share))
    return tuple(min(weight, ceiling) for weight in thousands)


def split_among_banks(samples: Samples, rng: np.random.Generator) -> list[Samples]:
    """Five banks at Dirichlet alpha 0.5, each with a fiftieth of the records at least, but possibly without a fraud."""
    partition = dirichlet_partition(samples, clients=BANKS, alpha=CONSORTIUM, rng=rng, min_samples=len(samples) // 50)
    return partition.split(samples)


def train_centrally(
    data: Samples, model: nn.Module, *, learning_rate: float, seed: int, size: Size, test: Samples, tick: Callable[[], None]
) -> tuple[tuple[float, ...], PlainVector]:
    """Plain SGD on the pooled records, with as many steps per round as all banks do together. PR-AUC per round, and the weights."""
    values = values_of(model)
    mechanism = NonPrivate(learning_rate=learning_rate, batch_size=BATCH_SIZE, steps=size.steps * BANKS, seed=seed)
    curve: list[float] = []
    for number in range(size.rounds):
        loss = BinaryCrossEntropy(positive_weight=POSITIVE_WEIGHT)
        moved = train(model, values, data, mechanism=mechanism, loss=loss, round=number).update_values
        values = PlainVector(layout=values.layout, values=values.values + moved.values)
        curve.append(pr_auc(model, values, test))
        tick()
    return tuple(curve), values


def train_federated(
    banks: Sequence[Samples],
    model: nn.Module,
    *,
    keys: SharedKey | Plaintext,
    learning_rate: float,
    seed: int,
    size: Size,
    test: Samples,
    tick: Callable[[], None],
) -> History:
    """FedAvg with declared weights. The same arguments give the same updates, so only the keys differ between two runs."""
    clients = [
        Client(
            f"bank_{number}",
            data,
            weight=weight,
            training=NonPrivate(learning_rate=learning_rate, batch_size=BATCH_SIZE, steps=size.steps, seed=BANKS * seed + number),
        )
        for number, (data, weight) in enumerate(zip(banks, declared_weights([len(data) for data in banks]), strict=True))
    ]
    loss = BinaryCrossEntropy(positive_weight=POSITIVE_WEIGHT)
    consortium = Consortium(clients, keys=keys, policy=POLICY, params=PARAMS, loss=loss)
    return simulate(consortium, model, rounds=size.rounds, evaluation=test, progress=lambda _: tick())


def tune(training: Samples, model: nn.Module, *, seed: int, size: Size, rng: np.random.Generator, tick: Callable[[], None]) -> list[float]:
    """The best learning rate of central and of federated training, on validation records out of the training side alone."""
    fit, validation = grouped_split(training, test_share=TEST_SHARE, rng=rng)
    banks = split_among_banks(fit, rng)
    central, federated = [], []
    for rate in size.learning_rates:
        curve, _ = train_centrally(fit, model, learning_rate=rate, seed=seed, size=size, test=validation, tick=tick)
        central.append(curve[-1])
        history = train_federated(banks, model, keys=Plaintext(), learning_rate=rate, seed=seed, size=size, test=validation, tick=tick)
        federated.append(history.pr_auc[-1])
    return [size.learning_rates[int(np.argmax(reached))] for reached in (central, federated)]


def compare(table: pd.DataFrame, feature_set: FeatureSet, *, seed: int, size: Size, tick: Callable[[], None]) -> Outcome:
    """All runs of one seed and feature set. The seed decides split, partition, first model and order of records; keys are random."""
    rng = np.random.default_rng(seed)
    training, test = grouped_split(features(table, feature_set), test_share=TEST_SHARE, rng=rng)
    banks = split_among_banks(training, rng)
    model = first_model(training.columns, seed=seed)
    central_rate, rate = tune(training, model, seed=seed, size=size, rng=rng, tick=tick)
    central, central_values = train_centrally(training, model, learning_rate=central_rate, seed=seed, size=size, test=test, tick=tick)
    encrypted, plain = (
        train_federated(banks, model, keys=keys, learning_rate=rate, seed=seed, size=size, test=test, tick=tick)
        for keys in (SharedKey.generate(), Plaintext())
    )
    # The amount of a group is that of its first row, which the group is numbered by.
    amounts = table["amount"].to_numpy()[test.groups]
    others = test.take(np.flatnonzero(~np.isin(amounts, GIVEAWAYS)))
    return Outcome(
        feature_set=feature_set.name,
        seed=seed,
        bank_records=tuple(len(data) for data in banks),
        bank_frauds=tuple(int(data.labels.sum()) for data in banks),
        weights=declared_weights([len(data) for data in banks]),
        test_records=len(test),
        test_frauds=int(test.labels.sum()),
        central_learning_rate=central_rate,
        federated_learning_rate=rate,
        central_pr_auc=central,
        federated_pr_auc=encrypted.pr_auc,
        central_without_giveaways=pr_auc(model, central_values, others),
        federated_without_giveaways=pr_auc(model, encrypted.model, others),
        exact=np.array_equal(encrypted.model.values, plain.model.values) and encrypted.pr_auc == plain.pr_auc,
        grid_error_max=encrypted.grid_error_max,
        parameters=encrypted.model.layout.size,
        bytes_up_per_parameter=encrypted.bytes_up_per_parameter,
        bytes_down_per_parameter=encrypted.bytes_down_per_parameter,
        seconds_per_round=seconds_per_round(encrypted),
        plaintext_seconds_per_round=seconds_per_round(plain),
    )


def seconds_per_round(history: History) -> float:
    return sum(sum(summary.record.seconds.values()) for summary in history.rounds) / len(history.rounds)


def summarise(outcomes: Sequence[Outcome], *, judged: bool) -> Summary:
    """Means over the seeds of one feature set, and the verdict."""
    central, federated = [outcome.central_pr_auc[-1] for outcome in outcomes], [outcome.federated_pr_auc[-1] for outcome in outcomes]
    hard_central = [outcome.central_without_giveaways for outcome in outcomes]
    hard_federated = [outcome.federated_without_giveaways for outcome in outcomes]
    errors = [outcome.grid_error_max for outcome in outcomes]
    ratio = ratio_interval(federated, central)
    return Summary(
        feature_set=outcomes[0].feature_set,
        seeds=len(outcomes),
        central=t_interval(central),
        federated=t_interval(federated),
        ratio=ratio,
        central_without_giveaways=t_interval(hard_central),
        federated_without_giveaways=t_interval(hard_federated),
        ratio_without_giveaways=ratio_interval(hard_federated, hard_central),
        exact=all(outcome.exact for outcome in outcomes) and errors == [0] * len(errors),
        grid_error_max=None if None in errors else max(error for error in errors if error is not None),
        accepted=ratio.estimate >= REQUIRED_RATIO if judged else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that is printed or written."""

    command: str
    source: Source
    table: pd.DataFrame
    size: Size
    outcomes: tuple[Outcome, ...]
    summaries: tuple[Summary, ...]

    def json_lines(self) -> list[str]:
        """One line per seed and feature set (`kind` is run), then one per feature set (`kind` is summary); infinity is null."""
        lines = [{"kind": "run"} | asdict(outcome) for outcome in self.outcomes]
        lines += [{"kind": "summary"} | asdict(summary) for summary in self.summaries]
        return [json.dumps(finite({"command": self.command, "source": self.source.name} | line), allow_nan=False) for line in lines]


def print_tables(report: Report) -> None:
    judged = all(summary.accepted is not None for summary in report.summaries)
    seeds = len(report.size.seeds)

    def show(interval: Interval) -> str:
        return str(interval) if judged else f"{interval.estimate:.3f}"

    table = Table(
        title=f"PR-AUC on held-out transactions: mean of {seeds} seeds ({'95 % interval' if judged else 'too few for an interval'})",
        caption=f"Training is NonPrivate: no differential privacy. {report.source.origin}",
    )
    table.add_column("features")
    for summary in report.summaries:
        table.add_column(summary.feature_set, justify="right")
    rows: dict[str, Callable[[Summary], str]] = {
        "central": lambda summary: show(summary.central),
        "federated, encrypted": lambda summary: show(summary.federated),
        "ratio": lambda summary: show(summary.ratio),
        "ratio without giveaways": lambda summary: show(summary.ratio_without_giveaways),
        "equals the plaintext run": lambda summary: "bit for bit" if summary.exact else "[red]NO[/red]",
        "largest error of a sum": lambda summary: f"{summary.grid_error_max} steps of the grid",
    }
    for name, cell in rows.items():
        table.add_row(name, *(cell(summary) for summary in report.summaries))
    console = wide_console()
    console.print(table)
    console.print(f"Data: {report.source.name}", highlight=False)
    for summary in report.summaries:
        console.print(verdict(summary), highlight=False)


def verdict(summary: Summary) -> str:
    """What the ratio says, in a sentence."""
    if summary.accepted is None:
        return f"{summary.feature_set}: not judged, because a quick run is too short to learn from."
    relation = "at least" if summary.accepted else "BELOW"
    interval = f"95 % interval {summary.ratio.low:.3f} to {summary.ratio.high:.3f}"
    ratio = f"federated / central is {summary.ratio.estimate:.3f}, {relation} the required {REQUIRED_RATIO} ({interval})"
    return f"{summary.feature_set}: {ratio}."


def dossier(report: Report) -> str:
    """The experiment as a Markdown page, with nothing in it that changes from day to day but the seconds."""
    size, outcomes = report.size, report.outcomes
    frauds = report.table["amount"].to_numpy()[report.table["isFraud"].to_numpy() == 1]
    capped, empty = int((frauds == GIVEAWAYS[1]).sum()), int((frauds == GIVEAWAYS[0]).sum())
    precision, recall = emptied_accounts(report.table)
    steps = size.rounds * size.steps * BANKS
    rates = " or ".join(f"{rate:g}" for rate in size.learning_rates)
    versions = versions_of("privfed", "torch", "tenseal", "numpy", "scikit-learn")
    mean = {name: float(np.mean([getattr(outcome, name) for outcome in outcomes])) for name in _MEANS}
    exact = all(summary.exact for summary in report.summaries)
    parameters = " and ".join(str(count) for count in sorted({outcome.parameters for outcome in outcomes}))
    lines = [
        "# PaySim: federated and encrypted against central",
        "",
        f"Made by `{report.command}`, which writes this page and its figure; do not edit them.",
        "",
        f"Data: {report.source.name}. **{report.source.origin}** Training is plain SGD without differential privacy "
        "(`NonPrivate`): the page isolates what federation and encryption cost.",
        "",
        "## Result",
        "",
        *(f"* {verdict(summary)}" for summary in report.summaries),
        f"* The encrypted run (`SharedKey`) {'equals' if exact else '**DOES NOT EQUAL**'} the plaintext integer-sum run: all weights of "
        f"the final model, bit for bit, for {sum(outcome.exact for outcome in outcomes)} of {len(outcomes)} pairs of runs. Largest "
        f"error of an opened sum in any round: {', '.join(str(summary.grid_error_max) for summary in report.summaries)} grid steps.",
        "",
        f"PR-AUC (average precision) on held-out transactions after the last round, mean of {len(size.seeds)} seeds with its 95 % "
        "t-interval; ratio of the means with Fieller's 95 % interval for paired values:",
        "",
        "| features | test records | central | federated, encrypted | ratio |",
        "|---|---|---|---|---|",
        *(f"| {s.feature_set} | all | {s.central} | {s.federated} | {s.ratio} |" for s in report.summaries),
        *(
            f"| {s.feature_set} | without giveaways | {s.central_without_giveaways} | {s.federated_without_giveaways} "
            f"| {s.ratio_without_giveaways} |"
            for s in report.summaries
        ),
        "",
        f"Giveaways: {capped} of the {len(frauds)} frauds have the simulator's largest amount, {GIVEAWAYS[1]:,.0f}, and {empty} have the "
        "amount 0. The amount alone gives them away, so the lower rows leave all test records of these two amounts out: they show the "
        "harder task, and what is required is required of the upper rows. `pre` stays easy even so, because it knows the balance: of "
        f'all records, the rule "the amount is the payer\'s whole balance" finds frauds with precision {precision:.2f} and recall '
        f"{recall:.2f}.",
        "",
        "All seeds split the same file, so their results are not independent. The intervals show the spread between splits, partitions "
        "and first weights, not what another file would give.",
        "",
        "![PR-AUC after each round](paysim.svg)",
        "",
        "## What was compared",
        "",
        "* `nobal` knows type, hour and amount; `pre` also the balances before the transaction. Scaling is a public function of each "
        "row; nothing is fitted.",
        f"* Per seed, {100 * TEST_SHARE:.0f} % of the records are held out, and the two legs of a fraud stay on one side. The rest goes to "
        f"{BANKS} banks by label, Dirichlet with alpha {CONSORTIUM}, drawn anew until each bank has a fiftieth of the records; "
        "a bank may have no fraud.",
        f"* Both sides train the same network (hidden layers of {HIDDEN[0]} and {HIDDEN[1]}) from the same weights, with batches of "
        f"{BATCH_SIZE} and frauds weighted {POSITIVE_WEIGHT:g} times, for the same number of gradient steps: {steps:,} for central "
        f"training in one sequence, and {size.rounds} rounds of {size.steps} at each of {BANKS} banks side by side. The figure shows where "
        "each levels off; one long sequence favours central training.",
        f"* The learning rate of each side, {rates}, is the one that did best on validation records cut out of the training side of "
        f"that seed. These two rates (at 3, single banks diverged), batch size, fraud weight and rounds were fixed before, on {FILE} "
        "under other seeds, so that some test records of this page were seen then; the choices are the same for both sides. The weights "
        "after the last round are reported, not the best.",
        "* Weights of FedAvg are declared: the size of a bank in whole thousands, capped so that nobody exceeds the policy's "
        f"{100 * POLICY.max_share:.0f} % of the sum. Updates saturate at {PARAMS.bound:g} per coordinate and are rounded to "
        f"{PARAMS.amplitude:,} steps each way before encryption; the plaintext run rounds alike.",
        "",
        "## Runs",
        "",
        "| features | seed | records per bank | frauds per bank | weights | test frauds | learning rate central, federated | central "
        "| federated | equal |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(_row(outcome) for outcome in outcomes),
        "",
        "## What it cost",
        "",
        f"An encrypted round took {mean['seconds_per_round']:.2f} s for all {BANKS} banks and the server, and a plaintext round "
        f"{mean['plaintext_seconds_per_round']:.2f} s, on the machine that made this page. "
        f"A bank sent {mean['bytes_up_per_parameter']:.1f} bytes per parameter and round and "
        f"received {mean['bytes_down_per_parameter']:.1f}: models of {parameters} "
        f"parameters fill part of the one ciphertext of {PARAMS.poly_modulus_degree} numbers, and only that part of it travels.",
        "",
        f"Versions: Python {platform.python_version()}, {versions}; torch on one thread. Seeds: "
        f"{', '.join(str(seed) for seed in size.seeds)}. Keys are never seeded; they change no number but the seconds.",
    ]
    return "\n".join(lines) + "\n"


_MEANS = ("seconds_per_round", "plaintext_seconds_per_round", "bytes_up_per_parameter", "bytes_down_per_parameter")


def emptied_accounts(table: pd.DataFrame) -> tuple[float, float]:
    """Precision and recall of the rule that a transaction of exactly the payer's balance is a fraud."""
    fraud, flagged = table["isFraud"].to_numpy() == 1, (table["amount"] == table["oldbalanceOrg"]).to_numpy()
    found = int((fraud & flagged).sum())
    return found / max(int(flagged.sum()), 1), found / max(int(fraud.sum()), 1)


def _row(outcome: Outcome) -> str:
    cells = (
        outcome.feature_set,
        outcome.seed,
        ", ".join(map(str, outcome.bank_records)),
        ", ".join(map(str, outcome.bank_frauds)),
        ", ".join(map(str, outcome.weights)),
        outcome.test_frauds,
        f"{outcome.central_learning_rate:g}, {outcome.federated_learning_rate:g}",
        f"{outcome.central_pr_auc[-1]:.3f}",
        f"{outcome.federated_pr_auc[-1]:.3f}",
        "yes" if outcome.exact else "**no**",
    )
    return f"| {' | '.join(map(str, cells))} |"


def draw(report: Report, path: Path) -> None:
    """PR-AUC after each round, a panel per feature set; the same report gives the same bytes."""
    import matplotlib as mpl  # noqa: PLC0415 # only those who write the figure need it
    from matplotlib.figure import Figure  # noqa: PLC0415

    with mpl.rc_context({"svg.hashsalt": "paysim", "font.size": 9}):
        figure = Figure(figsize=(8, 3.4), layout="constrained")
        panels = figure.subplots(1, len(report.summaries), sharey=True, squeeze=False)[0]
        rounds = np.arange(1, report.size.rounds + 1)
        for panel, summary in zip(panels, report.summaries, strict=True):
            outcomes = [outcome for outcome in report.outcomes if outcome.feature_set == summary.feature_set]
            for curves, name, style, colour in (
                ([outcome.central_pr_auc for outcome in outcomes], "central", "--", "tab:orange"),
                ([outcome.federated_pr_auc for outcome in outcomes], "federated, encrypted", "-", "tab:blue"),
            ):
                intervals = [t_interval(values) for values in zip(*curves, strict=True)]
                panel.plot(rounds, [interval.estimate for interval in intervals], style, color=colour, label=name)
                low, high = (np.clip([getattr(interval, end) for interval in intervals], 0, 1) for end in ("low", "high"))
                panel.fill_between(rounds, low, high, color=colour, alpha=0.18, linewidth=0)
            required = REQUIRED_RATIO * summary.central.estimate
            panel.axhline(required, color="0.35", linestyle=":", label=f"{REQUIRED_RATIO} of central after the last round")
            panel.set(title=f"features {summary.feature_set}", xlabel="round", xlim=(1, report.size.rounds), ylim=(0, 1.03))
            panel.grid(alpha=0.25)
        panels[0].set_ylabel("PR-AUC, held-out transactions")
        panels[-1].legend(loc="lower right", frameon=False)
        figure.suptitle(f"PaySim, {BANKS} banks, Dirichlet alpha {CONSORTIUM}: mean of {len(report.size.seeds)} seeds, 95 % t-interval")
        figure.savefig(path, metadata={"Date": None})


def main(*, quick: Quick = False, as_json: AsJson = False, data: Data = None, output: Output = None) -> None:
    """Compares federated, encrypted training with central training on PaySim, and with the same run in the clear.

    Exit status: 1 if the encrypted run is not exact, or (but for --quick) federated training is below 0.9 of central; 2 if there
    are no data or no matplotlib for the figure.
    """
    size = QUICK if quick else FULL
    folder = output or (None if quick else DOSSIER)
    table, source = prepare(data, quick=quick, folder=folder)
    report = run(table, size, source=source, command=_command(quick=quick, data=data), judged=not quick)
    if as_json:
        typer.echo("\n".join(report.json_lines()))
    else:
        print_tables(report)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        draw(report, folder / "paysim.svg")
        (folder / "paysim.md").write_text(dossier(report), encoding="utf-8")
    if any(not summary.exact or summary.accepted is False for summary in report.summaries):
        raise typer.Exit(BROKEN)


def run(table: pd.DataFrame, size: Size, *, source: Source, command: str, judged: bool) -> Report:
    """All runs, with progress on stderr."""
    outcomes: list[Outcome] = []
    with round_bar() as bar:
        trainings = 2 * len(size.learning_rates) + 3
        task = bar.add_task("", total=len(FEATURE_SETS) * len(size.seeds) * trainings * size.rounds)
        for feature_set in FEATURE_SETS:
            for seed in size.seeds:
                bar.update(task, description=f"{feature_set.name}, seed {seed}")
                outcomes.append(compare(table, feature_set, seed=seed, size=size, tick=lambda: bar.advance(task)))
    summaries = tuple(
        summarise([outcome for outcome in outcomes if outcome.feature_set == feature_set.name], judged=judged)
        for feature_set in FEATURE_SETS
    )
    return Report(command=command, source=source, table=table, size=size, outcomes=tuple(outcomes), summaries=summaries)


def _command(*, quick: bool, data: Path | None) -> str:
    return "python -m benchmarks.paysim" + (" --quick" if quick else "") + (f" --data {data.name}" if data else "")


if __name__ == "__main__":
    typer.run(main)
