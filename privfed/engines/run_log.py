"""The log of a run: an entry per round, appended and synchronised."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from privfed.errors import DamagedFileError
from privfed.files import synchronise_folder


class RunLog:
    """A file of JSON lines, made with mode 0600 by the first entry. Only for who holds the folder.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, entry: Mapping[str, object]) -> None:
        """Appends an entry, synchronised before this returns. A last line that was cut off before is dropped, as in `entries`."""
        self.drop_cut()
        new = not self._path.exists()
        with open(self._path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write((json.dumps(entry) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())
        if new:
            synchronise_folder(self._path.parent)

    def drop_cut(self) -> bytes:
        """Takes a last line off that a crash or a full disk cut off, and returns what there is of it; nothing if all are whole."""
        try:
            file = self._path.open("rb+")
        except FileNotFoundError:
            return b""
        with file:
            size = file.seek(0, os.SEEK_END)
            if size == 0:
                return b""
            file.seek(size - 1)
            if file.read(1) == b"\n":
                return b""
            file.seek(0)
            data = file.read()
            whole = len(_whole_lines(data))
            file.truncate(whole)
            return data[whole:]

    def entries(self, *, used: bool) -> list[dict[str, Any]]:
        """What was logged so far. A last line that a crash cut off was never acted upon; it is dropped.

        Args:
            used: Whether anything else says that there were rounds.

        Raises:
            DamagedFileError: If there are no entries where there were rounds, or a line is no JSON; nothing was changed.
        """
        data = self._path.read_bytes() if self._path.exists() else b""
        if not data and used:
            raise damaged(self._path)
        self.drop_cut()
        return _entries(self._path, _whole_lines(data))


def read_log(path: Path) -> list[dict[str, Any]]:
    """What another process has logged so far, for who only looks: the file stays as it is.

    Raises:
        DamagedFileError: If a line is no JSON object.
        OSError: If the file cannot be read.
    """
    return _entries(path, _whole_lines(path.read_bytes()))


def _whole_lines(data: bytes) -> bytes:
    return data[: data.rfind(b"\n") + 1]


def _entries(path: Path, lines: bytes) -> list[dict[str, Any]]:
    try:
        entries = [json.loads(line) for line in lines.splitlines()]
    except (ValueError, RecursionError) as error:
        raise damaged(path) from error
    if not all(isinstance(entry, dict) for entry in entries):
        raise damaged(path)
    return entries


def damaged(path: Path) -> DamagedFileError:
    """The refusal of a run whose file is missing or damaged."""
    return DamagedFileError(f"{path.name} is missing or damaged; nothing was changed; put it back as it was, or choose a new folder")
