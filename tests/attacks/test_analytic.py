import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from privfed.attacks.analytic import EXACT, analytic
from privfed.attacks.facts import Activation, BinaryLoss, Continuous, GaussianNoise, OneHot, Sgd, TableSchema, TrainingFacts
from privfed.attacks.observation import NotApplicable, Observation, Reconstruction
from privfed.attacks.scoring import advantage, check_certificates, mean_rows, score_rows
from privfed.audit.canaries import Canaries, transaction_schema
from privfed.data.paysim import PRE
from privfed.data.samples import Samples
from privfed.training.dpsgd import train
from privfed.training.loss import binary_cross_entropy
from privfed.training.mechanism import DpSgd, NonPrivate
from privfed.training.model import mlp, values_of
from privfed.training.randomness import _SeededRandomness
from privfed.update import Layout, PlainVector

GRID = 1 / (2**23 - 1)


def certified(result: object, truth: np.ndarray, schema) -> int:
    """Number of certified rows, after checking that none is false."""
    assert isinstance(result, Reconstruction)
    check = check_certificates(result, truth, schema=schema, tolerance=EXACT)
    assert check.false == 0
    return check.certified


def with_seen(observation: Observation, values: np.ndarray, **changes: object) -> Observation:
    return replace(observation, seen=PlainVector(layout=observation.layout, values=values), **changes)


def averaged(observations: list[Observation], *, step: float = 0.0) -> Observation:
    """What an opening shows of clients of equal weight: the mean of their updates, each rounded to a grid."""
    updates = [observation.seen.values for observation in observations]
    rounded = [np.rint(update / step) * step if step else update for update in updates]
    return with_seen(observations[0], np.mean(rounded, axis=0), coefficients=(1,) * len(updates), rounding_step=step)


SMALL = TableSchema(columns=(Continuous(name="amount", low=0.0, high=10.0), OneHot(name="kind", categories=("a", "b", "c"))))
ALWAYS, NEVER = [0.0, 0, 0, 0, 1], [0.0, 0, 0, 0, -1]


def crafted(before: list, change: list, *, schema: TableSchema = SMALL, rounding_step: float = 0.0) -> Observation:
    """A first layer [weight | bias] with a given change, without training."""
    neurons, columns = np.shape(before)
    layout = Layout(names=("0.weight", "0.bias", "2.weight", "2.bias"), shapes=((neurons, columns - 1), (neurons,), (1, neurons), (1,)))

    def vector(matrix: list) -> PlainVector:
        tensors = {"0.weight": np.array(matrix)[:, :-1], "0.bias": np.array(matrix)[:, -1]}
        return layout.flatten(tensors | {"2.weight": np.zeros((1, neurons)), "2.bias": np.zeros(1)})

    training = TrainingFacts(optimizer=Sgd(learning_rate=1.0), loss=BinaryLoss(), steps=1, batch_size=9)
    facts = {"activation": Activation.RELU, "schema": schema, "rounding_step": rounding_step}
    return Observation(layout=layout, model=vector(before), seen=vector(change), training=training, **facts)


def mixture(*shares: tuple[float, list[float]]) -> list[float]:
    """Change of a neuron that several rows fire, each with its share of the bias change."""
    return (0.01 * sum(np.array([*row, 1.0]) * share for share, row in shares)).tolist()


def test_a_mixture_of_categories_is_no_row() -> None:
    a, b, c = [2.0, 1, 0, 0], [4.0, 0, 1, 0], [4.0, 0, 0, 1]
    alone, mixed = mixture((1, a)), mixture((1, a), (0.5, b), (-0.5, c))
    zero = [0.0] * 5
    # The mixture has amount 2 and a 1 at "a"; only the other entries of the block give it away.
    assert analytic(crafted([ALWAYS, NEVER], [alone, zero])).certified.tolist() == [True]
    assert len(analytic(crafted([ALWAYS, NEVER], [mixed, zero])).rows) == 0


@pytest.mark.parametrize("block", [[0, 0, 0], [1, 0.5, 0], [1, 1, 0]])
def test_a_row_that_is_not_of_exactly_one_category_is_not_found(block: list[float]) -> None:
    assert len(analytic(crafted([ALWAYS, NEVER], [mixture((1, [2.0, *block])), [0.0] * 5])).rows) == 0


def test_a_row_out_of_the_public_range_is_shown_but_never_certified() -> None:
    high, low = [5.0, 1, 0, 0], [1.0, 1, 0, 0]
    for shares in ((3, -2), (-1, 2)):
        result = analytic(crafted([ALWAYS, NEVER], [mixture((shares[0], high), (shares[1], low)), [0.0] * 5]))
        assert result.certified.tolist() == [False]


def test_a_range_declared_too_narrow_costs_certificates_and_no_rows(table, observe) -> None:
    rows, labels = table.batch(4)
    columns = [replace(column, high=1e-3) if isinstance(column, Continuous) else column for column in table.schema.columns]
    observation = observe(rows, labels, table.schema)
    result = analytic(replace(observation, schema=TableSchema(columns=tuple(columns))))
    assert not result.certified.any()
    assert score_rows(result.rows, rows, schema=table.schema, tolerance=EXACT, baseline=np.full_like(rows, 99.0)).rows == 1.0


def test_rows_that_agree_in_categories_and_neurons_are_the_limit_of_the_certificate() -> None:
    # Nothing in the update tells this mixture from one row of amount 3.
    mixed = mixture((0.5, [5.0, 1, 0, 0]), (0.5, [1.0, 1, 0, 0]))
    assert analytic(crafted([ALWAYS, NEVER], [mixed, [0.0] * 5])).certified.tolist() == [True]


def test_silent_neurons_that_could_not_carry_all_rows_certify_nothing() -> None:
    high, low = [5.0, 1, 0, 0], [1.0, 1, 0, 0]
    shown, out_of_range = mixture((0.5, high), (0.5, low)), mixture((3, high), (-2, low))
    result = analytic(crafted([ALWAYS] * 3 + [NEVER] * 2, [shown, out_of_range, out_of_range, [0.0] * 5, [0.0] * 5]))
    # The row in range comes first, although two neurons agree on the other.
    np.testing.assert_allclose(result.rows, [[3.0, 1, 0, 0], [13.0, 1, 0, 0]], atol=1e-2)
    assert not result.certified.any()


def test_certified_rows_come_before_rows_that_more_neurons_agree_on() -> None:
    small, middle, other = [2.0, 1, 0, 0], [4.0, 1, 0, 0], [6.0, 0, 1, 0]
    only_small, only_middle, only_other = [-1.0, 0, 0, 0, 3], [1.0, 10, 0, 0, -13], [1.0, 0, 0, 0, -5]
    before = [only_small] * 3 + [only_middle] * 3 + [only_other] * 2
    result = analytic(crafted(before, [mixture((1, row)) for row in [small] * 3 + [middle] * 3 + [other] * 2]))
    assert result.certified.tolist() == [True, False, False]
    np.testing.assert_allclose(result.rows[0], other, atol=1e-2)
    assert result.confidence.tolist() == [1.0, 3 / 8, 3 / 8]


def test_without_blocks_a_row_needs_two_neurons_that_agree() -> None:
    schema = TableSchema(columns=(Continuous(name="amount", low=0.0, high=10.0), Continuous(name="age", low=0.0, high=10.0)))
    always = [0.0, 0, 1]
    once, twice = mixture((1, [2.0, 3.0])), mixture((1, [5.0, 4.0]))
    result = analytic(crafted([always] * 3, [once, twice, twice], schema=schema))
    np.testing.assert_allclose(result.rows, [[5.0, 4.0]], atol=1e-2)


def test_an_entry_that_is_not_known_to_one_percent_of_its_range_gives_no_row() -> None:
    change = [mixture((1, [2.0, 1, 0, 0])), [0.0] * 5]
    # Half a step over a bias change of 0.01, doubled for an entry of 1: a step of 1e-4 is 1 %.
    assert len(analytic(crafted([ALWAYS, NEVER], change, rounding_step=0.9e-4)).rows) == 1
    assert len(analytic(crafted([ALWAYS, NEVER], change, rounding_step=1.1e-4)).rows) == 0


def test_one_row_is_exact_and_certified_within_50_milliseconds(table, observe) -> None:
    seconds = []
    for seed in range(5):
        rows, labels = table.batch(1, seed=seed)
        observation = observe(rows, labels, table.schema, seed=seed)
        started = time.process_time()
        result = analytic(observation)
        seconds.append(time.process_time() - started)
        assert certified(result, rows, table.schema) == 1
        # Far below EXACT: 2^-24 of a weight of 0.1 over a bias change of 1e-3, times the largest entry.
        assert np.abs(result.rows - rows).max() < 1e-4
    assert min(seconds) < 0.05


def test_most_of_four_rows_are_certified_and_never_a_false_one(table, observe) -> None:
    counts = []
    for seed in range(20):
        rows, labels = table.batch(4, seed=seed)
        counts.append(certified(analytic(observe(rows, labels, table.schema, seed=seed)), rows, table.schema))
    assert np.mean(counts) >= 3.5


def test_more_than_half_of_eight_rows_are_certified_and_fewer_of_sixteen(table, observe) -> None:
    means = []
    for size in (8, 16):
        batches = [(seed, *table.batch(size, seed=seed)) for seed in range(10)]
        counts = [certified(analytic(observe(rows, labels, table.schema, seed=seed)), rows, table.schema) for seed, rows, labels in batches]
        means.append(np.mean(counts) / size)
    assert means[0] > 0.5 > means[1]


def test_a_table_with_few_categories_gives_rows_but_no_false_certificate(generate_table, observe) -> None:
    # Rows share categories here, so that integrality alone would certify dozens of mixtures.
    table = generate_table(numeric=8, categories=(5,))
    recovered = []
    for seed in range(20):
        rows, labels = table.batch(4, seed=seed)
        result = analytic(observe(rows, labels, table.schema, seed=seed))
        certified(result, rows, table.schema)
        recovered.append(score_rows(result.rows, rows, schema=table.schema, tolerance=EXACT, baseline=np.full_like(rows, 9.0)).rows)
    assert np.mean(recovered) > 0.8


def test_mixtures_of_transactions_that_agree_in_their_type_are_not_certified(observe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few categories and similar amounts: one neuron alone would certify a mixture in some of these batches."""
    schema = transaction_schema(PRE)
    false = {1: 0, 2: 0}
    exact = 0
    for seed in range(64):
        canaries = Canaries.draw(schema, count=8, rng=np.random.default_rng(seed))
        torch.manual_seed(seed)
        observation = observe(canaries.rows, canaries.labels, schema, seed=seed, model=mlp(schema.width, hidden=(64, 48)))
        for agreeing in false:
            monkeypatch.setattr("privfed.attacks.analytic._AGREEING", agreeing)
            check = check_certificates(analytic(observation), canaries.rows, schema=schema, tolerance=EXACT)
            false[agreeing] += check.false
        exact += check.certified
    assert false[2] == 0 < false[1]
    assert exact > 30


def test_rows_of_equal_categories_are_found_but_not_certified(table, observe) -> None:
    rows, labels = table.batch(2)
    for block in table.schema.blocks:
        rows[1, block] = rows[0, block]
    result = analytic(observe(rows, labels, table.schema))
    assert certified(result, rows, table.schema) == 0
    assert score_rows(result.rows, rows, schema=table.schema, tolerance=EXACT, baseline=np.zeros_like(rows)).rows == 1.0


@pytest.mark.parametrize("optimizer", [Sgd(learning_rate=0.1, weight_decay=0.1), Sgd(learning_rate=0.05, momentum=0.9)])
def test_rows_survive_several_steps_weight_decay_and_momentum(optimizer: Sgd, table, observe) -> None:
    rows, labels = table.batch(2)
    assert certified(analytic(observe(rows, labels, table.schema, optimizer=optimizer, steps=3)), rows, table.schema) == 2


def test_weight_decay_that_the_attacker_does_not_know_hides_the_rows(table, observe) -> None:
    rows, labels = table.batch(2)
    observation = observe(rows, labels, table.schema, optimizer=Sgd(learning_rate=0.1, weight_decay=0.1))
    training = replace(observation.training, optimizer=Sgd(learning_rate=0.1))
    assert certified(analytic(replace(observation, training=training)), rows, table.schema) == 0


def test_rows_of_several_clients_are_read_off_an_opened_aggregate(table, observe) -> None:
    rows, labels = table.batch(3)
    clients = [observe(rows[[i]], labels[[i]], table.schema) for i in range(3)]
    assert certified(analytic(averaged(clients)), rows, table.schema) == 3
    # The encryption grid rounds each update; that costs precision, not the rows.
    assert certified(analytic(averaged(clients, step=GRID)), rows, table.schema) == 3


def test_unequal_coefficients_change_nothing(table, observe) -> None:
    rows, labels = table.batch(2)
    one, other = (observe(rows[[i]], labels[[i]], table.schema) for i in range(2))
    mixed = with_seen(one, (3 * one.seen.values + other.seen.values) / 4, coefficients=(3, 1))
    assert certified(analytic(mixed), rows, table.schema) == 2


def test_clipping_the_batch_gradient_hides_nothing(table, observe) -> None:
    rows, labels = table.batch(4)
    observation = observe(rows, labels, table.schema)
    clipped = with_seen(observation, observation.seen.values / np.linalg.norm(observation.seen.values) * 1e-2)
    assert certified(analytic(clipped), rows, table.schema) == certified(analytic(observation), rows, table.schema) == 4


def private_round(table, *, size: int, noise_multiplier: float, seed: int) -> tuple[Observation, np.ndarray]:
    """One step of the product's own DP-SGD on all rows of a batch: noise on the sum of clipped gradients."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    rows, labels = table.batch(size, seed=seed)
    module = mlp(table.schema.width, hidden=(256, 32))
    names = tuple(f"c{i}" for i in range(table.schema.width))
    samples = Samples(features=rows.astype(np.float32), labels=labels, groups=None, columns=names)
    mechanism = DpSgd(
        noise_multiplier=noise_multiplier, max_grad_norm=0.5, sample_rate=1.0, expected_batch_size=size, steps=1, learning_rate=0.1
    )
    result = train(module, values_of(module), samples, mechanism=mechanism, loss=binary_cross_entropy, randomness=_SeededRandomness(seed))
    noise = GaussianNoise(noise_multiplier=noise_multiplier, max_grad_norm=mechanism.max_grad_norm)
    training = TrainingFacts(optimizer=Sgd(learning_rate=mechanism.learning_rate), loss=BinaryLoss(), steps=1, batch_size=size, noise=noise)
    update = result.update_values
    facts = {"layout": update.layout, "model": values_of(module), "seen": update, "training": training}
    return Observation(**facts, activation=Activation.RELU, schema=table.schema), rows


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("noise_multiplier", [0.01, 1.0])
def test_nothing_is_certified_under_the_noise_of_dp_sgd(table, size: int, noise_multiplier: float) -> None:
    for seed in range(3):
        told, rows = private_round(table, size=size, noise_multiplier=noise_multiplier, seed=seed)
        untold = replace(told, training=replace(told.training, noise=None))
        baseline = mean_rows(table.public, schema=table.schema, count=size)
        guess = score_rows(baseline, rows, schema=table.schema, tolerance=0.02, baseline=baseline)
        assert guess.cells > 0.1  # a floor of 0 would make "near the baseline" empty
        for observation in (told, untold):
            result = analytic(observation)
            assert certified(result, rows, table.schema) == 0
            score = score_rows(result.rows, rows, schema=table.schema, tolerance=0.02, baseline=baseline)
            assert abs(advantage(score.cells, baseline=guess.cells)) < 0.05


def test_clipping_each_record_without_noise_to_speak_of_hides_nothing(table) -> None:
    # The same path as above with a millionth of the noise: what protects is the noise, and the attack can find rows there.
    for seed in range(3):
        observation, rows = private_round(table, size=4, noise_multiplier=1e-6, seed=seed)
        assert certified(analytic(observation), rows, table.schema) >= 3


def test_the_products_own_plain_sgd_leaks_its_rows(table) -> None:
    torch.manual_seed(0)
    rows, labels = table.batch(4)
    module = mlp(table.schema.width, hidden=(256, 32))
    samples = Samples(
        features=rows.astype(np.float32), labels=labels, groups=None, columns=tuple(f"c{i}" for i in range(table.schema.width))
    )
    mechanism = NonPrivate(learning_rate=0.1, batch_size=2, steps=2, seed=0)
    update = train(module, values_of(module), samples, mechanism=mechanism, loss=binary_cross_entropy).update_values
    training = TrainingFacts(optimizer=Sgd(learning_rate=0.1), loss=BinaryLoss(), steps=2, batch_size=2)
    facts = {"layout": update.layout, "model": values_of(module), "seen": update, "training": training}
    result = analytic(Observation(**facts, activation=Activation.RELU, schema=table.schema))
    assert certified(result, rows, table.schema) >= 3


def test_a_table_without_one_hot_block_gives_rows_and_says_that_it_cannot_certify_them(generate_table, observe) -> None:
    table = generate_table(numeric=12, categories=())
    for size in (1, 2):
        rows, labels = table.batch(size)
        result = analytic(observe(rows, labels, table.schema))
        assert not result.certified.any()
        assert "no one-hot block" in result.certificate
        assert np.abs(result.rows[:, None] - rows).max(axis=2).min(axis=0).max() < 1e-2


@pytest.mark.parametrize(
    ("layers", "activation"),
    [((nn.Linear(50, 256), nn.Tanh(), nn.Linear(256, 1)), Activation.OTHER), ((nn.Linear(50, 1),), Activation.RELU)],
)
def test_without_relu_a_single_row_is_read_but_not_certified(table, observe, layers, activation: Activation) -> None:
    rows, labels = table.batch(1)
    result = analytic(observe(rows, labels, table.schema, model=nn.Sequential(*layers), activation=activation))
    assert "no ReLU follows" in result.certificate
    assert not result.certified.any()
    np.testing.assert_allclose(result.rows, rows, atol=1e-2)


def test_rows_never_outnumber_the_records_and_certified_ones_come_first(generate_table, observe) -> None:
    table = generate_table(numeric=8, categories=(2,))
    rows, labels = table.batch(6, seed=3)
    result = analytic(observe(rows, labels, table.schema))
    assert len(result.rows) <= 6
    assert (np.diff(result.certified.astype(int)) <= 0).all()
    assert (result.confidence[result.certified] == 1).all()


def test_a_model_without_a_layer_on_the_columns_is_not_applicable(table, observe) -> None:
    rows, labels = table.batch(1)
    observation = observe(rows, labels, table.schema, model=nn.Sequential(nn.Linear(50, 4, bias=False), nn.ReLU(), nn.Linear(4, 1)))
    result = analytic(observation)
    assert isinstance(result, NotApplicable)
    assert "no fully connected layer with bias on the schema's 50 columns" in str(result)


def test_the_order_and_the_names_of_the_tensors_do_not_matter(table, observe) -> None:
    rows, labels = table.batch(2)
    observation = observe(rows, labels, table.schema)
    names = {"0.weight": "in.weight", "0.bias": "in.bias", "2.weight": "mid.weight", "2.bias": "mid.bias", "4.weight": "a.weight"}
    names["4.bias"] = "a.bias"
    shapes = dict(zip(observation.layout.names, observation.layout.shapes, strict=True))
    order = sorted(names, key=lambda name: names[name])
    layout = Layout(names=tuple(names[name] for name in order), shapes=tuple(shapes[name] for name in order))
    model, seen = (
        layout.flatten({names[name]: tensor for name, tensor in observation.layout.unflatten(vector).items()})
        for vector in (observation.model, observation.seen)
    )
    renamed = replace(observation, layout=layout, model=model, seen=seen)
    np.testing.assert_array_equal(analytic(renamed).rows, analytic(observation).rows)
    assert analytic(renamed).certified.all()


def test_an_update_of_zeros_gives_no_row(table, observe) -> None:
    rows, labels = table.batch(2)
    observation = observe(rows, labels, table.schema)
    result = analytic(with_seen(observation, np.zeros(observation.layout.size)))
    assert result.rows.shape == (0, table.schema.width)
