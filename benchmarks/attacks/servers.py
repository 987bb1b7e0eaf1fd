"""What is read off more than one update, or with more than looking: bins that a server planted, many rounds, what kind of client it is.

And the other way round: how surely and how fast an auditor finds that a client's DP-SGD is not what it declares.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

import privfed.client
from benchmarks.attacks.cases import table
from benchmarks.attacks.outcome import Case, Trial
from benchmarks.attacks.rounds import network, plain_update
from privfed.attacks.analytic import EXACT
from privfed.attacks.candidates import LabelledRows
from privfed.attacks.client_properties import LabelDistribution, LabelShares
from privfed.attacks.dirac_rows import DiracRows
from privfed.attacks.disaggregation import disaggregate
from privfed.attacks.facts import BinaryLoss
from privfed.attacks.imprinting import imprint, read_imprint
from privfed.attacks.observation import NotApplicable
from privfed.attacks.scoring import mean_rows, score_rows
from privfed.audit.lone_client import lone_update
from privfed.client import Client
from privfed.consortium import Consortium
from privfed.data.samples import Samples
from privfed.dp.accounting import calibrate_noise_multiplier
from privfed.dp.ledger import Ledger
from privfed.dp.mechanism import Budget
from privfed.he.secret import SharedKey
from privfed.training.loss import binary_cross_entropy
from privfed.training.mechanism import DpSgd, TrainingMechanism
from privfed.training.model import load_values, values_of
from privfed.update import Layout, PlainVector

_DELTA, _CANARIES = 1e-5, 1000


def imprinted(size: int) -> Callable[[int], Trial]:
    """Share of rows that are exact, where the server handed out bins."""

    def run(seed: int) -> Trial:
        rows, labels = table().batch(size, seed=seed)
        public, schema = table().prior.rows, table().schema
        module = network(schema.width, hidden=(256, 32), seed=seed)
        load_values(module, imprint(values_of(module), public, rng=np.random.default_rng(seed)))
        update, training = plain_update(module, rows, labels, loss=BinaryLoss())
        started = time.perf_counter()
        found = read_imprint(table().observation(module, update, training))
        seconds = time.perf_counter() - started
        guess = mean_rows(public, schema=schema, count=size)
        score, baseline = (
            score_rows(some, rows, schema=schema, tolerance=EXACT, baseline=guess).rows
            for some in (guess if isinstance(found, NotApplicable) else found.rows, guess)
        )
        return Trial(score=score, baseline=baseline, seconds=seconds)

    return run


def rounds_apart(seed: int) -> Trial:
    """Cosine of each client's estimated mean update with the true one, least over clients; for the baseline, the sums' mean."""
    rng, clients, rounds = np.random.default_rng(seed), 6, 40
    layout = Layout(names=("weight",), shapes=((1000,),))
    own, present = rng.normal(size=(clients, 1000)), (rng.random((rounds, clients)) < 0.6).astype(float)
    present[present.sum(axis=1) < 3] = 1.0
    shares = present / present.sum(axis=1, keepdims=True)
    drifting = own + 0.5 * rng.normal(size=(rounds, clients, 1000))
    opened = [PlainVector(layout=layout, values=share @ those) for share, those in zip(shares, drifting, strict=True)]
    started = time.perf_counter()
    found = disaggregate(present, opened)
    seconds = time.perf_counter() - started
    mean = np.mean([vector.values for vector in opened], axis=0)

    def least(updates: list[NDArray[np.float64]]) -> float:
        pairs = zip(updates, own, strict=True)
        return min(float(one @ true / (np.linalg.norm(one) * np.linalg.norm(true))) for one, true in pairs)

    estimates = [mean if update is None else update.values for update in found.updates]
    return Trial(score=least(estimates), baseline=least([mean] * clients), seconds=seconds)


def fraud_rate(seed: int) -> Trial:
    """One minus the error of the share of positive labels; for the baseline, that of the public share."""
    rng, prior = np.random.default_rng(seed), table().prior
    rate = float(rng.uniform(0.0, 0.5))
    rows, labels = table().batch(256, seed=seed)[0], (rng.random(256) < rate).astype(np.int64)
    module = network(table().schema.width, hidden=(64, 32), seed=seed)
    update, training = plain_update(module, rows, labels, loss=BinaryLoss(), steps=5)
    attack = LabelDistribution(module=module, public=LabelledRows(rows=prior.rows, labels=prior.labels))
    found = attack.attack(table().observation(module, update, training))
    usual, truth = float(prior.labels.mean()), float(labels.mean())
    share = found.shares[1] if isinstance(found, LabelShares) else usual
    return Trial(
        score=1 - abs(float(share) - truth),
        baseline=1 - abs(usual - truth),
        seconds=found.seconds if isinstance(found, LabelShares) else 0.0,
    )


def audited(epsilon: float, actual: Callable[[DpSgd], DpSgd], *, faulty: bool) -> Callable[[int], Trial]:
    """Whether the Dirac-row audit through an encrypted round says of a client what is true. For the baseline, saying nothing."""

    def run(seed: int) -> Trial:
        noise = calibrate_noise_multiplier(Budget(epsilon=epsilon, delta=_DELTA), sample_rate=1.0, steps=1)
        facts = {"expected_batch_size": _CANARIES, "steps": 1, "learning_rate": 0.1, "max_records": _CANARIES}
        declared = DpSgd(noise_multiplier=noise, max_grad_norm=1.0, sample_rate=1.0, **facts)
        canaries = DiracRows.draw(declared, count=_CANARIES, rng=np.random.default_rng(seed))
        honest = privfed.client.train

        def otherwise(*arguments: object, mechanism: TrainingMechanism, **options: object) -> object:
            planted = actual(mechanism) if isinstance(mechanism, DpSgd) else mechanism
            return honest(*arguments, mechanism=planted, **options)

        started = time.perf_counter()
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            ledger = Ledger.open(folder / "canaries.ledger", population="canaries", budget=Budget.unlimited(delta=_DELTA))
            client = Client("ash", canaries.samples, training=canaries.mechanism, ledger=stack.enter_context(ledger))
            nobody = Samples(features=[[0.0]], labels=[0], groups=None, columns=("zero",))
            others = [Client(name, nobody, training=declared, ledger=client.ledger) for name in ("oak", "yew")]
            consortium = Consortium([client, *others], keys=SharedKey.generate())
            stack.enter_context(patch.object(privfed.client, "train", otherwise))
            update = lone_update(client, canaries.module, consortium=consortium, loss=binary_cross_entropy)
        found = bool(canaries.read(update, delta=_DELTA).faults)
        return Trial(score=float(found is faulty), baseline=float(not faulty), seconds=time.perf_counter() - started)

    return run


def server_cases() -> Iterator[Case]:
    """Every case of this module."""
    for size, least in ((16, 0.8), (64, 0.6)):
        yield Case(
            attack="imprinting server",
            setting=f"{size} rows, width 256",
            measure="rows exact",
            run=imprinted(size),
            repeats=10,
            least=least,
        )
    yield Case(
        attack="disaggregation",
        setting="6 clients, 40 rounds, 6 in 10 take part",
        measure="cosine with the client's mean update",
        run=rounds_apart,
        repeats=10,
        least=0.9,
    )
    yield Case(
        attack="label distribution",
        setting="256 rows, 5 steps, fresh network",
        measure="1 - error of the share of positives",
        run=fraud_rate,
        repeats=20,
        quick=2,
        least=0.95,
    )
    for epsilon in (1.0, 8.0):
        for what, change in (
            ("right client", None),
            ("half the noise", {"noise_multiplier": 0.5}),
            ("a tenth of the noise", {"noise_multiplier": 0.1}),
            ("no noise", {"noise_multiplier": 1e-9}),
            ("no clipping", {"max_grad_norm": 1e3, "noise_multiplier": 1e-3}),
        ):
            yield Case(
                attack="Dirac-row audit",
                setting=f"{what}, epsilon {epsilon:g}",
                measure="right verdicts",
                run=audited(epsilon, _times(change or {}), faulty=change is not None),
                repeats=10,
                least=0.9 if change is None else 1.0,
                seconds=5.0,
            )


def _times(factors: dict[str, float]) -> Callable[[DpSgd], DpSgd]:
    return lambda right: replace(right, **{name: factor * getattr(right, name) for name, factor in factors.items()})
