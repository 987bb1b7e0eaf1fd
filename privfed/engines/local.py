"""All parties on one machine, exchanging real wire bytes: for simulations, demonstrations and tests."""

import math
import secrets
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import nn

from privfed.agreement import SESSION_BYTES, Agreement, RoundContext
from privfed.client import Trainer
from privfed.consortium import Consortium, Plaintext
from privfed.data.samples import Samples
from privfed.engines.plaintext import run_plaintext_round
from privfed.engines.spawned import SpawnedServer
from privfed.he.codec import quantise
from privfed.history import History, RoundSummary
from privfed.identity import Identity, Roster
from privfed.round import RoundRecord, RoundServer, run_round
from privfed.selection import select_clients
from privfed.server import Server
from privfed.session import ClientSession
from privfed.training.evaluate import Evaluation, EvaluationScope, evaluate
from privfed.training.mechanism import DpSgd
from privfed.training.model import check_model, scores, values_of
from privfed.training.randomness import Randomness
from privfed.update import PlainVector, Update

if TYPE_CHECKING:
    from privfed.he.secret import SharedKey

SERVER_NAME = "server"


def simulate(
    consortium: Consortium,
    model: nn.Module,
    *,
    rounds: int,
    fraction: float = 1.0,
    rng: np.random.Generator | None = None,
    evaluation: Samples | None = None,
    scope: EvaluationScope = EvaluationScope.SIMULATION_ONLY,
    progress: Callable[[RoundSummary], None] | None = None,
) -> History:
    """Trains a model with a consortium, all parties in this process.

    Args:
        consortium: Who trains together, and how.
        model: Architecture and initial weights. It is not changed.
        rounds: Number of rounds, at least 1.
        fraction: Share of the clients that each round selects, above 0 and up to 1; never fewer than the policy demands.
        rng: Source of the selection; needed if `fraction` is below 1.
        evaluation: Records to evaluate the model on after each round.
        scope: What kind of records those are.
        progress: Is called after each round.

    Returns:
        What happened, what was spent, and the model.

    Raises:
        PrivFedError: If a client, the model or the policy is refused, or a round cannot be held.
        ValueError: If an argument is out of its range.
    """
    with Simulation(consortium, model, evaluation=evaluation, scope=scope) as simulation:
        return simulation.run(rounds=rounds, fraction=fraction, rng=rng, progress=progress)


class Simulation:
    """The parties of a consortium on this machine. Use it in a `with` block; `simulate` is the short way.

    Args:
        consortium: Who trains together, and how.
        model: Architecture and initial weights.
        evaluation: Records to evaluate on.
        scope: What kind of records those are.
        separate_server: Whether the server is a process of its own.
    """

    def __init__(
        self,
        consortium: Consortium,
        model: nn.Module,
        *,
        evaluation: Samples | None = None,
        scope: EvaluationScope = EvaluationScope.SIMULATION_ONLY,
        separate_server: bool = False,
        _randomness: Callable[[str, int], Randomness] | None = None,
    ) -> None:
        check_model(model)
        self._consortium = consortium
        self._model = model
        self._evaluation = evaluation
        self._scope = scope
        self._randomness = _randomness
        self._initial = values_of(model)
        self._session = secrets.token_bytes(SESSION_BYTES)
        self._updates: dict[str, Update[PlainVector]] = {}
        self._trainers = {client.name: self._trainer(client.name) for client in consortium.clients}
        self._stack = ExitStack()
        self._spawned: SpawnedServer | None = None
        self._sessions: dict[str, ClientSession] = {}
        self._plain_model = self._initial
        if not isinstance(consortium.keys, Plaintext):
            self._set_up(consortium.keys, separate_server=separate_server)

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
            randomness=None if randomness is None else lambda number: randomness(name, number),
            witness=lambda update: self._updates.update({update.sender: update}),
        )

    def _set_up(self, keys: "SharedKey", *, separate_server: bool) -> None:
        consortium = self._consortium
        root = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="privfed-")))
        server = Identity.generate(SERVER_NAME)
        identities = {client.name: Identity.generate(client.name) for client in consortium.clients}
        self.agreement = Agreement(
            session=self._session,
            roster=Roster(server=server.public, clients=tuple(identity.public for identity in identities.values())),
            params=consortium.params,
            layout=self._initial.layout,
            weights={client.name: client.weight for client in consortium.clients},
            rule=consortium.rule,
            policy=consortium.policy,
        )
        self._sessions = {
            name: ClientSession(
                trainer=self._trainers[name],
                identity=identity,
                agreement=self.agreement,
                keys=keys,
                start=self._initial,
                directory=root / name,
            )
            for name, identity in identities.items()
        }
        self._server_identity, self._spool = server, root / "spool"
        if separate_server:
            server.save(root / "server.pem")
            self._spawned = self._stack.enter_context(
                SpawnedServer(agreement=self.agreement, identity_path=root / "server.pem", spool=self._spool)
            )

    def run(
        self,
        *,
        rounds: int,
        fraction: float = 1.0,
        rng: np.random.Generator | None = None,
        progress: Callable[[RoundSummary], None] | None = None,
    ) -> History:
        """Runs the rounds; see `simulate`."""
        if rounds < 1:
            raise ValueError(f"expected at least 1 round, got {rounds}")
        if fraction < 1 and rng is None:
            raise ValueError("expected rng where fraction is below 1: selection is explicit")
        summaries: list[RoundSummary] = []
        for number in range(rounds):
            record = self._round(number, self._select(fraction, rng))
            summary = RoundSummary(
                record=record, epsilon=self._epsilon(), grid_error_max=self._grid_error(record), evaluation=self._evaluate()
            )
            summaries.append(summary)
            if progress is not None:
                progress(summary)
        return self._history(tuple(summaries))

    def _select(self, fraction: float, rng: np.random.Generator | None) -> tuple[str, ...]:
        names = tuple(self._trainers)
        if rng is None:
            return names
        return select_clients(names, fraction=fraction, rng=rng, minimum=min(self._consortium.policy.min_clients, len(names)))

    def _round(self, number: int, selected: Sequence[str]) -> RoundRecord:
        self._updates.clear()
        if self._sessions:
            context = RoundContext(agreement=self.agreement, round=number)
            return run_round(server=self._round_server(context, selected), sessions=self._sessions, context=context, selected=selected)
        record = run_plaintext_round(
            trainers=self._trainers,
            selected=selected,
            start=self._plain_model,
            weights={client.name: client.weight for client in self._consortium.clients},
            rule=self._consortium.rule,
            policy=self._consortium.policy,
            params=self._consortium.params,
            session=self._session,
            round=number,
        )
        self._plain_model = PlainVector(layout=self._initial.layout, values=self._plain_model.values + record.aggregate.vector.values)
        return record

    def _round_server(self, context: RoundContext, selected: Sequence[str]) -> RoundServer:
        if self._spawned is not None:
            return self._spawned.begin(context, selected)
        return Server(context=context, identity=self._server_identity, selected=selected, spool=self._spool)

    @property
    def server_pid(self) -> int:
        """Process id of the separate server.

        Raises:
            ValueError: If the server is in this process.
        """
        if self._spawned is None:
            raise ValueError("expected separate_server=True, the server is in this process")
        return self._spawned.pid

    @property
    def model_values(self) -> PlainVector:
        """The weights after the rounds so far; every client holds the same."""
        return next(iter(self._sessions.values())).state.values if self._sessions else self._plain_model

    def _grid_error(self, record: RoundRecord) -> int:
        """Largest difference, in grid steps, between what was opened and the integer weighted sum of what was trained."""
        params = self._consortium.params
        expected = np.zeros(self._initial.layout.size, dtype=np.int64)
        for name, coefficient in record.coefficients.items():
            expected += coefficient * quantise(self._updates[name].vector.values, params)[0]
        opened = np.rint(record.aggregate.vector.values * sum(record.coefficients.values()) / params.step).astype(np.int64)
        return int(np.abs(opened - expected).max())

    def _epsilon(self) -> dict[str, float]:
        return {client.name: math.inf if client.ledger is None else client.ledger.spent() for client in self._consortium.clients}

    def _evaluate(self) -> Evaluation | None:
        if self._evaluation is None:
            return None
        outputs = scores(self._model, self.model_values, self._evaluation.features)
        return evaluate(self._evaluation.labels, outputs, scope=self._scope)

    def _history(self, summaries: tuple[RoundSummary, ...]) -> History:
        consortium = self._consortium
        return History(
            mode=consortium.mode,
            rule=consortium.rule.name,
            policy=consortium.policy,
            params=consortium.params,
            training={client.name: client.training for client in consortium.clients},
            delta={client.name: client.ledger.budget.delta for client in consortium.clients if client.ledger is not None},
            private=self._randomness is None and all(isinstance(client.training, DpSgd) for client in consortium.clients),
            initial=self._initial,
            model=self.model_values,
            rounds=summaries,
        )

    def __enter__(self) -> "Simulation":
        return self

    def __exit__(self, *details: object) -> None:
        self._stack.close()
