"""The same rounds held by parties with folders of their own and by the local engine."""

from pathlib import Path
from typing import Any

import numpy as np

from privfed.engines.coordinator import coordinate
from privfed.engines.dropouts import Absences
from tests.engines.deployed import SERVER, Deployed, simulated
from tests.engines.exchanges import Fault, LocalExchange


def check_same_as_local(
    deployed: Deployed,
    folder: Path,
    *,
    rounds: int,
    fault: Fault | None = None,
    absences: Absences | None = None,
    restarted: tuple[str, ...] = (),
    exact: bool = True,
    **terms: Any,
) -> list[dict[str, int]]:
    """Holds the rounds at both, and gives the coefficients by round.

    Args:
        deployed: The parties.
        folder: New, for the local engine.
        rounds: How many.
        fault: What goes wrong on the way to the parties.
        absences: The same for the local engine.
        restarted: Parties that are stopped and started again after the first round, and the server with them.
        exact: Whether the opened sums are the same integers. With inner products they are those or the ones beside them: a product is
            exact, and so is not always its rescaling.
        terms: Of the consortium, where they are not in the agreement.
    """
    with LocalExchange(deployed, fault=fault) as exchange:
        if restarted:
            coordinate(deployed.folder(SERVER), exchange, rounds=1)
            for name in restarted:
                exchange.restart(name)
        records = coordinate(deployed.folder(SERVER), exchange, rounds=rounds).rounds
    history = simulated(deployed, folder, rounds=rounds, absences=absences, **terms)
    assert [record.round for record in records] == [summary.record.round for summary in history.rounds]
    assert [record.coefficients for record in records] == [summary.record.coefficients for summary in history.rounds]
    assert [record.silent for record in records] == [summary.record.silent for summary in history.rounds]
    assert not np.array_equal(history.model.values, history.initial.values)
    for name in deployed.names:
        np.testing.assert_allclose(deployed.state(name).values.values, history.model.values, rtol=0, atol=0 if exact else 1e-6)
    return [dict(record.coefficients) for record in records]
