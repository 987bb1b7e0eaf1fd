"""The task in Flower's simulation engine. It runs in an environment of its own, with Flower and torch and without privfed.

`python -m benchmarks.simulation.flower TASK.npz OUTCOME.json` reads what `benchmarks.simulation.task` wrote.
"""

import json
import logging
import sys
import time
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn

from benchmarks.simulation.flower_client import APP, network, task


def start_of(made: dict[str, np.ndarray], model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights from which all start, by name."""
    flat, place, tensors = made["start"], 0, {}
    for name, tensor in model.state_dict().items():
        tensors[name] = torch.from_numpy(flat[place : place + tensor.numel()].reshape(tuple(tensor.shape)).copy())
        place += tensor.numel()
    return tensors


def main(path: str, outcome: Path) -> None:
    """Runs the rounds and writes seconds per round and the final weights."""
    logging.disable(logging.INFO)
    made = task(path)
    model = network(made["widths"].tolist())
    clients, rounds = len(made["features"]), int(made["rounds"])
    times: list[float] = []
    final: list[np.ndarray] = []
    server = ServerApp()

    def note(number: int, arrays: ArrayRecord) -> MetricRecord:
        """Flower calls this before the first round and after every one."""
        times.append(time.perf_counter())
        if number == rounds:
            final.extend(tensor.numpy().ravel() for tensor in arrays.to_torch_state_dict().values())
        return MetricRecord()

    @server.main()
    def run(grid: Grid, context: Context) -> None:  # noqa: ARG001
        strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
        strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(start_of(made, model)),
            num_rounds=rounds,
            train_config=ConfigRecord({"task": path}),
            evaluate_fn=note,
        )

    # Flower's default gives a client two cores. With one each, all cores of the machine train clients.
    run_simulation(server, APP, num_supernodes=clients, backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}})
    seconds = np.diff(times).tolist()
    outcome.write_text(json.dumps({"seconds": seconds, "weights": np.concatenate(final).astype(float).tolist()}), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
