"""Claims about a run, each with what was looked at to test it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from privfed.audit.findings import Audit
from privfed.dp.statement import PrivacyStatement
from privfed.history import History
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


def run_checks(history: History, *, encrypted: bool) -> tuple[Check, ...]:
    """What a run's own record shows: the policy, the exactness of the sum, the budgets."""
    error = history.grid_error_max
    shares = [max(summary.record.coefficients.values()) / sum(summary.record.coefficients.values()) for summary in history.rounds]
    fewest = min(sum(1 for coefficient in summary.record.coefficients.values() if coefficient) for summary in history.rounds)
    policy = history.policy
    over = [name for name, limit in history.budget.items() if history.epsilon[name] > limit]
    checks = [
        Check(
            claim=f"Every opened sum held at least {policy.min_clients} clients, none with more than {policy.max_share:.0%} of the weight.",
            evidence=f"fewest clients in {len(history.rounds)} rounds: {fewest}; largest share: {max(shares):.0%}",
            holds=fewest >= policy.min_clients and max(shares) <= policy.max_share,
        )
    ]
    if encrypted:
        checks.append(
            Check(
                claim="Encryption did not change the result.",
                evidence="an update was not trained under these eyes"
                if error is None
                else f"largest difference between the opened sum and the exact sum, over all rounds and weights: {error} grid steps",
                holds=None if error is None else error == 0,
            )
        )
    if history.budget:
        checks.append(
            Check(
                claim="No client spent more than its privacy budget.",
                evidence=f"over budget: {', '.join(over)}" if over else f"epsilon within budget at {len(history.budget)} clients",
                holds=not over,
            )
        )
    if limits := {name: history.training[name] for name in history.delta}:
        given_away = {name: history.delta[name] * training.record_limit for name, training in limits.items() if isinstance(training, DpSgd)}
        if given_away:
            worst = max(given_away, key=lambda name: given_away[name])
            checks.append(
                Check(
                    claim="Delta is so small that giving away a whole record would break the promise, at every client.",
                    evidence=f"delta times the most records that a client may have: {given_away[worst]:.2g} at most, at {worst}",
                    holds=given_away[worst] < 1,
                )
            )
    return tuple(checks)


def statement_checks(statements: Sequence[PrivacyStatement]) -> tuple[Check, ...]:
    """Every stated epsilon, computed again."""
    return tuple(
        Check(
            claim=f"The epsilon stated for {statement.population} is what its training cost.",
            evidence=f"stated {_epsilon(statement.epsilon)}; from its {statement.rounds} charges: {_epsilon(statement.recompute())}",
            holds=math.isclose(statement.epsilon, statement.recompute(), rel_tol=0.01, abs_tol=1e-3),
        )
        for statement in statements
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
