"""What is wrong with FLARE's part of one party's folder: certificates, policies, storage, the port."""

import importlib.util
import json
import socket
import stat
from datetime import datetime
from pathlib import Path
from typing import Any

from privfed.deploy.certificates import certificate_problems, lets_strangers_in
from privfed.deploy.deployment import SERVER, Deployment
from privfed.engines.flare.job import COORDINATOR, HEART_BEAT_TIMEOUT, PARTY
from privfed.engines.flare.policies import KIT, NO_CODE, STORAGE

_SECONDS = 5.0
_ALLOW_LIST_MODULE = "nvflare.app_common.widgets.component_path_authorizer"
_LOG_SENDERS = ("LogStreamer", "LogSender", "LogReceiver")


def problems(folder: Path, deployment: Deployment, *, name: str, now: datetime) -> list[str]:
    """What is wrong, a line each, with what to do next.

    Args:
        folder: The party's.
        deployment: Who is where.
        name: Whose folder it is.
        now: The time, with its zone.
    """
    kit = folder / KIT
    server = name == SERVER
    startup = kit / "startup"
    which = "server" if server else "client"
    found = certificate_problems(
        startup / f"{which}.crt", key=startup / f"{which}.key", authority=startup / "rootCA.pem", name=name, now=now
    )
    found += _code_problems(kit, server=server)
    found += _resource_problems(kit, server=server)
    found += _control_problems(startup / f"fed_{which}.json", server=server)
    return found + _port_problems(deployment, server=server)


def _code_problems(kit: Path, *, server: bool) -> list[str]:
    """Whether code that comes with a job would run here, or a class of another package."""
    found: list[str] = []
    policy = _json(kit / "local" / "authorization.json")
    permissions = policy.get("permissions")
    if not isinstance(permissions, dict) or not permissions:
        found.append(
            "local/authorization.json is missing or damaged, so FLARE's own default lets jobs bring code; copy it from another party"
        )
    else:
        for role, rights in permissions.items():
            open_rights = [right for right in NO_CODE if not isinstance(rights, dict) or rights.get(right) != "none"]
            if open_rights:
                found.append(
                    f'local/authorization.json lets the role {role!r} bring code ({", ".join(open_rights)}); set these rights to "none"'
                )
    resources = _json(kit / "local" / "resources.json")
    allowed = resources.get("class_allow_list")
    ours = COORDINATOR if server else PARTY
    if allowed != [ours] or resources.get("class_list_enforcement_mode") != "enforce":
        found.append(f'local/resources.json lets jobs name other classes; set class_allow_list to ["{ours}"] and its mode to "enforce"')
    if importlib.util.find_spec("nvflare") is None:
        found.append("nvflare is not installed here; install privfed[flare] in the python3 that start.sh finds")
    elif importlib.util.find_spec(_ALLOW_LIST_MODULE) is None:
        found.append("this nvflare knows no class_allow_list, so a job may name any installed class; install nvflare 2.9")
    return found


def _resource_problems(kit: Path, *, server: bool) -> list[str]:
    found: list[str] = []
    resources = _json(kit / "local" / "resources.json")
    components = [str(component.get("path", "")) for component in resources.get("components", []) if isinstance(component, dict)]
    if any(word in path for path in components for word in _LOG_SENDERS) or (
        not server and resources.get("allow_log_streaming") is not False
    ):
        found.append("local/resources.json sends logs to the server; remove the log components and set allow_log_streaming to false")
    if not server:
        return found
    timeouts = [entry.get("heart_beat_timeout") for entry in resources.get("servers", []) if isinstance(entry, dict)]
    if timeouts != [HEART_BEAT_TIMEOUT]:
        found.append(f"local/resources.json waits {timeouts} s for a client that is gone; set heart_beat_timeout to {HEART_BEAT_TIMEOUT}")
    storage = kit / STORAGE
    if not storage.is_dir() or stat.S_IMODE(storage.stat().st_mode) & 0o077:
        found.append(f"{KIT}/{STORAGE} is missing, or others may read it; run: mkdir -p {storage} && chmod 700 {storage}")
    if "/tmp/" in json.dumps(resources):  # noqa: S108 -- what is looked for, so that nothing is stored there
        found.append(f"local/resources.json keeps jobs or snapshots under /tmp; set the paths to /proc/self/cwd/{STORAGE}")
    return found


def _control_problems(config: Path, *, server: bool) -> list[str]:
    terms = _json(config)
    section: Any = (terms.get("servers") or [{}])[0] if server else terms.get("client", {})
    found: list[str] = []
    if section.get("connection_security") != "mtls":
        found.append(f'startup/{config.name} does not demand certificates from both sides; set connection_security to "mtls"')
    if server and str(section.get("service", {}).get("target", "")).rpartition(":")[2] != str(section.get("admin_port")):
        found.append(f"startup/{config.name} opens a control port of its own; set admin_port to the port of service.target")
    return found


def _port_problems(deployment: Deployment, *, server: bool) -> list[str]:
    where = f"{deployment.host}:{deployment.port}"
    host = "localhost" if server else deployment.host
    try:
        socket.create_connection((host, deployment.port), timeout=_SECONDS).close()
    except OSError as error:
        if server:
            return []  # it is checked before it is started
        reason = error.strerror or error
        return [
            f"{where} cannot be reached from here ({reason}); start the server, wait until it listens, or let the firewall pass this port"
        ]
    if lets_strangers_in(host, deployment.port, seconds=_SECONDS):
        return [f"{where} talks to somebody without a certificate; stop what listens there, and start the server with ./start.sh"]
    return []


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
