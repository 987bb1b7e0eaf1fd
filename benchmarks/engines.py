"""What an engine costs: seconds and bytes of a round, beside the same round in one process. `--help` says the rest.

Three banks train the same network on the same records from the same start, encrypt under one shared key, and open the sum: in one
process, with each party's own folder and node in threads of one process, over NVIDIA FLARE with mutual TLS, and over Flower with TLS and
authenticated SuperNodes. All must end in the same model, to the last bit.
"""

import json
import os
import re
import runpy
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from privfed.consortium import Consortium
from privfed.deploy.deployment import OPERATOR, SERVER, installed
from privfed.deploy.parties import make_parties
from privfed.deploy.plan import Plan
from privfed.engines.coordinator import coordinate
from privfed.engines.deployments import write_deployment
from privfed.engines.exchange import TimeOuts
from privfed.engines.local import Simulation
from privfed.engines.node import Node
from privfed.engines.party_folder import EVENTS, METRICS_JSON, SITE, STATE
from privfed.he.secret import SharedKey

FAILED = 1
BANKS = ("bank_a", "bank_b", "bank_c")
ONE_PROCESS, THREADS, FLARE, FLOWER = "one process", "nodes in threads", "FLARE", "Flower"
ENGINES = {"one-process": ONE_PROCESS, "threads": THREADS, "flare": FLARE, "flower": FLOWER}
HIDDEN = {"fraud": (64, 48), "1M": (1024, 964), "10M": (3200, 3113)}
"""Widths of the hidden layers of each model: 3,873, 1,000,329 and 10,003,027 parameters."""
_QUICK = (16,)
_PORT = 8002
_START_SECONDS = 300.0
_RUN_SECONDS = 3600.0
_TIME_OUTS = TimeOuts(**dict.fromkeys(("status", "setup", "approval", "weighing", "holder", "opening"), 1800.0))
_SITE = """
from pathlib import Path

import numpy as np
import torch

import privfed as pf

torch.set_num_threads(1)
NAME = Path(__file__).parent.name


def model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return pf.mlp(10, hidden={hidden})


def client():
    transactions = pf.generate_transactions(rows=1000, fraud_rate=0.05, rng=np.random.default_rng(list(NAME.encode())))
    training = pf.NonPrivate(learning_rate=0.1, batch_size=64, steps=2, seed=0)
    return pf.Client(NAME, pf.features(transactions, pf.PRE), training=training)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One model on one engine.

    Args:
        engine: Which.
        model: Which.
        parameters: Number of its parameters.
        rounds: Seconds of each round but the first, which loads the data and starts processes.
        start_seconds: From the submission of the run to the end of its first round.
        message_bytes: Of a round, all that the parties hand to the engine, both ways.
        loopback_bytes: Of the whole run, by round: all that went over the loopback device of this network namespace; 0 where nothing did.
        server_megabytes: Largest resident memory of the server's processes; 0 in one process.
        bank_megabytes: The same of a bank.
        same: Whether it ended in the model of the run in one process; None where there was none.
    """

    engine: str
    model: str
    parameters: int
    rounds: tuple[float, ...]
    start_seconds: float
    message_bytes: int
    loopback_bytes: int = 0
    server_megabytes: float = 0.0
    bank_megabytes: float = 0.0
    same: bool | None = None

    @property
    def seconds(self) -> float:
        """Of a round: the median."""
        return statistics.median(self.rounds)


def _plan(folder: Path, *, engine: str, hidden: tuple[int, ...], rounds: int) -> Plan:
    (folder / "plan.py").write_text(_SITE.format(hidden=hidden))
    banks = dict.fromkeys(BANKS, 1.0)
    terms: dict[str, Any] = {"engine": engine, "banks": banks, "site": folder / "plan.py"}
    return Plan(name="engines", host="localhost", port=_PORT, rounds=rounds, ledgers=False, **terms)


def one_process(folder: Path, *, model: str, hidden: tuple[int, ...], rounds: int) -> tuple[Outcome, NDArray[np.float64]]:
    """The rounds in this process, and the model in which they end."""
    sites: list[Mapping[str, Any]] = []
    for name in BANKS:
        (folder / name).mkdir()
        (folder / name / SITE).write_text(_SITE.format(hidden=hidden))
        sites.append(runpy.run_path(str(folder / name / SITE)))
    consortium = Consortium([site["client"]() for site in sites], keys=SharedKey.generate())
    ends = [time.monotonic()]
    with Simulation(consortium, sites[0]["model"]()) as simulation:
        history = simulation.run(rounds=rounds, progress=lambda _: ends.append(time.monotonic()))
    records = [summary.record for summary in history.rounds]
    seconds = np.diff(ends).tolist()
    sent = sum(sum((*record.bytes_up.values(), *record.bytes_down.values())) for record in records)
    outcome = Outcome(
        engine=ONE_PROCESS,
        model=model,
        parameters=history.model.layout.size,
        rounds=tuple(seconds[1:]),
        start_seconds=seconds[0],
        message_bytes=sent // rounds,
    )
    return outcome, history.model.values


class _Threads:
    """An `Exchange` in this process: each party answers in a thread of its own."""

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        self._nodes = nodes

    def ask(self, requests: Mapping[str, bytes], *, seconds: float) -> Mapping[str, bytes]:  # noqa: ARG002 -- nobody is late here
        with ThreadPoolExecutor(len(requests)) as pool:
            return dict(zip(requests, pool.map(lambda name: self._nodes[name].answer(requests[name]), requests), strict=True))


def nodes_in_threads(root: Path, submitted: list[float], *, rounds: int) -> None:
    """Holds the rounds with a node for every folder."""
    with ExitStack() as stack:
        nodes = {name: stack.enter_context(Node(root / name)) for name in BANKS}
        submitted.append(time.time())
        coordinate(root / SERVER, _Threads(nodes), rounds=rounds, time_outs=_TIME_OUTS)


class Processes:
    """What was started, the largest memory that each party held, and its end."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.peaks: dict[str, float] = {}
        self._started: dict[str, list[subprocess.Popen[bytes]]] = {}
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._sample, daemon=True)

    def start(self, name: str, script: str) -> Path:
        """Starts a script of a party. Returns the file with its output."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        python = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PATH": path, "PYTHONPATH": python, "OMP_NUM_THREADS": "1"}
        output = self.root / f"{name}-{Path(script).stem}.out"
        with output.open("wb") as sink:
            process = subprocess.Popen(
                [self.root / name / script], env=environment, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT
            )
        self._started.setdefault(name, []).append(process)
        return output

    def run(self, name: str, script: str) -> None:
        """Starts a script and waits for its end.

        Raises:
            RuntimeError: If it fails.
        """
        output = self.start(name, script)
        if self._started[name][-1].wait(_RUN_SECONDS):
            raise RuntimeError(f"{name}/{script} failed; the end of its output:\n{output.read_text(errors='replace')[-2000:]}")

    def _trees(self) -> dict[str, list[psutil.Process]]:
        trees: dict[str, list[psutil.Process]] = {}
        for name, started in list(self._started.items()):
            for process in started:
                if process.poll() is None:
                    root = psutil.Process(process.pid)
                    trees.setdefault(name, []).extend([root, *root.children(recursive=True)])
        return trees

    def _sample(self) -> None:
        while not self._over.wait(0.2):
            try:
                held = {name: sum(process.memory_info().rss for process in tree) / 1e6 for name, tree in self._trees().items()}
            except psutil.NoSuchProcess:  # between the list and the look
                continue
            self.peaks |= {name: max(held[name], self.peaks.get(name, 0.0)) for name in held}

    def __enter__(self) -> "Processes":
        self._watch.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._over.set()
        self._watch.join()
        gone = [process for tree in self._trees().values() for process in tree]
        for process in gone:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(gone, timeout=30)


def _wait(happened: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not happened():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {_START_SECONDS:.0f} s in vain for {what}")
        time.sleep(0.1)


def over_flare(processes: Processes, submitted: list[float], *, rounds: int) -> None:
    """Holds the rounds over FLARE, with the folders and commands of a deployment."""
    job = processes.root / OPERATOR / "job" / "server" / "config" / "config_fed_server.json"
    content = json.loads(job.read_text())
    content["workflows"][0]["args"] = {"rounds": rounds, "time_outs": asdict(_TIME_OUTS)}
    job.write_text(json.dumps(content))
    server = processes.start(SERVER, "start.sh")
    for name in BANKS:
        processes.start(name, "start.sh")
    _wait(lambda: all(f"New client {name}@" in server.read_text(errors="replace") for name in BANKS), "the banks to be known")
    submitted.append(time.time())
    processes.run(OPERATOR, "submit.sh")


def over_flower(processes: Processes, submitted: list[float], *, rounds: int) -> None:  # noqa: ARG001 -- they stand in the script
    """Holds the rounds over Flower, with the folders and commands of a deployment, but for the proxy."""
    for name in BANKS:
        environment = processes.root / name / "flower" / "flower.env"
        superlink = re.sub(r"(?m)^PRIVFED_SUPERLINK=.*$", "PRIVFED_SUPERLINK=127.0.0.1:8000", environment.read_text())
        environment.write_text(superlink)
    submit = processes.root / OPERATOR / "submit.sh"
    options = " ".join(f"--time-out {step}={seconds}" for step, seconds in asdict(_TIME_OUTS).items())
    submit.write_text(submit.read_text().replace('"$@"', options))
    server = processes.start(SERVER, "flower/start-superlink.sh")
    _wait(lambda: server.read_text(errors="replace").count("RegisterNode") >= len(BANKS), "the SuperLink")
    outputs = [processes.start(name, "start.sh") for name in BANKS]
    _wait(lambda: all("SuperNode ID" in output.read_text(errors="replace") for output in outputs), "the SuperNodes")
    submitted.append(time.time())
    processes.run(OPERATOR, "submit.sh")


def _loopback_bytes() -> int:
    """What was sent over this network namespace's loopback device so far."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.partition(":")[2].split()[0])


def _server_log(server: Path) -> tuple[list[float], int]:
    """When each round was held, and the bytes that the server sent and received in all."""
    events = [json.loads(line) for line in (server / EVENTS).read_text().splitlines()]
    held = [datetime.fromisoformat(event["time"]).timestamp() for event in events if event["event"] == "round held"]
    metrics = json.loads((server / METRICS_JSON).read_text())["metrics"]
    return held, sum(entry["value"] for entry in metrics if entry["name"] in {"sent_bytes", "received_bytes"})


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pf-", ignore_cleanup_errors=True) as temporary:  # short: sockets lie in it
        yield Path(temporary)


def on_engine(engine: str, *, model: str, hidden: tuple[int, ...], rounds: int) -> tuple[Outcome, NDArray[np.float64]]:
    """The rounds with parties that have folders of their own, and the model in which they end.

    Raises:
        RuntimeError: If the run fails.
    """
    with _folder() as folder:
        root = folder / "out"
        plan = _plan(folder, engine="flower" if engine == FLOWER else "flare", hidden=hidden, rounds=rounds)
        submitted: list[float] = []
        peaks: Mapping[str, float] = {}
        if engine == THREADS:
            make_parties(plan, root)
            before = _loopback_bytes()
            nodes_in_threads(root, submitted, rounds=rounds)
        else:
            write_deployment(plan, root)
            before = _loopback_bytes()
            with Processes(root) as processes:
                (over_flare if engine == FLARE else over_flower)(processes, submitted, rounds=rounds)
            peaks = processes.peaks
        sent = _loopback_bytes() - before
        held, messages = _server_log(root / SERVER)
        if len(held) != rounds:
            raise RuntimeError(f"{len(held)} of {rounds} rounds were held over {engine}")
        with np.load(root / BANKS[0] / STATE / "model.npz", allow_pickle=False) as stored:
            values = stored["values"]
    outcome = Outcome(
        engine=engine,
        model=model,
        parameters=len(values),
        rounds=tuple(np.diff(held).tolist()),
        start_seconds=held[0] - submitted[0],
        message_bytes=messages // rounds,
        loopback_bytes=0 if engine == THREADS else sent // rounds,
        server_megabytes=peaks.get(SERVER, 0.0),
        bank_megabytes=max((peaks.get(name, 0.0) for name in BANKS), default=0.0),
    )
    return outcome, values


def measure(models: Mapping[str, tuple[int, ...]], *, engines: tuple[str, ...], rounds: int) -> list[Outcome]:
    """Every model on every engine. Each is compared with the run in one process, if that is among them."""
    outcomes: list[Outcome] = []
    for model, hidden in models.items():
        expected: NDArray[np.float64] | None = None
        for engine in engines:
            terms: dict[str, Any] = {"model": model, "hidden": hidden, "rounds": rounds}
            if engine == ONE_PROCESS:
                with _folder() as folder:
                    outcome, expected = one_process(folder, **terms)
                outcomes.append(outcome)
                continue
            outcome, values = on_engine(engine, **terms)
            same = None if expected is None else bool(np.array_equal(values, expected))
            outcomes.append(Outcome(**asdict(outcome) | {"same": same}))
    return outcomes


def failures(outcomes: list[Outcome]) -> list[str]:
    """What is wrong, in words: runs that ended in another model."""
    return [f"{outcome.engine}, {outcome.model}: another model than in one process" for outcome in outcomes if outcome.same is False]


def rows(outcomes: list[Outcome]) -> list[list[str]]:
    """Cells of a table, a row for each outcome."""

    def megabytes(count: float) -> str:
        return f"{count:,.1f}" if count else "-"

    return [
        [
            outcome.model,
            outcome.engine,
            f"{outcome.seconds:.1f}",
            f"{outcome.start_seconds:.1f}",
            megabytes(outcome.message_bytes / 1e6),
            megabytes(outcome.loopback_bytes / 1e6),
            f"{outcome.server_megabytes:,.0f}" if outcome.server_megabytes else "-",
            f"{outcome.bank_megabytes:,.0f}" if outcome.bank_megabytes else "-",
            {True: "yes", False: "no", None: "-"}[outcome.same],
        ]
        for outcome in outcomes
    ]


COLUMNS = (
    "model",
    "engine",
    "seconds per round",
    "seconds to the first sum",
    "messages MB",
    "on the wire MB",
    "server MB",
    "bank MB",
    "same model",
)


def page(outcomes: list[Outcome], *, command: str, rounds: int) -> str:
    """The results as a Markdown page."""
    sizes = {outcome.model: outcome.parameters for outcome in outcomes}
    versions = ", ".join(f"{name} {number}" for name, number in installed("privfed", "nvflare", "flwr", "tenseal").items())
    lines = [
        "# What an engine costs",
        "",
        f"`{command}` made this page, on {os.cpu_count()} cores. {versions}.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{len(COLUMNS) * '---|'}",
        *(f"| {' | '.join(row)} |" for row in rows(outcomes)),
        "",
        f"* Three banks, SharedKey, two steps without differential privacy on 1,000 made-up transactions each, {rounds} rounds: next to no "
        f"training, so that what is left is encryption, protocol and engine. Models: "
        f"{', '.join(f'{model} has {size:,} parameters' for model, size in sizes.items())}.",
        "* Seconds per round are the median of all rounds but the first. The first one starts when the run is submitted, to parties that "
        "are up, and has the engine's start of a run and the loading of the data in it.",
        "* Messages are what the parties hand to the engine in a round, both ways and for all banks: signed and encrypted uploads, the sum "
        "to each bank, and small ones. On the wire is what the loopback device of a network namespace of its own carried in the same time, "
        "by round, with TLS, the start of the run, heart beats and polls. Over FLARE a message passes it twice: a job has a process of its "
        "own, behind that of the server.",
        "* Memory is the largest resident set of all processes of a party together, shared pages counted in each.",
        "* Flower's SuperNodes speak to the SuperLink without the proxy in between.",
        "",
    ]
    return "\n".join(lines)


def main(
    *,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model, two rounds, no processes: does it run?")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    model: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(HIDDEN)}; may be repeated. By default the first two.")] = None,
    engine: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(ENGINES)}; may be repeated. By default all.")] = None,
    large: Annotated[
        bool, typer.Option("--large", help="10M parameters too, in one process and over FLARE: some 10 GB of memory.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of every run.")] = 3,
    output: Annotated[Path | None, typer.Option(help="Folder for the results as a page, engines.md; by default none.")] = None,
) -> None:
    """Seconds and bytes of a round on each engine. Needs `privfed[flare]` and `privfed[flower]`, and the ports 8000, 8002 and 9094-9096.

    To count the bytes of the run alone, give it a network of its own:

    unshare --net sh -c 'ip link set lo up && python -m benchmarks.engines'

    Exit status: 1 if a run ended in another model than the one in one process.
    """
    if unknown := (set(engine or ()) - set(ENGINES)) | (set(model or ()) - set(HIDDEN)):
        raise typer.BadParameter(f"unknown: {', '.join(sorted(unknown))}")
    chosen = {"tiny": _QUICK} if quick else {name: HIDDEN[name] for name in model or ("fraud", "1M")}
    selected = ("one-process", "threads") if quick else engine or tuple(ENGINES)
    rounds = 2 if quick else rounds
    outcomes = measure(chosen, engines=tuple(name for key, name in ENGINES.items() if key in selected), rounds=rounds)
    if large:
        outcomes += measure({"10M": HIDDEN["10M"]}, engines=(ONE_PROCESS, FLARE), rounds=rounds)
    wrong = failures(outcomes)
    if as_json:
        typer.echo(json.dumps({"outcomes": [asdict(outcome) for outcome in outcomes], "wrong": wrong}, indent=2))
    else:
        table = Table(*COLUMNS, title="A round of three banks")
        for row in rows(outcomes):
            table.add_row(*row)
        Console(width=140).print(table)
    for line in wrong:
        typer.echo(line, err=True)
    if output is not None:
        options = [
            *(["--quick"] if quick else []),
            *(["--large"] if large else []),
            *(f"--model {name}" for name in model or ()),
            *(f"--engine {name}" for name in engine or ()),
        ]
        command = " ".join(["python -m benchmarks.engines", *options, f"--rounds {rounds} --output {output}"])
        output.mkdir(parents=True, exist_ok=True)
        (output / "engines.md").write_text(page(outcomes, command=command, rounds=rounds), encoding="utf-8")
    if wrong:
        raise typer.Exit(FAILED)


if __name__ == "__main__":
    typer.run(main)
