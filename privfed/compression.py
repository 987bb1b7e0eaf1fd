"""Lossy compression of an update before it is encrypted, with error feedback.

What a compressor leaves out is kept at the client and added to its next update, so that nothing is lost in the long run (error
feedback: Karimireddy et al., 2019, arXiv:1901.09847, algorithm 2). A compressed update is post-processing of the update: under `DpSgd` it
costs no privacy. By itself it protects nothing that can be relied on; how much attacks still read is measured in
docs/experiments/audit.md. Ciphertexts have the same size whatever is in them, so that encrypted uploads do not get shorter.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from privfed.errors import HistoryMismatchError
from privfed.he.codec import dequantise, quantise
from privfed.he.params import CkksParams
from privfed.table import Table
from privfed.update import Aggregate, Layout, PlainVector

_COLUMNS = "name TEXT PRIMARY KEY, round INTEGER, attempt INTEGER, data BLOB"


class Compressor(Protocol):
    """Makes of an update one that needs fewer bits."""

    @property
    def name(self) -> str:
        """For reports."""
        ...

    def compress(self, values: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
        """The compressed update, of the same shape; the argument is not changed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK:
    """Keeps the coordinates of largest magnitude, at least one, and sets the others to zero. Public.

    Args:
        share: Share of the coordinates that is kept, above 0, at most 1.
    """

    share: float

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"expected share above 0 and at most 1, got {self.share}")

    @property
    def name(self) -> str:
        """For reports."""
        return f"top {self.share:.0%}" if self.share >= 0.01 else f"top {self.share:.1%}"

    def compress(self, values: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
        """The kept coordinates as they were; nothing is drawn."""
        del rng
        kept = max(1, math.ceil(self.share * values.size))
        chosen = np.argpartition(np.abs(values), -kept)[-kept:]
        sparse = np.zeros_like(values)
        sparse[chosen] = values[chosen]
        return sparse


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """Keeps the sign of every coordinate, times their mean magnitude (Karimireddy et al., 2019, arXiv:1901.09847, example 4). Public."""

    @property
    def name(self) -> str:
        """For reports."""
        return "sign"

    def compress(self, values: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
        """Signs of one magnitude; a zero stays zero. Nothing is drawn."""
        del rng
        return np.sign(values) * np.abs(values).mean()


@dataclass(frozen=True, slots=True, kw_only=True)
class StochasticQuantisation:
    """Rounds every coordinate up or down to a level, at random, so that it is right on average (QSGD: Alistarh et al., 2017). Public.

    Args:
        levels: Number of levels from zero to the largest magnitude of the update, at least 1.
    """

    levels: int

    def __post_init__(self) -> None:
        if self.levels < 1:
            raise ValueError(f"expected at least 1 level, got {self.levels}")

    @property
    def name(self) -> str:
        """For reports."""
        return f"stochastic quantisation, {self.levels} levels"

    def compress(self, values: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
        """Multiples of the largest magnitude over `levels`, each next to the coordinate, whose expectation is the coordinate."""
        step = float(np.abs(values).max(initial=0.0)) / self.levels
        if step == 0:  # also where the largest magnitude is too small for a float to be divided
            return np.zeros_like(values)
        return np.floor(values / step + rng.random(values.shape)) * step


def with_feedback(
    compressor: Compressor, values: NDArray[np.float64], left: NDArray[np.float64], rng: np.random.Generator
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Compresses an update and what earlier ones left out.

    What is sent and what is left add up to what came in, so that over all rounds only the last remainder is missing.

    Args:
        compressor: What to compress with.
        values: The update, of shape (size,). Private.
        left: What earlier updates left out, of the same shape; zeros at first. Private.
        rng: Source of the rounding.

    Returns:
        What is sent, and what is left out now.
    """
    whole = values + left
    sent = compressor.compress(whole, rng)
    return sent, whole - sent


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class _Kept:
    """A remainder, and the round and attempt that it is of."""

    values: NDArray[np.float64]
    round: int = -1
    attempt: int = 0


class ErrorFeedback:
    """What one client's compressed updates left out, kept until a later one makes up for it.

    What a round left out counts once the round was opened; a round that was not leaves the remainder as it was, because nothing of it is in
    the model.

    Args:
        compressor: What to compress with.
        layout: Layout of the model.
        path: File that survives a restart; it is made if it is not there. Left out, nothing is kept. Private.
        rounds: Rounds that are in the client's model, ascending.

    Raises:
        HistoryMismatchError: If the file misses a round that is in the model.
        LayoutMismatchError: If the file is of another model.
        DamagedFileError: If the file holds something else.
    """

    def __init__(self, *, compressor: Compressor, layout: Layout, path: Path | None = None, rounds: tuple[int, ...] = ()) -> None:
        self._compressor = compressor
        self._layout = layout
        self._table = None if path is None else Table(path, name="remainders", columns=_COLUMNS)
        self._left = self._next = _Kept(values=np.zeros(layout.size))
        if self._table is not None:
            self._load(self._table)
        if rounds and self._left.round < rounds[-1]:
            raise HistoryMismatchError(
                "what compression left out misses a round that is in the model; nothing was done; put its file back, or start a new session"
            )

    def compress(self, update: PlainVector, params: CkksParams, *, round: int, attempt: int) -> PlainVector:  # noqa: A002
        """What is sent in place of an update, on the grid. What is left out now is kept, durably, until the round is opened.

        Args:
            update: As it was trained. Private, or under `DpSgd` as private as what was sent before.
            params: The grid.
            round: Number of the round.
            attempt: Number of the attempt; a newer one takes the place of an older one.
        """
        # The rounding hides nothing, so its numbers need no secrecy; they are new in every attempt.
        compressed, _ = with_feedback(self._compressor, update.values, self._left.values, np.random.default_rng())
        sent = dequantise(quantise(compressed, params)[0], 1, params)
        self._keep(self._left, _Kept(values=update.values + self._left.values - sent, round=round, attempt=attempt))
        return PlainVector(layout=self._layout, values=sent)

    def opened(self, aggregate: Aggregate[PlainVector], *, client: str, attempt: int) -> None:
        """Takes note of an opened round, durably. Again, it does nothing.

        Args:
            aggregate: What was opened.
            client: Name of this client.
            attempt: Number of the attempt that was opened.

        Raises:
            HistoryMismatchError: If this client took part and does not know what it left out; nothing is changed.
        """
        number = aggregate.round
        if number <= self._left.round:
            return
        left = _Kept(values=self._left.values, round=number, attempt=attempt)
        if aggregate.coefficients.get(client):
            if (self._next.round, self._next.attempt) != (number, attempt):
                raise HistoryMismatchError(
                    f"{client!r} took part in round {number} and does not know what it left out; the remainder was left as it was; put its "
                    "file back, or start a new session"
                )
            left = self._next
        self._keep(left, self._next)

    def _keep(self, left: _Kept, following: _Kept) -> None:
        if self._table is not None:
            named = (("left", left), ("next", following))
            rows = [(name, kept.round, kept.attempt, kept.values.astype("<f8").tobytes()) for name, kept in named]
            with self._table.transaction() as connection:
                connection.executemany("REPLACE INTO remainders VALUES (?, ?, ?, ?)", rows)
        self._left, self._next = left, following

    def _load(self, table: Table) -> None:
        with table.transaction() as connection:
            found = {name: row for name, *row in connection.execute("SELECT name, round, attempt, data FROM remainders")}
        for name, (number, attempt, data) in found.items():
            # PlainVector refuses a file of another model.
            values = PlainVector(layout=self._layout, values=np.frombuffer(data, dtype="<f8")).values
            kept = _Kept(values=values, round=number, attempt=attempt)
            if name == "left":
                self._left = kept
            else:
                self._next = kept
