import json
import math
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import get_args

import pytest

from privfed.dp.accounting import epsilon
from privfed.dp.ledger import Ledger
from privfed.dp.mechanism import Budget, Event, GaussianRelease, NonPrivateRelease, PoissonSampledGaussian
from privfed.dp.statement import PrivacyStatement, Randomness

TRAINING = PoissonSampledGaussian(noise_multiplier=1.1, sample_rate=0.01, steps=100)
HISTOGRAM = GaussianRelease(noise_multiplier=8.0, count=2)


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


def test_every_event_type_has_words() -> None:
    assert {type(event) for event in (TRAINING, HISTOGRAM, NonPrivateRelease())} == set(get_args(Event))
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
    assert replace(PRIVATE, epsilon=0.995 * PRIVATE.epsilon).private


def edited(**changes: object) -> str:
    return json.dumps({**json.loads(PRIVATE.to_json()), **changes})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        edited(epsilon=0.5),
        edited(epsilon="1"),
        edited(private=False),
        edited(format="privfed privacy statement v2"),
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
