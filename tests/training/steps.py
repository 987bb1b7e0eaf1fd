"""What tests of training steps share: seams for the randomness, small tables and models."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from privfed.data.samples import Samples
from privfed.training.dpsgd import train
from privfed.training.loss import PerSampleLoss, binary_cross_entropy
from privfed.training.mechanism import DpSgd, TrainingMechanism
from privfed.training.model import mlp, values_of
from privfed.training.objective import Correction
from privfed.training.randomness import OperatingSystemRandomness, Randomness, _SeededRandomness

ONE_STEP = DpSgd(
    noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=1.0, expected_batch_size=1, steps=1, learning_rate=1.0, max_records=2000
)


class Silent(Randomness):
    """No noise, and the given batches in turn: what is left of a step is what it takes from the data."""

    private = False

    def __init__(self, *batches: Sequence[int]) -> None:
        self.batches = list(batches)

    def _stream(self, count: int) -> bytes:
        raise NotImplementedError

    def normal(self, count: int) -> NDArray[np.float64]:
        return np.zeros(count)

    def poisson_batches(self, records: int, *, sample_rate: float, steps: int) -> Iterator[NDArray[np.int64]]:
        for _ in range(steps):
            yield np.array(self.batches.pop(0) if self.batches else range(records), dtype=np.int64)


class Counting(Randomness):
    """The operating system's randomness, with the sizes of its batches and the number of its noise draws written down."""

    private = False

    def __init__(self) -> None:
        self.batch_sizes: list[int] = []
        self.noise_draws = 0
        self.source = OperatingSystemRandomness()

    def _stream(self, count: int) -> bytes:
        return self.source._stream(count)

    def normal_vectors(self, size: int, *, count: int) -> Iterator[NDArray[np.float64]]:
        for noise in super().normal_vectors(size, count=count):
            self.noise_draws += 1
            yield noise

    def poisson_batches(self, records: int, *, sample_rate: float, steps: int) -> Iterator[NDArray[np.int64]]:
        for batch in super().poisson_batches(records, sample_rate=sample_rate, steps=steps):
            self.batch_sizes.append(len(batch))
            yield batch


class StepByStep(Randomness):
    """Reproducible, and the noise of the first steps is the same however many follow: no more is drawn than the next step takes."""

    private = False

    def __init__(self, seed: int) -> None:
        self.source = _SeededRandomness(seed)

    def _stream(self, count: int) -> bytes:
        return self.source._stream(count)

    def normal_vectors(self, size: int, *, count: int) -> Iterator[NDArray[np.float64]]:
        return (self.normal(size) for _ in range(count))


def samples_of(features: NDArray[np.float64], labels: NDArray[np.int64], groups: NDArray[np.int64] | None = None) -> Samples:
    return Samples(features=features, labels=labels, groups=groups, columns=tuple(f"column_{i}" for i in range(features.shape[1])))


def table(records: int = 40, *, columns: int = 4) -> Samples:
    features = np.random.default_rng(0).normal(size=(records, columns))
    return samples_of(features, (features.sum(axis=1) > 1).astype(np.int64))


def seeded(module_seed: int, inputs: int, *, hidden: tuple[int, ...] = (6,), outputs: int = 1) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(module_seed)
        return mlp(inputs, hidden=hidden, outputs=outputs)


def update(
    module: nn.Module,
    samples: Samples,
    mechanism: TrainingMechanism,
    *,
    loss: PerSampleLoss = binary_cross_entropy,
    correction: Correction | None = None,
    randomness: Randomness | None = None,
) -> NDArray[np.float64]:
    result = train(module, values_of(module), samples, mechanism=mechanism, loss=loss, correction=correction, randomness=randomness)
    return result.update_values.values
