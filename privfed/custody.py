"""Who holds the key of a simulated consortium: a name for each trust mode, and the keys and parameters that go with it."""

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from privfed.he.params import CkksParams
from privfed.he.threshold_key import ThresholdKey

if TYPE_CHECKING:
    from privfed.he.escrow_secret import EscrowKey
    from privfed.he.secret import SharedKey


class Holder(Enum):
    """Who holds the key; the value is the name of the trust mode."""

    EVERY_CLIENT = "SharedKey"
    KEY_HOLDER = "EscrowKey"
    NOBODY = "ThresholdKey"


@dataclass(frozen=True, slots=True, kw_only=True)
class Custody:
    """Who holds the key, and where nobody does, what a quorum must withstand. Public.

    Args:
        clients: Number of clients.
        holder: Who holds the key.
        corrupted: Clients that may put together what they hold with the server; 0 unless nobody holds the key.
        dropouts: Clients that may fall silent in a round; 0 unless nobody holds the key.

    Raises:
        ValueError: If somebody holds the key and there are numbers for a quorum; or as `ThresholdKey`.

    Example:
        >>> Custody(clients=5, holder=Holder.NOBODY, corrupted=1, dropouts=1).words
        'nobody holds a key, any 4 of 5 banks open a sum together, and the server learns it'
    """

    clients: int
    holder: Holder = Holder.EVERY_CLIENT
    corrupted: int = 0
    dropouts: int = 0

    def __post_init__(self) -> None:
        if self.holder is Holder.NOBODY:
            _ = self._quorum
        elif self.corrupted or self.dropouts:
            raise ValueError(
                f"expected corrupted clients and dropouts beside {Holder.NOBODY.value} alone, whose quorum they decide, got "
                f"{self.corrupted} and {self.dropouts} with {self.holder.value}"
            )

    @property
    def _quorum(self) -> ThresholdKey:
        return ThresholdKey(clients=self.clients, corrupted=self.corrupted, dropouts=self.dropouts)

    @property
    def params(self) -> CkksParams:
        """Encryption parameters of the trust mode."""
        match self.holder:
            case Holder.EVERY_CLIENT:
                return CkksParams.standard()
            case Holder.KEY_HOLDER:
                return CkksParams.escrow()
            case Holder.NOBODY:
                return CkksParams.threshold(clients=self.clients)

    def keys(self) -> "SharedKey | EscrowKey | ThresholdKey":
        """New keys; where nobody holds one, how many open together."""
        from privfed.he.escrow_secret import EscrowKey  # noqa: PLC0415 # who describes a consortium need not load secrets
        from privfed.he.secret import SharedKey  # noqa: PLC0415

        match self.holder:
            case Holder.EVERY_CLIENT:
                return SharedKey.generate()
            case Holder.KEY_HOLDER:
                return EscrowKey.generate()
            case Holder.NOBODY:
                return self._quorum

    @property
    def words(self) -> str:
        """What it means, for people."""
        match self.holder:
            case Holder.EVERY_CLIENT:
                return "every bank holds the key, the server none"
            case Holder.KEY_HOLDER:
                return "one key holder beside banks and server opens the sums, and could open each update"
            case Holder.NOBODY:
                return (
                    f"nobody holds a key, any {self._quorum.quorum} of {self.clients} banks open a sum together, and the server learns it"
                )

    def content(self) -> dict[str, object]:
        """As JSON values."""
        return {"mode": self.holder.value, "corrupted": self.corrupted, "dropouts": self.dropouts}
