"""Whether clients train as they declare: canaries in their own training, along the path that their rounds take.

Attacks that fail say little about noise: they fail under a tenth of it as well. So each client's training is run on rows of which is
known what the declared mechanism makes of them, and what comes out is measured. Nothing of it is imitated: charging, sampling, clipping,
noise, encryption and the server's sum are those of a round (see `lone_client`). The client's data and ledger are not touched.
"""

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torch import nn

from privfed.attacks.dirac_rows import FAMILY_LEVEL, DiracReading, DiracRows
from privfed.attacks.meters import Meter, correlation_meter
from privfed.attacks.model_meters import CopiesTraining, SilentTraining
from privfed.attacks.observation import linear_layers
from privfed.audit.lone_client import lone_update, lone_updates
from privfed.client import Client
from privfed.consortium import Consortium
from privfed.data.samples import Samples
from privfed.dp.ledger import Ledger
from privfed.dp.mechanism import Budget, PoissonSampledGaussian
from privfed.errors import PrivFedError
from privfed.training.compiled import CompiledSum
from privfed.training.loss import PerSampleLoss, binary_cross_entropy
from privfed.training.mechanism import DpSgd
from privfed.training.model import layout_of
from privfed.update import PlainVector

_CANARIES = 1000
_COPIES = 2000
_FEWEST_RECORDS = 40
_LEAST_NOISE = 1e-3  # below, the grid to which sums are rounded is no longer fine beside the noise


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingReading:
    """What was measured at one client. Public: the canaries are nobody's.

    Args:
        noise: Standard deviation of the noise on a weight, in units of what one record may add.
        weight: How much a record weighs that is far longer than the clipping norm, in a step that takes every record, in the same unit.
        on_the_model: Meters of noise and clipping on the layers of the model itself.
        claimed: Epsilon at `delta` of a single step that takes every record, under the declared noise: what membership scores can be told
            apart by at most.
        proved: Epsilon that scores of canaries, of which a coin decided whether they took part in such a step, prove to have leaked.
        delta: The privacy parameter.
        further: Meters of the weight in sampled steps, of how far records' weights lie apart, of the noise in a second round, and of
            whether noise is the same in two rounds, or in two runs.
    """

    noise: Meter
    weight: Meter
    on_the_model: tuple[Meter, ...]
    claimed: float
    proved: float
    delta: float
    further: tuple[Meter, ...] = ()

    @property
    def meters(self) -> tuple[Meter, ...]:
        """All of them."""
        return (self.noise, self.weight, *self.further, *self.on_the_model)

    @property
    def meter_fault(self) -> str:
        """What is not as declared, in words; empty if every interval contains what is declared."""
        return "; ".join(meter.fault for meter in self.meters if meter.fault is not None)

    @property
    def leak(self) -> str:
        """How much more is proved to have leaked than is claimed, in words; empty if it is not more."""
        if self.proved <= self.claimed:
            return ""
        return f"epsilon of a step over all records is at least {self.proved:.2f} at delta {self.delta:g}, not {self.claimed:.2f}"

    def words(self) -> str:
        """What was measured, in a few words."""
        return f"noise {_times(self.noise)}, weight of a record {_times(self.weight)} times what is declared"


def _times(meter: Meter) -> str:
    measured, low, high = (value / meter.declared for value in (meter.measured, meter.low, meter.high))
    return f"{measured:.2f} ({low:.2f} to {high:.2f})"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeteredTraining:
    """One client's training, measured.

    Args:
        client: Its name.
        claims_noise: Whether it says that it trains with noise at all.
        reading: What was measured; None if nothing could be.
        missing: Why not, in words; empty if it was.
    """

    client: str
    claims_noise: bool
    reading: TrainingReading | None
    missing: str

    @property
    def fault(self) -> str:
        """What is not as declared, in words; empty if nothing is, or nothing was measured."""
        return "" if self.reading is None else "; ".join(filter(None, (self.reading.meter_fault, self.reading.leak)))

    def to_json(self) -> dict[str, object]:
        """The measurement as JSON values; what was not measured is null."""
        reading = self.reading
        values: dict[str, object] = {"client": self.client, "claims_noise": self.claims_noise, "fault": self.fault or None}
        return values | {
            "not_measured": self.missing or None,
            "claimed_epsilon": None if reading is None else reading.claimed,
            "proved_epsilon": None if reading is None else reading.proved,
            "delta": None if reading is None else reading.delta,
            "meters": []
            if reading is None
            else [
                {"what": meter.what, "measured": meter.measured, "low": meter.low, "high": meter.high, "declared": meter.declared}
                for meter in reading.meters
            ],
        }


def meter_training(client: Client, *, consortium: Consortium, model: nn.Module) -> MeteredTraining:
    """Measures the noise and the clipping of a client's training, and what canaries prove to have leaked in a round of it.

    What is not as declared must show twice, in trainings of their own, to be a fault: a client that trains as it declares has one with
    a probability of 1e-4 at most, and one whose noise, or bound on a record, is off by half is found with one of nearly 1. So is one whose
    noise is the same in two rounds, or in two runs, which a difference takes off. What begins after the second round does not show.

    Args:
        client: Whose training. Neither its data nor its ledger is touched.
        consortium: Whose loss and parameters to take.
        model: Architecture, and the weights before the round.
    """
    declared = client.training
    if not isinstance(declared, DpSgd) or client.ledger is None:
        return MeteredTraining(client=client.name, claims_noise=False, reading=None, missing="it says that it trains without noise")
    if missing := _unfit(declared):
        return MeteredTraining(client=client.name, claims_noise=True, reading=None, missing=missing)
    delta = client.ledger.budget.delta
    try:
        reading = _read(client, declared, consortium=consortium, model=model, delta=delta)
        if reading.meter_fault or reading.leak:
            reading = _read(client, declared, consortium=consortium, model=model, delta=delta)
    except PrivFedError as refused:
        return MeteredTraining(client=client.name, claims_noise=True, reading=None, missing=f"its training refused canaries: {refused}")
    return MeteredTraining(client=client.name, claims_noise=True, reading=reading, missing="")


def _unfit(declared: DpSgd) -> str:
    """Why a declared mechanism cannot be measured; empty if it can."""
    if not isinstance(declared.event(), PoissonSampledGaussian):
        return "meters know plain Poisson samples and a fixed clipping norm only"
    if declared.record_limit < _FEWEST_RECORDS:
        return f"it declares {declared.record_limit} records at most, too few for canaries"
    if declared.noise_multiplier < _LEAST_NOISE:
        return "its declared noise is too small to be measured"
    return ""


def _read(client: Client, declared: DpSgd, *, consortium: Consortium, model: nn.Module, delta: float) -> TrainingReading:
    with tempfile.TemporaryDirectory(prefix="privfed-audit-") as folder:
        budget = Budget.unlimited(delta=delta)  # the rows are nobody's
        with Ledger.open(Path(folder) / "canaries.ledger", population="canaries", budget=budget) as ledger:
            trial = _Trial(client=replace(client, ledger=ledger), consortium=consortium)
            seen = _canaries(trial, declared, delta=delta)
            # Sampling hides most of what a canary's score tells. A step that takes all is the sharpest test of membership.
            whole, further = _whole_steps(trial, declared, delta=delta)
            on_the_model = _on_the_model(trial, declared, model=model)
    return TrainingReading(
        noise=seen.noise,
        weight=whole.weight,
        on_the_model=on_the_model,
        claimed=whole.claimed,
        proved=whole.proved,
        delta=delta,
        further=(seen.weight, *further),
    )


def _draw(declared: DpSgd) -> DiracRows:
    return DiracRows.draw(declared, count=min(_CANARIES, declared.record_limit), rng=np.random.default_rng())


def _whole_steps(trial: "_Trial", declared: DpSgd, *, delta: float) -> tuple[DiracReading, tuple[Meter, ...]]:
    """A step that takes every record, in two rounds of a run and in one of another; and what the rounds have in common."""
    canaries = _draw(replace(declared, sample_rate=1.0, steps=1, max_records=declared.record_limit))
    first, second = trial.updates(canaries.module, canaries.samples, canaries.mechanism, rounds=2)
    again = trial.update(canaries.module, canaries.samples, canaries.mechanism, loss=binary_cross_entropy)
    reading, later = (canaries.read(update, delta=delta) for update in (first, second))
    shared = (
        correlation_meter(
            first.values[~canaries.included],
            other.values[~canaries.included],
            what=f"the correlation of noise in {what}",
            significance=FAMILY_LEVEL,
        )
        for what, other in (("two rounds", second), ("two runs", again))
    )
    spread = () if reading.spread is None else (reading.spread,)
    return reading, (*spread, reading.noise, replace(later.noise, what="the noise on a weight in a second round"), *shared)


def _canaries(trial: "_Trial", declared: DpSgd, *, delta: float) -> DiracReading:
    canaries = _draw(declared)
    return canaries.read(trial.update(canaries.module, canaries.samples, canaries.mechanism, loss=binary_cross_entropy), delta=delta)


def _on_the_model(trial: "_Trial", declared: DpSgd, *, model: nn.Module) -> tuple[Meter, ...]:
    """Noise on every layer of the model, and clipping there, as far as some record's gradient is clipped."""
    loss, inputs = trial.consortium.loss, trial.client.data.features.shape[1]
    silent = SilentTraining(module=model, inputs=inputs, declared=declared)
    noise = silent.read(trial.update(model, silent.samples, silent.mechanism, loss=loss))
    layers = linear_layers(layout_of(model))
    classes = max(2, layers[-1].outputs if layers else 2)
    copies = min(_COPIES, declared.record_limit)
    try:
        same = CopiesTraining(module=model, inputs=inputs, loss=loss, classes=classes, declared=declared, copies=copies)
    except ValueError:
        return noise  # no record's gradient is clipped in this model: the clipping was measured by the canaries alone
    update = trial.update(model, same.samples, same.mechanism, loss=loss, compiled=trial.client.compiled)
    return (*noise, same.read(update), *same.read_parts(update))


@dataclass(frozen=True, kw_only=True)
class _Trial:
    """Runs the training of a client that has a ledger for canaries."""

    client: Client
    consortium: Consortium

    def update(
        self, module: nn.Module, samples: Samples, mechanism: DpSgd, *, loss: PerSampleLoss, compiled: CompiledSum | None = None
    ) -> PlainVector:
        """What one round of training gives, as it is opened when nobody else sends anything."""
        return lone_update(self._client(samples, mechanism, compiled), module, consortium=self.consortium, loss=loss)

    def updates(self, module: nn.Module, samples: Samples, mechanism: DpSgd, *, rounds: int) -> tuple[PlainVector, ...]:
        """The same of several rounds, one after the other, with binary cross-entropy."""
        canary = self._client(samples, mechanism, None)
        return lone_updates(canary, module, consortium=self.consortium, loss=binary_cross_entropy, rounds=rounds)

    def _client(self, samples: Samples, mechanism: DpSgd, compiled: CompiledSum | None) -> Client:
        # Compression comes after the noise, and would be measured in its place.
        return replace(self.client, data=samples, training=mechanism, compiled=compiled, compressor=None)
