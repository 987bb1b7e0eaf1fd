import copy
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from privfed.aggregation.rules import FedAvg, MultiKrum
from privfed.client import Client, Trainer
from privfed.data.samples import Samples
from privfed.dp.ledger import Ledger
from privfed.dp.mechanism import Budget
from privfed.errors import HistoryMismatchError, LayoutMismatchError, UnsupportedInThisModeError
from privfed.he.codec import dequantise, quantise
from privfed.he.params import CkksParams
from privfed.training.dpsgd import train
from privfed.training.loss import binary_cross_entropy
from privfed.training.mechanism import DpSgd, NonPrivate, TrainingMechanism
from privfed.training.model import layout_of, mlp, values_of
from privfed.training.randomness import Randomness, _SeededRandomness
from privfed.training.scaffold import ControlVariates, Scaffold
from privfed.update import Aggregate, Layout, PlainVector

torch.set_num_threads(1)
PARAMS = CkksParams.standard(bound=1.0)
LAYOUT = Layout(names=("weight",), shapes=((3,),))
PRIVATE = DpSgd(
    noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.2, expected_batch_size=8, steps=4, learning_rate=0.25, max_records=100
)
PLAIN = NonPrivate(learning_rate=0.2, batch_size=40, steps=10, seed=0)
NAMES = ("ash", "birch", "cedar", "elm")
ULP = 2.0**-53


class Silent(Randomness):
    """No noise, and batches of all records but those left out."""

    private = False

    def __init__(self, *, without: Sequence[int] = ()) -> None:
        self.without = without

    def _stream(self, count: int) -> bytes:
        raise NotImplementedError

    def normal(self, count: int) -> NDArray[np.float64]:
        return np.zeros(count)

    def poisson_batches(self, records: int, *, sample_rate: float, steps: int) -> Iterator[NDArray[np.int64]]:
        for _ in range(steps):
            yield np.array([i for i in range(records) if i not in self.without], dtype=np.int64)


def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return mlp(3, hidden=(4,))


def table(seed: int, records: int = 40) -> Samples:
    """Clients differ: each has its own direction in which labels change, and its own share of ones."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(records, 3)) + rng.normal(size=3)
    labels = (features @ rng.normal(size=3) > rng.normal()).astype(np.int64)
    return Samples(features=features, labels=labels, groups=None, columns=("a", "b", "c"))


class Federation:
    """Trainers of several clients, and rounds of them in the clear."""

    def __init__(
        self, directory: Path, training: TrainingMechanism, *, correction: Scaffold | None = None, module: nn.Module | None = None
    ):
        self.directory = directory
        self.module = module or model()
        self.training = training
        self.correction = correction
        self.model = values_of(self.module)
        self.rounds: tuple[int, ...] = ()
        self.ledgers = {
            name: Ledger.open(directory / f"{name}.ledger", population=name, budget=Budget(epsilon=1e6, delta=1e-5))
            for name in NAMES
            if isinstance(training, DpSgd)
        }
        self.trainers = {name: self.trainer(name) for name in NAMES}

    def trainer(self, name: str, *, remember: bool = True) -> Trainer:
        client = Client(name, table(NAMES.index(name)), training=self.training, ledger=self.ledgers.get(name))
        trainer = Trainer(
            client=client,
            model=self.module,
            start=self.model,
            loss=binary_cross_entropy,
            params=PARAMS,
            correction=self.correction,
            randomness=lambda number: _SeededRandomness(1000 * number + NAMES.index(name)),
        )
        if remember:
            (self.directory / name).mkdir(exist_ok=True)
            trainer.remember(self.directory / name, rounds=self.rounds)
        return trainer

    def mean(self, number: int, names: Collection[str]) -> Aggregate[PlainVector]:
        """Trains the named clients and sums as a round does, on the grid."""
        updates = {name: self.trainers[name].train(self.model, session=b"session", round=number, attempt=0) for name in names}
        total = sum(quantise(update.vector.values, PARAMS)[0] for update in updates.values())
        values = dequantise(np.asarray(total), len(names), PARAMS)
        return Aggregate(
            round=number,
            vector=PlainVector(layout=self.model.layout, values=values),
            coefficients={name: int(name in names) for name in NAMES},
        )

    def hold(self, number: int, names: Collection[str] = NAMES) -> Aggregate[PlainVector]:
        aggregate = self.mean(number, names)
        for trainer in self.trainers.values():
            trainer.opened(aggregate, attempt=0)
        self.model = PlainVector(layout=self.model.layout, values=self.model.values + aggregate.vector.values)
        self.rounds += (number,)
        return aggregate

    def close(self) -> None:
        for ledger in self.ledgers.values():
            ledger.close()


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    federation = Federation(tmp_path, PRIVATE, correction=Scaffold(clients=4))
    yield federation
    federation.close()


def variates(trainer: Trainer) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    assert trainer._variates is not None
    return trainer._variates._kept["common"].values, trainer._variates._kept["own"].values


def assert_common_is_the_mean_of_all(federation: Federation) -> None:
    pairs = [variates(trainer) for trainer in federation.trainers.values()]
    common, own = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    assert all((c == common[0]).all() for c in common)
    # Each round adds at most eight rounded numbers of this size to either side.
    tolerance = 8 * len(federation.rounds) * ULP * float(np.abs(own).max() + np.abs(common).max())
    assert np.abs(np.mean(own, axis=0) - common[0]).max() <= tolerance
    assert np.abs(common[0]).max() > 1e6 * tolerance
    assert np.abs(own[0] - own[1]).max() > 1e6 * tolerance


# ---------------------------------------------------------------- the variates


def test_the_common_variate_is_the_mean_of_all_own_ones_after_rounds_of_all(federation: Federation) -> None:
    for number in range(3):
        federation.hold(number)
    assert_common_is_the_mean_of_all(federation)


def test_the_common_variate_is_the_mean_of_all_own_ones_after_rounds_of_some(federation: Federation) -> None:
    for number, names in enumerate([("ash", "birch"), ("birch", "cedar", "elm"), ("ash",), NAMES]):
        federation.hold(number, names)
    assert_common_is_the_mean_of_all(federation)


def test_after_a_round_of_all_the_own_variate_is_the_mean_gradient_of_the_client_s_steps(federation: Federation) -> None:
    aggregate = federation.hold(0)
    common, own = variates(federation.trainers["ash"])
    assert common == pytest.approx(-aggregate.vector.values / (4 * 0.25), rel=1e-12)
    start = values_of(federation.module)
    update = train(
        federation.module,
        start,
        table(0),
        mechanism=PRIVATE,
        loss=binary_cross_entropy,
        randomness=_SeededRandomness(0),
    ).update_values.values
    # An update is on the grid when it enters the sum.
    assert own == pytest.approx(-update / (4 * 0.25), abs=PARAMS.step / (4 * 0.25))


def test_a_client_that_did_not_take_part_keeps_its_own_variate(federation: Federation) -> None:
    federation.hold(0)
    before = variates(federation.trainers["elm"])
    federation.hold(1, ("ash", "birch", "cedar"))
    after = variates(federation.trainers["elm"])
    assert (after[1] == before[1]).all()
    assert (after[0] != before[0]).any()


# ---------------------------------------------------------------- what they do


def moved(correction: object, *, mechanism: TrainingMechanism, randomness: Randomness | None = None) -> NDArray[np.float64]:
    module = model()
    return train(
        module, values_of(module), table(0), mechanism=mechanism, loss=binary_cross_entropy, correction=correction, randomness=randomness
    ).update_values.values


@pytest.mark.parametrize("mechanism", [replace(PRIVATE, steps=1), replace(PLAIN, steps=1)], ids=["private", "plain"])
def test_scaffold_moves_each_step_by_exactly_the_difference_of_the_variates(mechanism: TrainingMechanism) -> None:
    layout = layout_of(model())
    kept = ControlVariates(scaffold=Scaffold(clients=2), mechanism=mechanism, layout=layout)
    sent = PlainVector(layout=layout, values=np.linspace(-0.1, 0.1, layout.size))
    mean = PlainVector(layout=layout, values=np.linspace(0.0, 0.05, layout.size))
    kept.trained(sent, round=0, attempt=0)
    kept.opened(Aggregate(round=0, vector=mean, coefficients={"ash": 1, "birch": 1}), client="ash", attempt=0)
    difference = moved(kept.correction(), mechanism=mechanism, randomness=Silent()) - moved(None, mechanism=mechanism, randomness=Silent())
    # c - c_i is (sent - mean) / eta, and a step is -eta times it; weights of this size are rounded to 2^-24 of themselves.
    assert difference == pytest.approx(mean.values - sent.values, abs=8 * 2.0**-24)
    assert np.abs(difference).max() > 0.01


def test_scaffold_really_changes_the_weights_under_private_training(federation: Federation, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    without = Federation(tmp_path / "plain", PRIVATE)
    for number in range(2):
        federation.hold(number)
        without.hold(number)
    without.close()
    # The noise is the same, so the difference is that of the variates.
    assert np.abs(federation.model.values - without.model.values).max() > 1e-3


def test_a_record_moves_a_corrected_step_by_at_most_the_clip_bound() -> None:
    mechanism = replace(PRIVATE, steps=1, expected_batch_size=1, max_grad_norm=0.05, learning_rate=1.0, sample_rate=1.0)
    layout = layout_of(model())
    kept = ControlVariates(scaffold=Scaffold(clients=2), mechanism=mechanism, layout=layout)
    kept.trained(PlainVector(layout=layout, values=np.linspace(-9, 9, layout.size)), round=0, attempt=0)
    mean = PlainVector(layout=layout, values=np.zeros(layout.size))
    kept.opened(Aggregate(round=0, vector=mean, coefficients={"ash": 1, "birch": 1}), client="ash", attempt=0)
    whole = moved(kept.correction(), mechanism=mechanism, randomness=Silent())
    distances = [np.linalg.norm(whole - moved(kept.correction(), mechanism=mechanism, randomness=Silent(without=[i]))) for i in range(40)]
    # Weights of up to 12 are rounded to 2^-24 of themselves, in each of the two updates.
    rounding = 2 * 12 * 2.0**-24 * np.sqrt(layout.size)
    assert 0.05 - rounding <= max(distances) <= 0.05 + rounding


def test_scaffold_ends_at_the_common_optimum_where_fedavg_drifts(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(3, 1))
    nn.init.zeros_(module[0].weight)
    nn.init.zeros_(module[0].bias)
    training = replace(PLAIN, learning_rate=0.5, steps=20)

    def slope(correction: Scaffold | None, folder: str) -> float:
        """Length of the gradient of the mean loss of all clients at the end: zero at the optimum."""
        (tmp_path / folder).mkdir()
        federation = Federation(tmp_path / folder, training, correction=correction, module=copy.deepcopy(module))
        for number in range(15):
            federation.hold(number)
        federation.close()
        end = copy.deepcopy(module)
        torch.nn.utils.vector_to_parameters(torch.tensor(federation.model.values, dtype=torch.float32), end.parameters())
        losses = [binary_cross_entropy(end(torch.tensor(table(i).features)), torch.tensor(table(i).labels)).mean() for i in range(4)]
        return float(torch.cat([g.reshape(-1) for g in torch.autograd.grad(torch.stack(losses).mean(), list(end.parameters()))]).norm())

    assert slope(Scaffold(clients=4), "scaffold") < slope(None, "fedavg") / 3


# ---------------------------------------------------------------- restarts


def test_the_variates_survive_a_restart_before_and_after_an_opening(federation: Federation) -> None:
    federation.hold(0)
    aggregate = federation.mean(1, NAMES)
    federation.trainers["birch"].opened(aggregate, attempt=0)
    expected = variates(federation.trainers["birch"])
    federation.trainers["birch"] = federation.trainer("birch")  # crashed after the variates moved, before the model did
    federation.trainers["cedar"] = federation.trainer("cedar")  # crashed before either
    for trainer in federation.trainers.values():
        trainer.opened(aggregate, attempt=0)
    federation.rounds += (1,)
    assert all((now == then).all() for now, then in zip(variates(federation.trainers["birch"]), expected, strict=True))
    assert_common_is_the_mean_of_all(federation)


def test_a_round_moves_the_variates_once(federation: Federation) -> None:
    aggregate = federation.hold(0)
    before = variates(federation.trainers["ash"])
    federation.trainers["ash"].opened(aggregate, attempt=0)
    assert all((now == then).all() for now, then in zip(variates(federation.trainers["ash"]), before, strict=True))


def test_a_retry_takes_the_place_of_what_was_trained_before_it() -> None:
    kept = ControlVariates(scaffold=Scaffold(clients=1), mechanism=PRIVATE, layout=LAYOUT)
    for values in ([1.0, 1.0, 1.0], [2.0, 0.0, -2.0]):
        kept.trained(PlainVector(layout=LAYOUT, values=values), round=0, attempt=0)
    kept.opened(
        Aggregate(round=0, vector=PlainVector(layout=LAYOUT, values=[2.0, 0.0, -2.0]), coefficients={"ash": 1}), client="ash", attempt=0
    )
    assert kept._kept["own"].values.tolist() == [-2.0, 0.0, 2.0]
    assert kept.correction().gradient(torch.zeros(3), torch.zeros(3)).tolist() == [0.0, 0.0, 0.0]


def test_a_lost_file_is_noticed_before_any_work(federation: Federation) -> None:
    federation.hold(0)
    (federation.directory / "elm" / "variates.sqlite").unlink()
    with pytest.raises(HistoryMismatchError, match="nothing was done"):
        federation.trainer("elm")


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    kept = ControlVariates(scaffold=Scaffold(clients=1), mechanism=PRIVATE, layout=LAYOUT, path=tmp_path / "variates.sqlite")
    kept.trained(PlainVector(layout=LAYOUT, values=[1.0, 2.0, 3.0]), round=0, attempt=0)
    other = Layout(names=("weight",), shapes=((4,),))
    with pytest.raises(LayoutMismatchError):
        ControlVariates(scaffold=Scaffold(clients=1), mechanism=PRIVATE, layout=other, path=tmp_path / "variates.sqlite")


def test_a_trainer_without_scaffold_keeps_nothing(tmp_path: Path) -> None:
    federation = Federation(tmp_path, PRIVATE)
    federation.hold(0)
    federation.close()
    assert not list(tmp_path.glob("*/variates*"))


# ---------------------------------------------------------------- refusals

UNSUITABLE: dict[str, dict[str, object]] = {
    "other weights": {"weights": {"ash": 1.0, "birch": 2.0}},
    "another rule": {"rule": MultiKrum(byzantine=0, keep=1)},
    "other steps": {"training": {"ash": PRIVATE, "birch": replace(PRIVATE, steps=5)}},
    "another learning rate": {"training": {"ash": PRIVATE, "birch": replace(PRIVATE, learning_rate=0.3)}},
    "plain training of other steps": {"training": {"ash": PRIVATE, "birch": PLAIN}},
    "more clients": {"weights": {"ash": 1.0, "birch": 1.0, "cedar": 1.0}, "training": dict.fromkeys(("ash", "birch", "cedar"), PRIVATE)},
}
SUITABLE: dict[str, object] = {"weights": {"ash": 3.0, "birch": 3.0}, "training": {"ash": PRIVATE, "birch": PRIVATE}, "rule": FedAvg()}


def test_equal_weights_steps_and_learning_rates_are_accepted_whatever_else_differs() -> None:
    Scaffold(clients=2).check(**SUITABLE)
    alike = NonPrivate(learning_rate=PRIVATE.learning_rate, steps=PRIVATE.steps, batch_size=7, seed=1)
    Scaffold(clients=2).check(**SUITABLE | {"training": {"ash": PRIVATE, "birch": alike}})


@pytest.mark.parametrize("changes", UNSUITABLE.values(), ids=UNSUITABLE.keys())
def test_a_consortium_whose_variates_do_not_follow_from_its_openings_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(UnsupportedInThisModeError, match="nothing was done"):
        Scaffold(clients=2).check(**SUITABLE | changes)


def test_no_client_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one client"):
        Scaffold(clients=0)


def test_an_opening_that_the_variates_do_not_follow_from_leaves_them_as_they_are() -> None:
    kept = ControlVariates(scaffold=Scaffold(clients=2), mechanism=PRIVATE, layout=LAYOUT)
    vector = PlainVector(layout=LAYOUT, values=[1.0, 2.0, 3.0])
    kept.trained(vector, round=0, attempt=1)
    before = dict(kept._kept)
    for coefficients in ({"ash": 1, "birch": 2}, {"ash": 1, "birch": 1, "cedar": 1}):
        with pytest.raises(UnsupportedInThisModeError, match="left as they are"):
            kept.opened(Aggregate(round=0, vector=vector, coefficients=coefficients), client="ash", attempt=1)
    for number, attempt in ((0, 0), (1, 1)):
        with pytest.raises(HistoryMismatchError, match="does not know what it sent"):
            kept.opened(Aggregate(round=number, vector=vector, coefficients={"ash": 1, "birch": 1}), client="ash", attempt=attempt)
    assert kept._kept == before
