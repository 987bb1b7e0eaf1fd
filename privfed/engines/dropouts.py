"""Clients that do not answer in time, for simulations. On a network, an engine's time-outs take this place."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from privfed.round_record import Stage


class Absences(Protocol):
    """Says who falls silent when."""

    def silent(self, round: int, names: Sequence[str]) -> Mapping[str, Stage]:  # noqa: A002 -- the field's word
        """The clients that fall silent in a round, and the stage from which on."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropouts:
    """Each client falls silent with the same probability in each round, at a stage drawn uniformly.

    Args:
        probability: From 0 to 1.
        seed: Decides who falls silent when. Nothing about it is secret.

    Raises:
        ValueError: If the probability is out of range.

    Example:
        >>> Dropouts(probability=1.0, seed=0).silent(3, ["bank_a"]).keys()
        dict_keys(['bank_a'])
    """

    probability: float
    seed: int

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise ValueError(f"expected a probability from 0 to 1, got {self.probability}")

    def silent(self, round: int, names: Sequence[str]) -> dict[str, Stage]:  # noqa: A002 -- the field's word
        """See `Absences.silent`. The same round and names give the same answer, also after a restart."""
        rng = np.random.default_rng((self.seed, round))
        drawn = rng.random(len(names)) < self.probability
        stages = rng.choice(list(Stage), size=len(names))
        return {name: Stage(int(stage)) for name, falls, stage in zip(names, drawn, stages, strict=True) if falls}
