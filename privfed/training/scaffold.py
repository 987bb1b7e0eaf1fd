"""SCAFFOLD: each client corrects its steps by how its gradients differ from everybody's (Karimireddy et al., 2020, algorithm 1).

The variates follow from what is sent anyway (option II). A client that moved by dy_i in K steps of length eta has

    c_i <- c_i - c - dy_i / (K eta),

and of a round of a share s of all clients, whose mean movement dy was opened, everybody knows that c <- (1 - s) c - s dy / (K eta).
So c is always the mean of all c_i, nothing is sent besides the updates, and under `DpSgd` everything here is post-processing of updates
that are private already. It needs all to take the same K and eta, and to weigh the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from privfed.aggregation.rules import FedAvg
from privfed.errors import HistoryMismatchError, UnsupportedInThisModeError
from privfed.table import Table
from privfed.training.mechanism import TrainingMechanism
from privfed.update import Aggregate, Layout, PlainVector

_COLUMNS = "name TEXT PRIMARY KEY, round INTEGER, attempt INTEGER, data BLOB"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class _Kept:
    """A vector, and the round and attempt that it is of."""

    values: NDArray[np.float64]
    round: int = -1
    attempt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaffold:
    """Takes SCAFFOLD for the correction of a consortium. Public.

    Args:
        clients: Number of clients of the consortium, those that a round does not select included.

    Raises:
        ValueError: If there is none.
    """

    clients: int

    def __post_init__(self) -> None:
        if self.clients < 1:
            raise ValueError(f"expected at least one client, got {self.clients}")

    def check(self, *, weights: Mapping[str, float], training: Mapping[str, TrainingMechanism], rule: object) -> None:
        """Refuses a consortium whose variates do not follow from what it opens.

        Args:
            weights: Public weight of each client, by name.
            training: How each client trains.
            rule: How updates are combined.

        Raises:
            UnsupportedInThisModeError: If the clients take another number of steps or another learning rate than each other, or as
                `check_weights`.
        """
        self.check_weights(weights=weights, rule=rule)
        if len({(mechanism.steps, mechanism.learning_rate) for mechanism in training.values()}) != 1:
            raise UnsupportedInThisModeError("SCAFFOLD needs the same steps and learning_rate for all clients; nothing was done")

    def check_weights(self, *, weights: Mapping[str, float], rule: object) -> None:
        """As `check`, where nobody knows how all the clients train.

        Args:
            weights: Public weight of each client, by name.
            rule: How updates are combined.

        Raises:
            UnsupportedInThisModeError: If the weights are not all the same, the rule is another than FedAvg, or the clients are more or
                fewer than declared.
        """
        if not isinstance(rule, FedAvg) or len(set(weights.values())) != 1:
            raise UnsupportedInThisModeError(
                "SCAFFOLD needs the plain mean of all updates: FedAvg and the same weight for all; nothing was done"
            )
        if len(weights) != self.clients:
            raise UnsupportedInThisModeError(f"SCAFFOLD was declared for {self.clients} clients, and there are others; nothing was done")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class _Addition:
    """The same addition to every gradient of a round: a `Correction`."""

    addition: torch.Tensor

    def gradient(self, weights: torch.Tensor, start: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        return self.addition


class ControlVariates:
    """One client's c and c_i, and what it has sent and not seen opened yet.

    Args:
        scaffold: How many clients there are.
        mechanism: How this client, and every other, trains.
        layout: Layout of the model.
        path: File that survives a restart; it is made if it is not there. Left out, nothing is kept. Private.
        rounds: Rounds that are in the client's model, ascending.

    Raises:
        HistoryMismatchError: If the file misses a round that is in the model.
        LayoutMismatchError: If the file is of another model.
        DamagedFileError: If the file holds something else.
    """

    def __init__(
        self, *, scaffold: Scaffold, mechanism: TrainingMechanism, layout: Layout, path: Path | None = None, rounds: tuple[int, ...] = ()
    ) -> None:
        self._scaffold = scaffold
        self._layout = layout
        self._way = mechanism.steps * mechanism.learning_rate
        self._table = None if path is None else Table(path, name="vectors", columns=_COLUMNS)
        nothing = _Kept(values=np.zeros(layout.size))
        self._kept = {"common": nothing, "own": nothing, "sent": nothing}
        if self._table is not None:
            self._load(self._table)
        if rounds and self._kept["common"].round < rounds[-1]:
            raise HistoryMismatchError(
                "the control variates miss a round that is in the model; nothing was done; put their file back, or start a new session"
            )

    def correction(self) -> _Addition:
        """What to add to each gradient of the next round: c - c_i. Under `DpSgd` as private as what was opened and sent before."""
        return _Addition(torch.from_numpy(self._kept["common"].values - self._kept["own"].values).float())

    def trained(self, sent: PlainVector, *, round: int, attempt: int) -> None:  # noqa: A002
        """Keeps what this client sends, durably, until it is opened. A newer training takes the place of an older one.

        Args:
            sent: The update as it enters the sum: on the grid, and within its bound. Private.
            round: Number of the round.
            attempt: Number of the attempt.
        """
        self._keep(sent=_Kept(values=sent.values, round=round, attempt=attempt))

    def opened(self, aggregate: Aggregate[PlainVector], *, client: str, attempt: int) -> None:
        """Moves the variates by an opened aggregate, durably. A round that has moved them already does nothing.

        Args:
            aggregate: The mean of the updates of all who took part.
            client: Name of this client.
            attempt: Number of the attempt that was opened.

        Raises:
            UnsupportedInThisModeError: If the participants do not weigh the same, or are more than there are clients.
            HistoryMismatchError: If this client took part and does not know what it sent. In both cases nothing is changed.
        """
        number = aggregate.round
        common, own, sent = self._kept["common"], self._kept["own"], self._kept["sent"]
        if number <= common.round:
            return
        weights = {name: coefficient for name, coefficient in aggregate.coefficients.items() if coefficient}
        share = len(weights) / self._scaffold.clients
        if len(set(weights.values())) != 1 or share > 1:
            raise UnsupportedInThisModeError(
                "SCAFFOLD needs the plain mean of the updates of its clients; the variates were left as they are"
            )
        moved = own.values
        if client in weights:
            if (sent.round, sent.attempt) != (number, attempt):
                raise HistoryMismatchError(
                    f"{client!r} took part in round {number} and does not know what it sent; the variates were left as they are; "
                    "put their file back, or start a new session"
                )
            moved = own.values - common.values - sent.values / self._way
        mean = (1 - share) * common.values - share * aggregate.vector.values / self._way
        self._keep(common=_Kept(values=mean, round=number, attempt=attempt), own=_Kept(values=moved, round=number, attempt=attempt))

    def _keep(self, **changed: _Kept) -> None:
        if self._table is not None:
            rows = [(name, kept.round, kept.attempt, kept.values.astype("<f8").tobytes()) for name, kept in changed.items()]
            with self._table.transaction() as connection:
                connection.executemany("REPLACE INTO vectors VALUES (?, ?, ?, ?)", rows)
        self._kept |= changed

    def _load(self, table: Table) -> None:
        with table.transaction() as connection:
            for name, number, attempt, data in connection.execute("SELECT name, round, attempt, data FROM vectors"):
                # PlainVector refuses a file of another model.
                vector = PlainVector(layout=self._layout, values=np.frombuffer(data, dtype="<f8"))
                self._kept[name] = _Kept(values=vector.values, round=number, attempt=attempt)
