import copy
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from privfed.attacks.candidates import LabelledRows
from privfed.attacks.facts import AdaptiveOptimizer, GaussianNoise, Sgd, SoftmaxLoss
from privfed.attacks.membership import LikelihoodRatio, LossThreshold, MembershipScores, RelativeMembership
from privfed.attacks.membership_scoring import MembershipScore, score_membership
from privfed.attacks.observation import CiphertextOnly, NotApplicable, Observation
from privfed.attacks.shadow_models import log_odds, train_shadows
from privfed.errors import LayoutMismatchError
from privfed.training.model import mlp, trainable_parameters, values_of

MEMBERS = 100


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model that was trained for long on the first 100 records in question, and other records of the attacker."""

    observation: Observation
    records: LabelledRows
    own: LabelledRows

    @property
    def members(self) -> np.ndarray:
        return np.arange(len(self.records)) < MEMBERS

    def attacks(self) -> tuple[LossThreshold | LikelihoodRatio | RelativeMembership, ...]:
        facts = {"module": mlp(50), "records": self.records, "own": self.own}
        return (LossThreshold(**facts), *(kind(**facts, client_records=MEMBERS) for kind in (LikelihoodRatio, RelativeMembership)))

    def score(self, attack) -> MembershipScore:
        result = attack.attack(self.observation)
        assert isinstance(result, MembershipScores)
        return score_membership(result.scores, self.members)


@pytest.fixture(scope="module")
def case(fraud_table, observe) -> Case:
    rng = np.random.default_rng(0)
    # Labels that can be learnt in part, so that the rest has to be remembered.
    labels = (fraud_table.rows[:, 6] + 0.8 * rng.normal(size=len(fraud_table.rows)) > 0).astype(np.int64)
    records = LabelledRows(rows=fraud_table.rows[:1100], labels=labels[:1100])
    own = LabelledRows(rows=fraud_table.rows[1100:2100], labels=labels[1100:2100])
    mine = records.rows[:MEMBERS], records.labels[:MEMBERS]
    torch.manual_seed(0)
    observation = observe(*mine, fraud_table.schema, model=mlp(50), optimizer=Sgd(learning_rate=0.3), steps=300)
    return Case(observation=observation, records=records, own=own)


every_attack = pytest.mark.parametrize("index", range(3), ids=["loss", "LiRA", "RMIA"])


@every_attack
def test_members_of_a_model_that_remembers_are_told_from_others(index: int, case) -> None:
    # A coin has 0.5 with a standard error of 0.03.
    assert case.score(case.attacks()[index]).area > 0.7


def test_comparing_with_other_models_finds_more_members_at_few_false_accusations(case) -> None:
    loss, _, relative = (case.score(attack) for attack in case.attacks())
    assert relative.found_at_1_percent > loss.found_at_1_percent
    assert relative.found_at_1_percent >= 0.03


@every_attack
def test_the_scores_of_others_are_spread_evenly_and_so_are_those_of_a_model_that_saw_nobody(index: int, case, observe) -> None:
    result = case.attacks()[index].attack(case.observation)
    others = result.scores[~case.members]
    assert ((result.scores >= 0) & (result.scores <= 1)).all()
    assert abs(others.mean() - 0.5) < 0.06
    assert abs(np.mean(others > 0.95) - 0.05) < 0.05
    torch.manual_seed(0)
    elsewhere = case.own.rows[:MEMBERS], case.own.labels[:MEMBERS]
    stranger = observe(*elsewhere, case.observation.schema, model=mlp(50), optimizer=Sgd(learning_rate=0.3), steps=300)
    scores = case.attacks()[index].attack(stranger).scores
    # The area has a standard error of 0.03 with 100 members and 1,000 others.
    assert abs(score_membership(scores, case.members).area - 0.5) < 0.09


def test_noise_hides_who_was_a_member(case, noised_round) -> None:
    few = LabelledRows(rows=case.records.rows[:MEMBERS], labels=case.records.labels[:MEMBERS])
    observation = noised_round(few.rows, few.labels, case.observation.schema, noise_multiplier=4.0)
    hidden = replace(case, observation=observation)
    for attack in hidden.attacks():
        assert abs(hidden.score(attack).area - 0.5) < 0.09


def test_shadow_models_are_trained_as_the_client_trains(case) -> None:
    facts = {"records": MEMBERS, "count": 4, "seed": 0}
    module = mlp(50)
    shadows = train_shadows(case.observation, module, case.own, **facts)
    assert shadows.trained_on.sum(axis=1).tolist() == [MEMBERS] * 4
    assert len({row.tobytes() for row in shadows.trained_on}) == 4
    odds = log_odds(module, shadows.parameters, case.own, case.observation.training.loss)
    # They remember what they were trained on, and nothing else.
    assert np.mean(odds[shadows.trained_on]) > np.mean(odds[~shadows.trained_on]) + 1


@pytest.mark.parametrize("noise", [None, GaussianNoise(noise_multiplier=0.0, max_grad_norm=0.1)], ids=["plain", "clipped"])
def test_a_shadow_model_on_the_clients_own_records_is_the_clients_model(noise, table, observe, noised_round) -> None:
    rows, labels = table.batch(6)
    torch.manual_seed(0)
    module = mlp(50)
    before = values_of(module).values
    if noise is None:
        optimizer = Sgd(learning_rate=0.1, momentum=0.5, weight_decay=0.1)
        seen = observe(rows, labels, table.schema, model=copy.deepcopy(module), optimizer=optimizer, steps=3)
    else:
        seen = noised_round(rows, labels, table.schema, noise_multiplier=1e-9, max_grad_norm=0.1, model=copy.deepcopy(module))
    # A hundred copies of each record but one: their mean gradient is the client's to within a hundredth.
    copies = LabelledRows(rows=np.tile(rows, (100, 1)), labels=np.tile(labels, 100))
    whole = replace(seen, training=replace(seen.training, batch_size=599.0, noise=noise))
    shadow = train_shadows(whole, module, copies, records=599, count=1, seed=0)
    moved = torch.cat([value[0].flatten() for value in shadow.parameters.values()]).double().numpy() - before
    assert np.linalg.norm(moved - seen.seen.values) < 0.01 * np.linalg.norm(seen.seen.values)


def test_shadow_models_get_the_declared_noise(table, noised_round) -> None:
    rows, labels = table.batch(8)
    own = LabelledRows(rows=table.public[:50], labels=table.public_labels[:50])
    seen = noised_round(rows, labels, table.schema, noise_multiplier=100.0, max_grad_norm=0.1)
    module = mlp(50)
    shadow = train_shadows(seen, module, own, records=8, count=2, seed=0)
    first, second = (torch.cat([value[index].flatten() for value in shadow.parameters.values()]) for index in range(2))
    expected = 0.1 * 100.0 * 0.1 / 8 * np.sqrt(2)
    assert float((first - second).std()) == pytest.approx(expected, rel=0.05)


def test_odds_are_those_of_the_label(table) -> None:
    torch.manual_seed(0)
    module = mlp(50, outputs=4)
    records = LabelledRows(rows=table.rows[:5], labels=np.array([0, 1, 2, 3, 1]))
    parameters = {name: value.detach()[None] for name, value in trainable_parameters(module).items()}
    odds = log_odds(module, parameters, records, SoftmaxLoss())
    probabilities = module(torch.tensor(records.rows, dtype=torch.float32)).softmax(dim=1).detach().numpy()
    right = probabilities[np.arange(5), records.labels]
    np.testing.assert_allclose(odds[0], np.log(right / (1 - right)), rtol=1e-4)


@every_attack
def test_it_says_when_it_is_not_applicable(index: int, case) -> None:
    encrypted = replace(case.observation, seen=CiphertextOnly(bytes_seen=10))
    result = case.attacks()[index].attack(encrypted)
    assert isinstance(result, NotApplicable)
    assert "holds no key" in str(result)
    adam = replace(case.observation, training=replace(case.observation.training, optimizer=AdaptiveOptimizer(name="Adam")))
    result = case.attacks()[index].attack(adam)
    # The loss of a record is known, however the model was trained; shadow models are not.
    assert isinstance(result, MembershipScores if index == 0 else NotApplicable)


@every_attack
def test_another_architecture_is_refused(index: int, case) -> None:
    with pytest.raises(LayoutMismatchError, match="nothing was attacked"):
        replace(case.attacks()[index], module=mlp(50, hidden=(3,))).attack(case.observation)


def test_too_few_own_records_are_refused(case) -> None:
    with pytest.raises(ValueError, match="more own records than each shadow model is trained on, got 1000 and 1000"):
        train_shadows(case.observation, mlp(50), case.own, records=1000, count=2, seed=0)


@every_attack
def test_the_result_does_not_depend_on_global_generators_and_is_not_printed(index: int, case) -> None:
    first = case.attacks()[index].attack(case.observation)
    torch.manual_seed(5)
    np.testing.assert_array_equal(first.scores, case.attacks()[index].attack(case.observation).scores)
    assert repr(first) == "MembershipScores(records=1100)"
