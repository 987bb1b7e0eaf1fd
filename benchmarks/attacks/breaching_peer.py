"""One attack of `breaching` on one photo, run by the interpreter in which it is installed. Prints the pixels as one line of JSON.

Its own "invertinggradients" (Geiping et al., 2020), with as many iterations and starts as ours, on the network and the gradient that
ours gets, in raw pixels. Knows nothing of privfed, which is not installed there.
"""

import json
import sys
import time

import breaching
import numpy as np
import torch
from torch import nn

WIDTH = 32


def network(seed: int) -> nn.Module:
    """As `images.relu_network`, behind a layer that takes images."""
    torch.manual_seed(seed)
    layers = [
        nn.Conv2d(3, WIDTH, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(WIDTH, 2 * WIDTH, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(2 * WIDTH, 2 * WIDTH, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * WIDTH * 64, 10),
    ]
    return nn.Sequential(*layers)


def main() -> None:
    path, number, iterations = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    with np.load(path) as data:
        pixels, labels = data["x_test"][:2000], data["y_test"][:2000]
    chosen = np.random.default_rng(0).permutation(len(labels))[number]
    photo = torch.tensor(pixels[chosen].reshape(1, 32, 32, 3).transpose(0, 3, 1, 2) / 255.0, dtype=torch.float32)
    label = torch.tensor([int(labels[chosen])])
    model, loss = network(number).eval(), nn.CrossEntropyLoss()
    gradients = torch.autograd.grad(loss(model(photo), label), list(model.parameters()))
    config = breaching.get_config(
        overrides=[
            "attack=invertinggradients",
            "case/data=CIFAR10",
            "attack.restarts.num_trials=1",
            f"attack.optim.max_iterations={iterations}",
            "case.data.mean=[0.0,0.0,0.0]",
            "case.data.std=[1.0,1.0,1.0]",
        ]
    )
    attacker = breaching.attacks.prepare_attack(model, loss, config.attack, {"device": torch.device("cpu"), "dtype": torch.float32})
    payload = [{"parameters": list(model.parameters()), "buffers": [], "metadata": config.case.data}]
    known = {"num_data_points": 1, "labels": label, "local_hyperparams": None, "data_key": "inputs"}
    shared = [{"gradients": list(gradients), "buffers": None, "metadata": known}]
    started = time.perf_counter()
    found, _ = attacker.reconstruct(payload, shared, {}, dryrun=False)
    seconds = time.perf_counter() - started
    image = found["data"].detach().clamp(0, 1).flatten().tolist()
    print(json.dumps({"pixels": image, "seconds": seconds}))


if __name__ == "__main__":
    main()
