"""What is wrong with FLARE's part of one party's folder: certificates, policies, storage, the port."""

import importlib.util
import json
import socket
import stat
from datetime import datetime
from pathlib import Path
from typing import Any

from privfed.deploy.certificates import certificate_problems, lets_strangers_in
from privfed.deploy.check import environment_problems
from privfed.deploy.deployment import SERVER, Deployment
from privfed.engines.flare.job import COMMANDS, COORDINATOR, HEART_BEAT_TIMEOUT, PARTY
from privfed.engines.flare.policies import AUTHORIZATION, FORBIDDEN, KIT, NO_CODE, STORAGE, client_resources, server_resources
from privfed.engines.flare.provisioning import START, start_script

_SECONDS = 5.0
_ALLOW_LIST_MODULE = "nvflare.app_common.widgets.component_path_authorizer"
_SITE_CODE = "custom"
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
    found += _component_problems(kit, server=server)
    found += _control_problems(startup / f"fed_{which}.json", server=server)
    if not server:
        found += _target_problems(startup / f"fed_{which}.json", deployment)
    if not (folder / START).is_file() or (folder / START).read_text() != start_script(name):
        found.append(f"{START} is not what was written; see that it starts FLARE alone, with secure_train=true, or write it anew")
    found += environment_problems(folder / "env")
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
            commands = [
                right for right in FORBIDDEN if right not in NO_CODE and (not isinstance(rights, dict) or rights.get(right) != "none")
            ]
            if commands:
                found.append(
                    f'local/authorization.json lets the role {role!r} give commands ({", ".join(commands)}); set these rights to "none"'
                )
            if isinstance(rights, dict) and (more := _more_rights(role, rights)):
                found.append(
                    f"local/authorization.json gives the role {role!r} other rights than were written ({', '.join(more)}); "
                    "put back what was written, or forbid more"
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


def _more_rights(role: str, rights: dict[str, Any]) -> list[str]:
    """The rights of a role that are neither what was written nor forbidden altogether. Those that nobody has are looked at elsewhere."""
    written: dict[str, Any] = AUTHORIZATION["permissions"].get(role, {})
    return sorted(right for right, who in rights.items() if right not in FORBIDDEN and who not in ("none", written.get(right, "none")))


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


def _component_problems(kit: Path, *, server: bool) -> list[str]:
    """Whether FLARE's process is made of anything else than what was written, or takes more commands than those of a job."""
    found: list[str] = []
    written = server_resources() if server else client_resources()
    expected = {str(component["path"]) for component in written["components"]}
    components = _json(kit / "local" / "resources.json").get("components", [])
    here = {str(component.get("path", "")) for component in components if isinstance(component, dict)}
    if not server and COMMANDS not in here:
        found.append(
            f"local/resources.json lacks the component {COMMANDS}, so the server can have FLARE print any file of this folder; put it into "
            "components, with an id of its own, or take local from new folders (privfed deploy certificates)"
        )
    if others := sorted(here - expected):
        found.append(f"local/resources.json has components that were not written: {', '.join(others)}; see what they are, and remove them")
    more = [
        path for place in ("local", "startup") for path in sorted((kit / place).glob("*resources.json")) if path.name != "resources.json"
    ]
    found += [f"{path.parent.name}/{path.name} adds to what FLARE's process is made of; remove it" for path in more]
    if (kit / "local" / _SITE_CODE).exists():
        found.append(f"local/{_SITE_CODE} holds code that FLARE's process may load; remove it")
    return found


def _target_problems(config: Path, deployment: Deployment) -> list[str]:
    section: Any = (_json(config).get("servers") or [{}])[0]
    target, identity, where = section.get("service", {}).get("target"), section.get("identity"), f"{deployment.host}:{deployment.port}"
    if target == where and identity == SERVER:
        return []
    return [
        f"startup/{config.name} connects to {target!r} as {identity!r}, and the server is {where}; put back the file that was made for "
        "this party"
    ]


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
