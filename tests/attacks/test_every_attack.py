"""What holds for every attack on an observation, found by enumeration: a new one cannot escape."""

import copy
import importlib
import inspect
import pkgutil
import typing
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch

import privfed.attacks
from privfed.attacks.analytic import analytic
from privfed.attacks.candidates import CandidateAttack, LabelledRows
from privfed.attacks.client_properties import LabelDistribution
from privfed.attacks.facts import AdaptiveOptimizer
from privfed.attacks.image_inversion import CosineInversion, DeepLeakage
from privfed.attacks.images import ImageShape
from privfed.attacks.imprinting import imprint, read_imprint
from privfed.attacks.labels import label_count, single_label
from privfed.attacks.membership import LikelihoodRatio, LossThreshold, RelativeMembership
from privfed.attacks.most_likely import MostLikelyRows
from privfed.attacks.observation import CiphertextOnly, NotApplicable, Observation, Reconstruction
from privfed.attacks.quotients import quotients
from privfed.attacks.scoring import mean_rows, score_rows
from privfed.attacks.spear import spear
from privfed.attacks.tabular import TabularEnsemble
from privfed.attacks.unmixing import unmix
from privfed.training.model import load_values, mlp, values_of

# Steps that attacks have in common, which are no attacks.
STEPS = {"gradient_part", "target_gradient", "row_space", "guess_labels", "read_labels", "train_shadows"}
IMAGE = ImageShape(channels=1, height=5, width=10)
Attack = Callable[[Observation], object]


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return mlp(50, hidden=(64, 32))


@pytest.fixture(scope="module")
def attacks(fraud_table, fraud_prior) -> Mapping[str, Attack]:
    """Every attack on an observation, by its name."""
    public = LabelledRows(rows=fraud_table.public[:400], labels=fraud_table.public_labels[:400])
    asked = LabelledRows(rows=fraud_table.public[400:410], labels=fraud_table.public_labels[400:410])
    member = {"module": network(), "records": asked, "own": public}
    shadow = member | {"client_records": 20, "shadows": 2}
    return {
        "analytic": analytic,
        "quotients": quotients,
        "unmix": unmix,
        "spear": lambda seen: spear(seen, starts=200),
        "single_label": single_label,
        "label_count": lambda seen: label_count(seen, mean_prediction=0.5),
        "read_imprint": read_imprint,
        "TabularEnsemble": TabularEnsemble(module=network(), prior=fraud_prior, restarts=2, iterations=5).attack,
        "MostLikelyRows": MostLikelyRows(module=network(), prior=fraud_prior, restarts=2, iterations=5).attack,
        "CandidateAttack": CandidateAttack(module=network(), candidates=asked).attack,
        "DeepLeakage": DeepLeakage(module=network(), shape=IMAGE, restarts=1, iterations=3).attack,
        "CosineInversion": CosineInversion(module=network(), shape=IMAGE, iterations=3).attack,
        "LossThreshold": LossThreshold(**member).attack,
        "LikelihoodRatio": LikelihoodRatio(**shadow).attack,
        "RelativeMembership": RelativeMembership(**shadow).attack,
        "LabelDistribution": LabelDistribution(module=network(), public=public).attack,
    }


def returns_not_applicable(function: Callable[..., object]) -> bool:
    hints = typing.get_type_hints(function)
    returned = hints.pop("return", None)
    return Observation in hints.values() and NotApplicable in typing.get_args(returned)


def test_every_attack_of_the_package_is_here(attacks) -> None:
    found: set[str] = set()
    for module in (importlib.import_module(f"privfed.attacks.{info.name}") for info in pkgutil.iter_modules(privfed.attacks.__path__)):
        own = {name: thing for name, thing in vars(module).items() if getattr(thing, "__module__", "") == module.__name__}
        public = {name: thing for name, thing in own.items() if not name.startswith("_")}
        found |= {name for name, thing in public.items() if inspect.isfunction(thing) and returns_not_applicable(thing)}
        classes = {
            name: thing for name, thing in public.items() if inspect.isclass(thing) and inspect.isfunction(vars(thing).get("attack"))
        }
        found |= {name for name, thing in classes.items() if returns_not_applicable(thing.attack)}
    assert found - STEPS == set(attacks)


def seen_of(rows: np.ndarray, labels: np.ndarray, table, observe, *, imprinted: bool) -> Observation:
    model = network()
    if imprinted:
        load_values(model, imprint(values_of(model), table.public, rng=np.random.default_rng(0)))
    return observe(rows, labels, table.schema, model=copy.deepcopy(model))


def answer(result: object) -> list[object]:
    """What an attack said, without how long it took."""
    if isinstance(result, NotApplicable):
        return [result.reason]
    names = [name for name in getattr(type(result), "__dataclass_fields__", {}) if name != "seconds"]
    return [np.asarray(getattr(result, name)).tolist() for name in names]


@pytest.mark.parametrize("size", [1, 3])
def test_no_result_changes_when_the_truth_is_replaced_by_garbage(size: int, attacks, fraud_table, observe) -> None:
    ran = set()
    for name, attack in attacks.items():
        rows, labels = (part.copy() for part in fraud_table.batch(size))
        observation = seen_of(rows, labels, fraud_table, observe, imprinted=name == "read_imprint")
        first = attack(observation)
        rows[:], labels[:] = 99.0, 1 - labels
        torch.manual_seed(77)
        np.random.seed(77)  # noqa: NPY002
        assert answer(first) == answer(attack(observation)), name
        ran |= set() if isinstance(first, NotApplicable) else {name}
    # None was left out because it did not run at all.
    assert set(attacks) - ran <= ({"single_label"} if size > 1 else set())


def test_no_result_changes_between_truths_that_make_the_same_observation(attacks, fraud_table, observe) -> None:
    rows, labels = fraud_table.batch(3)
    changed = observe(rows, 1 - labels, fraud_table.schema, model=network())
    same = observe(rows, labels, fraud_table.schema, model=network())
    # The control: another truth that makes another observation changes what some say.
    assert any(answer(attack(same)) != answer(attack(changed)) for attack in attacks.values())


def test_no_attack_claims_anything_of_ciphertexts_or_adaptive_optimisers(attacks, fraud_table, observe) -> None:
    rows, labels = fraud_table.batch(1)
    observation = seen_of(rows, labels, fraud_table, observe, imprinted=False)
    adam = replace(observation, training=replace(observation.training, optimizer=AdaptiveOptimizer(name="Adam")))
    encrypted = replace(observation, model=None, seen=CiphertextOnly(bytes_seen=1000))
    for name, attack in attacks.items():
        assert isinstance(attack(encrypted), NotApplicable), name
        # The loss threshold needs the model after the round only, however that was reached.
        assert isinstance(attack(adam), NotApplicable) is (name != "LossThreshold"), name


def test_an_attack_on_an_update_that_says_nothing_scores_as_the_baseline_or_says_what_it_was_told(attacks, fraud_table, observe) -> None:
    """An attack that does nothing, and each attack on an update of zeros, at the side of the mean row."""
    rows, labels = fraud_table.batch(4)
    schema, tolerance = fraud_table.schema, 0.319 / 80
    mean = mean_rows(fraud_table.public, schema=schema, count=4)
    nothing = score_rows(np.zeros((0, 50)), rows, schema=schema, tolerance=tolerance, baseline=mean)
    baseline = score_rows(mean, rows, schema=schema, tolerance=tolerance, baseline=mean)
    assert nothing == baseline
    observation = seen_of(rows, labels, fraud_table, observe, imprinted=False)
    silent = replace(observation, seen=type(observation.seen)(layout=observation.layout, values=np.zeros(observation.layout.size)))
    for name in ("analytic", "quotients", "unmix", "spear"):
        result = attacks[name](silent)
        found = result.rows if isinstance(result, Reconstruction) else np.zeros((0, 50))
        assert score_rows(found, rows, schema=schema, tolerance=tolerance, baseline=mean) == baseline, name


FEW_CATEGORIES = {"numeric": 8, "categories": (5,)}


@pytest.mark.parametrize(("name", "columns"), [("analytic", FEW_CATEGORIES), ("quotients", {}), ("unmix", {})])
def test_the_confidence_of_attacks_that_read_a_layer_separates_success_from_failure(
    name: str, columns: dict[str, object], attacks, generate_table, observe
) -> None:
    right, wrong = [], []
    table = generate_table(**columns)
    for size in (2, 4, 8, 16, 24):
        for seed in range(5):
            rows, labels = table.batch(size, seed=seed)
            torch.manual_seed(seed)
            result = attacks[name](observe(rows, labels, table.schema, model=mlp(table.schema.width, hidden=(64, 32)), seed=seed))
            if isinstance(result, Reconstruction):
                off = (np.abs(result.rows[:, None] - rows) / (table.schema.high - table.schema.low)).max(axis=2).min(axis=1)
                right += result.confidence[off <= 0.01].tolist()
                wrong += result.confidence[off > 0.03].tolist()
    assert len(right) >= 20
    assert len(wrong) >= 10
    # Without any meaning a right row would have the higher confidence in one pair of two.
    pairs = np.sign(np.array(right)[:, None] - np.array(wrong))
    assert np.mean((pairs + 1) / 2) > 0.7
