import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from privfed.attacks.candidates import LabelledRows
from privfed.attacks.client_properties import LabelDistribution, LabelShares
from privfed.attacks.facts import AdaptiveOptimizer, Sgd, SoftmaxLoss
from privfed.attacks.observation import CiphertextOnly, NotApplicable
from privfed.training.model import mlp

CLASSES = 5
CENTRES = np.random.default_rng(0).normal(size=(CLASSES, 50))


@pytest.fixture(scope="module")
def rows_of(table):
    """Rows of the table moved by their class, so that a network can learn it."""

    def made(labels: np.ndarray, *, public: bool = False, seed: int = 0) -> np.ndarray:
        pool = table.public if public else table.rows[:2000]
        return pool[np.random.default_rng(seed).choice(len(pool), size=len(labels))] + 0.7 * CENTRES[labels]

    return made


def drawn(rows_of, seed: int) -> LabelledRows:
    labels = np.random.default_rng(seed).integers(CLASSES, size=600)
    return LabelledRows(rows=rows_of(labels, public=True, seed=seed), labels=labels)


@pytest.fixture(scope="module")
def public(rows_of) -> LabelledRows:
    return drawn(rows_of, 9)


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return mlp(50, hidden=(64, 32), outputs=CLASSES)


def learnt(public: LabelledRows) -> nn.Module:
    model = network(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    rows, labels = torch.tensor(public.rows, dtype=torch.float32), torch.tensor(public.labels)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(rows), labels).backward()
        optimizer.step()
    return model


def skewed(seed: int, size: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.choice(CLASSES, size=size, p=rng.dirichlet(np.full(CLASSES, 0.5)))


def distance(shares: np.ndarray, labels: np.ndarray) -> float:
    """Total variation from the true frequencies."""
    return float(np.abs(shares - np.bincount(labels, minlength=CLASSES) / len(labels)).sum() / 2)


def attack(model: nn.Module, public: LabelledRows, observation) -> LabelShares:
    result = LabelDistribution(module=model, public=public).attack(observation)
    assert isinstance(result, LabelShares)
    assert result.shares.sum() == pytest.approx(1)
    assert result.shares.min() >= 0
    return result


@pytest.mark.parametrize(("trained", "steps"), [(False, 1), (False, 10), (True, 1), (True, 10)])
def test_the_frequencies_of_a_clients_labels_are_read(trained: bool, steps: int, rows_of, public, table, observe) -> None:  # noqa: PLR0917
    found, guessed = [], []
    usual = np.bincount(public.labels) / len(public)
    for seed in range(6):
        labels = skewed(seed, 200)
        model = learnt(public) if trained else network(seed)
        facts = {"model": copy.deepcopy(model), "loss": SoftmaxLoss(), "optimizer": Sgd(learning_rate=0.05), "steps": steps}
        observation = observe(rows_of(labels, seed=seed), labels, table.schema, **facts)
        found.append(distance(attack(model, public, observation).shares, labels))
        guessed.append(distance(usual, labels))
    assert np.mean(guessed) > 0.3
    assert np.mean(found) < 0.1


def test_a_banks_fraud_rate_is_read_with_one_logit_and_clipped_records(table, noised_round) -> None:
    torch.manual_seed(0)
    model = mlp(50)
    public = LabelledRows(rows=table.public, labels=table.public_labels)
    rows, _ = table.batch(400)
    for rate in (0.02, 0.2):
        labels = (np.random.default_rng(1).random(400) < rate).astype(np.int64)
        observation = noised_round(rows, labels, table.schema, noise_multiplier=0.01, max_grad_norm=0.5, model=model)
        result = attack_binary(model, public, observation)
        assert abs(result.shares[1] - labels.mean()) < 0.03
        assert abs(result.shares[1] - table.public_labels.mean()) > 0.05


def attack_binary(model: nn.Module, public: LabelledRows, observation) -> LabelShares:
    result = LabelDistribution(module=model, public=public).attack(observation)
    assert isinstance(result, LabelShares)
    return result


def test_where_noise_hides_them_the_public_frequencies_are_said(rows_of, public, table, noised_round) -> None:
    usual = np.bincount(public.labels) / len(public)
    found, guessed, sure = [], [], []
    for seed in range(10):
        labels, model = skewed(seed, 8), network(seed)
        facts = {"noise_multiplier": 20.0, "model": model, "loss": SoftmaxLoss(), "seed": seed}
        result = attack(model, public, noised_round(rows_of(labels, seed=seed), labels, table.schema, **facts))
        found.append(distance(result.shares, labels))
        guessed.append(distance(usual, labels))
        sure.append(result.confidence)
    assert abs(np.mean(found) - np.mean(guessed)) < 0.05
    assert np.mean(sure) < 0.3


@pytest.mark.parametrize("noise_multiplier", [1e-6, 4.0])
def test_the_standard_error_is_that_of_noise_and_of_who_happens_to_be_asked(noise_multiplier: float, rows_of, table, noised_round) -> None:
    # Far from the public frequencies, so that hardly anything is drawn to them.
    labels, model = np.repeat(np.arange(CLASSES), (120, 40, 20, 10, 10)), network(0)
    facts = {"noise_multiplier": noise_multiplier, "model": model, "loss": SoftmaxLoss()}
    results = []
    for seed in range(40):
        observation = noised_round(rows_of(labels, seed=seed), labels, table.schema, seed=seed, **facts)
        results.append(attack(model, drawn(rows_of, 1000 + seed), observation))
    measured = np.sqrt(np.mean(np.std([result.shares for result in results], axis=0, ddof=1) ** 2))
    stated = np.sqrt(np.mean(np.square([result.standard_errors for result in results])))
    # Forty draws of five numbers tell a standard deviation to some 6 %, and a hundred skewed records of a class its covariance to 10 %.
    assert 0.7 * stated < measured < 1.3 * stated


def test_the_result_is_the_same_when_the_truth_is_replaced_by_garbage(rows_of, public, table, observe) -> None:
    labels, model = skewed(0, 50), network(0)
    rows = rows_of(labels)
    observation = observe(rows, labels, table.schema, model=copy.deepcopy(model), loss=SoftmaxLoss())
    first = attack(model, public, observation)
    rows[:], labels[:] = 99.0, 0
    np.testing.assert_array_equal(first.shares, attack(model, public, observation).shares)
    assert repr(first) == "LabelShares(classes=5)"


def test_it_says_when_it_is_not_applicable(rows_of, public, table, observe) -> None:
    labels = skewed(0, 10)
    without_bias = nn.Sequential(nn.Linear(50, 8), nn.ReLU(), nn.Linear(8, CLASSES, bias=False))
    seen = observe(rows_of(labels), labels, table.schema, model=network(0), loss=SoftmaxLoss())
    adam = replace(seen, training=replace(seen.training, optimizer=AdaptiveOptimizer(name="Adam")))
    encrypted = replace(seen, seen=CiphertextOnly(bytes_seen=10))
    unbiased = observe(rows_of(labels), labels, table.schema, model=copy.deepcopy(without_bias), loss=SoftmaxLoss())
    for observation, module, reason in (
        (adam, network(0), "Adam rescales"),
        (encrypted, network(0), "holds no key"),
        (unbiased, without_bias, "has no bias with an entry for each class"),
    ):
        result = LabelDistribution(module=module, public=public).attack(observation)
        assert isinstance(result, NotApplicable)
        assert reason in str(result)


@pytest.mark.parametrize("labels", [[0, 0, 0], [0, 0, 1], [0, 0, 2, 2]])
def test_classes_without_enough_public_records_are_refused(labels: list[int]) -> None:
    public = LabelledRows(rows=np.zeros((len(labels), 3)), labels=np.array(labels))
    with pytest.raises(ValueError, match="at least two public records of each"):
        LabelDistribution(module=mlp(3), public=public)
