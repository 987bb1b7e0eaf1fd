"""What is known before a round: records like the ones attacked, what such records do to the model, and candidates to pick from."""

import copy
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from privfed.attacks.candidates import LabelledRows
from privfed.attacks.observation import linear_layers
from privfed.audit.canaries import Canaries
from privfed.training.loss import PerSampleLoss
from privfed.training.model import layout_of, trainable_parameters

CANDIDATES = 10
"""Records in a line-up."""

_TRIED = 200  # records of the pool: their mean is off by a fourteenth of their spread


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pulls:
    """What single records do to the bias of the last layer: what gives labels away. Public: they are records of the pool.

    Args:
        bias: Gradient of that bias, of shape (2, n): as if the records were negative, then as if they were positive.
        norm: Euclidean norm of the whole gradient, which decides how it is clipped, of the same shape.
    """

    bias: NDArray[np.float64]
    norm: NDArray[np.float64]

    @classmethod
    def of(cls, model: nn.Module, *, loss: PerSampleLoss, pool: Canaries) -> "Pulls | None":
        """Tries records of the pool with both labels; None for a model that does not end in one output."""
        layers = linear_layers(layout_of(model))
        if not layers or layers[-1].outputs != 1:
            return None
        model = copy.deepcopy(model).eval()
        parameters = trainable_parameters(model)
        position = list(parameters).index(layers[-1].bias)
        rows = torch.tensor(pool.rows[:_TRIED], dtype=torch.float32)
        pulls = np.empty((2, len(rows), 2))
        for label in (0, 1):
            for number, row in enumerate(rows):
                value = loss(model(row[None]), torch.tensor([label])).sum()
                gradients = torch.autograd.grad(value, list(parameters.values()))
                norm = torch.cat([gradient.flatten() for gradient in gradients]).double().norm()
                pulls[label, number] = float(gradients[position]), float(norm)
        return cls(bias=pulls[..., 0], norm=pulls[..., 1])

    def moments(self, max_grad_norm: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean and variance of a negative and of a positive record's pull, clipped to a norm; each of shape (2,).

        Args:
            max_grad_norm: The norm; infinite where nothing is clipped.
        """
        # A gradient of zero is not clipped, and stays zero.
        clipped = self.bias * np.minimum(1.0, max_grad_norm / np.maximum(self.norm, np.finfo(np.float64).tiny))
        return clipped.mean(axis=1), clipped.var(axis=1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LineUp:
    """Records of which one was trained on, for the attacker that differential privacy is about: it knows all other records.

    Args:
        candidates: `CANDIDATES` of them. Which one it was does not show.
        known: The other records of the batch.
    """

    candidates: LabelledRows
    known: LabelledRows

    @classmethod
    def of(cls, truth: Canaries, position: int, *, pool: Canaries, rng: np.random.Generator) -> "LineUp":
        """Hides one record among others of the pool.

        Args:
            truth: The records of the batch.
            position: Which of them is hidden.
            pool: Where the others are from.
            rng: Chooses and shuffles them.
        """
        others = rng.choice(len(pool), size=CANDIDATES - 1, replace=False)
        order = rng.permutation(CANDIDATES)
        rest = np.arange(len(truth)) != position
        return cls(
            candidates=LabelledRows(
                rows=np.concatenate([truth.rows[[position]], pool.rows[others]])[order],
                labels=np.concatenate([truth.labels[[position]], pool.labels[others]])[order],
            ),
            known=LabelledRows(rows=truth.rows[rest], labels=truth.labels[rest]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Background:
    """What is known beforehand.

    Args:
        pool: Records like the ones attacked, none of which is among them.
        module: The architecture.
        pulls: What such records do to the last bias of the model before the round; None for a model with several outputs.
        line_ups: Of the batch that is attacked, one for each of the first records. Only attackers that know all other records have them.
    """

    pool: Canaries
    module: nn.Module
    pulls: Pulls | None
    line_ups: tuple[LineUp, ...] = ()

    @property
    def prevalence(self) -> float:
        """Share of positive records."""
        return float(self.pool.labels.mean())
