"""What one client that lies could make of a round, under the rule and the policy that were agreed on.

Poisoning is told by nobody's secrets, so it is rehearsed in the clear: the clients are as many, weigh as much and train as they declare, on
canaries. The heaviest of them knows all the other updates and sends what it likes, as far as the encoding takes it. Beside what it moves
stands what an honest client moves by having other records.
"""

import secrets
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import nn

from privfed.aggregation.rules import PlaintextRule
from privfed.agreement import SESSION_BYTES
from privfed.attacks.facts import TableSchema
from privfed.attacks.poisoning import InnerProductManipulation, Knowledge, UpdateAttack, sign_flip
from privfed.audit.canaries import Canaries
from privfed.audit.rehearsal import rehearsal_keys
from privfed.client import Client, Trainer
from privfed.consortium import Consortium
from privfed.dp.ledger import Ledger
from privfed.dp.mechanism import Budget
from privfed.engines.plaintext import combine
from privfed.errors import CohortError, OpeningRefusedError
from privfed.he.codec import quantise
from privfed.training.mechanism import DpSgd, TrainingMechanism
from privfed.training.model import values_of
from privfed.training.scaffold import Scaffold
from privfed.update import PlainVector

HONEST = "nothing: it is honest, and has other records"
# Far beyond any bound, so that every coordinate, or the norm, is cut off there.
_LONGEST = 1e9
_ATTACKS: Mapping[str, UpdateAttack] = {
    "its own update, turned round": sign_flip(),
    "the mean of the others, turned round": InnerProductManipulation(factor=1.0),
    "the same, as long as the encoding takes it": InnerProductManipulation(factor=_LONGEST),
}
_MOST_RECORDS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Poisoned:
    """What one client's update makes of a round. Public: the records are canaries.

    Args:
        attack: What the client does, in words.
        held: Whether the rule found weights that the policy allows. If not, the round is skipped, and the model stays as it is.
        share: Share of that client in the mean, from 0 to 1; 0 where the rule sees every update and there is no mean.
        moved: Distance between the model after this round and after one in which the client is honest, in units of how far the latter
            round moves the model. From 0; a skipped round has 1.
        cosine: Of the movement and that of the honest round, from -1 (back) to 1 (on); 0 if the model does not move.
    """

    attack: str
    held: bool
    share: float
    moved: float
    cosine: float

    def sentence(self) -> str:
        """What came of it, in words."""
        if not self.held:
            return "no weights are allowed: the round is skipped, and the model stays as it is"
        return f"the model is off by {self.moved:.0%} of what an honest round moves it; the client's share is {self.share:.0%}"

    def to_json(self) -> dict[str, object]:
        """The numbers as JSON values."""
        return {"attack": self.attack, "held": self.held, "share": self.share, "moved": self.moved, "cosine": self.cosine}


def rehearse_poisoning(consortium: Consortium, model: nn.Module, *, schema: TableSchema, rng: np.random.Generator) -> tuple[Poisoned, ...]:
    """How far one client moves the model, first if it is honest; empty if even a round of honest clients is not held.

    Cumulative scores begin with this round. The consortium's data, keys and ledgers are not touched.

    Args:
        consortium: Whose clients, rule, policy, parameters and loss to take.
        model: Architecture, and the weights before the round.
        schema: The columns of the model's input.
        rng: Source of the canaries.

    Raises:
        PrivFedError: If the model is refused.
    """
    _, params = rehearsal_keys(consortium, encrypted=False, clients=len(consortium.clients))
    start = values_of(model)
    reference = None if consortium.validator is None else consortium.validator.name
    liar = max((client for client in consortium.clients if client.name != reference), key=lambda client: client.weight)

    def trained(client: Client) -> PlainVector:
        return _update(client, consortium=consortium, model=model, schema=schema, rng=rng)

    others = {client.name: trained(client) for client in consortium.clients if client.name != liar.name}
    own, other = trained(liar), trained(liar)
    weights = {client.name: client.weight for client in consortium.clients}

    def outcome(sent: PlainVector) -> tuple[NDArray[np.float64], float] | None:
        updates = others | {liar.name: sent}
        try:
            combined = combine(
                {name: quantise(updates[name].values, params)[0] for name in weights},
                layout=start.layout,
                weights=weights,
                rule=consortium.rule,
                policy=consortium.policy,
                params=params,
                round=0,
                validator=reference,
                noise_energy=consortium.noise_energy(start.layout.size),
            )
        except (CohortError, OpeningRefusedError):
            return None
        except ValueError:
            if not isinstance(consortium.rule, PlaintextRule):
                raise
            return None  # a rule that sees every update refuses too few clients as a value
        share = 0.0 if combined.aggregate is None else combined.coefficients[liar.name] / sum(combined.coefficients.values())
        return combined.movement.values, share

    honest = outcome(own)
    if honest is None or not honest[0].any():
        return ()
    knowledge = Knowledge(own=own, honest=[vector for name, vector in others.items() if name != reference])
    sent = {HONEST: other} | {name: attack.poison(knowledge, rng=rng) for name, attack in _ATTACKS.items()}
    return tuple(_poisoned(name, outcome(vector), honest[0]) for name, vector in sent.items())


def _poisoned(attack: str, outcome: tuple[NDArray[np.float64], float] | None, honest: NDArray[np.float64]) -> Poisoned:
    if outcome is None:
        return Poisoned(attack=attack, held=False, share=0.0, moved=1.0, cosine=0.0)
    moved, share = outcome
    length, whole = float(np.linalg.norm(moved)), float(np.linalg.norm(honest))
    cosine = float(moved @ honest) / (length * whole) if length else 0.0
    return Poisoned(
        attack=attack, held=True, share=share, moved=float(np.linalg.norm(moved - honest)) / whole, cosine=max(-1.0, min(1.0, cosine))
    )


def _update(client: Client, *, consortium: Consortium, model: nn.Module, schema: TableSchema, rng: np.random.Generator) -> PlainVector:
    """What a client sends that trains as it declares, on as many canaries as one of its batches has records."""
    start = values_of(model)
    training, count = _on_canaries(client.training)
    made_up = Canaries.draw(schema, count=count, rng=rng).samples(client.data.columns)
    with ExitStack() as stack:
        ledger = None
        if isinstance(training, DpSgd):
            path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="privfed-audit-"))) / "canaries.ledger"
            budget = Budget.unlimited(delta=1e-5)  # the rows are nobody's
            ledger = stack.enter_context(Ledger.open(path, population="canaries", budget=budget))
        trainer = Trainer(
            client=replace(client, data=made_up, training=training, ledger=ledger, compiled=None, compressor=None),
            model=model,
            start=start,
            loss=consortium.loss,
            params=consortium.params,
            # In its first round SCAFFOLD corrects nothing.
            correction=None if isinstance(consortium.correction, Scaffold) else consortium.correction,
        )
        return trainer.train(start, session=secrets.token_bytes(SESSION_BYTES), round=0, attempt=0).vector


def _on_canaries(declared: TrainingMechanism) -> tuple[TrainingMechanism, int]:
    """The training in which every step takes all of so many canaries, and noise and step of a record are as declared."""
    if not isinstance(declared, DpSgd):
        count = min(declared.batch_size, _MOST_RECORDS)
        return replace(declared, batch_size=count), count
    count = min(declared.expected_batch_size, _MOST_RECORDS)
    whole = replace(
        declared,
        sample_rate=1.0,
        expected_batch_size=count,
        max_records=count,
        learning_rate=declared.learning_rate * count / declared.expected_batch_size,
        batch_capacity=None,
        records_per_customer=None,
    )
    return whole, count
