"""What openers make of inner products: weights that the policy allows, the weights before, or nothing."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from privfed.aggregation.coordinatewise import Krum
from privfed.aggregation.gram import Gram
from privfed.aggregation.robust import CenteredClipping, FLTrust, GeometricMedian, NormBound
from privfed.aggregation.rules import FedAvg, MultiKrum
from privfed.agreement import Agreement, NamedRule, Validator
from privfed.contribution.cosine import Cgsv
from privfed.contribution.estimators import MonteCarlo
from privfed.contribution.trajectory import FedTsv
from privfed.decision import Decision, Fallback, decide
from privfed.dp.silo import SiloNoise
from privfed.errors import OpeningRefusedError, UnsupportedInThisModeError
from privfed.he.params import CkksParams
from privfed.he.product_params import ProductParams
from privfed.policy import OpeningPolicy
from privfed.written_agreement import decode_agreement, encode_agreement

PARAMS = ProductParams.exact(bound=2.0)
NAMES = ("bank_00", "bank_01", "bank_02", "bank_03", "bank_04")


@pytest.fixture
def agreed(meet: Any) -> Any:
    def make(rule: Any, *, validator: str | None = None, **terms: Any) -> Agreement:
        named = None if validator is None else Validator(name=validator, commitment=bytes(32), public=True)
        return meet(count=5, rule=rule, validator=named, **({"params": PARAMS} | terms)).agreement

    return make


def rows(*, last: float = 1.0, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    found = rng.normal(size=8) / 4 + rng.normal(size=(5, 8)) / 16
    found[-1] *= last
    return found


def decided(agreement: Agreement, values: np.ndarray, scores: dict[str, float] | None = None, *, digest: bytes = bytes(32)) -> Decision:
    return decide(agreement, NAMES, values @ values.T, scores=scores or {}, assurance="RECOMPUTED", digest=digest)


def test_the_rules_own_weights_are_taken_where_the_policy_allows_them(agreed: Any) -> None:
    decision = decided(agreed(MultiKrum(byzantine=1, keep=3)), rows(last=-1.0))
    assert decision.fallback is Fallback.NONE
    assert decision.coefficients["bank_04"] == 0
    assert sorted(decision.coefficients.values()) == [0, 0, 1, 1, 1]
    assert decision.disclosed == 15
    assert decision.reason == ""


def test_plain_krum_is_never_opened(agreed: Any) -> None:
    decision = decided(agreed(MultiKrum(byzantine=1, keep=1)), rows())
    assert decision.fallback is Fallback.SKIPPED
    assert not any(decision.coefficients.values())
    assert "1 clients have a positive coefficient and the policy demands 3" in decision.reason


def test_one_positive_score_is_never_opened(agreed: Any) -> None:
    values = rows()
    values[1:4] = -values[0] + 0.01 * values[1:4]  # bank_04 is the reference, and bank_00 alone goes its way
    values[4] = values[0] * 1.1
    agreement = agreed(FedTsv(), validator="bank_04")
    scores = {name: score for name, score in agreement.rule.step({}, _matrix(agreement, values))[0].items() if score > 0}
    assert list(scores) == ["bank_00"]
    assert decided(agreement, values).fallback is Fallback.SKIPPED


def _matrix(agreement: Agreement, values: np.ndarray) -> Any:
    from privfed.decision import checked_gram

    return checked_gram(agreement, NAMES, values @ values.T)


def test_the_weights_before_are_taken_where_the_policy_does_not_allow_the_new_ones(agreed: Any) -> None:
    values = rows()
    values[1:4] = -values[0] + 0.01 * values[1:4]
    values[4] = values[0] * 1.1
    agreement = agreed(FedTsv(), validator="bank_04")
    # Of cumulative scores, so small that this round alone decides the new ones.
    before = {"bank_00": 3e-9, "bank_01": 2e-9, "bank_02": 2e-9, "bank_03": -1e-9}
    with_policy = agreed(FedTsv(), validator="bank_04", policy=OpeningPolicy(min_clients=3))
    decision = decided(with_policy, values, before)
    assert decision.fallback is Fallback.PREVIOUS
    assert dict(decision.coefficients) == {"bank_00": 439, "bank_01": 293, "bank_02": 292, "bank_03": 0, "bank_04": 0}
    assert decision.scores["bank_00"] > 1e-3  # what this round showed counts from the next one on
    assert decided(agreement, values, {"bank_00": 1e-9}).fallback is Fallback.SKIPPED
    assert decided(agreement, values, {"bank_00": 1e-9}).scores == {"bank_00": 1e-9}


def test_too_few_effective_clients_are_never_opened(agreed: Any) -> None:
    values = np.eye(5, 8)
    values[0] /= 50  # a geometric median gives a short update most of the weight
    rule = GeometricMedian()
    shares = np.array(list(rule.mixture(dict.fromkeys(NAMES, 1.0), _matrix(agreed(rule), values)).shares.values()))
    effective = 1 / (shares**2).sum()
    below, above = effective * 0.98, effective * 1.02
    assert decided(agreed(rule, policy=OpeningPolicy(max_share=0.99, min_effective_clients=below)), values).fallback is Fallback.NONE
    refused = decided(agreed(rule, policy=OpeningPolicy(max_share=0.99, min_effective_clients=above)), values)
    assert refused.fallback is Fallback.SKIPPED
    assert "effective clients" in refused.reason


@pytest.mark.parametrize("value", [0.99, 2, math.inf, math.nan, True])
def test_a_bound_on_effective_clients_out_of_its_range_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="expected min_effective_clients"):
        OpeningPolicy(min_effective_clients=value)


def test_agreed_weights_are_not_held_to_the_bound_on_effective_clients(meet: Any) -> None:
    policy = OpeningPolicy(min_effective_clients=4.9)
    agreement = meet(count=5, weights=dict.fromkeys(NAMES, 1.0) | {"bank_00": 3.0}, policy=policy).agreement
    assert agreement.coefficients(NAMES)["bank_00"] == 3
    with pytest.raises(OpeningRefusedError, match="effective clients"):
        policy.check_chosen(agreement.coefficients(NAMES))


def test_a_client_beyond_the_bound_counts_nothing(agreed: Any) -> None:
    longest = rows()
    longest[4] *= 2.0 / np.linalg.norm(longest[4])
    assert decided(agreed(NormBound(max_norm=1.0)), longest).coefficients["bank_04"] > 0
    longest[4] *= 1.01
    decision = decided(agreed(NormBound(max_norm=1.0)), longest)
    assert decision.coefficients["bank_04"] == 0
    assert decision.fallback is Fallback.NONE


def test_a_reference_beyond_the_bound_is_none(agreed: Any) -> None:
    decision = decided(agreed(FLTrust(), validator="bank_04"), rows(last=100.0))
    assert decision.fallback is Fallback.SKIPPED


def test_a_validator_counts_nothing(agreed: Any) -> None:
    decision = decided(agreed(FLTrust(), validator="bank_04"), rows())
    assert decision.fallback is Fallback.NONE
    assert decision.coefficients["bank_04"] == 0
    assert all(decision.coefficients[name] > 0 for name in NAMES[:4])


@pytest.mark.parametrize("change", [(0, 0, -1.0), (0, 1, 3.0)])
def test_numbers_that_are_no_inner_products_open_nothing(agreed: Any, change: Any) -> None:
    first, second, number = change
    values = rows()
    products = values @ values.T
    products[first, second] = products[second, first] = number
    decision = decide(agreed(GeometricMedian()), NAMES, products, scores={}, assurance="RECOMPUTED", digest=bytes(32))
    assert decision.fallback is Fallback.SKIPPED


def test_a_rule_that_cannot_work_with_so_few_opens_nothing(agreed: Any) -> None:
    decision = decided(agreed(MultiKrum(byzantine=2, keep=3)), rows())
    assert decision.fallback is Fallback.SKIPPED
    assert "needs at least 7 clients, got 5" in decision.reason


@pytest.mark.parametrize("rule", [NamedRule(name="MultiKrum(byzantine=1, keep=3)", needs_reference=False), FedAvg()])
def test_a_rule_that_makes_nothing_of_inner_products_is_refused(agreed: Any, rule: Any) -> None:
    with pytest.raises(UnsupportedInThisModeError, match="makes nothing of inner products"):
        decided(agreed(rule), rows())


def test_a_share_of_the_reference_is_refused(agreed: Any) -> None:
    with pytest.raises(UnsupportedInThisModeError, match="which nobody opens"):
        decided(agreed(CenteredClipping(radius=0.1), validator="bank_04"), rows())


def test_a_decision_is_kept_whole_and_says_nothing_when_printed(agreed: Any) -> None:
    decision = decided(agreed(NormBound(max_norm=0.1)), rows())
    assert 0 < decision.scale < 1
    again = Decision.from_bytes(decision.to_bytes())
    assert again == decision
    assert repr(decision) == "Decision(participants=5, fallback=NONE)"
    for damaged in (b"", b"{}", b"[]", decision.to_bytes().replace(b"NONE", b"OTHER")):
        with pytest.raises(ValueError, match="expected|Expecting"):
            Decision.from_bytes(damaged)


# ---- agreements


def test_an_agreement_on_a_scored_rule_names_it_to_the_server_and_no_more(agreed: Any) -> None:
    agreement = agreed(FedTsv(), validator="bank_04")
    read = decode_agreement(encode_agreement(agreement))
    assert read.digest == agreement.digest
    assert read.rule == NamedRule(name=FedTsv().name, needs_reference=True)
    assert read.scored
    assert read.params == agreement.params
    assert dict(agreement.coefficients(NAMES)) == dict.fromkeys(NAMES, 0)


def test_an_agreement_depends_on_its_validator(agreed: Any) -> None:
    agreements = [agreed(FLTrust(), validator=name) for name in ("bank_03", "bank_04")]
    assert agreements[0].parts["rule"] != agreements[1].parts["rule"]


@pytest.mark.parametrize(
    ("terms", "error", "reason"),
    [
        ({"rule": GeometricMedian(), "params": CkksParams.standard()}, UnsupportedInThisModeError, "cannot multiply ciphertexts"),
        ({"rule": FLTrust()}, UnsupportedInThisModeError, "there is no validator"),
        ({"rule": GeometricMedian(), "validator": "bank_04"}, ValueError, "needs no reference"),
        ({"rule": FLTrust(), "validator": "stranger"}, ValueError, "expected a validator of the roster"),
        ({"rule": GeometricMedian(), "policy": OpeningPolicy(min_clients=6)}, OpeningRefusedError, "5 clients contribute"),
        ({"rule": FLTrust(), "validator": "bank_04", "policy": OpeningPolicy(min_clients=5)}, OpeningRefusedError, "4 clients contribute"),
    ],
)
def test_an_agreement_that_cannot_be_held_is_refused(agreed: Any, terms: Any, error: Any, reason: str) -> None:
    with pytest.raises(error, match=reason):
        agreed(**terms)


def test_a_round_without_its_reference_is_refused(agreed: Any) -> None:
    with pytest.raises(OpeningRefusedError, match="the reference of 'bank_04' is missing"):
        agreed(FLTrust(), validator="bank_04").coefficients(NAMES[:4])


def test_silo_noise_and_inner_products_are_refused_together(agreed: Any) -> None:
    noise = SiloNoise.__new__(SiloNoise)
    object.__setattr__(noise, "coordinates", 8)
    with pytest.raises(UnsupportedInThisModeError, match="noise for whole silos allows none"):
        agreed(GeometricMedian(), silo=noise)


def test_a_commitment_is_salted() -> None:
    first, second = (Validator.commit(b"records", salt=bytes([number]) * 32) for number in (0, 1))
    assert len(first) == 32
    assert first != second
    assert first != Validator.commit(b"other records", salt=bytes(32))
    with pytest.raises(ValueError, match="expected a salt of 32 bytes"):
        Validator.commit(b"records", salt=b"short")
    with pytest.raises(ValueError, match="expected a commitment of 32 bytes"):
        Validator(name="bank_04", commitment=b"short", public=True)


def test_krum_in_the_clear_stays_a_rule_of_its_own() -> None:
    assert not hasattr(Krum(byzantine=1), "mixture")


def test_who_is_over_the_bound_counts_nothing_in_the_weights_before_either(agreed: Any) -> None:
    agreement = agreed(FedTsv(), validator="bank_04", policy=OpeningPolicy(min_clients=3))
    scores = dict.fromkeys(("bank_00", "bank_01", "bank_02", "bank_03"), 1.0)
    values = rows()
    values[3:] *= 100  # the reference too, so that the rule itself has nothing to go by
    decision = decided(agreement, values, scores)
    assert decision.fallback is Fallback.PREVIOUS
    assert decision.coefficients["bank_03"] == 0
    assert min(decision.coefficients[name] for name in ("bank_00", "bank_01", "bank_02")) > 0
    negative = values @ values.T
    negative[3, 3] = -1.0
    again = decide(agreement, NAMES, negative, scores=scores, assurance="RECOMPUTED", digest=bytes(32))
    assert again.coefficients["bank_03"] == 0


def test_noise_is_taken_out_of_the_reference_too(agreed: Any) -> None:
    values = rows()
    square = float(values[4] @ values[4])
    plain = agreed(FedTsv(), validator="bank_04")
    noisy = agreed(FedTsv(), validator="bank_04", noise_energy={"bank_04": 0.4 * square})
    assert _matrix(plain, values).reference.square == pytest.approx(square, rel=1e-4)
    assert _matrix(noisy, values).reference.square == pytest.approx(0.6 * square, rel=1e-4)
    absurd = agreed(FedTsv(), validator="bank_04", noise_energy={"bank_04": 10 * square})
    assert _matrix(absurd, values).reference.square == pytest.approx(0.01 * square, rel=1e-4)


def test_a_minority_that_declares_much_noise_is_believed_no_more_than_the_median(agreed: Any) -> None:
    declared = {"bank_00": 0.1, "bank_01": 0.2, "bank_02": 0.1, "bank_03": 0.2, "bank_04": 25.0}
    matrix = _matrix(agreed(MultiKrum(byzantine=1, keep=3), noise_energy=declared), rows())
    assert matrix.declared_noise.tolist() == [0.1, 0.2, 0.1, 0.2, 0.2]
    alone = _matrix(agreed(MultiKrum(byzantine=1, keep=3), noise_energy={"bank_04": 25.0}), rows())
    assert alone.declared_noise.tolist() == [0.0] * 5


def test_a_liar_gains_nothing_by_declaring_noise_and_would_without_the_median() -> None:
    rng = np.random.default_rng(0)
    names = [f"bank_{index:02}" for index in range(15)]
    updates = np.ones((15, 50)) + rng.normal(0, 0.05, (15, 50))
    updates[12:, 0] += 5 * np.sqrt(50)
    declared = dict.fromkeys(names[12:], 25.0 * 50)
    shares = []
    matrix = Gram(names=tuple(names), size=50, products=updates @ updates.T)
    credulous = replace(matrix, noise_energy=np.array([declared.get(name, 0.0) for name in names]))
    for gram in (credulous, matrix.with_declared_noise(declared, reference=None)):
        weights = MultiKrum(byzantine=3, keep=6).mixture(dict.fromkeys(names, 1.0), gram).weights
        shares.append(sum(weights[name] for name in names[12:]) / sum(weights.values()))
    assert shares[0] > 0.3
    assert shares[1] == 0


@pytest.mark.parametrize("rule", [FLTrust(), Cgsv()], ids=lambda rule: rule.name[:7])
@pytest.mark.parametrize("share", [0.3, 1e-2, 1e-4, 1e-6])
def test_a_very_short_update_neither_stops_a_round_nor_gets_it_all(agreed: Any, rule: Any, share: float) -> None:
    values = rows()
    values[0] *= share
    agreement = agreed(rule, validator="bank_04" if rule.needs_reference else None)
    decision = decided(agreement, values)
    assert decision.fallback is Fallback.NONE
    total = sum(decision.coefficients.values())
    assert decision.coefficients["bank_00"] < 0.5 * total
    assert min(decision.coefficients[name] for name in ("bank_01", "bank_02", "bank_03")) > 0.1 * total


def test_openers_of_one_round_draw_the_same_and_every_round_draws_anew(agreed: Any) -> None:
    sampled = FedTsv(estimator=MonteCarlo(permutations=1))
    agreement = agreed(sampled, validator="bank_04")
    # Of five clients all coalitions are looked at, whatever is drawn: the seed is what differs.
    seeds = []

    class Watched(FedTsv):
        def step(self, scores: Any, gram: Gram) -> Any:
            seeds.append(gram.seed)
            return super().step(scores, gram)

    object.__setattr__(agreement, "rule", Watched(estimator=MonteCarlo(permutations=1)))
    for digest in (b"a" * 32, b"a" * 32, b"b" * 32):
        decided(agreement, rows(), digest=digest)
    assert seeds[0] == seeds[1] != seeds[2]
    assert all(seed > 0 for seed in seeds)
