import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm
from torch import nn

from privfed.attacks.candidates import CandidateAttack, CandidateGuess, LabelledRows
from privfed.attacks.facts import Activation, AdaptiveOptimizer, BinaryLoss, Continuous, GaussianNoise, Sgd, TableSchema, TrainingFacts
from privfed.attacks.observation import CiphertextOnly, NotApplicable, Observation
from privfed.attacks.reconstruction_bound import reconstruction_bound
from privfed.dp.mechanism import PoissonSampledGaussian
from privfed.training.model import mlp, values_of
from privfed.update import PlainVector

NOISE = {1: 3.7306, 8: 0.6002, 100: 0.0947}
"""Noise multipliers of a single Gaussian release with this epsilon at delta 1e-5 (Balle and Wang, 2018, theorem 8)."""


def bound(noise_multiplier: float, candidates: int, *, steps: int = 1) -> float:
    event = PoissonSampledGaussian(noise_multiplier=noise_multiplier, sample_rate=1.0, steps=steps)
    return reconstruction_bound(event, candidates=candidates)


def optimum(noise_multiplier: float, candidates: int) -> float:
    """The probability that the largest of `candidates` normal numbers is the one whose mean is 1 / noise_multiplier."""
    mean = 1 / noise_multiplier
    return quad(lambda z: norm.pdf(z - mean) * norm.cdf(z) ** (candidates - 1), mean - 10, mean + 10)[0]


def release(gradient: np.ndarray, noise_multiplier: float, model: nn.Module, schema, rng: np.random.Generator) -> Observation:
    """One step on one record whose clipped gradient, of norm 1, is given."""
    start = values_of(model)
    change = -0.1 * (gradient + noise_multiplier * rng.normal(size=gradient.shape))
    noise = GaussianNoise(noise_multiplier=noise_multiplier, max_grad_norm=1.0)
    training = TrainingFacts(optimizer=Sgd(learning_rate=0.1), loss=BinaryLoss(), steps=1, batch_size=1, noise=noise)
    seen = PlainVector(layout=start.layout, values=change)
    return Observation(layout=start.layout, model=start, seen=seen, training=training, activation=Activation.OTHER, schema=schema)


def orthogonal(count: int) -> tuple[nn.Module, TableSchema, LabelledRows]:
    """A model of one weight per column, and records of one column each: their clipped gradients are the unit vectors."""
    model = nn.Linear(count, 1, bias=False)
    nn.init.zeros_(model.weight)
    schema = TableSchema(columns=tuple(Continuous(name=f"column {i}", low=0, high=50) for i in range(count)))
    return model, schema, LabelledRows(rows=50 * np.eye(count), labels=np.zeros(count, dtype=np.int64))


def outcomes(noise_multiplier: float, count: int, trials: int) -> tuple[np.ndarray, np.ndarray]:
    """Whether the attack was right about orthogonal candidates, and how sure it was, in each trial."""
    rng = np.random.default_rng(count)
    model, schema, candidates = orthogonal(count)
    attack = CandidateAttack(module=model, candidates=candidates)
    right, sure = [], []
    for _ in range(trials):
        chosen = int(rng.integers(count))
        guess = attack.attack(release(np.eye(count)[chosen], noise_multiplier, model, schema, rng))
        right.append(guess.best == chosen)
        sure.append(guess.confidence)
    return np.array(right), np.array(sure)


def error(share: float, trials: int) -> float:
    """Three standard errors of a share."""
    return 3 * math.sqrt(share * (1 - share) / trials)


def check_optimal(noise_multiplier: float, count: int, trials: int) -> None:
    right, sure = outcomes(noise_multiplier, count, trials)
    best = optimum(noise_multiplier, count)
    assert abs(right.mean() - best) <= error(best, trials)
    assert right.mean() <= bound(noise_multiplier, count) + error(best, trials)
    # What it says about itself is true: on average it is as sure as it is right.
    assert abs(sure.mean() - right.mean()) <= error(best, trials)


def test_the_optimum_is_that_of_the_literature_and_below_the_bound() -> None:
    assert optimum(NOISE[8], 10) == pytest.approx(0.565, abs=5e-4)
    assert all(optimum(noise, count) <= bound(noise, count) for noise in NOISE.values() for count in (2, 10, 100))
    # What the statistical tests reject: an attack that takes the noise for twice as large as it is reads only half as much.
    assert optimum(2 * NOISE[8], 10) < optimum(NOISE[8], 10) - error(0.565, 400)


@pytest.mark.parametrize("epsilon", [1, 8, 100])
def test_on_orthogonal_candidates_it_is_optimal_and_not_above_the_bound(epsilon: int) -> None:
    check_optimal(NOISE[epsilon], 10, 400)


@pytest.mark.nightly
@pytest.mark.parametrize("count", [2, 10, 100])
@pytest.mark.parametrize("epsilon", [1, 8, 100])
def test_on_orthogonal_candidates_it_is_optimal_in_many_trials(epsilon: int, count: int) -> None:
    check_optimal(NOISE[epsilon], count, 4000)


def real(table, noised_round, *, epsilon: int, count: int, trials: int) -> float:
    """Share of trials in which the right one of real rows was named, after the product's own DP-SGD."""
    right = []
    for trial in range(trials):
        rng = np.random.default_rng(trial)
        rows, labels = table.batch(count, seed=trial)
        chosen = int(rng.integers(count))
        mine = slice(chosen, chosen + 1)
        observation = noised_round(rows[mine], labels[mine], table.schema, noise_multiplier=NOISE[epsilon], seed=trial)
        right.append(CandidateAttack(module=mlp(50), candidates=LabelledRows(rows=rows, labels=labels)).attack(observation).best == chosen)
    return float(np.mean(right))


def test_real_rows_are_named_as_often_as_the_bound_allows_at_most(fraud_table, noised_round) -> None:
    limit = bound(NOISE[8], 10)
    share = real(fraud_table, noised_round, epsilon=8, count=10, trials=60)
    assert share <= limit + error(limit, 60)
    assert real(fraud_table, noised_round, epsilon=100, count=100, trials=30) >= 0.9


@pytest.mark.nightly
@pytest.mark.parametrize("count", [10, 100])
@pytest.mark.parametrize("epsilon", [1, 8, 100])
def test_figures_on_real_rows(epsilon: int, count: int, fraud_table, noised_round) -> None:
    share = real(fraud_table, noised_round, epsilon=epsilon, count=count, trials=1500)
    limit = bound(NOISE[epsilon], count)
    print(f"epsilon {epsilon}, {count} candidates: named {share:.3f}, bound {limit:.3f}")
    assert share <= limit + error(limit, 1500)
    if epsilon == 100:
        assert share >= 0.9


def test_known_records_are_taken_out_of_the_sum(fraud_table, noised_round) -> None:
    rows, labels = fraud_table.batch(30, seed=5)
    known = LabelledRows(rows=rows[:7], labels=labels[:7])
    candidates = LabelledRows(rows=rows[7:], labels=labels[7:])
    observation = noised_round(rows[:8], labels[:8], fraud_table.schema, noise_multiplier=NOISE[100])
    assert CandidateAttack(module=mlp(50), candidates=candidates, known=known).attack(observation).best == 0
    with_nothing = CandidateAttack(module=mlp(50), candidates=candidates).attack(observation)
    assert with_nothing.confidence < 1
    shuffled = LabelledRows(rows=candidates.rows[::-1], labels=candidates.labels[::-1])
    assert CandidateAttack(module=mlp(50), candidates=shuffled, known=known).attack(observation).best == len(candidates) - 1


def test_without_noise_the_right_record_is_named_for_sure(fraud_table, observe) -> None:
    rows, labels = fraud_table.batch(20)
    torch.manual_seed(0)
    model = mlp(50)
    observation = observe(rows[3:4], labels[3:4], fraud_table.schema, model=model)
    guess = CandidateAttack(module=mlp(50), candidates=LabelledRows(rows=rows, labels=labels)).attack(observation)
    assert guess.best == 3
    assert guess.confidence > 0.999
    np.testing.assert_allclose(guess.posterior.sum(), 1)
    assert repr(guess) == "CandidateGuess(candidates=20)"


def test_it_says_when_it_is_not_applicable(fraud_table, noised_round) -> None:
    rows, labels = fraud_table.batch(3)
    observation = noised_round(rows[:1], labels[:1], fraud_table.schema, noise_multiplier=1.0)
    attack = CandidateAttack(module=mlp(50), candidates=LabelledRows(rows=rows, labels=labels))
    assert isinstance(attack.attack(observation), CandidateGuess)
    adam = replace(observation, training=replace(observation.training, optimizer=AdaptiveOptimizer(name="Adam")))
    encrypted = replace(observation, seen=CiphertextOnly(bytes_seen=10))
    for refused, reason in ((adam, "Adam rescales"), (encrypted, "holds no key")):
        result = attack.attack(refused)
        assert isinstance(result, NotApplicable)
        assert reason in str(result)


def test_candidates_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rows of shape \(n, width\) and n labels"):
        LabelledRows(rows=np.zeros((3, 2)), labels=np.zeros(2, dtype=np.int64))
    one = LabelledRows(rows=np.zeros((1, 2)), labels=np.zeros(1, dtype=np.int64))
    with pytest.raises(ValueError, match="at least two candidates, got 1"):
        CandidateAttack(module=nn.Linear(2, 1), candidates=one)
