"""A deployment on this machine's loopback, started with the scripts that a deployment gets, each process in a group of its own."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

BANKS = ("bank_0", "bank_1", "bank_2")
# What was measured on two idle cores, four times over.
START_SECONDS = 4 * 15.0
RUN_SECONDS = 4 * 90.0
# Flower notices after 63 s at the latest that a SuperNode was killed, and lets nobody in with the same key before.
FORGOTTEN_SECONDS = 4 * (63.0 + 15.0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(condition: Callable[[], bool], what: str, *, seconds: float = START_SECONDS) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s in vain for {what}"
        time.sleep(0.2)


@dataclass
class Started:
    """A script that runs, with everything that it started."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        """As a power cut: no process of the group gets to say good-bye."""
        for pid in self._all():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(30)

    def _all(self) -> list[int]:
        """The script, and what descends from it: Flower puts what it starts into sessions of their own."""
        children: dict[int, list[int]] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                except (FileNotFoundError, ProcessLookupError):
                    continue
                children.setdefault(parent, []).append(int(entry.name))
        found = [self.process.pid]
        for pid in found:
            found += children.get(pid, [])
        return found


@dataclass
class Place:
    """The folders of all parties on this machine."""

    root: Path
    superlink_port: int = field(default_factory=free_port)
    node_ports: dict[str, int] = field(default_factory=dict)
    through: int | None = None
    environment: dict[str, str] = field(default_factory=dict)
    started: dict[str, Started] = field(default_factory=dict)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for started in self.started.values():
            started.kill()
        if kind is not None:
            for started in self.started.values():
                print(f"==== {started.name}\n{started.text()[-6000:]}")

    def folder(self, party: str) -> Path:
        return self.root / party / "flower"

    def variables(self, party: str) -> dict[str, str]:
        """The environment of a party's processes: its own Flower folder and ports."""
        clone = Path(__file__).parents[3]
        return {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "PYTHONPATH": ":".join([str(clone), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "OMP_NUM_THREADS": "1",
            "HOME": str(self.root / party / "home"),
            **self.environment,
        }

    def settle(self) -> None:
        """Puts free ports into the files that a deployment would have settled with fixed ones."""
        self.set("server", "PRIVFED_SUPERLINK_PORT", str(self.superlink_port))
        for name in self.parties():
            self.node_ports[name] = free_port()
            self.set(name, "PRIVFED_NODE_PORT", str(self.node_ports[name]))
            self.set(name, "PRIVFED_SUPERLINK", f"127.0.0.1:{self.through or self.superlink_port}")

    def parties(self) -> list[str]:
        return sorted(path.name for path in self.root.iterdir() if (path / "flower" / "start-node.sh").exists())

    def set(self, party: str, name: str, value: str) -> None:
        """Sets a variable of a party's environment file."""
        path = self.folder(party) / "flower.env"
        lines = path.read_text().splitlines()
        assert sum(line.startswith(f"{name}=") for line in lines) == 1
        path.write_text("".join(f"{name}={value}\n" if line.startswith(f"{name}=") else f"{line}\n" for line in lines))

    def start(self, party: str, script: str, *arguments: str, user: str | None = None) -> Started:
        name = f"{party}-{script}-{sum(key.startswith(f'{party}-{script}') for key in self.started)}"
        log = self.root / f"{name}.log"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                ["sh", str(self.folder(party) / script), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=self.variables(party),
                start_new_session=True,
                user=user,
            )
        self.started[name] = Started(name, process, log)
        return self.started[name]

    def start_superlink(self) -> Started:
        superlink = self.start("server", "start-superlink.sh")
        nodes = len(self.parties())
        wait_for(lambda: superlink.text().count("RegisterNode") >= nodes or superlink.process.poll() is not None, "the SuperLink")
        assert superlink.process.poll() is None, superlink.text()
        return superlink

    def start_party(self, name: str) -> tuple[Started, Started]:
        node, supernode = self.start(name, "start-node.sh"), self.start(name, "start-supernode.sh")
        return node, supernode

    def wait_until_online(self, *supernodes: Started, seconds: float = START_SECONDS) -> None:
        for supernode in supernodes:
            wait_for(lambda supernode=supernode: "SuperNode ID" in supernode.text(), f"{supernode.name} to be let in", seconds=seconds)

    def run(self, rounds: int, *, seconds: float = RUN_SECONDS) -> subprocess.CompletedProcess[str]:
        """The operator's command, to its end."""
        return subprocess.run(
            ["sh", str(self.folder("server") / "run.sh"), str(rounds)],
            env=self.variables("server"),
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )


def nginx() -> str | None:
    """An nginx to test with, if there is one: PRIVFED_NGINX, or the one on the path."""
    return os.environ.get("PRIVFED_NGINX") or shutil.which("nginx")
