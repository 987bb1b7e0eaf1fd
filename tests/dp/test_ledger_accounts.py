"""Several jobs, queries, data sets and silos in one ledger."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from privfed.dp._chain import Chain
from privfed.dp.accounting import epsilon
from privfed.dp.entries import Reservation
from privfed.dp.ledger import Ledger
from privfed.dp.mechanism import (
    Budget,
    Composition,
    CustomerSampledGaussian,
    DiscreteGaussianSum,
    GaussianRelease,
    NonPrivateRelease,
    PoissonSampledGaussian,
    Relation,
    Unit,
    encode_event,
)
from privfed.errors import BudgetExceededError, InvalidMessageError, LedgerError
from privfed.identity import Identity

BUDGET = Budget(epsilon=2.0, delta=1e-5)
TRAINING = PoissonSampledGaussian(noise_multiplier=1.1, sample_rate=0.01, steps=100)
HALF = GaussianRelease(noise_multiplier=2.5)  # 1.54 at delta 1e-5: one fits, and two do not
CHEAP = GaussianRelease(noise_multiplier=50.0)
SUM = DiscreteGaussianSum(share_variance=4096, shares=4, l2_sensitivity=32, l1_sensitivity=320, coordinates=100)
FEATURES = np.arange(400, dtype=np.float32).reshape(100, 4)
LABELS = (np.arange(100) % 7 == 0).astype(np.int64)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "bank_a.ledger"


@pytest.fixture
def make(path: Path) -> Callable[..., Ledger]:
    return lambda **terms: Ledger.open(path, **({"population": "bank_a", "budget": BUDGET} | terms))


def reserve(ledger: Ledger, event: Any, number: int, session: bytes = b"job 1", **more: Any) -> Reservation:
    return ledger.reserve(event, session=session, round=number, attempt=0, **more)


# --- jobs and queries -----------------------------------------------------------------------------------------------------------------


def test_several_jobs_and_queries_are_charged_to_one_account(make: Callable[..., Ledger]) -> None:
    with make() as ledger:
        reserve(ledger, TRAINING, 0, b"job 1")
        reserve(ledger, TRAINING, 0, b"job 2")
        ledger.reserve_next(CHEAP, session=b"query: labels")
        ledger.reserve_next(CHEAP, session=b"query: labels")
        ledger.reserve_next(CHEAP, session=b"query: scores")
        assert ledger.spent() == epsilon([TRAINING, TRAINING, CHEAP, CHEAP, CHEAP], delta=1e-5)
        asked = [(row.reservation.session, row.reservation.round) for row in ledger.rows() if row.reservation][2:]
        assert asked == [(b"query: labels", 0), (b"query: labels", 1), (b"query: scores", 0)]
    with make() as ledger:
        assert ledger.reserve_next(CHEAP, session=b"query: labels").round == 2
        assert ledger.reserve_next(TRAINING, session=b"job 1").round == 1


def test_a_query_over_budget_is_refused_as_a_job_is(make: Callable[..., Ledger]) -> None:
    with make() as ledger:
        ledger.reserve_next(HALF, session=b"query")
        with pytest.raises(BudgetExceededError, match="nothing was spent"):
            ledger.reserve_next(HALF, session=b"query")
        assert len(ledger.events()) == 1


# --- data sets ------------------------------------------------------------------------------------------------------------------------


def changed(how: str) -> tuple[NDArray[Any], NDArray[Any]]:
    match how:
        case "one row appended":
            return np.vstack([FEATURES, FEATURES[:1]]), np.append(LABELS, 0)
        case "one value changed":
            other = FEATURES.copy()
            other[50, 2] += 1
            return other, LABELS
        case "reordered":
            return FEATURES[::-1], LABELS[::-1]
        case _:
            return FEATURES[:-1], LABELS[:-1]


CHANGES = ["one row appended", "one value changed", "reordered", "one row left out"]


@pytest.mark.parametrize("how", CHANGES)
def test_changed_data_do_not_open_a_fresh_budget(make: Callable[..., Ledger], how: str) -> None:
    with make() as ledger:
        reserve(ledger, HALF, 0, fingerprint=ledger.fingerprint(FEATURES, LABELS))
        other = ledger.fingerprint(*changed(how))
        assert other != ledger.fingerprint(FEATURES, LABELS)
        with pytest.raises(BudgetExceededError, match="nothing was spent"):
            reserve(ledger, HALF, 1, fingerprint=other)
        assert ledger.rounds_possible(HALF, fingerprint=other) == 0


def test_the_same_data_have_the_same_fingerprint_in_one_ledger_and_another_in_another(make: Callable[..., Ledger], tmp_path: Path) -> None:
    with make() as ledger:
        first = ledger.fingerprint(FEATURES, LABELS)
        assert len(first) == 32
        assert ledger.fingerprint(FEATURES.copy(order="F"), LABELS.copy()) == first
        assert ledger.fingerprint(FEATURES.astype(np.float64), LABELS) != first
        assert ledger.fingerprint(FEATURES.reshape(50, 8), LABELS) != first
        assert ledger.fingerprint(np.empty((0, 4)), np.empty(0)) != first
    with make() as ledger:
        assert ledger.fingerprint(FEATURES, LABELS) == first
    with Ledger.open(tmp_path / "other", population="bank_a", budget=BUDGET) as other:
        assert other.fingerprint(FEATURES, LABELS) != first


def test_a_fingerprint_is_recorded_and_shown_nowhere(make: Callable[..., Ledger], path: Path) -> None:
    with make() as ledger:
        fingerprint = ledger.fingerprint(FEATURES, LABELS)
        reservation = reserve(ledger, CHEAP, 0, fingerprint=fingerprint)
        assert reservation.fingerprint == fingerprint
        key = json.loads(ledger._chain.rows[0].body)["fingerprint_key"]
        shown = ledger.text() + repr(ledger.rows()) + repr(reservation) + repr(ledger)
        assert fingerprint.hex() not in shown
        assert key not in shown
    with Ledger.reopen(path) as ledger:
        known = ledger.reservation(session=b"job 1", round=0, attempt=0)
        assert known is not None
        assert known.fingerprint == fingerprint


def test_data_declared_disjoint_have_an_account_of_their_own(make: Callable[..., Ledger]) -> None:
    officer = Identity.generate("data-officer")
    with make() as ledger:
        old, new = ledger.fingerprint(FEATURES), ledger.fingerprint(FEATURES + 1000)
        reserve(ledger, HALF, 0, fingerprint=old)
        declaration = ledger.declare_disjoint(new, by=officer, reason="other customers, of the branch that was bought in May")
        declaration.verify(officer.public)
        reserve(ledger, HALF, 1, fingerprint=new)  # over budget, had it been the same account
        assert ledger.spent() == epsilon([HALF], delta=1e-5)
        assert len(ledger.events()) == 2
    with make() as ledger:
        assert ledger.declarations == (declaration,)
        assert ledger.spent() == epsilon([HALF], delta=1e-5)
        for fingerprint in (old, new):
            with pytest.raises(BudgetExceededError):
                reserve(ledger, HALF, 2, fingerprint=fingerprint)
        reserve(ledger, CHEAP, 2, fingerprint=new)
        assert ledger.spent() == epsilon([HALF, CHEAP], delta=1e-5)


@pytest.mark.parametrize("how", ["no fingerprint", "unknown"])
def test_data_of_which_nothing_was_declared_are_charged_to_every_account(make: Callable[..., Ledger], how: str) -> None:
    officer = Identity.generate("data-officer")
    with make() as ledger:
        old, new = ledger.fingerprint(FEATURES), ledger.fingerprint(FEATURES + 1000)
        reserve(ledger, CHEAP, 9, fingerprint=old)
        ledger.declare_disjoint(new, by=officer, reason="another branch")
        appended = ledger.fingerprint(np.vstack([FEATURES + 1000, FEATURES[:1]]))
        reserve(ledger, HALF, 0, fingerprint=appended if how == "unknown" else None)
        for fingerprint in (old, new, appended, None):
            with pytest.raises(BudgetExceededError):
                reserve(ledger, HALF, 1, fingerprint=fingerprint)


def test_a_row_appended_to_data_declared_disjoint_does_not_open_a_fresh_budget(make: Callable[..., Ledger]) -> None:
    officer = Identity.generate("data-officer")
    with make() as ledger:
        new = ledger.fingerprint(FEATURES)
        ledger.declare_disjoint(new, by=officer, reason="another branch")
        reserve(ledger, HALF, 0, fingerprint=new)
        with pytest.raises(BudgetExceededError):
            reserve(ledger, HALF, 1, fingerprint=ledger.fingerprint(np.vstack([FEATURES, FEATURES[:1]])))


def test_data_that_were_charged_before_cannot_be_declared_disjoint_afterwards(make: Callable[..., Ledger]) -> None:
    officer = Identity.generate("data-officer")
    with make() as ledger:
        fingerprint = ledger.fingerprint(FEATURES)
        reserve(ledger, CHEAP, 0, fingerprint=fingerprint)
        rows = ledger.rows()
        with pytest.raises(LedgerError, match="nothing was declared"):
            ledger.declare_disjoint(fingerprint, by=officer, reason="I changed my mind")
        assert ledger.rows() == rows
        other = ledger.fingerprint(FEATURES + 1)
        ledger.declare_disjoint(other, by=officer, reason="another branch")
        with pytest.raises(LedgerError, match="nothing was declared"):
            ledger.declare_disjoint(other, by=officer, reason="again")


def test_a_declaration_is_bound_to_its_author_its_data_its_reason_and_all_that_was_before(make: Callable[..., Ledger]) -> None:
    from dataclasses import replace

    officer = Identity.generate("data-officer")
    with make() as ledger:
        declaration = ledger.declare_disjoint(ledger.fingerprint(FEATURES), by=officer, reason="another branch")
    assert (declaration.declared_by, declaration.public_key) == ("data-officer", officer.public.public_key)
    with pytest.raises(InvalidMessageError):
        declaration.verify(Identity.generate("data-officer").public)
    for change in ({"head": bytes(32)}, {"fingerprint": bytes(32)}, {"reason": "else"}):
        with pytest.raises(InvalidMessageError):
            replace(declaration, **change).verify(officer.public)


@pytest.mark.parametrize(("fingerprint", "reason"), [(b"short", "why"), (bytes(32), ""), (bytes(32), "x" * 1001)])
def test_a_declaration_needs_a_fingerprint_and_a_reason(make: Callable[..., Ledger], fingerprint: bytes, reason: str) -> None:
    with make() as ledger, pytest.raises(ValueError, match="expected a fingerprint"):
        ledger.declare_disjoint(fingerprint, by=Identity.generate("a"), reason=reason)


def test_a_fingerprint_of_another_length_is_refused(make: Callable[..., Ledger]) -> None:
    with make() as ledger, pytest.raises(ValueError, match="expected a fingerprint"):
        reserve(ledger, CHEAP, 0, fingerprint=b"short")


# --- silos ----------------------------------------------------------------------------------------------------------------------------


def test_records_and_the_silo_are_accounted_jointly_and_each_in_its_own_budget(make: Callable[..., Ledger]) -> None:
    with make(silo_budget=Budget(epsilon=12.0, delta=1e-6)) as ledger:
        for number in range(2):
            reserve(ledger, TRAINING, number, silo_event=SUM)
        ledger.reserve_next(CHEAP, session=b"query")  # costs records alone
        assert ledger.spent() == epsilon([TRAINING, TRAINING, CHEAP], delta=1e-5)
        assert ledger.silo_spent() == epsilon([SUM, SUM], delta=1e-6)
        assert ledger.silo_events() == (SUM, SUM)
    with make(silo_budget=Budget(epsilon=12.0, delta=1e-6)) as ledger:
        assert ledger.silo_spent() == epsilon([SUM, SUM], delta=1e-6)
        assert ledger.silo_spent(delta=1e-5) < ledger.silo_spent()


def test_an_event_over_one_of_both_budgets_charges_neither(make: Callable[..., Ledger], path: Path) -> None:
    silo_budget = Budget(epsilon=epsilon([SUM, SUM], delta=1e-6) * 1.001, delta=1e-6)
    with make(silo_budget=silo_budget) as ledger:
        assert ledger.rounds_possible(CHEAP, silo_event=SUM) == 2
        for number in range(2):
            reserve(ledger, CHEAP, number, silo_event=SUM)
        spent, rows = (ledger.spent(), ledger.silo_spent()), ledger.rows()
        with pytest.raises(BudgetExceededError, match=r"on the silo as a whole.*nothing was spent or trained; 0 more rounds"):
            reserve(ledger, CHEAP, 2, silo_event=SUM)
        with pytest.raises(BudgetExceededError, match="bring what is spent from"):
            reserve(ledger, NonPrivateRelease(), 2, silo_event=SUM)
        assert (ledger.spent(), ledger.silo_spent()) == spent
        assert ledger.rows() == rows
        reserve(ledger, CHEAP, 2)


def test_the_budget_of_a_silo_is_spent_to_the_last_bit_and_not_a_bit_beyond(make: Callable[..., Ledger], tmp_path: Path) -> None:
    with make(silo_budget=Budget(epsilon=1e6, delta=1e-6)) as ledger:
        ledger.reserve(CHEAP, session=b"s", round=0, attempt=0, silo_event=SUM)
        cost = ledger.silo_spent()
    for limit, covered in ((cost, True), (math.nextafter(cost, 0), False), (cost / 1.005, False)):
        silo_budget = Budget(epsilon=limit, delta=1e-6)
        path = tmp_path / f"{limit!r}.ledger"
        with Ledger.open(path, population="other", budget=Budget.unlimited(delta=1e-6), silo_budget=silo_budget) as ledger:
            assert ledger.rounds_possible(CHEAP, silo_event=SUM) == covered
            if covered:
                ledger.reserve(CHEAP, session=b"s", round=0, attempt=0, silo_event=SUM)
            with pytest.raises(BudgetExceededError, match="what is spent on the silo as a whole"):
                ledger.reserve(CHEAP, session=b"s", round=1, attempt=0, silo_event=SUM)
            assert ledger.silo_spent() <= limit


def test_a_silo_is_charged_only_where_it_has_a_budget(make: Callable[..., Ledger]) -> None:
    with make() as ledger:
        for action in (lambda: reserve(ledger, CHEAP, 0, silo_event=SUM), ledger.silo_spent):
            with pytest.raises(ValueError, match="expected a ledger with a silo_budget"):
                action()
        assert ledger.events() == ()


# --- units, relations, composition ------------------------------------------------------------------------------------------------------


def test_an_event_of_another_unit_is_refused(make: Callable[..., Ledger]) -> None:
    customers = CustomerSampledGaussian(noise_multiplier=2.0, sample_rate=0.01, records_per_customer=3, steps=10)
    with make() as ledger:
        for event in (customers, SUM):
            with pytest.raises(ValueError, match="expected an event about one record"):
                reserve(ledger, event, 0)
        with pytest.raises(ValueError, match="expected an event about one record"):
            ledger.rounds_possible(customers)
        assert len(ledger.rows()) == 1


def test_a_ledger_of_customers_charges_what_customers_pay(make: Callable[..., Ledger]) -> None:
    customers = CustomerSampledGaussian(noise_multiplier=2.0, sample_rate=0.01, records_per_customer=3, steps=10)
    with make(unit=Unit.CUSTOMER) as ledger:
        reserve(ledger, customers, 0)
        assert ledger.spent() == epsilon([customers], delta=1e-5) > epsilon([CHEAP], delta=1e-5)
        with pytest.raises(ValueError, match="expected an event about one customer"):
            reserve(ledger, TRAINING, 1)


def test_a_ledger_for_replaced_records_charges_more(make: Callable[..., Ledger]) -> None:
    with make(relation=Relation.REPLACE_ONE) as ledger:
        reserve(ledger, TRAINING, 0)
        assert ledger.spent() == epsilon([TRAINING], delta=1e-5, relation=Relation.REPLACE_ONE) > epsilon([TRAINING], delta=1e-5)


def test_an_adaptive_ledger_stops_at_a_proven_filter(make: Callable[..., Ledger]) -> None:
    with make(composition=Composition.ADAPTIVE) as ledger:
        rounds = ledger.rounds_possible(TRAINING)
        assert rounds > 1
        for number in range(rounds):
            reserve(ledger, TRAINING, number)
        with pytest.raises(BudgetExceededError):
            reserve(ledger, TRAINING, rounds)
        fixed = epsilon(ledger.events(), delta=1e-5)
        assert fixed < ledger.spent() <= 2.0
    with make(composition=Composition.ADAPTIVE) as ledger:
        assert len(ledger.events()) == rounds


def test_an_adaptive_ledger_refuses_what_it_has_no_filter_for(make: Callable[..., Ledger]) -> None:
    customers = CustomerSampledGaussian(noise_multiplier=2.0, sample_rate=0.01, records_per_customer=3, steps=10)
    with make(composition=Composition.ADAPTIVE, unit=Unit.CUSTOMER) as ledger:
        with pytest.raises(ValueError, match="known Renyi divergences"):
            reserve(ledger, customers, 0)
        assert len(ledger.rows()) == 1


TERMS: list[dict[str, Any]] = [
    {"unit": Unit.CUSTOMER},
    {"relation": Relation.REPLACE_ONE},
    {"composition": Composition.ADAPTIVE},
    {"silo_budget": Budget(epsilon=1.0, delta=1e-6)},
]


@pytest.mark.parametrize("other", TERMS)
def test_no_term_of_a_ledger_can_be_changed(make: Callable[..., Ledger], path: Path, other: dict[str, Any]) -> None:
    make().close()
    with pytest.raises(LedgerError, match=r"was made for .*, and was opened for .*; nothing was opened or changed"):
        make(**other)
    before = path.read_bytes()
    make().close()
    with Ledger.open(path.with_name("other"), population="bank_a", budget=BUDGET, **other) as ledger:
        assert ledger.terms != make().terms
    assert path.read_bytes() == before


def test_terms_that_make_no_sense_open_nothing(make: Callable[..., Ledger], path: Path) -> None:
    with pytest.raises(ValueError, match="silo_budget"):
        make(unit=Unit.SILO)
    with pytest.raises(ValueError, match="limited budget"):
        make(composition=Composition.ADAPTIVE, budget=Budget.unlimited(delta=1e-5))
    assert not path.exists()


# --- the dump -------------------------------------------------------------------------------------------------------------------------


def test_the_dump_names_the_terms_every_row_and_what_is_left(make: Callable[..., Ledger]) -> None:
    officer = Identity.generate("data-officer")
    with make(silo_budget=Budget(epsilon=12.0, delta=1e-6)) as ledger:
        ledger.commit(reserve(ledger, TRAINING, 3, silo_event=SUM))
        ledger.reserve_next(CHEAP, session=b"\xffbinary")
        ledger.declare_disjoint(ledger.fingerprint(FEATURES), by=officer, reason="another branch")
        ledger.record_countersignatures(rows=3, context=bytes(32), start=0, signature=b"", hashes=(), signatures={"bank_b": bytes(64)})
        text = ledger.text()
        for words in (
            "population 'bank_a', unit RECORD, relation ADD_OR_REMOVE_ONE, epsilon 2 at delta 1e-05",
            "for the silo epsilon 12 at delta 1e-06",
            "one record",
            "fixed before anything was seen",
            "0  20",
            "opened",
            "reserved round 3, attempt 0 of 'job 1': 100 noisy training steps",
            "and for the silo: 1 sums of integer vectors with 4 shares",
            "committed round 3, attempt 0 of 'job 1'",
            "of 'ff62696e617279'",
            "'data-officer' declared other data to be disjoint from all before: another branch",
            "head of 3 rows countersigned by bank_b",
            f"Spent: epsilon {ledger.spent():.4g} of 2 at delta 1e-05",
            f"Spent on the silo as a whole: epsilon {ledger.silo_spent():.4g} of 12 at delta 1e-06",
            f"Head of 6 rows: {ledger.head.hex()}",
        ):
            assert words in text
        assert text.count("\n") == 6 + 5


def test_an_adaptive_or_unlimited_ledger_says_so(make: Callable[..., Ledger], tmp_path: Path) -> None:
    with make(composition=Composition.ADAPTIVE) as ledger:
        assert "adaptive" in ledger.text()
    unlimited = Budget.unlimited(delta=1e-5)
    with Ledger.open(tmp_path / "other", population="b", budget=unlimited, silo_budget=unlimited) as ledger:
        assert ledger.text().count("no limit") == 2


# --- rows that do not fit together ------------------------------------------------------------------------------------------------------

PLACE = {"session": b"s".hex(), "round": 0, "attempt": 0, "time": "now"}
DECLARED = {"kind": "declare", "fingerprint": "00" * 32, "reason": "why", "by": "a", "public_key": "00", "signature": "00", "time": "now"}


@pytest.mark.parametrize(
    "rows",
    [
        [{"kind": "reserve", "event": encode_event(SUM), **PLACE}],
        [{"kind": "reserve", "event": encode_event(CHEAP), "silo_event": encode_event(CHEAP), **PLACE}],
        [{"kind": "reserve", "event": encode_event(CHEAP), "silo_event": encode_event(SUM), **PLACE}],
        [{"kind": "countersign", "rows": 1, "head": "00" * 32, "context": "00" * 32, "by": {}, "time": "now"}],
        [{"kind": "countersign", "rows": 99, "head": "00" * 32, "context": "00" * 32, "by": {}, "time": "now"}],
        [DECLARED, DECLARED],
        [{"kind": "reserve", "event": encode_event(CHEAP), "fingerprint": "00" * 32, **PLACE}, DECLARED],
        [{**DECLARED, "fingerprint": "no hexadecimal"}],
    ],
)
def test_rows_that_say_what_no_ledger_wrote_are_not_understood(path: Path, make: Callable[..., Ledger], rows: list[dict[str, Any]]) -> None:
    make().close()
    chain = Chain(path, create=False)
    for row in rows:
        chain.append(row)
    chain.close()
    with pytest.raises(LedgerError, match="does not understand everything"):
        make()
