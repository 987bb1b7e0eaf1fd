"""The log of events and the record of rounds after a line that was cut off."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from privfed.engines.metrics import EventLog
from privfed.engines.run_log import RunLog


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


@given(kept=st.integers(0), again=st.booleans())
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_after_a_cut_line_the_next_event_is_on_a_line_of_its_own_and_nothing_of_other_lines_is_lost(
    tmp_path: Path, kept: int, again: bool
) -> None:
    path = tmp_path / "events.jsonl"
    path.unlink(missing_ok=True)
    log = EventLog(tmp_path, party="bank_0")
    log.write("first", number=1)
    log.write("second", number=2)
    first, second = path.read_bytes().splitlines(keepends=True)
    left = second[: kept % len(second)]
    path.write_bytes(first + left)
    # A process that goes on after a full disk, and one that is started after a crash.
    (EventLog(tmp_path, party="bank_0") if again else log).write("third", number=3)
    events = lines(tmp_path)
    assert path.read_bytes().startswith(first)
    assert [event["event"] for event in events] == ["first", *(["line cut off"] if left else []), "third"]
    if left:
        assert str(events[1]["text"]).encode() == left


def test_what_is_no_text_in_a_cut_line_does_not_stop_the_log(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(b"\x00\x00\xff")
    EventLog(tmp_path, party="bank_0").write("started")
    assert [event["event"] for event in lines(tmp_path)] == ["line cut off", "started"]


def test_an_entry_is_not_glued_to_one_that_was_cut_off(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "rounds.jsonl")
    log.append({"number": 1})
    with (tmp_path / "rounds.jsonl").open("ab") as file:
        file.write(b'{"number": ')
    log.append({"number": 2})
    assert log.entries(used=True) == [{"number": 1}, {"number": 2}]


@pytest.mark.parametrize("data", [b"", b"{}\n", b"{}\n{}\n"])
def test_whole_lines_stay_as_they_are(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "rounds.jsonl"
    path.write_bytes(data)
    assert RunLog(path).drop_cut() == b""
    assert path.read_bytes() == data
