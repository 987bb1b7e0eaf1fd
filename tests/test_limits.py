from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from privfed.attacks.adversary import CLIENT_WITH_SERVER, SERVER
from privfed.attacks.meters import Meter
from privfed.attacks.observation import NotApplicable
from privfed.attacks.scoring import Interval, advantage, interval
from privfed.audit.example import Example
from privfed.audit.findings import Audit, Finding, Measured
from privfed.audit.limits import Limits
from privfed.audit.metering import MeteredTraining, TrainingReading
from privfed.audit.suite import Baseline
from privfed.errors import UnsupportedDataError
from privfed.history import History

EXAMPLE = Example(columns=("a",), truth=(("1",),), said=(("1",),), right=((True,),), certified=(False,), guessed=(False,))
CIPHERTEXT = NotApplicable(reason="only ciphertext was seen")


def outcome(*scores: float, baseline: float = 0.2, **options: Any) -> Measured:
    values: dict[str, Any] = {
        "score": interval(scores),
        "baseline": baseline,
        "stronger": Baseline.MEAN,
        "baselines": dict.fromkeys(Baseline, baseline),
        "gain": interval([score - baseline for score in scores]),
        "advantage": advantage(sum(scores) / len(scores), baseline=baseline),
        "certified": 0.0,
        "false_certificates": 0,
        "rows": 4,
        "example": EXAMPLE,
    }
    return Measured(**values | options)


READ = outcome(1.0, 1.0)
GUESSED = outcome(*[0.19, 0.21] * 30)


def finding(found: Measured | NotApplicable, *, control: bool = False, adversary: Any = CLIENT_WITH_SERVER) -> Finding:
    return Finding(
        adversary=adversary,
        party=adversary.name,
        attack="records",
        measure="of cells right",
        protection="encrypted",
        control=control,
        outcome=found,
        bytes_seen=9 if found is CIPHERTEXT else None,
    )


METER = Meter(what="noise", measured=1.0, low=0.9, high=1.1, declared=1.0, less="less noise", more="more noise")
READING = TrainingReading(noise=METER, weight=METER, on_the_model=(), claimed=2.0, proved=0.5, delta=1e-5)
METERED = MeteredTraining(client="bank_1", claims_noise=True, reading=READING, missing="")


def audit(*audited: Finding, control: Measured | NotApplicable = READ, trainings: tuple[MeteredTraining, ...] = (METERED,)) -> Audit:
    return Audit(
        mode="SharedKey",
        protection="encrypted",
        clients=3,
        rows=4,
        repeats=5,
        findings=(*audited, finding(control, control=True)),
        trainings=trainings,
        holdings={},
        seconds=1.0,
    )


def history(epsilon: Mapping[str, float], *, private: bool = True) -> History:
    return cast(History, SimpleNamespace(epsilon=epsilon, private=private))


def told(limits: Limits, found: Audit, epsilon: Mapping[str, float] | None = None, *, private: bool = True) -> list[str]:
    return [str(one) for one in limits.check(found, history({"bank_1": 3.0} if epsilon is None else epsilon, private=private))]


SAFE = audit(finding(GUESSED), finding(CIPHERTEXT, adversary=SERVER))


def test_a_run_that_keeps_all_limits_exceeds_none() -> None:
    assert told(Limits(max_cells_read=0.1, max_epsilon=3.0, require_as_declared=True), SAFE) == []
    assert told(Limits(), audit(finding(READ), trainings=())) == []
    assert not Limits().given
    assert Limits(require_as_declared=True).given


def test_records_that_are_read_exceed_a_limit_and_party_and_number_are_named() -> None:
    (line,) = told(Limits(max_cells_read=0.5), audit(finding(outcome(0.8, 0.9, 0.8, 0.9)), finding(CIPHERTEXT, adversary=SERVER)))
    assert line.startswith(
        f"max_cells_read 0.5: {CLIENT_WITH_SERVER.name}, records: an advantage of 0.81, and up to 0.93 by what 4 batches"
    )
    assert line.count("records:") == 1


def test_the_upper_end_of_the_interval_decides_and_not_its_middle() -> None:
    wide = outcome(0.0, 0.4, baseline=0.2)
    assert wide.advantage == pytest.approx(0)
    assert "up to 1.00" in told(Limits(max_cells_read=0.9), audit(finding(wide)))[0]
    assert told(Limits(max_cells_read=0.06), audit(finding(GUESSED))) == []
    assert told(Limits(max_cells_read=0.0), audit(finding(GUESSED)))


@pytest.mark.parametrize(("batches", "confirmed"), [(2, 0.78), (3, 0.64), (16, 0.18), (29, 0.1)])
def test_batches_in_which_nothing_at_all_was_read_keep_no_limit_that_so_few_cannot_confirm(batches: int, confirmed: float) -> None:
    silent = audit(finding(outcome(*[0.2] * batches)))
    assert told(Limits(max_cells_read=confirmed), silent) == []
    assert "by what" in told(Limits(max_cells_read=confirmed - 0.02), silent)[0]


def test_a_party_as_which_no_attack_reads_records_without_protection_keeps_no_limit() -> None:
    blind = outcome(0.0, 0.4, baseline=0.2)
    other = replace(CLIENT_WITH_SERVER, name="another")
    found = audit(finding(GUESSED), finding(GUESSED, adversary=other), finding(blind, control=True, adversary=other))
    assert "not measured as another: no attack on records reads any there" in told(Limits(max_cells_read=0.9), found)[0]
    seen = audit(finding(GUESSED), finding(GUESSED, adversary=other), finding(READ, control=True, adversary=other))
    assert told(Limits(max_cells_read=0.9), seen) == []


def test_every_party_must_keep_the_limit_not_the_first_alone() -> None:
    other = replace(CLIENT_WITH_SERVER, name="another")
    assert "another, records" in told(Limits(max_cells_read=0.5), audit(finding(GUESSED), finding(READ, adversary=other)))[0]


def test_a_certificate_exceeds_every_limit_though_few_cells_were_right() -> None:
    (line,) = told(Limits(max_cells_read=0.9), audit(finding(outcome(0.2, 0.2, certified=0.5))))
    assert "0.5 of 4 records certified" in line


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (audit(finding(GUESSED), control=GUESSED), "the attacks fail even where nothing protects"),
        (audit(finding(GUESSED), control=NotApplicable(reason="of the model")), "the attacks fail even where nothing protects"),
        (audit(finding(NotApplicable(reason="of the model"))), "no attack on records applied"),
        (audit(finding(GUESSED), finding(NotApplicable(reason="of it"), adversary=SERVER)), f"not measured as {SERVER.name}"),
        (audit(finding(outcome(1.0, 1.0, baseline=1.0))), "guessing is always right"),
        (audit(finding(replace(GUESSED, example=None))), "no attack on records applied"),
        (audit(), "no party was audited"),
    ],
)
def test_an_audit_that_measured_nothing_does_not_keep_a_limit(found: Audit, why: str) -> None:
    (line,) = told(Limits(max_cells_read=0.99), found)
    assert why in line


def test_more_right_picks_than_the_noise_allows_exceed_a_limit_on_records() -> None:
    picks = outcome(1.0, 1.0, 1.0, 1.0, 1.0, baseline=0.1, bound=0.2, example=None)
    allowed = replace(picks, bound=0.9)
    assert "more picks are right" in told(Limits(max_cells_read=0.5), audit(finding(GUESSED), finding(picks)))[0]
    assert told(Limits(max_cells_read=0.5), audit(finding(GUESSED), finding(allowed))) == []


def test_epsilon_is_limited_for_every_client_and_never_met_without_privacy() -> None:
    limit = Limits(max_epsilon=3.0)
    assert told(limit, SAFE, {"bank_1": 3.0, "bank_2": 3.01}) == ["max_epsilon 3: bank_2 spent 3.01"]
    assert told(limit, SAFE, {"bank_1": float("nan")})
    assert told(limit, SAFE, {}) == ["max_epsilon 3: not known what was spent"]
    assert "no differential privacy may be claimed" in told(limit, SAFE, {"bank_1": 1.0}, private=False)[0]


def test_training_as_declared_must_have_been_measured_at_every_client() -> None:
    limit = Limits(require_as_declared=True)
    faulty = replace(METERED, client="bank_2", reading=replace(READING, noise=replace(METER, measured=0.4, low=0.3, high=0.5)))
    unmeasured = MeteredTraining(client="bank_3", claims_noise=True, reading=None, missing="too few records")
    silent = MeteredTraining(client="bank_4", claims_noise=False, reading=None, missing="it says that it trains without noise")
    (line,) = told(limit, audit(finding(GUESSED), trainings=(METERED, faulty, unmeasured, silent)))
    assert line.startswith("require_as_declared: bank_2: ")
    assert "less noise" in line
    assert "bank_3: not measured: too few records" in line
    assert "bank_4: not measured: it says that it trains without noise" in line
    assert "bank_1" not in line
    assert told(limit, audit(finding(GUESSED), trainings=()))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"max_cells_read": -0.1}, "max_cells_read from 0 and below 1"),
        ({"max_cells_read": 1.0}, "max_cells_read from 0 and below 1"),
        ({"max_cells_read": float("nan")}, "max_cells_read from 0 and below 1"),
        ({"max_cells_read": "0.1"}, "expected a number, got str"),
        ({"max_epsilon": 0.0}, "max_epsilon to be a finite number above 0"),
        ({"max_epsilon": float("inf")}, "max_epsilon to be a finite number above 0"),
        ({"max_epsilon": True}, "expected a number, got bool"),
        ({"require_as_declared": 1}, "require_as_declared to be true or false"),
    ],
)
def test_limits_that_limit_nothing_are_refused(change: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Limits(**change)


def test_limits_are_read_from_a_file_as_they_are_written(tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    file.write_text("# for the pipeline\nmax_cells_read = 0.1\nmax_epsilon = 8\nrequire_as_declared = true\n")
    assert Limits.load(file) == Limits(max_cells_read=0.1, max_epsilon=8, require_as_declared=True)
    with pytest.raises(FileNotFoundError):
        Limits.load(tmp_path / "absent.toml")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "max_cells = 0.1",
        "max_epsilon = '8'",
        "max_epsilon = nan",
        "max_epsilon = 8\nmax_epsilon = 9",
        "no toml",
        "require_as_declared = false",
    ],
)
def test_a_file_of_limits_that_says_something_else_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "limits.toml"
    file.write_text(text)
    with pytest.raises(UnsupportedDataError, match="nothing was audited"):
        Limits.load(file)


def test_a_bound_is_broken_by_what_chance_does_not_give() -> None:
    def picks(right: float, repeats: int, bound: float) -> bool:
        score = Interval(mean=right, low=right, high=right, level=0.95, repeats=repeats)
        return outcome(1.0, 1.0, score=score, bound=bound).breaks_bound

    assert picks(1.0, 8, 0.39)
    assert not picks(1.0, 3, 0.39)  # three batches do not tell: they are all right by chance once in 17 times
    assert not picks(0.45, 16, 0.39)
    assert not picks(0.2, 1000, 0.39)
    assert not picks(1.0, 1000, 1.0)
    assert picks(0.5, 1000, 0.39)
