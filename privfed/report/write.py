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

from privfed.audit.findings import Audit
from privfed.dp.statement import PrivacyStatement
from privfed.history import History
from privfed.report.advice import advice
from privfed.report.checks import Check
from privfed.report.glossary import GLOSSARY
from privfed.report.model import Report, Spending
from privfed.report.pictures import figures, finding_strip, spent_strip
from privfed.report.promises import common
from privfed.report.summary import Point, best_guess, certainty, exposed, listed, protected_unit, readers, spent_words, verdict
from privfed.report.tables import compared, examples, finding_tone, gain_words, holdings, rounds, scope, traffic
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
    pages = {".html": html(report), ".md": markdown(report), ".json": json.dumps(_json(report), indent=2, allow_nan=False)}
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
        best_guess=_best_guess,
        tone=finding_tone,
        gain=gain_words,
    )
    return environment.get_template(template).render(
        report=report,
        verdict=verdict(report),
        readers=readers(report),
        certainty=certainty(report),
        advice=advice(report),
        parties=exposed(report),
        compared=compared(report.audit),
        examples=examples(report.audit),
        promises=common(report.statements),
        unit=protected_unit(report),
        spent_words=spent_words(report),
        trainings=_trainings(report.history),
        rounds=rounds(report.history),
        scope=scope(report.history),
        traffic=traffic(report.history),
        holdings=holdings(report.audit),
        glossary=GLOSSARY,
        **more,
    )


def _json(report: Report) -> dict[str, object]:
    """The first page in words, then all that it rests on."""

    def words(points: Sequence[Point]) -> list[dict[str, str]]:
        return [{"tone": point.tone.style, "lead": point.lead, "text": point.text} for point in points]

    page = {
        "verdict": words([verdict(report)])[0],
        "who_can_read_what": words(readers(report)),
        "how_sure": words(certainty(report)),
        "what_to_do": words(advice(report)),
    }
    return page | report.to_json()


_SETTINGS = {"loader": PackageLoader("privfed.report"), "undefined": StrictUndefined, "trim_blocks": True, "keep_trailing_newline": True}


def _escape_markdown(value: object) -> object:
    return _MARKDOWN_SPECIAL.sub(r"\\\1", " ".join(value.splitlines())) if isinstance(value, str) else value


def _epsilon(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "infinite"


def _best_guess(spent: Spending) -> str:
    return best_guess(spent.epsilon, spent.delta)


def _trainings(history: History) -> tuple[tuple[str, str], ...]:
    """How clients trained, and which: those that trained alike are told together."""
    alike: dict[str, list[str]] = {}
    for name, training in history.training.items():
        alike.setdefault(_training(training), []).append(name)
    return tuple((words, listed(names)) for words, names in alike.items())


def _training(training: TrainingMechanism) -> str:
    if isinstance(training, DpSgd):
        norm = f"{'' if training.adaptive_clipping is None else 'adaptive, at most '}{training.max_grad_norm:g}"
        words = (
            f"DP-SGD, noise multiplier {training.noise_multiplier:.3g}, clipping norm {norm}, sample rate "
            f"{training.sample_rate:.3g}, {training.steps} steps per round, learning rate {training.learning_rate:g}"
        )
        if training.batch_capacity is not None:
            words += f", at most {training.batch_capacity} records per step"
        if training.records_per_customer is not None:
            words += f", at most {training.records_per_customer} records per customer"
        return words
    return f"no privacy: SGD, batches of {training.batch_size}, {training.steps} steps per round, learning rate {training.learning_rate:g}"
