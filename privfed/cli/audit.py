"""`privfed audit` and `privfed report`: what a simulation gave away."""

import math
import shlex
import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from privfed.cli.arguments import AsJson, RunFolder, above_zero, alone, at_least, finished_run
from privfed.cli.terminal import RoundProgress, print_json, printable, round_progress, table, use_one_core

if TYPE_CHECKING:
    from privfed.audit.findings import Audit, Finding
    from privfed.audit.limits import Exceeded, Limits
    from privfed.saved import SavedRun

_REPEATS, _QUICK_REPEATS = 16, 3
_LONGEST = 10_000  # characters of a verdict, which names every bank
EXCEEDED = 3
"""Exit code of an audit that a limit does not let pass."""


class Tier(Enum):
    """How long an attack may take."""

    MILLISECONDS = "0"
    SECONDS = "1"


Quick = Annotated[bool, typer.Option("--quick", help=f"{_QUICK_REPEATS} batches of canaries instead of {_REPEATS}.")]


def audit(
    folder: RunFolder,
    *,
    quick: Quick = False,
    batches: Annotated[
        int | None, typer.Option(metavar="N", show_default=False, callback=at_least("--batches", 2), help="So many batches of canaries.")
    ] = None,
    tier: Annotated[Tier, typer.Option(help="0: attacks of milliseconds, for every round. 1: those of seconds too.")] = Tier.SECONDS,
    seconds: Annotated[
        float | None,
        typer.Option(
            metavar="S", show_default=False, callback=above_zero("--seconds"), help="Begin no batch after so long, from the third."
        ),
    ] = None,
    max_cells_read: Annotated[
        float | None,
        typer.Option(
            metavar="A", show_default=False, help="Limit: advantage over guessing at reading records, seen from any party. 0 none, 1 all."
        ),
    ] = None,
    max_epsilon: Annotated[float | None, typer.Option(metavar="E", show_default=False, help="Limit: what any bank may have spent.")] = None,
    require_as_declared: Annotated[
        bool, typer.Option("--require-as-declared", help="Limit: every bank must be measured to train with the noise that it declares.")
    ] = False,
    limits: Annotated[
        Path | None,
        typer.Option(metavar="FILE.toml", show_default=False, readable=False, help="These limits from a file: max_cells_read = 0.1"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find out what each party could read: attack made-up records under the protection of a simulation.

    DIR is a folder that `privfed simulate --out`, `privfed demo` or `privfed.save_run` wrote. The attacks run on canary rounds: real
    encrypted rounds, with the training of the bank that adds the least noise, on made-up records. Beside every score stands what guessing
    reaches, and the same attack with the protection taken away, which must succeed. Canaries in each bank's training show whether it adds
    the noise that it declares, and clips. No record and no ledger of the banks is touched. What was found is kept as audit.json in DIR, for
    `privfed report`; an earlier one is replaced.

    With limits the audit can decide, in CI for example: exit code 3, and a line on stderr for each limit that was not kept, or of which
    that is not known. An advantage counts with the upper end of its interval, so that an audit of few batches keeps no small limit.

    ```
    privfed audit run1
    privfed audit run1 --max-cells-read 0.2 --max-epsilon 8 --require-as-declared
    ```
    """
    if quick:
        alone("--quick", {"--batches": batches}, reason="it takes a number of its own")
    set_here = {"--max-cells-read": max_cells_read, "--max-epsilon": max_epsilon, "--require-as-declared": require_as_declared or None}
    if limits is not None:
        alone("--limits", set_here, reason="a limit must stand in one place")
    finished_run(folder)
    with round_progress(quiet=as_json) as progress:
        from privfed.audit.limits import Limits  # noqa: PLC0415 # --help must not wait for torch
        from privfed.saved import SavedRun  # noqa: PLC0415

        kept = (
            Limits(max_cells_read=max_cells_read, max_epsilon=max_epsilon, require_as_declared=require_as_declared)
            if limits is None
            else Limits.load(limits)
        )
        run = SavedRun.load(folder)
        repeats = batches or (_QUICK_REPEATS if quick else _REPEATS)
        found = _attack(run, progress, repeats=repeats, tier=tier, seconds=math.inf if seconds is None else seconds)
    exceeded = kept.check(found, run.history)
    if as_json:
        print_json(found.to_json() | {"exceeded": [str(one) for one in exceeded] if kept.given else None})
    else:
        show_audit(found)
        reported = " The report that is there already tells of an earlier audit." if (folder / "report.html").exists() else ""
        typer.echo(f"Kept: {folder / 'audit.json'}.{reported} Next:")
        typer.echo(f"  {shlex.join(['privfed', 'report', str(folder)])}")
    _decide(kept, exceeded, quiet=as_json)


def _decide(limits: "Limits", exceeded: "tuple[Exceeded, ...]", *, quiet: bool) -> None:
    for one in exceeded:
        typer.echo(f"limit not kept: {printable(str(one), most=_LONGEST)}", err=True)
    if exceeded:
        raise typer.Exit(EXCEEDED)
    if limits.given and not quiet:
        typer.echo("All limits were kept.")


def report(
    folder: RunFolder,
    *,
    no_audit: Annotated[bool, typer.Option("--no-audit", help="Leave the attacks out: the report says so.")] = False,
    quick: Quick = False,
) -> None:
    """Write a report of a simulation: quality, privacy spent, bytes, who could read what. HTML, Markdown and JSON.

    DIR is a folder that `privfed simulate --out`, `privfed demo` or `privfed.save_run` wrote; report.html, report.md and report.json are
    put into it and replace earlier ones. What attacks could read is taken from the audit.json of `privfed audit` if it is about this very
    run and of this version; else the attacks are run, as `privfed audit` does. The report shows what is public, and canaries: no record of
    a bank.

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
        found = kept if kept is not None or no_audit else _attack(run, progress, repeats=_QUICK_REPEATS if quick else _REPEATS)
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


def _attack(run: "SavedRun", progress: RoundProgress, *, repeats: int, tier: Tier = Tier.SECONDS, seconds: float = math.inf) -> "Audit":
    from privfed.audit.suite import DEEPER, SUITE  # noqa: PLC0415 # --help must not wait for torch

    use_one_core()
    progress.preparing("Attacking canaries")
    found = run.audit(
        repeats=repeats,
        attacks=DEEPER if tier is Tier.SECONDS else SUITE,
        seconds=seconds,
        progress=lambda done: progress.preparing(f"Attacking canaries, {done} of {repeats}"),
    )
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
            caption=f"Of {found.clients} made-up clients with {found.rows} records each, as few as the policy allows: a bad "
            f"case for a client. Mean of {found.repeats} repeats, with its 95 % interval. Cells: values of a record that the attack had "
            "right; where it can prove nothing, it says what guessing says. Certified: proven from the update, to within 1 % of a "
            "column's range. Nothing to attack is no proof of safety.",
        )
    )
    if found.poisonings:
        Console().print(
            table(
                "What one client that lies could make of a round",
                ("it sends", "what comes of it"),
                rows=((poisoned.attack, poisoned.sentence()) for poisoned in found.poisonings),
                left=2,
                caption="One round on made-up records, under the rule and the policy of this consortium. The client is the heaviest one, "
                "and knows all other updates.",
            )
        )
    typer.echo(f"Training, measured with canaries. {printable(found.training_verdict, most=_LONGEST)}")


def _sentence(finding: "Finding | None") -> str:
    if finding is None:
        return "-"
    from privfed.audit.findings import Measured  # noqa: PLC0415 # --help must not wait for torch

    if not isinstance(finding.outcome, Measured):
        return finding.sentence()
    score = finding.outcome.score
    return f"{finding.sentence()} [{max(0.0, score.low):.0%} to {min(1.0, score.high):.0%}]"
