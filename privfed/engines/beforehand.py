"""What is refused before the first round of a run: nothing is charged or trained for a run that cannot be finished."""

from collections.abc import Mapping

import numpy as np
from torch import nn

from privfed.client import Trainer
from privfed.consortium import Consortium
from privfed.data.samples import Samples
from privfed.errors import BudgetExceededError
from privfed.training.model import scores
from privfed.update import PlainVector


def check_evaluation(evaluation: object, consortium: Consortium) -> None:
    """Refuses records to evaluate on that a model of the consortium could not score.

    Raises:
        TypeError: If they are no `Samples`.
        ValueError: If their columns are not those of the clients, or a label is neither 0 nor 1.
    """
    if evaluation is None:
        return
    if not isinstance(evaluation, Samples):
        raise TypeError(f"expected evaluation to be Samples, got {type(evaluation).__name__}; nothing was trained")
    client = consortium.clients[0]
    if evaluation.columns != client.data.columns:
        raise ValueError(
            f"expected evaluation to have the columns of {client.name!r}, {_some(client.data.columns)}, got {_some(evaluation.columns)}; "
            "nothing was trained"
        )
    if evaluation.classes > 2:
        raise ValueError(
            "expected evaluation to have labels of 0 and 1, got others; nothing was trained; make them so, or leave evaluation out and "
            "score history.model"
        )


def check_outputs(model: nn.Module, start: PlainVector, evaluation: Samples | None) -> None:
    """Refuses a model of several outputs where there are records to evaluate it on: the metrics take one score per record.

    Raises:
        ValueError: If it has several.
    """
    if evaluation is None:
        return
    outputs = scores(model, start, evaluation.features[:1])
    if outputs.ndim != 1:
        raise ValueError(
            f"expected a model with one output per record where evaluation is given, got {outputs.shape[1:]}; nothing was trained; leave "
            "evaluation out and score history.model"
        )


def check_rounds(rounds: object) -> None:
    """Refuses what is no number of rounds.

    Raises:
        TypeError: If it is no whole number.
        ValueError: If it is below 1.
    """
    if not isinstance(rounds, int | np.integer) or isinstance(rounds, bool):
        raise TypeError(f"expected rounds to be a whole number, got {type(rounds).__name__}; nothing was trained")
    if rounds < 1:
        raise ValueError(f"expected at least 1 round, got {rounds}")


def check_budgets(trainers: Mapping[str, Trainer], *, first: int, rounds: int, fewest: int, session: bytes | None) -> None:
    """Refuses rounds in all of which every client is to take part, if too few budgets cover them to the end.

    Single clients whose budgets end earlier are left out of the rounds that they do not cover, and the run goes on.

    Args:
        trainers: Of all clients, by name.
        first: The first round that is not held yet, from 0.
        rounds: Number of all rounds.
        fewest: Clients that policy and silo noise demand in each.
        session: Session of a run that is taken up again, in which the first round may be charged already; None if nothing was charged.

    Raises:
        BudgetExceededError: If fewer clients than that can pay for the last round. Nothing was charged or trained.
    """
    left = rounds - first
    short: dict[str, int] = {}
    for name, trainer in trainers.items():
        possible = trainer.rounds_possible()
        if possible is None:
            continue
        if session is not None and trainer.has_charged(session=session, round=first):
            possible += 1
        if possible < left:
            short[name] = possible
    if not short or len(trainers) - len(short) >= fewest:
        return
    which = f"{'the ' if first else ''}{_rounds(left)}" + (f" that {'is' if left == 1 else 'are'} left" if first else "")
    (name, possible), *others = short.items()
    words = "".join(f", that of {other} {number}" for other, number in others[:7])
    if len(others) > 7:
        words += f", and those of {len(others) - 7} others fewer than {left}"
    # With the clients in the order of what they can pay, the last one that the policy demands decides.
    most = sorted((short.get(client, left) for client in trainers), reverse=True)[: max(fewest, 1)][-1]
    advice = f"take at most {_rounds(first + most)}, or" if most else "take"
    raise BudgetExceededError(
        f"the budget of {name} covers {possible} of {which}{words}, and each needs {fewest} clients; nothing was trained; "
        f"{advice} training whose noise is made for all rounds, as DpSgd.for_budget does"
    )


def _rounds(number: int) -> str:
    return f"{number} round{'' if number == 1 else 's'}"


def _some(columns: tuple[str, ...]) -> str:
    return ", ".join(columns[:20]) + (", ..." if len(columns) > 20 else "")
