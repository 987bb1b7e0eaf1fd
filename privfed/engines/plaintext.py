"""Rounds without encryption, for comparison runs in one process: objects, never wire bytes.

The arithmetic is that of an encrypted round, so equal updates give equal aggregates, bit for bit. Rules that look at the Gram
matrix have their second phase here: scores first, then the sum. What the policy makes of a rule's choice is decided as under encryption,
so that a round in which one would be skipped, or the weights of the rounds before taken, is such a round in the clear.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from privfed.aggregation.gram import gram
from privfed.aggregation.mixture import Mixture
from privfed.aggregation.rules import CumulativeRule, PlaintextRule, Rule
from privfed.agreement import SESSION_BYTES
from privfed.client import Trainer
from privfed.consortium import Consortium, Plaintext
from privfed.decision import Fallback, choose
from privfed.engines.plain_site import PlainSite
from privfed.errors import BudgetExceededError, CohortError, OpeningRefusedError, RoundSkippedError
from privfed.he.codec import dequantise, quantise
from privfed.he.params import CkksParams
from privfed.policy import OpeningPolicy
from privfed.round_record import Clock, RoundRecord, Stage
from privfed.state import ModelState
from privfed.update import Aggregate, Layout, PlainVector, Update


@dataclass(frozen=True, slots=True, kw_only=True)
class Combined:
    """What a round in the clear comes to.

    Args:
        aggregate: What an encrypted round would open: the mean under the coefficients. None if the rule has none, because it looked
            at every update.
        coefficients: Integer coefficient of each participant; 1 each if the rule has none.
        movement: How the model moves.
        scores: Cumulative scores after the round; empty but for rules that keep some.
        fallback: What was done where the policy did not allow what the rule chose; None for rules that look at no inner products.
    """

    aggregate: Aggregate[PlainVector] | None
    coefficients: Mapping[str, int]
    movement: PlainVector
    scores: Mapping[str, float]
    fallback: Fallback | None = None


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
    noise_energy: Mapping[str, float] = MappingProxyType({}),
) -> Combined:
    """Combines grid updates in the clear: proportions by the rule, policy, integer weighted sum, mean, movement.

    Args:
        grids: Quantised update of each participant, of shape (layout.size,).
        layout: Layout of the updates.
        weights: Public weight of each participant.
        rule: Any rule.
        policy: Checked as for an encrypted round.
        params: The grid.
        round: Number of the round. Estimators that sample draw from it.
        scores: Cumulative scores after the rounds before.
        validator: Whose update is the reference, and counts nothing in the mean; None for rules that need none.
        noise_energy: Declared squared norm of the noise in an update, by name; clients that are not named declare none.

    Raises:
        OpeningRefusedError: If the policy does not allow coefficients that follow from the weights alone.
        RoundSkippedError: If a rule that looks at inner products finds no weights that the policy allows, and there are none before.
        CohortError: If the participants are too few for an encrypted round, or the validator is not among them.
        ValueError: If a rule that sees every update cannot work with so few participants.
    """
    named = {name: weights[name] for name in grids if name != validator}
    mixture: Mixture | None = None
    reference: PlainVector | None = None
    fallback: Fallback | None = None
    after: Mapping[str, float] = scores
    if validator is not None and validator not in grids:
        raise CohortError(f"the reference of {validator!r} is missing; nothing was summed")
    if len(named) < policy.min_clients:
        raise CohortError(f"the policy demands {policy.min_clients} clients, and {len(named)} contribute; nothing was summed")
    if isinstance(rule, PlaintextRule):
        coefficients = dict.fromkeys(grids, 1)
        policy.check(coefficients)
        updates = {name: PlainVector(layout=layout, values=dequantise(grid, 1, params)) for name, grid in grids.items()}
        return Combined(aggregate=None, coefficients=coefficients, movement=rule.aggregate(updates), scores=after)
    if rule.needs_gram is True:
        updates = {name: PlainVector(layout=layout, values=dequantise(grid, 1, params)) for name, grid in grids.items()}
        reference = None if validator is None else updates.pop(validator)
        choice = choose(
            rule,
            lambda: replace(gram(updates, reference=reference).with_declared_noise(noise_energy, reference=validator), seed=round),
            weights=named,
            scores=scores,
            eligible=named,
            policy=policy,
            total=params.weight_sum,
        )
        if choice.mixture is None:
            raise RoundSkippedError(f"round {round} is skipped: {choice.reason}; nothing was summed")
        mixture, after, fallback = choice.mixture, choice.scores, choice.fallback
        coefficients = {name: choice.coefficients.get(name, 0) for name in grids}
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
        movement=mean if mixture is None else mixture.moved(mean, reference),
        scores=after,
        fallback=fallback,
    )


class PlaintextRounds:
    """The parties of a run in the clear.

    Args:
        consortium: Who trains together, and how.
        trainers: Each client's training, by name.
        initial: Weights from which the run starts.
        site: Its folder; None for a run that keeps nothing.

    Attributes:
        state: The model after the rounds so far, the state of the server optimiser, and cumulative scores of rules that keep some.
    """

    def __init__(
        self, *, consortium: Consortium, trainers: Mapping[str, Trainer], initial: PlainVector, site: PlainSite | None = None
    ) -> None:
        self._consortium = consortium
        self._trainers = trainers
        together = isinstance(consortium.keys, Plaintext) and consortium.keys.train_together
        self._stacked = Trainer.stacked(list(trainers.values())) if together else None
        self._weights = {client.name: client.weight for client in consortium.clients}
        self._site = site
        self._session = secrets.token_bytes(SESSION_BYTES) if site is None else site.session
        self.state = ModelState(values=initial)

    @property
    def model(self) -> PlainVector:
        """The weights after the rounds so far."""
        return self.state.values

    def was_held(self, number: int, selected: Sequence[str], record: RoundRecord) -> None:
        """Nothing to note: the state says which rounds are in it, see `restore`."""

    def restore(self, rounds: Sequence[int]) -> None:
        """Takes up the state after the rounds that the folder's log has. Without a folder, rounds are counted anew on the same model.

        Raises:
            DamagedFileError: If the folder does not hold it.
        """
        self.state = replace(self.state, rounds=()) if self._site is None else self._site.load(rounds)

    def hold(
        self, number: int, *, selected: Sequence[str], silent: Mapping[str, Stage]
    ) -> tuple[RoundRecord, Aggregate[PlainVector] | None]:
        """Holds one round. A client that is silent before its upload, or whose budget does not cover the round, is left out.

        Raises:
            CohortError: As `combine`.
            PrivFedError: As `combine` and `Trainer.train`.
        """
        policy, params = self._consortium.policy, self._consortium.params
        clock = Clock()
        absent = {name: stage for name, stage in silent.items() if stage <= Stage.UPLOAD and name in selected}
        present = [name for name in selected if name not in absent]
        with clock.phase("train"):
            updates = self._train(number, present)
        refused = [name for name in present if name not in updates]
        grids = {name: quantise(update.vector.values, params)[0] for name, update in updates.items()}
        with clock.phase("sum"):
            try:
                combined = combine(
                    grids,
                    layout=self.model.layout,
                    weights=self._weights,
                    rule=self._consortium.rule,
                    policy=policy,
                    params=params,
                    round=number,
                    scores=self.state.scores,
                    validator=None if self._consortium.validator is None else self._consortium.validator.name,
                    noise_energy=self._consortium.noise_energy(self.model.layout.size),
                )
            except OpeningRefusedError as error:  # the server of an encrypted run does not close such a round
                raise CohortError(f"the updates that came may not be combined: {error}; nothing was summed") from error
            state = self.state.after(combined.movement, round=number, optimizer=self._consortium.server_optimizer, scores=combined.scores)
        if combined.aggregate is not None:
            for trainer in self._trainers.values():
                trainer.opened(combined.aggregate, attempt=0)
        if self._site is not None:
            self._site.save(state)
        self.state = state
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
            fallback="" if combined.fallback is None else combined.fallback.name,
        )
        return record, combined.aggregate

    def _train(self, number: int, names: Sequence[str]) -> dict[str, Update[PlainVector]]:
        """The update of each client whose budget covers the round."""
        if self._stacked is not None and names:
            order = list(self._trainers)
            results = self._stacked.train(self.model, round=number, among=[order.index(name) for name in names])
            return {
                name: self._trainers[name].trained(result.update_values, round=number) for name, result in zip(names, results, strict=True)
            }
        updates: dict[str, Update[PlainVector]] = {}
        for name in names:
            try:
                updates[name] = self._trainers[name].train(self.model, session=self._session, round=number, attempt=0)
            except BudgetExceededError:
                continue
            self._trainers[name].commit(session=self._session, round=number, attempt=0)
        return updates
