"""Keys from a party's folder, for code that hands them on and never looks into them."""

from pathlib import Path

from privfed.he.escrow_secret import EscrowKey
from privfed.he.secret import SharedKey
from privfed.keys.chain import CHAIN_HEADER, KeyChain
from privfed.keys.roster import PinnedRoster


def load_shared_key(path: Path, *, roster: Path) -> SharedKey | KeyChain:
    """The key that clients share, in whichever of its two forms the file holds.

    Args:
        path: The key file.
        roster: The pinned roster, which is read only beside a key chain.

    Raises:
        KeyRefusedError: If the chain is of another roster.
        OSError: If a file cannot be read, or others than the owner may read the key.
        ValueError: If the file holds something else.
    """
    with path.open("rb") as file:
        chained = file.read(len(CHAIN_HEADER)) == CHAIN_HEADER
    return KeyChain.load(path, roster=PinnedRoster.load(roster)) if chained else SharedKey.load(path)


def load_escrow_key(path: Path) -> EscrowKey:
    """The key holder's key.

    Raises:
        OSError: If the file cannot be read, or others than the owner may read it.
        ValueError: If it holds something else.
    """
    return EscrowKey.load(path)
