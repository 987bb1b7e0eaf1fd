"""What the experiments on transactions have in common: records, intervals, options, progress, and finished runs that are kept."""

import hashlib
import importlib.util
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar

import numpy as np
import pandas as pd
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from scipy import stats
from torch import nn

from privfed.data.paysim import check_full_file, load_paysim
from privfed.data.samples import Samples
from privfed.data.transactions import generate_transactions
from privfed.errors import UnsupportedDataError
from privfed.training.evaluate import average_precision
from privfed.training.model import mlp, scores
from privfed.update import PlainVector

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Outcome = TypeVar("_Outcome", bound="DataclassInstance")

FILE = "paysim_sim_194k.csv.gz"
DOSSIER = Path(__file__).parents[1] / "docs" / "experiments"
TEST_SHARE = 0.3
HIDDEN = (64, 32)
UNUSABLE = 2
QUICK_ROWS, QUICK_FRAUD_RATE = 20_000, 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate and its 95 % interval."""

    estimate: float
    low: float
    high: float

    def __str__(self) -> str:
        if not (math.isfinite(self.low) and math.isfinite(self.high)):
            return f"{self.estimate:.3f} (no interval)"
        return f"{self.estimate:.3f} ({self.low:.3f} to {self.high:.3f})"


def t_interval(values: Sequence[float]) -> Interval:
    """Mean and Student's 95 % interval of at least two independent values."""
    array = np.asarray(values)
    half = stats.t.ppf(0.975, len(array) - 1) * array.std(ddof=1) / math.sqrt(len(array))
    return Interval(estimate=float(array.mean()), low=float(array.mean() - half), high=float(array.mean() + half))


def signed(interval: Interval) -> str:
    """A difference and its interval, with signs."""
    return f"{interval.estimate:+.3f} ({interval.low:+.3f} to {interval.high:+.3f})"


def ratio_interval(above: Sequence[float], below: Sequence[float]) -> Interval:
    """Ratio of the means of paired values, with Fieller's 95 % interval (Fieller, 1954, "Some problems in interval estimation").

    It holds the ratios r at which the paired differences above - r * below pass a t-test for mean 0. Where the mean of `below` is
    not distinguishable from 0, every bound could be passed, and the interval is infinite.
    """
    pairs = np.stack([above, below])
    up, down = pairs.mean(axis=1)
    spread = np.cov(pairs) / pairs.shape[1] * stats.t.ppf(0.975, pairs.shape[1] - 1) ** 2
    a, b, c = down**2 - spread[1, 1], up * down - spread[0, 1], up**2 - spread[0, 0]
    if a <= 0:
        return Interval(estimate=float(up / down), low=-math.inf, high=math.inf)
    root = math.sqrt(max(b**2 - a * c, 0.0))
    return Interval(estimate=float(up / down), low=float((b - root) / a), high=float((b + root) / a))


def pr_auc(model: nn.Module, values: PlainVector, samples: Samples) -> float:
    return average_precision(samples.labels, scores(model, values, samples.features))


def first_model(columns: Sequence[str], *, seed: int) -> nn.Module:
    """The network that all training of a seed starts from."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return mlp(inputs=len(columns), hidden=HIDDEN)


def versions_of(*names: str) -> str:
    """Names and versions of installed packages, for a page."""
    return ", ".join(f"{name} {version(name)}" for name in names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the records are from: `origin` says what may be concluded."""

    name: str
    origin: str


def finite(value: object) -> object:
    """The value with null for every number in it that JSON has none for."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_lines(source: Source, **kinds: Sequence["DataclassInstance"]) -> None:
    """One JSON object per line, with its kind and where the records are from."""
    for kind, things in kinds.items():
        for thing in things:
            typer.echo(json.dumps(finite({"kind": kind, "source": source.name} | asdict(thing)), allow_nan=False))


def wide_console() -> Console:
    """A console in which tables crop no number: a terminal that is narrower wraps their lines."""
    return Console(width=max(Console().width, 200))


def print_table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str | None = None) -> None:
    """The results for a reader at a terminal."""
    shown = Table(title=title, caption=caption)
    for name in head:
        shown.add_column(name)
    for row in rows:
        shown.add_row(*row)
    wide_console().print(shown)


class Dealt(Protocol):
    """An outcome that says what its banks had."""

    @property
    def bank_records(self) -> tuple[int, ...]: ...
    @property
    def bank_frauds(self) -> tuple[int, ...]: ...


def bank_lines(by_seed: Mapping[int, Dealt]) -> list[str]:
    """What each bank had, a line per seed, for a page."""
    lines = ["| seed | records per bank | frauds per bank |", "|---|---|---|"]
    for seed, run in by_seed.items():
        lines.append(f"| {seed} | {', '.join(map(str, run.bank_records))} | {', '.join(map(str, run.bank_frauds))} |")
    return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRuns:
    """What runs that are finished gave, so that an experiment that was interrupted goes on where it was.

    Args:
        folder: One file per run; None to keep nothing.
    """

    folder: Path | None

    def take(self, kind: type[_Outcome], *setting: object, run: Callable[[], _Outcome], spared: Callable[[], object]) -> _Outcome:
        """The outcome of a run of this setting: what was kept, and `spared` is called; or what `run` gives, which is kept."""
        kept = self.find(*setting)
        if kept is not None:
            spared()
            return kind(**kept)
        outcome = run()
        self.keep(asdict(outcome), *setting)
        return outcome

    def find(self, *setting: object) -> dict[str, Any] | None:
        """The fields that were kept for a run of this setting, lists as tuples; None if there are none."""
        path = self._path(setting)
        if path is None or not path.is_file():
            return None
        fields = json.loads(path.read_text(encoding="utf-8"))
        return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}

    def keep(self, fields: Mapping[str, Any], *setting: object) -> None:
        """Keeps the fields of a run: all of the file is there, or none of it."""
        path = self._path(setting)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(".unfinished")
            unfinished.write_text(json.dumps(fields), encoding="utf-8")
            unfinished.replace(path)

    def _path(self, setting: tuple[object, ...]) -> Path | None:
        return None if self.folder is None else self.folder / f"{hashlib.sha256(repr(setting).encode()).hexdigest()[:20]}.json"


def find_data() -> Path | None:
    """The default file in the folder PRIVFED_DATA, or ../shared/data beside the repository; None where it is not."""
    folder = Path(os.environ.get("PRIVFED_DATA") or Path(__file__).parents[2] / "shared" / "data")
    return folder / FILE if (folder / FILE).is_file() else None


_SIMULATED = "These records come from a simulator. They are not Kaggle's file, and no number here is a result on it."
_MADE_UP = "These records are made up. They are not Kaggle's file, and no number here is a result on it."
_GIVEN = "These are the records of a file that was given; where they come from is for whoever gave it to say."
_KAGGLE = "These records have the published figures of Kaggle's file."


def load(data: Path | None, *, quick: bool) -> tuple[pd.DataFrame, Source]:
    """The table and where it is from.

    Raises:
        FileNotFoundError: If there is no file and made-up transactions would not do.
    """
    path = data or find_data()
    if path is not None:
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path}")
        table = load_paysim(path)
        name = f"{path.name}, {_extent(table)}, SHA-256 {hashlib.sha256(path.read_bytes()).hexdigest()}"
        return table, Source(name=name, origin=_SIMULATED if data is None else _origin(table))
    if not quick:
        raise FileNotFoundError(f"no {FILE} found: set PRIVFED_DATA to the folder that holds it, or give a PaySim log with --data")
    table = generate_transactions(rows=QUICK_ROWS, fraud_rate=QUICK_FRAUD_RATE, rng=np.random.default_rng(0))
    return table, Source(name=f"generated transactions, {_extent(table)}", origin=_MADE_UP)


def _origin(table: pd.DataFrame) -> str:
    try:
        check_full_file(table)
    except UnsupportedDataError:
        return _GIVEN
    return _KAGGLE


def _extent(table: pd.DataFrame) -> str:
    return f"{len(table):,} rows with {int(table['isFraud'].to_numpy().sum()):,} frauds"


Quick = Annotated[bool, typer.Option("--quick", help="Seconds instead of minutes; too short to be judged; writes no page.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object per line and nothing else.")]
Data = Annotated[Path | None, typer.Option(help="A PaySim log in Kaggle's columns; by default PRIVFED_DATA's.")]
Output = Annotated[Path | None, typer.Option(help="Folder for page and figure; by default docs/experiments, of a quick run none.")]


Cache = Annotated[Path | None, typer.Option(help="Folder of finished runs, from which an interrupted experiment goes on.")]


def need_matplotlib(folder: Path | None) -> None:
    """Ends with status 2 if a figure is to be written, and cannot be."""
    if folder is not None and importlib.util.find_spec("matplotlib") is None:
        typer.echo("the figure needs matplotlib, which is not installed: pip install 'privfed[dev]'; nothing was run", err=True)
        raise typer.Exit(UNUSABLE)


def prepare(data: Path | None, *, quick: bool, folder: Path | None) -> tuple[pd.DataFrame, Source]:
    """The table of an experiment, when all that it needs is there; else it ends with status 2, before anything was run."""
    torch.set_num_threads(1)
    need_matplotlib(folder)
    try:
        return load(data, quick=quick)
    except (FileNotFoundError, UnsupportedDataError) as error:
        typer.echo(f"{error}; nothing was run", err=True)
        raise typer.Exit(UNUSABLE) from error


def round_bar(what: str = "rounds") -> Progress:
    """Progress on stderr, in rounds of all runs."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(what), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True))
