"""All parties of a deployment on this machine, in the workers of Flower's simulation engine. Needs the extra `privfed[simulation]`.

Each party works from its own folder, as it would on its own host, so a run ends with the same integers as in `engines.local`.
"""

import os
from collections.abc import Mapping
from pathlib import Path

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # read by ray when it starts

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from privfed.deploy.deployment import SERVER
from privfed.engines.coordinator import CoordinatedRun, coordinate
from privfed.engines.exchange import TimeOuts
from privfed.engines.flower.envelope import seal, unseal
from privfed.engines.flower.exchange import FlowerExchange, Online
from privfed.engines.party_folder import answering_parties, read_agreement

_START_SECONDS = 600.0


def simulate(folder: Path, *, rounds: int, time_outs: TimeOuts | None = None, workers: int = 2) -> CoordinatedRun:
    """Holds the rounds that are not held yet, with as many parties at a time as there are workers.

    Args:
        folder: It holds a folder for the server and each other party, as `privfed deploy init` writes them.
        rounds: Number of all rounds, those in the server's folder among them, at least 1.
        time_outs: How long answers are waited for; left out, `TimeOuts()` with ten minutes for the first message, over which Flower starts
            its workers.
        workers: Processes in which parties work, each on a core of its own, at least 1.

    Returns:
        What the server knows of the run; the models are in the parties' folders.

    Raises:
        PrivFedError: As `coordinate`.
        ValueError: If `rounds` or `workers` is below 1.
    """
    if workers < 1:
        raise ValueError(f"expected at least 1 worker, got {workers}")
    names = sorted(answering_parties(read_agreement(folder / SERVER)))
    runs: list[CoordinatedRun] = []
    server_app, client_app = ServerApp(), ClientApp()

    @server_app.main()
    def _coordinate(grid: Grid, context: Context) -> None:  # noqa: ARG001 -- Flower calls it by position
        exchange = FlowerExchange(grid, nodes=lambda grid: _any_node_for_each(grid, names))
        runs.append(coordinate(folder / SERVER, exchange, rounds=rounds, time_outs=time_outs or TimeOuts(status=_START_SECONDS)))

    @client_app.train()
    def _answer(message: Message, context: Context) -> Message:  # noqa: ARG001 -- Flower calls it by position
        from contextlib import closing  # noqa: PLC0415 -- in a worker, which gets this function and not this module's names

        from privfed.engines.node import Node  # noqa: PLC0415

        # Workers are not parties: whoever is free opens the folder of the party that is asked, and lets go of it again.
        with closing(Node(folder / message.metadata.group_id.rpartition(" ")[2])) as node:
            return Message(seal(node.answer(unseal(message.content))), reply_to=message)

    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=len(names),
        backend_config={"init_args": {"num_cpus": workers, "include_dashboard": False}, "client_resources": {"num_cpus": 1}},
    )
    return runs[0]


def _any_node_for_each(grid: Grid, names: list[str]) -> Mapping[str, Online]:
    """A node for each party, whichever: the message says who is asked."""
    nodes = sorted(grid.get_node_ids())
    return {name: Online(node, "") for name, node in zip(names, nodes, strict=True)} if len(nodes) == len(names) else {}
