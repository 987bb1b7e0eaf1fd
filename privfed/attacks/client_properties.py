"""What kind of records a client has, read off its update: how frequent each label is among them.

Records of one class pull the last layer's bias in one direction, on average; what was seen is a mixture of these pulls. So a bank's fraud
rate, or which products it sells at all, shows in an update that hides every single record.
"""

import copy
import time
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import solve_triangular
from scipy.optimize import nnls
from threadpoolctl import threadpool_limits
from torch import nn

from privfed.attacks.candidates import LabelledRows
from privfed.attacks.gradients import TargetGradient, target_gradient
from privfed.attacks.observation import NotApplicable, Observation, linear_layers
from privfed.training.model import load_values
from privfed.update import PlainVector

_RECORDS_AT_ONCE = 256
# Shares sum to one: an equation that counts for more than all others.
_SUM_TO_ONE = 1e3
# Entries of a softmax's gradient sum to zero, so that their covariance alone has no inverse.
_RIDGE = 1e-6
# The luck of the batch depends on the shares, which are what is looked for.
_TIMES = 3


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LabelShares:
    """How frequent each label is among a client's records, or those of all clients in a sum. Private.

    Args:
        shares: Of shape (classes,), from 0 to 1, summing to 1.
        standard_errors: How far known noise, and which records happen to be the client's and the public ones, put each off, of shape
            (classes,). Public.
        confidence: Share of the distance from the public frequencies that those do not explain, from 0 to 1.
        seconds: Elapsed time.
    """

    shares: NDArray[np.float64]
    standard_errors: NDArray[np.float64]
    confidence: float
    seconds: float

    def __repr__(self) -> str:
        return f"LabelShares(classes={len(self.shares)})"


@dataclass(frozen=True, kw_only=True, eq=False)
class LabelDistribution:
    """Compares the change of the last layer's bias with what public records of each class would do to it, clipped as the client clips.

    After several steps their pulls at the model before the round and after it are averaged. As far as noise and luck explain what differs
    from the public frequencies, the answer stays at these: it is hardly ever worse than they are.

    Args:
        module: The architecture. Public.
        public: Labelled records of every class.

    Raises:
        ValueError: If there are fewer than two classes, or a class has fewer than two records.
    """

    module: nn.Module
    public: LabelledRows

    def __post_init__(self) -> None:
        counts = np.bincount(self.public.labels)
        if len(counts) < 2 or counts.min() < 2:
            raise ValueError(f"expected at least two public records of each of at least two classes, got {len(counts)} classes")

    # Tensors this small only wait for each other's threads.
    @threadpool_limits.wrap(limits=1)
    def attack(self, observation: Observation) -> LabelShares | NotApplicable:
        """The shares. Not applicable where no mean of gradients was seen, or the last layer has no bias."""
        started = time.perf_counter()
        target = target_gradient(observation, self.module)
        if isinstance(target, NotApplicable):
            return target
        layers = linear_layers(observation.layout)
        if not layers or layers[-1].outputs not in {1, len(np.bincount(self.public.labels))}:
            return NotApplicable(reason="the last layer has no bias with an entry for each class, whose change would show labels")
        bias = self._place(observation, layers[-1].bias)
        pulls, spreads = self._pulls(target, observation, bias)
        usual = np.bincount(self.public.labels) / len(self.public)
        seen, noise = target.values[bias].double().numpy(), target.errors[bias].double().numpy()
        raw, deviations = usual, np.diag(noise)
        for _ in range(_TIMES):
            luck = raw / observation.records + raw**2 / np.bincount(self.public.labels)
            covariance = np.diag(noise**2) + np.tensordot(luck, spreads, axes=1)
            deviations = np.linalg.cholesky(covariance + _RIDGE * np.trace(covariance) * np.eye(len(seen)))
            raw = _solve(pulls, seen, deviations)
        # How far a standard deviation of what was seen moves the solution.
        errors = np.sqrt(np.sum([(_solve(pulls, seen + step, deviations) - raw) ** 2 for step in deviations.T], axis=0))
        distance = float(np.sum((raw - usual) ** 2))
        confidence = max(0.0, 1 - float(np.sum(errors**2)) / distance) if distance else 0.0
        return LabelShares(
            shares=usual + confidence * (raw - usual),
            standard_errors=errors,
            confidence=confidence,
            seconds=time.perf_counter() - started,
        )

    def _pulls(self, target: TargetGradient, observation: Observation, bias: slice) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Each class's mean gradient at the bias, of shape (classes, outputs), and covariance, of shape (classes, outputs, outputs)."""
        models = [target.module]
        if observation.training.steps > 1 and observation.model is not None and isinstance(observation.seen, PlainVector):
            after = copy.deepcopy(target.module)
            load_values(after, PlainVector(layout=observation.layout, values=observation.model.values + observation.seen.values))
            models.append(after)
        rows, labels = (torch.from_numpy(part) for part in (self.public.rows.astype(np.float32), self.public.labels.copy()))
        found = np.zeros((len(labels), bias.stop - bias.start))
        for model in models:
            here = TargetGradient(
                values=target.values,
                deviation=target.deviation,
                errors=target.errors,
                module=model,
                loss=target.loss,
                size=1,
                max_grad_norm=target.max_grad_norm,
            )
            with torch.no_grad():
                parts = zip(rows.split(_RECORDS_AT_ONCE), labels.split(_RECORDS_AT_ONCE), strict=True)
                found += torch.cat([here.of_records(*part)[:, bias] for part in parts]).double().numpy() / len(models)
        classes = range(int(labels.max()) + 1)
        of_class = [found[self.public.labels == number] for number in classes]
        covariances = [np.atleast_2d(np.cov(part, rowvar=False)) for part in of_class]
        return np.array([part.mean(axis=0) for part in of_class]), np.array(covariances)

    @staticmethod
    def _place(observation: Observation, name: str) -> slice:
        sizes = [int(np.prod(shape)) for shape in observation.layout.shapes]
        index = observation.layout.names.index(name)
        return slice(sum(sizes[:index]), sum(sizes[: index + 1]))


def _solve(pulls: NDArray[np.float64], seen: NDArray[np.float64], deviations: NDArray[np.float64]) -> NDArray[np.float64]:
    """Shares of at least 0 that sum to 1 and mix the classes' pulls to what was seen, by least squares.

    Args:
        pulls: Of shape (classes, outputs).
        seen: Of shape (outputs,).
        deviations: A square root of the covariance of what was seen, lower triangular.
    """
    equations = solve_triangular(deviations, pulls.T, lower=True)
    strong = _SUM_TO_ONE * float(np.abs(equations).max())
    right = np.append(solve_triangular(deviations, seen, lower=True), strong)
    shares, _ = nnls(np.vstack([equations, np.full(len(pulls), strong)]), right)
    return shares / shares.sum()
