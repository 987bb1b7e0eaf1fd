"""The last round and attempt that a party was asked to take part in, on its disk: what comes late is for none of these any more."""

import json
from pathlib import Path

from privfed import files
from privfed.agreement import RoundContext
from privfed.engines.party_folder import ASKED
from privfed.errors import DamagedFileError, RoundMismatchError
from privfed.strict_json import parse


class LastAsked:
    """Refuses requests that arrive after a later round or attempt began: nobody waits for their answer, and training would be charged.

    The history that stands in a request does not tell: where a round was not held, the next one has the same.

    Args:
        folder: The party's.

    Raises:
        DamagedFileError: If the file is damaged; nothing was changed.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / ASKED
        self._last = (0, 0)
        if self._path.exists():
            try:
                kept = parse(self._path.read_text())
                self._last = (kept["round"], kept["attempt"])
            except (ValueError, TypeError, LookupError, RecursionError):
                self._last = (-1, -1)
            if not all(type(number) is int and number >= 0 for number in self._last):
                raise DamagedFileError(f"{ASKED} is damaged; nothing was changed; put it back as it was")

    def check(self, context: RoundContext) -> None:
        """Refuses what is late.

        Raises:
            RoundMismatchError: If it is; nothing was done.
        """
        if (context.round, context.attempt) < self._last:
            raise RoundMismatchError(
                f"the request is for round {context.round}, attempt {context.attempt}, and came after round {self._last[0]}, attempt "
                f"{self._last[1]}, had begun; nothing was done"
            )

    def begin(self, context: RoundContext) -> None:
        """Takes note of a round or attempt that begins, durably, before anything is done for it."""
        self.check(context)
        if (context.round, context.attempt) != self._last:
            files.replace(self._path, json.dumps({"round": context.round, "attempt": context.attempt}).encode())
            self._last = (context.round, context.attempt)
