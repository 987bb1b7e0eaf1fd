import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, f1_score, roc_curve

from privfed.training.evaluate import (
    Evaluation,
    EvaluationScope,
    average_precision,
    best_f1_threshold,
    evaluate,
    f1_at_threshold,
    recall_at_fpr,
)

METRICS = {
    "average_precision": average_precision,
    "recall_at_fpr": lambda labels, scores: recall_at_fpr(labels, scores, fpr=0.01),
    "best_f1_threshold": best_f1_threshold,
    "f1_at_threshold": lambda labels, scores: f1_at_threshold(labels, scores, threshold=0.5),
}
# Scores with many ties, because ties are where such metrics go wrong.
RECORDS = st.lists(st.tuples(st.integers(0, 1), st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9])), min_size=2, max_size=60)
BOTH = RECORDS.filter(lambda records: len({label for label, _ in records}) == 2)


@settings(deadline=None)
@given(BOTH)
def test_average_precision_is_that_of_scikit_learn(records):
    labels, scores = map(np.array, zip(*records, strict=True))
    assert average_precision(labels, scores) == pytest.approx(average_precision_score(labels, scores), rel=1e-12)


@settings(deadline=None)
@given(BOTH, st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.25, 0.5, 1.0]))
def test_recall_at_fpr_is_the_largest_recall_within_the_rate(records, fpr):
    labels, scores = map(np.array, zip(*records, strict=True))
    false_rate, recall, _ = roc_curve(labels, scores, drop_intermediate=False)
    assert recall_at_fpr(labels, scores, fpr=fpr) == recall[false_rate <= fpr].max()


def test_recall_at_fpr_does_not_split_ties_or_interpolate():
    labels, scores = [0, 1, 1, 0], [0.9, 0.9, 0.5, 0.1]
    assert recall_at_fpr(labels, scores, fpr=0.49) == 0
    assert recall_at_fpr(labels, scores, fpr=0.5) == 1


def test_recall_at_fpr_accepts_the_rate_itself():
    labels = np.array([0] * 100 + [1] * 2)
    scores = np.concatenate([np.arange(100) / 1000, [0.0985, 0.05]])  # one negative above the first positive
    assert recall_at_fpr(labels, scores, fpr=0.01) == 0.5
    assert recall_at_fpr(labels, scores, fpr=0.0099) == 0


@settings(deadline=None)
@given(BOTH)
def test_the_best_threshold_has_the_highest_f1_of_all(records):
    labels, scores = map(np.array, zip(*records, strict=True))
    best = max(f1_score(labels, scores >= threshold) for threshold in np.unique(scores))
    threshold = best_f1_threshold(labels, scores)
    assert f1_score(labels, scores >= threshold) == pytest.approx(best, rel=1e-12)
    assert f1_at_threshold(labels, scores, threshold=threshold) == pytest.approx(best, rel=1e-12)


def test_of_equally_good_thresholds_the_highest_is_chosen():
    # Flagging 1 of 1 found, or 3 with 2 found: F1 is 2/3 and 2*2/(2+3), so the lower wins; with a false one more they tie.
    assert best_f1_threshold([1, 0, 0, 1], [0.9, 0.8, 0.7, 0.6]) == 0.9


def test_f1_is_zero_where_nothing_is_flagged():
    assert f1_at_threshold([0, 1], [0.1, 0.2], threshold=0.5) == 0


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_is_nan_without_positives(name):
    assert math.isnan(METRICS[name]([0, 0, 0], [0.1, 0.2, 0.3]))


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize(
    ("labels", "scores"),
    [
        ([], []),
        ([0, 1], [0.1]),
        ([[0], [1]], [[0.1], [0.2]]),
        ([0, 1], [[0.1], [0.2]]),
        ([0, 2], [0.1, 0.2]),
        ([0.5, 1], [0.1, 0.2]),
        ([math.nan, 1], [0.1, 0.2]),
        ([0, 1], [0.1, math.nan]),
        ([0, 1], [0.1, math.inf]),
    ],
)
def test_every_metric_refuses_bad_input(name, labels, scores):
    with pytest.raises(ValueError, match="expected"):
        METRICS[name](labels, scores)


@pytest.mark.parametrize("fpr", [-0.1, 1.1, math.nan])
def test_recall_refuses_what_is_no_rate(fpr):
    with pytest.raises(ValueError, match="expected fpr"):
        recall_at_fpr([0, 1], [0.1, 0.2], fpr=fpr)


def test_f1_refuses_a_threshold_chosen_without_positives():
    with pytest.raises(ValueError, match="validation records that include positives"):
        f1_at_threshold([0, 1], [0.1, 0.2], threshold=best_f1_threshold([0, 0], [0.1, 0.2]))


def test_evaluate_joins_the_metrics_and_stamps_the_scope():
    generator = np.random.default_rng(3)
    labels = (generator.random(5000) < 0.05).astype(int)
    scores = generator.normal(size=5000) + 2 * labels
    evaluation = evaluate(labels, scores, scope=EvaluationScope.PUBLIC_DATA)
    assert evaluation.pr_auc == average_precision(labels, scores)
    assert evaluation.recall_at_1_percent_fpr == recall_at_fpr(labels, scores, fpr=0.01)
    assert evaluation.recall_at_01_percent_fpr == recall_at_fpr(labels, scores, fpr=0.001)
    assert 0 < evaluation.recall_at_01_percent_fpr < evaluation.recall_at_1_percent_fpr < 1
    assert (evaluation.positives, evaluation.records) == (labels.sum(), 5000)
    assert evaluation.scope is EvaluationScope.PUBLIC_DATA
    assert evaluation.note == ""


def test_an_evaluation_says_why_a_metric_is_undefined():
    without = evaluate([0, 0], [0.1, 0.2], scope=EvaluationScope.SIMULATION_ONLY)
    assert math.isnan(without.pr_auc)
    assert without.note.startswith("no positive record")
    only = evaluate([1, 1], [0.1, 0.2], scope=EvaluationScope.SIMULATION_ONLY)
    assert only.pr_auc == 1
    assert math.isnan(only.recall_at_1_percent_fpr)
    assert only.note.startswith("no negative record")


@pytest.mark.parametrize(
    "changes",
    [
        {"pr_auc": 1.1},
        {"recall_at_1_percent_fpr": -0.1},
        {"recall_at_01_percent_fpr": 2.0},
        {"positives": 11},
        {"positives": -1},
        {"records": 0, "positives": 0},
        {"pr_auc": math.nan},
        {"positives": 0},
    ],
)
def test_an_evaluation_that_cannot_be_is_refused(changes):
    values = {"pr_auc": 0.5, "recall_at_1_percent_fpr": 0.5, "recall_at_01_percent_fpr": 0.4, "positives": 3, "records": 10}
    with pytest.raises(ValueError, match="expected"):
        Evaluation(**{**values, **changes}, scope=EvaluationScope.PUBLIC_DATA)


def test_a_string_is_no_scope():
    with pytest.raises(TypeError, match="EvaluationScope"):
        evaluate([0, 1], [0.1, 0.2], scope="public data")
