"""What would make a run safer."""

import math

from privfed.audit.findings import Verdict
from privfed.consortium import Plaintext
from privfed.he.secret import SharedKey
from privfed.he.threshold_key import ThresholdKey
from privfed.report.model import Report
from privfed.report.summary import STRONG_EPSILON, Point, best_guess, listed
from privfed.report.tone import Tone
from privfed.training.mechanism import DpSgd

_FEW_CLIENTS = 5


def advice(report: Report) -> tuple[Point, ...]:
    """What to do, most urgent first; what does not concern the run is not said."""
    return (*_urgent(report), *_protection(report), *_spending(report), *_clients(report), *_faults(report))


def _urgent(report: Report) -> list[Point]:
    points: list[Point] = []
    audit = report.audit
    read = [finding for finding in audit.audited if finding.reads_records] if audit else []
    if read:
        parties = listed(list(dict.fromkeys(finding.adversary.name for finding in read)))
        text = (
            f"Attacks read records better than guessing, seen from {parties}. Hold no further round, and give the model to nobody else, "
            "before there is more noise, or less that these can see."
        )
        points.append(Point(tone=Tone.DANGER, lead="Stop here.", text=text))
    elif audit is not None and audit.better_than_guessing:
        measures = listed(list(dict.fromkeys(finding.attack for finding in audit.better_than_guessing)))
        text = (
            f"Take this for known to whoever sees the numbers: {measures}. Differential privacy hides single records, not what many of a "
            "client's records have in common. If it must stay secret, more noise is needed."
        )
        points.append(Point(tone=Tone.CAUTION, lead="Ask whether labels may be counted.", text=text))
    if not read and audit is not None and any(finding.about_records and finding.verdict is Verdict.UNDECIDED for finding in audit.audited):
        text = f"{audit.repeats} are too few to tell whether attacks gain anything that matters. More of them cost time, and no privacy."
        points.append(Point(tone=Tone.CAUTION, lead="Audit with more batches.", text=text))
    failed = [check.claim for check in report.checks if check.holds is False]
    if failed:
        text = f"Do not rely on this report before it is known why: {' '.join(failed)}"
        points.append(Point(tone=Tone.DANGER, lead="Find out why a claim fails.", text=text))
    return points


def _protection(report: Report) -> list[Point]:
    history = report.history
    points: list[Point] = []
    if history.mode == Plaintext.__name__:
        text = "This run was in the clear, for comparison: whoever summed the updates saw each of them."
        points.append(Point(tone=Tone.DANGER, lead="Encrypt.", text=text))
    bare = [name for name, training in history.training.items() if not isinstance(training, DpSgd)]
    if bare:
        who = "No client adds noise" if len(bare) == len(history.training) else f"No noise is added by {listed(bare)}"
        text = f"{who}, so that whoever gets an update can look for records in it. Use DP-SGD, and a ledger with a budget, at every client."
        points.append(Point(tone=Tone.DANGER, lead="Train with differential privacy.", text=text))
    elif not history.private:
        text = "It came from a seed: whoever knows or tries the seed takes the noise off again. Leave the seed out."
        points.append(Point(tone=Tone.DANGER, lead="Draw the noise from the operating system.", text=text))
    elif not report.private:
        who = listed([statement.population for statement in report.statements if not statement.private])
        text = f"Of the records of {who} more was released, without noise that can be relied on, than this run did. See its statement."
        points.append(Point(tone=Tone.DANGER, lead="Find out what else was charged.", text=text))
    if report.audit is None:
        text = "Nobody has tried to read records under this protection yet. An audit does, on made-up records, and costs no privacy."
        points.append(Point(tone=Tone.CAUTION, lead="Have it attacked.", text=text))
    if history.mode == SharedKey.__name__:
        text = (
            "In this trust mode every client holds the key, so that one client together with the server can open every update. Let a party "
            "run the server that no client controls, and that keeps what it stores from all of them."
        )
        points.append(Point(tone=Tone.CAUTION, lead="Keep the server apart from the clients.", text=text))
    if history.mode == ThresholdKey.__name__:
        text = (
            "In this trust mode the server learns the sum of every round, and so does whoever reads what travels to it. It is as good as "
            "the noise in the updates."
        )
        points.append(Point(tone=Tone.CAUTION, lead="Count the server among those who know the model.", text=text))
    if history.mode == "EscrowKey":
        text = (
            "In this trust mode the key holder gets every upload and could open each, if it did not keep to the protocol. Let a party hold "
            "the key whom every client would show its update."
        )
        points.append(Point(tone=Tone.CAUTION, lead="Choose the key holder with care.", text=text))
    return points


def _spending(report: Report) -> list[Point]:
    if not report.private:
        return []
    points: list[Point] = []
    unlimited = [spent.name for spent in report.spending if spent.budget is None or math.isinf(spent.budget)]
    if unlimited:
        text = f"Nothing stops the epsilon of {listed(unlimited)} from growing with every round. A ledger with a budget refuses more."
        points.append(Point(tone=Tone.CAUTION, lead="Set a budget.", text=text))
    most = max(report.spending, key=lambda spent: spent.epsilon)
    if most.epsilon > STRONG_EPSILON:
        now, then = (best_guess(epsilon, most.delta) for epsilon in (most.epsilon, STRONG_EPSILON))
        text = (
            f"At epsilon {most.epsilon:.2f} the best-informed attack may be right {now} of the time; at epsilon {STRONG_EPSILON:g} it "
            f"would be {then}. Fewer rounds, more records per client, or more noise bring it down; the last costs accuracy."
        )
        points.append(Point(tone=Tone.CAUTION, lead="Spend less privacy.", text=text))
    return points


def _clients(report: Report) -> list[Point]:
    smallest = min((summary.record for summary in report.history.rounds), key=lambda record: record.effective_clients)
    count = sum(1 for coefficient in smallest.coefficients.values() if coefficient)
    worth = smallest.effective_clients
    if worth >= _FEW_CLIENTS:
        return []
    if count >= _FEW_CLIENTS or worth < count / 2:
        text = f"The smallest sum, of {count} clients, is worth one of {worth:.1f} with equal weight: it says most about the heaviest."
        return [Point(tone=Tone.CAUTION, lead="Even out the weights.", text=text)]
    if count == 1:
        alone = "it is that client's update"
    else:
        left = "the update of the other one" if count == 2 else f"a sum of {count - 1}"
        alone = f"a client that takes its own update out of it is left with {left}"
    text = f"The smallest sum is of {count} client{'' if count == 1 else 's'}: {alone}. The more clients, the less a sum says about each."
    return [Point(tone=Tone.CAUTION, lead="Take in more clients.", text=text)]


def _faults(report: Report) -> list[Point]:
    history = report.history
    points: list[Point] = []
    refused = list(dict.fromkeys(name for summary in history.rounds for name in summary.record.refused))
    if refused:
        text = (
            f"The budget did not cover every round of {listed(refused)}, which sat out. Agree on a budget that does before the "
            "next run; to raise it in a run breaks what was promised."
        )
        points.append(Point(tone=Tone.CAUTION, lead="Plan the budget for all rounds.", text=text))
    if history.failed:
        number = len(history.failed)
        text = (
            f"{number} {'round was' if number == 1 else 'rounds were'} not held. Nothing was opened, but what the clients trained for "
            f"{'it' if number == 1 else 'them'} stays charged to their budgets."
        )
        points.append(Point(tone=Tone.CAUTION, lead="Find out why rounds failed.", text=text))
    silent = list(dict.fromkeys(name for summary in history.rounds for name in summary.record.silent))
    if silent:
        text = f"There was no answer in time from {listed(silent)} in some rounds. Whoever is left out makes the sum smaller."
        points.append(Point(tone=Tone.CAUTION, lead="Look after clients that fall silent.", text=text))
    return points
