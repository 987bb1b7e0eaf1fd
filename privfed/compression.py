"""Lossy compression of an update before it is encrypted, with error feedback.

What a compressor leaves out is kept at the client and added to its next update, so that nothing is lost in the long run (error
feedback: Karimireddy et al., 2019, arXiv:1901.09847, algorithm 2). A compressed update is post-processing of the update: under `DpSgd` it
costs no privacy. By itself it protects nothing that can be relied on; how much attacks still read is measured in
docs/experiments/audit.md. Ciphertexts have the same size whatever is in them, so that encrypted uploads do not get shorter.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


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
        largest = float(np.abs(values).max(initial=0.0))
        if largest == 0:
            return np.zeros_like(values)
        step = largest / self.levels
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
