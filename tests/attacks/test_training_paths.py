"""Every way that training has to its clipped sums, audited with canaries that each have weights of their own in a whole network."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn

from privfed.attacks.dirac_rows import DiracReading, DiracRows
from privfed.dp.accounting import calibrate_noise_multiplier
from privfed.dp.mechanism import Budget
from privfed.training import bookkeeping, compiled, dpsgd
from privfed.training.batched import train_together
from privfed.training.bookkeeping import BookKeeping, ReluNetworkBookKeeping
from privfed.training.compiled import CompiledBookKeeping, compile_sum
from privfed.training.dpsgd import _HookedGradients, train
from privfed.training.loss import binary_cross_entropy
from privfed.training.mechanism import DpSgd, NonPrivate
from privfed.training.model import layout_of, mlp, values_of
from privfed.training.randomness import _SeededRandomness
from privfed.update import PlainVector
from tests.attacks.wrong_randomness import EachRecordTwice, OneDraw

CANARIES, DELTA, WIDTH = 1000, 1e-5, 2
# A canary is a row of 50, so that every neuron of the first layer is at 1, far from where a ReLU is silent.
_FIRST_WEIGHTS = 0.02


@dataclass(frozen=True, kw_only=True)
class Path:
    """A network, and the class that sums its gradients."""

    network: Callable[[], nn.Module]
    kind: type
    compiled: bool = False


def smooth() -> nn.Module:
    return nn.Sequential(nn.Linear(CANARIES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 1))


def convolutions() -> nn.Module:
    whole = nn.Conv1d(1, WIDTH, CANARIES)
    return nn.Sequential(nn.Unflatten(1, (1, CANARIES)), whole, nn.Tanh(), nn.Flatten(), nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 1))


def relu() -> nn.Module:
    return mlp(CANARIES, hidden=(WIDTH, 4))


PATHS = {
    "without autograd": Path(network=relu, kind=ReluNetworkBookKeeping),
    "book-keeping": Path(network=smooth, kind=BookKeeping),
    "hooks": Path(network=convolutions, kind=_HookedGradients),
    "compiled": Path(network=relu, kind=CompiledBookKeeping, compiled=True),
}
every_path = pytest.mark.parametrize("path", PATHS)
every_epsilon = pytest.mark.parametrize("epsilon", [1.0, 8.0])


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Canaries alone are to find faults, without what training compares beforehand; and compiling would take half a minute each time."""
    monkeypatch.setattr(dpsgd, "_check_gradients", lambda *_, **__: None)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def drawn(epsilon: float, *, seed: int) -> DiracRows:
    steps, rate = 4, 0.5
    noise = calibrate_noise_multiplier(Budget(epsilon=epsilon, delta=DELTA), sample_rate=rate, steps=steps)
    declared = DpSgd(
        noise_multiplier=noise,
        max_grad_norm=1.0,
        sample_rate=rate,
        expected_batch_size=round(CANARIES * rate),
        steps=steps,
        learning_rate=0.5,
        max_records=CANARIES,
    )
    return DiracRows.draw(declared, count=CANARIES, rng=np.random.default_rng(seed))


def network(path: Path) -> nn.Module:
    """A network to which all canaries are alike: the gradient of each is that of any other, but for whose weights it stands at."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = path.network()
    first, bias, *later = model.parameters()
    with torch.no_grad():
        first.fill_(_FIRST_WEIGHTS)
        bias.zero_()
        for parameter in later:
            parameter.abs_()
    return model


def scores(update: PlainVector, model: nn.Module, canaries: DiracRows) -> PlainVector:
    """How far the weights of each canary moved the way of its gradient, as if there were one weight for each."""
    row = torch.zeros(1, CANARIES)
    row[0, 0] = float(canaries.samples.features.max())
    first = next(iter(model.parameters()))
    (gradient,) = torch.autograd.grad(binary_cross_entropy(model(row), torch.tensor([0])).sum(), first)
    direction = gradient.reshape(WIDTH, CANARIES)[:, 0].double().numpy()
    moved = next(iter(update.layout.unflatten(update).values())).reshape(WIDTH, CANARIES)
    return PlainVector(layout=layout_of(canaries.module), values=direction @ moved / np.linalg.norm(direction))


def read(
    name: str,
    epsilon: float,
    *,
    seed: int = 0,
    actual: Callable[[DpSgd], DpSgd] = lambda right: right,
    randomness: type[_SeededRandomness] = _SeededRandomness,
) -> DiracReading:
    """What canaries tell about a training along a path that may not be as it is declared."""
    path, canaries = PATHS[name], drawn(epsilon, seed=seed)
    model, mechanism = network(path), actual(canaries.mechanism)
    compiled_sum = compile_sum(model, mechanism=mechanism, loss=binary_cross_entropy, inputs=CANARIES) if path.compiled else None
    facts = {"loss": binary_cross_entropy, "compiled": compiled_sum}
    taken = dpsgd._clipped_gradients(copy.deepcopy(model), max_grad_norm=1.0, inputs=CANARIES, **facts)
    assert type(taken) is path.kind
    source = randomness(seed)
    update = train(model, values_of(model), canaries.samples, mechanism=mechanism, randomness=source, **facts).update_values
    return canaries.read(scores(update, model, canaries), delta=DELTA)


def halved_noise(right: DpSgd) -> DpSgd:
    return replace(right, noise_multiplier=right.noise_multiplier / 2)


@every_path
@every_epsilon
def test_right_training_passes_on_every_path(path: str, epsilon: float, alone: None) -> None:
    # Three audits at a level of 1e-3 find two or more faults once in 300,000 times.
    assert sum(bool(read(path, epsilon, seed=seed).faults) for seed in range(3)) <= 1


@every_path
@every_epsilon
def test_halved_noise_is_found_on_every_path(path: str, epsilon: float, alone: None) -> None:
    assert read(path, epsilon, actual=halved_noise).noise.fault.startswith("less noise than declared")


@every_path
@every_epsilon
def test_noise_that_is_used_in_several_steps_is_found_on_every_path(path: str, epsilon: float, alone: None) -> None:
    assert "one draw is used several times" in read(path, epsilon, randomness=OneDraw).noise.fault


@every_path
@every_epsilon
def test_records_that_are_used_twice_are_found_on_every_path(path: str, epsilon: float, alone: None) -> None:
    assert read(path, epsilon, randomness=EachRecordTwice).weight.fault.startswith("records weigh more")


@every_path
@every_epsilon
def test_a_path_that_does_not_clip_is_found(path: str, epsilon: float, alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(path, epsilon).faults == ()
    for module in (bookkeeping, compiled, dpsgd):
        monkeypatch.setattr(module, "clip_factors", lambda norms, **_: torch.ones_like(norms))
    assert read(path, epsilon).weight.fault.startswith("records weigh more")


@pytest.mark.nightly
@every_epsilon
def test_what_was_really_compiled_passes_and_halved_noise_is_found(epsilon: float) -> None:
    assert read("compiled", epsilon).faults == ()
    assert read("compiled", epsilon, actual=halved_noise).noise.fault.startswith("less noise than declared")
    assert read("compiled", epsilon, randomness=EachRecordTwice).weight.fault.startswith("records weigh more")


def test_clients_that_are_trained_together_have_no_noise_and_are_found_to_have_none() -> None:
    canaries = drawn(8.0, seed=0)
    model = network(PATHS["without autograd"])
    records = len(canaries.samples)
    facts = {"module": model, "start": values_of(model), "clients": [canaries.samples] * 2, "loss": binary_cross_entropy}
    with pytest.raises(TypeError, match="expected NonPrivate, got DpSgd"):
        train_together(**facts, mechanism=canaries.mechanism)
    plain = NonPrivate(learning_rate=canaries.mechanism.learning_rate, batch_size=records, steps=4, seed=0)
    for result in train_together(**facts, mechanism=plain):
        assert not result.private_randomness
        reading = canaries.read(scores(result.update_values, model, canaries), delta=DELTA)
        assert reading.noise.fault.startswith("less noise than declared")
