"""Federations that are set up wrongly, each in one way: the audit or the report finds it, and nothing where all is right."""

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import privfed.keyholder
from privfed.attacks.adversary import CLIENT_WITH_SERVER, KEY_HOLDER, OTHER_CLIENT, OUTSIDER, SERVER, Form
from privfed.attacks.imprinting import imprint
from privfed.attacks.record import EncryptedRecord
from privfed.audit import run
from privfed.audit.canaries import Canaries
from privfed.audit.findings import Audit, Finding, Measured
from privfed.audit.limits import Limits
from privfed.audit.rounds import hold_canary_round
from privfed.audit.run import run_audit
from privfed.audit.suite import DEEPER, SUITE, PickAttack
from privfed.consortium import Consortium
from privfed.data.samples import Samples
from privfed.engines.local import Simulation
from privfed.errors import AgreementMismatchError, OpeningRefusedError, UnsupportedModelError
from privfed.he.codec import gather, unpack_words
from privfed.he.escrow_secret import EscrowKey
from privfed.he.params import CkksParams
from privfed.he.threshold_key import ThresholdKey
from privfed.history import History
from privfed.policy import OpeningPolicy
from privfed.report.advice import advice
from privfed.report.checks import Check, audit_checks
from privfed.report.model import Report
from privfed.report.summary import verdict
from privfed.training.mechanism import TrainingMechanism
from privfed.training.model import load_values, mlp, values_of
from privfed.update import PlainVector
from tests.consortia import COLUMNS, OPEN, PRIVATE, SCHEMA, consortium, network
from tests.engines.conftest import table
from tests.test_session import Bank

Make = Callable[..., Consortium]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    with ExitStack() as stack:
        yield lambda **options: consortium(stack, tmp_path_factory.mktemp("ledgers"), **options)


def audited(banks: Consortium, model: nn.Module | None = None, **options: Any) -> Audit:
    options = {"repeats": 2, "attacks": SUITE[:1], "rng": np.random.default_rng(0)} | options
    return run_audit(banks, network() if model is None else model, schema=SCHEMA, **options)


def claim(audit: Audit, words: str) -> Check:
    (found,) = [check for check in audit_checks(audit) if words in check.claim]
    return found


def faults(audit: Audit) -> str:
    return "; ".join(str(one) for one in Limits(require_as_declared=True).check(audit, None))  # type: ignore[arg-type] # not looked at


# -- a secret key at the server --------------------------------------------------------------------------------------------------


@pytest.fixture(params=["the shared key", "the key of the round"])
def key_at_server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves a key in a file of the server's folder, inside of other bytes."""

    def hold(*arguments: Any, **options: Any) -> Any:
        record = hold_canary_round(*arguments, **options)
        if not isinstance(record, EncryptedRecord):
            return record
        key = record.keys._secret if request.param == "the shared key" else record._round_key._ring_key.words().tobytes()
        return replace(record, stored=dict(record.stored) | {"context.bin": b"public part" + key + b"end"})

    monkeypatch.setattr(run, "hold_canary_round", hold)


def test_a_secret_key_in_the_folder_of_the_server_is_found_and_used(make: Make, key_at_server: None) -> None:
    audit = audited(make(training=OPEN))
    (finding,) = audit.of(SERVER.name)
    assert isinstance(finding.outcome, Measured)
    assert finding.outcome.certified > 2
    assert finding.reads_records
    assert Form.KEY in {holding.form for holding in audit.holdings[SERVER.name]}
    assert Form.OPENABLE in {holding.form for holding in audit.holdings[SERVER.name]}
    assert not any(holding.form is Form.KEY for holding in audit.holdings[OUTSIDER.name])
    check = claim(audit, "No key lies")
    assert check.holds is False
    assert "context.bin" in check.evidence
    assert "the secret key, in context.bin" in faults(audit)


def test_a_secret_key_at_the_server_is_found_where_noise_hides_the_records_all_the_same(make: Make, key_at_server: None) -> None:
    audit = audited(make())
    assert not audit.of(SERVER.name)[0].reads_records
    assert claim(audit, "No key lies").holds is False


def test_no_key_is_found_at_the_server_of_a_federation_that_is_set_up_right(make: Make) -> None:
    audit = audited(make())
    assert claim(audit, "No key lies").holds is True
    assert claim(audit, "rounded to the grid").holds is True
    assert faults(audit) == ""
    assert json.loads(json.dumps(audit.to_json()))["opening"]["fault"] is None


TRUST: dict[str, Callable[[], dict[str, Any]]] = {
    "EscrowKey": lambda: {"keys": EscrowKey.generate(), "params": CkksParams.escrow()},
    "ThresholdKey": lambda: {"keys": ThresholdKey(clients=3, corrupted=0, dropouts=0), "params": CkksParams.threshold(clients=3)},
}


@pytest.mark.parametrize("mode", TRUST)
def test_nothing_is_found_where_no_client_holds_a_key_and_all_is_right(make: Make, mode: str) -> None:
    audit = audited(make(training=OPEN, **TRUST[mode]()))
    assert audit.mode == mode
    assert claim(audit, "No key lies").holds is True
    assert claim(audit, "rounded to the grid").holds is True
    assert audit.opening is not None
    assert "no client holds the key" in audit.opening.words


def test_the_key_of_the_key_holder_in_the_folder_of_the_server_is_found_and_used(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def hold(*arguments: Any, **options: Any) -> Any:
        record = hold_canary_round(*arguments, **options)
        if not isinstance(record, EncryptedRecord) or not isinstance(record.keys, EscrowKey):
            return record
        return replace(record, stored=dict(record.stored) | {"backup/key.bin": b"x" + record.keys._secret})

    monkeypatch.setattr(run, "hold_canary_round", hold)
    audit = audited(make(training=OPEN, **TRUST["EscrowKey"]()))
    assert audit.of(SERVER.name)[0].reads_records
    assert "backup/key.bin" in claim(audit, "No key lies").evidence


# -- openings with their noise ---------------------------------------------------------------------------------------------------


@pytest.fixture
def unrounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that publish decryptions as CKKS gives them."""

    def open_sum(vector: Any, round_key: Any, *, coefficients: Any) -> Any:
        ring_key, params = round_key._ring_key, vector.params
        rows = [unpack_words(chunk, params) for chunk in vector.chunks]
        degree, whole = params.poly_modulus_degree, 2 * params.poly_modulus_degree
        raw = [
            gather(ring_key.decrypt_unrounded(row), params) if row.size == whole else ring_key.decrypt_cut(row[:-degree], row[-degree:])
            for row in rows
        ]
        return np.concatenate(raw)[: vector.layout.size] / 2**params.guard_bits

    monkeypatch.setattr(privfed.keyholder, "open_sum", open_sum)


def wide() -> nn.Module:
    """A model of more than two ciphertexts."""
    torch.manual_seed(0)
    return mlp(SCHEMA.width, hidden=(128, 64))


def test_openings_with_their_noise_are_found_and_the_key_is_computed_from_them(make: Make, unrounded: None) -> None:
    audit = audited(make(), wide(), attacks=[])
    assert audit.opening is not None
    assert audit.opening.recovered
    check = claim(audit, "rounded to the grid")
    assert check.holds is False
    assert "the key was recovered" in check.evidence
    assert "the key was recovered" in faults(audit)


def test_openings_with_their_noise_are_found_where_one_ciphertext_is_too_little_for_the_key(make: Make, unrounded: None) -> None:
    audit = audited(make(), attacks=[])
    assert audit.opening is not None
    assert not audit.opening.recovered
    assert "carry noise of the decryption" in claim(audit, "rounded to the grid").evidence
    assert claim(audit, "rounded to the grid").holds is False


def test_from_rounded_openings_of_the_same_model_no_key_follows(make: Make) -> None:
    audit = audited(make(), wide(), attacks=[])
    assert audit.opening is not None
    assert audit.opening.fault == ""
    assert "the noise is not in what was published" in audit.opening.words


# -- one client that dominates ---------------------------------------------------------------------------------------------------


def weighted(make: Make, *weights: float, **options: Any) -> Consortium:
    banks = make(count=len(weights), **options)
    clients = [replace(client, weight=weight) for client, weight in zip(banks.clients, weights, strict=True)]
    return replace(banks, clients=clients)


def run_of(banks: Consortium) -> History:
    with Simulation(banks, network()) as simulation:
        return simulation.run(rounds=1)


def test_a_client_that_dominates_is_refused_by_the_default_policy_and_named_in_the_report_of_a_lax_one(make: Make) -> None:
    with pytest.raises(OpeningRefusedError, match="one client would be more than 75%"):
        run_of(weighted(make, 20, 1, 1))
    lax = weighted(make, 20, 1, 1, policy=OpeningPolicy(max_share=0.95))
    report = Report(title="a run", history=run_of(lax))
    (point,) = [point for point in advice(report) if point.lead == "Even out the weights."]
    assert "of 3 clients, is worth one of 1.2 with equal weight" in point.text
    even = Report(title="a run", history=run_of(make()))
    assert not [point for point in advice(even) if point.lead == "Even out the weights."]


def test_canary_rounds_have_the_heaviest_client_of_the_consortium_so_that_the_audit_shows_what_its_weight_does(make: Make) -> None:
    def bound(banks: Consortium) -> float:
        (picks,) = audited(banks, attacks=[PickAttack()]).of(KEY_HOLDER.name)
        assert isinstance(picks.outcome, Measured)
        assert picks.outcome.bound is not None
        return picks.outcome.bound

    alone = audited(make(), attacks=[PickAttack()]).of(CLIENT_WITH_SERVER.name)[0].outcome
    assert isinstance(alone, Measured)
    assert alone.bound is not None
    even = bound(make())
    dominated = bound(weighted(make, 20, 1, 1, policy=OpeningPolicy(max_share=0.95)))
    # The others' noise no longer counts for much: a sum that one client dominates is nearly its update.
    assert even < alone.bound - 0.1
    assert dominated == pytest.approx(alone.bound, abs=0.01)


# -- so few records or clients that a sum hides nothing ---------------------------------------------------------------------------


def test_steps_over_single_records_are_audited_with_as_few_because_a_sum_of_more_could_not_be_read(make: Make) -> None:
    spear = [attack for attack in DEEPER if attack.name == "records, all of a batch together"]

    def key_holder(batch_size: int) -> Finding:
        audit = audited(make(training=replace(OPEN, batch_size=batch_size)), attacks=spear)
        assert audit.rows == min(4, batch_size)
        (finding,) = audit.of(KEY_HOLDER.name)
        return finding

    assert key_holder(1).reads_records
    assert not key_holder(16).reads_records


def test_where_the_policy_opens_sums_of_two_each_reads_the_other(make: Make) -> None:
    def other(least: int) -> Finding:
        audit = audited(make(training=OPEN, policy=OpeningPolicy(min_clients=least)))
        assert audit.clients == least
        return audit.of(OTHER_CLIENT.name)[0]

    assert isinstance(two := other(2).outcome, Measured)
    assert two.certified > 2
    assert isinstance(three := other(3).outcome, Measured)
    assert three.certified < two.certified


# -- a model that the server has changed -----------------------------------------------------------------------------------------


def test_a_client_refuses_a_model_that_the_server_has_changed_before_it_trains_on_it(tmp_path: Path) -> None:
    bank = Bank(tmp_path)
    changed = copy.deepcopy(bank.model)
    with torch.no_grad():
        next(iter(changed.parameters()))[0] += 1e-3
    start = values_of(changed)
    assert isinstance(start, PlainVector)
    with bank.ledger() as ledger:
        with pytest.raises(AgreementMismatchError, match="another start than the agreement names"):
            bank.session(ledger, start=start, trainer=bank.trainer(ledger, start=start))
        assert not bank.trained
        assert not ledger.events()
        bank.session(ledger).upload(bank.round())
    assert len(bank.trained) == 1


@pytest.mark.parametrize("training", [OPEN, PRIVATE], ids=["in the clear", "under DP-SGD"])
def test_no_client_trains_on_an_agreed_model_that_was_made_to_read_records(make: Make, training: TrainingMechanism) -> None:
    banks = make(training=training)
    public = Canaries.draw(SCHEMA, count=500, rng=np.random.default_rng(0)).rows
    made = network()
    load_values(made, imprint(values_of(made), public, rng=np.random.default_rng(0)))
    with pytest.raises(UnsupportedModelError, match="'bank_0' would train looks as if it were made to read records"):
        Simulation(banks, made)
    assert not any(client.ledger.events() for client in banks.clients if client.ledger is not None)
    assert run_of(banks).rounds


def test_trap_weights_are_refused_where_nothing_else_hides_the_records_and_not_looked_for_where_a_refusal_would_be_a_disclosure(
    make: Make,
) -> None:
    trapped = network()
    with torch.no_grad():
        first = next(iter(trapped.parameters()))
        rows = Canaries.draw(SCHEMA, count=400, rng=np.random.default_rng(0)).samples(COLUMNS)
        projections = torch.tensor(rows.features) @ first.T
        dict(trapped.named_parameters())["0.bias"].copy_(-projections.quantile(0.996, dim=0))
    with pytest.raises(UnsupportedModelError, match="fire for hardly any record"):
        Simulation(with_data(make(training=OPEN), rows), trapped)
    with Simulation(with_data(make(), rows), trapped):
        pass


def with_data(banks: Consortium, data: Samples) -> Consortium:
    return replace(banks, clients=[replace(client, data=data) for client in banks.clients])


def test_a_model_that_other_clients_bent_in_a_later_round_is_refused_before_it_is_charged(tmp_path: Path) -> None:
    bank = Bank(tmp_path)
    bank.model = mlp(inputs=4, hidden=(16, 4))
    bank.start = values_of(bank.model)
    rows = table(500, seed=0).features.astype(np.float64)
    bent = imprint(bank.start, rows, rng=np.random.default_rng(0))
    with bank.ledger() as ledger:
        trainer = bank.trainer(ledger)
        with pytest.raises(UnsupportedModelError, match="nothing was trained or charged"):
            trainer.train(bent, session=b"session of banks", round=1, attempt=0)
        assert not ledger.events()
        assert not bank.trained
        trainer.train(bank.start, session=b"session of banks", round=1, attempt=0)
        assert len(ledger.events()) == 1


def test_the_report_of_a_wrong_set_up_says_so_first(make: Make, key_at_server: None) -> None:
    banks = make()
    report = Report(title="a run", history=run_of(banks), audit=audited(banks))
    assert verdict(report).lead == "Not all that is claimed holds"
    assert "No key lies" in verdict(report).text
