"""Whole deployments: the engine-free part of every folder, and that of the engine.

Here an engine plugs in, with two functions of its own: `write(deployment, folder)`, which adds its part to the folder of every party,
and `problems(folder, deployment, name=, now=)`.
"""

import importlib.util
import shutil
from datetime import UTC, datetime
from pathlib import Path

from privfed.deploy.check import party_problems
from privfed.deploy.deployment import ENGINE_DISTRIBUTIONS, SERVER, Deployment, party_name
from privfed.deploy.plan import Plan
from privfed.errors import DeploymentError
from privfed.files import make_folder

RENEWED: dict[str, str] = {
    "flare": "flare/startup",
    "flower": "at a bank ca.pem, node.key and node.pub in flower, at the server ca.pem, server.pem, server.key and nodes in flower",
}
"""What takes the place of what a party has when certificates are renewed; all else in its folder stays."""


def write_deployment(plan: Plan, folder: Path) -> Deployment:
    """Writes a ready folder for every party, and one for the engine's operator.

    Args:
        plan: Who takes part, over which engine.
        folder: A new folder; it is made, mode 0700.

    Returns:
        Who is where.

    Raises:
        DeploymentError: If the folder exists, the site file has no `model()`, or the engine is not installed or failed; nothing was left.
        PrivFedError: If the model or the terms are refused.
        ValueError: If a value of the plan is out of its range.
    """
    from privfed.deploy.parties import make_parties  # noqa: PLC0415 -- it loads torch, which no server has

    _check_engine(plan.engine)
    deployment = make_parties(plan, folder)
    _write_engine(deployment, folder)
    return deployment


def write_certificates(deployment: Deployment, folder: Path) -> None:
    """Writes the engine's part of every folder anew, with new certificates under a new authority.

    Args:
        deployment: Who is where.
        folder: A new folder; it is made, mode 0700.

    Raises:
        DeploymentError: If the folder exists, or the engine is not installed or failed; nothing was left.
    """
    _check_engine(deployment.engine)
    if folder.exists():
        raise DeploymentError(f"{folder} is there already; nothing was done; name a new folder")
    for name in (SERVER, *deployment.parties):
        make_folder(folder / name)
    _write_engine(deployment, folder)


def problems(folder: Path, *, now: datetime | None = None) -> list[str]:
    """What is wrong with one party's folder on this machine, a line each, with what to do next.

    Args:
        folder: The party's.
        now: The time, with its zone; left out, that of this machine.

    Raises:
        DeploymentError: If it is no such folder.
    """
    deployment, name, now = Deployment.load(folder), party_name(folder), now or datetime.now(UTC)
    found = party_problems(folder, deployment, name=name, now=now)
    if deployment.engine == "flare":
        from privfed.engines.flare.check import problems as flare_problems  # noqa: PLC0415 -- an extra

        return found + flare_problems(folder, deployment, name=name, now=now)
    if not _is_installed("flower"):
        return [*found, "flwr is not installed here, so what belongs to it was not looked at; install privfed[flower] for this user"]
    from privfed.engines.flower.provisioning import problems as flower_problems  # noqa: PLC0415 -- an extra

    return found + flower_problems(folder, deployment, name=name, now=now)


def _write_engine(deployment: Deployment, folder: Path) -> None:
    try:
        if deployment.engine == "flare":
            from privfed.engines.flare.provisioning import write  # noqa: PLC0415 -- an extra

            write(deployment, folder)
        else:
            from privfed.engines.flower.provisioning import write as write_flower  # noqa: PLC0415 -- an extra

            write_flower(deployment, folder)
    except BaseException:
        shutil.rmtree(folder)  # half a deployment is none
        raise


def _is_installed(engine: str) -> bool:
    return importlib.util.find_spec(ENGINE_DISTRIBUTIONS[engine]) is not None


def _check_engine(engine: str) -> None:
    if not _is_installed(engine):
        raise DeploymentError(
            f"the engine {engine} needs {ENGINE_DISTRIBUTIONS[engine]}; nothing was done; pip install 'privfed[{engine}]'"
        )
