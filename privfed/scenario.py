"""A consortium of simulated banks over one table of transactions: what `privfed simulate` runs.

One party holds all the data here, so counts per bank and metrics are shown; a real consortium must not publish them.
"""

import hashlib
import io
import json
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from privfed.client import Client, check_delta
from privfed.consortium import Consortium
from privfed.custody import Custody, Holder
from privfed.data.partition import CONSORTIUM
from privfed.data.paysim import PRE, FeatureSet, features
from privfed.deal import Deal, deal
from privfed.dp.accounting import MOST_CALIBRATED_NOISE, epsilon
from privfed.dp.ledger import Ledger
from privfed.dp.mechanism import Budget, PoissonSampledGaussian
from privfed.engines.local import Simulation
from privfed.history import History, RoundSummary
from privfed.strict_json import checksum
from privfed.training.evaluate import EvaluationScope
from privfed.training.loss import BinaryCrossEntropy
from privfed.training.mechanism import DpSgd, NonPrivate, TrainingMechanism
from privfed.training.model import mlp

_BATCH = 512
_POSITIVE_WEIGHT = 20.0
_HIDDEN = (64, 48)  # with the features of PRE it fills one ciphertext
_DECLARED_IN = 1000
_MOST_NOISE = 20.0  # standard deviation over the clipping norm
_MOST_DELTA = 0.1  # times the declared number of records


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """How many banks, how their data differ, and how they train. All of it is public.

    Args:
        banks: Number of banks, at least 3: an aggregate of fewer is not opened.
        alpha: Concentration of the Dirichlet partition; small means that the banks' shares of frauds differ much.
        feature_set: What the model looks at.
        rounds: Number of rounds, at least 1.
        steps: Training steps per round, at least 1.
        epsilon: What each bank may spend in all rounds together, above 0; infinite: the banks train without noise.
        delta: The delta of that epsilon, above 0 and below 1; left out, `default_delta` of the largest declared number of records.
        seed: Fixes who gets which record and what is set aside. Noise and keys come from the operating system.
        holder: Who holds the key.
        corrupted: See `Custody`.
        dropouts: See `Custody`.

    Raises:
        ValueError: If a number is out of its range, or as `Custody`.
    """

    banks: int = 5
    alpha: float = CONSORTIUM
    feature_set: FeatureSet = PRE
    rounds: int = 20
    steps: int = 40
    epsilon: float = 4.0
    delta: float | None = None
    seed: int = 0
    holder: Holder = Holder.EVERY_CLIENT
    corrupted: int = 0
    dropouts: int = 0

    def __post_init__(self) -> None:
        if self.banks < 3:
            raise ValueError(f"expected at least 3 banks, got {self.banks}; an aggregate of fewer says too much about each")
        if self.rounds < 1 or self.steps < 1:
            raise ValueError(f"expected at least 1 round and 1 step, got {self.rounds} and {self.steps}")
        if self.seed < 0:
            raise ValueError(f"expected a seed from 0, got {self.seed}")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ValueError(f"expected alpha to be a finite number above 0, got {self.alpha}")
        self.budget(max_records=1)
        _ = self.custody

    @property
    def custody(self) -> Custody:
        """Who holds the key."""
        return Custody(clients=self.banks, holder=self.holder, corrupted=self.corrupted, dropouts=self.dropouts)

    def budget(self, *, max_records: int) -> Budget:
        """What each bank may spend, if the largest of them declares so many records."""
        delta = default_delta(max_records) if self.delta is None else self.delta
        return Budget.unlimited(delta=delta) if self.epsilon == math.inf else Budget(epsilon=self.epsilon, delta=delta)

    def training(self, budget: Budget, *, max_records: int) -> TrainingMechanism:
        """How a bank trains that declares so many records: calibrated to its budget."""
        if not budget.limited:
            return NonPrivate(learning_rate=0.5, batch_size=_BATCH, steps=self.steps, seed=0)
        try:
            return DpSgd.for_budget(
                budget, rounds=self.rounds, max_records=max_records, expected_batch_size=_BATCH, steps=self.steps, learning_rate=4.0
            )
        except ValueError as error:
            job = PoissonSampledGaussian(
                noise_multiplier=MOST_CALIBRATED_NOISE, sample_rate=_BATCH / max_records, steps=self.rounds * self.steps
            )
            if epsilon((job,), delta=budget.delta) <= budget.epsilon:
                raise
            raise ValueError(
                f"expected an epsilon that some noise keeps to, got {budget.epsilon:g}, too small for {self.rounds} rounds; nothing was "
                "trained; raise it, or take fewer rounds (--epsilon, --rounds)"
            ) from error


def default_delta(max_records: int) -> float:
    """The largest power of ten below one over ten times a declared number of records.

    Example:
        >>> default_delta(3_000), default_delta(1_300_000)
        (1e-05, 1e-08)
    """
    return float(f"1e-{len(str(10 * max_records))}")


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
        budget: What each bank might spend.
        banks: The banks, in order.
        deal: Who got which record.
        history: What happened.
    """

    scenario: Scenario
    budget: Budget
    banks: tuple[Bank, ...]
    deal: Deal
    history: History

    @property
    def prevalence(self) -> float:
        """Share of frauds among the records that the model was evaluated on: the PR-AUC of guessing."""
        evaluation = self.history.rounds[-1].evaluation
        return math.nan if evaluation is None else evaluation.positives / evaluation.records

    @property
    def declared(self) -> int:
        """Most records that a bank declared to have."""
        return max(_declared(bank.records) for bank in self.banks)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the numbers must know besides."""
        notes: list[str] = []
        if not self.history.private:
            notes.append("no differential privacy: the banks trained without noise; for comparison only")
        if small := [bank.name for bank in self.banks if bank.records < _BATCH]:
            several = len(small) > 1
            notes.append(
                f"{', '.join(small)} {'have' if several else 'has'} fewer records than the {_BATCH} of a batch: what "
                f"{'they send' if several else 'it sends'} is hardly more than {'noise' if self.history.private else 'those records'}"
            )
        noise = {name: how.noise_multiplier for name, how in self.history.training.items() if isinstance(how, DpSgd)}
        if loud := [name for name, multiplier in noise.items() if multiplier > _MOST_NOISE]:
            notes.append(
                f"the noise of {', '.join(loud)} is {max(noise.values()):.3g} times the most that a record adds to a step: hardly anything "
                "is learned under it; a larger epsilon, fewer rounds or more records per bank need less"
            )
        if self.history.private and (expected := self.budget.delta * self.declared) > _MOST_DELTA:
            notes.append(
                f"delta {self.budget.delta:g} is large: times the {self.declared:,} records that the largest bank declares it is "
                f"{expected:.2g}, and so many records in expectation may be given away whole; take at most a tenth"
            )
        if self.deal.repairs is not None:
            notes.append(self.deal.repairs)
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
            "keys": scenario.custody.content(),
            "rule": history.rule,
            "private": history.private,
            "features": list(scenario.feature_set.columns),
            "alpha": scenario.alpha,
            "seed": scenario.seed,
            "budget": {"epsilon": _finite(self.budget.epsilon), "delta": self.budget.delta},
            "deviation": self.deal.partition.deviation,
            "redraws": self.deal.partition.redraws,
            "moved": self.deal.partition.moved,
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

    def save(self, folder: Path, *, command: str | None = None, demonstration: bool = False) -> None:
        """Writes history.json, under a checksum, and model.npz, one array per tensor of the model, into a folder that exists.

        The history has the SHA-256 of model.npz, so that the model of another run is told from this one's.

        Args:
            folder: Where to.
            command: How the run was started, for reports; None if unknown.
            demonstration: Whether all of it is made up, so that a later demonstration may replace it.

        Raises:
            FileExistsError: If one of them is there already. Nothing is overwritten.
        """
        tensors: dict[str, Any] = {
            name: values.astype(np.float32) for name, values in self.history.model.layout.unflatten(self.history.model).items()
        }
        packed = io.BytesIO()
        np.savez(packed, **tensors)  # float32, so nothing is pickled; before 2.1 NumPy would save `allow_pickle` as a tensor
        content = self.to_json() | {
            "command": command,
            "demonstration": demonstration,
            "model_sha256": hashlib.sha256(packed.getvalue()).hexdigest(),
        }
        with (folder / "history.json").open("x", encoding="utf-8") as file:
            json.dump(content | {"checksum": checksum(content)}, file, indent=2, allow_nan=False)
        with (folder / "model.npz").open("xb") as file:
            file.write(packed.getvalue())


def first_model(feature_set: FeatureSet) -> nn.Module:
    """The public model from which every scenario with these features starts. Noise and keys are never seeded."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return mlp(inputs=len(feature_set.columns), hidden=_HIDDEN)


def consortium_of(clients: Sequence[Client], custody: Custody) -> Consortium:
    """The consortium of a scenario, under new keys."""
    return Consortium(clients, keys=custody.keys(), params=custody.params, loss=BinaryCrossEntropy(positive_weight=_POSITIVE_WEIGHT))


def run_scenario(
    table: pd.DataFrame,
    scenario: Scenario,
    *,
    ledgers: Path,
    ready: Callable[[], None] | None = None,
    progress: Callable[[RoundSummary], None] | None = None,
    inspect: Callable[[Simulation, Consortium], None] | None = None,
) -> Outcome:
    """Deals a table to banks and trains with encrypted updates.

    Args:
        table: As `load_paysim` or `generate_transactions` returns it.
        scenario: What to run.
        ledgers: Folder in which every bank keeps its ledger.
        ready: Is called before the first round, when the table and the budget were found to be usable.
        progress: Is called after each round.
        inspect: Is called after the last round, while all parties are still there. If it is given, the server is a process of its own.

    Raises:
        UnsupportedDataError: If the table has too few records or frauds for so many banks. Nothing was trained.
        ValueError: If delta is too large for what a bank declares, or no noise keeps to the budget. No ledger was made.
        PrivFedError: If a party refuses.
    """
    dealt = deal(features(table, scenario.feature_set), banks=scenario.banks, alpha=scenario.alpha, seed=scenario.seed)
    declared = {name: _declared(len(shard)) for name, shard in dealt.banks.items()}
    budget = scenario.budget(max_records=max(declared.values()))
    training = {limit: scenario.training(budget, max_records=limit) for limit in set(declared.values())}
    for name, limit in declared.items():
        check_delta(name, training=training[limit], budget=budget)
    if ready is not None:
        ready()
    with ExitStack() as stack:
        clients = [
            Client(
                name,
                shard,
                training=training[declared[name]],
                ledger=stack.enter_context(Ledger.open(ledgers / f"{name}.ledger", population=name, budget=budget)),
            )
            for name, shard in dealt.banks.items()
        ]
        consortium = consortium_of(clients, scenario.custody)
        simulation = stack.enter_context(
            Simulation(consortium, first_model(scenario.feature_set), evaluation=dealt.test, separate_server=inspect is not None)
        )
        history = simulation.run(rounds=scenario.rounds, progress=progress)
        if inspect is not None:
            inspect(simulation, consortium)
    banks = tuple(
        Bank(
            name=name,
            records=len(shard),
            frauds=int((shard.labels > 0).sum()),
            bytes_up=sum(summary.record.bytes_up.get(name, 0) for summary in history.rounds),
        )
        for name, shard in dealt.banks.items()
    )
    return Outcome(scenario=scenario, budget=budget, banks=banks, deal=dealt, history=history)


def _declared(records: int) -> int:
    """A bank's number of records, rounded up to thousands."""
    return -(-records // _DECLARED_IN) * _DECLARED_IN


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
