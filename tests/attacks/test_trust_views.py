"""What each party holds after a round in the trust modes without a shared key."""

from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from privfed.attacks.adversary import ADVERSARIES, ESCROW_KEY_ADVERSARIES, OUTSIDER, SERVER, Adversary, Form
from privfed.attacks.analytic import analytic
from privfed.attacks.observation import CiphertextOnly, NotApplicable, Reconstruction
from privfed.attacks.record import EncryptedRecord
from privfed.attacks.scoring import check_certificates
from privfed.attacks.views import RoundFacts, view
from privfed.audit.canaries import Canaries
from privfed.audit.rounds import Setting, facts, hold_canary_round
from privfed.audit.run import run_audit
from privfed.audit.suite import SUITE
from privfed.errors import DecryptionError, InvalidMessageError
from privfed.he.escrow import RunningSum, SealedVector
from privfed.he.escrow_secret import EscrowKey
from privfed.he.params import CkksParams
from privfed.he.threshold_key import ThresholdKey
from privfed.training.loss import binary_cross_entropy
from privfed.training.mechanism import NonPrivate
from privfed.update import PlainVector
from privfed.wire import decode_upload
from tests.consortia import COLUMNS, OPEN, SCHEMA, consortium, network

NAMES = ("canary_1", "canary_2", "canary_3")
SGD = NonPrivate(learning_rate=0.05, batch_size=4, steps=1, seed=0)
MODES = {
    "ThresholdKey": {"keys": ThresholdKey(clients=4, corrupted=0, dropouts=1), "params": CkksParams.threshold(clients=4)},
    "EscrowKey": {"keys": EscrowKey.generate(), "params": CkksParams.escrow()},
}


@pytest.fixture(scope="module")
def canaries() -> dict[str, Canaries]:
    rng = np.random.default_rng(3)
    return {name: Canaries.draw(SCHEMA, count=4, rng=rng) for name in NAMES}


@pytest.fixture(scope="module")
def records(canaries: dict[str, Canaries], tmp_path_factory: pytest.TempPathFactory) -> dict[str, EncryptedRecord]:
    found: dict[str, EncryptedRecord] = {}
    with ExitStack() as stack:
        for mode, options in MODES.items():
            banks = consortium(stack, tmp_path_factory.mktemp(mode), training=OPEN, count=4, **options)
            record = hold_canary_round(banks, network(), Setting(training=SGD, encrypted=True), canaries, columns=COLUMNS)
            assert isinstance(record, EncryptedRecord)
            assert record.context.agreement.mode == mode
            found[mode] = record
    return found


@pytest.fixture(scope="module")
def known(canaries: dict[str, Canaries]) -> RoundFacts:
    return facts(Setting(training=SGD, encrypted=True), network(), loss=binary_cross_entropy, canaries=canaries["canary_1"])


CASES = [(mode, adversary) for mode in MODES for adversary in ADVERSARIES[mode]]


@pytest.mark.parametrize(("mode", "adversary"), CASES, ids=[f"{mode}: {adversary.name}" for mode, adversary in CASES])
def test_each_party_sees_what_its_row_says_and_no_single_update_but_for_the_key_holder(
    records: dict[str, EncryptedRecord], known: RoundFacts, mode: str, adversary: Adversary
) -> None:
    record = records[mode]
    seen = view(record, known, adversary, target="canary_1", insider="canary_2")
    updates = {name: record.update_of(name).values for name in NAMES}
    step = record.params.step
    if adversary.holds_key:
        assert adversary == ESCROW_KEY_ADVERSARIES[-1]
        expected, clients = updates["canary_1"], ("canary_1",)
    elif adversary.trains:
        clients = ("canary_1", "canary_3")
        expected = np.mean([updates[name] for name in clients], axis=0)
    elif adversary.gets_model:
        clients = NAMES
        expected = np.mean([updates[name] for name in clients], axis=0)
    else:
        assert isinstance(seen.observation.seen, CiphertextOnly)
        assert mode == "EscrowKey"
        return
    assert isinstance(seen.observation.seen, PlainVector)
    assert seen.clients == clients
    assert np.abs(seen.observation.seen.values - expected).max() < step


PARTS_OF_CLIENTS = (("setup message of", ""), ("commitment of", " to its upload"), ("approval of", ""))
PUBLIC = [
    "agreed terms: parties, weights, shape of the model, policy",
    "announcement of who takes part, with which coefficients",
    "name of the round's key, not the key",
]
HOLDS = {
    "ThresholdKey": {
        Form.PUBLIC: PUBLIC,
        Form.CIPHERTEXT: [
            *(f"encrypted update of {name}" for name in NAMES),
            *(f"shares of {name}, each encrypted to one client" for name in NAMES),
        ],
        Form.OPENABLE: ["sum, with the answers of a quorum that open it"],
        Form.NUMBERS: [
            *(f"approval of {name}, with its part in opening the sum" for name in NAMES),
            "the model before and after the round, and so the opened sum",
        ],
        Form.OWN: ["its own signing key"],
    },
    "EscrowKey": {
        Form.PUBLIC: [
            *PUBLIC,
            "commitments of all clients, as they were relayed",
            "public keys of the key holder for this attempt",
            "request to the key holder, with all approvals",
            *(f"{what} {name}{end}" for name in NAMES for what, end in PARTS_OF_CLIENTS),
        ],
        Form.CIPHERTEXT: [*(f"encrypted update of {name}" for name in NAMES), "opened sum, encrypted to the clients"],
        Form.OWN: ["its own signing key"],
    },
}


@pytest.mark.parametrize("mode", MODES)
def test_the_server_holds_what_is_on_this_list_and_nothing_else(records: dict[str, EncryptedRecord], known: RoundFacts, mode: str) -> None:
    record = records[mode]
    seen = view(record, known, ADVERSARIES[mode][0], target="canary_1", insider="canary_2")
    by_form = {form: sorted(holding.what for holding in seen.holdings if holding.form is form) for form in Form}
    assert by_form == {form: sorted(HOLDS[mode].get(form, [])) for form in Form}
    stored = [holding.size for holding in seen.holdings if not holding.what.startswith(("agreed terms", "the model before"))]
    assert sorted(stored) == sorted(len(data) for data in record.stored.values())


@pytest.mark.parametrize("blind", [SERVER, OUTSIDER])
def test_who_holds_no_key_of_the_attempt_gets_nothing_and_reads_the_records_as_soon_as_it_has_it(
    records: dict[str, EncryptedRecord], known: RoundFacts, canaries: dict[str, Canaries], blind: Adversary
) -> None:
    sides = {"target": "canary_1", "insider": "canary_2"}
    assert isinstance(analytic(view(records["EscrowKey"], known, blind, **sides).observation), NotApplicable)
    found = analytic(view(records["EscrowKey"], known, replace(blind, holds_key=True), **sides).observation)
    assert isinstance(found, Reconstruction)
    check = check_certificates(found, canaries["canary_1"].rows, schema=SCHEMA, tolerance=1e-2)
    assert check.certified >= 3
    assert check.false == 0


def test_a_key_of_one_attempt_among_the_servers_files_is_found_and_opens_that_attempt_alone(
    records: dict[str, EncryptedRecord], known: RoundFacts
) -> None:
    record = records["EscrowKey"]
    assert isinstance(record.keys, EscrowKey)
    other = replace(record.context, attempt=1)
    right, wrong = (record.keys.attempt_key(binding=context.digest, params=record.params) for context in (record.context, other))
    assert not record.key_at_server
    for key, found in ((right, True), (wrong, False)):
        sealing = replace(record, stored=dict(record.stored) | {"spool/notes.bin": b"x" + key._sealing_key.private_bytes_raw()})
        left = replace(record, stored=dict(record.stored) | {"spool/notes.bin": b"x" + key._ring_key.words().tobytes()})
        if found:
            assert sealing.key_at_server
            assert left.key_at_server
            seen = view(left, known, SERVER, target="canary_1", insider="canary_2")
            assert isinstance(analytic(seen.observation), Reconstruction)
        else:
            # It is no key of this round, and no message either: that it is there is not passed over.
            with pytest.raises(ValueError, match="expected only messages"):
                _ = left.key_at_server
    upload = decode_upload(record._message("upload-canary_1"), record.context, record._key_id).vector
    assert isinstance(upload, SealedVector)
    total = RunningSum(layout=upload.layout, params=record.params, key_id=record._key_id)
    total.add(1, right.unseal(upload, sender="canary_1"))
    with pytest.raises(InvalidMessageError):
        wrong.unseal(upload, sender="canary_1")
    opened = right.open_sum(total.total(), coefficients=(1,)) * record.params.step
    np.testing.assert_array_equal(opened, record.update_of("canary_1").values)
    with pytest.raises(DecryptionError):
        wrong.open_sum(total.total(), coefficients=(1,))


@pytest.mark.parametrize("mode", ["SharedKey", *MODES])
def test_the_same_attacks_read_records_wherever_a_party_holds_an_opening_and_nowhere_else(
    mode: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """One record for each client, so that whoever has the sum has few enough."""
    with ExitStack() as stack:
        banks = consortium(stack, tmp_path_factory.mktemp(mode), training=OPEN, count=4, **MODES.get(mode, {}))
        audit = run_audit(banks, network(), schema=SCHEMA, repeats=3, rows=1, attacks=SUITE[:2], rng=np.random.default_rng(0))
    for adversary in ADVERSARIES[mode]:
        blind = not adversary.gets_model and not adversary.holds_key
        for finding in audit.of(adversary.name):
            assert isinstance(finding.outcome, NotApplicable) is blind
            assert finding.reads_records is not blind
            # The planted positive: the same attacks on the same kind of round, with the key where the party has none.
            control = audit.control_of(adversary.name)
            assert control is not None
            assert control.reads_records
    blinds = {adversary.name for adversary in ADVERSARIES[mode] if not adversary.gets_model and not adversary.holds_key}
    assert blinds == (set() if mode == "ThresholdKey" else {SERVER.name, OUTSIDER.name})


@pytest.mark.parametrize("mode", MODES)
def test_an_audit_attacks_the_parties_of_the_mode(mode: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    with ExitStack() as stack:
        banks = consortium(stack, tmp_path_factory.mktemp(mode), training=OPEN, count=4, **MODES[mode])
        audit = run_audit(banks, network(), schema=SCHEMA, repeats=2, rows=2, attacks=SUITE[:1], rng=np.random.default_rng(0))
    assert audit.mode == mode
    assert set(audit.parties) == {adversary.name for adversary in ADVERSARIES[mode]}
