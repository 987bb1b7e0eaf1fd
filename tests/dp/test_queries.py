import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats
from sklearn.metrics import average_precision_score

from privfed.data.divergence import kl_divergence, total_variation
from privfed.dp import noise
from privfed.dp.accounting import epsilon
from privfed.dp.ledger import Ledger
from privfed.dp.mechanism import Budget, GaussianRelease, Unit
from privfed.dp.queries import NoisyCounts, Queries, ScoreHistogram
from privfed.errors import BudgetExceededError

NEVER, SURELY = 1e-7, 1e-30
RECORDS = 5000
RNG = np.random.default_rng(2)
LABELS = (RNG.random(RECORDS) < 0.05).astype(int)
SCORES = np.clip(RNG.normal(0.3 + 0.4 * LABELS, 0.15), 0, 1)
AMOUNTS = RNG.lognormal(3, 1, RECORDS)
EDGES = np.linspace(0.05, 0.95, 19)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger.open(tmp_path / "ledger", population="bank_a", budget=Budget.unlimited(delta=1e-6)) as opened:
        yield opened


@pytest.fixture
def fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    monkeypatch.setattr(noise, "_words", lambda count: rng.integers(0, 2**64, count, np.uint64))


def histogram(queries: Queries, values: Any, noise_multiplier: float = 5.0, **changes: Any) -> NoisyCounts:
    return queries.histogram(values, **({"bins": 2, "noise_multiplier": noise_multiplier, "purpose": "labels"} | changes))


def score_histogram(queries: Queries, values: Any, noise_multiplier: float = 5.0, **changes: Any) -> ScoreHistogram:
    usual: dict[str, Any] = {"edges": EDGES, "noise_multiplier": noise_multiplier, "purpose": "scores"}
    return queries.score_histogram(LABELS, values, **(usual | changes))


def quantile(queries: Queries, values: Any, noise_multiplier: float = 5.0, **changes: Any) -> float:
    usual: dict[str, Any] = {"probability": 0.5, "lower": 0.0, "step": 0.5, "points": 1000, "purpose": "median"}
    return queries.quantile(values, **(usual | {"noise_multiplier": noise_multiplier} | changes))


def means(queries: Queries, values: Any, noise_multiplier: float = 5.0, **changes: Any) -> NDArray[np.float64]:
    usual: dict[str, Any] = {"lower": [0.0, -1.0], "upper": [100.0, 1.0], "step": 0.25, "purpose": "means"}
    return queries.means(values, **(usual | {"noise_multiplier": noise_multiplier} | changes))


TABLE = np.column_stack([AMOUNTS, SCORES])
QUERIES: dict[str, tuple[Callable[..., Any], Any, int]] = {
    "histogram": (histogram, LABELS, 1),
    "score_histogram": (score_histogram, SCORES, 1),
    "quantile": (quantile, AMOUNTS, 10),
    "means": (means, TABLE, 1),
}


def test_every_query_is_tested_here() -> None:
    public = {name for name, _ in inspect.getmembers(Queries, inspect.isfunction) if not name.startswith("_")}
    assert public == set(QUERIES)


# --- paid for before the data are touched -------------------------------------------------------------------------------------------


class Watched:
    """Data that note what was in the ledger when they were first looked at."""

    def __init__(self, values: Any, ledger: Ledger) -> None:
        self.values, self.ledger = np.asarray(values), ledger
        self.charged: list[int] = []

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        self.charged.append(len(self.ledger.events()))
        return self.values.astype(dtype)


@pytest.mark.parametrize("name", QUERIES)
def test_every_query_is_charged_before_it_touches_the_data_and_committed_after(ledger: Ledger, name: str) -> None:
    ask, values, releases = QUERIES[name]
    watched = Watched(values, ledger)
    ask(Queries(ledger=ledger), watched, noise_multiplier=7.0)
    assert watched.charged
    assert set(watched.charged) == {1}
    assert ledger.events() == (GaussianRelease(noise_multiplier=7.0, count=releases),)
    assert [row.kind for row in ledger.rows()] == ["open", "reserve", "commit"]
    assert "query: " in ledger.rows()[1].text
    assert ledger.spent() == epsilon([GaussianRelease(noise_multiplier=7.0, count=releases)], delta=1e-6)


@pytest.mark.parametrize("name", QUERIES)
def test_a_query_over_budget_does_not_touch_the_data(tmp_path: Path, name: str) -> None:
    ask, values, _ = QUERIES[name]
    with Ledger.open(tmp_path / "ledger", population="a", budget=Budget(epsilon=0.1, delta=1e-6)) as ledger:
        watched = Watched(values, ledger)
        with pytest.raises(BudgetExceededError, match="nothing was spent"):
            ask(Queries(ledger=ledger), watched, noise_multiplier=1.0)
        assert watched.charged == []
        assert ledger.events() == ()


@pytest.mark.parametrize("name", QUERIES)
def test_a_query_that_fails_after_it_was_charged_stays_charged(ledger: Ledger, name: str) -> None:
    ask, _, _ = QUERIES[name]

    class Broken:
        def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="gone"):
        ask(Queries(ledger=ledger), Broken())
    assert len(ledger.events()) == 1


def test_the_data_of_a_query_are_recognised(ledger: Ledger) -> None:
    fingerprint = ledger.fingerprint(LABELS)
    queries = Queries(ledger=ledger, fingerprint=fingerprint)
    histogram(queries, LABELS)
    charged = ledger.rows()[1].reservation
    assert charged is not None
    assert charged.fingerprint == fingerprint
    assert fingerprint.hex() not in repr(queries)


# --- on the declared grid ------------------------------------------------------------------------------------------------------------


ANY_NUMBERS = st.lists(st.floats(), max_size=20)


@given(values=ANY_NUMBERS, noise_multiplier=st.floats(1e-3, 1e3))
@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_answer_is_off_its_grid_and_no_warning_depends_on_the_data(ledger: Ledger, values: list[float], noise_multiplier: float) -> None:
    queries = Queries(ledger=ledger)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        counts = histogram(queries, values, noise_multiplier, bins=3)
        point = quantile(queries, values, noise_multiplier, lower=-2.0, step=0.125, points=100)
        table = np.array(values, float)[:, None] * np.ones(2)
        found = means(queries, table, noise_multiplier)
    assert counts.counts.dtype == np.int64
    assert counts.counts.shape == (3,)
    steps = (point + 2.0) / 0.125
    assert steps == round(steps)
    assert 0 <= steps < 100
    assert ((found - [0.0, -1.0]) / 0.25 == np.rint((found - [0.0, -1.0]) / 0.25)).all()
    assert (found >= [0.0, -1.0]).all()
    assert (found <= [100.0, 1.0]).all()


def test_score_counts_are_whole_and_their_edges_are_those_declared(ledger: Ledger) -> None:
    found = score_histogram(Queries(ledger=ledger), np.where(np.arange(RECORDS) % 2, np.nan, np.inf))
    assert found.edges == tuple(EDGES)
    assert found.positives.counts.dtype == found.negatives.counts.dtype == np.int64
    assert found.positives.counts.shape == found.negatives.counts.shape == (20,)
    # NaN is the lowest score, infinity the highest.
    total = found.positives.counts + found.negatives.counts
    assert total[0] == pytest.approx(RECORDS / 2, abs=60)
    assert total[-1] == pytest.approx(RECORDS / 2, abs=60)
    assert abs(total[1:-1]).max() < 60


# --- the noise ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fixed")
@pytest.mark.parametrize("name", ["histogram", "score_histogram"])
def test_counts_carry_the_noise_that_was_charged_and_not_two_thirds_or_three_halves_of_it(ledger: Ledger, name: str) -> None:
    queries = Queries(ledger=ledger)
    sample: list[int] = []
    if name == "histogram":
        sample = histogram(queries, [], 40.0, bins=4000).counts.tolist()
    else:
        edges = np.arange(2000.0)
        empty = queries.score_histogram([], [], edges=edges, noise_multiplier=40.0, purpose="nobody")
        sample = [*empty.positives.counts.tolist(), *empty.negatives.counts.tolist()]
    scaled = (np.array(sample) + np.random.default_rng(1).uniform(-0.5, 0.5, len(sample))) / 40  # what rounding took
    assert stats.kstest(scaled, "norm").pvalue > NEVER
    for wrong in (2 / 3, 3 / 2):
        assert stats.kstest(scaled, "norm", args=(0, wrong)).pvalue < SURELY


@pytest.mark.usefixtures("fixed")
def test_means_carry_noise_for_all_sums_and_the_count_together(ledger: Ledger) -> None:
    many = np.ones(2000)
    found = Queries(ledger=ledger).means(np.zeros((1000, 2000)), lower=-many, upper=many, step=1e-9, noise_multiplier=0.05, purpose="zeros")
    scaled = found / (0.05 * math.sqrt(2001) / 1000)  # the noise on the count matters little where the sum is small
    assert stats.kstest(scaled, "norm").pvalue > NEVER
    for wrong in (2 / 3, 3 / 2):
        assert stats.kstest(scaled, "norm", args=(0, wrong)).pvalue < 1e-15


@pytest.mark.parametrize(("probability", "share"), [(0.5, 0.5), (0.9, 0.9), (0.1, 0.1)])
def test_a_quantile_carries_noise_for_the_largest_change_of_one_record(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, probability: float, share: float
) -> None:
    """Twenty records above the lower of two points weigh 20 p against it; noise of 20 times max(p, 1 - p) outweighs them or not."""
    from privfed.dp import queries as module

    for factor, expected in ((0.99, 1.0), (1.01, 0.0)):
        deviations = factor * share / max(probability, 1 - probability)
        monkeypatch.setattr(module, "standard_normal", lambda count, size=deviations: np.full(count, size))
        found = quantile(Queries(ledger=ledger), [5.0] * 20, 20.0, probability=probability, lower=0.0, step=1.0, points=2)
        assert found == expected


def test_one_record_changes_what_is_noised_by_no_more_than_the_sensitivity(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the noise switched off and on a fine grid: a histogram by 1, sums and count together by sqrt(columns + 1)."""
    from privfed.dp import queries as module

    monkeypatch.setattr(module, "standard_normal", np.zeros)
    queries = Queries(ledger=ledger)
    for more in ([0], [1]):
        change = histogram(queries, [*LABELS, *more]).counts - histogram(queries, LABELS).counts
        assert np.linalg.norm(change) == 1
    for row in ([1e300, 1e300], [-math.inf, math.nan], [50.0, 0.0]):
        without = means(queries, TABLE, step=1e-9) * RECORDS
        with_row = means(queries, np.vstack([TABLE, row]), step=1e-9) * (RECORDS + 1)
        assert (np.abs(with_row - without) <= [100 + 1e-3, 1 + 1e-3]).all()


# --- what the answers say -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def precise(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> Queries:
    """Queries without noise, to compare what is computed from them."""
    from privfed.dp import queries as module

    monkeypatch.setattr(module, "standard_normal", np.zeros)
    return Queries(ledger=ledger)


def test_metrics_from_histograms_are_those_of_the_binned_scores(precise: Queries) -> None:
    found = score_histogram(precise, SCORES)
    binned = np.searchsorted(EDGES, SCORES, side="right")
    assert found.average_precision() == pytest.approx(average_precision_score(LABELS, binned), abs=1e-12)
    from privfed.training.evaluate import recall_at_fpr

    for fpr in (0.0, 0.01, 0.1, 1.0):
        assert found.recall_at_fpr(fpr=fpr) == pytest.approx(recall_at_fpr(LABELS, binned, fpr=fpr), abs=1e-12)


def test_metrics_with_noise_are_close_and_in_their_range(ledger: Ledger) -> None:
    found = score_histogram(Queries(ledger=ledger), SCORES, 3.0)
    # Over 400 draws the noise takes 0.065 from it, with a deviation of 0.041: six of these on top.
    assert found.average_precision() == pytest.approx(average_precision_score(LABELS, SCORES), abs=0.065 + 6 * 0.041)
    for empty in (score_histogram(Queries(ledger=ledger), np.full(RECORDS, np.nan), 500.0) for _ in range(5)):
        assert math.isnan(empty.average_precision()) or 0 <= empty.average_precision() <= 1
        assert math.isnan(empty.recall_at_fpr(fpr=0.1)) or 0 <= empty.recall_at_fpr(fpr=0.1) <= 1


def test_metrics_without_positives_or_negatives_are_undefined() -> None:
    none, some = (NoisyCounts(counts=np.array(counts), noise=1.0) for counts in ([-3, -1], [5, 2]))
    assert math.isnan(ScoreHistogram(edges=(0.5,), positives=none, negatives=some).average_precision())
    for positives, negatives in ((none, some), (some, none)):
        assert math.isnan(ScoreHistogram(edges=(0.5,), positives=positives, negatives=negatives).recall_at_fpr(fpr=0.5))
    with pytest.raises(ValueError, match="fpr"):
        ScoreHistogram(edges=(0.5,), positives=some, negatives=some).recall_at_fpr(fpr=1.5)


def test_divergence_between_clients_follows_from_their_noisy_labels(precise: Queries) -> None:
    one = histogram(precise, LABELS).shares
    other = histogram(precise, np.arange(1000) % 2).shares
    assert one == pytest.approx([1 - LABELS.mean(), LABELS.mean()])
    assert total_variation(one, other) == pytest.approx(abs(LABELS.mean() - 0.5))
    assert kl_divergence(one, other) > 0


def test_shares_of_counts_that_are_all_negative_are_uniform() -> None:
    assert NoisyCounts(counts=np.array([-1, -5, 0, -2]), noise=3.0).shares.tolist() == [0.25] * 4


@pytest.mark.parametrize("probability", [0.05, 0.5, 0.9])
def test_a_quantile_without_noise_is_the_first_point_that_reaches_its_share(precise: Queries, probability: float) -> None:
    found = quantile(precise, AMOUNTS, probability=probability)
    assert np.mean(found >= AMOUNTS) >= probability > np.mean(found - 0.5 >= AMOUNTS)


def test_a_quantile_with_noise_is_close(ledger: Ledger) -> None:
    found = quantile(Queries(ledger=ledger), AMOUNTS, 5.0)
    assert abs(np.mean(found >= AMOUNTS) - 0.5) < 0.05


@pytest.mark.parametrize("points", [2, 3, 64, 65])
def test_a_quantile_reaches_both_ends_of_its_grid(precise: Queries, points: int) -> None:
    common: dict[str, Any] = {"lower": 10.0, "step": 1.0, "points": points}
    assert quantile(precise, [-5.0] * 9, **common) == 10.0
    assert quantile(precise, [1e9] * 9, **common) == 10.0 + points - 1


def test_means_are_those_of_the_clipped_columns(precise: Queries) -> None:
    found = means(precise, TABLE, step=1e-6)
    assert found == pytest.approx([np.clip(AMOUNTS, 0, 100).mean(), SCORES.mean()], abs=1e-5)
    assert means(precise, np.empty((0, 2)), step=0.25).tolist() == [50.0, 0.0]


# --- customers ------------------------------------------------------------------------------------------------------------------------


def test_a_query_about_customers_carries_noise_for_all_of_their_records(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "c", population="a", budget=Budget(epsilon=100, delta=1e-6), unit=Unit.CUSTOMER) as ledger:
        with pytest.raises(ValueError, match="expected records_per_customer"):
            Queries(ledger=ledger)
        found = histogram(Queries(ledger=ledger, records_per_customer=7), LABELS, 5.0)
        assert found.noise == 35.0
        assert ledger.events() == (GaussianRelease(noise_multiplier=5.0),)
        with pytest.raises(ValueError, match="at least 1"):
            Queries(ledger=ledger, records_per_customer=0)


@pytest.mark.parametrize("name", QUERIES)
def test_every_query_about_customers_of_k_records_carries_k_times_the_noise_of_one_about_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """With every draw of the noise at one deviation, what is added to one count, sum or surplus is k times as large."""
    from privfed.dp import queries as module

    def added(unit: Unit, records: int | None) -> list[float]:
        path = tmp_path / f"{name}-{unit.name}"
        with Ledger.open(path, population="a", budget=Budget.unlimited(delta=1e-6), unit=unit) as ledger:
            queries = Queries(ledger=ledger, records_per_customer=records)
            match name:
                case "histogram":
                    return histogram(queries, [], 3.0).counts.tolist()
                case "score_histogram":
                    found = queries.score_histogram([], [], edges=[0.5], noise_multiplier=3.0, purpose="scores")
                    return [*found.positives.counts.tolist(), *found.negatives.counts.tolist()]
                case "quantile":
                    # Of two points, the lower is chosen while the noise outweighs half of the records, which are all above it.
                    return [sum(quantile(queries, [5.0] * n, 3.0, lower=0.0, step=1.0, points=2) == 0.0 for n in range(100))]
                case _:
                    # A mean is noise / (count + noise) of half the range around its middle, on a fine grid.
                    wide = queries.means(np.zeros((1000, 1)), lower=[-1.0], upper=[1.0], step=1e-12, noise_multiplier=3.0, purpose="m")
                    return (1000 * wide / (1 - wide)).tolist()

    monkeypatch.setattr(module, "standard_normal", np.ones)
    one, several = added(Unit.RECORD, None), added(Unit.CUSTOMER, 7)
    exact = {"histogram": 3.0, "score_histogram": 3.0, "quantile": 4.0, "means": 3.0 * math.sqrt(2)}[name]
    assert one == pytest.approx([exact] * len(one), rel=1e-6)
    assert several == pytest.approx([22.0 if name == "quantile" else 7 * exact] * len(one), rel=1e-6)


def test_records_have_no_number_per_customer(ledger: Ledger) -> None:
    with pytest.raises(ValueError, match="only there"):
        Queries(ledger=ledger, records_per_customer=2)


# --- refusals -------------------------------------------------------------------------------------------------------------------------


WRONG: dict[str, list[dict[str, Any]]] = {
    "histogram": [{"bins": 0}, {"bins": 1.5}, {"bins": True}],
    "score_histogram": [{"edges": []}, {"edges": [1.0, 0.5]}, {"edges": [0.5, math.nan]}, {"edges": [[0.1], [0.2]]}],
    "quantile": [{"probability": 0.0}, {"probability": 1.0}, {"points": 1}, {"points": 2**41}, {"step": 0.0}, {"lower": math.inf}],
    "means": [{"lower": [0.0]}, {"upper": [0.0, 1.0], "lower": [0.0, 0.0]}, {"upper": [math.inf, 1.0]}, {"step": -1.0}],
}
ALWAYS_WRONG: list[dict[str, Any]] = [
    {"noise_multiplier": 0.0},
    {"purpose": ""},
    {"purpose": "x" * 51},
    {"purpose": "é"},
    {"purpose": "a\n"},
]


@pytest.mark.parametrize("name", QUERIES)
def test_a_query_with_an_argument_out_of_range_is_refused_and_not_charged(ledger: Ledger, name: str) -> None:
    ask, values, _ = QUERIES[name]
    for wrong in WRONG[name] + ALWAYS_WRONG:
        watched = Watched(values, ledger)
        with pytest.raises(ValueError, match="expected"):
            ask(Queries(ledger=ledger), watched, **wrong)
        assert watched.charged == []
    assert ledger.events() == ()


def test_data_of_another_shape_release_nothing_and_say_nothing_about_values(ledger: Ledger) -> None:
    with pytest.raises(ValueError, match="nothing was released") as refusal:
        means(Queries(ledger=ledger), AMOUNTS)
    assert str(len(AMOUNTS)) not in str(refusal.value)
    with pytest.raises(ValueError, match="nothing was released"):
        score_histogram(Queries(ledger=ledger), SCORES[:-1])


def test_values_with_several_numbers_per_record_are_refused_because_they_would_cost_more(ledger: Ledger) -> None:
    queries, many = Queries(ledger=ledger), np.zeros((100, 40))
    with pytest.raises(ValueError, match="one number per record.*nothing was released"):
        queries.histogram(many, bins=2, noise_multiplier=50.0, purpose="many")
    with pytest.raises(ValueError, match="one number per record.*nothing was released"):
        queries.quantile(many, probability=0.5, lower=0.0, step=1.0, points=8, noise_multiplier=50.0, purpose="many")


def test_a_value_that_is_no_number_is_in_no_message(ledger: Ledger) -> None:
    with pytest.raises(ValueError, match="expected numbers") as caught:
        Queries(ledger=ledger).histogram(["0", "alice-secret"], bins=2, noise_multiplier=50.0, purpose="text")
    assert caught.value.__suppress_context__
    assert "alice" not in str(caught.value)
