"""What the server's operator asks the SuperLink: to know the banks' nodes, and to run the consortium's app to its end.

`flwr` ends with exit code 0 whatever happened, and calls a run completed in which every client failed. Here a failure is an error:
`python -m privfed.engines.flower.control register DIR`, `... run APP --rounds N`.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from privfed.engines.exchange import TimeOuts
from privfed.engines.flower.app import TIME_OUT

CONNECTION = "consortium"
"""Name of the SuperLink in Flower's configuration file."""

_POLL_SECONDS = 2.0
_RUN_POLL_SECONDS = 5.0  # each look is a process of a second, on the host that sums
_COMMAND_SECONDS = 120.0
_COMPLETED = "finished:completed"


class ControlError(RuntimeError):
    """The SuperLink did not do what it was asked."""


def register(keys: Path, *, seconds: float) -> None:
    """Registers the parties' nodes, so that no others are let in. Needed after each start of a SuperLink, which forgets.

    Args:
        keys: Folder with the public key of each party's SuperNode, `NAME.pub`.
        seconds: Time to wait for a SuperLink that is still starting.

    Raises:
        ControlError: If the SuperLink refuses, or there are no keys.
    """
    paths = sorted(keys.glob("*.pub"))
    if not paths:
        raise ControlError(f"there are no public keys in {keys.name!r}; nothing was registered")
    end = time.monotonic() + seconds
    while True:
        try:
            _flwr("list", CONNECTION)
            break
        except ControlError:
            if time.monotonic() >= end:
                raise
            time.sleep(_POLL_SECONDS)
    for path in paths:
        _flwr("supernode", "register", str(path), CONNECTION, "--name", path.stem)


def run(app: Path, *, rounds: int, time_outs: Mapping[str, float] = MappingProxyType({})) -> None:
    """Runs an app, and returns when all of it is done.

    Args:
        app: Folder of the app.
        rounds: Rounds of the whole run, also of those that were held before a restart.
        time_outs: Seconds to wait at a step, by its name in `TimeOuts`; the others stay as they are.

    Raises:
        ControlError: If the run did not reach its end.
    """
    config = " ".join([f"rounds={rounds}", *(f"{TIME_OUT}{name}={float(seconds)}" for name, seconds in time_outs.items())])
    number = str(_flwr("run", str(app), CONNECTION, "--run-config", config).get("run-id", ""))
    if not number:
        raise ControlError(f"flwr run gave no number of a run; see whether one runs (flwr list {CONNECTION}), then try again")
    while True:
        status, details = _status(number)
        if status.startswith("finished"):
            break
        time.sleep(_RUN_POLL_SECONDS)
    if status != _COMPLETED:
        raise ControlError(f"the run ended as {status}: {details or 'no reason given'}")


def _status(number: str) -> tuple[str, str]:
    """How a run stands, and Flower's words on it."""
    runs = _flwr("list", CONNECTION, "--run-id", number).get("runs")
    found: Any = runs[0] if isinstance(runs, list) and len(runs) == 1 else None
    if not isinstance(found, dict) or "status" not in found:
        raise ControlError(f"flwr list does not say how run {number} stands; it may still run; see flwr list {CONNECTION}")
    return str(found["status"]), str(found.get("status-details") or "")


def _flwr(*arguments: str) -> dict[str, Any]:
    command = ["flwr", *arguments, "--format", "json"]
    try:
        done = subprocess.run(  # noqa: S603 -- no shell
            command, capture_output=True, text=True, errors="replace", timeout=_COMMAND_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ControlError(
            f"flwr {arguments[0]} did not end within {_COMMAND_SECONDS:g} s and was stopped; what it asked for may have been done; "
            f"see whether the SuperLink answers (flwr list {CONNECTION}), then try again"
        ) from error
    except OSError as error:
        raise ControlError(
            f"flwr cannot be started ({error.strerror or error}); nothing was done; install privfed[flower], and put the folder that holds "
            "its flwr on the PATH"
        ) from error
    try:
        answer = json.loads(done.stdout[done.stdout.index("{") :])
    except ValueError as error:
        raise ControlError(f"flwr {arguments[0]} gave no answer: {(done.stderr or done.stdout).strip()[-500:]}") from error
    if answer.get("success") is not True:
        raise ControlError(f"flwr {arguments[0]} failed: {str(answer.get('error-message', 'no reason given')).strip()}")
    return answer


def _time_out(text: str) -> tuple[str, float]:
    name, _, seconds = text.partition("=")
    if name not in {field.name for field in fields(TimeOuts)}:
        raise argparse.ArgumentTypeError(f"expected a step of {', '.join(field.name for field in fields(TimeOuts))}, got {name!r}")
    return name, float(seconds)


def main(arguments: Sequence[str] | None = None) -> None:
    """Does what it is told, and ends with exit code 1 and the reason if that failed."""
    parser = argparse.ArgumentParser(prog="python -m privfed.engines.flower.control", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    registering = commands.add_parser("register")
    registering.add_argument("keys", type=Path, metavar="DIR", help="folder with NAME.pub of each party")
    registering.add_argument("--seconds", type=float, default=60.0, help="time to wait for the SuperLink")
    running = commands.add_parser("run")
    running.add_argument("app", type=Path, metavar="APP", help="folder of the app")
    running.add_argument("--rounds", type=int, required=True, help="rounds of the whole run")
    running.add_argument("--time-out", type=_time_out, action="append", default=[], metavar="STEP=SECONDS", help="for example training=600")
    known = parser.parse_args(arguments)
    try:
        if known.command == "register":
            register(known.keys, seconds=known.seconds)
        else:
            run(known.app, rounds=known.rounds, time_outs=dict(known.time_out))
    except ControlError as error:
        sys.exit(f"privfed: {error}")
    except KeyboardInterrupt:
        sys.exit(f"privfed: stopped waiting; a run that was started goes on; see flwr list {CONNECTION}")


if __name__ == "__main__":
    main()
