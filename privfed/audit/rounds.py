"""Canary rounds: real rounds, through the engine and its wire bytes, in which the clients' data are canaries."""

import math
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torch import nn

from privfed.agreement import RoundContext
from privfed.attacks.facts import Activation, BinaryLoss, GaussianNoise, Sgd, SoftmaxLoss, TrainingFacts
from privfed.attacks.record import EncryptedRecord, PlaintextRecord, Record
from privfed.attacks.views import RoundFacts
from privfed.audit.canaries import Canaries
from privfed.audit.rehearsal import rehearsal_keys
from privfed.client import Client
from privfed.consortium import Consortium, Plaintext
from privfed.dp.ledger import Ledger
from privfed.dp.mechanism import Budget
from privfed.engines.local import Simulation
from privfed.errors import UnsupportedModelError
from privfed.he.params import CkksParams
from privfed.he.threshold_key import ThresholdKey
from privfed.training.loss import BinaryCrossEntropy, PerSampleLoss, binary_cross_entropy, cross_entropy
from privfed.training.mechanism import DpSgd, NonPrivate, TrainingMechanism
from privfed.training.scaffold import Scaffold
from privfed.update import Aggregate, PlainVector

# As a share of the bound on a coordinate: small enough that no coordinate of the control's update is cut off there.
_CONTROL_LEARNING_RATE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How a canary round is protected. Public.

    Args:
        training: How each client trains.
        encrypted: Whether updates travel encrypted, in the consortium's trust mode.
        steps: Of how many steps with the noise that is declared the noise of the one step stands for; 1 if it is that of one.
    """

    training: TrainingMechanism
    encrypted: bool
    steps: int = 1

    @property
    def protection(self) -> str:
        """What protects, in words."""
        noise = "no differential privacy"
        if isinstance(self.training, DpSgd):
            noise = f"DP-SGD with noise multiplier {self.training.noise_multiplier:.3g}"
            noise += f" (what {self.steps} steps of a round leave of it)" if self.steps > 1 else ""
        return f"{'encrypted' if self.encrypted else 'no encryption'}, {noise}"


def audited_setting(consortium: Consortium, *, rows: int) -> Setting:
    """The consortium's own protection, in the case that is worst for a client: one step that visits all its rows.

    Noise, clipping and the step of a single record are those of the client whose rounds hide a record least. A batch of more records than
    `smallest_batch`, or a sample that leaves rows out, can only hide more. Over T steps with sample rate q a record adds up q T times and
    the noise sqrt(T) times, so that where q sqrt(T) is above 1, a round says that much more of a record than a step: the noise is divided
    by it. And where clipping adapts, a step's sum and count together say
    as much as the sum of a step with a fixed norm.
    """
    weakest = min((client.training for client in consortium.clients), key=lambda one: _noise(one) / _visits(one))
    training: TrainingMechanism
    if isinstance(weakest, DpSgd):
        # The learning rate over the batch size stays what it is, and with it how far a record, or the noise, moves a weight.
        rate = weakest.learning_rate * rows / weakest.expected_batch_size
        training = replace(
            weakest,
            noise_multiplier=weakest.noise_multiplier / _visits(weakest),
            sample_rate=1.0,
            steps=1,
            expected_batch_size=rows,
            max_records=rows,
            learning_rate=rate,
            max_grad_norm=weakest.initial_norm,
            batch_capacity=None,
            records_per_customer=None,
            adaptive_clipping=None,
        )
    else:
        training = replace(weakest, steps=1, batch_size=rows)
    return Setting(training=training, encrypted=consortium.encrypted, steps=weakest.steps if _visits(weakest) > 1 else 1)


def smallest_batch(consortium: Consortium) -> int:
    """Fewest records that a step of some client is declared to be over, at least 1."""
    trainings = [client.training for client in consortium.clients]
    return max(1, min(one.expected_batch_size if isinstance(one, DpSgd) else one.batch_size for one in trainings))


def control_setting(params: CkksParams, *, rows: int, encrypted: bool) -> Setting:
    """The planted positive: nothing hides the rows from whoever can read the update."""
    training = NonPrivate(learning_rate=_CONTROL_LEARNING_RATE * params.bound, batch_size=rows, steps=1, seed=0)
    return Setting(training=training, encrypted=encrypted)


def _noise(training: TrainingMechanism) -> float:
    return training.noise_multiplier if isinstance(training, DpSgd) else 0.0


def _visits(training: TrainingMechanism) -> float:
    """How much more a round says of a record than one step that takes it; at least 1."""
    return max(1.0, training.sample_rate * math.sqrt(training.steps)) if isinstance(training, DpSgd) else 1.0


def facts(setting: Setting, model: nn.Module, *, loss: PerSampleLoss, canaries: Canaries) -> RoundFacts:
    """What everybody knows about a canary round.

    Raises:
        UnsupportedModelError: If attacks do not know the loss.
    """
    training, noise = setting.training, None
    if isinstance(training, DpSgd):
        noise = GaussianNoise(noise_multiplier=training.noise_multiplier, max_grad_norm=training.max_grad_norm)
    return RoundFacts(
        training=TrainingFacts(
            optimizer=Sgd(learning_rate=training.learning_rate),
            loss=_known_loss(loss),
            steps=training.steps,
            batch_size=len(canaries),
            noise=noise,
        ),
        activation=_activation(model),
        schema=canaries.schema,
    )


def _known_loss(loss: PerSampleLoss) -> BinaryLoss | SoftmaxLoss:
    if isinstance(loss, BinaryCrossEntropy):
        return BinaryLoss(positive_weight=loss.positive_weight)
    if loss is binary_cross_entropy:
        return BinaryLoss()
    if loss is cross_entropy:
        return SoftmaxLoss()
    raise UnsupportedModelError("the attacks know the losses of privfed.training.loss only; nothing was attacked")


def _activation(model: nn.Module) -> Activation:
    layers = [layer for layer in model.modules() if not list(layer.children())]
    return Activation.RELU if len(layers) > 1 and isinstance(layers[1], nn.ReLU) else Activation.OTHER


def _weights(consortium: Consortium, *, count: int) -> list[float]:
    """Of so many canary clients: the first has the share of the heaviest client of the consortium, the others what is left, evenly."""
    weights = [client.weight for client in consortium.clients]
    share = max(weights) / sum(weights)
    return [1.0] * count if share * count <= 1 else [share * (count - 1) / (1 - share), *[1.0] * (count - 1)]


def hold_canary_round(
    consortium: Consortium, model: nn.Module, setting: Setting, canaries: Mapping[str, Canaries], *, columns: tuple[str, ...]
) -> Record:
    """Holds one round among clients whose data are canaries, with keys, identities and ledgers of its own.

    The first of them weighs as much as the heaviest client does in a round of the whole consortium: a sum says most about that one.

    Args:
        consortium: Whose policy, parameters, loss and correction to take. Its clients, keys and ledgers are not touched.
        model: Architecture, and the weights before the round.
        setting: How the round is protected.
        canaries: Each client's data.
        columns: Names of the input columns.

    Returns:
        The round as it ran.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="privfed-audit-")))
        clients: list[Client] = []
        for (name, made_up), weight in zip(canaries.items(), _weights(consortium, count=len(canaries)), strict=True):
            ledger = None
            if isinstance(setting.training, DpSgd):
                budget = Budget.unlimited(delta=1e-5)  # the rows are nobody's
                ledger = stack.enter_context(Ledger.open(folder / f"{name}.ledger", population="canaries", budget=budget))
            clients.append(Client(name, made_up.samples(columns), training=setting.training, ledger=ledger, weight=weight))
        keys, params = rehearsal_keys(consortium, encrypted=setting.encrypted, clients=len(clients))
        # In its first round SCAFFOLD corrects nothing.
        correction = None if isinstance(consortium.correction, Scaffold) else consortium.correction
        rehearsal = Consortium(clients, keys=keys, policy=consortium.policy, params=params, loss=consortium.loss, correction=correction)
        simulation = stack.enter_context(Simulation(rehearsal, model, directory=folder / "run" if setting.encrypted else None))
        history = simulation.run(rounds=1)
        coefficients = history.rounds[0].record.coefficients
        divisor = float(simulation.agreement.weighting.divisor(list(coefficients)) if setting.encrypted else sum(coefficients.values()))
        grid = (history.model.values - history.initial.values) * divisor / params.step
        opened = Aggregate(
            round=0,
            vector=PlainVector(layout=history.initial.layout, values=np.rint(grid) * params.step / divisor),
            coefficients=coefficients,
        )
        updates = {name: update.vector for name, update in simulation.updates.items()}
        if isinstance(keys, Plaintext):
            return PlaintextRecord(params=params, start=history.initial, opened=opened, updates=updates)
        server = simulation.server_folder
        return EncryptedRecord(
            context=RoundContext(agreement=simulation.agreement, round=0),
            keys=None if isinstance(keys, ThresholdKey) else keys,
            updates=updates if isinstance(keys, ThresholdKey) else {},
            start=history.initial,
            opened=opened,
            published=grid,
            stored={str(path.relative_to(server)): path.read_bytes() for path in sorted(server.rglob("*")) if path.is_file()},
        )
