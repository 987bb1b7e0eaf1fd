import numpy as np
import pandas as pd
import pytest
from sklearn.compose import ColumnTransformer
from sklearn.exceptions import NotFittedError
from sklearn.preprocessing import MinMaxScaler, OneHotEncoder

from privfed.data.frames import samples_from_frame
from privfed.errors import UnsupportedDataError

TABLE = pd.DataFrame(
    {
        "amount": [10.0, 20.0, 40.0],
        "kind": ["cash", "card", "cash"],
        "customer": ["zoe", "ann", "zoe"],
        "fraud": [0, 1, 0],
    }
)
PUBLIC = pd.DataFrame({"amount": [0.0, 100.0], "kind": ["card", "cash"]})


def preprocessing() -> ColumnTransformer:
    return ColumnTransformer(
        [("range", MinMaxScaler(), ["amount"]), ("kind", OneHotEncoder(categories=[["card", "cash"]]), ["kind"])],
        verbose_feature_names_out=False,
    )


def test_numbers_are_taken_as_they_are_and_names_are_kept() -> None:
    samples = samples_from_frame(TABLE.drop(columns=["kind", "customer"]), label="fraud")
    assert samples.columns == ("amount",)
    assert samples.features.tolist() == [[10.0], [20.0], [40.0]]
    assert samples.labels.tolist() == [0, 1, 0]
    assert samples.groups is None


def test_a_fitted_transformer_is_applied_and_names_the_columns() -> None:
    samples = samples_from_frame(TABLE, label="fraud", group="customer", transformer=preprocessing().fit(PUBLIC))
    assert samples.columns == ("amount", "kind_card", "kind_cash")
    assert samples.features == pytest.approx(np.array([[0.1, 0, 1], [0.2, 1, 0], [0.4, 0, 1]]))
    assert samples.groups is not None
    assert samples.groups[0] == samples.groups[2] != samples.groups[1]


def test_sparse_results_are_taken() -> None:
    words = OneHotEncoder(categories=[["card", "cash"]], sparse_output=True).fit(PUBLIC[["kind"]])
    samples = samples_from_frame(TABLE[["kind", "fraud"]], label="fraud", transformer=words)
    assert samples.features.tolist() == [[0, 1], [1, 0], [0, 1]]


def test_a_transformer_is_never_fitted_on_a_clients_table() -> None:
    transformer = preprocessing()
    with pytest.raises(NotFittedError):
        samples_from_frame(TABLE, label="fraud", group="customer", transformer=transformer)
    fitted = preprocessing().fit(PUBLIC)
    samples_from_frame(TABLE, label="fraud", group="customer", transformer=fitted)
    assert fitted.named_transformers_["range"].data_max_ == [100.0]


def test_words_without_a_transformer_are_refused_by_name_and_without_values() -> None:
    with pytest.raises(UnsupportedDataError, match=r"\['kind', 'customer'\] are no numbers; nothing was kept") as refusal:
        samples_from_frame(TABLE, label="fraud")
    assert "zoe" not in str(refusal.value)


@pytest.mark.parametrize(
    ("table", "options", "match"),
    [
        (TABLE, {"label": "isFraud"}, r"it lacks \['isFraud'\]"),
        (TABLE, {"label": "fraud", "group": "account"}, r"it lacks \['account'\]"),
        (pd.DataFrame([[1, 2, 0]], columns=["a", "a", "y"]), {"label": "y"}, "every column of the table to have its own name"),
        (pd.DataFrame({"a": [1.0, np.nan], "y": [0, 1]}), {"label": "y"}, "finite features"),
        (pd.DataFrame({"a": [1.0, 2.0], "y": [0, None]}), {"label": "y"}, "rows without"),
        (pd.DataFrame({"a": [1.0, 2.0], "g": ["x", None], "y": [0, 1]}), {"label": "y", "group": "g"}, "rows without"),
        (pd.DataFrame({"a": [1.0, 2.0], "y": ["no", "yes"]}), {"label": "y"}, "in the label column 'y', got values of"),
    ],
)
def test_tables_that_are_none_are_refused(table: pd.DataFrame, options: dict[str, str], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        samples_from_frame(table, **options)


def test_labels_may_be_booleans_or_any_whole_numbers_and_the_refusal_of_others_prints_none() -> None:
    for labels in ([True, False], pd.array([1, 0], dtype="Int64"), np.array([1, 0], dtype=np.uint8)):
        assert samples_from_frame(pd.DataFrame({"a": [1.0, 2.0], "y": labels}), label="y").labels.tolist() == [1, 0]
    with pytest.raises(ValueError, match=r"got values of type float64; nothing was kept; make them") as refusal:
        samples_from_frame(pd.DataFrame({"a": [1.0, 2.0], "y": [417.0, 0.0]}), label="y")
    assert "417" not in str(refusal.value)


def test_something_else_than_a_table_is_refused() -> None:
    with pytest.raises(TypeError, match="pandas DataFrame, got list"):
        samples_from_frame([[1, 2]], label="y")  # pyright: ignore[reportArgumentType]


def test_missing_numbers_of_pandas_own_kinds_are_refused_too() -> None:
    table = pd.DataFrame({"a": pd.array([1, None], dtype="Int64"), "y": [0, 1]})
    with pytest.raises(ValueError, match="finite features"):
        samples_from_frame(table, label="y")
