"""Rounds without encryption, for comparison runs in one process: objects, never wire bytes.

The arithmetic is that of an encrypted round, so equal updates give equal aggregates, bit for bit. Rules that look at the Gram
matrix have their second phase here: scores first, then the sum.
"""

import secrets
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from privfed.aggregation.gram import gram
from privfed.aggregation.rules import Rule
from privfed.agreement import SESSION_BYTES, OpeningPolicy
from privfed.client import Trainer
from privfed.consortium import Consortium
from privfed.errors import BudgetExceededError, CohortError
from privfed.he.codec import dequantise, quantise
from privfed.he.params import CkksParams
from privfed.round import Clock, RoundRecord, Stage
from privfed.update import Aggregate, Layout, PlainVector


def combine(
    grids: Mapping[str, NDArray[np.int64]],
    *,
    layout: Layout,
    weights: Mapping[str, float],
    rule: Rule,
    policy: OpeningPolicy,
    params: CkksParams,
    round: int,  # noqa: A002
) -> Aggregate[PlainVector]:
    """The aggregate of grid updates in the clear: coefficients by the rule, policy, integer weighted sum, mean.

    Args:
        grids: Quantised update of each participant, of shape (layout.size,).
        layout: Layout of the updates.
        weights: Public weight of each participant.
        rule: Also one that needs the Gram matrix of the updates.
        policy: Checked as for an encrypted round.
        params: The grid.
        round: Number of the round.

    Raises:
        OpeningRefusedError: If the policy does not allow these coefficients.
        ValueError: If the rule cannot work with so few participants.
    """
    named = {name: weights[name] for name in grids}
    if rule.needs_gram is True:
        updates = [PlainVector(layout=layout, values=dequantise(grid, 1, params)) for grid in grids.values()]
        coefficients = rule.coefficients(named, gram(updates))
    else:
        coefficients = rule.coefficients(named, total=params.weight_sum)
    policy.check(coefficients)
    total = np.zeros(layout.size, dtype=np.int64)
    for name, grid in grids.items():
        total += coefficients[name] * grid
    values = PlainVector(layout=layout, values=dequantise(total, sum(coefficients.values()), params))
    return Aggregate(round=round, vector=values, coefficients=coefficients)


class PlaintextRounds:
    """The parties of a run in the clear.

    Args:
        consortium: Who trains together, and how.
        trainers: Each client's training, by name.
        initial: Weights from which the run starts.
    """

    def __init__(self, *, consortium: Consortium, trainers: Mapping[str, Trainer], initial: PlainVector) -> None:
        self._consortium = consortium
        self._trainers = trainers
        self._weights = {client.name: client.weight for client in consortium.clients}
        self._session = secrets.token_bytes(SESSION_BYTES)
        self.model = initial

    def hold(self, number: int, *, selected: Sequence[str], silent: Mapping[str, Stage]) -> tuple[RoundRecord, Aggregate[PlainVector]]:
        """Holds one round. A client that is silent before its upload, or whose budget does not cover the round, is left out.

        Raises:
            CohortError: If too few clients are left.
            PrivFedError: As `combine` and `Trainer.train`.
        """
        policy, params = self._consortium.policy, self._consortium.params
        clock = Clock()
        refused: list[str] = []
        grids: dict[str, NDArray[np.int64]] = {}
        absent = {name: stage for name, stage in silent.items() if stage <= Stage.UPLOAD and name in selected}
        for name in selected:
            if name in absent:
                continue
            with clock.phase("train"):
                try:
                    update = self._trainers[name].train(self.model, session=self._session, round=number, attempt=0)
                except BudgetExceededError:
                    refused.append(name)
                    continue
                self._trainers[name].commit(session=self._session, round=number, attempt=0)
            grids[name], _ = quantise(update.vector.values, params)
        if len(grids) < policy.min_clients:
            raise CohortError(f"the policy demands {policy.min_clients} clients, and there are {len(grids)} updates; nothing was summed")
        with clock.phase("sum"):
            aggregate = combine(
                grids,
                layout=self.model.layout,
                weights=self._weights,
                rule=self._consortium.rule,
                policy=policy,
                params=params,
                round=number,
            )
        self.model = PlainVector(layout=self.model.layout, values=self.model.values + aggregate.vector.values)
        record = RoundRecord(
            round=number,
            selected=tuple(selected),
            refused=tuple(refused),
            silent=absent,
            history="",
            coefficients=aggregate.coefficients,
            bytes_up={},
            bytes_down={},
            seconds=clock.seconds,
        )
        return record, aggregate
