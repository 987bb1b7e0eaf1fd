"""CPU seconds and memory of what one process does between two points. Imports nothing that an interpreter of a peer has not."""

import resource
import time
from pathlib import Path
from types import TracebackType

_STATUS = Path("/proc/self/status")
_KIBIBYTE = 1024 / 1e6


def _cpu_seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _status(field: str) -> float:
    """Megabytes of a field of /proc/self/status."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * _KIBIBYTE


class Meter:
    """A stopwatch: `with meter` as often as there is work, of this process and its children.

    Memory is the peak from the first start to the last stop, above what the process held at the first: interpreter, libraries and the
    input are not counted, whatever is received in between is.
    """

    def __init__(self) -> None:
        self.cpu_seconds = 0.0
        self.peak_megabytes = 0.0
        self._held: float | None = None
        self._started = 0.0

    def __enter__(self) -> None:
        if self._held is None:
            Path("/proc/self/clear_refs").write_text("5")  # the peak so far, imports for the most part, is forgotten: proc(5)
            self._held = _status("VmRSS")
        self._started = _cpu_seconds()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.cpu_seconds += _cpu_seconds() - self._started
        self.peak_megabytes = _status("VmHWM") - (self._held or 0.0)
