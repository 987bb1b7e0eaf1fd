"""What is wrong with the engine-free part of one party's folder, a line each, with what to do next."""

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

from privfed.agreement import Agreement
from privfed.deploy.deployment import KEY_HOLDER, Deployment, installed
from privfed.engines.party_folder import AGREEMENT, ESCROW_KEY, IDENTITY, ROSTER, RULE, SHARED_KEY, answering_parties, read_agreement
from privfed.engines.site_code import with_rule
from privfed.errors import AgreementMismatchError, KeyRefusedError
from privfed.identity import Identity
from privfed.keys.load import load_escrow_key, load_shared_key

_CLOCK_SLACK = timedelta(minutes=5)


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
    return found + _key_problems(folder, deployment, agreement, name) + _rule_problems(folder, deployment, agreement, name)


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
