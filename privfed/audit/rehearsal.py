"""Keys and parameters for the rounds that an audit holds itself: fresh ones, in the trust mode of the consortium that is audited."""

from privfed.consortium import Consortium, Plaintext, is_escrow
from privfed.he.escrow_secret import EscrowKey
from privfed.he.params import CkksParams
from privfed.he.secret import SharedKey
from privfed.he.threshold_key import ThresholdKey


def rehearsal_keys(
    consortium: Consortium, *, encrypted: bool, clients: int
) -> tuple[SharedKey | ThresholdKey | EscrowKey | Plaintext, CkksParams]:
    """Fresh keys of the consortium's own mode, and parameters for so many clients; a grid as fine where there is no encryption.

    Args:
        consortium: Whose mode and parameters to take. Its keys are not touched.
        encrypted: Whether the round is encrypted.
        clients: Number of clients in the round.
    """
    if isinstance(consortium.keys, ThresholdKey):
        if not encrypted:
            return Plaintext(), CkksParams.standard(bound=consortium.params.bound)
        params = CkksParams.threshold(clients=clients, bound=consortium.params.bound)
        return ThresholdKey(clients=clients, corrupted=0, dropouts=0), params
    if not encrypted:
        return Plaintext(), consortium.params
    return EscrowKey.generate() if is_escrow(consortium.keys) else SharedKey.generate(), consortium.params
