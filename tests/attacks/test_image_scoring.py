import math

import numpy as np
import pytest

from privfed.attacks.image_scoring import grey_images, mean_images, score_images, structural_similarity
from privfed.attacks.images import ImageShape

SHAPE = ImageShape(channels=3, height=16, width=16)


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    return np.random.default_rng(0).random((8, SHAPE.pixels))


def score(rows: np.ndarray, truth: np.ndarray, gallery: np.ndarray):
    return score_images(rows, truth, shape=SHAPE, baseline=grey_images(SHAPE, count=len(truth)), gallery=gallery)


def test_the_true_images_in_any_order_have_the_best_score(images) -> None:
    best = score(images[[2, 0, 1]], images[:3], images[3:])
    assert best.psnr == 120
    assert best.ssim == pytest.approx(1)
    assert best.identified == 1


def test_psnr_divides_by_pixels_and_channels(images) -> None:
    # An error of 0.1 in every channel is 20 dB; divided by the channels once more it would be 24.77 dB.
    off = images[:1] + 0.1 * np.where(images[:1] < 0.5, 1, -1)
    assert score(off, images[:1], images[1:]).psnr == pytest.approx(20)
    assert score(off, images[:1], images[1:]).psnr != pytest.approx(20 + 10 * math.log10(3), abs=1)


def test_structural_similarity_is_that_of_scikit_image() -> None:
    y, x = np.mgrid[:32, :32] / 31.0
    image = np.stack([x, y, (x + y) / 2])
    other = np.clip(image + 0.2 * np.sin(20 * x * y), 0, 1)
    # Mean of the full map of scikit-image 0.26's structural_similarity: gaussian_weights, sigma 1.5, no sample covariance.
    assert structural_similarity(image, other) == pytest.approx(0.32221711091760885, abs=1e-9)
    assert structural_similarity(image, image) == pytest.approx(1)


def test_structural_similarity_of_even_images_is_that_of_their_brightness() -> None:
    dark, bright = np.full((1, 16, 16), 0.2), np.full((1, 16, 16), 0.6)
    assert structural_similarity(dark, bright) == pytest.approx((2 * 0.2 * 0.6 + 1e-4) / (0.2**2 + 0.6**2 + 1e-4))


def test_an_image_is_identified_only_if_no_other_is_nearer(images) -> None:
    near = 0.9 * images[:1] + 0.1 * images[1:2]
    assert score(near, images[:1], images[1:]).identified == 1
    assert score(near, images[:1], np.concatenate([images[1:], near])).identified == 0
    assert score(0.1 * images[:1] + 0.9 * images[1:2], images[:1], images[1:]).identified == 0
    # The others of the batch are rivals, too.
    assert score(np.stack([images[0], 0.4 * images[1] + 0.6 * images[0]]), images[:2], images[2:]).identified == 0.5


def test_an_attack_that_finds_nothing_scores_as_the_baseline(images) -> None:
    nothing = score(np.zeros((0, SHAPE.pixels)), images[:3], images[3:])
    assert nothing == score(grey_images(SHAPE, count=3), images[:3], images[3:])
    some = score(images[:1], images[:3], images[3:])
    assert nothing.psnr < some.psnr < 120


def test_spraying_guesses_gains_nothing(images) -> None:
    grey = grey_images(SHAPE, count=2)
    sprayed = np.concatenate([grey, images])
    assert score(sprayed, images[:2], images[2:]) == score(grey, images[:2], images[2:])


def test_the_mean_image_is_that_of_the_public_ones(images) -> None:
    np.testing.assert_allclose(mean_images(images, count=2), np.stack([images.mean(axis=0)] * 2))


def test_shapes_that_do_not_fit_are_refused(images) -> None:
    with pytest.raises(ValueError, match="at least one true image"):
        score(images, images[:0], images)
    with pytest.raises(ValueError, match="at least one true image"):
        score_images(images, images[:2], shape=SHAPE, baseline=images[:1], gallery=images)
    with pytest.raises(ValueError, match="rows of 768 pixels"):
        score(np.zeros((1, 700)), np.zeros((1, 700)), np.zeros((1, 700)))
