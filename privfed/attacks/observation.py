"""What an attacker holds, and nothing more: an `Observation` has no place for the truth.

An attack is a function or a frozen dataclass with one method, `attack(observation) -> Reconstruction | NotApplicable`. What it
found is compared with the truth elsewhere, in `privfed.attacks.scoring`.
"""

import math
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from privfed.attacks.facts import Activation, AdaptiveOptimizer, TableSchema, TrainingFacts
from privfed.errors import LayoutMismatchError
from privfed.update import Layout, PlainVector

# Products, mean, clipping, learning rate, subtraction and cast round a gradient at most 8 times.
_FLOAT32_ROUNDING = 8 * 2.0**-24
# Eight independent roundings, each off by at most 2^-24, are off by this much together.
_FLOAT32_DEVIATION = math.sqrt(8 / 3) * 2.0**-24
# A coordinate of Gaussian noise passes this many standard deviations with probability 6e-7.
_NOISE_DEVIATIONS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CiphertextOnly:
    """Stands where a vector would, when the attacker saw ciphertexts and holds no key.

    Args:
        bytes_seen: Number of bytes, at least 1.
    """

    bytes_seen: int

    def __post_init__(self) -> None:
        if self.bytes_seen < 1:
            raise ValueError(f"expected at least one byte, got {self.bytes_seen}")

    @property
    def reason(self) -> str:
        """Why an attack on values has nothing to work on."""
        return f"this party saw {self.bytes_seen} bytes of ciphertext and holds no key; whoever holds it must be attacked instead"


@dataclass(frozen=True, kw_only=True, repr=False)
class Observation:
    """What one attacker holds after one round. It has no field for records, labels or the order of a batch.

    Args:
        layout: Names and shapes of the model's tensors. Public.
        model: The model that the clients got; None where the attacker holds none, which only goes with `CiphertextOnly`.
        seen: One client's update (trained minus received), or an aggregate of updates divided by the coefficients' sum; or
            `CiphertextOnly`.
        coefficients: Positive aggregation coefficient of each client in `seen`; one entry for a single update. Public.
        training: How the clients trained. Public.
        activation: What follows the first layer. Public.
        schema: What is known about the input columns. Public.
        rounding_step: Step of the grid that each client's update was rounded to before encryption; 0 if it was not. Public.

    Raises:
        LayoutMismatchError: If model or vector have another layout.
        ValueError: If a vector is seen without the model, there is no coefficient, one is not positive, or the step is negative.
    """

    layout: Layout
    model: PlainVector | None
    seen: PlainVector | CiphertextOnly
    coefficients: tuple[int, ...] = (1,)
    training: TrainingFacts
    activation: Activation
    schema: TableSchema
    rounding_step: float = 0.0

    def __post_init__(self) -> None:
        vectors = [vector for vector in (self.model, self.seen) if isinstance(vector, PlainVector)]
        if any(vector.layout != self.layout for vector in vectors):
            raise LayoutMismatchError("expected model and vector of the observation's layout, got another one; nothing was attacked")
        if isinstance(self.seen, PlainVector) and self.model is None:
            raise ValueError("expected the model before the round beside a vector in the clear, got none")
        if not self.coefficients or min(self.coefficients) < 1:
            raise ValueError(f"expected a positive coefficient for each of at least one client, got {self.coefficients}")
        if not 0 <= self.rounding_step < math.inf:
            raise ValueError(f"expected rounding_step >= 0, got {self.rounding_step}")

    @property
    def records(self) -> float:
        """Number of (expected) record visits behind what was seen: batch size times steps times clients."""
        return self.training.batch_size * self.training.steps * len(self.coefficients)

    def __repr__(self) -> str:
        return f"Observation(seen={type(self.seen).__name__}, clients={len(self.coefficients)})"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Reconstruction:
    """Rows that an attack believes were trained on, best first. Private: where the attack succeeds, these are the data.

    Args:
        rows: Of shape (n, width), finite, in the units of the model's input. No row is no finding, not a proof of safety.
        certified: Of shape (n,): True where the attack shows, without the truth, that the row is exact.
        confidence: Of shape (n,), from 0 to 1: the attack's own order of trust, 1 for certified rows.
        certificate: What `certified` rests on here, or why nothing could be certified. Public.
        seconds: Elapsed time.
    """

    rows: NDArray[np.float64]
    certified: NDArray[np.bool_]
    confidence: NDArray[np.float64]
    certificate: str
    seconds: float

    def __post_init__(self) -> None:
        count = len(self.rows)
        if self.rows.ndim != 2 or self.certified.shape != (count,) or self.confidence.shape != (count,):
            raise ValueError("expected rows of shape (n, width), and certified and confidence of shape (n,)")
        if not np.isfinite(self.rows).all() or not ((self.confidence >= 0) & (self.confidence <= 1)).all():
            raise ValueError("expected finite rows and confidences from 0 to 1")

    def __repr__(self) -> str:
        return f"Reconstruction(rows={len(self.rows)}, certified={int(self.certified.sum())})"


@dataclass(frozen=True, slots=True, kw_only=True)
class NotApplicable:
    """An attack could not run, which says nothing about what another attack, or another party, can read.

    It is neither true nor false, so that no `if` can take it for "nothing was found".

    Args:
        reason: What was missing, to be read after "because". Public.

    Example:
        >>> print(NotApplicable(reason="the first layer has no bias"))
        not applicable because the first layer has no bias
    """

    reason: str

    def __str__(self) -> str:
        return f"not applicable because {self.reason}"

    def __bool__(self) -> NoReturn:
        raise TypeError("an attack that was not applicable is neither a success nor a failure; compare types instead")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearLayer:
    """A fully connected layer with bias, by the names of its tensors. Public."""

    weight: str
    bias: str
    inputs: int
    outputs: int


def linear_layers(layout: Layout) -> tuple[LinearLayer, ...]:
    """Fully connected layers with bias in a layout, in its order: every `p.weight` of shape (m, n) with a `p.bias` of shape (m,).

    Example:
        >>> linear_layers(Layout(names=("0.weight", "0.bias", "1.weight"), shapes=((4, 3), (4,), (4,))))
        (LinearLayer(weight='0.weight', bias='0.bias', inputs=3, outputs=4),)
    """
    shapes = dict(zip(layout.names, layout.shapes, strict=True))
    layers: list[LinearLayer] = []
    for name, shape in shapes.items():
        bias = name.removesuffix("weight") + "bias"
        if (name == "weight" or name.endswith(".weight")) and len(shape) == 2 and shapes.get(bias) == shape[:1]:
            layers.append(LinearLayer(weight=name, bias=bias, inputs=shape[1], outputs=shape[0]))
    return tuple(layers)


@dataclass(frozen=True, kw_only=True, repr=False)
class GradientPart:
    """What an observation in the clear says about gradients. Private, as the observation is.

    Args:
        before: The model before the round.
        after: The model after it, as what was seen makes it.
        change: What was seen, without the part that weight decay alone explains: up to the error, minus a non-negative
            combination of the steps' gradients.
        error: Largest error of each coordinate of the change: float32 rounding, the encryption grid, and the known Gaussian
            noise at five standard deviations.
        deviation: Standard deviation of that error, if roundings are independent; above 0.
    """

    before: PlainVector
    after: PlainVector
    change: PlainVector
    error: PlainVector
    deviation: PlainVector


def gradient_part(observation: Observation) -> GradientPart | NotApplicable:
    """Splits what weight decay explains from what was seen, and bounds the error of the rest.

    Not applicable where only ciphertexts were seen, or an adaptive optimiser rescaled each coordinate by a number of its own.
    """
    model, seen, training = observation.model, observation.seen, observation.training
    if isinstance(seen, CiphertextOnly):
        return NotApplicable(reason=seen.reason)
    if isinstance(training.optimizer, AdaptiveOptimizer):
        return NotApplicable(reason=f"{training.optimizer.name} rescales each coordinate by numbers that this party did not see")
    if model is None:
        return NotApplicable(reason="the model before the round is not held")
    decay = training.optimizer.decayed(training.steps) - 1.0
    change = seen.values - decay * model.values
    # Weights are float32 numbers after each step; half a unit in the last place is lost each time.
    last_place = np.spacing((np.abs(model.values) + np.abs(seen.values)).astype(np.float32)).astype(np.float64)
    error = training.steps * last_place / 2 + _FLOAT32_ROUNDING * np.abs(change) + observation.rounding_step / 2
    # Rounding to a multiple of s is off by s / sqrt(12), and independently so at every client.
    shares = np.array(observation.coefficients) / sum(observation.coefficients)
    variance = np.dot(shares, shares) * (training.steps * last_place**2 + observation.rounding_step**2) / 12
    variance += (_FLOAT32_DEVIATION * change) ** 2
    if training.noise is not None:
        step = training.optimizer.learning_rate / (1 - training.optimizer.momentum) / training.batch_size
        deviation = step * training.noise.noise_multiplier * training.noise.max_grad_norm * math.sqrt(training.steps)
        deviation *= float(np.linalg.norm(shares))
        error += _NOISE_DEVIATIONS * deviation
        variance += deviation**2

    def vector(values: NDArray[np.float64]) -> PlainVector:
        return PlainVector(layout=observation.layout, values=values)

    return GradientPart(
        before=model,
        after=vector(model.values + seen.values),
        change=vector(change),
        error=vector(error),
        deviation=vector(np.sqrt(variance)),
    )
