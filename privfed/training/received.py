"""What a client checks before it trains on a model that it got from somebody else.

In a session nobody gets a model from the server: all start from weights whose digest stands in the agreement, and every client adds up
what it opened itself. Where a model does come from outside, as the first one of a session does, the pin is what protects: a model that is
not the agreed one is refused whatever it looks like. Signs of a manipulated first layer are worth looking for in the agreed one, too; who
hides them well is not found.
"""

import hmac

import numpy as np
from numpy.typing import NDArray

from privfed.errors import ModelMismatchError, UnsupportedModelError
from privfed.update import PlainVector

# Of fresh and of trained networks, hardly any two neurons have weights that point the same way so exactly.
_ALIKE = 0.999
_FEWEST_NEURONS, _FEWEST_INPUTS = 8, 4
_MOST = 0.25
# A neuron that fires for so small a share of the records, but for some, shows them alone.
_RARELY = 0.01
_FEWEST_RECORDS = 200


def check_received(model: PlainVector, *, pinned: bytes, rows: NDArray[np.float64] | None = None) -> None:
    """Refuses a model that is not the agreed one, or that looks as if it were made to read records.

    Args:
        model: The weights that were received.
        pinned: `PlainVector.digest` of the agreed ones, as it stands in the agreement. Public.
        rows: The client's records, of shape (n, inputs). Private; they are only run through the first layer, here.

    Raises:
        ModelMismatchError: If it is another model.
        UnsupportedModelError: If there is any of `imprint_signs`.
    """
    if not hmac.compare_digest(model.digest, pinned):
        raise ModelMismatchError("the received model is not the one that was agreed on; nothing was trained; ask the others for theirs")
    signs = imprint_signs(model, rows=rows)
    if signs:
        raise UnsupportedModelError(f"the model looks as if it were made to read records: {'; '.join(signs)}; nothing was trained")


def imprint_signs(model: PlainVector, *, rows: NDArray[np.float64] | None = None) -> tuple[str, ...]:
    """What looks as if a model were made to read records, in words; empty if nothing does. It says nothing about the records.

    Layers in which more than a quarter of the neurons have another one with weights in the same direction (Fowl et al., 2022), or whose
    neurons are all worth the same to the layer after; and, given enough records, a first layer of which more than a quarter of the neurons
    fire for some of them, but for fewer than one in a hundred (trap weights: Boenisch et al., 2021, arXiv:2112.02918). A server that blurs
    its weights a little escapes the first two.

    Args:
        model: The weights.
        rows: Records to run through the first layer, of shape (n, inputs), 200 or more; fewer are not looked at.
    """
    tensors = model.layout.unflatten(model)
    matrices = {name: tensor for name, tensor in tensors.items() if tensor.ndim == 2}
    signs: list[str] = []
    for name, tensor in matrices.items():
        if min(tensor.shape) >= _FEWEST_INPUTS and len(tensor) >= _FEWEST_NEURONS and _alike(tensor) > _MOST:
            signs.append(f"neurons of {name} compare the same number of a record")
        if tensor.shape[1] >= _FEWEST_NEURONS and len(tensor) >= _FEWEST_INPUTS and _alike(tensor.T) > _MOST:
            signs.append(f"neurons are all worth the same to {name}")
    first = next(iter(matrices), None)
    if rows is not None and first is not None and len(rows) >= _FEWEST_RECORDS and matrices[first].shape[1] == rows.shape[1]:
        bias = tensors.get(first.removesuffix("weight") + "bias", np.zeros(len(matrices[first])))
        fired = (rows @ matrices[first].T + bias > 0).mean(axis=0)
        if len(fired) >= _FEWEST_NEURONS and ((fired > 0) & (fired < _RARELY)).mean() > _MOST:
            signs.append(f"many neurons of {first} fire for hardly any record")
    return tuple(signs)


def _alike(rows: NDArray[np.float64]) -> float:
    """Share of rows that point in the direction of another one. Rows of zeros point nowhere."""
    lengths = np.linalg.norm(rows, axis=1)
    units = rows[lengths > 0] / lengths[lengths > 0, None]
    cosines = units @ units.T
    np.fill_diagonal(cosines, 0.0)
    return float((cosines.max(axis=1, initial=0.0) > _ALIKE).sum()) / len(rows)
