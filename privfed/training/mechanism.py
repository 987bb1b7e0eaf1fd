"""How a client trains: the public parameters of a training run, what the run costs, and what it returns."""

import math
from dataclasses import dataclass, field, replace
from typing import Self, final

from privfed.dp.accounting import calibrate
from privfed.dp.clipping import LEAST_NORM, AdaptiveClipping
from privfed.dp.mechanism import (
    AdaptivelyClippedGaussian,
    Budget,
    CappedPoissonSampledGaussian,
    CustomerSampledGaussian,
    NonPrivateRelease,
    PoissonSampledGaussian,
    check_count,
    check_noise,
    check_real,
    check_sample_rate,
)
from privfed.update import PlainVector

# A noised gradient sum is rounded to this fraction of max_grad_norm, so that the low bits of a floating-point number, which
# tell sums apart (Mironov, 2012, "On significance of the least significant bits"), do not exist.
GRID_FRACTION = 2.0**-20


def _check_learning_rate(learning_rate: object) -> None:
    check_real("learning_rate", learning_rate, least=1e-38, most=3e38)


def _check_counts(**counts: object) -> None:
    for name, count in counts.items():
        check_count(name, count)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DpSgd:
    """DP-SGD with Poisson sampling (Abadi et al., 2016, algorithm 1), for records or customers. All fields are public.

    Nothing in it may be derived from private data: the batch is divided by the declared `expected_batch_size` and sampled at
    the declared `sample_rate`, whatever the number of records really is.

    Args:
        noise_multiplier: Standard deviation of the noise on the sum of clipped gradients, in units of `max_grad_norm`; from 1e-9 to 1e9.
        max_grad_norm: Bound on the Euclidean norm that one record's gradient may have in the sum, from 1e-12 to 1e12. With
            `adaptive_clipping`, the largest that the bound may become.
        sample_rate: Probability with which each record enters each batch, independently of the others; from 1e-15 to 1.
        expected_batch_size: What the noised sum is divided by; at least 1.
        steps: Number of steps of one training run. Exactly as many are executed and charged, empty batches included.
        learning_rate: Step length of plain gradient descent.
        max_records: Most records a client may have. Left out, it is `expected_batch_size / sample_rate`, rounded up.
        batch_capacity: Most records in a batch: of a larger sample, so many are drawn uniformly at random. It bounds memory, and its price
            depends on `max_records`. Left out, a batch may be of any size.
        records_per_customer: Most records that one customer, which is one of `Samples.groups`, may have. With it the promise is about
            these groups, whatever they are, and the ledger must be of customers. Make them customers: those of a table that
            `load_paysim` made are frauds. Left out, the promise is about records.
        adaptive_clipping: How the bound follows the gradients, from the beginning in every training run. The noise on the sums is larger
            by what the counts cost, so that the run costs what `noise_multiplier` costs without it. Left out, the bound is fixed.

    Raises:
        ValueError: If a number is out of range, more than one of the last three fields is given, for which no bound is proved, or the
            noise on the count is too small.

    Example:
        >>> mechanism = DpSgd(
        ...     noise_multiplier=1.1, max_grad_norm=1.0, sample_rate=0.01, expected_batch_size=256, steps=100, learning_rate=0.1
        ... )
        >>> mechanism.record_limit
        25600
    """

    noise_multiplier: float
    max_grad_norm: float
    sample_rate: float
    expected_batch_size: int
    steps: int
    learning_rate: float
    max_records: int | None = None
    batch_capacity: int | None = None
    records_per_customer: int | None = None
    adaptive_clipping: AdaptiveClipping | None = None

    def __post_init__(self) -> None:
        check_noise("noise_multiplier", self.noise_multiplier)
        check_real("max_grad_norm", self.max_grad_norm, least=LEAST_NORM, most=1 / LEAST_NORM)
        check_sample_rate(self.sample_rate)
        _check_learning_rate(self.learning_rate)
        _check_counts(expected_batch_size=self.expected_batch_size, steps=self.steps)
        optional = {name: getattr(self, name) for name in ("max_records", "batch_capacity", "records_per_customer")}
        _check_counts(**{name: count for name, count in optional.items() if count is not None})
        variants = ("batch_capacity", "records_per_customer", "adaptive_clipping")
        if len(given := [name for name in variants if getattr(self, name) is not None]) > 1:
            raise ValueError(f"expected at most one of {', '.join(variants)}, got {' and '.join(given)}, for which no bound is proved")
        if self.adaptive_clipping is not None:
            self.adaptive_clipping.sum_noise_multiplier(self.noise_multiplier)
            if self.adaptive_clipping.initial_norm > self.max_grad_norm:
                raise ValueError(
                    f"expected initial_norm to be at most max_grad_norm, got {self.adaptive_clipping.initial_norm} and {self.max_grad_norm}"
                )

    @classmethod
    def for_budget(
        cls,
        budget: Budget,
        *,
        rounds: int,
        max_records: int,
        expected_batch_size: int,
        steps: int,
        learning_rate: float,
        max_grad_norm: float = 1.0,
        batch_capacity: int | None = None,
        records_per_customer: int | None = None,
        adaptive_clipping: AdaptiveClipping | None = None,
    ) -> Self:
        """The mechanism with the least noise with which so many rounds stay within a budget.

        Args:
            budget: Epsilon and delta that all rounds together may spend, on one record, or on one customer.
            rounds: Number of rounds the client will take part in, at least 1.
            max_records: Most records the client may have; with `expected_batch_size` it fixes the sample rate. Declare a public
                number, not `len(data)`.
            expected_batch_size: See the class.
            steps: Steps per round.
            learning_rate: See the class.
            max_grad_norm: See the class.
            batch_capacity: See the class.
            records_per_customer: See the class.
            adaptive_clipping: See the class.

        Raises:
            ValueError: As the class; or if the budget has no limit, or no noise keeps to it.

        Example:
            >>> budget = Budget(epsilon=4.0, delta=1e-5)
            >>> mechanism = DpSgd.for_budget(
            ...     budget, rounds=10, max_records=20_000, expected_batch_size=256, steps=40, learning_rate=0.5
            ... )
            >>> mechanism.sample_rate
            0.0128
        """
        _check_counts(rounds=rounds, max_records=max_records, expected_batch_size=expected_batch_size, steps=steps)
        if expected_batch_size > max_records:
            raise ValueError(f"expected expected_batch_size to be at most max_records, got {expected_batch_size} and {max_records}")
        plain = cls(
            noise_multiplier=1.0,
            max_grad_norm=max_grad_norm,
            sample_rate=expected_batch_size / max_records,
            expected_batch_size=expected_batch_size,
            steps=steps,
            learning_rate=learning_rate,
            max_records=max_records,
            batch_capacity=batch_capacity,
            records_per_customer=records_per_customer,
        )
        # Adaptive clipping costs what the same noise multiplier costs without it.
        job = calibrate(replace(plain, steps=rounds * steps)._without_adaptive_clipping(), budget=budget)
        return replace(plain, noise_multiplier=job.noise_multiplier, adaptive_clipping=adaptive_clipping)

    @property
    def record_limit(self) -> int:
        """Most records that a client may have: `max_records`, or what follows from the declared batch size and rate. Public."""
        if self.max_records is not None:
            return self.max_records
        # Rounded first, because 256 / (256 / 60000) must not become 60001 in floating point.
        return math.ceil(round(self.expected_batch_size / self.sample_rate, 6))

    @property
    def release_grid(self) -> float:
        """Smallest step of a grid to which an update may be rounded before it leaves, in units of a weight. Public.

        It is one grid step of the noised sum after division by `expected_batch_size` and one learning-rate step.
        """
        return GRID_FRACTION * self.learning_rate * self.max_grad_norm / self.expected_batch_size

    @property
    def initial_norm(self) -> float:
        """The bound on a record's gradient in the first step: the only one, unless it adapts. Public."""
        return self.max_grad_norm if self.adaptive_clipping is None else self.adaptive_clipping.initial_norm

    @property
    def sum_noise_multiplier(self) -> float:
        """Standard deviation of the noise on a step's sum in units of the step's own bound: more than `noise_multiplier` if it adapts."""
        if self.adaptive_clipping is None:
            return self.noise_multiplier
        return self.adaptive_clipping.sum_noise_multiplier(self.noise_multiplier)

    def event(self) -> PoissonSampledGaussian | CappedPoissonSampledGaussian | CustomerSampledGaussian | AdaptivelyClippedGaussian:
        """What one training run costs: the event that the ledger is charged with."""
        if self.adaptive_clipping is None:
            return self._without_adaptive_clipping()
        return self.adaptive_clipping.event(noise_multiplier=self.noise_multiplier, sample_rate=self.sample_rate, steps=self.steps)

    def _without_adaptive_clipping(self) -> PoissonSampledGaussian | CappedPoissonSampledGaussian | CustomerSampledGaussian:
        noise_multiplier, sample_rate, steps = self.noise_multiplier, self.sample_rate, self.steps
        if self.batch_capacity is not None:
            return CappedPoissonSampledGaussian(
                noise_multiplier=noise_multiplier,
                sample_rate=sample_rate,
                capacity=self.batch_capacity,
                max_records=self.record_limit,
                steps=steps,
            )
        if self.records_per_customer is not None:
            return CustomerSampledGaussian(
                noise_multiplier=noise_multiplier, sample_rate=sample_rate, records_per_customer=self.records_per_customer, steps=steps
            )
        return PoissonSampledGaussian(noise_multiplier=noise_multiplier, sample_rate=sample_rate, steps=steps)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NonPrivate:
    """Plain minibatch SGD. It protects nothing: the update may be an exact copy of a record. All fields are public.

    Args:
        learning_rate: Step length of plain gradient descent.
        batch_size: Records per step, drawn without replacement until too few are left; a smaller client uses all it has.
        steps: Number of steps of one training run.
        seed: With the round's number, decides the order of the records. The same two give the same update, bit for bit.

    Raises:
        ValueError: If a number is out of range.
    """

    learning_rate: float
    batch_size: int
    steps: int
    seed: int

    def __post_init__(self) -> None:
        _check_learning_rate(self.learning_rate)
        _check_counts(batch_size=self.batch_size, steps=self.steps)
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or self.seed < 0:
            raise ValueError(f"expected seed to be a whole number of at least 0, got {self.seed}")

    def event(self) -> NonPrivateRelease:
        """What one training run costs: everything (epsilon is infinite)."""
        return NonPrivateRelease()


TrainingMechanism = DpSgd | NonPrivate


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """What one training run gives back.

    Args:
        update_values: Trained minus received weights. Under `DpSgd` as private as its event says, else private data.
        steps: Steps executed; always those of the mechanism. Public.
        private_randomness: Whether noise and sampling came from the operating system's entropy. If not, no privacy may be claimed.
        zeroed_gradients: Gradients that were NaN or infinite and entered their batch as zero. Private data; it never leaves.
    """

    update_values: PlainVector
    steps: int
    private_randomness: bool
    zeroed_gradients: int = field(repr=False)
