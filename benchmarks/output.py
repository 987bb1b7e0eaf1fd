"""Standard output of a benchmark: what it says itself, and nothing that libraries or the processes that it starts write there."""

import os
import sys


def keep_stdout() -> None:
    """Leaves standard output to Python's `sys.stdout` in this process, to its end. What else goes there goes to standard error.

    TenSEAL prints its warnings from C++, past Python, and the processes that engines start inherit the descriptor. They find standard error
    at descriptor 1; `sys.stdout` gets one of its own, which is not inherited. It is not set back, because what C++ holds back in a buffer
    comes when the process ends.
    """
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors, buffering=1)
    os.dup2(2, 1)
