"""Times of the hot paths. No test here asserts a time; `make bench` compares them with a baseline, see `benchmarks.hot_paths`."""

import hashlib

import numpy as np
import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from privfed.data.samples import Samples
from privfed.dp.accounting import epsilon
from privfed.dp.mechanism import PoissonSampledGaussian
from privfed.he.additive import CkksVector, weighted_sum
from privfed.he.codec import quantise
from privfed.he.params import CkksParams
from privfed.he.secret import RoundBinding, RoundKey, SharedKey, encrypt, open_sum
from privfed.training.dpsgd import check, train
from privfed.training.loss import binary_cross_entropy
from privfed.training.mechanism import DpSgd, NonPrivate, TrainingMechanism
from privfed.training.model import mlp, values_of
from privfed.update import Layout

PARAMETERS = 100_000
PARAMS = CkksParams.standard()
LAYOUT = Layout(names=("weight",), shapes=((PARAMETERS,),))
KEYS = SharedKey.generate()


def test_reference(benchmark: BenchmarkFixture) -> None:
    """Work of fixed size that nothing here can change: what the others are measured in."""
    matrix, data = np.random.default_rng(0).normal(size=(256, 256)), bytes(1 << 20)
    benchmark(lambda: (matrix @ matrix, hashlib.sha256(data).digest()))


def round_key() -> RoundKey:
    """A new object for the one key of one round: each object encrypts once."""
    return KEYS.round_key(RoundBinding(session=bytes(16), attempt=0, round=0, roster_digest=bytes(32), params=PARAMS))


def encrypted() -> CkksVector:
    """An encrypted update of 100,000 parameters."""
    grid, _ = quantise(np.random.default_rng(0).normal(scale=0.01, size=PARAMETERS), PARAMS)
    return encrypt(grid, LAYOUT, PARAMS, round_key(), sender="bank")


def test_encrypt_100k(benchmark: BenchmarkFixture) -> None:
    grid, _ = quantise(np.random.default_rng(0).normal(scale=0.01, size=PARAMETERS), PARAMS)
    benchmark.pedantic(encrypt, setup=lambda: ((grid, LAYOUT, PARAMS, round_key()), {"sender": "bank"}), rounds=10)


def test_sum_10_clients_100k(benchmark: BenchmarkFixture) -> None:
    vectors = [encrypted() for _ in range(10)]
    benchmark(weighted_sum, vectors, list(range(1, 11)))


def test_open_100k(benchmark: BenchmarkFixture) -> None:
    summed = weighted_sum([encrypted() for _ in range(3)], [1, 2, 3])
    benchmark(open_sum, summed, round_key(), coefficients=[1, 2, 3])


def test_derive_round_key(benchmark: BenchmarkFixture) -> None:
    benchmark(round_key)


MECHANISMS = {
    "private": DpSgd(noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.05, expected_batch_size=512, steps=20, learning_rate=0.1),
    "plain": NonPrivate(learning_rate=0.1, batch_size=512, steps=20, seed=0),
}


@pytest.mark.parametrize("name", MECHANISMS)
def test_train_20_steps(benchmark: BenchmarkFixture, name: str) -> None:
    torch.set_num_threads(1)
    mechanism: TrainingMechanism = MECHANISMS[name]
    rng = np.random.default_rng(0)
    features = rng.normal(size=(10_000, 30)).astype(np.float32)
    samples = Samples(
        features=features, labels=(features[:, 0] > 1).astype(np.int64), groups=None, columns=tuple(f"c{index}" for index in range(30))
    )
    model = mlp(inputs=30, hidden=(128, 64))
    values, loss = values_of(model), binary_cross_entropy
    steady = check(model, values, samples, mechanism=mechanism, loss=loss)  # once for all rounds
    benchmark(train, model, values, samples, mechanism=mechanism, loss=loss, steady=steady)


def test_epsilon_of_20_rounds(benchmark: BenchmarkFixture) -> None:
    counter = iter(range(10_000_000))

    def fresh() -> float:
        # Another noise multiplier each time, so that no cache answers.
        return epsilon([PoissonSampledGaussian(noise_multiplier=1.0 + next(counter) * 1e-6, sample_rate=0.01, steps=100)] * 20, delta=1e-5)

    benchmark(fresh)
