"""A finished audit as a file, bound to the run that it is about.

What an audit is made of are frozen dataclasses of public values and canaries. They are written by their fields and read by the types of
these, so that whatever an audit holds comes back as it was, and nothing else does.
"""

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from privfed.audit.findings import Audit
from privfed.errors import UnsupportedDataError
from privfed.strict_json import checksum, parse


def write_audit(audit: Audit, path: Path, *, run: str) -> None:
    """Writes an audit; a file that is there is replaced.

    Args:
        audit: What to write.
        path: Where to.
        run: Digest of the run that it is about. It binds by content, not by a key, and so does the checksum of the file: who may write
            the file can forge both.
    """
    content = {"run": run, "training_verdict": audit.training_verdict, "audit": _encode(audit)}
    path.write_text(json.dumps(content | {"checksum": checksum(content)}, indent=1, allow_nan=False), encoding="utf-8")


def read_audit(path: Path, *, run: str) -> Audit | None:
    """Reads what `write_audit` wrote; None if there is no file, or it is about another run.

    Raises:
        UnsupportedDataError: If the file holds something else.
    """
    if not path.exists():
        return None
    try:
        found = parse(path.read_text(encoding="utf-8"))
        return _checked(found) if found["run"] == run else None
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise UnsupportedDataError(
            f"{path} does not hold what privfed audit writes; nothing was done; remove it, or have it replaced by privfed audit"
        ) from error


def _checked(found: dict[str, Any]) -> Audit:
    """The audit of a file, which must not have been edited, and whose verdict must follow from its measurements."""
    seal = found.pop("checksum")
    audit: Audit = _decode(Audit, found["audit"])
    if seal != checksum(found) or set(found) != {"run", "training_verdict", "audit"} or found["training_verdict"] != audit.training_verdict:
        raise ValueError("expected the verdict that follows from the measurements, and nothing else")
    return audit


def _encode(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return {"is": type(value).__name__} | {field.name: _encode(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Mapping):
        return [[_encode(key), _encode(item)] for key, item in value.items()]
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    if isinstance(value, float):
        return repr(value)  # exact, and NaN has no number in JSON
    if isinstance(value, str | int | NoneType):
        return value
    raise TypeError(f"expected an audit of plain values, got {type(value).__name__}")


def _decode(kind: Any, value: Any) -> Any:
    """The value that was encoded, if it is of that type."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        named = {part.__name__: part for part in parts}
        # Numbers with a fraction are written as texts.
        kind_of = "float" if isinstance(value, str) and str not in parts else type(value).__name__
        return _decode(named[value["is"] if isinstance(value, dict) else kind_of], value)
    if origin is tuple:
        return tuple(_decode(parts[0], item) for item in value)
    if origin is not None and issubclass(origin, Mapping):
        return {_decode(parts[0], key): _decode(parts[1], item) for key, item in value}
    name: str = kind.__name__
    if is_dataclass(kind):
        make: Any = kind
        types = get_type_hints(kind)
        if set(value) != {"is", *types} or value["is"] != name:
            raise ValueError(f"expected the fields of {name}")
        return make(**{name: _decode(types[name], value[name]) for name in types})
    if issubclass(kind, Enum):
        return kind[value]
    if kind is float and isinstance(value, str):
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"expected {name}")
    return value
