"""A party's durable copy of the model: which rounds are in it, and its weights."""

from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from privfed.agreement import DIGEST_BYTES
from privfed.errors import DamagedFileError
from privfed.files import replacement
from privfed.update import Layout, PlainVector


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState:
    """The model as one party holds it.

    Args:
        values: The weights.
        rounds: Numbers of the rounds whose aggregates are in it, ascending.
        history: `RoundDigest.digest` of the last of them, 32 bytes; zeros if there is none.

    Raises:
        ValueError: If the rounds are not ascending, or the history has another length.
    """

    values: PlainVector
    rounds: tuple[int, ...] = ()
    history: bytes = bytes(DIGEST_BYTES)

    def __post_init__(self) -> None:
        if len(self.history) != DIGEST_BYTES:
            raise ValueError(f"expected a history of {DIGEST_BYTES} bytes, got {len(self.history)}")
        if any(later <= earlier for earlier, later in zip(self.rounds, self.rounds[1:], strict=False)):
            raise ValueError(f"expected ascending rounds, got {self.rounds}")


class ModelStore:
    """One file with the current `ModelState`, replaced as a whole: a crash leaves the old or the new one, never a mixture.

    Args:
        path: The file, made with mode 0600 by the first `save`.
        layout: Layout of the model.
    """

    def __init__(self, path: Path, *, layout: Layout) -> None:
        self._path = path
        self._layout = layout

    def load(self) -> ModelState | None:
        """The stored state, or None if nothing was stored yet.

        Raises:
            LayoutMismatchError: If the file holds a model of another size.
            DamagedFileError: If it is damaged, or holds something else.
        """
        if not self._path.exists():
            return None
        data = BytesIO(self._path.read_bytes())
        try:
            with np.load(data, allow_pickle=False) as file:
                values, rounds, history = file["values"], file["rounds"], file["history"]
            return ModelState(
                values=PlainVector(layout=self._layout, values=values),
                rounds=tuple(int(number) for number in rounds),
                history=history.tobytes(),
            )
        except (ValueError, TypeError, LookupError, AttributeError, EOFError, OSError, RuntimeError, BadZipFile) as error:
            raise DamagedFileError(
                f"{self._path.name} is damaged or no model of a session; nothing was done; put it back, or take it away with the whole "
                "folder of this client and join a new session"
            ) from error

    def save(self, state: ModelState) -> None:
        """Replaces the stored state; it is on disk, synchronised, before this returns."""
        with replacement(self._path) as file:
            np.savez(
                file,
                values=state.values.values,
                rounds=np.array(state.rounds, dtype=np.int64),
                history=np.frombuffer(state.history, dtype=np.uint8),
            )
