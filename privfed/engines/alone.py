"""One client alone, without a consortium: what it reaches before it joins one, under the mechanism and the account of a round."""

import math
import secrets
from dataclasses import dataclass, field

from torch import nn

from privfed.agreement import SESSION_BYTES
from privfed.client import Client, Trainer
from privfed.engines.beforehand import check_rounds
from privfed.errors import BudgetExceededError, UnsupportedInThisModeError
from privfed.he.codec import dequantise, quantise
from privfed.he.params import CkksParams
from privfed.training.loss import PerSampleLoss, binary_cross_entropy
from privfed.training.model import check_model, values_of
from privfed.update import PlainVector


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedAlone:
    """What training alone came to.

    Args:
        model: The weights after the last round. As private as the training says: public under `DpSgd` at this epsilon and delta, else as
            private as the records.
        epsilon: What the ledger has spent in all, with what it was charged before; infinite without differential privacy. Public.
        delta: The delta of that epsilon; None without a ledger. Public.
    """

    model: PlainVector = field(repr=False)
    epsilon: float
    delta: float | None


def train_alone(
    client: Client, model: nn.Module, *, rounds: int, loss: PerSampleLoss = binary_cross_entropy, params: CkksParams | None = None
) -> TrainedAlone:
    """Trains a model at one client alone: what it reaches without the others, or before it joins them.

    Every round is what the client does in a round of a consortium, but that nobody else is in the sum: the ledger is charged, then it
    trains, and the update is rounded to the grid. Rounds here cost what rounds there cost, and are charged to the same budget.

    Args:
        client: Its data, training and ledger.
        model: Architecture and initial weights, which must not be made from private records. It is not changed.
        rounds: Number of rounds, at least 1.
        loss: Loss per record.
        params: The grid, and the bound at which coordinates of an update are cut off, as in `Consortium`; left out,
            `CkksParams.standard()`. Nothing is encrypted.

    Returns:
        The weights, and what was spent. `load_values(model, result.model)` puts them into the module.

    Raises:
        BudgetExceededError: If the client's budget does not cover all rounds; nothing was charged or trained.
        PrivFedError: If the model, the loss or the data cannot be used; nothing was charged or trained.
        TypeError: If `rounds` is no whole number.
        UnsupportedInThisModeError: If the client compresses its updates.
        ValueError: If `rounds` is below 1, or the grid is finer than differential privacy allows.
    """
    check_rounds(rounds)
    check_model(model)
    if client.compressor is not None:
        raise UnsupportedInThisModeError(f"{client.name!r} compresses updates, and alone it sends none; nothing was trained")
    grid, values = CkksParams.standard() if params is None else params, values_of(model)
    trainer = Trainer(client=client, model=model, start=values, loss=loss, params=grid)
    possible = trainer.rounds_possible()
    if possible is not None and possible < rounds:
        raise BudgetExceededError(
            f"the budget of {client.name!r} covers {possible} of {rounds} rounds; nothing was trained; take fewer, or training whose noise "
            "is made for all rounds, as DpSgd.for_budget does"
        )
    session = secrets.token_bytes(SESSION_BYTES)
    for number in range(rounds):
        update = trainer.train(values, session=session, round=number, attempt=0)
        moved = dequantise(quantise(update.vector.values, grid)[0], 1, grid)
        values = PlainVector(layout=values.layout, values=values.values + moved)
        trainer.commit(session=session, round=number, attempt=0)
    ledger = client.ledger
    return TrainedAlone(
        model=values,
        epsilon=math.inf if ledger is None else ledger.spent(),
        delta=None if ledger is None else ledger.budget.delta,
    )
