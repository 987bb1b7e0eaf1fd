"""Whether what was opened gives the key away: sums must be published rounded to the grid, never with the noise of their decryption."""

from dataclasses import dataclass

import numpy as np

from privfed.attacks.key_recovery import RecoveredKey, real_parts, recover_key, see_sum
from privfed.attacks.record import EncryptedRecord
from privfed.he.params import ring_of


@dataclass(frozen=True, slots=True, kw_only=True)
class OpeningReading:
    """What an opened sum gave away of its key. Public: the key was of a canary round.

    Args:
        off_grid: Largest distance of an opened number from the grid, in steps.
        rounding: As far as double precision alone explains, in the same unit.
        recovered: Whether the key was computed from what was published.
        words: What key recovery came to.
    """

    off_grid: float
    rounding: float
    recovered: bool
    words: str

    @property
    def fault(self) -> str:
        """What is wrong, in words; empty if nothing is."""
        if self.recovered:
            return f"the key was recovered from what was opened: {self.words}"
        if self.off_grid > self.rounding:
            return f"opened numbers are {self.off_grid:.1e} steps off the grid: they carry noise of the decryption, and with it the key"
        return ""

    @property
    def evidence(self) -> str:
        """What was looked at, and what was seen."""
        return f"opened numbers are at most {self.off_grid:.1e} steps off the grid; key recovery: {self.words}"


def read_opening(record: EncryptedRecord) -> OpeningReading:
    """Looks at a round's opening as everybody sees it, and tries to compute the key (see `privfed.attacks.key_recovery`)."""
    published = record.published
    # What was opened was added to the model and taken off again.
    moved = np.abs(record.start.values).max() + np.abs(record.opened.vector.values).max()
    opened = float(np.abs(record.opened.vector.values).max())
    steps = float(np.abs(published).max())
    rounding = 2 * float(np.spacing(moved)) * (steps / opened if opened else 0.0) + 2.0**-50 * steps
    off_grid = float(np.abs(published - np.rint(published)).max())
    recovered, words = _recover(record)
    return OpeningReading(off_grid=off_grid, rounding=rounding, recovered=recovered, words=words)


def _recover(record: EncryptedRecord) -> tuple[bool, str]:
    params, size, total = record.params, record.params.chunk_coordinates, record.total
    if total is None:
        return False, "not tried, because in this trust mode no client holds the key"
    if len(record.published) < 2 * size:
        return False, "not tried, because fewer than two whole ciphertexts were opened"
    raw = record.published * 2.0**params.guard_bits
    chunks = [real_parts(raw[start : start + size], params) for start in (0, size)]
    found = recover_key(ring_of(params), see_sum(total)[:2], chunks)
    if isinstance(found, RecoveredKey):
        return True, "two ciphertexts and their opened numbers gave a key of -1, 0 and 1"
    return False, f"no key, because {found.reason}"
