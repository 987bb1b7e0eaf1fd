import copy
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from privfed.attacks.analytic import EXACT
from privfed.attacks.facts import Activation, AdaptiveOptimizer, BinaryLoss, GaussianNoise, Sgd, TrainingFacts
from privfed.attacks.observation import NotApplicable, Observation, Reconstruction
from privfed.attacks.scoring import check_certificates, mean_rows, score_rows
from privfed.attacks.spear import spear
from privfed.data.samples import Samples
from privfed.training.dpsgd import train
from privfed.training.loss import binary_cross_entropy
from privfed.training.mechanism import DpSgd, NonPrivate, TrainingMechanism
from privfed.training.model import mlp, values_of
from privfed.training.randomness import _SeededRandomness
from privfed.update import PlainVector


@pytest.fixture(scope="module", params=["mixed", "numeric"])
def any_table(request, generate_table):
    """50 inputs: 20 numbers and five categories, or numbers alone."""
    return generate_table() if request.param == "mixed" else generate_table(numeric=50, categories=())


@pytest.fixture(scope="module")
def numeric_table(generate_table):
    return generate_table(numeric=50, categories=())


def network(table, *, width: int = 64, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return mlp(table.schema.width, hidden=(width, 32))


def exact(result: object, rows: np.ndarray, schema) -> float:
    """Share of rows that were recovered, after checking that no certificate is false."""
    assert isinstance(result, Reconstruction)
    assert check_certificates(result, rows, schema=schema, tolerance=EXACT).false == 0
    return score_rows(result.rows, rows, schema=schema, tolerance=EXACT, baseline=np.full_like(rows, 99.0)).rows


def trained_network(table, *, width: int = 64, epochs: int = 5) -> nn.Module:
    """A one-logit network that has learnt rare labels from the public rows, so that it is sure of most rows."""
    direction = np.random.default_rng(0).normal(size=table.schema.width)
    score = (table.public - table.public.mean(axis=0)) @ direction
    features = torch.tensor(table.public, dtype=torch.float32)
    labels = torch.tensor(score > np.quantile(score, 0.95)).float()
    model = network(table, width=width)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    order = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for batch in torch.randperm(len(features), generator=order).split(64):
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(model(features[batch])[:, 0], labels[batch]).backward()
            optimizer.step()
    return model


def trained_round(
    table, mechanism: TrainingMechanism, *, size: int, seed: int, noise: GaussianNoise | None = None
) -> tuple[Observation, np.ndarray]:
    """A round of the product's own training on all rows of one client."""
    rows, labels = table.batch(size, seed=seed)
    names = tuple(f"c{i}" for i in range(table.schema.width))
    samples = Samples(features=rows.astype(np.float32), labels=labels, groups=None, columns=names)
    module = network(table, seed=seed)
    start = values_of(module)
    result = train(module, start, samples, mechanism=mechanism, loss=binary_cross_entropy, randomness=_SeededRandomness(seed))
    batch = mechanism.batch_size if isinstance(mechanism, NonPrivate) else mechanism.expected_batch_size
    optimizer = Sgd(learning_rate=mechanism.learning_rate)
    training = TrainingFacts(optimizer=optimizer, loss=BinaryLoss(), steps=mechanism.steps, batch_size=batch, noise=noise)
    facts = {"layout": start.layout, "model": start, "seen": result.update_values, "training": training}
    return Observation(**facts, activation=Activation.RELU, schema=table.schema), rows


@pytest.mark.parametrize(("size", "width", "seconds"), [(8, 64, 5.0), (12, 128, 10.0), (16, 256, 60.0), (24, 256, 60.0)])
def test_all_rows_are_exact_and_certified(size: int, width: int, seconds: float, any_table, observe) -> None:
    repeats = 10 if size <= 16 else 3
    slowest = 0.0
    for seed in range(repeats):
        rows, labels = any_table.batch(size, seed=seed)
        observation = observe(rows, labels, any_table.schema, model=network(any_table, width=width, seed=seed))
        started = time.process_time()
        result = spear(observation)
        slowest = max(slowest, time.process_time() - started)
        assert exact(result, rows, any_table.schema) == 1.0
        assert result.certified.sum() >= size - 2
    assert slowest < seconds


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_few_rows_are_exact_too(size: int, any_table, observe) -> None:
    for seed in range(5):
        rows, labels = any_table.batch(size, seed=seed)
        result = spear(observe(rows, labels, any_table.schema, model=network(any_table, seed=seed)))
        assert exact(result, rows, any_table.schema) == 1.0
        assert result.certified.all()


def test_the_number_of_rows_need_not_be_known(any_table, observe) -> None:
    rows, labels = any_table.batch(6)
    observation = observe(rows, labels, any_table.schema, model=network(any_table))
    for believed in (1.0, 2.5, 100.0):
        result = spear(replace(observation, training=replace(observation.training, batch_size=believed)))
        assert exact(result, rows, any_table.schema) == 1.0
        assert len(result.rows) == 6


def test_five_local_epochs_of_minibatches_hide_nothing(any_table) -> None:
    for seed in range(10):
        mechanism = NonPrivate(learning_rate=0.1, batch_size=4, steps=10, seed=seed)
        observation, rows = trained_round(any_table, mechanism, size=8, seed=seed)
        assert exact(spear(observation), rows, any_table.schema) == 1.0


def test_momentum_and_known_weight_decay_hide_nothing(any_table, observe) -> None:
    optimizer = Sgd(learning_rate=0.05, momentum=0.9, weight_decay=0.01)
    for seed in range(3):
        rows, labels = any_table.batch(8, seed=seed)
        observation = observe(rows, labels, any_table.schema, model=network(any_table, seed=seed), optimizer=optimizer, steps=10)
        assert exact(spear(observation), rows, any_table.schema) == 1.0


def test_weight_decay_that_the_attacker_does_not_know_certifies_nothing(any_table, observe) -> None:
    rows, labels = any_table.batch(4)
    observation = observe(rows, labels, any_table.schema, model=network(any_table), optimizer=Sgd(learning_rate=0.1, weight_decay=0.1))
    result = spear(replace(observation, training=replace(observation.training, optimizer=Sgd(learning_rate=0.1))))
    assert isinstance(result, NotApplicable) or not result.certified.any()


@pytest.mark.parametrize("max_grad_norm", [0.01, 0.5])
def test_clipping_each_record_hides_nothing_without_noise(max_grad_norm: float, any_table) -> None:
    for seed in range(5):
        mechanism = DpSgd(
            noise_multiplier=1e-9, max_grad_norm=max_grad_norm, sample_rate=1.0, expected_batch_size=8, steps=1, learning_rate=0.1
        )
        observation, rows = trained_round(any_table, mechanism, size=8, seed=seed)
        assert exact(spear(observation), rows, any_table.schema) == 1.0


def test_ten_rows_of_five_clients_are_read_off_a_really_encrypted_and_opened_sum(any_table, observe, people, tmp_path) -> None:
    rows, labels = any_table.batch(10)
    model = network(any_table)
    pairs = [slice(2 * i, 2 * i + 2) for i in range(5)]
    clients = [observe(rows[pair], labels[pair], any_table.schema, model=copy.deepcopy(model)) for pair in pairs]
    parties = people.meet(tmp_path, count=5, layout=clients[0].layout)
    names = list(parties.clients)
    updates = {name: client.seen.values for name, client in zip(names, clients, strict=True)}
    ran = parties.round()
    opened = ran.key_holder(names[0]).open(ran.run(updates))
    coefficients = tuple(opened.coefficients.values())
    step = parties.agreement.params.step
    observation = replace(clients[0], seen=opened.vector, coefficients=coefficients, rounding_step=step)
    result = spear(observation)
    assert exact(result, rows, any_table.schema) == 1.0
    assert result.certified.sum() >= 8


def test_sums_of_clients_with_unequal_coefficients_hide_nothing(any_table, observe) -> None:
    for seed in range(3):
        rows, labels = any_table.batch(6, seed=seed)
        model = network(any_table, seed=seed)
        clients = [
            observe(rows[2 * i : 2 * i + 2], labels[2 * i : 2 * i + 2], any_table.schema, model=copy.deepcopy(model)) for i in range(3)
        ]
        mixed = sum(weight * client.seen.values for weight, client in zip((1, 2, 5), clients, strict=True)) / 8
        observation = replace(clients[0], seen=PlainVector(layout=clients[0].layout, values=mixed), coefficients=(1, 2, 5))
        assert exact(spear(observation), rows, any_table.schema) == 1.0


@pytest.mark.parametrize("width", [64, 256])
def test_trained_networks_with_one_logit_give_four_rows_always_and_eight_nearly_always(width: int, any_table, observe) -> None:
    model = trained_network(any_table, width=width)
    recovered = {4: [], 8: []}
    for size, shares in recovered.items():
        for seed in range(10):
            rows, labels = any_table.batch(size, seed=seed)
            observation = observe(rows, labels, any_table.schema, model=copy.deepcopy(model))
            shares.append(exact(spear(observation, starts=4000), rows, any_table.schema))
    assert np.mean(recovered[4]) == 1.0
    assert np.mean(recovered[8]) >= 0.97
    assert np.mean(np.array(recovered[8]) == 1.0) >= 0.8


@pytest.mark.nightly
@pytest.mark.parametrize("width", [64, 256])
def test_trained_networks_with_one_logit_in_forty_batches(width: int, any_table, observe) -> None:
    model, recovered = trained_network(any_table, width=width), {4: [], 8: [], 12: []}
    for size, shares in recovered.items():
        for seed in range(40):
            rows, labels = any_table.batch(size, seed=seed)
            shares.append(exact(spear(observe(rows, labels, any_table.schema, model=copy.deepcopy(model))), rows, any_table.schema))
        print(f"{size} rows, width {width}: {np.mean(shares):.3f} of rows, {np.mean(np.array(shares) == 1.0):.3f} of batches")
    assert np.mean(recovered[4]) >= 0.99
    assert np.mean(recovered[8]) >= 0.97


def test_rows_of_which_a_learnt_network_is_so_sure_that_rounding_hides_them_leave_the_others_readable(fraud_table, observe) -> None:
    """Standardised columns with outliers: gradients of one batch differ by factors of thousands."""
    model, shares = trained_network(fraud_table), []
    for seed in range(10):
        rows, labels = fraud_table.batch(8, seed=seed)
        shares.append(
            exact(spear(observe(rows, labels, fraud_table.schema, model=copy.deepcopy(model)), starts=1000), rows, fraud_table.schema)
        )
    assert np.mean(shares) >= 0.85
    assert sorted(shares)[2] >= 0.75


@pytest.mark.parametrize(("activation", "layer"), [(Activation.OTHER, nn.Tanh()), (Activation.OTHER, nn.GELU())], ids=["tanh", "gelu"])
def test_without_relu_it_is_not_applicable(activation: Activation, layer: nn.Module, any_table, observe) -> None:
    rows, labels = any_table.batch(2)
    model = nn.Sequential(nn.Linear(50, 64), layer, nn.Linear(64, 1))
    assert "no ReLU follows" in str(spear(observe(rows, labels, any_table.schema, model=model, activation=activation)))


@pytest.mark.parametrize("layer", [nn.Tanh(), nn.GELU()])
def test_a_network_that_is_wrongly_said_to_have_relu_certifies_nothing(layer: nn.Module, numeric_table, observe) -> None:
    for seed in range(3):
        rows, labels = numeric_table.batch(4, seed=seed)
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(50, 64), layer, nn.Linear(64, 32), layer, nn.Linear(32, 1))
        result = spear(observe(rows, labels, numeric_table.schema, model=model), starts=1000)
        assert exact(result, rows, numeric_table.schema) <= 1.0
        assert not result.certified.any()


def test_updates_of_adam_are_not_applicable_and_make_no_false_claim(any_table, observe) -> None:
    rows, labels = any_table.batch(4)
    for steps in (1, 5):
        adam = observe(rows, labels, any_table.schema, model=network(any_table), optimizer=AdaptiveOptimizer(name="Adam"), steps=steps)
        assert "Adam rescales" in str(spear(adam))
        result = spear(replace(adam, training=replace(adam.training, optimizer=Sgd(learning_rate=0.001))), starts=200)
        assert isinstance(result, NotApplicable) or not result.certified.any()


@pytest.mark.parametrize("noise_multiplier", [1e-5, 1e-4, 1e-3, 1e-2, 1.0])
def test_noise_hides_rows_and_makes_no_false_claim(noise_multiplier: float, any_table) -> None:
    mechanism = DpSgd(
        noise_multiplier=noise_multiplier, max_grad_norm=0.5, sample_rate=1.0, expected_batch_size=4, steps=1, learning_rate=0.1
    )
    noise = GaussianNoise(noise_multiplier=noise_multiplier, max_grad_norm=0.5)
    shares = []
    for seed in range(3):
        observation, rows = trained_round(any_table, mechanism, size=4, seed=seed, noise=noise)
        told = spear(observation, starts=1000)
        shares.append(exact(told, rows, any_table.schema))
        untold = spear(replace(observation, training=replace(observation.training, noise=None)), starts=1000)
        assert isinstance(untold, NotApplicable) or not untold.certified.any() or exact(untold, rows, any_table.schema) == 1.0
        if noise_multiplier >= 1e-2:
            # Nothing is found, so it scores as the baseline.
            baseline = mean_rows(any_table.public, schema=any_table.schema, count=4)
            assert score_rows(told.rows, rows, schema=any_table.schema, tolerance=0.02, baseline=baseline) == score_rows(
                baseline, rows, schema=any_table.schema, tolerance=0.02, baseline=baseline
            )
    assert np.mean(shares) == 1.0 if noise_multiplier == 1e-5 else noise_multiplier < 1e-2 or np.mean(shares) == 0.0


def test_confidence_separates_success_from_failure(any_table, observe) -> None:
    right, wrong = [], []
    # Networks that are so sure of some rows that those drown in rounding, and too few searches.
    for model in (trained_network(any_table, epochs=5), trained_network(any_table, epochs=20)):
        for seed in range(24):
            rows, labels = any_table.batch(8, seed=seed)
            result = spear(observe(rows, labels, any_table.schema, model=copy.deepcopy(model)), starts=200)
            errors = np.abs(result.rows[:, None] - rows) / (any_table.schema.high - any_table.schema.low)
            off = errors.max(axis=2).min(axis=1)
            right += result.confidence[off <= EXACT].tolist()
            wrong += result.confidence[off > 3 * EXACT].tolist()
    assert len(right) >= 40
    assert len(wrong) >= 10
    # A right row has the higher confidence in at least four pairs of five; without any meaning it would be one of two.
    assert np.mean(np.array(right)[:, None] > np.array(wrong)) > 0.8
    assert np.mean(np.array(wrong) < 0.5) > 0.9


def test_the_same_seed_gives_the_same_rows_and_no_global_generator_is_touched(numeric_table, observe) -> None:
    rows, labels = numeric_table.batch(8)
    observation = observe(rows, labels, numeric_table.schema, model=network(numeric_table))
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    states = torch.random.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    np.testing.assert_array_equal(spear(observation, seed=3).rows, spear(observation, seed=3).rows)
    assert torch.equal(states[0], torch.random.get_rng_state())
    np.testing.assert_array_equal(states[1], np.random.get_state()[1])  # noqa: NPY002


def test_a_range_declared_too_narrow_costs_certificates_and_no_rows(numeric_table, observe) -> None:
    rows, labels = numeric_table.batch(4)
    observation = observe(rows, labels, numeric_table.schema, model=network(numeric_table))
    columns = tuple(replace(column, high=1e-3) for column in numeric_table.schema.columns)
    result = spear(replace(observation, schema=replace(numeric_table.schema, columns=columns)))
    assert not result.certified.any()
    assert exact(result, rows, numeric_table.schema) == 1.0


@pytest.mark.nightly
@pytest.mark.parametrize(("size", "width"), [(8, 64), (12, 128), (16, 256), (24, 256), (28, 256)])
def test_forty_batches_in_a_row_are_exact(size: int, width: int, any_table, observe) -> None:
    shares = []
    for seed in range(40):
        rows, labels = any_table.batch(size, seed=seed)
        shares.append(
            exact(spear(observe(rows, labels, any_table.schema, model=network(any_table, width=width, seed=seed))), rows, any_table.schema)
        )
    assert np.mean(np.array(shares) == 1.0) >= 0.95
