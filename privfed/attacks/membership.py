"""Was this record trained on? Three answers from the model after a round, each beside what it says about records that were not.

A score is the share of non-members that look less like members: even on [0, 1] for non-members, near 1 for members where the model
remembers them. Compare scores of members and non-members with `privfed.attacks.membership_scoring`.
"""

import copy
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, log_expit, ndtr
from threadpoolctl import threadpool_limits
from torch import nn

from privfed.attacks.candidates import LabelledRows
from privfed.attacks.observation import CiphertextOnly, NotApplicable, Observation
from privfed.attacks.shadow_models import Shadows, log_odds, train_shadows
from privfed.errors import LayoutMismatchError
from privfed.training.model import layout_of, load_values, trainable_parameters
from privfed.update import PlainVector

# How much the average probability of a record over models with and without it is believed to differ (Zarifzadeh et al., appendix B.2.2).
_OFFLINE = 0.3
_LEAST_SPREAD = 1e-6


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MembershipScores:
    """How much each record looks as if it had been trained on. Private.

    Args:
        scores: From 0 to 1, of shape (records,); the attack's own confidence that it is no non-member.
        seconds: Elapsed time.
    """

    scores: NDArray[np.float64]
    seconds: float

    def __repr__(self) -> str:
        return f"MembershipScores(records={len(self.scores)})"


@dataclass(frozen=True, kw_only=True, eq=False)
class LossThreshold:
    """Members have small losses (Yeom et al., 2018, arXiv:1709.01604, section 3.2). It takes easy records for members.

    Args:
        module: The architecture. Public.
        records: The records in question.
        own: Records of the attacker like these, none of which was trained on.
    """

    module: nn.Module
    records: LabelledRows
    own: LabelledRows

    # Tensors this small only wait for each other's threads.
    @threadpool_limits.wrap(limits=1)
    def attack(self, observation: Observation) -> MembershipScores | NotApplicable:
        """The share of own records with a larger loss."""
        started = time.perf_counter()
        held = _models(observation, self.module)
        if isinstance(held, NotApplicable):
            return held
        found, usual = (_sureness(held.after, records, observation) for records in (self.records, self.own))
        return MembershipScores(scores=_share_below(found, usual), seconds=time.perf_counter() - started)


@dataclass(frozen=True, kw_only=True, eq=False)
class LikelihoodRatio:
    """Members are surer than the same record is in models that never saw it (offline LiRA: Carlini et al., 2022, arXiv:2112.03570, eq. 4).

    The spread is one for all records, since few shadow models do not show that of each.

    Args:
        module: The architecture. Public.
        records: The records in question, none of them among `own`.
        own: Records of the attacker, for training shadow models.
        client_records: How many records the client is believed to have, fewer than `own`.
        shadows: Number of shadow models, at least 2.
        seed: Decides which own records each is trained on.
    """

    module: nn.Module
    records: LabelledRows
    own: LabelledRows
    client_records: int
    shadows: int = 16
    seed: int = 0

    # Tensors this small only wait for each other's threads.
    @threadpool_limits.wrap(limits=1)
    def attack(self, observation: Observation) -> MembershipScores | NotApplicable:
        """The probability that a model without the record is less sure of it."""
        started = time.perf_counter()
        models = _with_shadows(self, observation)
        if isinstance(models, NotApplicable):
            return models
        held, shadows = models
        without = log_odds(held.before, shadows.parameters, self.records, observation.training.loss)
        spread = max(float(np.sqrt(without.var(axis=0, ddof=1).mean())), _LEAST_SPREAD)
        found = _sureness(held.after, self.records, observation)
        return MembershipScores(scores=ndtr((found - without.mean(axis=0)) / spread), seconds=time.perf_counter() - started)


@dataclass(frozen=True, kw_only=True, eq=False)
class RelativeMembership:
    """Training raised a member's probability more than that of other records (offline RMIA: Zarifzadeh et al., 2024, arXiv:2312.03262).

    Arguments as for `LikelihoodRatio`.
    """

    module: nn.Module
    records: LabelledRows
    own: LabelledRows
    client_records: int
    shadows: int = 4
    seed: int = 0

    # Tensors this small only wait for each other's threads.
    @threadpool_limits.wrap(limits=1)
    def attack(self, observation: Observation) -> MembershipScores | NotApplicable:
        """The share of own records whose probability was raised less."""
        started = time.perf_counter()
        models = _with_shadows(self, observation)
        if isinstance(models, NotApplicable):
            return models
        held, shadows = models

        def raised(records: LabelledRows, without: NDArray[np.bool_]) -> NDArray[np.float64]:
            probabilities = expit(log_odds(held.before, shadows.parameters, records, observation.training.loss))
            mean = (probabilities * without).sum(axis=0) / without.sum(axis=0)
            usual = ((1 + _OFFLINE) * mean + 1 - _OFFLINE) / 2
            return log_expit(_sureness(held.after, records, observation)) - np.log(usual)

        # Own records on which all models were trained have no probability without them.
        known = (~shadows.trained_on).any(axis=0)
        own = LabelledRows(rows=self.own.rows[known], labels=self.own.labels[known])
        usual = raised(own, ~shadows.trained_on[:, known])
        found = raised(self.records, np.ones((self.shadows, len(self.records)), dtype=np.bool_))
        return MembershipScores(scores=_share_below(found, usual), seconds=time.perf_counter() - started)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Models:
    before: nn.Module
    after: nn.Module


def _models(observation: Observation, module: nn.Module) -> _Models | NotApplicable:
    """The model before the round, and the one that what was seen makes of it."""
    model, seen = observation.model, observation.seen
    if isinstance(seen, CiphertextOnly):
        return NotApplicable(reason=seen.reason)
    if model is None:
        return NotApplicable(reason="the model before the round is not held")
    if layout_of(module) != observation.layout:
        raise LayoutMismatchError("expected an architecture of the observation's layout, got another one; nothing was attacked")
    before, after = (copy.deepcopy(module).eval() for _ in range(2))
    load_values(before, model)
    load_values(after, PlainVector(layout=model.layout, values=model.values + seen.values))
    return _Models(before=before, after=after)


def _with_shadows(attack: "LikelihoodRatio | RelativeMembership", observation: Observation) -> tuple[_Models, Shadows] | NotApplicable:
    held = _models(observation, attack.module)
    if isinstance(held, NotApplicable):
        return held
    shadows = train_shadows(observation, held.before, attack.own, records=attack.client_records, count=attack.shadows, seed=attack.seed)
    return shadows if isinstance(shadows, NotApplicable) else (held, shadows)


def _sureness(module: nn.Module, records: LabelledRows, observation: Observation) -> NDArray[np.float64]:
    """Logarithm of the odds that a model gives each record's label."""
    parameters = {name: parameter.detach()[None] for name, parameter in trainable_parameters(module).items()}
    return log_odds(module, parameters, records, observation.training.loss)[0]


def _share_below(values: NDArray[np.float64], others: NDArray[np.float64]) -> NDArray[np.float64]:
    """For each value, the share of the others that are below it, those that are equal counting half."""
    ordered = np.sort(others)
    return (np.searchsorted(ordered, values, side="left") + np.searchsorted(ordered, values, side="right")) / (2 * len(ordered))
