"""What `privfed simulate` and `privfed demo` show of a run to people."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape

from privfed.cli.terminal import bytes_of, epsilon_of, number, table

if TYPE_CHECKING:
    from privfed.scenario import Outcome


def show_outcome(outcome: "Outcome") -> None:
    """Shows the rounds, the banks, and who holds the key."""
    from privfed.training.mechanism import DpSgd  # noqa: PLC0415

    history, budget = outcome.history, outcome.budget
    console = Console()
    rounds = (
        (
            str(summary.record.round + 1),
            str(len(summary.record.participants)),
            number(summary.evaluation.pr_auc) if summary.evaluation else "-",
            number(summary.evaluation.recall_at_1_percent_fpr) if summary.evaluation else "-",
            bytes_of(sum(summary.record.bytes_up.values()) / len(summary.record.bytes_up)),
            f"{sum(summary.record.seconds.values()):.1f}",
        )
        for summary in history.rounds
    )
    console.print(
        table(
            "The model, round by round",
            ("round", "banks in sum", "PR-AUC", "recall at 1 % FPR", "sent per bank", "seconds"),
            rows=rounds,
            left=0,
            caption=f"On the quarter set aside (simulation only). Guessing has a PR-AUC of {outcome.prevalence:.4f}. Recall: share of the "
            "frauds found where 1 % of the others are flagged, too.",
        )
    )
    banks = (
        (
            bank.name,
            f"{bank.records:,}",
            f"{bank.frauds:,}",
            f"{mechanism.noise_multiplier:.3g}" if isinstance(mechanism := history.training[bank.name], DpSgd) else "none",
            epsilon_of(history.epsilon[bank.name]),
            f"{budget.epsilon:g}" if budget.limited else "no limit",
            f"{budget.delta:g}",
            bytes_of(bank.bytes_up),
        )
        for bank in outcome.banks
    )
    console.print()
    console.print(
        table(
            "The banks",
            ("bank", "records", "frauds", "noise", "epsilon spent", "of", "at delta", "sent"),
            rows=banks,
            caption="Records and frauds: simulation only. Noise: standard deviation over the clipping norm.",
        )
    )
    console.print()
    if outcome.scenario.delta is None and history.private:
        console.print(
            f"Delta {budget.delta:g} was chosen: a power of ten below 1 / (10 x {outcome.declared:,}); the largest bank declares "
            f"{outcome.declared:,} records.",
            highlight=False,
        )
    console.print(
        f"Updates travelled encrypted: {history.bytes_up_per_parameter:.2f} bytes per parameter up, "
        f"{history.bytes_down_per_parameter:.2f} down ({history.model.layout.size} parameters). Trust mode {history.mode}: "
        f"{outcome.scenario.custody.words}."
    )
    for note in outcome.notes:
        console.print(f"[yellow]Note:[/yellow] {escape(note)}")


def show_written(outcome: "Outcome", out: Path, *, also: str = "") -> None:
    """Says what was written where, and what to do with it.

    Args:
        outcome: What was run.
        out: The folder.
        also: Further things that were written to it.
    """
    Console().print(f"Written to {escape(str(out))}: history.json, model.npz, initial.npz, {also}and a ledger per bank. Next:")
    for command in (["audit", out], ["report", out], ["ledger", "show", out / f"{outcome.banks[0].name}.ledger"]):
        typer.echo(f"  {shlex.join(['privfed', *map(str, command)])}")
