import dataclasses
import sys
import typing
from collections.abc import Callable
from enum import Enum
from subprocess import run

import numpy as np
import pytest

from privfed.attacks.analytic import analytic
from privfed.attacks.facts import (
    Activation,
    AdaptiveOptimizer,
    BinaryLoss,
    Continuous,
    GaussianNoise,
    OneHot,
    Sgd,
    TableSchema,
    TrainingFacts,
)
from privfed.attacks.labels import label_count, single_label
from privfed.attacks.observation import (
    CiphertextOnly,
    NotApplicable,
    Observation,
    Reconstruction,
    gradient_part,
    linear_layers,
)
from privfed.attacks.scoring import score_rows
from privfed.errors import LayoutMismatchError
from privfed.update import Layout, PlainVector

LAYOUT = Layout(names=("0.weight", "0.bias", "2.weight", "2.bias"), shapes=((4, 3), (4,), (1, 4), (1,)))
ZEROS = PlainVector(layout=LAYOUT, values=np.zeros(LAYOUT.size))
SCHEMA = TableSchema(columns=(Continuous(name="amount", low=0.0, high=1.0), OneHot(name="kind", categories=("a", "b"))))
TRAINING = TrainingFacts(optimizer=Sgd(learning_rate=0.1), loss=BinaryLoss(), steps=1, batch_size=2)
OBSERVATION = Observation(layout=LAYOUT, model=ZEROS, seen=ZEROS, training=TRAINING, activation=Activation.RELU, schema=SCHEMA)
CIPHERTEXT = dataclasses.replace(OBSERVATION, model=None, seen=CiphertextOnly(bytes_seen=1000))


def leaves(kind: object) -> set[object]:
    """Types that an object of this type can hold, through dataclasses, unions and tuples."""
    if dataclasses.is_dataclass(kind) and kind is not Layout:
        return set().union(*(leaves(hint) for hint in typing.get_type_hints(kind).values()))
    arguments = [argument for argument in typing.get_args(kind) if argument is not Ellipsis]
    return set().union(*(leaves(argument) for argument in arguments)) if arguments else {kind}


def test_an_observation_has_no_place_for_the_truth() -> None:
    kinds = leaves(Observation)
    enums = {kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Enum)}
    # Two vectors of the model's layout; besides them only single numbers, names and enumerations: no array, object or callable.
    assert kinds - enums == {PlainVector, Layout, int, float, str, type(None)}
    vectors = [name for name, hint in typing.get_type_hints(Observation).items() if PlainVector in leaves(hint)]
    assert vectors == ["model", "seen"]


def test_the_walk_over_types_would_find_an_array() -> None:
    @dataclasses.dataclass
    class Cheating:
        facts: TrainingFacts
        truth: tuple[np.ndarray, ...] | None

    assert np.ndarray in leaves(Cheating)


def test_results_are_identical_when_the_truth_is_garbage(table, observe) -> None:
    rows, labels = table.batch(4)
    observation = observe(rows, labels, table.schema)
    first, baseline = analytic(observation), np.zeros_like(rows)
    score_rows(first.rows, rows, schema=table.schema, tolerance=0.0, baseline=baseline)
    rows[:], labels[:] = 7.0, 0
    score_rows(first.rows, rows, schema=table.schema, tolerance=0.0, baseline=baseline)
    np.testing.assert_array_equal(analytic(observation).rows, first.rows)


@pytest.mark.parametrize("attack", [analytic, single_label, lambda observation: label_count(observation, mean_prediction=0.5)])
def test_every_attack_is_not_applicable_to_ciphertexts(attack: Callable[[Observation], object]) -> None:
    observation = dataclasses.replace(CIPHERTEXT, training=dataclasses.replace(TRAINING, batch_size=1))
    result = attack(observation)
    assert isinstance(result, NotApplicable)
    assert "1000 bytes of ciphertext and holds no key" in str(result)


@pytest.mark.parametrize("attack", [analytic, single_label, lambda observation: label_count(observation, mean_prediction=0.5)])
def test_every_attack_is_not_applicable_to_an_adaptive_optimiser(attack: Callable[[Observation], object]) -> None:
    training = dataclasses.replace(TRAINING, optimizer=AdaptiveOptimizer(name="Adam"), batch_size=1)
    result = attack(dataclasses.replace(OBSERVATION, training=training))
    assert isinstance(result, NotApplicable)
    assert "Adam rescales" in str(result)


def test_not_applicable_never_reads_as_safe() -> None:
    result = NotApplicable(reason="only ciphertexts were seen")
    assert str(result) == "not applicable because only ciphertexts were seen"
    with pytest.raises(TypeError, match="neither a success nor a failure"):
        bool(result)
    # It has nothing that could be scored, so a table cannot show it as a low score.
    assert [field.name for field in dataclasses.fields(result)] == ["reason"]


def test_an_observation_refuses_another_layout() -> None:
    other = Layout(names=("weight",), shapes=((LAYOUT.size,),))
    vector = PlainVector(layout=other, values=np.zeros(other.size))
    for change in ({"model": vector}, {"seen": vector}):
        with pytest.raises(LayoutMismatchError, match="nothing was attacked"):
            dataclasses.replace(OBSERVATION, **change)


@pytest.mark.parametrize("change", [{"coefficients": ()}, {"coefficients": (1, 0)}, {"rounding_step": -1.0}, {"model": None}])
def test_an_impossible_observation_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="expected"):
        dataclasses.replace(OBSERVATION, **change)
    with pytest.raises(ValueError, match="at least one byte"):
        CiphertextOnly(bytes_seen=0)


@pytest.mark.parametrize(
    "change",
    [
        {"rows": np.zeros(3)},
        {"rows": np.full((1, 3), np.nan)},
        {"certified": np.zeros(2, dtype=np.bool_)},
        {"confidence": np.zeros(2)},
        {"confidence": np.array([1.5])},
    ],
)
def test_an_impossible_reconstruction_is_refused(change: dict[str, np.ndarray]) -> None:
    valid = {"rows": np.zeros((1, 3)), "certified": np.ones(1, dtype=np.bool_), "confidence": np.ones(1)}
    with pytest.raises(ValueError, match="expected"):
        Reconstruction(**(valid | change), certificate="", seconds=0.0)


def test_what_was_found_and_seen_is_not_in_the_repr(table, observe) -> None:
    rows, labels = table.batch(1)
    observation = observe(rows, labels, table.schema)
    assert repr(observation) == "Observation(seen=PlainVector, clients=1)"
    assert repr(analytic(observation)) == "Reconstruction(rows=1, certified=1)"
    assert repr(label_count(observation, mean_prediction=0.5)) == "LabelCount(records=1)"
    assert repr(single_label(observation)) == "SingleLabel(certain=True)"


def test_linear_layers_are_found_whatever_the_order_and_the_other_tensors() -> None:
    names = (
        "norm.bias",
        "norm.weight",
        "b.bias",
        "b.weight",
        "conv.weight",
        "conv.bias",
        "a.weight",
        "a.bias",
        "odd_weight",
        "table.weight",
    )
    shapes = ((3,), (3,), (5,), (5, 3), (2, 1, 3, 3), (2,), (1, 5), (1,), (5, 3), (9, 3))
    found = linear_layers(Layout(names=names, shapes=shapes))
    assert [(layer.weight, layer.bias, layer.inputs, layer.outputs) for layer in found] == [
        ("b.weight", "b.bias", 3, 5),
        ("a.weight", "a.bias", 5, 1),
    ]
    assert [layer.weight for layer in linear_layers(Layout(names=("weight", "bias"), shapes=((2, 3), (2,))))] == ["weight"]


@pytest.mark.parametrize("optimizer", [Sgd(learning_rate=0.1, weight_decay=0.5), Sgd(learning_rate=0.1, weight_decay=0.5, momentum=0.9)])
@pytest.mark.parametrize("steps", [1, 5])
def test_known_weight_decay_is_subtracted_to_within_the_stated_error(optimizer: Sgd, steps: int, table, observe) -> None:
    # Rows of zeros and a saturated label leave no gradient in the first weights: all that moves them is the decay.
    rows, labels = np.zeros((2, table.schema.width)), np.ones(2, dtype=np.int64)
    observation = observe(rows, labels, table.schema, optimizer=optimizer, steps=steps)
    part = gradient_part(observation)
    moved, kept, error = (observation.layout.unflatten(v)["0.weight"] for v in (observation.seen, part.change, part.error))
    assert np.abs(moved).max() > 1e-3
    # Momentum sums the roundings of a step's decay up, at most ten times here.
    assert (np.abs(kept) <= 10 * error).all()
    assert np.abs(kept).max() < 1e-6


def test_the_stated_error_counts_grid_and_noise() -> None:
    silent = gradient_part(OBSERVATION).error.values.max()
    gridded = gradient_part(dataclasses.replace(OBSERVATION, rounding_step=1e-3)).error.values.max()
    noise = GaussianNoise(noise_multiplier=2.0, max_grad_norm=0.5)
    noisy = dataclasses.replace(OBSERVATION, training=dataclasses.replace(TRAINING, noise=noise, steps=4), coefficients=(3, 4))
    assert gridded - silent == pytest.approx(5e-4)
    # 5 deviations of lr sigma C sqrt(steps) / batch, times the norm of the shares (3/7, 4/7).
    assert gradient_part(noisy).error.values.max() == pytest.approx(5 * 0.1 * 2 * 0.5 * 2 / 2 * 5 / 7)


def test_attacks_run_without_torch_and_opacus() -> None:
    program = (
        "import sys; sys.modules['torch'] = sys.modules['opacus'] = None\n"
        "import privfed.attacks.analytic, privfed.attacks.labels, privfed.attacks.scoring"
    )
    assert run([sys.executable, "-c", program], check=False).returncode == 0
