"""Meters of DP-SGD on the very model that a client trains, since every kind of layer takes another path through the training code.

`SilentTraining` samples no record, so that all weights move by noise alone. `CopiesTraining` trains on copies of one record whose
gradient is far longer than it may be: how far the model moves along it says how records are clipped, sampled and summed.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from privfed.attacks.dirac_rows import FAMILY_LEVEL, check_plain
from privfed.attacks.meters import Meter, noise_meter, weight_meter
from privfed.data.samples import Samples
from privfed.training.loss import PerSampleLoss
from privfed.training.mechanism import DpSgd
from privfed.training.model import layout_of, trainable_parameters, values_of
from privfed.update import PlainVector

_NEVER = 1e-12
# So far a weight moves by noise: much further than float32 rounds, and hardly at all.
_NOISE_ON_A_WEIGHT = 1e-4
_MOST_MOVED = 1e-3
_TRIED, _EXCESS = 64, 2.0


@dataclass(frozen=True, kw_only=True, eq=False)
class SilentTraining:
    """A training run in which no record is sampled. Train `module` from its own weights on `samples` with `mechanism`; then `read`.

    Args:
        module: The model.
        inputs: Number of its columns.
        declared: The mechanism that is claimed.

    Raises:
        ValueError: If the mechanism is not DP-SGD with plain Poisson samples and a fixed clipping norm.
    """

    module: nn.Module
    inputs: int
    declared: DpSgd

    def __post_init__(self) -> None:
        check_plain(self.declared)

    @property
    def samples(self) -> Samples:
        """A single record of zeros, which is not sampled but once in a trillion steps."""
        return _samples(np.zeros((1, self.inputs)), label=0)

    @property
    def mechanism(self) -> DpSgd:
        """The declared mechanism, but for the sample rate and for a learning rate at which the model hardly moves."""
        declared = self.declared
        rate = _NOISE_ON_A_WEIGHT * declared.expected_batch_size / (math.sqrt(declared.steps) * _one_step(declared))
        return replace(declared, sample_rate=_NEVER, learning_rate=rate, max_records=declared.record_limit)

    def read(self, update: PlainVector) -> tuple[Meter, ...]:
        """The noise on each tensor of the model, in units of what one record may add. Any fault has a probability of 1e-3 at most.

        Raises:
            ValueError: If the update is not one of `module`.
        """
        mechanism = self.mechanism
        scaled = _in_records(update, mechanism, self.module)
        declared, each = mechanism.noise_multiplier * math.sqrt(mechanism.steps), FAMILY_LEVEL / len(update.layout.names)
        tensors = update.layout.unflatten(PlainVector(layout=update.layout, values=scaled))
        return tuple(
            noise_meter(tensor.reshape(-1), what=f"the noise on {name}", declared=declared, significance=each)
            for name, tensor in tensors.items()
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class CopiesTraining:
    """A training run on copies of one record. Train `module` from its own weights on `samples` with `mechanism`; then `read`.

    Args:
        module: The model.
        inputs: Number of its columns.
        loss: Loss per record.
        classes: Number of classes, at least 2.
        declared: The mechanism that is claimed.
        copies: Number of records, at least 1: the more, the smaller faults show.

    Raises:
        ValueError: If there are more copies than the mechanism allows records, it is not DP-SGD with plain Poisson samples and a fixed
            clipping norm, or no made-up record has a gradient that is clipped.
    """

    module: nn.Module
    inputs: int
    loss: PerSampleLoss
    classes: int
    declared: DpSgd
    copies: int

    def __post_init__(self) -> None:
        check_plain(self.declared)
        if not 1 <= self.copies <= self.declared.record_limit:
            raise ValueError(f"expected 1 to {self.declared.record_limit} copies, as the mechanism declares, got {self.copies}")
        if self._longest[2].norm() < _EXCESS * self.declared.max_grad_norm:
            raise ValueError("expected a model in which some record's gradient is longer than twice max_grad_norm, got none")

    @property
    def samples(self) -> Samples:
        """The copies."""
        row, label, _ = self._longest
        return _samples(np.tile(row, (self.copies, 1)), label=label)

    @property
    def mechanism(self) -> DpSgd:
        """The declared mechanism with a learning rate at which the model hardly moves."""
        declared = self.declared
        noise = math.sqrt(declared.steps * layout_of(self.module).size) * _one_step(declared)
        moved = declared.steps * declared.sample_rate * self.copies * declared.max_grad_norm
        return replace(declared, learning_rate=_MOST_MOVED * declared.expected_batch_size / (moved + noise))

    def read(self, update: PlainVector) -> Meter:
        """How many records' weight the model has moved along the clipped gradient. A fault has a probability of 1e-3 at most.

        Raises:
            ValueError: If the update is not one of `module`.
        """
        mechanism = self.mechanism
        direction = self._longest[2].double().numpy()
        expected = mechanism.steps * mechanism.sample_rate * self.copies
        return weight_meter(
            -float(_in_records(update, mechanism, self.module) @ direction / np.linalg.norm(direction)),
            what=f"the weight of {self.copies} copies of a record",
            declared=expected,
            deviation=math.sqrt(mechanism.steps * mechanism.noise_multiplier**2 + expected * (1 - mechanism.sample_rate)),
            significance=FAMILY_LEVEL,
        )

    def read_parts(self, update: PlainVector) -> tuple[Meter, ...]:
        """The same for each tensor alone, along its own part of the clipped gradient. Any fault has a probability of 1e-3 at most.

        A layer that is clipped for itself shows here, also where nearly all of the gradient is in another one.

        Raises:
            ValueError: If the update is not one of `module`.
        """
        mechanism, gradient = self.mechanism, self._longest[2].double().numpy()
        layout, expected = update.layout, mechanism.steps * mechanism.sample_rate * self.copies
        moved = layout.unflatten(PlainVector(layout=layout, values=-_in_records(update, mechanism, self.module)))
        parts = layout.unflatten(PlainVector(layout=layout, values=gradient / np.linalg.norm(gradient)))
        lengths = {name: float(np.linalg.norm(part)) for name, part in parts.items() if part.any()}
        return tuple(
            weight_meter(
                float(np.sum(moved[name] * parts[name])) / length,
                what=f"the weight of {self.copies} copies of a record on {name}",
                declared=expected * length,
                deviation=math.sqrt(mechanism.steps * mechanism.noise_multiplier**2 + length**2 * expected * (1 - mechanism.sample_rate)),
                significance=FAMILY_LEVEL / len(lengths),
            )
            for name, length in lengths.items()
        )

    @cached_property
    def _longest(self) -> tuple[NDArray[np.float64], int, torch.Tensor]:
        """Of made-up records, the one with the longest gradient, its label, and this gradient by torch alone."""
        return max(self._tried(), key=lambda record: float(record[2].norm()))

    def _tried(self) -> Iterator[tuple[NDArray[np.float64], int, torch.Tensor]]:
        rows = np.random.default_rng(0).normal(scale=10.0, size=(_TRIED, self.inputs)).astype(np.float32).astype(np.float64)
        parameters = list(trainable_parameters(self.module).values())
        for row in rows:
            for label in range(self.classes):
                outputs = self.module(torch.tensor(row[None], dtype=torch.float32))
                gradients = torch.autograd.grad(self.loss(outputs, torch.tensor([label])).sum(), parameters, allow_unused=True)
                pairs = zip(gradients, parameters, strict=True)
                parts = [torch.zeros(parameter.numel()) if part is None else part.flatten() for part, parameter in pairs]
                yield row, label, torch.cat(parts)


def _one_step(declared: DpSgd) -> float:
    return declared.noise_multiplier * declared.max_grad_norm


def _samples(rows: NDArray[np.float64], *, label: int) -> Samples:
    names = tuple(f"column {index}" for index in range(rows.shape[1]))
    return Samples(features=rows.astype(np.float32), labels=np.full(len(rows), label, dtype=np.int64), groups=None, columns=names)


def _in_records(update: PlainVector, mechanism: DpSgd, module: nn.Module) -> NDArray[np.float64]:
    """The update in units of what one record may add in one step."""
    if update.layout != values_of(module).layout:
        raise ValueError("expected an update of the metered model, got another layout")
    return update.values * mechanism.expected_batch_size / (mechanism.learning_rate * mechanism.max_grad_norm)
