"""An active server: it hands out a model whose first layer sorts records into bins, and reads them off the updates.

All neurons compare the same number of a record, each with a threshold of its own, and all are worth the same to the next layer. A record
then fires every neuron up to its bin, and what two neighbouring neurons differ in is the records of one bin (Fowl et al., 2022,
arXiv:2110.13057, section 4). Batches of any size are read, as far as records are alone in their bins. Nothing is hidden in an update:
whoever trains on such a model can know it, see `privfed.training.received`.
"""

import time

import numpy as np
from numpy.typing import NDArray

from privfed.attacks.analytic import EXACT
from privfed.attacks.facts import Activation, TableSchema
from privfed.attacks.observation import LinearLayer, NotApplicable, Observation, Reconstruction, gradient_part, linear_layers
from privfed.update import PlainVector

_SAME_DIRECTION = 1e-5
# Small weights are rounded in small steps, so that a small change of them is read exactly.
_SCALE = 1e-3
_CERTIFICATE = "no row is certified: two rows in one bin look like one"


def imprint(model: PlainVector, public_rows: NDArray[np.float64], *, rng: np.random.Generator) -> PlainVector:
    """A model of the same layout whose first layer sorts records into as many bins as it has neurons.

    Args:
        model: Of the agreed layout: a fully connected layer with bias on the records, ReLU, and another such layer.
        public_rows: Records like those of the clients, of shape (n, inputs): thresholds are set so that they fill all bins evenly.
        rng: Decides which number is compared.

    Raises:
        ValueError: If the model does not begin with two fully connected layers, the first of them on such rows.
    """
    layers = linear_layers(model.layout)
    if len(layers) < 2 or layers[0].inputs != public_rows.shape[1] or layers[1].inputs != layers[0].outputs:
        raise ValueError(f"expected two fully connected layers, the first on {public_rows.shape[1]} columns")
    first, second = layers[:2]
    tensors = {name: tensor.copy() for name, tensor in model.layout.unflatten(model).items()}
    spread = public_rows.std(axis=0)
    direction = np.where(spread > 0, rng.normal(size=first.inputs) / np.where(spread > 0, spread, 1.0), 0.0)
    direction *= _SCALE / np.linalg.norm(direction)
    thresholds = np.quantile(public_rows @ direction, np.arange(first.outputs) / first.outputs)
    tensors[first.weight] = np.tile(direction, (first.outputs, 1))
    tensors[first.bias] = -thresholds
    # Positive, so that no later ReLU shuts off what was sorted, and the same for all neurons.
    tensors[second.weight] = np.tile(np.abs(tensors[second.weight]).mean(axis=1, keepdims=True), (1, first.outputs))
    return model.layout.flatten(tensors)


def read_imprint(observation: Observation) -> Reconstruction | NotApplicable:
    """Reads one record off every bin of a model that `imprint` made, the clearest first.

    Exact for one step, and for records alone in their bins; bins of several give a mixture, which is found out where it is not of one
    category in each block. Not applicable to other models: `privfed.attacks.analytic` reads those.

    Args:
        observation: What the server holds; the model in it is the one that it handed out.
    """
    started = time.perf_counter()
    part, layers = gradient_part(observation), linear_layers(observation.layout)
    if isinstance(part, NotApplicable):
        return part
    schema = observation.schema
    if observation.activation is not Activation.RELU or not layers or layers[0].inputs != schema.width:
        return NotApplicable(reason=f"the model has no fully connected layer with bias and ReLU on the schema's {schema.width} columns")
    first = layers[0]
    order = _bins(observation.layout.unflatten(part.before), first)
    if order is None:
        return NotApplicable(reason="the neurons of the first layer do not all compare the same number of a record")

    def matrix(vector: PlainVector) -> NDArray[np.float64]:
        tensors = observation.layout.unflatten(vector)
        return np.column_stack([tensors[first.weight], tensors[first.bias]])[order]

    change, error = matrix(part.change), matrix(part.error)
    # From the lowest threshold up; the highest bin has no neighbour above.
    bins = change - np.vstack([change[1:], np.zeros((1, change.shape[1]))])
    errors = error + np.vstack([error[1:], np.zeros((1, change.shape[1]))])
    filled = np.abs(bins[:, -1]) > 2 * errors[:, -1]
    bins, errors = bins[filled], errors[filled]
    rows = bins[:, :-1] / bins[:, -1:]
    # |w/b - (w+e)/(b+f)| for the largest errors e and f.
    reach = (errors[:, :-1] + np.abs(rows) * errors[:, -1:]) / (np.abs(bins[:, -1:]) - errors[:, -1:])
    confidence = _confidence(rows, reach, schema)
    best = np.argsort(-confidence, kind="stable")[: max(1, round(observation.records))]
    return Reconstruction(
        rows=rows[best],
        certified=np.zeros(len(best), dtype=np.bool_),
        confidence=confidence[best],
        certificate=_CERTIFICATE,
        seconds=time.perf_counter() - started,
    )


def _bins(tensors: dict[str, NDArray[np.float64]], first: LinearLayer) -> NDArray[np.intp] | None:
    """The neurons in the order of their thresholds; None if they do not all compare the same number."""
    weight = tensors[first.weight]
    lengths = np.linalg.norm(weight, axis=1, keepdims=True)
    if not lengths.min() > 0 or np.abs(weight / lengths - weight[0] / lengths[0]).max() > _SAME_DIRECTION:
        return None
    return np.argsort(-tensors[first.bias] / lengths[:, 0], kind="stable")


def _confidence(rows: NDArray[np.float64], reach: NDArray[np.float64], schema: TableSchema) -> NDArray[np.float64]:
    """Share of each row's entries that are known, halved where numbers are out of range or a block is not of one category."""
    scale = schema.high - schema.low
    known = (reach <= EXACT * scale).mean(axis=1)
    possible = ~((rows < schema.low - reach) | (rows > schema.high + reach)).any(axis=1)
    for block in schema.blocks:
        whole = np.rint(rows[:, block])
        possible &= (np.abs(rows[:, block] - whole) <= reach[:, block] + EXACT).all(axis=1) & (whole.sum(axis=1) == 1)
    return 0.9 * known * np.where(possible, 1.0, 0.5)
