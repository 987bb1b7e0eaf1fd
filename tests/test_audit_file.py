import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from privfed.attacks.adversary import SERVER, Form, Holding
from privfed.attacks.meters import Meter
from privfed.attacks.observation import NotApplicable
from privfed.attacks.scoring import Interval
from privfed.audit.findings import Audit, Finding, Measured
from privfed.audit.metering import MeteredTraining, TrainingReading
from privfed.audit.poisoned import Poisoned
from privfed.audit.suite import Baseline, Example
from privfed.audit_file import read_audit, write_audit
from privfed.errors import UnsupportedDataError
from privfed.strict_json import checksum

EXAMPLE = Example(
    columns=("type", "amount"),
    truth=(("CASH_OUT", "0.100"),),
    said=(("CASH_OUT", "0.300"),),
    right=((True, False),),
    certified=(False,),
    guessed=(True,),
)
MEASURED = Measured(
    score=Interval(mean=0.1 + 0.2, low=-0.1, high=0.7, level=0.95, repeats=2),
    baseline=1 / 3,
    stronger=Baseline.MEAN,
    baselines={Baseline.MEAN: 1 / 3, Baseline.MARGINAL: 0.25},
    gain=Interval(mean=-1 / 3, low=-0.5, high=0.25, level=0.995, repeats=2),
    advantage=-math.inf,
    certified=0.5,
    false_certificates=1,
    rows=4,
    example=EXAMPLE,
)
FINDING = Finding(
    adversary=SERVER,
    party="the server",
    attack="records",
    measure="of cells right",
    protection="encrypted",
    control=False,
    outcome=MEASURED,
    bytes_seen=None,
)
METER = Meter(what="noise", measured=1.0, low=0.9, high=1.1, declared=1.0, less="too little", more="too much")
READING = TrainingReading(noise=METER, weight=METER, on_the_model=(METER, METER), claimed=math.inf, proved=0.5, delta=1e-5)
AUDIT = Audit(
    mode="SharedKey",
    protection="encrypted",
    clients=3,
    rows=4,
    repeats=2,
    findings=(
        FINDING,
        replace(FINDING, outcome=replace(MEASURED, example=None, bound=0.1 + 0.2)),
        replace(FINDING, outcome=NotApplicable(reason="nothing was sent"), bytes_seen=4096),
    ),
    trainings=(
        MeteredTraining(client="bank_1", claims_noise=True, reading=READING, missing=""),
        MeteredTraining(client="bank_2", claims_noise=True, reading=None, missing="too few records"),
    ),
    holdings={"the server": (Holding(what="uploads", size=12, form=Form.CIPHERTEXT),), "nobody": ()},
    seconds=1.5,
    poisonings=(Poisoned(attack="its own, turned round", held=True, share=0.25, moved=0.5, cosine=-0.1),),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_audit(AUDIT, tmp_path / "audit.json", run="this run")
    return tmp_path / "audit.json"


def test_an_audit_comes_back_as_it_was(path: Path) -> None:
    assert read_audit(path, run="this run") == AUDIT
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_a_number_that_is_none_comes_back_as_such(path: Path) -> None:
    undefined = replace(AUDIT, findings=(replace(FINDING, outcome=replace(MEASURED, advantage=math.nan)),))
    write_audit(undefined, path, run="this run")
    found = read_audit(path, run="this run")
    assert found is not None
    assert isinstance(found.findings[0].outcome, Measured)
    assert math.isnan(found.findings[0].outcome.advantage)


def test_the_audit_of_another_run_is_none_and_so_is_no_file(path: Path) -> None:
    assert read_audit(path, run="another run") is None
    assert read_audit(path.with_name("absent.json"), run="this run") is None


def set_to(value: object, *place: str | int) -> Any:
    def change(file: Any) -> None:
        for step in place[:-1]:
            file = file[step]
        file[place[-1]] = value

    return change


DAMAGE = {
    "no audit": set_to([], "audit"),
    "another type": set_to("Finding", "audit", "is"),
    "text for a number": set_to("three", "audit", "clients"),
    "a number for text": set_to(3, "audit", "mode"),
    "an unknown name": set_to("A FORM", "audit", "holdings", 0, 1, 0, "form"),
    "an unknown kind of outcome": set_to({"is": "Path"}, "audit", "findings", 0, "outcome"),
    "no outcome": set_to(None, "audit", "findings", 0, "outcome"),
    "one field more": set_to(1, "audit", "extra"),
    "a field beside it": set_to(1, "extra"),
    "another verdict": set_to("As declared.", "training_verdict"),
    "a measurement that is not as the verdict says": set_to("9.0", "audit", "trainings", 0, "reading", "weight", "low"),
    "no verdict": set_to(None, "training_verdict"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_file_that_holds_something_else_is_refused_though_its_checksum_was_computed_anew(path: Path, damage: Any) -> None:
    file = json.loads(path.read_text())
    del file["checksum"]
    damage(file)
    file["checksum"] = checksum(file)
    path.write_text(json.dumps(file))
    with pytest.raises(UnsupportedDataError, match="does not hold what privfed audit writes; nothing was done; remove it"):
        read_audit(path, run="this run")


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", "\xff"])
def test_a_file_that_is_no_audit_at_all_is_refused(path: Path, text: str) -> None:
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UnsupportedDataError, match="nothing was done"):
        read_audit(path, run="this run")


def test_what_an_audit_must_not_hold_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="plain values, got bytes"):
        write_audit(replace(AUDIT, mode=b"bytes"), tmp_path / "audit.json", run="this run")
    assert not (tmp_path / "audit.json").exists()


@pytest.mark.parametrize("place", [("score", "mean"), ("gain", "high"), ("certified",), ("rows",)])
def test_an_edited_number_is_noticed_by_the_checksum(path: Path, place: tuple[str, ...]) -> None:
    file = json.loads(path.read_text())
    set_to(3 if place == ("rows",) else "0.0", "audit", "findings", 0, "outcome", *place)(file)
    path.write_text(json.dumps(file))
    with pytest.raises(UnsupportedDataError, match="nothing was done"):
        read_audit(path, run="this run")


def test_a_key_that_stands_twice_is_refused(path: Path) -> None:
    path.write_text(path.read_text().replace('"run": ', '"run": "this run", "run": ', 1))
    with pytest.raises(UnsupportedDataError, match="nothing was done"):
        read_audit(path, run="this run")


def test_the_file_says_the_verdict(path: Path) -> None:
    assert json.loads(path.read_text())["training_verdict"] == AUDIT.training_verdict
    assert AUDIT.training_verdict.startswith("As declared: the noise and the clipping of bank_1, ")
    assert AUDIT.training_verdict.endswith("; not measured at bank_2: too few records.")
