"""What a run leaves behind: a record per round, the privacy that each client spent, and the model."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from privfed.he.params import CkksParams
from privfed.policy import OpeningPolicy
from privfed.round_record import FailedRound, RoundRecord
from privfed.strict_json import real, whole
from privfed.training.evaluate import Evaluation, EvaluationScope
from privfed.training.mechanism import DpSgd, TrainingMechanism
from privfed.update import PlainVector


@dataclass(frozen=True, kw_only=True, repr=False)
class RoundSummary:
    """One round as a history keeps it. Public, but for what `evaluation` says of its scope.

    Args:
        record: What happened.
        epsilon: What each client had spent after the round, at its budget's delta; infinite without differential privacy.
        grid_error_max: Largest difference, in grid steps, between the opened sum and the integer weighted sum of the updates; None
            if an update was not trained under these eyes, but resent after a restart.
        evaluation: Metrics of the model after the round, if it was evaluated.

    Raises:
        ValueError: If no client has a positive coefficient, one has a negative one, or an epsilon is negative or NaN.
    """

    record: RoundRecord
    epsilon: Mapping[str, float]
    grid_error_max: int | None
    evaluation: Evaluation | None

    def __post_init__(self) -> None:
        coefficients = self.record.coefficients.values()
        if not any(coefficients) or min(coefficients) < 0:
            raise ValueError(f"expected a sum with positive coefficients in round {self.record.round + 1}, got one without")
        if not all(value >= 0 for value in self.epsilon.values()):
            raise ValueError(f"expected every epsilon after round {self.record.round + 1} to be at least 0, got another one")

    def __repr__(self) -> str:
        return f"RoundSummary(round={self.record.round}, participants={len(self.record.participants)})"

    def to_json(self) -> dict[str, object]:
        """The summary as JSON values; an infinite epsilon and an undefined metric are null."""
        evaluation: dict[str, object] | None = None
        if self.evaluation is not None:
            evaluation = {name: _finite(value) for name, value in asdict(self.evaluation).items() if name != "scope"}
            evaluation["scope"] = self.evaluation.scope.name
        return {
            "record": self.record.to_json(),
            "epsilon": {name: _finite(value) for name, value in self.epsilon.items()},
            "grid_error_max": self.grid_error_max,
            "evaluation": evaluation,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "RoundSummary":
        """Reads what `to_json` gave.

        Raises:
            ValueError: If it is something else.
        """
        try:
            _check_kinds(fields)
            evaluation: Evaluation | None = None
            if fields["evaluation"] is not None:
                metrics = {name: math.nan if value is None else value for name, value in fields["evaluation"].items()}
                evaluation = Evaluation(**{**metrics, "scope": EvaluationScope[str(metrics["scope"])]})
            summary = cls(
                record=RoundRecord.from_json(fields["record"]),
                epsilon={name: math.inf if value is None else value for name, value in fields["epsilon"].items()},
                grid_error_max=fields["grid_error_max"],
                evaluation=evaluation,
            )
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError("expected a round as RoundSummary.to_json gives it, got something else") from error
        if set(fields) != set(summary.to_json()):
            raise ValueError("expected exactly the fields of a round, got others")
        return summary


def _check_kinds(fields: Mapping[str, Any]) -> None:
    """Refuses a summary with a text for a number, or the like, with a ValueError."""
    evaluation = {} if fields["evaluation"] is None else fields["evaluation"]
    counted = [evaluation[name] for name in ("positives", "records") if evaluation]
    counted += [] if fields["grid_error_max"] is None else [fields["grid_error_max"]]
    for count in counted:
        whole(count)
    metrics = [value for name, value in evaluation.items() if name != "scope"]
    for number in (*metrics, *fields["epsilon"].values()):
        if number is not None:
            real(number)


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True, kw_only=True)
class History:
    """A finished run.

    Args:
        mode: Name of the trust mode.
        rule: Name of the aggregation rule.
        policy: When aggregates may be opened.
        params: Encryption parameters, or the grid alone in a plaintext run.
        training: How each client trained.
        delta: The delta of each client's epsilon; absent for clients without a ledger.
        budget: The epsilon that each client may spend in total, infinite without a limit; absent for clients without a ledger.
        private: Whether differential privacy may be claimed: every client trained with it, and no noise was seeded.
        initial: The weights before the first round.
        model: The weights after the last round.
        rounds: A summary per round that was held, at least one.
        failed: Rounds that were not held.

    Raises:
        ValueError: If there is no client or no round, what a client had spent after the last round is missing, or differential privacy is
            claimed though a client trained without it.
    """

    mode: str
    rule: str
    policy: OpeningPolicy
    params: CkksParams
    training: Mapping[str, TrainingMechanism]
    delta: Mapping[str, float]
    budget: Mapping[str, float]
    private: bool
    initial: PlainVector = field(repr=False)
    model: PlainVector = field(repr=False)
    rounds: tuple[RoundSummary, ...] = field(repr=False)
    failed: tuple[FailedRound, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if not self.training or not self.rounds:
            raise ValueError(f"expected at least one client and one round, got {len(self.training)} and {len(self.rounds)}")
        if not set(self.training) <= set(self.epsilon):
            raise ValueError("expected what every client had spent after the last round, got it of some")
        if self.private and not all(isinstance(training, DpSgd) for training in self.training.values()):
            raise ValueError("expected no claim of differential privacy where a client trains without it")

    @property
    def epsilon(self) -> Mapping[str, float]:
        """What each client has spent after the last round."""
        return self.rounds[-1].epsilon

    @property
    def pr_auc(self) -> tuple[float, ...]:
        """Average precision after each evaluated round."""
        return tuple(summary.evaluation.pr_auc for summary in self.rounds if summary.evaluation is not None)

    @property
    def bytes_up_per_parameter(self) -> float:
        """Mean bytes that a participant sent per round and parameter; 0 in a plaintext run, which has no wire."""
        sent = [count for summary in self.rounds for count in summary.record.bytes_up.values()]
        return sum(sent) / len(sent) / self.model.layout.size if sent else 0.0

    @property
    def bytes_down_per_parameter(self) -> float:
        """Mean bytes that a client received per round and parameter; 0 in a plaintext run, which has no wire."""
        received = [count for summary in self.rounds for count in summary.record.bytes_down.values()]
        return sum(received) / len(received) / self.model.layout.size if received else 0.0

    @property
    def grid_error_max(self) -> int | None:
        """Largest difference of any round, in grid steps, between what was opened and the integer weighted sum; None if unknown."""
        errors = [summary.grid_error_max for summary in self.rounds]
        return None if None in errors else max(error for error in errors if error is not None)
