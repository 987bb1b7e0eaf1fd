"""A client: what its owner declares, and its training, paid for before it begins."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from types import UnionType

from torch import nn

from privfed.aggregation.linear import check_weight
from privfed.compression import Compressor, ErrorFeedback
from privfed.data.samples import Samples
from privfed.dp.countersign import check_stated, record, state_head
from privfed.dp.entries import Party, Signer
from privfed.dp.ledger import Ledger, Reservation
from privfed.dp.mechanism import Budget
from privfed.dp.silo import SiloNoise
from privfed.errors import UnsupportedInThisModeError
from privfed.he.codec import dequantise, quantise
from privfed.he.params import CkksParams
from privfed.identity import check_name
from privfed.training.batched import StackedClients
from privfed.training.compiled import CompiledSum
from privfed.training.dpsgd import check, train
from privfed.training.loss import PerSampleLoss
from privfed.training.mechanism import DpSgd, NonPrivate, TrainingMechanism
from privfed.training.objective import Correction
from privfed.training.randomness import Randomness
from privfed.training.received import check_start
from privfed.training.scaffold import ControlVariates, Scaffold
from privfed.update import Aggregate, Layout, PlainVector, Update

_MOST_RETRIES = 1 << 16


@dataclass(frozen=True, eq=False)
class Client:
    """A data owner as a consortium describes it.

    Args:
        name: Name in the roster. Public.
        data: The client's records. Private.
        weight: Weight in the aggregate, positive. Public and agreed, and so not a count of records, unless the consortium has
            `PrivateWeights`; then it stays with the client.
        training: How it trains. Public.
        ledger: Account of what its data have spent. `DpSgd` cannot be without one.
        compiled: What `compile_sum` made of the model, the loss and `training`; left out, nothing is compiled.
        compressor: Makes every update coarser before it is encrypted, and keeps what that leaves out for the next one; left out, updates
            go as they are. Public.

    Raises:
        TypeError: If data, training or ledger are of another kind. Nothing was charged.
        ValueError: If the name or the weight is none, or `DpSgd` has no ledger, or as `check_delta`. Nothing was charged.
    """

    name: str
    data: Samples
    _: KW_ONLY
    training: TrainingMechanism
    ledger: Ledger | None = None
    weight: float = 1
    compiled: CompiledSum | None = None
    compressor: Compressor | None = None

    def __post_init__(self) -> None:
        check_name(self.name)
        kinds: dict[str, tuple[object, type | UnionType, str]] = {
            "data": (self.data, Samples, "Samples"),
            "training": (self.training, TrainingMechanism, "DpSgd or NonPrivate"),
            "ledger": (self.ledger, Ledger | None, "a Ledger (see Ledger.open)"),
        }
        for what, (value, kind, words) in kinds.items():
            if not isinstance(value, kind):
                raise TypeError(f"expected {what} of {self.name!r} to be {words}, got {type(value).__name__}")
        object.__setattr__(self, "weight", check_weight(self.weight, name=self.name))
        if isinstance(self.training, DpSgd) and self.ledger is None:
            raise ValueError(f"expected a ledger for {self.name!r}, which trains with DP-SGD; open one with Ledger.open")
        if self.ledger is not None:
            check_delta(self.name, training=self.training, budget=self.ledger.budget)

    def __repr__(self) -> str:
        return f"Client(name={self.name!r}, training={type(self.training).__name__})"


def check_delta(name: str, *, training: TrainingMechanism, budget: Budget) -> None:
    """Refuses a delta with which nothing is promised to a client's records.

    Only declared numbers are compared, so neither the refusal nor its absence says how many records there are.

    Args:
        name: Of the client.
        training: How it trains, and how many records it declares.
        budget: Of its ledger.

    Raises:
        ValueError: If delta times the declared number of records is 1 or more. Nothing was charged.
    """
    if isinstance(training, DpSgd) and budget.delta * training.record_limit >= 1:
        raise ValueError(
            f"expected a delta far below one over the {training.record_limit} records that {name!r} declares at most, got "
            f"{budget.delta:g}, under which a record may be given away whole; nothing was charged; take a delta of at most a tenth of "
            "one over that number, for the budget and in a new ledger"
        )


class Trainer:
    """A client's training inside a session: it charges the ledger, then trains.

    Args:
        client: The data owner.
        model: The architecture; its own trainable weights are ignored.
        start: The weights from which the session starts.
        loss: Loss per record.
        params: Encryption parameters of the session, or the grid of a plaintext run.
        correction: Data-independent correction of the gradients, or `Scaffold`.
        silo: The session's noise for whole silos; what it costs is charged beside what the training costs.
        randomness: Noise and samples of a round; left out, the operating system's entropy.
        witness: Is handed each update in the clear, for checks that hold all parties in one process.

    Raises:
        PrivFedError: If the model, the loss or the data cannot be used, or the start looks as if it were made to read records, see
            `training.received`; nothing was charged or trained.
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
        silo: SiloNoise | None = None,
        randomness: Callable[[int], Randomness] | None = None,
        witness: Callable[[Update[PlainVector]], None] | None = None,
    ) -> None:
        self._steady = check(
            model, start, client.data, mechanism=client.training, loss=loss, compiled=client.compiled, client=repr(client.name)
        )
        # Under DP-SGD nothing that depends on the records may show without being charged, a refusal neither.
        check_start(start, client=repr(client.name), rows=client.data.features if isinstance(client.training, NonPrivate) else None)
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
        if client.compressor is not None and (self._scaffold is not None or silo is not None):
            raise UnsupportedInThisModeError(
                f"{client.name!r} compresses its updates, which SCAFFOLD and silo noise have no proof for; nothing was trained; take the "
                "compressor away, or them"
            )
        self._variates = self._control_variates()
        self._feedback = self._error_feedback()
        self._randomness = randomness
        self._witness = witness
        self._silo = silo
        # Data are known again after a restart, and other data in the same account are noticed.
        ledger = client.ledger
        self._fingerprint = None if ledger is None else ledger.fingerprint(client.data.features, client.data.labels)

    @property
    def weight(self) -> float:
        """The client's weight. Public, unless the agreement says that weights are private."""
        return self._client.weight

    @property
    def name(self) -> str:
        """Name of the client. Public."""
        return self._client.name

    @property
    def layout(self) -> Layout:
        """Layout of the model that it trains. Public."""
        return self._layout

    @property
    def params(self) -> CkksParams:
        """Encryption parameters that it trains for. Public."""
        return self._params

    @property
    def silo(self) -> SiloNoise | None:
        """The noise for whole silos that it charges. Public."""
        return self._silo

    @property
    def adds_noise(self) -> bool:
        """Whether every training has fresh noise of differential privacy. Public: it was declared."""
        return isinstance(self._client.training, DpSgd)

    @property
    def population(self) -> str | None:
        """Population of the client's ledger; None if it keeps none. Public."""
        return None if self._client.ledger is None else self._client.ledger.population

    def rounds_possible(self) -> int | None:
        """How many more rounds the client's ledger covers; None without a ledger or a limit. Public."""
        ledger = self._client.ledger
        if ledger is None or not any(budget.limited for budget in (ledger.budget, ledger.terms.silo_budget) if budget is not None):
            return None
        event, silo_event = self._client.training.event(), None if self._silo is None else self._silo.event()
        return ledger.rounds_possible(event, silo_event=silo_event, fingerprint=self._fingerprint)

    def has_charged(self, *, session: bytes, round: int, attempt: int = 0) -> bool:  # noqa: A002
        """Whether an attempt at a round of a session is charged already, so that its stored update goes out again at no cost."""
        return any(self._charged(session, round, attempt))

    def state_head(self, signer: Signer, *, context: bytes, peers: tuple[str, ...]) -> bytes:
        """See `countersign.state_head`; empty for a client without a ledger."""
        return b"" if self._client.ledger is None else state_head(self._client.ledger, signer, context=context, peers=peers)

    def check_head(self, statement: bytes, *, owner: Party, context: bytes) -> None:
        """See `countersign.check_stated`."""
        if self._client.ledger is not None:
            check_stated(self._client.ledger, statement, owner=owner, context=context)

    def record_head(self, answers: Sequence[tuple[Party, bytes]], *, shown: Mapping[str, bytes], owner: Party, context: bytes) -> None:
        """See `countersign.record`."""
        if self._client.ledger is not None:
            record(self._client.ledger, answers, shown=shown, owner=owner, context=context)

    def remember(self, directory: Path, *, rounds: tuple[int, ...]) -> None:
        """Keeps what training must not forget in a folder, or takes up again what is kept there.

        That is the variates of SCAFFOLD, and what compression left out.

        Args:
            directory: This client's own. Private.
            rounds: Rounds that are in the client's model.

        Raises:
            HistoryMismatchError: If the folder misses a round that is in the model.
        """
        self._variates = self._control_variates(directory / "variates.sqlite", rounds=rounds)
        self._feedback = self._error_feedback(directory / "remainder.sqlite", rounds=rounds)

    def opened(self, aggregate: Aggregate[PlainVector], *, attempt: int) -> None:
        """Takes note of an opened aggregate, durably, before it enters the client's model. Again, it does nothing.

        Raises:
            PrivFedError: As `ControlVariates.opened` and `ErrorFeedback.opened`; the aggregate must not enter the model.
        """
        if self._variates is not None:
            self._variates.opened(aggregate, client=self._client.name, attempt=attempt)
        if self._feedback is not None:
            self._feedback.opened(aggregate, client=self._client.name, attempt=attempt)

    def _error_feedback(self, path: Path | None = None, *, rounds: tuple[int, ...] = ()) -> ErrorFeedback | None:
        if self._client.compressor is None:
            return None
        return ErrorFeedback(compressor=self._client.compressor, layout=self._layout, path=path, rounds=rounds)

    def _control_variates(self, path: Path | None = None, *, rounds: tuple[int, ...] = ()) -> ControlVariates | None:
        if self._scaffold is None:
            return None
        return ControlVariates(scaffold=self._scaffold, mechanism=self._client.training, layout=self._layout, path=path, rounds=rounds)

    def train(self, start: PlainVector, *, session: bytes, round: int, attempt: int) -> Update[PlainVector]:  # noqa: A002
        """Charges the ledger, then trains from `start`.

        A crash before `commit` leaves the reservation charged; training again reserves anew.

        Raises:
            BudgetExceededError: If the budget does not cover the round; nothing was trained.
            UnsupportedModelError: If `start` looks as if it were made to read records; nothing was trained or charged.
            PrivFedError: As `training.dpsgd.train`; what was charged stays charged.
        """
        client = self._client
        check_start(start, client=repr(client.name))
        if client.ledger is not None:
            retry = len(tuple(self._charged(session, round, attempt)))
            client.ledger.reserve(
                client.training.event(),
                session=session,
                round=round,
                attempt=attempt * _MOST_RETRIES + retry,
                silo_event=None if self._silo is None else self._silo.event(),
                fingerprint=self._fingerprint,
            )
        result = train(
            self._model,
            start,
            client.data,
            mechanism=client.training,
            loss=self._loss,
            correction=self._correction if self._variates is None else self._variates.correction(),
            randomness=None if self._randomness is None else self._randomness(round),
            compiled=client.compiled,
            steady=self._steady,
            round=round,
        )
        vector = result.update_values
        if self._feedback is not None:
            vector = self._feedback.compress(vector, self._params, round=round, attempt=attempt)
        update = Update(sender=client.name, round=round, vector=vector)
        if self._variates is not None:
            # What enters the sum is on the grid and within its bound; so is what the variates follow.
            sent = dequantise(quantise(update.vector.values, self._params)[0], 1, self._params)
            self._variates.trained(PlainVector(layout=self._layout, values=sent), round=round, attempt=attempt)
        if self._witness is not None:
            self._witness(update)
        return update

    @staticmethod
    def stacked(trainers: "Sequence[Trainer]") -> StackedClients:
        """The clients of these trainers as one stacked model, which trains as each of them does.

        Args:
            trainers: At least one, of clients that `Consortium` lets train together. Nothing is charged, because none has a ledger.

        Raises:
            PrivFedError: As `StackedClients`.
            ValueError: As `StackedClients`.
        """
        plain = [trainer._client.training for trainer in trainers if isinstance(trainer._client.training, NonPrivate)]
        return StackedClients(
            trainers[0]._model,
            [trainer._client.data for trainer in trainers],
            mechanism=plain[0],
            loss=trainers[0]._loss,
            seeds=[training.seed for training in plain],
        )

    def trained(self, values: PlainVector, *, round: int) -> Update[PlainVector]:  # noqa: A002
        """The update of this client, as `stacked` trained it."""
        update = Update(sender=self.name, round=round, vector=values)
        if self._witness is not None:
            self._witness(update)
        return update

    def commit(self, *, session: bytes, round: int, attempt: int) -> None:  # noqa: A002
        """Commits the newest reservation of an attempt, whose update is kept; earlier ones stay charged. Again, it does nothing."""
        *_, newest = (None, *self._charged(session, round, attempt))
        if self._client.ledger is not None and newest is not None and not newest.committed:
            self._client.ledger.commit(newest)

    def committed(self, *, session: bytes, round: int, attempt: int) -> bool:  # noqa: A002
        """Whether the ledger says that an upload of this attempt was kept."""
        return any(reservation.committed for reservation in self._charged(session, round, attempt))

    def _charged(self, session: bytes, round: int, attempt: int) -> Iterator[Reservation]:  # noqa: A002
        """Reservations of an attempt, oldest first: one, and one more for each crash before the update was kept."""
        if self._client.ledger is None:
            return
        for retry in range(_MOST_RETRIES):
            reservation = self._client.ledger.reservation(session=session, round=round, attempt=attempt * _MOST_RETRIES + retry)
            if reservation is None:
                return
            yield reservation
