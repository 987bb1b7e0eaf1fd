"""A consortium of simulated banks over one table of transactions: what `privfed simulate` runs.

One party holds all the data here, so counts per bank and metrics are shown; a real consortium must not publish them.
"""

import json
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import nn

from privfed.client import Client
from privfed.consortium import Consortium
from privfed.data.partition import CONSORTIUM, Partition, dirichlet_partition
from privfed.data.paysim import PRE, FeatureSet, features, grouped_split
from privfed.dp.ledger import Ledger
from privfed.dp.mechanism import Budget
from privfed.engines.local import simulate
from privfed.errors import UnsupportedDataError
from privfed.he.secret import SharedKey
from privfed.history import History, RoundSummary
from privfed.training.evaluate import EvaluationScope
from privfed.training.loss import BinaryCrossEntropy
from privfed.training.mechanism import DpSgd, NonPrivate, TrainingMechanism
from privfed.training.model import mlp

TEST_SHARE = 0.25
"""Share of every class that no bank gets: the model is evaluated on it after each round."""

SMALLEST_SHARE = 0.1
"""Every bank gets at least this fraction of an even share of the records, and one fraud: less would be nothing but noise."""

_BATCH = 512
_POSITIVE_WEIGHT = 20.0
_HIDDEN = (64, 48)  # with the features of PRE it fills one ciphertext
_DECLARED_IN = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """How many banks, how their data differ, and how they train. All of it is public.

    Args:
        banks: Number of banks, at least 3: an aggregate of fewer is not opened.
        alpha: Concentration of the Dirichlet partition; small means that the banks' shares of frauds differ much.
        feature_set: What the model looks at.
        rounds: Number of rounds, at least 1.
        steps: Training steps per round, at least 1.
        budget: What each bank may spend in all rounds together; with `Budget.unlimited` the banks train without noise.
        seed: Fixes who gets which record and what is set aside. Noise and keys come from the operating system.

    Raises:
        ValueError: If a number is out of its range.
    """

    banks: int = 5
    alpha: float = CONSORTIUM
    feature_set: FeatureSet = PRE
    rounds: int = 20
    steps: int = 40
    budget: Budget = field(default_factory=lambda: Budget(epsilon=4.0, delta=1e-5))
    seed: int = 0

    def __post_init__(self) -> None:
        if self.banks < 3:
            raise ValueError(f"expected at least 3 banks, got {self.banks}; an aggregate of fewer says too much about each")
        if self.rounds < 1 or self.steps < 1 or self.seed < 0:
            raise ValueError(f"expected rounds and steps from 1 and a seed from 0, got {self.rounds}, {self.steps} and {self.seed}")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ValueError(f"expected alpha to be a finite number above 0, got {self.alpha}")

    def training(self, records: int) -> TrainingMechanism:
        """How a bank of so many records trains: it declares its size, rounded up to thousands, and calibrates to its budget."""
        if not self.budget.limited:
            return NonPrivate(learning_rate=0.5, batch_size=_BATCH, steps=self.steps, seed=0)
        return DpSgd.for_budget(
            self.budget,
            rounds=self.rounds,
            max_records=-(-records // _DECLARED_IN) * _DECLARED_IN,
            expected_batch_size=_BATCH,
            steps=self.steps,
            learning_rate=1.0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bank:
    """What one bank of a scenario held and sent. A simulation may show it.

    Args:
        name: Its name in the roster.
        records: Records that it trained on.
        frauds: How many of them are frauds.
        bytes_up: Bytes that it sent in all rounds.
    """

    name: str
    records: int
    frauds: int
    bytes_up: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A scenario that was run.

    Args:
        scenario: What was run.
        banks: The banks, in order.
        partition: Who got which record of the training side.
        history: What happened.
    """

    scenario: Scenario
    banks: tuple[Bank, ...]
    partition: Partition
    history: History

    @property
    def prevalence(self) -> float:
        """Share of frauds among the records that the model was evaluated on: the PR-AUC of guessing."""
        evaluation = self.history.rounds[-1].evaluation
        return math.nan if evaluation is None else evaluation.positives / evaluation.records

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the numbers must know besides."""
        notes: list[str] = []
        if not self.history.private:
            notes.append("no differential privacy: the banks trained without noise; for comparison only")
        elif weak := [bank.name for bank in self.banks if self.scenario.budget.delta * bank.records >= 1]:
            notes.append(
                f"delta {self.scenario.budget.delta:g} is not below one over the records of {', '.join(weak)}: giving a whole record "
                "away would keep such a promise; take a smaller delta"
            )
        if self.history.failed:
            notes.append(f"{len(self.history.failed)} rounds were not held")
        if math.isnan(self.history.pr_auc[-1]):
            notes.append("no fraud among the records set aside: PR-AUC is undefined")
        return tuple(notes)

    def to_json(self) -> dict[str, object]:
        """The outcome as JSON values. An infinite epsilon and an undefined metric are null."""
        scenario, history = self.scenario, self.history
        return {
            "scope": EvaluationScope.SIMULATION_ONLY.value,
            "mode": history.mode,
            "rule": history.rule,
            "private": history.private,
            "features": list(scenario.feature_set.columns),
            "alpha": scenario.alpha,
            "seed": scenario.seed,
            "budget": {"epsilon": _finite(scenario.budget.epsilon), "delta": scenario.budget.delta},
            "deviation": self.partition.deviation,
            "banks": [
                asdict(bank)
                | {"epsilon": _finite(history.epsilon[bank.name]), "training": asdict(history.training[bank.name])}
                | {"mechanism": type(history.training[bank.name]).__name__}
                for bank in self.banks
            ],
            "pr_auc": [_finite(value) for value in history.pr_auc],
            "pr_auc_of_guessing": _finite(self.prevalence),
            "parameters": history.model.layout.size,
            "bytes_up_per_parameter": history.bytes_up_per_parameter,
            "bytes_down_per_parameter": history.bytes_down_per_parameter,
            "notes": list(self.notes),
            "rounds": [summary.to_json() for summary in history.rounds],
        }

    def save(self, folder: Path) -> None:
        """Writes history.json and model.npz, one array per tensor of the model, into a folder that exists.

        Raises:
            FileExistsError: If one of them is there already. Nothing is overwritten.
        """
        with (folder / "history.json").open("x", encoding="utf-8") as file:
            json.dump(self.to_json(), file, indent=2, allow_nan=False)
        model = self.history.model
        tensors = {name: values.astype(np.float32) for name, values in model.layout.unflatten(model).items()}
        with (folder / "model.npz").open("xb") as file:
            np.savez(file, allow_pickle=False, **tensors)


def first_model(feature_set: FeatureSet) -> nn.Module:
    """The public model from which every scenario with these features starts. Noise and keys are never seeded."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return mlp(inputs=len(feature_set.columns), hidden=_HIDDEN)


def consortium_of(clients: Sequence[Client]) -> Consortium:
    """The consortium of a scenario, under a new shared key."""
    return Consortium(clients, keys=SharedKey.generate(), loss=BinaryCrossEntropy(positive_weight=_POSITIVE_WEIGHT))


def run_scenario(
    table: pd.DataFrame, scenario: Scenario, *, ledgers: Path, progress: Callable[[RoundSummary], None] | None = None
) -> Outcome:
    """Deals a table to banks and trains with encrypted updates.

    Args:
        table: As `load_paysim` or `generate_transactions` returns it.
        scenario: What to run.
        ledgers: Folder in which every bank keeps its ledger.
        progress: Is called after each round.

    Raises:
        UnsupportedDataError: If the table has too few records or frauds for so many banks. Nothing was trained.
        PrivFedError: If a party refuses.
    """
    rng = np.random.default_rng(scenario.seed)
    train, test = grouped_split(features(table, scenario.feature_set), test_share=TEST_SHARE, rng=rng)
    if np.unique(np.asarray(train.groups)[train.labels > 0]).size < scenario.banks:
        raise UnsupportedDataError(
            f"the table has too few frauds for {scenario.banks} banks: each needs one, after a quarter was set aside; nothing was trained; "
            "use more data or fewer banks"
        )
    smallest = max(1, int(SMALLEST_SHARE * len(train) / scenario.banks))
    partition = dirichlet_partition(train, clients=scenario.banks, alpha=scenario.alpha, rng=rng, min_samples=smallest, min_positive=1)
    width = len(str(scenario.banks))
    shards = {f"bank_{number:0{width}}": shard for number, shard in enumerate(partition.split(train), start=1)}
    with ExitStack() as stack:
        clients = [
            Client(
                name,
                shard,
                training=scenario.training(len(shard)),
                ledger=stack.enter_context(Ledger.open(ledgers / f"{name}.ledger", population=name, budget=scenario.budget)),
            )
            for name, shard in shards.items()
        ]
        history = simulate(
            consortium_of(clients),
            first_model(scenario.feature_set),
            rounds=scenario.rounds,
            evaluation=test,
            progress=progress,
        )
    banks = tuple(
        Bank(
            name=name,
            records=len(shard),
            frauds=int((shard.labels > 0).sum()),
            bytes_up=sum(summary.record.bytes_up.get(name, 0) for summary in history.rounds),
        )
        for name, shard in shards.items()
    )
    return Outcome(scenario=scenario, banks=banks, partition=partition, history=history)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
