"""Rows of a table under known noise: those that make the update and are like public records at once."""

import math
import time
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import chi2
from threadpoolctl import threadpool_limits
from torch import nn
from torch.func import jacfwd, vmap

from privfed.attacks.gradients import TargetGradient, minimise, target_gradient
from privfed.attacks.label_guesses import guess_labels
from privfed.attacks.observation import NotApplicable, Observation, Reconstruction
from privfed.attacks.pooling import certainty, pool_rows, whole_categories
from privfed.attacks.prior import Prior

# Noise alone makes so bad a fit once in a thousand rounds.
_UNEXPLAINED = 1e-3
_SCATTER, _LEARNING_RATE = 0.3, 0.1


@dataclass(frozen=True, kw_only=True, eq=False)
class MostLikelyRows:
    """The records of highest posterior density under the known Gaussian noise and a prior (MAP).

    Where noise hides everything, these are the most typical records: no better than `Prior.guess`, and no worse. Compare its score
    with that of this guess. Without noise it is an ordinary inversion with a prior.

    Confidence is the share of what decides each entry that comes from the update, not from the prior, all entries of the batch taken
    together. If noise does not explain how badly the rows fit, the search has ended at wrong ones, and confidence is no more than
    the starts agree.

    Args:
        module: The architecture. Public.
        prior: Public records.
        restarts: Number of starts, at least 2: half near public records that fit, half near the typical one.
        iterations: Steps of each.
        seed: Decides where they start.
    """

    module: nn.Module
    prior: Prior
    restarts: int = 4
    iterations: int = 300
    seed: int = 0

    # Tensors this small only wait for each other's threads.
    @threadpool_limits.wrap(limits=1)
    def attack(self, observation: Observation) -> Reconstruction | NotApplicable:
        """As many rows as there are (expected) records in a step of all clients, surest first. None is certified."""
        started = time.perf_counter()
        self.prior.check(observation.schema)
        target = target_gradient(observation, self.module)
        if isinstance(target, NotApplicable):
            return target
        guessed = guess_labels(observation, target, self.prior, restarts=self.restarts)
        if isinstance(guessed, NotApplicable):
            return guessed
        prior, labels = self.prior, guessed.labels

        def misfit(variables: torch.Tensor) -> torch.Tensor:
            gradients = target.of_batches(prior.records(variables), labels)
            return ((gradients - target.values) ** 2).sum(dim=1) / target.tolerance**2

        def energy(variables: torch.Tensor) -> torch.Tensor:
            return misfit(variables) / 2 + prior.energy(variables).sum(dim=1) + guessed.energy

        start = self._start(target, labels)
        found = minimise(start, energy, iterations=self.iterations, learning_rate=_LEARNING_RATE)
        with torch.no_grad():
            best = int(energy(found).argmin())
            unexplained = chi2.sf(float(misfit(found)[best]), len(target.values)) < _UNEXPLAINED
        rows = prior.records(found).double().numpy()
        confidence = self._evidence(target, found[best], labels[best])
        if unexplained:
            agreement = certainty(pool_rows(rows, best=best), schema=prior.schema, usual_spread=prior.rows.std(axis=0))
            confidence = confidence * agreement
        order = np.argsort(-confidence)
        return Reconstruction(
            rows=whole_categories(rows[best], schema=prior.schema)[order],
            certified=np.zeros(target.size, dtype=np.bool_),
            confidence=np.clip(confidence, 0, 1)[order],
            certificate="no row is certified: these are the likeliest rows, not the only possible ones",
            seconds=time.perf_counter() - started,
        )

    def _start(self, target: TargetGradient, labels: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        start = self.prior.typical().repeat(self.restarts, target.size, 1)
        rows = torch.tensor(self.prior.rows, dtype=torch.float32)

        def fits(part: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
            # What a record adds to the sum: the better it points where the target does, the likelier it is part of it.
            gradients = target.of_records(part, label.expand(len(part)))
            return gradients @ target.values - gradients.square().sum(dim=1) / (2 * target.size)

        for restart in range(0, self.restarts, 2):
            for label in labels[restart].unique():
                with torch.no_grad():
                    fitting = torch.cat([fits(part, label) for part in rows.split(256)]).argsort(descending=True)
                mine = labels[restart] == label
                # Where there are more records than public rows, each row is used several times.
                nearest = fitting.repeat(math.ceil(target.size / len(rows)))[: int(mine.sum())]
                start[restart, mine] = self.prior.variables_near(nearest)
        return start + _SCATTER * torch.randn(start.shape, generator=generator)

    def _evidence(self, target: TargetGradient, variables: torch.Tensor, labels: torch.Tensor) -> NDArray[np.float64]:
        """Per record, the mean over numbers of 1 - (posterior variance / prior variance), and over blocks of the entropy that was lost.

        Both densities are taken as normal around the record that was found.
        """
        prior = self.prior

        def gradient(one: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
            return target.of_records(prior.records(one)[None], label[None])[0] / (target.size * target.tolerance)

        sensitivity = vmap(jacfwd(gradient))(variables, labels).double()  # (records, parameters, width)
        together = sensitivity.transpose(0, 1).flatten(1)
        before = prior.curvature(len(variables))
        after = torch.linalg.inv(before + together.T @ together).diagonal()
        variances = (after / torch.linalg.inv(before).diagonal()).unflatten(0, variables.shape)
        left = torch.cat([variances[:, : len(prior.schema.continuous)], prior.entropy_left(variables)], dim=1)
        return (1 - left.clamp(0, 1)).mean(dim=1).numpy()
