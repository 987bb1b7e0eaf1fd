import json
import math
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest

from privfed.dp.accounting import epsilon
from privfed.dp.ledger import Ledger
from privfed.dp.mechanism import (
    AdaptivelyClippedGaussian,
    Budget,
    CappedPoissonSampledGaussian,
    Composition,
    CustomerSampledGaussian,
    Event,
    GaussianRelease,
    NonPrivateRelease,
    PoissonSampledGaussian,
    Relation,
    Unit,
)
from privfed.dp.silo import SiloNoise
from privfed.dp.silo_promise import SiloPromise
from privfed.dp.statement import ANSWERS_RELEASED, MODEL_RELEASED, NOISELESS_RELEASED, PrivacyStatement, Randomness
from privfed.strict_json import checksum

TRAINING = PoissonSampledGaussian(noise_multiplier=1.1, sample_rate=0.01, steps=100)
HISTOGRAM = GaussianRelease(noise_multiplier=8.0, count=2)
CUSTOMERS = CustomerSampledGaussian(noise_multiplier=2.0, sample_rate=0.01, records_per_customer=3, steps=100)
NOISE = SiloNoise(weights=dict.fromkeys("abcdef", 1), clip_steps=32, noise_multiplier=6.0, coordinates=1000, colluders=1, dropouts=1)


def statement_of(*events: Event, randomness: Randomness = Randomness.OPERATING_SYSTEM) -> PrivacyStatement:
    return PrivacyStatement.of(events, population="bank_a", delta=1e-5, max_grad_norm=1.5, randomness=randomness)


PRIVATE = statement_of(*[TRAINING] * 20, HISTOGRAM, TRAINING)
SEEDED = statement_of(TRAINING, randomness=Randomness.SEEDED)
NOISELESS = statement_of(TRAINING, NonPrivateRelease())


def test_a_statement_recomputes_its_epsilon_from_its_json_alone() -> None:
    restored = PrivacyStatement.from_json(PRIVATE.to_json())
    assert restored == PRIVATE
    assert restored.recompute() == restored.epsilon == epsilon([TRAINING] * 21 + [HISTOGRAM], delta=1e-5)
    assert restored.rounds == 22


@pytest.mark.parametrize("statement", [PRIVATE, SEEDED, NOISELESS, statement_of()], ids=["private", "seeded", "noiseless", "empty"])
def test_every_statement_survives_json(statement: PrivacyStatement) -> None:
    assert PrivacyStatement.from_json(statement.to_json()) == statement


def test_a_statement_about_a_ledger_says_what_the_ledger_spent(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "ledger", population="bank_a", budget=Budget(epsilon=3.0, delta=1e-5)) as ledger:
        ledger.reserve(TRAINING, session=b"s", round=0, attempt=0)
        statement = PrivacyStatement.of(ledger.events(), population=ledger.population, delta=ledger.budget.delta, max_grad_norm=1.0)
        assert statement.epsilon == ledger.spent()


def test_the_json_names_every_part_of_the_promise() -> None:
    content = json.loads(PRIVATE.to_json())
    assert content["events"][0]["event"] == {"kind": "poisson sampled gaussian", "noise_multiplier": 1.1, "sample_rate": 0.01, "steps": 100}
    assert [run["rounds"] for run in content["events"]] == [20, 1, 1]
    assert (content["unit"], content["relation"], content["delta"], content["max_grad_norm"]) == ("RECORD", "ADD_OR_REMOVE_ONE", 1e-5, 1.5)
    assert content["private"] is True
    assert "dp-accounting 0.6" in content["accountant"]
    assert content["randomness"] == "OPERATING_SYSTEM"
    assert content["released"]
    assert content["noise_added_by"]


def test_the_text_names_every_part_of_the_promise() -> None:
    text = PRIVATE.text()
    for words in (
        "bank_a",
        f"epsilon {PRIVATE.epsilon:.3g} at delta 1e-05",
        f"{PRIVATE.best_guess:.1%}",
        "one record",
        "exactly one unit more",
        "20 x 100 noisy training steps",
        "probability 0.01 (Poisson sampling)",
        "noise multiplier 1.1",
        "2 noisy sums over all records; noise multiplier 8",
        "clipped to norm 1.5",
        "before anything is encrypted",
        "operating system's entropy",
        "dp-accounting",
        "Released:",
        "Not covered:",
    ):
        assert words in text
    assert "NOT PRIVATE" not in text


@pytest.mark.parametrize(
    "subject", ["several records", "other parties", "number of records", "evaluation metrics", "looking at private results"]
)
def test_a_statement_lists_what_it_does_not_cover(subject: str) -> None:
    assert any(subject in item for item in PRIVATE.not_covered)
    assert all(item in PRIVATE.text() for item in PRIVATE.not_covered)


def test_every_event_that_a_statement_can_hold_is_told() -> None:
    capped = CappedPoissonSampledGaussian(noise_multiplier=1.5, sample_rate=0.01, capacity=125, max_records=10_000, steps=10)
    moving = AdaptivelyClippedGaussian(noise_multiplier=1.5, count_noise=5.0, sample_rate=0.01, steps=10)
    text = statement_of(TRAINING, capped, moving, HISTOGRAM).text()
    for words in ("at most 125 of at most 10000 records", "with adaptive clipping", "2 noisy sums over all records"):
        assert words in text
    assert "clipped to a norm of its step, at most 1.5;" in text
    assert "a release without noise" in NOISELESS.text()
    assert "- nothing" in statement_of().text()


@pytest.mark.parametrize("statement", [SEEDED, NOISELESS], ids=["seeded", "noiseless"])
def test_a_statement_is_stamped_not_private_when_noise_was_seeded_or_missing(statement: PrivacyStatement) -> None:
    assert not statement.private
    assert statement.epsilon == math.inf
    assert statement.best_guess == 1.0
    assert "NOT PRIVATE" in statement.text()
    assert "Promise" not in statement.text()
    content = json.loads(statement.to_json())
    assert content["private"] is False
    assert content["epsilon"] is None
    assert all("nothing is promised" in claim for claim in statement.claims().values())


def test_claims_are_made_per_adversary_and_never_because_of_encryption() -> None:
    claims = PRIVATE.claims()
    assert set(claims) == {
        "an outsider",
        "another client",
        "the server",
        "the server together with whoever can decrypt",
        "all other parties together",
        "the owner itself",
    }
    assert all(f"epsilon {PRIVATE.epsilon:.3g} at delta 1e-05 per record" in claims[who] for who in set(claims) - {"the owner itself"})
    assert not any("encrypt" in claim and "decrypt" not in claim for claim in claims.values())
    assert "epsilon" not in claims["the owner itself"]


@pytest.mark.parametrize(("noise_multiplier", "text"), [(0.05, "epsilon above 100"), (1.0, "epsilon 4.38")])
def test_an_epsilon_above_one_hundred_is_not_given_digits(noise_multiplier: float, text: str) -> None:
    assert text in statement_of(GaussianRelease(noise_multiplier=noise_multiplier)).text()


def test_the_best_guess_is_a_coin_at_no_cost_and_follows_the_definition() -> None:
    assert statement_of().best_guess == pytest.approx(0.5, abs=1e-5)
    value = PRIVATE.epsilon
    assert PRIVATE.best_guess == pytest.approx((math.exp(value) + 1e-5) / (math.exp(value) + 1), rel=1e-12)
    # One Gaussian: the best test is right ncdf(1 / (2 * noise multiplier)) of the time, which the bound must cover.
    for noise_multiplier in (0.5, 1.0, 5.0, 50.0):
        exact = 0.5 * (1 + math.erf(1 / (2 * noise_multiplier) / math.sqrt(2)))
        assert exact <= statement_of(GaussianRelease(noise_multiplier=noise_multiplier)).best_guess <= 1


def test_an_epsilon_that_is_not_the_cost_of_the_events_is_refused() -> None:
    for factor in (0.9, 1.1):
        with pytest.raises(ValueError, match="expected the epsilon of the events"):
            replace(PRIVATE, epsilon=factor * PRIVATE.epsilon)
    with pytest.raises(ValueError, match="expected the epsilon of the events"):
        replace(PRIVATE, randomness=Randomness.SEEDED)
    with pytest.raises(ValueError, match="expected the epsilon of the events"):
        replace(PRIVATE, epsilon=math.nan)
    with pytest.raises(ValueError, match="expected the epsilon of the events"):
        replace(PRIVATE, epsilon=0.999 * PRIVATE.epsilon)
    assert replace(PRIVATE, epsilon=(1 + 1e-9) * PRIVATE.epsilon).private  # as another machine may round


def edited(**changes: object) -> str:
    return json.dumps({**json.loads(PRIVATE.to_json()), **changes})


def sealed(**changes: object) -> str:
    """An edit by somebody who computes the checksum anew."""
    content = {**json.loads(PRIVATE.to_json()), **changes}
    del content["checksum"]
    return json.dumps(content | {"checksum": checksum(content)})


CONTENT: dict[str, Any] = json.loads(PRIVATE.to_json())
# For every field, something else of the same kind: a new field cannot escape this.
OTHER: dict[str, object] = {
    "format": "privfed privacy statement v1",
    "private": False,
    "population": "bank_b",
    "unit": "CUSTOMER",
    "relation": "REPLACE_ONE",
    "epsilon": PRIVATE.epsilon * 0.999,
    "delta": 1e-6,
    "events": CONTENT["events"][:1],
    "max_grad_norm": 0.5,
    "randomness": "SEEDED",
    "noise_added_by": "the server",
    "adaptive_budget": {"epsilon": 3.0, "delta": 1e-5},
    "silo": {},
    "accountant": "dp-accounting 99.0",
    "released": [],
    "not_covered": CONTENT["not_covered"][1:],
    "claims": CONTENT["claims"] | {"the server": "nothing can be learned"},
    "checksum": "0" * 64,
}
BOUND_BY_THE_CHECKSUM_ALONE = {"population", "max_grad_norm"}


def test_every_field_of_a_statement_is_edited_in_a_test() -> None:
    assert set(OTHER) == set(CONTENT)
    assert all(OTHER[name] != CONTENT[name] for name in OTHER)


@pytest.mark.parametrize("name", OTHER)
def test_an_edit_of_any_one_field_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        PrivacyStatement.from_json(edited(**{name: OTHER[name]}))
    left_out = {key: value for key, value in CONTENT.items() if key != name}
    with pytest.raises(ValueError, match="expected"):
        PrivacyStatement.from_json(json.dumps(left_out))


@pytest.mark.parametrize("name", sorted(set(OTHER) - BOUND_BY_THE_CHECKSUM_ALONE - {"checksum"}))
def test_an_edit_of_a_field_that_follows_from_others_is_refused_though_its_checksum_was_computed_anew(name: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        PrivacyStatement.from_json(sealed(**{name: OTHER[name]}))


def test_a_checksum_is_no_signature_and_what_follows_from_nothing_else_is_for_the_ledger_to_tell() -> None:
    for name in BOUND_BY_THE_CHECKSUM_ALONE:
        assert getattr(PrivacyStatement.from_json(sealed(**{name: OTHER[name]})), name) == OTHER[name]


@pytest.mark.parametrize("number", [1, True])
def test_numbers_of_another_kind_are_refused_though_python_takes_them_for_equal(number: object) -> None:
    asked = PrivacyStatement.of([HISTOGRAM], population="a", delta=1e-5, max_grad_norm=1.0)
    for name in ("max_grad_norm", "delta", "epsilon"):
        content = json.loads(asked.to_json()) | {name: number}
        with pytest.raises(ValueError, match="expected"):
            PrivacyStatement.from_json(json.dumps(content))


def test_a_key_that_stands_twice_and_a_number_that_is_none_are_refused() -> None:
    text = PRIVATE.to_json()
    claims = json.dumps(CONTENT["claims"])
    for twice in (
        text.replace('"private": true', '"private": true, "private": true'),
        text.replace('"unit": "RECORD"', '"unit": "CUSTOMER", "unit": "RECORD"'),
        text.replace('"count": 2', '"count": 9, "count": 2'),
        json.dumps(CONTENT).replace(claims, claims[:-1] + ', "the server": "x", "the server": "y"}'),
        text.replace('"max_grad_norm": 1.5', '"max_grad_norm": NaN'),
        text.replace('"max_grad_norm": 1.5', '"max_grad_norm": 1e999'),
    ):
        assert twice not in (text, json.dumps(CONTENT))
        with pytest.raises(ValueError, match="expected"):
            PrivacyStatement.from_json(twice)


def test_what_was_released_follows_from_what_was_charged() -> None:
    assert statement_of(TRAINING).released == (MODEL_RELEASED,)
    assert PRIVATE.released == (MODEL_RELEASED, ANSWERS_RELEASED)
    assert NOISELESS.released == (MODEL_RELEASED, NOISELESS_RELEASED)
    assert statement_of().released == ()
    assert customer_statement().released == (MODEL_RELEASED,)
    moving = AdaptivelyClippedGaussian(noise_multiplier=1.5, count_noise=5.0, sample_rate=0.01, steps=10)
    assert statement_of(moving).released == (MODEL_RELEASED,)
    with pytest.raises(ValueError, match="clipping norm"):
        PrivacyStatement.of([moving], population="a", delta=1e-5, max_grad_norm=None)


def test_a_population_without_a_name_is_refused() -> None:
    for name in ("", None, 3):
        with pytest.raises(ValueError, match="1 to 200 printable characters"):
            replace(PRIVATE, population=name)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        edited(epsilon=0.5),
        edited(epsilon="1"),
        edited(private=False),
        edited(format="privfed privacy statement v3"),
        edited(extra=1),
        edited(unit="CUSTOMER"),
        edited(events=[]),
        edited(events=[{"rounds": 10**12, "event": {"kind": "non-private release"}}]),
        edited(events=[{"rounds": -1, "event": {"kind": "non-private release"}}]),
        edited(events=[{"rounds": 1, "event": {"kind": "laplace"}}]),
        edited(delta=2.0),
        edited(max_grad_norm=0.0),
        edited(max_grad_norm=None),
    ],
)
def test_json_that_is_no_statement_or_was_edited_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|Expecting"):
        PrivacyStatement.from_json(text)


def test_an_unknown_event_makes_no_statement() -> None:
    with pytest.raises(TypeError, match="expected an event"):
        statement_of("anything")  # type: ignore[arg-type]


def test_a_statement_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        PRIVATE.epsilon = 0.1  # type: ignore[misc]


# --- other units, relations and composition -------------------------------------------------------------------------------------------


def customer_statement() -> PrivacyStatement:
    return PrivacyStatement.of([CUSTOMERS] * 2, population="bank_a", delta=1e-6, max_grad_norm=1.0, unit=Unit.CUSTOMER)


def test_a_statement_about_customers_says_so_and_what_it_does_not_hide() -> None:
    statement = customer_statement()
    assert statement.epsilon == epsilon([CUSTOMERS] * 2, delta=1e-6)
    assert PrivacyStatement.from_json(statement.to_json()) == statement
    text = statement.text()
    for words in (
        "one customer",
        "whether a given customer was used",
        "of a customer at most 3 records",
        "per customer",
        "beyond the declared",
    ):
        assert words in text
    assert "for each record alone" not in text


def test_a_statement_about_one_unit_holds_no_event_about_another() -> None:
    with pytest.raises(ValueError, match="about one record"):
        statement_of(CUSTOMERS)
    with pytest.raises(ValueError, match="about one customer"):
        PrivacyStatement.of([TRAINING], population="a", delta=1e-6, max_grad_norm=1.0, unit=Unit.CUSTOMER)


def test_a_statement_about_replaced_records_is_larger_and_recomputable() -> None:
    statement = PrivacyStatement.of([TRAINING], population="a", delta=1e-6, max_grad_norm=1.0, relation=Relation.REPLACE_ONE)
    assert statement.epsilon == epsilon([TRAINING], delta=1e-6, relation=Relation.REPLACE_ONE) > epsilon([TRAINING], delta=1e-6)
    assert PrivacyStatement.from_json(statement.to_json()) == statement
    assert "equally many units" in statement.text()
    with pytest.raises(ValueError, match="expected the epsilon of the events"):
        replace(statement, relation=Relation.ADD_OR_REMOVE_ONE)


def test_an_adaptive_statement_promises_its_budget_and_nothing_if_its_filter_was_overrun() -> None:
    budget = Budget(epsilon=3.0, delta=1e-6)
    statement = PrivacyStatement.of([TRAINING], population="a", delta=1e-6, max_grad_norm=1.0, adaptive_budget=budget)
    assert statement.epsilon == 3.0 > epsilon([TRAINING], delta=1e-6)
    assert PrivacyStatement.from_json(statement.to_json()) == statement
    assert "Adaptive: " in statement.text()
    for events, delta in (([TRAINING] * 100, 1e-6), ([TRAINING], 1e-7)):
        overrun = PrivacyStatement.of(events, population="a", delta=delta, max_grad_norm=1.0, adaptive_budget=budget)
        assert not overrun.private


@pytest.mark.parametrize(
    "terms", [{}, {"relation": Relation.REPLACE_ONE}, {"composition": Composition.ADAPTIVE}, {"unit": Unit.CUSTOMER}], ids=str
)
def test_a_statement_of_a_ledger_is_on_the_terms_of_the_ledger(tmp_path: Path, terms: dict[str, object]) -> None:
    budget = Budget(epsilon=3.0, delta=1e-6)
    with Ledger.open(tmp_path / "ledger", population="bank_a", budget=budget, **terms) as ledger:  # type: ignore[arg-type]
        ledger.reserve(CUSTOMERS if "unit" in terms else TRAINING, session=b"s", round=0, attempt=0)
        statement = PrivacyStatement.of_ledger(ledger, max_grad_norm=1.0)
        assert (statement.population, statement.delta, statement.events) == ("bank_a", 1e-6, ledger.events())
        assert statement.epsilon == (3.0 if "composition" in terms else ledger.spent())
        assert PrivacyStatement.from_json(statement.to_json()) == statement


# --- the silo beside the records --------------------------------------------------------------------------------------------------------


def promise(rounds: int = 5) -> SiloPromise:
    return SiloPromise.of([NOISE.event()] * rounds, delta=1e-6, noise=NOISE)


def with_silo() -> PrivacyStatement:
    return PrivacyStatement.of([TRAINING] * 5, population="bank_a", delta=1e-5, max_grad_norm=1.0, silo=promise())


def test_a_promise_about_the_silo_is_recomputed_from_json_alone() -> None:
    statement = with_silo()
    restored = PrivacyStatement.from_json(statement.to_json())
    assert restored == statement
    assert restored.silo is not None
    assert restored.silo.recompute() == restored.silo.epsilon == epsilon([NOISE.event(count=5)], delta=1e-6)
    assert restored.silo.single_upload_epsilon == epsilon([NOISE.one_share_event(count=5)], delta=1e-6)


def test_who_reads_single_uploads_is_told_apart_from_who_sees_sums() -> None:
    silo = promise()
    claims = silo.claims()
    together, alone = f"epsilon {silo.epsilon:.3g}", f"epsilon {silo.single_upload_epsilon:.3g}"
    assert silo.single_upload_epsilon > 1.5 * silo.epsilon
    for who in ("an outsider", "another client", "the server", "up to 1 clients together"):
        assert claims[who].startswith(together)
    for who in ("the server together with whoever can decrypt", "all other parties together"):
        assert claims[who].startswith(alone)
    text = with_silo().text()
    assert all(claim in text for claim in claims.values())
    assert "one silo: everything that one data owner has; in one of the data sets one unit contributes nothing" in text
    assert "1 may be known to the adversary and 1 may be missing" in text


def edited_silo(**changes: object) -> str:
    content = json.loads(with_silo().to_json())
    content["silo"] |= changes
    return json.dumps(content)


@pytest.mark.parametrize(
    "text",
    [
        edited_silo(epsilon=0.5),
        edited_silo(delta=0.5),
        edited_silo(clients=4),
        edited_silo(events=[]),
        edited_silo(events=[{"rounds": 5, "event": {"kind": "non-private release"}}]),
        edited_silo(events=[{"rounds": 5, "event": {"kind": "poisson sampled gaussian", "noise_multiplier": 1.0}}]),
        edited_silo(extra=1),
        edited_silo(claims={}),
        edited_silo(colluders=-1),
        edited_silo(clients=6.0),
        edited(silo=3),
        edited(silo={}),
        edited(adaptive_budget={"epsilon": 3.0}),
        edited(adaptive_budget={"epsilon": 3.0, "delta": 1e-5}),
    ],
)
def test_an_edited_promise_about_the_silo_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        PrivacyStatement.from_json(text)


def test_a_promise_that_counts_on_more_shares_than_it_tolerates_is_refused() -> None:
    with pytest.raises(ValueError, match="no more shares"):
        replace(promise(), colluders=2)
    with pytest.raises(ValueError, match="epsilon of the events"):
        replace(promise(), epsilon=1.0)
    with pytest.raises(ValueError, match="delta"):
        replace(promise(), delta=0.0)
    for name, count in (("clients", 0), ("colluders", -1), ("dropouts", True), ("clients", 6.0)):
        with pytest.raises(ValueError, match=f"expected {name} to be a whole number"):
            replace(promise(), **{name: count})


def test_the_statement_of_a_ledger_says_what_was_charged_for_the_silo(tmp_path: Path) -> None:
    noise = SiloNoise(weights=dict.fromkeys("abcde", 1), clip_steps=32, noise_multiplier=4.0, coordinates=100, colluders=1)
    terms = {"population": "bank_a", "budget": Budget(epsilon=3.0, delta=1e-5), "silo_budget": Budget(epsilon=9.0, delta=1e-6)}
    with Ledger.open(tmp_path / "ledger", **terms) as ledger:
        assert PrivacyStatement.of_ledger(ledger, max_grad_norm=1.0).silo is None
        for number in range(2):
            ledger.reserve(TRAINING, session=b"s", round=number, attempt=0, silo_event=noise.event())
        with pytest.raises(ValueError, match="expected the silo noise that was agreed"):
            PrivacyStatement.of_ledger(ledger, max_grad_norm=1.0)
        statement = PrivacyStatement.of_ledger(ledger, max_grad_norm=1.0, silo=noise)
        assert statement.silo is not None
        assert statement.silo.epsilon == ledger.silo_spent() > 0
        assert (statement.silo.events, statement.silo.delta) == ((noise.event(),) * 2, 1e-6)
        assert PrivacyStatement.from_json(statement.to_json()) == statement
        forgetful = replace(noise, colluders=2)
        with pytest.raises(ValueError, match="no more shares than colluders and dropouts leave"):
            PrivacyStatement.of_ledger(ledger, max_grad_norm=1.0, silo=forgetful)


@pytest.mark.parametrize("population", ["", "x" * 201, "bank_a\n\nPromise: epsilon 0.01", "bank\ud800"])
def test_a_population_that_would_add_lines_to_a_statement_is_refused(tmp_path: Path, population: str) -> None:
    with pytest.raises(ValueError, match="1 to 200 printable characters"):
        replace(PRIVATE, population=population)
    with pytest.raises(ValueError, match="1 to 200 printable characters"):
        Ledger.open(tmp_path / "ledger", population=population, budget=Budget(epsilon=1.0, delta=1e-5))


@pytest.mark.parametrize("rounds", [-(10**12), 0, 1.0, True, "1"])
def test_events_that_were_charged_less_than_once_are_refused_before_they_are_counted_out(rounds: Any) -> None:
    content = json.loads(PRIVATE.to_json())
    content["events"] = [dict(content["events"][0], rounds=rounds), dict(content["events"][0], rounds=10**12)]
    with pytest.raises(ValueError, match="events that were charged once or more often|expected"):
        PrivacyStatement.from_json(json.dumps(content))
