"""That a model was found steady, so that it need not be looked at again in every round.

`steady` looks at every shape of pass, which takes longer than some steps of training. It draws nothing, and it puts weights of its own in
the place of all that the model has: so while nothing changes but the weights that are trained, it would find the same again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import nn

from privfed.training.compiled import CompiledSum
from privfed.training.loss import PerSampleLoss
from privfed.training.mechanism import DpSgd
from privfed.training.memory import state_of
from privfed.training.model import layout_of, trainable_parameters
from privfed.update import Layout


@dataclass(frozen=True, slots=True, eq=False, repr=False, kw_only=True)
class SteadyModel:
    """All that it depends on whether a model is steady, but for the machine. Public: no record went through.

    Args:
        layout: Names and shapes of what is trained.
        state: What model and loss hold besides, as `state_of` writes it down.
        code: Class of each layer and of the loss, and the code that records go through in it.
        mechanism: How it is trained: its declared number of records decides which shapes of pass there are.
        inputs: Number of feature columns.
        compiled: The compiled sum; None if there is none.
        torch_settings: Of torch, those by which products are computed.
    """

    layout: Layout
    state: Mapping[str, str]
    code: tuple[object, ...]
    mechanism: DpSgd
    inputs: int
    compiled: CompiledSum | None
    torch_settings: tuple[object, ...]

    @classmethod
    def of(cls, model: nn.Module, *, loss: PerSampleLoss, mechanism: DpSgd, inputs: int, compiled: CompiledSum | None) -> Self:
        """What it depends on now.

        Args:
            model: The model, in training mode.
            loss: Loss per record.
            mechanism: How it is trained.
            inputs: Number of feature columns.
            compiled: The compiled sum, if there is one.
        """
        kinds = [type(layer) for layer in model.modules()]
        return cls(
            layout=layout_of(model),
            state=state_of(model=model, loss=loss, without=list(trainable_parameters(model).values())),
            code=(*((kind, kind.forward) for kind in kinds), getattr(loss, "__code__", None), type(loss), type(loss).__call__),
            mechanism=mechanism,
            inputs=inputs,
            compiled=compiled,
            torch_settings=(
                torch.get_float32_matmul_precision(),
                torch.get_default_dtype(),
                torch.are_deterministic_algorithms_enabled(),
                torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled(),  # pyright: ignore[reportPrivateUsage]
            ),
        )

    def holds_for(self, other: "SteadyModel | None") -> bool:
        """Whether the other one would be found steady as this one was, because it is the same in all this."""
        return other is not None and self.compiled is other.compiled and self._compared() == other._compared()

    def _compared(self) -> tuple[object, ...]:
        return self.layout, dict(self.state), self.code, self.mechanism, self.inputs, self.torch_settings
