"""Claims about a run, each with what was looked at to test it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from privfed.audit.findings import Audit, Measured
from privfed.audit.metering import TrainingReading
from privfed.dp.statement import PrivacyStatement, Randomness
from privfed.history import History
from privfed.report.tone import Tone
from privfed.training.mechanism import DpSgd, TrainingMechanism


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A claim about a run, and what was looked at to test it. Public.

    Args:
        claim: In one sentence.
        evidence: What was looked at, and what was seen.
        holds: Whether the evidence bears the claim out; None if it could not be looked at.
    """

    claim: str
    evidence: str
    holds: bool | None

    @property
    def verdict(self) -> str:
        """The result in words."""
        return {True: "holds", False: "does not hold", None: "not tested"}[self.holds]

    @property
    def tone(self) -> Tone:
        """How alarming the result is."""
        return {True: Tone.CALM, False: Tone.DANGER, None: Tone.CAUTION}[self.holds]


def run_checks(history: History, *, encrypted: bool) -> tuple[Check, ...]:
    """What a run's own record shows: the policy, and the exactness of the sum."""
    return (_policy(history), *([_exactness(history)] if encrypted else []))


def budget_checks(spent: Mapping[str, tuple[float, float | None]]) -> tuple[Check, ...]:
    """Whether the budgets were kept to; nothing is claimed of clients whose budget has no limit, or that have none.

    Args:
        spent: Epsilon and budget of each client, by name.
    """
    limited = {name: (epsilon, budget) for name, (epsilon, budget) in spent.items() if budget is not None and math.isfinite(budget)}
    if not limited:
        return ()
    over = [name for name, (epsilon, budget) in limited.items() if epsilon > budget]
    return (
        Check(
            claim="No client spent more than its privacy budget.",
            evidence=f"over budget: {', '.join(over)}" if over else f"epsilon within budget at {len(limited)} clients",
            holds=not over,
        ),
    )


def _policy(history: History) -> Check:
    policy = history.policy
    shares = [max(summary.record.coefficients.values()) / sum(summary.record.coefficients.values()) for summary in history.rounds]
    fewest = min(sum(1 for coefficient in summary.record.coefficients.values() if coefficient) for summary in history.rounds)
    return Check(
        claim=f"Every opened sum held at least {policy.min_clients} clients, none with over {policy.max_share:.0%} of the coefficients.",
        evidence=f"fewest clients in {len(history.rounds)} rounds: {fewest}; largest share: {max(shares):.0%}",
        holds=fewest >= policy.min_clients and max(shares) <= policy.max_share,
    )


def _exactness(history: History) -> Check:
    error = history.grid_error_max
    return Check(
        claim="Decryption gave exactly the sum of what was encrypted.",
        evidence="not known: an update was resent after a restart, or the clients hid it in noise of their own"
        if error is None
        else f"largest difference between the opened sum and the exact sum, over all rounds and weights: {error} grid steps",
        holds=None if error is None else error == 0,
    )


def delta_checks(training: Mapping[str, TrainingMechanism], deltas: Mapping[str, float | None]) -> tuple[Check, ...]:
    """The rule of thumb: with delta at one over the records, giving away a record at random would be allowed."""
    records = {name: how.record_limit for name, how in training.items() if isinstance(how, DpSgd)}
    products = {name: (delta * records[name], delta) for name, delta in deltas.items() if delta is not None and name in records}
    if not products:
        return ()
    worst = max(products, key=lambda name: products[name])
    product, delta = products[worst]
    return (
        Check(
            claim="Delta is below one over the number of records, at every client.",
            evidence=f"closest at {worst}: delta {delta:g} times at most {records[worst]:,} records is {product:.2g}, and has to be below "
            "1",
            holds=product < 1,
        ),
    )


def statement_checks(history: History, statements: Sequence[PrivacyStatement]) -> tuple[Check, ...]:
    """Whether what the run says of training is what the ledgers charged. A statement cannot be off by itself: it recomputes its epsilon."""
    if not statements:
        return ()
    stated = {statement.population: statement for statement in statements}
    wrong = {name: parts for name in stated if name in history.training and (parts := _contradicted(history, stated[name]))}
    missing = [name for name in history.delta if name not in stated]
    further = {name: more for name in stated if name in history.training and (more := _further_charges(history, stated[name]))}
    evidence = [f"compared {', '.join(name for name in stated if name in history.training) or 'nobody'}"]
    evidence += [f"{name}: another {' and '.join(parts)}" for name, parts in wrong.items()]
    evidence += [f"{name} was charged {more} times more, which its epsilon includes" for name, more in further.items()]
    evidence += [f"no statement about {', '.join(missing)}"] if missing else []
    return (
        Check(
            claim="How each client is said to have trained is what its ledger charged.",
            evidence="; ".join(evidence),
            holds=False if wrong else None if missing or not stated.keys() & history.training.keys() else True,
        ),
    )


def _contradicted(history: History, statement: PrivacyStatement) -> list[str]:
    """What a statement and the run say differently of a client."""
    name, training = statement.population, history.training[statement.population]
    norm = training.max_grad_norm if isinstance(training, DpSgd) else statement.max_grad_norm
    budget = statement.adaptive_budget
    same = {
        "training": statement.events.count(training.event()) >= _rounds(history, name),
        "clipping norm": statement.max_grad_norm == norm,
        "delta": history.delta.get(name, statement.delta) == statement.delta,
        "budget": budget is None or history.budget.get(name, budget.epsilon) == budget.epsilon,
        "source of noise": not history.private or statement.randomness is Randomness.OPERATING_SYSTEM,
    }
    return [what for what, holds in same.items() if not holds]


def _further_charges(history: History, statement: PrivacyStatement) -> int:
    return max(0, len(statement.events) - _rounds(history, statement.population))


def _rounds(history: History, name: str) -> int:
    return sum(name in summary.record.participants for summary in history.rounds)


def audit_checks(audit: Audit | None) -> tuple[Check, ...]:
    """Whether the audit's attacks work at all, and whether clients train as they declare."""
    return () if audit is None else (control_check(audit), *_key_checks(audit), *_pick_checks(audit), *_training_checks(audit))


def control_check(audit: Audit) -> Check:
    """Whether the audit's attacks work at all."""
    best = audit.best_control
    evidence = "no control could be attacked" if best is None else f"{best.adversary.name}, {best.protection}: {best.sentence()}"
    return Check(
        claim="The attacks of the audit work where nothing hides the rows.",
        evidence=evidence,
        holds=audit.controls_succeed,
    )


def _key_checks(audit: Audit) -> tuple[Check, ...]:
    """Whether the key stays where it belongs; nothing is claimed where nothing was encrypted."""
    if audit.opening is None:
        return ()
    return (
        Check(
            claim="No key lies among the files of the server.",
            evidence=f"every file after a canary round was read; found: {', '.join(audit.keys_at_server) or 'none'}",
            holds=not audit.keys_at_server,
        ),
        Check(
            claim="Opened sums are rounded to the grid, and so say nothing of the key.",
            evidence=audit.opening.fault or audit.opening.evidence,
            holds=not audit.opening.fault,
        ),
    )


def _pick_checks(audit: Audit) -> tuple[Check, ...]:
    """Whether the noise keeps its own promise; nothing is claimed where no noise is declared."""
    limited = [(finding, finding.outcome) for finding in audit.audited if isinstance(finding.outcome, Measured) and finding.outcome.bound]
    limited = [(finding, outcome) for finding, outcome in limited if outcome.bound != 1]
    if not limited:
        return ()
    return (
        Check(
            claim="Nobody picks the record that took part out of others more often than the declared noise allows.",
            evidence="; ".join(f"{finding.adversary.name}: {finding.sentence()}" for finding, _ in limited),
            holds=not any(outcome.breaks_bound for _, outcome in limited),
        ),
    )


def _training_checks(audit: Audit) -> tuple[Check, ...]:
    """Nothing is claimed where nobody says that it trains with noise."""
    claiming = [metered for metered in audit.trainings if metered.claims_noise]
    if not claiming:
        return ()
    checks: list[Check] = []
    for claim, fault_of, words in (
        ("Every client's training adds the noise, and clips, as it declares.", lambda reading: reading.meter_fault, TrainingReading.words),
        ("Who was in a training is told no better, of canaries, than its noise allows.", lambda reading: reading.leak, _leak_words),
    ):
        readings = {metered.client: metered.reading for metered in claiming if metered.reading is not None}
        faults = {name: fault for name, reading in readings.items() if (fault := fault_of(reading))}
        missing = [f"not measured at {metered.client}: {metered.missing}" for metered in claiming if metered.reading is None]
        evidence = [f"{name}: {faults.get(name) or words(reading)}" for name, reading in readings.items()] + missing
        checks.append(Check(claim=claim, evidence="; ".join(evidence), holds=False if faults else None if missing else True))
    return tuple(checks)


def _leak_words(reading: TrainingReading) -> str:
    return f"epsilon at least {reading.proved:.2f}, and at most {_epsilon(reading.claimed)}, in a step over all records"


def _epsilon(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "infinite"
