"""What a meter shows: a measured number beside the one that the declared mechanism makes, and whether they can be the same."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2, norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Meter:
    """A measured number with an interval, beside the declared one.

    Args:
        what: What is measured. Public.
        measured: The estimate.
        low: Lower end of the interval.
        high: Upper end.
        declared: What the declared mechanism makes.
        less: What it means if the measured number is smaller.
        more: What it means if it is larger.
    """

    what: str
    measured: float
    low: float
    high: float
    declared: float
    less: str
    more: str

    @property
    def fault(self) -> str | None:
        """What is not as declared, in words; None where the interval contains the declared number."""
        if self.low <= self.declared <= self.high:
            return None
        meaning = self.less if self.high < self.declared else self.more
        return f"{meaning}: {self.what} is {self.measured:.4g} (at least {self.low:.4g}, at most {self.high:.4g}), not {self.declared:.4g}"


def noise_meter(noise: NDArray[np.float64], *, what: str, declared: float, significance: float, centred: bool = False) -> Meter:
    """Standard deviation of coordinates that are noise of mean 0 alone, with a chi-square interval.

    Args:
        noise: At least one coordinate, of shape (n,).
        what: What they are.
        declared: Their declared standard deviation, above 0.
        significance: Probability of a fault if all is as declared; half of it on each side.
        centred: Whether their own mean was taken off, of at least two coordinates.
    """
    count, squares = len(noise) - centred, float(np.sum(noise**2))
    low, high = (math.sqrt(squares / float(chi2.ppf(share, count))) for share in (1 - significance / 2, significance / 2))
    return Meter(
        what=what,
        measured=math.sqrt(squares / count),
        low=low,
        high=high,
        declared=declared,
        less="less noise than declared",
        more="noise is larger than declared, as it is when one draw is used several times",
    )


def weight_meter(measured: float, *, what: str, declared: float, deviation: float, significance: float) -> Meter:
    """How much records weigh in an update, with a normal interval.

    Args:
        measured: The estimate.
        what: What it is the weight of.
        declared: What the declared mechanism makes of it.
        deviation: Standard deviation that sampling and declared noise give the estimate.
        significance: As for `noise_meter`.
    """
    reach = float(norm.isf(significance / 2)) * deviation
    return Meter(
        what=what,
        measured=measured,
        low=measured - reach,
        high=measured + reach,
        declared=declared,
        less="records weigh less than declared",
        more="records weigh more than declared: they are clipped less, sampled more often or used several times",
    )


def correlation_meter(first: NDArray[np.float64], second: NDArray[np.float64], *, what: str, significance: float) -> Meter:
    """Correlation of noise that is declared to be independent, with an interval by Fisher's transformation.

    Args:
        first: Noise of mean 0, of shape (n,), n at least 4.
        second: Noise of another round or client in the same places.
        what: What is compared.
        significance: As for `noise_meter`.
    """
    lengths = float(np.linalg.norm(first) * np.linalg.norm(second))
    measured = float(first @ second) / lengths if lengths else 0.0
    centre, reach = math.atanh(min(max(measured, -1 + 1e-12), 1 - 1e-12)), float(norm.isf(significance / 2)) / math.sqrt(len(first) - 3)
    return Meter(
        what=what,
        measured=measured,
        low=math.tanh(centre - reach),
        high=math.tanh(centre + reach),
        declared=0.0,
        less="noise is not independent",
        more="noise is not independent",
    )
