"""Server optimisers: what is done with an aggregate before it moves the model.

Each is a frozen configuration with one pure step, from state and aggregate to new state and movement. A state is a dictionary of
vectors of the model's layout, empty at the start, that is stored beside the model. Only additions, multiplications, divisions and
square roots of single coordinates are used, which IEEE 754 fixes to the last bit, so that everybody who opens aggregates gets the
same model, on whatever processor.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from privfed.errors import LayoutMismatchError
from privfed.update import PlainVector

State: TypeAlias = Mapping[str, PlainVector]

_MOMENTUM, _SECOND = "momentum", "second_moment"


class ServerOptimizer(Protocol):
    """Turns aggregates into movements of the model."""

    @property
    def name(self) -> str:
        """Canonical name with every parameter in it; parties compare it. Public."""
        ...

    def step(self, state: State, aggregate: PlainVector) -> tuple[dict[str, PlainVector], PlainVector]:
        """The state after this round, and how the model moves.

        Raises:
            ValueError: If the state is not one of this optimiser, or a number overflows.
            LayoutMismatchError: If the state has another layout than the aggregate.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSgd:
    """The aggregate times a learning rate, with momentum (FedAvgM; Hsu et al., 2019, arXiv:1909.06335). All fields are public.

    Args:
        learning_rate: Positive; 1 without momentum is plain FedAvg.
        momentum: Share of the last movement that is kept, from 0 to below 1.

    Raises:
        ValueError: If a number is out of range.
    """

    learning_rate: float = 1.0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        _check_positive(learning_rate=self.learning_rate)
        _check_share(momentum=self.momentum)

    @property
    def name(self) -> str:
        """Canonical name. Public."""
        return f"ServerSgd(learning_rate={self.learning_rate!r}, momentum={self.momentum!r})"

    def step(self, state: State, aggregate: PlainVector) -> tuple[dict[str, PlainVector], PlainVector]:
        """See `ServerOptimizer.step`."""
        velocity = aggregate.values
        for last in _moments(state, aggregate, **({_MOMENTUM: 0.0} if self.momentum else {})):
            velocity = self.momentum * last + velocity
        kept = {_MOMENTUM: PlainVector(layout=aggregate.layout, values=velocity)} if self.momentum else {}
        return kept, PlainVector(layout=aggregate.layout, values=self.learning_rate * velocity)


@dataclass(frozen=True, slots=True, kw_only=True)
class FedAdagrad:
    """Adagrad on aggregates (Reddi et al., 2021, "Adaptive federated optimization", algorithm 2). All fields are public.

    Args:
        learning_rate: Positive.
        momentum: Beta_1, from 0 to below 1; the paper's experiments have 0 here.
        adaptivity: Tau, positive: coordinates that move less than this are not amplified. The second moment starts at its square.

    Raises:
        ValueError: If a number is out of range.
    """

    learning_rate: float
    momentum: float = 0.0
    adaptivity: float = 1e-3

    def __post_init__(self) -> None:
        _check_positive(learning_rate=self.learning_rate, adaptivity=self.adaptivity)
        _check_share(momentum=self.momentum)

    @property
    def name(self) -> str:
        """Canonical name. Public."""
        return f"FedAdagrad(learning_rate={self.learning_rate!r}, momentum={self.momentum!r}, adaptivity={self.adaptivity!r})"

    def step(self, state: State, aggregate: PlainVector) -> tuple[dict[str, PlainVector], PlainVector]:
        """See `ServerOptimizer.step`."""
        first, second = _moments(state, aggregate, momentum=0.0, second_moment=self.adaptivity**2)
        second = second + aggregate.values * aggregate.values
        return _adapted(self, first, second, aggregate)


@dataclass(frozen=True, slots=True, kw_only=True)
class FedAdam:
    """Adam on aggregates, without bias correction (Reddi et al., 2021, algorithm 2). All fields are public.

    Args:
        learning_rate: Positive.
        momentum: Beta_1, from 0 to below 1.
        second_decay: Beta_2, from 0 to below 1.
        adaptivity: Tau, positive; see `FedAdagrad`.

    Raises:
        ValueError: If a number is out of range.
    """

    learning_rate: float
    momentum: float = 0.9
    second_decay: float = 0.99
    adaptivity: float = 1e-3

    def __post_init__(self) -> None:
        _check_positive(learning_rate=self.learning_rate, adaptivity=self.adaptivity)
        _check_share(momentum=self.momentum, second_decay=self.second_decay)

    @property
    def name(self) -> str:
        """Canonical name. Public."""
        return _name(self)

    def step(self, state: State, aggregate: PlainVector) -> tuple[dict[str, PlainVector], PlainVector]:
        """See `ServerOptimizer.step`."""
        first, second = _moments(state, aggregate, momentum=0.0, second_moment=self.adaptivity**2)
        squares = aggregate.values * aggregate.values
        second = self.second_decay * second + (1 - self.second_decay) * squares
        return _adapted(self, first, second, aggregate)


@dataclass(frozen=True, slots=True, kw_only=True)
class FedYogi:
    """Yogi on aggregates (Reddi et al., 2021, algorithm 2): as Adam, but the second moment never forgets faster than it learns.

    Args:
        learning_rate: Positive.
        momentum: Beta_1, from 0 to below 1.
        second_decay: Beta_2, from 0 to below 1.
        adaptivity: Tau, positive; see `FedAdagrad`.

    Raises:
        ValueError: If a number is out of range.
    """

    learning_rate: float
    momentum: float = 0.9
    second_decay: float = 0.99
    adaptivity: float = 1e-3

    def __post_init__(self) -> None:
        _check_positive(learning_rate=self.learning_rate, adaptivity=self.adaptivity)
        _check_share(momentum=self.momentum, second_decay=self.second_decay)

    @property
    def name(self) -> str:
        """Canonical name. Public."""
        return _name(self)

    def step(self, state: State, aggregate: PlainVector) -> tuple[dict[str, PlainVector], PlainVector]:
        """See `ServerOptimizer.step`."""
        first, second = _moments(state, aggregate, momentum=0.0, second_moment=self.adaptivity**2)
        squares = aggregate.values * aggregate.values
        second = second - (1 - self.second_decay) * squares * np.sign(second - squares)
        return _adapted(self, first, second, aggregate)


SERVER_OPTIMIZERS: tuple[type[ServerSgd | FedAdagrad | FedAdam | FedYogi], ...] = (ServerSgd, FedAdagrad, FedAdam, FedYogi)
"""What an agreement may name."""


def check_server_optimizer(optimizer: ServerOptimizer) -> None:
    """Refuses an optimiser that not every party knows by its name.

    Raises:
        TypeError: If it is none of `SERVER_OPTIMIZERS`.
    """
    if type(optimizer) not in SERVER_OPTIMIZERS:
        known = ", ".join(kind.__name__ for kind in SERVER_OPTIMIZERS)
        raise TypeError(f"expected a server optimiser of {known}, got {type(optimizer).__name__}")


def with_optimizer(rule: str, optimizer: ServerOptimizer) -> str:
    """Name of a rule and what is done with its aggregates; that of the rule alone where they are added as they are."""
    return rule if optimizer == ServerSgd() else f"{rule}, then {optimizer.name}"


def _name(optimizer: FedAdam | FedYogi) -> str:
    return (
        f"{type(optimizer).__name__}(learning_rate={optimizer.learning_rate!r}, momentum={optimizer.momentum!r}, "
        f"second_decay={optimizer.second_decay!r}, adaptivity={optimizer.adaptivity!r})"
    )


def _moments(state: State, aggregate: PlainVector, **starts: float) -> tuple[NDArray[np.float64], ...]:
    """The named vectors of a state; before the first round, constants."""
    if state and set(state) != set(starts):
        raise ValueError(f"expected a state with {sorted(starts)}, got one with {sorted(state)}; nothing was moved")
    if any(vector.layout != aggregate.layout for vector in state.values()):
        raise LayoutMismatchError("expected a state of the aggregate's layout, got another; nothing was moved")
    return tuple(state[name].values if state else np.full(aggregate.layout.size, start) for name, start in starts.items())


def _adapted(
    optimizer: FedAdagrad | FedAdam | FedYogi, first: NDArray[np.float64], second: NDArray[np.float64], aggregate: PlainVector
) -> tuple[dict[str, PlainVector], PlainVector]:
    layout = aggregate.layout
    first = optimizer.momentum * first + (1 - optimizer.momentum) * aggregate.values
    moved = optimizer.learning_rate * first / (np.sqrt(second) + optimizer.adaptivity)
    state = {_MOMENTUM: PlainVector(layout=layout, values=first), _SECOND: PlainVector(layout=layout, values=second)}
    return state, PlainVector(layout=layout, values=moved)


def _check_positive(**numbers: float) -> None:
    for name, number in numbers.items():
        if not (math.isfinite(number) and number > 0):
            raise ValueError(f"expected {name} to be positive and finite, got {number}")


def _check_share(**numbers: float) -> None:
    for name, number in numbers.items():
        if not 0 <= number < 1:
            raise ValueError(f"expected {name} from 0 to below 1, got {number}")
