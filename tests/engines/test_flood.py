"""Bytes that anybody on the way can send again and again: a node does not write for each of them, and counts them all."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from privfed.engines import allowance, node
from privfed.engines.allowance import Allowance
from privfed.engines.node import Node
from privfed.phases import Step
from tests.engines.deployed import Deployed, deploy
from tests.engines.test_coordinator import events
from tests.engines.test_node import answered, asking

FLOOD = 400


@pytest.fixture
def deployed(tmp_path: Path) -> Deployed:
    return deploy(tmp_path, private=False)


@pytest.fixture
def synchronised(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every fsync."""
    calls: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append(descriptor) or real(descriptor))
    return calls


def metrics(deployed: Deployed) -> dict[tuple[str, str], float]:
    written = json.loads((deployed.folder("bank_0") / "metrics.json").read_text())["metrics"]
    return {(entry["name"], entry["label"]): entry["value"] for entry in written}


def logged(deployed: Deployed, event: str, **facts: Any) -> list[dict[str, Any]]:
    return [each for each in events(deployed, "bank_0") if each["event"] == event and facts.items() <= each.items()]


def left_out(deployed: Deployed) -> int:
    return sum(event.get("left_out", 0) for event in events(deployed, "bank_0"))


@pytest.mark.parametrize("what", ["no request", "copies of one"])
def test_a_flood_of_bytes_is_written_down_a_hundred_times_at_once_and_then_every_ten_seconds_and_counted_in_full(
    deployed: Deployed, synchronised: list[int], what: str
) -> None:
    begun = time.monotonic()
    with Node(deployed.folder("bank_0")) as party:
        before = len(synchronised)
        copy = asking(deployed, Step.STATUS)
        for number in range(FLOOD):
            party.answer(copy if what == "copies of one" else number.to_bytes(4, "big"))
        calls = len(synchronised) - before
    # One that is fresh, a hundred at once, one more every ten seconds; for each a line, and two files in a folder.
    most = 1 + 100 + (time.monotonic() - begun) / 10
    assert 5 * 100 <= calls <= 5 * most
    event, step = ("answered", "STATUS") if what == "copies of one" else ("refused", "INVALID")
    written = len(logged(deployed, event))
    assert 100 <= written <= most
    assert written + left_out(deployed) == FLOOD
    assert metrics(deployed)["requests", step] == FLOOD
    if event == "refused":
        assert metrics(deployed)["refusals", "InvalidMessageError"] == FLOOD


def test_what_the_server_asks_for_the_first_time_is_written_down_whatever_else_came(deployed: Deployed) -> None:
    with Node(deployed.folder("bank_0")) as party:
        for number in range(FLOOD):
            party.answer(number.to_bytes(4, "big"))
        for number in range(5):
            assert answered(deployed, party, asking(deployed, Step.STATUS, round=number)).refusal == ""
            assert len(logged(deployed, "answered", step="STATUS", round=number)) == 1
            assert metrics(deployed)["requests", "STATUS"] == number + 1
            assert metrics(deployed)["requests", "INVALID"] == FLOOD
        assert len(logged(deployed, "refused")) + left_out(deployed) == FLOOD


def test_a_round_that_a_copy_of_a_request_opens_is_written_down_too(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request may have come before, when the disk was full."""
    monkeypatch.setattr(node, "_LOGGED_AT_ONCE", 1)
    with Node(deployed.folder("bank_0")) as party:
        request = asking(deployed, Step.SETUP)
        for _ in range(3):
            party.answer(request)
        bank: Any = party._party
        monkeypatch.setattr(bank, "opened", lambda _: {"round": 0, "attempt": 0, "coefficients": None, "epsilon": None})
        party.answer(request)
        assert len(logged(deployed, "round opened")) == 1
        assert metrics(deployed)["rounds_held", ""] == 1


def test_an_allowance_grows_again_with_time_and_never_beyond_what_is_allowed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(allowance.time, "monotonic", lambda: now[0])
    allowed = Allowance(burst=3, seconds=10.0)

    def taken() -> int:
        return sum(allowed.take() for _ in range(20))

    assert taken() == 3
    for later, expected in ((9.0, 0), (11.0, 1), (31.0, 2), (1e6, 3)):
        now[0] = later
        assert taken() == expected
