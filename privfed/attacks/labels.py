"""Labels read off the last layer's bias gradient, which is the mean of prediction minus label.

On a fresh network all predictions are nearly equal, so the number of positive records of a batch follows: a bank's fraud rate
leaks in every round that is not protected.
"""

import math
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from privfed.attacks.facts import AdaptiveOptimizer, BinaryLoss
from privfed.attacks.observation import NotApplicable, Observation, gradient_part, linear_layers


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LabelCount:
    """Estimated number of positive records. Private: it says what the client's labels are.

    Args:
        positives: The estimate, at least 0; not rounded.
        records: Number of (expected) record visits among them, over all steps and clients. Public.
        standard_error: Standard deviation that the known noise gives the estimate; 0 without noise. Public.
        seconds: Elapsed time.
    """

    positives: float
    records: float
    standard_error: float
    seconds: float

    def __repr__(self) -> str:
        return f"LabelCount(records={self.records})"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SingleLabel:
    """The label of the only record. Private.

    Args:
        label: Class index.
        certain: Whether the sign that it was read from stands out of rounding and known noise.
        seconds: Elapsed time.
    """

    label: int
    certain: bool
    seconds: float

    def __repr__(self) -> str:
        return f"SingleLabel(certain={self.certain})"


@dataclass(frozen=True, kw_only=True, eq=False)
class _BiasGradient:
    """Gradient of the last layer's bias, of shape (outputs,), averaged over steps and clients, and its largest error."""

    mean: NDArray[np.float64]
    error: NDArray[np.float64]


def label_count(observation: Observation, *, mean_prediction: float) -> LabelCount | NotApplicable:
    """Counts the positive records behind an update of a model with one logit.

    A record with prediction p adds p to the bias gradient if it is negative, and -w (1 - p) if it is positive, where w is the
    client's positive weight. With p the same for all, the share of positives is (p - g) / (p + w (1 - p)); for w = 1 it is p - g
    whatever the predictions are, as long as their mean is right.

    Clipping shrinks what a record adds, so under DP-SGD the count is a guess; score it against the prevalence. With unequal
    aggregation coefficients the share of positives is the clients' weighted mean.

    Args:
        observation: What the attacker holds.
        mean_prediction: Mean probability (after the sigmoid) that the model gives to records like the client's, above 0 and below
            1. The attacker runs the model before the round on own or public records, and after several steps also the one after
            it, and takes the mean of both.

    Raises:
        ValueError: If the mean prediction is not between 0 and 1.
    """
    started = time.perf_counter()
    if not 0 < mean_prediction < 1:
        raise ValueError(f"expected mean_prediction above 0 and below 1, got {mean_prediction}")
    training = observation.training
    gradient = _bias_gradient(observation)
    if isinstance(gradient, NotApplicable):
        return gradient
    if not isinstance(training.loss, BinaryLoss) or len(gradient.mean) != 1:
        return NotApplicable(reason="labels are counted for one logit with binary cross-entropy only")
    scale = observation.records / (mean_prediction + training.loss.positive_weight * (1 - mean_prediction))
    deviation = 0.0
    if training.noise is not None:
        shares = np.array(observation.coefficients) / sum(observation.coefficients)
        one_step = training.noise.noise_multiplier * training.noise.max_grad_norm / training.batch_size
        deviation = one_step / math.sqrt(training.steps) * float(np.linalg.norm(shares))
    return LabelCount(
        positives=max(0.0, scale * (mean_prediction - float(gradient.mean[0]))),
        records=observation.records,
        standard_error=scale * deviation,
        seconds=time.perf_counter() - started,
    )


def single_label(observation: Observation) -> SingleLabel | NotApplicable:
    """Reads the label of a single record off the signs of the bias gradient, whatever the network (Zhao et al., 2020, section 3).

    Only the record's own class has a negative gradient: with one logit the sign is the label, else the smallest entry names it.

    Args:
        observation: What the attacker holds; not applicable unless one record was visited once, by one client.
    """
    started = time.perf_counter()
    if observation.records != 1:
        return NotApplicable(reason="more than one record was visited; their signs add up")
    gradient = _bias_gradient(observation)
    if isinstance(gradient, NotApplicable):
        return gradient
    if isinstance(observation.training.loss, BinaryLoss):
        if len(gradient.mean) != 1:
            return NotApplicable(reason="binary cross-entropy on more than one output is not supported")
        label, certain = int(gradient.mean[0] < 0), bool(np.abs(gradient.mean[0]) > gradient.error[0])
    else:
        label = int(np.argmin(gradient.mean))
        certain = bool(((gradient.mean < -gradient.error) == (np.arange(len(gradient.mean)) == label)).all())
    return SingleLabel(label=label, certain=certain, seconds=time.perf_counter() - started)


def _bias_gradient(observation: Observation) -> _BiasGradient | NotApplicable:
    part, optimizer = gradient_part(observation), observation.training.optimizer
    if isinstance(part, NotApplicable):
        return part
    if isinstance(optimizer, AdaptiveOptimizer):
        return NotApplicable(reason=f"{optimizer.name} rescales each coordinate")
    layers = linear_layers(observation.layout)
    if not layers:
        return NotApplicable(reason="the model has no fully connected layer with bias")
    response, bias = optimizer.response(observation.training.steps), layers[-1].bias
    unflatten = observation.layout.unflatten
    return _BiasGradient(mean=-unflatten(part.change)[bias] / response, error=unflatten(part.error)[bias] / response)
