"""DP-SGD through Opacus. The only module that drives it.

Opacus' hooks compute the gradient of each record where book-keeping cannot do without, and its optimizer makes of a sum what is released
of it, which one step of plain gradient descent follows. Float32 are the model, the derivative of each record's loss, what the hooks write
down, and the weights. Float64 is what decides the privacy, from the
norm of each record's gradient on: clipping, the sum (but for that of `compiled`), the noise, and rounding to a grid. Then:

* One record more or less moves the sum by at most `max_grad_norm`; a gradient that is NaN or infinite counts as zero.
* The noise on the sum has standard deviation `noise_multiplier * max_grad_norm` per coordinate, from the operating system.
* Where clipping adapts, both hold with the norm of the step, and the noise on sum and count together is that of `noise_multiplier`.
* The noised sum is a multiple of 2^-20 * max_grad_norm: it has no low bits that could tell sums apart.
* It is divided by the declared `expected_batch_size`, never by the size of the batch or of the table.
* Exactly `steps` noised steps are done; an empty batch is a step of pure noise.
* Only trainable parameters of the unwrapped model are released, and only if nothing else in it changed, and they in noised steps alone.

Up to its clipping, a record's gradient is the same bits wherever in a batch the record stands and whatever stands beside it: `check`
refuses a model for which that is not so on this machine (see `steady`). So what one record does to a sum is its own gradient. That is
looked at once for a model, and again if anything changes on which it depends (see `steady_model`).
"""

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from opacus import GradSampleModule
from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed
from opacus.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping
from torch import nn

from privfed.data.samples import Samples
from privfed.errors import LayoutMismatchError, UnsupportedDataError, UnsupportedModelError
from privfed.training.bookkeeping import BookKeeping, ReluNetworkBookKeeping, linear_layers, relu_network
from privfed.training.compiled import CompiledBookKeeping, CompiledSum, check_compiled
from privfed.training.gradients import ClippedGradients, clip_factors, zero_broken
from privfed.training.loss import PerSampleLoss, check_loss
from privfed.training.mechanism import GRID_FRACTION, DpSgd, NonPrivate, TrainingMechanism, TrainingResult
from privfed.training.memory import check_unchanged, state_of
from privfed.training.model import check_columns, check_model, join_parameters, layout_of, load_values, trainable_parameters, values_of
from privfed.training.objective import Correction, add_correction, flat
from privfed.training.probe import perturbed_copy, synthetic_records
from privfed.training.randomness import OperatingSystemRandomness, Randomness
from privfed.training.sgd import descend
from privfed.training.steady import awake_copy, unlike_records, widen_narrow_layers
from privfed.training.steady_model import SteadyModel
from privfed.update import PlainVector

# Float32 differs between a batch and a single record by some 1e-6; a wrong gradient differs by a whole factor.
_GRADIENT_TOLERANCE = 1e-3
# Float64 copies of all gradients that the hooks have written down would triple the memory of a step, and miss the cache.
_ROWS_AT_ONCE = 32


class _NoisingOptimizer(DPOptimizerFastGradientClipping):
    """Opacus' optimizer on one vector of weights, with noise from the given randomness, in float64, rounded to a grid."""

    def __init__(self, weights: nn.Parameter, *, mechanism: DpSgd, rounding: float, randomness: Randomness) -> None:
        super().__init__(
            torch.optim.SGD([weights], lr=mechanism.learning_rate),
            noise_multiplier=mechanism.sum_noise_multiplier * (1.0 + rounding),
            max_grad_norm=mechanism.initial_norm,
            expected_batch_size=mechanism.expected_batch_size,
        )
        self.noise = randomness.normal_vectors(weights.numel(), count=mechanism.steps)
        self.grid = GRID_FRACTION * mechanism.max_grad_norm

    def accumulate(self) -> None:
        """Does nothing: `summed_grad` is the whole batch already."""

    def add_noise(self) -> None:
        """Adds the noise to the sum, in float64, and rounds to the grid before anything is done with the result."""
        weights: Any = self.params[0]  # Any, because Opacus hangs its results on it as attributes
        _check_processed_flag(weights.summed_grad)
        grid = self.grid
        noise = torch.from_numpy(next(self.noise)).mul_(self.noise_multiplier * self.max_grad_norm / grid)
        weights.grad = noise.add_(weights.summed_grad, alpha=1 / grid).round_().mul_(grid).to(weights.dtype)
        _mark_as_processed(weights.summed_grad)


class _HookedGradients(BookKeeping):
    """For any model: Opacus' hooks write down the gradient of each record of a pass, at all layers that book-keeping cannot serve."""

    def __init__(
        self,
        model: nn.Module,
        *,
        layers: Sequence[nn.Linear],
        parameters: Sequence[nn.Parameter],
        loss: PerSampleLoss,
        max_grad_norm: float,
    ) -> None:
        super().__init__(model, layers=layers, parameters=parameters, loss=loss, max_grad_norm=max_grad_norm)
        served = [parameter for layer in layers for parameter in layer.parameters()]
        for parameter in served:
            parameter.requires_grad = False  # Opacus hooks what is trained
        self._model = GradSampleModule(model, loss_reduction="sum")
        # Opacus wants each layer to be gone through, and not the sums of gradients that torch would compute on the way.
        own = ([own for own in layer.parameters(recurse=False) if own.requires_grad] for layer in model.modules())
        self._smallest = [min(trained, key=nn.Parameter.numel) for trained in own if trained]
        # Any, because Opacus hangs its results on them as attributes.
        self._hooked: list[tuple[int, Any]] = [(index, parameter) for index, parameter in enumerate(parameters) if parameter.requires_grad]
        for parameter in served:
            parameter.requires_grad = True

    @property
    def numbers_per_record(self) -> int:
        return super().numbers_per_record + 2 * sum(self._sizes[index] for index, _ in self._hooked)

    def of_records(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        pieces = self._pieces_of(features, labels)
        rows = self._write_down(pieces)
        for (index, _), row in zip(self._hooked, pieces[2 * len(self._layers) :], strict=True):
            rows[index] = row
        return torch.cat(rows, dim=1)

    def _add(self, pieces: list[torch.Tensor], total: torch.Tensor) -> tuple[torch.Tensor, int]:
        hooked = pieces[2 * len(self._layers) :]
        inputs, derivatives = self._of_layers([piece.double() for piece in pieces[: 2 * len(self._layers)]])
        sums, records = total.split(self._sizes), len(pieces[0])
        norms = self._squared_norms(inputs, derivatives) if inputs else torch.zeros(records, dtype=torch.float64)
        zeroed = 0
        for start in range(0, records, _ROWS_AT_ONCE):
            here = slice(start, start + _ROWS_AT_ONCE)
            rows = [row[here].double() for row in hooked]
            of_rows = torch.stack([torch.linalg.vector_norm(row, dim=1) for row in rows]).square_().sum(dim=0)
            norms[here].add_(of_rows).sqrt_()
            zeroed += zero_broken(norms[here], [*rows, *(tensor[here] for tensor in (*inputs, *derivatives))])
            factors = clip_factors(norms[here], max_grad_norm=self.max_grad_norm)
            for (index, _), row in zip(self._hooked, rows, strict=True):
                sums[index].addmv_(row.T, factors)
        self._add_products(inputs, derivatives, clip_factors(norms, max_grad_norm=self.max_grad_norm), sums)
        return norms, zeroed

    def _pieces(self, features: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
        """As book-keeping, and the gradients of each record at the hooked parameters, one tensor of shape (records, numel) each."""
        with warnings.catch_warnings():
            # Torch would have the features require a gradient, but to a first layer of convolutions that is a third of the work.
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            loss, inputs, outputs = self._forward(features, labels)
            derivatives = torch.autograd.grad(loss, [*outputs, *self._smallest])[: len(outputs)]
        rows = [parameter.grad_sample for _, parameter in self._hooked]
        for _, parameter in self._hooked:
            parameter.grad_sample = None
        if any(not isinstance(row, torch.Tensor) or len(row) != len(features) for row in rows):
            raise UnsupportedModelError("a layer of the model has no gradient per record; no update was made")
        return [*inputs, *derivatives, *(row.flatten(start_dim=1) if row.ndim > 1 else row[:, None] for row in rows)]


def _clipped_gradients(
    model: nn.Module, *, loss: PerSampleLoss, max_grad_norm: float, inputs: int, compiled: CompiledSum | None = None
) -> ClippedGradients:
    """The cheapest way to the clipped sums of this model; it stays hooked to the model."""
    layers = linear_layers(model, features=synthetic_records(inputs)[0])
    parameters = list(trainable_parameters(model).values())
    alternating = relu_network(model, layers=layers)
    if not alternating:
        widen_narrow_layers(model)
    if compiled is not None:
        if not alternating:
            raise UnsupportedModelError("a compiled sum is for nn.Linear and nn.ReLU in turn; nothing was trained")
        return CompiledBookKeeping(model, layers=layers, parameters=parameters, compiled=compiled)
    kind = _HookedGradients
    if len(parameters) == sum(len(list(layer.parameters())) for layer in layers):
        kind = ReluNetworkBookKeeping if alternating else BookKeeping
    return kind(model, layers=layers, parameters=parameters, loss=loss, max_grad_norm=max_grad_norm)


def check(
    module: nn.Module,
    start: PlainVector,
    samples: Samples,
    *,
    mechanism: TrainingMechanism,
    loss: PerSampleLoss,
    compiled: CompiledSum | None = None,
    client: str = "the client",
    steady: SteadyModel | None = None,
) -> SteadyModel | None:
    """Refuses whatever `train` refuses, without training. Call it before the ledger is charged.

    The model and the loss run on made-up records only. Of the private data, the number of records and the labels are looked at. `client`
    is whom a refusal of its records names.

    Returns:
        For `DpSgd`, what was found steady: handed over as `steady` the next time, it is not looked at again, if it is still the same.

    Raises:
        TypeError: If the mechanism is of an unknown kind.
        LayoutMismatchError: If the start has another layout than the module.
        UnsupportedModelError: See `check_model`, `check_columns` and `check_loss`; also if training would not get the right gradient for
            each record.
        UnsupportedDataError: If there are more records than the mechanism's `record_limit`, a customer has more than its
            `records_per_customer`, or the loss does not take a label.
        ValueError: As `check_compiled`.
    """
    if not isinstance(mechanism, DpSgd | NonPrivate):
        raise TypeError(f"expected DpSgd or NonPrivate, got {type(mechanism).__name__}; nothing was trained")
    check_model(module)
    if start.layout != layout_of(module):
        raise LayoutMismatchError("the start does not have the layout of the model; nothing was trained")
    if isinstance(mechanism, DpSgd) and len(samples) > mechanism.record_limit:
        raise UnsupportedDataError(
            f"{client} has more records than the declared limit of {mechanism.record_limit}; declare a smaller sample_rate or a larger "
            "max_records; nothing was trained"
        )
    if isinstance(mechanism, DpSgd) and mechanism.records_per_customer is not None:
        _check_customers(samples, most=mechanism.records_per_customer, client=client)
    if compiled is not None:
        check_compiled(compiled, layout=start.layout, loss=loss, mechanism=mechanism)
    inputs = samples.features.shape[1]
    check_columns(module, samples.columns)
    module = copy.deepcopy(module)
    load_values(module, start)
    check_loss(module, loss, inputs=inputs, labels=samples.labels)
    if not isinstance(mechanism, DpSgd):
        return None
    found = SteadyModel.of(module.train(), loss=loss, mechanism=mechanism, inputs=inputs, compiled=compiled)
    _check_gradients(module, loss, mechanism=mechanism, inputs=inputs, compiled=compiled, known_steady=found.holds_for(steady))
    return found


def train(
    module: nn.Module,
    start: PlainVector,
    samples: Samples,
    *,
    mechanism: TrainingMechanism,
    loss: PerSampleLoss,
    correction: Correction | None = None,
    randomness: Randomness | None = None,
    compiled: CompiledSum | None = None,
    steady: SteadyModel | None = None,
    round: int = 0,  # noqa: A002
) -> TrainingResult:
    """Trains a copy of the model for one round and returns how its weights moved.

    No argument is changed, and neither is the state of torch's or numpy's global generators.

    Args:
        module: The architecture. Its own trainable weights are ignored, its frozen ones are used as they are.
        start: Weights to start from, public; rounded to float32.
        samples: The client's records. Private.
        mechanism: How to train. `DpSgd` costs the privacy of its event, which the caller has charged before.
        loss: Loss per record, from that record alone.
        correction: Data-independent addition to each gradient, after clipping and noise.
        randomness: Source of noise and samples for `DpSgd`; left out, the operating system's entropy.
        compiled: What `compile_sum` made of this model, loss and mechanism: `DpSgd` takes it to go faster.
        steady: What `check` gave before for the same model, loss and mechanism, which saves time.
        round: Number of the round, from 0. Public. Only `NonPrivate` orders its records by it.

    Raises:
        PrivFedError: Whatever `check` refuses, before any record is touched; or as `check_unchanged`, after.
        ValueError: If the weights became infinite or NaN, or the correction has the wrong shape. What was charged stays charged.
    """
    check(module, start, samples, mechanism=mechanism, loss=loss, compiled=compiled, steady=steady)
    model = copy.deepcopy(module).train()
    load_values(model, start)
    loaded = values_of(model)
    trained = list(trainable_parameters(model).values())
    before = state_of(model=model, loss=loss, without=trained)
    features, labels = _borrow(samples.features), _borrow(samples.labels)
    zeroed_gradients, private_randomness = 0, False
    if isinstance(mechanism, DpSgd):
        source = OperatingSystemRandomness() if randomness is None else randomness
        private_randomness = source.private
        zeroed_gradients = _descend_privately(
            model, features, labels, mechanism=mechanism, loss=loss, correction=correction, randomness=source, compiled=compiled
        )
    else:
        descend(model, features, labels, mechanism=mechanism, loss=loss, correction=correction, round=round)
    check_unchanged(before, model=model, loss=loss, without=trained)
    if not all(bool(torch.isfinite(parameter).all()) for parameter in trained):
        raise ValueError("expected a learning_rate at which the weights stay finite; they did not, and no update was made")
    update = PlainVector(layout=loaded.layout, values=values_of(model).values - loaded.values)
    return TrainingResult(
        update_values=update, steps=mechanism.steps, private_randomness=private_randomness, zeroed_gradients=zeroed_gradients
    )


def _borrow(array: NDArray[Any]) -> torch.Tensor:
    """A tensor on the memory of an array. Batches are copied out of it; nothing is ever written to it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def _descend_privately(
    model: nn.Module,
    features: torch.Tensor,
    labels: torch.Tensor,
    *,
    mechanism: DpSgd,
    loss: PerSampleLoss,
    correction: Correction | None,
    randomness: Randomness,
    compiled: CompiledSum | None,
) -> int:
    """Trains a model in place and returns how many gradients were zeroed for being NaN or infinite."""
    weights: Any = join_parameters(model)  # Any, because Opacus hangs its results on it as attributes
    start = flat([weights])
    parameters = list(trainable_parameters(model).values())
    places = [parameter.data_ptr() for parameter in parameters]
    bits = weights.detach().view(torch.int32)
    known = torch.empty_like(bits)
    norm, capacity, adaptive = mechanism.initial_norm, mechanism.batch_capacity, mechanism.adaptive_clipping
    gradients = _clipped_gradients(model, loss=loss, max_grad_norm=norm, inputs=features.shape[1], compiled=compiled)
    optimizer = _NoisingOptimizer(weights, mechanism=mechanism, rounding=gradients.rounding, randomness=randomness)
    zeroed = 0
    for indices in randomness.poisson_batches(len(labels), sample_rate=mechanism.sample_rate, steps=mechanism.steps):
        taken = indices if capacity is None or len(indices) <= capacity else randomness.subset(indices, capacity)
        batch = torch.from_numpy(gradients.whole_blocks(taken))
        known.copy_(bits)
        clipped = gradients.sum(features.index_select(0, batch), labels.index_select(0, batch), count=len(taken))
        _check_unmoved(bits, known, places, parameters)
        weights.summed_grad = clipped.values
        zeroed += clipped.zeroed
        optimizer.pre_step()
        if correction is not None:
            add_correction([weights], start, correction)
        with torch.no_grad():  # what torch.optim.SGD does, at a tenth of its time
            weights.add_(weights.grad, alpha=-mechanism.learning_rate)
        if adaptive is not None:
            count = _noised_count(clipped.norms <= norm, count_noise=adaptive.count_noise, randomness=randomness)
            norm = adaptive.next_norm(norm, noised_count=count, expected_batch_size=mechanism.expected_batch_size)
            # The next step clips to the same number as its noise is in multiples of.
            # Below a step of the grid, all sums would be rounded away.
            norm = gradients.max_grad_norm = optimizer.max_grad_norm = min(max(norm, optimizer.grid), mechanism.max_grad_norm)
    return zeroed


def _check_unmoved(bits: torch.Tensor, known: torch.Tensor, places: Sequence[int], parameters: Sequence[nn.Parameter]) -> None:
    """Refuses a model whose weights moved, or were exchanged, while records went through: no noise would cover that."""
    if not torch.equal(bits, known) or [parameter.data_ptr() for parameter in parameters] != places:
        raise UnsupportedModelError(
            "the model moved its own weights while records went through, which no noise covers; no update was made; what was charged stays "
            "charged; take out what writes to weights, such as max_norm of nn.Embedding"
        )


def _noised_count(within: torch.Tensor, *, count_noise: float, randomness: Randomness) -> float:
    """One half for each record that was not clipped, minus one half for each that was, plus noise, on a grid. Fit to be released."""
    count = int(within.count_nonzero()) - len(within) / 2
    return round((count + count_noise * float(randomness.normal(1)[0])) / GRID_FRACTION) * GRID_FRACTION


def _check_customers(samples: Samples, *, most: int, client: str) -> None:
    if samples.groups is None:
        raise UnsupportedDataError(f"{client} does not say whose each record is; make its customers the groups; nothing was trained")
    if np.unique(samples.groups, return_counts=True)[1].max() > most:
        raise UnsupportedDataError(
            f"{client} has a customer with more records than the declared {most}; leave out those beyond, with "
            "Samples.first_of_groups, or declare more; nothing was trained"
        )


def _check_gradients(
    module: nn.Module, loss: PerSampleLoss, *, mechanism: DpSgd, inputs: int, compiled: CompiledSum | None, known_steady: bool
) -> None:
    """Compares the gradients of made-up records, as training computes and sums them, with the gradient of each record alone.

    And with themselves at every other place of a batch, unless that was found before.
    """
    plain, model = perturbed_copy(module), perturbed_copy(module)
    features, labels = synthetic_records(inputs)
    try:
        gradients = _clipped_gradients(model, loss=loss, max_grad_norm=mechanism.max_grad_norm, inputs=inputs, compiled=compiled)
        rows = gradients.of_records(features, labels)
        total = gradients.sum(features, labels).values
        steady = known_steady
        if not known_steady:
            bound = mechanism.max_grad_norm
            awake = _clipped_gradients(awake_copy(module), loss=loss, max_grad_norm=bound, inputs=inputs, compiled=compiled)
            steady = awake.is_steady(*unlike_records(inputs, labels), most=mechanism.record_limit)
    except (NotImplementedError, RuntimeError, ValueError, UnsupportedModelError) as error:
        raise UnsupportedModelError(
            "there is no gradient per record of this model; use inplace=False in all layers, every layer of the model, and layers that "
            "treat every record by itself; nothing was trained"
        ) from error
    parameters = list(trainable_parameters(plain).values())
    alone = torch.zeros_like(rows)
    for index in range(len(labels)):
        record_loss = loss(plain(features[index : index + 1]), labels[index : index + 1]).sum()
        parts = torch.autograd.grad(record_loss, parameters, allow_unused=True, materialize_grads=True)
        alone[index] = torch.cat([part.reshape(-1) for part in parts])
    norms = torch.linalg.vector_norm(alone, dim=1)
    expected = clip_factors(norms.double(), max_grad_norm=mechanism.max_grad_norm) @ alone.double()
    if (
        not (torch.linalg.vector_norm(rows - alone, dim=1) <= _GRADIENT_TOLERANCE * norms).all()
        or not float((total - expected).norm()) <= _GRADIENT_TOLERANCE * len(labels) * mechanism.max_grad_norm
    ):
        raise UnsupportedModelError(
            "the gradient of a record in a batch is not the gradient of that record alone: a parameter is used outside its layer, or the "
            "model mixes records; nothing was trained"
        )
    if not steady:
        raise UnsupportedModelError(
            "on this machine, the gradient of a record has other last bits at another place of the batch, by which one record could push "
            "others over a kink of the model; take layers of other kinds or widths, such as mlp makes; nothing was trained"
        )
