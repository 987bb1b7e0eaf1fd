"""Looks for the clients' keys in the memory of another process."""

from collections.abc import Sequence

from privfed.agreement import RoundContext
from privfed.he.escrow_secret import AttemptKey, EscrowKey
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
    return any(patterns_in_process(pid, _patterns(keys, contexts)))


def bytes_hold_key(data: bytes, keys: SharedKey | EscrowKey, context: RoundContext) -> bool:
    """Whether bytes, such as those of a file, hold the secret of the clients or of the key holder, or any part of its keys of a round."""
    if isinstance(keys, EscrowKey):
        attempt_key = keys.attempt_key(binding=context.digest, params=context.agreement.params)
        sealing_key = attempt_key._sealing_key.private_bytes_raw()  # pyright: ignore[reportPrivateUsage]
        return any(pattern in data for pattern in [keys._secret, sealing_key, *_parts(attempt_key)])  # pyright: ignore[reportPrivateUsage]
    return any(pattern in data for pattern in _patterns(keys, [context]))


def _patterns(keys: SharedKey, contexts: Sequence[RoundContext]) -> list[bytes]:
    patterns = [keys._secret]  # pyright: ignore[reportPrivateUsage] # no public name gives key material away
    for context in contexts:
        patterns.extend(_parts(round_key(keys, context)))
    return patterns


def _parts(key: RoundKey | AttemptKey) -> list[bytes]:
    words = key._ring_key.words()  # pyright: ignore[reportPrivateUsage]
    return [words[start : start + 8].tobytes() for start in range(0, len(words), len(words) // 4)]
