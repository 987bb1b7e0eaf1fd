"""A finished run in its folder, as `privfed simulate --out`, `privfed demo` and `save_run` leave it: read, audited, and reported on."""

import hashlib
import io
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from zipfile import BadZipFile

import numpy as np
from torch import nn

from privfed import __version__
from privfed.attacks.facts import TableSchema
from privfed.audit.canaries import Canaries
from privfed.audit.findings import Audit
from privfed.audit.run import run_audit
from privfed.audit.suite import SUITE, AuditAttack
from privfed.audit_file import read_audit, write_audit
from privfed.client import Client
from privfed.consortium import Consortium
from privfed.dp.charges import Charges
from privfed.dp.clipping import AdaptiveClipping
from privfed.dp.ledger import Ledger
from privfed.dp.mechanism import Composition, Relation
from privfed.dp.statement import PrivacyStatement
from privfed.errors import LedgerError, UnsupportedDataError, UnsupportedInThisModeError
from privfed.history import History, RoundSummary
from privfed.run_setup import HISTORY, INITIAL, MODEL, WEIGHTS, Setup, history_content, run_files, write_run
from privfed.strict_json import canonical, checksum, parse
from privfed.training.mechanism import DpSgd, NonPrivate, TrainingMechanism
from privfed.training.model import layout_of
from privfed.update import PlainVector

_ROUNDING = 1e-6  # how far another machine may be off
_FILES = (HISTORY, MODEL, INITIAL)
_AUDIT = "audit.json"
_STAND_INS = 100
_PUT_BACK = (
    "put the run's own file back, or make a folder with privfed simulate --out; what another version of privfed wrote, that version reads"
)
# What a damaged file, or one of something else, makes of parsing; RuntimeError also where JSON is nested too deeply.
_NOT_WRITTEN_SO = (
    *(LookupError, TypeError, ValueError, AttributeError, StopIteration, OverflowError, RuntimeError),
    *(EOFError, BadZipFile, zlib.error),
)
_MECHANISMS = {mechanism.__name__: mechanism for mechanism in (DpSgd, NonPrivate)}


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """A run that `privfed simulate --out`, `privfed demo` or `save_run` wrote.

    Args:
        folder: Where it is, with history.json, model.npz, initial.npz and a ledger per bank.
        setup: How it was set up.
        history: What happened.
        command: How it was started; None if unknown.
        demonstration: Whether `privfed demo` wrote it, so that all of it is made up.
    """

    folder: Path
    setup: Setup
    history: History
    command: str | None
    demonstration: bool

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Reads a folder.

        What follows from other fields of history.json is computed anew, and must be what is written there. The checksum in it notices
        other edits, unless it was computed anew: it is no signature. What the ledgers know is compared with them before it is used.

        Raises:
            OSError: If a file may not be read.
            UnsupportedDataError: If the folder holds something else than this version writes, history.json was edited, or a file with
                weights is missing, damaged or of another run.
        """
        return cls._of(folder, {name: _own_file(folder / name) for name in _FILES})

    @classmethod
    def _of(cls, folder: Path, files: Mapping[str, bytes]) -> Self:
        try:
            fields: dict[str, Any] = parse(files[HISTORY].decode())
            seal = fields.pop("checksum")
            whole = seal == checksum(fields)
            for field, name in WEIGHTS.items():
                if whole and fields[field] != hashlib.sha256(files[name]).hexdigest():
                    raise UnsupportedDataError(f"{name} in {folder} is damaged or of another run; nothing was done; {_PUT_BACK}")
            setup = Setup.from_json(fields["setup"])
            command: str | None = None if fields["command"] is None else str(fields["command"])
            training = {str(bank["name"]): _mechanism(bank) for bank in fields["banks"]}
            model = setup.module()
            history = History(
                mode=setup.custody.holder.value,
                rule=setup.rule.name,
                policy=setup.policy,
                params=setup.params,
                training=training,
                delta={name: account.budget.delta for name, account in setup.accounts.items()},
                budget={name: account.budget.epsilon for name, account in setup.accounts.items()},
                # No run that is saved seeds its noise.
                private=all(isinstance(how, DpSgd) for how in training.values()),
                initial=_unpacked(model, files[INITIAL]),
                model=_unpacked(model, files[MODEL]),
                rounds=tuple(RoundSummary.from_json(summary) for summary in fields["rounds"]),
            )
            differing = _differences(fields, history, setup) or ([] if whole else ["checksum"])
        except _NOT_WRITTEN_SO as error:
            raise UnsupportedDataError(
                f"history.json in {folder} does not hold what this version of privfed writes; nothing was done; {_PUT_BACK}"
            ) from error
        if differing:
            raise UnsupportedDataError(
                f"history.json in {folder} was edited, or is of another version: the {', '.join(differing)} in it is not what follows from "
                f"the rest; nothing was done; {_PUT_BACK}"
            )
        return cls(folder=folder, setup=setup, history=history, command=command, demonstration=fields.get("demonstration") is True)

    def audit(
        self,
        *,
        repeats: int,
        attacks: Sequence[AuditAttack[Any]] = SUITE,
        seconds: float = math.inf,
        progress: Callable[[int], None] | None = None,
    ) -> Audit:
        """Attacks canary rounds under the protection of this run; see `run_audit`. The banks' data and ledgers are not touched.

        Args:
            repeats: Number of independent batches of canaries, at least 2.
            attacks: What to try.
            seconds: Once so many have passed, no further batch is begun, beyond the second.
            progress: Is called after each repeat with the number of repeats done.

        Raises:
            PrivFedError: If a ledger cannot be opened.
        """
        schema = self.setup.schema
        # `run_audit` looks at how the clients train; their data are replaced by canaries, so made-up records stand in for them.
        made_up = Canaries.draw(schema, count=_STAND_INS, rng=np.random.default_rng(0)).samples(self.setup.columns)
        with ExitStack() as stack:
            clients = [
                Client(
                    name,
                    made_up,
                    training=training,
                    ledger=stack.enter_context(self._ledger(name)),
                    weight=self.setup.accounts[name].weight,
                )
                for name, training in self.history.training.items()
            ]
            return run_audit(
                self.setup.consortium(clients),
                self.setup.module_with(self.history.initial),
                schema=schema,
                repeats=repeats,
                attacks=attacks,
                seconds=seconds,
                progress=progress,
            )

    @property
    def digest(self) -> str:
        """SHA-256 over what the run wrote and the version of privfed, hexadecimal: what an audit of it is bound to."""
        state = hashlib.sha256(f"privfed run v1 {__version__} ".encode())
        for name in _FILES:
            state.update(hashlib.sha256((self.folder / name).read_bytes()).digest())
        return state.hexdigest()

    def keep_audit(self, audit: Audit) -> None:
        """Writes an audit of this run into its folder, in place of an earlier one."""
        write_audit(audit, self.folder / _AUDIT, run=self.digest)

    def kept_audit(self) -> Audit | None:
        """The audit that was kept; None if there is none, or it is about another run, or of another version.

        Raises:
            UnsupportedDataError: If the file holds something else.
        """
        return read_audit(self.folder / _AUDIT, run=self.digest)

    def statements(self) -> tuple[PrivacyStatement, ...]:
        """The privacy statement of each bank, from its ledger.

        Raises:
            PrivFedError: If a ledger cannot be opened.
        """
        statements: list[PrivacyStatement] = []
        for name, training in self.history.training.items():
            with self._ledger(name) as ledger:
                norm = training.max_grad_norm if isinstance(training, DpSgd) else None
                statements.append(PrivacyStatement.of_ledger(ledger, max_grad_norm=norm))
        return tuple(statements)

    def _ledger(self, name: str) -> Ledger:
        """The ledger of a bank, which must be the one that this run charged, for what the history says."""
        path = self.folder / f"{name}.ledger"
        if not path.exists():
            raise LedgerError(f"{path.name} is missing in {self.folder}; nothing was done; {_PUT_BACK}")
        ledger = Ledger.read(path)
        if differing := _unlike(self.history, self.setup, name, ledger):
            ledger.close()
            raise LedgerError(
                f"{name}.ledger in {self.folder} is not the ledger that this run charged, or history.json was edited: its "
                f"{', '.join(differing)} is another than history.json says; nothing was done; put the run's own files back"
            )
        return ledger


def save_run(history: History, folder: Path | str, *, consortium: Consortium, model: nn.Module, schema: TableSchema) -> SavedRun:
    """Writes a run of `simulate` as `privfed simulate --out` would, for `privfed audit`, `privfed report` and `privfed history show`.

    Into the folder go history.json, model.npz and initial.npz, of mode 0600. The ledgers are not copied, as a copy could be charged a
    second time: they have to be in the folder already, each as NAME.ledger, as `Ledger.open(folder / f"{name}.ledger", ...)` makes them.
    Close them before another program reads the folder: an open ledger is locked.

    What is written is what all parties know, and nothing of a record or a key: the setup, the rounds, what each client has spent, and the
    model. What `history.rounds` says of quality was computed from the records that `simulate` was given for it, and no epsilon covers it:
    run `simulate` without `evaluation` if these are private. The model is as private as what it was trained with, `DpSgd` or `NonPrivate`.

    Args:
        history: What `simulate` returned.
        folder: Where the ledgers are.
        consortium: Whose run it was.
        model: The network that was trained, made by `mlp`. The weights are taken from the history.
        schema: The columns of the model's input, from public knowledge.

    Returns:
        The run, as `load_run` gives it.

    Raises:
        FileExistsError: If a run is in the folder already. Nothing is overwritten.
        LedgerError: If a client has no ledger, it is not in the folder, its terms are not the usual ones (a fixed schedule, neighbours
            that differ by one record, no silo budget), or it was charged after the run.
        UnsupportedInThisModeError: If a round was not held, or there is something about the run that the files cannot say: no encryption,
            rules but FedAvg and MultiKrum, corrections but FedProx, silo noise, private weights, a validator, a server optimiser.
        UnsupportedModelError: If the model was not made by `mlp`.
        ValueError: If the history is of another consortium or model, or the schema does not fit.
    """
    folder = Path(folder)
    if history.failed:
        raise UnsupportedInThisModeError(f"a run of which {len(history.failed)} rounds were not held cannot be saved; nothing was written")
    setup = Setup.of(consortium, model, schema=schema, history=history)
    mine = (
        (history.mode, consortium.mode),
        (history.rule, setup.rule.name),
        (history.policy, setup.policy),
        (history.params, setup.params),
        (dict(history.training), {client.name: client.training for client in consortium.clients}),
        (history.model.layout, layout_of(model)),
    )
    if any(of_run != of_consortium for of_run, of_consortium in mine):
        raise ValueError("expected the history of a run of this consortium and this model, got another one; nothing was written")
    content = history_content(history) | {"setup": setup.to_json(), "command": None, "demonstration": False}
    files = run_files(content, history)
    # Read before it is written, so that what is left is what can be used.
    run = SavedRun._of(folder, files)
    for client in consortium.clients:
        path = folder / f"{client.name}.ledger"
        if client.ledger is None or client.ledger.path != path.resolve():
            raise LedgerError(
                f"the ledger of {client.name!r} is not {path}; nothing was written; give the folder in which the ledgers of the run are, "
                "each as NAME.ledger"
            )
        if differing := _unlike(run.history, setup, client.name, client.ledger):
            raise LedgerError(
                f"{path.name} is not what this run left: its {', '.join(differing)} is another than the run's; nothing was written; save "
                "a run before the next one on the same ledgers"
            )
    write_run(folder, files)
    return run


def load_run(folder: Path | str) -> SavedRun:
    """Reads what `save_run`, `privfed simulate --out` or `privfed demo` wrote; see `SavedRun.load`.

    Returns:
        The run: `history`, `audit(repeats=...)`, which attacks it as `privfed audit` does, and `statements()`.

    Raises:
        OSError: If a file may not be read.
        UnsupportedDataError: If the folder holds something else than this version writes, or what is in it was edited or damaged.
    """
    return SavedRun.load(Path(folder))


def _unlike(history: History, setup: Setup, name: str, ledger: Ledger) -> list[str]:
    """In what a ledger is not the one that the run charged."""
    terms, events, earlier = ledger.terms, ledger.events(), setup.accounts[name].earlier_charges
    taken_part = [name in summary.record.participants for summary in history.rounds]
    standard = (Composition.FIXED_SCHEDULE, Relation.ADD_OR_REMOVE_ONE, None)
    same = {
        "population": terms.population == name,
        "terms": (terms.composition, terms.relation, terms.silo_budget) == standard,
        "budget": terms.budget.epsilon == history.budget[name],
        "delta": terms.budget.delta == history.delta[name],
        "number of charges": len(events) == earlier + sum(taken_part),
        "training": set(events[earlier:]) <= {history.training[name].event()},
    }
    if all(same.values()):
        same["epsilon"] = all(
            _equal(summary.epsilon[name], Charges(events[: earlier + sum(taken_part[: number + 1])]).epsilon(delta=terms.budget.delta))
            for number, summary in enumerate(history.rounds)
        )
    return [what for what, holds in same.items() if not holds]


def _own_file(path: Path) -> bytes:
    """What the run wrote into one of its files."""
    if not path.is_file():
        raise UnsupportedDataError(f"{path.name} is missing in {path.parent}; nothing was done; {_PUT_BACK}")
    return path.read_bytes()


def _differences(fields: dict[str, Any], history: History, setup: Setup) -> list[str]:
    """Fields of history.json that are not what follows from its other ones."""
    follows = history_content(history)
    banks: list[dict[str, Any]] = fields["banks"]
    names = [str(bank["name"]) for bank in banks]
    parts = ("mode", "rule", "private", "parameters", "pr_auc", "bytes_up_per_parameter", "bytes_down_per_parameter")
    differing = [name for name in parts if canonical(fields[name]) != canonical(follows[name])]
    # What the history of a simulation says a second time.
    budgets = [account.to_json()["budget"] for account in setup.accounts.values()]
    again = {"features": [list(setup.columns)], "keys": [setup.custody.content()], "budget": budgets}
    differing += [part for part, said in again.items() if any(canonical(fields.get(part, one)) != canonical(one) for one in said)]
    for part in ("bytes_up", "epsilon"):
        if canonical([bank[part] for bank in banks]) != canonical([bank[part] for bank in follows["banks"]]):
            differing.append(f"{part} of the banks")
    if (
        len(set(names)) != len(names)
        or set(names) != set(setup.accounts)
        or any(not {*s.record.selected, *s.record.coefficients, *s.epsilon} <= {*names} for s in history.rounds)
    ):
        differing.append("names of the banks")
    if [summary.record.round for summary in history.rounds] != list(range(len(history.rounds))):
        differing.append("numbers of the rounds")
    return differing


def _equal(said: float, computed: float) -> bool:
    return said == computed or math.isclose(said, computed, rel_tol=_ROUNDING)


def _unpacked(model: nn.Module, packed: bytes) -> PlainVector:
    with np.load(io.BytesIO(packed), allow_pickle=False) as tensors:
        return layout_of(model).flatten(dict(tensors))


def _mechanism(bank: dict[str, Any]) -> TrainingMechanism:
    fields = dict(bank["training"])
    if fields.get("adaptive_clipping") is not None:
        fields["adaptive_clipping"] = AdaptiveClipping(**fields["adaptive_clipping"])
    return _MECHANISMS[bank["mechanism"]](**fields)
