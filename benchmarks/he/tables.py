"""What the figures say: a table for each number of clients, and what is required of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.he.catalogue import FLARE, OURS, STANDARD, THRESHOLD
from benchmarks.he.runs import Cost, Missing

_WIDTH = 220  # also where the output goes to a file
_JUDGED_FROM = 1_000_000  # parameters: below, what a process takes at all hides what the parameters take
_FLAT = 1.25  # a few hundred bytes of each client, its approval for one, go into the server's message

_WHOLE = 1.5  # bytes down per byte up: 1 as c0 and seeds, 2 if whole

# Heading, field, and how a figure is written.
_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("B up", "bytes_up_per_parameter", ".2f"),
    ("B down", "bytes_down_per_parameter", ".2f"),
    ("shares up", "shares_up", ",.0f"),
    ("shares down", "shares_down", ",.0f"),
    ("client CPU s", "client_cpu_s", ".3f"),
    ("server CPU s", "server_cpu_s", ".3f"),
    ("agreement CPU s", "agreement_cpu_s", ".3f"),
    ("opener CPU s", "opener_cpu_s", ".3f"),
    ("holder CPU s", "holder_cpu_s", ".3f"),
    ("client MB", "client_peak_mb", ".0f"),
    ("server MB", "server_peak_mb", ".0f"),
    ("opener MB", "opener_peak_mb", ".0f"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """A figure that is required, and whether it is reached; None if it is not judged at this size."""

    what: str
    clients: int
    required: float
    measured: float
    at_most: bool
    reached: bool | None


def judge(results: Sequence[Cost | Missing]) -> list[Requirement]:
    """What is required of the implementations that were measured, for each number of clients, and of all numbers together."""
    found = list[Requirement]()
    costs = [result for result in results if isinstance(result, Cost)]

    def require(what: str, clients: int, measured: float, required: float, *, at_most: bool, params: int) -> None:
        reached = measured <= required if at_most else measured >= required
        found.append(
            Requirement(
                what=what,
                clients=clients,
                required=required,
                measured=measured,
                at_most=at_most,
                reached=reached if params >= _JUDGED_FROM else None,
            )
        )

    for clients, group in groupby(costs, key=lambda cost: cost.clients):
        by_name = {cost.name: cost for cost in group}
        for name, most in (("parity", 4.2), (STANDARD, 7.2)):
            if name in by_name:
                params, up = by_name[name].params, by_name[name].bytes_up_per_parameter
                require(f"{name}: bytes up per parameter", clients, up, most, at_most=True, params=params)
        if THRESHOLD in by_name:
            params = by_name[THRESHOLD].params
            for direction in ("up", "down"):
                measured = getattr(by_name[THRESHOLD], f"bytes_{direction}_per_parameter")
                require(f"{THRESHOLD}: bytes {direction} per parameter, beside shares", clients, measured, 5.2, at_most=True, params=params)
        if STANDARD in by_name and FLARE in by_name:
            ours, theirs = by_name[STANDARD], by_name[FLARE]
            for field, least in (("bytes_up_per_parameter", 8), ("client_cpu_s", 4), ("server_cpu_s", 4), ("server_peak_mb", 5)):
                ratio = getattr(theirs, field) / getattr(ours, field)
                require(f"{FLARE} / {STANDARD}: {field}", clients, ratio, least, at_most=False, params=ours.params)
    for name in OURS:
        # A sum travels as c0 and seeds or whole, and then is twice as large, wherever it is: memory is compared within one form.
        for whole in (False, True):
            group = [
                cost
                for cost in costs
                if cost.name == name and (cost.bytes_down_per_parameter > _WHOLE * cost.bytes_up_per_parameter) is whole
            ]
            fewest, most = min(group, key=_clients, default=None), max(group, key=_clients, default=None)
            if fewest is not None and most is not None and fewest.clients < most.clients:
                ratio = most.server_peak_mb / fewest.server_peak_mb
                what = f"{name}: server_peak_mb / server_peak_mb with {fewest.clients} clients"
                require(what, most.clients, ratio, _FLAT, at_most=True, params=most.params)
    return found


def _clients(cost: Cost) -> int:
    return cost.clients


def print_tables(results: Sequence[Cost | Missing], requirements: Sequence[Requirement]) -> None:
    """Tables that Markdown understands. In brackets, how many times as much as `standard` takes."""
    console = Console(width=_WIDTH)
    for _, group in groupby(results, key=lambda result: result.clients):
        rows = list(group)
        first = rows[0]
        console.print(f"{first.params:,} parameters in {first.tensors} tensors, {first.clients} clients\n")
        console.print(_costs(rows))
        for row in rows:
            if isinstance(row, Missing):
                console.print(f"{row.name} is missing: {row.missing}", soft_wrap=True, markup=False)
    if requirements:
        console.print("\nWhat is required\n")
        console.print(_required(requirements))


def _costs(rows: Sequence[Cost | Missing]) -> Table:
    table = Table(box=box.MARKDOWN)
    for heading in ("implementation", *(heading for heading, _, _ in _COLUMNS), "max error"):
        table.add_column(heading, justify="left" if heading == "implementation" else "right", no_wrap=True)
    reference = next((row for row in rows if isinstance(row, Cost) and row.name == STANDARD), None)
    for row in rows:
        if isinstance(row, Missing):
            continue
        cells = (_cell(row, reference, field, style) for _, field, style in _COLUMNS)
        table.add_row(row.name, *cells, f"{row.max_error:.1e}")
    return table


def _cell(row: Cost, reference: Cost | None, field: str, style: str) -> str:
    value = getattr(row, field)
    if reference is None or not getattr(reference, field):
        return format(value, style)
    return f"{value:{style}} ({value / getattr(reference, field):.1f})"


def _required(requirements: Sequence[Requirement]) -> Table:
    table = Table("figure", "clients", "required", "measured", "reached", box=box.MARKDOWN)
    words = {True: "yes", False: "NO", None: "not judged below a million parameters"}
    for requirement in requirements:
        bound = f"{'at most' if requirement.at_most else 'at least'} {requirement.required:g}"
        table.add_row(requirement.what, str(requirement.clients), bound, f"{requirement.measured:.2f}", words[requirement.reached])
    return table
