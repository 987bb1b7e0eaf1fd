"""What each party holds after one round: a view follows from the party's capabilities and the record of the round alone."""

from dataclasses import dataclass, replace

import numpy as np

from privfed.attacks.adversary import Adversary, Form, Holding
from privfed.attacks.facts import Activation, TableSchema, TrainingFacts
from privfed.attacks.observation import CiphertextOnly, Observation
from privfed.attacks.record import EncryptedRecord, PlaintextRecord, Record
from privfed.he.secret import SECRET_BYTES
from privfed.update import PlainVector
from privfed.written_agreement import encode_agreement

_WIRE = ("setup", "upload", "digest", "approval", "aggregate", "opened")
_BYTES_PER_WEIGHT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFacts:
    """What everybody knows about how the clients of a round trained, and on what kind of table. Public."""

    training: TrainingFacts
    activation: Activation
    schema: TableSchema


@dataclass(frozen=True, kw_only=True, repr=False)
class View:
    """What one party holds after a round, and the best of it to attack.

    Args:
        adversary: The party.
        holdings: Everything that it holds of the round.
        clients: Clients whose rows are behind what the observation shows. Public.
        observation: What an attack gets. Private where it is in the clear.
    """

    adversary: Adversary
    holdings: tuple[Holding, ...]
    clients: tuple[str, ...]
    observation: Observation


def view(record: Record, facts: RoundFacts, adversary: Adversary, *, target: str, insider: str) -> View:
    """What a party holds after a round.

    What it can read of the target's rows is the target's own update where it has that client's message and can open it, else the
    sum without what it knows itself, else nothing. A server that stores the secret key holds it, whatever the trust mode says.

    Args:
        record: The round.
        facts: How the clients trained.
        adversary: The party.
        target: The client that is attacked.
        insider: The client that the adversary is, if it trains.

    Raises:
        ValueError: If target and insider are the same or not in the sum, the party sees nothing of this round, or the server holds
            something that no message accounts for.
    """
    coefficients = {name: coefficient for name, coefficient in record.opened.coefficients.items() if coefficient}
    if target == insider or not {target, insider} <= coefficients.keys():
        raise ValueError("expected two different participants as target and insider")
    if adversary.runs_server and isinstance(record, EncryptedRecord) and record.key_at_server:
        adversary = replace(adversary, holds_key=True)
    holdings = _holdings(record, adversary, insider=insider)
    clients: tuple[str, ...] = (target,)
    seen: PlainVector | CiphertextOnly
    if adversary.sees_messages and (isinstance(record, PlaintextRecord) or adversary.holds_key):
        seen = record.update_of(target)
    elif adversary.gets_model:
        clients = tuple(name for name in coefficients if not (adversary.trains and name == insider))
        seen = _without(record, insider) if adversary.trains else record.opened.vector
    else:
        seen = CiphertextOnly(bytes_seen=sum(holding.size for holding in holdings if holding.form is Form.CIPHERTEXT))
    observation = Observation(
        layout=record.start.layout,
        model=record.start if isinstance(seen, PlainVector) else None,
        seen=seen,
        coefficients=tuple(coefficients[name] for name in clients),
        training=facts.training,
        activation=facts.activation,
        schema=facts.schema,
        rounding_step=record.params.step,
    )
    return View(adversary=adversary, holdings=holdings, clients=clients, observation=observation)


def _without(record: Record, insider: str) -> PlainVector:
    """The mean of the others' updates, for a client that takes its own out of the sum."""
    coefficients = record.opened.coefficients
    total, own = sum(coefficients.values()), coefficients[insider]
    others = record.opened.vector.values * total - own * record.update_of(insider).values
    # Both are multiples of the step up to rounding in double precision, and so is their difference.
    return PlainVector(layout=record.start.layout, values=np.rint(others / record.params.step) * record.params.step / (total - own))


def _holdings(record: Record, adversary: Adversary, *, insider: str) -> tuple[Holding, ...]:
    holdings: list[Holding] = []
    size = record.start.layout.size * _BYTES_PER_WEIGHT
    if adversary.sees_messages and isinstance(record, EncryptedRecord):
        if adversary.runs_server:
            terms = len(encode_agreement(record.context.agreement))
            holdings.append(Holding(what="agreed terms: parties, weights, shape of the model, policy", size=terms, form=Form.PUBLIC))
        for kind, holding in record.files:
            if adversary.runs_server or kind in _WIRE:
                openable = adversary.holds_key and holding.form is Form.CIPHERTEXT
                holdings.append(Holding(what=holding.what, size=holding.size, form=Form.OPENABLE if openable else holding.form))
    elif adversary.runs_server and isinstance(record, PlaintextRecord):
        holdings += [Holding(what=f"update of {client}", size=size, form=Form.NUMBERS) for client in record.updates]
    if adversary.gets_model:
        holdings.append(Holding(what="the model before and after the round, and so the opened sum", size=2 * size, form=Form.NUMBERS))
    if adversary.holds_key and isinstance(record, EncryptedRecord):
        holdings.append(Holding(what="the key of the round", size=SECRET_BYTES, form=Form.OWN))
    if adversary.trains:
        holdings.append(Holding(what=f"rows and update of {insider}", size=size, form=Form.OWN))
    if not holdings:
        raise ValueError(f"expected a party that takes part in the round or watches it, got {adversary.name!r}")
    return tuple(holdings)
