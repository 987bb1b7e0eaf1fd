"""Images as rows of a table of pixels: so the model unflattens them first, and every attack on rows works on them too."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from privfed.attacks.facts import Continuous, TableSchema

_SMOOTH = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageShape:
    """How a row of pixels, each from 0 to 1, is an image: channels first, then rows from the top. Public.

    Args:
        channels: 1 for grey, 3 for colours.
        height: Number of rows of pixels.
        width: Number of pixels in each.

    Raises:
        ValueError: If one is not positive.

    Example:
        >>> ImageShape(channels=3, height=32, width=32).pixels
        3072
    """

    channels: int
    height: int
    width: int

    def __post_init__(self) -> None:
        if min(self.channels, self.height, self.width) < 1:
            raise ValueError(f"expected positive sizes, got {self.channels}, {self.height} and {self.width}")

    @property
    def pixels(self) -> int:
        """Number of inputs of the model, channels counted singly."""
        return self.channels * self.height * self.width

    def schema(self) -> TableSchema:
        """One numeric column for each pixel and channel, from 0 to 1."""
        sizes = (self.channels, self.height, self.width)
        return TableSchema(columns=tuple(Continuous(name=f"pixel {index}", low=0.0, high=1.0) for index in np.ndindex(sizes)))

    def images(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """Images of shape (n, channels, height, width) from rows of shape (n, pixels).

        Raises:
            ValueError: If the rows have another number of columns.
        """
        if rows.ndim != 2 or rows.shape[1] != self.pixels:
            raise ValueError(f"expected rows of {self.pixels} pixels, got shape {rows.shape}")
        return rows.reshape(len(rows), self.channels, self.height, self.width)

    def variation(self, rows: torch.Tensor) -> torch.Tensor:
        """Total variation of each row as an image, of shape (n,): the sum of differences between neighbouring pixels. Differentiable.

        Differences are rounded off near 0, so that it has a derivative.
        """
        image = rows.unflatten(-1, (self.channels, self.height, self.width))
        steps = [image.diff(dim=dim).square().add(_SMOOTH**2).sqrt().flatten(1).sum(dim=1) for dim in (-1, -2)]
        return steps[0] + steps[1]
