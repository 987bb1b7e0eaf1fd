"""The work that every implementation is given: the same vectors with the same weights. Imports numpy alone: all interpreters have it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

BOUND = 1 / 16  # of a coordinate's absolute value, known to whoever wants a bound or a clipping range
_SPREAD = 0.01
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Updates of so many parameters, in so many tensors of equal size (but for one), from so many clients."""

    params: int
    clients: int
    tensors: int

    @property
    def sizes(self) -> dict[str, int]:
        """Parameters of each tensor, by name."""
        cuts = [self.params * index // self.tensors for index in range(self.tensors + 1)]
        return {f"tensor_{index}": stop - start for index, (start, stop) in enumerate(pairwise(cuts))}

    @property
    def weights(self) -> tuple[int, ...]:
        """1, 2, 3, 1, 2, 3 and so on: every profile holds them exactly, for 128 clients and fewer."""
        return tuple(1 + client % 3 for client in range(self.clients))

    def values(self, client: int) -> NDArray[np.float32]:
        """What a client sends, of shape (params,): normal numbers within the bound, made in place so that a peak of memory is not ours."""
        values = np.random.default_rng(client).standard_normal(self.params, dtype=np.float32)
        values *= np.float32(_SPREAD)
        return np.clip(values, -BOUND, BOUND, out=values)

    def update(self, client: int) -> dict[str, NDArray[np.float32]]:
        """The same by tensor, without a copy."""
        return self.tensors_of(self.values(client))

    def tensors_of(self, values: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
        """A flat vector by tensor, without a copy."""
        cuts = np.cumsum(list(self.sizes.values()))[:-1]
        return dict(zip(self.sizes, np.split(values, cuts), strict=True))

    def mean(self) -> NDArray[np.float64]:
        """What should come out."""
        total = np.zeros(self.params)
        for client, weight in enumerate(self.weights):
            total += weight * self.values(client).astype(np.float64)
        return total / sum(self.weights)


def pack(parts: Sequence[bytes]) -> bytes:
    """Parts behind their lengths, for implementations that have no messages of their own."""
    return b"".join(len(part).to_bytes(_LENGTH_BYTES, "big") + part for part in parts)


def unpack(data: bytes) -> list[bytes]:
    """What `pack` packed."""
    parts, start = list[bytes](), 0
    while start < len(data):
        stop = start + _LENGTH_BYTES + int.from_bytes(data[start : start + _LENGTH_BYTES], "big")
        parts.append(data[start + _LENGTH_BYTES : stop])
        start = stop
    return parts
