"""What scores cost, and what the checks for free riders find. `python -m benchmarks.contribution --help` says the rest.

Speed: Shapley values from one Gram matrix against averaging the updates again for every coalition, on the same updates. Encrypted:
what the Gram matrix of ciphertexts costs. Detection: clients with extremely skewed labels train on scikit-learn's digits, free riders
join them, and each check's hits are counted, and its false alarms of honest clients, also where labels are dealt evenly. Times are
processor time of one thread.
"""

import json
import math
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from rich.table import Table
from sklearn.datasets import load_digits
from threadpoolctl import threadpool_limits

from benchmarks import encrypted_gram
from benchmarks.experiment import wide_console
from privfed.aggregation.gram import Gram, gram
from privfed.aggregation.robust import FLTrust, GeometricMedian
from privfed.aggregation.rules import MultiKrum, NearestNeighbourMixing
from privfed.attacks.poisoning import Duplicate, Knowledge, PureNoise, Replay, UpdateAttack
from privfed.contribution.checks import check_round
from privfed.contribution.cosine import Cgsv
from privfed.contribution.estimators import Automatic, Exact, MonteCarlo
from privfed.contribution.trajectory import AsSent, FedTsv, TrajectoryGame
from privfed.data.partition import EXTREME, dirichlet_partition
from privfed.data.samples import Samples
from privfed.training.batched import train_together
from privfed.training.loss import cross_entropy
from privfed.training.mechanism import NonPrivate
from privfed.training.model import mlp, scores, values_of
from privfed.update import Layout, PlainVector

REQUIRED_EXACT, REQUIRED_SAMPLED, REQUIRED_SCORING_MS = 40.0, 60.0, 10.0
MISSED = 1

CLIENTS, RIDERS = 20, 2
MECHANISM = NonPrivate(learning_rate=0.1, batch_size=20, steps=12, seed=0)
RIDER_KINDS: Mapping[str, UpdateAttack] = {
    "nothing": Replay(factor=0.0),
    "replay": Replay(),
    "replay times 0.5": Replay(factor=0.5),
    "replay times -1": Replay(factor=-1.0),
    "replay plus a tenth of noise": Replay(noise=0.1),
    "replay plus as much noise": Replay(noise=1.0),
    "noise": PureNoise(norm=1.0),
    "duplicate": Duplicate(),
}
NOISE_RATIOS = (0.0, 1.0, 10.0, 100.0)
EVEN = 1000.0
"""Dirichlet alpha at which all clients have all labels alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """One comparison; seconds of the whole way from updates to Shapley values, the best of some runs.

    `extrapolated` says that averaging again was timed on a part of the permutations, whose time is the same for each.
    """

    way: str
    clients: int
    size: int
    gram_seconds: float
    values_seconds: float
    again_seconds: float
    extrapolated: bool
    factor: float
    largest_difference: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """Milliseconds of a rule or score on a Gram matrix that is there, the median of some runs."""

    name: str
    clients: int
    milliseconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """Share of the free riders of one kind that are flagged by any check, over all seeds and rounds."""

    kind: str
    found: float
    riders: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FalseAlarms:
    """Share of the honest clients that are flagged, by noise energy relative to the median energy of their updates without noise."""

    alpha: float
    noise_ratio: float
    flagged: float
    clients: int


def made_up_updates(clients: int, size: int, seed: int, *, long: int = 0) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Updates and a reference that have a direction in common; a fifth of the clients goes backwards, `long` of these ten times as far."""
    rng = np.random.default_rng(seed)
    base = rng.normal(size=size) / math.sqrt(size)
    rows = base + rng.normal(size=(clients, size)) / math.sqrt(size)
    rows[: clients // 5] *= -0.7
    rows[:long] *= 10
    return rows.astype(np.float32), (base + 0.5 * rng.normal(size=size) / math.sqrt(size)).astype(np.float32)


def exact_by_averaging_again(rows: NDArray[np.float32], reference: NDArray[np.float32]) -> NDArray[np.float64]:
    """Exact Shapley values with every coalition's mean formed from the updates, in float32 and without a detour."""
    clients, unit = len(rows), float(reference @ reference)
    worth = np.empty(1 << clients)
    worth[0] = 0.5
    for coalition in range(1, 1 << clients):
        mean = rows[[client for client in range(clients) if coalition >> client & 1]].mean(axis=0)
        mean -= reference
        worth[coalition] = 1 / (1 + float(mean @ mean) / unit)
    values = np.zeros(clients)
    for client in range(clients):
        for coalition in range(1 << clients):
            if not coalition >> client & 1:
                others = coalition.bit_count()
                values[client] += (worth[coalition | 1 << client] - worth[coalition]) / (clients * math.comb(clients - 1, others))
    return values


def sampled_by_averaging_again(rows: NDArray[np.float32], reference: NDArray[np.float32], orders: NDArray[np.int64]) -> NDArray[np.float64]:
    """Shapley values of permutations with a running sum of the updates, in float32."""
    unit = float(reference @ reference)
    values = np.zeros(len(rows))
    for order in orders:
        total, last = np.zeros_like(reference), 0.5
        for place, client in enumerate(order, start=1):
            total += rows[client]
            away = total / np.float32(place) - reference
            worth = 1 / (1 + float(away @ away) / unit)
            values[client] += worth - last
            last = worth
    return values / len(orders)


def compare(*, clients: int, size: int, permutations: int | None, again: int, repeats: int) -> Speed:
    """Times both ways. Without `permutations` exactly; else `again` of them are averaged again, and their time is scaled."""
    rows, reference = made_up_updates(clients, size, seed=0)
    layout = Layout(names=("w",), shapes=((size,),))
    updates = {f"c{index:03}": PlainVector(layout=layout, values=row) for index, row in enumerate(rows)}
    known = PlainVector(layout=layout, values=reference)
    rule = FedTsv(game=TrajectoryGame(scale=AsSent()), estimator=Exact() if permutations is None else MonteCarlo(permutations=permutations))
    gram_seconds = best(lambda: gram(updates, reference=known), repeats)
    matrix = gram(updates, reference=known)
    values_seconds = best(lambda: rule.scores(matrix), repeats)
    values = np.array(list(rule.scores(matrix).values()))
    start = time.process_time()
    if permutations is None:
        expected, factor = exact_by_averaging_again(rows, reference), 1.0
    else:
        orders = np.stack([np.random.default_rng(seed).permutation(clients) for seed in range(again)])
        expected, factor = sampled_by_averaging_again(rows, reference, orders), permutations / again
    again_seconds = (time.process_time() - start) * factor
    return Speed(
        way="exact" if permutations is None else f"{permutations} permutations",
        clients=clients,
        size=size,
        gram_seconds=gram_seconds,
        values_seconds=values_seconds,
        again_seconds=again_seconds,
        extrapolated=factor != 1,
        factor=again_seconds / (gram_seconds + values_seconds),
        largest_difference=float(np.abs(values - expected).max()),
    )


def best(run: Callable[[], object], repeats: int) -> float:
    """Least seconds of some runs: what the work takes where nothing else runs."""
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        seconds.append(time.process_time() - start)
    return min(seconds)


def time_scoring(clients: int, repeats: int) -> list[Scoring]:
    """Rules and scores on one Gram matrix."""
    layout = Layout(names=("w",), shapes=((1000,),))

    def matrix_of(long: int) -> Gram:
        rows, reference = made_up_updates(clients, layout.size, seed=1, long=long)
        return gram(
            {f"c{index:03}": PlainVector(layout=layout, values=row) for index, row in enumerate(rows)},
            reference=PlainVector(layout=layout, values=reference),
        )

    matrix, uneven = matrix_of(0), matrix_of(clients // 20)
    weights = dict.fromkeys(matrix.names, 1.0)
    byzantine = clients // 5
    krum, median = MultiKrum(byzantine=byzantine, keep=clients - byzantine), GeometricMedian()
    work: dict[str, Callable[[], object]] = {
        "FedTSV, estimator chosen automatically: strata": lambda: FedTsv(estimator=Automatic()).scores(matrix),
        "FedTSV, estimator chosen automatically, some ten times as long: 1000 permutations": lambda: FedTsv(estimator=Automatic()).scores(
            uneven
        ),
        "CGSV": lambda: Cgsv().step({}, matrix),
        "Multi-Krum": lambda: krum.mixture(weights, matrix),
        "geometric median": lambda: median.mixture(weights, matrix),
        "nearest-neighbour mixing, geometric median": lambda: NearestNeighbourMixing(byzantine=byzantine, rule=median).mixture(
            weights, matrix
        ),
        "FLTrust": lambda: FLTrust().mixture(weights, matrix),
        "all checks of a round": lambda: check_round(matrix, last=matrix.reference),
    }
    results = []
    for name, run in work.items():
        seconds = sorted(best(run, 1) for _ in range(repeats))
        results.append(Scoring(name=name, clients=clients, milliseconds=1e3 * seconds[len(seconds) // 2]))
    return results


def digits() -> Samples:
    """Handwritten digits of 8 x 8 pixels, from scikit-learn."""
    data = load_digits()
    return Samples(features=data.data / 16, labels=data.target, groups=None, columns=tuple(f"p{index}" for index in range(64)))


def detect(seeds: int, rounds: int, *, alpha: float = EXTREME) -> tuple[list[Detection], list[FalseAlarms], float]:
    """Hits, false alarms, and the accuracy that the honest clients' model had in the end, so that it is known to have trained."""
    samples = digits()
    hits, alarms = dict.fromkeys(RIDER_KINDS, 0), dict.fromkeys(NOISE_RATIOS, 0)
    checked, accuracy = 0, 0.0
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        clients = dirichlet_partition(samples, clients=CLIENTS, alpha=alpha, rng=rng, min_samples=20).split(samples)
        torch.manual_seed(seed)
        model = mlp(64, hidden=(64,), outputs=10)
        values, last = values_of(model), None
        for number in range(rounds):
            results = train_together(model, values, clients, mechanism=MECHANISM, loss=cross_entropy, round=number)
            honest = {f"honest_{index:02}": result.update_values for index, result in enumerate(results)}
            mean = PlainVector(layout=values.layout, values=np.mean([vector.values for vector in honest.values()], axis=0))
            if last is not None:
                for kind, attack in RIDER_KINDS.items():
                    hits[kind] += _riders_found(honest, attack, last, rng)
                for ratio in NOISE_RATIOS:
                    alarms[ratio] += _false_alarms(honest, last, ratio, rng)
                checked += 1
            values, last = PlainVector(layout=values.layout, values=values.values + mean.values), mean
        accuracy += float((scores(model, values, samples.features).argmax(axis=1) == samples.labels).mean()) / seeds
    return (
        [Detection(kind=kind, found=count / (checked * RIDERS), riders=checked * RIDERS) for kind, count in hits.items()],
        [
            FalseAlarms(alpha=alpha, noise_ratio=ratio, flagged=count / (checked * CLIENTS), clients=checked * CLIENTS)
            for ratio, count in alarms.items()
        ],
        accuracy,
    )


def _riders_found(honest: Mapping[str, PlainVector], attack: UpdateAttack, last: PlainVector, rng: np.random.Generator) -> int:
    others = list(honest.values())
    riders = {
        f"rider_{index}": attack.poison(Knowledge(own=others[0], honest=others[index:], last=last), rng=rng) for index in range(RIDERS)
    }
    matrix = gram(dict(honest) | riders, reference=last)
    return len(check_round(matrix, last=matrix.reference).flagged & set(riders))


def _false_alarms(honest: Mapping[str, PlainVector], last: PlainVector, ratio: float, rng: np.random.Generator) -> int:
    """Honest clients that are flagged when each adds noise of the same energy, declared as it is."""
    size = last.layout.size
    energy = ratio * float(np.median([vector.values @ vector.values for vector in honest.values()]))
    noisy = {
        name: PlainVector(layout=vector.layout, values=vector.values + rng.normal(size=size) * math.sqrt(energy / size))
        for name, vector in honest.items()
    }
    matrix = gram(noisy, reference=last, noise_energy=dict.fromkeys(noisy, energy))
    return len(check_round(matrix, last=matrix.reference).flagged)


def main(
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Seconds instead of minutes: one small case of each; not judged.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    output: Annotated[Path | None, typer.Option(help="Folder for the results as a page, contribution.md; by default none.")] = None,
) -> None:
    """Times scores against averaging again, and counts what the checks find at Dirichlet alpha 0.1.

    Exit status: 1 if a required factor is missed (but for --quick).
    """
    torch.set_num_threads(1)
    with threadpool_limits(1):  # both ways on one core
        measure(quick=quick, as_json=as_json, output=output)


def measure(*, quick: bool, as_json: bool, output: Path | None) -> None:
    """Everything, and the printing of it."""
    sizes, repeats = ((100_000,), 3) if quick else ((100_000, 1_000_000), 5)
    speeds = [compare(clients=10, size=size, permutations=None, again=0, repeats=repeats) for size in sizes]
    again = 2 if quick else 5
    speeds += [compare(clients=100, size=size, permutations=1000, again=again, repeats=repeats) for size in sizes]
    scoring = time_scoring(100, repeats=5 if quick else 15)
    seeds, rounds = (1, 4) if quick else (5, 25)
    detections, alarms, accuracy = detect(seeds, rounds)
    alarms += detect(seeds, rounds, alpha=EVEN)[1]
    encrypted = encrypted_gram.measure_all(clients=10, sizes=sizes)
    failures = [*missed(speeds, scoring), *encrypted_gram.missed(encrypted)]
    if as_json:
        report = {
            "machine": {
                "processor": platform.processor() or platform.machine(),
                "cores": os.cpu_count(),
                "python": platform.python_version(),
            },
            "speed": [asdict(speed) for speed in speeds],
            "scoring": [asdict(score) for score in scoring],
            "encrypted": [asdict(cost) for cost in encrypted],
            "alpha": EXTREME,
            "accuracy": accuracy,
            "detection": [asdict(detection) for detection in detections],
            "false_alarms": [asdict(alarm) for alarm in alarms],
            "missed": failures,
            "judged": not quick,
        }
        typer.echo(json.dumps(report, indent=2))
    else:
        print_tables(speeds, scoring, detections, alarms, accuracy)
        encrypted_gram.print_costs(encrypted)
        for failure in failures:
            typer.echo(failure, err=True)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        command = "python -m benchmarks.contribution" + (" --quick" if quick else "") + f" --output {output}"
        page = dossier(speeds, scoring, detections, alarms, accuracy, failures=failures, command=command)
        (output / "contribution.md").write_text(page, encoding="utf-8")
    if failures and not quick:
        raise typer.Exit(MISSED)


def dossier(
    speeds: list[Speed],
    scoring: list[Scoring],
    detections: list[Detection],
    alarms: list[FalseAlarms],
    accuracy: float,
    *,
    failures: list[str],
    command: str,
) -> str:
    """The results as a Markdown page."""
    lines = [
        "# What scores cost, and what the checks find",
        "",
        f"`{command}` made this page, on one thread of {platform.machine()} with {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, numpy {np.__version__}.",
        "",
        "## Shapley values: one Gram matrix against averaging again",
        "",
        "| way | clients | coordinates | Gram, ms | values, ms | averaging again, s | factor |",
        f"|{'---|' * 7}",
        *(
            f"| {speed.way} | {speed.clients} | {speed.size:,} | {1e3 * speed.gram_seconds:.1f} | {1e3 * speed.values_seconds:.1f} | "
            f"{speed.again_seconds:.1f}{' (scaled from a part)' if speed.extrapolated else ''} | {speed.factor:.0f} |"
            for speed in speeds
        ),
        "",
        f"Required at 100,000 coordinates are {REQUIRED_EXACT:g} times (exact, 10 clients) and {REQUIRED_SAMPLED:g} times (1000 "
        f"permutations, 100 clients), and {REQUIRED_SCORING_MS:g} ms for the scores of 100 clients once the Gram matrix is there. "
        + ("All of this is met." if not failures else f"Missed: {'; '.join(failures)}."),
        "",
        "| once the Gram matrix of 100 clients is there | ms |",
        "|---|---|",
        *(f"| {score.name} | {score.milliseconds:.2f} |" for score in scoring),
        "",
        f"## Free riders at Dirichlet alpha {EXTREME:g}",
        "",
        f"{RIDERS} riders join {CLIENTS} honest clients, who have few digits each and train a network of 64 hidden units on scikit-learn's "
        f"digits (accuracy in the end: {accuracy:.2f}).",
        "",
        "| a rider sends | found | of |",
        "|---|---|---|",
        *(f"| {detection.kind} | {detection.found:.1%} | {detection.riders} |" for detection in detections),
        "",
        "| alpha | energy of the declared noise, relative to that of an update | honest clients that are flagged | of |",
        "|---|---|---|---|",
        *(f"| {alarm.alpha:g} | {alarm.noise_ratio:g} | {alarm.flagged:.1%} | {alarm.clients} |" for alarm in alarms),
        "",
        "Where honest updates have little in common, because noise is longer than they are, or little but the last aggregate, because data "
        "are alike and the model hardly turns, the check for noise flags nobody: free riders who add noise escape there. A finding is a "
        "reason to ask, never evidence.",
        "",
    ]
    return "\n".join(lines)


def missed(speeds: list[Speed], scoring: list[Scoring]) -> list[str]:
    """Requirements that are not met, in words."""
    failures = []
    for speed in speeds:
        required = REQUIRED_EXACT if speed.way == "exact" else REQUIRED_SAMPLED
        if speed.size == 100_000 and speed.factor < required:
            failures.append(f"{speed.way} at {speed.clients} clients is {speed.factor:.0f} times faster, required are {required:.0f}")
    for score in scoring:
        if score.name.startswith("FedTSV") and score.milliseconds > REQUIRED_SCORING_MS:
            failures.append(f"{score.name} takes {score.milliseconds:.1f} ms, required are {REQUIRED_SCORING_MS:.0f}")
    return failures


def print_tables(
    speeds: list[Speed], scoring: list[Scoring], detections: list[Detection], alarms: list[FalseAlarms], accuracy: float
) -> None:
    """The results for a reader."""
    console = wide_console()
    table = Table(title="Shapley values: one Gram matrix against averaging again")
    for column in ("way", "clients", "coordinates", "Gram, ms", "values, ms", "again, s", "factor", "difference"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for speed in speeds:
        again = f"{speed.again_seconds:.2f}" + (" *" if speed.extrapolated else "")
        table.add_row(
            speed.way,
            str(speed.clients),
            f"{speed.size:,}",
            f"{1e3 * speed.gram_seconds:.1f}",
            f"{1e3 * speed.values_seconds:.1f}",
            again,
            f"{speed.factor:.0f}",
            f"{speed.largest_difference:.0e}",
        )
    console.print(table)
    console.print("* scaled from a part of the permutations, which are others: the difference is that of two samples")
    table = Table(title="Milliseconds once the Gram matrix is there")
    for column in ("rule", "clients", "ms"):
        table.add_column(column, justify="left" if column == "rule" else "right")
    for score in scoring:
        table.add_row(score.name, str(score.clients), f"{score.milliseconds:.2f}")
    console.print(table)
    table = Table(title=f"Free riders at Dirichlet alpha {EXTREME}: {RIDERS} beside {CLIENTS} honest clients")
    for column in ("sends", "found", "of"):
        table.add_column(column, justify="left" if column == "sends" else "right")
    for detection in detections:
        table.add_row(detection.kind, f"{detection.found:.1%}", str(detection.riders))
    console.print(table)
    table = Table(title="Honest clients that are flagged, by declared noise")
    for column in ("alpha", "noise energy / signal energy", "flagged", "of"):
        table.add_column(column, justify="right")
    for alarm in alarms:
        table.add_row(f"{alarm.alpha:g}", f"{alarm.noise_ratio:g}", f"{alarm.flagged:.1%}", str(alarm.clients))
    console.print(table)
    console.print(f"Accuracy of the honest clients' model in the end: {accuracy:.2f}")


if __name__ == "__main__":
    typer.run(main)
