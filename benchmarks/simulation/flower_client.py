"""A client of the task in Flower. A module of its own, because Ray's workers have to find it by its name."""

from functools import cache
from itertools import pairwise

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn
from torch.nn import functional

APP = ClientApp()


@cache
def task(path: str) -> dict[str, np.ndarray]:
    """The records and numbers of the task, read once per process."""
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def network(widths: list[int]) -> nn.Module:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@APP.train()
def train(message: Message, context: Context) -> Message:
    """One client's round: the same batches as ours, in a plain loop."""
    torch.set_num_threads(1)
    config = message.content["config"]
    made = task(str(config["task"]))
    place = int(context.node_config["partition-id"])
    model = network(made["widths"].tolist())
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    features, labels = torch.from_numpy(made["features"][place]), torch.from_numpy(made["labels"][place]).float()
    optimizer = torch.optim.SGD(model.parameters(), lr=float(made["learning_rate"]))
    size, records = int(made["batch_size"]), len(labels)
    rng = np.random.default_rng((place, int(config["server-round"]) - 1))
    order = rng.permutation(records)
    for _ in range(int(made["steps"])):
        if len(order) < size:
            order = rng.permutation(records)
        batch, order = order[:size], order[size:]
        optimizer.zero_grad()
        functional.binary_cross_entropy_with_logits(model(features[batch]).squeeze(1), labels[batch]).backward()
        optimizer.step()
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": records})})
    return Message(content=content, reply_to=message)
