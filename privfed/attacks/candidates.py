"""Which of several candidate records was trained on, when everything else about the batch is known.

It is the attack that differential privacy is about (Balle et al., 2022, arXiv:2201.04845, section 2), and its success is bounded:
see `privfed.attacks.reconstruction_bound`.
"""

import time
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits
from torch import nn

from privfed.attacks.gradients import target_gradient
from privfed.attacks.observation import NotApplicable, Observation


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LabelledRows:
    """Records with labels.

    Args:
        rows: Of shape (n, width), finite, in the units of the model's input.
        labels: Class indices from 0, of shape (n,).

    Raises:
        ValueError: If shapes do not fit.
    """

    rows: NDArray[np.float64]
    labels: NDArray[np.int64]

    def __post_init__(self) -> None:
        if self.rows.ndim != 2 or self.labels.shape != self.rows.shape[:1]:
            raise ValueError(f"expected rows of shape (n, width) and n labels, got shapes {self.rows.shape} and {self.labels.shape}")

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CandidateGuess:
    """How likely each candidate is the record of the batch. Private.

    Args:
        posterior: Probability of each candidate, of shape (candidates,), when all were equally likely before.
        seconds: Elapsed time.
    """

    posterior: NDArray[np.float64]
    seconds: float

    @property
    def best(self) -> int:
        """Position of the likeliest candidate."""
        return int(self.posterior.argmax())

    @property
    def confidence(self) -> float:
        """Probability that `best` is right, if the noise is what was declared."""
        return float(self.posterior.max())

    def __repr__(self) -> str:
        return f"CandidateGuess(candidates={len(self.posterior)})"


@dataclass(frozen=True, kw_only=True, eq=False)
class CandidateAttack:
    """Compares the clipped gradient of each candidate with what the update has left without the known records.

    With one step that takes all records, it is the most successful of all attacks under Gaussian noise: the likeliest candidate. With
    several steps it takes all gradients at the model before the round.

    Args:
        module: The architecture. Public.
        candidates: At least two records, one of which is in the batch.
        known: The other records of the batch, if there are any.

    Raises:
        ValueError: If there are fewer than two candidates.
    """

    module: nn.Module
    candidates: LabelledRows
    known: LabelledRows | None = None

    def __post_init__(self) -> None:
        if len(self.candidates) < 2:
            raise ValueError(f"expected at least two candidates, got {len(self.candidates)}")

    # Tensors this small only wait for each other's threads.
    @threadpool_limits.wrap(limits=1)
    def attack(self, observation: Observation) -> CandidateGuess | NotApplicable:
        """The probability of each candidate. Not applicable where no mean of gradients was seen."""
        started = time.perf_counter()
        target = target_gradient(observation, self.module)
        if isinstance(target, NotApplicable):
            return target
        records = observation.training.batch_size * len(observation.coefficients)

        def contributions(part: LabelledRows) -> torch.Tensor:
            rows, labels = torch.from_numpy(part.rows.astype(np.float32, order="C")), torch.from_numpy(part.labels.copy())
            with torch.no_grad():
                return target.of_records(rows, labels) / records

        left = target.values
        if self.known is not None and len(self.known):
            left = left - contributions(self.known).sum(dim=0)
        distances = (contributions(self.candidates) - left).double().square().sum(dim=1)
        posterior = (-distances / (2 * target.tolerance**2)).softmax(dim=0)
        return CandidateGuess(posterior=posterior.numpy(), seconds=time.perf_counter() - started)
