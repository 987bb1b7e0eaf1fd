import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from privfed.audit.canaries import Canaries, transaction_schema
from privfed.audit.findings import Audit
from privfed.audit.run import run_audit
from privfed.audit.suite import _texts
from privfed.consortium import Consortium, Plaintext
from privfed.data.paysim import PRE, money_of
from privfed.dp.statement import PrivacyStatement
from privfed.engines.local import simulate
from privfed.history import History
from privfed.report.checks import Check
from privfed.report.figures import Line, compact, line_chart, nice_ceiling, strip
from privfed.report.glossary import GLOSSARY
from privfed.report.model import Report
from privfed.report.summary import Exposure, advice, exposed, headlines
from privfed.report.tables import examples
from privfed.report.write import html, markdown, write_report
from privfed.round import Stage
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
        assert not re.search(r"https?:|src=|href=|@import|url\(|<script|<link|<iframe|javascript:", page)


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


def test_the_first_page_says_who_can_read_what_how_sure_and_what_would_help(report: Report) -> None:
    _, text = parsed(html(report))
    assert "The server and an outsider on the network can read nothing: only ciphertext, without the key." in text
    assert "The weakest point is another client together with the server" in text
    assert "With the protection taken away, the same attacks had" in text
    assert "certified exact" in text
    assert "Let a party run the server that no client controls." in text
    assert text.index("In short") < text.index("Who can read what") < text.index("What would help") < text.index("attack by attack")


def test_exposure_follows_from_the_trust_mode_and_the_noise(report: Report, bare: Report) -> None:
    rows = {row.party: row for row in exposed(report)}
    assert [row.exposure for row in rows.values()] == [Exposure.CIPHERTEXT] * 2 + [Exposure.NOISED] * 3
    assert [row.holds_key for row in rows.values()] == [False, False, True, True, True]
    assert rows["the server"].evidence.startswith("nothing to attack: only ciphertext")
    assert "certified exact" in rows["the server"].control
    clear = {row.party: row for row in exposed(bare)}
    assert set(clear) == {"the server", "whoever opens the sum", "another client"}
    assert {row.exposure for row in clear.values()} == {Exposure.CLEAR}
    assert {row.bound for row in clear.values()} == {"nothing"}
    assert {row.evidence for row in clear.values()} == {"not audited"}


def test_seeded_noise_is_reported_as_no_noise(report: Report) -> None:
    seeded = replace(report, history=replace(report.history, private=False))
    assert Exposure.NOISED not in {row.exposure for row in exposed(seeded)}
    assert any("No differential privacy is claimed" in line for line in headlines(seeded))
    assert any("Train with differential privacy" in line for line in advice(seeded))


def test_a_run_without_protection_is_told_what_would_help(bare: Report) -> None:
    lines = advice(bare)
    assert lines[0].startswith("Encrypt.")
    assert lines[1].startswith("Train with differential privacy")
    assert any("No attack was tried" in line for line in headlines(bare))


def test_attacks_that_never_succeed_are_no_evidence(report: Report) -> None:
    assert report.audit is not None
    useless = replace(report.audit, findings=report.audit.audited)
    broken = replace(report, audit=useless)
    assert any("the audit says nothing about this model" in line for line in headlines(broken))
    assert [check.holds for check in broken.checks if "attacks of the audit" in check.claim] == [False]
    assert "here they do NOT" in html(broken)


def test_a_claim_that_fails_is_on_the_first_page(report: Report) -> None:
    failing = Check(claim="The moon is made of cheese.", evidence="it was looked at", holds=False)
    lines = headlines(replace(report, further_checks=(failing,)))
    assert "A claim did NOT stand its test: The moon is made of cheese." in lines
    assert not any("stood their test" in line for line in lines)


def test_what_was_not_tested_is_not_said_to_hold() -> None:
    assert [Check(claim="", evidence="", holds=holds).verdict for holds in (True, False, None)] == ["holds", "does not hold", "not tested"]


def test_checks_recompute_what_they_claim(report: Report) -> None:
    assert all(check.holds for check in report.checks)
    history = report.history
    over = replace(report, history=replace(history, budget=dict.fromkeys(history.budget, 0.1)))
    assert [check.claim for check in over.checks if check.holds is False] == ["No client spent more than its privacy budget."]
    off = tuple(replace(summary, grid_error_max=3) for summary in history.rounds)
    changed = replace(report, history=replace(history, rounds=off))
    assert [check.claim for check in changed.checks if check.holds is False] == ["Encryption did not change the result."]
    lonely = replace(history.rounds[0], record=replace(history.rounds[0].record, coefficients={"bank_0": 9, "bank_1": 1}))
    few = replace(report, history=replace(history, rounds=(lonely,)))
    assert few.checks[0].holds is False
    unknown = replace(report, history=replace(history, rounds=(replace(history.rounds[0], grid_error_max=None),)))
    assert [check.holds for check in unknown.checks if check.claim.startswith("Encryption")] == [None]


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


def test_a_delta_that_would_allow_giving_records_away_fails_on_the_first_page(report: Report) -> None:
    claim = "Delta is so small that giving away a whole record would break the promise, at every client."
    (held,) = [check for check in report.checks if check.claim == claim]
    assert held.holds
    careless = replace(report, history=replace(report.history, delta=dict(report.history.delta) | {"bank_2": 0.01}))
    (failed,) = [check for check in careless.checks if check.claim == claim]
    assert failed.holds is False
    assert "6.4 at most, at bank_2" in failed.evidence  # 640 records at most, by a delta of 0.01
    assert any(claim in line and "NOT" in line for line in headlines(careless))


def test_a_spent_budget_is_said_where_it_is_spent_and_is_no_advice(report: Report) -> None:
    history = report.history
    spent = replace(report, history=replace(history, budget=dict.fromkeys(history.budget, 1.05 * max(history.epsilon.values()))))
    words = "Hardly another round fits into the budget of bank_0, bank_1, bank_2:"
    assert words in parsed(html(spent))[1]
    assert words not in parsed(html(report))[1]
    assert advice(spent) == advice(report)


@pytest.mark.parametrize(("fewest", "left"), [(2, "the update of the other one"), (3, "a sum of 2"), (4, "a sum of 3")])
def test_advice_counts_the_clients_that_there_were(report: Report, fewest: int, left: str) -> None:
    summary = report.history.rounds[0]
    record = replace(summary.record, coefficients={f"bank_{index}": 1 for index in range(fewest)})
    small = replace(report, history=replace(report.history, rounds=(replace(summary, record=record),)))
    (line,) = [line for line in advice(small) if "Take in more clients" in line]
    assert f"of {fewest} clients" in line
    assert line.endswith(f"is left with {left}.")


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
    start = text.index("Words")
    for word, meaning in GLOSSARY:
        assert meaning in text[start:]
        assert any(part.strip().lower() in text[:start].lower() for part in word.split(",")), word


def test_sums_of_money_are_shown_as_money() -> None:
    schema = transaction_schema(PRE)
    canaries = Canaries.draw(schema, count=4, rng=np.random.default_rng(0))
    amount = _texts(canaries.rows[0], canaries)[-3]
    expected = money_of(canaries.rows[0][-3])
    assert amount == f"{expected:,.0f}"
    assert "." not in amount
