import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

from privfed.errors import OpeningRefusedError
from privfed.estimator import FederatedClassifier

torch.set_num_threads(1)

RECORDS = 900
FEATURES = np.random.default_rng(0).normal(size=(RECORDS, 4))
LABELS = np.where(FEATURES[:, 0] - FEATURES[:, 1] > 0, "yes", "no")
CLIENTS = np.repeat(["north", "south", "west"], RECORDS // 3)


def classifier(**changes: object) -> FederatedClassifier:
    options = {"max_records": 400, "rounds": 3, "steps": 20, "expected_batch_size": 100, "hidden": (16,), "epsilon": 8.0}
    return FederatedClassifier(**(options | changes))


@pytest.fixture(scope="module")
def fitted() -> FederatedClassifier:
    return classifier().fit(FEATURES, LABELS, clients=CLIENTS)


def test_it_learns_what_a_guess_does_not_know(fitted: FederatedClassifier) -> None:
    # 900 records ranked at random: the standard error of the area is about 0.02.
    assert roc_auc_score(LABELS == "yes", fitted.decision_function(FEATURES)) > 0.5 + 10 * 0.02
    assert fitted.score(FEATURES, LABELS) > 0.7


def test_it_speaks_the_labels_that_it_was_given(fitted: FederatedClassifier) -> None:
    assert fitted.classes_.tolist() == ["no", "yes"]
    probabilities = fitted.predict_proba(FEATURES)
    assert probabilities.shape == (RECORDS, 2)
    assert probabilities.sum(axis=1) == pytest.approx(np.ones(RECORDS))
    assert (fitted.predict(FEATURES) == np.where(probabilities[:, 1] > 0.5, "yes", "no")).all()


def test_every_client_trained_privately_under_encryption_within_its_budget(fitted: FederatedClassifier) -> None:
    history = fitted.history_
    assert history.mode == "SharedKey"
    assert history.private
    assert history.grid_error_max == 0
    assert len(history.epsilon) == 3
    assert all(0.98 * 8.0 < spent <= 8.0 for spent in history.epsilon.values())


def test_it_is_cloned_and_cross_validated_as_any_classifier() -> None:
    assert clone(classifier(epsilon=2.0)).get_params()["epsilon"] == 2.0
    folds = StratifiedKFold(2, shuffle=True, random_state=0)
    assert np.isfinite(cross_val_score(classifier(rounds=1), FEATURES, LABELS, cv=folds, params={"clients": CLIENTS})).all()


def test_it_stands_at_the_end_of_a_pipeline() -> None:
    pipeline = make_pipeline(FunctionTransformer(lambda table: table / 3.0), classifier(rounds=1))
    assert pipeline.fit(FEATURES, LABELS, federatedclassifier__clients=CLIENTS).predict(FEATURES).shape == (RECORDS,)


def test_nothing_is_said_before_training() -> None:
    with pytest.raises(NotFittedError):
        classifier().predict(FEATURES)


@pytest.mark.parametrize(
    ("labels", "clients", "match"),
    [
        (LABELS, CLIENTS[:-1], "the client of each of 900 records"),
        (np.arange(RECORDS) % 3, CLIENTS, "labels of two kinds, got 3; for more, train a Consortium"),
        (np.zeros(RECORDS), CLIENTS, "labels of two kinds, got 1"),
    ],
)
def test_what_it_cannot_train_on_is_refused(labels: object, clients: object, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        classifier().fit(FEATURES, labels, clients=clients)


def test_too_few_clients_are_refused() -> None:
    with pytest.raises(OpeningRefusedError, match="clients with a positive coefficient are 1, and the policy demands 3"):
        classifier(max_records=RECORDS).fit(FEATURES, LABELS, clients=["alone"] * RECORDS)


def test_other_numbers_of_features_are_refused(fitted: FederatedClassifier) -> None:
    with pytest.raises(ValueError, match="4 features, as in training, got 3"):
        fitted.predict(FEATURES[:, :3])
