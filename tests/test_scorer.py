"""Opening inner products: after all approvals, once per round; and aggregates with no other coefficients than follow from them."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from privfed import protect
from privfed import scorer as scorer_module
from privfed.aggregation.robust import NormBound
from privfed.aggregation.rules import MultiKrum
from privfed.digest import abridge
from privfed.errors import (
    AlreadyOpenedError,
    CohortError,
    DamagedFileError,
    DecryptionError,
    InvalidMessageError,
    OpeningRefusedError,
    ParametersMismatchError,
    RoundMismatchError,
    RoundSkippedError,
    TamperedAggregateError,
    TamperedProductsError,
    UnsupportedInThisModeError,
)
from privfed.he import secret
from privfed.he._seal_public import product_ring, zeros_under
from privfed.he.additive import weighted_sum
from privfed.he.codec import dequantise, pack_polynomials, quantise, unpack_public_key
from privfed.he.product import ZeroSumMask, masked_products
from privfed.he.product_params import ProductParams
from privfed.message import Kind, seal
from privfed.scorer import Scorer
from privfed.update import Layout
from privfed.wire import decode_setup, decode_upload, encode_setup, setup_public_key
from privfed.wire_aggregate import encode_aggregate
from privfed.wire_digest import decode_digest, encode_approval
from privfed.wire_products import decode_coefficients, decode_products, encode_coefficients, encode_products, sketch_seed

RULE = MultiKrum(byzantine=1, keep=3)
PARAMS = ProductParams.exact(bound=4.0)
FAR = "bank_04"


@pytest.fixture
def people5(meet: Any) -> Any:
    return meet(count=5, rule=RULE, params=PARAMS)


def updates(people: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    shared = rng.uniform(-1, 1, 8)
    return {name: (-shared if name == FAR else shared) + rng.normal(size=8) / 10 for name in people.clients}


def uploaded(people: Any) -> Any:
    joint = people.round().setup()
    return joint.upload(updates(people)).approve_all()


@pytest.fixture
def joint(people5: Any) -> Any:
    return uploaded(people5)


def scorer(joint: Any, name: str) -> Scorer:
    return Scorer(context=joint.context, round_key=joint.new_key(), journal=joint.parties.journal(name), scores={})


def weighed(joint: Any, names: Any = None) -> Any:
    data = joint.server.products()
    for name in names or joint.uploads:
        digest, decision = scorer(joint, name).open(data)
        numbers = tuple(decision.coefficients.values())
        joint.server.receive_coefficients(encode_coefficients(joint.context, joint.parties.clients[name], digest, numbers))
    return joint


def digest_of(joint: Any) -> Any:
    return decode_digest(joint.server.close(), joint.context, joint.key_id)


def approvals_of(joint: Any) -> list[bytes]:
    return [encode_approval(joint.context, joint.parties.clients[name], digest_of(joint)) for name in joint.uploads]


def vectors_of(joint: Any) -> list[Any]:
    return [decode_upload(joint.uploads[name], joint.context, joint.key_id).vector for name in joint.uploads]


def products_of(joint: Any, approvals: list[bytes] | None = None) -> bytes:
    """What a server sends that multiplies and masks once more."""
    vectors = vectors_of(joint)
    products = masked_products(
        lambda upload, chunk: vectors[upload].chunks[chunk],
        count=len(vectors),
        layout=joint.context.agreement.layout,
        params=PARAMS,
        key_id=joint.key_id,
        public_key=joint.new_key().public_key(),
    )
    return encode_products(
        joint.context,
        joint.parties.server,
        joint.server.close(),
        approvals_of(joint) if approvals is None else approvals,
        products=products,
    )


def test_a_scored_round_opens_to_the_mean_of_the_clients_that_the_rule_chose(joint: Any) -> None:
    data = weighed(joint).server.aggregate()
    holder = joint.key_holder("bank_00")
    aggregate = holder.open(data)
    chosen = {name: coefficient for name, coefficient in aggregate.coefficients.items() if coefficient}
    assert len(chosen) == 3
    assert FAR not in chosen
    sent = updates(joint.parties)
    total = sum(quantise(sent[name], PARAMS)[0] for name in chosen)
    np.testing.assert_array_equal(aggregate.vector.values, dequantise(np.asarray(total), 3, PARAMS))
    assert joint.server.coefficients() == dict(aggregate.coefficients)
    assert joint.server.next_history() == holder.history
    assert holder.decision is not None
    assert holder.decision.disclosed == 15


def test_the_server_learns_coefficients_and_nothing_else(joint: Any) -> None:
    digest, decision = scorer(joint, "bank_00").open(joint.server.products())
    message = encode_coefficients(joint.context, joint.parties.clients["bank_00"], digest, tuple(decision.coefficients.values()))
    sender, numbers = decode_coefficients(message, joint.context, digest)
    assert (sender, numbers) == ("bank_00", tuple(decision.coefficients.values()))
    others = encode_coefficients(joint.context, joint.parties.clients["bank_00"], digest, (9, 9, 9, 9, 9))
    assert len(message) == len(others)
    with pytest.raises(ValueError, match="one coefficient for each of 5 participants"):
        encode_coefficients(joint.context, joint.parties.clients["bank_00"], digest, (1,))


def test_a_second_opening_of_inner_products_is_refused(joint: Any) -> None:
    first, second = joint.server.products(), products_of(joint)
    scorer(joint, "bank_00").open(first)
    with pytest.raises(AlreadyOpenedError, match="others than these"):
        scorer(joint, "bank_00").open(second)
    assert scorer(joint, "bank_01").open(second)  # who opened nothing yet takes either: it is a fresh mask on the same products


def test_the_same_products_again_are_not_decrypted_again(joint: Any, monkeypatch: Any) -> None:
    data = joint.server.products()
    _, decision = scorer(joint, "bank_00").open(data)
    monkeypatch.setattr(scorer_module, "open_products", None)
    assert scorer(joint, "bank_00").open(data)[1] == decision
    with pytest.raises(TypeError):
        scorer(joint, "bank_01").open(data)


def test_nothing_is_opened_after_the_round_is_finished(joint: Any) -> None:
    products = joint.server.products()
    holder = (weighed(joint), joint.key_holder("bank_00"))[1]
    holder.open(joint.server.aggregate())
    holder.finish()
    with pytest.raises(AlreadyOpenedError, match="already opened; nothing"):
        scorer(joint, "bank_00").open(products)


def test_no_inner_product_is_opened_without_the_approval_of_every_participant(joint: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(scorer_module, "open_products", None)
    for approvals in (approvals_of(joint)[1:], [*approvals_of(joint), approvals_of(joint)[0]], approvals_of(joint)[::-1]):
        with pytest.raises(OpeningRefusedError, match="expected the approval of every participant, once"):
            scorer(joint, "bank_00").open(products_of(joint, approvals))


def test_the_opening_is_on_record_before_anything_is_decrypted(joint: Any, monkeypatch: Any) -> None:
    def crash(*_: Any) -> None:
        raise KeyboardInterrupt

    first, second = joint.server.products(), products_of(joint)
    monkeypatch.setattr(scorer_module, "open_products", crash)
    with pytest.raises(KeyboardInterrupt):
        scorer(joint, "bank_00").open(first)
    monkeypatch.undo()
    with pytest.raises(AlreadyOpenedError):
        scorer(joint, "bank_00").open(second)
    assert scorer(joint, "bank_00").open(first)


def test_a_server_that_repeats_a_mask_has_nothing_opened(joint: Any, monkeypatch: Any) -> None:
    zero = zeros_under(product_ring(), unpack_public_key(joint.new_key().public_key(), PARAMS))
    once = ZeroSumMask(PARAMS, zero).take()
    monkeypatch.setattr(ZeroSumMask, "take", lambda self: once)
    with pytest.raises(TamperedProductsError):
        scorer(joint, "bank_00").open(products_of(joint))


def test_hostile_products_are_refused_with_one_error(joint: Any) -> None:
    data = joint.server.products()
    for bad in (b"", data[:-1], data[:100] + b"\0" + data[101:], data + b"\0", joint.server.close()):
        with pytest.raises(InvalidMessageError):
            decode_products(bad, joint.context, joint.key_id)


def test_products_of_another_key_are_refused(joint: Any) -> None:
    with pytest.raises(RoundMismatchError):
        decode_products(joint.server.products(), joint.context, bytes(16))


def test_an_aggregate_is_not_opened_before_its_inner_products(joint: Any) -> None:
    data = weighed(joint, ["bank_00", "bank_01", "bank_02"]).server.aggregate()
    with pytest.raises(OpeningRefusedError, match="open the products first"):
        joint.key_holder("bank_03").open(data)
    scorer(joint, "bank_03").open(joint.server.products())
    assert joint.key_holder("bank_03").open(data)


def test_two_weightings_of_the_same_ciphertexts_are_refused(joint: Any) -> None:
    data = weighed(joint).server.aggregate()
    names = list(joint.uploads)
    right = joint.server.coefficients()
    for numbers in ([1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [2 * number for number in right.values()], list(right.values())[::-1]):
        counting = [name for name, number in zip(names, numbers, strict=True) if number]
        vectors = dict(zip(names, vectors_of(joint), strict=True))
        total = weighted_sum([vectors[name] for name in counting], [number for number in numbers if number])
        forged = encode_aggregate(
            joint.context,
            joint.parties.server,
            joint.server.close(),
            approvals_of(joint),
            uploads=[abridge(joint.uploads[name]) for name in names],
            total=total,
            coefficients=numbers,
        )
        with pytest.raises(OpeningRefusedError, match="other coefficients than follow"):
            joint.key_holder("bank_00").open(forged)
    assert joint.key_holder("bank_00").open(data)


def test_a_sum_with_other_coefficients_than_it_says_is_refused(joint: Any) -> None:
    weighed(joint)
    right, names = joint.server.coefficients(), list(joint.uploads)
    vectors = dict(zip(names, vectors_of(joint), strict=True))
    chosen = [name for name in names if right[name]]
    forged = encode_aggregate(
        joint.context,
        joint.parties.server,
        joint.server.close(),
        approvals_of(joint),
        uploads=[abridge(joint.uploads[name]) for name in names],
        total=weighted_sum([vectors[name] for name in chosen], [1, 1, 2]),
        coefficients=list(right.values()),
    )
    with pytest.raises(TamperedAggregateError):
        joint.key_holder("bank_00").open(forged)


def test_openers_that_find_different_coefficients_have_nothing_summed(joint: Any) -> None:
    weighed(joint, ["bank_00", "bank_01"])
    with pytest.raises(CohortError, match="openers that sent coefficients"):
        joint.server.aggregate()
    other = encode_coefficients(joint.context, joint.parties.clients["bank_02"], digest_of(joint), (1, 1, 1, 1, 1))
    joint.server.receive_coefficients(other)
    with pytest.raises(CohortError, match="did not find the same coefficients"):
        joint.server.aggregate()


def test_a_skipped_round_has_no_aggregate(joint: Any) -> None:
    joint.server.products()
    for name in joint.uploads:
        joint.server.receive_coefficients(encode_coefficients(joint.context, joint.parties.clients[name], digest_of(joint), (0,) * 5))
    with pytest.raises(RoundSkippedError, match="no weights that the policy allows"):
        joint.server.aggregate()


def test_who_found_no_weights_opens_no_aggregate(people5: Any) -> None:
    # Two groups disagree about nothing here: the policy of the opener alone skips the round.
    joint = uploaded(people5)
    data = weighed(joint).server.aggregate()
    journal = joint.parties.journal("bank_00")
    kept = scorer(joint, "bank_00").open(joint.server.products())[1]
    journal.keep_decision(joint.context, replace(kept, coefficients=dict.fromkeys(joint.uploads, 0)).to_bytes())
    with pytest.raises(OpeningRefusedError, match="is skipped"):
        joint.key_holder("bank_00").open(data)


def test_coefficients_come_after_products_and_once(joint: Any) -> None:
    message = encode_coefficients(joint.context, joint.parties.clients["bank_00"], digest_of(joint), (1, 1, 1, 0, 0))
    with pytest.raises(CohortError, match="products that were never made"):
        joint.server.receive_coefficients(message)
    joint.server.products()
    assert joint.server.receive_coefficients(message) == joint.server.receive_coefficients(message) == "bank_00"
    other = encode_coefficients(joint.context, joint.parties.clients["bank_00"], digest_of(joint), (1, 1, 0, 1, 0))
    with pytest.raises(CohortError, match="sent another"):
        joint.server.receive_coefficients(other)
    assert joint.server.received(Kind.COEFFICIENTS) == ("bank_00",)


def test_coefficients_for_another_digest_are_refused(joint: Any) -> None:
    joint.server.products()
    other = replace(digest_of(joint), rule="another")
    with pytest.raises(RoundMismatchError, match="weighed another digest"):
        joint.server.receive_coefficients(encode_coefficients(joint.context, joint.parties.clients["bank_00"], other, (1,) * 5))


def test_nothing_is_multiplied_before_all_approved(people5: Any) -> None:
    joint = people5.round().setup().upload(updates(people5))
    joint.server.close()
    with pytest.raises(CohortError, match="nothing was multiplied"):
        joint.server.products()


def test_a_server_that_restarts_sends_the_same_products(joint: Any) -> None:
    assert joint.server.products() == joint.new_server().products()


def test_a_session_with_agreed_weights_multiplies_nothing(parties: Any) -> None:
    joint = parties.round().setup().upload().approve_all()
    with pytest.raises(UnsupportedInThisModeError, match="needs no inner products; nothing was multiplied"):
        joint.server.products()


def test_the_seed_of_a_sketch_depends_on_every_approval(joint: Any) -> None:
    digest, approvals = digest_of(joint), approvals_of(joint)
    seeds = {sketch_seed(joint.context, digest, given) for given in (approvals, approvals[1:], approvals[::-1])}
    assert len(seeds) == 3
    assert sketch_seed(joint.context, replace(digest, rule="another"), approvals) not in seeds


def test_an_update_so_long_that_it_looks_short_does_not_get_into_a_model(meet: Any, monkeypatch: Any) -> None:
    # Its square is that of an update within the bound, modulo what squares are opened modulo, and it is at a right angle to all others.
    people = meet(count=5, rule=NormBound(max_norm=1.0), params=PARAMS, layout=Layout(names=("weight",), shapes=((1500,),)))
    length = math.sqrt(PARAMS.wraps_at * PARAMS.bound**2 + 0.5)
    sent = dict(zip(people.clients, np.hstack((np.eye(5), np.zeros((5, 1495)))), strict=True))
    sent[FAR] = np.append(np.zeros(500), np.full(1000, length / math.sqrt(1000)))
    monkeypatch.setattr(secret, "check_grid", lambda *_: None)
    monkeypatch.setattr(protect, "quantise", lambda values, params, share: (np.rint(values / params.step).astype(np.int64), 0))
    joint = people.round().setup().upload(sent).approve_all()
    data = weighed(joint).server.aggregate()
    assert joint.server.coefficients()[FAR] > 0
    with pytest.raises(DecryptionError, match="longer than the agreed bound; nothing was put into the model"):
        joint.key_holder("bank_00").open(data)


def test_a_mean_of_updates_at_the_bound_is_opened(meet: Any) -> None:
    # All alike, so that the mean is as long; and of values between two points of the grid, which lengthens them.
    people = meet(count=5, rule=NormBound(max_norm=100.0), params=PARAMS, layout=Layout(names=("weight",), shapes=((900,),)))
    joint = people.round().setup().upload(dict.fromkeys(people.clients, np.full(900, 1.0))).approve_all()
    data = weighed(joint).server.aggregate()
    opened = joint.key_holder("bank_00").open(data)
    assert np.linalg.norm(opened.vector.values) == pytest.approx(PARAMS.bound, abs=math.sqrt(900) * PARAMS.step / 2)


# ---- frames


@pytest.fixture(params=["products", "coefficients"])
def message(request: Any, joint: Any) -> Any:
    """An authentic message of each kind of a scored round, who signed it, and what its receiver calls."""
    data = joint.server.products()
    if request.param == "products":
        return data, joint.parties.server, lambda given: decode_products(given, joint.context, joint.key_id)
    bank, digest = joint.parties.clients["bank_00"], digest_of(joint)
    return (
        encode_coefficients(joint.context, bank, digest, (1, 2, 3, 0, 0)),
        bank,
        lambda given: decode_coefficients(given, joint.context, digest),
    )


def test_a_flipped_bit_a_missing_or_an_added_byte_is_refused(message: Any) -> None:
    data, _, decode = message
    decode(data)
    head = min(560, len(data))
    for position in sorted({*range(0, head, 7), *range(len(data) - 70, len(data), 7), *range(head, len(data), 400_009)}):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        for bad in (bytes(flipped), data[:position]):
            with pytest.raises(InvalidMessageError):
                decode(bad)
    for bad in (data + b"\0", b"\0" + data, data + data):
        with pytest.raises(InvalidMessageError):
            decode(bad)


def test_a_payload_of_another_length_or_signer_is_refused_even_when_signed(message: Any, joint: Any) -> None:
    data, signer, decode = message
    body = data[:-64]
    for other in (joint.parties.clients["bank_01"], joint.parties.server if signer.name == "bank_00" else joint.parties.clients["bank_00"]):
        with pytest.raises(InvalidMessageError):
            decode(body + other.sign(body))
    for changed in (body + b"\0", body[:-1]):
        with pytest.raises(InvalidMessageError):
            decode(changed + signer.sign(changed))


def test_a_message_of_another_attempt_is_refused_by_name(message: Any, joint: Any) -> None:
    data, *_ = message
    other = replace(joint.context, attempt=1)
    digest = digest_of(joint)
    with pytest.raises(RoundMismatchError, match="attempt"):
        decode_products(data, other, joint.key_id) if len(data) > 10_000 else decode_coefficients(data, other, digest)


def test_masked_words_beyond_a_prime_are_refused(joint: Any) -> None:
    data = joint.server.products()
    message = decode_products(data, joint.context, joint.key_id)
    bad = replace(message.products, chunks=(b"\xff" * PARAMS.product_bytes, *message.products.chunks[1:]))
    forged = encode_products(joint.context, joint.parties.server, joint.server.close(), approvals_of(joint), products=bad)
    with pytest.raises(InvalidMessageError):
        scorer(joint, "bank_00").open(forged)


# ---- the public key of the round


def sealed_setup(joint: Any, name: str, payload: bytes) -> bytes:
    return seal(joint.context, joint.parties.clients[name], Kind.SETUP, key_id=joint.key_id, payload=payload)


def another_public_key(joint: Any) -> bytes:
    """One whose noise and whose second polynomial a client chose."""
    words = joint.new_key()._ring_key.public_key_of(bytes(64))
    return pack_polynomials(words, PARAMS.key_moduli, PARAMS.poly_modulus_degree)


def test_clients_publish_the_rounds_public_key_with_their_setup(people5: Any) -> None:
    joint = people5.round()
    messages = [joint.setup_message(name) for name in joint.selected]
    assert {setup_public_key(message, joint.context) for message in messages} == {joint.new_key().public_key()}
    assert [decode_setup(message, joint.context) for message in messages] == [(name, joint.key_id) for name in joint.selected]


def test_a_setup_without_the_rounds_public_key_is_refused(people5: Any, meet: Any) -> None:
    joint = people5.round()
    good, client = joint.new_key().public_key(), joint.parties.clients["bank_00"]
    for bad in (b"", good[:-1], bytes(len(good)), good[: len(good) // 2] + bytes(len(good) // 2), b"\xff" * len(good)):
        with pytest.raises(InvalidMessageError):
            joint.server.receive_setup(sealed_setup(joint, "bank_00", bad))
    with pytest.raises(ValueError, match="expected a public key of"):
        encode_setup(joint.context, client, joint.key_id)
    plain = meet(count=3).round()
    assert setup_public_key(plain.setup_message("bank_00"), plain.context) == b""
    with pytest.raises(ValueError, match="expected a public key of 0 bytes"):
        encode_setup(plain.context, plain.parties.clients["bank_00"], plain.key_id, good)


def test_clients_that_publish_different_public_keys_start_nothing(people5: Any) -> None:
    joint = people5.round()
    for name in joint.selected[:-1]:
        joint.server.receive_setup(joint.setup_message(name))
    joint.server.receive_setup(sealed_setup(joint, joint.selected[-1], another_public_key(joint)))
    with pytest.raises(ParametersMismatchError, match="derived another key"):
        joint.server.start_uploads()


def test_products_are_refused_when_a_kept_public_key_is_another_one_or_gone(joint: Any) -> None:
    (path,) = joint.parties.directory.rglob("setup-bank_02")
    kept = path.read_bytes()
    for changed in (sealed_setup(joint, "bank_02", another_public_key(joint)), kept[:-1], b""):
        path.write_bytes(changed)
        with pytest.raises(DamagedFileError):
            joint.server.products()
    path.write_bytes(kept)
    assert scorer(joint, "bank_00").open(joint.server.products())
