"""`privfed audit` and `privfed report`: what a simulation gave away."""

import shlex
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from privfed.cli.arguments import AsJson, RunFolder, finished_run
from privfed.cli.terminal import RoundProgress, print_json, printable, round_progress, table, use_one_core

if TYPE_CHECKING:
    from privfed.audit.findings import Audit, Finding
    from privfed.saved import SavedRun

_REPEATS, _QUICK_REPEATS = 16, 3
_LONGEST = 10_000  # characters of a verdict, which names every bank

Quick = Annotated[bool, typer.Option("--quick", help=f"{_QUICK_REPEATS} batches of canaries instead of {_REPEATS}.")]


def audit(folder: RunFolder, *, quick: Quick = False, as_json: AsJson = False) -> None:
    """Find out what each party could read: attack made-up records under the protection of a simulation.

    DIR is a folder that `privfed simulate --out` wrote. The attacks run on canary rounds: real encrypted rounds, with the training
    of the bank that adds the least noise, on made-up records. Beside every score stands what guessing reaches, and the same attack
    with the protection taken away, which must succeed. Canaries in each bank's training show whether it adds the noise that it declares,
    and clips. No record and no ledger of the banks is touched. What was found is kept as
    audit.json in DIR, for `privfed report`; an earlier one is replaced.

    ```
    privfed audit run1
    ```
    """
    finished_run(folder)
    with round_progress(quiet=as_json) as progress:
        from privfed.saved import SavedRun  # noqa: PLC0415 # --help must not wait for torch

        found = _attack(SavedRun.load(folder), progress, quick=quick)
    if as_json:
        print_json(found.to_json())
    else:
        show_audit(found)
        reported = " The report that is there already tells of an earlier audit." if (folder / "report.html").exists() else ""
        typer.echo(f"Kept: {folder / 'audit.json'}.{reported} Next:")
        typer.echo(f"  {shlex.join(['privfed', 'report', str(folder)])}")


def report(
    folder: RunFolder,
    *,
    no_audit: Annotated[bool, typer.Option("--no-audit", help="Leave the attacks out: the report says so.")] = False,
    quick: Quick = False,
) -> None:
    """Write a report of a simulation: quality, privacy spent, bytes, who could read what. HTML, Markdown and JSON.

    DIR is a folder that `privfed simulate --out` wrote; report.html, report.md and report.json are put into it and replace earlier
    ones. What attacks could read is taken from the audit.json of `privfed audit` if it is about this very run and of this version;
    else the attacks are run, as `privfed audit` does. The report shows what is public, and canaries: no record of a bank.

    ```
    privfed report run1
    ```
    """
    if no_audit and quick:
        raise ValueError("expected --no-audit without --quick: there is nothing to shorten; nothing was read")
    finished_run(folder)
    with round_progress(quiet=False) as progress:
        from privfed.report.write import write_report  # noqa: PLC0415 # --help must not wait for torch
        from privfed.saved import SavedRun  # noqa: PLC0415

        run = SavedRun.load(folder)
        statements = run.statements()
        kept = None if no_audit else run.kept_audit()
        found = kept if kept is not None or no_audit else _attack(run, progress, quick=quick)
        path = write_report(
            run.history,
            folder / "report.html",
            audit=found,
            statements=statements,
            title=f"What the simulation in {folder.resolve().name} gave away",
            command="; ".join(filter(None, (run.command, shlex.join(["privfed", *sys.argv[1:]])))),
        )
    typer.echo(f"Report: {path} (and .md, .json)")
    if kept is not None:
        typer.echo(f"Attacks: those of audit.json, over {kept.repeats} batches of canaries; privfed audit repeats them.")
    elif found is not None:
        typer.echo(f"Attacks: run now, over {found.repeats} batches of canaries, because there was no audit.json of this very run.")


def _attack(run: "SavedRun", progress: RoundProgress, *, quick: bool) -> "Audit":
    use_one_core()
    repeats = _QUICK_REPEATS if quick else _REPEATS
    progress.preparing("Attacking canaries")
    found = run.audit(repeats=repeats, progress=lambda done: progress.preparing(f"Attacking canaries, {done} of {repeats}"))
    run.keep_audit(found)
    return found


def show_audit(found: "Audit") -> None:
    """Prints what attacks could read, party by party, and whether the banks train as they declare."""
    rows = ((party, _sentence(found.shown(party)), _sentence(found.control_of(party))) for party in found.parties)
    Console().print(
        table(
            "What attacks could read of made-up records",
            ("party", "in this consortium", "with the protection taken away"),
            rows=rows,
            left=3,
            caption=f"Of {found.clients} made-up clients with {found.rows} records each, three or as many as the policy demands: a bad "
            f"case for a client. Mean of {found.repeats} repeats, with its 95 % interval. Cells: values of a record that the attack had "
            "right; where it can prove nothing, it says what guessing says. Certified: proven from the update, to within 1 % of a "
            "column's range. Nothing to attack is no proof of safety.",
        )
    )
    typer.echo(f"Training, measured with canaries. {printable(found.verdict, most=_LONGEST)}")


def _sentence(finding: "Finding | None") -> str:
    if finding is None:
        return "-"
    from privfed.audit.findings import Measured  # noqa: PLC0415 # --help must not wait for torch

    if not isinstance(finding.outcome, Measured):
        return finding.sentence()
    score = finding.outcome.score
    return f"{finding.sentence()} [{max(0.0, score.low):.0%} to {min(1.0, score.high):.0%}]"
