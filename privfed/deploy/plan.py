"""The file from which a deployment is made: who takes part, over which engine, in which trust mode. Public.

    name = "fraud"
    engine = "flare"
    host = "hub.example.org"
    port = 8002
    rounds = 20
    site = "site.py"

    [banks]
    bank_a = 1.0
    bank_b = 1.0
    bank_c = 0.5

`site` is a Python file that every bank gets a copy of, to complete on its own disk; `banks` are names and agreed weights. The other
keys are the other fields of `Plan`.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from privfed.errors import DeploymentError

Mode = Literal["SharedKey", "EscrowKey", "ThresholdKey"]
MODES: tuple[Mode, ...] = ("SharedKey", "EscrowKey", "ThresholdKey")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a deployment is made from. Public.

    Args:
        name: Name of the consortium.
        engine: "flare" or "flower".
        host: Name or address under which the banks reach the server.
        port: The server's port.
        rounds: How many rounds a run has.
        site: Python file with `model()` and `client()`, copied to every bank.
        banks: Agreed weight of every bank, by name.
        mode: Who opens what.
        corrupted: `ThresholdKey` alone: how many banks may work against the others.
        dropouts: `ThresholdKey` alone: how many banks may fall silent in a round.
        min_clients: With how many banks a round is held.
        max_share: Largest share of one bank in an aggregate.
        bound: Largest absolute coordinate of an update.
        ledgers: Whether every bank keeps a privacy ledger, for the population of its own name.
        roster: File of `privfed keys` with everybody's public line. Left out, the keys of all are made here.
        session: `SharedKey` with a roster alone: the session that `privfed keys show` prints for the key that the banks share, 32
            hexadecimal digits.

    Raises:
        ValueError: If the mode is none, or numbers of another mode are given.
    """

    name: str
    engine: Literal["flare", "flower"]
    host: str
    port: int
    rounds: int
    site: Path
    banks: Mapping[str, float]
    mode: Mode = "SharedKey"
    corrupted: int = 0
    dropouts: int = 0
    min_clients: int = 3
    max_share: float = 0.75
    bound: float = 1.0
    ledgers: bool = True
    roster: Path | None = None
    session: str = ""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"expected a mode of {', '.join(MODES)}, got {self.mode!r}")
        if self.mode != "ThresholdKey" and (self.corrupted or self.dropouts):
            raise ValueError(f"expected corrupted and dropouts with ThresholdKey alone, got them with {self.mode}")
        if bool(self.session) != (self.mode == "SharedKey" and self.roster is not None):
            raise ValueError("expected the session of the banks' shared key where a roster is given in SharedKey mode, and nowhere else")
        if self.session and not re.fullmatch(r"[0-9a-f]{32}", self.session):
            raise ValueError("expected a session of 32 hexadecimal digits, as privfed keys show prints it")

    @classmethod
    def load(cls, path: Path) -> "Plan":
        """Reads a plan. Files that it names are beside it.

        Raises:
            DeploymentError: If it is no plan.
            ValueError: If a value in it is out of its range.
        """
        try:
            terms: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise DeploymentError(f"{path.name} is no plan: {error}; nothing was done") from error
        known = {each.name for each in fields(cls)}
        needed = {"name", "engine", "host", "port", "rounds", "site", "banks"}
        if unknown := sorted(set(terms) - known):
            raise DeploymentError(f"{path.name} has keys that no plan has: {', '.join(unknown)}; nothing was done")
        if missing := sorted(needed - set(terms)):
            raise DeploymentError(f"{path.name} lacks {', '.join(missing)}; nothing was done")
        for name in ("site", "roster"):
            if name in terms:
                terms[name] = path.parent / str(terms[name])
        if not isinstance(terms["banks"], dict):
            raise DeploymentError(f"{path.name}: banks must be a table of names and weights; nothing was done")
        return cls(**terms)
