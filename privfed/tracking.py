"""The numbers of a run for people's dashboards: functions on a `History`, called when the run is over."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from privfed.history import History, RoundSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One number of one round.

    Args:
        name: What it is, with `/` between a group and its members, as dashboards group by.
        round: Number of the round, from 0.
        value: Finite.
    """

    name: str
    round: int
    value: float


def metrics(history: "History") -> tuple[Metric, ...]:
    """All numbers of the rounds that were held, in their order. What is not known or not finite is left out.

    With MLflow, for example: `for m in metrics(history): mlflow.log_metric(m.name, m.value, step=m.round)`.

    Args:
        history: A finished run. What its evaluation may be shown to, its scope says.
    """
    return tuple(
        Metric(name=name, round=summary.record.round, value=float(value))
        for summary in history.rounds
        for name, value in _numbers(summary)
        if value is not None and math.isfinite(value)
    )


def _numbers(summary: "RoundSummary") -> Iterator[tuple[str, float | None]]:
    record, evaluation = summary.record, summary.evaluation
    if evaluation is not None:
        yield "quality/pr_auc", evaluation.pr_auc
        yield "quality/recall_at_1_percent_fpr", evaluation.recall_at_1_percent_fpr
        yield "quality/recall_at_01_percent_fpr", evaluation.recall_at_01_percent_fpr
    yield "round/participants", len(record.participants)
    yield "round/effective_clients", record.effective_clients
    yield "round/grid_error_max", summary.grid_error_max
    groups: Mapping[str, Mapping[str, float]] = {
        "epsilon": summary.epsilon,
        "bytes_up": record.bytes_up,
        "bytes_down": record.bytes_down,
        "seconds": record.seconds,
    }
    for group, numbers in groups.items():
        for member, number in numbers.items():
            yield f"{group}/{member}", number


def write_tensorboard(history: "History", directory: Path) -> None:
    """Writes the numbers as a run for TensorBoard: `tensorboard --logdir` with the folder above shows it beside others.

    Args:
        history: A finished run.
        directory: Folder of this run; made if it is not there.

    Raises:
        ImportError: If tensorboard is not installed; `pip install tensorboard`.
    """
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 (needs a package that is none of ours)

    with SummaryWriter(str(directory)) as writer:
        for metric in metrics(history):
            writer.add_scalar(metric.name, metric.value, metric.round)
