"""What a report shows as pictures, and the words under them."""

import math
from dataclasses import dataclass
from statistics import fmean

from markupsafe import Markup

from privfed.audit.findings import Finding, Measured
from privfed.report.figures import Line, compact, line_chart, strip
from privfed.report.model import Report, Spending
from privfed.training.evaluate import EvaluationScope

_TELLING = 0.2  # an advantage over guessing from which a bar is drawn in the colour of alarm
_BUDGET_AT = 0.8  # where the budget stands on a bar of spending


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A chart and what stands under it."""

    svg: Markup
    caption: str


def figures(report: Report) -> tuple[Figure, ...]:
    """The charts of a run: quality, privacy spent, bytes; those for which there are numbers."""
    history = report.history
    rounds = [summary.record.round + 1 for summary in history.rounds]
    figures: list[Figure] = []
    evaluated = [(summary.record.round + 1, summary.evaluation) for summary in history.rounds if summary.evaluation is not None]
    if evaluated:
        _, last = evaluated[-1]
        chart = line_chart(
            [Line(label="model", values=[evaluation.pr_auc for _, evaluation in evaluated])],
            rounds=[number for number, _ in evaluated],
            title="PR-AUC after each round",
            reference=("guessing", last.positives / last.records),
            top=1.0,
        )
        stamp = "" if last.scope is EvaluationScope.PUBLIC_DATA else " Simulation only: a consortium of real clients must not publish it."
        caption = f"Quality of the model after each round: PR-AUC, 1 is perfect.{stamp}"
        figures.append(Figure(svg=chart, caption=caption))
    highest = [max(summary.epsilon.values()) for summary in history.rounds]
    if all(math.isfinite(value) for value in highest):
        limits = [limit for limit in history.budget.values() if math.isfinite(limit)]
        chart = line_chart(
            [Line(label=f"spent, {compact(highest[-1])}", values=highest)],
            rounds=rounds,
            title="Epsilon after each round",
            reference=(f"budget, {compact(min(limits))}", min(limits)) if limits else None,
        )
        figures.append(Figure(svg=chart, caption="Privacy spent after each round: epsilon of the client that spent most, and the budget."))
    if report.encrypted:
        up = [fmean(summary.record.bytes_up.values() or (0,)) for summary in history.rounds]
        down = [fmean(summary.record.bytes_down.values() or (0,)) for summary in history.rounds]
        chart = line_chart(
            [Line(label=f"down, {compact(down[-1])}", values=down), Line(label=f"up, {compact(up[-1])}", values=up)],
            rounds=rounds,
            title="Bytes per client and round",
        )
        caption = (
            f"Bytes that a client sends (up) and receives (down) per round: {history.bytes_up_per_parameter:.2f} and "
            f"{history.bytes_down_per_parameter:.2f} per weight of the model."
        )
        figures.append(Figure(svg=chart, caption=caption))
    return tuple(figures)


def finding_strip(finding: Finding) -> Markup | str:
    """A finding as a bar; words where there is no score, never an empty bar."""
    outcome = finding.outcome
    if not isinstance(outcome, Measured):
        return "no score"
    return strip(
        value=outcome.score.mean,
        low=outcome.score.low,
        high=outcome.score.high,
        mark=outcome.baseline,
        tone="alarm" if outcome.advantage > _TELLING else "calm",
        title=finding.sentence(),
    )


def spent_strip(spent: Spending) -> Markup | str:
    """What is spent as a bar on which the budget is marked; words where there is no limit."""
    if spent.share is None:
        return "no limit" if spent.budget is not None else "no ledger"
    return strip(value=spent.share * _BUDGET_AT, mark=_BUDGET_AT, tone="calm", title=f"{spent.share:.0%} of the budget")
