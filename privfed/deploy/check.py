"""What is wrong with the engine-free part of one party's folder, a line each, with what to do next."""

import os
import re
import stat
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from privfed.agreement import Agreement
from privfed.deploy.deployment import KEY_HOLDER, SERVER, Deployment, installed
from privfed.engines.party_folder import AGREEMENT, ESCROW_KEY, IDENTITY, ROSTER, RULE, SHARED_KEY, answering_parties, read_agreement
from privfed.engines.site_code import check_site, with_rule
from privfed.errors import AgreementMismatchError, KeyRefusedError
from privfed.identity import Identity
from privfed.keys.load import load_escrow_key, load_shared_key
from privfed.keys.party import ENCRYPTION, Party
from privfed.trust import EscrowTrust

_MOST_NAMED = 10
_CLOCK_SLACK = timedelta(minutes=5)
_MOST_SHOWN = 80
_SETTING = re.compile(r"""[A-Za-z_][A-Za-z0-9_]*=(?:[\w./:@,+%-]*|"[\w ./:@,+%-]*"|'[\w ./:@,+%-]*')""", re.ASCII)
# Of the shell, the dynamic linker, and Python: where programs, libraries and modules come from, and what runs before them.
_STEERING = {"PATH", "ENV", "BASH_ENV", "IFS"}
_STEERING_PREFIXES = ("LD_", "PYTHON")
_HARMLESS = {"PYTHONDONTWRITEBYTECODE", "PYTHONNOUSERSITE", "PYTHONUNBUFFERED"}


def party_problems(folder: Path, deployment: Deployment, *, name: str, now: datetime) -> list[str]:
    """What is wrong, apart from the engine.

    Args:
        folder: The party's.
        deployment: Who is where.
        name: Whose folder it is.
        now: The time, with its zone.
    """
    found: list[str] = []
    if stat.S_IMODE(folder.stat().st_mode) & 0o077:
        found.append(f"others may look into {folder}; run: chmod 700 {folder}")
    found += _permission_problems(folder)
    now, made = now.astimezone(UTC), datetime.fromtimestamp(deployment.made, UTC)
    if now < made - _CLOCK_SLACK:
        found.append(
            f"the clock of this machine says {now:%Y-%m-%d %H:%M}, before this deployment was made ({made:%Y-%m-%d %H:%M} UTC); "
            "set the clock"
        )
    for distribution, here in installed(*deployment.versions).items():
        version = deployment.versions[distribution]
        if here != version:
            found.append(f"{distribution} is {here} here and {version} at the others; install {distribution}=={version}")
    try:
        agreement = read_agreement(folder)
    except (OSError, ValueError) as error:
        return [*found, f"{AGREEMENT} cannot be read ({error}); copy it from another party, it is public and the same for all"]
    found += _agreement_problems(deployment, agreement)
    found += _key_problems(folder, deployment, agreement, name)
    return found + _site_problems(folder, deployment, name) + _rule_problems(folder, deployment, agreement, name)


def _permission_problems(folder: Path) -> list[str]:
    """What others than the folder's owner may change in it: whoever may write one script or setting may do what the party may."""
    owner = folder.stat().st_uid
    open_to_others: list[str] = []
    foreign: list[str] = []
    for path in _below(folder):
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue  # a process of the party is at work
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
            continue
        if stat.S_IMODE(status.st_mode) & 0o022:
            open_to_others.append(str(path.relative_to(folder)))
        if status.st_uid not in (owner, 0):
            foreign.append(str(path.relative_to(folder)))
    found: list[str] = []
    if open_to_others:
        found.append(f"others may write {_some(open_to_others)}; see that nobody did, then run: chmod -R go-w {folder}")
    if foreign:
        found.append(f"{_some(foreign)} belong to another user than the folder; see who put them there, then take them away or own them")
    return found


def environment_problems(path: Path) -> list[str]:
    """What in a file of settings, which a start script reads as shell, would have other code run than what is installed.

    Args:
        path: The file; one that is not there has no problems here.
    """
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines()] if path.is_file() else []
    settings = [line for line in lines if line and not line.startswith("#")]
    found = [
        f"{path.name} holds {line[:_MOST_SHOWN]!r}, which is more than a setting NAME=VALUE, and would be run; remove it"
        for line in settings
        if not _SETTING.fullmatch(line)
    ]
    names = sorted({line.partition("=")[0] for line in settings} - _HARMLESS)
    steering = [name for name in names if name in _STEERING or name.startswith(_STEERING_PREFIXES)]
    if steering:
        found.append(f"{path.name} sets {', '.join(steering)}, so that other code may run than what is installed; remove it")
    return found


def _below(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        yield from (Path(place, name) for name in (*folders, *files))


def _some(names: list[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def _agreement_problems(deployment: Deployment, agreement: Agreement) -> list[str]:
    """Where the two public files that say who takes part, and how few of them are enough, do not say the same."""
    same = {
        "the banks": set(agreement.roster.names) == set(deployment.banks),
        "min_clients": agreement.policy.min_clients == deployment.min_clients,
        "a key holder": isinstance(agreement.trust, EscrowTrust) == deployment.key_holder,
    }
    return [
        f"{AGREEMENT} and deployment.json differ in {part}; compare both with the other parties before anything is started"
        for part, equal in same.items()
        if not equal
    ]


def _site_problems(folder: Path, deployment: Deployment, name: str) -> list[str]:
    if name not in deployment.banks:
        return []
    try:
        check_site(folder)
    except FileNotFoundError:
        return ["site.py is missing; put back this bank's own"]
    except (OSError, ValueError) as error:
        return [f"site.py: {error}"]
    return []


def _rule_problems(folder: Path, deployment: Deployment, agreement: Agreement, name: str) -> list[str]:
    if name not in deployment.parties:
        return []
    try:
        with_rule(agreement, folder)
    except FileNotFoundError:
        return [f"{RULE} is missing; copy it from another party, it is the same for all but the server"]
    except (OSError, ValueError, AgreementMismatchError) as error:
        return [f"{RULE}: {error}"]
    return []


def _key_problems(folder: Path, deployment: Deployment, agreement: Agreement, name: str) -> list[str]:
    found: list[str] = []
    server = agreement.roster.server
    pinned = ({server.name: server} | answering_parties(agreement)).get(name)
    try:
        if pinned is None:
            found.append(f"{AGREEMENT} knows no {name!r}; take the folder that was made for this party")
        elif Identity.load(folder / IDENTITY, name=name).public != pinned:
            found.append(f"{IDENTITY} is not the key that the agreement pins for {name!r}; put the right key back, or agree anew")
    except FileNotFoundError:
        found.append(f"{IDENTITY} is missing; copy what privfed keys init made for {name!r} into {folder}")
    except (OSError, ValueError) as error:
        found.append(f"{IDENTITY}: {error}")
    found += _foreign_key_problems(folder, name)
    if name in deployment.banks and agreement.trust is not None:
        found += _decryption_key_problems(folder, agreement, name)
    holder = name == KEY_HOLDER
    if not holder and (name not in deployment.banks or agreement.trust is not None):
        return found
    path = folder / (ESCROW_KEY if holder else SHARED_KEY)
    try:
        key = load_escrow_key(path) if holder else load_shared_key(path, roster=folder / ROSTER)
    except FileNotFoundError as error:
        found.append(
            f"{Path(error.filename).name} is missing; put back what this party had, or get it from another bank, never from the server"
        )
    except (OSError, ValueError, KeyRefusedError) as error:
        found.append(f"{path.name}: {error}")
    else:
        if deployment.key and key.fingerprint != deployment.key:
            found.append(f"{path.name} is another key than that of this deployment; put the right one back, and compare fingerprints")
    return found


def _foreign_key_problems(folder: Path, name: str) -> list[str]:
    """Keys that a party must not have: with one of these, the server reads every update."""
    forbidden = {SERVER: (SHARED_KEY, ESCROW_KEY, ENCRYPTION), KEY_HOLDER: (SHARED_KEY, ENCRYPTION)}.get(name, (ESCROW_KEY,))
    return [
        f"{file} is in the folder of {name!r}, which must not have it; find out how it came there, and begin a new session with new keys"
        for file in forbidden
        if (folder / file).exists()
    ]


def _decryption_key_problems(folder: Path, agreement: Agreement, name: str) -> list[str]:
    """Whether the bank can open what others encrypt for it."""
    try:
        party = Party.of(Identity.load(folder / IDENTITY, name=name), folder)
    except (OSError, ValueError) as error:
        return [f"{ENCRYPTION}: {error}"]
    if agreement.trust is not None and agreement.trust.encryption_keys.get(name) != party.public.encryption_key:
        return [f"{ENCRYPTION} is not the key that the agreement names for {name!r}; put the right key back, or agree anew"]
    return []
