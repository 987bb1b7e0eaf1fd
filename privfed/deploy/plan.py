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
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from privfed.agreement import Validator
from privfed.deploy.deployment import Engine
from privfed.errors import DeploymentError

Mode = Literal["SharedKey", "EscrowKey", "ThresholdKey"]


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
        rule: Python file with `rule()`, copied to every bank and the key holder. Left out, `FedAvg`. With a rule that looks at inner
            products, `bound` is one on the Euclidean norm of an update.
        validator: Who provides the reference, where the rule needs one: the `name` of a bank, its `commitment` as `Validator.commit`
            makes it, in hexadecimal, and whether its data are `public`.
        noise_energy: Declared squared norm of the noise in each bank's update, by name, for a rule that looks at inner products; see
            `privfed.aggregation.gram.noise_energy`. Banks that are not named declare none.

    Raises:
        ValueError: If the engine or the mode is none, numbers of another mode are given, or the validator is not described.
    """

    name: str
    engine: Engine
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
    rule: Path | None = None
    validator: Mapping[str, Any] | None = None
    noise_energy: Mapping[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        if self.engine not in get_args(Engine):
            raise ValueError(f"expected an engine of {', '.join(get_args(Engine))}, got {self.engine!r}")
        if self.mode not in get_args(Mode):
            raise ValueError(f"expected a mode of {', '.join(get_args(Mode))}, got {self.mode!r}")
        if self.mode != "ThresholdKey" and (self.corrupted or self.dropouts):
            raise ValueError(f"expected corrupted and dropouts with ThresholdKey alone, got them with {self.mode}")
        if bool(self.session) != (self.mode == "SharedKey" and self.roster is not None):
            raise ValueError("expected the session of the banks' shared key where a roster is given in SharedKey mode, and nowhere else")
        if self.session and not re.fullmatch(r"[0-9a-f]{32}", self.session):
            raise ValueError("expected a session of 32 hexadecimal digits, as privfed keys show prints it")
        if self.validator is not None:
            _ = self.reference

    @property
    def reference(self) -> Validator | None:
        """The validator, as the agreement has it.

        Raises:
            ValueError: If it is not described.
        """
        if self.validator is None:
            return None
        terms = dict(self.validator)
        if set(terms) != {"name", "commitment", "public"} or not isinstance(terms["public"], bool):
            raise ValueError(f"expected of the validator a name, a commitment and public = true or false, got {sorted(terms)}")
        if not re.fullmatch(r"[0-9a-f]{64}", str(terms["commitment"])):
            raise ValueError("expected a commitment of 64 hexadecimal digits: Validator.commit(data, salt=salt).hex()")
        return Validator(name=str(terms["name"]), commitment=bytes.fromhex(terms["commitment"]), public=terms["public"])

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
        for name in ("site", "roster", "rule"):
            if name in terms:
                terms[name] = path.parent / str(terms[name])
        for name in ("banks", "validator", "noise_energy"):
            if not isinstance(terms.get(name, {}), dict):
                raise DeploymentError(f"{path.name}: {name} must be a table; nothing was done")
        return cls(**terms)
