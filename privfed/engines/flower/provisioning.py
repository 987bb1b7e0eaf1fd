"""What Flower needs in the folder of each party, and what is wrong with it."""

import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography import x509

from privfed.engines.flower import scripts
from privfed.engines.flower.app import bundle_hash, installed_hash, write_app
from privfed.engines.flower.certificates import node_key, server_certificate
from privfed.engines.flower.supernode import read_apps
from privfed.files import create, make_folder

if TYPE_CHECKING:
    from privfed.deploy.deployment import Deployment

_FOLDER = "flower"
_SERVER = "server"
_EXECUTABLE = 0o700
_SECRET = ("server.key", "node.key")


def write(deployment: "Deployment", folder: Path) -> None:
    """Adds a folder `flower` to the folder of each party, never over one that is there.

    Args:
        deployment: Who is where.
        folder: It holds the folders of all parties.

    Raises:
        FileExistsError: If a file is there already; it stays as it is.
    """
    server = folder / _SERVER / _FOLDER
    now = datetime.datetime.now(datetime.UTC)
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
    for index, name in enumerate(deployment.parties):
        place = folder / name / _FOLDER
        private, public = node_key()
        environment = scripts.party_environment(host=deployment.host, port=deployment.port, index=index)
        _write(place, {"ca.pem": authority, "node.key": private, "node.pub": public, "apps.sha256": allowed, "flower.env": environment})
        _write(place, {"start-node.sh": scripts.START_NODE, "start-supernode.sh": scripts.START_SUPERNODE}, executable=True)
        _write(server / "nodes", {f"{name}.pub": public})


def problems(folder: Path, deployment: "Deployment") -> list[str]:
    """What is wrong with Flower's part of one party's folder, a line each; nothing where all is well.

    Args:
        folder: The party's folder.
        deployment: Who is where.
    """
    place = folder / _FOLDER
    if not place.is_dir():
        return [f"{_FOLDER} is missing: this folder was not made for Flower"]
    is_server = (place / "start-superlink.sh").exists()
    found = _missing_settings(place)
    for name in _SECRET:
        if (place / name).exists() and (place / name).stat().st_mode & 0o077:
            found.append(f"{name} can be read by others than its owner: run chmod 600 on it")
    for name in ("ca.pem", "server.pem"):
        if (place / name).exists():
            found += _expired(place / name)
    if is_server:
        registered = {path.stem for path in (place / "nodes").glob("*.pub")}
        found += [
            f"the SuperNode of {name} is not registered: nodes/{name}.pub is missing"
            for name in deployment.parties
            if name not in registered
        ]
        found += [f"nodes/{name}.pub is of nobody in the consortium: remove it" for name in sorted(registered - set(deployment.parties))]
        configuration = (place / "nginx.conf").read_text()
        if configuration != scripts.proxy_configuration(port=deployment.port):
            found.append("nginx.conf was changed: make sure that it passes on /v1/fleet/ alone, and bodies of 8 MB")
        return found
    try:
        apps = read_apps(place / "apps.sha256")
    except (OSError, ValueError) as error:
        return [*found, f"apps.sha256: {error}"]
    return found + (
        [] if apps == {installed_hash()} else ["apps.sha256 allows another app than that of the privfed that is installed here"]
    )


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


def _expired(path: Path) -> list[str]:
    now = datetime.datetime.now(datetime.UTC)
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    if now > certificate.not_valid_after_utc:
        return [f"{path.name} expired on {certificate.not_valid_after_utc:%Y-%m-%d}: get a new one"]
    if now < certificate.not_valid_before_utc:
        return [f"{path.name} is not valid before {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC: is the clock right?"]
    return []


def _write(place: Path, files: dict[str, bytes | str], *, executable: bool = False) -> None:
    make_folder(place)
    for name, content in files.items():
        create(place / name, content.encode() if isinstance(content, str) else content)
        if executable:
            (place / name).chmod(_EXECUTABLE)
