"""The app bundle of the consortium: the same bytes wherever it is built, so a bank can name it by its hash.

It holds two lines of code, which import what is installed at each party. Nothing that a party runs comes over the network.
"""

import hashlib
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from flwr.cli.build import build_fab_from_disk

from privfed import __version__
from privfed.engines.exchange import TimeOuts
from privfed.files import make_folder, replace

FOLDER = "consortium-app"
"""Name of the app's folder; Flower demands a name without dots and underscores."""
TIME_OUT = "time-out-"
"""In front of the name of a step: key of its time-out in the app's configuration, in seconds."""

# For each message Flower polls and starts a process, so that the shortest times of other engines are too short for it.
_PATIENT = TimeOuts(status=180.0, setup=240.0, approval=240.0)
_TIME_OUTS = "\n".join(f"{TIME_OUT}{name} = {seconds}" for name, seconds in asdict(_PATIENT).items())
_FILES = {
    "pyproject.toml": f"""\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "privfed-consortium"
version = "{__version__}"
description = "Hands the messages of privfed to each party's own node"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "privfed"

[tool.flwr.app.components]
serverapp = "consortium_app.server:app"
clientapp = "consortium_app.client:app"

[tool.flwr.app.config]
rounds = 1
{_TIME_OUTS}
""",
    "consortium_app/__init__.py": "",
    "consortium_app/server.py": "from privfed.engines.flower import server\n\napp = server.app\n",
    "consortium_app/client.py": "from privfed.engines.flower import client\n\napp = client.app\n",
}


def write_app(parent: Path) -> Path:
    """Writes the app's folder, from which `flwr run` builds the bundle.

    Returns:
        The folder.
    """
    folder = parent / FOLDER
    for name, text in _FILES.items():
        make_folder((folder / name).parent)
        replace(folder / name, text.encode())
    return folder


def bundle_hash(folder: Path) -> str:
    """SHA-256 of the bundle that Flower builds from an app's folder, in hexadecimal."""
    return hashlib.sha256(build_fab_from_disk(folder)).hexdigest()


def installed_hash() -> str:
    """SHA-256 of the app of the privfed that is installed here."""
    with tempfile.TemporaryDirectory(prefix="privfed-") as temporary:
        return bundle_hash(write_app(Path(temporary)))


if __name__ == "__main__":
    sys.stdout.write(f"{installed_hash()}\n")
