"""Real FLARE processes of a deployment on this machine: each party in a process group of its own."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from privfed.deploy.deployment import OPERATOR, SERVER, Deployment

_ROOT = Path(__file__).parents[3]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


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
            with (self.folder / f"{name}.out").open("ab") as output:
                self.processes[name] = subprocess.Popen(
                    [self.folder / name / "start.sh"],
                    env=self.environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )

    def kill(self, name: str) -> None:
        """As a power cut: the party's process and those that it started."""
        process = self.processes.pop(name)
        # FLARE starts the processes of a job in the group of their parent.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def submit(self, job: Path | None = None, *, seconds: float) -> str:
        """How FLARE says that the job ended."""
        return self.submitting(job).communicate(timeout=seconds)[0].strip().splitlines()[-1]

    def submitting(self, job: Path | None = None) -> "subprocess.Popen[str]":
        """Submits without waiting for the end."""
        command = [sys.executable, "-m", "privfed.engines.flare.submit", str(self.folder / OPERATOR), *([] if job is None else [str(job)])]
        return subprocess.Popen(command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def output(self, name: str) -> str:
        return (self.folder / f"{name}.out").read_text(errors="replace")
