"""A client's part in `ThresholdKey` beside its upload: it deals shares of its secret, takes those of others, and answers once."""

from collections.abc import Collection, Mapping

from privfed.agreement import RoundContext
from privfed.errors import InvalidMessageError, PrivFedError, ShareRefusedError
from privfed.he.threshold import unpack_polynomial
from privfed.he.threshold_secret import SummandKey, sum_shares
from privfed.identity import Identity
from privfed.keys.party import Party, seal
from privfed.keys.roster import Member
from privfed.message import write_text
from privfed.trust import ThresholdTrust
from privfed.wire_shares import decode_relay, decode_share, encode_dealt_setup, encode_share

_MAGIC = b"privfed share v1\n"


def deal(secret: SummandKey, context: RoundContext, identity: Identity, trust: ThresholdTrust) -> bytes:
    """Shares a secret among all clients of the roster, each share encrypted to one, and signed.

    Args:
        secret: The client's secret of this attempt.
        context: Agreement, round and attempt.
        identity: The client.
        trust: The session's quorum, and the keys to encrypt to.

    Returns:
        A setup message.
    """
    names = context.agreement.roster.names
    shares = secret.shares(clients=trust.key.clients, quorum=trust.key.quorum)
    messages: dict[str, bytes] = {}
    for public, share in zip(context.agreement.roster.clients, shares, strict=True):
        recipient = Member(identity=public, encryption_key=trust.encryption_keys[public.name])
        sealed = seal(share, recipient, info=_info(context, sender=identity.name, recipient=public.name))
        messages[public.name] = encode_share(context, identity, recipient=public.name, sealed=sealed)
    return encode_dealt_setup(context, identity, {name: messages[name] for name in names})


def check_shares(data: bytes, context: RoundContext, party: Party) -> tuple[str, ...]:
    """Names of the clients whose shares for this one came with the server's message, each verified and decrypted.

    Raises:
        ShareRefusedError: If one is not as it should be; it names the client from which it came.
        PrivFedError: As `wire_shares.decode_relay`.
    """
    relayed = decode_relay(data, context)
    for sender in relayed:
        _share(relayed, sender, context, party)
    return tuple(relayed)


def answer(data: bytes, context: RoundContext, party: Party, *, participants: Collection[str]) -> bytes:
    """The sum of this client's shares of the secrets of the participants: its part in opening their sum, and no other one.

    Args:
        data: The server's message with the shares, as it was checked before the upload.
        context: Agreement, round and attempt.
        party: The client.
        participants: The clients in the sum.

    Raises:
        ShareRefusedError: If a share of a participant is missing, or is not as it should be.
        PrivFedError: As `wire_shares.decode_relay`.
    """
    relayed = decode_relay(data, context)
    return sum_shares([_share(relayed, sender, context, party) for sender in participants], context.agreement.params)


def _share(relayed: Mapping[str, bytes], sender: str, context: RoundContext, party: Party) -> bytes:
    if sender not in relayed:
        raise ShareRefusedError(f"no share of {sender!r} came to {party.name!r}; nothing was sent; leave it out in a new attempt")
    try:
        signed_by, recipient, sealed = decode_share(relayed[sender], context)
        if (signed_by, recipient) != (sender, party.name):
            raise InvalidMessageError
    except PrivFedError:
        raise ShareRefusedError(
            f"the share that came as that of {sender!r} is not signed by it for {party.name!r} and this attempt; nothing was sent; it "
            "or the server changed it: begin a new attempt, and leave it out if this happens again"
        ) from None
    try:
        share = party.unseal(sealed, info=_info(context, sender=sender, recipient=recipient))
        unpack_polynomial(share, context.agreement.params)
    except InvalidMessageError:
        raise ShareRefusedError(
            f"the share of {sender!r} for {party.name!r} is signed by it and cannot be used; nothing was sent; leave it out, in a new "
            "attempt"
        ) from None
    return share


def _info(context: RoundContext, *, sender: str, recipient: str) -> bytes:
    return _MAGIC + context.digest + write_text(sender) + write_text(recipient)
