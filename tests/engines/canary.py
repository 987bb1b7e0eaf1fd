"""A bank's plaintext update as a canary: the bank keeps it in its memory and on its disk, and nobody else may have it anywhere."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import psutil

from privfed.engines.party_folder import read_agreement
from privfed.memory import patterns_in_process

KEEPING = """
from privfed.client import Trainer as _Trainer

_TRAIN, _KEPT = _Trainer.train, []


def _keeping(self, start, **place):
    update = _TRAIN(self, start, **place)
    _KEPT.append(np.array(update.vector.values))
    np.save(Path(__file__).parent / f"update-{update.round}.npy", _KEPT[-1])
    return update


if __name__ == "privfed_site":  # at the bank itself, and not where a test runs the file
    _Trainer.train = _keeping
"""
"""For the end of a `site.py`: the bank's process keeps every update in the clear, and writes it into its own folder."""

_LENGTH = 4


def canary(bank: Path, *, number: int, dtype: type = np.float64) -> bytes:
    """A stretch of the update of a round, of 16 bytes at least, so that it is nowhere by chance."""
    values = np.load(bank / f"update-{number}.npy")
    stretch = values[len(values) // 2 :][:_LENGTH]
    assert np.count_nonzero(stretch) == _LENGTH, "zeros are everywhere"
    return stretch.astype(dtype).tobytes()


def check_server_is_blind(*, server: int, servers_folder: Path, bank: int, banks_folder: Path, rounds: tuple[int, ...]) -> None:
    """Looks for a bank's updates at the server, and finds none; looks for them in the same way at the bank, and finds them all.

    Args:
        server: Process id of the server; those that it started are searched too.
        servers_folder: The server's.
        bank: Process id of the bank.
        banks_folder: The bank's.
        rounds: Whose updates are looked for.
    """
    kept = {canary(banks_folder, number=number) for number in rounds}
    forms = kept | {canary(banks_folder, number=number, dtype=np.float32) for number in rounds}
    session = read_agreement(servers_folder).session
    assert in_memory(server, [*forms, session]) == {session}  # it was looked at: the server knows the session
    assert in_files(servers_folder, forms) == set()
    assert kept <= in_memory(bank, kept)
    assert in_files(banks_folder, kept) == kept


def commands(pid: int) -> list[str]:
    """Command lines of a process and of those that it started."""
    root, lines = psutil.Process(pid), []
    for process in (root, *root.children(recursive=True)):
        try:
            lines.append(" ".join(process.cmdline()))
        except psutil.NoSuchProcess:
            continue
    return lines


def in_memory(pid: int, patterns: Iterable[bytes]) -> set[bytes]:
    """Those patterns that stand in the memory of a process or of one that it started."""
    root, patterns = psutil.Process(pid), list(patterns)
    found: set[bytes] = set()
    for process in (root, *root.children(recursive=True)):
        try:
            flags = patterns_in_process(process.pid, patterns)
        except (ProcessLookupError, FileNotFoundError, RuntimeError):
            if process == root or (process.is_running() and process.status() != psutil.STATUS_ZOMBIE):
                raise
            continue  # it has ended meanwhile, and its memory with it
        found |= {pattern for pattern, there in zip(patterns, flags, strict=True) if there}
    return found


def in_files(folder: Path, patterns: Iterable[bytes]) -> set[bytes]:
    """Those patterns that stand in a file of a folder, or of one in it."""
    contents = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    return {pattern for pattern in patterns if any(pattern in content for content in contents)}
