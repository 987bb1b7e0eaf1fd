"""What a client's session is refused for before it begins: something else than was agreed, or files that do not belong together."""

from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from privfed.agreement import Agreement
from privfed.client import Trainer
from privfed.dp.countersign import HeadMemory
from privfed.errors import AgreementMismatchError, DamagedFileError, LedgerError
from privfed.identity import Identity
from privfed.journal import Journal
from privfed.keys.chain import KeyChain
from privfed.keys.party import Party
from privfed.spool import Spool
from privfed.state import ModelState
from privfed.trust import EscrowTrust, ThresholdTrust
from privfed.update import PlainVector

if TYPE_CHECKING:
    from privfed.he.secret import SharedKey

JOURNAL = "journal.sqlite"
HEADS = "heads.sqlite"

_Trust = TypeVar("_Trust", ThresholdTrust, EscrowTrust)


def agreed_trust(kind: type[_Trust], *, party: Party, identity: Identity, agreement: Agreement) -> _Trust:
    """The trust mode of a session, if it is of this kind, and names the keys of this client.

    Args:
        kind: What the client can take part in.
        party: Its keys. Secret.
        identity: Its signing key.
        agreement: What the session agreed on.

    Raises:
        AgreementMismatchError: If it is not, or does not, or the keys belong to another identity. Nothing was done.
    """
    trust = agreement.trust
    if not isinstance(trust, kind) or trust.encryption_keys.get(party.name) != party.public.encryption_key:
        raise AgreementMismatchError(
            f"{party.name!r} has another encryption key or trust mode than the agreement names for it; nothing was done; begin with "
            "what was agreed, or agree anew"
        )
    if party.public.identity != identity.public:
        raise AgreementMismatchError(f"the keys of {party.name!r} belong to another identity; nothing was done")
    return trust


def check_agreed(
    agreement: Agreement, *, identity: Identity, trainer: Trainer, keys: "SharedKey | KeyChain | None", start: PlainVector
) -> None:
    """Refuses a client that is not set up as agreed.

    Raises:
        AgreementMismatchError: With what is another one than the agreement names; nothing was done.
    """
    name = identity.name
    agreed = {
        "client": trainer.name == name,
        "trust mode": (keys is None) is (agreement.trust is not None),
        "shared key": not isinstance(keys, KeyChain) or keys.belongs_to(agreement.session, agreement.roster.digest),
        "identity": identity.public in agreement.roster.clients,
        "start": start.digest == agreement.start,
        "layout of the model": trainer.layout == start.layout == agreement.layout,
        "encryption parameters": trainer.params == agreement.params,
        "weight": agreement.private_weights is not None or agreement.weights.get(name) == trainer.weight,
        "privacy ledger": agreement.populations.get(name) == trainer.population,
        "silo noise": trainer.silo == agreement.silo,
    }
    if differing := [part for part, same in agreed.items() if not same]:
        raise AgreementMismatchError(
            f"{name!r} has another {' and another '.join(differing)} than the agreement names for it; nothing was done; begin with what "
            "was agreed, or agree anew"
        )


def check_complete(directory: Path, *, used: bool) -> None:
    """Refuses a client's folder from which what it must not forget was taken away.

    Args:
        directory: The folder.
        used: Whether there are uploads or a model in it.

    Raises:
        DamagedFileError: If the journal or the heads of the peers' ledgers are missing in a folder that was in use; nothing was done.
    """
    journal, heads = directory / JOURNAL, directory / HEADS
    missing = [path.name for path in (journal, heads) if not path.exists()]
    # A crash while the folder was being made leaves heads without a journal, and nothing in them.
    begun = heads.exists() and not HeadMemory(heads).empty
    if missing and (used or begun or journal.exists()):
        raise DamagedFileError(
            f"{' and '.join(missing)} are missing beside the uploads or the model of {directory.name!r}; nothing was done; a client that "
            "forgot what it promised may be talked into a second opening: put the files back, or join a new session in a new folder"
        )


def check_same_rounds(journal: Journal, state: ModelState, *, session: bytes, name: str) -> None:
    """Refuses a journal and a model that are not of the same time: one of them was lost, or is an older copy.

    Args:
        journal: The client's.
        state: The model as the client holds it.
        session: Of the agreement.
        name: Of the client.

    Raises:
        DamagedFileError: If they are not; nothing was done.
    """
    opened = journal.opened(session)
    finished = {number for number, done in opened.items() if done}
    if not finished <= set(state.rounds) <= opened.keys():
        raise DamagedFileError(
            f"the journal and the model of {name!r} do not hold the same rounds: one of them is an older copy or was lost; "
            "nothing was done; put back both as they were last, or join a new session in a new folder"
        )


def check_charged(trainer: Trainer, outbox: Spool, *, session: bytes) -> None:
    """Refuses a ledger that does not know of an upload in the outbox: it was lost, or is an older copy.

    Args:
        trainer: The client's, with its ledger.
        outbox: The client's stored messages.
        session: Of the agreement.

    Raises:
        LedgerError: If it does not; nothing was done.
    """
    if trainer.population is None:
        return
    for file in outbox.names(f"{session.hex()}-"):
        number, attempt, *more = file.split("-")
        if not more and not trainer.has_charged(session=session, round=int(number), attempt=int(attempt)):
            raise LedgerError(
                f"the ledger of {trainer.name!r} does not hold the charge of round {number}, for which an upload is in its folder: it was "
                "lost, or is an older copy; nothing was done; put it back as it was last. A new one would forget what was spent"
            )
