"""The client's outbound boundary: what leaves it is on the grid and encrypted."""

from dataclasses import dataclass
from fractions import Fraction

from privfed.agreement import RoundContext
from privfed.dp.silo import SiloNoise
from privfed.he.additive import CkksVector
from privfed.he.codec import quantise
from privfed.he.params import CkksParams
from privfed.he.secret import RoundBinding, RoundKey, SharedKey, encrypt
from privfed.update import PlainVector, Update


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Protected:
    """An update that may leave, and what stays.

    Args:
        update: Encrypted. Public.
        saturated: Number of coordinates beyond the bound, which were clipped to it. Private: it stays at the client.
    """

    update: Update[CkksVector]
    saturated: int


def round_key(key: SharedKey, context: RoundContext) -> RoundKey:
    """The secret key of one attempt at one round; another attempt, round, session, roster or parameter has another.

    Args:
        key: The clients' shared secret.
        context: Agreement, round and attempt.
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
    update: Update[PlainVector], *, params: CkksParams, round_key: RoundKey, share: Fraction | None = None, silo: SiloNoise | None = None
) -> Protected:
    """Clips every coordinate to the public bound, scales and quantises to the grid, encrypts, and seals tags.

    With silo noise it clips the Euclidean norm on the grid, applies the sender's weight, and adds its share of the noise, before it
    encrypts; then no coordinate saturates.

    Args:
        update: In the clear. Private.
        params: Encryption parameters of the session.
        round_key: Key of this round and attempt; it encrypts once.
        share: The sender's `Weighting.share`: its share of all weights if the clients pre-scale, else None. Public.
        silo: The session's noise for whole silos, if it agreed on any. Public.

    Raises:
        ValueError: If the share is missing, out of its range, or not for these parameters, or as `SiloNoise.noised`; nothing was
            encrypted.
        PrivFedError: As `he.secret.encrypt`.
    """
    if silo is None:
        grid, saturated = quantise(update.vector.values, params, share)
    else:
        grid, saturated = silo.noised(update.sender, update.vector.values, step=params.step), 0
    vector = encrypt(grid, update.vector.layout, params, round_key, sender=update.sender)
    return Protected(update=Update(sender=update.sender, round=update.round, vector=vector), saturated=saturated)
