"""Lays a report out as HTML, Markdown and JSON.

Everything that is put into a page is escaped there, whatever it is; the templates alone are trusted. The HTML needs nothing else: no
script, no font, no picture from elsewhere.
"""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from privfed.audit.findings import Audit, Finding, Measured
from privfed.dp.statement import PrivacyStatement
from privfed.history import History
from privfed.report.checks import Check
from privfed.report.glossary import GLOSSARY
from privfed.report.model import Report
from privfed.report.pictures import figures, finding_strip, spent_strip
from privfed.report.summary import advice, exposed, headlines
from privfed.report.tables import examples, groups, rounds, scope
from privfed.training.mechanism import DpSgd, TrainingMechanism

_MARKDOWN_SPECIAL = re.compile(r"([\\`*_\[\]<>|#&~])")


def write_report(
    history: History,
    path: Path | str,
    *,
    audit: Audit | None = None,
    statements: Sequence[PrivacyStatement] = (),
    checks: Sequence[Check] = (),
    title: str = "What a federated run gave away",
    command: str | None = None,
) -> Path:
    """Writes a report as HTML, and beside it as .json and .md. Files that are there are replaced.

    It contains what is public, and canaries. Metrics of private records (`EvaluationScope.SIMULATION_ONLY`) are stamped as such.

    Args:
        history: The run.
        path: The HTML file; its folder is made.
        audit: What `run_audit` found about the same consortium.
        statements: The clients' privacy statements.
        checks: Claims that were tested elsewhere, and the evidence.
        title: Heading.
        command: How the run was started.

    Returns:
        The HTML file.

    Raises:
        ValueError: If the path does not end in .html, or the trust mode is one that has no threat model.
    """
    path = Path(path)
    if path.suffix != ".html":
        raise ValueError(f"expected a path that ends in .html, got {path.name!r}; nothing was written")
    report = Report(title=title, history=history, audit=audit, statements=tuple(statements), further_checks=tuple(checks), command=command)
    pages = {".html": html(report), ".md": markdown(report), ".json": json.dumps(report.to_json(), indent=2, allow_nan=False)}
    path.parent.mkdir(parents=True, exist_ok=True)
    for suffix, page in pages.items():
        path.with_suffix(suffix).write_text(page, encoding="utf-8")
    return path


def html(report: Report) -> str:
    """The report as one HTML page. Raises as `write_report`."""
    return _render("report.html.j2", report, Environment(**_SETTINGS, autoescape=True), figures=figures(report))


def markdown(report: Report) -> str:
    """The report as Markdown. Raises as `write_report`."""
    return _render("report.md.j2", report, Environment(**_SETTINGS, autoescape=False, finalize=_escape_markdown))  # noqa: S701 -- by finalize


def _render(template: str, report: Report, environment: Environment, **more: object) -> str:
    environment.filters.update(
        strip=finding_strip,
        spent_strip=spent_strip,
        epsilon=_epsilon,
        training=_training,
        score=_score,
        baseline=_baseline,
    )
    return environment.get_template(template).render(
        report=report,
        headlines=headlines(report),
        parties=exposed(report),
        advice=advice(report),
        findings=groups(report.audit),
        examples=examples(report.audit),
        rounds=rounds(report.history),
        scope=scope(report.history),
        glossary=GLOSSARY,
        **more,
    )


_SETTINGS = {"loader": PackageLoader("privfed.report"), "undefined": StrictUndefined, "trim_blocks": True, "keep_trailing_newline": True}


def _escape_markdown(value: object) -> object:
    return _MARKDOWN_SPECIAL.sub(r"\\\1", " ".join(value.splitlines())) if isinstance(value, str) else value


def _score(finding: Finding) -> str:
    return f"{finding.outcome.score.mean:.2f}" if isinstance(finding.outcome, Measured) else "-"


def _baseline(finding: Finding) -> str:
    return f"{finding.outcome.baseline:.2f}" if isinstance(finding.outcome, Measured) else "-"


def _epsilon(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "infinite"


def _training(training: TrainingMechanism) -> str:
    if isinstance(training, DpSgd):
        return (
            f"DP-SGD, noise multiplier {training.noise_multiplier:.3g}, clipping norm {training.max_grad_norm:g}, sample rate "
            f"{training.sample_rate:.3g}, {training.steps} steps per round, learning rate {training.learning_rate:g}"
        )
    return f"no privacy: SGD, batches of {training.batch_size}, {training.steps} steps per round, learning rate {training.learning_rate:g}"
