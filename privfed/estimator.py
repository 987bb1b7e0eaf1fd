"""The simplest case as a scikit-learn classifier: one process that holds all tables, yes-or-no labels, a small network."""

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.validation import check_array, check_is_fitted, check_X_y

from privfed.client import Client
from privfed.consortium import Consortium
from privfed.data.samples import Samples
from privfed.dp.ledger import Ledger
from privfed.dp.mechanism import Budget
from privfed.engines.local import simulate
from privfed.he.secret import SharedKey
from privfed.training.loss import BinaryCrossEntropy
from privfed.training.mechanism import DpSgd
from privfed.training.model import load_values, mlp, scores

_CLASSES = 2


class FederatedClassifier(ClassifierMixin, BaseEstimator):
    """A classifier that several clients train with DP-SGD and encrypted federated averaging, all of them in this process.

    For trials on tables that you hold all of: it answers what a consortium's model would be worth, in cross-validation and grid
    searches. Every fit trains as if nothing had been spent before, and forgets what it spent; a consortium that trains on private data
    keeps ledgers, with `Client` and `Consortium`. Neither noise nor keys can be seeded, so two fits differ.

    Features are taken as they are: bring them to a scale of about 1 by ranges that are public.

    Args:
        epsilon: What each fit may spend on each client's records.
        delta: The delta of this epsilon; far below one over `max_records`.
        max_records: Most records that a client may have. Public.
        rounds: Number of rounds.
        steps: Steps of DP-SGD per round.
        expected_batch_size: Records in a batch, on average.
        learning_rate: Step length. Clipped gradients are short, so 1 to 4 is usual where plain gradient descent takes 0.1.
        max_grad_norm: Bound on the norm of a record's gradient.
        hidden: Widths of the network's hidden layers.
        positive_weight: How often a record of the second class counts in the loss; above 1 where that class is rare.

    Attributes:
        classes_: The two labels, in order.
        n_features_in_: Number of features.
        history_: The `History` of the run.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> features = rng.normal(size=(300, 3))
        >>> labels = np.where(features[:, 0] > 0, "fraud", "fine")
        >>> classifier = FederatedClassifier(max_records=150, rounds=2, steps=5, expected_batch_size=32)
        >>> classifier.fit(features, labels, clients=np.repeat(["a", "b", "c"], 100)).predict(features[:2]).shape
        (2,)
    """

    classes_: NDArray[Any]
    n_features_in_: int

    def __init__(
        self,
        *,
        max_records: int,
        epsilon: float = 4.0,
        delta: float = 1e-6,
        rounds: int = 10,
        steps: int = 50,
        expected_batch_size: int = 256,
        learning_rate: float = 2.0,
        max_grad_norm: float = 1.0,
        hidden: tuple[int, ...] = (64, 32),
        positive_weight: float = 1.0,
    ) -> None:
        self.max_records = max_records
        self.epsilon = epsilon
        self.delta = delta
        self.rounds = rounds
        self.steps = steps
        self.expected_batch_size = expected_batch_size
        self.learning_rate = learning_rate
        self.max_grad_norm = max_grad_norm
        self.hidden = hidden
        self.positive_weight = positive_weight

    def fit(self, X: ArrayLike, y: ArrayLike, *, clients: ArrayLike) -> Self:  # noqa: N803 (scikit-learn's name)
        """Trains with the clients.

        Args:
            X: Features, of shape (records, features), finite.
            y: Labels of two kinds, of shape (records,).
            clients: Name of the client that holds each record, of shape (records,); at least as many clients as a policy demands, three.

        Returns:
            This classifier.

        Raises:
            ValueError: If shapes disagree, there are not two kinds of labels, or an argument is out of its range.
            PrivFedError: As `simulate`.
        """
        features, labels = check_X_y(X, y)
        owners = np.asarray(clients)
        if owners.shape != labels.shape:
            raise ValueError(f"expected the client of each of {len(labels)} records, got an array of shape {owners.shape}")
        kinds, classes = np.unique(labels, return_inverse=True)
        if len(kinds) != _CLASSES:
            raise ValueError(f"expected labels of two kinds, got {len(kinds)}; for more, train a Consortium with cross_entropy")
        budget = Budget(epsilon=self.epsilon, delta=self.delta)
        training = DpSgd.for_budget(
            budget,
            rounds=self.rounds,
            max_records=self.max_records,
            expected_batch_size=self.expected_batch_size,
            steps=self.steps,
            learning_rate=self.learning_rate,
            max_grad_norm=self.max_grad_norm,
        )
        names = tuple(f"feature_{number}" for number in range(features.shape[1]))
        model = mlp(len(names), hidden=self.hidden)
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="privfed-")))
            members: list[Client] = []
            for number, owner in enumerate(np.unique(owners)):
                mine = owners == owner
                name = f"client_{number + 1}"
                ledger = stack.enter_context(Ledger.open(folder / name, population=name, budget=budget))
                records = Samples(features=features[mine], labels=classes[mine], groups=None, columns=names)
                members.append(Client(name, records, training=training, ledger=ledger))
            loss = BinaryCrossEntropy(positive_weight=self.positive_weight)
            history = simulate(Consortium(members, keys=SharedKey.generate(), loss=loss), model, rounds=self.rounds)
        load_values(model, history.model)
        self.classes_, self.n_features_in_, self.history_, self._model = kinds, len(names), history, model
        return self

    def decision_function(self, X: ArrayLike) -> NDArray[np.float32]:  # noqa: N803 (scikit-learn's name)
        """Scores, of shape (records,): above 0 for the second class.

        Raises:
            sklearn.exceptions.NotFittedError: If nothing was trained.
            ValueError: If the features are not as many as in training.
        """
        check_is_fitted(self)
        features = check_array(X)
        if features.shape[1] != self.n_features_in_:
            raise ValueError(f"expected {self.n_features_in_} features, as in training, got {features.shape[1]}")
        return scores(self._model, self.history_.model, features.astype(np.float32))

    def predict_proba(self, X: ArrayLike) -> NDArray[np.float32]:  # noqa: N803 (scikit-learn's name)
        """Probabilities, of shape (records, 2), as the model has them: calibrated only if `positive_weight` is 1."""
        second = torch.sigmoid(torch.from_numpy(self.decision_function(X))).numpy()
        return np.column_stack([1 - second, second])

    def predict(self, X: ArrayLike) -> NDArray[Any]:  # noqa: N803 (scikit-learn's name)
        """The likelier label of each record, of shape (records,)."""
        second = self.decision_function(X) > 0
        return self.classes_[second.astype(np.int64)]
