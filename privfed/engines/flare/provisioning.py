"""FLARE's start-up kits for every party of a deployment, with mutual TLS, hardened policies, and a command to start."""

import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

from nvflare.lighter.constants import AdminRole, CtxKey, ParticipantType, PropKey
from nvflare.lighter.entity import Participant, Project
from nvflare.lighter.impl.cert import CertBuilder
from nvflare.lighter.impl.static_file import StaticFileBuilder
from nvflare.lighter.impl.workspace import WorkspaceBuilder
from nvflare.lighter.provisioner import Provisioner

from privfed.deploy.deployment import OPERATOR, SERVER, Deployment
from privfed.deploy.scripts import need_python
from privfed.engines.flare.job import write_job, write_json
from privfed.engines.flare.policies import AUTHORIZATION, KIT, STORAGE, client_resources, server_resources
from privfed.errors import DeploymentError

JOB: Final = "job"
START: Final = "start.sh"
"""The script in a party's folder that starts it."""
_API_VERSION: Final = 3
# The first answer of a bank comes after its data are loaded. One that is gone is noticed by FLARE long before.
_LOADING_SECONDS: Final = 900.0

_ENVIRONMENT: Final = """\
# Read by ./start.sh. Nothing in it is secret.
PYTHONDONTWRITEBYTECODE=1
PYTHONNOUSERSITE=1
OMP_NUM_THREADS=1
MALLOC_ARENA_MAX=4
"""

_START: Final = """\
#!/bin/sh
# Starts {name} and stays in the foreground; python3 must be one in which privfed[flare] is installed.
cd "$(dirname "$0")" || exit 1
umask 077
set -a
. ./env
set +a
{need}exec python3 -u -m nvflare.private.fed.app.{kind} -m "$PWD/{kit}" -s {config} \\
  --set secure_train=true {uid}org={org} config_folder=config
"""

_NEED: Final[str] = need_python("python3", module="nvflare", extra="flare")

_SUBMIT: Final = f"""\
#!/bin/sh
# Hands the run to the server, waits for its end, and fails loudly if a round failed.
# python3 must be one in which privfed[flare] is installed.
cd "$(dirname "$0")" || exit 1
umask 077
{_NEED}exec python3 -m privfed.engines.flare.submit .
"""


def write(deployment: Deployment, folder: Path) -> None:
    """Adds a start-up kit to the folder of every party, and makes a folder for the operator, who submits the job.

    The key of the certificate authority is not kept: nobody can make a certificate of another party afterwards.

    Args:
        deployment: Who is where.
        folder: It holds a folder for every party already.

    Raises:
        DeploymentError: If FLARE's provisioner fails, or a name is none for FLARE.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix=".provisioning-") as temporary:
        kits = _provision(deployment, Path(temporary))
        for name in (SERVER, *deployment.parties):
            shutil.move(kits / name, folder / name / KIT)
            _harden(folder / name / KIT, server=name == SERVER)
            _write_start(folder / name, name)
        operator = folder / OPERATOR
        operator.mkdir(mode=0o700)
        shutil.move(kits / operator_name(deployment), operator / KIT)
        deployment.save(operator)
    write_job(
        operator / JOB,
        name=deployment.name,
        parties=deployment.parties,
        min_parties=deployment.min_clients + deployment.key_holder,
        arguments={"rounds": deployment.rounds, "time_outs": {"status": _LOADING_SECONDS}},
    )
    _write_text(operator / "submit.sh", _SUBMIT, 0o700)


def operator_name(deployment: Deployment) -> str:
    """The operator's name for FLARE, which wants a mail address."""
    return f"{OPERATOR}@{_organisation(deployment.name)}.invalid".replace("_", "-")


def _provision(deployment: Deployment, temporary: Path) -> Path:
    organisation = _organisation(deployment.name)
    server = {PropKey.DEFAULT_HOST: deployment.host, PropKey.FED_LEARN_PORT: deployment.port, PropKey.ADMIN_PORT: deployment.port}
    try:
        project = Project(name=organisation, description=deployment.name, props={PropKey.API_VERSION: _API_VERSION})
        participants = [
            Participant(ParticipantType.SERVER, SERVER, organisation, server, project),
            *(Participant(ParticipantType.CLIENT, name, _organisation(name), None, project) for name in deployment.parties),
            Participant(ParticipantType.ADMIN, operator_name(deployment), organisation, {PropKey.ROLE: AdminRole.LEAD}, project),
        ]
        for participant in participants:
            project.add_participant(participant)
        builders = [WorkspaceBuilder(), StaticFileBuilder(config_folder="config", scheme="grpc"), CertBuilder()]
        log = _Log()
        context: Any = Provisioner(str(temporary), builders).provision(project, logger=log)
    except ValueError as error:
        raise DeploymentError(f"FLARE does not take these names: {error}; nothing was written") from error
    if context.get(CtxKey.BUILD_ERROR):
        raise DeploymentError(f"FLARE's provisioner failed: {' '.join(log.errors) or 'without a reason'}; nothing was written")
    return Path(context[CtxKey.CURRENT_PROD_DIR])


class _Log:
    """Keeps what FLARE's provisioner says, and prints none of it."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def debug(self, message: str) -> None: ...
    def info(self, message: str) -> None: ...
    def warning(self, message: str) -> None: ...
    def error(self, message: str) -> None:
        self.errors.append(message)


def _harden(kit: Path, *, server: bool) -> None:
    local = kit / "local"
    write_json(local / "authorization.json", AUTHORIZATION)
    write_json(local / "resources.json", server_resources() if server else client_resources())
    for path in (kit, *kit.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    if server:
        for path in (kit / STORAGE, kit / STORAGE / "jobs", kit / STORAGE / "snapshots"):
            path.mkdir(mode=0o700)


def _write_start(folder: Path, name: str) -> None:
    _write_text(folder / START, start_script(name), 0o700)
    _write_text(folder / "env", _ENVIRONMENT, 0o600)


def start_script(name: str) -> str:
    """The script that starts a party.

    Args:
        name: Of the party.
    """
    terms = {"name": name, "kit": KIT, "org": _organisation(name), "need": _NEED}
    if name == SERVER:
        terms |= {"kind": "server.server_train", "config": "fed_server.json", "uid": ""}
    else:
        terms |= {"kind": "client.client_train", "config": "fed_client.json", "uid": f"uid={name} "}
    return _START.format(**terms)


def _write_text(path: Path, text: str, mode: int) -> None:
    path.write_text(text, encoding="ascii")
    path.chmod(mode)


def _organisation(name: str) -> str:
    return name.replace("-", "_").replace(".", "_")
