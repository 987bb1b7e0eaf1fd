"""What a client checks of a model before it trains on it.

In a session nobody gets a model from the server: all start from weights whose digest stands in the agreement, and every client adds up
what it opened itself. A model that is not the agreed one is refused whatever it looks like. But whoever proposed the agreed one, or sent
updates that bent it, may have made it so that it sorts records into the neurons of a layer, and an update shows them one by one. Signs of
that are looked for in every model before it is trained; who hides them well is not found.
"""

import math

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv

from privfed.errors import UnsupportedModelError
from privfed.update import PlainVector

# Hardly any two neurons have weights that point the same way so exactly, unless they came to do the same: then their thresholds agree.
_ALIKE = 0.999
# Of so few numbers, or so many neurons, directions meet by chance: no more than this share of random ones may count as alike.
_BY_CHANCE = 0.01
_FEWEST_NEURONS, _FEWEST_INPUTS = 8, 3
# Weight decay makes up to a third of the neurons of a later layer much the same, and hardly any of the first.
_MOST_ALIKE, _MOST_ALIKE_LATER = 0.25, 0.5
# A neuron that fires for so small a share of the records, but for some, shows them alone. Weight decay leaves up to 0.4 of a layer so.
_RARELY, _MOST_RARE = 0.01, 0.5
_FEWEST_RECORDS = 200
# More neurons, or records, say the same.
_MOST_NEURONS, _MOST_RECORDS = 256, 10_000


def check_start(model: PlainVector, *, client: str, rows: NDArray[np.float32] | None = None) -> None:
    """Refuses a model that looks as if it were made to read records.

    Args:
        model: The weights that training would start from.
        client: Whose training, in words.
        rows: As `imprint_signs`. A refusal then says something about them: leave them out where every disclosure is accounted for.

    Raises:
        UnsupportedModelError: If there is any of `imprint_signs`.
    """
    if signs := imprint_signs(model, rows=rows):
        raise UnsupportedModelError(
            f"the model that {client} would train looks as if it were made to read records: {'; '.join(signs)}; nothing was trained or "
            "charged; find out who made it, and start from freshly initialised weights"
        )


def imprint_signs(model: PlainVector, *, rows: NDArray[np.float32] | None = None) -> tuple[str, ...]:
    """What looks as if a model were made to read records, in words; empty if nothing does. It says nothing about the records.

    A first layer of which more than a quarter of the neurons, or a later one of which more than half, compare the same number of a record
    as another one does, with a threshold of its own (Fowl et al., 2022, arXiv:2110.13057); and, given enough records, a first layer of
    which more than half of the neurons fire for some of them, but for fewer than one in a hundred, and more than of a random one (trap
    weights: Boenisch et al., 2021, arXiv:2112.02918). A server that blurs its weights a little escapes the first, and so does one whose
    records differ by a few hundredths only. Of large layers and tables, a part is looked at.

    Args:
        model: The weights.
        rows: Records to run through the first layer, of shape (n, inputs), 200 or more; fewer are not looked at. Private.
    """
    tensors = model.layout.unflatten(model)
    signs: list[str] = []
    allowed = _MOST_ALIKE
    for number, (name, weight) in enumerate(tensors.items()):
        bias = tensors.get(name.removesuffix("weight") + "bias")
        if weight.ndim != 2 or bias is None or len(weight) < _FEWEST_NEURONS or bias.shape != weight.shape[:1]:
            continue
        if weight.shape[1] >= _FEWEST_INPUTS and _sorting(weight, bias) > allowed:
            signs.append(f"neurons of {name} compare the same number of a record")
        allowed = _MOST_ALIKE_LATER
        if number == 0 and rows is not None and _rarely_firing(weight, bias, rows):
            signs.append(f"many neurons of {name} fire for hardly any record")
    return tuple(signs)


def _sorting(weight: NDArray[np.float64], bias: NDArray[np.float64]) -> float:
    """Share of neurons that point in the direction of another one, and have another threshold. Those without weights point nowhere."""
    lengths = np.linalg.norm(weight, axis=1)
    pointing = np.flatnonzero(lengths > 0)
    weight, bias, lengths = weight[pointing], bias[pointing], lengths[pointing]
    # Which are looked at must not be known to who makes a model.
    chosen = np.random.default_rng().permutation(len(pointing))[:_MOST_NEURONS]
    products = weight[chosen] @ weight.T
    alike = products > _threshold(len(pointing), weight.shape[1]) * np.outer(lengths[chosen], lengths)
    alike[np.arange(len(chosen)), chosen] = False
    extended = np.hypot(lengths, bias)
    apart = products + np.outer(bias[chosen], bias) < _ALIKE * np.outer(extended[chosen], extended)
    return float((alike & apart).any(axis=1).mean()) if len(chosen) else 0.0


def _threshold(count: int, size: int) -> float:
    """Cosine above which hardly any of so many random directions of such a size has a neighbour.

    A random direction has a cosine above t to another one with probability I(1 - t^2; (size - 1) / 2, 1 / 2) / 2.
    """
    tail = float(betaincinv((size - 1) / 2, 0.5, min(1.0, 2 * _BY_CHANCE / max(1, count))))
    return max(_ALIKE, math.sqrt(1 - tail))


def _rarely_firing(weight: NDArray[np.float64], bias: NDArray[np.float64], rows: NDArray[np.float32]) -> bool:
    """Whether many more neurons fire for hardly any record than of a layer that nobody made. Not, of too few or of other records."""
    if len(rows) < _FEWEST_RECORDS or rows.shape[1:] != weight.shape[1:]:
        return False
    some = rows[:: -(-len(rows) // _MOST_RECORDS)].astype(np.float64)

    def share(weight: NDArray[np.float64], bias: NDArray[np.float64]) -> float:
        fired = (some @ weight.T + bias > 0).mean(axis=0)
        return float(((fired > 0) & (fired < _RARELY)).mean())

    rng, bound = np.random.default_rng(), 1 / math.sqrt(weight.shape[1])
    fresh = share(rng.uniform(-bound, bound, size=(_MOST_NEURONS, weight.shape[1])), rng.uniform(-bound, bound, size=_MOST_NEURONS))
    return share(weight, bias) > fresh + _MOST_RARE
