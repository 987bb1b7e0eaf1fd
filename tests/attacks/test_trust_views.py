"""What each party holds after a round in the trust modes without a shared key."""

from contextlib import ExitStack

import numpy as np
import pytest

from privfed.attacks.adversary import ADVERSARIES, ESCROW_KEY_ADVERSARIES, SERVER, THRESHOLD_KEY_ADVERSARIES, Adversary, Form
from privfed.attacks.observation import CiphertextOnly
from privfed.attacks.record import EncryptedRecord
from privfed.attacks.views import RoundFacts, view
from privfed.audit.canaries import Canaries
from privfed.audit.rounds import Setting, facts, hold_canary_round
from privfed.audit.run import run_audit
from privfed.audit.suite import SUITE
from privfed.he.escrow_secret import EscrowKey
from privfed.he.params import CkksParams
from privfed.he.threshold_key import ThresholdKey
from privfed.training.loss import binary_cross_entropy
from privfed.training.mechanism import NonPrivate
from privfed.update import PlainVector
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


def test_the_server_of_a_threshold_round_holds_what_opens_the_sum_and_no_key(
    records: dict[str, EncryptedRecord], known: RoundFacts
) -> None:
    seen = view(records["ThresholdKey"], known, THRESHOLD_KEY_ADVERSARIES[0], target="canary_1", insider="canary_2")
    by_form = {form: sorted(holding.what for holding in seen.holdings if holding.form is form) for form in Form}
    assert by_form[Form.OPENABLE] == ["sum, with the answers of a quorum that open it"]
    assert by_form[Form.CIPHERTEXT] == [
        *(f"encrypted update of {name}" for name in NAMES),
        *(f"shares of {name}, each encrypted to one client" for name in NAMES),
    ]
    assert by_form[Form.OWN] == ["its own signing key"]


def test_the_server_of_an_escrow_round_holds_ciphertexts_and_names_alone(records: dict[str, EncryptedRecord], known: RoundFacts) -> None:
    seen = view(records["EscrowKey"], known, SERVER, target="canary_1", insider="canary_2")
    by_form = {form: sorted(holding.what for holding in seen.holdings if holding.form is form) for form in Form}
    assert by_form[Form.NUMBERS] == by_form[Form.OPENABLE] == []
    assert by_form[Form.CIPHERTEXT] == [*(f"encrypted update of {name}" for name in NAMES), "opened sum, encrypted to the clients"]


@pytest.mark.parametrize("mode", MODES)
def test_an_audit_attacks_the_parties_of_the_mode(mode: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    with ExitStack() as stack:
        banks = consortium(stack, tmp_path_factory.mktemp(mode), training=OPEN, count=4, **MODES[mode])
        audit = run_audit(banks, network(), schema=SCHEMA, repeats=2, rows=2, attacks=SUITE[:1], rng=np.random.default_rng(0))
    assert audit.mode == mode
    assert set(audit.parties) == {adversary.name for adversary in ADVERSARIES[mode]}
