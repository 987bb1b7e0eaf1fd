"""What defences leave to be seen of images: the same attacks on the same digits and photos, under every defence. `--help` says the rest.

One client's update of a fresh small ConvNet, one step over one image unless the setting says otherwise, rounded to the grid of the
encryption, as whoever may open it sees it. The images are held back from what the attacker knows of such images.
"""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.attacks.images import relu_network
from benchmarks.audit_grid import DELTA, DOSSIER, MAX_GRAD_NORM, PARAMS, Setting, defences, noisy, part_of, seen
from benchmarks.experiment import print_table
from privfed.attacks.facts import SoftmaxLoss
from privfed.attacks.image_inversion import CosineInversion, DeepLeakage
from privfed.attacks.image_scoring import ImageScore, grey_images, mean_images, score_images
from privfed.attacks.images import ImageShape
from privfed.attacks.observation import NotApplicable
from privfed.attacks.scoring import interval
from privfed.audit.canaries import Canaries

SEEDS, WIDTH, ITERATIONS, NOISY_ITERATIONS, POOL, GALLERY = 3, 16, 300, 20, 1000, 50
LEARNING_RATE, TOLD = 0.01, 0.3  # so sure is an attack at least that says anything
FILES = {"MNIST": "mnist.npz", "CIFAR-10": "cifar10_12k.npz"}

PLAIN = Setting(name="plain", group="defence", rows=1, batch_size=1, learning_rate=LEARNING_RATE)
DEFENCES = defences(PLAIN, of="images")
EPSILONS = noisy(PLAIN)
BATCHES = tuple(
    replace(PLAIN, name=f"batch of {size}", group="batch size", value=size, rows=size, batch_size=size) for size in (1, 2, 4, 8)
)
EPOCHS = tuple(
    replace(PLAIN, name=f"local epochs: {epochs}", group="local epochs", value=epochs, rows=2, batch_size=2, steps=epochs)
    for epochs in (1, 2, 5, 10)
)
SUMS = tuple(
    replace(PLAIN, name=f"clients in the sum: {count}", group="clients in the sum", value=count, clients=count) for count in (1, 2, 3, 5)
)
GRID = (*DEFENCES, *EPSILONS, *BATCHES, *EPOCHS, *SUMS)
QUICK_GRID = (PLAIN, EPSILONS[0], BATCHES[1], EPOCHS[1], SUMS[1])
_WORDS = {
    "epsilon": "epsilon of the update (no noise at the right)",
    "batch size": "images in the batch",
    "local epochs": "passes over 2 images, in steps of both",
    "clients in the sum": "clients in the sum, with 1 image each",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One attack in one setting on one batch of images, beside the better of a grey and a mean image."""

    data: str
    setting: str
    attack: str
    seed: int
    psnr: float
    ssim: float
    identified: float
    guess_psnr: float
    guess_ssim: float
    guess_identified: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The attack with the best mean PSNR in one setting. That has a 95 % t-interval."""

    data: str
    setting: str
    attack: str
    psnr: float
    low: float
    high: float
    guess_psnr: float
    ssim: float
    guess_ssim: float
    identified: float
    guess_identified: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Picture:
    """The first image of the first batch of a setting, and what the best attack made of it, each of shape (height, width, channels)."""

    data: str
    setting: str
    truth: NDArray[np.float64]
    found: NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Images:
    """Labelled images as rows of pixels."""

    rows: Canaries
    shape: ImageShape

    @classmethod
    def load(cls, path: Path) -> "Images":
        with np.load(path) as data:
            pixels, labels = data["x_test"][:2000], data["y_test"][:2000].ravel()
        pixels = pixels.reshape(*pixels.shape[:3], -1).transpose(0, 3, 1, 2)
        shape = ImageShape(channels=pixels.shape[1], height=pixels.shape[2], width=pixels.shape[3])
        rows = (pixels.reshape(len(pixels), -1) / 255.0).astype(np.float32).astype(np.float64)
        return cls(rows=Canaries(rows=rows, labels=labels.astype(np.int64), schema=shape.schema()), shape=shape)


def images() -> dict[str, Images]:
    """Every set that is in the folder that PRIVFED_DATA names."""
    folder = Path(os.environ.get("PRIVFED_DATA", Path(__file__).parents[2] / "shared" / "data"))
    return {name: Images.load(folder / file) for name, file in FILES.items() if (folder / file).exists()}


def attack_once(data: Images, name: str, setting: Setting, *, seed: int) -> tuple[list[Outcome], Picture]:
    """All attacks on one batch in one setting. Batches, and first models, are the same in all settings of a seed as far as they go."""
    order = np.random.default_rng(seed).permutation(len(data.rows))
    public, private = data.rows.rows[order[:POOL]], order[POOL:]
    shards = [part_of(data.rows, private[n * setting.rows : (n + 1) * setting.rows]) for n in range(setting.clients)]
    with torch.random.fork_rng():
        model = relu_network(WIDTH, seed=seed, shape=data.shape)
    observation = seen(setting, model, shards, loss=SoftmaxLoss(), seed=seed)
    truth = Canaries.together(shards).rows
    guesses = [grey_images(data.shape, count=len(truth)), mean_images(public, count=len(truth))]

    def score(rows: NDArray[np.float64]) -> ImageScore:
        return score_images(rows, truth, shape=data.shape, baseline=guesses[1], gallery=public[:GALLERY])

    guessed = [score(guess) for guess in guesses]
    best, least = guesses[1], -math.inf
    outcomes = list[Outcome]()
    for label, attack in (
        ("cosine + total variation", CosineInversion(module=model, shape=data.shape, iterations=ITERATIONS)),
        ("likeliest image", DeepLeakage(module=model, shape=data.shape, restarts=1, iterations=NOISY_ITERATIONS)),
    ):
        # Where there is no noise the first one applies, and on such networks is the better one.
        found = NotApplicable(reason="another attack applied") if outcomes else attack.attack(observation)
        if isinstance(found, NotApplicable):
            continue
        # An image that hardly explains the update is worse than a guess.
        told = found.confidence >= TOLD
        found = replace(found, rows=found.rows[told], certified=found.certified[told], confidence=found.confidence[told])
        reached = score(found.rows)
        if reached.psnr > least and len(found.rows):
            best, least = found.rows, reached.psnr
        outcomes.append(
            Outcome(
                data=name,
                setting=setting.name,
                attack=label,
                seed=seed,
                psnr=reached.psnr,
                ssim=reached.ssim,
                identified=reached.identified,
                guess_psnr=max(one.psnr for one in guessed),
                guess_ssim=max(one.ssim for one in guessed),
                guess_identified=max(one.identified for one in guessed),
                seconds=found.seconds,
            )
        )
    nearest = best[((best - truth[0]) ** 2).mean(axis=1).argmin()]
    pair = (data.shape.images(image[None])[0].transpose(1, 2, 0) for image in (truth[0], nearest))
    return outcomes, Picture(data=name, setting=setting.name, truth=next(pair), found=next(pair))


def summarise(outcomes: Sequence[Outcome]) -> list[Summary]:
    """The best attack of each setting, in the order of the runs. An attack that did not apply to some batch is left out."""
    seeds = len({outcome.seed for outcome in outcomes})
    runs: dict[tuple[str, str], dict[str, list[Outcome]]] = {}
    for outcome in outcomes:
        runs.setdefault((outcome.data, outcome.setting), {}).setdefault(outcome.attack, []).append(outcome)
    summaries: list[Summary] = []
    for (data, setting), attacks in runs.items():
        complete = {attack: found for attack, found in attacks.items() if len(found) == seeds}
        if not complete:
            continue
        attack, found = max(complete.items(), key=lambda item: float(np.mean([one.psnr for one in item[1]])))
        reach = interval([one.psnr for one in found])
        means = {
            name: float(np.mean([getattr(one, name) for one in found]))
            for name in ("guess_psnr", "ssim", "guess_ssim", "identified", "guess_identified")
        }
        summaries.append(Summary(data=data, setting=setting, attack=attack, psnr=reach.mean, low=reach.low, high=reach.high, **means))
    return summaries


def run(
    found: Mapping[str, Images], grid: Sequence[Setting], *, seeds: int, tick: Callable[[str], None]
) -> tuple[list[Outcome], list[Picture]]:
    """Every setting, set of images and seed, and a picture of each setting."""
    outcomes, pictures = list[Outcome](), list[Picture]()
    for name, data in found.items():
        # Several groups have a setting in common: it is attacked once.
        known: dict[tuple[Setting, int], tuple[list[Outcome], Picture]] = {}
        for setting in grid:
            for seed in range(seeds):
                key = replace(setting, name="", group="", value=0.0), seed
                if key not in known:
                    known[key] = attack_once(data, name, setting, seed=seed)
                scored, picture = known[key]
                outcomes += [replace(outcome, setting=setting.name) for outcome in scored]
                pictures += [replace(picture, setting=setting.name)] if seed == 0 else []
                tick(f"{name}, {setting.name}")
    return outcomes, pictures


_HEAD = ("images", "setting", "PSNR, best attack", "guessing", "SSIM", "guessing", "recognised", "guessing", "attack")


def cells(one: Summary) -> tuple[str, ...]:
    """A setting as a row of `_HEAD`."""
    psnr = f"{one.psnr:.1f} dB ({one.low:.1f} to {one.high:.1f})"
    shares = (f"{one.ssim:.2f}", f"{one.guess_ssim:.2f}", f"{one.identified:.0%}", f"{one.guess_identified:.0%}")
    return one.data, one.setting, psnr, f"{one.guess_psnr:.1f} dB", *shares, one.attack


def dossier(summaries: Sequence[Summary], *, seeds: int, command: str) -> str:
    """The experiment as a Markdown page."""
    lines = [
        "# What defences leave to be seen of images",
        "",
        f"Made by `{command}`, which writes this page and its figures; do not edit them.",
        "",
        f"Of {seeds} batches of each set, none known to the attacker: how near the best attack came, as peak signal to noise ratio "
        "with its 95 % t-interval (from 25 dB on people see the same image), as structural similarity (1 is the same), and as the share "
        f"of images that are told from {GALLERY} others of the set by what was read. Beside each, what the better of a grey and a mean "
        "image reaches.",
        "",
        "![How near the attack came](audit_images.svg)",
        "",
        "![What it saw](audit_images.png)",
        "",
        "The first image of the first batch, and what came nearest to it in each setting.",
        "",
        "Where less is read after more local epochs, that is a limit of these attacks and no protection: they do not unroll local "
        "steps, but take all of them as if from the first model.",
        "",
        f"| {' | '.join(_HEAD)} |",
        f"|{'---|' * len(_HEAD)}",
        *(f"| {' | '.join(cells(one))} |" for one in summaries),
        "",
        "## What was attacked",
        "",
        f"* A fresh network of three convolutions of {WIDTH}, {2 * WIDTH} and {2 * WIDTH} channels with ReLU and ten classes, one step "
        f"over one image unless the setting says otherwise, learning rate {LEARNING_RATE:g}, the update rounded to the grid of the "
        f"encryption ({PARAMS.step:.2g}).",
        f"* Epsilon is that of the whole update, at delta {DELTA:g}, with images clipped to {MAX_GRAD_NORM:g}.",
        f"* Attacks: cosine and total variation with {ITERATIONS} iterations; under noise, where that is worse than a grey image, the "
        f"likeliest image under the noise, {NOISY_ITERATIONS} iterations. Labels are read off the update first. An attack whose own "
        f"confidence is below {TOLD:g} says a mean image. More iterations, or an attack that knows what images look like, may see "
        "more: that an attack fails bounds nothing.",
        "* Compression is measured in a first round, before error feedback sends what was left out.",
        "",
        f"Versions: {', '.join(f'{name} {version(name)}' for name in ('privfed', 'torch', 'numpy'))}.",
        "",
    ]
    return "\n".join(lines)


def draw(summaries: Sequence[Summary], grid: Sequence[Setting], path: Path) -> None:
    """PSNR of the best attack by epsilon, batch size, local epochs and number of clients."""
    import matplotlib as mpl  # noqa: PLC0415 # only those who write the figure need it
    from matplotlib.figure import Figure  # noqa: PLC0415

    by_name = {(one.data, one.setting): one for one in summaries}
    names = list(dict.fromkeys(one.data for one in summaries))
    colours = dict(zip(names, ("tab:blue", "tab:orange"), strict=False))
    with mpl.rc_context({"svg.hashsalt": "audit_images", "font.size": 9}):
        figure = Figure(figsize=(8.4, 5.6), layout="constrained")
        panels = figure.subplots(2, 2, sharey=True).ravel()
        for panel, (group, words) in zip(panels, _WORDS.items(), strict=True):
            settings = [setting for setting in grid if setting.group == group]
            ticks = [f"{setting.value:g}" for setting in settings]
            if group == "epsilon":
                settings, ticks = [*settings, PLAIN], [*ticks, "none"]
            places = np.arange(len(settings))
            for name in names:
                found = [by_name[name, setting.name] for setting in settings]
                psnr = np.array([one.psnr for one in found])
                reach = [psnr - [one.low for one in found], [one.high for one in found] - psnr]
                panel.errorbar(places, psnr, yerr=reach, marker="o", capsize=2, color=colours[name], label=name)
                panel.plot(places, [one.guess_psnr for one in found], ":", color=colours[name])
            panel.axhline(25, color="grey", lw=0.6)
            panel.set(xlabel=words, xlim=(-0.3, len(settings) - 0.7))
            panel.set_xticks(places, ticks)
            panel.grid(alpha=0.25)
        for panel in panels[::2]:
            panel.set_ylabel("PSNR in dB, best attack")
        panels[0].legend(loc="upper left", frameon=False, title="dotted: guessing")
        figure.savefig(path, metadata={"Date": None})


def show(pictures: Sequence[Picture], path: Path) -> None:
    """A sheet of images: the true one, and what was read of it in each setting."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    names = list(dict.fromkeys(picture.data for picture in pictures))
    rows: list[list[tuple[str, NDArray[np.float64]]]] = []
    for name in names:
        own = [picture for picture in pictures if picture.data == name]
        shown = [("true", own[0].truth), *((picture.setting, picture.found) for picture in own)]
        rows += [shown[start : start + 8] for start in range(0, len(shown), 8)]
    figure = Figure(figsize=(9.6, 1.45 * len(rows)), layout="constrained")
    panels: Any = figure.subplots(len(rows), 8, squeeze=False)
    for panel in panels.ravel():
        panel.axis("off")
    for line, row in zip(panels, rows, strict=True):
        for panel, (title, image) in zip(line, row, strict=False):
            panel.imshow(image.clip(0, 1), cmap="gray", vmin=0, vmax=1)
            panel.set_title(_wrapped(title), fontsize=7)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _wrapped(title: str) -> str:
    """A title in lines of some twenty letters."""
    lines = [""]
    for word in title.split():
        lines = [*lines[:-1], f"{lines[-1]} {word}".strip()] if len(lines[-1]) + len(word) < 20 else [*lines, word]
    return "\n".join(lines)


def main(
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Five settings, two batches; writes nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line: every run, then every mean.")] = False,
    seeds: Annotated[int, typer.Option(min=2, help="Batches of each set in each setting.")] = SEEDS,
    output: Annotated[Path | None, typer.Option(help="Folder for the page and the figures.")] = None,
) -> None:
    """Attacks the same digits and photos under every defence: noise, clipping, compression, sums, more images, more local epochs."""
    torch.set_num_threads(1)
    folder = output or (None if quick else DOSSIER)
    grid, seeds = (QUICK_GRID, 2) if quick else (GRID, seeds)
    found = images()
    if not found:
        typer.echo(f"no {' or '.join(FILES.values())} at PRIVFED_DATA, nor in ../shared/data beside the repository", err=True)
        raise typer.Exit(1)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=len(found) * len(grid) * seeds)
        outcomes, pictures = run(found, grid, seeds=seeds, tick=lambda words: bar.update(task, advance=1, description=words))
    summaries = summarise(outcomes)
    if as_json:
        for kind, things in (("run", outcomes), ("summary", summaries)):
            for thing in things:
                typer.echo(json.dumps({"kind": kind} | asdict(thing), allow_nan=False))
    else:
        print_table(f"What the best attack saw, mean of {seeds} batches (95 % interval)", _HEAD, map(cells, summaries))
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        command = "python -m benchmarks.audit_images" + (" --quick" if quick else "" if seeds == SEEDS else f" --seeds {seeds}")
        if not quick:
            draw(summaries, grid, folder / "audit_images.svg")
        show(pictures, folder / "audit_images.png")
        (folder / "audit_images.md").write_text(dossier(summaries, seeds=seeds, command=command), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
