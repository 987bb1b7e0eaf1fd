"""What a whole round costs, by its parts: plain FedAvg, with DP-SGD, encrypted, both, and under a threshold of key holders.

All ways train the same network on the same number of records in as many steps, all parties in one process and one after the other, each
way in a process of its own, in turns. `python -m benchmarks.round --help` says the rest.
"""

import json
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import torch
import typer
from torch import nn

from benchmarks.experiment import DOSSIER, AsJson, Cache, FinishedRuns, Output, need_matplotlib, print_table, round_bar, versions_of
from benchmarks.he.meter import Meter
from privfed.agreement import DIGEST_BYTES
from privfed.client import Client, Trainer
from privfed.consortium import Consortium, Plaintext
from privfed.data.samples import Samples
from privfed.dp.ledger import Ledger
from privfed.dp.mechanism import Budget
from privfed.engines.local import Simulation
from privfed.he.params import SEALED_TAGS_BYTES, SEED_BYTES, CkksParams
from privfed.he.secret import SharedKey
from privfed.he.threshold_key import ThresholdKey
from privfed.history import RoundSummary
from privfed.identity import SIGNATURE_BYTES
from privfed.policy import OpeningPolicy
from privfed.session import ClientSession
from privfed.threshold_session import ThresholdSession
from privfed.training.compiled import compile_sum
from privfed.training.loss import BinaryCrossEntropy
from privfed.training.mechanism import DpSgd, NonPrivate
from privfed.training.model import layout_of, mlp

REQUIRED_SECONDS, REQUIRED_BYTES, REQUIRED_BYTES_PARITY = 1.3, 2.0, 1.05
COLUMNS = 11
LOSS = BinaryCrossEntropy(positive_weight=10.0)
LEARNING_RATE, BOUND = 0.1, 8.0
FLOAT32_BYTES = 4
PARTS = ("train", "protect", "wire", "sum", "open")


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a round is held.

    Args:
        name: For tables.
        private: Whether the clients train with DP-SGD.
        keys: `none` for rounds in the clear, `shared`, or `threshold`.
        parity: Whether the parameters are those with as many bytes as float32.
        compiled: Whether the sums of DP-SGD are compiled.
        looks_every_round: Whether every training looks anew at whether its model is steady, which once is enough for.
    """

    name: str
    private: bool = False
    keys: str = "none"
    parity: bool = False
    compiled: bool = False
    looks_every_round: bool = False


PLAIN = Way(name="FedAvg")
DP = Way(name="+ DP", private=True)
HE = Way(name="+ HE", keys="shared")
BOTH = Way(name="+ DP + HE", private=True, keys="shared")
PARITY = Way(name="+ DP + HE, parity", private=True, keys="shared", parity=True)
UNMENDED = Way(name="+ DP + HE, model looked at in every round", private=True, keys="shared", looks_every_round=True)
DP_COMPILED = Way(name="+ DP, compiled", private=True, compiled=True)
COMPILED = Way(name="+ DP + HE, compiled", private=True, keys="shared", compiled=True)
THRESHOLD = Way(name="ThresholdKey + DP", private=True, keys="threshold")
WAYS = (PLAIN, DP, HE, BOTH, PARITY, THRESHOLD, UNMENDED, DP_COMPILED, COMPILED)
AFTER_MENDING = (PLAIN, DP, HE, BOTH, UNMENDED)
WIDE_WAYS = (PLAIN, DP, BOTH, PARITY, DP_COMPILED, COMPILED)
SCALED = (PLAIN, BOTH, PARITY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What every way is given: clients with so many records each, a network, and steps of so many records."""

    clients: int
    records: int
    hidden: tuple[int, ...]
    batch: int
    steps: int
    rounds: int
    turns: int

    def model(self) -> nn.Module:
        """The network; its first weights are always the same."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return mlp(COLUMNS, hidden=self.hidden)

    @property
    def parameters(self) -> int:
        """Numbers in an update."""
        return layout_of(self.model()).size

    def tables(self) -> list[Samples]:
        """Made-up records of each client."""
        columns = tuple(f"column_{place}" for place in range(COLUMNS))
        tables = []
        for place in range(self.clients):
            features = np.random.default_rng(place).standard_normal((self.records, COLUMNS), dtype=np.float32)
            tables.append(Samples(features=features, labels=(features[:, 0] > 2).astype(np.int64), groups=None, columns=columns))
        return tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """A round of one way.

    Args:
        way: Its name.
        clients: Number of clients.
        parameters: Numbers in an update.
        steps: Steps of each client.
        seconds: Wall-clock seconds of the fastest round, of all parties one after the other: other work on a machine only ever adds.
        cpu_seconds: Processor seconds of the round with the fewest: waiting, for the disk above all, is not in them.
        parts: Seconds of that round by part. `train` charges the ledger and trains; `protect` derives keys, rounds and encrypts; `wire`
            is messages, signatures, what is stored, digest and approvals; `sum` is the server's, `open` that of all clients.
        bytes_up: Mean bytes that a client sent. In the clear, those of the weights as float32.
        bytes_down: Mean bytes that a client received, likewise.
        peak_megabytes: Memory at the peak of the rounds, above what the process held before them.
    """

    way: str
    clients: int
    parameters: int
    steps: int
    seconds: float
    cpu_seconds: float
    parts: Mapping[str, float]
    bytes_up: float
    bytes_down: float
    peak_megabytes: float


BANKS = Work(clients=5, records=200_000, hidden=(64, 48), batch=512, steps=390, rounds=3, turns=1)
SHORT = replace(BANKS, steps=39)
# The layers of `benchmarks.dp_sgd`.
WIDE = replace(BANKS, hidden=(128, 64))
_SMALL = Work(clients=5, records=1000, hidden=(64, 48), batch=64, steps=1, rounds=2, turns=1)
FULL: tuple[tuple[Work, tuple[Way, ...]], ...] = ((BANKS, WAYS), (WIDE, WIDE_WAYS), (SHORT, AFTER_MENDING))
CLIENTS = tuple(replace(_SMALL, clients=clients) for clients in (2, 5, 10, 30, 100))
# One hidden layer of as many neurons as make about that many parameters.
PARAMETERS = tuple(replace(_SMALL, hidden=(size // (COLUMNS + 2),)) for size in (10_000, 20_000, 50_000, 100_000, 1_000_000))
# Ten million in two layers: in one so wide, products round a record's gradient by its place in the batch, which DP-SGD refuses.
LARGE = (replace(_SMALL, hidden=(3150, 3150)),)
_TINY = Work(clients=5, records=2000, hidden=(64, 48), batch=64, steps=5, rounds=2, turns=1)
QUICK: tuple[tuple[Work, tuple[Way, ...]], ...] = ((_TINY, (PLAIN, DP, BOTH, THRESHOLD)),)
QUICK_CLIENTS, QUICK_PARAMETERS = (replace(_TINY, clients=2, steps=1),), (replace(_TINY, hidden=(800,), steps=1),)


@contextmanager
def parted(inside: dict[str, float]) -> Iterator[None]:
    """Adds up the seconds in which clients train and protect, wherever in a round that is."""

    def timed(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                inside[part] = inside.get(part, 0.0) + time.perf_counter() - start

        return call

    with ExitStack() as stack:
        for owner, method, part in (
            (Trainer, "train", "train"),
            (ClientSession, "_protect", "protect"),
            (ThresholdSession, "_protect", "protect"),
        ):
            stack.enter_context(patch.object(owner, method, timed(getattr(owner, method), part)))
        yield


def hold(way: Way, work: Work) -> Cost:
    """The fastest of some rounds, of which the first does not count."""
    torch.set_num_threads(1)
    model = work.model()
    private = DpSgd(
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=work.batch / work.records,
        expected_batch_size=work.batch,
        steps=work.steps,
        learning_rate=LEARNING_RATE,
        max_records=work.records,
    )
    compiled = compile_sum(model, mechanism=private, loss=LOSS, inputs=COLUMNS) if way.compiled else None
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="privfed-round-")))
        clients = []
        for place, data in enumerate(work.tables()):
            name, ledger = f"bank_{place:03}", None
            if way.private:
                budget = Budget.unlimited(delta=1e-7)
                ledger = stack.enter_context(Ledger.open(folder / f"{place}.ledger", population=name, budget=budget))
            plain = NonPrivate(learning_rate=LEARNING_RATE, batch_size=work.batch, steps=work.steps, seed=place)
            clients.append(Client(name, data, training=private if way.private else plain, ledger=ledger, compiled=compiled))
        keys: Any = Plaintext() if way.keys == "none" else SharedKey.generate()
        params = CkksParams.parity(clients=work.clients, bound=BOUND) if way.parity else CkksParams.standard(bound=BOUND)
        if way.keys == "threshold":
            keys = ThresholdKey(clients=work.clients, corrupted=1, dropouts=1)
            params = CkksParams.threshold(clients=work.clients, bound=BOUND)
        policy = OpeningPolicy(min_clients=2, max_share=0.75)
        consortium = Consortium(clients, keys=keys, policy=policy, params=params, loss=LOSS)
        simulation = stack.enter_context(Simulation(consortium, model))
        if way.looks_every_round:
            for trainer in simulation._trainers.values():
                trainer._steady = None
        meter, inside, rounds, processor = Meter(), dict[str, float](), list[dict[str, float]](), list[float]()
        whole = simulation._rounds.hold

        def timed(*arguments: Any, **named: Any) -> Any:
            start = time.process_time()
            held = whole(*arguments, **named)
            processor.append(time.process_time() - start)
            return held

        def note(summary: RoundSummary) -> None:
            rounds.append(parts_of(summary.record.seconds, inside))
            inside.clear()

        with parted(inside), patch.object(simulation._rounds, "hold", timed), meter:
            history = simulation.run(rounds=work.rounds, progress=note)
    fastest = min(rounds[1:], key=lambda parts: sum(parts.values()))
    size = history.model.layout.size
    in_the_clear = float(FLOAT32_BYTES * size) if way.keys == "none" else None
    return Cost(
        way=way.name,
        clients=work.clients,
        parameters=size,
        steps=work.steps,
        seconds=sum(fastest.values()),
        cpu_seconds=min(processor[1:]),
        parts=fastest,
        bytes_up=in_the_clear or history.bytes_up_per_parameter * size,
        bytes_down=in_the_clear or history.bytes_down_per_parameter * size,
        peak_megabytes=meter.peak_megabytes,
    )


def parts_of(phases: Mapping[str, float], inside: Mapping[str, float]) -> dict[str, float]:
    """Seconds of a round by part, which add up to all of it.

    Args:
        phases: Seconds by phase, as the record of the round has them.
        inside: Seconds in which clients trained and protected.
    """
    train, added, opened = inside["train"], phases["sum"], phases.get("open", 0.0)
    protect = inside.get("protect", 0.0) + phases.get("setup", 0.0) + phases.get("shares", 0.0)
    wire = max(0.0, sum(phases.values()) - train - protect - added - opened)
    return {"train": train, "protect": protect, "wire": wire, "sum": added, "open": opened}


def better(first: Cost | None, second: Cost) -> Cost:
    """The faster of two, with the larger memory of both."""
    if first is None:
        return second
    faster = min(first, second, key=lambda cost: cost.seconds)
    most = max(first.peak_megabytes, second.peak_megabytes)
    return replace(faster, cpu_seconds=min(first.cpu_seconds, second.cpu_seconds), peak_megabytes=most)


def measure(work: Work, ways: Sequence[Way], tick: Callable[[], None]) -> list[Cost]:
    """All ways on one work, in turns, each in a process of its own: what one leaves in memory is not there for the next."""
    best: dict[str, Cost] = {}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.round"])
    for _ in range(work.turns):
        for way in ways:
            with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
                best[way.name] = better(best.get(way.name), pool.submit(hold, way, work).result())
            tick()
    return list(best.values())


def run(plan: Sequence[tuple[Work, Sequence[Way]]], finished: FinishedRuns) -> list[list[Cost]]:
    """The costs of each work, with progress on stderr; of one that is finished, from where they are kept: never a part of them."""
    results: list[list[Cost]] = []
    with round_bar("measurements") as bar:
        task = bar.add_task("", total=sum(work.turns * len(ways) for work, ways in plan))
        for work, ways in plan:
            bar.update(task, description=f"{work.clients} clients, {work.parameters:,} parameters, {work.steps} steps")
            key = ("round", work, tuple(ways))
            kept = finished.find(*key)
            if kept is None:
                costs = measure(work, ways, lambda: bar.advance(task))
                finished.keep({"costs": [asdict(cost) for cost in costs]}, *key)
            else:
                costs = [Cost(**fields) for fields in kept["costs"]]
                bar.advance(task, work.turns * len(ways))
            results.append(costs)
    return results


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """What the ways of one work say of each other. Bytes are both directions together."""

    parameters: int
    steps: int
    seconds: Mapping[str, float]
    cpu_seconds: Mapping[str, float]
    bytes: Mapping[str, float]


def ratios(costs: Sequence[Cost]) -> Ratios:
    """Ratios to plain FedAvg of the same work, by name of the way."""
    plain = next(cost for cost in costs if cost.way == PLAIN.name)
    return Ratios(
        parameters=plain.parameters,
        steps=plain.steps,
        seconds={cost.way: cost.seconds / plain.seconds for cost in costs},
        cpu_seconds={cost.way: cost.cpu_seconds / plain.cpu_seconds for cost in costs},
        bytes={cost.way: (cost.bytes_up + cost.bytes_down) / (plain.bytes_up + plain.bytes_down) for cost in costs},
    )


def verdicts(found: Ratios) -> list[str]:
    """What is required of a whole encrypted round with DP, and what it takes, in sentences."""
    where = f"{found.parameters:,} parameters, {found.steps} steps"

    def judged(value: float, limit: float) -> str:
        return f"{value:.2f} times, {'at most' if value <= limit else '**MORE** than'} the {limit:g} times that are required"

    def split(private: str, both: str) -> str:
        wall, processor = found.seconds, found.cpu_seconds
        return (
            f"DP takes {wall[private]:.2f} times the plain round, and HE {wall[both] / wall[private]:.2f} times the round with DP; of "
            f"processor time it is {processor[private]:.2f} and {processor[both] / processor[private]:.2f}, together {processor[both]:.2f}."
        )

    needed = judged(found.seconds[BOTH.name], REQUIRED_SECONDS)
    sentences = [f"{where}: the round with DP and HE takes the time of the plain round {needed}. {split(DP.name, BOTH.name)}"]
    if COMPILED.name in found.seconds:
        needed = judged(found.seconds[COMPILED.name], REQUIRED_SECONDS)
        sentences.append(f"{where}, sums compiled: {needed}. {split(DP_COMPILED.name, COMPILED.name)}")
    sentences.append(f"{where}, bytes: {judged(found.bytes[BOTH.name], REQUIRED_BYTES)}.")
    if PARITY.name in found.bytes:
        sentences.append(f"{where}, bytes with the parameters `parity`: {judged(found.bytes[PARITY.name], REQUIRED_BYTES_PARITY)}.")
    return sentences


_HEAD = ("way", "seconds", "to FedAvg", "CPU seconds", "to FedAvg", *PARTS, "bytes up", "bytes down", "to FedAvg", "peak MB")


def cells(cost: Cost, found: Ratios) -> tuple[str, ...]:
    """A cost as a row of `_HEAD`."""
    processor = f"{cost.cpu_seconds:.3f}", f"{found.cpu_seconds[cost.way]:.2f}"
    seconds = f"{cost.seconds:.3f}", f"{found.seconds[cost.way]:.2f}", *processor, *(f"{cost.parts[part]:.3f}" for part in PARTS)
    sent = f"{cost.bytes_up:,.0f}", f"{cost.bytes_down:,.0f}", f"{found.bytes[cost.way]:.2f}"
    return cost.way, *seconds, *sent, f"{cost.peak_megabytes:.0f}"


def table_of(costs: Sequence[Cost]) -> list[str]:
    """The ways of one work as a Markdown table."""
    return [f"| {' | '.join(_HEAD)} |", f"|{'---|' * len(_HEAD)}", *(f"| {' | '.join(cells(cost, ratios(costs)))} |" for cost in costs)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The costs of all works: whole rounds, and rounds with little training, by clients and by parameters."""

    works: Sequence[Work]
    rounds: Sequence[Sequence[Cost]]
    by_clients: Sequence[Sequence[Cost]]
    by_parameters: Sequence[Sequence[Cost]]


def within_bytes(by_parameters: Sequence[Sequence[Cost]]) -> list[str]:
    """From which size of the networks that were measured the required bytes are kept, in sentences for a page."""
    lines = list[str]()
    for way, limit in ((BOTH, REQUIRED_BYTES), (PARITY, REQUIRED_BYTES_PARITY)):
        kept = [costs[0].parameters for costs in by_parameters if ratios(costs).bytes[way.name] <= limit]
        known = f"from {min(kept):,} parameters on" if kept else "by none"
        lines += [
            f"* Of the networks below with {by_parameters[0][0].clients} clients, {limit:g} times the bytes are kept {known} ({way.name})."
        ]
    around = next(cost for cost in by_parameters[0] if cost.way == PARITY.name)
    lines += [
        f"* What makes a round trustworthy hardly grows with it. Signatures, sealed tags, hashes and seeds of {around.clients} clients are "
        f"{least_beside(around.clients, chunks=1):,} bytes for each, if nothing else is said. {REQUIRED_BYTES_PARITY:g} times the bytes of "
        f"float32 leave no room for these alone below {proven_least(around.clients):,} parameters.",
        "",
    ]
    return lines


def least_beside(clients: int, *, chunks: int) -> int:
    """Bytes that a client sends and receives beside the numbers themselves, if messages were nothing but what cannot be left out.

    Its own setup, upload and approval, the digest and the aggregate are signed. Of each client it receives the signature under its
    approval, under the heads of ledgers and under its own head, the hash and the sealed tags of its upload, and a seed for each chunk. It
    sends tags and seeds of its own.
    """
    per_client = 3 * SIGNATURE_BYTES + DIGEST_BYTES + SEALED_TAGS_BYTES + chunks * SEED_BYTES
    return 5 * SIGNATURE_BYTES + clients * per_client + SEALED_TAGS_BYTES + chunks * SEED_BYTES


def proven_least(clients: int) -> int:
    """Parameters below which `least_beside` exceeds what `REQUIRED_BYTES_PARITY` leaves beside float32, both ways."""
    degree = CkksParams.parity(clients=clients).poly_modulus_degree
    chunks = 1
    while True:
        needed = math.ceil(least_beside(clients, chunks=chunks) / (2 * FLOAT32_BYTES * (REQUIRED_BYTES_PARITY - 1)))
        if needed <= chunks * degree:
            return max(needed, (chunks - 1) * degree + 1)
        chunks += 1


def scaling(results: Sequence[Sequence[Cost]], what: str) -> list[str]:
    """How the parts of a round with DP and HE grow, as a Markdown table."""
    head = (what, "plain seconds", "seconds", *PARTS, "bytes up", "bytes down", "bytes to plain", "of `parity`", "peak MB")
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for costs in results:
        plain, both, parity = (next(cost for cost in costs if cost.way == way.name) for way in SCALED)
        row = (
            f"{getattr(both, what):,}",
            f"{plain.seconds:.3f}",
            f"{both.seconds:.3f}",
            *(f"{both.parts[part]:.3f}" for part in PARTS),
            f"{both.bytes_up:,.0f}",
            f"{both.bytes_down:,.0f}",
            f"{ratios(costs).bytes[both.way]:.2f}",
            f"{ratios(costs).bytes[parity.way]:.2f}",
            f"{both.peak_megabytes:.0f}",
        )
        lines.append(f"| {' | '.join(row)} |")
    return lines


def dossier(report: Report, command: str) -> str:
    """The benchmark as a Markdown page."""
    lines = [
        "# A whole round by its parts",
        "",
        f"`{command}` made this page and its figure, on {multiprocessing.cpu_count()} cores; do not edit them.",
        "",
        "## Result",
        "",
        *(f"* {sentence}" for costs in report.rounds for sentence in verdicts(ratios(costs))),
        "",
        "What encryption adds to a round does not grow with the steps, so its share falls with them; what DP-SGD adds to a step stays. "
        "A ciphertext holds 4096 numbers, and of the last one only those in use travel.",
        "",
        *within_bytes(report.by_parameters),
    ]
    for work, costs in zip(report.works, report.rounds, strict=True):
        lines += [
            f"## {work.clients} banks, layers of {' and '.join(map(str, work.hidden))} ({work.parameters:,} parameters), {work.steps} "
            f"steps of {work.batch} records",
            "",
            *table_of(costs),
            "",
        ]
    lines += [
        "## By clients, with next to no training",
        "",
        *scaling(report.by_clients, "clients"),
        "",
        "## By parameters, with next to no training",
        "",
        *scaling(report.by_parameters, "parameters"),
        "",
        "![Seconds of a round by part, by clients and by parameters](round.svg)",
        "",
        "## How it is measured",
        "",
        "* Wall-clock seconds of all parties, one after the other in one process, on one thread: on machines of their own, banks train, "
        "protect and open side by side. The fastest round of all turns but each first counts, because other work on a machine only ever "
        "adds. Ways take turns. CPU seconds do not count waiting for the disk, on which every party stores what it must not forget; where "
        "other work kept the machine busy, they are the better measure.",
        f"* Every way trains the same network on as many records: {COLUMNS} columns of made-up numbers, as many steps, and of as many "
        "records each; under DP-SGD on average, because its batches are drawn at random. A step of DP-SGD clips each record's gradient, "
        "sums in float64 and adds noise, so it is not the same work as a step of plain SGD: both ratios are stated.",
        "* `train` is ledger and training; `protect` is keys (and shares), rounding and encryption; `wire` is messages, signatures, "
        "storing, digest and approvals with the heads of the ledgers; `sum` is the server; `open` is decryption at every client, and "
        "storing the model.",
        "* Bytes of plain FedAvg are those of its weights as float32, with nothing around them; ours are those of all messages of a client "
        "in a round, means over the clients.",
        "* Memory is the peak of one process that holds all parties, above what it held before the first round.",
        f"* {UNMENDED.name[2:]}: what a round takes if each training looks anew at every shape of pass, which once is enough for.",
        "* Compiled sums are for long runs: the first one of a process takes 10 to 30 seconds, which are not counted. Plain training "
        "is not compiled, here or elsewhere in privfed.",
        "",
        f"Versions: {versions_of('privfed', 'torch', 'opacus', 'tenseal', 'numpy')}.",
        "",
    ]
    return "\n".join(lines)


def draw(report: Report, path: Path) -> None:
    """The parts of each way of the first work, and of rounds with DP and HE by clients and by parameters."""
    import matplotlib as mpl  # noqa: PLC0415 # only those who write the figure need it
    from matplotlib.figure import Figure  # noqa: PLC0415

    colours = ("tab:gray", "tab:blue", "tab:green", "tab:orange", "tab:red")
    with mpl.rc_context({"svg.hashsalt": "round", "font.size": 8}):
        figure = Figure(figsize=(11, 3.6), layout="constrained")
        bars, *panels = figure.subplots(1, 3, width_ratios=(1.5, 1, 1))
        costs = list(report.rounds[0])[::-1]
        left = np.zeros(len(costs))
        for part, colour in zip(PARTS, colours, strict=True):
            widths = np.array([cost.parts[part] for cost in costs])
            bars.barh([cost.way for cost in costs], widths, left=left, color=colour, label=part)
            left += widths
        bars.set(xlabel="seconds of a round", title=f"{report.works[0].clients} banks, {report.works[0].steps} steps")
        bars.legend(frameon=False, fontsize=7)
        for panel, what, results in zip(panels, ("clients", "parameters"), (report.by_clients, report.by_parameters), strict=True):
            both = [next(cost for cost in each if cost.way == BOTH.name) for each in results]
            for part, colour in zip(PARTS, colours, strict=True):
                panel.loglog([getattr(cost, what) for cost in both], [cost.parts[part] for cost in both], "o-", color=colour, markersize=3)
            panel.set(xlabel=what, title=f"{BOTH.name[2:]}, by {what}")
            panel.grid(alpha=0.25, which="both")
        figure.savefig(path, metadata={"Date": None})


QuickRound = Annotated[bool, typer.Option("--quick", help="Half a minute: tiny work, not to be judged; writes no page.")]
Largest = Annotated[bool, typer.Option("--large", help="Up to ten million parameters too: some minutes and gigabytes more.")]


def main(*, quick: QuickRound = False, as_json: AsJson = False, large: Largest = False, output: Output = None, cache: Cache = None) -> None:
    """Measures whole rounds: seconds and bytes by part, memory, and how they grow with clients and parameters.

    Exit status: 2 if there is no matplotlib for the figure.
    """
    folder = output or (None if quick else DOSSIER)
    need_matplotlib(folder)
    works, by_clients, by_parameters = (QUICK, QUICK_CLIENTS, QUICK_PARAMETERS) if quick else (FULL, CLIENTS, PARAMETERS)
    by_parameters = (*by_parameters, *LARGE) if large else by_parameters
    plan = [*works, *((work, SCALED) for work in (*by_clients, *by_parameters))]
    results = run(plan, FinishedRuns(folder=cache))
    first, second = len(works), len(works) + len(by_clients)
    report = Report(
        works=[work for work, _ in works], rounds=results[:first], by_clients=results[first:second], by_parameters=results[second:]
    )
    if as_json:
        for costs in results:
            for cost in costs:
                typer.echo(json.dumps({"kind": "cost"} | asdict(cost), allow_nan=False))
        for costs in report.rounds:
            typer.echo(json.dumps({"kind": "ratios"} | asdict(ratios(costs)), allow_nan=False))
    else:
        for costs in results:
            title = f"{costs[0].clients} clients, {costs[0].parameters:,} parameters, {costs[0].steps} steps"
            rows = [cells(cost, ratios(costs)) for cost in costs]
            print_table(title, (*_HEAD[:5], *_HEAD[-4:]), [(*row[:5], *row[-4:]) for row in rows])
        for costs in () if quick else report.rounds:
            for sentence in verdicts(ratios(costs)):
                typer.echo(sentence.replace("*", ""))
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        draw(report, folder / "round.svg")
        (folder / "round.md").write_text(dossier(report, "python -m benchmarks.round" + (" --large" if large else "")), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
