"""What Flower needs in the folder of each party, and what is wrong with it."""

import ssl
import urllib.error
import urllib.request
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509

from privfed.deploy.certificates import date_problems, is_issued_by, key_problems
from privfed.deploy.deployment import OPERATOR, SERVER, Deployment
from privfed.engines.flower import scripts
from privfed.engines.flower.app import bundle_hash, installed_hash, write_app
from privfed.engines.flower.certificates import node_key, server_certificate
from privfed.engines.flower.supernode import read_apps
from privfed.files import create, make_folder

_FOLDER = "flower"
_EXECUTABLE = 0o700
_SECRET = ("server.key", "node.key")
_SECONDS = 10.0
_FORBIDDEN = 403
_AGAIN = "get new ones (privfed deploy certificates, or your own authority)"


def write(deployment: Deployment, folder: Path) -> None:
    """Adds a folder `flower` and a command to start to the folder of each party, never over what is there; and a folder for the operator.

    Args:
        deployment: Who is where.
        folder: It holds the folders of all parties.

    Raises:
        FileExistsError: If a file is there already; it stays as it is.
    """
    server = folder / SERVER / _FOLDER
    now = datetime.now(UTC)
    authority, certificate, key = server_certificate(deployment.host, now=now)
    app = write_app(server)
    allowed = f"{bundle_hash(app)}  # the app of privfed {deployment.versions['privfed']}\n".encode()
    _write(server, {"ca.pem": authority, "server.pem": certificate, "server.key": key, "flower.env": scripts.server_environment()})
    _write(server, {"nginx.conf": scripts.proxy_configuration(port=deployment.port)})
    _write(
        server,
        {"start-superlink.sh": scripts.START_SUPERLINK, "start-proxy.sh": scripts.START_PROXY, "run.sh": scripts.RUN},
        executable=True,
    )
    _write(folder / SERVER, {"start.sh": scripts.start_all("start-proxy.sh", "start-superlink.sh")}, executable=True)
    _write(folder / OPERATOR, {"submit.sh": scripts.submit(rounds=deployment.rounds)}, executable=True)
    for index, name in enumerate(deployment.parties):
        place = folder / name / _FOLDER
        private, public = node_key()
        environment = scripts.party_environment(host=deployment.host, port=deployment.port, index=index)
        _write(place, {"ca.pem": authority, "node.key": private, "node.pub": public, "apps.sha256": allowed, "flower.env": environment})
        _write(place, {"start-node.sh": scripts.START_NODE, "start-supernode.sh": scripts.START_SUPERNODE}, executable=True)
        _write(folder / name, {"start.sh": scripts.start_all("start-node.sh", "start-supernode.sh")}, executable=True)
        _write(server / "nodes", {f"{name}.pub": public})


def problems(folder: Path, deployment: Deployment, *, name: str, now: datetime) -> list[str]:
    """What is wrong with Flower's part of one party's folder, a line each; nothing where all is well.

    Args:
        folder: The party's folder.
        deployment: Who is where.
        name: Whose folder it is.
        now: The time, with its zone.
    """
    place = folder / _FOLDER
    if not place.is_dir():
        return [f"{_FOLDER} is missing: put back what was made for {name!r}"]
    found = _missing_settings(place)
    for secret in _SECRET:
        if (place / secret).exists() and (place / secret).stat().st_mode & 0o077:
            found.append(f"{secret} can be read by others than its owner; run: chmod 600 {place / secret}")
    for certificate in ("ca.pem", "server.pem"):
        if (place / certificate).exists():
            found += _certificate_problems(place / certificate, now)
    found += _server_problems(place, deployment) if name == SERVER else _app_problems(place)
    return found + _port_problems(deployment, authority=place / "ca.pem", server=name == SERVER)


def _server_problems(place: Path, deployment: Deployment) -> list[str]:
    known, parties = {path.stem for path in (place / "nodes").glob("*.pub")}, set(deployment.parties)
    found = [
        f"the SuperNode of {name} is not registered: nodes/{name}.pub is missing; get it from {name}" for name in sorted(parties - known)
    ]
    found += [f"nodes/{name}.pub is of nobody in the consortium; remove it" for name in sorted(known - parties)]
    found += _own_certificate_problems(place)
    path = place / "nginx.conf"
    if not path.is_file() or path.read_text() != scripts.proxy_configuration(port=deployment.port):
        found.append("nginx.conf is not what was written; make sure that it passes on /v1/fleet/ alone, and bodies of 8 MB")
    return found


def _own_certificate_problems(place: Path) -> list[str]:
    """Whether what a renewal brings was put in place as a whole."""
    path = place / "server.pem"
    try:
        held, *others = x509.load_pem_x509_certificates(path.read_bytes())
        authorities = [*others, *x509.load_pem_x509_certificates((place / "ca.pem").read_bytes())]
    except (OSError, ValueError) as error:
        return [f"server.pem or ca.pem cannot be read ({error}); {_AGAIN}"]
    found = key_problems(held, certificate=path, key=place / "server.key", again=_AGAIN)
    if not any(is_issued_by(held, authority) for authority in authorities):
        found.append("server.pem is not signed by ca.pem; put server.pem, server.key and ca.pem in place that were made together")
    return found


def _app_problems(place: Path) -> list[str]:
    try:
        apps = read_apps(place / "apps.sha256")
    except (OSError, ValueError) as error:
        return [f"apps.sha256: {error}"]
    if apps == {installed_hash()}:
        return []
    return ["apps.sha256 allows another app than that of the privfed that is installed here; see python -m privfed.engines.flower.app"]


def _port_problems(deployment: Deployment, *, authority: Path, server: bool) -> list[str]:
    """Asks for a list of runs, as somebody who has the public certificate may try."""
    where = f"{'localhost' if server else deployment.host}:{deployment.port}"
    try:
        context = ssl.create_default_context(cafile=str(authority))
        with urllib.request.urlopen(f"https://{where}/v1/control/list-runs", data=b"", context=context, timeout=_SECONDS):
            closed = False
    except urllib.error.HTTPError as answer:
        closed = answer.code == _FORBIDDEN
    except OSError as error:
        if server:
            return []  # it is checked before it is started
        return [f"nothing of ours answers at {where} ({error}); start the server, or open its firewall"]
    return [] if closed else [f"the control path is open at {where}: anybody with ca.pem can submit apps; put the proxy in front"]


def _missing_settings(place: Path) -> list[str]:
    lines = (place / "flower.env").read_text().splitlines() if (place / "flower.env").exists() else []
    return [
        f"flower.env lacks {setting}: {consequence}"
        for setting, consequence in {
            "FLWR_TELEMETRY_ENABLED=0": "Flower reports to its makers",
            "FLWR_DISABLE_UPDATE_CHECK=1": "Flower asks its makers for updates",
        }.items()
        if setting not in lines
    ]


def _certificate_problems(path: Path, now: datetime) -> list[str]:
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError as error:
        return [f"{path.name} is no certificate ({error}); put it back"]
    return date_problems(certificate, said=path.name, now=now, again=_AGAIN)


def _write(place: Path, files: dict[str, bytes | str], *, executable: bool = False) -> None:
    make_folder(place)
    for name, content in files.items():
        create(place / name, content.encode() if isinstance(content, str) else content)
        if executable:
            (place / name).chmod(_EXECUTABLE)
