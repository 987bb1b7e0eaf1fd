"""Whether what a client releases shows how many records it has: under differential privacy one record more must not be noticed.

Opacus divides by `int(records * sample_rate)`, so that one record more changes the scale of the noise itself (its issues 571 and 819):
two releases tell neighbouring tables apart, whatever epsilon says. Here a client trains on records of zeros, which move no weight of the
model: what is released is noise, and its scale must be the same for one record more or less.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import f as fisher
from torch import nn

from privfed.attacks.canary_scores import CanaryScores
from privfed.attacks.dirac_rows import FAMILY_LEVEL, check_plain
from privfed.attacks.epsilon_bounds import clopper_pearson_epsilon
from privfed.attacks.meters import Meter
from privfed.data.samples import Samples
from privfed.training.mechanism import DpSgd
from privfed.training.model import layout_of
from privfed.update import PlainVector

# Few records make the largest difference between so many and one more.
_EXPECTED = 4
_NEURONS = 2500
_NOISE_ON_A_WEIGHT = 1e-4


@dataclass(frozen=True, kw_only=True)
class CardinalityCanary:
    """Trainings on several numbers of records that are zero. Train `module` on `samples(n)` for each n of `sizes`; then `read`.

    Args:
        declared: The mechanism that is claimed.

    Raises:
        ValueError: If the mechanism is not DP-SGD with plain Poisson samples and a fixed clipping norm.
    """

    declared: DpSgd

    def __post_init__(self) -> None:
        check_plain(self.declared)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Numbers of records, each one more than the last: where the expected batch is a whole number, and on both sides of it."""
        middle = round(_EXPECTED / self.declared.sample_rate)
        return middle - 1, middle, middle + 1

    @property
    def module(self) -> nn.Module:
        """A model of one input whose gradient at zero is zero: two layers without bias, all weights zero."""
        module = nn.Sequential(nn.Linear(1, _NEURONS, bias=False), nn.ReLU(), nn.Linear(_NEURONS, 1, bias=False))
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        return module

    @property
    def mechanism(self) -> DpSgd:
        """The declared mechanism, for any of these numbers of records, with a learning rate at which the model hardly moves."""
        declared = self.declared
        noise = math.sqrt(declared.steps) * declared.noise_multiplier * declared.max_grad_norm
        rate = _NOISE_ON_A_WEIGHT * declared.expected_batch_size / noise
        return replace(declared, learning_rate=rate, max_records=max(self.sizes[-1], declared.record_limit))

    def samples(self, records: int) -> Samples:
        """So many records of zeros, with label 0: for binary cross-entropy."""
        zeros = np.zeros((records, 1), dtype=np.float32)
        return Samples(features=zeros, labels=np.zeros(records, dtype=np.int64), groups=None, columns=("zero",))

    def read(self, updates: Sequence[PlainVector]) -> tuple[Meter, Meter]:
        """How much larger the noise is for one record less, twice. Any fault has a probability of 1e-3 at most.

        Args:
            updates: Trained minus received weights, one for each of `sizes`.

        Raises:
            ValueError: If there is not one update of `module` for each size.
        """
        layout = layout_of(self.module)
        if len(updates) != len(self.sizes) or any(update.layout != layout for update in updates):
            raise ValueError(f"expected an update of the canary's model for each of {self.sizes} records")
        fewer, some, more = (update.values for update in updates)
        low, middle, high = self.sizes
        return _ratio(fewer, some, what=f"{low} to that of {middle}"), _ratio(some, more, what=f"{middle} to that of {high}")


def _ratio(fewer: NDArray[np.float64], more: NDArray[np.float64], *, what: str) -> Meter:
    squares = float(np.sum(more**2))
    measured = math.sqrt(float(np.sum(fewer**2)) / squares) if squares else math.inf
    reach = math.sqrt(float(fisher.isf(FAMILY_LEVEL / 4, len(fewer), len(more))))
    meaning = "what is released depends on the number of records"
    return Meter(
        what=f"the ratio of the noise of {what} records",
        measured=measured,
        low=measured / reach,
        high=measured * reach,
        declared=1.0,
        less=meaning,
        more=meaning,
    )


def cardinality_epsilon(fewer: Sequence[PlainVector], more: Sequence[PlainVector], *, delta: float, significance: float = 0.05) -> float:
    """Lower bound on the epsilon of one release, from independent ones of neighbouring tables, told apart by the scale of their noise.

    Args:
        fewer: Releases without the record.
        more: Releases with it.
        delta: The privacy parameter.
        significance: Probability with which the bound is too high.
    """
    without, with_it = (np.array([float(np.linalg.norm(update.values)) for update in updates]) for updates in (fewer, more))
    # Which of the two is larger is not known beforehand.
    either = (CanaryScores(included=sign * with_it, excluded=sign * without) for sign in (1.0, -1.0))
    return max(clopper_pearson_epsilon(scores, delta=delta, significance=significance / 2) for scores in either)
