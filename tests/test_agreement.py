import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from privfed.aggregation.gram import Gram
from privfed.aggregation.rules import MultiKrum
from privfed.aggregation.server_optimizer import FedAdagrad, FedAdam, FedYogi, ServerOptimizer, ServerSgd
from privfed.agreement import RoundContext
from privfed.errors import OpeningRefusedError, UnsupportedInThisModeError
from privfed.he.params import CkksParams
from privfed.he.product_params import ProductParams
from privfed.identity import Identity, Roster
from privfed.policy import OpeningPolicy
from privfed.update import Layout
from privfed.written_agreement import decode_agreement, encode_agreement


def test_the_policy_allows_enough_clients_with_small_shares() -> None:
    OpeningPolicy(min_clients=3, max_share=0.75).check({"a": 75, "b": 24, "c": 1})


@pytest.mark.parametrize("coefficients", [{}, {"a": 1}, {"a": 1, "b": 1}, {"a": 1, "b": 1, "c": 0}])
def test_the_policy_counts_clients_with_a_positive_coefficient_only(coefficients: dict[str, int]) -> None:
    with pytest.raises(
        OpeningRefusedError, match=r"a positive coefficient are [012], and the policy demands 3 \(min_clients\); nothing was opened"
    ):
        OpeningPolicy(min_clients=3).check(coefficients)


def test_the_policy_refuses_a_client_that_is_nearly_the_whole_aggregate() -> None:
    with pytest.raises(OpeningRefusedError, match=r"more than 75% of the aggregate \(1\.\d+ effective clients\)"):
        OpeningPolicy(min_clients=3, max_share=0.75).check({"a": 76, "b": 23, "c": 1})


@pytest.mark.parametrize(("keep", "allowed"), [(1, False), (2, False), (3, True)])
def test_the_policy_refuses_a_krum_that_keeps_too_few(keep: int, allowed: bool) -> None:
    from numpy import eye

    gram = Gram(names=tuple("abcdef"), size=6, products=eye(6))
    coefficients = MultiKrum(byzantine=1, keep=keep).mixture(dict.fromkeys("abcdef", 1.0), gram).coefficients(total=4096)
    if allowed:
        OpeningPolicy(min_clients=3).check(coefficients)
    else:
        with pytest.raises(OpeningRefusedError):
            OpeningPolicy(min_clients=3).check(coefficients)


@pytest.mark.parametrize(
    "changes",
    [
        {"min_clients": 1},
        {"min_clients": 0},
        {"max_share": 0.0},
        {"max_share": 1.0},
        {"max_share": math.nan},
        *({"min_clients": value} for value in (math.nan, 2.5, 3.0, True, "3", 2**70, math.inf)),
        {"max_share": "0.5"},
    ],
)
def test_a_policy_that_would_open_single_updates_cannot_be_made(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected (min_clients to be a whole number from 2|max_share between 0 and 1)"):
        OpeningPolicy(**changes)


def test_coefficients_follow_from_the_weights_in_roster_order(meet: Callable[..., Any]) -> None:
    agreement = meet(weights={"bank_03": 1.0, "bank_00": 2.0, "bank_01": 3.0, "bank_02": 4.0}).agreement
    assert list(agreement.coefficients(["bank_03", "bank_01", "bank_00"]).items()) == [("bank_00", 2), ("bank_01", 3), ("bank_03", 1)]


@pytest.mark.parametrize("participants", [[], ["bank_00", "bank_01"], ["bank_00", "bank_01", "bank_02", "stranger"]])
def test_participants_whom_the_policy_or_the_roster_does_not_know_have_no_coefficients(parties: Any, participants: list[str]) -> None:
    with pytest.raises(OpeningRefusedError, match="nothing was opened"):
        parties.agreement.coefficients(participants)


def test_a_rule_that_needs_products_of_ciphertexts_is_refused_at_construction(meet: Callable[..., Any]) -> None:
    with pytest.raises(UnsupportedInThisModeError, match=r"MultiKrum.*cannot multiply ciphertexts; no session was made"):
        meet(count=9, rule=MultiKrum(byzantine=1, keep=3))


def test_a_policy_that_refuses_even_a_round_of_all_is_refused_at_construction(meet: Callable[..., Any]) -> None:
    with pytest.raises(OpeningRefusedError, match="the policy demands 5"):
        meet(count=4, policy=OpeningPolicy(min_clients=5))
    with pytest.raises(OpeningRefusedError, match="more than 75%"):
        meet(weights={"bank_00": 10, "bank_01": 1, "bank_02": 1, "bank_03": 1})


@pytest.mark.parametrize(
    "weights",
    [{"bank_00": 1.0}, {f"bank_{index:02}": 1.0 for index in range(5)}, {"bank_00": 1.0, "bank_01": 1.0, "bank_02": 1.0, "bank_03": 0.0}],
    ids=["missing", "stranger", "zero"],
)
def test_weights_that_are_not_one_positive_number_per_client_are_refused(meet: Callable[..., Any], weights: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="weight"):
        meet(weights=weights)


def test_a_session_of_another_length_is_refused(meet: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="session of 16 bytes"):
        meet(session=b"short")


def test_an_agreement_keeps_its_weights_whatever_the_caller_does(meet: Callable[..., Any]) -> None:
    weights = {f"bank_{index:02}": 1.0 for index in range(4)}
    agreement = meet(weights=weights).agreement
    weights["bank_00"] = 99.0
    assert agreement.weights["bank_00"] == 1.0
    with pytest.raises(TypeError):
        agreement.weights["bank_00"] = 99.0


def test_every_part_has_its_own_digest_and_the_agreement_is_bound_to_all(parties: Any) -> None:
    agreement = parties.agreement
    reweighted = dict(agreement.weights) | {"bank_00": 2.0}
    others = {
        "roster": replace(
            agreement,
            roster=Roster(server=Identity.generate("server").public, clients=agreement.roster.clients),
        ),
        "params": replace(agreement, params=CkksParams.standard(bound=2.0)),
        "layout": replace(agreement, layout=Layout(names=("other",), shapes=((8,),))),
        "weights": replace(agreement, weights=reweighted),
        "policy": replace(agreement, policy=OpeningPolicy(max_share=0.5)),
    }
    for part, other in others.items():
        assert [name for name in agreement.parts if agreement.parts[name] != other.parts[name]] == [part]
    elsewhere = replace(agreement, session=bytes(16))
    assert elsewhere.parts == agreement.parts
    assert len({agreement.digest, elsewhere.digest, *(other.digest for other in others.values())}) == len(others) + 2


def test_equal_weights_of_another_type_are_the_same_agreement(parties: Any) -> None:
    integers = replace(parties.agreement, weights=dict.fromkeys(parties.agreement.weights, 1))
    assert integers.digest == parties.agreement.digest


def test_a_context_is_bound_to_round_attempt_history_and_agreement(parties: Any) -> None:
    contexts = [
        RoundContext(agreement=agreement, round=number, attempt=attempt, history=history)
        for agreement in (parties.agreement, replace(parties.agreement, session=bytes(16)))
        for number in (0, 1)
        for attempt in (0, 1)
        for history in (bytes(32), bytes(31) + b"h")
    ]
    assert len({context.digest for context in contexts}) == len(contexts)


@pytest.mark.parametrize("number", [-1, 2**32, 1.5, "0", True])
@pytest.mark.parametrize("which", ["round", "attempt"])
def test_a_round_or_an_attempt_that_does_not_fit_the_wire_is_refused(parties: Any, which: str, number: Any) -> None:
    with pytest.raises(ValueError, match="from 0 to 2\\^32 - 1"):
        RoundContext(agreement=parties.agreement, **({"round": 0} | {which: number}))


def test_an_agreement_survives_the_way_to_another_process(meet: Callable[..., Any]) -> None:
    agreement = meet(weights={"bank_00": 0.1, "bank_01": 2, "bank_02": 1 / 3, "bank_03": 1}, policy=OpeningPolicy(max_share=0.7)).agreement
    again = decode_agreement(encode_agreement(agreement))
    assert again == agreement
    assert again.digest == agreement.digest


@pytest.mark.parametrize(
    "change",
    [("FedAvg", "Other"), ("min_clients", "least"), ("{", "["), ('"session"', '"S"'), ('"amplitude"', '"a"')],
    ids=lambda change: change[0],
)
def test_another_text_than_an_agreement_is_refused(parties: Any, change: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match=r"[Ee]xpect"):
        decode_agreement(encode_agreement(parties.agreement).replace(*change))


@pytest.mark.parametrize("weight", [True, "1", None, 10**400, 2**53 + 1, math.nan, math.inf, 0, -1, 1j])
def test_a_weight_that_is_no_exact_positive_number_is_refused_and_not_shown(meet: Callable[..., Any], weight: Any) -> None:
    with pytest.raises(ValueError, match="expected the weight of 'bank_02' to be a positive, finite number") as refused:
        meet(weights=dict.fromkeys(("bank_00", "bank_01", "bank_03"), 1) | {"bank_02": weight})
    assert str(2**53 + 1) not in str(refused.value)


@pytest.mark.parametrize("kind", [int, np.int64, np.uint8, float, np.float32, np.float64, Fraction])
def test_weights_of_any_kind_of_number_make_the_same_agreement(meet: Callable[..., Any], kind: Callable[[int], Any]) -> None:
    agreement = meet().agreement
    again = replace(agreement, weights={name: kind(1) for name in agreement.weights})
    assert again.digest == agreement.digest
    assert decode_agreement(encode_agreement(again)).digest == agreement.digest


@pytest.mark.parametrize("population", [1, "", "two\nlines", "\ud800", "x" * 201])
def test_a_population_that_no_ledger_can_have_is_refused(meet: Callable[..., Any], population: Any) -> None:
    with pytest.raises(ValueError, match="expected populations of 1 to 200 printable characters"):
        meet(populations={"bank_00": population})


OPTIMIZERS = (
    ServerSgd(momentum=0.9),
    ServerSgd(learning_rate=0.5),
    FedAdagrad(learning_rate=0.1),
    FedAdam(learning_rate=0.1, second_decay=0.999),
    FedYogi(learning_rate=0.1, momentum=0.0),
)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.name)
def test_a_server_optimiser_is_agreed_on_and_written_down(parties: Any, optimizer: ServerOptimizer) -> None:
    agreement = replace(parties.agreement, server_optimizer=optimizer)
    assert {part for part in agreement.parts if agreement.parts[part] != parties.agreement.parts[part]} == {"rule"}
    read = decode_agreement(encode_agreement(agreement))
    assert read.server_optimizer == optimizer
    assert read.digest == agreement.digest
    assert len({replace(parties.agreement, server_optimizer=other).digest for other in OPTIMIZERS}) == len(OPTIMIZERS)


def test_adding_aggregates_as_they_are_is_the_agreement_that_it_was_without_optimisers(parties: Any) -> None:
    import hashlib

    assert parties.agreement.parts["rule"] == hashlib.sha256(b"privfed rule v1FedAvg").digest()


def test_an_optimiser_that_other_parties_may_not_know_is_refused(parties: Any) -> None:
    class Own(ServerSgd):
        pass

    with pytest.raises(TypeError, match="expected a server optimiser of ServerSgd, FedAdagrad, FedAdam, FedYogi, got Own"):
        replace(parties.agreement, server_optimizer=Own())


@pytest.mark.parametrize(
    "written",
    [
        "{}",
        '{"Own": {}}',
        '{"FedAdam": {}}',
        '{"FedAdam": {"learning_rate": "0.1"}}',
        '{"FedAdam": {"learning_rate": true}}',
        '{"ServerSgd": {"learning_rate": -1}}',
        '{"ServerSgd": {"speed": 1}}',
        '{"ServerSgd": {}, "FedAdam": {"learning_rate": 1}}',
        "[]",
        "null",
    ],
)
def test_what_names_no_server_optimiser_is_refused(parties: Any, written: str) -> None:
    text = encode_agreement(parties.agreement)
    known = '{"ServerSgd": {"learning_rate": 1.0, "momentum": 0.0}}'
    assert known in text
    with pytest.raises(ValueError, match="expected"):
        decode_agreement(text.replace(known, written))


def test_declared_noise_is_part_of_what_is_agreed_and_is_read_back(meet: Callable[..., Any]) -> None:
    terms = {"rule": MultiKrum(byzantine=1, keep=3), "params": ProductParams.exact(bound=1.0), "count": 5}
    plain = meet(**terms).agreement
    noisy = replace(plain, noise_energy={"bank_01": 0.5, "bank_00": 0.25})
    assert list(noisy.noise_energy.items()) == [("bank_00", 0.25), ("bank_01", 0.5)]
    assert [part for part, digest in plain.parts.items() if digest != noisy.parts[part]] == ["rule"]
    assert decode_agreement(encode_agreement(noisy)).digest == noisy.digest
    assert decode_agreement(encode_agreement(noisy)).noise_energy == noisy.noise_energy


@pytest.mark.parametrize("energies", [{"stranger": 1.0}, {"bank_00": 0.0}, {"bank_00": math.inf}, {"bank_00": math.nan}, {"bank_00": "1"}])
def test_noise_that_nobody_could_have_declared_is_refused(meet: Callable[..., Any], energies: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected a noise_energy"):
        meet(rule=MultiKrum(byzantine=1, keep=3), params=ProductParams.exact(bound=1.0), count=5, noise_energy=energies)
    with pytest.raises(ValueError, match="expected no noise_energy beside FedAvg"):
        meet(noise_energy={"bank_00": 1.0})


def test_coefficients_that_a_rule_chose_leave_no_participant_with_the_update_of_another() -> None:
    policy = OpeningPolicy()
    for coefficients in ((531, 492, 1), (1, 532, 491), (500, 450, 74), (614, 300, 110)):
        named = dict(zip("abc", coefficients, strict=True))
        policy.check(named)
        with pytest.raises(OpeningRefusedError, match="takes its own update out"):
            policy.check_chosen(named)
    for coefficients in ((3, 1, 1), (1, 1, 1), (2, 2, 1), (400, 300, 200, 124), (1, 1, 1, 0)):
        policy.check_chosen(dict(zip("abcd", coefficients, strict=False)))
    # Whoever agrees on means of two agrees that each of the two knows the update of the other.
    OpeningPolicy(min_clients=2).check_chosen({"a": 1, "b": 1})


@given(st.lists(st.integers(0, 20), min_size=3, max_size=6))
def test_what_is_left_to_each_participant_is_what_the_definition_says(numbers: list[int]) -> None:
    policy = OpeningPolicy(min_clients=3, max_share=0.75, min_effective_clients=1.0)
    named = dict(zip("abcdef", numbers, strict=False))
    whole = sum(numbers)
    rest = [other / (whole - own) for i, own in enumerate(numbers) for j, other in enumerate(numbers) if j != i and whole > own]
    allowed = sum(number > 0 for number in numbers) >= 3 and max(numbers) <= 0.75 * whole and max(rest) <= 0.75
    if allowed:
        policy.check_chosen(named)
    else:
        with pytest.raises(OpeningRefusedError):
            policy.check_chosen(named)
