"""How a run was set up, as JSON in its folder: what an audit of it needs to hold rounds that are protected in the same way. Public."""

import errno
import hashlib
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import torch
from torch import nn

from privfed.aggregation.rules import FedAvg, MultiKrum
from privfed.aggregation.server_optimizer import ServerSgd
from privfed.attacks.facts import Continuous, OneHot, Scale, TableSchema
from privfed.client import Client
from privfed.consortium import Consortium, Plaintext
from privfed.custody import Custody, Holder
from privfed.dp.mechanism import Budget
from privfed.errors import LedgerError, UnsupportedInThisModeError, UnsupportedModelError
from privfed.files import create
from privfed.he.params import CkksParams
from privfed.he.product_params import ProductParams
from privfed.he.threshold_key import ThresholdKey
from privfed.history import History
from privfed.policy import OpeningPolicy
from privfed.strict_json import checksum, real, whole
from privfed.training.loss import BinaryCrossEntropy, PerSampleLoss, binary_cross_entropy, cross_entropy
from privfed.training.model import layout_of, load_values, mlp
from privfed.training.objective import FedProx
from privfed.update import PlainVector

HISTORY, MODEL, INITIAL = "history.json", "model.npz", "initial.npz"
WEIGHTS = {"model_sha256": MODEL, "initial_sha256": INITIAL}
"""Files with weights, by the field of history.json that has their SHA-256."""

_FEWEST_WIDTHS = 2
_RULES = (FedAvg, MultiKrum)
_LOSSES = {loss.__name__: loss for loss in (binary_cross_entropy, cross_entropy)}
_AUDIT_IT = "nothing was written; audit it with privfed.run_audit in your program"


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What a client counts for, and may spend. Public.

    Args:
        weight: In the aggregate.
        budget: Of its ledger.
        earlier_charges: Charges that its ledger held before the run.
    """

    weight: float
    budget: Budget
    earlier_charges: int

    def to_json(self) -> dict[str, object]:
        """As JSON values; an infinite epsilon is null."""
        epsilon = self.budget.epsilon if self.budget.limited else None
        return {
            "weight": self.weight,
            "budget": {"epsilon": epsilon, "delta": self.budget.delta},
            "earlier_charges": self.earlier_charges,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Reads what `to_json` gave."""
        epsilon, delta = content["budget"]["epsilon"], real(content["budget"]["delta"])
        budget = Budget.unlimited(delta=delta) if epsilon is None else Budget(epsilon=real(epsilon), delta=delta)
        return cls(weight=real(content["weight"]), budget=budget, earlier_charges=whole(content["earlier_charges"]))


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How a run was set up, beside how each client trained. Public: it holds no key, no record, and no number of records.

    Args:
        columns: Names of the input columns.
        schema: What is publicly known about them.
        widths: Of the model, a network as `mlp` makes it: inputs, hidden layers, outputs.
        loss: Loss per record.
        custody: Who holds the key.
        params: Encryption parameters.
        rule: How aggregates were combined.
        policy: When an aggregate might be opened.
        correction: Correction of the gradients; None without one.
        accounts: What each client counts for and may spend.

    Raises:
        ValueError: If columns, schema and model are of different widths, the model has no layer, or the clients are not as many as the
            custody says.
    """

    columns: tuple[str, ...]
    schema: TableSchema
    widths: tuple[int, ...]
    loss: PerSampleLoss
    custody: Custody
    params: CkksParams
    rule: FedAvg | MultiKrum
    policy: OpeningPolicy
    correction: FedProx | None
    accounts: Mapping[str, Account]

    def __post_init__(self) -> None:
        if len(self.widths) < _FEWEST_WIDTHS:
            raise ValueError(f"expected the inputs and the outputs of a model, got {len(self.widths)} widths")
        if not len(self.columns) == self.schema.width == self.widths[0]:
            raise ValueError(
                f"expected a schema and a model of {len(self.columns)} columns, as the clients' data have, got {self.schema.width} and "
                f"{self.widths[0]}"
            )
        if len(self.accounts) != self.custody.clients:
            raise ValueError(f"expected {self.custody.clients} clients, got {len(self.accounts)}")

    @classmethod
    def of(cls, consortium: Consortium, model: nn.Module, *, schema: TableSchema, history: History) -> Self:
        """The setup of a run that is over.

        Raises:
            LedgerError: If a client has no ledger, or one with fewer charges than rounds that it took part in.
            UnsupportedInThisModeError: If there is something about the consortium that a file cannot say.
            UnsupportedModelError: If the model is no network as `mlp` makes it.
            ValueError: As the class.
        """
        loss = consortium.loss
        refused = {
            "no encryption": isinstance(consortium.keys, Plaintext),
            f"the rule {consortium.rule.name}": type(consortium.rule) not in _RULES,
            "a server optimiser": consortium.server_optimizer != ServerSgd(),
            "a correction other than FedProx": not isinstance(consortium.correction, FedProx | None),
            "noise for whole silos": consortium.silo is not None,
            "private weights": consortium.private_weights is not None,
            "a validator": consortium.validator is not None,
            "a loss of its own": not isinstance(loss, BinaryCrossEntropy) and loss not in _LOSSES.values(),
        }
        if found := [words for words, present in refused.items() if present]:
            raise UnsupportedInThisModeError(f"a run with {' and '.join(found)} cannot be saved; {_AUDIT_IT}")
        keys = consortium.keys
        quorum = {"corrupted": keys.corrupted, "dropouts": keys.dropouts} if isinstance(keys, ThresholdKey) else {}
        return cls(
            columns=consortium.clients[0].data.columns,
            schema=schema,
            widths=_widths(model),
            loss=loss,
            custody=Custody(clients=len(consortium.clients), holder=Holder(consortium.mode), **quorum),
            params=consortium.params,
            rule=cast("FedAvg | MultiKrum", consortium.rule),
            policy=consortium.policy,
            correction=cast("FedProx | None", consortium.correction),
            accounts={client.name: _account(client, history) for client in consortium.clients},
        )

    def to_json(self) -> dict[str, object]:
        """As JSON values."""
        columns: list[dict[str, Any]] = [
            asdict(column) | ({"scale": column.scale.name} if isinstance(column, Continuous) else {}) for column in self.schema.columns
        ]
        return {
            "columns": list(self.columns),
            "schema": columns,
            "widths": list(self.widths),
            "loss": {"kind": getattr(self.loss, "__name__", type(self.loss).__name__)} | _fields(self.loss),
            "keys": self.custody.content(),
            "params": _fields(self.params),
            "rule": {"kind": type(self.rule).__name__} | _fields(self.rule),
            "policy": _fields(self.policy),
            "correction": None if self.correction is None else _fields(self.correction),
            "clients": {name: account.to_json() for name, account in self.accounts.items()},
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Reads what `to_json` gave.

        Raises:
            Exception: Of any kind that reading something else makes; `SavedRun.load` turns it into a refusal.
        """
        keys, rule, loss = content["keys"], dict(content["rule"]), dict(content["loss"])
        kind, name = rule.pop("kind"), loss.pop("kind")
        return cls(
            columns=tuple(str(column) for column in content["columns"]),
            schema=TableSchema(columns=tuple(_column(column) for column in content["schema"])),
            widths=tuple(whole(width) for width in content["widths"]),
            loss=BinaryCrossEntropy(positive_weight=real(loss["positive_weight"])) if loss else _LOSSES[name],
            custody=Custody(
                clients=len(content["clients"]), holder=Holder(keys["mode"]), corrupted=keys["corrupted"], dropouts=keys["dropouts"]
            ),
            params=(ProductParams if "sketch" in content["params"] else CkksParams)(**content["params"]),
            rule=next(known for known in _RULES if known.__name__ == kind)(**rule),
            policy=OpeningPolicy(**content["policy"]),
            correction=None if content["correction"] is None else FedProx(**content["correction"]),
            accounts={str(name): Account.from_json(account) for name, account in content["clients"].items()},
        )

    def consortium(self, clients: Sequence[Client]) -> Consortium:
        """A consortium that is set up like that, under new keys."""
        return Consortium(
            clients,
            keys=self.custody.keys(),
            rule=self.rule,
            policy=self.policy,
            params=self.params,
            loss=self.loss,
            correction=self.correction,
        )

    def module(self) -> nn.Module:
        """The network, with weights of no meaning. It draws nothing from torch's global generator."""
        with torch.random.fork_rng():
            return mlp(self.widths[0], hidden=self.widths[1:-1], outputs=self.widths[-1])

    def module_with(self, values: PlainVector) -> nn.Module:
        """The network with these weights."""
        module = self.module()
        load_values(module, values)
        return module


def history_content(history: History) -> dict[str, Any]:
    """What history.json says of every run, as JSON values. An infinite epsilon and an undefined metric are null."""
    return {
        "mode": history.mode,
        "rule": history.rule,
        "private": history.private,
        "pr_auc": [_finite(value) for value in history.pr_auc],
        "parameters": history.model.layout.size,
        "bytes_up_per_parameter": history.bytes_up_per_parameter,
        "bytes_down_per_parameter": history.bytes_down_per_parameter,
        "banks": [
            {
                "name": name,
                "bytes_up": sum(summary.record.bytes_up.get(name, 0) for summary in history.rounds),
                "epsilon": _finite(history.epsilon[name]),
                "mechanism": type(training).__name__,
                "training": asdict(training),
            }
            for name, training in history.training.items()
        ],
        "rounds": [summary.to_json() for summary in history.rounds],
    }


def run_files(content: Mapping[str, object], history: History) -> dict[str, bytes]:
    """The files of a run by their names, history.json last: it says that the others are there, and their SHA-256.

    Args:
        content: What it is to say, beside that and its own checksum.
        history: Whose weights to write.
    """
    files = {MODEL: _packed(history.model), INITIAL: _packed(history.initial)}
    content = dict(content) | {field: hashlib.sha256(files[name]).hexdigest() for field, name in WEIGHTS.items()}
    files[HISTORY] = json.dumps(content | {"checksum": checksum(content)}, indent=2, allow_nan=False).encode()
    return files


def write_run(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes new files of mode 0600 into a folder that exists.

    Raises:
        FileExistsError: If one of them is there already. Nothing is overwritten.
    """
    for name in files:
        if (folder / name).exists():
            raise FileExistsError(errno.EEXIST, "there already, and nothing was written; take another folder", str(folder / name))
    for name, data in files.items():
        create(folder / name, data)


def _packed(vector: PlainVector) -> bytes:
    packed = io.BytesIO()
    tensors: dict[str, Any] = {name: values.astype(np.float32) for name, values in vector.layout.unflatten(vector).items()}
    np.savez(packed, **tensors)  # float32, so nothing is pickled; before 2.1 NumPy would save `allow_pickle` as a tensor
    return packed.getvalue()


def _account(client: Client, history: History) -> Account:
    if client.ledger is None:
        raise LedgerError(f"{client.name!r} has no ledger, so that nothing says what the run cost it; {_AUDIT_IT}")
    earlier = len(client.ledger.events()) - sum(client.name in summary.record.participants for summary in history.rounds)
    if earlier < 0:
        raise LedgerError(f"the ledger of {client.name!r} has fewer charges than the rounds that it took part in; nothing was written")
    return Account(weight=client.weight, budget=client.ledger.budget, earlier_charges=earlier)


def _widths(model: nn.Module) -> tuple[int, ...]:
    """Inputs, widths of the hidden layers, and outputs of a network as `mlp` makes it."""
    layers = list(model) if type(model) is nn.Sequential else []
    linear = [layer for layer in layers[::2] if type(layer) is nn.Linear]
    if linear and len(linear) == len(layers[::2]) == len(layers[1::2]) + 1 and all(type(layer) is nn.ReLU for layer in layers[1::2]):
        widths = (linear[0].in_features, *(layer.out_features for layer in linear))
        with torch.random.fork_rng():
            same = mlp(widths[0], hidden=widths[1:-1], outputs=widths[-1])
        if layout_of(same) == layout_of(model):
            return widths
    raise UnsupportedModelError(f"only a model as privfed.mlp makes it can be saved, so that others can make it; {_AUDIT_IT}")


def _column(content: dict[str, Any]) -> Continuous | OneHot:
    if "categories" in content:
        return OneHot(name=str(content["name"]), categories=tuple(str(category) for category in content["categories"]))
    low, high = real(content["low"]), real(content["high"])
    return Continuous(name=str(content["name"]), low=low, high=high, scale=Scale[content["scale"]])


def _fields(value: Any) -> dict[str, object]:
    """The fields of a frozen dataclass of plain values; none of a function."""
    return {} if value in _LOSSES.values() else {field.name: getattr(value, field.name) for field in fields(value)}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
