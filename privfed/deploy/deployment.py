"""What a deployment is: who is where, over which engine, in which versions. Public, and the same file in every party's folder."""

import importlib.metadata
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from privfed import __version__
from privfed.errors import DeploymentError
from privfed.files import create, read_pinned
from privfed.identity import check_name
from privfed.strict_json import parse

DEPLOYMENT = "deployment.json"
PARTY = "party.txt"
SERVER = "server"
KEY_HOLDER = "key_holder"
OPERATOR = "operator"
Engine = Literal["flare", "flower"]

_MOST_BYTES = 1_000_000
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,252})")
ENGINE_DISTRIBUTIONS: dict[str, str] = {"flare": "nvflare", "flower": "flwr"}
"""What brings each engine: the name of the distribution, and of its module."""


def installed(*distributions: str) -> dict[str, str]:
    """The installed version of each distribution, "none" where there is none."""
    found: dict[str, str] = {}
    for name in distributions:
        if name == "privfed":
            found[name] = __version__  # of what is imported, installed or not
            continue
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "none"
    return found


def versions_here(engine: str) -> dict[str, str]:
    """Installed versions of what must be the same at every party. TenSEAL brings SEAL."""
    return installed("privfed", "tenseal", ENGINE_DISTRIBUTIONS[engine])


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Who is where. Public.

    Args:
        name: Name of the consortium.
        engine: What carries the messages.
        banks: Names of the banks.
        host: Name or address under which the banks reach the server.
        port: The server's port.
        min_clients: With how many banks a round is held.
        rounds: How many rounds a run has.
        key_holder: Whether there is one.
        key: Fingerprint of the key that the banks share, or of the key holder's key; empty where there is none.
        made: When the folders were made, seconds since 1970.
        versions: As `versions_here` found them when the folders were made.

    Raises:
        ValueError: If a name, a number or the engine is none.
    """

    name: str
    engine: Engine
    banks: tuple[str, ...]
    host: str
    port: int
    min_clients: int
    rounds: int
    key_holder: bool = False
    key: str = ""
    made: float
    versions: dict[str, str]

    def __post_init__(self) -> None:
        object.__setattr__(self, "banks", tuple(self.banks))
        for name in (self.name, *self.banks):
            check_name(name)
        if taken := {SERVER, KEY_HOLDER, OPERATOR} & set(self.banks):
            raise ValueError(f"expected banks with names of their own, got {sorted(taken)}")
        if len(self.banks) < 2 or len(set(self.banks)) != len(self.banks):
            raise ValueError(f"expected at least two banks, each with its own name, got {list(self.banks)}")
        if self.engine not in get_args(Engine):
            raise ValueError(f"expected an engine of {', '.join(get_args(Engine))}, got {self.engine!r}")
        if not _HOST.fullmatch(self.host):
            raise ValueError(f"expected the name or address of a host, got {self.host!r}")
        if type(self.port) is not int or not 1 <= self.port < 2**16:
            raise ValueError(f"expected a port from 1 to 65535, got {self.port!r}")
        if not 2 <= self.min_clients <= len(self.banks):
            raise ValueError(f"expected min_clients from 2 to the number of banks, {len(self.banks)}, got {self.min_clients}")
        if self.rounds < 1:
            raise ValueError(f"expected at least 1 round, got {self.rounds}")

    @property
    def parties(self) -> tuple[str, ...]:
        """Names of all who answer the server: the banks, and the key holder."""
        return (*self.banks, KEY_HOLDER) if self.key_holder else self.banks

    def save(self, folder: Path) -> None:
        """Writes the file into a party's folder, never over another one."""
        create(folder / DEPLOYMENT, json.dumps(asdict(self), indent=2).encode() + b"\n")

    @classmethod
    def load(cls, folder: Path) -> "Deployment":
        """Reads the file of a party's folder.

        Raises:
            DeploymentError: If there is none, or it is damaged.
            PermissionError: If others than the owner may write it.
        """
        if not (folder / DEPLOYMENT).is_file():
            raise DeploymentError(f"{folder} holds no {DEPLOYMENT}; nothing was done; name a folder that privfed deploy init wrote")
        try:
            terms = parse(read_pinned(folder / DEPLOYMENT, most=_MOST_BYTES).decode())
            return cls(**terms)
        except (ValueError, TypeError, RecursionError) as error:
            raise DeploymentError(
                f"{folder / DEPLOYMENT} is damaged; nothing was done; take it from another party, it is public"
            ) from error


def party_name(folder: Path) -> str:
    """Whose folder it is, as `privfed deploy init` wrote it there.

    Raises:
        DeploymentError: If nobody's.
        PermissionError: If others than the owner may write the file.
    """
    if not (folder / PARTY).is_file():
        raise DeploymentError(f"{folder} holds no {PARTY}; nothing was done; name one party's folder, as privfed deploy init wrote it")
    name = read_pinned(folder / PARTY, most=_MOST_BYTES).decode(errors="replace").strip()
    check_name(name)
    return name
