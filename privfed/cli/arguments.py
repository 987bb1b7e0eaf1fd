"""Arguments that several commands have, and what is refused before anything is loaded: a user must not wait for torch to be told."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from privfed.errors import UnsupportedDataError

RUN = "history.json"
"""The file by which the folder of a saved simulation is told from others."""


def at_least(option: str, smallest: int, reason: str = "") -> Callable[[int | None], int | None]:
    """Refuses a smaller number."""

    def check(number: int | None) -> int | None:
        if number is not None and number < smallest:
            raise ValueError(f"expected {option} from {smallest}, got {number}{reason}; nothing was read")
        return number

    return check


def above_zero(option: str, *, below: float = math.inf, reason: str = "") -> Callable[[float | None], float | None]:
    """Refuses a number that is not above 0 and below a limit."""

    def check(number: float | None) -> float | None:
        if number is not None and not 0 < number < below:
            limit = "to be a finite number above 0" if below == math.inf else f"to be above 0 and below {below:g}"
            raise ValueError(f"expected {option} {limit}, got {number:g}{reason}; nothing was read")
        return number

    return check


# Files are opened, not asked: what the system says about them is a refusal like any other.
CsvFile = Annotated[Path, typer.Argument(metavar="FILE.csv", show_default=False, readable=False)]
RunFolder = Annotated[Path, typer.Argument(metavar="DIR", show_default=False, readable=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def alone(option: str, others: Mapping[str, object], *, reason: str) -> None:
    """Refuses an option beside others, which it would override without a word.

    Args:
        option: Is given.
        others: Values of the other options; None where one was not given.
        reason: Why they do not go together.
    """
    if given := [other for other, value in others.items() if value is not None]:
        raise ValueError(f"expected {option} without {' and '.join(given)}: {reason}; nothing was read")


def readable(file: Path) -> None:
    """Refuses, as the system does, a file that cannot be opened."""
    with file.open("rb"):
        pass


def empty_folder(folder: Path) -> Path:
    """Makes a folder, or refuses one that holds something."""
    _make(folder)
    if any(folder.iterdir()):
        raise ValueError(f"expected {folder} to be a new or empty folder; nothing was read or overwritten; give --out another one")
    return folder


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Makes an empty folder for a block. If nothing was written when the block is refused, what was made is taken away again."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    empty_folder(folder)
    try:
        yield folder
    except BaseException:
        for path in made:
            if any(path.iterdir()):
                break
            path.rmdir()
        raise


def folder_to_write(folder: Path) -> Path:
    """Makes a folder; what it holds stays."""
    _make(folder)
    return folder


def finished_run(folder: Path) -> None:
    """Refuses a folder that no finished simulation left."""
    make = "make one with: privfed simulate FILE.csv --out DIR"
    if not folder.exists():
        raise UnsupportedDataError(
            f"there is no folder {folder}; nothing was done; name the folder that privfed simulate --out wrote, or {make}"
        )
    if not folder.is_dir():
        raise UnsupportedDataError(
            f"{folder} is a file, not the folder of a run; nothing was done; name the folder that privfed simulate --out wrote, or {make}"
        )
    if not (folder / RUN).is_file():
        raise UnsupportedDataError(
            f"{folder} holds no {RUN}, so it is no folder of a finished privfed simulate --out or privfed demo; nothing was done; name "
            f"another folder, or {make}; a run of privfed.simulate is kept with privfed.save_run"
        )


def _make(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"expected --out to name a folder, and {folder} is a file; nothing was read or overwritten")
    folder.mkdir(parents=True, exist_ok=True)
