"""The folder of a run on this machine: who the parties are, what they agreed on, and what has happened so far."""

import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from privfed.agreement import SESSION_BYTES, Agreement
from privfed.consortium import Consortium, is_escrow
from privfed.engines.run_log import RunLog, damaged
from privfed.errors import AgreementMismatchError, DamagedFileError
from privfed.files import FolderLock, is_bookkeeping, make_folder, sweep
from privfed.he.threshold_key import ThresholdKey
from privfed.identity import Identity, Roster
from privfed.keys.party import ENCRYPTION, Party
from privfed.spool import Spool
from privfed.trust import EscrowTrust, ThresholdTrust
from privfed.update import PlainVector
from privfed.written_agreement import decode_agreement, encode_agreement

if TYPE_CHECKING:
    from privfed.he.escrow_secret import EscrowKey
    from privfed.he.secret import SharedKey

SERVER_NAME = "server"
HOLDER_NAME = "key_holder"
_TERMS = "terms.json"
_ONE_OF = {"params": "set of parameters", "weights": "set of weights", "populations": "set of populations"}
_LOG = "rounds.jsonl"
_IDENTITY = "identity.pem"


class Site:
    """Makes the folder of a run, or finds it as an interrupted run left it.

    The terms are written last: a folder without them holds nothing that was ever used. One object at a time holds the folder, until
    `close`, or until the object or the process ends. Identities that are there are kept, never replaced.

    Args:
        root: Folder of this run and no other.
        consortium: Who trains together, and how.
        keys: The clients' shared key, how many of them open together, or the key holder's key.
        initial: Weights from which the run starts.

    Raises:
        AgreementMismatchError: If the folder belongs to a run with other terms or another key; nothing was changed.
        FolderInUseError: If another object holds the folder; nothing was changed.
        DamagedFileError: If files of a run are missing or damaged, or there are others in the folder; nothing was changed.
        ValueError: If a client has the server's name.
    """

    def __init__(self, root: Path, *, consortium: Consortium, keys: "SharedKey | ThresholdKey | EscrowKey", initial: PlainVector) -> None:
        self.root = root
        names = [client.name for client in consortium.clients]
        for taken, whose in ((SERVER_NAME, "server's"), (HOLDER_NAME, "key holder's")):
            if taken in names:
                raise ValueError(f"expected no client with the name {taken!r}, which is the {whose}; nothing was changed")
        make_folder(root)
        if not (root / _TERMS).exists():
            _check_unused(root)
        self._lock = FolderLock(root)
        try:
            self._meet(names, consortium=consortium, keys=keys, initial=initial)
        except BaseException:
            self.close()
            raise

    def _meet(
        self, names: Sequence[str], *, consortium: Consortium, keys: "SharedKey | ThresholdKey | EscrowKey", initial: PlainVector
    ) -> None:
        files = Spool(self.root)
        stored, key = self._terms() if files.has(_TERMS) else (None, "")
        if stored is not None and (missing := [name for name in names if not self.client(name).is_dir()]):
            raise AgreementMismatchError(f"the folder holds a run without {missing}; nothing was changed; choose a new folder")
        for path in (self.spool, *(self.client(name) for name in names)):
            make_folder(path)
        for folder in (self.root, self.server_identity_path.parent, *self.spool.iterdir()):
            sweep(folder)
        self.server = _identity(self.server_identity_path, SERVER_NAME, new=stored is None)
        self.clients = {name: _identity(self.client(name) / _IDENTITY, name, new=stored is None) for name in names}
        self.parties: dict[str, Party] = {}
        self.holder: Identity | None = None
        session = secrets.token_bytes(SESSION_BYTES) if stored is None else stored.session
        fingerprint, trust = "" if isinstance(keys, ThresholdKey) else keys.fingerprint, None
        encryption_keys: dict[str, bytes] = {}
        if isinstance(keys, ThresholdKey) or is_escrow(keys):
            self.parties = {name: _party(identity, self.client(name), new=stored is None) for name, identity in self.clients.items()}
            encryption_keys = {name: party.public.encryption_key for name, party in self.parties.items()}
        if isinstance(keys, ThresholdKey):
            trust = ThresholdTrust(key=keys, encryption_keys=encryption_keys)
        elif is_escrow(keys):
            make_folder(self.holder_folder)
            self.holder = _identity(self.holder_folder / _IDENTITY, HOLDER_NAME, new=stored is None)
            trust = EscrowTrust(holder=self.holder.public, encryption_keys=encryption_keys)
        self.agreement = Agreement(
            session=session,
            roster=Roster(server=self.server.public, clients=tuple(identity.public for identity in self.clients.values())),
            params=consortium.params,
            layout=initial.layout,
            start=initial.digest,
            weights={client.name: client.weight if consortium.private_weights is None else 1 for client in consortium.clients},
            rule=consortium.session_rule,
            policy=consortium.policy,
            populations={client.name: client.ledger.population for client in consortium.clients if client.ledger is not None},
            silo=consortium.silo,
            private_weights=consortium.private_weights,
            validator=consortium.validator,
            noise_energy=consortium.noise_energy(initial.layout.size),
            server_optimizer=consortium.server_optimizer,
            trust=trust,
        )
        if stored is None:
            files.put(_TERMS, json.dumps({"agreement": encode_agreement(self.agreement), "key": fingerprint}).encode())
        elif differing := [
            *(part for part, digest in stored.parts.items() if digest != self.agreement.parts[part]),
            *(["shared key"] if key != fingerprint else []),
        ]:
            others = " and another ".join(_ONE_OF.get(part, part) for part in differing)
            raise AgreementMismatchError(
                f"the folder {self.root.name!r} holds a run with another {others}; nothing was changed; hand over what that run was "
                "started with (start: the model's initial weights; shared key: the SharedKey or EscrowKey that was saved), or choose a new "
                "folder"
            )

    def close(self) -> None:
        """Lets go of the folder, so that another object may go on there."""
        self._lock.release()

    def _terms(self) -> tuple[Agreement, str]:
        try:
            terms = json.loads((self.root / _TERMS).read_bytes())
            return decode_agreement(terms["agreement"]), terms["key"]
        except (ValueError, TypeError, LookupError) as error:
            raise damaged(self.root / _TERMS) from error

    def client(self, name: str) -> Path:
        """A client's own folder."""
        return self.root / "clients" / name

    @property
    def server_identity_path(self) -> Path:
        """File with the server's signing key."""
        return self.root / "server" / _IDENTITY

    @property
    def holder_folder(self) -> Path:
        """The key holder's own folder."""
        return self.root / HOLDER_NAME

    @property
    def spool(self) -> Path:
        """Folder in which the server keeps messages."""
        return self.root / "server" / "spool"

    def log(self, entry: Mapping[str, object]) -> None:
        """Appends an entry to the run's log, synchronised before this returns."""
        RunLog(self.root / _LOG).append(entry)

    def entries(self) -> list[dict[str, Any]]:
        """What was logged so far; see `RunLog.entries`."""
        return RunLog(self.root / _LOG).entries(used=any(stored.is_file() for stored in self.spool.rglob("*")))


def _check_unused(root: Path) -> None:
    """A folder without terms may hold identities, and what a crash left before anything was used; and nothing else."""
    for path in root.rglob("*"):
        if not path.is_dir() and path.name not in {_IDENTITY, ENCRYPTION} and not is_bookkeeping(path):
            raise DamagedFileError(
                f"the folder {root.name!r} holds {path.name} and no {_TERMS}, so it cannot be told what run it belongs to; nothing was "
                f"changed; put {_TERMS} back, or choose a new folder"
            )


def _identity(path: Path, name: str, *, new: bool) -> Identity:
    if new and not path.exists():
        Identity.generate(name).save(path)
    if not path.exists():
        raise AgreementMismatchError(f"the folder holds a run without {name!r}; nothing was changed; choose a new folder")
    try:
        return Identity.load(path, name=name)
    except ValueError as error:
        raise damaged(path) from error


def _party(identity: Identity, folder: Path, *, new: bool) -> Party:
    try:
        return Party.of(identity, folder, new=new)
    except ValueError as error:
        raise damaged(folder / ENCRYPTION) from error
