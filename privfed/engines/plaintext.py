"""Rounds without encryption, for comparison runs in one process: objects, never wire bytes.

The arithmetic is that of an encrypted round, so equal updates give equal aggregates, bit for bit. Rules that look at the Gram
matrix have their second phase here: scores first, then the sum.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from privfed.aggregation.gram import gram
from privfed.aggregation.mixture import Mixture
from privfed.aggregation.rules import CumulativeRule, PlaintextRule, Rule
from privfed.agreement import SESSION_BYTES, OpeningPolicy
from privfed.client import Trainer
from privfed.consortium import Consortium
from privfed.errors import BudgetExceededError, CohortError
from privfed.he.codec import dequantise, quantise
from privfed.he.params import CkksParams
from privfed.round import Clock, RoundRecord, Stage
from privfed.update import Aggregate, Layout, PlainVector


@dataclass(frozen=True, slots=True, kw_only=True)
class Combined:
    """What a round in the clear comes to.

    Args:
        aggregate: What an encrypted round would open: the mean under the coefficients. None if the rule has none, because it looked
            at every update.
        coefficients: Integer coefficient of each participant; 1 each if the rule has none.
        movement: How the model moves.
        scores: Cumulative scores after the round; empty but for rules that keep some.
    """

    aggregate: Aggregate[PlainVector] | None
    coefficients: Mapping[str, int]
    movement: PlainVector
    scores: Mapping[str, float]


def combine(
    grids: Mapping[str, NDArray[np.int64]],
    *,
    layout: Layout,
    weights: Mapping[str, float],
    rule: Rule | CumulativeRule | PlaintextRule,
    policy: OpeningPolicy,
    params: CkksParams,
    round: int,  # noqa: A002
    scores: Mapping[str, float] = MappingProxyType({}),
    validator: str | None = None,
) -> Combined:
    """Combines grid updates in the clear: proportions by the rule, policy, integer weighted sum, mean, movement.

    Args:
        grids: Quantised update of each participant, of shape (layout.size,).
        layout: Layout of the updates.
        weights: Public weight of each participant.
        rule: Any rule.
        policy: Checked as for an encrypted round.
        params: The grid.
        round: Number of the round.
        scores: Cumulative scores after the rounds before.
        validator: Whose update is the reference, and counts nothing in the mean; None for rules that need none.

    Raises:
        OpeningRefusedError: If the policy does not allow these coefficients.
        CohortError: If the rule finds nobody to take an update from.
        ValueError: If the rule cannot work with so few participants, or needs a reference and has none.
    """
    named = {name: weights[name] for name in grids if name != validator}
    mixture: Mixture | None = None
    after: Mapping[str, float] = scores
    if isinstance(rule, PlaintextRule):
        coefficients = dict.fromkeys(grids, 1)
        policy.check(coefficients)
        updates = {name: PlainVector(layout=layout, values=dequantise(grid, 1, params)) for name, grid in grids.items()}
        return Combined(aggregate=None, coefficients=coefficients, movement=rule.aggregate(updates), scores=after)
    if rule.needs_gram is True:
        updates = {name: PlainVector(layout=layout, values=dequantise(grid, 1, params)) for name, grid in grids.items()}
        reference = None if validator is None else updates.pop(validator)
        matrix = gram(updates, reference=reference)
        if isinstance(rule, CumulativeRule):
            after, mixture = rule.step(scores, matrix)
        else:
            mixture = rule.mixture(named, matrix)
        chosen = mixture.coefficients(total=params.weight_sum)
        coefficients = {name: chosen.get(name, 0) for name in grids}
    else:
        coefficients = rule.coefficients(named, total=params.weight_sum)
    policy.check(coefficients)
    total = np.zeros(layout.size, dtype=np.int64)
    for name, grid in grids.items():
        total += coefficients[name] * grid
    mean = PlainVector(layout=layout, values=dequantise(total, sum(coefficients.values()), params))
    return Combined(
        aggregate=Aggregate(round=round, vector=mean, coefficients=coefficients),
        coefficients=coefficients,
        movement=mean if mixture is None else mixture.moved(mean),
        scores=after,
    )


class PlaintextRounds:
    """The parties of a run in the clear.

    Args:
        consortium: Who trains together, and how.
        trainers: Each client's training, by name.
        initial: Weights from which the run starts.

    Attributes:
        model: The weights after the rounds so far.
        scores: Cumulative scores after the rounds so far, for rules that keep some.
    """

    def __init__(self, *, consortium: Consortium, trainers: Mapping[str, Trainer], initial: PlainVector) -> None:
        self._consortium = consortium
        self._trainers = trainers
        self._weights = {client.name: client.weight for client in consortium.clients}
        self._session = secrets.token_bytes(SESSION_BYTES)
        self.model = initial
        self.scores: Mapping[str, float] = {}

    def hold(
        self, number: int, *, selected: Sequence[str], silent: Mapping[str, Stage]
    ) -> tuple[RoundRecord, Aggregate[PlainVector] | None]:
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
            combined = combine(
                grids,
                layout=self.model.layout,
                weights=self._weights,
                rule=self._consortium.rule,
                policy=policy,
                params=params,
                round=number,
                scores=self.scores,
                validator=None if self._consortium.validator is None else self._consortium.validator.name,
            )
        self.scores = combined.scores
        if combined.aggregate is not None:
            for trainer in self._trainers.values():
                trainer.opened(combined.aggregate, attempt=0)
        self.model = PlainVector(layout=self.model.layout, values=self.model.values + combined.movement.values)
        record = RoundRecord(
            round=number,
            selected=tuple(selected),
            refused=tuple(refused),
            silent=absent,
            history="",
            coefficients=combined.coefficients,
            bytes_up={},
            bytes_down={},
            seconds=clock.seconds,
        )
        return record, combined.aggregate
