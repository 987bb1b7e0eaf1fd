"""The same consortium in one process: what a run over FLARE must end with."""

import json
import runpy
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from privfed.consortium import Consortium
from privfed.deploy.deployment import SERVER, Deployment
from privfed.dp.ledger import Ledger
from privfed.engines.local import Simulation
from privfed.engines.party_folder import read_agreement
from privfed.he.secret import SharedKey

State = dict[str, NDArray[np.float64]]


def reference(
    folder: Path, deployment: Path, *, rounds: int, away: Mapping[int, str] | None = None
) -> tuple[NDArray[np.float64], dict[str, float]]:
    """Weights after so many rounds, and what each bank has spent, with the banks' own code and randomness, in this process.

    Args:
        folder: For the run.
        deployment: From which `site.py` is taken.
        rounds: Number of rounds.
        away: Who is not there, by round.
    """
    banks = Deployment.load(deployment / SERVER).banks
    with ExitStack() as stack:
        clients = []
        sites = {}
        for name in banks:
            (folder / name).mkdir(parents=True)
            (folder / name / "site.py").write_bytes((deployment / name / "site.py").read_bytes())
            (folder / name / "party.txt").write_text(name)
            sites[name] = runpy.run_path(str(folder / name / "site.py"))
            clients.append(sites[name]["client"]())
            stack.callback(clients[-1].ledger.close)
        site = sites[banks[0]]
        consortium = Consortium(clients, keys=SharedKey.generate(), loss=site["loss"], policy=read_agreement(deployment / SERVER).policy)
        simulation = stack.enter_context(Simulation(consortium, site["model"](), directory=folder / "run", _randomness=site["_randomness"]))
        absences = None if away is None else _Away(away)
        history = simulation.run(rounds=rounds, absences=absences)
        return history.model.values, dict(history.epsilon)


class _Away:
    def __init__(self, away: Mapping[int, str]) -> None:
        self._away = away

    def silent(self, number: int, names: list[str]) -> dict[str, object]:
        from privfed.round_record import Stage

        return {self._away[number]: Stage.SETUP} if number in self._away else {}


def model_at(bank: Path) -> tuple[NDArray[np.float64], list[int]]:
    """The weights in a bank's folder, and the rounds in them."""
    with np.load(next((bank / "state").glob("*model*")), allow_pickle=False) as stored:
        return stored["values"], stored["rounds"].tolist()


def spent(bank: Path) -> tuple[float, int]:
    """What a bank's ledger says was spent, and how many charges that were."""
    with Ledger.reopen(bank / "ledger") as ledger:
        return ledger.spent(), len(ledger.events())


def records(server: Path) -> list[dict[str, object]]:
    """The server's record of rounds."""
    return [json.loads(line) for line in (server / "rounds.jsonl").read_text().splitlines()]
