from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from privfed.he.additive import CkksVector
from privfed.he.params import CkksParams
from privfed.he.secret import RoundBinding, RoundKey, SharedKey, encrypt
from privfed.update import Layout


@pytest.fixture(scope="session")
def params() -> CkksParams:
    return CkksParams.standard()


@pytest.fixture(scope="session")
def shared_key() -> SharedKey:
    return SharedKey.generate()


@pytest.fixture(scope="session")
def bind() -> Callable[..., RoundBinding]:
    def make(**changes: object) -> RoundBinding:
        fields = {"session": bytes(16), "attempt": 0, "round": 0, "roster_digest": bytes(32), "params": CkksParams.standard()}
        return RoundBinding(**(fields | changes))

    return make


@pytest.fixture(scope="session")
def new_key(shared_key: SharedKey, bind: Callable[..., RoundBinding]) -> Callable[..., RoundKey]:
    """Each call is another client that derives the key of the same round."""

    def make(**changes: object) -> RoundKey:
        return shared_key.round_key(bind(**changes))

    return make


@pytest.fixture(scope="session")
def seal(new_key: Callable[..., RoundKey]) -> Callable[[NDArray[np.int64]], CkksVector]:
    """A client that encrypts a grid under the key of the round."""

    def make(grid: NDArray[np.int64], *, sender: str = "bank_a", **changes: object) -> CkksVector:
        key = new_key(**changes)
        return encrypt(grid, flat_layout(grid.size), key.params, key, sender=sender)

    return make


def flat_layout(size: int) -> Layout:
    return Layout(names=("values",), shapes=((size,),))


@pytest.fixture(scope="session")
def layout() -> Callable[[int], Layout]:
    return flat_layout
