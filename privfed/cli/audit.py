"""`privfed audit` and `privfed report`: what a simulation gave away."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from privfed.cli.terminal import AsJson, print_json, round_progress, table, use_one_core

if TYPE_CHECKING:
    from privfed.audit.findings import Audit, Finding
    from privfed.saved import SavedRun

_REPEATS, _QUICK_REPEATS = 8, 3

RunFolder = Annotated[Path, typer.Argument(metavar="DIR", show_default=False, readable=False)]
Quick = Annotated[bool, typer.Option("--quick", help=f"{_QUICK_REPEATS} batches of canaries instead of {_REPEATS}.")]


def audit(folder: RunFolder, *, quick: Quick = False, as_json: AsJson = False) -> None:
    """Find out what each party could read: attack made-up records under the protection of a simulation.

    DIR is a folder that `privfed simulate --out` wrote. The attacks run on canary rounds: real encrypted rounds, with the training
    of the bank that adds the least noise, on made-up records. Beside every score stands what guessing reaches, and the same attack
    with the protection taken away, which must succeed. No record and no ledger of the banks is touched.

    ```
    privfed audit run1
    ```
    """
    _, found = _audited(folder, quick=quick, quiet=as_json)
    if as_json:
        print_json(found.to_json())
    else:
        show_audit(found)


def report(
    folder: RunFolder,
    *,
    no_audit: Annotated[bool, typer.Option("--no-audit", help="Leave the attacks out: the report says so.")] = False,
    quick: Quick = False,
) -> None:
    """Write a report of a simulation: quality, privacy spent, bytes, who could read what. HTML, Markdown and JSON.

    DIR is a folder that `privfed simulate --out` wrote; report.html, report.md and report.json are put into it and replace earlier
    ones. The report shows what is public, and canaries: no record of a bank.

    ```
    privfed report run1
    ```
    """
    from privfed.report.write import write_report  # noqa: PLC0415 # --help must not wait for torch
    from privfed.saved import SavedRun  # noqa: PLC0415

    run, found = (SavedRun.load(folder), None) if no_audit else _audited(folder, quick=quick, quiet=False)
    path = write_report(
        run.history,
        folder / "report.html",
        audit=found,
        statements=run.statements(),
        title=f"What the simulation in {folder.resolve().name} gave away",
        command=shlex.join(["privfed", *sys.argv[1:]]),
    )
    typer.echo(f"Report: {path} (and .md, .json)")


def _audited(folder: Path, *, quick: bool, quiet: bool) -> "tuple[SavedRun, Audit]":
    with round_progress(quiet=quiet) as progress:
        from privfed.saved import SavedRun  # noqa: PLC0415 # --help must not wait for torch

        use_one_core()
        repeats = _QUICK_REPEATS if quick else _REPEATS
        run = SavedRun.load(folder)
        progress.preparing("Attacking canaries")
        return run, run.audit(repeats=repeats, progress=lambda done: progress.preparing(f"Attacking canaries, {done} of {repeats}"))


def show_audit(found: "Audit") -> None:
    """Prints what attacks could read, party by party."""
    rows = ((party, found.shown(party).sentence(), _sentence(found.control_of(party))) for party in found.parties)
    Console().print(
        table(
            "What attacks could read of made-up records",
            ("party", "in this consortium", "with the protection taken away"),
            rows=rows,
            left=3,
            caption="Cells of the records that an attack had right, beside what guessing reaches. Nothing to attack is no proof of safety.",
        )
    )


def _sentence(finding: "Finding | None") -> str:
    return "-" if finding is None else finding.sentence()
