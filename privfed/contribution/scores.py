"""Cumulative scores, kept across rounds and restarts."""

import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Self

_FORMAT = "privfed scores v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Scores of a run after some of its rounds. As private as the inner products they come from, unless the clients agreed to see them.

    Args:
        rule: Name of the rule that they belong to.
        rounds: Numbers of the rounds that are in them, ascending.
        values: Score of each client that took part in one, by name.

    Raises:
        ValueError: If a score is NaN or infinite, or the rounds are not ascending.
    """

    rule: str
    rounds: tuple[int, ...] = ()
    values: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        values = {name: float(value) for name, value in self.values.items()}
        if not all(map(math.isfinite, values.values())):
            raise ValueError("expected finite scores, got NaN or infinity")
        if any(later <= earlier for earlier, later in zip(self.rounds, self.rounds[1:], strict=False)):
            raise ValueError(f"expected ascending rounds, got {self.rounds}")
        object.__setattr__(self, "values", MappingProxyType(values))

    def after(self, number: int, values: Mapping[str, float]) -> Self:
        """The scores after one more round.

        Args:
            number: Of the round.
            values: Scores after it, of all clients that ever took part.

        Raises:
            ValueError: If the round is in the scores already, is not later than all that are, or a client is missing. So a round
                that is gone through again after a restart is never counted twice.
        """
        if missing := sorted(set(self.values) - set(values)):
            raise ValueError(f"expected a score for every client that ever took part, missing {missing}")
        return type(self)(rule=self.rule, rounds=(*self.rounds, number), values=values)


class ScoreStore:
    """One file with the current `Scores`, replaced as a whole: a crash leaves the old or the new ones, never a mixture.

    Args:
        path: The file, made with mode 0600 by the first `save`.
        rule: Name of the rule.
    """

    def __init__(self, path: Path, *, rule: str) -> None:
        self._path = path
        self._rule = rule

    def load(self) -> Scores:
        """The stored scores; empty ones if nothing was stored yet.

        Raises:
            ValueError: If the file holds scores of another rule, or something else.
        """
        if not self._path.exists():
            return Scores(rule=self._rule)
        try:
            fields = json.loads(self._path.read_text(encoding="utf-8"))[_FORMAT]
            scores = Scores(rule=fields["rule"], rounds=tuple(fields["rounds"]), values=fields["values"])
        except (KeyError, TypeError, AttributeError, OverflowError, RecursionError, json.JSONDecodeError) as error:
            raise ValueError("expected a file of scores as ScoreStore.save writes it, got something else") from error
        if scores.rule != self._rule:
            raise ValueError(f"expected scores of {self._rule}, got some of {scores.rule}")
        return scores

    def save(self, scores: Scores) -> None:
        """Replaces the stored scores; they are on disk, synchronised, before this returns. Every digit is kept.

        Raises:
            ValueError: If they are of another rule.
        """
        if scores.rule != self._rule:
            raise ValueError(f"expected scores of {self._rule}, got some of {scores.rule}")
        fields = {_FORMAT: {"rule": scores.rule, "rounds": scores.rounds, "values": dict(scores.values)}}
        descriptor, temporary = tempfile.mkstemp(dir=self._path.parent, prefix=".")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(fields, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self._path)
        except BaseException:
            os.unlink(temporary)
            raise
        directory = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
