"""Attacks on tables: what is tried, against which baseline, and what is promised of it."""

import copy
import time
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import binom
from torch import nn

from benchmarks.attacks.outcome import Case, Trial
from benchmarks.attacks.rounds import (
    NOISE,
    RANGE,
    Workload,
    epochs_update,
    network,
    plain_update,
    private_update,
    trained_network,
)
from privfed.attacks.analytic import EXACT, analytic
from privfed.attacks.candidates import CandidateAttack, CandidateGuess, LabelledRows
from privfed.attacks.facts import BinaryLoss, Sgd, TrainingFacts
from privfed.attacks.labels import LabelCount, label_count
from privfed.attacks.membership import LikelihoodRatio, MembershipScores, RelativeMembership
from privfed.attacks.membership_scoring import score_membership
from privfed.attacks.most_likely import MostLikelyRows
from privfed.attacks.observation import NotApplicable, Observation, Reconstruction
from privfed.attacks.reconstruction_bound import reconstruction_bound
from privfed.attacks.scoring import check_certificates, mean_rows, score_rows
from privfed.attacks.spear import spear
from privfed.attacks.tabular import TabularEnsemble
from privfed.attacks.unmixing import unmix
from privfed.client import Client
from privfed.consortium import Consortium
from privfed.dp.mechanism import PoissonSampledGaussian
from privfed.engines.local import Simulation
from privfed.he.secret import SharedKey
from privfed.training.mechanism import NonPrivate
from privfed.update import PlainVector

# Of standardised columns, 0.319 standard deviations (Vero et al., 2023, section 5), as a share of the declared range.
CLOSE = 0.319 / (RANGE[1] - RANGE[0])

Attack = Callable[[Observation], Reconstruction | NotApplicable]
Round = Callable[[int], tuple[Observation, NDArray[np.float64]]]


@cache
def table() -> Workload:
    return Workload.generate()


def read_rows(attack: Attack, held: Round, *, exact: bool) -> Callable[[int], Trial]:
    """Share of rows that are exact, or of cells that are close, beside the mean row or the likeliest one, whichever is better."""

    def run(seed: int) -> Trial:
        observation, rows = held(seed)
        started = time.perf_counter()
        found = attack(observation)
        seconds = time.perf_counter() - started
        prior, schema = table().prior, table().schema
        guesses = (mean_rows(prior.rows, schema=schema, count=len(rows)), prior.guess(len(rows)))
        tolerance = EXACT if exact else CLOSE

        def share(some: NDArray[np.float64]) -> float:
            score = score_rows(some, rows, schema=schema, tolerance=tolerance, baseline=guesses[0])
            return score.rows if exact else score.cells

        if isinstance(found, NotApplicable):
            return Trial(score=max(map(share, guesses)), baseline=max(map(share, guesses)), seconds=seconds)
        false = check_certificates(found, rows, schema=schema, tolerance=EXACT).false
        return Trial(score=share(found.rows), baseline=max(map(share, guesses)), seconds=seconds, false=false)

    return run


def certified_rows(attack: Attack, held: Round) -> Callable[[int], Trial]:
    """Share of rows that the attack proves to be exact."""

    def run(seed: int) -> Trial:
        observation, rows = held(seed)
        started = time.perf_counter()
        found = attack(observation)
        seconds = time.perf_counter() - started
        if isinstance(found, NotApplicable):
            return Trial(score=0.0, baseline=0.0, seconds=seconds)
        check = check_certificates(found, rows, schema=table().schema, tolerance=EXACT)
        return Trial(score=(check.certified - check.false) / len(rows), baseline=0.0, seconds=seconds, false=check.false)

    return run


def plain(size: int, *, hidden: tuple[int, ...], model: Callable[[], nn.Module] | None = None, adam: bool = False) -> Round:
    """One step of SGD on all rows of a fresh network, or of a given one."""

    def held(seed: int) -> tuple[Observation, NDArray[np.float64]]:
        rows, labels = table().batch(size, seed=seed)
        module = network(table().schema.width, hidden=hidden, seed=seed) if model is None else copy.deepcopy(model())
        update, training = plain_update(module, rows, labels, loss=BinaryLoss(), adam=adam)
        return table().observation(module, update, training), rows

    return held


def noised(size: int, *, noise_multiplier: float) -> Round:
    """One step of our DP-SGD on all rows of a fresh network."""

    def held(seed: int) -> tuple[Observation, NDArray[np.float64]]:
        rows, labels = table().batch(size, seed=seed)
        module = network(table().schema.width, hidden=(64, 32), seed=seed)
        update, training = private_update(table(), module, rows, labels, noise_multiplier=noise_multiplier)
        return table().observation(module, update, training), rows

    return held


def epochs(seed: int) -> tuple[Observation, NDArray[np.float64]]:
    rows, labels = table().batch(8, seed=seed)
    module = network(table().schema.width, hidden=(64, 32), seed=seed)
    update, training = epochs_update(table(), module, rows, labels, seed=seed)
    return table().observation(module, update, training), rows


def encrypted(seed: int) -> tuple[Observation, NDArray[np.float64]]:
    """The opened sum of a really encrypted round of five clients with two rows each."""
    rows, labels = table().batch(10, seed=seed)
    module = network(table().schema.width, hidden=(64, 32), seed=seed)
    mechanism = NonPrivate(learning_rate=0.1, batch_size=2, steps=1, seed=seed)
    parts = [slice(2 * i, 2 * i + 2) for i in range(5)]
    clients = [Client(f"bank_{i}", table().samples(rows[part], labels[part]), training=mechanism) for i, part in enumerate(parts)]
    consortium = Consortium(clients, keys=SharedKey.generate())
    with Simulation(consortium, module) as simulation:
        history = simulation.run(rounds=1)
    opened = PlainVector(layout=history.initial.layout, values=history.model.values - history.initial.values)
    coefficients = tuple(history.rounds[0].record.coefficients.values())
    training = TrainingFacts(optimizer=Sgd(learning_rate=0.1), loss=BinaryLoss(), steps=1, batch_size=2)
    known = {"coefficients": coefficients, "rounding_step": consortium.params.step}
    return table().observation(module, opened, training, **known), rows


def candidates(epsilon: int, count: int) -> Callable[[int], Trial]:
    """Whether the right one of so many records is named, beside a guess."""

    def run(seed: int) -> Trial:
        rows, labels = table().batch(count, seed=seed)
        chosen = int(np.random.default_rng(seed).integers(count))
        mine = slice(chosen, chosen + 1)
        module = network(table().schema.width, hidden=(64, 32), seed=seed)
        update, training = private_update(table(), module, rows[mine], labels[mine], noise_multiplier=NOISE[epsilon])
        attack = CandidateAttack(module=module, candidates=LabelledRows(rows=rows, labels=labels))
        guess = attack.attack(table().observation(module, update, training))
        right = isinstance(guess, CandidateGuess) and guess.best == chosen
        return Trial(score=float(right), baseline=1 / count, seconds=guess.seconds if isinstance(guess, CandidateGuess) else 0.0)

    return run


def positives(size: int) -> Callable[[int], Trial]:
    """Whether the number of positive labels is right, beside the most frequent number."""

    def run(seed: int) -> Trial:
        rows = table().batch(size, seed=seed)[0]
        prevalence = 0.3
        labels = (np.random.default_rng(seed).random(size) < prevalence).astype(np.int64)
        module = network(table().schema.width, hidden=(64, 32), seed=seed)
        update, training = plain_update(module, rows, labels, loss=BinaryLoss())
        with torch.no_grad():
            usual_prediction = float(module(torch.tensor(table().prior.rows, dtype=torch.float32)).sigmoid().mean())
        count = label_count(table().observation(module, update, training), mean_prediction=usual_prediction)
        if not isinstance(count, LabelCount):
            return Trial(score=0.0, baseline=0.0, seconds=0.0)
        usual = int(binom.pmf(np.arange(size + 1), size, prevalence).argmax())
        truth = int(labels.sum())
        return Trial(score=float(round(count.positives) == truth), baseline=float(usual == truth), seconds=count.seconds)

    return run


def membership(kind: type[LikelihoodRatio] | type[RelativeMembership]) -> Callable[[int], Trial]:
    """Share of members found where one other in a hundred is accused, after 300 steps on 100 rows; a coin finds as many as it accuses."""

    def run(seed: int) -> Trial:
        rng, rows = np.random.default_rng(seed), table().rows
        labels = (rows[:, 6] + 0.8 * rng.normal(size=len(rows)) > 0).astype(np.int64)
        order = rng.permutation(len(rows))
        asked, own = order[:1100], order[1100:2100]
        module = network(table().schema.width, hidden=(64, 32), seed=seed)
        update, training = plain_update(module, rows[asked[:100]], labels[asked[:100]], loss=BinaryLoss(), steps=300)
        records, others = (LabelledRows(rows=rows[some], labels=labels[some]) for some in (asked, own))
        attack = kind(module=module, records=records, own=others, client_records=100, seed=seed)
        found = attack.attack(table().observation(module, update, training))
        if not isinstance(found, MembershipScores):
            return Trial(score=0.01, baseline=0.01, seconds=0.0)
        score = score_membership(found.scores, np.arange(len(asked)) < 100)
        return Trial(score=score.found_at_1_percent, baseline=0.01, seconds=found.seconds)

    return run


def _exact() -> Iterator[Case]:
    rows, proved = "rows exact", "rows proved exact"
    one_layer, deep = (64, 32), (256, 32)
    yield Case(
        attack="analytic",
        setting="1 row, width 256",
        measure=proved,
        run=certified_rows(analytic, plain(1, hidden=deep)),
        repeats=20,
        quick=3,
        least=1.0,
        seconds=0.05,
    )
    yield Case(
        attack="analytic",
        setting="4 rows, width 256",
        measure=proved,
        run=certified_rows(analytic, plain(4, hidden=deep)),
        repeats=20,
        quick=3,
        least=3.5 / 4,
    )
    yield Case(
        attack="unmix",
        setting="8 rows, width 64",
        measure=rows,
        run=read_rows(unmix, plain(8, hidden=one_layer), exact=True),
        repeats=10,
        quick=2,
    )
    for size, width, least, seconds in ((8, 64, 1.0, 5.0), (12, 128, 0.9, 10.0), (16, 256, 2 / 3, 60.0)):
        held = plain(size, hidden=(width, 32))
        yield Case(
            attack="SPEAR",
            setting=f"{size} rows, width {width}",
            measure=rows,
            run=read_rows(spear, held, exact=True),
            repeats=10,
            quick=2,
            least=least,
            seconds=seconds,
        )
    for setting, held in (
        ("5 local epochs in batches of 4, 8 rows", epochs),
        ("each record clipped, no noise to speak of, 8 rows", noised(8, noise_multiplier=1e-9)),
        ("opened sum of an encrypted round, 5 clients, 2 rows each", encrypted),
    ):
        yield Case(
            attack="SPEAR",
            setting=setting,
            measure=rows,
            run=read_rows(spear, held, exact=True),
            repeats=10,
            quick=1,
            least=1.0,
        )
    trained = cache(lambda: trained_network(table(), width=64))
    for size, least in ((4, 0.95), (8, 0.9)):
        held = plain(size, hidden=one_layer, model=trained)
        yield Case(
            attack="SPEAR",
            setting=f"{size} rows, trained network with one logit",
            measure=rows,
            run=read_rows(lambda observation: spear(observation, starts=4000), held, exact=True),
            repeats=10,
            quick=1,
            least=least,
        )
    yield Case(
        attack="SPEAR",
        setting="Adam, 4 rows: not applicable",
        measure=rows,
        run=read_rows(spear, plain(4, hidden=one_layer, adam=True), exact=True),
        repeats=3,
        quick=1,
        near=0.0,
    )


def _likely() -> Iterator[Case]:
    prior = cache(lambda: table().prior)

    def tabular(observation: Observation) -> Reconstruction | NotApplicable:
        module = network(table().schema.width, hidden=(64, 32), seed=0)
        return TabularEnsemble(module=module, prior=prior()).attack(observation)

    def likely(observation: Observation) -> Reconstruction | NotApplicable:
        return MostLikelyRows(module=network(table().schema.width, hidden=(64, 32), seed=0), prior=prior()).attack(observation)

    cells = "cells right"
    for size, least, repeats in ((1, 1.0, 20), (8, 0.65, 20)):
        held = plain(size, hidden=(64, 32))
        yield Case(
            attack="TabLeak ensemble",
            setting=f"{size} rows" if size > 1 else "1 row",
            measure=cells,
            run=read_rows(tabular, held, exact=False),
            repeats=repeats,
            least=least,
        )
    for epsilon, least in ((1, None), (8, None), (100, 0.43), (1000, 0.78)):
        yield Case(
            attack="likeliest rows",
            setting=f"1 row, epsilon {epsilon}",
            measure=cells,
            run=read_rows(likely, noised(1, noise_multiplier=NOISE[epsilon]), exact=False),
            repeats=60,
            quick=2,
            least=least,
            near=0.05 if least is None else None,
        )
    yield Case(
        attack="likeliest rows",
        setting="8 rows, epsilon 8",
        measure=cells,
        run=read_rows(likely, noised(8, noise_multiplier=NOISE[8]), exact=False),
        repeats=20,
        near=0.05,
    )
    for epsilon in (1, 8, 100):
        for count in (10, 100):
            event = PoissonSampledGaussian(noise_multiplier=NOISE[epsilon], sample_rate=1.0, steps=1)
            yield Case(
                attack="candidates",
                setting=f"{count} records, epsilon {epsilon}",
                measure="right one named",
                run=candidates(epsilon, count),
                repeats=400,
                quick=5,
                least=0.9 if epsilon == 100 else None,
                bound=reconstruction_bound(event, candidates=count),
            )


def _people() -> Iterator[Case]:
    for size, least in ((16, 0.95), (64, 0.95)):
        yield Case(
            attack="number of positive labels",
            setting=f"{size} rows, fresh network",
            measure="number right",
            run=positives(size),
            repeats=40,
            quick=5,
            least=least,
        )
    for name, kind in (("LiRA", LikelihoodRatio), ("RMIA", RelativeMembership)):
        yield Case(
            attack=name,
            setting="100 members, 1,000 others, 300 steps",
            measure="members found at 1 % accused",
            run=membership(kind),
            repeats=10,
        )


def cases() -> tuple[Case, ...]:
    """Every case, cheap ones first."""
    return (*_exact(), *_likely(), *_people())
