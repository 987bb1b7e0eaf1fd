"""Compares reconstructed images with the true ones, beside guesses that saw nothing. Only an auditor can run this."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter
from scipy.optimize import linear_sum_assignment

from privfed.attacks.images import ImageShape

# Of structural similarity (Wang et al., 2004, section III-C): constants against division by 0, and the window, 11 pixels wide.
_LUMINANCE, _CONTRAST = 0.01**2, 0.03**2
_WINDOW, _WINDOWS = 1.5, 3.5
_LEAST_ERROR = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageScore:
    """Means over the true images.

    Args:
        psnr: Peak signal to noise ratio in decibels; up to 120, from 25 on people see the same image.
        ssim: Structural similarity, up to 1.
        identified: Share of images whose reconstruction is nearer to them than to any other image of the gallery, from 0 to 1.
    """

    psnr: float
    ssim: float
    identified: float


def score_images(
    rows: NDArray[np.float64],
    truth: NDArray[np.float64],
    *,
    shape: ImageShape,
    baseline: NDArray[np.float64],
    gallery: NDArray[np.float64],
) -> ImageScore:
    """How near the reconstructions are, under the assignment to true images with the least squared error.

    Only as many as there are true ones count, in the attack's own order. Where an attack gives fewer, images of the baseline fill up:
    an attack that finds nothing scores as the baseline.

    Args:
        rows: What the attack found, of shape (any, pixels), best first.
        truth: The true images, of shape (n, pixels), n at least 1. Private.
        shape: Of the images.
        baseline: Guesses without the update, of shape (n, pixels). Pass it as `rows` to get the baseline's own score.
        gallery: Other images of the same kind, of shape (any, pixels), among which each true one is to be recognised.

    Raises:
        ValueError: If shapes do not fit.
    """
    true_images = shape.images(truth)
    if not len(truth) or baseline.shape != truth.shape:
        raise ValueError(f"expected at least one true image and as many of the baseline, got shapes {truth.shape} and {baseline.shape}")
    guesses = np.concatenate([rows, baseline])[: len(truth)]
    guesses = guesses[linear_sum_assignment(_squared_errors(truth, guesses))[1]]
    distances = _squared_errors(guesses, np.concatenate([truth, gallery]))
    errors = np.maximum(distances.diagonal(), _LEAST_ERROR)
    pairs = zip(shape.images(guesses), true_images, strict=True)
    return ImageScore(
        psnr=float((-10 * np.log10(errors)).mean()),
        ssim=float(np.mean([structural_similarity(guess, true) for guess, true in pairs])),
        identified=float((distances.argmin(axis=1) == np.arange(len(truth))).mean()),
    )


def structural_similarity(image: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Structural similarity of two images of shape (channels, height, width) and range 0 to 1, mean over pixels and channels.

    Source: Wang et al., 2004, equation 13, with a Gaussian window.
    """

    def blurred(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return gaussian_filter(values, sigma=(0, _WINDOW, _WINDOW), truncate=_WINDOWS)

    mean, other_mean = blurred(image), blurred(other)
    variances = blurred(image**2) - mean**2 + blurred(other**2) - other_mean**2
    covariance = blurred(image * other) - mean * other_mean
    luminance = (2 * mean * other_mean + _LUMINANCE) / (mean**2 + other_mean**2 + _LUMINANCE)
    return float((luminance * (2 * covariance + _CONTRAST) / (variances + _CONTRAST)).mean())


def grey_images(shape: ImageShape, *, count: int) -> NDArray[np.float64]:
    """Baseline: the same grey image `count` times."""
    return np.full((count, shape.pixels), 0.5)


def mean_images(public_rows: NDArray[np.float64], *, count: int) -> NDArray[np.float64]:
    """Baseline: the mean of public images `count` times."""
    return np.tile(public_rows.mean(axis=0), (count, 1))


def _squared_errors(rows: NDArray[np.float64], others: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean squared error per pixel and channel, of shape (rows, others)."""
    return np.stack([((others - row) ** 2).mean(axis=1) for row in rows])
