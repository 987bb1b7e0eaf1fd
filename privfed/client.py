"""A client: what its owner declares, and its training, paid for before it begins."""

from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from torch import nn

from privfed.data.samples import Samples
from privfed.dp.ledger import Ledger, Reservation
from privfed.he.codec import dequantise, quantise
from privfed.he.params import CkksParams
from privfed.training.compiled import CompiledSum
from privfed.training.dpsgd import check, train
from privfed.training.loss import PerSampleLoss
from privfed.training.mechanism import DpSgd, TrainingMechanism
from privfed.training.objective import Correction
from privfed.training.randomness import Randomness
from privfed.training.scaffold import ControlVariates, Scaffold
from privfed.update import Aggregate, PlainVector, Update

_MOST_RETRIES = 1 << 16


@dataclass(frozen=True, eq=False)
class Client:
    """A data owner as a consortium describes it.

    Args:
        name: Name in the roster. Public.
        data: The client's records. Private.
        weight: Public, agreed weight in the aggregate; not a count of records. Positive.
        training: How it trains. Public.
        ledger: Account of what its data have spent. `DpSgd` cannot be without one.
        compiled: What `compile_sum` made of the model, the loss and `training`; left out, nothing is compiled.

    Raises:
        ValueError: If `DpSgd` has no ledger.
    """

    name: str
    data: Samples
    _: KW_ONLY
    training: TrainingMechanism
    ledger: Ledger | None = None
    weight: float = 1
    compiled: CompiledSum | None = None

    def __post_init__(self) -> None:
        if isinstance(self.training, DpSgd) and self.ledger is None:
            raise ValueError(f"expected a ledger for {self.name!r}, which trains with DP-SGD; open one with Ledger.open")

    def __repr__(self) -> str:
        return f"Client(name={self.name!r}, training={type(self.training).__name__})"


class Trainer:
    """A client's training inside a session: it charges the ledger, then trains.

    Args:
        client: The data owner.
        model: The architecture; its own trainable weights are ignored.
        start: The weights from which the session starts.
        loss: Loss per record.
        params: Encryption parameters of the session, or the grid of a plaintext run.
        correction: Data-independent correction of the gradients, or `Scaffold`.
        randomness: Noise and samples of a round; left out, the operating system's entropy.
        witness: Is handed each update in the clear, for checks that hold all parties in one process.

    Raises:
        PrivFedError: If the model, the loss or the data cannot be used; nothing was charged or trained.
        ValueError: If the grid is finer than differential privacy allows.
    """

    def __init__(
        self,
        *,
        client: Client,
        model: nn.Module,
        start: PlainVector,
        loss: PerSampleLoss,
        params: CkksParams,
        correction: Correction | Scaffold | None = None,
        randomness: Callable[[int], Randomness] | None = None,
        witness: Callable[[Update[PlainVector]], None] | None = None,
    ) -> None:
        check(model, start, client.data, mechanism=client.training, loss=loss, compiled=client.compiled)
        if isinstance(client.training, DpSgd) and params.step < client.training.release_grid:
            raise ValueError(
                f"expected a grid step of at least {client.training.release_grid:.3g} for {client.name!r}, got {params.step:.3g}; "
                "raise the bound of the encryption parameters; nothing was trained"
            )
        self._client = client
        self._model = model
        self._loss = loss
        self._correction = None if isinstance(correction, Scaffold) else correction
        self._scaffold = correction if isinstance(correction, Scaffold) else None
        self._params = params
        self._layout = start.layout
        self._variates = self._control_variates()
        self._randomness = randomness
        self._witness = witness

    def remember(self, directory: Path, *, rounds: tuple[int, ...]) -> None:
        """Keeps what training must not forget in a folder, or takes up again what is kept there: the variates of SCAFFOLD.

        Args:
            directory: This client's own. Private.
            rounds: Rounds that are in the client's model.

        Raises:
            HistoryMismatchError: If the folder misses a round that is in the model.
        """
        self._variates = self._control_variates(directory / "variates.sqlite", rounds=rounds)

    def opened(self, aggregate: Aggregate[PlainVector], *, attempt: int) -> None:
        """Takes note of an opened aggregate, durably, before it enters the client's model. Again, it does nothing.

        Raises:
            PrivFedError: As `ControlVariates.opened`; the aggregate must not enter the model.
        """
        if self._variates is not None:
            self._variates.opened(aggregate, client=self._client.name, attempt=attempt)

    def _control_variates(self, path: Path | None = None, *, rounds: tuple[int, ...] = ()) -> ControlVariates | None:
        if self._scaffold is None:
            return None
        return ControlVariates(scaffold=self._scaffold, mechanism=self._client.training, layout=self._layout, path=path, rounds=rounds)

    def train(self, start: PlainVector, *, session: bytes, round: int, attempt: int) -> Update[PlainVector]:  # noqa: A002
        """Charges the ledger, then trains from `start`.

        A crash before `commit` leaves the reservation charged; training again reserves anew.

        Raises:
            BudgetExceededError: If the budget does not cover the round; nothing was trained.
            PrivFedError: As `training.dpsgd.train`; what was charged stays charged.
        """
        client = self._client
        if client.ledger is not None:
            retry = len(tuple(self._charged(session, round, attempt)))
            client.ledger.reserve(client.training.event(), session=session, round=round, attempt=attempt * _MOST_RETRIES + retry)
        result = train(
            self._model,
            start,
            client.data,
            mechanism=client.training,
            loss=self._loss,
            correction=self._correction if self._variates is None else self._variates.correction(),
            randomness=None if self._randomness is None else self._randomness(round),
            compiled=client.compiled,
            round=round,
        )
        update = Update(sender=client.name, round=round, vector=result.update_values)
        if self._variates is not None:
            # What enters the sum is on the grid and within its bound; so is what the variates follow.
            sent = dequantise(quantise(update.vector.values, self._params)[0], 1, self._params)
            self._variates.trained(PlainVector(layout=self._layout, values=sent), round=round, attempt=attempt)
        if self._witness is not None:
            self._witness(update)
        return update

    def commit(self, *, session: bytes, round: int, attempt: int) -> None:  # noqa: A002
        """Commits the newest reservation of an attempt, whose update is kept; earlier ones stay charged. Again, it does nothing."""
        *_, newest = (None, *self._charged(session, round, attempt))
        if self._client.ledger is not None and newest is not None and not newest.committed:
            self._client.ledger.commit(newest)

    def _charged(self, session: bytes, round: int, attempt: int) -> Iterator[Reservation]:  # noqa: A002
        """Reservations of an attempt, oldest first: one, and one more for each crash before the update was kept."""
        if self._client.ledger is None:
            return
        for retry in range(_MOST_RETRIES):
            reservation = self._client.ledger.reservation(session=session, round=round, attempt=attempt * _MOST_RETRIES + retry)
            if reservation is None:
                return
            yield reservation
