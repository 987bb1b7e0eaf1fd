"""A digest and its approvals, as they stand in front of what they allow to open.

What a reader knows travels once or not at all: the header of an approval is that of the message around it, and the server's signature
around all covers the digest, too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from privfed.agreement import DIGEST_BYTES, RoundContext
from privfed.digest import COUNT_BYTES, RoundDigest
from privfed.identity import SIGNATURE_BYTES
from privfed.message import MAX_TEXT_BYTES, Kind, Reader, attach, detach, write_text
from privfed.wire_digest import approval_answer, countersignature_bytes, max_digest_payload, read_approval, take_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedHeads:
    """The heads of the participants' privacy ledgers in a round. Opaque here: `dp.countersign` reads and verifies them. Public.

    Args:
        statements: What each participant that keeps a ledger stated of its head, by name, in the digest's order.
        countersignatures: What each participant signed of all these statements, by name; empty if there are none.
    """

    statements: Mapping[str, bytes]
    countersignatures: Mapping[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Approved:
    """A digest, and who approved it: every signature was verified. Whether these are all, each once, is for the opener to decide.

    Args:
        digest: What was announced.
        approved_by: Participants whose signed approval of this digest was verified, in the message's order.
        approvals: Their approval messages, in the same order.
        heads: Of the participants' privacy ledgers.
        answers: The sum of shares of each approver, by name; empty in trust modes that have none.
    """

    digest: RoundDigest
    approved_by: tuple[str, ...]
    approvals: tuple[bytes, ...]
    heads: SignedHeads
    answers: Mapping[str, bytes]


def write_approved(digest_message: bytes, approvals: Sequence[bytes]) -> bytes:
    """A digest and its approvals inside of a message of the server, without what their reader knows: see `message.detach`.

    Of the digest that is also the server's signature, because the server signs what is around it.

    Args:
        digest_message: As `encode_digest` made it.
        approvals: Approval messages of it.
    """
    parts = [detach(digest_message)[1], len(approvals).to_bytes(COUNT_BYTES, "big")]
    for sender, payload, signature in map(detach, approvals):
        parts += [write_text(sender), payload[DIGEST_BYTES:], signature]
    return b"".join(parts)


def read_approved(reader: Reader, context: RoundContext, key_id: bytes) -> Approved:
    """Takes what `write_approved` made off the front of a payload that the server signed. Every approval is verified.

    Raises:
        InvalidMessageError: If it is something else; or an approval is none of this digest, in this context, or not its sender's.
    """
    digest, statements = take_digest(reader, context, key_id)
    hashed, countersigned = digest.digest(context), countersignature_bytes(context, digest)
    tail_bytes = countersigned + context.agreement.answer_bytes
    senders, approvals, countersignatures, answers = list[str](), list[bytes](), dict[str, bytes](), dict[str, bytes]()
    for _ in range(reader.integer(COUNT_BYTES)):
        sender, tail, signature = reader.text(), reader.take(tail_bytes), reader.take(SIGNATURE_BYTES)
        message = attach(context, Kind.APPROVAL, sender=sender, key_id=key_id, payload=hashed + tail, signature=signature)
        _, countersignature = read_approval(message, context, digest)
        senders.append(sender)
        approvals.append(message)
        if countersigned:
            countersignatures[sender] = countersignature
        if context.agreement.answer_bytes:
            answers[sender] = approval_answer(message, context)
    heads = SignedHeads(statements=statements, countersignatures=countersignatures)
    return Approved(digest=digest, approved_by=tuple(senders), approvals=tuple(approvals), heads=heads, answers=answers)


def max_approved_payload(context: RoundContext) -> int:
    """Most bytes that a digest and its approvals take inside of a message."""
    agreement, clients = context.agreement, len(context.agreement.roster.clients)
    approval = 1 + MAX_TEXT_BYTES + SIGNATURE_BYTES + agreement.answer_bytes + SIGNATURE_BYTES
    return max_digest_payload(context) + COUNT_BYTES + clients * approval
