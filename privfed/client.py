"""A client: what its owner declares, and its training, paid for before it begins."""

from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass

from torch import nn

from privfed.data.samples import Samples
from privfed.dp.ledger import Ledger, Reservation
from privfed.he.params import CkksParams
from privfed.training.dpsgd import check, train
from privfed.training.loss import PerSampleLoss
from privfed.training.mechanism import DpSgd, TrainingMechanism
from privfed.training.objective import Correction
from privfed.training.randomness import Randomness
from privfed.update import PlainVector, Update

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

    Raises:
        ValueError: If `DpSgd` has no ledger.
    """

    name: str
    data: Samples
    _: KW_ONLY
    training: TrainingMechanism
    ledger: Ledger | None = None
    weight: float = 1

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
        correction: Data-independent correction of the gradients.
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
        correction: Correction | None = None,
        randomness: Callable[[int], Randomness] | None = None,
        witness: Callable[[Update[PlainVector]], None] | None = None,
    ) -> None:
        check(model, start, client.data, mechanism=client.training, loss=loss)
        if isinstance(client.training, DpSgd) and params.step < client.training.release_grid:
            raise ValueError(
                f"expected a grid step of at least {client.training.release_grid:.3g} for {client.name!r}, got {params.step:.3g}; "
                "raise the bound of the encryption parameters; nothing was trained"
            )
        self._client = client
        self._model = model
        self._loss = loss
        self._correction = correction
        self._randomness = randomness
        self._witness = witness

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
            correction=self._correction,
            randomness=None if self._randomness is None else self._randomness(round),
            round=round,
        )
        update = Update(sender=client.name, round=round, vector=result.update_values)
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
