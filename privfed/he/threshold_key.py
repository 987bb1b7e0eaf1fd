"""`ThresholdKey`: who must come together to open a sum, where nobody holds a key."""

from dataclasses import dataclass

from privfed.errors import UnsupportedInThisModeError
from privfed.he.params import CkksParams
from privfed.he.threshold import MOST_MODULUS_BITS

LEAST_CLIENTS, LEAST_HONEST = 3, 2
_MOST_CLIENTS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdKey:
    """In place of keys: every round has new ones, and any `quorum` clients open its sum. Nobody can alone. Public.

    Two sums of one round can never both be opened, so the sum of all but one is not to be had besides the sum of all: as many clients
    answer for a sum as there may be after the dropouts, and any two such quorums share an honest client, which answers once. The server
    learns every sum that is opened.

    The quorum t is solved from t > (K + c) / 2 and t <= K - f. Two quorums of t share at least 2 t - K clients, and the first says that
    these are more than the corrupted ones; the second that the quorum is there when f are silent. The largest t that is left is taken,
    K - f: a smaller one would let no more clients fall silent, and sums of fewer be opened. Three banks of which one may be corrupted so
    have t = 3, and nobody may be missing. Besides, in every sum there are three clients, as everywhere, and two of them honest: whoever
    takes the corrupted ones' own updates out of a sum has no single update left. Where it is two, it has the sum of these two.

    Args:
        clients: Number of clients in the roster, K.
        corrupted: Number of clients that may put together what they hold with the server, c.
        dropouts: Number of clients that may fall silent in a round, before or after their upload, f.

    Raises:
        ValueError: If a number is out of its range, or no quorum solves it: it says why, and which other number would.

    Example:
        >>> ThresholdKey(clients=10, corrupted=2, dropouts=3).quorum
        7
        >>> ThresholdKey(clients=3, corrupted=1, dropouts=0).quorum
        3
    """

    clients: int
    corrupted: int
    dropouts: int

    def __post_init__(self) -> None:
        for name in ("clients", "corrupted", "dropouts"):
            value: object = getattr(self, name)
            if type(value) is not int or not 0 <= value <= _MOST_CLIENTS:
                raise ValueError(f"expected {name} to be a whole number from 0 to {_MOST_CLIENTS}, got {value!r}")
        if reason := self._unsolvable():
            raise ValueError(
                f"expected a quorum of more than half of clients and corrupted together, of {LEAST_CLIENTS} or more with {LEAST_HONEST} "
                f"honest ones, got {self.clients} clients, {self.corrupted} corrupted and {self.dropouts} dropouts, which leave "
                f"{max(0, self.quorum)} to answer: {reason}; nearest that can be solved: {self._nearest()}"
            )

    def _unsolvable(self) -> str:
        """Why there is no quorum; empty if there is one."""
        if self.quorum < LEAST_CLIENTS:
            return f"a sum of fewer than {LEAST_CLIENTS} clients says too much about each"
        if self.quorum - self.corrupted < LEAST_HONEST:
            return "without what the corrupted ones know, a sum would be the update of a single client, or nothing"
        if not 2 * self.quorum > self.clients + self.corrupted:
            return (
                f"two quorums of {self.quorum} could meet in corrupted clients alone, which answer twice, and a lying server would have "
                "two sums opened"
            )
        return ""

    def _nearest(self) -> str:
        """What each of the three numbers would have to be beside the other two, where there is such a number."""
        clients, corrupted, dropouts = self.clients, self.corrupted, self.dropouts
        fewer = min((clients - corrupted - 1) // 2, clients - corrupted - LEAST_HONEST, clients - LEAST_CLIENTS)
        found = {
            "dropouts": (fewer, fewer),
            "corrupted": (min(clients - 2 * dropouts - 1, clients - dropouts - LEAST_HONEST), dropouts),
            "clients": (max(corrupted + 2 * dropouts + 1, corrupted + dropouts + LEAST_HONEST, dropouts + LEAST_CLIENTS), dropouts),
        }
        if clients - dropouts < LEAST_CLIENTS:
            del found["corrupted"]
        return (
            ", or ".join(
                f"{name}={number} (a quorum of {(number if name == 'clients' else clients) - silent})"
                for name, (number, silent) in found.items()
                if 0 <= number <= _MOST_CLIENTS
            )
            or f"none with up to {_MOST_CLIENTS} clients"
        )

    @property
    def quorum(self) -> int:
        """Number of clients that must answer for a sum, t: all but the dropouts."""
        return self.clients - self.dropouts

    def check_params(self, params: CkksParams) -> None:
        """Refuses encryption parameters that are not for one polynomial and coefficients of 1.

        Raises:
            UnsupportedInThisModeError: If they are not.
        """
        if not params.prescaled or params.slots or params.seeded_sums or params.modulus.bit_length() > MOST_MODULUS_BITS:
            raise UnsupportedInThisModeError(
                "ThresholdKey needs clients that pre-scale, because a sum of secrets with weights gives single ones away; nothing was "
                f"agreed; take CkksParams.threshold(clients={self.clients})"
            )
        if params.weight_sum < self.clients:
            raise UnsupportedInThisModeError(
                f"the parameters hold a sum of {params.weight_sum} clients and there are {self.clients}; nothing was agreed; take "
                f"CkksParams.threshold(clients={self.clients})"
            )
