"""What Flower needs in the folder of each party, and what is wrong with it."""

import os
import shutil
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_private_key

from privfed.deploy.certificates import date_problems, is_issued_by, key_problems
from privfed.deploy.check import environment_problems
from privfed.deploy.deployment import OPERATOR, SERVER, Deployment
from privfed.engines.flower import scripts
from privfed.engines.flower.app import FOLDER as APP
from privfed.engines.flower.app import bundle_hash, installed_hash, write_app
from privfed.engines.flower.certificates import node_key, server_certificate
from privfed.engines.flower.exchange import registered
from privfed.engines.flower.server import read_node_keys
from privfed.engines.flower.supernode import read_apps
from privfed.files import create, make_folder, read_private

_FOLDER = "flower"
_EXECUTABLE = 0o700
_MOST_BYTES = 100_000
_SERVER_SCRIPTS = {"start-superlink.sh": scripts.START_SUPERLINK, "start-proxy.sh": scripts.START_PROXY, "run.sh": scripts.RUN}
_PARTY_SCRIPTS = {"start-node.sh": scripts.START_NODE, "start-supernode.sh": scripts.START_SUPERNODE}
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
    _write(server, _SERVER_SCRIPTS, executable=True)
    _write(folder / SERVER, {"start.sh": scripts.start_all("start-proxy.sh", "start-superlink.sh")}, executable=True)
    _write(folder / OPERATOR, {"submit.sh": scripts.submit(rounds=deployment.rounds)}, executable=True)
    for index, name in enumerate(deployment.parties):
        place = folder / name / _FOLDER
        private, public = node_key()
        environment = scripts.party_environment(host=deployment.host, port=deployment.port, index=index)
        _write(place, {"ca.pem": authority, "node.key": private, "node.pub": public, "apps.sha256": allowed, "flower.env": environment})
        _write(place, _PARTY_SCRIPTS, executable=True)
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
    server = name == SERVER
    found = _setting_problems(place, deployment, server=server) + environment_problems(place / "flower.env")
    for script, written in (_SERVER_SCRIPTS if server else _PARTY_SCRIPTS).items():
        if not (place / script).is_file() or (place / script).read_text() != written:
            found.append(f"{script} is not what was written, and may leave out what protects this party; put back what was written")
    for certificate in ("ca.pem", "server.pem") if server else ("ca.pem",):
        found += _certificate_problems(place / certificate, now)
    found += _server_problems(place, deployment) if server else [*_app_problems(place), *_node_key_problems(place)]
    return found + _port_problems(deployment, authority=place / "ca.pem", server=server)


def _server_problems(place: Path, deployment: Deployment) -> list[str]:
    known, parties = {path.stem for path in (place / "nodes").glob("*.pub")}, set(deployment.parties)
    found = [
        f"the SuperNode of {name} is not registered: nodes/{name}.pub is missing; get it from {name}" for name in sorted(parties - known)
    ]
    found += [f"nodes/{name}.pub is of nobody in the consortium; remove it" for name in sorted(known - parties)]
    found += _registration_problems(place / "nodes")
    if not (place / APP).is_dir() or bundle_hash(place / APP) != installed_hash():
        found.append(f"{APP} is not the app of the privfed that is installed here, so banks refuse it; see the guide on upgrades")
    found += _own_certificate_problems(place)
    path = place / "nginx.conf"
    if not path.is_file() or path.read_text() != scripts.proxy_configuration(port=deployment.port):
        found.append("nginx.conf is not what was written; make sure that it passes on /v1/fleet/ alone, and bodies of 8 MB")
    if shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:{scripts.NGINX_FOLDERS}") is None:
        found.append(f"nginx is neither on the PATH nor in {scripts.NGINX_FOLDERS}, so no bank gets in; install it, version 1.22 or later")
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
        return [f"nothing of ours answers at {where} ({error}); start the server, wait until it listens, or open its firewall"]
    return [] if closed else [f"the control path is open at {where}: anybody with ca.pem can submit apps; put the proxy in front"]


def _registration_problems(nodes: Path) -> list[str]:
    try:
        keys = read_node_keys(nodes)
        registered(keys)
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        return [f"nodes: a public key of a SuperNode cannot be used ({error}); get it from its bank again"]
    return []


def _node_key_problems(place: Path) -> list[str]:
    """Whether the SuperNode's key can be used, and is the one whose public half lies beside it, as the server knows it."""
    try:
        private = load_ssh_private_key(read_private(place / "node.key", most=_MOST_BYTES), password=None)
        public = private.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        known = (place / "node.pub").read_bytes()
    except FileNotFoundError as error:
        return [f"{Path(error.filename).name} is missing; put it back, or make a new key as the guide says"]
    except PermissionError:
        return [f"node.key can be read by others than its owner; run: chmod 600 {place / 'node.key'}"]
    except (OSError, ValueError, UnsupportedAlgorithm):
        return ["node.key holds no private key of a SuperNode; put it back, or make a new one as the guide says"]
    if known.split()[:2] != public.split()[:2]:
        return ["node.key is not the key of node.pub; put back the one whose public half the server has"]
    return []


def _setting_problems(place: Path, deployment: Deployment, *, server: bool) -> list[str]:
    lines = (place / "flower.env").read_text().splitlines() if (place / "flower.env").exists() else []
    settings = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))  # the last one counts, as in a shell
    wanted = {
        "FLWR_TELEMETRY_ENABLED": ("0", "Flower reports to its makers"),
        "FLWR_DISABLE_UPDATE_CHECK": ("1", "Flower asks its makers for updates"),
    }
    if not server:
        wanted["PRIVFED_SUPERLINK"] = (f"{deployment.host}:{deployment.port}", "the SuperNode speaks to another server")
    return [
        f"flower.env lacks {name}={value}: {consequence}" for name, (value, consequence) in wanted.items() if settings.get(name) != value
    ]


def _certificate_problems(path: Path, now: datetime) -> list[str]:
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except FileNotFoundError:
        return [f"{path.name} is missing; put it back"]
    except ValueError as error:
        return [f"{path.name} is no certificate ({error}); put it back"]
    return date_problems(certificate, said=path.name, now=now, again=_AGAIN)


def _write(place: Path, files: Mapping[str, bytes | str], *, executable: bool = False) -> None:
    make_folder(place)
    for name, content in files.items():
        create(place / name, content.encode() if isinstance(content, str) else content)
        if executable:
            (place / name).chmod(_EXECUTABLE)
