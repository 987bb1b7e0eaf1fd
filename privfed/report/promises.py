"""Privacy statements side by side: what all of them say once, and what each says of its own in a table."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from privfed.dp.statement import PrivacyStatement

_PARTS: tuple[tuple[str, Callable[[PrivacyStatement], tuple[str, ...]]], ...] = (
    ("Protected", lambda statement: (f"{statement.unit.value}; {statement.relation.value}",)),
    ("Noise added by", lambda statement: (statement.noise_added_by,)),
    ("Noise drawn from", lambda statement: (statement.randomness.value,)),
    ("Computed by", lambda statement: (statement.accountant,)),
    ("Released", lambda statement: statement.released),
    ("Not covered", lambda statement: statement.not_covered),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Something that every statement says, in one or more items."""

    name: str
    items: tuple[str, ...]


def common(statements: Sequence[PrivacyStatement]) -> tuple[Part, ...]:
    """What all statements say alike; what differs stands in the full texts."""
    if not statements:
        return ()
    first = statements[0]
    return tuple(
        Part(name=name, items=items(first)) for name, items in _PARTS if all(items(statement) == items(first) for statement in statements)
    )
