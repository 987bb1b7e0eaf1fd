"""Simulating many small clients: ours, at once and one by one, and Flower's simulation engine. `--help` says the rest.

All train the same network on the same records in the same batches from the same start, so that they end in the same model.
"""

import json
import os
import platform
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.table import Table

from benchmarks.experiment import wide_console
from benchmarks.he.catalogue import Contender
from benchmarks.he.environments import DEFAULT_FOLDER, MissingPeerError, interpreter, versions
from benchmarks.simulation.task import COLUMNS, Task
from privfed.client import Client
from privfed.consortium import Consortium, Plaintext
from privfed.engines.local import Simulation
from privfed.he.params import CkksParams
from privfed.policy import OpeningPolicy
from privfed.training.loss import binary_cross_entropy
from privfed.training.mechanism import NonPrivate
from privfed.training.model import scores, values_of
from privfed.update import PlainVector

REQUIRED_FACTOR = 10.0
# The engines sum float32 numbers in another order, and ours rounds updates to a grid: the models agree to some 1e-4 after some rounds,
# and labels only of records next to the boundary.
SAME_ACCURACY = 0.005
MISSED = 1
FLOWER = Contender(
    name="Flower",
    module="benchmarks.simulation.flower",
    type_name="",
    libraries=("flwr", "ray", "torch"),
    requirement="flwr[simulation]==1.42.0",
)
TORCH = "torch==2.13.0"
TOGETHER, ALONE = "privfed, all clients at once", "privfed, one by one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One engine. Seconds per round are those of its fastest round, because other work on a machine only ever adds to them."""

    engine: str
    seconds_per_round: float
    accuracy: float
    farthest_weight: float
    rounds: tuple[float, ...]


def ours(task: Task, *, together: bool) -> tuple[list[float], PlainVector]:
    """Seconds of each round, and the model."""
    tables, _ = task.tables()
    training = {"learning_rate": task.learning_rate, "batch_size": task.batch_size, "steps": task.steps}
    clients = [Client(f"client_{place:03}", data, training=NonPrivate(**training, seed=place)) for place, data in enumerate(tables)]  # type: ignore[arg-type]
    consortium = Consortium(
        clients,
        keys=Plaintext(train_together=together),
        policy=OpeningPolicy(),
        params=CkksParams.standard(bound=8.0),
        loss=binary_cross_entropy,
    )
    seconds: list[float] = []
    with Simulation(consortium, task.model()) as simulation:
        start = time.perf_counter()

        def note(_: object) -> None:
            nonlocal start
            seconds.append(time.perf_counter() - start)
            start = time.perf_counter()

        history = simulation.run(rounds=task.rounds, progress=note)
    return seconds, history.model


def flower(task: Task, python: Path, folder: Path) -> tuple[list[float], PlainVector]:
    """The same from Flower, in its own environment.

    Raises:
        MissingPeerError: If it does not run here.
    """
    task.save(folder / "task.npz")
    root = Path(__file__).parents[2]
    command = [python, "-m", FLOWER.module, folder / "task.npz", folder / "outcome.json"]
    environment = os.environ | {"FLWR_TELEMETRY_ENABLED": "0", "PYTHONPATH": str(root)}
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, cwd=root, env=environment)
    except subprocess.CalledProcessError as error:
        raise MissingPeerError(f"Flower's simulation failed: {error.stderr.strip().splitlines()[-1:]}") from error
    outcome = json.loads((folder / "outcome.json").read_text(encoding="utf-8"))
    return outcome["seconds"], PlainVector(layout=values_of(task.model()).layout, values=np.array(outcome["weights"]))


def judge(outcomes: list[Outcome]) -> list[str]:
    """Requirements that are not met, in words."""
    by_name = {outcome.engine: outcome for outcome in outcomes}
    if FLOWER.name not in by_name:
        return []
    peer, best = by_name[FLOWER.name], by_name[TOGETHER]
    failures = []
    factor = peer.seconds_per_round / best.seconds_per_round
    if factor < REQUIRED_FACTOR:
        failures.append(f"a round is {factor:.1f} times faster than Flower's, required are {REQUIRED_FACTOR:g}")
    if abs(peer.accuracy - best.accuracy) > SAME_ACCURACY:
        failures.append(f"accuracies are {best.accuracy:.3f} and {peer.accuracy:.3f}, and should be the same")
    return failures


def main(
    *,
    quick: Annotated[
        bool, typer.Option("--quick", help="10 clients, 2 rounds, and nothing is installed: does it run? Not judged.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    environments: Annotated[Path, typer.Option(help="Folder for Flower's environment, installed on demand.")] = DEFAULT_FOLDER,
    output: Annotated[Path | None, typer.Option(help="Folder for the results as a page, simulation.md; by default none.")] = None,
) -> None:
    """Times a round of 100 clients in our local engine and in Flower's simulation engine.

    Ours runs on one thread; Flower trains on all cores. Exit status: 1 if ours is less than 10 times faster, or another accuracy results.
    """
    torch.set_num_threads(1)
    task = Task(clients=10, rounds=2) if quick else Task()
    runs = {TOGETHER: ours(task, together=True), ALONE: ours(task, together=False)}
    known = {"torch": torch.__version__}
    missing = ""
    try:
        python = interpreter(FLOWER, environments, install=not quick, beside=(TORCH,))
        known = {f"{FLOWER.name}: {name}": number for name, number in versions(FLOWER, python).items()} | known
        with tempfile.TemporaryDirectory(prefix="privfed-simulation-") as folder:
            runs[FLOWER.name] = flower(task, python, Path(folder))
    except MissingPeerError as error:
        missing = str(error)
    _, test = task.tables()
    reference = runs[ALONE][1].values
    outcomes = [
        Outcome(
            engine=name,
            seconds_per_round=min(seconds),
            accuracy=float(((scores(task.model(), model, test.features).ravel() > 0) == test.labels).mean()),
            farthest_weight=float(np.abs(model.values - reference).max()),
            rounds=tuple(seconds),
        )
        for name, (seconds, model) in runs.items()
    ]
    failures = judge(outcomes)
    if as_json:
        machine = {"cores": os.cpu_count(), "python": platform.python_version()} | known
        report = {"machine": machine, "task": asdict(task), "outcomes": [asdict(outcome) for outcome in outcomes]}
        typer.echo(json.dumps(report | {"missing": missing, "missed": failures, "judged": not quick}, indent=2))
    else:
        show(task, outcomes)
        for line in (*([missing] if missing else []), *failures):
            typer.echo(line, err=True)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        command = "python -m benchmarks.simulation" + (" --quick" if quick else "") + f" --output {output}"
        page = dossier(task, outcomes, known, failures=[*failures, *([missing] if missing else [])], command=command)
        (output / "simulation.md").write_text(page, encoding="utf-8")
    if (failures or missing) and not quick:
        raise typer.Exit(MISSED)


def dossier(task: Task, outcomes: list[Outcome], known: dict[str, str], *, failures: list[str], command: str) -> str:
    """The results as a Markdown page."""
    rows = [
        f"| {outcome.engine} | {1e3 * outcome.seconds_per_round:.0f} | {outcome.accuracy:.4f} | {outcome.farthest_weight:.0e} |"
        for outcome in outcomes
    ]
    lines = [
        f"# Simulating {task.clients} small clients",
        "",
        f"`{command}` made this page, on {os.cpu_count()} cores. {', '.join(f'{name} {number}' for name, number in known.items())}.",
        "",
        "| engine | ms per round | accuracy in the end | farthest weight from training one by one |",
        "|---|---|---|---|",
        *rows,
        "",
        f"Required is a round {REQUIRED_FACTOR:g} times faster than in Flower's simulation engine, at the same accuracy. "
        + ("This is met." if not failures else f"Missed: {'; '.join(failures)}."),
        "",
        f"* {task.clients} clients with {task.records} made-up records of {COLUMNS} columns, a network for tables, {task.steps} steps of "
        f"{task.batch_size} records per round. All engines start from the same weights and take the same batches, so that they end in the "
        "same model but for rounding; ours also rounds every update to its grid.",
        f"* Milliseconds are of the fastest of {task.rounds} rounds. Ours runs on one thread. Flower trains as many clients at a time "
        "as there are cores, and the first round, in which it starts them, does not count.",
        "* What is saved is the work around each client: with larger clients or models the factor falls, because the training itself costs "
        "the same.",
        "",
    ]
    return "\n".join(lines)


def show(task: Task, outcomes: list[Outcome]) -> None:
    """The results for a reader."""
    table = Table(title=f"A round of {task.clients} clients with {task.records} records, {task.steps} steps of {task.batch_size} each")
    for column in ("engine", "ms per round", "accuracy", "farthest weight"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for outcome in outcomes:
        cells = (f"{1e3 * outcome.seconds_per_round:.0f}", f"{outcome.accuracy:.4f}", f"{outcome.farthest_weight:.0e}")
        table.add_row(outcome.engine, *cells)
    wide_console().print(table)


if __name__ == "__main__":
    typer.run(main)
