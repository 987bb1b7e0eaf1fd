"""Sums of 3, 10 and 100 clients over real wire bytes, with clients that fall silent before and after their upload: bit for bit.

With 100 clients every night, because of their ten thousand shares; their sums without messages are in `tests/he`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from privfed.consortium import Consortium
from privfed.engines.local import Simulation
from privfed.he.escrow_secret import EscrowKey
from privfed.he.params import CkksParams
from privfed.he.threshold_key import ThresholdKey
from privfed.round import Stage
from tests.engines.test_threshold import Script

Make = Callable[..., Consortium]


def rounds_of(lost: Sequence[int], after: Stage) -> list[tuple[int, Mapping[str, Stage]]]:
    """For each number of dropouts: all before the upload, all after it, half of them either way; each once."""
    rounds: list[tuple[int, Mapping[str, Stage]]] = []
    for count in lost:
        for before in sorted({0, count // 2, count}):
            stages = [Stage.SETUP if index % 2 else Stage.UPLOAD for index in range(before)] + [after] * (count - before)
            rounds.append((before, {f"bank_{index}": stage for index, stage in enumerate(stages)}))
    return rounds


@pytest.mark.parametrize(
    ("clients", "corrupted", "lost"), [(3, 1, (0,)), (10, 2, range(4)), pytest.param(100, 20, (0, 39), marks=pytest.mark.nightly)]
)
def test_a_quorum_opens_exact_sums_with_every_number_of_dropouts_before_and_after_the_upload(
    model: torch.nn.Module, non_private: Make, clients: int, corrupted: int, lost: Sequence[int]
) -> None:
    """Whoever falls silent after its upload is in the sum all the same: a quorum of the others opens it."""
    rounds = rounds_of(lost, Stage.APPROVAL)
    options = {
        "keys": ThresholdKey(clients=clients, corrupted=corrupted, dropouts=max(lost)),
        "params": CkksParams.threshold(clients=clients),
    }
    script = Script(**{f"round_{index}": silent for index, (_, silent) in enumerate(rounds)})
    with Simulation(non_private(count=clients, weights=weights(clients), **options), model) as simulation:
        history = simulation.run(rounds=len(rounds), absences=script)
    assert history.grid_error_max == 0
    assert [len(summary.record.participants) for summary in history.rounds] == [clients - before for before, _ in rounds]


@pytest.mark.parametrize(("clients", "lost"), [(3, (0,)), (10, range(4)), pytest.param(100, (0, 39), marks=pytest.mark.nightly)])
def test_a_key_holder_opens_exact_sums_with_every_number_of_dropouts_before_and_after_the_upload(
    model: torch.nn.Module, non_private: Make, clients: int, lost: Sequence[int]
) -> None:
    """Whoever falls silent after its approval is in the sum; who uploaded and approves nothing stops the round, and the next is held."""
    rounds = rounds_of(lost, Stage.OPENING)
    script = Script(
        **{f"round_{index}": silent for index, (_, silent) in enumerate(rounds)},
        **{f"round_{len(rounds)}": {"bank_0": Stage.APPROVAL}},
    )
    options: dict[str, Any] = {"keys": EscrowKey.generate(), "params": CkksParams.escrow()}
    with Simulation(non_private(count=clients, weights=weights(clients), **options), model) as simulation:
        history = simulation.run(rounds=len(rounds) + 2, absences=script)
    assert history.grid_error_max == 0
    assert [failed.round for failed in history.failed] == [len(rounds)]
    assert [len(summary.record.participants) for summary in history.rounds] == [*(clients - before for before, _ in rounds), clients]


def weights(clients: int) -> tuple[float, ...]:
    return tuple(1.0 + index % 3 for index in range(clients))
