"""Models and losses that remember one batch in the next: the gradient of a record would depend on earlier, private records."""

import array
import functools
import itertools
import types
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from privfed.client import Client, Trainer
from privfed.data.samples import Samples
from privfed.dp.ledger import Ledger
from privfed.dp.mechanism import Budget
from privfed.errors import UnsupportedModelError
from privfed.he.params import CkksParams
from privfed.training import dpsgd
from privfed.training.batched import train_together
from privfed.training.dpsgd import check, train
from privfed.training.loss import BinaryCrossEntropy, binary_cross_entropy
from privfed.training.mechanism import NonPrivate
from privfed.training.memory import check_memory, first_change, state_of
from privfed.training.model import mlp, values_of
from privfed.update import PlainVector
from tests.training.steps import ONE_STEP, Counting, seeded, table

torch.set_num_threads(1)
NON_PRIVATE = NonPrivate(learning_rate=0.1, batch_size=8, steps=3, seed=0)
SEEN: list[float] = []


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.scale = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.layer(features * self.scale)


class FrozenMoves(Base):
    """What was found in review: a frozen weight that follows the batches, and multiplies the inputs of the next."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(features)
        with torch.no_grad():
            self.scale.mul_(0.9999).add_(features.abs().mean(dim=0), alpha=1e-4)
        return outputs


class FrozenIsReplaced(Base):
    def forward(self, features: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(features)
        self.scale = nn.Parameter(self.scale.detach() + features.detach().mean(dim=0), requires_grad=False)
        return outputs


class FrozenMovesBehindTorch(Base):
    def forward(self, features: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(features)
        self.scale.data.numpy()[...] += 1e-30
        self.scale.data.numpy()[0] = np.nextafter(self.scale.data.numpy()[0], np.float32(2))
        return outputs


class TrainedMoves(Base):
    def forward(self, features: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(features.clone())
        self.layer.weight.data = self.layer.weight.data + 1e-3 * features.mean()
        return outputs


class TensorAttribute(Base):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(4)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(features - self.mean)
        self.mean = 0.99 * self.mean + 0.01 * features.detach().mean(dim=0)
        return outputs


class Counter(Base):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(features)


class NewAttribute(Base):
    def forward(self, features: torch.Tensor) -> torch.Tensor:
        self.last = features.detach().mean()
        return super().forward(features)


class InAList(Base):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        self.kept.append(features.detach().mean())
        return super().forward(features)


class InAHiddenModule(Base):
    """A module in a plain list, where torch does not see it."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [{"norm": nn.BatchNorm1d(4, affine=False)}]

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        self.hidden[0]["norm"](features)
        return super().forward(features)


class InAnArray(Base):
    def __init__(self) -> None:
        super().__init__()
        self.kept = types.SimpleNamespace(total=np.zeros(4))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        self.kept.total += features.detach().numpy().mean(axis=0)
        return super().forward(features)


class InBackward(Base):
    """Nothing changes in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = torch.zeros(())

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(features)
        if outputs.requires_grad:
            outputs.register_hook(lambda derivative: self.largest.copy_(torch.maximum(self.largest, derivative.detach().abs().max())))
        return outputs


class SwitchesItself(Base):
    def forward(self, features: torch.Tensor) -> torch.Tensor:
        self.training = False
        return super().forward(features)


class Thaws(Base):
    def forward(self, features: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(features)
        self.scale.requires_grad_(True)
        return outputs


class OutsideOfTheModel(Base):
    """Nothing in the model changes; what is kept can only be told by what it does."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(features) * (1 + 1e-3 * sum(SEEN[-1:]))
        SEEN.append(float(features.abs().max()))
        return outputs


class DrawsFromNumpy(Base):
    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return super().forward(features) + 1e-3 * float(self.rng.normal())


class InBytes(Base):
    def __init__(self) -> None:
        super().__init__()
        self.kept = [bytearray(4), array.array("d", [0.0])]

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        self.kept[0][0] = (self.kept[0][0] + 1) % 256
        return super().forward(features)


class InAnArrayOfObjects(Base):
    def __init__(self) -> None:
        super().__init__()
        self.kept = np.array([{"calls": 0}], dtype=object)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        self.kept[0]["calls"] += 1
        return super().forward(features)


class InACounter(Base):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count()

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        next(self.numbers)
        return super().forward(features)


class InTheClass(Base):
    kept: ClassVar[list[float]] = [0.0]

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        self.kept[0] += 1.0
        return super().forward(features)


class ByTheClass(Base):
    calls = 0

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        ByTheClass.calls += 1
        return super().forward(features)


REMEMBERING = [
    FrozenMoves, FrozenIsReplaced, FrozenMovesBehindTorch, TrainedMoves, TensorAttribute, Counter, NewAttribute, InAList, InAHiddenModule,
    InAnArray, InBackward, SwitchesItself, Thaws, OutsideOfTheModel, DrawsFromNumpy,
    InBytes, InAnArrayOfObjects, InACounter, InTheClass, ByTheClass,
]  # fmt: skip


@pytest.mark.parametrize("kind", REMEMBERING)
@pytest.mark.parametrize("mechanism", [ONE_STEP, NON_PRIVATE], ids=["private", "plain"])
def test_a_model_that_changes_while_records_go_through_is_refused_before_any_record_is_touched(
    kind: type[nn.Module], mechanism: object
) -> None:
    module, counting = kind(), Counting()
    with pytest.raises(UnsupportedModelError, match="nothing was trained"):
        train(module, values_of(module), table(), mechanism=mechanism, loss=binary_cross_entropy, randomness=counting)  # type: ignore[arg-type]
    assert counting.batch_sizes == []


@pytest.mark.parametrize(
    ("kind", "place"),
    [(FrozenMoves, "the model.scale changes"), (TensorAttribute, "the model.mean changes"), (InAList, "the model.kept changes"),
     (InAHiddenModule, "the model.hidden[0]['norm'].running_mean changes")],
)  # fmt: skip
def test_the_refusal_names_what_changes(kind: type[nn.Module], place: str) -> None:
    with pytest.raises(UnsupportedModelError) as refusal:
        check_memory(kind(), binary_cross_entropy, inputs=4)
    assert str(refusal.value).startswith(place)


def test_the_parts_that_the_refused_models_share_are_accepted_and_left_as_they_are() -> None:
    module = Base()
    before = state_of(model=module, loss=binary_cross_entropy)
    check(module, values_of(module), table(), mechanism=ONE_STEP, loss=binary_cross_entropy)
    train(module, values_of(module), table(), mechanism=ONE_STEP, loss=binary_cross_entropy)
    assert state_of(model=module, loss=binary_cross_entropy) == before


@dataclass
class RunningWeight:
    """A loss that weighs positives by how rare they were so far."""

    positives: torch.Tensor = field(default_factory=lambda: torch.ones(()))

    def __call__(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        losses = BinaryCrossEntropy(positive_weight=2.0)(outputs, labels) * self.positives
        self.positives = 0.999 * self.positives + 0.001 * labels.float().mean()
        return losses


class Slotted:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return binary_cross_entropy(outputs, labels)

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self(outputs, labels)


def closing_over() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    mean = 0.0

    def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        nonlocal mean
        mean += float(outputs.detach().mean())
        return binary_cross_entropy(outputs, labels)

    return loss


def with_default(outputs: torch.Tensor, labels: torch.Tensor, kept: list[int] = []) -> torch.Tensor:  # noqa: B006
    kept.append(len(labels))
    return binary_cross_entropy(outputs, labels)


@pytest.mark.parametrize(
    "loss",
    [RunningWeight(), Slotted(), Slotted().loss, closing_over(), with_default, functools.partial(Slotted.loss, Slotted())],
    ids=["running weight", "slots", "method", "closure", "default", "partial"],
)
def test_a_loss_that_remembers_is_refused_too(loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    module = mlp(4)
    with pytest.raises(UnsupportedModelError, match="the loss.* changes while records go through"):
        check(module, values_of(module), table(), mechanism=ONE_STEP, loss=loss)


def test_stacked_training_refuses_what_remembers() -> None:
    module = FrozenMoves()
    with pytest.raises(UnsupportedModelError, match=r"the model\.scale changes"):
        train_together(module, values_of(module), [table()], mechanism=NON_PRIVATE, loss=binary_cross_entropy)


# ---------------------------------------------------------------- trained weights


class MovesTrained(Base):
    """As nn.Embedding with a max_norm does: the weights of what a record looks up are made shorter, before any noise."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if _unlike_made_up(features):
            with torch.no_grad():
                self.layer.weight[0, 0] *= 0.5
        return super().forward(features)


class ExchangesTrained(Base):
    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if _unlike_made_up(features):
            self.layer.weight.data = self.layer.weight.data.clone()
        return super().forward(features)


class ShortEmbedding(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.table, self.last = kind(8, 4, max_norm=1.0), nn.Linear(4, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        looked_up = self.table(features[:, :1].long().clamp(0, 7))
        return self.last(looked_up.reshape(len(features), 4))


@pytest.mark.parametrize("kind", [MovesTrained, ExchangesTrained])
def test_a_model_that_moves_its_trained_weights_for_some_records_gives_no_update(kind: type[nn.Module]) -> None:
    module = kind()
    check(module, values_of(module), sevens(), mechanism=ONE_STEP, loss=binary_cross_entropy)
    with pytest.raises(UnsupportedModelError, match=r"moved its own weights .*; no update was made; what was charged stays charged"):
        train(module, values_of(module), sevens(), mechanism=ONE_STEP, loss=binary_cross_entropy)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_layers_with_a_max_norm_are_refused_before_anything_is_charged(kind: Callable[..., nn.Module]) -> None:
    module = ShortEmbedding(kind)
    with pytest.raises(UnsupportedModelError, match=r"'table' has a max_norm.*nothing was trained"):
        check(module, values_of(module), table(), mechanism=ONE_STEP, loss=binary_cross_entropy)


def test_what_changes_under_the_weights_of_the_start_alone_is_refused() -> None:
    class Shortened(Base):
        def forward(self, features: torch.Tensor) -> torch.Tensor:
            if bool((self.layer.weight.detach().abs() > 100).any()):
                self.layer.weight.data.mul_(0.5)
            return super().forward(features)

    module = Shortened()
    start = values_of(module)
    check(module, start, table(), mechanism=ONE_STEP, loss=binary_cross_entropy)
    far = PlainVector(layout=start.layout, values=start.values + 1000.0)
    with pytest.raises(UnsupportedModelError, match=r"changes while records go through.*nothing was trained"):
        check(module, far, table(), mechanism=ONE_STEP, loss=binary_cross_entropy)


# ---------------------------------------------------------------- after training


def _unlike_made_up(features: torch.Tensor) -> bool:
    return bool((features == 7.0).any())


def sevens() -> Samples:
    samples = table()
    features = samples.features.copy()
    features[:, 0] = 7.0
    return replace(samples, features=features)


class Later(Base):
    """Behaves until it sees a record that no made-up record is like."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(features)
        if _unlike_made_up(features):
            with torch.no_grad():
                self.scale += features.mean(dim=0)
        return outputs


class LaterElsewhere(Base):
    def __init__(self) -> None:
        super().__init__()
        self.kept = {"calls": 0}

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        self.kept["calls"] += _unlike_made_up(features)
        return super().forward(features)


class LaterAnew(Base):
    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if _unlike_made_up(features):
            self.kept = features.detach().mean()
        return super().forward(features)


@pytest.mark.parametrize("kind", [Later, LaterElsewhere, LaterAnew])
@pytest.mark.parametrize("mechanism", [ONE_STEP, NonPrivate(learning_rate=0.1, batch_size=40, steps=3, seed=0)], ids=["private", "plain"])
def test_an_update_is_not_given_back_if_anything_but_the_trained_weights_changed(kind: type[nn.Module], mechanism: object) -> None:
    module = kind()
    check(module, values_of(module), sevens(), mechanism=mechanism, loss=binary_cross_entropy)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModelError, match=r"the model\..* changed in training .*; no update was made; what was charged stays"):
        train(module, values_of(module), sevens(), mechanism=mechanism, loss=binary_cross_entropy)  # type: ignore[arg-type]


def test_what_a_model_that_changes_in_training_was_charged_stays_charged_and_nothing_is_kept(tmp_path: Path) -> None:
    module, mechanism = Later(), ONE_STEP
    witnessed: list[object] = []
    with Ledger.open(tmp_path / "ledger", population="ash", budget=Budget(epsilon=100.0, delta=1e-5)) as ledger:
        trainer = Trainer(
            client=Client("ash", sevens(), training=mechanism, ledger=ledger),
            model=module,
            start=values_of(module),
            loss=binary_cross_entropy,
            params=CkksParams.standard(bound=64.0),
            witness=witnessed.append,
        )
        with pytest.raises(UnsupportedModelError, match="no update was made"):
            trainer.train(values_of(module), session=b"session", round=0, attempt=0)
        assert ledger.events() == (mechanism.event(),)
    assert witnessed == []


def test_the_moved_frozen_weight_would_break_the_bound_on_what_a_record_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the check is for: two steps without noise, in whose second the one more record of the first is not drawn."""
    from tests.training.steps import Silent, samples_of

    monkeypatch.setattr(dpsgd, "check", lambda *_, **__: None)
    monkeypatch.setattr(dpsgd, "check_unchanged", lambda *_, **__: None)
    features = np.vstack([table(20).features, np.full((1, 4), 1e5)])
    labels = (features.sum(axis=1) > 1).astype(np.int64)
    moved = {}
    for kind, batches in itertools.product((Base, FrozenMoves), ([[], range(20)], [[20], range(20)])):
        torch.manual_seed(0)
        module = kind()
        result = train(
            module,
            values_of(module),
            samples_of(features, labels),
            mechanism=dpsgd.DpSgd(
                noise_multiplier=1.0, max_grad_norm=1e-3, sample_rate=0.5, expected_batch_size=1, steps=2, learning_rate=1.0, max_records=50
            ),
            loss=binary_cross_entropy,
            randomness=Silent(*[list(batch) for batch in batches]),
        )
        moved[kind, len(batches[0])] = result.update_values.values
    # The first step moves by at most the bound, and the second follows it smoothly; the bound is 1e-3.
    assert np.linalg.norm(moved[Base, 1] - moved[Base, 0]) < 1.1e-3
    assert np.linalg.norm(moved[FrozenMoves, 1] - moved[FrozenMoves, 0]) > 3e-3


# ---------------------------------------------------------------- what is compared


def test_every_kind_of_thing_in_a_model_is_compared_bit_for_bit() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)
            self.nested = {"a": [1.5, (torch.zeros(2), np.zeros(2))], "b": {"c"}}
            self.register_buffer("buffer", torch.tensor([float("nan"), -0.0]))
            self.itself = [self]
            self.kind = nn.Linear
            self.other = {"a": 1}
            self.bytes = (bytearray(b"a"), array.array("d", [1.0]))

    def edits() -> dict[str, Callable[[Holder], object]]:
        return {
            "the model.layer.weight": lambda held: held.layer.weight.data.view(torch.int32).bitwise_xor_(1),
            "the model.nested['a'][0]": lambda held: held.nested["a"].__setitem__(0, 1.6),
            "the model.nested['a'][1][0]": lambda held: held.nested["a"][1][0].neg_(),
            "the model.nested['a'][1][1]": lambda held: held.nested["a"][1][1].__setitem__(0, -0.0),
            "the model.nested['b']": lambda held: held.nested["b"].add("d"),
            "the model.buffer": lambda held: held.buffer.abs_(),
            "the model.itself[0]": lambda held: held.itself.__setitem__(0, None),
            "the model.bytes[1]": lambda held: held.bytes[1].append(2.0),
            "the model.new": lambda held: setattr(held, "new", 1),
            "the model.other": lambda held: setattr(held, "other", held.nested),
        }

    for place, edit in edits().items():
        held = Holder()
        before = state_of(model=held, loss=binary_cross_entropy)
        assert state_of(model=held, loss=binary_cross_entropy) == before
        edit(held)
        assert first_change(before, state_of(model=held, loss=binary_cross_entropy)) == place


def test_parameters_that_are_left_out_may_change() -> None:
    module = Base()
    before = state_of(model=module, loss=binary_cross_entropy, without=list(module.layer.parameters()))
    with torch.no_grad():
        module.layer.weight += 1.0
    after = state_of(model=module, loss=binary_cross_entropy, without=list(module.layer.parameters()))
    assert first_change(before, after) is None
    with torch.no_grad():
        module.scale += 1.0
    assert first_change(before, state_of(model=module, loss=binary_cross_entropy)) == "the model.scale"


def test_tensors_of_other_kinds_are_compared_as_well() -> None:
    module = seeded(1, 4)
    module.sparse, module.nowhere = torch.tensor([0.0, 1.0]).to_sparse(), torch.zeros(2, device="meta")  # type: ignore[assignment]
    before = state_of(model=module, loss=binary_cross_entropy)
    check_memory(module, binary_cross_entropy, inputs=4)
    module.sparse = torch.tensor([0.0, 2.0]).to_sparse()  # type: ignore[assignment]
    assert first_change(before, state_of(model=module, loss=binary_cross_entropy)) == "the model.sparse"


def test_a_loss_without_a_gradient_is_refused() -> None:
    module = mlp(4)
    with pytest.raises(UnsupportedModelError, match="have no gradient"):
        check(module, values_of(module), table(), mechanism=NON_PRIVATE, loss=lambda outputs, labels: (outputs[:, 0] > 0).float() - labels)
