"""Folders as `privfed deploy init` writes them, for rules other than FedAvg, beside the same run in `engines.local`."""

import subprocess
import sys
import textwrap
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from privfed.aggregation.rules import MultiKrum
from privfed.agreement import NamedRule, Validator
from privfed.contribution.trajectory import FedTsv
from privfed.deploy.check import party_problems
from privfed.deploy.deployment import Deployment
from privfed.deploy.parties import make_parties
from privfed.deploy.plan import Plan
from privfed.errors import DeploymentError, UnsupportedInThisModeError
from privfed.keys.load import load_escrow_key, load_shared_key
from privfed.written_agreement import decode_agreement
from tests.engines.beside_local import check_same_as_local
from tests.engines.deployed import HOLDER, MODEL, SERVER, Deployed

ROUNDS = 2
SITE = """
    from dataclasses import replace

    NAME = Path(__file__).parent.name
    INDEX = int(NAME[-1]) if NAME[-1].isdigit() else 0


    def client():
        data = features(generate_transactions(rows=300, fraud_rate=0.3, rng=np.random.default_rng(INDEX)), PRE)
        if INDEX == 4:
            data = replace(data, labels=1 - data.labels)
        return Client(NAME, data, training=NonPrivate(learning_rate=0.3, batch_size=50, steps=4, seed=INDEX))
"""
KRUM = """
    from privfed.aggregation.rules import MultiKrum

    def rule():
        return MultiKrum(byzantine=1, keep=3)
"""
TSV = """
    from privfed.contribution.trajectory import FedTsv

    def rule():
        return FedTsv()
"""
VALIDATOR = {"name": "bank_0", "commitment": "ab" * 32, "public": True}


def plan(folder: Path, *, rule: str = "", site: str = "", weights: tuple[float, ...] = 5 * (1.0,), **terms: Any) -> Plan:
    folder.mkdir(exist_ok=True)
    (folder / "site.py").write_text(textwrap.dedent(MODEL) + textwrap.dedent(SITE) + textwrap.dedent(site))
    if rule:
        (folder / "rule.py").write_text(textwrap.dedent(rule))
        terms |= {"rule": folder / "rule.py", "bound": 4.0}
    banks = {f"bank_{index}": weight for index, weight in enumerate(weights)}
    place: dict[str, Any] = {"engine": "flare", "host": "localhost", "port": 8002}
    return Plan(name="fraud", rounds=ROUNDS, site=folder / "site.py", banks=banks, ledgers=False, **place, **terms)


def made(folder: Path, **terms: Any) -> Deployed:
    """The folders of a plan, with the key that a test may hold beside them."""
    deployment = make_parties(plan(folder, **terms), folder / "parties")
    root = folder / "parties"
    agreement = decode_agreement((root / SERVER / "agreement.json").read_text())
    if deployment.key_holder:
        keys: Any = load_escrow_key(root / HOLDER / "escrow.key")
    else:
        keys = load_shared_key(root / "bank_0" / "shared.key", roster=root / "bank_0" / "roster.txt")
    return Deployed(root=root, agreement=agreement, keys=keys, names=deployment.banks)


@pytest.mark.parametrize("mode", ["SharedKey", "EscrowKey"])
def test_multi_krum_of_a_plan_leaves_the_bank_with_flipped_labels_out_as_in_the_local_engine(tmp_path: Path, mode: str) -> None:
    deployed = made(tmp_path / "plan", rule=KRUM, mode=mode)
    assert isinstance(deployed.agreement.rule, NamedRule)
    coefficients = check_same_as_local(deployed, tmp_path / "local", rounds=ROUNDS, exact=False, rule=MultiKrum(byzantine=1, keep=3))
    for each in coefficients:
        assert each["bank_4"] == 0
        assert sorted(each.values())[:3] == [0, 0, min(value for value in each.values() if value)]


@pytest.mark.parametrize("mode", ["SharedKey", "EscrowKey"])
def test_fedtsv_of_a_plan_scores_against_its_validator_as_in_the_local_engine(tmp_path: Path, mode: str) -> None:
    deployed = made(tmp_path / "plan", rule=TSV, mode=mode, validator=VALIDATOR)
    validator = Validator(name="bank_0", commitment=b"\xab" * 32, public=True)
    assert deployed.agreement.validator == validator
    coefficients = check_same_as_local(deployed, tmp_path / "local", rounds=ROUNDS, exact=False, rule=FedTsv(), validator=validator)
    for each in coefficients:
        assert each["bank_0"] == 0
        assert each["bank_4"] < min(each[name] for name in ("bank_1", "bank_2", "bank_3"))


def test_scaffold_in_the_site_file_of_a_plan_runs_as_in_the_local_engine(tmp_path: Path) -> None:
    site = """
    def correction():
        return Scaffold(clients=3)
    """
    deployed = made(tmp_path / "plan", site=site, weights=3 * (1.0,))
    check_same_as_local(deployed, tmp_path / "local", rounds=ROUNDS)
    (without := tmp_path / "without").mkdir()
    plain = made(without / "plan", weights=3 * (1.0,))
    check_same_as_local(plain, without / "local", rounds=ROUNDS)
    assert not np.array_equal(plain.state("bank_0").values.values, deployed.state("bank_0").values.values)


def test_everybody_but_the_server_has_the_rule_and_the_key_holder_needs_no_torch_for_it(tmp_path: Path) -> None:
    deployed = made(tmp_path / "plan", rule=KRUM, mode="EscrowKey")
    assert sorted(path.parent.name for path in deployed.root.rglob("rule.py")) == sorted([*deployed.names, HOLDER])
    program = f"""
        import sys
        from pathlib import Path
        sys.modules["torch"] = None
        from privfed.engines.node import Node
        with Node(Path({str(deployed.folder(HOLDER))!r})) as node:
            print(node.name)
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, f"{HOLDER}\n"), result.stderr


def test_a_rule_file_that_is_gone_or_another_is_found_by_the_check(tmp_path: Path) -> None:
    deployed = made(tmp_path / "plan", rule=KRUM, mode="EscrowKey")

    def found(name: str) -> list[str]:
        folder = deployed.folder(name)
        return party_problems(folder, Deployment.load(folder), name=name, now=datetime.now(UTC))

    for name in (*deployed.names, HOLDER, SERVER):
        assert found(name) == []
    (deployed.folder("bank_1") / "rule.py").unlink()
    assert found("bank_1") == ["rule.py is missing; copy it from another party, it is the same for all but the server"]
    for text, reason in ((KRUM.replace("keep=3", "keep=4"), "agree on one"), ("x = 1", "expected rule.py to define rule()")):
        (deployed.folder(HOLDER) / "rule.py").write_text(textwrap.dedent(text))
        (problem,) = found(HOLDER)
        assert problem.startswith("rule.py: ")
        assert reason in problem


def test_declared_noise_and_the_bound_of_a_plan_are_in_the_agreement(tmp_path: Path) -> None:
    agreement = made(tmp_path / "plan", rule=KRUM, noise_energy={"bank_1": 0.5}).agreement
    assert (dict(agreement.noise_energy), agreement.params.bound) == ({"bank_1": 0.5}, 4.0)


@pytest.mark.parametrize(
    ("terms", "error", "message"),
    [
        ({"rule": "x = 1"}, DeploymentError, r"rule\.py has no rule\(\)"),
        ({"rule": "def rule():\n    return 3"}, DeploymentError, r"rule\.py has no rule\(\)"),
        ({"rule": KRUM, "min_clients": 4}, UnsupportedInThisModeError, "would open a mean of 3, and the policy demands 4"),
        ({"rule": KRUM, "mode": "ThresholdKey"}, UnsupportedInThisModeError, "needs inner products of updates, which ThresholdKey"),
        ({"rule": TSV}, UnsupportedInThisModeError, "needs a reference, and there is no validator"),
        ({"validator": VALIDATOR}, ValueError, "expected no validator beside FedAvg"),
        ({"noise_energy": {"bank_0": 1.0}}, ValueError, "expected no noise_energy beside FedAvg"),
        (
            {"rule": "from privfed.aggregation.coordinatewise import CoordinateMedian\n\ndef rule():\n    return CoordinateMedian()"},
            UnsupportedInThisModeError,
            "needs to see every update",
        ),
        ({"site": "def correction():\n    return Scaffold(clients=4)"}, UnsupportedInThisModeError, "declared for 4 clients"),
        (
            {"site": "def correction():\n    return Scaffold(clients=5)", "mode": "ThresholdKey", "corrupted": 1},
            UnsupportedInThisModeError,
            "SCAFFOLD does not go with ThresholdKey",
        ),
        (
            {"site": "def correction():\n    return Scaffold(clients=2)", "weights": (1.0, 2.0), "min_clients": 2},
            UnsupportedInThisModeError,
            "the same weight for all",
        ),
    ],
)
def test_a_plan_whose_rule_could_never_be_followed_is_refused_and_nothing_is_left(
    tmp_path: Path, terms: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make_parties(plan(tmp_path, **terms), tmp_path / "parties")
    assert not (tmp_path / "parties").exists()


@pytest.mark.parametrize(
    ("validator", "message"),
    [
        ({"name": "bank_0", "public": True}, "expected of the validator a name"),
        ({"name": "bank_0", "commitment": "ab" * 32, "public": "yes"}, "public = true or false"),
        ({"name": "bank_0", "commitment": "ab" * 31, "public": True}, "64 hexadecimal digits"),
    ],
)
def test_a_validator_that_is_not_described_is_refused(tmp_path: Path, validator: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(tmp_path, validator=validator)


def test_a_plan_names_its_rule_beside_it_and_its_validator_in_a_table(tmp_path: Path) -> None:
    plan(tmp_path, rule=TSV)
    head = 'name = "fraud"\nengine = "flare"\nhost = "localhost"\nport = 1\nrounds = 1\nsite = "site.py"\nrule = "rule.py"\n'
    banks = "".join(f"bank_{index} = 1.0\n" for index in range(4))
    table = f'[validator]\nname = "bank_0"\ncommitment = "{"ab" * 32}"\npublic = true\n'
    (tmp_path / "fraud.toml").write_text(f"{head}[banks]\n{banks}{table}[noise_energy]\nbank_1 = 0.5\n")
    read = Plan.load(tmp_path / "fraud.toml")
    assert (read.rule, read.noise_energy) == (tmp_path / "rule.py", {"bank_1": 0.5})
    assert read.reference == Validator(name="bank_0", commitment=b"\xab" * 32, public=True)
    (tmp_path / "fraud.toml").write_text(f'{head}validator = "bank_0"\n[banks]\n{banks}')
    with pytest.raises(DeploymentError, match="validator must be a table"):
        Plan.load(tmp_path / "fraud.toml")
