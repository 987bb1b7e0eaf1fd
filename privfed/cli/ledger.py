"""`privfed ledger show` and `privfed ledger verify`."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from privfed.cli.terminal import AsJson, print_json, table
from privfed.errors import LedgerError

if TYPE_CHECKING:
    from privfed.dp.ledger import Ledger

app = typer.Typer(no_args_is_help=True, help="Look at the privacy ledger of a data owner: what was spent, and whether it was altered.")

LedgerFile = Annotated[Path, typer.Argument(metavar="LEDGER", show_default=False, readable=False)]


@app.command()
def show(file: LedgerFile, as_json: AsJson = False) -> None:
    """Show every charge and what is left of the budget. The ledger is verified first, and must not be open elsewhere.

    ```
    privfed ledger show run1/bank_1.ledger
    ```
    """
    from privfed.dp.mechanism import encode_event  # noqa: PLC0415 # --help must not wait for the accountants

    with _reopened(file) as ledger:
        charges = [row for row in ledger.rows() if row.kind == "reserve"]
        committed = {row.reservation.id for row in ledger.rows() if row.kind == "commit" and row.reservation}
        spent = ledger.spent()
        facts = _facts(ledger) | {"spent": _finite(spent), "unit": ledger.unit.value}
        events = [encode_event(event) for event in ledger.events()]
        rows = [
            {
                "row": row.number,
                "time": row.time,
                "session": charge.session.hex(),
                "round": charge.round,
                "attempt": charge.attempt,
                "event": event,
                "committed": charge.id in committed,
            }
            for row, event in zip(charges, events, strict=True)
            if (charge := row.reservation)
        ]
    if as_json:
        print_json(facts | {"charges": rows})
        return
    budget = ledger.budget
    cells = (
        (
            str(row["time"])[:16].replace("T", " "),
            str(row["session"])[:8],
            str(row["round"]),
            str(event["kind"]),
            str(event.get("steps", event.get("count", 1))),
            f"{event['sample_rate']:.3g}" if "sample_rate" in event else "-",
            f"{event['noise_multiplier']:.3g}" if "noise_multiplier" in event else "-",
            "yes" if row["committed"] else "no",
        )
        for row, event in zip(rows, events, strict=True)
    )
    limit = f"of {budget.epsilon:g}" if budget.limited else "of an unlimited budget"
    console = Console()
    console.print(
        table(
            f"Ledger of {ledger.population}",
            ("time (UTC)", "session", "round", "charged for", "times", "rate", "noise", "done"),
            rows=cells,
            left=4,
            caption="Every line counts, done or not. Rate: of a record in a step. Noise: over the clipping norm.",
        )
    )
    console.print(f"Spent: epsilon {spent:.3f} {limit}, at delta {budget.delta:g}. Protected: {ledger.unit.value}.")
    console.print(f"Head: {ledger.head.hex()}", soft_wrap=True)


@app.command()
def verify(file: LedgerFile, as_json: AsJson = False) -> None:
    """Check every row against the chain of hashes. Exit code 0: nothing was edited, cut off or exchanged.

    Not even this shows that all files were set back to an older copy together. Keep the head that is printed elsewhere, and compare.

    ```
    privfed ledger verify run1/bank_1.ledger
    ```
    """
    with _reopened(file) as ledger:
        ledger.verify()
        facts = _facts(ledger)
    if as_json:
        print_json({"verified": True, **facts})
        return
    console = Console()
    console.print(f"Verified: all {facts['rows']} rows of the ledger of {ledger.population} are as they were written.", markup=False)
    console.print(f"Head: {facts['head']}", soft_wrap=True)


def _reopened(path: Path) -> "Ledger":
    from privfed.dp.ledger import Ledger  # noqa: PLC0415

    with path.open("rb") as file:
        if file.read(16) != b"SQLite format 3\0":  # a file that is no ledger gets no .head file beside it
            raise LedgerError(f"{path.name} is no ledger, or its first bytes are damaged; nothing was opened")
    return Ledger.reopen(path)


def _facts(ledger: "Ledger") -> dict[str, object]:
    return {
        "population": ledger.population,
        "budget": {"epsilon": _finite(ledger.budget.epsilon), "delta": ledger.budget.delta},
        "rows": len(ledger.rows()),
        "head": ledger.head.hex(),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
