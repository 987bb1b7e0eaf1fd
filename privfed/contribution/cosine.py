"""CGSV: clients are weighted by how far they point the way of the aggregate.

Source: Xu et al., 2021, "Gradient-driven rewards to guarantee fairness in collaborative machine learning" (NeurIPS), algorithm 1,
with the constants of its published code. The cosine is an approximation of the Shapley value for normalised updates.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from privfed.aggregation.gram import Gram
from privfed.aggregation.mixture import Mixture
from privfed.update import PlainVector

# No importance falls below this, as in the published code: a client that is out can come back.
_LEAST = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Cgsv:
    """Sum of the updates at one length, weighted by importance: a moving average of each client's cosine with that sum.

    The importance that a round begins with weights its updates, and the round then changes it. Importances of a round's clients keep
    their sum, so with full participation they sum to 1. A client that is new starts with the mean importance of the others, and keeps it
    as they do. Updates shorter than a third of the median stay that much shorter than the others, in the sum and in the cosines
    (`Gram.lengths`).

    Args:
        length: Euclidean norm to which every update is brought. Positive, public.
        decay: Share of the old importance that is kept, from 0 to below 1.

    Raises:
        ValueError: If a number is out of range.
    """

    needs_gram: ClassVar[Literal[True]] = True

    length: float = 0.5
    decay: float = 0.95

    def __post_init__(self) -> None:
        if not (math.isfinite(self.length) and self.length > 0):
            raise ValueError(f"expected length to be positive and finite, got {self.length}")
        if not 0 <= self.decay < 1:
            raise ValueError(f"expected decay from 0 to below 1, got {self.decay}")

    @property
    def needs_reference(self) -> bool:
        """It does not: the aggregate itself is the reference."""
        return False

    @property
    def name(self) -> str:
        """Canonical name. Public."""
        return f"Cgsv(length={self.length!r}, decay={self.decay!r})"

    def step(self, scores: Mapping[str, float], gram: Gram) -> tuple[dict[str, float], Mixture]:
        """See `CumulativeRule.step`. A round of zero updates moves nothing and changes no importance."""
        known = [scores[name] for name in gram.names if name in scores]
        start = math.fsum(known) / len(known) if known else 1 / len(gram.names)
        old = np.array([scores.get(name, start) for name in gram.names])
        norms, lengths = np.sqrt(gram.squared_norms), gram.lengths
        if not norms.any():
            return dict(scores), Mixture(weights=dict.fromkeys(gram.names, 1.0))
        cosines_between = gram.products / lengths / lengths[:, np.newaxis]
        share = old / old.sum()
        towards = cosines_between @ share
        resultant = math.sqrt(max(float(share @ towards), 0.0))
        cosines = towards / resultant if resultant > 0 else np.zeros(len(norms))
        # In a first round the published average starts at nothing, for all alike. Who comes later has the mean of the others for a past.
        past = old if known else np.zeros(len(norms))
        new = np.maximum(self.decay * past + (1 - self.decay) * cosines, _LEAST)
        new *= old.sum() / new.sum()
        # Of what is cut off below the shortest length, the weight falls with the norm, and is nothing where nothing was sent.
        inverse = norms / lengths / lengths
        weights = share * inverse
        if not weights.any():  # whoever has an importance sent nothing
            weights = inverse
        mixture = Mixture(weights=dict(zip(gram.names, weights.tolist(), strict=True)), scale=self.length * float(weights.sum()))
        return dict(scores) | dict(zip(gram.names, new.tolist(), strict=True)), mixture


def gradient_reward(aggregate: PlainVector, *, share: float) -> PlainVector:
    """What a client gets of an aggregate under CGSV: in each tensor, only the coordinates of largest magnitude; the others are zero.

    It is part of the published method, for comparisons in the clear. Who can open an aggregate has all of it.

    Args:
        aggregate: The aggregate.
        share: Of the coordinates of each tensor, rounded up, from 0 to 1. The best client gets 1.

    Raises:
        ValueError: If the share is out of range.

    Example:
        >>> from privfed.update import Layout
        >>> layout = Layout(names=("weight", "bias"), shapes=((4,), (1,)))
        >>> gradient_reward(PlainVector(layout=layout, values=[1, -4, 2, 3, 5]), share=0.5).values.tolist()
        [0.0, -4.0, 0.0, 3.0, 5.0]
    """
    if not 0 <= share <= 1:
        raise ValueError(f"expected share from 0 to 1, got {share}")
    kept: dict[str, np.ndarray] = {}
    for name, tensor in aggregate.layout.unflatten(aggregate).items():
        flat = tensor.ravel()
        largest = np.argsort(-np.abs(flat), kind="stable")[: math.ceil(share * flat.size)]
        reward = np.zeros_like(flat)
        reward[largest] = flat[largest]
        kept[name] = reward.reshape(tensor.shape)
    return aggregate.layout.flatten(kept)
