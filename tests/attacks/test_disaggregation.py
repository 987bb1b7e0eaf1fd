import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from privfed.attacks.analytic import EXACT
from privfed.attacks.disaggregation import Disaggregation, disaggregate, disaggregation_risk
from privfed.attacks.scoring import score_rows
from privfed.attacks.spear import spear
from privfed.errors import LayoutMismatchError
from privfed.training.model import mlp
from privfed.update import Layout, PlainVector

LAYOUT = Layout(names=("weight",), shapes=((500,),))


def means(coefficients: np.ndarray, updates: np.ndarray, layout: Layout = LAYOUT) -> list[PlainVector]:
    """What each opening shows, given each client's update, of shape ([openings,] clients, size)."""
    shares = coefficients / coefficients.sum(axis=1, keepdims=True)
    every = np.broadcast_to(updates, (len(coefficients), *updates.shape[-2:]))
    return [PlainVector(layout=layout, values=share @ those) for share, those in zip(shares, every, strict=True)]


def cosine(first: np.ndarray, second: np.ndarray) -> float:
    return float(first @ second / (np.linalg.norm(first) * np.linalg.norm(second)))


def test_two_openings_of_the_same_uploads_give_the_one_that_differs_exactly() -> None:
    coefficients = np.array([[1.0, 2.0, 1.0], [1.0, 2.0, 0.0]])
    updates = np.random.default_rng(0).normal(size=(3, 500))
    found = disaggregate(coefficients, means(coefficients, updates))
    assert [update is not None for update in found.updates] == [False, False, True]
    np.testing.assert_allclose(found.updates[2].values, updates[2], atol=1e-12)
    assert repr(found) == "Disaggregation(clients=3, determined=1)"


def test_records_of_the_client_that_left_are_read_off_two_sums(table, observe) -> None:
    rows, labels = table.batch(8)
    torch.manual_seed(0)
    model = mlp(table.schema.width, hidden=(64, 32))
    clients = [observe(rows[2 * i : 2 * i + 2], labels[2 * i : 2 * i + 2], table.schema, model=copy.deepcopy(model)) for i in range(4)]
    coefficients = np.array([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.0]])
    opened = means(coefficients, np.stack([client.seen.values for client in clients]), clients[0].layout)
    found = disaggregate(coefficients, opened)
    alone = found.observation(3, opened=replace(clients[0], seen=opened[0], coefficients=(1, 1, 1, 1)))
    assert found.observation(0, opened=clients[0]) is None
    # Rounding of the sums is an error that the attack on records does not know of; its grid is some 1e-16 of the weights.
    result = spear(alone)
    assert score_rows(result.rows, rows[6:], schema=table.schema, tolerance=EXACT, baseline=np.full((2, 50), 99.0)).rows == 1.0
    assert len(result.rows) == 2


def drifting(*, rounds: int, clients: int, drift: float, everybody: bool, seed: int = 0) -> tuple[Disaggregation, np.ndarray, np.ndarray]:
    """Clients whose updates change from round to round around their own mean; the means, and those of the sums."""
    rng = np.random.default_rng(seed)
    own = rng.normal(size=(clients, 500))
    present = np.ones((rounds, clients)) if everybody else (rng.random((rounds, clients)) < 0.6).astype(float)
    present[present.sum(axis=1) < 3] = 1.0
    opened = means(present, own + drift * rng.normal(size=(rounds, clients, 500)))
    return disaggregate(present, opened), own, np.mean([vector.values for vector in opened], axis=0)


def test_many_rounds_with_changing_participants_tell_the_clients_apart() -> None:
    found, own, mean = drifting(rounds=40, clients=6, drift=0.5, everybody=False)
    assert all(update is not None for update in found.updates)
    similar = [cosine(update.values, mine) for update, mine in zip(found.updates, own, strict=True)]
    # Without solving, the sums' own mean is all that is known of anybody.
    guessed = [cosine(mean, mine) for mine in own]
    assert min(similar) > 0.9
    assert max(guessed) < 0.6
    errors = [np.std(update.values - mine) for update, mine in zip(found.updates, own, strict=True)]
    np.testing.assert_allclose(errors, found.standard_errors, rtol=0.25)


def test_where_all_take_part_in_every_round_nobody_is_told_apart() -> None:
    found, _, _ = drifting(rounds=40, clients=6, drift=0.5, everybody=True)
    assert found.updates == (None,) * 6
    assert np.isinf(found.standard_errors).all()
    assert not found.confidence.any()
    assert np.isinf(disaggregation_risk(np.ones((40, 6)))).all()


def test_confidence_falls_with_what_changes_between_rounds() -> None:
    confidences = [drifting(rounds=40, clients=6, drift=drift, everybody=False)[0].confidence.mean() for drift in (0.1, 1.0, 30.0)]
    assert confidences == sorted(confidences, reverse=True)
    assert confidences[0] > 0.9
    assert confidences[2] < 0.1
    exactly_solved = disaggregate(np.eye(2), means(np.eye(2), np.ones((2, 500))))
    assert not exactly_solved.confidence.any()
    assert np.isnan(exactly_solved.standard_errors).all()


def test_the_risk_is_the_factor_of_the_error_and_known_beforehand() -> None:
    rng = np.random.default_rng(0)
    coefficients = np.array([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0], [0.0, 1.0, 1.0], [1.0, 0.0, 1.0]])
    risk = disaggregation_risk(coefficients)
    noise = [disaggregate(coefficients, means_with_noise(coefficients, rng)) for _ in range(20)]
    measured = [np.std([found.updates[client].values for found in noise]) for client in range(3)]
    np.testing.assert_allclose(measured, risk, rtol=0.1)
    assert disaggregation_risk(np.eye(3)).tolist() == [1.0, 1.0, 1.0]


def means_with_noise(coefficients: np.ndarray, rng: np.random.Generator) -> list[PlainVector]:
    return [PlainVector(layout=LAYOUT, values=rng.normal(size=500)) for _ in coefficients]


def test_openings_that_do_not_fit_are_refused() -> None:
    vector = PlainVector(layout=LAYOUT, values=np.zeros(500))
    other = PlainVector(layout=Layout(names=("bias",), shapes=((500,),)), values=np.zeros(500))
    with pytest.raises(ValueError, match="one opening for each row"):
        disaggregate(np.ones((2, 3)), [vector])
    with pytest.raises(LayoutMismatchError, match="openings of one layout"):
        disaggregate(np.ones((2, 3)), [vector, other])
    for broken in (np.zeros((1, 3)), np.zeros((0, 3)), -np.ones((1, 3)), np.full((1, 3), np.nan), np.ones(3)):
        with pytest.raises(ValueError, match="expected"):
            disaggregation_risk(broken)
