"""A finished simulation in its folder, as `privfed simulate --out` leaves it: read, audited, and reported on."""

import hashlib
import json
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from privfed import __version__
from privfed.agreement import OpeningPolicy
from privfed.audit.canaries import transaction_schema
from privfed.audit.findings import Audit
from privfed.audit.run import run_audit
from privfed.audit_file import read_audit, write_audit
from privfed.client import Client
from privfed.data.paysim import NOBAL, PRE, FeatureSet, features
from privfed.data.transactions import generate_transactions
from privfed.dp.clipping import AdaptiveClipping
from privfed.dp.ledger import Ledger
from privfed.dp.statement import PrivacyStatement
from privfed.errors import LedgerError, UnsupportedDataError
from privfed.he.params import CkksParams
from privfed.history import History, RoundSummary
from privfed.scenario import consortium_of, first_model
from privfed.training.mechanism import DpSgd, NonPrivate, TrainingMechanism
from privfed.training.model import layout_of, values_of

_OTHER_ACCOUNTANT = 0.01  # how far another version of the accountant may be off
_AUDIT = "audit.json"
_MECHANISMS = {mechanism.__name__: mechanism for mechanism in (DpSgd, NonPrivate)}


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """A simulation that `privfed simulate --out` wrote.

    Args:
        folder: Where it is, with history.json, model.npz and a ledger per bank.
        feature_set: What the model looks at.
        history: What happened.
        command: How it was started; None if unknown.
    """

    folder: Path
    feature_set: FeatureSet
    history: History
    command: str | None

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Reads a folder.

        Raises:
            OSError: If a file is missing or may not be read.
            UnsupportedDataError: If the folder holds something else than `privfed simulate` writes.
        """
        text = (folder / "history.json").read_text(encoding="utf-8")
        try:
            fields: dict[str, Any] = json.loads(text)
            feature_set = next(known for known in (PRE, NOBAL) if list(known.columns) == fields["features"])
            model = first_model(feature_set)
            command: str | None = None if fields["command"] is None else str(fields["command"])
            training = {bank["name"]: _mechanism(bank) for bank in fields["banks"]}
            epsilon: float = math.inf if fields["budget"]["epsilon"] is None else fields["budget"]["epsilon"]
            with np.load(folder / "model.npz", allow_pickle=False) as tensors:
                values = layout_of(model).flatten(dict(tensors))
            history = History(
                mode=fields["mode"],
                rule=fields["rule"],
                policy=OpeningPolicy(),
                params=CkksParams.standard(),
                training=training,
                delta=dict.fromkeys(training, float(fields["budget"]["delta"])),
                budget=dict.fromkeys(training, epsilon),
                private=fields["private"],
                initial=values_of(model),
                model=values,
                rounds=tuple(RoundSummary.from_json(summary) for summary in fields["rounds"]),
            )
        except (KeyError, TypeError, ValueError, StopIteration, OverflowError, RecursionError) as error:
            raise UnsupportedDataError(
                f"{folder} does not hold what privfed simulate --out writes; nothing was done; make a folder with that command"
            ) from error
        return cls(folder=folder, feature_set=feature_set, history=history, command=command)

    def audit(self, *, repeats: int, progress: Callable[[int], None] | None = None) -> Audit:
        """Attacks canary rounds under the protection of this run; see `run_audit`. The banks' data and ledgers are not touched.

        Args:
            repeats: Number of independent batches of canaries, at least 2.
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
                consortium_of(clients),
                first_model(self.feature_set),
                schema=transaction_schema(self.feature_set),
                repeats=repeats,
                progress=progress,
            )

    @property
    def digest(self) -> str:
        """SHA-256 over what the run wrote and the version of privfed, hexadecimal: what an audit of it is bound to."""
        state = hashlib.sha256(f"privfed run v1 {__version__} ".encode())
        for name in ("history.json", "model.npz"):
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
        """The ledger of a bank, which must be the one that this run charged."""
        ledger = Ledger.read(self.folder / f"{name}.ledger")
        said, budget = self.history.epsilon[name], self.history.budget[name]
        rounds = sum(name in summary.record.participants for summary in self.history.rounds)
        same = math.isclose(ledger.spent(), said, rel_tol=_OTHER_ACCOUNTANT) or (math.isinf(said) and math.isinf(ledger.spent()))
        if ledger.population != name or ledger.budget.epsilon != budget or len(ledger.events()) != rounds or not same:
            ledger.close()
            raise LedgerError(
                f"{name}.ledger in {self.folder} is not the ledger that this run charged: its population, budget, number of charges or "
                "epsilon is another than history.json says; nothing was done; put the run's own ledger back"
            )
        return ledger


def _mechanism(bank: dict[str, Any]) -> TrainingMechanism:
    fields = dict(bank["training"])
    if fields.get("adaptive_clipping") is not None:
        fields["adaptive_clipping"] = AdaptiveClipping(**fields["adaptive_clipping"])
    return _MECHANISMS[bank["mechanism"]](**fields)
