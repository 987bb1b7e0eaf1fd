"""Attacks on images of CIFAR-10, beside `breaching` where that can be installed and runs."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from benchmarks.attacks.outcome import Case, Trial
from benchmarks.attacks.rounds import plain_update
from privfed.attacks.facts import Activation, SoftmaxLoss
from privfed.attacks.image_inversion import CosineInversion, DeepLeakage
from privfed.attacks.image_scoring import grey_images, mean_images, score_images
from privfed.attacks.images import ImageShape
from privfed.attacks.observation import NotApplicable, Observation, Reconstruction
from privfed.training.model import values_of

FILE, SHAPE = "cifar10_12k.npz", ImageShape(channels=3, height=32, width=32)
ATTACKED = 6
ITERATIONS = 300


def find_images() -> Path | None:
    """The file in the folder PRIVFED_DATA, or ../shared/data beside the repository; None where it is not."""
    folder = Path(os.environ.get("PRIVFED_DATA") or Path(__file__).parents[3] / "shared" / "data")
    return folder / FILE if (folder / FILE).is_file() else None


@cache
def photos(path: Path) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Rows of pixels from 0 to 1 with labels, in a fixed random order. The first `ATTACKED` are attacked, the others are public."""
    with np.load(path) as data:
        pixels, labels = data["x_test"][:2000], data["y_test"][:2000]
    order = np.random.default_rng(0).permutation(len(labels))
    rows = pixels.reshape(len(pixels), 32, 32, 3).transpose(0, 3, 1, 2).reshape(len(pixels), -1) / 255.0
    return rows.astype(np.float32).astype(np.float64)[order], labels.astype(np.int64)[order]


def smooth_network(seed: int) -> nn.Module:
    """The network of DLG: three convolutions with sigmoid, and even weights. Source: Zhu et al., 2019, section 5.1."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Unflatten(1, (3, 32, 32))]
    for channels, stride in ((3, 2), (12, 2), (12, 1)):
        layers += [nn.Conv2d(channels, 12, 5, padding=2, stride=stride), nn.Sigmoid()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(12 * 64, 10))
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    return model


def relu_network(width: int, *, seed: int, shape: ImageShape = SHAPE) -> nn.Module:
    """Three convolutions with ReLU, as torch initialises them."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Unflatten(1, (shape.channels, shape.height, shape.width)),
        nn.Conv2d(shape.channels, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(2 * width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * (shape.height // 4) * (shape.width // 4), 10),
    )


def observe(path: Path, model: nn.Module, number: int) -> Observation:
    """What one step on one photo shows."""
    rows, labels = photos(path)
    update, training = plain_update(model, rows[[number]], labels[[number]], loss=SoftmaxLoss())
    before = values_of(model)
    facts = {"training": training, "activation": Activation.RELU, "schema": SHAPE.schema()}
    return Observation(layout=before.layout, model=before, seen=update, **facts)


def decibels(path: Path, found: NDArray[np.float64], number: int) -> tuple[float, float]:
    """Of what was found, and of the better of two images that saw nothing: grey, and the mean of the public ones."""
    rows, _ = photos(path)
    truth, public = rows[[number]], rows[ATTACKED:]
    guesses = (grey_images(SHAPE, count=1), mean_images(public, count=1))
    score, *guessed = (score_images(some, truth, shape=SHAPE, baseline=guesses[1], gallery=public[:50]).psnr for some in (found, *guesses))
    return score, max(guessed)


def image_cases(path: Path) -> Iterator[Case]:
    """Our attacks on photos; seed n attacks photo n on a network of its own."""

    def trial(number: int, model: nn.Module, attack: Callable[[Observation], Reconstruction | NotApplicable], *, least: float) -> Trial:
        found = attack(observe(path, model, number))
        if isinstance(found, NotApplicable):
            return Trial(score=0.0, baseline=0.0, seconds=0.0)
        score, baseline = decibels(path, found.rows, number)
        return Trial(score=float(score >= least) if least else score, baseline=float(baseline >= least) if least else baseline,
                     seconds=found.seconds)  # fmt: skip

    def cosine(number: int) -> Trial:
        model = relu_network(32, seed=number)
        return trial(number, model, CosineInversion(module=model, shape=SHAPE, iterations=ITERATIONS).attack, least=0.0)

    def deep(number: int) -> Trial:
        model = smooth_network(number)
        return trial(number, model, DeepLeakage(module=model, shape=SHAPE).attack, least=35.0)

    yield Case(
        attack="cosine + total variation",
        setting=f"1 photo 32x32, ReLU width 32, {ITERATIONS} iterations",
        measure="PSNR in dB",
        run=cosine,
        repeats=ATTACKED,
        quick=1,
        least=25.0,
        seconds=15.0,
    )
    yield Case(
        attack="iDLG",
        setting="1 photo 32x32, sigmoid network, at most 4 starts",
        measure="photos of 35 dB",
        run=deep,
        repeats=ATTACKED,
        quick=0,
        least=5 / 6,
    )


class PeerError(Exception):
    """Why the peer does not run here."""


def peer_case(path: Path, python: Path) -> Case:
    """The same photos, networks and iterations given to `breaching` in an interpreter of its own."""

    def run(number: int) -> Trial:
        started = time.perf_counter()
        command = [python, Path(__file__).with_name("breaching_peer.py"), str(path), str(number), str(ITERATIONS)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"})
        if done.returncode:
            said = (done.stderr.strip() or "no reason was given").splitlines()
            raise PeerError(f"it was installed and does not run: {said[-1]}")
        answer = json.loads(done.stdout.strip().splitlines()[-1])
        score, baseline = decibels(path, np.array([answer["pixels"]]), number)
        return Trial(score=score, baseline=baseline, seconds=answer.get("seconds", time.perf_counter() - started))

    setting = f"1 photo 32x32, ReLU width 32, {ITERATIONS} iterations"
    return Case(attack="breaching, invertinggradients", setting=setting, measure="PSNR in dB", run=run, repeats=ATTACKED, quick=0)
