"""Starts a bank's SuperNode so that it runs no app but those that the bank has named.

Flower runs whatever app the SuperLink sends. Its own check of apps asks a service of its makers. So the place of that check is taken by
one against a file of the bank's: `python -m privfed.engines.flower.supernode --apps FILE ...`, with the arguments of
`flower-supernode` behind it. Flower has no public seam for this; therefore exactly one minor version is accepted, and every
expectation about it is checked before the node starts.
"""

import argparse
import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from flwr.cli.config_utils import get_fab_metadata
from flwr.supercore.constant import TaskType
from flwr.supercore.version import package_version
from flwr.supernode import start_client_internal as internals
from flwr.supernode.cli.flower_supernode import flower_supernode

from privfed.files import read_pinned

_VERSION = "1.42."
_MOST_BYTES = 2**16
_FORBIDDEN = ("--insecure", "--trusted-entities", "--allow-runtime-dependency-installation")
_SEAMS = {
    "_pull_and_store_message": {"get_run", "get_fab", "trusted_entities"},
    "_verify_fab": {"fab", "trusted_entities"},
}


class _Bundle(Protocol):
    hash_str: str
    content: bytes
    verifications: dict[str, str]


def read_apps(path: Path) -> frozenset[str]:
    """The hashes in a bank's file of allowed apps: one SHA-256 a line, in hexadecimal; what follows a # is a comment.

    Raises:
        PermissionError: If others than its owner may write the file.
        ValueError: If a line is something else, or there is none.
    """
    lines = [line.partition(b"#")[0].strip() for line in read_pinned(path, most=_MOST_BYTES).splitlines()]
    hashes = frozenset(line.decode("ascii", "replace") for line in lines if line)
    if not hashes or not all(re.fullmatch(r"[0-9a-f]{64}", entry) for entry in hashes):
        raise ValueError(f"expected {path.name} to hold SHA-256 hashes of app bundles, one a line")
    return hashes


def is_allowed(bundle: _Bundle, apps: Collection[str]) -> bool:
    """Whether a bundle is one of the allowed ones: by the hash of its content, not by what it says of itself."""
    return hashlib.sha256(bundle.content).hexdigest() in apps


def guard(apps: Collection[str], *, refused: Callable[[str], None]) -> None:
    """Makes the SuperNode of this process refuse all other apps, before they are stored or run.

    Args:
        apps: SHA-256 of the allowed bundles, in hexadecimal.
        refused: Is called with the reason when an app was refused.

    Raises:
        RuntimeError: If this version of Flower is not the one that this was made for; nothing was started.
    """
    if not package_version.startswith(_VERSION) or any(
        not expected <= set(inspect.signature(getattr(internals, name, guard)).parameters) for name, expected in _SEAMS.items()
    ):
        raise RuntimeError(
            f"apps can be held to a list with Flower {_VERSION}* only, and {package_version} is installed; nothing was started; "
            f"install flwr=={_VERSION}*"
        )
    pull = internals._pull_and_store_message
    runs: dict[int, Any] = {}

    def checked(*, get_run: Callable[[int], Any], get_fab: Callable[[str, int], Any], **others: Any) -> object:
        def run_of(run_id: int) -> Any:
            runs[run_id] = get_run(run_id)
            return runs[run_id]

        def bundle_of(fab_hash: str, run_id: int) -> Any:
            bundle = get_fab(fab_hash, run_id)
            run = runs.pop(run_id)
            if reason := _objection(bundle, run, apps):
                refused(reason)
                # Emptied, so that not even a Flower that forgot to ask could run it.
                return replace(bundle, content=b"", verifications={})
            return replace(bundle, verifications={"valid_license": "true"})

        return pull(**others | {"get_run": run_of, "get_fab": bundle_of, "trusted_entities": {"privfed": "allow-list"}})

    def verified(fab: Any, trusted_entities: object) -> bool:  # noqa: ARG001 -- Flower's type, and its call
        return is_allowed(fab, apps)

    internals._pull_and_store_message = checked
    internals._verify_fab = verified


def _objection(bundle: _Bundle, run: Any, apps: Collection[str]) -> str:
    digest = hashlib.sha256(bundle.content).hexdigest()
    if not is_allowed(bundle, apps):
        return f"the app {digest} is not among the allowed ones"
    # The folder from which the app runs is named by the run and the bundle, not by the content.
    if {bundle.hash_str, run.fab_hash} != {digest} or (run.fab_id, run.fab_version) != get_fab_metadata(bundle.content):
        return f"the app {digest} goes by another name than its own"
    if run.primary_task_type != TaskType.SERVER_APP:
        return f"the app {digest} is to be run as {run.primary_task_type!r}"
    return ""


def _say(reason: str) -> None:
    sys.stderr.write(f"privfed: refused: {reason}; nothing was run\n")
    sys.stderr.flush()


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the list and starts the SuperNode with the other arguments."""
    parser = argparse.ArgumentParser(prog="python -m privfed.engines.flower.supernode", description=__doc__, allow_abbrev=False)
    parser.add_argument("--apps", type=Path, required=True, metavar="FILE", help="SHA-256 of the app bundles that may run here, one a line")
    known, others = parser.parse_known_args(arguments)
    # Flower's parser takes abbreviations of its options.
    if named := [given for given in others if given.startswith("--") and any(f.startswith(given.partition("=")[0]) for f in _FORBIDDEN)]:
        parser.error(f"{', '.join(named)} would undo what this command is for")
    try:
        guard(read_apps(known.apps), refused=_say)
    except (RuntimeError, ValueError, OSError) as error:
        parser.error(str(error))
    sys.argv = ["flower-supernode", *others]
    flower_supernode()


if __name__ == "__main__":
    main()
