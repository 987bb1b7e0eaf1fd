"""The trained model as a file of the field: safetensors. The package comes with `privfed[export]`."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import privfed
from privfed.files import replace

if TYPE_CHECKING:
    from privfed.history import History


def save_safetensors(history: "History", path: Path | str) -> None:
    """Writes the weights after the last round, float32, under the names that they have in the model.

    `safetensors.torch.load_model(model, path)` reads them back. The file says beside the weights how they came about: the trust mode, the
    rule, the number of rounds, and what each client spent. It holds nothing that the opened model does not give away.

    Args:
        history: A finished run.
        path: The file, replaced as a whole if it is there.

    Raises:
        ImportError: If safetensors is not installed; `pip install 'privfed[export]'`.
        ValueError: If a weight does not fit into float32; nothing was written.
    """
    from safetensors.numpy import save  # noqa: PLC0415 (an extra)

    layout = history.model.layout
    if np.abs(history.model.values).max() > np.finfo(np.float32).max:
        raise ValueError("expected weights that fit into float32, got a larger one; nothing was written")
    tensors = {name: np.ascontiguousarray(tensor, dtype=np.float32) for name, tensor in layout.unflatten(history.model).items()}
    epsilon = {name: value if math.isfinite(value) else None for name, value in history.epsilon.items()}
    metadata = {
        "format": "pt",
        "privfed": privfed.__version__,
        "mode": history.mode,
        "rule": history.rule,
        "rounds": str(len(history.rounds)),
        "differentially_private": json.dumps(history.private),
        "epsilon": json.dumps(epsilon),
        "delta": json.dumps(dict(history.delta)),
    }
    replace(Path(path), save(tensors, metadata=metadata))
