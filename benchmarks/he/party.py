"""One role of one implementation in a process of its own: `python -m benchmarks.he.party IMPLEMENTATION ROLE WORKLOAD FOLDER [CLIENT]`.

The interpreter may be another one than that of the benchmark, with other libraries. A process answers on standard output in lines: what it
wants from the one that runs it (see `runs`), and in the last line, in JSON, what it took.
"""

import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, TextIO

import numpy as np
from numpy.typing import NDArray

from benchmarks.he.catalogue import find
from benchmarks.he.meter import Meter
from benchmarks.he.workload import Workload

NEXT, ANSWERS, END = "next", "answers", "end"


class Implementation(Protocol):
    """Averages under encryption, or however it does. Everything outside of the meter is not counted."""

    def __init__(self, work: Workload, folder: Path) -> None: ...

    def prepare(self, meter: Meter) -> None:
        """What is done before anybody uploads. Metered is what each client does in every round, for all of them."""
        ...

    def upload(self, client: int, meter: Meter, agreeing: Meter) -> bytes:
        """The client's role: a message to the server, out of its update. `agreeing` is for what it does only to agree on what is summed."""
        ...

    def serve(self, uploads: Iterator[bytes], answers: Callable[[], None], meter: Meter) -> bytes:
        """The server's role: a message to the clients, out of their uploads, which come one by one. `answers` lets `answer` run."""
        ...

    def answer(self, meter: Meter) -> None:
        """What clients answer to the server before the result is there. Metered for all of them."""
        ...

    def open(self, data: bytes, meter: Meter) -> NDArray[np.floating]:
        """The opener's role: the mean, of shape (params,), out of the server's message."""
        ...


class Line:
    """What this process says to the one that runs it, and hears."""

    def __init__(self, output: TextIO) -> None:
        self._output = output

    def say(self, word: str) -> None:
        """Says a word."""
        print(word, file=self._output, flush=True)

    def ask(self, word: str) -> str:
        """Says a word and hears another."""
        self.say(word)
        return sys.stdin.readline().strip()

    def uploads(self) -> Iterator[bytes]:
        """The uploads that the other gives, one at a time."""
        while (path := self.ask(NEXT)) != END:
            yield Path(path).read_bytes()


def play(implementation: Implementation, role: str, folder: Path, client: str, line: Line) -> tuple[Meter, Meter]:
    """Plays a role once, or that of a client for every number that is said. The second meter is for what a client does to agree."""
    meter, agreeing = Meter(), Meter()
    if role == "prepare":
        implementation.prepare(meter)
    elif role == "client":
        _write(upload_path(folder, int(client)), implementation.upload(int(client), meter, agreeing))
    elif role == "other-clients":
        while (number := line.ask(NEXT)) != END:
            _write(upload_path(folder, int(number)), implementation.upload(int(number), Meter(), Meter()))
    elif role == "server":
        _write(folder / "result", implementation.serve(line.uploads(), lambda: _heard(line.ask(ANSWERS)), meter))
    elif role == "answer":
        implementation.answer(meter)
    elif role == "opener":
        np.save(folder / "mean.npy", implementation.open((folder / "result").read_bytes(), meter))
    else:
        raise ValueError(f"expected a role, got {role!r}")
    return meter, agreeing


def upload_path(folder: Path, client: int) -> Path:
    """Where the upload of a client lies."""
    return folder / f"upload-{client}"


def _heard(word: str) -> None:
    if word != END:
        raise RuntimeError(f"expected {END!r}, got {word!r}")


def _write(path: Path, data: bytes) -> None:
    """Writes a file, whole or not at all."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    os.replace(file.name, path)


def main() -> None:
    """Plays the role that the arguments name."""
    # TenSEAL prints on standard output, from C++; the line gets a descriptor that it does not know.
    with os.fdopen(os.dup(1), "w") as output:
        os.dup2(2, 1)
        name, role, work, folder, *client = sys.argv[1:]
        contender = find(name)
        made: type[Implementation] = getattr(importlib.import_module(contender.module), contender.type_name)
        implementation = made(Workload(**json.loads(work)), Path(folder))
        line = Line(output)
        meter, agreeing = play(implementation, role, Path(folder), client[0] if client else "", line)
        figures = {"cpu_seconds": meter.cpu_seconds, "peak_megabytes": meter.peak_megabytes, "agreeing_cpu_seconds": agreeing.cpu_seconds}
        line.say(json.dumps(figures))


if __name__ == "__main__":
    main()
