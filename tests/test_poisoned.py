"""What one client that lies could make of a round, as an audit rehearses it."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from privfed.aggregation.coordinatewise import CoordinateMedian, TrimmedMean
from privfed.aggregation.robust import FLTrust, NormBound
from privfed.aggregation.rules import MultiKrum
from privfed.agreement import Validator
from privfed.audit.poisoned import HONEST, Poisoned, rehearse_poisoning
from privfed.consortium import Consortium, Plaintext
from privfed.he.product_params import ProductParams
from privfed.policy import OpeningPolicy
from privfed.training.mechanism import NonPrivate
from tests.consortia import PRIVATE, SCHEMA, consortium, network

Make = Callable[..., Consortium]
# Enough records for honest updates to be alike.
OPEN = NonPrivate(learning_rate=0.5, batch_size=200, steps=3, seed=0)


@pytest.fixture
def make(tmp_path: Any) -> Iterator[Make]:
    with ExitStack() as stack:
        yield lambda **options: consortium(stack, tmp_path, **({"training": OPEN, "count": 7, "keys": Plaintext()} | options))


def rehearsed(given: Consortium, seed: int = 0) -> dict[str, Poisoned]:
    return {found.attack: found for found in rehearse_poisoning(given, network(), schema=SCHEMA, rng=np.random.default_rng(seed))}


LONGEST = "the same, as long as the encoding takes it"
TURNED = "the mean of the others, turned round"


def test_an_honest_client_comes_first_and_moves_a_mean_by_little(make: Make) -> None:
    found = rehearsed(make())
    assert next(iter(found)) == HONEST
    assert found[HONEST].moved < 0.3
    assert found[HONEST].cosine > 0.9
    assert found[HONEST].share == pytest.approx(1 / 7)


def test_under_a_mean_one_client_undoes_the_round_and_under_a_robust_rule_it_does_not(make: Make) -> None:
    mean = rehearsed(make())
    # One of seven that turns the mean of the others round takes two sevenths of it away.
    assert mean[TURNED].moved == pytest.approx(2 / 7, abs=0.15)
    assert mean[LONGEST].moved > 3
    assert mean[LONGEST].cosine < 0
    for rule in (MultiKrum(byzantine=1, keep=5), TrimmedMean(byzantine=1), CoordinateMedian()):
        robust = rehearsed(make(rule=rule))
        assert robust[LONGEST].held
        assert robust[LONGEST].moved < 0.6
        assert robust[LONGEST].cosine > 0.7


def test_a_bound_on_norms_bounds_what_one_client_moves(make: Make) -> None:
    found = rehearsed(make(rule=NormBound(max_norm=0.05)))
    # Everybody is cut to the bound: two sevenths, as if it were as long as the others.
    assert found[LONGEST].moved < 0.6
    assert found[LONGEST].share < 0.1


def test_the_reference_is_no_update_and_is_not_attacked(make: Make) -> None:
    validator = Validator(name="bank_0", commitment=bytes(32), public=True)
    found = rehearsed(make(rule=FLTrust(), validator=validator))
    assert found[LONGEST].share == 0.0
    assert found[LONGEST].moved < 0.6


def test_what_an_encrypted_round_would_open_is_rehearsed_for_its_parameters(make: Make) -> None:
    found = rehearsed(make(rule=MultiKrum(byzantine=1, keep=5), params=ProductParams.exact(bound=2.0)))
    assert found[LONGEST].held
    assert found[LONGEST].share == 0.0


def test_a_round_that_a_policy_stops_is_told(make: Make) -> None:
    # Nobody who is honest is shortened, so all seven weigh alike. The liar is, and then they are 6.4 effective clients.
    rule = NormBound(max_norm=10.0)
    policy = OpeningPolicy(min_effective_clients=6.5)
    found = rehearsed(make(rule=rule, policy=policy))
    assert found[HONEST].held
    assert not found[LONGEST].held
    assert found[LONGEST].moved == 1.0
    assert "the round is skipped" in found[LONGEST].sentence()


def test_the_heaviest_client_is_the_one_that_lies(make: Make) -> None:
    even = make()
    heavy = replace(even, clients=[replace(client, weight=3 if client.name == "bank_4" else 1) for client in even.clients])
    assert rehearsed(heavy)[HONEST].share == pytest.approx(3 / 9)
    assert rehearsed(heavy)[TURNED].moved > rehearsed(even)[TURNED].moved


def test_noise_and_clipping_are_as_declared_and_no_ledger_is_touched(make: Make) -> None:
    given = make(training=PRIVATE, count=4)
    spent = [client.ledger.spent() for client in given.clients if client.ledger is not None]
    found = rehearsed(given)
    assert [client.ledger.spent() for client in given.clients if client.ledger is not None] == spent
    assert len(spent) == 4
    assert all(math.isfinite(poisoned.moved) for poisoned in found.values())


def test_where_no_round_of_honest_clients_is_held_nothing_is_told(make: Make) -> None:
    assert rehearsed(make(count=3, policy=OpeningPolicy(min_clients=4))) == {}
    assert rehearsed(make(count=4, rule=MultiKrum(byzantine=1, keep=3))) == {}
    assert rehearsed(make(count=3, rule=TrimmedMean(byzantine=2))) == {}


def test_the_numbers_are_there_as_json() -> None:
    poisoned = Poisoned(attack="x", held=True, share=0.25, moved=1.5, cosine=-0.5)
    assert poisoned.to_json() == {"attack": "x", "held": True, "share": 0.25, "moved": 1.5, "cosine": -0.5}
    assert poisoned.sentence() == "the model is off by 150% of what an honest round moves it; the client's share is 25%"
