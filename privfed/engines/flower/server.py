"""The app at the server: it runs the coordinator over Flower's grid. No torch, and no secret key but the server's signing key.

Where the server's folder is comes from the environment of the SuperLink, never from who submits the run.
"""

import os
from pathlib import Path

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from privfed.engines.coordinator import TimeOuts, coordinate
from privfed.engines.flower.exchange import FlowerExchange, registered
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
        PrivFedError: If a round could not be held; the run then counts as failed.
        ValueError: If the environment names no folder, or the run no number of rounds.
    """
    folder = os.environ.get(FOLDER)
    if not folder:
        raise ValueError(f"expected the SuperLink to be started with {FOLDER}, the path of the server's folder")
    rounds = context.run_config["rounds"]
    if not isinstance(rounds, int) or isinstance(rounds, bool):
        raise ValueError(f"expected rounds to be a whole number, got {type(rounds).__name__}")  # noqa: TRY004
    exchange = FlowerExchange(grid, nodes=registered(read_node_keys(Path(folder) / NODES)))
    coordinate(Path(folder), exchange, rounds=rounds, time_outs=TimeOuts())
