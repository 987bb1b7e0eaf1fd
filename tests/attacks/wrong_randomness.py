"""Sources of randomness that a client must not train with: what the audits of training are to find."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from privfed.training.randomness import _SeededRandomness


class EachRecordTwice(_SeededRandomness):
    """Puts each sampled record into its batch twice."""

    def poisson_batches(self, records: int, *, sample_rate: float, steps: int) -> Iterator[NDArray[np.int64]]:
        for batch in super().poisson_batches(records, sample_rate=sample_rate, steps=steps):
            yield np.repeat(batch, 2)


class OneDraw(_SeededRandomness):
    """Adds the same noise in every step."""

    def normal_vectors(self, size: int, *, count: int) -> Iterator[NDArray[np.float64]]:
        drawn = self.normal(size)
        for _ in range(count):
            yield drawn.copy()
