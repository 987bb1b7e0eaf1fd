"""What privacy accounting costs and finds: privacy loss distributions against Opacus' PRV and RDP accountants.

Per setting: epsilon by each accountant and the CPU time that it took; the time to find the noise for a budget; and, for a ledger in the
middle of a job, the time to check one more round. `python -m benchmarks.accounting --help` says the rest.
"""

import json
import math
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import count, pairwise
from typing import Annotated, TypeVar

import typer
from rich.table import Table

from benchmarks.experiment import wide_console
from privfed.dp.accounting import calibrate_noise_multiplier, epsilon, epsilon_prv, epsilon_rdp
from privfed.dp.charges import Charges
from privfed.dp.mechanism import (
    Budget,
    CappedPoissonSampledGaussian,
    CustomerSampledGaussian,
    DiscreteGaussianSum,
    Event,
    GaussianRelease,
    PoissonSampledGaussian,
    Relation,
)

T = TypeVar("T")
BROKEN = 1
PRV_ERROR = 0.011  # Opacus adds its error bound of 0.01 to what it finds
GRID_ERROR = 1e-3
ROUNDS = 20  # of equal length, of which the last one's check is timed
_SERIAL: Iterator[int] = count()

# Noise multiplier, sample rate, steps, delta. The golden values of the tests.
SETTINGS = (
    (1.0, 1.0, 1, 1e-5),
    (4.0, 0.01, 10_000, 1e-5),
    (1.1, 256 / 60_000, 14_063, 1e-5),
    (0.8, 0.01, 1000, 1e-6),
    (1.0, 512 / 1e5, 1955, 1e-6),
    (0.6, 512 / 1e5, 1955, 1e-6),
    (5.0, 1.0, 50, 1e-5),
    (1.0, 0.01, 1, 1e-5),
    (20.0, 0.05, 1000, 1e-8),
)
QUICK = SETTINGS[:2]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Epsilons and CPU seconds of one setting; None where an accountant has no such mechanism or gave up."""

    setting: str
    pld: float
    pld_seconds: float
    prv: float | None
    prv_seconds: float | None
    rdp: float | None
    rdp_seconds: float | None
    check_seconds: float
    calibration_seconds: float | None

    @property
    def ordered(self) -> bool:
        """Whether PLD <= PRV <= RDP, within what each of them states as its error."""
        limits = [limit for limit in (self.prv, self.rdp) if limit is not None]
        in_order = all(low <= high + PRV_ERROR for low, high in pairwise(limits))
        return in_order and all(self.pld <= limit * (1 + GRID_ERROR) for limit in limits)


def timed(action: Callable[[], T]) -> tuple[T, float]:
    """A result and the CPU seconds that it took."""
    start = time.process_time()
    result = action()
    return result, time.process_time() - start


def fresh(noise_multiplier: float) -> float:
    """Almost the same noise, and never the same twice: no cache answers."""
    return noise_multiplier * (1 + next(_SERIAL) * 1e-9)


def opacus(accountant: Callable[..., float], event: Event, delta: float) -> tuple[float | None, float | None]:
    """What Opacus finds, if it finds anything."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the range of orders
            found, seconds = timed(lambda: accountant([event], delta=delta))
    except (ValueError, RuntimeError):
        return None, None
    return (found, seconds) if math.isfinite(found) else (None, None)


def check_seconds(event: Event, delta: float, relation: Relation) -> float:
    """Seconds to learn what one more round costs, for a ledger that holds many like it."""
    charges = Charges([event] * ROUNDS)
    charges.epsilon(delta=delta, relation=relation)
    return timed(lambda: charges.plus(event).epsilon(delta=delta, relation=relation))[1]


def sampled(noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> Outcome:
    """One golden setting by all accountants."""
    event = PoissonSampledGaussian(noise_multiplier=noise_multiplier, sample_rate=sample_rate, steps=steps)
    pld, seconds = timed(lambda: epsilon([replace(event, noise_multiplier=fresh(noise_multiplier))], delta=delta))
    prv, prv_seconds = opacus(epsilon_prv, event, delta)
    rdp, rdp_seconds = opacus(epsilon_rdp, event, delta)
    one = replace(event, noise_multiplier=fresh(noise_multiplier), steps=-(-steps // ROUNDS))
    budget = Budget(epsilon=pld * (1 + 1e-9 * next(_SERIAL)), delta=delta)
    return Outcome(
        setting=f"records, noise {noise_multiplier:g}, rate {sample_rate:.4g}, {steps} steps, delta {delta:g}",
        pld=pld,
        pld_seconds=seconds,
        prv=prv,
        prv_seconds=prv_seconds,
        rdp=rdp,
        rdp_seconds=rdp_seconds,
        check_seconds=check_seconds(one, delta, Relation.ADD_OR_REMOVE_ONE),
        calibration_seconds=timed(lambda: calibrate_noise_multiplier(budget, sample_rate=sample_rate, steps=steps))[1],
    )


def other(setting: str, event: Event, delta: float, relation: Relation = Relation.ADD_OR_REMOVE_ONE) -> Outcome:
    """Something that only this package accounts."""
    pld, seconds = timed(lambda: epsilon([event], delta=delta, relation=relation))
    return Outcome(
        setting=f"{setting}, delta {delta:g}",
        pld=pld,
        pld_seconds=seconds,
        prv=None,
        prv_seconds=None,
        rdp=None,
        rdp_seconds=None,
        check_seconds=check_seconds(event, delta, relation),
        calibration_seconds=None,
    )


def others() -> Iterator[Outcome]:
    """Replaced records, capped batches, customers, integer noise, and twenty jobs in one account."""
    rate, steps = 512 / 1e5, 1955
    replaced = PoissonSampledGaussian(noise_multiplier=fresh(1.0), sample_rate=rate, steps=steps)
    yield other("a record replaced, noise 1", replaced, 1e-6, Relation.REPLACE_ONE)
    for share in (0.9, 1.0, 1.1):
        capped = CappedPoissonSampledGaussian(
            noise_multiplier=fresh(1.0), sample_rate=rate, capacity=640, max_records=round(share * 1e5), steps=steps
        )
        yield other(f"batches of 640 at most, {share:g} x 100000 records, noise 1", capped, 1e-6)
    for records in (2, 5):
        customers = CustomerSampledGaussian(noise_multiplier=fresh(1.0), sample_rate=rate, records_per_customer=records, steps=steps)
        yield other(f"customers of {records} records, noise 1", customers, 1e-6)
    sums = DiscreteGaussianSum(share_variance=2048, shares=8, l2_sensitivity=32, l1_sensitivity=1024, coordinates=12_000, count=50)
    yield other("silos, 50 sums, 8 shares, noise 4", sums, 1e-6)


def many_jobs() -> Outcome:
    """Twenty jobs with a noise of their own, and queries, in one account."""
    jobs: list[Event] = [
        PoissonSampledGaussian(noise_multiplier=fresh(1 + number / 100), sample_rate=0.01, steps=100) for number in range(20)
    ]
    charges = Charges([*jobs, GaussianRelease(noise_multiplier=20.0, count=5)])
    pld, seconds = timed(lambda: charges.epsilon(delta=1e-6))
    charges.add(jobs[7])
    return Outcome(
        setting="20 jobs of different noise and 5 queries, delta 1e-06",
        pld=pld,
        pld_seconds=seconds,
        prv=None,
        prv_seconds=None,
        rdp=None,
        rdp_seconds=None,
        check_seconds=timed(lambda: charges.epsilon(delta=1e-6))[1],
        calibration_seconds=None,
    )


def _shown(value: float | None, seconds: float | None) -> tuple[str, str]:
    return ("-" if value is None else f"{value:.4f}"), ("-" if seconds is None else f"{seconds:.3f}")


def print_table(outcomes: list[Outcome]) -> None:
    table = Table(title="Epsilon, and CPU seconds from a cold start")
    for column in ("setting", "PLD", "s", "PRV", "s", "RDP", "s", "one more round, s", "calibration, s"):
        table.add_column(column, justify="left" if column == "setting" else "right")
    for outcome in outcomes:
        cells = (
            *_shown(outcome.pld, outcome.pld_seconds),
            *_shown(outcome.prv, outcome.prv_seconds),
            *_shown(outcome.rdp, outcome.rdp_seconds),
            _shown(None, outcome.check_seconds)[1],
            _shown(None, outcome.calibration_seconds)[1],
        )
        table.add_row(outcome.setting, *cells)
    wide_console().print(table)


def main(
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Two settings and no others.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Compare accountants: value and time per setting.

    Exit status: 1 if an accountant is below one that must not be above it (PLD <= PRV <= RDP).
    """
    timed(lambda: epsilon_rdp([GaussianRelease(noise_multiplier=1.0)], delta=1e-5))  # imports Opacus and torch
    outcomes = [sampled(*setting) for setting in (QUICK if quick else SETTINGS)]
    if not quick:
        outcomes += [*others(), many_jobs()]
    if as_json:
        versions = {name: version(name) for name in ("dp-accounting", "opacus", "numpy")}
        found = {
            "python": platform.python_version(),
            "versions": versions,
            "ordered": all(outcome.ordered for outcome in outcomes),
            "settings": [asdict(outcome) for outcome in outcomes],
        }
        typer.echo(json.dumps(found, allow_nan=False))
    else:
        print_table(outcomes)
    if not all(outcome.ordered for outcome in outcomes):
        raise typer.Exit(BROKEN)


if __name__ == "__main__":
    typer.run(main)
