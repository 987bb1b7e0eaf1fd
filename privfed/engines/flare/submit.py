"""The operator's command: `python -m privfed.engines.flare.submit FOLDER [JOB]` hands the job to the server and waits for its end."""

import io
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any, NamedTuple

from nvflare.apis.fl_exception import FLCommunicationError
from nvflare.fuel.common.excepts import ConfigError
from nvflare.fuel.flare_api import api_spec
from nvflare.fuel.flare_api.flare_api import new_secure_session

from privfed.deploy.deployment import Deployment
from privfed.engines.flare.messages import REASON, STATS
from privfed.engines.flare.policies import KIT
from privfed.engines.flare.provisioning import JOB, operator_name
from privfed.errors import DeploymentError, EngineError, PrivFedError

_CONNECT_SECONDS = 60.0
_POLL_SECONDS = 1.0
_MOST_REASON = 4000
_RUNNING = "RUNNING"
FINISHED = "FINISHED:COMPLETED"

# FLARE's errors have no class in common.
_FAILURES: tuple[type[Exception], ...] = (
    *(kind for kind in vars(api_spec).values() if isinstance(kind, type) and issubclass(kind, Exception)),
    FLCommunicationError,
    ConfigError,
    RuntimeError,
)


class End(NamedTuple):
    """How a job ended. Public.

    Args:
        status: As FLARE says it.
        reason: Why the run failed, as the server said while the job still ran; empty if it said nothing.
    """

    status: str
    reason: str


def submit(folder: Path, *, job: Path | None = None, seconds: float = 0.0) -> End:
    """Submits a job and waits.

    Args:
        folder: The operator's.
        job: Folder of the job; left out, the one that lies in the operator's folder.
        seconds: How long to wait for the end; 0 for ever.

    Raises:
        DeploymentError: If it is no operator's folder.
        EngineError: If there is no server, or it does not take the job, or goes away meanwhile.
    """
    folder = folder.resolve()
    deployment = Deployment.load(folder)
    if not (folder / KIT / "startup").is_dir():
        raise DeploymentError(f"{folder} holds no {KIT}/startup; nothing was submitted; name the operator's folder")
    where = f"{deployment.host}:{deployment.port}"
    with (
        _failing(f"there is no session with the server at {where}", "nothing was submitted; start it, or let the firewall pass this port"),
        redirect_stdout(io.StringIO()),  # FLARE says there that it connects
    ):
        session: Any = new_secure_session(operator_name(deployment), str(folder / KIT), timeout=_CONNECT_SECONDS)
    said: list[str] = []
    try:
        with _failing("the server did not take the job", "nothing was started; see its output"):
            number: str = session.submit_job(str((job or folder / JOB).resolve()))
        with _failing("the server went away before the job ended", "what is stored stays; see its output, then submit again to go on"):
            session.monitor_job(number, timeout=seconds, poll_interval=_POLL_SECONDS, cb=_listening(said))
            return End(str(session.get_job_meta(number)["status"]), said[-1] if said else "")
    finally:
        with suppress(*_FAILURES):
            session.close()


def _listening(said: list[str]) -> Any:
    """What FLARE calls at each look at the job: it asks a job that runs why it failed, and always goes on."""

    def listen(session: Any, number: str, meta: dict[str, Any]) -> bool:
        if meta.get("status") == _RUNNING:
            with suppress(*_FAILURES):  # it may have ended just now
                stats = session.show_stats(number, "server")
                reason = stats.get("server", {}).get(STATS, {}).get(REASON) if isinstance(stats, dict) else None
                if isinstance(reason, str) and reason:
                    said.append(_plain(reason))
        return True

    return listen


@contextmanager
def _failing(what: str, next_step: str) -> Iterator[None]:
    """Says what to do where FLARE has an error."""
    try:
        yield
    except _FAILURES as error:
        raise EngineError(f"{what} ({_plain(str(error)) or type(error).__name__}); {next_step}") from error


def _plain(text: str) -> str:
    """Another side's text, with nothing in it that a terminal would obey."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:_MOST_REASON]).strip()


def main() -> int:
    """Exit code 0 if every round of the run was held that was not held before, 1 otherwise, with the reason."""
    job = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    logging.disable(logging.ERROR)  # what FLARE logs of a connection that it did not get, is said in one line below
    try:
        end = submit(Path(sys.argv[1]), job=job)
    except (PrivFedError, OSError, ValueError) as error:
        sys.stderr.write(f"privfed: {error}\n")
        return 1
    sys.stdout.write(f"{end.status}\n")
    if end.status == FINISHED:
        return 0
    sys.stderr.write(f"privfed: the run failed: {end.reason or 'the server gave no reason; see its output'}\n")
    return 1


def _interrupted(*_: object) -> None:
    """Ends at once, without unwinding: there FLARE waits for threads of its own, which may not end."""
    sys.stderr.write("privfed: stopped waiting; if the job was submitted, it goes on, and the server's output says how it ends\n")
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, _interrupted)
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # FLARE's threads would keep a process that was interrupted for ever
