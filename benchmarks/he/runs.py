"""Runs the roles of an implementation, each in a fresh process, and takes down what they take."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from benchmarks.he.catalogue import Contender
from benchmarks.he.environments import MissingPeerError, interpreter, versions
from benchmarks.he.party import ANSWERS, END, NEXT, upload_path
from benchmarks.he.workload import Workload

ROOT = Path(__file__).parents[2]
# Uploads are kept for further repetitions if they, with the server's own copies, take no more of the free space of the disk than this.
_MOST_OF_DISK = 0.25
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one implementation takes. Seconds are the fewest, megabytes the most, of the repetitions.

    A client's seconds are those from its update to the bytes that it sends; `agreement_cpu_s` are those that it spends besides, to agree
    with the others on keys and on what will be summed. An opener is a client that opens the sum; `holder_cpu_s` is what a separate key
    holder takes, if there is one. Shares of keys, which do not grow with the model, are counted for themselves, in bytes.
    """

    name: str
    params: int
    clients: int
    tensors: int
    bytes_up_per_parameter: float
    bytes_down_per_parameter: float
    client_cpu_s: float
    server_cpu_s: float
    agreement_cpu_s: float
    opener_cpu_s: float
    client_peak_mb: float
    server_peak_mb: float
    opener_peak_mb: float
    shares_up: int
    shares_down: int
    holder_cpu_s: float
    max_error: float
    versions: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """An implementation that was not measured, and why."""

    name: str
    params: int
    clients: int
    tensors: int
    missing: str


class Party:
    """A process that plays a role, to be used in a `with`."""

    def __init__(self, python: Path, contender: Contender, role: str, work: Workload, folder: Path, *client: str) -> None:
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (closed in __exit__)
        self._role = role
        command = [python, "-m", "benchmarks.he.party", contender.name, role, json.dumps(asdict(work)), folder, *client]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._log}
        self._process = subprocess.Popen(command, cwd=ROOT, env=os.environ | _ONE_THREAD, text=True, **pipes)

    def __enter__(self) -> Self:
        return self

    def hear(self) -> str:
        """The next line.

        Raises:
            MissingPeerError: If the process ended without one.
        """
        line = self._process.stdout.readline().strip()
        if not line:
            self._process.wait()
            self._log.seek(0)
            said = self._log.read().strip().splitlines()
            raise MissingPeerError(f"its {self._role} failed: {said[-1] if said else f'exit status {self._process.returncode}'}")
        return line

    def say(self, word: str) -> None:
        """Answers."""
        print(word, file=self._process.stdin, flush=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.stdin.close()
        if error is not None:
            self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        self._log.close()


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One implementation at work in a folder of its own."""

    contender: Contender
    python: Path
    work: Workload
    folder: Path
    repetitions: int

    def play(self, role: str, *client: str) -> dict[str, float]:
        """Lets a role be played that asks for nothing; what it took."""
        with self._party(role, *client) as party:
            return json.loads(party.hear())

    def _party(self, role: str, *client: str) -> Party:
        return Party(self.python, self.contender, role, self.work, self.folder, *client)

    def measure(self) -> dict[str, float]:
        """All roles. The CPU time of what clients do before and after their uploads is measured for all of them, and shared out."""
        together = self.play("prepare")["cpu_seconds"]
        clients = [self.play("client", str(client)) for client in range(min(self.repetitions, self.work.clients))]
        size = upload_path(self.folder, 0).stat().st_size
        free, needed = shutil.disk_usage(self.folder).free, size * self.work.clients
        if needed > free:
            raise MissingPeerError(f"its uploads, which a server may store, take {needed / 1e9:.0f} GB and {free / 1e9:.0f} GB are free")
        keep = 2 * needed < _MOST_OF_DISK * free
        servers, answers = list[dict[str, float]](), list[float]()
        with self._uploads(keep=keep) as uploads:
            for _ in range(self.repetitions if keep else 1):
                cost, answer = self._serve(uploads, keep=keep)
                servers.append(cost)
                answers.append(answer)
        openers = [self.play("opener") for _ in range(self.repetitions)]
        fewest = {role: min(cost["cpu_seconds"] for cost in costs) for role, costs in self._named(clients, servers, openers)}
        most = {role: max(cost["peak_megabytes"] for cost in costs) for role, costs in self._named(clients, servers, openers)}
        hashing = min(client["agreeing_cpu_seconds"] for client in clients)
        down = (self.folder / "result").stat().st_size
        shares, holder = self.folder / "shares.json", self.folder / "holder.json"
        shared = json.loads(shares.read_text()) if shares.exists() else {"up": 0, "down": 0, "in_result": 0}
        return {
            "bytes_up_per_parameter": size / self.work.params,
            "bytes_down_per_parameter": (down - shared["in_result"]) / self.work.params,
            "shares_up": shared["up"],
            "shares_down": shared["down"],
            "holder_cpu_s": json.loads(holder.read_text()) if holder.exists() else 0.0,
            **{f"{role}_cpu_s": seconds for role, seconds in fewest.items()},
            "agreement_cpu_s": hashing + (together + min(answers)) / self.work.clients,
            **{f"{role}_peak_mb": megabytes for role, megabytes in most.items()},
        }

    @staticmethod
    def _named(*costs: list[dict[str, float]]) -> Iterator[tuple[str, list[dict[str, float]]]]:
        return zip(("client", "server", "opener"), costs, strict=True)

    def _serve(self, uploads: "Uploads", *, keep: bool) -> tuple[dict[str, float], float]:
        """What the server took, and what the clients' answers did, for one of each upload."""
        waiting = iter(range(self.work.clients))
        given: Path | None = None
        answered = 0.0
        with self._party("server") as server:
            while (word := server.hear()) in {NEXT, ANSWERS}:
                if given is not None and not keep:
                    given.unlink(missing_ok=True)
                if word == ANSWERS:
                    answered += self.play("answer")["cpu_seconds"]
                    server.say(END)
                elif (client := next(waiting, None)) is None:
                    server.say(END)
                else:
                    given = uploads.path(client)
                    server.say(str(given))
            return json.loads(word), answered

    @contextmanager
    def _uploads(self, *, keep: bool) -> Iterator["Uploads"]:
        with self._party("other-clients") as party:
            party.hear()
            if not keep:
                for client in range(self.work.clients):
                    upload_path(self.folder, client).unlink(missing_ok=True)
            yield Uploads(party, self.folder)
            party.say(END)
            party.hear()


class Uploads:
    """Uploads of clients, made by one process when they are wanted."""

    def __init__(self, party: Party, folder: Path) -> None:
        self._party = party
        self._folder = folder

    def path(self, client: int) -> Path:
        """Where the upload of a client lies, from now on."""
        path = upload_path(self._folder, client)
        if not path.exists():
            self._party.say(str(client))
            self._party.hear()
        return path


def measure(
    contender: Contender, work: Workload, *, mean: NDArray[np.float64], environments: Path, repetitions: int, install: bool
) -> Cost | Missing:
    """Measures an implementation, or says why not.

    Args:
        contender: Which.
        work: What it has to do.
        mean: What should come out, of shape (params,).
        environments: Folder for the libraries of peers.
        repetitions: How often a role is played.
        install: Whether peers may be installed.
    """
    try:
        python = interpreter(contender, environments, install=install)
        found = versions(contender, python)
        with tempfile.TemporaryDirectory(prefix="privfed-bench-") as folder:
            bench = Bench(contender=contender, python=python, work=work, folder=Path(folder), repetitions=repetitions)
            costs = bench.measure()
            error = float(np.abs(np.load(Path(folder) / "mean.npy") - mean).max())
    except MissingPeerError as error:
        return Missing(name=contender.name, **asdict(work), missing=str(error))
    return Cost(name=contender.name, **asdict(work), **costs, max_error=error, versions=found)
