"""The folder of a run in the clear: what the run is, what has happened, and the model with all that moves it."""

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from privfed.agreement import SESSION_BYTES
from privfed.consortium import Consortium
from privfed.data.samples import Samples
from privfed.engines.run_log import RunLog, damaged
from privfed.errors import AgreementMismatchError, DamagedFileError
from privfed.files import FolderLock, is_bookkeeping, make_folder, replace, sweep
from privfed.state import ModelState, ModelStore
from privfed.training.loss import PerSampleLoss
from privfed.update import PlainVector

_TERMS = "terms.json"
_LOG = "rounds.jsonl"


class PlainSite:
    """Makes the folder of a run in the clear, or finds it as an interrupted run left it.

    The state after a round is stored before the round is logged, under its number, and those before the last one are removed after:
    whatever a crash interrupts, the state of the last logged round is there. One object at a time holds the folder, until `close`.

    Args:
        root: Folder of this run and no other. Who reads it sees no update, but the model and the scores, and can tell whether a guess of
            all of a client's records is right.
        consortium: Who trains together, and how.
        initial: Weights from which the run starts.

    Raises:
        AgreementMismatchError: If the folder belongs to a run with other terms, records among them; nothing was changed. A loss that is
            neither a function nor a dataclass is known by the name of its class alone.
        FolderInUseError: If another object holds the folder; nothing was changed.
        DamagedFileError: If files are missing or damaged, or there are others in the folder; nothing was changed.
    """

    def __init__(self, root: Path, *, consortium: Consortium, initial: PlainVector) -> None:
        make_folder(root)
        if not (root / _TERMS).exists():
            _check_unused(root)
        self._lock = FolderLock(root)
        self._root, self._initial, self._log = root, initial, RunLog(root / _LOG)
        try:
            sweep(root)
            self.session = self._meet(_terms_of(consortium, initial))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Lets go of the folder, so that another object may go on there."""
        self._lock.release()

    def _meet(self, terms: Mapping[str, str]) -> bytes:
        path = self._root / _TERMS
        if not path.exists():
            session = secrets.token_bytes(SESSION_BYTES)
            replace(path, json.dumps({"session": session.hex(), "terms": dict(terms)}).encode())
            return session
        try:
            stored = json.loads(path.read_bytes())
            session, known = bytes.fromhex(stored["session"]), dict(stored["terms"])
        except (ValueError, TypeError, LookupError) as error:
            raise damaged(path) from error
        if differing := [part for part in terms if known.get(part) != terms[part]]:
            raise AgreementMismatchError(
                f"the folder {self._root.name!r} holds a run with another {' and another '.join(differing)}; nothing was changed; hand "
                "over what that run was started with, or choose a new folder"
            )
        return session

    def log(self, entry: Mapping[str, object]) -> None:
        """Appends an entry to the run's log, synchronised before this returns."""
        self._log.append(entry)

    def entries(self) -> list[dict[str, object]]:
        """What was logged so far; see `RunLog.entries`."""
        return self._log.entries(used=any(self._root.glob("model-*.npz")))

    def save(self, state: ModelState) -> None:
        """Stores the state after its last round; it is on disk, synchronised, before this returns."""
        self._store(state.rounds[-1]).save(state)
        for number in self._stored():
            if number < state.rounds[-1] and number not in state.rounds[-2:]:
                self._path(number).unlink()

    def load(self, rounds: Sequence[int]) -> ModelState:
        """The state after the given rounds, of which the last one is logged.

        Raises:
            DamagedFileError: If it is not there, damaged, or of other rounds; nothing was changed.
        """
        if not rounds:
            return ModelState(values=self._initial)
        state = self._store(rounds[-1]).load()
        if state is None or state.rounds != tuple(rounds):
            raise damaged(self._path(rounds[-1]))
        return state

    def _stored(self) -> list[int]:
        names = (path.stem.removeprefix("model-") for path in self._root.glob("model-*.npz"))
        return [int(name) for name in names if name.isdecimal()]

    def _path(self, number: int) -> Path:
        return self._root / f"model-{number}.npz"

    def _store(self, number: int) -> ModelStore:
        return ModelStore(self._path(number), layout=self._initial.layout)


def _terms_of(consortium: Consortium, initial: PlainVector) -> dict[str, str]:
    """What decides how a run goes on, part by part. Records are there as digests."""
    return {
        "list of clients": repr([(client.name, client.weight) for client in consortium.clients]),
        "training": repr([client.training for client in consortium.clients]),
        "loss": _name_of(consortium.loss),
        "set of records": hashlib.sha256(b"".join(_digest_of(client.data) for client in consortium.clients)).hexdigest(),
        "rule": consortium.rule_name,
        "policy": repr(consortium.policy),
        "grid": consortium.params.digest.hex(),
        "start": hashlib.sha256(initial.layout.digest + initial.digest).hexdigest(),
        "correction": repr(consortium.correction),
        "way of training": repr(consortium.keys),
        "validator": repr(consortium.validator),
    }


def _name_of(loss: PerSampleLoss) -> str:
    if is_dataclass(loss):
        return repr(loss)
    kind: Any = loss if hasattr(loss, "__qualname__") else type(loss)
    return f"{kind.__module__}.{kind.__qualname__}"


def _digest_of(samples: Samples) -> bytes:
    """SHA-256 over shape, columns and every value, 32 bytes."""
    state = hashlib.sha256(b"privfed records v1")
    state.update(json.dumps([list(samples.features.shape), list(samples.columns), samples.groups is not None]).encode())
    for values, kind in ((samples.features, "<f4"), (samples.labels, "<i8"), (samples.groups, "<i8")):
        if values is not None:
            state.update(values.astype(kind).tobytes())
    return state.digest()


def _check_unused(root: Path) -> None:
    for path in root.iterdir():
        if not is_bookkeeping(path):
            raise DamagedFileError(
                f"the folder {root.name!r} holds {path.name} and no {_TERMS}, so it cannot be told what run it belongs to; nothing was "
                f"changed; put {_TERMS} back, or choose a new folder"
            )
