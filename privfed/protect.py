"""The client's outbound boundary: what leaves it is on the grid and encrypted."""

from dataclasses import dataclass

from privfed.agreement import RoundContext
from privfed.errors import LayoutMismatchError, RoundMismatchError
from privfed.he.additive import CkksVector
from privfed.he.codec import quantise
from privfed.he.escrow import HolderKey, SealedVector, seal_vector
from privfed.he.escrow_secret import encrypt_to_holder
from privfed.he.secret import RoundBinding, RoundKey, SharedKey, encrypt
from privfed.he.threshold import OnePolynomialVector
from privfed.he.threshold_secret import SummandKey
from privfed.keys.chain import KeyChain
from privfed.update import PlainVector, Update


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Protected:
    """An update that may leave, and what stays.

    Args:
        update: Encrypted. Public.
        saturated: Number of coordinates beyond the bound, which were clipped to it. Private: it stays at the client.
    """

    update: Update[CkksVector] | Update[OnePolynomialVector] | Update[SealedVector]
    saturated: int


def round_key(key: SharedKey | KeyChain, context: RoundContext) -> RoundKey:
    """The secret key of one attempt at one round; another attempt, round, session, roster or parameter has another.

    Args:
        key: The clients' shared secret, or the chain that stands where it does.
        context: Agreement, round and attempt.

    Raises:
        KeyErasedError, KeyRefusedError: As `KeyChain.round_key`.
    """
    agreement = context.agreement
    return key.round_key(
        RoundBinding(
            session=agreement.session,
            attempt=context.attempt,
            round=context.round,
            roster_digest=agreement.roster.digest,
            params=agreement.params,
        )
    )


def protect(
    update: Update[PlainVector], context: RoundContext, *, round_key: RoundKey | SummandKey | HolderKey, weight: float = 1
) -> Protected:
    """Clips every coordinate to the public bound, scales and quantises to the grid, encrypts, and seals tags.

    What else happens before the encryption follows from the agreement. Where clients pre-scale, the sender's share of all weights is
    applied. With silo noise the Euclidean norm is clipped on the grid, the sender's weight applied, and its share of the noise added;
    then no coordinate saturates. With private weights the sender's own weight is applied, and sent along.

    Args:
        update: In the clear. Private.
        context: Agreement, round and attempt.
        round_key: Key of this round and attempt, or the client's own secret of it in `ThresholdKey` mode; it encrypts once. In
            `EscrowKey` mode the holder's public key of it, which encrypts as often as you like.
        weight: The sender's own weight, where the agreement says that weights are private. Private.

    Raises:
        LayoutMismatchError: If the update has another layout than the agreement; nothing was encrypted.
        ValueError: If the agreement does not know the sender, or as `SiloNoise.noised` and `PrivateWeights.check`; nothing was encrypted.
        RoundMismatchError: If the secret or the holder's key was made for another round or attempt; nothing was encrypted.
        PrivFedError: As `he.secret.encrypt` and `SummandKey.encrypt`.
    """
    agreement, values, saturated = context.agreement, update.vector.values, 0
    params = agreement.params
    if update.vector.layout != agreement.layout:
        raise LayoutMismatchError("the update does not have the layout of the agreement; nothing was encrypted")
    if isinstance(round_key, SummandKey | HolderKey) and round_key.binding != context.digest:
        raise RoundMismatchError("the key was made for another round or attempt; nothing was encrypted")
    if agreement.silo is not None:
        grid = agreement.silo.noised(update.sender, values, step=params.step)
    elif agreement.private_weights is not None:
        private = agreement.private_weights
        grid, saturated = private.grid(values, private.check(weight, name=update.sender), params)
    else:
        grid, saturated = quantise(values, params, agreement.weighting.share(update.sender))
    if isinstance(round_key, SummandKey):
        own = round_key.encrypt(grid, agreement.sent_layout)
        return Protected(update=Update(sender=update.sender, round=update.round, vector=own), saturated=saturated)
    if isinstance(round_key, HolderKey):
        whole = encrypt_to_holder(grid, agreement.sent_layout, params, round_key.public_key)
        sealed = seal_vector(whole, round_key, sender=update.sender)
        return Protected(update=Update(sender=update.sender, round=update.round, vector=sealed), saturated=saturated)
    vector = encrypt(grid, agreement.sent_layout, params, round_key, sender=update.sender)
    return Protected(update=Update(sender=update.sender, round=update.round, vector=vector), saturated=saturated)
