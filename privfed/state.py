"""A party's durable copy of the model: which rounds are in it, its weights, and what decides how it goes on."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import Any
from zipfile import BadZipFile

import numpy as np

from privfed.aggregation.server_optimizer import ServerOptimizer
from privfed.agreement import DIGEST_BYTES
from privfed.errors import DamagedFileError, LayoutMismatchError
from privfed.files import replacement
from privfed.update import Layout, PlainVector

_OPTIMIZER, _SCORES = "optimizer_", "scores"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState:
    """The model as one party holds it.

    Args:
        values: The weights.
        rounds: Numbers of the rounds whose aggregates are in it, ascending.
        history: `RoundDigest.digest` of the last of them, 32 bytes; zeros if there is none.
        optimizer: State of the server optimiser after them, by name; empty for one that keeps none.
        scores: Cumulative scores of the clients after them, for rules that keep some. Finite. As private as inner products.

    Raises:
        ValueError: If the rounds are not ascending, the history has another length, or a score is not finite.
    """

    values: PlainVector
    rounds: tuple[int, ...] = ()
    history: bytes = bytes(DIGEST_BYTES)
    optimizer: Mapping[str, PlainVector] = field(default_factory=dict[str, PlainVector])
    scores: Mapping[str, float] = field(default_factory=dict[str, float], repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "optimizer", MappingProxyType(dict(self.optimizer)))
        object.__setattr__(self, "scores", MappingProxyType({name: float(score) for name, score in self.scores.items()}))
        if not all(map(math.isfinite, self.scores.values())):
            raise ValueError("expected finite scores, got NaN or infinity")
        if len(self.history) != DIGEST_BYTES:
            raise ValueError(f"expected a history of {DIGEST_BYTES} bytes, got {len(self.history)}")
        if any(later <= earlier for earlier, later in zip(self.rounds, self.rounds[1:], strict=False)):
            raise ValueError(f"expected ascending rounds, got {self.rounds}")

    def after(
        self,
        movement: PlainVector,
        *,
        round: int,  # noqa: A002
        optimizer: ServerOptimizer,
        history: bytes = bytes(DIGEST_BYTES),
        scores: Mapping[str, float] | None = None,
    ) -> "ModelState":
        """The state after one more round. Everybody who opens the same aggregates gets the same one, to the last bit.

        Args:
            movement: How the rule would move the model.
            round: Number of the round.
            optimizer: What is done with it.
            history: `RoundDigest.digest` of the round.
            scores: Cumulative scores after it; left out, they stay.

        Raises:
            ValueError: If the round is not later than those in the model, or a number overflows.
            LayoutMismatchError: If the movement has another layout than the model.
            DamagedFileError: If the optimiser's state of the rounds before is missing.
        """
        if movement.layout != self.values.layout:
            raise LayoutMismatchError("the aggregate has another layout than the model; the model is as it was")
        kept, moved = optimizer.step(self.optimizer, movement)
        if self.rounds and kept.keys() != self.optimizer.keys():
            raise DamagedFileError("the stored model lacks the state of the server optimiser; the model is as it was; put it back")
        return ModelState(
            values=PlainVector(layout=movement.layout, values=self.values.values + moved.values),
            rounds=(*self.rounds, round),
            history=history,
            optimizer=kept,
            scores=self.scores if scores is None else scores,
        )


class ModelStore:
    """One file with the current `ModelState`, replaced as a whole: a crash leaves the old or the new one, never a mixture.

    Args:
        path: The file, made with mode 0600 by the first `save`.
        layout: Layout of the model.
    """

    def __init__(self, path: Path, *, layout: Layout) -> None:
        self._path = path
        self._layout = layout

    def load(self) -> ModelState | None:
        """The stored state, or None if nothing was stored yet.

        Raises:
            LayoutMismatchError: If the file holds a model of another size.
            DamagedFileError: If it is damaged, or holds something else.
        """
        if not self._path.exists():
            return None
        data = BytesIO(self._path.read_bytes())
        try:
            with np.load(data, allow_pickle=False) as file:
                values, rounds, history = file["values"], file["rounds"], file["history"]
                moments = {name.removeprefix(_OPTIMIZER): file[name] for name in file.files if name.startswith(_OPTIMIZER)}
                scores = json.loads(file[_SCORES].tobytes()) if _SCORES in file.files else {}
            return ModelState(
                values=PlainVector(layout=self._layout, values=values),
                rounds=tuple(int(number) for number in rounds),
                history=history.tobytes(),
                optimizer={name: PlainVector(layout=self._layout, values=moment) for name, moment in moments.items()},
                scores=scores,
            )
        except (ValueError, TypeError, LookupError, AttributeError, EOFError, OSError, RuntimeError, BadZipFile) as error:
            raise DamagedFileError(
                f"{self._path.name} is damaged or no model of a session; nothing was done; put it back, or take it away with the whole "
                "folder of this client and join a new session"
            ) from error

    def save(self, state: ModelState) -> None:
        """Replaces the stored state; it is on disk, synchronised, before this returns."""
        parts: dict[str, Any] = {_OPTIMIZER + name: moment.values for name, moment in state.optimizer.items()}
        if state.scores:  # as JSON, which keeps every digit
            parts[_SCORES] = np.frombuffer(json.dumps(dict(state.scores)).encode(), dtype=np.uint8)
        with replacement(self._path) as file:
            np.savez(
                file,
                values=state.values.values,
                rounds=np.array(state.rounds, dtype=np.int64),
                history=np.frombuffer(state.history, dtype=np.uint8),
                **parts,
            )
