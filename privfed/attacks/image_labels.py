"""Classes of a batch of images, read off the update. They are needed to compute gradients of guessed images."""

import numpy as np
import torch
from numpy.typing import NDArray

from privfed.attacks.facts import BinaryLoss
from privfed.attacks.gradients import TargetGradient
from privfed.attacks.images import ImageShape
from privfed.attacks.labels import SingleLabel, single_label
from privfed.attacks.observation import NotApplicable, Observation, linear_layers

_PROBES = 64


def read_labels(observation: Observation, target: TargetGradient, shape: ImageShape) -> torch.Tensor | NotApplicable:
    """Class indices of shape (records,), in any order.

    The last layer's bias gradient is the mean of predicted minus true classes. Of a single record its sign gives the class (Zhao et
    al., 2020, section 3). Of several, the classes are counted with the predictions of random images in place of the unknown ones,
    which is right on networks that are not sure of anything yet.

    Not applicable to networks whose last layer has no bias, and to clipped records if there are several.
    """
    single = single_label(observation)
    if isinstance(single, SingleLabel):
        return torch.tensor([single.label])
    layers = linear_layers(observation.layout)
    if not layers:
        return NotApplicable(reason="the model has no fully connected layer with bias, whose change would show labels")
    if target.max_grad_norm is not None:
        return NotApplicable(reason="clipping each record hides how many records there are of each class")
    with torch.no_grad():
        outputs = target.module(torch.rand(_PROBES, shape.pixels, generator=torch.Generator().manual_seed(0)))
    sizes = [int(np.prod(size)) for size in observation.layout.shapes]
    gradients = dict(zip(observation.layout.names, target.values.split(sizes), strict=True))
    bias = gradients[layers[-1].bias]
    if isinstance(target.loss, BinaryLoss):
        mean = float(outputs.sigmoid().mean())
        positive = (mean - float(bias[0])) / (mean + target.loss.positive_weight * (1 - mean))
        shares = np.array([1 - positive, positive])
    else:
        shares = (outputs.softmax(dim=1).mean(dim=0) - bias).double().numpy()
    return torch.from_numpy(_largest_remainders(shares.clip(0), target.size))


def _largest_remainders(shares: NDArray[np.float64], size: int) -> NDArray[np.int64]:
    """Each class as often as its share of so many records says, of shape (size,)."""
    exact = shares / shares.sum() * size
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: size - counts.sum()]] += 1
    return np.repeat(np.arange(len(shares)), counts)
