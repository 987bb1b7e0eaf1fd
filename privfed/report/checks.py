"""Claims about a run, each with what was looked at to test it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from privfed.audit.findings import Audit
from privfed.dp.statement import PrivacyStatement
from privfed.history import History
from privfed.report.tone import Tone
from privfed.training.mechanism import DpSgd


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
    """What a run's own record shows: the policy, the exactness of the sum, the budgets, the deltas."""
    checks = [_policy(history)]
    if encrypted:
        checks.append(_exactness(history))
    if history.budget:
        over = [name for name, limit in history.budget.items() if history.epsilon[name] > limit]
        checks.append(
            Check(
                claim="No client spent more than its privacy budget.",
                evidence=f"over budget: {', '.join(over)}" if over else f"epsilon within budget at {len(history.budget)} clients",
                holds=not over,
            )
        )
    return (*checks, *_deltas(history))


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


def _deltas(history: History) -> list[Check]:
    """The rule of thumb: with delta at one over the records, giving away a record at random would be allowed."""
    limits = {name: how.record_limit for name, how in history.training.items() if isinstance(how, DpSgd) and name in history.delta}
    if not limits:
        return []
    worst = max(limits, key=lambda name: history.delta[name] * limits[name])
    delta, product = history.delta[worst], history.delta[worst] * limits[worst]
    return [
        Check(
            claim="Delta is below one over the number of records, at every client.",
            evidence=f"closest at {worst}: delta {delta:g} times at most {limits[worst]:,} records is {product:.2g}, and has to be below 1",
            holds=product < 1,
        )
    ]


def statement_checks(statements: Sequence[PrivacyStatement]) -> tuple[Check, ...]:
    """Every stated epsilon, computed again from what was charged."""
    if not statements:
        return ()
    wrong = [
        statement.population
        for statement in statements
        if not math.isclose(statement.epsilon, statement.recompute(), rel_tol=0.01, abs_tol=1e-3)
    ]
    computed = "; ".join(
        f"{statement.population} {_epsilon(statement.recompute())} (stated {_epsilon(statement.epsilon)})" for statement in statements
    )
    return (
        Check(
            claim="Every stated epsilon is what the listed charges cost.",
            evidence=f"computed again from the charges: {computed}",
            holds=not wrong,
        ),
    )


def audit_checks(audit: Audit | None) -> tuple[Check, ...]:
    """Whether the audit's attacks work at all."""
    if audit is None:
        return ()
    best = audit.best_control
    evidence = "no control could be attacked" if best is None else f"{best.adversary.name}, {best.protection}: {best.sentence()}"
    return (
        Check(
            claim="The attacks of the audit work where nothing hides the rows.",
            evidence=evidence,
            holds=audit.controls_succeed,
        ),
    )


def _epsilon(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "infinite"
