"""The source of what is dealt, selected or made up. Noise and keys never come from it."""

import numpy as np


def check_generator(rng: object) -> None:
    """Refuses what is no generator of NumPy, a bare seed for example.

    Raises:
        TypeError: If it is none.
    """
    if not isinstance(rng, np.random.Generator):
        raise TypeError(f"expected rng to be a NumPy generator, as np.random.default_rng(1) makes it, got {type(rng).__name__}")
