import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest

import privfed.consortium as consortium_module
from privfed.attacks.adversary import ADVERSARIES, OTHER_CLIENT
from privfed.attacks.observation import NotApplicable
from privfed.audit.canaries import Canaries
from privfed.audit.findings import Audit, Finding, Measured, Verdict
from privfed.audit.run import run_audit
from privfed.audit.suite import SUITE
from privfed.consortium import Consortium, Plaintext
from privfed.dp.clipping import AdaptiveClipping
from privfed.dp.mechanism import Budget, GaussianRelease, NonPrivateRelease
from privfed.dp.statement import PrivacyStatement, Randomness
from privfed.engines.local import simulate
from privfed.he.escrow_secret import EscrowKey
from privfed.he.secret import SharedKey
from privfed.history import History
from privfed.report.advice import advice
from privfed.report.checks import Check
from privfed.report.figures import Line, compact, line_chart, nice_ceiling, strip
from privfed.report.glossary import GLOSSARY
from privfed.report.model import Report
from privfed.report.promises import common
from privfed.report.summary import Exposure, Point, best_guess, certainty, exposed, readers, spent_words, verdict
from privfed.report.tables import Held, compared, examples, finding_tone, gain_words, holdings, rounds, traffic
from privfed.report.tone import Tone
from privfed.report.write import html, markdown, write_report
from privfed.round_record import Stage
from privfed.training.mechanism import DpSgd
from tests.consortia import COLUMNS, OPEN, SCHEMA, consortium, network

NASTY = "</title><script>alert('x')</script> | `rm` & <b>bold</b> \"quoted\""


class Absent:
    """Everybody is silent in round 1, one bank in round 2."""

    def silent(self, round: int, names: Sequence[str]) -> Mapping[str, Stage]:
        if round == 1:
            return dict.fromkeys(names, Stage.UPLOAD)
        return {names[-1]: Stage.SETUP} if round == 2 else {}


@pytest.fixture(scope="module")
def banks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Consortium]:
    with ExitStack() as stack:
        yield consortium(stack, tmp_path_factory.mktemp("ledgers"), count=4)


@pytest.fixture(scope="module")
def history(banks: Consortium) -> History:
    held_out = Canaries.draw(SCHEMA, count=50, rng=np.random.default_rng(11)).samples(COLUMNS)
    return simulate(banks, network(), rounds=3, evaluation=held_out, absences=Absent())


@pytest.fixture(scope="module")
def audit(banks: Consortium) -> Audit:
    return run_audit(banks, network(), schema=SCHEMA, repeats=2, rng=np.random.default_rng(0))


@pytest.fixture(scope="module")
def report(banks: Consortium, history: History, audit: Audit) -> Report:
    statements = []
    for client in banks.clients:
        assert client.ledger is not None
        assert isinstance(client.training, DpSgd)
        statements.append(PrivacyStatement.of(client.ledger.events(), population=client.name, delta=1e-5, max_grad_norm=1.0))
    return Report(title="A run", history=history, audit=audit, statements=tuple(statements), command="privfed demo")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """A run in the clear, without noise, audit or evaluation."""
    with ExitStack() as stack:
        banks = consortium(stack, tmp_path_factory.mktemp("none"), training=OPEN, keys=Plaintext())
        return Report(title="In the clear", history=simulate(banks, network(), rounds=1))


class Balanced(HTMLParser):
    """Collects tags and text, and fails where tags do not close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.add(tag)
        if tag not in {"meta", "br", "line", "polyline", "circle", "rect"}:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parsed(page: str) -> tuple[set[str], str]:
    parser = Balanced()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser.seen, re.sub(r"\s+", " ", "".join(parser.text))


def test_the_page_needs_nothing_from_elsewhere(report: Report, bare: Report) -> None:
    for page in (html(report), html(bare)):
        assert not re.search(r'https?:|src=|href=(?!"#)|@import|url\(|<script|<link|<iframe|javascript:', page)


def test_tags_close_in_order(report: Report, bare: Report) -> None:
    for page in (html(report), html(bare)):
        seen, _ = parsed(page)
        assert {"table", "h2"} <= seen


def test_everything_that_is_put_in_is_escaped(report: Report) -> None:
    check = Check(claim=NASTY, evidence=NASTY, holds=None)
    nasty = replace(
        report,
        title=NASTY,
        command=NASTY,
        further_checks=(check,),
        versions={NASTY: NASTY},
        history=replace(report.history, rule=NASTY),
        statements=tuple(replace(statement, population=NASTY) for statement in report.statements),
    )
    page = html(nasty)
    seen, text = parsed(page)
    assert not {"script", "b"} & (seen - parsed(html(report))[0])
    assert "<script" not in page
    assert text.count("alert('x')") >= 6
    marked_up = markdown(nasty)
    assert not re.search(r"(?<!\\)<", marked_up)
    assert json.loads(json.dumps(nasty.to_json(), allow_nan=False))["title"] == NASTY


def test_tables_in_markdown_keep_their_columns_whatever_is_in_the_cells(report: Report) -> None:
    check = Check(claim=NASTY, evidence="a\nb\r\u2028c", holds=True)
    page = markdown(replace(report, title=NASTY, further_checks=(check,)))
    width = None
    rows = 0
    for line in page.splitlines():
        if not line.startswith("|"):
            width = None
            continue
        cells = len(re.findall(r"(?<!\\)\|", line))
        width = cells if width is None else width
        assert cells == width, line
        rows += 1
    assert rows > 60
    assert [line for before, line in pairwise(page.splitlines()) if line.startswith("#") and before] == []
    assert "\n\n\n" not in page


def test_faults_are_told_with_their_rounds(report: Report, bare: Report) -> None:
    assert [(fault.round, fault.held) for fault in report.faults] == [(2, False), (3, True)]
    assert "bank_3: no answer from setup on" in report.faults[1].what
    refused = replace(report.history.rounds[0], record=replace(report.history.rounds[0].record, refused=("bank_2",)))
    told = replace(report, history=replace(report.history, rounds=(refused,))).faults
    assert (1, "bank_2: privacy budget used up, left out") in [(fault.round, fault.what) for fault in told]
    _, text = parsed(html(report))
    assert "Round 2, not held" in text
    assert "every selected client took part" in parsed(html(bare))[1]


def test_statements_are_in_every_layout(report: Report) -> None:
    _, text = parsed(html(report))
    for statement in report.statements:
        assert f"Privacy statement for {statement.population}" in text
        assert re.sub(r"\s+", " ", statement.text()).strip() in text
    assert "Against whom" in markdown(report)


def test_metrics_of_private_records_are_stamped(report: Report) -> None:
    assert "Simulation only: a consortium of real clients must not publish it." in parsed(html(report))[1]
    assert "simulation only" in markdown(report)


def test_no_weight_of_the_model_is_in_a_report(report: Report) -> None:
    pages = "".join((html(report), markdown(report), json.dumps(report.to_json())))
    shown = {match.lstrip("-") for match in re.findall(r"-?\d+\.\d{6,}", pages)}
    assert len(shown) > 20  # seconds, scores and epsilons in the JSON
    assert not shown & {f"{abs(value):.{digits}f}" for value in report.history.model.values for digits in (6, 8)}
    assert not any(repr(float(value)) in pages for value in report.history.model.values)


def test_no_record_of_a_client_is_in_an_audit_or_a_report(tmp_path: Path) -> None:
    """Every record has an amount that nothing else has; the canaries, which are shown, never do."""
    with ExitStack() as stack:
        banks = consortium(stack, tmp_path)
        marked = []
        for client in banks.clients:
            features = client.data.features.copy()
            features[:, 0] = 7777.125
            marked.append(replace(client, data=replace(client.data, features=features)))
        banks = replace(banks, clients=marked)
        history = simulate(banks, network(), rounds=1)
        report = Report(title="t", history=history, audit=run_audit(banks, network(), schema=SCHEMA, repeats=2))
    pages = "".join((html(report), markdown(report), json.dumps(report.to_json())))
    assert not re.search(r"7,?777[.,]1", pages)
    assert "kind" in pages


def test_three_files_are_written_and_replaced(report: Report, tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "report.html"
    for title in ("first", "second"):
        assert write_report(report.history, path, audit=report.audit, statements=report.statements, title=title) == path
    assert sorted(file.name for file in path.parent.iterdir()) == ["report.html", "report.json", "report.md"]
    assert json.loads(path.with_suffix(".json").read_text())["title"] == "second"
    assert "second" in path.read_text(encoding="utf-8")
    assert path.with_suffix(".md").read_text(encoding="utf-8").startswith("# second\n")


def test_another_kind_of_file_is_refused(report: Report, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ends in \.html"):
        write_report(report.history, tmp_path / "report.pdf")
    assert not list(tmp_path.iterdir())


def test_a_trust_mode_without_a_threat_model_is_refused(report: Report) -> None:
    with pytest.raises(ValueError, match="nothing was reported"):
        html(replace(report, history=replace(report.history, mode="Telepathy")))


def test_json_says_the_same_as_the_pages(report: Report) -> None:
    values = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert [spent["client"] for spent in values["spending"]] == list(report.clients)
    assert len(values["rounds"]) == 2
    assert len(values["checks"]) == len(report.checks)
    assert {"privfed", "torch", "opacus", "tenseal", "python"} <= set(values["versions"])
    assert values["audit"]["repeats"] == 2
    assert values["seconds"]["audit"] > 0


def test_infinite_and_missing_numbers_are_null_or_words(bare: Report) -> None:
    values = bare.to_json()
    assert json.dumps(values, allow_nan=False)
    assert values["spending"] == [{"client": f"bank_{i}", "epsilon": None, "delta": None, "budget": None} for i in range(3)]
    assert "infinite" in parsed(html(bare))[1]
    assert "The model was not evaluated." in markdown(bare)


# -- figures ------------------------------------------------------------------------------------------------------------------


def test_a_chart_has_a_point_per_round_and_leaves_gaps_for_what_is_not_there() -> None:
    chart = line_chart([Line(label="a", values=[0.1, math.nan, 0.3])], rounds=[1, 2, 3], title="t", top=1.0)
    assert chart.count("<circle") == 2
    assert "nan" not in chart


def test_labels_do_not_stand_on_each_other_and_stay_in_the_picture() -> None:
    lines = [Line(label=f"line {index}", values=[0.0, 0.0]) for index in range(6)]
    chart = line_chart(lines, rounds=[1, 2], title="t", reference=("zero", 0.0), top=1.0)
    heights = sorted(float(y) for y in re.findall(r'class="label[^"]*" x="\d+" y="([\d.]+)"', chart))
    assert len(heights) == 7
    assert all(after - before >= 13 for before, after in pairwise(heights))
    assert 0 < heights[0] < heights[-1] <= 220


def test_a_chart_of_one_round_and_one_of_many_are_drawn() -> None:
    assert "<circle" in line_chart([Line(label="a", values=[5.0])], rounds=[4], title="t")
    many = list(range(1, 201))
    chart = line_chart([Line(label="a", values=many)], rounds=many, title="t")
    assert "<circle" not in chart
    assert len(re.findall('text-anchor="middle"', chart)) <= 9


@pytest.mark.parametrize("lines", [[], [Line(label="a", values=[1.0])] * 7, [Line(label="a", values=[1.0, 2.0])]])
def test_a_chart_that_cannot_be_read_is_refused(lines: list[Line]) -> None:
    with pytest.raises(ValueError, match="one to six lines"):
        line_chart(lines, rounds=[1], title="t")


def test_a_bar_never_leaves_its_track() -> None:
    for value in (-3.0, 0.0, 0.4, 1.0, 7.0):
        bar = strip(value=value, low=-5.0, high=9.0, mark=2.0, tone="calm", title="t")
        widths = [float(width) for width in re.findall(r'class="bar calm" x="1" y="2" width="([\d.]+)"', bar)]
        assert widths == [round(158 * min(1, max(0, value)), 1)]
        assert all(0 <= float(x) <= 160 for x in re.findall(r' x[12]?="([\d.-]+)"', bar))


def test_figures_escape_their_labels() -> None:
    chart = line_chart([Line(label=NASTY, values=[1.0])], rounds=[1], title=NASTY, reference=(NASTY, 0.5))
    for figure in (chart, strip(value=0.5, tone="calm", title=NASTY)):
        assert "<script" not in figure
        assert '"quoted"' not in figure


@pytest.mark.parametrize("value", [1e-4, 0.03, 1.0, 2.01, 9.99, 60_224, 5e9])
def test_the_top_of_an_axis_is_round_and_not_below_the_value(value: float) -> None:
    top = nice_ceiling(value)
    assert value * (1 - 1e-9) <= top <= 2.5 * value
    assert float(f"{top:.2g}") == pytest.approx(top)
    assert len(compact(top)) <= 6


def test_a_spent_budget_is_said_where_it_is_spent_and_is_no_advice(report: Report) -> None:
    history = report.history
    spent = replace(report, history=replace(history, budget=dict.fromkeys(history.budget, 1.05 * max(history.epsilon.values()))))
    words = "Hardly another round fits into the budget of bank_0, bank_1, bank_2:"
    assert words in parsed(html(spent))[1]
    assert words not in parsed(html(report))[1]
    assert advice(spent) == advice(report)


def test_a_cell_that_was_read_looks_like_danger_and_one_that_was_missed_does_not(report: Report) -> None:
    page = html(report)
    shown = examples(report.audit)
    read = sum(cell.right and not cell.luck for example in shown for row in example.rows for cell in row.said)
    luck = sum(cell.right and cell.luck for example in shown for row in example.rows for cell in row.said)
    assert all(cell.luck for example in shown for row in example.rows if row.guessed for cell in row.said)
    missed = sum(not cell.right for example in shown for row in example.rows for cell in row.said)
    assert read > 0 < missed
    assert (page.count('<td class="read">'), page.count('<td class="luck">'), page.count('<td class="missed">')) == (read, luck, missed)
    css = page[page.index("<style>") : page.index("</style>")]
    assert re.search(r"td\.read, span\.read \{ background: var\(--bad-soft\)", css)


def test_every_word_that_is_explained_is_used(report: Report) -> None:
    text = parsed(html(report))[1]
    start = text.rindex(" Words ")
    for word, meaning in GLOSSARY:
        assert meaning in text[start:]
        assert any(part.strip().lower() in text[:start].lower() for part in word.split(",")), word


def test_the_first_page_names_what_each_client_spent_and_links_to_where_it_is_explained(report: Report) -> None:
    spent = {one.name: f"{one.epsilon:.2f}" for one in report.spending}
    (budget,), (delta,) = {one.budget for one in report.spending}, {one.delta for one in report.spending}
    line = f"{', '.join(f'{name} {epsilon}' for name, epsilon in spent.items())} of {budget:g}; at delta {delta:g}"
    assert spent_words(report) == line
    page = html(report)
    assert page.index(f"in epsilon: {line}.") < page.index("Who can read what")
    (anchor,) = re.findall(r'href="#([^"]+)">Privacy spent<', page)
    assert f'<h2 id="{anchor}">Privacy spent, and promised</h2>' in page
    text = markdown(report)
    assert text.index(f"[Privacy spent](#{anchor}), in epsilon: ") < text.index("## Who can read what")
    assert "## Privacy spent, and promised" in text


def test_what_clients_with_other_limits_spent_is_told_with_their_own(report: Report, bare: Report) -> None:
    assert spent_words(bare) == ", ".join(f"{name} infinite" for name in bare.clients)
    first, *others = report.clients
    history = replace(report.history, budget={**report.history.budget, first: 100.0})
    first_line, rest = spent_words(replace(report, history=history)).split(". ")[0], spent_words(replace(report, history=history))
    assert first_line.startswith(f"{first} ")
    assert " of 100; at delta" in rest
    assert all(f"{name} " in rest[rest.index(" of 100; at delta") :] for name in others)


def test_a_report_says_how_batches_customers_and_clipping_were_bounded(report: Report) -> None:
    (name, training), *_ = report.history.training.items()
    assert isinstance(training, DpSgd)
    clipping = AdaptiveClipping(initial_norm=0.5, target_quantile=0.5, learning_rate=0.2, count_noise=20.0)
    for variant, words in (
        ({"batch_capacity": 300}, "at most 300 records per step"),
        ({"records_per_customer": 2}, "at most 2 records per customer"),
        ({"adaptive_clipping": clipping}, "clipping norm adaptive, at most"),
    ):
        changed = replace(report.history, training={**report.history.training, name: replace(training, **variant)})
        assert words not in html(report)
        assert words in html(replace(report, history=changed))


# -- the first page -----------------------------------------------------------------------------------------------------------


def judged(report: Report, wanted: Callable[[Finding], Verdict]) -> Report:
    """The report of an audit whose audited findings compare with guessing as is wanted."""
    ends = {Verdict.BETTER: (0.1, 0.3), Verdict.UNDECIDED: (-0.3, 0.3), Verdict.NO_BETTER: (-0.1, 0.01), Verdict.WORSE: (-0.3, -0.1)}
    assert report.audit is not None
    findings: list[Finding] = []
    for finding in report.audit.findings:
        outcome = finding.outcome
        if isinstance(outcome, Measured) and not finding.control:
            low, high = ends[wanted(finding)]
            gain = replace(outcome.gain, mean=(low + high) / 2, low=low, high=high, repeats=10_000)
            findings.append(replace(finding, outcome=replace(outcome, gain=gain, certified=0.0)))
            assert findings[-1].verdict is wanted(finding)
        elif isinstance(outcome, Measured) and finding.about_records:
            low, high = ends[Verdict.BETTER]
            findings.append(replace(finding, outcome=replace(outcome, gain=replace(outcome.gain, low=low, high=high))))
        else:
            findings.append(finding)
    return replace(report, audit=replace(report.audit, findings=tuple(findings)))


def calm(report: Report) -> Report:
    return judged(report, lambda finding: Verdict.NO_BETTER)


def spending(report: Report, epsilon: float) -> Report:
    """The report of a run in which every client spent as much."""
    history = report.history
    rounds = tuple(replace(summary, epsilon=dict.fromkeys(summary.epsilon, epsilon)) for summary in history.rounds)
    return replace(report, history=replace(history, rounds=rounds, budget=dict.fromkeys(history.budget, 1e6)), statements=())


def with_coefficients(report: Report, *coefficients: int) -> Report:
    (summary, *_) = report.history.rounds
    record = replace(summary.record, coefficients={f"bank_{index}": number for index, number in enumerate(coefficients)})
    return replace(report, history=replace(report.history, rounds=(replace(summary, record=record),)))


def test_a_client_that_a_rule_left_out_is_not_counted_in_the_sum(report: Report) -> None:
    (held,) = rounds(with_coefficients(report, 1, 1, 1, 0, 0).history)
    assert (held.clients, held.effective) == (3, "3.0")


def leads(points: Iterable[Point]) -> list[str]:
    return [point.lead for point in points]


def test_the_first_page_says_who_can_read_what_how_sure_and_what_to_do(report: Report) -> None:
    _, text = parsed(html(calm(report)))
    assert "The server and an outsider on the network: nothing: it is ciphertext to them." in text
    assert (
        "Another client together with the server: every client's update, with the clients' noise in it. This is the weakest point." in text
    )
    assert "With the protection taken away:" in text
    assert "records certified" in text
    assert "Keep the server apart from the clients." in text
    order = ["No attack read a record.", "Who can read what", "How sure that is", "What to do", "Party by party", "Attack by attack"]
    assert [text.index(words) for words in order] == sorted(text.index(words) for words in order)


def test_a_record_that_was_read_is_the_first_thing_that_is_said_and_the_run_is_to_stop(report: Report) -> None:
    read = judged(report, lambda finding: Verdict.BETTER if finding.attack == SUITE[1].name else Verdict.UNDECIDED)
    assert (verdict(read).tone, verdict(read).lead) == (Tone.DANGER, "Records were read under the protection in use")
    assert leads(advice(read))[0] == "Stop here."
    assert "Audit with more batches." not in leads(advice(read))
    assert "at most" not in certainty(read)[0].text
    assert '<div class="verdict danger">' in html(read)


@pytest.mark.parametrize("how", [Verdict.NO_BETTER, Verdict.WORSE, Verdict.UNDECIDED])
def test_nobody_is_told_to_stop_where_nothing_was_read_above_guessing(report: Report, how: Verdict) -> None:
    assert "Stop here." not in leads(advice(judged(report, lambda finding: how)))
    labels = judged(report, lambda finding: Verdict.BETTER if finding.attack == SUITE[2].name else how)
    assert "Stop here." not in leads(advice(labels))
    assert verdict(labels).tone is not Tone.DANGER


def test_labels_that_were_counted_are_told_apart_from_records(report: Report) -> None:
    labels = judged(report, lambda finding: Verdict.BETTER if finding.attack == SUITE[2].name else Verdict.NO_BETTER)
    assert verdict(labels).tone is Tone.CAUTION
    assert "learned something about many of them" in verdict(labels).lead
    assert leads(advice(labels))[0] == "Ask whether labels may be counted."
    assert "of batches counted exactly" in verdict(labels).text


def test_an_audit_that_cannot_tell_says_so(report: Report) -> None:
    undecided = judged(report, lambda finding: Verdict.UNDECIDED)
    assert (verdict(undecided).tone, verdict(undecided).lead) == (Tone.CAUTION, "The audit is too small to tell")
    assert "2 batches are too few to rule out that one reads a record in every second batch" in verdict(undecided).text
    assert "the most that any may have gained is 30 points" in verdict(undecided).text
    assert "the most that any may have gained is 1 point " in verdict(calm(report)).text
    assert leads(advice(undecided))[0] == "Audit with more batches."
    labels = judged(report, lambda finding: Verdict.UNDECIDED if finding.attack == SUITE[2].name else Verdict.NO_BETTER)
    assert verdict(labels).tone is Tone.CALM
    assert "Not decided, in 2 batches: number of positive labels." in verdict(labels).text


def test_an_audit_of_two_batches_does_not_say_that_no_more_than_nothing_was_gained(report: Report) -> None:
    assert report.audit is not None
    silent = [
        replace(f, outcome=replace(f.outcome, gain=replace(f.outcome.gain, mean=0.0, low=0.0, high=0.0, repeats=2)))
        if isinstance(f.outcome, Measured) and not f.control
        else f
        for f in calm(report).audit.findings  # type: ignore[union-attr]
    ]
    told = replace(report, audit=replace(report.audit, findings=tuple(silent)))
    assert verdict(told).lead == "The audit is too small to tell"
    highest = max(f.outcome.highest_gain for f in silent if isinstance(f.outcome, Measured) and f.about_records and not f.control)
    # In two batches an attack is not seen that reads all of 78 % of them: 1 - 0.05^(1/2).
    assert highest > 0.4
    assert f"the most that any may have gained is {100 * highest:.0f} points" in verdict(told).text
    one = next(f for f in silent if f.verdict and not f.control)
    assert gain_words(one) == "the same as guessing, in too few batches to tell"


def test_a_party_as_which_no_attack_reads_records_without_protection_is_not_called_safe(report: Report) -> None:
    audit = calm(report).audit
    assert audit is not None
    assert audit.untested == ()
    for change in (
        lambda f: replace(f, outcome=NotApplicable(reason="of the model")) if f.party == OTHER_CLIENT.name and f.about_records else f,
        lambda f: (
            replace(f, outcome=replace(f.outcome, gain=replace(f.outcome.gain, low=-0.1), certified=0.0))
            if f.control and f.party == OTHER_CLIENT.name and f.about_records
            else f
        ),
    ):
        blunt = replace(audit, findings=tuple(change(finding) for finding in audit.findings))
        assert blunt.untested == (OTHER_CLIENT.name,)
        assert blunt.controls_succeed
        told = replace(report, audit=blunt)
        assert verdict(told).tone is Tone.CAUTION
        assert OTHER_CLIENT.name in verdict(told).text
        assert certainty(told)[0].tone is Tone.CAUTION


def test_an_audit_without_any_attack_on_records_says_nothing_about_them(report: Report) -> None:
    audit = calm(report).audit
    assert audit is not None
    blunt = replace(
        audit, findings=tuple(replace(f, outcome=NotApplicable(reason="of it")) if f.about_records else f for f in audit.findings)
    )
    assert any(f.verdict is Verdict.BETTER for f in blunt.controls)
    assert not blunt.controls_succeed
    assert verdict(replace(report, audit=blunt)).lead == "The audit says nothing about this model"


def test_the_largest_gain_that_is_not_excluded_is_on_the_first_page(report: Report) -> None:
    assert "a gain of at most 1 point (95% confidence)" in certainty(calm(report))[0].text
    one = judged(report, lambda finding: Verdict.UNDECIDED if finding.attack == SUITE[1].name else Verdict.NO_BETTER)
    assert "a gain of at most 30 points (95% confidence)" in certainty(one)[0].text


def test_exposure_follows_from_the_trust_mode_and_the_noise(report: Report, bare: Report) -> None:
    rows = {row.party: row for row in exposed(report)}
    assert [row.exposure for row in rows.values()] == [Exposure.CIPHERTEXT] * 2 + [Exposure.NOISED] * 3
    assert [row.holds_key for row in rows.values()] == [False, False, True, True, True]
    server = rows["the server"]
    assert server.finding is not None
    assert server.control is not None
    assert server.finding.sentence().startswith("nothing to attack: only ciphertext")
    assert "certified" in server.control.sentence()
    clear = {row.party: row for row in exposed(bare)}
    assert set(clear) == {"the server", "any client, opening the sum as all do", "a client that also subtracts its own update"}
    assert {row.exposure for row in clear.values()} == {Exposure.CLEAR}
    assert {row.finding for row in clear.values()} == {None}
    assert "not audited" in parsed(html(bare))[1]


def test_parties_that_see_the_same_are_told_together_and_the_weakest_last(report: Report, bare: Report) -> None:
    assert leads(readers(report)) == [
        "The server and an outsider on the network",
        "Any client, opening the sum as all do",
        "A client that also subtracts its own update",
        "Another client together with the server",
    ]
    assert leads(readers(bare))[-1] == "The server"
    for points in (readers(report), readers(bare)):
        assert [point.text.endswith("This is the weakest point.") for point in points] == [False] * (len(points) - 1) + [True]


def test_seeded_noise_is_reported_as_no_noise(report: Report) -> None:
    seeded = replace(calm(report), history=replace(report.history, private=False))
    assert Exposure.NOISED not in {row.exposure for row in exposed(seeded)}
    assert verdict(seeded).lead == "No differential privacy is claimed for this run"
    assert certainty(seeded)[1].text.startswith("None:")
    assert "Draw the noise from the operating system." in leads(advice(seeded))
    assert "Train with differential privacy." not in leads(advice(seeded))
    assert "98.2%" not in html(seeded)


def test_a_run_without_protection_is_told_what_would_help(bare: Report) -> None:
    assert leads(advice(bare)) == ["Encrypt.", "Train with differential privacy.", "Have it attacked.", "Take in more clients."]
    assert "No client adds noise" in advice(bare)[1].text
    assert verdict(bare).tone is Tone.DANGER


def test_a_single_client_without_noise_is_named(report: Report) -> None:
    mixed = replace(report.history, training={**report.history.training, "bank_2": OPEN}, private=False)
    (point,) = [point for point in advice(replace(report, history=mixed)) if point.lead == "Train with differential privacy."]
    assert point.text.startswith("No noise is added by bank_2,")


def test_a_run_that_was_not_attacked_says_so(report: Report) -> None:
    alone = replace(report, audit=None)
    assert verdict(alone).lead == "No attack was tried on this run"
    assert "Have it attacked." in leads(advice(alone))
    assert "measured" not in certainty(alone)[1].text


def test_attacks_that_never_succeed_are_no_evidence(report: Report) -> None:
    assert report.audit is not None
    useless = replace(report.audit, findings=calm(report).audit.audited)  # type: ignore[union-attr]
    broken = replace(report, audit=useless)
    assert verdict(broken).lead == "The audit says nothing about this model"
    assert "says nothing about this model" in certainty(broken)[0].text
    assert [check.holds for check in broken.checks if "attacks of the audit" in check.claim] == [False]
    assert "they do NOT" in html(broken)


def test_a_claim_that_fails_is_on_the_first_page(report: Report) -> None:
    failing = Check(claim="The moon is made of cheese.", evidence="it was looked at", holds=False)
    failed = replace(calm(report), further_checks=(failing,))
    assert (verdict(failed).tone, verdict(failed).lead) == (Tone.DANGER, "Not all that is claimed holds")
    assert "The moon is made of cheese." in verdict(failed).text
    assert "do NOT hold: The moon is made of cheese." in certainty(failed)[2].text
    assert leads(advice(failed))[0] == "Find out why a claim fails."


def test_what_was_not_tested_is_not_said_to_hold(report: Report) -> None:
    assert [Check(claim="", evidence="", holds=holds).verdict for holds in (True, False, None)] == ["holds", "does not hold", "not tested"]
    point = certainty(replace(report, further_checks=(Check(claim="c", evidence="e", holds=None),)))[2]
    assert (point.tone, point.text) == (Tone.CAUTION, "10 of 11 that are listed below hold. 1 could not be tested.")


@pytest.mark.parametrize(
    ("epsilon", "share", "tone", "words"),
    [
        (0.5, "62.2%", Tone.CALM, "That is strong"),
        (4.0, "98.2%", Tone.CAUTION, "limits the best-informed attack without ruling it out"),
        (20.0, "over 99.9%", Tone.DANGER, "rules out nearly nothing"),
    ],
)
def test_what_an_epsilon_means_is_said_beside_a_coin(report: Report, epsilon: float, share: str, tone: Tone, words: str) -> None:
    spend_less = tone is not Tone.CALM
    spent = spending(calm(report), epsilon)
    promise = certainty(spent)[1]
    assert promise.tone is tone
    assert f"{share} of the time at most; a coin is right 50%" in promise.text
    assert words in promise.text
    assert ("Strong would be epsilon 1, and 73.1%" in promise.text) is spend_less
    assert ("Spend less privacy." in leads(advice(spent))) is spend_less
    assert verdict(spent).tone is (Tone.CAUTION if tone is Tone.DANGER else Tone.CALM)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
def test_the_best_guess_is_that_of_the_statement(report: Report, epsilon: float) -> None:
    # The posterior at even odds of the two-point mechanism that is just (epsilon, delta)-private.
    keep = math.exp(epsilon) / (1 + math.exp(epsilon))
    assert best_guess(epsilon, 1e-5) == f"{1e-5 + (1 - 1e-5) * keep:.1%}"
    for statement in report.statements:
        assert best_guess(statement.epsilon, statement.delta) == f"{statement.best_guess:.1%}"


def test_promises_to_customers_are_not_said_to_be_about_records(report: Report) -> None:
    history = report.history
    training = {name: replace(how, records_per_customer=2) for name, how in history.training.items() if isinstance(how, DpSgd)}
    customers = replace(report, history=replace(history, training=training))
    assert "whether a given customer was used" in certainty(customers)[1].text
    assert "whether a given record was used" in certainty(report)[1].text
    assert "Right about one customer, at most" in parsed(html(customers))[1]


@pytest.mark.parametrize(
    ("coefficients", "words"),
    [
        ((1, 1), "of 2 clients: a client that takes its own update out of it is left with the update of the other one."),
        ((1, 1, 1), "of 3 clients: a client that takes its own update out of it is left with a sum of 2."),
        ((1, 1, 1, 0), "of 3 clients: a client that takes its own update out of it is left with a sum of 2."),
        ((1, 1, 1, 1), "of 4 clients: a client that takes its own update out of it is left with a sum of 3."),
        ((7,), "of 1 client: it is that client's update."),
    ],
)
def test_advice_counts_the_clients_that_there_were(report: Report, coefficients: tuple[int, ...], words: str) -> None:
    (point,) = [point for point in advice(with_coefficients(report, *coefficients)) if point.lead == "Take in more clients."]
    assert words in point.text


def test_ten_clients_are_enough_unless_one_of_them_weighs_nearly_all(report: Report) -> None:
    even = leads(advice(with_coefficients(report, *[1] * 10)))
    assert "Take in more clients." not in even
    assert "Even out the weights." not in even
    skewed = advice(with_coefficients(report, 50, *[1] * 9))
    (point,) = [point for point in skewed if point.lead == "Even out the weights."]
    assert "of 10 clients, is worth one of 1.4 with equal weight" in point.text
    assert "Take in more clients." not in leads(skewed)


def test_faults_are_advised_about_and_clients_keep_the_names_they_have(report: Report) -> None:
    (summary, *_) = report.history.rounds
    refused = replace(summary, record=replace(summary.record, refused=("bank_2",)))
    points = {point.lead: point.text for point in advice(replace(report, history=replace(report.history, rounds=(refused,))))}
    assert "every round of bank_2, which sat out" in points["Plan the budget for all rounds."]
    points = {point.lead: point.text for point in advice(report)}
    assert points["Find out why rounds failed."].startswith("1 round was not held. Nothing was opened")
    assert "from bank_3 in some rounds" in points["Look after clients that fall silent."]
    assert "Plan the budget for all rounds." not in points
    calm_run = replace(report, history=replace(report.history, failed=(), rounds=report.history.rounds[:1]))
    assert not {"Find out why rounds failed.", "Look after clients that fall silent."} & set(leads(advice(calm_run)))


def test_a_budget_without_a_limit_is_advised_against(report: Report) -> None:
    assert "Set a budget." not in leads(advice(report))
    history = report.history
    unlimited = replace(report, history=replace(history, budget={**history.budget, "bank_1": math.inf}))
    (point,) = [point for point in advice(unlimited) if point.lead == "Set a budget."]
    assert "the epsilon of bank_1 from growing" in point.text
    assert "no limit" in parsed(html(unlimited))[1]
    assert json.dumps(unlimited.to_json(), allow_nan=False)


# -- claims -------------------------------------------------------------------------------------------------------------------


def test_checks_recompute_what_they_claim(report: Report) -> None:
    assert all(check.holds for check in report.checks)
    history = report.history
    over = replace(report, history=replace(history, budget=dict.fromkeys(history.budget, 0.1)))
    assert [check.claim for check in over.checks if check.holds is False] == ["No client spent more than its privacy budget."]
    off = tuple(replace(summary, grid_error_max=3) for summary in history.rounds)
    changed = replace(report, history=replace(history, rounds=off))
    assert [check.claim for check in changed.checks if check.holds is False] == ["Decryption gave exactly the sum of what was encrypted."]
    few = with_coefficients(report, 9, 1)
    assert few.checks[0].holds is False
    unknown = replace(report, history=replace(history, rounds=(replace(history.rounds[0], grid_error_max=None),)))
    assert [check.holds for check in unknown.checks if check.claim.startswith("Decryption")] == [None]


def test_a_delta_that_would_allow_giving_records_away_fails_on_the_first_page(report: Report) -> None:
    claim = "Delta is below one over the number of records, at every client."
    (held,) = [check for check in report.checks if check.claim == claim]
    assert held.holds
    for delta, shown in ((0.01, "6.4"), (1 / 640, "1")):
        careless = replace(
            calm(report), history=replace(report.history, delta=dict(report.history.delta) | {"bank_2": delta}), statements=()
        )
        (failed,) = [check for check in careless.checks if check.claim == claim]
        assert failed.holds is False
        assert f"closest at bank_2: delta {delta:g} times at most 640 records is {shown}, and has to be below 1" in failed.evidence
        assert claim in verdict(careless).text
    just = replace(report, history=replace(report.history, delta=dict(report.history.delta) | {"bank_2": 0.999 / 640}), statements=())
    assert all(check.holds for check in just.checks)
    stated = edited_statement(report, delta=0.01)
    assert "closest at bank_1: delta 0.01" in next(check.evidence for check in stated.checks if check.claim == claim)


SAID = "How each client is said to have trained is what its ledger charged."


def claimed(report: Report, claim: str) -> Check:
    (check,) = [check for check in report.checks if check.claim == claim]
    return check


def test_training_is_compared_with_what_the_ledgers_charged(report: Report) -> None:
    check = claimed(report, SAID)
    assert check.holds
    assert check.evidence.startswith("compared bank_0, bank_1, bank_2, bank_3")
    assert SAID not in {check.claim for check in replace(report, statements=()).checks}
    fewer = claimed(replace(report, statements=report.statements[1:]), SAID)
    assert fewer.holds is None
    assert fewer.evidence.endswith("no statement about bank_0")


def edited_training(report: Report, **change: object) -> Report:
    history = report.history
    training = history.training["bank_1"]
    assert isinstance(training, DpSgd)
    return replace(report, history=replace(history, training={**history.training, "bank_1": replace(training, **change)}))  # type: ignore[arg-type]


def fewer_charges(report: Report) -> Report:
    """The ledger of bank_1 was charged for all of its rounds but one."""
    statements = list(report.statements)
    first = statements[1]
    assert len(first.events) > 1
    statements[1] = PrivacyStatement.of(first.events[1:], population="bank_1", delta=first.delta, max_grad_norm=1.0)
    return replace(report, statements=tuple(statements))


def test_statements_about_others_alone_are_compared_with_nobody(report: Report) -> None:
    strangers = tuple(replace(statement, population=f"another {statement.population}") for statement in report.statements)
    history = replace(report.history, delta={})
    check = claimed(replace(report, history=history, statements=strangers), SAID)
    assert check.holds is None
    assert check.evidence.startswith("compared nobody")


def edited_statement(report: Report, **change: object) -> Report:
    def other(statement: PrivacyStatement) -> PrivacyStatement:
        if statement.population != "bank_1":
            return statement
        known = {"population": "bank_1", "delta": statement.delta, "max_grad_norm": statement.max_grad_norm}
        return PrivacyStatement.of(statement.events, **(known | change))  # type: ignore[arg-type]

    return replace(report, statements=tuple(other(statement) for statement in report.statements))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda report: edited_training(report, noise_multiplier=9.0), "bank_1: another training"),
        (lambda report: edited_training(report, steps=1), "bank_1: another training"),
        (fewer_charges, "bank_1: another training"),
        (lambda report: edited_training(report, max_grad_norm=0.1), "bank_1: another clipping norm"),
        (lambda report: replace(report, history=replace(report.history, delta=report.history.delta | {"bank_1": 1e-9})), "another delta"),
        (lambda report: edited_statement(report, delta=1e-9), "bank_1: another delta"),
        (lambda report: edited_statement(report, adaptive_budget=Budget(epsilon=900.0, delta=1e-5)), "bank_1: another budget"),
        (lambda report: edited_statement(report, randomness=Randomness.SEEDED), "bank_1: another source of noise"),
    ],
)
def test_a_run_that_says_something_else_than_the_ledgers_fails_on_the_first_page(
    report: Report, edit: Callable[[Report], Report], words: str
) -> None:
    edited = edit(calm(report))
    check = claimed(edited, SAID)
    assert check.holds is False
    assert words in check.evidence
    assert SAID in verdict(edited).text


def with_events(report: Report, *more: Any, **terms: Any) -> Report:
    """The report of a run at which the ledger of bank_1 was charged for another job as well."""
    statements = list(report.statements)
    first = statements[1]
    statements[1] = PrivacyStatement.of([*first.events, *more], population="bank_1", delta=first.delta, max_grad_norm=1.0, **terms)
    return replace(report, statements=tuple(statements))


def test_epsilon_is_that_of_the_whole_ledger_and_not_of_this_run(report: Report) -> None:
    job = GaussianRelease(noise_multiplier=0.5)
    both = with_events(calm(report), job, job)
    spent = {spending.name: spending.epsilon for spending in both.spending}
    assert spent["bank_1"] == both.statements[1].epsilon > 2 * report.history.epsilon["bank_1"]
    assert spent["bank_0"] == report.statements[0].epsilon
    assert f"Epsilon {spent['bank_1']:.2f}" in certainty(both)[1].text
    assert f"{spent['bank_1']:.2f}" in parsed(html(both))[1]
    assert claimed(both, SAID).holds
    assert "bank_1 was charged 2 times more, which its epsilon includes" in claimed(both, SAID).evidence
    # A curve over this run's rounds would end below what is spent.
    assert "Privacy spent after each round" in html(report)
    assert "Privacy spent after each round" not in html(both)


def test_an_adaptive_ledger_promises_its_budget_and_that_is_what_is_reported(report: Report) -> None:
    history = report.history
    adaptive = with_events(calm(report), adaptive_budget=Budget(epsilon=history.budget["bank_1"], delta=1e-5))
    spent = adaptive.spending[1]
    assert spent.epsilon == history.budget["bank_1"] == 50.0 > history.epsilon["bank_1"]
    assert "Epsilon 50.00 of 50 at most" in certainty(adaptive)[1].text
    assert not spent.used_up
    assert all(check.holds for check in adaptive.checks)


def test_a_ledger_that_paid_for_something_without_noise_makes_the_report_not_private(report: Report) -> None:
    released = with_events(calm(report), NonPrivateRelease())
    assert report.private
    assert not released.private
    assert verdict(released).tone is Tone.DANGER
    assert "Find out what else was charged." in leads(advice(released))
    assert "Draw the noise from the operating system." not in leads(advice(released))
    assert Exposure.NOISED not in {row.exposure for row in exposed(released)}
    assert claimed(released, "No client spent more than its privacy budget.").holds is False


def test_a_budget_without_a_limit_is_no_claim_that_it_was_kept(report: Report) -> None:
    history = report.history
    claim = "No client spent more than its privacy budget."
    unlimited = replace(report, history=replace(history, budget=dict.fromkeys(history.budget, math.inf)))
    assert claim not in {check.claim for check in unlimited.checks}
    one = replace(report, history=replace(history, budget=history.budget | {"bank_1": math.inf}))
    assert claimed(one, claim).evidence == "epsilon within budget at 3 clients"
    over = with_events(report, GaussianRelease(noise_multiplier=0.05))
    assert claimed(over, claim).holds is False
    assert claimed(over, claim).evidence == "over budget: bank_1"


NOISED = "Every client's training adds the noise, and clips, as it declares."
TOLD_APART = "Who was in a training is told no better, of canaries, than its noise allows."


def with_reading(report: Report, **change: Any) -> Report:
    assert report.audit is not None
    first, second, *rest = report.audit.trainings
    assert second.reading is not None
    reading = replace(second.reading, **{name: made(second.reading) for name, made in change.items()})
    return replace(report, audit=replace(report.audit, trainings=(first, replace(second, reading=reading), *rest)))


def test_measured_training_is_claimed_with_its_numbers(report: Report, bare: Report) -> None:
    for claim, words in ((NOISED, "bank_3: noise"), (TOLD_APART, "bank_3: epsilon at least")):
        assert claimed(report, claim).holds
        assert words in claimed(report, claim).evidence
        assert claim not in {check.claim for check in bare.checks}
    assert report.audit is not None
    assert json.loads(json.dumps(report.to_json(), allow_nan=False))["audit"]["training_verdict"] == report.audit.training_verdict
    assert report.audit.training_verdict.startswith("As declared")


def test_noise_that_is_not_as_declared_fails_on_the_first_page(report: Report) -> None:
    quiet = with_reading(calm(report), noise=lambda reading: replace(reading.noise, measured=0.5, low=0.4, high=0.6))
    assert claimed(quiet, NOISED).holds is False
    assert "bank_1: less noise than declared" in claimed(quiet, NOISED).evidence
    assert claimed(quiet, TOLD_APART).holds
    assert (verdict(quiet).tone, verdict(quiet).lead) == (Tone.DANGER, "Not all that is claimed holds")
    assert NOISED in verdict(quiet).text
    heavy = with_reading(report, on_the_model=lambda reading: (replace(reading.weight, low=9.0, high=9.9),))
    assert "bank_1: records weigh more than declared" in claimed(heavy, NOISED).evidence


def test_canaries_that_are_told_apart_too_well_fail_on_the_first_page(report: Report) -> None:
    leaking = with_reading(calm(report), proved=lambda reading: reading.claimed + 1)
    assert claimed(leaking, TOLD_APART).holds is False
    assert claimed(leaking, NOISED).holds
    assert TOLD_APART in verdict(leaking).text


def test_training_that_was_not_measured_is_not_said_to_be_as_declared(report: Report) -> None:
    assert report.audit is not None
    first, *rest = report.audit.trainings
    unknown = replace(first, reading=None, missing="it is new")
    some = replace(report, audit=replace(report.audit, trainings=(unknown, *rest)))
    for claim in (NOISED, TOLD_APART):
        assert claimed(some, claim).holds is None
        assert "not measured at bank_0: it is new" in claimed(some, claim).evidence


def test_every_kind_of_key_that_a_consortium_can_have_has_a_table_of_parties() -> None:
    kinds = get_type_hints(Consortium, vars(consortium_module) | {"SharedKey": SharedKey, "EscrowKey": EscrowKey})["keys"]
    assert {kind.__name__ for kind in get_args(kinds)} == set(ADVERSARIES)


# -- tables -------------------------------------------------------------------------------------------------------------------


def test_every_audited_finding_stands_beside_its_control(report: Report) -> None:
    audit = report.audit
    assert audit is not None
    parties = compared(audit)
    assert [party.name for party in parties] == [*audit.parties, "the server of a run without encryption"]
    shown = [row for party in parties for row in party.rows]
    assert {id(row.audited) for row in shown if row.audited} == {id(finding) for finding in audit.audited}
    assert sorted(id(row.control) for row in shown if row.control) == sorted(id(finding) for finding in audit.controls)
    for row in shown:
        assert {finding.attack for finding in (row.audited, row.control) if finding} == {row.attack}
    assert [bool(party.nothing) for party in parties] == [True, True, False, False, False, False]
    assert compared(None) == ()


def test_the_gain_is_told_within_what_is_possible(report: Report) -> None:
    assert report.audit is not None
    finding = next(finding for finding in calm(report).audit.audited if finding.verdict)  # type: ignore[union-attr]
    outcome = finding.outcome
    assert isinstance(outcome, Measured)

    def told(low: float, high: float, certified: float = 0.0) -> str:
        gain = replace(outcome.gain, low=low, high=high)
        return gain_words(replace(finding, outcome=replace(outcome, gain=gain, baseline=0.3, certified=certified)))

    assert told(-0.05, 0.004) == "no better than guessing (-5 to 0 points)"
    assert told(-0.9, 0.9) == "too few batches to tell (-30 to +70 points)"
    assert told(0.0, 0.0) == "the same as guessing"
    assert told(-0.2, -0.1) == "worse than guessing (-20 to -10 points)"
    assert told(0.25, 0.5) == "better than guessing (+25 to +50 points)"
    assert told(-0.1, 0.1, certified=0.5) == "better than guessing (it certified records)"
    assert gain_words(report.audit.of("the server")[0]) == ""


def test_danger_is_for_records_that_were_read(report: Report) -> None:
    def tones(attack: int, how: Verdict) -> set[Tone | None]:
        audit = judged(report, lambda finding: how).audit
        assert audit is not None
        return {finding_tone(finding) for finding in audit.audited if finding.attack == SUITE[attack].name and finding.verdict}

    assert [tones(1, how) for how in Verdict] == [{Tone.DANGER}, {Tone.CAUTION}, {Tone.CALM}, {Tone.CALM}]
    assert [tones(2, how) for how in Verdict] == [{Tone.CAUTION}, {Tone.CAUTION}, {Tone.CALM}, {Tone.CALM}]


def test_no_tone_is_told_by_colour_alone(report: Report) -> None:
    page = html(report)
    told = re.findall(r'<span class="(?:badge|sign|held) (calm|caution|danger)"[^>]*>(.)', page)
    assert len(told) > 30
    assert all(sign == Tone[style.upper()].value for style, sign in told)


def test_holdings_are_a_column_per_party_and_tell_what_is_of_each_client_once(report: Report) -> None:
    audit = report.audit
    assert audit is not None
    things = {thing.what: dict(zip(audit.holdings, thing.by, strict=True)) for thing in holdings(audit)}
    update = things["encrypted update of each client"]
    size = next(held.size for held in audit.holdings["the server"] if held.what == "encrypted update of canary_1")
    assert update["the server"] == Held(form="sealed", size=f"3 times {size:,}", tone=Tone.CALM)
    assert update["another client together with the server"] == Held(form="can open", size=f"3 times {size:,}", tone=Tone.CAUTION)
    assert update["a client that also subtracts its own update"] is None
    assert {who for who, held in things["the key of the round"].items() if held} == set(audit.holdings) - {
        "the server",
        "an outsider on the network",
    }
    for name, held in audit.holdings.items():
        shown = [things[what][name] for what in things]
        assert sum(int(cell.size.partition(" times ")[0]) if "times" in cell.size else 1 for cell in shown if cell) == len(held)


def test_what_statements_have_in_common_is_said_once_and_the_rest_in_full(report: Report) -> None:
    assert {part.name for part in common(report.statements)} >= {"Protected", "Released", "Not covered"}
    page = parsed(html(report))[1]
    visible = page[: page.index("The whole statement of")]
    assert visible.count(report.statements[0].not_covered[0]) == 1
    asked = GaussianRelease(noise_multiplier=9.0)
    other = PrivacyStatement.of([asked], population="bank_0", delta=1e-5, max_grad_norm=None)
    assert "Released" not in {part.name for part in common((other, *report.statements[1:]))}
    assert common(()) == ()
    values = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert [PrivacyStatement.from_json(json.dumps(statement)) for statement in values["statements"]] == list(report.statements)


def test_what_travelled_is_told_in_bytes(report: Report, bare: Report) -> None:
    assert f"({report.history.bytes_up_per_parameter:.2f} per weight of the model)" in traffic(report.history)
    assert traffic(bare.history) == ""


def test_the_json_file_has_the_first_page_in_words(report: Report, tmp_path: Path) -> None:
    path = write_report(report.history, tmp_path / "report.html", audit=report.audit, statements=report.statements)
    values = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    assert values["verdict"] == {"tone": verdict(report).tone.style, "lead": verdict(report).lead, "text": verdict(report).text}
    assert [point["lead"] for point in values["what_to_do"]] == leads(advice(report))
    assert len(values["who_can_read_what"]) == 4
    assert len(values["how_sure"]) == 3


def test_a_page_for_paper_is_light_and_a_page_at_night_dark(report: Report) -> None:
    page = html(report)
    assert "prefers-color-scheme: dark" in page
    paper = page[page.index("@media print") :]
    assert "--paper: #ffffff" in paper
    assert "break-inside: avoid" in paper
    assert all('aria-label="' in svg for svg in re.findall(r"<svg[^>]*>", page))
    assert not re.search(r'aria-label=""', page)
