"""The engine-free part of every party's folder: its keys, the agreement, and the bank's own code to complete."""

import runpy
import secrets
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch import nn

from privfed.aggregation.robust import check_openable
from privfed.aggregation.rules import CumulativeRule, FedAvg, PlaintextRule, Rule
from privfed.agreement import SESSION_BYTES, Agreement
from privfed.deploy.deployment import KEY_HOLDER, PARTY, SERVER, Deployment, versions_here
from privfed.deploy.plan import Plan
from privfed.engines.party_folder import AGREEMENT, ESCROW_KEY, IDENTITY, ROSTER, RULE, SHARED_KEY, SITE
from privfed.errors import DeploymentError, UnsupportedInThisModeError
from privfed.files import create, make_folder
from privfed.he.escrow_secret import EscrowKey
from privfed.he.params import CkksParams
from privfed.he.product_params import ProductParams
from privfed.he.secret import SharedKey
from privfed.he.threshold_key import ThresholdKey
from privfed.identity import Identity, PublicIdentity, Roster
from privfed.keys.party import Party, create_server
from privfed.keys.roster import PinnedRoster
from privfed.policy import OpeningPolicy
from privfed.training.model import check_model, values_of
from privfed.training.scaffold import Scaffold
from privfed.trust import EscrowTrust, ThresholdTrust, Trust
from privfed.update import PlainVector
from privfed.written_agreement import encode_agreement


def make_parties(plan: Plan, folder: Path) -> Deployment:
    """Writes a folder for every party, without the engine's part.

    With a roster, no key of a bank or the server is made here: each puts what `privfed keys` made into its folder itself.

    Args:
        plan: Who takes part.
        folder: A new folder for all of them; it is made, mode 0700.

    Returns:
        Who is where, as it stands in every folder.

    Raises:
        DeploymentError: If the folder exists, the site file has no `model()`, or the rule file no `rule()`.
        PrivFedError: If the model, the rule, the correction or the terms are refused.
        ValueError: If a value of the plan is out of its range.
    """
    if folder.exists():
        raise DeploymentError(f"{folder} is there already; nothing was done; name a new folder")
    site = _defined(plan.site, "model() and client()")
    start = _initial_values(plan, site)
    rule = _agreed_rule(plan)
    _check_correction(plan, site, rule)
    make_folder(folder)
    try:
        return _make(plan, folder, start, rule)
    except BaseException:
        shutil.rmtree(folder)  # half a deployment is none
        raise


def _defined(path: Path, what: str) -> Mapping[str, Any]:
    """The names that a file defines.

    Raises:
        DeploymentError: If there is no such file.
    """
    if not path.is_file():
        raise DeploymentError(f"there is no file {path}; nothing was done; name a Python file with {what}")
    return runpy.run_path(str(path))


def _made(names: Mapping[str, Any], name: str) -> Any:
    """What a function of a file returns; None if the file has no such function."""
    make = names.get(name)
    return make() if callable(make) else None


def _initial_values(plan: Plan, site: Mapping[str, Any]) -> PlainVector:
    """The weights from which the model of the site file starts.

    Raises:
        DeploymentError: If the file has no `model()` that makes a module.
        UnsupportedModelError: As `check_model`.
    """
    model = _made(site, "model")
    if not isinstance(model, nn.Module):
        raise DeploymentError(f"{plan.site.name} has no model() that returns a torch module; nothing was done")
    check_model(model)
    return values_of(model)


def _agreed_rule(plan: Plan) -> Rule | CumulativeRule:
    """The rule of the plan's file.

    Raises:
        DeploymentError: If the file has none.
        UnsupportedInThisModeError: If no round could be opened under it.
    """
    if plan.rule is None:
        return FedAvg()
    rule = _made(_defined(plan.rule, "rule()"), "rule")
    if not hasattr(rule, "needs_gram") and not isinstance(rule, PlaintextRule):
        raise DeploymentError(f"{plan.rule.name} has no rule() that returns a rule; nothing was done")
    return check_openable(cast("Rule", rule), min_clients=plan.min_clients)


def _check_correction(plan: Plan, site: Mapping[str, Any], rule: Rule | CumulativeRule) -> None:
    """Refuses SCAFFOLD in the site file where its variates would not follow from what is opened. How banks train, they know alone.

    Raises:
        UnsupportedInThisModeError: If they would not.
    """
    correction = _made(site, "correction")
    if not isinstance(correction, Scaffold):
        return
    if plan.mode == "ThresholdKey":
        raise UnsupportedInThisModeError("SCAFFOLD does not go with ThresholdKey; nothing was done; take SharedKey or EscrowKey")
    correction.check_weights(weights=plan.banks, rule=rule)


def _make(plan: Plan, folder: Path, start: PlainVector, rule: Rule | CumulativeRule) -> Deployment:
    server, banks, encryption_keys = _identities(plan, folder)
    session = bytes.fromhex(plan.session) or secrets.token_bytes(SESSION_BYTES)
    scored = rule.needs_gram is True
    fingerprint, trust = "", None
    params = ProductParams.exact(bound=plan.bound) if scored else CkksParams.standard(bound=plan.bound)
    if plan.mode == "SharedKey" and plan.roster is not None:
        for name in banks:
            create(folder / name / ROSTER, plan.roster.read_bytes())
    elif plan.mode == "SharedKey":
        shared = SharedKey.generate()
        fingerprint = shared.fingerprint
        for name in banks:
            shared.save(folder / name / SHARED_KEY)
    elif plan.mode == "ThresholdKey":
        params = CkksParams.threshold(clients=len(banks), bound=plan.bound)
        key = ThresholdKey(clients=len(banks), corrupted=plan.corrupted, dropouts=plan.dropouts)
        trust = ThresholdTrust(key=key, encryption_keys=encryption_keys)
    else:
        params = ProductParams.escrow(bound=plan.bound) if scored else CkksParams.escrow(bound=plan.bound)
        fingerprint, trust = _holder(folder, encryption_keys)
    agreement = _agreement(plan, start, session=session, server=server, banks=banks, params=params, trust=trust, rule=rule)
    deployment = Deployment(
        name=plan.name,
        engine=plan.engine,
        banks=tuple(banks),
        host=plan.host,
        port=plan.port,
        min_clients=plan.min_clients,
        rounds=plan.rounds,
        key_holder=isinstance(trust, EscrowTrust),
        key=fingerprint,
        made=time.time(),
        versions=versions_here(plan.engine),
    )
    for name in (SERVER, *deployment.parties):
        create(folder / name / AGREEMENT, encode_agreement(agreement).encode())
        deployment.save(folder / name)
        create(folder / name / PARTY, f"{name}\n".encode())
    for name in banks:
        create(folder / name / SITE, plan.site.read_bytes())
    if plan.rule is not None:
        for name in deployment.parties:
            create(folder / name / RULE, plan.rule.read_bytes())
    return deployment


def _agreement(plan: Plan, start: PlainVector, *, banks: Mapping[str, PublicIdentity], server: PublicIdentity, **terms: Any) -> Agreement:
    return Agreement(
        roster=Roster(server=server, clients=tuple(banks.values())),
        layout=start.layout,
        start=start.digest,
        weights=plan.banks,
        policy=OpeningPolicy(min_clients=plan.min_clients, max_share=plan.max_share),
        validator=plan.reference,
        noise_energy=plan.noise_energy,
        populations={name: name for name in banks} if plan.ledgers else {},
        **terms,
    )


def _identities(plan: Plan, folder: Path) -> tuple[PublicIdentity, dict[str, PublicIdentity], dict[str, bytes]]:
    if plan.roster is None:
        server = create_server(folder / SERVER, name=SERVER)
        members = [Party.create(folder / name, name=name).public for name in plan.banks]
    else:
        pinned = PinnedRoster.load(plan.roster)
        if pinned.server.name != SERVER or {member.name for member in pinned.members} != set(plan.banks):
            raise DeploymentError(
                f"the roster must name the server {SERVER!r} and the banks of the plan, and names others; nothing was done"
            )
        server, members = pinned.server, list(pinned.members)
        for name in (SERVER, *plan.banks):
            make_folder(folder / name)
    return server, {each.name: each.identity for each in members}, {each.name: each.encryption_key for each in members}


def _holder(folder: Path, encryption_keys: dict[str, bytes]) -> tuple[str, Trust]:
    make_folder(folder / KEY_HOLDER)
    identity, key = Identity.generate(KEY_HOLDER), EscrowKey.generate()
    identity.save(folder / KEY_HOLDER / IDENTITY)
    key.save(folder / KEY_HOLDER / ESCROW_KEY)
    return key.fingerprint, EscrowTrust(holder=identity.public, encryption_keys=encryption_keys)
