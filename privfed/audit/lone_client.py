"""One client's update as it comes out of a real round, in which all others send zeros: for trainings on canaries.

The round is encrypted where the consortium's rounds are, and goes through the client's ledger, its training and its encryption, the
server's sum, every participant's approval and the opening. A policy that refuses a sum of one client stays on: as many take part as the
consortium has clients, and the auditor plays all but one.
"""

import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import nn

from privfed.audit.rehearsal import rehearsal_keys
from privfed.client import Client
from privfed.consortium import Consortium
from privfed.data.samples import Samples
from privfed.engines.local import Simulation
from privfed.training.loss import PerSampleLoss
from privfed.training.mechanism import DpSgd, NonPrivate
from privfed.training.model import layout_of
from privfed.training.randomness import Randomness
from privfed.update import PlainVector

# Float32 weights do not move by so little.
_ZEROS = NonPrivate(learning_rate=1e-38, batch_size=1, steps=1, seed=0)
# What the parties of such a round keep need not survive it: where it is small, it stays in memory, if the system has a folder there.
_MEMORY, _SMALL = Path("/dev/shm"), 1_000_000  # noqa: S108 (inside, the folder is one that nobody else can read)
# As far out as noise comes, and as much as the sum of all records may be exceeded before a coordinate saturates.
_DEVIATIONS, _SPARE, _LEAST = 8.0, 2.0, 8.0


def lone_update(
    client: Client,
    module: nn.Module,
    *,
    consortium: Consortium,
    loss: PerSampleLoss,
    _randomness: Callable[[str, int], Randomness] | None = None,
) -> PlainVector:
    """The update of the first of `lone_updates`, which says what the arguments are."""
    return lone_updates(client, module, consortium=consortium, loss=loss, rounds=1, _randomness=_randomness)[0]


def lone_updates(
    client: Client,
    module: nn.Module,
    *,
    consortium: Consortium,
    loss: PerSampleLoss,
    rounds: int,
    _randomness: Callable[[str, int], Randomness] | None = None,
) -> tuple[PlainVector, ...]:
    """Holds rounds in which the others send zeros, and takes from what was opened in each the part of one client.

    Args:
        client: As it trains in the round: with its data for it, its mechanism, and the ledger that is charged.
        module: Architecture, and the weights before the round.
        consortium: Whose number of clients, policy, encryption profile and mode to take. Its keys and clients are not touched.
        loss: Loss per record.
        rounds: Number of rounds, one after the other, at least 1.

    Returns:
        The update of each round, on the grid of the encryption.

    Raises:
        PrivFedError: If the client or the model is refused, or the round cannot be held.
        ValueError: If the client does not train with DP-SGD.
    """
    data = client.data
    nothing = Samples(
        features=np.zeros((1, data.features.shape[1]), dtype=np.float32),
        labels=np.zeros(1, dtype=np.int64),
        groups=None,
        columns=data.columns,
    )
    others = [Client(other.name, nothing, training=_ZEROS) for other in consortium.clients if other.name != client.name]
    keys, kept = rehearsal_keys(consortium, encrypted=consortium.encrypted, clients=1 + len(others))
    params = replace(kept, bound=_bound(client))
    rehearsal = Consortium([replace(client, weight=1), *others], keys=keys, policy=consortium.policy, params=params, loss=loss)
    small = len(rehearsal.clients) * layout_of(module).size <= _SMALL and _MEMORY.is_dir()
    with (
        tempfile.TemporaryDirectory(prefix="privfed-audit-", dir=_MEMORY if small else None) as folder,
        Simulation(rehearsal, module, directory=Path(folder) if rehearsal.encrypted else None, _randomness=_randomness) as simulation,
    ):
        models: list[PlainVector] = []
        history = simulation.run(rounds=rounds, progress=lambda _: models.append(simulation.model_values))
    # A client that pre-scales rounds its share of the update, so that the grid of the update is as much coarser.
    share = simulation.agreement.weighting.share(client.name) if rehearsal.encrypted else None
    step = params.step / float(share or 1)

    def part(before: PlainVector, after: PlainVector, coefficients: Mapping[str, int]) -> PlainVector:
        opened = (after.values - before.values) * (sum(coefficients.values()) / coefficients[client.name])
        return PlainVector(layout=before.layout, values=np.rint(opened / step) * step)

    return tuple(
        part(before, after, summary.record.coefficients)
        for before, after, summary in zip((history.initial, *models), models, history.rounds, strict=False)
    )


def _bound(client: Client) -> float:
    """A bound that no coordinate of the declared training reaches; the grid that follows from it is fine beside the noise."""
    declared = client.training
    if not isinstance(declared, DpSgd):
        raise ValueError(f"expected a client that trains with DP-SGD, got {type(declared).__name__}")
    records = declared.steps * max(1.0, declared.sample_rate * len(client.data))
    noise = _DEVIATIONS * declared.noise_multiplier * math.sqrt(declared.steps)
    one = declared.learning_rate * declared.max_grad_norm / declared.expected_batch_size
    return one * max(_LEAST, _SPARE * (records + noise))
