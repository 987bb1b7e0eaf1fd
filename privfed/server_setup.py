"""What the server makes before the uploads: the key that all clients derived, and what it relays to them."""

from collections import defaultdict
from collections.abc import Collection

from privfed.agreement import RoundContext
from privfed.errors import CohortError, InvalidMessageError, ParametersMismatchError
from privfed.identity import Identity
from privfed.message import Kind
from privfed.server_spool import RoundSpool
from privfed.wire_commit import decode_commitments, encode_commitments


def require_enough(context: RoundContext, names: Collection[str], what: str) -> None:
    """Refuses to go on with fewer clients than the agreement demands.

    Args:
        context: Agreement, round and attempt.
        names: Of the clients that there are.
        what: What they are, or what came of them, for the message.

    Raises:
        CohortError: If there are too few; nothing was summed.
    """
    least = context.agreement.least_participants
    if len(names) < least:
        demands = "the policy demands" if least == context.agreement.policy.min_clients else "the quorum is"
        raise CohortError(f"{demands} {least} clients, and there are {len(names)} {what}; nothing was summed")


def agreed_key_id(spool: RoundSpool, cohort: Collection[str]) -> bytes:
    """Key id in the setup messages of these clients, 16 bytes, if all derived the same key, and its public half where there is one.

    Raises:
        CohortError: If the policy demands more clients.
        ParametersMismatchError: If key ids or public keys differ; names the clients outside the largest group. Nothing was started.
    """
    require_enough(spool.context, cohort, "setup messages")
    groups: defaultdict[tuple[bytes, bytes], list[str]] = defaultdict(list)
    for name in cohort:
        groups[spool.setup(name)].append(name)
    keys = max(groups, key=lambda candidate: len(groups[candidate]))
    if len(groups) > 1:
        differing = [name for name in cohort if name not in groups[keys]]
        raise ParametersMismatchError(
            f"{differing} derived another key than {groups[keys]}; nothing was started. Either their shared key is another "
            "one, or their platform is: SEAL's sampling depends on the C++ library: transport the key",
            names=tuple(differing),
        )
    return keys[0]


def closed_commitments(spool: RoundSpool, identity: Identity) -> bytes:
    """The message with the commitments that came, for every client that may upload.

    Raises:
        CohortError: If the policy demands more clients; more commitments may come.
        DamagedFileError: If what was stored is not what came.
    """
    names = spool.received(Kind.COMMIT)
    require_enough(spool.context, names, "commitments")
    with spool.reading():
        messages = {name: spool.message(Kind.COMMIT, name) for name in names}
        closed = encode_commitments(spool.context, identity, messages, key_id=spool.key_id)
        if tuple(decode_commitments(closed, spool.context, spool.key_id)) != names:
            raise InvalidMessageError
    return closed
