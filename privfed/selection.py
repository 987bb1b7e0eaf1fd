"""Which clients take part in a round."""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np


def select_clients(names: Sequence[str], *, fraction: float, rng: np.random.Generator, minimum: int = 1) -> tuple[str, ...]:
    """A uniform sample of clients without replacement, in the order of `names`.

    Args:
        names: Names of all clients, each once. Public.
        fraction: Share of the clients to take, above 0 and up to 1. The number is rounded up, and read as the decimal that
            was written: a fraction of 0.1 of 30 clients is 3.
        rng: Source of the choice. The choice is public; it needs no secrecy.
        minimum: Fewest clients to take, from 1 to len(names), for example the policy's `min_clients`.

    Returns:
        max(minimum, ceil(fraction * len(names))) names.

    Raises:
        ValueError: If the fraction or the minimum is out of range, or a name repeats.

    Example:
        >>> select_clients(["a", "b", "c"], fraction=0.5, rng=np.random.default_rng(0), minimum=2)
        ('b', 'c')
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"expected a fraction above 0 and up to 1, got {fraction!r}")
    if not 1 <= minimum <= len(names):
        raise ValueError(f"expected a minimum from 1 to {len(names)}, the number of clients, got {minimum!r}")
    if len(set(names)) != len(names):
        raise ValueError("expected every name once, got a repeated one")
    count = max(minimum, math.ceil(Fraction(repr(float(fraction))) * len(names)))
    return tuple(names[int(index)] for index in sorted(rng.choice(len(names), size=count, replace=False)))
