from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import audit_images
from benchmarks.audit_images import EPSILONS, GRID, PLAIN, QUICK_GRID, Images, Outcome, Picture
from privfed.attacks.images import ImageShape
from privfed.audit.canaries import Canaries

torch.set_num_threads(1)


def made(setting: str, seed: int) -> Outcome:
    guess = {"guess_psnr": 12.0, "guess_ssim": 0.1, "guess_identified": 0.0}
    return Outcome(data="d", setting=setting, attack="a", seed=seed, psnr=20.0 + seed, ssim=0.5, identified=1.0, seconds=0.0, **guess)


@pytest.fixture
def small() -> Images:
    """Smooth made-up images of 8 x 8 pixels."""
    shape, rng = ImageShape(channels=1, height=8, width=8), np.random.default_rng(0)
    waves = np.sin(np.linspace(0, 3, 8)[:, None] * rng.uniform(0.5, 2, size=(1100, 1, 1)) + rng.uniform(0, 6, size=(1100, 1, 8)))
    rows = (0.5 + 0.4 * waves).reshape(1100, -1).astype(np.float32).astype(np.float64)
    return Images(rows=Canaries(rows=rows, labels=rng.integers(10, size=1100), schema=shape.schema()), shape=shape)


def test_an_image_is_seen_without_noise_and_guessed_with_it(small: Images) -> None:
    (plain,), seen = audit_images.attack_once(small, "d", PLAIN, seed=0)
    assert plain.psnr > plain.guess_psnr + 3
    assert ((seen.found - seen.truth) ** 2).mean() < 0.02
    (noised,), _ = audit_images.attack_once(small, "d", EPSILONS[0], seed=0)
    assert abs(noised.psnr - noised.guess_psnr) < 1.0


def test_a_setting_that_several_groups_have_is_attacked_once_and_shown_in_each(small: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def attack(data: Images, name: str, setting: audit_images.Setting, *, seed: int) -> tuple[list[Outcome], Picture]:
        asked.append(setting.name)
        return [made(setting.name, seed)], Picture(data=name, setting=setting.name, truth=np.zeros((8, 8, 1)), found=np.zeros((8, 8, 1)))

    monkeypatch.setattr(audit_images, "attack_once", attack)
    outcomes, pictures = audit_images.run({"d": small}, GRID, seeds=2, tick=lambda _: None)
    assert {outcome.setting for outcome in outcomes} == {picture.setting for picture in pictures} == {setting.name for setting in GRID}
    alike = {replace(setting, name="", group="", value=0.0) for setting in GRID}
    assert len(asked) == 2 * len(alike) < 2 * len(GRID)


def test_the_page_and_the_figures_are_made_from_the_runs(tmp_path: Path) -> None:
    summaries = audit_images.summarise([made(setting.name, seed) for setting in GRID for seed in range(3)])
    page = audit_images.dossier(summaries, seeds=3, command="python -m benchmarks.audit_images")
    assert page.count("| d |") == len(GRID) > len(QUICK_GRID)
    assert "21.0 dB (18.5 to 23.5)" in page
    audit_images.draw(summaries, GRID, tmp_path / "figure.svg")
    assert "clients in the sum" in (tmp_path / "figure.svg").read_text()
    image = np.linspace(0, 1, 64).reshape(8, 8, 1)
    audit_images.show([Picture(data="d", setting=setting.name, truth=image, found=image) for setting in GRID], tmp_path / "sheet.png")
    assert (tmp_path / "sheet.png").read_bytes().startswith(b"\x89PNG")
