"""The job of a run: configuration only. What runs is installed at every party already."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from privfed.engines.flare.messages import TASK

COORDINATOR = "privfed.engines.flare.controller.Coordinator"
PARTY = "privfed.engines.flare.executor.Party"
COMMANDS = "privfed.engines.flare.commands.JobCommandsOnly"
HEART_BEAT_TIMEOUT = 30
"""Seconds after which a silent client counts as gone; FLARE's own 600 keep a job without it running for ten minutes."""
_TASK_REQUEST_INTERVAL = 0.2


def write_job(folder: Path, *, name: str, parties: Sequence[str], min_parties: int, arguments: Mapping[str, object]) -> None:
    """Writes a new job folder.

    Args:
        folder: It must not exist.
        name: Name of the run.
        parties: Names of the banks, and of the key holder.
        min_parties: With how many of them the job may begin.
        arguments: Of the `Coordinator`.

    Raises:
        FileExistsError: If there is such a folder.
    """
    folder.mkdir()
    write_json(
        folder / "meta.json",
        {
            "name": name,
            "resource_spec": {},
            "min_clients": min_parties,
            "mandatory_clients": [],
            "deploy_map": {"server": ["server"], "party": list(parties)},
        },
    )
    nothing: dict[str, object] = {"format_version": 2, "task_data_filters": [], "task_result_filters": [], "components": []}
    write_json(
        folder / "server" / "config" / "config_fed_server.json",
        nothing
        | {
            "server": {"heart_beat_timeout": HEART_BEAT_TIMEOUT, "task_request_interval": _TASK_REQUEST_INTERVAL},
            "workflows": [{"id": "coordinator", "path": COORDINATOR, "args": dict(arguments)}],
        },
    )
    write_json(
        folder / "party" / "config" / "config_fed_client.json",
        nothing | {"executors": [{"tasks": [TASK], "executor": {"path": PARTY, "args": {}}}]},
    )


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Writes a file of FLARE's, over one that is there, and makes the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
