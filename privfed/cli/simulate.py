"""`privfed simulate`."""

import math
import shlex
import sys
import tempfile
from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from privfed.cli.arguments import AsJson, CsvFile, above_zero, alone, at_least, new_folder, readable
from privfed.cli.outcome import show_outcome, show_written
from privfed.cli.terminal import print_json, round_progress, use_one_core

_ROUNDS, _EPSILON = 20, 4.0
FEWEST_DECLARED = 1000
"""Every bank declares at least so many records, and delta must be below one over that number."""
_DELTA = (
    f": every bank declares {FEWEST_DECLARED:,} records or more, and a delta of one over that number would allow giving a record away "
    "whole; leave --delta out, or take at most a tenth of one over the records of a bank"
)
_QUICK_ROUNDS, _QUICK_STEPS = 2, 10


class Features(Enum):
    """What `--features` takes."""

    PRE = "pre"
    NOBAL = "nobal"


class Keys(Enum):
    """What `--keys` takes."""

    SHARED = "shared"
    ESCROW = "escrow"
    THRESHOLD = "threshold"


def simulate(
    file: CsvFile,
    *,
    banks: Annotated[
        int,
        typer.Option(
            help="Number of simulated banks, at least 3.",
            callback=at_least("--banks", 3, ", because an aggregate of fewer says too much about each"),
        ),
    ] = 5,
    alpha: Annotated[
        float,
        typer.Option(
            help="How alike the banks are: 0.1 extreme skew, 0.5 a consortium, 1 moderate.",
            callback=above_zero("--alpha"),
        ),
    ] = 0.5,
    features: Annotated[
        Features, typer.Option(help="What the model sees: type, hour, amount (nobal), and balances before the transaction (pre).")
    ] = Features.PRE,
    rounds: Annotated[
        int | None, typer.Option(help="Number of rounds.", show_default=str(_ROUNDS), callback=at_least("--rounds", 1))
    ] = None,
    epsilon: Annotated[
        float | None,
        typer.Option(
            help="Privacy budget of each bank for all rounds together.",
            show_default=f"{_EPSILON:g}",
            callback=above_zero("--epsilon"),
        ),
    ] = None,
    delta: Annotated[
        float | None,
        typer.Option(
            help="The other half of the budget: far below one over the records of a bank. Left out: a power of ten below 1 / (10 x the "
            "records that the largest bank declares).",
            show_default=False,
            callback=above_zero("--delta", below=1 / FEWEST_DECLARED, reason=_DELTA),
        ),
    ] = None,
    non_private: Annotated[bool, typer.Option("--non-private", help="Train without noise, for comparison. Nothing is promised.")] = False,
    keys: Annotated[
        Keys,
        typer.Option(
            help="Who holds the key. shared: every bank, so one bank together with the server reads every update. escrow: one key holder "
            "beside banks and server, which could open each update. threshold: nobody; a quorum of banks opens each sum, which the server "
            "learns."
        ),
    ] = Keys.SHARED,
    corrupted: Annotated[
        int | None,
        typer.Option(
            help="With --keys threshold: banks that may put together what they hold with the server, and still learn nothing but sums.",
            show_default="0",
            callback=at_least("--corrupted", 0),
        ),
    ] = None,
    dropouts: Annotated[
        int | None,
        typer.Option(
            help="With --keys threshold: banks that may fall silent in a round. All others are the quorum that opens its sum.",
            show_default="0",
            callback=at_least("--dropouts", 0),
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Fixes who gets which record, and the test set. Never noise, never keys.", callback=at_least("--seed", 0))
    ] = 0,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="New or empty folder for history.json, the weights and the ledgers.", show_default=False),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help=f"{_QUICK_ROUNDS} short rounds, to see that everything works.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train on your own transactions as if they lay at several banks: encrypted updates, DP-SGD at each bank.

    FILE.csv holds transactions in the columns of Kaggle's PaySim log, gzipped if you like; it is only read. Tables with other columns
    go through privfed.samples_from_frame, in Python. A quarter of the records is set aside for evaluation, and the others are dealt to
    the banks by a Dirichlet distribution; `privfed partition` shows that deal. Each bank declares its number of records, rounded up to
    thousands. Counts and quality are shown because you hold all the data; real banks must not publish theirs.

    Without --keys every bank holds the same key, which suits banks that trust each other. A quorum must be more than half of banks and
    corrupted banks together, and at most the banks without the dropouts: 3 banks, one of them corrupted, all answer; of 5 banks one may
    be corrupted and one missing. What cannot be solved is refused, with the nearest numbers that can.

    ```
    privfed simulate log.csv --quick
    privfed simulate log.csv --banks 5 --epsilon 4 --out run1
    privfed simulate log.csv --keys escrow
    privfed simulate log.csv --banks 5 --keys threshold --corrupted 1 --dropouts 1
    ```
    """
    if quick:
        alone("--quick", {"--rounds": rounds}, reason=f"it has {_QUICK_ROUNDS} rounds")
    if non_private:
        alone("--non-private", {"--epsilon": epsilon}, reason="without noise there is no epsilon to keep to")
    _check_quorum(keys, banks=banks, corrupted=corrupted, dropouts=dropouts)
    readable(file)
    with ExitStack() as stack:
        kept = new_folder(out) if out else tempfile.TemporaryDirectory(prefix="privfed-simulate-")
        folder = Path(stack.enter_context(kept))
        progress = stack.enter_context(round_progress(quiet=as_json))
        progress.preparing(f"Reading {file.name}")
        from privfed.data.paysim import NOBAL, PRE, load_paysim  # noqa: PLC0415 # --help must not wait for pandas and torch

        transactions = load_paysim(file)
        progress.preparing("Loading torch")
        from privfed.custody import Holder  # noqa: PLC0415
        from privfed.scenario import Scenario, run_scenario  # noqa: PLC0415

        use_one_core()
        scenario = Scenario(
            banks=banks,
            alpha=alpha,
            feature_set={Features.PRE: PRE, Features.NOBAL: NOBAL}[features],
            rounds=_QUICK_ROUNDS if quick else rounds or _ROUNDS,
            steps=_QUICK_STEPS if quick else Scenario().steps,
            epsilon=math.inf if non_private else epsilon or _EPSILON,
            delta=delta,
            seed=seed,
            holder={Keys.SHARED: Holder.EVERY_CLIENT, Keys.ESCROW: Holder.KEY_HOLDER, Keys.THRESHOLD: Holder.NOBODY}[keys],
            corrupted=corrupted or 0,
            dropouts=dropouts or 0,
        )
        progress.preparing(f"Dealing records to {banks} banks")
        outcome = run_scenario(
            transactions,
            scenario,
            ledgers=folder,
            ready=lambda: progress.training(scenario.rounds, banks=banks),
            progress=progress.round,
        )
    if out:
        outcome.save(out, command=shlex.join(["privfed", *sys.argv[1:]]))
    if as_json:
        print_json(outcome.to_json())
        return
    show_outcome(outcome)
    if out:
        show_written(outcome, out)
    else:
        typer.echo("Nothing was kept. With --out DIR it is, and privfed audit and privfed report can look at it.")


def _check_quorum(keys: Keys, *, banks: int, corrupted: int | None, dropouts: int | None) -> None:
    """Refuses numbers for a quorum where there is none, and those that no quorum solves."""
    if keys is not Keys.THRESHOLD:
        alone(
            f"--keys {keys.value}",
            {"--corrupted": corrupted, "--dropouts": dropouts},
            reason="they decide the quorum that opens sums with --keys threshold, and somebody holds the key here",
        )
        return
    from privfed.he.threshold_key import ThresholdKey  # noqa: PLC0415 # --help must not wait for tenseal

    try:
        ThresholdKey(clients=banks, corrupted=corrupted or 0, dropouts=dropouts or 0)
    except ValueError as error:
        raise ValueError(f"{error} (--banks, --corrupted, --dropouts); nothing was read") from error
