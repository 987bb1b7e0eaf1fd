"""Interpreters with the libraries of peers, which cannot be installed beside ours; made on demand and kept."""

import shutil
import subprocess
import sys
import venv
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.he.catalogue import Contender

DEFAULT_FOLDER = Path.home() / ".cache" / "privfed-bench"
_VERSIONS = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"


class MissingPeerError(Exception):
    """Why an implementation cannot be measured here."""


def interpreter(contender: Contender, folder: Path, *, install: bool, beside: tuple[str, ...] = ()) -> Path:
    """The interpreter in which a contender runs, installed if need be, with the requirements that it needs beside its own.

    Raises:
        MissingPeerError: If it is not there and may not, or cannot, be installed.
    """
    if contender.requirement is None:
        return Path(sys.executable)
    home = folder / contender.requirement.replace("[", "-").replace("]", "-")
    python, complete = home / "bin" / "python", home / "complete"
    if complete.exists():
        return python
    if not install:
        raise MissingPeerError(f"not installed here: {contender.requirement}")
    try:
        shutil.rmtree(home, ignore_errors=True)  # what an interrupted run left
        venv.create(home, with_pip=True)
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", contender.requirement, *beside], check=True, capture_output=True, text=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise MissingPeerError(f"{contender.requirement} could not be installed: {said[-1] if said else 'no reason was given'}") from error
    complete.touch()
    return python


def versions(contender: Contender, python: Path) -> dict[str, str]:
    """Version of each library that a contender is made of.

    Raises:
        MissingPeerError: If one of them is not there.
    """
    try:
        if contender.requirement is None:
            found = [version(name) for name in contender.libraries]
        else:
            command = [python, "-c", _VERSIONS, *contender.libraries]
            found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    except (OSError, PackageNotFoundError, subprocess.CalledProcessError) as error:
        raise MissingPeerError(f"not all of {', '.join(contender.libraries)} is installed") from error
    return dict(zip(contender.libraries, found, strict=True))
