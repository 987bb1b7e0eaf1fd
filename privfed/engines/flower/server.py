"""The app at the server: it runs the coordinator over Flower's grid. No torch, and no secret key but the server's signing key.

Where the server's folder is comes from the environment of the SuperLink, never from who submits the run.
"""

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from privfed.engines.coordinator import coordinate
from privfed.engines.exchange import Exchange, TimeOuts
from privfed.engines.flower.app import TIME_OUT
from privfed.engines.flower.exchange import FlowerExchange, registered
from privfed.engines.forbidden import forbid_secrets
from privfed.files import read_pinned

FOLDER = "PRIVFED_FOLDER"
"""Environment variable with the path of a party's folder."""
NODES = Path("flower", "nodes")
"""Folder with the public key of each party's SuperNode, below the server's folder."""

_MOST_BYTES = 10_000

app = ServerApp()


def read_node_keys(folder: Path) -> dict[str, bytes]:
    """The public key of each party's SuperNode, by party name, as Flower hands them about.

    Args:
        folder: It holds a file `NAME.pub` for each party, in OpenSSH's format.

    Raises:
        PermissionError: If others than the owner may write a file.
        ValueError: If a file holds no public key.
    """
    return {
        path.stem: load_ssh_public_key(read_pinned(path, most=_MOST_BYTES)).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        for path in sorted(folder.glob("*.pub"))
    }


@app.main()
def coordinate_run(grid: Grid, context: Context) -> None:
    """Holds the rounds that are not held yet; what the server's folder holds already is not done again.

    Raises:
        ImportError: If torch or a secret key was loaded in this process.
        CohortError: If one of them could not be held; Flower would call the run completed.
        PrivFedError: As `coordinate`.
        ValueError: If the environment names no folder.
    """
    forbid_secrets()
    named = os.environ.get(FOLDER)
    if not named:
        raise ValueError(f"expected the SuperLink to be started with {FOLDER}, the path of the server's folder")
    folder = Path(named)
    hold_rounds(folder, FlowerExchange(grid, nodes=registered(read_node_keys(folder / NODES))), config=context.run_config)


def hold_rounds(folder: Path, exchange: Exchange, *, config: Mapping[str, object]) -> None:
    """As `coordinate`, and fails if a round failed now.

    Args:
        folder: The server's.
        exchange: Carries the bytes.
        config: `rounds`, the number of all rounds, and a time-out for each step, as in the app's configuration.

    Raises:
        CohortError: As `CoordinatedRun.check_held`. The rounds that were held stay.
        PrivFedError: As `coordinate`.
    """
    rounds: Any = config["rounds"]
    time_outs: Any = {field.name: config[TIME_OUT + field.name] for field in fields(TimeOuts)}
    coordinate(folder, exchange, rounds=rounds, time_outs=TimeOuts(**time_outs)).check_held()
