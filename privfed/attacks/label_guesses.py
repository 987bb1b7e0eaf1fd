"""Labels that an attack by optimisation assumes: those that the update shows, else those that are frequent."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import binom, norm

from privfed.attacks.facts import BinaryLoss
from privfed.attacks.gradients import TargetGradient
from privfed.attacks.labels import LabelCount, SingleLabel, label_count, single_label
from privfed.attacks.observation import NotApplicable, Observation
from privfed.attacks.prior import Prior

# An estimated count of positives is off by about this much, because predictions differ between records.
_COUNT_DEVIATION = 0.35


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LabelGuesses:
    """For each restart, labels of the batch in any order. Private.

    Args:
        labels: Class indices, of shape (restarts, records).
        energy: Minus the logarithm of how frequent such labels are, of shape (restarts,).
    """

    labels: torch.Tensor
    energy: torch.Tensor


def guess_labels(observation: Observation, target: TargetGradient, prior: Prior, *, restarts: int) -> LabelGuesses | NotApplicable:
    """Labels for several restarts, the likelier ones for more of them.

    A single record's label follows from signs where noise does not hide them; of a batch with one logit, the number of positive
    records is counted. Under noise all counts are tried that are frequent enough.
    """
    noisy = target.max_grad_norm is not None
    if not isinstance(target.loss, BinaryLoss):
        if target.size > 1:
            return NotApplicable(reason="labels of several records and classes are not guessed")
        single = single_label(observation)
        chosen, energies = _shared_out(-prior.log_label_frequencies, restarts)
        if isinstance(single, SingleLabel) and single.certain:
            chosen, energies = np.full(restarts, single.label), np.zeros(restarts)
        return LabelGuesses(labels=torch.tensor(chosen[:, None]), energy=torch.tensor(energies, dtype=torch.float32))
    counts = np.arange(target.size + 1)
    log_frequencies = binom.logpmf(counts, target.size, np.exp(prior.log_label_frequencies[1]))
    if not noisy:
        estimate = label_count(observation, mean_prediction=_mean_prediction(target, prior))
        if isinstance(estimate, LabelCount):
            per_step = estimate.positives / observation.training.steps
            log_frequencies = log_frequencies + norm.logpdf(counts, loc=per_step, scale=_COUNT_DEVIATION)
    chosen, energies = _shared_out(-log_frequencies, restarts)
    labels = (np.arange(target.size) < chosen[:, None]).astype(np.int64)
    return LabelGuesses(labels=torch.from_numpy(labels), energy=torch.tensor(energies, dtype=torch.float32))


def _mean_prediction(target: TargetGradient, prior: Prior) -> float:
    with torch.inference_mode():
        outputs = target.module(torch.tensor(prior.rows, dtype=torch.float32))
    return float(torch.sigmoid(outputs).mean().clamp(1e-6, 1 - 1e-6))


def _shared_out(energies: NDArray[np.float64], restarts: int) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Which choice each restart gets, in proportion to probability, and the choice's energy. All restarts get one, best first."""
    probabilities = np.exp(energies.min() - energies)
    probabilities /= probabilities.sum()
    places = (np.arange(restarts) + 0.5) / restarts
    order = np.argsort(-probabilities, kind="stable")
    chosen = order[np.minimum(np.searchsorted(probabilities[order].cumsum(), places), len(order) - 1)]
    return chosen, (energies - energies.min())[chosen]
