"""An audit of DP-SGD in which every coordinate of the update is the score of one canary.

The model is one weight per canary, all zero; canary j is a row that is zero but in column j, and there so large that its gradient is
clipped. So it adds exactly `max_grad_norm` to weight j, and to no other, in every step that samples it. Weights of canaries that
did not take part are noise alone. The mechanism is the client's own; nothing of it is imitated.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from privfed.attacks.canary_scores import CanaryScores
from privfed.attacks.epsilon_bounds import clopper_pearson_epsilon, gaussian_epsilon, gaussian_trade_off_epsilon
from privfed.attacks.meters import Meter, correlation_meter, noise_meter, weight_meter
from privfed.data.samples import Samples
from privfed.dp.accounting import epsilon
from privfed.dp.mechanism import PoissonSampledGaussian
from privfed.training.mechanism import DpSgd
from privfed.training.model import layout_of, values_of
from privfed.update import PlainVector

# A gradient is this many times as long as it may be, at least, as long as the model hardly moves.
_EXCESS = 25.0
_MOST_MOVED = 0.05
_FEWEST = 40
FAMILY_LEVEL = 1e-3
"""Probability with which an audit of a mechanism that is as declared finds any fault."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DiracReading:
    """What the update of such a training says about the mechanism. Public: the canaries are nobody's.

    Args:
        scores: Each canary's weight, in units of what one record may add in one step.
        noise: Standard deviation of the excluded canaries' weights.
        weight: Mean weight of the included ones.
        spread: How far their weights lie apart: by noise alone, if no record counts for more than another. None for sampled steps, in which
            records are taken by chance.
        claimed: Epsilon that the declared mechanism spends at `delta`.
        delta: The privacy parameter.
        proved: Epsilon that has leaked, at level 1e-3 / 4: by `gaussian_trade_off_epsilon` where every step takes all records, and by
            `clopper_pearson_epsilon` for sampled steps, whose trade-off is not Gaussian.
    """

    scores: CanaryScores
    noise: Meter
    weight: Meter
    spread: Meter | None
    claimed: float
    delta: float
    proved: float

    @property
    def faults(self) -> tuple[str, ...]:
        """What is not as declared. A mechanism that is as declared has any with probability 1e-3 at most."""
        found = [meter.fault for meter in (self.noise, self.weight, self.spread) if meter is not None and meter.fault is not None]
        if self.proved > self.claimed:
            found.append(f"epsilon is at least {self.proved:.2f} at delta {self.delta:g}, and {self.claimed:.2f} was claimed")
        return tuple(found)

    def sharpest_bound(self, *, significance: float = 0.05) -> float:
        """Lower bound on epsilon by the means of normal scores. Only for mechanisms whose every step takes all records."""
        return gaussian_epsilon(self.scores, delta=self.delta, significance=significance)


@dataclass(frozen=True, kw_only=True, eq=False)
class DiracRows:
    """Canaries for one training run. Whether each takes part was decided before, by a coin.

    Train `module` from `start` on `samples` with `mechanism`, along the path to be audited; then `read` the update.

    Args:
        included: Whether each canary takes part, of shape (canaries,), at least 40, some of each kind.
        declared: The mechanism that is claimed.

    Raises:
        ValueError: If there are too few canaries, more take part than the mechanism allows records, or it is not DP-SGD with plain
            Poisson samples and a fixed clipping norm.
    """

    included: NDArray[np.bool_]
    declared: DpSgd

    def __post_init__(self) -> None:
        check_plain(self.declared)
        count = int(self.included.sum())
        if len(self.included) < _FEWEST or not 2 <= count <= len(self.included) - 2:
            raise ValueError(f"expected at least {_FEWEST} canaries and two of each kind, got {len(self.included)} with {count} included")
        if count > self.declared.record_limit:
            raise ValueError(f"expected at most {self.declared.record_limit} included canaries, as the mechanism declares, got {count}")

    @classmethod
    def draw(cls, declared: DpSgd, *, count: int, rng: np.random.Generator) -> "DiracRows":
        """Tosses a coin for each of so many canaries."""
        return cls(included=rng.random(count) < 0.5, declared=declared)

    @cached_property
    def module(self) -> nn.Module:
        """One weight for each canary and nothing else, all zero."""
        module = nn.Linear(len(self.included), 1, bias=False)
        with torch.no_grad():
            module.weight.zero_()
        return module

    @property
    def start(self) -> PlainVector:
        """The zero model."""
        return values_of(self.module)

    @property
    def samples(self) -> Samples:
        """The included canaries, with label 0: for binary cross-entropy."""
        rows = self._height * np.eye(len(self.included), dtype=np.float32)[self.included]
        names = tuple(f"canary {index}" for index in range(len(self.included)))
        return Samples(features=rows, labels=np.zeros(len(rows), dtype=np.int64), groups=None, columns=names)

    @property
    def mechanism(self) -> DpSgd:
        """The declared mechanism with a learning rate at which the model hardly moves: all noise and all records scale with it."""
        declared = self.declared
        most = declared.steps * max(1.0, declared.noise_multiplier) * declared.max_grad_norm
        return replace(declared, learning_rate=_MOST_MOVED * declared.expected_batch_size / (most * self._height))

    @property
    def _height(self) -> float:
        # The gradient of a record that is as likely to be positive as negative is half its length.
        return 2 * _EXCESS * max(1.0, self.declared.max_grad_norm)

    def read(self, update: PlainVector, *, delta: float) -> DiracReading:
        """Compares the update with what the declared mechanism makes.

        Args:
            update: Trained minus received weights, as they left the client or were opened.
            delta: The privacy parameter at which epsilon is claimed and proved.

        Raises:
            ValueError: If the update is not one of `module`, or delta is not above 0 and below 1.
        """
        mechanism, included = self.mechanism, self.included
        if update.layout != layout_of(self.module):
            raise ValueError(f"expected an update of {len(included)} weights, one for each canary, got another layout")
        unit = mechanism.learning_rate * mechanism.max_grad_norm / mechanism.expected_batch_size
        weights = -update.values / unit
        rate, steps = mechanism.sample_rate, mechanism.steps
        noise = mechanism.noise_multiplier * steps**0.5
        sampling = (steps * rate * (1 - rate)) ** 0.5
        kinds = CanaryScores(included=weights[included], excluded=weights[~included])
        each = FAMILY_LEVEL / 4
        bound = gaussian_trade_off_epsilon if rate == 1 else clopper_pearson_epsilon
        return DiracReading(
            scores=kinds,
            noise=noise_meter(kinds.excluded, what="the noise on a weight", declared=noise, significance=each),
            weight=weight_meter(
                float(kinds.included.mean()),
                what="the weight of a record",
                declared=steps * rate,
                deviation=((noise**2 + sampling**2) / len(kinds.included)) ** 0.5,
                significance=each,
            ),
            spread=_spread(kinds.included, declared=noise, significance=each) if rate == 1 else None,
            claimed=epsilon([mechanism.event()], delta=delta),
            delta=delta,
            proved=bound(kinds, delta=delta, significance=each),
        )


def _spread(weights: NDArray[np.float64], *, declared: float, significance: float) -> Meter:
    meter = noise_meter(
        weights - weights.mean(), what="the spread of the records' weights", declared=declared, significance=significance, centred=True
    )
    return replace(meter, more="some records weigh more than others: they are used several times, or clipped less")


def check_plain(declared: DpSgd) -> None:
    """Refuses variants of DP-SGD that the meters do not know, with a ValueError."""
    if not isinstance(declared.event(), PoissonSampledGaussian):
        raise ValueError(f"expected DP-SGD with plain Poisson samples and a fixed clipping norm, got {type(declared.event()).__name__}")


def compare_noise(first: tuple[DiracRows, PlainVector], second: tuple[DiracRows, PlainVector], *, what: str) -> Meter:
    """Whether the noise of two rounds or clients is independent, by the canaries that took part in neither, at level 1e-3.

    Args:
        first: Canaries, and the update of the training on them.
        second: Likewise, as many canaries.
        what: What is compared, such as "the noise of rounds 1 and 2".

    Raises:
        ValueError: If the numbers of canaries differ, or hardly any canary took part in neither.
    """
    absent = ~(first[0].included | second[0].included) if len(first[0].included) == len(second[0].included) else np.zeros(0, dtype=np.bool_)
    if absent.sum() < _FEWEST // 4:
        raise ValueError(f"expected equally many canaries, {_FEWEST // 4} of which took part in neither training, got {int(absent.sum())}")
    return correlation_meter(first[1].values[absent], second[1].values[absent], what=what, significance=FAMILY_LEVEL)
