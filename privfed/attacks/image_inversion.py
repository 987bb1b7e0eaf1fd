"""Images by optimisation: pixels whose gradient is what was seen.

`DeepLeakage` is for smooth activations, `CosineInversion` for ReLU, where a gradient jumps and second derivatives mislead. Both read
the labels off the update first (iDLG: Zhao et al., 2020, arXiv:2001.02610).
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import nn
from torch.nn.functional import cosine_similarity

from privfed.attacks.facts import TableSchema
from privfed.attacks.gradients import TargetGradient, minimise, target_gradient
from privfed.attacks.image_labels import read_labels
from privfed.attacks.images import ImageShape
from privfed.attacks.observation import NotApplicable, Observation, Reconstruction

_CERTIFICATE = "no image is certified: an optimiser may end anywhere"
# Neighbouring pixels of natural images differ by some 0.05.
_VARIATION = 20.0
# Images whose gradient is right to three digits look like the true ones.
_DIGITS, _ENOUGH, _LEAST = 3.0, 0.5, 1e-12
_STEEPNESS, _HISTORY, _LEARNING_RATE = 4.0, 100, 0.1


@dataclass(frozen=True, kw_only=True, eq=False)
class DeepLeakage:
    """The likeliest image under noise and rounding and a preference for smooth ones, by L-BFGS (DLG: Zhu et al., 2019, arXiv:1906.08935).

    Under noise that hides everything it answers with a nearly grey image. It starts again, up to `restarts` times, until confidence is 0.5.

    Confidence is a third for every digit of the gradient that the images explain, beyond what grey ones do: 0 for no better than grey,
    1 for three digits or more.

    Args:
        module: The architecture, whose first layer unflattens rows. Public.
        shape: Of the images. Public.
        restarts: Number of starts at most, at least 1.
        iterations: Steps of each at most.
        seed: Decides where they start.
    """

    module: nn.Module
    shape: ImageShape
    restarts: int = 4
    iterations: int = 1000
    seed: int = 0

    # Tensors this small only wait for each other's threads.
    @threadpool_limits.wrap(limits=1)
    def attack(self, observation: Observation) -> Reconstruction | NotApplicable:
        """As many images as there are records in a step of all clients. None is certified."""
        started = time.perf_counter()
        target = _image_target(observation, self.module, self.shape)
        if isinstance(target, NotApplicable):
            return target
        labels = read_labels(observation, target, self.shape)
        if isinstance(labels, NotApplicable):
            return labels

        error = float(target.errors.square().mean().sqrt())

        def misfit(pixels: torch.Tensor) -> torch.Tensor:
            return (target.of_batch(pixels, labels) - target.values).square().mean() / error**2

        def energy(variables: torch.Tensor) -> torch.Tensor:
            pixels = torch.sigmoid(_STEEPNESS * variables)
            return misfit(pixels) / 2 + _VARIATION * self.shape.variation(pixels).sum() / len(target.values)

        best, least, confidence = torch.full((target.size, self.shape.pixels), 0.5), math.inf, 0.0
        with torch.no_grad():
            grey = float(misfit(best))
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(self.restarts):
            start = 0.3 * (torch.rand(best.shape, generator=generator) - 0.5)
            found = _lbfgs(start, energy, iterations=self.iterations)
            with torch.no_grad():
                reached, pixels = float(energy(found)), torch.sigmoid(_STEEPNESS * found)
                if reached < least:
                    digits = math.log10(max(grey, _LEAST) / max(float(misfit(pixels)), _LEAST)) / 2
                    best, least, confidence = pixels, reached, digits / _DIGITS
            if confidence >= _ENOUGH:
                break
        return _reconstruction(best, confidence, observation.schema, started=started)


@dataclass(frozen=True, kw_only=True, eq=False)
class CosineInversion:
    """The image whose gradient points where the update does, and that is smooth (Geiping et al., 2020, arXiv:2003.14053, section 4).

    Only the sign of each pixel's derivative is used, as there. Not applicable to updates with noise: `DeepLeakage` is.

    Confidence is the cosine that was reached, above that of a grey image: 1 for the very direction, 0 for no better than grey.

    Args:
        module: The architecture, whose first layer unflattens rows. Public.
        shape: Of the images. Public.
        restarts: Number of starts, at least 1; the nearest direction wins.
        iterations: Steps of each.
        variation: Weight of the total variation per pixel.
        seed: Decides where they start.
    """

    module: nn.Module
    shape: ImageShape
    restarts: int = 1
    iterations: int = 300
    variation: float = 1e-3
    seed: int = 0

    # Tensors this small only wait for each other's threads.
    @threadpool_limits.wrap(limits=1)
    def attack(self, observation: Observation) -> Reconstruction | NotApplicable:
        """As many images as there are records in a step of all clients. None is certified."""
        started = time.perf_counter()
        target = _image_target(observation, self.module, self.shape)
        if isinstance(target, NotApplicable):
            return target
        if target.deviation > 0:
            return NotApplicable(reason="the update has noise, under which the nearest direction is worse than a grey image")
        labels = read_labels(observation, target, self.shape)
        if isinstance(labels, NotApplicable):
            return labels

        def distance(pixels: torch.Tensor) -> torch.Tensor:
            return 1 - cosine_similarity(target.of_batch(pixels, labels), target.values, dim=0)

        def objective(pixels: torch.Tensor) -> torch.Tensor:
            return distance(pixels) + self.variation * self.shape.variation(pixels).sum() / pixels.numel()

        best = torch.full((target.size, self.shape.pixels), 0.5)
        with torch.no_grad():
            grey = least = float(distance(best))
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(self.restarts):
            start = torch.rand(best.shape, generator=generator)
            found = minimise(start, objective, iterations=self.iterations, learning_rate=_LEARNING_RATE, pixels=True)
            with torch.no_grad():
                reached = float(distance(found))
            if reached < least:
                best, least = found, reached
        confidence = 1 - least / grey if grey else 0.0
        return _reconstruction(best, confidence, observation.schema, started=started)


def _image_target(observation: Observation, module: nn.Module, shape: ImageShape) -> TargetGradient | NotApplicable:
    if observation.schema.width != shape.pixels:
        raise ValueError(f"expected a schema of {shape.pixels} pixels, got {observation.schema.width} columns")
    return target_gradient(observation, module)


def _lbfgs(start: torch.Tensor, objective: Callable[[torch.Tensor], torch.Tensor], *, iterations: int) -> torch.Tensor:
    variables = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [variables], max_iter=iterations, history_size=_HISTORY, tolerance_grad=0, tolerance_change=1e-12, line_search_fn="strong_wolfe"
    )

    def closure() -> torch.Tensor:
        value = objective(variables)
        (variables.grad,) = torch.autograd.grad(value, variables)
        return value.detach()

    optimizer.step(closure)
    return variables.detach()


def _reconstruction(pixels: torch.Tensor, confidence: float, schema: TableSchema, *, started: float) -> Reconstruction:
    rows = pixels.double().numpy()
    return Reconstruction(
        rows=np.clip(rows, schema.low, schema.high),
        certified=np.zeros(len(rows), dtype=np.bool_),
        confidence=np.full(len(rows), min(1.0, max(0.0, confidence))),
        certificate=_CERTIFICATE,
        seconds=time.perf_counter() - started,
    )
