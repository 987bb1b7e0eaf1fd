"""Agreements as JSON, for another process or machine."""

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from privfed.aggregation.private_weights import PrivateWeights
from privfed.aggregation.rules import FedAvg, WeightRule
from privfed.aggregation.server_optimizer import SERVER_OPTIMIZERS, ServerOptimizer
from privfed.agreement import Agreement, NamedRule, Validator
from privfed.dp.silo import SiloNoise
from privfed.he.params import CkksParams
from privfed.he.product_params import ProductParams
from privfed.he.threshold_key import ThresholdKey
from privfed.identity import PublicIdentity, Roster
from privfed.policy import OpeningPolicy
from privfed.trust import EscrowTrust, ThresholdTrust, Trust
from privfed.update import Layout

_SILO_FIELDS = tuple(field.name for field in fields(SiloNoise))
# Rules that a written agreement may name in full. Of those that look at inner products a reader has the name: see `NamedRule`.
_WRITTEN_RULES: tuple[WeightRule, ...] = (FedAvg(),)


def encode_agreement(agreement: Agreement) -> str:
    """The agreement as JSON, for another process or machine. Public."""
    params, policy, roster, silo = agreement.params, agreement.policy, agreement.roster, agreement.silo
    optimizer: Any = agreement.server_optimizer  # Any, because a protocol is not known to be a dataclass
    parties = [{"name": party.name, "public_key": party.public_key.hex()} for party in (roster.server, *roster.clients)]
    return json.dumps(
        {
            "session": agreement.session.hex(),
            "parties": parties,
            "params": {field.name: getattr(params, field.name) for field in fields(params)},
            "layout": {"names": agreement.layout.names, "shapes": agreement.layout.shapes},
            "start": agreement.start.hex(),
            "weights": dict(agreement.weights),
            "rule": agreement.rule.name,
            "scored": {"needs_reference": agreement.rule.needs_reference} if agreement.rule.needs_gram is True else None,
            "policy": {field.name: getattr(policy, field.name) for field in fields(policy)},
            "populations": dict(agreement.populations),
            "silo": None if silo is None else {field: getattr(silo, field) for field in _SILO_FIELDS} | {"weights": dict(silo.weights)},
            "private_weights": None if agreement.private_weights is None else agreement.private_weights.largest,
            "noise_energy": dict(agreement.noise_energy),
            "validator": None
            if agreement.validator is None
            else {
                "name": agreement.validator.name,
                "commitment": agreement.validator.commitment.hex(),
                "public": agreement.validator.public,
            },
            "server_optimizer": {type(optimizer).__name__: {field.name: getattr(optimizer, field.name) for field in fields(optimizer)}},
            "trust": None if agreement.trust is None else _written_trust(agreement.trust),
        }
    )


def _written_trust(trust: Trust) -> dict[str, object]:
    terms: dict[str, object] = {
        "mode": trust.mode,
        "encryption_keys": {name: key.hex() for name, key in trust.encryption_keys.items()},
    }
    if isinstance(trust, EscrowTrust):
        holder = {"name": trust.holder.name, "public_key": trust.holder.public_key.hex()}
        return terms | {"holder": holder}
    return terms | {"clients": trust.key.clients, "corrupted": trust.key.corrupted, "dropouts": trust.key.dropouts}


def _read_trust(terms: Mapping[str, Any]) -> Trust:
    keys = {name: bytes.fromhex(key) for name, key in terms["encryption_keys"].items()}
    if terms["mode"] == ThresholdKey.__name__:
        key = ThresholdKey(clients=terms["clients"], corrupted=terms["corrupted"], dropouts=terms["dropouts"])
        return ThresholdTrust(key=key, encryption_keys=keys)
    holder = terms["holder"]
    identity = PublicIdentity(name=holder["name"], public_key=bytes.fromhex(holder["public_key"]))
    trust = EscrowTrust(holder=identity, encryption_keys=keys)
    if terms["mode"] != trust.mode:
        raise ValueError("expected an agreement with a trust mode that is known here, got another")
    return trust


def decode_agreement(text: str) -> Agreement:
    """Reads what `encode_agreement` wrote. The result is checked like any agreement.

    Raises:
        ValueError: If it is not such JSON, or names a rule that is not known here.
    """
    try:
        terms = json.loads(text)
        kind = ProductParams if "sketch" in terms["params"] else CkksParams
        scored, validator = terms["scored"], terms["validator"]
        parties = [PublicIdentity(name=party["name"], public_key=bytes.fromhex(party["public_key"])) for party in terms["parties"]]
        return Agreement(
            session=bytes.fromhex(terms["session"]),
            roster=Roster(server=parties[0], clients=tuple(parties[1:])),
            params=kind(**terms["params"]),
            layout=Layout(names=tuple(terms["layout"]["names"]), shapes=tuple(tuple(shape) for shape in terms["layout"]["shapes"])),
            start=bytes.fromhex(terms["start"]),
            weights=terms["weights"],
            rule=next(rule for rule in _WRITTEN_RULES if rule.name == terms["rule"])
            if scored is None
            else NamedRule(name=terms["rule"], needs_reference=scored["needs_reference"]),
            policy=OpeningPolicy(**terms["policy"]),
            populations=terms["populations"],
            silo=None if terms["silo"] is None else SiloNoise(**terms["silo"]),
            private_weights=None if terms["private_weights"] is None else PrivateWeights(largest=terms["private_weights"]),
            noise_energy=terms["noise_energy"],
            validator=None
            if validator is None
            else Validator(name=validator["name"], commitment=bytes.fromhex(validator["commitment"]), public=validator["public"]),
            server_optimizer=_written_optimizer(terms["server_optimizer"]),
            trust=None if terms["trust"] is None else _read_trust(terms["trust"]),
        )
    except (KeyError, IndexError, TypeError, AttributeError, StopIteration, OverflowError, RecursionError) as error:
        raise ValueError("expected an agreement as encode_agreement writes it, got something else") from error


def _written_optimizer(written: Mapping[str, Mapping[str, float]]) -> ServerOptimizer:
    ((name, numbers),) = written.items()
    if not all(type(number) in (int, float) for number in numbers.values()):
        raise TypeError("expected numbers")
    return next(kind for kind in SERVER_OPTIMIZERS if kind.__name__ == name)(**numbers)
