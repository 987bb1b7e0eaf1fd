from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from privfed.attacks.model_meters import CopiesTraining, SilentTraining
from privfed.training import dpsgd, gradients
from privfed.training.compiled import compile_sum
from privfed.training.dpsgd import train
from privfed.training.loss import binary_cross_entropy, cross_entropy
from privfed.training.mechanism import DpSgd
from privfed.training.model import mlp, values_of
from privfed.training.randomness import _SeededRandomness
from privfed.update import PlainVector

DECLARED = DpSgd(
    noise_multiplier=1.5, max_grad_norm=0.5, sample_rate=0.5, expected_batch_size=100, steps=4, learning_rate=0.1, max_records=200
)


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 6, 6)), nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 1))


MODELS = {
    "relu": lambda: mlp(36, hidden=(32, 16)),
    "tanh": lambda: nn.Sequential(nn.Linear(36, 32), nn.Tanh(), nn.Linear(32, 1)),
    "convolutions": convolutions,
}
every_path = pytest.mark.parametrize("path", MODELS)


def network(path: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[path]()


def run(probe, mechanism: DpSgd, *, randomness=None, seed: int = 0, compiled=None):
    """What the meters say about a training that may not be as it is declared."""
    loss = binary_cross_entropy if isinstance(probe, SilentTraining) else probe.loss
    source = _SeededRandomness(seed) if randomness is None else randomness
    start = values_of(probe.module)
    return probe.read(
        train(probe.module, start, probe.samples, mechanism=mechanism, loss=loss, randomness=source, compiled=compiled).update_values
    )


def copies(path: str, **changes) -> CopiesTraining:
    facts = {"module": network(path), "inputs": 36, "loss": binary_cross_entropy, "classes": 2, "declared": DECLARED, "copies": 200}
    return CopiesTraining(**(facts | changes))


@every_path
def test_right_noise_passes_on_every_layer_and_wrong_noise_is_found_there(path: str) -> None:
    probe = SilentTraining(module=network(path), inputs=36, declared=DECLARED)
    # Ten runs at a level of 1e-3 find two or more faults once in 20,000 times.
    assert sum(meter.fault is not None for seed in range(10) for meter in run(probe, probe.mechanism, seed=seed)) <= 1
    for factor in (2 / 3, 0.1, 1e-9):
        meters = run(probe, replace(probe.mechanism, noise_multiplier=factor * DECLARED.noise_multiplier))
        assert any(meter.fault is not None and meter.fault.startswith("less noise") for meter in meters)
        assert [meter.what.removeprefix("the noise on ") for meter in meters] == list(values_of(probe.module).layout.names)


@every_path
def test_right_clipping_passes_and_missing_clipping_is_found(path: str) -> None:
    probe = copies(path)
    assert sum(run(probe, probe.mechanism, seed=seed).fault is not None for seed in range(10)) <= 1
    longer = replace(probe.mechanism, max_grad_norm=1.0, noise_multiplier=DECLARED.noise_multiplier / 2)
    assert run(probe, longer).fault.startswith("records weigh more")


def test_clipping_each_layer_for_itself_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = copies("convolutions")

    def per_layer(own, features, labels, *, count=None):
        features, labels, total = features[:count], labels[:count], torch.zeros(own.size, dtype=torch.float64)
        rows = own.of_records(features, labels).double()
        parts = total.split(own._sizes)
        for index, row in enumerate(rows.split(own._sizes, dim=1)):
            factors = gradients.clip_factors(row.norm(dim=1), max_grad_norm=own.max_grad_norm)
            parts[index].addmv_(row.T, factors)
        return gradients.ClippedSum(total, rows.norm(dim=1), 0)

    # Training compares its sums with such of single records beforehand, and would refuse: here the meter is to find it alone.
    monkeypatch.setattr(dpsgd, "_check_gradients", lambda *_, **__: None)
    assert run(probe, probe.mechanism).fault is None
    monkeypatch.setattr(dpsgd._HookedGradients, "sum", per_layer)
    assert run(probe, probe.mechanism).fault.startswith("records weigh more")


def test_clipping_each_layer_for_itself_is_found_where_nearly_all_of_the_gradient_is_in_one() -> None:
    probe = copies("relu", module=nn.Linear(36, 1))
    mechanism, gradient, rng = probe.mechanism, probe._longest[2].double().numpy(), np.random.default_rng(0)
    parts = np.split(gradient, [36])
    assert np.linalg.norm(parts[1]) < 0.02 * np.linalg.norm(gradient)
    noise = mechanism.noise_multiplier * mechanism.max_grad_norm * np.sqrt(mechanism.steps) * rng.normal(size=37)

    def moved(record: NDArray[np.float64]) -> PlainVector:
        total = mechanism.steps * 100 * record + noise
        return PlainVector(layout=probe_layout, values=-total * mechanism.learning_rate / mechanism.expected_batch_size)

    probe_layout = values_of(probe.module).layout
    whole = moved(mechanism.max_grad_norm * gradient / np.linalg.norm(gradient))
    each = moved(np.concatenate([mechanism.max_grad_norm * part / max(mechanism.max_grad_norm, np.linalg.norm(part)) for part in parts]))
    assert all(meter.fault is None for meter in (probe.read(whole), *probe.read_parts(whole)))
    assert probe.read(each).fault is None
    assert [meter.fault is None for meter in probe.read_parts(each)] == [True, False]


@every_path
def test_the_weight_on_each_layer_is_as_declared_in_right_training(path: str) -> None:
    probe, faulty = copies(path), 0
    for seed in range(10):
        source = _SeededRandomness(seed)
        trained = train(probe.module, values_of(probe.module), probe.samples, mechanism=probe.mechanism, loss=probe.loss, randomness=source)
        meters = probe.read_parts(trained.update_values)
        assert len(meters) == len(trained.update_values.layout.names)
        faulty += any(meter.fault is not None for meter in meters)
    assert faulty <= 1


@every_path
def test_doubled_sampling_and_a_wrong_divisor_are_found(path: str) -> None:
    class DoubledRate(_SeededRandomness):
        def poisson_batches(self, records: int, *, sample_rate: float, steps: int) -> Iterator[NDArray[np.int64]]:
            return super().poisson_batches(records, sample_rate=min(1.0, 2 * sample_rate), steps=steps)

    probe = copies(path)
    assert run(probe, probe.mechanism, randomness=DoubledRate(0)).fault.startswith("records weigh more")
    assert run(probe, replace(probe.mechanism, expected_batch_size=50)).fault.startswith("records weigh more")
    assert run(probe, replace(probe.mechanism, expected_batch_size=200)).fault.startswith("records weigh less")


def test_models_of_several_classes_are_metered_too() -> None:
    torch.manual_seed(0)
    probe = copies("relu", module=mlp(36, hidden=(16,), outputs=5), loss=cross_entropy, classes=5)
    assert run(probe, probe.mechanism).fault is None
    assert len(set(probe.samples.labels.tolist())) == 1


@pytest.mark.nightly
def test_the_compiled_path_passes_and_its_faults_are_found() -> None:
    probe = copies("relu")
    compiled = compile_sum(probe.module, mechanism=probe.mechanism, loss=binary_cross_entropy, inputs=36)
    assert sum(run(probe, probe.mechanism, seed=seed, compiled=compiled).fault is not None for seed in range(10)) <= 1
    longer = replace(probe.mechanism, max_grad_norm=1.0, noise_multiplier=DECLARED.noise_multiplier / 2)
    recompiled = compile_sum(probe.module, mechanism=longer, loss=binary_cross_entropy, inputs=36)
    assert run(probe, longer, compiled=recompiled).fault.startswith("records weigh more")
    silent = SilentTraining(module=probe.module, inputs=36, declared=DECLARED)
    assert all(meter.fault is None for meter in run(silent, silent.mechanism))


def test_probes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="expected 1 to 200 copies"):
        copies("relu", copies=201)
    with pytest.raises(ValueError, match="longer than twice max_grad_norm"):
        copies("relu", declared=replace(DECLARED, max_grad_norm=1e6))
    capped = replace(DECLARED, batch_capacity=150)
    for probe in (lambda: copies("relu", declared=capped), lambda: SilentTraining(module=network("relu"), inputs=36, declared=capped)):
        with pytest.raises(ValueError, match="plain Poisson samples"):
            probe()
    other = values_of(network("tanh"))
    for probe in (copies("relu"), SilentTraining(module=network("relu"), inputs=36, declared=DECLARED)):
        with pytest.raises(ValueError, match="another layout"):
            probe.read(other)
