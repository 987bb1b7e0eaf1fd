"""What averaging under encryption costs: our profiles, and what others ship, on the same work in one run.

Every role of every implementation is played in a fresh process. `python -m benchmarks.he --help` says the rest.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.he.catalogue import NAMES, find
from benchmarks.he.environments import DEFAULT_FOLDER
from benchmarks.he.runs import Cost, Missing, measure
from benchmarks.he.tables import judge, print_tables
from benchmarks.he.workload import Workload

UNUSABLE, NOT_REACHED = 2, 1
REPETITIONS = 5
_QUICK_PARAMS, _QUICK_CLIENTS = 10_000, 3


def main(
    *,
    params: Annotated[int, typer.Option(min=1, help="Parameters of the model.")] = 1_000_000,
    clients: Annotated[list[int] | None, typer.Option(min=3, max=128, help="Clients of the round; may be repeated. [default: 10]")] = None,
    tensors: Annotated[int, typer.Option(min=1, help="Tensors of the model, of equal size.")] = 8,
    implementations: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(NAMES)}; may be repeated. [default: all]")] = None,
    environments: Annotated[Path, typer.Option(help="Folder for the libraries of peers, installed on demand.")] = DEFAULT_FOLDER,
    quick: Annotated[
        bool, typer.Option("--quick", help="10,000 parameters, 3 clients, once, and nothing is installed: does it run?")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line: implementations, then what was required.")
    ] = False,
) -> None:
    """Compares bytes, CPU time, memory and error of averaging under encryption.

    CPU times are the fewest of five repetitions, because other work on a machine only ever adds to them. Exit status: 1 if
    something that is required at a million parameters or more is not reached; 2 if an argument is wrong.
    """
    if quick:
        params, clients = _QUICK_PARAMS, [_QUICK_CLIENTS]
    try:
        contenders = [find(name) for name in implementations or NAMES]
        if tensors > params:
            raise ValueError(f"expected no more tensors than parameters, got {tensors} and {params}")  # noqa: TRY301
    except ValueError as error:
        typer.echo(f"{error}; nothing was run", err=True)
        raise typer.Exit(UNUSABLE) from error
    results = list[Cost | Missing]()
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("")
        for count in clients or [10]:
            work = Workload(params=params, clients=count, tensors=tensors)
            mean = work.mean()
            for contender in contenders:
                bar.update(task, description=f"{contender.name}, {count} clients")
                results.append(
                    measure(
                        contender,
                        work,
                        mean=mean,
                        environments=environments,
                        repetitions=1 if quick else REPETITIONS,
                        install=not quick,
                    )
                )
                if as_json:
                    print(json.dumps(asdict(results[-1])), flush=True)
    requirements = judge(results)
    if as_json:
        print(json.dumps({"requirements": [asdict(requirement) for requirement in requirements]}))
    else:
        print_tables(results, requirements)
    if any(requirement.reached is False for requirement in requirements):
        raise typer.Exit(NOT_REACHED)


if __name__ == "__main__":
    typer.run(main)
