"""What is made of a round's inner products: coefficients that the policy allows, or none.

Openers decide so, and so does a run in the clear that is compared with theirs. Under encryption it is the coefficients that single out a
client, if anything does: Krum takes one update, and so does FedTSV in a round in which one client alone has a positive score. Such
coefficients are never opened. What happens instead is defined, and the same at every opener: the weights of the rounds before, if the rule
keeps any and the policy allows them; else the round is skipped.
"""

import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from privfed.aggregation.gram import Gram, Reference
from privfed.aggregation.mixture import Mixture
from privfed.aggregation.rules import CumulativeRule, GramRule
from privfed.agreement import Agreement, NamedRule
from privfed.errors import CohortError, OpeningRefusedError, UnsupportedInThisModeError
from privfed.he.product_params import ProductParams
from privfed.he.sketch import standard_error
from privfed.policy import OpeningPolicy

# Scores are sums of worths of at most 1: what rounding leaves of nothing is no score.
_ROUNDING = 1e-12
# Of a sketch six standard errors: beyond them by chance once in 36 rounds at the very most, and in truth next to never.
_SKETCH_DEVIATIONS = 6
_SEED_BYTES = 8


class Fallback(Enum):
    """What was done where the policy did not allow what the rule chose."""

    NONE = "the rule's own weights"
    PREVIOUS = "the cumulative weights of the rounds before"
    SKIPPED = "nothing is opened, the round is skipped"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Decision:
    """Coefficients of a scored round, and what stays at the openers.

    Args:
        coefficients: Of each participant, by name; all zero if the round is skipped. Public.
        scale: By what the weighted mean is multiplied before it moves the model. Private, as the norms from which it follows.
        scores: Cumulative scores after the round, of rules that keep some. Private to the openers.
        fallback: What was done. Public.
        disclosed: How many inner products were opened. Public.
        assurance: Name of the `Assurance` of these. Public.
        reason: Why the rule's own weights were not taken; empty if they were. Private to the openers.
    """

    coefficients: Mapping[str, int]
    scale: float
    scores: Mapping[str, float]
    fallback: Fallback
    disclosed: int
    assurance: str
    reason: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "coefficients", MappingProxyType(dict(self.coefficients)))
        object.__setattr__(self, "scores", MappingProxyType(dict(self.scores)))

    def to_bytes(self) -> bytes:
        """The decision as an opener keeps it."""
        kept = {field.name: getattr(self, field.name) for field in fields(self)}
        kept |= {"coefficients": dict(self.coefficients), "scores": dict(self.scores), "fallback": self.fallback.name}
        return json.dumps(kept).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Decision":
        """Reads what `to_bytes` wrote.

        Raises:
            ValueError: If it is something else.
        """
        try:
            kept = json.loads(data)
            return cls(**(kept | {"fallback": Fallback[kept["fallback"]]}))
        except (TypeError, LookupError) as error:
            raise ValueError("expected a decision as Decision.to_bytes writes it, got something else") from error

    def __repr__(self) -> str:
        return f"Decision(participants={len(self.coefficients)}, fallback={self.fallback.name})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was chosen for a round.

    Args:
        fallback: What was done.
        mixture: Proportions of the updates; None if the round is skipped.
        coefficients: Of the clients of the mixture, by name; empty if the round is skipped.
        scores: Cumulative scores after the round.
        reason: Why the rule's own weights were not taken; empty if they were.
    """

    fallback: Fallback
    mixture: Mixture | None
    coefficients: Mapping[str, int]
    scores: Mapping[str, float]
    reason: str


def choose(
    rule: GramRule | CumulativeRule,
    matrix: Callable[[], Gram],
    *,
    weights: Mapping[str, float],
    scores: Mapping[str, float],
    eligible: Collection[str],
    policy: OpeningPolicy,
    total: int,
) -> Choice:
    """The rule's own weights, if it finds some and the policy allows them; else those of the rounds before; else none.

    Args:
        rule: The rule.
        matrix: Makes the Gram matrix, or refuses to with a `ValueError`.
        weights: Public weight of each client of the matrix, at least.
        scores: Cumulative scores after the rounds before.
        eligible: Who may count in the weights of the rounds before.
        policy: When coefficients may be opened.
        total: Largest sum of the coefficients.
    """
    after: Mapping[str, float] = scores
    chosen: list[tuple[Fallback, Mixture]] = []
    reasons: list[str] = []
    try:
        gram = matrix()
        if isinstance(rule, CumulativeRule):
            after, mixture = rule.step(scores, gram)
        else:
            mixture = rule.mixture({name: weights[name] for name in gram.names}, gram)
        chosen.append((Fallback.NONE, mixture))
    except (CohortError, ValueError) as error:
        reasons.append(str(error))
    previous = {name: scores.get(name, 0.0) for name in eligible}
    previous = {name: score if score > _ROUNDING else 0.0 for name, score in previous.items()}
    if any(previous.values()):
        chosen.append((Fallback.PREVIOUS, Mixture(weights=previous)))
    for fallback, mixture in chosen:
        coefficients = mixture.coefficients(total=total)
        try:
            policy.check_chosen(coefficients)
        except OpeningRefusedError as error:
            reasons.append(str(error))
            continue
        return Choice(fallback=fallback, mixture=mixture, coefficients=coefficients, scores=after, reason="; ".join(reasons))
    return Choice(fallback=Fallback.SKIPPED, mixture=None, coefficients={}, scores=scores, reason="; ".join(reasons))


def decide(
    agreement: Agreement,
    participants: Sequence[str],
    products: NDArray[np.float64],
    *,
    scores: Mapping[str, float],
    assurance: str,
    digest: bytes,
) -> Decision:
    """Coefficients of a scored round, under which the policy allows an opening; all zero if there are none.

    A client whose opened norm is beyond the agreed bound did not do what an honest client does, and counts nothing. That holds for norms
    up to 90 times the bound. Squares are opened modulo `ProductParams.wraps_at` squared bounds: a client that chooses a length beyond that
    may have a small square opened, and then counts as what it looks like, or a negative one, and then the rule's choice is not taken.

    Args:
        agreement: Rule, weights, policy and parameters.
        participants: In the order of the rows, the validator among them.
        products: Opened inner products, of shape (n, n). Private.
        scores: Cumulative scores after the rounds before.
        assurance: Name of the `Assurance` of the products.
        digest: `RoundDigest.digest` of the round. It depends on every upload, and estimators that sample draw from it: all openers
            draw the same, nobody knows it before the uploads are fixed, and every round draws anew. Public.

    Raises:
        UnsupportedInThisModeError: If the rule is known by name alone, or is none that looks at inner products.
    """
    rule, params = agreement.rule, agreement.params
    if rule.needs_gram is not True or isinstance(rule, NamedRule) or not isinstance(params, ProductParams):
        raise UnsupportedInThisModeError("the rule of this session makes nothing of inner products; nothing was decided")
    seed = int.from_bytes(hashlib.sha256(b"privfed estimators v1" + digest).digest()[:_SEED_BYTES])
    choice = choose(
        rule,
        lambda: replace(checked_gram(agreement, participants, products), seed=seed),
        weights=agreement.weights,
        scores=scores,
        # Who is over the bound counts nothing in the weights before, either.
        eligible=_within_bound(agreement, params, participants, products),
        policy=agreement.policy,
        total=params.weight_sum,
    )
    if choice.mixture is not None and choice.mixture.reference_share:
        raise UnsupportedInThisModeError(f"{rule.name} takes a share of the reference, which nobody opens; nothing was decided")
    return Decision(
        coefficients={name: choice.coefficients.get(name, 0) for name in participants},
        scale=1.0 if choice.mixture is None else choice.mixture.scale,
        scores=choice.scores,
        fallback=choice.fallback,
        disclosed=len(products) * (len(products) + 1) // 2,
        assurance=assurance,
        reason=choice.reason,
    )


def checked_gram(agreement: Agreement, participants: Sequence[str], products: NDArray[np.float64]) -> Gram:
    """The Gram matrix of those contributors that keep to the bound, with the reference if there is one.

    An update is nothing if all of its inner products are within the error of an opening, and a reference if its squared norm is: the
    angles of what is left would be chance.

    Raises:
        ValueError: If nobody does, or the reference does not, or the numbers are no inner products of updates.
    """
    params, size = agreement.params, agreement.layout.size
    if not isinstance(params, ProductParams):
        raise ValueError("expected parameters for products, got others")
    slack, longest = params.scalar_error(size), _longest_square(params, size)
    squares = np.diag(products)
    lengths = np.sqrt(np.maximum(squares, 0.0) + slack)
    if (squares < -slack).any() or (np.abs(products) > np.outer(lengths, lengths) + slack).any():
        raise ValueError("expected inner products of updates, got numbers that are none")
    sent = (np.abs(products) > slack).any(axis=1).astype(np.float64)
    products = products * np.outer(sent, sent)
    rows = {name: row for row, name in enumerate(participants)}
    kept = _within_bound(agreement, params, participants, products)
    places = [rows[name] for name in kept]
    reference: Reference | None = None
    if agreement.validator is not None:
        row = rows[agreement.validator.name]
        if squares[row] > longest:
            raise ValueError("expected a reference within the bound, got a longer one")
        reference = Reference(products=products[row, places], square=float(squares[row]) if squares[row] > slack else 0.0)
    matrix = products[np.ix_(places, places)]
    np.fill_diagonal(matrix, np.maximum(np.diag(matrix), 0.0))
    gram = Gram(names=tuple(kept), size=size, products=matrix, reference=reference)
    return gram.with_declared_noise(agreement.noise_energy, reference=None if agreement.validator is None else agreement.validator.name)


def _within_bound(agreement: Agreement, params: ProductParams, participants: Sequence[str], products: NDArray[np.float64]) -> list[str]:
    """Contributors whose squared norm, as it was opened, is that of an update within the bound."""
    squares = dict(zip(participants, np.diag(products), strict=True))
    size = agreement.layout.size
    longest, slack = _longest_square(params, size), params.scalar_error(size)
    return [name for name in agreement.contributors(participants) if -slack <= squares[name] <= longest]


def _longest_square(params: ProductParams, size: int) -> float:
    # The grid may lengthen an update by half a step in every coordinate, and a sketch changes its norm.
    longest = (params.bound + math.sqrt(size) * params.step / 2) ** 2 + params.scalar_error(size)
    if params.sketch:
        longest += _SKETCH_DEVIATIONS * standard_error(longest, longest, longest)
    return longest
