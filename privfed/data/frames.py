"""pandas tables and scikit-learn preprocessing, into the records that training takes."""

from typing import Any, Protocol

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from sklearn.utils.validation import check_is_fitted

from privfed.data.samples import Samples
from privfed.errors import UnsupportedDataError


class Transformer(Protocol):
    """What scikit-learn's transformers have, `ColumnTransformer` and pipelines of them included."""

    def transform(self, X: pd.DataFrame) -> ArrayLike: ...  # noqa: N803 (scikit-learn's name)
    def get_feature_names_out(self) -> ArrayLike: ...


def samples_from_frame(frame: pd.DataFrame, *, label: str, group: str | None = None, transformer: Transformer | None = None) -> Samples:
    """One client's records from a pandas table.

    What the transformer learnt is part of the model that all clients share: fit it on public data, or make it of public ranges and
    categories. Fitted on a client's own table, it gives that table away, and no differential privacy accounts for it. It is only
    applied here, never fitted.

    Args:
        frame: One row per record. Private.
        label: Column with the class of each record, whole numbers from 0 (or booleans). With yes-or-no labels 1 (or True) is what the
            model looks for: a loss with a `positive_weight` and PR-AUC are about those records.
        group: Column that says whose each record is, of any kind; records of one group stay together. Left out, every record is alone.
        transformer: Fitted preprocessing of all other columns, for example a `ColumnTransformer`. Left out, they are taken as they
            are, and have to be numbers.

    Returns:
        The records; their columns are named as in the table, or as the transformer names them.

    Raises:
        TypeError: If `frame` is no pandas table.
        ValueError: If a column is missing or named twice, or the values are none that `Samples` takes.
        UnsupportedDataError: If a column is no number and there is no transformer.
        sklearn.exceptions.NotFittedError: If the transformer is not fitted.

    Example:
        >>> table = pd.DataFrame({"amount": [12.5, 80.0], "hour": [3, 17], "fraud": [0, 1], "account": ["a", "b"]})
        >>> samples_from_frame(table, label="fraud", group="account").columns
        ('amount', 'hour')
    """
    if not isinstance(frame, pd.DataFrame):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers without a type checker
        raise TypeError(f"expected frame to be a pandas DataFrame, got {type(frame).__name__}")
    special = [label] if group is None else [label, group]
    if frame.columns.has_duplicates:
        raise ValueError("expected every column of the table to have its own name; nothing was kept")
    if missing := [name for name in special if name not in frame.columns]:
        raise ValueError(f"expected the table to have the columns {special}, it lacks {missing}; nothing was kept")
    rest = frame.drop(columns=special)
    if frame[special].isna().to_numpy().any():
        raise ValueError("expected a class and a group in every row, got rows without; nothing was kept; leave them out or fill them in")
    labels = frame[label]
    if not (pd.api.types.is_bool_dtype(labels) or pd.api.types.is_integer_dtype(labels)):
        raise ValueError(
            f"expected whole numbers from 0, or booleans, in the label column {label!r}, got values of type {labels.dtype}; nothing was "
            f"kept; make them, for example with table[{label!r}] == ... for what the model shall look for, or with .astype(int)"
        )
    return Samples(
        features=_numbers(rest) if transformer is None else _transformed(rest, transformer),
        labels=labels.to_numpy(),
        groups=None if group is None else pd.factorize(frame[group])[0].astype(np.int64),
        columns=tuple(str(name) for name in (rest.columns if transformer is None else np.asarray(transformer.get_feature_names_out()))),
    )


def _numbers(table: pd.DataFrame) -> NDArray[Any]:
    if others := [str(name) for name in table.columns if not pd.api.types.is_numeric_dtype(table[name])]:
        raise UnsupportedDataError(
            f"the columns {others} are no numbers; nothing was kept; leave them out, or hand over a fitted transformer, for example "
            "ColumnTransformer([('words', OneHotEncoder(categories=...), [...])], remainder='passthrough')"
        )
    return table.to_numpy(dtype=np.float64, na_value=np.nan)


def _transformed(table: pd.DataFrame, transformer: Transformer) -> NDArray[Any]:
    check_is_fitted(transformer)
    result = transformer.transform(table)
    dense = result.toarray() if hasattr(result, "toarray") else result  # pyright: ignore[reportAttributeAccessIssue] -- of scipy
    return np.asarray(dense, dtype=np.float64)
