import hashlib
import math
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from privfed.aggregation.server_optimizer import FedAdagrad, FedAdam, FedYogi, ServerSgd
from privfed.errors import LayoutMismatchError
from privfed.update import Layout, PlainVector

LAYOUT = Layout(names=("w", "b"), shapes=((3, 4), (1,)))  # a layer of one element among them
OPTIMIZERS: tuple[Any, ...] = (
    ServerSgd(),
    ServerSgd(learning_rate=0.5, momentum=0.9),
    FedAdagrad(learning_rate=0.1),
    FedAdagrad(learning_rate=0.1, momentum=0.5),
    FedAdam(learning_rate=0.1),
    FedYogi(learning_rate=0.1),
)
every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.name)


def aggregates(rounds: int, seed: int = 0) -> list[PlainVector]:
    rng = np.random.default_rng(seed)
    return [PlainVector(layout=LAYOUT, values=rng.normal(size=LAYOUT.size)) for _ in range(rounds)]


def run(optimizer: Any, rounds: list[PlainVector]) -> tuple[dict[str, PlainVector], list[np.ndarray]]:
    state: dict[str, PlainVector] = {}
    movements = []
    for aggregate in rounds:
        state, moved = optimizer.step(state, aggregate)
        movements.append(moved.values)
    return state, movements


def reddi(optimizer: Any, deltas: list[float]) -> list[float]:
    """Reddi et al., 2021, algorithm 2, for one coordinate, line by line."""
    m, v, tau = 0.0, optimizer.adaptivity**2, optimizer.adaptivity
    moved = []
    for delta in deltas:
        m = optimizer.momentum * m + (1 - optimizer.momentum) * delta
        if isinstance(optimizer, FedAdagrad):
            v = v + delta**2
        elif isinstance(optimizer, FedAdam):
            v = optimizer.second_decay * v + (1 - optimizer.second_decay) * delta**2
        else:
            sign = math.copysign(1.0, v - delta**2) if v != delta**2 else 0.0
            v = v - (1 - optimizer.second_decay) * delta**2 * sign
        moved.append(optimizer.learning_rate * m / (math.sqrt(v) + tau))
    return moved


@pytest.mark.parametrize("optimizer", OPTIMIZERS[2:], ids=lambda optimizer: optimizer.name)
def test_adaptive_optimizers_are_the_published_algorithm(optimizer: Any) -> None:
    rounds = aggregates(20)
    _, movements = run(optimizer, rounds)
    for coordinate in range(LAYOUT.size):
        expected = reddi(optimizer, [float(aggregate.values[coordinate]) for aggregate in rounds])
        np.testing.assert_allclose([moved[coordinate] for moved in movements], expected, rtol=1e-12)


def test_plain_server_sgd_is_fedavg_to_the_last_bit() -> None:
    (aggregate,) = aggregates(1)
    state, moved = ServerSgd().step({}, aggregate)
    assert state == {}
    np.testing.assert_array_equal(moved.values, aggregate.values)


def test_momentum_adds_up_the_past_with_falling_weight() -> None:
    rounds = aggregates(4)
    _, movements = run(ServerSgd(learning_rate=0.5, momentum=0.9), rounds)
    expected = 0.5 * sum(0.9 ** (3 - index) * aggregate.values for index, aggregate in enumerate(rounds))
    np.testing.assert_allclose(movements[-1], expected, rtol=1e-12)


@every_optimizer
def test_two_openers_with_the_same_state_and_aggregate_move_alike_to_the_last_bit(optimizer: Any) -> None:
    rounds = aggregates(5)
    first, second = run(optimizer, rounds), run(optimizer, rounds)
    for ours, theirs in zip(first[1], second[1], strict=True):
        np.testing.assert_array_equal(ours, theirs)


@every_optimizer
def test_a_state_that_was_stored_and_loaded_goes_on_where_it_was(optimizer: Any, tmp_path: Any) -> None:
    rounds = aggregates(6)
    state, _ = run(optimizer, rounds[:3])
    np.savez(tmp_path / "state.npz", **{name: vector.values for name, vector in state.items()})
    with np.load(tmp_path / "state.npz", allow_pickle=False) as file:
        loaded = {name: PlainVector(layout=LAYOUT, values=file[name]) for name in file.files}
    for aggregate in rounds[3:]:
        state, moved = optimizer.step(state, aggregate)
        loaded, moved_loaded = optimizer.step(loaded, aggregate)
        np.testing.assert_array_equal(moved.values, moved_loaded.values)


@every_optimizer
def test_a_step_changes_neither_its_state_nor_its_aggregate(optimizer: Any) -> None:
    rounds = aggregates(3)
    state, _ = run(optimizer, rounds[:2])
    before = {name: hashlib.sha256(vector.values.tobytes()).digest() for name, vector in state.items()}
    optimizer.step(state, rounds[2])
    assert before == {name: hashlib.sha256(vector.values.tobytes()).digest() for name, vector in state.items()}


@every_optimizer
def test_a_round_of_nothing_never_divides_by_nothing(optimizer: Any) -> None:
    zero = PlainVector(layout=LAYOUT, values=np.zeros(LAYOUT.size))
    _, movements = run(optimizer, [zero, zero])
    np.testing.assert_array_equal(movements[-1], np.zeros(LAYOUT.size))


@every_optimizer
def test_a_state_of_another_optimizer_or_model_is_refused(optimizer: Any) -> None:
    (aggregate,) = aggregates(1)
    with pytest.raises(ValueError, match=r"expected a state with .*nothing was moved"):
        optimizer.step({"other": aggregate}, aggregate)
    state, _ = optimizer.step({}, aggregate)
    if state:
        small = PlainVector(layout=Layout(names=("w",), shapes=((2,),)), values=[1.0, 2.0])
        with pytest.raises(LayoutMismatchError, match="nothing was moved"):
            optimizer.step(dict.fromkeys(state, small), aggregate)


def test_names_hold_every_parameter() -> None:
    assert len({optimizer.name for optimizer in OPTIMIZERS}) == len(OPTIMIZERS)
    for optimizer in OPTIMIZERS:
        assert all(repr(getattr(optimizer, field.name)) in optimizer.name for field in fields(optimizer))


def test_yogi_forgets_a_large_past_more_slowly_than_adam() -> None:
    large, small = (PlainVector(layout=LAYOUT, values=np.full(LAYOUT.size, value)) for value in (10.0, 0.01))
    rounds = [large] * 50 + [small] * 50
    adam, _ = run(FedAdam(learning_rate=0.1), rounds)
    yogi, _ = run(FedYogi(learning_rate=0.1), rounds)
    assert (yogi["second_moment"].values > adam["second_moment"].values).all()


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("make", [ServerSgd, FedAdagrad, FedAdam, FedYogi], ids=lambda make: make.__name__)
def test_numbers_out_of_range_are_refused(make: Any, bad: float) -> None:
    with pytest.raises(ValueError, match="learning_rate to be positive"):
        make(learning_rate=bad)
    if bad != 0:
        with pytest.raises(ValueError, match="momentum from 0 to below 1"):
            make(learning_rate=1.0, momentum=bad)
    if make is not ServerSgd:
        with pytest.raises(ValueError, match="adaptivity to be positive"):
            make(learning_rate=1.0, adaptivity=bad)
    if make in (FedAdam, FedYogi):
        with pytest.raises(ValueError, match="second_decay from 0 to below 1"):
            make(learning_rate=1.0, second_decay=1.0)
