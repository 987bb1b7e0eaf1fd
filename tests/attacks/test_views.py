from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from privfed.attacks.adversary import (
    CLIENT_WITH_SERVER,
    KEY_HOLDER,
    OTHER_CLIENT,
    OUTSIDER,
    PLAINTEXT_ADVERSARIES,
    SERVER,
    SHARED_KEY_ADVERSARIES,
    Adversary,
    Form,
)
from privfed.attacks.analytic import analytic
from privfed.attacks.observation import CiphertextOnly, NotApplicable, Reconstruction
from privfed.attacks.quotients import quotients
from privfed.attacks.record import EncryptedRecord, PlaintextRecord
from privfed.attacks.scoring import check_certificates
from privfed.attacks.views import RoundFacts, View, view
from privfed.audit.canaries import Canaries
from privfed.audit.rounds import Setting, facts, hold_canary_round
from privfed.errors import InvalidMessageError
from privfed.he.params import CkksParams
from privfed.training.loss import binary_cross_entropy
from privfed.training.mechanism import NonPrivate
from privfed.update import Aggregate, Layout, PlainVector
from tests.consortia import COLUMNS, OPEN, SCHEMA, consortium, network

NAMES = ("canary_1", "canary_2", "canary_3")
PLAIN_SGD = NonPrivate(learning_rate=0.05, batch_size=4, steps=1, seed=0)


@pytest.fixture(scope="module")
def canaries() -> dict[str, Canaries]:
    rng = np.random.default_rng(3)
    return {name: Canaries.draw(SCHEMA, count=4, rng=rng) for name in NAMES}


@pytest.fixture(scope="module")
def records(canaries: dict[str, Canaries], tmp_path_factory: pytest.TempPathFactory) -> tuple[EncryptedRecord, PlaintextRecord]:
    """The same round twice: encrypted and in the clear. Without noise both have the same updates, bit for bit."""
    with ExitStack() as stack:
        banks = consortium(stack, tmp_path_factory.mktemp("ledgers"), training=OPEN)
        encrypted, plain = (
            hold_canary_round(banks, network(), Setting(training=PLAIN_SGD, encrypted=flag), canaries, columns=COLUMNS)
            for flag in (True, False)
        )
    assert isinstance(encrypted, EncryptedRecord)
    assert isinstance(plain, PlaintextRecord)
    return encrypted, plain


@pytest.fixture(scope="module")
def known(canaries: dict[str, Canaries]) -> RoundFacts:
    setting = Setting(training=PLAIN_SGD, encrypted=True)
    return facts(setting, network(), loss=binary_cross_entropy, canaries=canaries["canary_1"])


def see(record: EncryptedRecord | PlaintextRecord, known: RoundFacts, adversary: Adversary) -> View:
    return view(record, known, adversary, target="canary_1", insider="canary_2")


def test_the_server_holds_these_files_and_nothing_else(records: tuple[EncryptedRecord, PlaintextRecord], known: RoundFacts) -> None:
    record, _ = records
    seen = see(record, known, SERVER)
    stored = [holding for holding in seen.holdings if not holding.what.startswith("agreed terms")]
    assert sorted(holding.size for holding in stored) == sorted(len(data) for data in record.stored.values())
    by_form = {form: sorted(holding.what for holding in seen.holdings if holding.form is form) for form in Form}
    assert by_form[Form.NUMBERS] == by_form[Form.OPENABLE] == []
    assert by_form[Form.OWN] == ["its own signing key"]
    assert by_form[Form.CIPHERTEXT] == ["encrypted sum, with all approvals", *(f"encrypted update of {name}" for name in NAMES)]
    assert len(by_form[Form.PUBLIC]) == 9  # terms, digest, name of the key, 3 setups, 3 approvals


@pytest.mark.parametrize("adversary", [SERVER, OUTSIDER])
def test_who_has_no_key_gets_no_number_to_work_on(
    records: tuple[EncryptedRecord, PlaintextRecord], known: RoundFacts, adversary: Adversary
) -> None:
    record, _ = records
    seen = see(record, known, adversary)
    ciphertexts = sum(len(data) for path, data in record.stored.items() if "/upload-" in path or path.endswith("/aggregate"))
    assert seen.observation.model is None
    assert seen.observation.seen == CiphertextOnly(bytes_seen=ciphertexts)
    assert all(isinstance(attack(seen.observation), NotApplicable) for attack in (analytic, quotients))


def test_no_stretch_of_an_update_or_model_stands_in_what_the_server_holds(records: tuple[EncryptedRecord, PlaintextRecord]) -> None:
    """Two neighbouring weights as they would be written down; the plaintext record shows that the search finds them."""
    encrypted, plain = records

    def found(haystack: bytes) -> bool:
        vectors = [encrypted.start, encrypted.opened.vector, *(encrypted.update_of(name) for name in NAMES)]
        grids = [np.rint(vector.values / encrypted.params.step).astype(np.int64) for vector in vectors]
        as_written = [
            array[start : start + 2].tobytes()
            for array in (*(v.values for v in vectors), *(v.values.astype(np.float32) for v in vectors), *grids)
            for start in range(0, len(array) - 2, 97)
            if array[start] and array[start + 1]
        ]
        return any(needle in haystack for needle in as_written)

    assert not found(b"".join(encrypted.stored.values()))
    assert found(b"noise" + plain.update_of("canary_3").values.tobytes())


def test_the_outsider_sees_the_servers_messages_but_not_its_files(
    records: tuple[EncryptedRecord, PlaintextRecord], known: RoundFacts
) -> None:
    server, outsider = (see(records[0], known, adversary).holdings for adversary in (SERVER, OUTSIDER))
    assert set(outsider) < set(server)
    kept = {holding.what for holding in set(server) - set(outsider)}
    assert kept == {
        "its own signing key",
        "name of the round's key, not the key",
        "agreed terms: parties, weights, shape of the model, policy",
    }


def test_a_file_that_no_message_accounts_for_is_not_passed_over(records: tuple[EncryptedRecord, PlaintextRecord]) -> None:
    for name in ("spool/round/notes.txt", "spool/round/plain_update", "spool/round/key"):
        with pytest.raises(ValueError, match="expected only messages"):
            _ = replace(records[0], stored={**records[0].stored, name: b"?" * 16}).files


def test_a_file_that_is_not_the_message_it_is_called_is_not_passed_over(records: tuple[EncryptedRecord, PlaintextRecord]) -> None:
    record, _ = records
    path = next(path for path in record.stored if path.endswith("upload-canary_1"))
    damaged = bytearray(record.stored[path])
    damaged[-100] ^= 1
    with pytest.raises(InvalidMessageError):
        _ = replace(record, stored={**record.stored, path: bytes(damaged)}).files


def test_a_client_with_the_server_opens_every_update_bit_for_bit(
    records: tuple[EncryptedRecord, PlaintextRecord], known: RoundFacts, canaries: dict[str, Canaries]
) -> None:
    encrypted, plain = records
    for name in NAMES:
        assert np.array_equal(encrypted.update_of(name).values, plain.update_of(name).values)
    seen = see(encrypted, known, CLIENT_WITH_SERVER)
    assert isinstance(seen.observation.seen, PlainVector)
    assert np.array_equal(seen.observation.seen.values, plain.update_of("canary_1").values)
    assert {holding.form for holding in seen.holdings} >= {Form.OPENABLE}
    assert Form.CIPHERTEXT not in {holding.form for holding in seen.holdings}
    found = analytic(seen.observation)
    assert isinstance(found, Reconstruction)
    check = check_certificates(found, canaries["canary_1"].rows, schema=SCHEMA, tolerance=1e-2)
    assert check.certified >= 3
    assert check.false == 0


@pytest.mark.parametrize("blind", [SERVER, OUTSIDER])
def test_the_same_view_with_the_key_given_reads_the_rows(
    records: tuple[EncryptedRecord, PlaintextRecord], known: RoundFacts, blind: Adversary
) -> None:
    seen = see(records[0], known, replace(blind, holds_key=True))
    found = analytic(seen.observation)
    assert isinstance(found, Reconstruction)
    assert found.certified.sum() >= 3


def test_whoever_opens_sees_the_sum_and_another_client_takes_its_own_out(
    records: tuple[EncryptedRecord, PlaintextRecord], known: RoundFacts
) -> None:
    for record in records:
        opened, others = see(record, known, KEY_HOLDER), see(record, known, OTHER_CLIENT)
        assert opened.clients == NAMES
        assert others.clients == ("canary_1", "canary_3")
        assert isinstance(others.observation.seen, PlainVector)
        mean = (record.update_of("canary_1").values + record.update_of("canary_3").values) / 2
        # Grid sums are integers below 2^53 and are divided once, here after and there before the sum.
        assert np.abs(others.observation.seen.values - mean).max() <= 2.0**-50
        assert np.array_equal(opened.observation.seen.values, record.opened.vector.values)


def test_taking_its_own_out_respects_the_weights() -> None:
    layout = Layout(names=("w",), shapes=((50,),))
    params = CkksParams.standard()
    rng = np.random.default_rng(1)
    updates = {name: PlainVector(layout=layout, values=rng.integers(-1000, 1000, 50) * params.step) for name in NAMES}
    coefficients = dict(zip(NAMES, (5, 2, 1), strict=True))
    total = sum(coefficient * updates[name].values for name, coefficient in coefficients.items())
    opened = Aggregate(round=0, vector=PlainVector(layout=layout, values=total / 8), coefficients=coefficients)
    record = PlaintextRecord(params=params, start=PlainVector(layout=layout, values=np.zeros(50)), opened=opened, updates=updates)
    setting = Setting(training=PLAIN_SGD, encrypted=False)
    made_up = Canaries.draw(SCHEMA, count=4, rng=rng)
    seen = see(record, facts(setting, network(), loss=binary_cross_entropy, canaries=made_up), OTHER_CLIENT)
    assert seen.observation.coefficients == (5, 1)
    expected = (5 * updates["canary_1"].values + updates["canary_3"].values) / 6
    assert isinstance(seen.observation.seen, PlainVector)
    assert np.abs(seen.observation.seen.values - expected).max() <= 1e-15


def test_the_server_of_a_plaintext_round_sees_every_update(records: tuple[EncryptedRecord, PlaintextRecord], known: RoundFacts) -> None:
    seen = see(records[1], known, SERVER)
    assert [holding.what for holding in seen.holdings] == [f"update of {name}" for name in NAMES]
    assert {holding.form for holding in seen.holdings} == {Form.NUMBERS}
    assert isinstance(seen.observation.seen, PlainVector)


def test_capabilities_and_not_names_decide_what_is_seen(records: tuple[EncryptedRecord, PlaintextRecord], known: RoundFacts) -> None:
    for record, parties in zip(records, (SHARED_KEY_ADVERSARIES, PLAINTEXT_ADVERSARIES), strict=True):
        for adversary in parties:
            renamed = replace(adversary, name="somebody else")
            mine, theirs = see(record, known, adversary), see(record, known, renamed)
            assert mine.holdings == theirs.holdings
            assert mine.clients == theirs.clients


def test_a_view_of_nothing_is_refused(records: tuple[EncryptedRecord, PlaintextRecord], known: RoundFacts) -> None:
    with pytest.raises(ValueError, match="takes part in the round or watches it"):
        see(records[0], known, Adversary(name="nobody"))
    with pytest.raises(ValueError, match="takes part in the round or watches it"):
        see(records[1], known, OUTSIDER)  # no message travels in the clear
    for target, insider in (("canary_1", "canary_1"), ("canary_9", "canary_1"), ("canary_1", "canary_9")):
        with pytest.raises(ValueError, match="two different participants"):
            view(records[0], known, SERVER, target=target, insider=insider)


def test_records_and_views_do_not_show_what_they_hold(records: tuple[EncryptedRecord, PlaintextRecord], known: RoundFacts) -> None:
    for thing in (*records, see(records[0], known, CLIENT_WITH_SERVER)):
        assert len(repr(thing)) < 200
