"""`privfed history show`: the rounds in a party's folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from privfed.cli.arguments import RUN, AsJson
from privfed.cli.refusals import SUGGEST_COMMANDS
from privfed.cli.terminal import bytes_of, duration, epsilon_of, print_json, printable, table
from privfed.strict_json import parse

if TYPE_CHECKING:
    from privfed.round_record import FailedRound, RoundRecord

_TEXTS = 3
"""How many of the columns are text."""
_MOST_REASON = 1000

app = typer.Typer(no_args_is_help=True, suggest_commands=SUGGEST_COMMANDS, help="Look at the rounds that a party has a record of.")

PartyFolder = Annotated[Path, typer.Argument(metavar="DIR", show_default=False, help="The party's folder, or a run's.", readable=False)]


@app.command()
def show(folder: PartyFolder, *, as_json: AsJson = False) -> None:
    """Show each round: who took part, who was silent, what it took; at a bank, what its ledger had spent.

    For the folder of a server, a bank or a key holder, and for that of a simulation or the demo. No file is written to. Rounds count from
    1, in `--json` from 0.

    ```
    privfed history show server
    privfed history show bank_1 --json
    ```
    """
    if (folder / RUN).is_file():
        from privfed.saved import SavedRun  # noqa: PLC0415 # torch, which the folder of a party does not need

        SavedRun.load(folder)  # refuses what was edited
        rounds = [{"held": summary} for summary in parse((folder / RUN).read_text(encoding="utf-8"))["rounds"]]
    else:
        rounds = [entry for entry in _logged(folder) if entry.keys() & {"held", "failed", "opened"}]
    if as_json:
        print_json({"rounds": rounds})
        return
    console = Console(highlight=False, markup=False)
    if not rounds:
        console.print("No round yet.")
    elif any("opened" in entry for entry in rounds):
        console.print(_at_a_party(rounds))
    else:
        console.print(_at_the_server(rounds))
        for failed in (_part(entry, "failed") for entry in rounds if "failed" in entry):
            console.print(f"Round {failed['round'] + 1} was not held: {printable(failed['reason'], most=_MOST_REASON)}")


def _logged(folder: Path) -> list[dict[str, Any]]:
    """What stands in the record of a party; nothing where it has not been in a round yet."""
    from privfed.engines.party_folder import AGREEMENT, ROUNDS, SPOOL, STATE  # noqa: PLC0415 # --help must not wait for the cryptography
    from privfed.engines.run_log import read_log  # noqa: PLC0415

    used = (folder / STATE / "model.npz").exists() or any((folder / SPOOL).glob("*"))
    if (folder / AGREEMENT).is_file() and not (folder / ROUNDS).exists() and not used:
        return []
    return read_log(folder / ROUNDS)


def _at_the_server(entries: list[dict[str, Any]]) -> object:
    from privfed.round_record import FailedRound, RoundRecord  # noqa: PLC0415 # --help must not wait for numpy

    rows = [
        _held(RoundRecord.from_json(_part(entry, "held", "record"))) if "held" in entry else _failed(FailedRound.from_json(entry["failed"]))
        for entry in entries
    ]
    columns = ("Round", "In the aggregate", "Silent or over budget", "Effective", "Up", "Down", "Time")
    kept = [position for position in range(len(columns)) if any(row[position] for row in rows)]
    shown = [[row[position] for position in kept] for row in rows]
    return table("Rounds", [columns[position] for position in kept], shown, left=sum(position < _TEXTS for position in kept))


def _held(record: "RoundRecord") -> tuple[str, ...]:
    return (
        str(record.round + 1) if record.attempt == 0 else f"{record.round + 1}, attempt {record.attempt + 1}",
        ", ".join(name for name, coefficient in record.coefficients.items() if coefficient),
        ", ".join([*_silent(record), *(f"{name} over budget" for name in record.refused)]),
        f"{record.effective_clients:.2f}",
        bytes_of(sum(record.bytes_up.values())),
        bytes_of(sum(record.bytes_down.values())),
        duration(sum(record.seconds.values())),
    )


def _failed(failed: "FailedRound") -> tuple[str, ...]:
    return (f"{failed.round + 1}, not held", "", ", ".join(_silent(failed)), "", "", "", "")


def _silent(record: "RoundRecord | FailedRound") -> list[str]:
    """Who was silent, and from which stage on."""
    return [f"{name} {stage.name.lower()}" for name, stage in record.silent.items()]


def _at_a_party(entries: list[dict[str, Any]]) -> object:
    rows = [_opened(_part(entry, "opened")) for entry in entries if "opened" in entry]
    return table("Rounds in the model", ("Round", "In the aggregate", "Epsilon spent"), rows, left=2)


def _opened(entry: Mapping[str, Any]) -> tuple[str, ...]:
    number, coefficients, epsilon = entry.get("round"), entry.get("coefficients"), entry.get("epsilon")
    if type(number) is not int or not isinstance(coefficients, dict | None) or not isinstance(epsilon, int | float | None):
        raise ValueError("expected a record of rounds as a party writes it, got something else; nothing was shown")
    return (str(number + 1), ", ".join(map(str, coefficients or {})), "" if epsilon is None else epsilon_of(epsilon))


def _part(entry: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """A value inside of an entry."""
    value: Any = entry
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    if not isinstance(value, dict):
        raise ValueError("expected a record of rounds as a party writes it, got something else; nothing was shown")
    return value
