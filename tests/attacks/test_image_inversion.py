import copy
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.attacks.images import relu_network
from privfed.attacks.facts import AdaptiveOptimizer, SoftmaxLoss
from privfed.attacks.image_inversion import CosineInversion, DeepLeakage
from privfed.attacks.image_scoring import ImageScore, grey_images, mean_images, score_images
from privfed.attacks.images import ImageShape
from privfed.attacks.observation import CiphertextOnly, NotApplicable, Reconstruction

MNIST, CIFAR = ImageShape(channels=1, height=28, width=28), ImageShape(channels=3, height=32, width=32)
DRAWN = slice(0, 6)
"""Which test images are attacked; the others are public."""


class Images:
    """Rows of pixels from 0 to 1 with labels, in a fixed random order."""

    def __init__(self, path, shape: ImageShape) -> None:
        with np.load(path) as data:
            pixels, labels = data["x_test"][:2000], data["y_test"][:2000]
        pixels = pixels.reshape(len(pixels), shape.height, shape.width, shape.channels).transpose(0, 3, 1, 2)
        order = np.random.default_rng(0).permutation(len(labels))
        self.rows = (pixels.reshape(len(labels), -1) / 255.0).astype(np.float32).astype(np.float64)[order]
        self.labels = labels.astype(np.int64)[order]
        self.shape = shape

    def score(self, result: object, chosen: slice) -> ImageScore:
        assert isinstance(result, Reconstruction)
        truth, public = self.rows[chosen], self.rows[DRAWN.stop :]
        return score_images(result.rows, truth, shape=self.shape, baseline=mean_images(public, count=len(truth)), gallery=public)

    def guess(self, chosen: slice) -> float:
        """Decibels of the better of two images that saw nothing: grey, or the mean of the public ones."""
        truth, public = self.rows[chosen], self.rows[DRAWN.stop :]
        guesses = (grey_images(self.shape, count=len(truth)), mean_images(public, count=len(truth)))
        return max(score_images(guess, truth, shape=self.shape, baseline=guess, gallery=public).psnr for guess in guesses)


@pytest.fixture(scope="module")
def digits(shared_data) -> Images:
    return Images(shared_data / "mnist.npz", MNIST)


@pytest.fixture(scope="module")
def photos(shared_data) -> Images:
    return Images(shared_data / "cifar10_12k.npz", CIFAR)


def lenet(shape: ImageShape, *, seed: int = 0) -> nn.Module:
    """The network of DLG: three convolutions with sigmoid, and even weights. Source: Zhu et al., 2019, section 5.1."""
    torch.manual_seed(seed)
    sizes = (shape.channels, shape.height, shape.width)
    layers: list[nn.Module] = [nn.Unflatten(1, sizes)]
    for channels, stride in ((shape.channels, 2), (12, 2), (12, 1)):
        layers += [nn.Conv2d(channels, 12, 5, padding=2, stride=stride), nn.Sigmoid()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(12 * (shape.height // 4) * (shape.width // 4), 10))
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    return model


def convnet(width: int, *, seed: int = 0) -> nn.Module:
    """Three convolutions with ReLU for 32x32 colours, as torch initialises them."""
    return relu_network(width, seed=seed)


def seen(images: Images, chosen: slice, model: nn.Module, observe):
    rows, labels = images.rows[chosen], images.labels[chosen]
    return observe(rows, labels, images.shape.schema(), model=copy.deepcopy(model), loss=SoftmaxLoss())


@pytest.fixture
def starts(monkeypatch) -> list[torch.Tensor]:
    """Where L-BFGS was started."""
    found: list[torch.Tensor] = []
    plain = torch.optim.LBFGS

    def noted(parameters, **settings):
        found.append(parameters[0].detach().clone())
        return plain(parameters, **settings)

    monkeypatch.setattr(torch.optim, "LBFGS", noted)
    return found


def test_a_digit_is_read_off_a_smooth_network_at_the_first_start_and_recognised(digits, observe, starts) -> None:
    chosen, model = slice(0, 1), lenet(MNIST)
    result = DeepLeakage(module=model, shape=MNIST, iterations=200).attack(seen(digits, chosen, model, observe))
    score = digits.score(result, chosen)
    assert score.psnr > 25 > digits.guess(chosen) + 10
    assert score.ssim > 0.8
    assert score.identified == 1
    assert result.confidence[0] > 0.5
    assert len(starts) == 1


def test_a_photo_is_read_off_a_relu_network_in_300_iterations(photos, observe) -> None:
    chosen, model = slice(0, 1), convnet(32)
    observation = seen(photos, chosen, model, observe)
    started = time.process_time()
    result = CosineInversion(module=model, shape=CIFAR).attack(observation)
    assert time.process_time() - started < 15
    score = photos.score(result, chosen)
    assert score.psnr >= 25 > photos.guess(chosen)
    assert score.identified == 1
    assert result.confidence[0] > 0.9


@pytest.mark.nightly
def test_five_of_six_photos_reach_35_decibels_with_at_most_four_starts(photos, observe) -> None:
    found = []
    for number in range(6):
        chosen, model = slice(number, number + 1), lenet(CIFAR, seed=number)
        result = DeepLeakage(module=model, shape=CIFAR).attack(seen(photos, chosen, model, observe))
        found.append(photos.score(result, chosen).psnr)
        print(f"photo {number}: {found[-1]:.1f} dB, guessing {photos.guess(chosen):.1f} dB, confidence {result.confidence[0]:.2f}, "
              f"{result.seconds:.1f} s")  # fmt: skip
    assert np.sum(np.array(found) >= 35) >= 5


@pytest.mark.nightly
def test_photos_reach_25_decibels_in_300_iterations_and_15_seconds(photos, observe) -> None:
    found, seconds = [], []
    for number in range(6):
        chosen, model = slice(number, number + 1), convnet(32, seed=number)
        observation = seen(photos, chosen, model, observe)
        started = time.process_time()
        result = CosineInversion(module=model, shape=CIFAR).attack(observation)
        seconds.append(time.process_time() - started)
        found.append(photos.score(result, chosen).psnr)
        print(f"photo {number}: {found[-1]:.1f} dB, guessing {photos.guess(chosen):.1f} dB, confidence {result.confidence[0]:.2f}, "
              f"{seconds[-1]:.1f} s")  # fmt: skip
    assert np.mean(found) >= 25
    assert np.mean(seconds) <= 15


@pytest.mark.nightly
def test_two_photos_of_one_batch_are_both_recognised(photos, observe) -> None:
    chosen, model = slice(0, 2), convnet(32)
    score = photos.score(CosineInversion(module=model, shape=CIFAR).attack(seen(photos, chosen, model, observe)), chosen)
    assert score.psnr > photos.guess(chosen) + 5
    assert score.identified == 1


@pytest.mark.parametrize("noise_multiplier", [0.6, 3.7])
def test_noise_hides_an_image_and_the_likeliest_one_is_no_worse_than_grey(noise_multiplier: float, digits, noised_round) -> None:
    chosen, model = slice(0, 1), lenet(MNIST)
    facts = {"noise_multiplier": noise_multiplier, "model": model, "loss": SoftmaxLoss()}
    observation = noised_round(digits.rows[chosen], digits.labels[chosen], MNIST.schema(), **facts)
    result = DeepLeakage(module=model, shape=MNIST, restarts=1, iterations=50).attack(observation)
    grey = score_images(
        grey_images(MNIST, count=1), digits.rows[chosen], shape=MNIST, baseline=grey_images(MNIST, count=1), gallery=digits.rows[6:]
    )
    assert abs(digits.score(result, chosen).psnr - grey.psnr) < 1
    assert result.confidence[0] < 0.01
    refused = CosineInversion(module=model, shape=MNIST).attack(observation)
    assert isinstance(refused, NotApplicable)
    assert "noise" in str(refused)


def test_confidence_rises_with_what_is_read(digits, observe) -> None:
    chosen, model = slice(1, 2), lenet(MNIST)
    observation = seen(digits, chosen, model, observe)
    early, late = (DeepLeakage(module=model, shape=MNIST, restarts=1, iterations=steps).attack(observation) for steps in (5, 120))
    assert digits.score(early, chosen).psnr < digits.score(late, chosen).psnr - 5
    assert early.confidence[0] < 0.4 < late.confidence[0]


@pytest.mark.nightly
def test_confidence_of_the_nearest_direction_separates_success_from_failure(photos, observe) -> None:
    model, right, wrong = convnet(16), [], []
    for number in range(3):
        for size, steps in ((1, 300), (1, 5), (4, 30)):
            chosen = slice(number, number + size)
            result = CosineInversion(module=model, shape=CIFAR, iterations=steps).attack(seen(photos, chosen, model, observe))
            (right if photos.score(result, chosen).psnr >= 25 else wrong).append(result.confidence[0])
    assert len(right) >= 2
    assert len(wrong) >= 3
    assert min(right) > max(wrong)


def test_it_starts_again_elsewhere_while_the_gradient_is_not_explained(digits, observe, starts) -> None:
    model = lenet(MNIST)
    observation = seen(digits, slice(0, 1), model, observe)
    DeepLeakage(module=model, shape=MNIST, restarts=3, iterations=2).attack(observation)
    assert len(starts) == 3
    assert not torch.equal(starts[0], starts[1])


def test_the_pixels_really_move(digits, observe) -> None:
    model = lenet(MNIST)
    observation = seen(digits, slice(0, 1), model, observe)
    for attack in (DeepLeakage, CosineInversion):
        before, after = (attack(module=model, shape=MNIST, restarts=1, iterations=steps).attack(observation).rows for steps in (1, 20))
        assert np.abs(before - after).max() > 0.1


@pytest.mark.parametrize("attack", [DeepLeakage, CosineInversion])
def test_it_says_when_it_is_not_applicable(attack: type, digits, observe) -> None:
    model = lenet(MNIST)
    observation = seen(digits, slice(0, 1), model, observe)
    adam = replace(observation, training=replace(observation.training, optimizer=AdaptiveOptimizer(name="Adam")))
    encrypted = replace(observation, seen=CiphertextOnly(bytes_seen=10))
    without_bias = nn.Sequential(nn.Unflatten(1, (1, 28, 28)), nn.Conv2d(1, 10, 28), nn.Flatten())
    unlabelled = seen(digits, slice(0, 2), without_bias, observe)
    for refused, reason, module in (
        (adam, "Adam rescales", model),
        (encrypted, "holds no key", model),
        (unlabelled, "labels", without_bias),
    ):
        result = attack(module=module, shape=MNIST).attack(refused)
        assert isinstance(result, NotApplicable)
        assert reason in str(result)


@pytest.mark.parametrize("attack", [DeepLeakage, CosineInversion])
def test_tables_are_refused(attack: type, digits, observe) -> None:
    model = lenet(MNIST)
    observation = seen(digits, slice(0, 1), model, observe)
    with pytest.raises(ValueError, match="schema of 3072 pixels, got 784"):
        attack(module=model, shape=CIFAR).attack(observation)


@pytest.mark.parametrize("attack", [DeepLeakage, CosineInversion])
def test_the_result_is_the_same_when_the_truth_is_replaced_by_garbage(attack: type, digits, observe) -> None:
    rows, labels, model = digits.rows[:1].copy(), digits.labels[:1].copy(), lenet(MNIST)
    observation = observe(rows, labels, MNIST.schema(), model=copy.deepcopy(model), loss=SoftmaxLoss())
    tried = attack(module=model, shape=MNIST, restarts=1, iterations=5)
    first = tried.attack(observation)
    rows[:], labels[:] = 0.5, 0
    torch.manual_seed(77)
    again = tried.attack(observation)
    np.testing.assert_array_equal(first.rows, again.rows)
    assert not first.certified.any()
