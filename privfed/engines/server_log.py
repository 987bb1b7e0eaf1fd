"""What a server knows of a run besides the messages in its spool: a line for all that a restart must find again."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from privfed.agreement import DIGEST_BYTES, RoundContext
from privfed.engines.run_log import RunLog
from privfed.errors import DamagedFileError
from privfed.round_record import FailedRound, RoundRecord, Stage
from privfed.strict_json import whole

_LONGEST_REST = 8
"""One more than the most rounds from which a client is left out for approvals that did not come."""


class ServerLog:
    """The record of rounds in the server's folder, read when it is opened, and appended to.

    Args:
        path: The file.
        used: Whether the spool says that there were rounds.

    Raises:
        DamagedFileError: If the file is missing or damaged, or rounds in it are; nothing was changed.
    """

    def __init__(self, path: Path, *, used: bool) -> None:
        self._log = RunLog(path)
        self._begun = False
        self.held: list[RoundRecord] = []
        self.failed: list[FailedRound] = []
        self._abandoned: list[dict[str, Any]] = []
        self._silent: dict[tuple[int, int, str], Stage] = {}
        self._stalled: dict[str, list[int]] = {}
        self._refused: set[int] = set()
        try:
            for entry in self._log.entries(used=used):
                self._read(entry)
                self._begun = True
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise DamagedFileError(f"{path.name} is damaged; nothing was changed; put it back as it was") from error
        numbers = sorted([record.round for record in self.held] + [failed.round for failed in self.failed])
        if numbers != list(range(len(numbers))):
            raise DamagedFileError(f"rounds are missing in {path.name}, or stand twice; nothing was changed; put it back as it was")

    def _read(self, entry: dict[str, Any]) -> None:
        ((kind, fields),) = entry.items()
        match kind:
            case "held":
                self.held.append(RoundRecord.from_json(fields["record"]))
            case "failed":
                self.failed.append(FailedRound.from_json(fields))
            case "abandoned":
                self._abandoned.append({name: fields[name] for name in ("round", "attempt", "by", "left_out")})
            case "begun":
                pass
            case "silent":
                self._silent[fields["round"], fields["attempt"], fields["client"]] = Stage[fields["stage"]]
            case "stalled":
                self._keep_stalled(whole(fields["round"]), fields["clients"])
            case "refused":
                self._refused.add(whole(fields["round"]))
            case _:
                raise ValueError("expected an entry of a server's log, got something else")

    def history(self, number: int) -> bytes:
        """`RoundDigest.history` of the last round that was held before this one, 32 bytes; zeros if there is none."""
        before = [record.history for record in self.held if record.round < number]
        return bytes.fromhex(before[-1]) if before else bytes(DIGEST_BYTES)

    def abandoned(self, number: int) -> list[dict[str, Any]]:
        """Attempts at a round that were given up: who made that necessary, and who is left out from there on."""
        return [attempt for attempt in self._abandoned if attempt["round"] == number]

    def silent(self, number: int, *, attempt: int) -> dict[str, Stage]:
        """Clients that fell silent in an attempt at a round, and from which stage on."""
        return {name: stage for (known, at, name), stage in self._silent.items() if (known, at) == (number, attempt)}

    def resting(self, number: int) -> set[str]:
        """Clients that are better not asked to take part in a round, because rounds before failed for want of their approval.

        All others had paid for those. Each is left out of the next round, at the second time of the next 3, and from the third on of the
        next 7: whoever does so on purpose makes at most one of 8 rounds fail in the long run, and who has done so by mishap is soon there
        again.
        """
        return {name for name, rounds in self._stalled.items() if rounds[-1] < number < rounds[-1] + min(2 ** len(rounds), _LONGEST_REST)}

    def was_refused(self, number: int) -> bool:
        """Whether every client that answered has refused the aggregate of a round before."""
        return number in self._refused

    def begin(self) -> None:
        """Keeps that there is a run: before its first message is, so that no server that is killed early takes this file for lost."""
        if not self._begun:
            self._log.append({"begun": {}})
            self._begun = True

    def add_held(self, record: RoundRecord) -> None:
        """Keeps the record of a round; from here on it is never held again."""
        self._log.append({"held": {"record": record.to_json()}})
        self.held.append(record)

    def add_failed(self, failed: FailedRound) -> None:
        """Keeps that a round was not held; from here on it never is."""
        self._log.append({"failed": failed.to_json()})
        self.failed.append(failed)

    def add_abandoned(self, context: RoundContext, *, by: Sequence[str], left_out: Collection[str], reason: str) -> None:
        """Keeps that an attempt was given up; the next one has other keys."""
        fields = {"round": context.round, "attempt": context.attempt, "by": list(by), "left_out": list(left_out)}
        self._log.append({"abandoned": fields | {"reason": reason}})
        self._abandoned.append(fields)

    def add_silent(self, context: RoundContext, name: str, stage: Stage) -> None:
        """Keeps that a client fell silent."""
        place = (context.round, context.attempt, name)
        if self._silent.get(place) is not stage:
            self._log.append({"silent": {"round": context.round, "attempt": context.attempt, "client": name, "stage": stage.name}})
            self._silent[place] = stage

    def add_stalled(self, number: int, clients: Sequence[str]) -> None:
        """Keeps for whose approval, which never came, a round failed."""
        self._log.append({"stalled": {"round": number, "clients": list(clients)}})
        self._keep_stalled(number, clients)

    def _keep_stalled(self, number: int, clients: Sequence[str]) -> None:
        for name in clients:
            rounds = self._stalled.setdefault(name, [])
            if number not in rounds:
                rounds.append(number)

    def add_refused(self, number: int) -> None:
        """Keeps that every client that answered refused the aggregate of a round."""
        self._log.append({"refused": {"round": number}})
        self._refused.add(number)
