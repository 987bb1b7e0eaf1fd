"""What averaging costs without any protection: float32 numbers."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.he.meter import Meter
from benchmarks.he.workload import Workload


class Float32:
    """The server adds numbers and sends their mean."""

    def __init__(self, work: Workload, folder: Path) -> None:
        self._work = work
        self._folder = folder

    def prepare(self, meter: Meter) -> None: ...

    def answer(self, meter: Meter) -> None: ...

    def upload(self, client: int, meter: Meter, agreeing: Meter) -> bytes:  # noqa: ARG002
        update = self._work.update(client)
        with meter:
            return b"".join(tensor.tobytes() for tensor in update.values())

    def serve(self, uploads: Iterator[bytes], answers: Callable[[], None], meter: Meter) -> bytes:  # noqa: ARG002
        with meter:
            total = np.zeros(self._work.params, np.float32)
        for data, weight in zip(uploads, self._work.weights, strict=True):
            with meter:
                total += np.float32(weight) * np.frombuffer(data, np.float32)
        with meter:
            total /= np.float32(sum(self._work.weights))
            return total.tobytes()

    def open(self, data: bytes, meter: Meter) -> NDArray[np.floating]:
        with meter:
            return np.frombuffer(data, np.float32)
