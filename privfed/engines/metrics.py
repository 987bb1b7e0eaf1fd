"""What a party tells its operator: a line per event, and counters as JSON and as Prometheus text. No private values."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from privfed import files
from privfed.engines.party_folder import EVENTS, METRICS_JSON, METRICS_PROM
from privfed.engines.run_log import RunLog

_METRICS: Mapping[str, tuple[str, str]] = {
    "rounds_held": ("counter", "Rounds that were held, and are in the record of rounds."),
    "rounds_failed": ("counter", "Rounds that were not held."),
    "round_last": ("gauge", "Number of the last round in the record, from 0."),
    "requests": ("counter", "Requests since the start, by step."),
    "refusals": ("counter", "Refusals since the start, by kind."),
    "silences": ("counter", "Parties that did not answer in time since the start, by step."),
    "received_bytes": ("counter", "Bytes received since the start."),
    "sent_bytes": ("counter", "Bytes sent since the start."),
    "seconds": ("counter", "Wall-clock seconds since the start, by step."),
    "epsilon_spent": ("gauge", "What this party's privacy ledger says was spent."),
}


class Metrics:
    """Counters of one party, in two files of its folder that are replaced as a whole.

    Args:
        folder: The party's.
        party: Its name.
    """

    def __init__(self, folder: Path, *, party: str) -> None:
        self._folder = folder
        self._party = party
        self._values: dict[tuple[str, str], float] = {}

    def add(self, name: str, by: float = 1, *, label: str = "") -> None:
        """Counts on."""
        self._values[name, label] = self._values.get((name, label), 0) + by

    def set(self, name: str, value: float) -> None:
        """Sets a number."""
        self._values[name, ""] = value

    def write(self) -> None:
        """Replaces both files."""
        entries = [{"name": name, "label": label, "value": value} for (name, label), value in sorted(self._values.items())]
        text = json.dumps({"party": self._party, "metrics": entries}, indent=1, allow_nan=False)
        files.replace(self._folder / METRICS_JSON, f"{text}\n".encode())
        files.replace(self._folder / METRICS_PROM, self._prometheus().encode())

    def _prometheus(self) -> str:
        lines: list[str] = []
        for name, (kind, words) in _METRICS.items():
            found = [(label, value) for (known, label), value in sorted(self._values.items()) if known == name]
            if found:
                full = f"privfed_{name}{'_total' if kind == 'counter' else ''}"
                lines += [f"# HELP {full} {words}", f"# TYPE {full} {kind}"]
                for label, value in found:
                    labels = f'party="{self._party}"' + (f',of="{label}"' if label else "")
                    lines.append(f"{full}{{{labels}}} {value!r}")
        return "\n".join(lines) + "\n"


class EventLog:
    """A JSON line per event, with the time in UTC, in the party's folder.

    What there is of a line that a crash or a full disk cut off stands in an event `line cut off`; the lines before it stay as they are.

    Args:
        folder: The party's.
        party: Its name.
    """

    def __init__(self, folder: Path, *, party: str) -> None:
        self._log = RunLog(folder / EVENTS)
        self._party = party

    def write(self, event: str, **facts: object) -> None:
        """Appends one line.

        Args:
            event: What happened, in a word or two.
            facts: Public JSON values.
        """
        if cut := self._log.drop_cut():
            self._append("line cut off", {"text": cut.decode(errors="replace")})
        self._append(event, facts)

    def _append(self, event: str, facts: Mapping[str, object]) -> None:
        self._log.append({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "party": self._party, "event": event, **facts})
