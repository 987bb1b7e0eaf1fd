"""Invented mobile-money transactions in PaySim's columns, for demos and tests that may not wait for a download.

No real data and no other simulator stand behind them: each row is drawn from the constants below, there are no accounts that
live on from row to row, and a score reached here says nothing about a score on PaySim. What they share with PaySim is what
a pipeline has to cope with: the types and their mix, log-normal sums, a daily rhythm, rare frauds in two legs, and
balances that give the fraud away in part. At 60,000 rows with 1 % frauds a small MLP reaches an average precision of about 0.75
on the features `PRE` and 0.24 on `NOBAL`; guessing reaches 0.01. Public.
"""

import math

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from privfed.data.paysim import TYPES, typed_table

DAYS = 31
"""Length of the invented log; `step` runs from 0 to 24 * DAYS - 1."""

LIMIT = 1e7
"""Largest amount of one transaction."""

# Per type, in the order of TYPES: share of the rows, median amount, spread of its logarithm, share of empty paying accounts.
_MIX = np.array([0.22, 0.35, 0.01, 0.34, 0.08])
_MEDIAN = np.array([120e3, 130e3, 3e3, 8e3, 300e3])
_SPREAD = np.array([0.9, 1.1, 1.0, 0.9, 1.3])
_EMPTY = np.array([0.05, 0.30, 0.10, 0.35, 0.30])

_CASH_IN, _CASH_OUT, _PAYMENT, _TRANSFER = (TYPES.index(kind) for kind in ("CASH_IN", "CASH_OUT", "PAYMENT", "TRANSFER"))

# Honest people close accounts too: without them "takes the whole balance" would be a perfect fraud rule.
_CLOSING = 0.006
# Not every thief takes everything, and some use accounts that hold money already.
_TAKES_ALL = 0.7
_FRESH_MULE = 0.85

# Noon and evening peaks over a quiet night. Thieves do not sleep, so the hour tells a little.
_HOURS = np.arange(24)
_RHYTHM = 0.1 + np.exp(-(((_HOURS - 12) / 3.5) ** 2)) + 1.2 * np.exp(-(((_HOURS - 18.5) / 2.5) ** 2))
_RHYTHM = _RHYTHM / _RHYTHM.sum()


def generate_transactions(*, rows: int, fraud_rate: float = 0.003, rng: np.random.Generator) -> pd.DataFrame:
    """A table as `load_paysim` returns it, ordered by step, with exactly round(rows * fraud_rate) frauds.

    A fraud is a TRANSFER out of a victim's account and the CASH_OUT of the same amount in the same hour; if the number of
    frauds is odd, one of them is a CASH_OUT alone. The same generator state gives the same table.

    Args:
        rows: Number of rows, at least 1.
        fraud_rate: Share of the rows that are frauds, from 0 to 0.5. PaySim's is 0.0013; the default is a little more, so that
            small demos contain some.
        rng: Source of everything.

    Raises:
        ValueError: If rows or fraud_rate is out of range.

    Example:
        >>> table = generate_transactions(rows=1000, fraud_rate=0.02, rng=np.random.default_rng(1))
        >>> len(table), int(table["isFraud"].sum()), table["group"].nunique()
        (1000, 20, 990)
    """
    if rows < 1:
        raise ValueError(f"expected rows >= 1, got {rows}")
    if not 0 <= fraud_rate <= 0.5:
        raise ValueError(f"expected fraud_rate from 0 to 0.5, got {fraud_rate}")
    frauds = round(rows * fraud_rate)
    honest, thieves = _honest(rows - frauds, rng), _frauds(frauds, rng)
    columns = {name: np.concatenate([honest[name], thieves[name]]) for name in honest}
    order = np.lexsort((columns.pop("order"), columns["step"]))
    columns = {name: values[order] for name, values in columns.items()}
    return typed_table(columns | {"type": np.array(TYPES)[columns["type"].astype(np.intp)]})


def _honest(count: int, rng: np.random.Generator) -> dict[str, NDArray[np.generic]]:
    kind = rng.choice(len(TYPES), size=count, p=_MIX)
    amount = _cents(np.clip(_MEDIAN[kind] * np.exp(_SPREAD[kind] * rng.standard_normal(count)), 0.01, LIMIT))
    payer = np.where(rng.random(count) < _EMPTY[kind], 0.0, _wealth(count, rng))
    closing = np.isin(kind, [_CASH_OUT, _TRANSFER]) & (rng.random(count) < _CLOSING)
    payer = np.where(closing, amount, payer)
    payee = np.where(rng.random(count) < 0.15, 0.0, _wealth(count, rng))
    payee = np.where(kind == _PAYMENT, 0.0, payee)  # merchants' balances are not in the log
    inward = np.where(kind == _CASH_IN, 1.0, -1.0)
    return {
        "step": 24 * rng.integers(DAYS, size=count) + rng.choice(24, size=count, p=_RHYTHM),
        "type": kind,
        "amount": amount,
        "oldbalanceOrg": payer,
        "newbalanceOrig": _cents(np.maximum(payer + inward * amount, 0.0)),
        "oldbalanceDest": payee,
        "newbalanceDest": np.where(kind == _PAYMENT, 0.0, _cents(np.maximum(payee - inward * amount, 0.0))),
        "isFraud": np.zeros(count),
        "order": rng.random(count),
    }


def _frauds(count: int, rng: np.random.Generator) -> dict[str, NDArray[np.generic]]:
    """Both legs of each fraud, the TRANSFERs first; of an odd count the last TRANSFER is missing."""
    thefts = math.ceil(count / 2)
    victim = _cents(1e6 * np.exp(1.3 * rng.standard_normal(thefts)) + 1)
    taken = np.where(rng.random(thefts) < _TAKES_ALL, 1.0, rng.beta(4, 2, size=thefts))
    amount = np.clip(_cents(victim * taken), 0.01, LIMIT)
    mule = np.where(rng.random(thefts) < _FRESH_MULE, 0.0, _wealth(thefts, rng))
    filled = _cents(mule + amount)
    agent = np.where(rng.random(thefts) < 0.15, 0.0, _wealth(thefts, rng))
    step = rng.integers(24 * DAYS, size=thefts)
    order = rng.random(thefts)
    legs = {
        "step": (step, step),
        "type": (np.full(thefts, _TRANSFER), np.full(thefts, _CASH_OUT)),
        "amount": (amount, amount),
        "oldbalanceOrg": (victim, filled),
        "newbalanceOrig": (_cents(victim - amount), mule),
        "oldbalanceDest": (mule, agent),
        "newbalanceDest": (filled, _cents(agent + amount)),
        "isFraud": (np.ones(thefts), np.ones(thefts)),
        "order": (order, np.nextafter(order, 2)),  # the CASH_OUT right after its TRANSFER
    }
    return {name: np.concatenate([transfer[: count // 2], cash_out]) for name, (transfer, cash_out) in legs.items()}


def _wealth(count: int, rng: np.random.Generator) -> NDArray[np.float64]:
    return _cents(60e3 * np.exp(1.8 * rng.standard_normal(count)))


def _cents(money: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.round(money, 2)
