"""Real FLARE processes of a deployment on this machine: each party in a session of its own."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from privfed.deploy.deployment import OPERATOR, SERVER, Deployment

_ROOT = Path(__file__).parents[3]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def edit(path: Path, *keys: str | int, to: object) -> None:
    """Changes one value of a JSON file."""
    content: Any = json.loads(path.read_text())
    value = content
    for key in keys[:-1]:
        value = value[key]
    value[keys[-1]] = to
    path.write_text(json.dumps(content))


class Loopback:
    """The processes of a folder that `privfed deploy init` wrote. Leaving the block kills what is left of them."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder
        self.deployment = Deployment.load(folder / SERVER)
        # start.sh calls the python3 of the path: that of this process, and this source.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environment = os.environ | {"PATH": path, "PYTHONPATH": str(_ROOT)} | environment
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for name in list(self.processes):
            self.kill(name)

    def start(self, *names: str) -> None:
        for name in names or (SERVER, *self.deployment.parties):
            with (self.folder / f"{name}.out").open("wb") as output:
                self.processes[name] = subprocess.Popen(
                    [self.folder / name / "start.sh"],
                    env=self.environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
        # FLARE looks for work every ten seconds where it found too few clients: not before all are there.
        for name in self.deployment.parties:
            if name in self.processes:
                self.wait_for_client(name)

    def wait_for_client(self, name: str) -> None:
        """Returns when the server that was started last knows a client."""
        known = (f"New client {name}@", f"Re-activate the client: {name} at")
        self.wait_until(lambda: any(words in self.output(SERVER) for words in known), f"the server to know {name}", seconds=240)

    def wait_until(self, happened: Callable[[], bool], what: str, *, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not happened():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {seconds} s for {what}")
            time.sleep(0.05)

    def kill(self, name: str) -> None:
        """As a power cut: the party's process and those that it started, which FLARE puts into sessions of their own."""
        process = self.processes.pop(name)
        started = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        for each in (process, *started):
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                each.kill()
        process.wait()
        psutil.wait_procs(started, timeout=30)

    def submit(self, job: Path | None = None, *, seconds: float) -> str:
        """How FLARE says that the job ended."""
        return self.submitting(job).communicate(timeout=seconds)[0].strip().splitlines()[-1]

    def failure(self, job: Path, *, seconds: float) -> str:
        """What the operator's command says of a run that fails."""
        operator = self.submitting(job, errors=subprocess.PIPE)
        said = operator.communicate(timeout=seconds)[1]
        assert operator.returncode == 1, said
        return said

    def submitting(self, job: Path | None = None, *, errors: int = subprocess.DEVNULL) -> "subprocess.Popen[str]":
        """Submits without waiting for the end."""
        command = [sys.executable, "-m", "privfed.engines.flare.submit", str(self.folder / OPERATOR), *([] if job is None else [str(job)])]
        return subprocess.Popen(command, env=self.environment, stdout=subprocess.PIPE, stderr=errors, text=True)

    def job(self, name: str, *, rounds: int, parties: Mapping[str, str] | None = None, **time_outs: float) -> Path:
        """A job of the deployment with other numbers, and with other classes at some parties."""
        job = self.folder / name
        shutil.copytree(self.folder / OPERATOR / "job", job, ignore=shutil.ignore_patterns(".*"))
        edit(
            job / "server/config/config_fed_server.json",
            "workflows",
            0,
            "args",
            to={"rounds": rounds, "time_outs": {"status": 900.0} | time_outs},
        )
        for party, kind in (parties or {}).items():
            shutil.copytree(job / "party", job / party)
            edit(job / party / "config/config_fed_client.json", "executors", 0, "executor", "path", to=kind)
        others = [party for party in self.deployment.parties if party not in (parties or {})]
        edit(job / "meta.json", "deploy_map", to={"server": ["server"], "party": others} | {party: [party] for party in parties or {}})
        return job

    def output(self, name: str) -> str:
        return (self.folder / f"{name}.out").read_text(errors="replace")
