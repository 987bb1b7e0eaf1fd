import json
import math
from dataclasses import replace

import numpy as np
import pytest

from privfed.he.params import CkksParams
from privfed.history import History, RoundSummary
from privfed.policy import OpeningPolicy
from privfed.round_record import RoundRecord
from privfed.training.mechanism import DpSgd, NonPrivate
from privfed.update import Layout, PlainVector

OPEN = NonPrivate(learning_rate=0.1, batch_size=8, steps=1, seed=0)
NOISY = DpSgd(noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.1, expected_batch_size=8, steps=1, learning_rate=0.1)


def a_round(**coefficients: int) -> RoundSummary:
    record = RoundRecord(
        round=0,
        selected=tuple(coefficients),
        refused=(),
        silent={},
        history="",
        coefficients=coefficients,
        bytes_up={},
        bytes_down={},
        seconds={},
    )
    return RoundSummary(record=record, epsilon=dict.fromkeys(coefficients, math.inf), grid_error_max=None, evaluation=None)


def a_history(**changes: object) -> History:
    values = PlainVector(layout=Layout(names=("w",), shapes=((2,),)), values=np.zeros(2))
    facts = {
        "mode": "Plaintext",
        "rule": "FedAvg",
        "policy": OpeningPolicy(),
        "params": CkksParams.standard(),
        "training": {"a": OPEN, "b": NOISY},
        "delta": {},
        "budget": {},
        "private": False,
        "initial": values,
        "model": values,
        "rounds": (a_round(a=1, b=1),),
    }
    return History(**(facts | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"rounds": ()}, "at least one client and one round, got 2 and 0"),
        ({"training": {}}, "at least one client and one round, got 0 and 1"),
        ({"rounds": (a_round(a=1),)}, "got it of some"),
        ({"private": True}, "no claim of differential privacy where a client trains without it"),
    ],
)
def test_a_history_that_cannot_be_reported_on_is_refused(changes: dict[str, object], match: str) -> None:
    assert a_history().epsilon == {"a": math.inf, "b": math.inf}
    assert a_history(training={"a": NOISY, "b": NOISY}, private=True).private
    with pytest.raises(ValueError, match=match):
        a_history(**changes)


def test_a_sum_of_nothing_and_an_epsilon_below_zero_are_refused() -> None:
    for coefficients in ({}, {"a": 0, "b": 0}, {"a": 3, "b": -1}):
        with pytest.raises(ValueError, match="a sum with positive coefficients in round 1"):
            a_round(**coefficients)
    assert a_round(a=1, b=0).record.coefficients == {"a": 1, "b": 0}
    for epsilon in (-1.0, math.nan):
        with pytest.raises(ValueError, match="every epsilon after round 1"):
            replace(a_round(a=1), epsilon={"a": epsilon})


def test_a_round_comes_back_from_json_as_it_was() -> None:
    summary = a_round(a=1, b=0)
    assert RoundSummary.from_json(json.loads(json.dumps(summary.to_json()))).to_json() == summary.to_json()


def test_a_round_shows_itself_in_a_few_words_and_without_its_numbers() -> None:
    clients = [f"bank_{number}" for number in range(50)]
    record = RoundRecord(
        round=3,
        selected=tuple(clients),
        refused=(),
        silent={},
        history="ab" * 32,
        coefficients=dict.fromkeys(clients, 1),
        bytes_up=dict.fromkeys(clients, 30_000),
        bytes_down=dict.fromkeys(clients, 30_000),
        seconds={"train": 0.5},
    )
    summary = RoundSummary(record=record, epsilon=dict.fromkeys(clients, 1.5), grid_error_max=0, evaluation=None)
    assert repr(summary) == "RoundSummary(round=3, participants=50)"
