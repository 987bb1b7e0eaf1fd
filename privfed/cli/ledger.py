"""`privfed ledger show` and `privfed ledger verify`."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from privfed.cli.arguments import AsJson
from privfed.cli.refusals import SUGGEST_COMMANDS
from privfed.cli.terminal import epsilon_of, print_json, printable
from privfed.errors import LedgerError

if TYPE_CHECKING:
    from privfed.dp.entries import LedgerRow
    from privfed.dp.ledger import Ledger
    from privfed.dp.mechanism import Budget

app = typer.Typer(
    no_args_is_help=True,
    suggest_commands=SUGGEST_COMMANDS,
    help="Look at the privacy ledger of a data owner: what was spent, and whether it was altered.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Charge:
    """One charge, as `--json` gives it, and in words."""

    row: int
    time: str
    session: str
    round: int
    attempt: int
    event: Mapping[str, object]
    committed: bool
    words: str

    def to_json(self) -> dict[str, object]:
        values = asdict(self)
        del values["words"]
        return values


LedgerFile = Annotated[Path, typer.Argument(metavar="LEDGER", show_default=False, readable=False)]


@app.command()
def show(
    file: LedgerFile,
    show_all: Annotated[bool, typer.Option("--all", help="A line per charge, and everything else that is written in it.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what was charged in each session, and what is left of the budget.

    The ledger is verified first, and must not be open elsewhere. No file is written to. Rounds count from 1, in `--json` from 0.

    ```
    privfed ledger show run1/bank_1.ledger
    privfed ledger show run1/bank_1.ledger --all
    ```
    """
    from privfed.dp.ledger import Ledger  # noqa: PLC0415 # --help must not wait for the accountants
    from privfed.dp.mechanism import Unit, describe_event, encode_event  # noqa: PLC0415

    with Ledger.read(file) as ledger:
        rows = ledger.rows()
        committed = {row.reservation.id for row in rows if row.kind == "commit" and row.reservation}
        charges = [
            _Charge(
                row=row.number,
                time=row.time,
                session=charge.session.hex(),
                round=charge.round,
                attempt=charge.attempt,
                event=encode_event(charge.event),
                committed=charge.id in committed,
                words=describe_event(charge.event),
            )
            for row in rows
            if row.kind == "reserve" and (charge := row.reservation)
        ]
        spent = {ledger.unit.value: (ledger.spent(), ledger.budget)}
        facts = _facts(ledger) | {"spent": _finite(ledger.spent()), "unit": ledger.unit.value}
        if (silo := ledger.terms.silo_budget) is not None:
            spent[Unit.SILO.value] = (ledger.silo_spent(), silo)
            facts |= {"silo_spent": _finite(ledger.silo_spent()), "silo_budget": _budget(silo)}
    if as_json:
        print_json(facts | {"charges": [charge.to_json() for charge in charges]})
        return
    console = Console(highlight=False, markup=False)
    console.print(f"Ledger of {printable(ledger.population)}")
    for line in _lines(charges, rows) if show_all else _sessions(charges):
        console.print(line)
    for unit, (epsilon, budget) in spent.items():
        limit = f"of {budget.epsilon:g}" if budget.limited else "without a limit"
        console.print(f"Spent: epsilon {epsilon_of(epsilon)} {limit}, at delta {budget.delta:g}. Protected: {unit}.")
    console.print(f"Head: {ledger.head.hex()}", soft_wrap=True)


@app.command()
def verify(
    file: LedgerFile,
    population: Annotated[
        str | None, typer.Option(metavar="NAME", help="Whose ledger it must be: the name of the data set.", show_default=False)
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|HEX",
            help="A head that it had, as peers or the owner remember it: 64 digits, a text with them (such as what this command printed "
            "then), or the heads.sqlite of a peer.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check every row of a ledger, and what else you can say about it. Exit code 0: all that was checked holds.

    The rows alone show that nothing was edited or cut off. They do not show whose ledger it is: say so with `--population`. Nor that
    its files were not set back to an older copy, or exchanged, all together: for this, give `--head`, kept elsewhere; the ledger may
    have grown since. What was not checked is said. No file is written to.

    ```
    privfed ledger verify run1/bank_1.ledger
    privfed ledger verify run1/bank_1.ledger --population bank_1 --head remembered.txt
    ```
    """
    if head is not None:
        _check_head(head)
    from privfed.dp.ledger import Ledger  # noqa: PLC0415 # --help must not wait for the accountants

    with Ledger.read(file) as ledger:
        ledger.verify()
        if population is not None and ledger.population != population:
            raise LedgerError(
                f"{file} is the ledger of {ledger.population!r}, not of {population!r}; nothing was changed; find out who exchanged it"
            )
        since = None if head is None else ledger.rows_since(_remembered(head, population=ledger.population))
        facts = _facts(ledger)
    if as_json:
        print_json({"verified": True, "population_checked": population is not None, "rows_since_head": since, **facts})
        return
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"Checked: all {facts['rows']} rows of the ledger of {printable(ledger.population)} are as they were written, none is cut off."
    )
    if population is None:
        console.print("Not checked: whose ledger this is. Give --population NAME.")
    else:
        console.print("Checked: it is the ledger of that population.")
    if since is None:
        console.print(
            "Not checked: whether all its files were set back to an older copy or exchanged together. Give --head, kept elsewhere."
        )
    else:
        console.print(f"Checked: it extends the head that you remember, {f'by {since} rows' if since else 'and has not grown since'}.")
    console.print(f"Head: {facts['head']}")


def _check_head(head: str) -> None:
    """Refuses what is neither a head nor a file, before the ledger is read."""
    if not _DIGITS.fullmatch(head) and not Path(head).is_file():
        raise ValueError(
            f"expected --head to be 64 hexadecimal digits, or a file that holds them, got {head!r}, {len(head)} characters and no file; "
            "nothing was checked; give the head that privfed ledger verify printed then, whole, or the heads.sqlite of a peer"
        )


def _remembered(head: str, *, population: str) -> bytes:
    """The head that is given, as digits or in a file."""
    from privfed.dp.countersign import remembered_head  # noqa: PLC0415 # --help must not wait for the accountants

    if _DIGITS.fullmatch(head):
        return bytes.fromhex(head)
    file = Path(head)
    content = file.read_bytes()
    if content.startswith(b"SQLite format 3\0"):
        return remembered_head(file, population=population)
    found = set(_DIGITS.findall(content.decode(errors="replace")))
    if len(found) != 1:
        raise ValueError(
            f"expected --head to be 64 hexadecimal digits, or a file with exactly one such number, got {len(found)} in {file.name}"
        )
    return bytes.fromhex(found.pop())


_DIGITS = re.compile(r"\b[0-9a-fA-F]{64}\b")


def _sessions(charges: Iterable[_Charge]) -> Iterator[str]:
    """A paragraph per session, or more where it was charged for different things one after the other."""
    for (session, words), group in groupby(charges, key=lambda charge: (charge.session, charge.words)):
        alike = list(group)
        first, last = min(charge.round for charge in alike) + 1, max(charge.round for charge in alike) + 1
        rounds = f"round {first}" if first == last else f"rounds {first} to {last}"
        open_ones = sum(not charge.committed for charge in alike)
        done = f"{open_ones} of them never finished, which counts as well" if open_ones else "all done"
        times = "1 charge" if len(alike) == 1 else f"{len(alike)} charges"
        yield f"  Session {session[:8]}, from {_minute(alike[0].time)} UTC: {rounds}, {times}, {done}. Each: {words}."


def _lines(charges: Iterable[_Charge], rows: Iterable["LedgerRow"]) -> Iterator[str]:
    """A line per row of the ledger; whether a charge is done stands in its own."""
    by_row = {charge.row: charge for charge in charges}
    for row in rows:
        if row.number in by_row:
            charge = by_row[row.number]
            attempt = f", attempt {charge.attempt + 1}" if charge.attempt else ""
            done = "done" if charge.committed else "never finished, which counts as well"
            yield f"  {_minute(row.time)}  session {charge.session[:8]}, round {charge.round + 1}{attempt}: {charge.words}; {done}"
        elif row.kind != "commit":
            yield f"  {_minute(row.time)}  {printable(row.text)}"


def _minute(time: str) -> str:
    return time[:16].replace("T", " ")


def _facts(ledger: "Ledger") -> dict[str, object]:
    return {
        "population": ledger.population,
        "budget": _budget(ledger.budget),
        "rows": len(ledger.rows()),
        "head": ledger.head.hex(),
    }


def _budget(budget: "Budget") -> dict[str, float | None]:
    return {"epsilon": _finite(budget.epsilon), "delta": budget.delta}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
