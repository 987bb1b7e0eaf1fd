"""What a run leaves behind: a record per round, the privacy that each client spent, and the model."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from privfed.agreement import OpeningPolicy
from privfed.he.params import CkksParams
from privfed.round import RoundRecord
from privfed.training.evaluate import Evaluation
from privfed.training.mechanism import TrainingMechanism
from privfed.update import PlainVector


@dataclass(frozen=True, kw_only=True)
class RoundSummary:
    """One round as a history keeps it. Public, but for what `evaluation` says of its scope.

    Args:
        record: What happened.
        epsilon: What each client had spent after the round, at its budget's delta; infinite without differential privacy.
        grid_error_max: Largest difference, in grid steps, between the opened sum and the integer weighted sum of the updates.
        evaluation: Metrics of the model after the round, if it was evaluated.
    """

    record: RoundRecord
    epsilon: Mapping[str, float]
    grid_error_max: int
    evaluation: Evaluation | None


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
        private: Whether differential privacy may be claimed: every client trained with it, and no noise was seeded.
        initial: The weights before the first round.
        model: The weights after the last round.
        rounds: A summary per round.
    """

    mode: str
    rule: str
    policy: OpeningPolicy
    params: CkksParams
    training: Mapping[str, TrainingMechanism]
    delta: Mapping[str, float]
    private: bool
    initial: PlainVector = field(repr=False)
    model: PlainVector = field(repr=False)
    rounds: tuple[RoundSummary, ...] = field(repr=False)

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
    def grid_error_max(self) -> int:
        """Largest difference of any round, in grid steps, between what was opened and the integer weighted sum."""
        return max(summary.grid_error_max for summary in self.rounds)
