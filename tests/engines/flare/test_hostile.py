"""One bank after the other sends what it should not; the rounds are held without it, and it catches up afterwards."""

from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("nvflare", reason="needs nvflare: pip install 'privfed[flare]'")

from privfed.deploy.plan import Plan
from privfed.engines.deployments import write_deployment
from privfed.he.secret import SharedKey
from privfed.identity import Identity
from tests.engines.flare.loopback import Loopback, edit, free_port
from tests.engines.flare.plans import PAYSIM_SITE, PLAN, write_plan
from tests.engines.flare.runs import model_at, records

pytestmark = pytest.mark.nightly

BANKS = ("bank_a", "bank_b", "bank_c")
COMPLETED = "FINISHED:COMPLETED"
SECONDS = 400
_HOSTILE = "tests.engines.flare.hostile"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loopback]:
    folder = tmp_path_factory.mktemp("flare")
    plan = f"min_clients = 2\nmax_share = 0.9\n{PLAN}"
    write_deployment(Plan.load(write_plan(folder, port=free_port(), site=PAYSIM_SITE, plan=plan)), folder / "out")
    for name in BANKS:
        edit(
            folder / "out" / name / "flare/local/resources.json", "class_allow_list", to=["privfed.engines.flare.executor.Party", _HOSTILE]
        )
    with Loopback(folder / "out") as loopback:
        loopback.start()
        yield loopback


def held(running: Loopback) -> dict[int, list[str]]:
    """Participants by round, as the server recorded them."""
    entries = [entry["held"]["record"] for entry in records(running.folder / "server") if "held" in entry]
    return {entry["round"]: sorted(entry["coefficients"]) for entry in entries}


def test_a_tampered_upload_and_then_too_few_are_not_opened(running: Loopback) -> None:
    tampered = f"{_HOSTILE}.TamperedParty"
    assert running.submit(running.job("one", rounds=1, parties={"bank_c": tampered}), seconds=SECONDS) == COMPLETED
    assert held(running) == {0: ["bank_a", "bank_b"]}
    said = running.failure(running.job("two", rounds=2, parties={"bank_b": tampered, "bank_c": tampered}), seconds=SECONDS)
    assert "privfed: the run failed: 1 of 2 rounds were not held, and nothing of them was opened: round 1: " in said
    assert held(running) == {0: ["bank_a", "bank_b"]}
    assert model_at(running.folder / "bank_a")[1] == [0]


def test_an_upload_of_an_earlier_round_is_refused(running: Loopback) -> None:
    job = running.job("stale", rounds=4, parties={"bank_c": f"{_HOSTILE}.StaleParty"})
    assert running.submit(job, seconds=SECONDS) == COMPLETED
    assert held(running) == {0: ["bank_a", "bank_b"], 2: ["bank_a", "bank_b", "bank_c"], 3: ["bank_a", "bank_b"]}


def test_a_bank_with_another_key_is_left_out(running: Loopback) -> None:
    key = running.folder / "bank_c" / "shared.key"
    right = key.rename(key.with_suffix(".right"))
    SharedKey.generate().save(key)
    assert running.submit(running.job("key", rounds=5), seconds=SECONDS) == COMPLETED
    assert held(running)[4] == ["bank_a", "bank_b"]
    right.replace(key)


def test_a_bank_whom_the_agreement_does_not_know_is_left_out(running: Loopback) -> None:
    identity = running.folder / "bank_c" / "identity.pem"
    right = identity.rename(identity.with_suffix(".right"))
    Identity.generate("bank_c").save(identity)
    running.submit(running.job("identity", rounds=6, status=60), seconds=SECONDS)
    right.replace(identity)
    assert "this party does not take part: the key in bank_c/identity.pem is of nobody" in running.output("bank_c")
    assert held(running).get(5, ["bank_a", "bank_b"]) == ["bank_a", "bank_b"]


def test_afterwards_all_have_the_same_weights(running: Loopback) -> None:
    assert running.submit(running.job("all", rounds=7), seconds=SECONDS) == COMPLETED
    assert held(running)[6] == list(BANKS)
    models = [model_at(running.folder / name) for name in BANKS]
    assert all(np.array_equal(values, models[0][0]) and rounds == models[0][1] for values, rounds in models)
