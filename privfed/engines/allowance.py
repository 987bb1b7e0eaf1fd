"""How often something may be done that others can bring about at will."""

import time


class Allowance:
    """Some times at once, and from then on once in a while.

    Args:
        burst: How many times at once, at least 1.
        seconds: How long until one more is allowed, above 0.

    Example:
        >>> allowance = Allowance(burst=2, seconds=3600)
        >>> [allowance.take() for _ in range(3)]
        [True, True, False]
    """

    def __init__(self, *, burst: int, seconds: float) -> None:
        self._burst = burst
        self._seconds = seconds
        self._left = float(burst)
        self._since = time.monotonic()

    def take(self) -> bool:
        """Whether it may be done now; then it counts as done."""
        now = time.monotonic()
        self._left = min(self._left + (now - self._since) / self._seconds, self._burst)
        self._since = now
        if self._left < 1:
            return False
        self._left -= 1
        return True
