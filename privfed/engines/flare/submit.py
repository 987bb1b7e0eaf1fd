"""The operator's command: `python -m privfed.engines.flare.submit FOLDER [JOB]` hands the job to the server and waits for its end."""

import sys
from pathlib import Path
from typing import Any

from nvflare.fuel.flare_api.flare_api import new_secure_session

from privfed.deploy.deployment import Deployment
from privfed.engines.flare.policies import KIT
from privfed.engines.flare.provisioning import JOB, operator_name

_CONNECT_SECONDS = 60.0
_POLL_SECONDS = 1.0
FINISHED = "FINISHED:COMPLETED"


def submit(folder: Path, *, job: Path | None = None, seconds: float = 0.0) -> str:
    """Submits a job and waits.

    Args:
        folder: The operator's.
        job: Folder of the job; left out, the one that lies in the operator's folder.
        seconds: How long to wait for the end; 0 for ever.

    Returns:
        How FLARE says that it ended.
    """
    folder = folder.resolve()
    deployment = Deployment.load(folder)
    session: Any = new_secure_session(operator_name(deployment), str(folder / KIT), timeout=_CONNECT_SECONDS)
    try:
        number: str = session.submit_job(str((job or folder / JOB).resolve()))
        session.monitor_job(number, timeout=seconds, poll_interval=_POLL_SECONDS)
        return str(session.get_job_meta(number)["status"])
    finally:
        session.close()


def main() -> int:
    """Exit code 0 if the run was held to its end, 1 otherwise."""
    job = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    status = submit(Path(sys.argv[1]), job=job)
    sys.stdout.write(f"{status}\n")
    return 0 if status == FINISHED else 1


if __name__ == "__main__":
    sys.exit(main())
