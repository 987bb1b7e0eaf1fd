"""Where clients differ, a report speaks of the worst of them: what is said holds for everybody."""

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import pytest

from privfed.engines.local import simulate
from privfed.history import History
from privfed.report import summary
from privfed.report.advice import advice
from privfed.report.checks import run_checks
from privfed.report.model import Report
from privfed.report.pictures import figures
from privfed.report.summary import Point, certainty, verdict
from privfed.report.tone import Tone
from tests.consortia import consortium, network

if TYPE_CHECKING:
    from privfed.audit.findings import Audit

WORST = {"bank_0": 2.0, "bank_1": 31.25, "bank_2": 0.5}


class Tried:
    """Stands for an audit of which only its summary matters."""

    audited = ()


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    """Two rounds of three banks of which one, neither the first nor the last, spent far more than the others."""
    with ExitStack() as stack:
        run = simulate(consortium(stack, tmp_path_factory.mktemp("ledgers")), network(), rounds=2)
    rounds = tuple(
        replace(held, epsilon={name: value * share for name, value in WORST.items()})
        for held, share in zip(run.rounds, (0.5, 1.0), strict=True)
    )
    return replace(run, rounds=rounds, budget={"bank_0": 40.0, "bank_1": 33.0, "bank_2": 50.0})


def test_the_first_page_the_advice_and_the_figure_speak_of_the_client_that_spent_most(history: History) -> None:
    report = Report(title="Three banks", history=history)
    promise = next(point for point in certainty(report) if point.lead == "Promise")
    assert promise.text.startswith("Epsilon 31.25 of 33 at most.")
    spend = next(point for point in advice(report) if point.lead == "Spend less privacy.")
    assert spend.text.startswith("At epsilon 31.25 ")
    privacy = next(figure for figure in figures(report) if figure.caption.startswith("Privacy spent"))
    assert "Epsilon after each round, from 15.62 to 31.25" in privacy.svg
    assert "budget, 33" in privacy.svg


def test_the_verdict_is_about_the_client_that_spent_most(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    """An audit that found nothing is no comfort while one client is promised next to nothing."""
    calm = Point(tone=Tone.CALM, lead="Nothing was read", text="As far as anybody tried.")
    monkeypatch.setattr(summary, "_audited", lambda _: calm)
    tried = cast("Audit", Tried())
    monkeypatch.setattr(Report, "checks", ())
    assert verdict(Report(title="Three banks", history=history, audit=tried)).lead == "Nothing was read, but next to nothing is promised"
    modest = tuple(replace(held, epsilon=dict.fromkeys(WORST, 0.5)) for held in history.rounds)
    assert verdict(Report(title="Three banks", history=replace(history, rounds=modest), audit=tried)) == calm


def test_the_policy_is_checked_at_the_smallest_round_and_the_heaviest_client(history: History) -> None:
    def evidence(*coefficients: tuple[int, int, int]) -> tuple[str, bool | None]:
        rounds = tuple(
            replace(held, record=replace(held.record, coefficients=dict(zip(WORST, round_of, strict=True))))
            for held, round_of in zip(history.rounds, coefficients, strict=True)
        )
        policy = run_checks(replace(history, rounds=rounds), encrypted=False)[0]
        return policy.evidence, policy.holds

    assert evidence((1, 1, 1), (1, 2, 1)) == ("fewest clients in 2 rounds: 3; largest share: 50%", True)
    assert evidence((1, 1, 1), (1, 0, 1)) == ("fewest clients in 2 rounds: 2; largest share: 50%", False)
    assert evidence((1, 8, 1), (1, 1, 1)) == ("fewest clients in 2 rounds: 3; largest share: 80%", False)
