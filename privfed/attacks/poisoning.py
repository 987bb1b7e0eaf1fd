"""What a bad client does: to its records before it trains, or to its update before it sends it.

For experiments and for the audit. Nothing here defends; `privfed.aggregation` and `privfed.contribution.checks` do.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from privfed.data.samples import Samples
from privfed.errors import LayoutMismatchError
from privfed.update import PlainVector


class DataAttack(Protocol):
    """An attack on a client's own records."""

    def poison(self, samples: Samples, *, rng: np.random.Generator) -> Samples:
        """The records that the client trains on instead. The argument is not changed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelFlip:
    """Calls every record of one class another one, such as a fraud no fraud.

    Args:
        source: The class to hide, from 0.
        target: What it is called, another class from 0.

    Raises:
        ValueError: If a class is negative or both are one.
    """

    source: int
    target: int

    def __post_init__(self) -> None:
        if min(self.source, self.target) < 0 or self.source == self.target:
            raise ValueError(f"expected two different classes from 0, got {self.source} and {self.target}")

    def poison(self, samples: Samples, *, rng: np.random.Generator) -> Samples:  # noqa: ARG002
        """See `DataAttack.poison`."""
        return _relabelled(samples, np.where(samples.labels == self.source, self.target, samples.labels))


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelShuffle:
    """Renames the classes by one fixed permutation: the records are learnable, and wrong.

    Args:
        permutation: What class 0, 1, ... is called: each class once.

    Raises:
        ValueError: If it is no permutation.
    """

    permutation: tuple[int, ...]

    def __post_init__(self) -> None:
        if sorted(self.permutation) != list(range(len(self.permutation))):
            raise ValueError(f"expected each class from 0 once, got {self.permutation}")

    @classmethod
    def drawn(cls, classes: int, *, rng: np.random.Generator) -> "LabelShuffle":
        """A permutation that leaves no class its name, each of them equally likely.

        Raises:
            ValueError: If there are fewer than two classes.
        """
        if classes < 2:
            raise ValueError(f"expected at least 2 classes, got {classes}")
        while True:
            permutation = rng.permutation(classes)
            if (permutation != np.arange(classes)).all():
                return cls(permutation=tuple(permutation.tolist()))

    def poison(self, samples: Samples, *, rng: np.random.Generator) -> Samples:  # noqa: ARG002
        """See `DataAttack.poison`.

        Raises:
            ValueError: If a record has a class beyond the permutation.
        """
        if samples.classes > len(self.permutation):
            raise ValueError(f"expected at most {len(self.permutation)} classes, got {samples.classes}")
        return _relabelled(samples, np.array(self.permutation)[samples.labels])


@dataclass(frozen=True, slots=True, kw_only=True)
class Backdoor:
    """Stamps a trigger on some records and calls them the target class (Gu et al., 2017, arXiv:1708.06733).

    Args:
        columns: Positions of the feature columns of the trigger, each once.
        values: What they are set to, finite.
        target: Class of every record with the trigger, from 0.
        share: Of the records that are stamped, above 0 and up to 1, rounded up.

    Raises:
        ValueError: If a number is out of range or the lengths differ.
    """

    columns: tuple[int, ...]
    values: tuple[float, ...]
    target: int
    share: float = 0.5

    def __post_init__(self) -> None:
        if not self.columns or len(self.columns) != len(self.values) or len(set(self.columns)) != len(self.columns):
            raise ValueError("expected one value for each of at least one column, each column once")
        if min(self.columns) < 0 or self.target < 0 or not all(map(math.isfinite, self.values)) or not 0 < self.share <= 1:
            raise ValueError("expected columns and a target from 0, finite values, and a share above 0 and up to 1, got others")

    def stamped(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """Copies of records, of shape (records, columns), with the trigger.

        Raises:
            ValueError: If there are fewer columns than the trigger has.
        """
        if max(self.columns) >= features.shape[1]:
            raise ValueError(f"expected at least {max(self.columns) + 1} feature columns, got {features.shape[1]}")
        stamped = np.array(features, dtype=np.float32)
        stamped[:, list(self.columns)] = self.values
        return stamped

    def poison(self, samples: Samples, *, rng: np.random.Generator) -> Samples:
        """See `DataAttack.poison`.

        Raises:
            ValueError: If there are fewer columns than the trigger has.
        """
        chosen = rng.choice(len(samples), size=math.ceil(self.share * len(samples)), replace=False)
        features, labels = np.array(samples.features), np.array(samples.labels)
        features[chosen] = self.stamped(features[chosen])
        labels[chosen] = self.target
        return Samples(features=features, labels=labels, groups=samples.groups, columns=samples.columns)

    def success_rate(self, predicted: NDArray[np.int64], labels: NDArray[np.int64]) -> float:
        """Share of the records of other classes that are taken for the target once they have the trigger; NaN if there is none.

        Args:
            predicted: Classes that a model predicts for `stamped` records.
            labels: Their true classes.

        Raises:
            ValueError: If the shapes differ.
        """
        if predicted.shape != labels.shape:
            raise ValueError(f"expected one prediction per label, got shapes {predicted.shape} and {labels.shape}")
        others = labels != self.target
        return float((predicted[others] == self.target).mean()) if others.any() else math.nan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Knowledge:
    """What a bad client knows when it makes its update.

    Args:
        own: What it would send if it were honest.
        honest: Updates of others that it knows: those of its accomplices, or all of them for the strongest attacker.
        last: The last aggregate, None before the first.
        round: Number of the round.
    """

    own: PlainVector
    honest: Sequence[PlainVector] = ()
    last: PlainVector | None = None
    round: int = 0

    def __post_init__(self) -> None:
        layouts = {vector.layout for vector in (self.own, *self.honest, *(() if self.last is None else (self.last,)))}
        if len(layouts) > 1:
            raise LayoutMismatchError("expected vectors of one layout, got different ones; nothing was poisoned")

    @property
    def known(self) -> NDArray[np.float64]:
        """The honest updates that it knows, or its own if it knows none, of shape (updates, size)."""
        return np.stack([vector.values for vector in (self.honest or (self.own,))])


class UpdateAttack(Protocol):
    """An attack on the update that a client sends."""

    def poison(self, knowledge: Knowledge, *, rng: np.random.Generator) -> PlainVector:
        """What the client sends instead."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Its own update times a factor: above 1 to outweigh the others, below 0 to undo them (sign flip).

    Source: Bagdasaryan et al., 2020, section 3 (model replacement: a factor of the number of clients).

    Args:
        factor: Finite.

    Raises:
        ValueError: If it is not.
    """

    factor: float

    def __post_init__(self) -> None:
        _check_finite(factor=self.factor)

    def poison(self, knowledge: Knowledge, *, rng: np.random.Generator) -> PlainVector:  # noqa: ARG002
        """See `UpdateAttack.poison`."""
        return _like(knowledge, self.factor * knowledge.own.values)


def sign_flip(factor: float = 1.0) -> Scaling:
    """Minus `factor` times its own update.

    Raises:
        ValueError: If the factor is not positive and finite.
    """
    if not factor > 0:
        raise ValueError(f"expected a positive factor, got {factor}")
    return Scaling(factor=-factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alie:
    """A little is enough: the mean of the known updates minus some standard deviations, coordinate by coordinate.

    Close enough that many honest updates are further out. Source: Baruch et al., 2019, algorithm 3.

    Args:
        deviations: Standard deviations, positive.

    Raises:
        ValueError: If they are not positive and finite.
    """

    deviations: float

    def __post_init__(self) -> None:
        _check_finite(deviations=self.deviations)
        if self.deviations <= 0:
            raise ValueError(f"expected positive deviations, got {self.deviations}")

    @classmethod
    def against(cls, *, clients: int, byzantine: int) -> "Alie":
        """The most deviations at which, per coordinate, enough honest clients are expected further out to make a majority.

        Raises:
            ValueError: If the attackers are none or a majority, or so many or so few that this is no positive number.
        """
        if not 1 <= byzantine < clients / 2:
            raise ValueError(f"expected attackers from 1 to below half of {clients} clients, got {byzantine}")
        supporters = clients // 2 + 1 - byzantine
        honest = clients - byzantine
        return cls(deviations=float(stats.norm.ppf((honest - supporters) / honest)))

    def poison(self, knowledge: Knowledge, *, rng: np.random.Generator) -> PlainVector:  # noqa: ARG002
        """See `UpdateAttack.poison`."""
        known = knowledge.known
        return _like(knowledge, known.mean(axis=0) - self.deviations * known.std(axis=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerProductManipulation:
    """Minus a factor times the mean of the known updates, so that the aggregate points away (IPM; Xie et al., 2020).

    Args:
        factor: Positive; below 1 it looks like a short update.

    Raises:
        ValueError: If it is not positive and finite.
    """

    factor: float = 0.5

    def __post_init__(self) -> None:
        _check_finite(factor=self.factor)
        if self.factor <= 0:
            raise ValueError(f"expected a positive factor, got {self.factor}")

    def poison(self, knowledge: Knowledge, *, rng: np.random.Generator) -> PlainVector:  # noqa: ARG002
        """See `UpdateAttack.poison`."""
        return _like(knowledge, -self.factor * knowledge.known.mean(axis=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sleeper:
    """Honest until a round, to earn trust, and bad from then on.

    Args:
        wakes: The first bad round, from 0.
        attack: What it does then.

    Raises:
        ValueError: If the round is negative.
    """

    wakes: int
    attack: UpdateAttack

    def __post_init__(self) -> None:
        if self.wakes < 0:
            raise ValueError(f"expected a round from 0, got {self.wakes}")

    def poison(self, knowledge: Knowledge, *, rng: np.random.Generator) -> PlainVector:
        """See `UpdateAttack.poison`."""
        return knowledge.own if knowledge.round < self.wakes else self.attack.poison(knowledge, rng=rng)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A free rider that sends the last aggregate again, hidden in noise if asked; before the first one, nothing.

    Args:
        factor: What the aggregate is multiplied by, finite; 0 and no noise is a free rider that sends nothing.
        noise: Norm of the noise, relative to that of the last aggregate, from 0.

    Raises:
        ValueError: If a number is out of range.
    """

    factor: float = 1.0
    noise: float = 0.0

    def __post_init__(self) -> None:
        _check_finite(factor=self.factor, noise=self.noise)
        if self.noise < 0:
            raise ValueError(f"expected noise from 0, got {self.noise}")

    def poison(self, knowledge: Knowledge, *, rng: np.random.Generator) -> PlainVector:
        """See `UpdateAttack.poison`."""
        size = knowledge.own.layout.size
        last = np.zeros(size) if knowledge.last is None else knowledge.last.values
        spread = self.noise * float(np.linalg.norm(last)) / math.sqrt(size)
        return _like(knowledge, self.factor * last + spread * rng.normal(size=size))


@dataclass(frozen=True, slots=True, kw_only=True)
class PureNoise:
    """A free rider that sends noise of a plausible length.

    Args:
        norm: Expected norm, positive.

    Raises:
        ValueError: If it is not positive and finite.
    """

    norm: float

    def __post_init__(self) -> None:
        _check_finite(norm=self.norm)
        if self.norm <= 0:
            raise ValueError(f"expected a positive norm, got {self.norm}")

    def poison(self, knowledge: Knowledge, *, rng: np.random.Generator) -> PlainVector:
        """See `UpdateAttack.poison`."""
        size = knowledge.own.layout.size
        return _like(knowledge, self.norm / math.sqrt(size) * rng.normal(size=size))


@dataclass(frozen=True, slots=True, kw_only=True)
class Duplicate:
    """A free rider, or the second identity of one client, that sends an update which another client sends too."""

    def poison(self, knowledge: Knowledge, *, rng: np.random.Generator) -> PlainVector:  # noqa: ARG002
        """See `UpdateAttack.poison`. It is the first of the known updates.

        Raises:
            ValueError: If no update of another is known.
        """
        if not knowledge.honest:
            raise ValueError("expected to know an update to copy, got none")
        return knowledge.honest[0]


def _relabelled(samples: Samples, labels: NDArray[np.int64]) -> Samples:
    return Samples(features=samples.features, labels=labels, groups=samples.groups, columns=samples.columns)


def _like(knowledge: Knowledge, values: NDArray[np.float64]) -> PlainVector:
    return PlainVector(layout=knowledge.own.layout, values=values)


def _check_finite(**numbers: float) -> None:
    for name, number in numbers.items():
        if not math.isfinite(number):
            raise ValueError(f"expected {name} to be finite, got {number}")
