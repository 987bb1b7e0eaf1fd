"""All parties on one machine, exchanging real wire bytes: for simulations, demonstrations and tests."""

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import nn

from privfed.aggregation.private_weights import PrivateWeights
from privfed.agreement import Agreement
from privfed.client import Trainer
from privfed.consortium import Consortium, Plaintext
from privfed.data.generator import check_generator
from privfed.data.samples import Samples
from privfed.engines.beforehand import check_budgets, check_evaluation, check_outputs, check_rounds
from privfed.engines.dropouts import Absences
from privfed.engines.encrypted import EncryptedRounds
from privfed.engines.plain_site import PlainSite
from privfed.engines.plaintext import PlaintextRounds
from privfed.engines.site import Site
from privfed.errors import CohortError, DamagedFileError, RoundSkippedError
from privfed.he.codec import quantise
from privfed.history import History, RoundSummary
from privfed.round_record import FailedRound, RoundRecord, Stage
from privfed.selection import select_clients
from privfed.training.evaluate import Evaluation, EvaluationScope, evaluate
from privfed.training.mechanism import DpSgd
from privfed.training.model import check_model, scores, values_of
from privfed.training.randomness import Randomness
from privfed.training.scaffold import Scaffold
from privfed.update import Aggregate, PlainVector, Update


def simulate(
    consortium: Consortium,
    model: nn.Module,
    *,
    rounds: int,
    fraction: float = 1.0,
    rng: np.random.Generator | None = None,
    evaluation: Samples | None = None,
    scope: EvaluationScope = EvaluationScope.SIMULATION_ONLY,
    directory: Path | str | None = None,
    absences: Absences | None = None,
    progress: Callable[[RoundSummary], None] | None = None,
) -> History:
    """Trains a model with a consortium, all parties in this process.

    Args:
        consortium: Who trains together, and how.
        model: Architecture and initial weights. It is not changed.
        rounds: Number of rounds, at least 1.
        fraction: Share of the clients that each round selects, above 0 and up to 1; never fewer than the policy demands.
        rng: Source of the selection; needed if `fraction` is below 1.
        evaluation: Records to evaluate a model with one output on after each round, with labels 0 and 1.
        scope: What kind of records those are.
        directory: Folder that survives a crash: the same call on it goes on where the last one stopped. A new process makes the same
            call with the same key (`SharedKey.save`, `SharedKey.load`), the same initial weights (`torch.manual_seed`) and the same
            ledgers. Left out, nothing is kept.
        absences: Clients that do not answer in time, for example `Dropouts`. A round that is not held for their absence is
            recorded, and the next one begins.
        progress: Is called after each round.

    Returns:
        What happened, what was spent, and the model.

    Raises:
        BudgetExceededError: If all clients are to take part in every round, and too few budgets for the policy cover them to the end.
        PrivFedError: If a client, the model or the policy is refused, or a round cannot be held.
        TypeError: If `evaluation` is no `Samples`, `rounds` no whole number, or `rng` no generator.
        ValueError: If an argument is out of its range, or `evaluation` has other columns than the clients, other labels than 0 and 1,
            or a model of several outputs.
    """
    folder = None if directory is None else Path(directory)
    with Simulation(consortium, model, evaluation=evaluation, scope=scope, directory=folder) as simulation:
        return simulation.run(rounds=rounds, fraction=fraction, rng=rng, absences=absences, progress=progress)


class _Rounds(Protocol):
    @property
    def model(self) -> PlainVector: ...
    def was_held(self, number: int, selected: Sequence[str], record: RoundRecord) -> None: ...
    def hold(
        self, number: int, *, selected: tuple[str, ...], silent: Mapping[str, Stage]
    ) -> tuple[RoundRecord, Aggregate[PlainVector] | None]: ...


class Simulation:
    """The parties of a consortium on this machine. Use it in a `with` block; `simulate` is the short way.

    Args:
        consortium: Who trains together, and how.
        model: Architecture and initial weights.
        evaluation: Records to evaluate on.
        scope: What kind of records those are.
        directory: Folder of the run; see `simulate`.
        separate_server: Whether the server is a process of its own.

    Raises:
        PrivFedError: If a client, the model or the policy is refused, or the folder belongs to another run.
        ValueError: If a folder is given for a plaintext run with `Scaffold`, whose variates only encrypted runs keep.
    """

    def __init__(
        self,
        consortium: Consortium,
        model: nn.Module,
        *,
        evaluation: Samples | None = None,
        scope: EvaluationScope = EvaluationScope.SIMULATION_ONLY,
        directory: Path | None = None,
        separate_server: bool = False,
        _randomness: Callable[[str, int], Randomness] | None = None,
    ) -> None:
        check_model(model)
        check_evaluation(evaluation, consortium)
        self._consortium = consortium
        self._model = model
        self._evaluation = evaluation
        self._scope = scope
        self._randomness = _randomness
        self._initial = values_of(model)
        self._updates: dict[str, Update[PlainVector]] = {}
        self._site: Site | None = None
        self._log_keeper: Site | PlainSite | None = None
        self._trainers = trainers = {client.name: self._trainer(client.name) for client in consortium.clients}
        check_outputs(model, self._initial, evaluation)
        if isinstance(consortium.keys, Plaintext):
            if directory is not None and isinstance(consortium.correction, Scaffold):
                raise ValueError("expected no directory for a plaintext run with SCAFFOLD, whose variates only encrypted runs keep")
            self._stack = ExitStack()
            if directory is not None:
                self._log_keeper = PlainSite(directory, consortium=consortium, initial=self._initial)
                self._stack.callback(self._log_keeper.close)
            self._rounds: _Rounds = PlaintextRounds(consortium=consortium, trainers=trainers, initial=self._initial, site=self._log_keeper)
            return
        with ExitStack() as stack:
            root = directory or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="privfed-")))
            self._site = Site(root, consortium=consortium, keys=consortium.keys, initial=self._initial)
            self._log_keeper = self._site
            stack.callback(self._site.close)
            self._encrypted = EncryptedRounds(
                site=self._site,
                keys=consortium.keys,
                trainers=trainers,
                initial=self._initial,
                separate_server=separate_server,
                stack=stack,
            )
            self._rounds = self._encrypted
            self._stack = stack.pop_all()

    def _trainer(self, name: str) -> Trainer:
        client = next(client for client in self._consortium.clients if client.name == name)
        randomness = self._randomness
        return Trainer(
            client=client,
            model=self._model,
            start=self._initial,
            loss=self._consortium.loss,
            params=self._consortium.params,
            correction=self._consortium.correction,
            silo=self._consortium.silo,
            randomness=None if randomness is None else lambda number: randomness(name, number),
            witness=lambda update: self._updates.update({update.sender: update}),
        )

    @property
    def agreement(self) -> Agreement:
        """What the parties of an encrypted run agreed on.

        Raises:
            ValueError: If the run is in the clear.
        """
        if self._site is None:
            raise ValueError("expected an encrypted run; a plaintext run has no agreement")
        return self._site.agreement

    @property
    def encrypted(self) -> EncryptedRounds:
        """The parties of an encrypted run.

        Raises:
            ValueError: If the run is in the clear.
        """
        if self._site is None:
            raise ValueError("expected an encrypted run; a plaintext run has no separate parties")
        return self._encrypted

    @property
    def server_folder(self) -> Path:
        """Folder with everything that the server of an encrypted run keeps.

        Raises:
            ValueError: If the run is in the clear.
        """
        if self._site is None:
            raise ValueError("expected an encrypted run; the server of a plaintext run keeps nothing")
        return self._site.server_identity_path.parent

    @property
    def updates(self) -> Mapping[str, Update[PlainVector]]:
        """What each client trained in the last round, in the clear: no party of an encrypted run sees this, but this process does."""
        return dict(self._updates)

    @property
    def server_pid(self) -> int:
        """Process id of the separate server.

        Raises:
            ValueError: If the server is in this process.
        """
        if self.encrypted.spawned is None:
            raise ValueError("expected separate_server=True, the server is in this process")
        return self.encrypted.spawned.pid

    @property
    def model_values(self) -> PlainVector:
        """The weights after the rounds so far."""
        return self._rounds.model

    def run(
        self,
        *,
        rounds: int,
        fraction: float = 1.0,
        rng: np.random.Generator | None = None,
        absences: Absences | None = None,
        progress: Callable[[RoundSummary], None] | None = None,
    ) -> History:
        """Runs the rounds that are not in the folder's log yet; see `simulate`."""
        check_rounds(rounds)
        if rng is not None:
            check_generator(rng)
        elif fraction < 1:
            raise ValueError("expected rng where fraction is below 1: selection is explicit")
        summaries, failed, seed = self._restore()
        if fraction == 1 and absences is None:
            silo = self._consortium.silo
            check_budgets(
                self._trainers,
                first=len(summaries) + len(failed),
                rounds=rounds,
                fewest=max(self._consortium.policy.min_clients, 0 if silo is None else silo.min_arrivals),
                session=None if self._site is None else self._site.agreement.session,
            )
        if seed is None:
            seed = 0 if rng is None else int(rng.integers(2**63))
            self._log({"selection": seed})
        for number in range(len(summaries) + len(failed), rounds):
            selected = self._select(number, fraction, seed)
            silent = {} if absences is None else absences.silent(number, list(self._names))
            self._updates.clear()
            try:
                record, aggregate = self._rounds.hold(number, selected=selected, silent=silent)
            except CohortError as error:
                if not silent and not isinstance(error, RoundSkippedError):
                    raise
                failed.append(FailedRound(round=number, silent=silent, reason=str(error)))
                self._log({"failed": failed[-1].to_json()})
                continue
            summary = RoundSummary(
                record=record, epsilon=self._epsilon(), grid_error_max=self._grid_error(record, aggregate), evaluation=self._evaluate()
            )
            self._log({"held": summary.to_json(), "selected": selected})
            summaries.append(summary)
            if progress is not None:
                progress(summary)
        if not summaries:
            raise CohortError(f"none of {rounds} rounds could be held; the last one: {failed[-1].reason}")
        return self._history(tuple(summaries), tuple(failed))

    def _restore(self) -> tuple[list[RoundSummary], list[FailedRound], int | None]:
        """What the folder's log says of earlier rounds."""
        summaries: list[RoundSummary] = []
        failed: list[FailedRound] = []
        seed: int | None = None
        entries: list[dict[str, Any]] = [] if self._log_keeper is None else self._log_keeper.entries()
        try:
            for entry in entries:
                if "held" in entry:
                    summary = RoundSummary.from_json(entry["held"])
                    self._rounds.was_held(summary.record.round, entry["selected"], summary.record)
                    summaries.append(summary)
                elif "failed" in entry:
                    failed.append(FailedRound.from_json(entry["failed"]))
                else:
                    seed = entry["selection"]
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise DamagedFileError("the log of the run is damaged; nothing was changed; put it back, or choose a new folder") from error
        held = [summary.record.round for summary in summaries]
        if sorted((*held, *(lost.round for lost in failed))) != list(range(len(held) + len(failed))) or held != sorted(held):
            raise DamagedFileError("rounds are missing in the log of the run, or out of order; nothing was changed; put it back")
        if entries and seed is None:
            raise DamagedFileError("the log of the run lacks its beginning; nothing was changed; put it back, or choose a new folder")
        if isinstance(self._rounds, PlaintextRounds):
            self._rounds.restore(held)
        return summaries, failed, seed

    def _log(self, entry: Mapping[str, object]) -> None:
        if self._log_keeper is not None:
            self._log_keeper.log(entry)

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(client.name for client in self._consortium.clients)

    def _select(self, number: int, fraction: float, seed: int) -> tuple[str, ...]:
        # One generator per round, so that a run that was interrupted selects what it would have selected.
        validator = self._consortium.validator
        names = tuple(name for name in self._names if validator is None or name != validator.name)
        minimum = min(self._consortium.policy.min_clients, len(names))
        chosen = select_clients(names, fraction=fraction, rng=np.random.default_rng((seed, number)), minimum=minimum)
        # A round without its reference cannot be scored.
        return chosen if validator is None else tuple(name for name in self._names if name in chosen or name == validator.name)

    def _grid_error(self, record: RoundRecord, aggregate: Aggregate[PlainVector] | None) -> int | None:
        """Largest difference, in grid steps, between what was opened and the integer weighted sum of what was trained.

        None if it is not known: where updates were resent, or where each client added noise that nobody else knows.
        """
        trained = all(name in self._updates for name, coefficient in record.coefficients.items() if coefficient)
        if aggregate is None or self._consortium.silo is not None or not trained:
            return None
        if self._consortium.private_weights is not None:
            return self._private_grid_error(self._consortium.private_weights, record, aggregate)
        params = self._consortium.params
        weighting = None if self._site is None else self._site.agreement.weighting
        expected = np.zeros(self._initial.layout.size, dtype=np.int64)
        for name, multiplier in zip(record.coefficients, params.multipliers(tuple(record.coefficients.values())), strict=True):
            share = None if weighting is None else weighting.share(name)
            expected += multiplier * quantise(self._updates[name].vector.values, params, share)[0]
        divisor: int | Fraction = sum(record.coefficients.values())
        if weighting is not None and not self.agreement.scored:
            divisor = weighting.divisor(record.participants)
        opened = np.rint(aggregate.vector.values * float(divisor) / params.step).astype(np.int64)
        return int(np.abs(opened - expected).max())

    def _private_grid_error(self, private: PrivateWeights, record: RoundRecord, aggregate: Aggregate[PlainVector]) -> int:
        params = self._consortium.params
        weights = {client.name: int(client.weight) for client in self._consortium.clients}
        grids = [private.grid(self._updates[name].vector.values, weights[name], params)[0] for name in record.participants]
        expected = np.sum(grids, axis=0)
        opened = np.rint(aggregate.vector.values * expected[-1] / (params.step * private.largest)).astype(np.int64)
        return int(np.abs(opened - expected[:-1]).max())

    def _epsilon(self) -> dict[str, float]:
        return {client.name: math.inf if client.ledger is None else client.ledger.spent() for client in self._consortium.clients}

    def _evaluate(self) -> Evaluation | None:
        if self._evaluation is None:
            return None
        outputs = scores(self._model, self.model_values, self._evaluation.features)
        return evaluate(self._evaluation.labels, outputs, scope=self._scope)

    def _history(self, summaries: tuple[RoundSummary, ...], failed: tuple[FailedRound, ...]) -> History:
        consortium = self._consortium
        return History(
            mode=consortium.mode,
            rule=consortium.rule_name,
            policy=consortium.policy,
            params=consortium.params,
            training={client.name: client.training for client in consortium.clients},
            delta={client.name: client.ledger.budget.delta for client in consortium.clients if client.ledger is not None},
            budget={client.name: client.ledger.budget.epsilon for client in consortium.clients if client.ledger is not None},
            private=self._randomness is None and all(isinstance(client.training, DpSgd) for client in consortium.clients),
            initial=self._initial,
            model=self.model_values,
            rounds=summaries,
            failed=failed,
        )

    def __enter__(self) -> "Simulation":
        return self

    def __exit__(self, *details: object) -> None:
        self._stack.close()
