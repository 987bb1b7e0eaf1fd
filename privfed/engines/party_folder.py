"""The folder of one party on its own disk: the names in it, who it belongs to, and what was agreed.

agreement.json   everywhere the same, public
identity.pem     the party's signing key
encryption.pem   of a bank in `ThresholdKey` and `EscrowKey` mode: its decryption key
shared.key       of a bank in `SharedKey` mode: the shared key, or the key chain; then roster.txt beside it
escrow.key       of the key holder
site.py          of a bank: its own code, see `privfed.engines.site_code`
rule.py          of a bank and the key holder, where the rule looks at inner products: the rule, the same everywhere
state/           of a bank and the key holder: what must not be forgotten
asked.json       of a bank: the round and attempt that it was asked to take part in last
spool/           of the server: the messages of all rounds
rounds.jsonl     a record per round; of the server also what it must know after a restart
events.jsonl     a line per event; metrics.json and metrics.prom: counters
"""

from collections.abc import Iterable
from pathlib import Path

from privfed.agreement import Agreement
from privfed.errors import AgreementMismatchError
from privfed.files import read_pinned
from privfed.identity import Identity, PublicIdentity
from privfed.trust import EscrowTrust
from privfed.written_agreement import decode_agreement

AGREEMENT = "agreement.json"
IDENTITY = "identity.pem"
SHARED_KEY = "shared.key"
ESCROW_KEY = "escrow.key"
ROSTER = "roster.txt"
SITE = "site.py"
RULE = "rule.py"
STATE = "state"
SPOOL = "spool"
ROUNDS = "rounds.jsonl"
ASKED = "asked.json"
EVENTS = "events.jsonl"
METRICS_JSON = "metrics.json"
METRICS_PROM = "metrics.prom"

_MOST_BYTES = 1 << 28


def read_agreement(folder: Path) -> Agreement:
    """What the party agreed to.

    Raises:
        OSError: If the file cannot be read, or others than the owner may write it.
        ValueError: If it holds something else.
    """
    return decode_agreement(read_pinned(folder / AGREEMENT, most=_MOST_BYTES).decode("ascii", errors="replace"))


def own_identity(folder: Path, parties: Iterable[PublicIdentity]) -> Identity:
    """The signing key in the folder, with the name that one of these parties has.

    Raises:
        AgreementMismatchError: If it is none of theirs; nothing was done.
        OSError: If the file cannot be read, or others than the owner may read it.
        ValueError: If it holds something else.
    """
    unnamed = Identity.load(folder / IDENTITY, name="unnamed")
    for party in parties:
        if party.public_key == unnamed.public.public_key:
            return Identity.load(folder / IDENTITY, name=party.name)
    raise AgreementMismatchError(
        f"the key in {folder.name}/{IDENTITY} is of nobody whom the agreement pins in this place; nothing was done; put back the key with "
        "which the agreement was made"
    )


def answering_parties(agreement: Agreement) -> dict[str, PublicIdentity]:
    """Everybody who answers the server, by name: the clients, and the key holder if there is one."""
    holder = (agreement.trust.holder,) if isinstance(agreement.trust, EscrowTrust) else ()
    return {party.name: party for party in (*agreement.roster.clients, *holder)}
