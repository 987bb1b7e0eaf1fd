"""A finished simulation in its folder, as `privfed simulate --out` and `privfed demo` leave it: read, audited, and reported on."""

import hashlib
import io
import math
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from zipfile import BadZipFile

import numpy as np

from privfed import __version__
from privfed.aggregation.rules import FedAvg
from privfed.audit.canaries import transaction_schema
from privfed.audit.findings import Audit
from privfed.audit.run import run_audit
from privfed.audit.suite import SUITE, AuditAttack
from privfed.audit_file import read_audit, write_audit
from privfed.client import Client
from privfed.custody import Custody, Holder
from privfed.data.paysim import NOBAL, PRE, FeatureSet, features
from privfed.data.transactions import generate_transactions
from privfed.dp.charges import Charges
from privfed.dp.clipping import AdaptiveClipping
from privfed.dp.ledger import Ledger
from privfed.dp.mechanism import Composition, Relation
from privfed.dp.statement import PrivacyStatement
from privfed.errors import LedgerError, UnsupportedDataError
from privfed.history import History, RoundSummary
from privfed.policy import OpeningPolicy
from privfed.scenario import consortium_of, first_model
from privfed.strict_json import canonical, checksum, parse, real
from privfed.training.mechanism import DpSgd, NonPrivate, TrainingMechanism
from privfed.training.model import layout_of, values_of

_ROUNDING = 1e-6  # how far another machine may be off
_FILES = ("history.json", "model.npz")
_AUDIT = "audit.json"
_PUT_BACK = "put the run's own file back, or make a folder with privfed simulate --out"
# What a damaged file, or one of something else, makes of parsing; RuntimeError also where JSON is nested too deeply.
_NOT_WRITTEN_SO = (
    *(LookupError, TypeError, ValueError, AttributeError, StopIteration, OverflowError, RuntimeError),
    *(EOFError, BadZipFile, zlib.error),
)
_MECHANISMS = {mechanism.__name__: mechanism for mechanism in (DpSgd, NonPrivate)}


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """A simulation that `privfed simulate --out` or `privfed demo` wrote.

    Args:
        folder: Where it is, with history.json, model.npz and a ledger per bank.
        feature_set: What the model looks at.
        history: What happened.
        custody: Who holds the key.
        command: How it was started; None if unknown.
        demonstration: Whether `privfed demo` wrote it, so that all of it is made up.
    """

    folder: Path
    feature_set: FeatureSet
    history: History
    custody: Custody
    command: str | None
    demonstration: bool

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Reads a folder.

        What follows from other fields of history.json is computed anew, and must be what is written there. The checksum in it notices
        other edits, unless it was computed anew: it is no signature. What the ledgers know is compared with them before it is used.

        Raises:
            OSError: If a file may not be read.
            UnsupportedDataError: If the folder holds something else than `privfed simulate` writes, history.json was edited, or model.npz
                is missing, damaged or of another run.
        """
        text, packed = (_own_file(folder / name) for name in _FILES)
        try:
            fields: dict[str, Any] = parse(text.decode())
            seal = fields.pop("checksum")
            whole = seal == checksum(fields)
            if whole and fields["model_sha256"] != hashlib.sha256(packed).hexdigest():
                raise UnsupportedDataError(f"model.npz in {folder} is damaged or of another run; nothing was done; {_PUT_BACK}")
            feature_set = next(known for known in (PRE, NOBAL) if list(known.columns) == fields["features"])
            model = first_model(feature_set)
            command: str | None = None if fields["command"] is None else str(fields["command"])
            keys = fields["keys"]
            custody = Custody(
                clients=len(fields["banks"]), holder=Holder(keys["mode"]), corrupted=keys["corrupted"], dropouts=keys["dropouts"]
            )
            training = {str(bank["name"]): _mechanism(bank) for bank in fields["banks"]}
            epsilon = math.inf if fields["budget"]["epsilon"] is None else real(fields["budget"]["epsilon"])
            with np.load(io.BytesIO(packed), allow_pickle=False) as tensors:
                values = layout_of(model).flatten(dict(tensors))
            history = History(
                mode=custody.holder.value,
                rule=FedAvg().name,
                policy=OpeningPolicy(),
                params=custody.params,
                training=training,
                delta=dict.fromkeys(training, real(fields["budget"]["delta"])),
                budget=dict.fromkeys(training, epsilon),
                # No simulation seeds its noise.
                private=all(isinstance(how, DpSgd) for how in training.values()),
                initial=values_of(model),
                model=values,
                rounds=tuple(RoundSummary.from_json(summary) for summary in fields["rounds"]),
            )
            differing = _differences(fields, history) or ([] if whole else ["checksum"])
        except _NOT_WRITTEN_SO as error:
            raise UnsupportedDataError(
                f"history.json in {folder} does not hold what privfed simulate --out writes; nothing was done; {_PUT_BACK}"
            ) from error
        if differing:
            raise UnsupportedDataError(
                f"history.json in {folder} was edited, or is of another version: the {', '.join(differing)} in it is not what follows from "
                f"the rest; nothing was done; {_PUT_BACK}"
            )
        return cls(
            folder=folder,
            feature_set=feature_set,
            history=history,
            custody=custody,
            command=command,
            demonstration=fields.get("demonstration") is True,
        )

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
        # `run_audit` looks at how the clients train; their data are replaced by canaries, so made-up records stand in for them.
        stand_in = features(generate_transactions(rows=100, fraud_rate=0.1, rng=np.random.default_rng(0)), self.feature_set)
        with ExitStack() as stack:
            clients = [
                Client(name, stand_in, training=training, ledger=stack.enter_context(self._ledger(name)))
                for name, training in self.history.training.items()
            ]
            return run_audit(
                consortium_of(clients, self.custody),
                first_model(self.feature_set),
                schema=transaction_schema(self.feature_set),
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
        history, terms, events = self.history, ledger.terms, ledger.events()
        taken_part = [name in summary.record.participants for summary in history.rounds]
        standard = (Composition.FIXED_SCHEDULE, Relation.ADD_OR_REMOVE_ONE, None)
        same = {
            "population": terms.population == name,
            "terms": (terms.composition, terms.relation, terms.silo_budget) == standard,
            "budget": terms.budget.epsilon == history.budget[name],
            "delta": terms.budget.delta == history.delta[name],
            "number of charges": len(events) == sum(taken_part),
            "training": set(events) <= {history.training[name].event()},
        }
        if all(same.values()):
            same["epsilon"] = all(
                _equal(summary.epsilon[name], Charges(events[: sum(taken_part[: number + 1])]).epsilon(delta=terms.budget.delta))
                for number, summary in enumerate(history.rounds)
            )
        if not all(same.values()):
            ledger.close()
            raise LedgerError(
                f"{name}.ledger in {self.folder} is not the ledger that this run charged, or history.json was edited: its "
                f"{', '.join(what for what, holds in same.items() if not holds)} is another than history.json says; nothing was done; put "
                "the run's own files back"
            )
        return ledger


def _own_file(path: Path) -> bytes:
    """What the run wrote into one of its files."""
    if not path.is_file():
        raise UnsupportedDataError(f"{path.name} is missing in {path.parent}; nothing was done; {_PUT_BACK}")
    return path.read_bytes()


def _differences(fields: dict[str, Any], history: History) -> list[str]:
    """Fields of history.json that are not what follows from its other ones."""
    last = history.rounds[-1]
    banks: list[dict[str, Any]] = fields["banks"]
    names = [str(bank["name"]) for bank in banks]
    follows: dict[str, object] = {
        "mode": history.mode,
        "rule": history.rule,
        "private": history.private,
        "parameters": history.model.layout.size,
        "pr_auc": [None if math.isnan(value) else value for value in history.pr_auc],
        "bytes_up_per_parameter": history.bytes_up_per_parameter,
        "bytes_down_per_parameter": history.bytes_down_per_parameter,
    }
    differing = [name for name, value in follows.items() if canonical(fields[name]) != canonical(value)]
    sent = [sum(summary.record.bytes_up.get(name, 0) for summary in history.rounds) for name in names]
    spent = [value if math.isfinite(value := last.epsilon[name]) else None for name in names]
    for part, values in (("bytes_up", sent), ("epsilon", spent)):
        if canonical([bank[part] for bank in banks]) != canonical(values):
            differing.append(f"{part} of the banks")
    if len(set(names)) != len(names) or any(
        not {*s.record.selected, *s.record.coefficients, *s.epsilon} <= {*names} for s in history.rounds
    ):
        differing.append("names of the banks")
    if [summary.record.round for summary in history.rounds] != list(range(len(history.rounds))):
        differing.append("numbers of the rounds")
    return differing


def _equal(said: float, computed: float) -> bool:
    return said == computed or math.isclose(said, computed, rel_tol=_ROUNDING)


def _mechanism(bank: dict[str, Any]) -> TrainingMechanism:
    fields = dict(bank["training"])
    if fields.get("adaptive_clipping") is not None:
        fields["adaptive_clipping"] = AdaptiveClipping(**fields["adaptive_clipping"])
    return _MECHANISMS[bank["mechanism"]](**fields)
