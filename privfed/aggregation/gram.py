"""The Gram matrix of updates: the n x n inner products from which every rule's coefficients follow."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from privfed.errors import LayoutMismatchError
from privfed.update import PlainVector

_BLOCK = 1 << 16


def gram(vectors: Sequence[PlainVector]) -> NDArray[np.float64]:
    """Inner products of n updates in the clear, of shape (n, n), symmetric.

    Accumulated in float64 over blocks of coordinates, so the extra memory is n times the block and not a copy of all updates.
    Hand it *updates* (differences to the received model), not models: inner products of models that differ in the fourth
    digit have lost the difference.

    Args:
        vectors: Updates of one layout, at least one.

    Raises:
        ValueError: If there is no vector, or an inner product overflows.
        LayoutMismatchError: If the vectors have different layouts.

    Example:
        >>> from privfed.update import Layout
        >>> layout = Layout(names=("weight",), shapes=((2,),))
        >>> gram([PlainVector(layout=layout, values=[1, 2]), PlainVector(layout=layout, values=[3, 0])])
        array([[5., 3.],
               [3., 9.]])
    """
    if not vectors:
        raise ValueError("expected at least one vector, got none")
    layout = vectors[0].layout
    if any(vector.layout != layout for vector in vectors):
        raise LayoutMismatchError("expected vectors of one layout, got different ones; nothing was computed")
    products = np.zeros((len(vectors), len(vectors)))
    with np.errstate(over="ignore", invalid="ignore"):  # refused below
        for start in range(0, layout.size, _BLOCK):
            block = np.stack([vector.values[start : start + _BLOCK] for vector in vectors])
            products += block @ block.T
    if not np.isfinite(products).all():
        raise ValueError("expected updates whose inner products are finite in float64, got an overflow")
    return products
