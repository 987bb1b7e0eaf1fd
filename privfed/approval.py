"""A participant's word before an opening: it checks the announced digest against what it knows itself, then signs it."""

from collections.abc import Callable, Mapping

from privfed.agreement import RoundContext
from privfed.digest import RoundDigest
from privfed.errors import OpeningRefusedError
from privfed.identity import Identity
from privfed.journal import Journal
from privfed.trust import EscrowTrust
from privfed.wire_commit import check_committed
from privfed.wire_digest import encode_approval, read_digest

Witness = Callable[[Mapping[str, bytes]], bytes]
"""Countersigns the heads of ledgers: from the statements of all participants, by owner, to one signature under them, or a refusal."""


Answer = Callable[[tuple[str, ...]], bytes]
"""From the participants of a digest to the client's sum of their shares."""


def check_digest(context: RoundContext, digest: RoundDigest) -> None:
    """Refuses a digest that is not what the agreement makes of its participants.

    Args:
        context: Agreement, round and attempt.
        digest: A decoded digest: its participants are pinned.

    Raises:
        OpeningRefusedError: If the rule or a coefficient is not the agreed one, or the policy does not allow the opening.
    """
    if digest.rule != context.agreement.rule.name:
        raise OpeningRefusedError(f"the digest names another rule than {context.agreement.rule.name}; nothing was approved or opened")
    if digest.by_name != context.agreement.coefficients(digest.participants):
        raise OpeningRefusedError("the digest's coefficients do not follow from the agreed weights; nothing was approved or opened")


def approve(
    context: RoundContext,
    identity: Identity,
    data: bytes,
    *,
    key_id: bytes,
    upload_hash: bytes,
    journal: Journal,
    statement: bytes = b"",
    witness: Witness | None = None,
    answer: Answer | None = None,
    committed: Mapping[str, bytes] | None = None,
) -> bytes:
    """Checks the server's digest and signs it, once per round.

    The approval is in the journal before it is signed. The same digest again gets the same bytes. A participant whose ledger was set
    back is refused by the witness, before anything is promised.

    Args:
        context: Agreement, round and attempt.
        identity: The participant that approves.
        data: The server's digest message.
        key_id: Of the round key that the participant derived.
        upload_hash: `digest.hash_message` of the upload that the participant sent.
        journal: The participant's own.
        statement: Of the head of its ledger, as the participant sent it with its upload.
        witness: Remembers the heads of the other participants' ledgers and countersigns all; needed if the agreement names any.
        answer: Gives what goes with the approval where the trust mode has quorums. As the approval, it is for one digest of a round only.
        committed: Hash of the upload to which each client committed before this one handed out its own, by name, where there is a key
            holder; else None.

    Returns:
        An approval message.

    Raises:
        ValueError: If there is no witness and the agreement names ledgers, or commitments are missing or too many; nothing was approved.
        OpeningRefusedError: If the participant is not in the digest, its upload or its statement is not the one that it sent, a
            participant had not committed to its upload, the coefficients or the rule are not the agreed ones, or the policy does not
            allow the opening.
        AlreadyOpenedError: If the round is promised to another digest, of this attempt or another one.
        LedgerTamperedError: If another participant's ledger was set back; nothing was approved.
        PrivFedError: As `wire_digest.read_digest`, and as `answer`.
    """
    if context.agreement.populations and witness is None:
        raise ValueError("expected a witness of the ledgers that the agreement names; nothing was approved")
    if (committed is not None) is not isinstance(context.agreement.trust, EscrowTrust):
        raise ValueError("expected the commitments of the clients where there is a key holder, and nowhere else; nothing was approved")
    digest, statements = read_digest(data, context, key_id)
    if identity.name not in digest.participants:
        raise OpeningRefusedError(f"{identity.name!r} is not in the digest; nothing was approved")
    if digest.upload_hashes[digest.participants.index(identity.name)] != upload_hash:
        raise OpeningRefusedError(f"the digest names another upload of {identity.name!r} than the one that it sent; nothing was approved")
    if statements.get(identity.name, b"") != statement:
        raise OpeningRefusedError(
            f"the digest carries another statement of the ledger of {identity.name!r} than the one that it sent; nothing was approved"
        )
    if committed is not None:
        check_committed(digest, committed)
    check_digest(context, digest)
    kept = journal.approval(context, digest.digest(context))
    if kept is not None:
        return kept
    countersignature = witness(statements) if witness is not None and statements else b""
    answered = b"" if answer is None else answer(digest.participants)
    journal.approve(context, digest.digest(context))
    approval = encode_approval(context, identity, digest, countersignature, answer=answered)
    journal.keep_approval(context, approval)
    return approval
