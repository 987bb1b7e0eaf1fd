"""Looks for the clients' keys in the memory of another process."""

from collections.abc import Sequence

from privfed.agreement import RoundContext
from privfed.he.secret import RoundKey, SharedKey
from privfed.memory import patterns_in_process
from privfed.protect import round_key


def process_holds_key(pid: int, keys: SharedKey, contexts: Sequence[RoundContext]) -> bool:
    """Whether the memory of a process holds the shared key, or the key of one of these rounds.

    A round key is looked for as SEAL keeps it: eight successive words, at four places of the key.

    Args:
        pid: A process that this one may trace, not this one itself.
        keys: The shared key to look for.
        contexts: Rounds whose keys to look for, at least one.

    Returns:
        True if any part of any key was found.

    Raises:
        ValueError: If there is no round.
        NotImplementedError: Where another process's memory cannot be read; nothing is known then.
        PermissionError: If the process may not be traced.
    """
    if not contexts:
        raise ValueError("expected at least one round whose key to look for")
    patterns = [keys._secret]  # pyright: ignore[reportPrivateUsage] # no public name gives key material away
    for context in contexts:
        patterns.extend(_patterns(round_key(keys, context)))
    return any(patterns_in_process(pid, patterns))


def _patterns(key: RoundKey) -> list[bytes]:
    words = key._ring_key.words()  # pyright: ignore[reportPrivateUsage]
    return [words[start : start + 8].tobytes() for start in range(0, len(words), len(words) // 4)]
