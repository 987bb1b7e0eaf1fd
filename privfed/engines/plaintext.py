"""Rounds without encryption, for comparison runs in one process: objects, never wire bytes.

The arithmetic is that of an encrypted round, so equal updates give equal aggregates, bit for bit. Rules that look at the Gram
matrix have their second phase here: scores first, then the sum.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from privfed.aggregation.gram import gram
from privfed.aggregation.rules import Rule
from privfed.agreement import OpeningPolicy
from privfed.client import Trainer
from privfed.errors import BudgetExceededError, CohortError
from privfed.he.codec import dequantise, quantise
from privfed.he.params import CkksParams
from privfed.round import Clock, RoundRecord
from privfed.update import Aggregate, PlainVector


def combine(
    grids: Mapping[str, "np.ndarray[tuple[int], np.dtype[np.int64]]"],
    *,
    start: PlainVector,
    weights: Mapping[str, float],
    rule: Rule,
    policy: OpeningPolicy,
    params: CkksParams,
    round: int,  # noqa: A002
) -> Aggregate[PlainVector]:
    """The aggregate of grid updates in the clear: coefficients by the rule, policy, integer weighted sum, mean.

    Args:
        grids: Quantised update of each participant, of shape (layout.size,).
        start: Any vector of the layout.
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
        updates = [PlainVector(layout=start.layout, values=dequantise(grid, 1, params)) for grid in grids.values()]
        coefficients = rule.coefficients(named, gram(updates))
    else:
        coefficients = rule.coefficients(named, total=params.weight_sum)
    policy.check(coefficients)
    total = np.zeros(start.layout.size, dtype=np.int64)
    for name, grid in grids.items():
        total += coefficients[name] * grid
    values = PlainVector(layout=start.layout, values=dequantise(total, sum(coefficients.values()), params))
    return Aggregate(round=round, vector=values, coefficients=coefficients)


def run_plaintext_round(
    *,
    trainers: Mapping[str, Trainer],
    selected: Sequence[str],
    start: PlainVector,
    weights: Mapping[str, float],
    rule: Rule,
    policy: OpeningPolicy,
    params: CkksParams,
    session: bytes,
    round: int,  # noqa: A002
) -> RoundRecord:
    """Runs one round in the clear. A client whose budget does not cover it is left out, if the policy holds.

    Raises:
        CohortError: If too few clients are left.
        PrivFedError: As `combine` and `Trainer.train`.
    """
    clock = Clock()
    refused: list[str] = []
    grids: dict[str, np.ndarray[tuple[int], np.dtype[np.int64]]] = {}
    for name in selected:
        with clock.phase("train"):
            try:
                update = trainers[name].train(start, session=session, round=round, attempt=0)
            except BudgetExceededError:
                refused.append(name)
                continue
            trainers[name].commit(session=session, round=round, attempt=0)
        grids[name], _ = quantise(update.vector.values, params)
    if len(grids) < policy.min_clients:
        raise CohortError(f"the policy demands {policy.min_clients} clients, and {len(grids)} trained; nothing was summed")
    with clock.phase("sum"):
        aggregate = combine(grids, start=start, weights=weights, rule=rule, policy=policy, params=params, round=round)
    return RoundRecord(
        round=round,
        selected=tuple(selected),
        refused=tuple(refused),
        coefficients=aggregate.coefficients,
        bytes_up={},
        bytes_down={},
        seconds=clock.seconds,
        aggregate=aggregate,
    )
