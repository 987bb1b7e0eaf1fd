"""What a report shows as pictures, and the words under them."""

import math
from dataclasses import dataclass

from markupsafe import Markup

from privfed.audit.findings import Finding, Measured
from privfed.report.figures import Line, compact, line_chart, strip
from privfed.report.model import Report, Spending
from privfed.report.tables import finding_tone
from privfed.report.tone import Tone
from privfed.training.evaluate import EvaluationScope

_BUDGET_AT = 0.8  # where the budget stands on a bar of spending


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A chart and what stands under it."""

    svg: Markup
    caption: str


def figures(report: Report) -> tuple[Figure, ...]:
    """The charts of a run: quality, and privacy spent; those for which there are numbers."""
    history = report.history
    rounds = [summary.record.round + 1 for summary in history.rounds]
    figures: list[Figure] = []
    evaluated = [
        (summary.record.round + 1, summary.evaluation)
        for summary in history.rounds
        if summary.evaluation is not None and math.isfinite(summary.evaluation.pr_auc)
    ]
    if evaluated:
        _, last = evaluated[-1]
        chart = line_chart(
            [Line(label="model", values=[evaluation.pr_auc for _, evaluation in evaluated])],
            rounds=[number for number, _ in evaluated],
            title=f"PR-AUC after each round, from {evaluated[0][1].pr_auc:.2f} to {last.pr_auc:.2f}; guessing has "
            f"{last.positives / last.records:.2g}",
            reference=("guessing", last.positives / last.records),
            top=1.0,
        )
        stamp = "" if last.scope is EvaluationScope.PUBLIC_DATA else " Simulation only: a consortium of real clients must not publish it."
        caption = f"Quality of the model after each round: PR-AUC, of which 1 is perfect.{stamp}"
        figures.append(Figure(svg=chart, caption=caption))
    highest = [max(summary.epsilon.values()) for summary in history.rounds]
    # Where a ledger promises less than the run noted, because of other jobs or because they adapt, a curve would look better than it is.
    covered = all(math.isclose(spent.epsilon, history.epsilon[spent.name], rel_tol=1e-6) for spent in report.spending)
    if covered and all(math.isfinite(value) for value in highest):
        limits = [limit for limit in history.budget.values() if math.isfinite(limit)]
        chart = line_chart(
            [Line(label=f"spent, {compact(highest[-1])}", values=highest)],
            rounds=rounds,
            title=f"Epsilon after each round, from {highest[0]:.2f} to {highest[-1]:.2f}",
            reference=(f"budget, {compact(min(limits))}", min(limits)) if limits else None,
        )
        budget = "" if not limits else ", and the budget" if len(set(limits)) == 1 else ", and the smallest budget"
        figures.append(Figure(svg=chart, caption=f"Privacy spent after each round: epsilon of the client that spent most{budget}."))
    return tuple(figures)


def finding_strip(finding: Finding) -> Markup | str:
    """A finding as a bar; nothing where there is no score, never an empty bar."""
    outcome, tone = finding.outcome, finding_tone(finding)
    if not isinstance(outcome, Measured) or tone is None:
        return ""
    return strip(
        value=outcome.score.mean,
        low=outcome.score.low,
        high=outcome.score.high,
        mark=outcome.baseline,
        tone=tone.style,
        title=finding.sentence(),
    )


def spent_strip(spent: Spending) -> Markup | str:
    """What is spent as a bar on which the budget is marked; words where there is no limit."""
    if spent.share is None:
        return "no limit" if spent.budget is not None else "no ledger"
    tone = Tone.DANGER if spent.share > 1 else Tone.CALM
    return strip(value=spent.share * _BUDGET_AT, mark=_BUDGET_AT, tone=tone.style, title=f"{spent.share:.0%} of the budget")
