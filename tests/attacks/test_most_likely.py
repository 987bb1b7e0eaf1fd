from dataclasses import replace

import numpy as np
import pytest
import torch

from privfed.attacks.facts import AdaptiveOptimizer
from privfed.attacks.most_likely import MostLikelyRows
from privfed.attacks.observation import CiphertextOnly, NotApplicable, Reconstruction
from privfed.attacks.scoring import match_rows, score_rows
from privfed.training.model import mlp

NOISE = {1: 3.7306, 8: 0.6002, 100: 0.0947, 1000: 0.0246}
"""Noise multipliers of a single Gaussian release with this epsilon at delta 1e-5 (Balle and Wang, 2018, theorem 8)."""


def scores(table, prior, noised_round, *, noise_multiplier: float, size: int, seeds: range, **attack) -> tuple[np.ndarray, np.ndarray]:
    """Shares of cells right to 0.319 standard deviations, for the attack and for the best guess that saw nothing, per batch."""
    found = []
    tolerance = 0.319 / float((table.schema.high - table.schema.low)[0])
    for seed in seeds:
        rows, labels = table.batch(size, seed=seed)
        observation = noised_round(rows, labels, table.schema, noise_multiplier=noise_multiplier, seed=seed)
        result = MostLikelyRows(module=mlp(50), prior=prior, **attack).attack(observation)
        assert isinstance(result, Reconstruction)
        guess = prior.guess(size)
        found.append([score_rows(r, rows, schema=table.schema, tolerance=tolerance, baseline=guess).cells for r in (result.rows, guess)])
    return np.array(found)[:, 0], np.array(found)[:, 1]


@pytest.mark.parametrize("epsilon", [1, 8])
def test_where_noise_hides_the_record_it_is_as_good_as_a_guess(epsilon: int, fraud_table, fraud_prior, noised_round) -> None:
    settings = {"noise_multiplier": NOISE[epsilon], "size": 1, "restarts": 2, "iterations": 60}
    found, guessed = scores(fraud_table, fraud_prior, noised_round, seeds=range(6), **settings)
    assert abs(np.mean(found - guessed)) <= 0.05


def test_at_epsilon_100_and_1000_it_reads_more_than_a_guess(fraud_table, fraud_prior, noised_round) -> None:
    settings = {"size": 1, "seeds": range(6), "restarts": 2, "iterations": 100}
    weak, guessed = scores(fraud_table, fraud_prior, noised_round, noise_multiplier=NOISE[100], **settings)
    strong, _ = scores(fraud_table, fraud_prior, noised_round, noise_multiplier=NOISE[1000], **settings)
    assert np.mean(guessed) < 0.43 <= np.mean(weak)
    assert np.mean(strong) >= 0.78


def test_without_noise_it_reads_a_record_completely(fraud_table, fraud_prior, noised_round) -> None:
    settings = {"noise_multiplier": 1e-9, "size": 1, "restarts": 2, "iterations": 150}
    assert scores(fraud_table, fraud_prior, noised_round, seeds=range(3), **settings)[0].tolist() == [1.0] * 3


@pytest.mark.nightly
@pytest.mark.parametrize(("size", "repeats"), [(1, 60), (8, 24)])
@pytest.mark.parametrize("epsilon", [1, 8, 100, 1000])
def test_figures_per_epsilon(epsilon: int, size: int, repeats: int, fraud_prior, request) -> None:
    fraud_table, noised_round = (request.getfixturevalue(name) for name in ("fraud_table", "noised_round"))
    found, guessed = scores(fraud_table, fraud_prior, noised_round, noise_multiplier=NOISE[epsilon], size=size, seeds=range(repeats))
    gain = found - guessed
    print(f"epsilon {epsilon}, {size} records: {found.mean():.3f}, guessing {guessed.mean():.3f}, gain {gain.mean():.3f} +- "
          f"{gain.std(ddof=1) / np.sqrt(repeats):.3f}")  # fmt: skip
    assert gain.mean() >= -0.05
    if epsilon <= 8:
        assert gain.mean() <= 0.05
    if size == 1:
        assert found.mean() >= {1: 0, 8: 0, 100: 0.43, 1000: 0.78}[epsilon]


def test_confidence_falls_as_noise_grows_and_separates_success_from_failure(fraud_table, fraud_prior, noised_round) -> None:
    tolerance = 0.319 / float((fraud_table.schema.high - fraud_table.schema.low)[0])
    right, wrong, means = [], [], []
    for noise_multiplier in (1e-9, 0.0246, 3.7):
        confidences = []
        for size, seed in ((1, 0), (4, 2)):
            rows, labels = fraud_table.batch(size, seed=seed)
            observation = noised_round(rows, labels, fraud_table.schema, noise_multiplier=noise_multiplier, seed=seed)
            result = MostLikelyRows(module=mlp(50), prior=fraud_prior, restarts=2, iterations=100).attack(observation)
            match = match_rows(result.rows, rows, schema=fraud_table.schema, tolerance=tolerance, baseline=rows)
            share = match.right.mean(axis=1)[np.argsort(match.found)]
            right += result.confidence[share >= 0.7].tolist()
            wrong += result.confidence[share < 0.6].tolist()
            if size == 1:
                confidences += result.confidence.tolist()
        means.append(np.mean(confidences))
    assert means == sorted(means, reverse=True)
    assert means[0] > 0.9
    assert means[2] < 0.05
    assert len(right) >= 2
    assert len(wrong) >= 6
    assert np.mean(np.array(right)[:, None] > np.array(wrong)) >= 0.9


def test_a_misfit_that_noise_does_not_explain_is_told_by_confidence(fraud_table, fraud_prior, noised_round) -> None:
    rows, labels = fraud_table.batch(1)
    observation = noised_round(rows, labels, fraud_table.schema, noise_multiplier=1.0)
    declared = replace(observation.training.noise, noise_multiplier=0.05)
    understated = replace(observation, training=replace(observation.training, noise=declared))
    confidence = {}
    for name, seen in (("true", observation), ("understated", understated)):
        result = MostLikelyRows(module=mlp(50), prior=fraud_prior, iterations=100).attack(seen)
        assert isinstance(result, Reconstruction)
        confidence[name] = float(result.confidence[0])
    assert confidence["true"] < 0.1
    # Rows that were fitted to noise which is not known to be noise are a mistake that cannot be noticed entirely.
    assert confidence["understated"] < 0.6


def test_it_says_when_it_is_not_applicable(fraud_table, fraud_prior, noised_round) -> None:
    rows, labels = fraud_table.batch(2)
    observation = noised_round(rows, labels, fraud_table.schema, noise_multiplier=1.0)
    adam = replace(observation, training=replace(observation.training, optimizer=AdaptiveOptimizer(name="Adam")))
    encrypted = replace(observation, seen=CiphertextOnly(bytes_seen=10))
    for refused, reason in ((adam, "Adam rescales"), (encrypted, "holds no key")):
        result = MostLikelyRows(module=mlp(50), prior=fraud_prior).attack(refused)
        assert isinstance(result, NotApplicable)
        assert reason in str(result)


def test_a_prior_on_another_schema_is_refused(fraud_table, fraud_prior, noised_round) -> None:
    rows, labels = fraud_table.batch(1)
    columns = fraud_table.schema.columns[::-1]
    observation = noised_round(rows, labels, replace(fraud_table.schema, columns=columns), noise_multiplier=1.0)
    with pytest.raises(ValueError, match="another schema"):
        MostLikelyRows(module=mlp(50), prior=fraud_prior).attack(observation)


def test_the_result_is_the_same_when_the_truth_is_replaced_by_garbage(fraud_table, fraud_prior, noised_round) -> None:
    rows, labels = (part.copy() for part in fraud_table.batch(2))
    observation = noised_round(rows, labels, fraud_table.schema, noise_multiplier=0.1)
    attack = MostLikelyRows(module=mlp(50), prior=fraud_prior, iterations=20)
    first = attack.attack(observation)
    rows[:], labels[:] = 99.0, 1
    torch.manual_seed(77)
    again = attack.attack(observation)
    np.testing.assert_array_equal(first.rows, again.rows)
    np.testing.assert_array_equal(first.confidence, again.confidence)
    assert not first.certified.any()
