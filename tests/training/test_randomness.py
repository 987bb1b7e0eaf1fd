import itertools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from privfed.training.randomness import OperatingSystemRandomness, Randomness, _SeededRandomness

ROOT = Path(__file__).parents[2]
SURE = 1e-6  # chance of a false alarm that a test of the operating system's entropy accepts
RECORDS, RATE, DRAWS = 50, 0.1, 8000


class Constant(Randomness):
    """Repeats one byte."""

    private = False

    def __init__(self, byte: bytes) -> None:
        self.byte = byte

    def _stream(self, count: int) -> bytes:
        return self.byte * count


def normal_p(sample: NDArray[np.float64], *, scale: float) -> float:
    return float(stats.kstest(sample, "norm", args=(0, scale)).pvalue)


@pytest.mark.parametrize("randomness", [OperatingSystemRandomness(), _SeededRandomness(1)], ids=["system", "seeded"])
def test_the_noise_is_standard_normal_and_the_test_rejects_two_thirds_and_three_halves(randomness: Randomness) -> None:
    sample = randomness.normal(20001)
    assert sample.shape == (20001,)
    assert sample.dtype == np.float64
    assert normal_p(sample, scale=1.0) > SURE
    assert normal_p(sample, scale=2 / 3) < SURE
    assert normal_p(sample, scale=3 / 2) < SURE


def test_the_two_numbers_of_a_box_muller_pair_are_independent() -> None:
    first, second = np.split(_SeededRandomness(2).normal(40000), 2)
    for a, b in ((first, second), (first**2, second**2), (np.abs(first), second)):
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(len(a))
    assert abs(np.corrcoef(first**2, first**2 + second**2)[0, 1]) > 5 / np.sqrt(len(first))


def test_the_extreme_streams_give_finite_noise() -> None:
    for byte in (b"\x00", b"\xff"):
        sample = Constant(byte).normal(3)
        assert np.isfinite(sample).all()
        assert np.abs(sample).max() <= 36


def test_the_noise_is_that_of_box_and_muller_to_the_last_bits() -> None:
    class Given(Randomness):
        private = False

        def _stream(self, count: int) -> bytes:
            words = np.concatenate([np.full(count // 16, 2**62), np.linspace(0, 2**64 - 2**12, count // 16)])
            return words.astype(np.uint64).tobytes()

    uniform = Given()._uniform(2000)
    radius, angle = np.sqrt(-2 * np.log(uniform[:1000])), 2 * np.pi * uniform[1000:]
    expected = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    # The angle itself is rounded, by 2 pi 2^-53; the tangent and four more operations by 2^-53 each.
    assert np.abs(Given().normal(2000) - expected).max() <= radius.max() * (2 * np.pi + 6) * 2.0**-52


def test_noise_comes_from_aes_256_in_counter_mode() -> None:
    # The encryption of the zero block under the zero key (McGrew and Viega, 2005, "GCM", test case 13, H).
    assert _SeededRandomness(0)._stream(16).hex() == "dc95c078a2408989ad48a21492842087"


def test_every_draw_is_new_even_from_one_object() -> None:
    randomness = OperatingSystemRandomness()
    draws = [randomness.normal(4).tobytes() for _ in range(100)] + [OperatingSystemRandomness().normal(4).tobytes() for _ in range(100)]
    assert len(set(draws)) == 200


def test_only_the_operating_system_s_randomness_is_private() -> None:
    assert OperatingSystemRandomness().private
    assert not _SeededRandomness(3).private
    assert _SeededRandomness(3).normal(5).tolist() == _SeededRandomness(3).normal(5).tolist()
    assert _SeededRandomness(3).normal(5).tolist() != _SeededRandomness(4).normal(5).tolist()


def test_forked_processes_get_different_noise() -> None:
    randomness = OperatingSystemRandomness()
    randomness.normal(8)
    seen = []
    for _ in range(2):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writer, randomness.normal(8).tobytes())
            os._exit(0)
        os.close(writer)
        seen.append(os.read(reader, 64))
        os.close(reader)
        os.waitpid(child, 0)
    seen.append(randomness.normal(8).tobytes())
    assert all(len(noise) == 64 for noise in seen)
    assert len(set(seen)) == 3


def test_a_forked_copy_of_the_seeded_seam_repeats_the_noise_so_the_fork_test_can_fail() -> None:
    randomness = _SeededRandomness(1)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, randomness.normal(8).tobytes())
        os._exit(0)
    os.close(writer)
    noise = os.read(reader, 64)
    os.close(reader)
    os.waitpid(child, 0)
    assert noise == randomness.normal(8).tobytes()


def test_new_processes_get_different_noise_and_need_no_torch() -> None:
    code = (
        "import random, sys; sys.modules['torch'] = None; import numpy; random.seed(1); numpy.random.seed(1)\n"
        "from privfed.training.randomness import OperatingSystemRandomness as R; print(R().normal(8).tobytes().hex())"
    )
    seen = {subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True).stdout for _ in range(2)}
    assert len(seen) == 2


def batch(randomness: Randomness, records: int, *, sample_rate: float) -> NDArray[np.int64]:
    """The only batch of a run of one step."""
    (only,) = randomness.poisson_batches(records, sample_rate=sample_rate, steps=1)
    return only


def memberships(batches: Iterable[NDArray[np.int64]]) -> NDArray[np.bool_]:
    members = np.zeros((DRAWS, RECORDS), dtype=bool)
    for row, indices in zip(members, batches, strict=True):
        row[indices] = True
    return members


def marginal_p(members: NDArray[np.bool_]) -> float:
    """Two-sided p-value of the hypothesis that each record is in with probability RATE."""
    z = (members.sum(axis=0) - DRAWS * RATE) / np.sqrt(DRAWS * RATE * (1 - RATE))
    tail = float(stats.chi2.sf((z**2).sum(), df=RECORDS))
    return 2 * min(tail, 1 - tail)


def worst_pair_z(members: NDArray[np.bool_]) -> float:
    """Largest standard score of the correlation of two records' memberships."""
    centred = (members - RATE) / np.sqrt(RATE * (1 - RATE))
    correlation = centred.T @ centred / np.sqrt(DRAWS)
    return float(np.abs(correlation[np.triu_indices(RECORDS, k=1)]).max())


def size_variance_z(members: NDArray[np.bool_]) -> float:
    """Standard score of the variance of the batch size against that of a binomial distribution."""
    ratio = members.sum(axis=1).var(ddof=1) / (RECORDS * RATE * (1 - RATE))
    return float((ratio - 1) / np.sqrt(2 / DRAWS))


# 1225 pairs: the largest of as many standard normal numbers exceeds 5.5 with a probability of 5e-5.
PAIR_LIMIT, SIZE_LIMIT, MARGINAL_LIMIT = 5.5, 5.0, 1e-5


def test_each_record_is_sampled_independently_with_the_declared_rate() -> None:
    randomness = _SeededRandomness(5)
    for members in (
        memberships(randomness.poisson_batches(RECORDS, sample_rate=RATE, steps=DRAWS)),
        memberships(batch(randomness, RECORDS, sample_rate=RATE) for _ in range(DRAWS)),
    ):
        assert marginal_p(members) > MARGINAL_LIMIT
        assert worst_pair_z(members) < PAIR_LIMIT
        assert abs(size_variance_z(members)) < SIZE_LIMIT


def test_successive_batches_are_independent_and_the_test_rejects_batches_that_go_on_from_each_other() -> None:
    members = memberships(_SeededRandomness(7).poisson_batches(RECORDS, sample_rate=RATE, steps=DRAWS))
    centred = (members - RATE) / np.sqrt(RATE * (1 - RATE))

    def worst_z(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
        return float(np.abs(first.T @ second / np.sqrt(len(first))).max())

    # 2500 pairs: the largest of as many standard normal numbers exceeds 5.5 with a probability of 1e-4.
    assert worst_z(centred[:-1], centred[1:]) < PAIR_LIMIT
    assert worst_z(centred[:-1], (centred[:-1] + centred[1:]) / np.sqrt(2)) > PAIR_LIMIT


def test_the_sampling_test_rejects_a_wrong_rate_a_fixed_size_and_blocks() -> None:
    randomness, rng = _SeededRandomness(6), np.random.default_rng(6)
    wrong_rate = memberships(randomness.poisson_batches(RECORDS, sample_rate=1.1 * RATE, steps=DRAWS))
    assert marginal_p(wrong_rate) < MARGINAL_LIMIT
    fixed_size = memberships(rng.choice(RECORDS, size=round(RECORDS * RATE), replace=False) for _ in range(DRAWS))
    assert abs(size_variance_z(fixed_size)) > SIZE_LIMIT
    firsts = randomness.poisson_batches(RECORDS // 2, sample_rate=RATE, steps=DRAWS)
    pairs = memberships(np.concatenate([2 * first, 2 * first + 1]) for first in firsts)
    assert worst_pair_z(pairs) > PAIR_LIMIT


@pytest.mark.parametrize("steps", [1, 63, 64, 65, 200])
def test_there_are_as_many_batches_as_steps_whatever_is_drawn_at_once(steps: int) -> None:
    for records, rate in ((40, 0.1), (40, 1.0), (30_000, 0.5)):
        assert sum(1 for _ in _SeededRandomness(1).poisson_batches(records, sample_rate=rate, steps=steps)) == steps


def test_a_process_that_is_forked_between_two_batches_draws_its_own() -> None:
    batches = OperatingSystemRandomness().poisson_batches(RECORDS, sample_rate=0.5, steps=40)
    next(batches)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, next(batches).tobytes())
        os._exit(0)
    os.close(writer)
    theirs = os.read(reader, 8 * RECORDS)
    os.close(reader)
    os.waitpid(child, 0)
    # Equal by chance: 2^-50.
    assert theirs != next(batches).tobytes()


@pytest.mark.parametrize(("size", "count"), [(1, 7), (4000, 19), (70_000, 2), (0, 3)])
def test_there_are_as_many_vectors_of_noise_as_asked_for_and_no_number_comes_twice(size: int, count: int) -> None:
    vectors = list(OperatingSystemRandomness().normal_vectors(size, count=count))
    assert [vector.shape for vector in vectors] == [(size,)] * count
    # Two of n numbers of some 50 random bits are equal with a probability below n^2 / 2^50.
    assert len(np.unique(np.concatenate(vectors))) == size * count


def test_vectors_of_noise_are_standard_normal_each_and_independent_of_each_other() -> None:
    vectors = np.stack(list(_SeededRandomness(8).normal_vectors(2000, count=50)))
    assert normal_p(vectors.ravel(), scale=1.0) > SURE
    assert normal_p(vectors.ravel(), scale=2 / 3) < SURE
    assert normal_p(vectors.ravel(), scale=3 / 2) < SURE

    def worst_z(rows: NDArray[np.float64]) -> float:
        return float(np.abs((rows @ rows.T / np.sqrt(rows.shape[1]))[np.triu_indices(len(rows), k=1)]).max())

    # 1225 pairs, as above.
    assert worst_z(vectors) < PAIR_LIMIT
    assert worst_z(np.concatenate([vectors, vectors[:1]])) > PAIR_LIMIT


def test_a_vector_of_noise_may_be_changed_in_place_and_no_other_changes() -> None:
    expected = [vector.copy() for vector in _SeededRandomness(9).normal_vectors(5, count=4)]
    for vector, known in zip(_SeededRandomness(9).normal_vectors(5, count=4), expected, strict=True):
        assert vector.tolist() == known.tolist()
        vector[:] = np.nan


def test_a_process_that_is_forked_between_two_vectors_of_noise_draws_its_own() -> None:
    vectors = OperatingSystemRandomness().normal_vectors(8, count=40)
    next(vectors)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, next(vectors).tobytes())
        os._exit(0)
    os.close(writer)
    theirs = os.read(reader, 64)
    os.close(reader)
    os.waitpid(child, 0)
    assert len(theirs) == 64
    assert theirs != next(vectors).tobytes()


def test_a_rate_of_one_takes_every_record_and_a_tiny_rate_none() -> None:
    randomness = OperatingSystemRandomness()
    assert batch(randomness, 7, sample_rate=1.0).tolist() == list(range(7))
    for rate in (1e-15, 5e-324):
        assert len(batch(randomness, 100, sample_rate=rate)) == 0


def test_every_subset_is_as_likely_as_every_other_and_the_test_rejects_the_first_indices() -> None:
    indices, subsets = np.array([2, 3, 5, 8, 13]), list(itertools.combinations((2, 3, 5, 8, 13), 2))

    def p_value(drawn: Iterable[NDArray[np.int64]]) -> float:
        counted = Counter(tuple(subset.tolist()) for subset in drawn)
        assert set(counted) <= set(subsets)  # sorted, none twice
        return float(stats.chisquare([counted[subset] for subset in subsets]).pvalue)

    randomness = OperatingSystemRandomness()
    assert p_value(randomness.subset(indices, 2) for _ in range(4000)) > SURE
    assert p_value(indices[:2] for _ in range(4000)) < SURE
    assert randomness.subset(indices, 5).tolist() == indices.tolist()


def test_sampling_draws_again_when_the_first_gaps_do_not_reach_the_end() -> None:
    # All-ones bytes are the uniform number 1, for which every gap is 1.
    assert batch(Constant(b"\xff"), 5000, sample_rate=0.01).tolist() == list(range(5000))
    assert batch(Constant(b"\x00"), 3000, sample_rate=0.01).tolist() == []


@settings(max_examples=60, deadline=None)
@given(records=st.integers(1, 400), rate=st.floats(0, 1, exclude_min=True), seed=st.integers(0, 2**64))
def test_a_sample_is_sorted_without_repetition_and_in_range(records: int, rate: float, seed: int) -> None:
    for sample in _SeededRandomness(seed).poisson_batches(records, sample_rate=rate, steps=3):
        assert sample.dtype == np.int64
        assert (np.diff(sample) > 0).all()
        assert not len(sample) or (sample[0] >= 0 and sample[-1] < records)
