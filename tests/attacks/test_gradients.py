import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from privfed.attacks.facts import AdaptiveOptimizer, BinaryLoss, Sgd, SoftmaxLoss
from privfed.attacks.gradients import TargetGradient, minimise, target_gradient
from privfed.attacks.observation import CiphertextOnly, NotApplicable
from privfed.errors import LayoutMismatchError
from privfed.training.model import mlp


def network(width: int, *, outputs: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return mlp(width, hidden=(16, 8), outputs=outputs)


@pytest.mark.parametrize("loss", [BinaryLoss(), BinaryLoss(positive_weight=4.0), SoftmaxLoss()], ids=["binary", "weighted", "softmax"])
def test_the_true_rows_have_the_target_gradient(loss, table, observe) -> None:
    rows, labels = table.batch(4)
    module = network(50, outputs=3 if isinstance(loss, SoftmaxLoss) else 1)
    observation = observe(rows, labels, table.schema, model=copy.deepcopy(module), loss=loss)
    target = target_gradient(observation, module)
    assert target.size == 4
    assert target.deviation == 0
    batches = torch.tensor(np.stack([rows, rows[::-1]]), dtype=torch.float32), torch.tensor(np.stack([labels, labels[::-1]]))
    made = target.of_batches(*batches)
    for gradient in made:
        # Weights are rounded to float32 after a step of a tenth of the gradient.
        torch.testing.assert_close(gradient, target.values, rtol=0, atol=2e-6)
    wrong = target.of_batches(batches[0], 1 - batches[1])
    assert (wrong - target.values).norm() > 0.1 * target.values.norm()


def test_known_clipping_and_noise_are_those_of_the_product(fraud_table, noised_round) -> None:
    rows, labels = fraud_table.batch(4)
    clipped = noised_round(rows, labels, fraud_table.schema, noise_multiplier=1e-9, max_grad_norm=0.3)
    module = mlp(50)
    target = target_gradient(clipped, module)
    batch = torch.tensor(rows[None], dtype=torch.float32), torch.tensor(labels[None])
    torch.testing.assert_close(target.of_batches(*batch)[0], target.values, rtol=0, atol=3e-6)
    singles = target.of_records(batch[0][0], batch[1][0])
    assert (torch.linalg.vector_norm(singles, dim=1) <= 0.3 * (1 + 1e-5)).all()

    noised = target_gradient(noised_round(rows, labels, fraud_table.schema, noise_multiplier=2.0, max_grad_norm=0.3), module)
    assert noised.deviation == pytest.approx(2.0 * 0.3 / 4)
    off = (noised.values - target.values) / noised.deviation
    # The variance of 5377 normal numbers is off by less than 8 percent but once in 30,000 times.
    assert float(off.var()) == pytest.approx(1, abs=0.08)


def test_the_mean_of_clients_and_steps_has_less_noise(fraud_table, noised_round) -> None:
    rows, labels = fraud_table.batch(4)
    seen = noised_round(rows, labels, fraud_table.schema, noise_multiplier=2.0)
    module = mlp(50)
    alone = target_gradient(seen, module).deviation
    assert target_gradient(replace(seen, coefficients=(3, 3, 3, 3)), module).deviation == pytest.approx(alone / 2)
    assert target_gradient(replace(seen, training=replace(seen.training, steps=9)), module).deviation == pytest.approx(alone / 3)
    assert target_gradient(replace(seen, coefficients=(1, 1)), module).size == 8


def test_several_short_steps_show_one_gradient(table, observe) -> None:
    rows, labels = table.batch(4)
    optimizer = Sgd(learning_rate=1e-3, momentum=0.5, weight_decay=0.1)
    module = network(50)
    many = target_gradient(observe(rows, labels, table.schema, model=copy.deepcopy(module), optimizer=optimizer, steps=5), module)
    one = target_gradient(observe(rows, labels, table.schema, model=copy.deepcopy(module)), module)
    assert (many.values - one.values).norm() < 0.02 * one.values.norm()


def test_ciphertexts_and_adaptive_optimisers_are_not_applicable(table, observe) -> None:
    rows, labels = table.batch(2)
    observation, module = observe(rows, labels, table.schema, model=network(50)), network(50)
    encrypted = replace(observation, seen=CiphertextOnly(bytes_seen=10))
    adam = replace(observation, training=replace(observation.training, optimizer=AdaptiveOptimizer(name="Adam")))
    for refused, reason in ((encrypted, "holds no key"), (adam, "Adam rescales")):
        result = target_gradient(refused, module)
        assert isinstance(result, NotApplicable)
        assert reason in str(result)


def test_another_architecture_is_refused(table, observe) -> None:
    rows, labels = table.batch(2)
    observation = observe(rows, labels, table.schema, model=network(50))
    with pytest.raises(LayoutMismatchError, match="nothing was attacked"):
        target_gradient(observation, mlp(50, hidden=(17, 8)))


def test_the_architecture_is_not_changed(table, observe) -> None:
    rows, labels = table.batch(2)
    observation = observe(rows, labels, table.schema, model=network(50))
    torch.manual_seed(9)
    module = mlp(50, hidden=(16, 8)).train()
    weights = [parameter.clone() for parameter in module.parameters()]
    assert isinstance(target_gradient(observation, module), TargetGradient)
    assert all(torch.equal(a, b) for a, b in zip(weights, module.parameters(), strict=True))
    assert module.training


def test_every_restart_is_lowered_by_itself_and_the_start_is_not_changed() -> None:
    goals, start = torch.tensor([[1.0, -2.0], [0.5, 3.0]]), torch.zeros(2, 2)
    found = minimise(start, lambda now: (now - goals).square().sum(dim=1), iterations=300, learning_rate=0.1)
    torch.testing.assert_close(found, goals, rtol=0, atol=0.02)
    assert (start == 0).all()


def test_pixels_stay_from_0_to_1() -> None:
    goals = torch.tensor([[0.3, -2.0, 5.0]])
    found = minimise(torch.zeros(1, 3), lambda now: (now - goals).square().sum(dim=1), iterations=300, learning_rate=0.1, pixels=True)
    torch.testing.assert_close(found, torch.tensor([[0.3, 0.0, 1.0]]), rtol=0, atol=0.02)


def test_one_batch_has_the_gradient_of_several(table, fraud_table, observe, noised_round) -> None:
    rows, labels = table.batch(3)
    plain = target_gradient(observe(rows, labels, table.schema, model=network(50)), network(50))
    clipped = target_gradient(noised_round(rows, labels, fraud_table.schema, noise_multiplier=1.0, max_grad_norm=0.1), mlp(50))
    for target in (plain, clipped):
        for size in (1, 3):
            batch = torch.tensor(rows[:size], dtype=torch.float32), torch.tensor(labels[:size])
            torch.testing.assert_close(target.of_batch(*batch), target.of_batches(batch[0][None], batch[1][None])[0])
