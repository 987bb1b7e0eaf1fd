"""JSON that says one thing: read strictly, and written in one way only."""

import hashlib
import json
import math
from typing import Any


def parse(text: str) -> Any:
    """The value that a JSON text stands for, whoever reads it.

    Readers differ where a key stands twice and where a number is NaN, infinite or too large, so none of these is read.

    Raises:
        ValueError: If the text is no JSON, or one of these is in it.
        RecursionError: If it is nested too deeply.

    Example:
        >>> parse('{"epsilon": 4.0}')
        {'epsilon': 4.0}
        >>> parse('{"epsilon": 4.0, "epsilon": 1.0}')
        Traceback (most recent call last):
        ValueError: expected every key of a JSON object once, got one twice
    """
    return json.loads(text, object_pairs_hook=_once, parse_constant=_finite, parse_float=_finite)


def canonical(value: object) -> str:
    """JSON values in the one text that equal values have, and no others: 1, 1.0 and true differ.

    Raises:
        ValueError: If a number is not finite.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def checksum(value: object) -> str:
    """SHA-256 of the canonical text, hexadecimal. It notices an edit; it is no signature, since anybody can compute it anew."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def real(value: object) -> float:
    """A value that must be a number, and not a truth value.

    Raises:
        ValueError: If it is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"expected a number, got {type(value).__name__}")
    return value


def whole(value: object) -> int:
    """A value that must be a whole number from 0, and not a truth value.

    Raises:
        ValueError: If it is something else.
    """
    if type(value) is not int or value < 0:
        raise ValueError(f"expected a whole number from 0, got {type(value).__name__}")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("expected every key of a JSON object once, got one twice")
    return found


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError("expected finite numbers in JSON, got another one")
    return value
