"""DP-SGD through Opacus. The only module that drives it.

Opacus computes the gradient of each record and runs the optimizer. What decides the privacy is done here in float64: clipping, the
sum, the noise, and rounding to a grid. Then:

* One record more or less moves the sum by at most `max_grad_norm`; a gradient that is NaN or infinite counts as zero.
* The noise on the sum has standard deviation `noise_multiplier * max_grad_norm` per coordinate, from the operating system.
* The noised sum is a multiple of 2^-20 * max_grad_norm: it has no low bits that could tell sums apart.
* It is divided by the declared `expected_batch_size`, never by the size of the batch or of the table.
* Exactly `steps` noised steps are done; an empty batch is a step of pure noise.
* Only trainable parameters of the unwrapped model are released.

The gradients themselves are float32: the other records of a batch can move the last bits of a record's gradient.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from opacus import GradSampleModule
from opacus.optimizers.optimizer import DPOptimizer, _check_processed_flag, _mark_as_processed
from torch import nn

from privfed.data.samples import Samples
from privfed.errors import LayoutMismatchError, UnsupportedDataError, UnsupportedModelError
from privfed.training.loss import PerSampleLoss, check_loss, perturbed_copy, synthetic_records
from privfed.training.mechanism import GRID_FRACTION, DpSgd, NonPrivate, TrainingMechanism, TrainingResult
from privfed.training.model import check_model, layout_of, load_values, trainable_parameters, values_of
from privfed.training.objective import Correction, add_correction, flat
from privfed.training.randomness import OperatingSystemRandomness, Randomness
from privfed.training.sgd import descend
from privfed.update import PlainVector

# Float32 differs between a batch and a single record by some 1e-6; a wrong gradient differs by a whole factor.
_GRADIENT_TOLERANCE = 1e-3
# Float64 copies of a whole batch of gradients would triple the memory of a step, and miss the cache.
_ROWS_AT_ONCE = 32


class _NoisingOptimizer(DPOptimizer):
    """Opacus' optimizer with the clipped sum in float64 and noise from the given randomness."""

    def __init__(self, parameters: list[nn.Parameter], *, mechanism: DpSgd, randomness: Randomness) -> None:
        super().__init__(
            torch.optim.SGD(parameters, lr=mechanism.learning_rate),
            noise_multiplier=mechanism.noise_multiplier,
            max_grad_norm=mechanism.max_grad_norm,
            expected_batch_size=mechanism.expected_batch_size,
        )
        self.randomness = randomness
        self.zeroed_gradients = 0

    def clip_and_accumulate(self) -> None:
        """Sums the gradients of the batch, each scaled to a norm of at most max_grad_norm over all parameters together."""
        parameters: list[Any] = self.params  # Any, because Opacus hangs its results on them as attributes
        for parameter in parameters:
            _check_processed_flag(parameter.grad_sample)
            parameter.summed_grad = torch.zeros_like(parameter, dtype=torch.float64)
        for grad_samples in zip(*(self._get_flat_grad_sample(parameter).split(_ROWS_AT_ONCE) for parameter in parameters), strict=True):
            self._clip_and_add(parameters, [grad_sample.double() for grad_sample in grad_samples])
        for parameter in parameters:
            _mark_as_processed(parameter.grad_sample)

    def _clip_and_add(self, parameters: list[Any], grad_samples: list[torch.Tensor]) -> None:
        rows = [grad.reshape(len(grad), parameter.numel()) for grad, parameter in zip(grad_samples, parameters, strict=True)]
        norms = torch.stack([torch.linalg.vector_norm(row, dim=1) for row in rows]).norm(dim=0)
        broken = ~torch.isfinite(norms)
        if broken.any():
            # Scaling by zero would not do: zero times NaN is NaN.
            norms[broken] = 0.0
            for row in rows:
                row[broken] = 0.0
            self.zeroed_gradients += int(broken.sum())
        factors = self.max_grad_norm / norms.clamp(min=self.max_grad_norm)
        for parameter, row in zip(parameters, rows, strict=True):
            parameter.summed_grad += (factors @ row).view_as(parameter)

    def add_noise(self) -> None:
        """Adds the noise to the sums, in float64, and rounds to the grid before anything is done with the result."""
        parameters: list[Any] = self.params
        sizes = [parameter.numel() for parameter in parameters]
        noise = torch.from_numpy(self.randomness.normal(sum(sizes))) * (self.noise_multiplier * self.max_grad_norm)
        grid = GRID_FRACTION * self.max_grad_norm
        for parameter, part in zip(parameters, noise.split(sizes), strict=True):
            _check_processed_flag(parameter.summed_grad)
            noised = parameter.summed_grad + part.view_as(parameter)
            parameter.grad = (torch.round(noised / grid) * grid).to(parameter.dtype)
            _mark_as_processed(parameter.summed_grad)


def check(module: nn.Module, start: PlainVector, samples: Samples, *, mechanism: TrainingMechanism, loss: PerSampleLoss) -> None:
    """Refuses whatever `train` refuses, without training. Call it before the ledger is charged.

    The model and the loss run on made-up records only. Of the private data, the number of records and the labels are looked at.

    Raises:
        TypeError: If the mechanism is of an unknown kind.
        LayoutMismatchError: If the start has another layout than the module.
        UnsupportedModelError: See `check_model` and `check_loss`; also if Opacus does not give the right gradient for each record.
        UnsupportedDataError: If there are more records than the mechanism's `record_limit`, or a label the loss does not take.
    """
    if not isinstance(mechanism, DpSgd | NonPrivate):
        raise TypeError(f"expected DpSgd or NonPrivate, got {type(mechanism).__name__}; nothing was trained")
    check_model(module)
    if start.layout != layout_of(module):
        raise LayoutMismatchError("the start does not have the layout of the model; nothing was trained")
    if isinstance(mechanism, DpSgd) and len(samples) > mechanism.record_limit:
        raise UnsupportedDataError(
            f"the client has more records than the declared limit of {mechanism.record_limit}; declare a smaller sample_rate or a "
            "larger max_records; nothing was trained"
        )
    inputs = samples.features.shape[1]
    check_loss(module, loss, inputs=inputs, labels=samples.labels)
    if isinstance(mechanism, DpSgd):
        _check_gradients(module, loss, inputs=inputs)


def train(
    module: nn.Module,
    start: PlainVector,
    samples: Samples,
    *,
    mechanism: TrainingMechanism,
    loss: PerSampleLoss,
    correction: Correction | None = None,
    randomness: Randomness | None = None,
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
        round: Number of the round, from 0. Public. Only `NonPrivate` orders its records by it.

    Raises:
        PrivFedError: Whatever `check` refuses, before any record is touched.
        ValueError: If the weights became infinite or NaN, or the correction has the wrong shape. What was charged stays charged.
    """
    check(module, start, samples, mechanism=mechanism, loss=loss)
    model = copy.deepcopy(module).train()
    load_values(model, start)
    loaded = values_of(model)
    features, labels = torch.tensor(samples.features), torch.tensor(samples.labels)
    zeroed_gradients, private_randomness = 0, False
    if isinstance(mechanism, DpSgd):
        source = OperatingSystemRandomness() if randomness is None else randomness
        private_randomness = source.private
        zeroed_gradients = _descend_privately(
            model, features, labels, mechanism=mechanism, loss=loss, correction=correction, randomness=source
        )
    else:
        descend(model, features, labels, mechanism=mechanism, loss=loss, correction=correction, round=round)
    if not all(bool(torch.isfinite(parameter).all()) for parameter in trainable_parameters(model).values()):
        raise ValueError("expected a learning_rate at which the weights stay finite; they did not, and no update was made")
    update = PlainVector(layout=loaded.layout, values=values_of(model).values - loaded.values)
    return TrainingResult(
        update_values=update, steps=mechanism.steps, private_randomness=private_randomness, zeroed_gradients=zeroed_gradients
    )


def _descend_privately(
    model: nn.Module,
    features: torch.Tensor,
    labels: torch.Tensor,
    *,
    mechanism: DpSgd,
    loss: PerSampleLoss,
    correction: Correction | None,
    randomness: Randomness,
) -> int:
    """Trains a model in place and returns how many gradients were zeroed for being NaN or infinite."""
    parameters: list[Any] = list(trainable_parameters(model).values())
    start = flat(parameters)
    wrapped = GradSampleModule(model, loss_reduction="sum")
    optimizer = _NoisingOptimizer(parameters, mechanism=mechanism, randomness=randomness)
    for _ in range(mechanism.steps):
        batch = torch.from_numpy(randomness.poisson_sample(len(labels), sample_rate=mechanism.sample_rate))
        optimizer.zero_grad()
        if len(batch):
            _backward(wrapped, features[batch], labels[batch], loss)
        else:
            for parameter in parameters:
                parameter.grad_sample = parameter.new_zeros((0, *parameter.shape))
        optimizer.pre_step()
        if correction is not None:
            add_correction(parameters, start, correction)
        optimizer.original_optimizer.step()
    return optimizer.zeroed_gradients


def _backward(wrapped: Callable[[torch.Tensor], Any], features: torch.Tensor, labels: torch.Tensor, loss: PerSampleLoss) -> None:
    # With a gradient for the features, torch runs the hooks of the first layer without a warning.
    loss(wrapped(features.requires_grad_()), labels).sum().backward()


def _check_gradients(module: nn.Module, loss: PerSampleLoss, *, inputs: int) -> None:
    """Compares Opacus' gradient of each made-up record with the gradient of that record alone."""
    plain, model = perturbed_copy(module), perturbed_copy(module)
    features, labels = synthetic_records(inputs)
    try:
        _backward(GradSampleModule(model, loss_reduction="sum"), features, labels, loss)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        raise UnsupportedModelError(
            "Opacus cannot compute a gradient per record of this model; use inplace=False in all layers, and layers that treat every "
            "record by itself; nothing was trained"
        ) from error
    wrong = UnsupportedModelError(
        "Opacus' gradient of a record is not the gradient of that record alone: a parameter is used outside its layer, or the model "
        "mixes records; nothing was trained"
    )
    grad_samples = [getattr(parameter, "grad_sample", None) for parameter in trainable_parameters(model).values()]
    parameters = list(trainable_parameters(plain).values())
    for index in range(len(labels)):
        record_loss = loss(plain(features[index : index + 1].detach()), labels[index : index + 1]).sum()
        alone = torch.autograd.grad(record_loss, parameters, allow_unused=True, materialize_grads=True)
        norm = float(torch.cat([gradient.reshape(-1) for gradient in alone]).norm())
        for grad_sample, gradient in zip(grad_samples, alone, strict=True):
            if not isinstance(grad_sample, torch.Tensor) or grad_sample.shape != (len(labels), *gradient.shape):
                raise wrong
            if not float((grad_sample[index] - gradient).norm()) <= _GRADIENT_TOLERANCE * norm:
                raise wrong
