import numpy as np
import pytest

from privfed.client import Client
from privfed.consortium import Consortium, Plaintext
from privfed.data.samples import Samples
from privfed.he.secret import SharedKey
from privfed.training.mechanism import NonPrivate


def client(name: str) -> Client:
    data = Samples(features=np.zeros((4, 1)), labels=[0, 1, 0, 1], groups=None, columns=("a",))
    return Client(name, data, training=NonPrivate(learning_rate=0.1, batch_size=2, steps=1, seed=0))


@pytest.mark.parametrize("clients", [["a"], "abc", [None]])
def test_clients_that_are_none_are_refused(clients: object) -> None:
    with pytest.raises(TypeError, match="expected clients to be Client objects, got (str|NoneType)"):
        Consortium(clients, keys=Plaintext())


@pytest.mark.parametrize(
    ("keys", "got"), [(None, "NoneType"), (SharedKey, "the class SharedKey"), (Plaintext, "the class Plaintext"), (b"key", "bytes")]
)
def test_keys_that_are_none_are_refused_and_not_shown(keys: object, got: str) -> None:
    with pytest.raises(TypeError, match=rf"expected keys to be a SharedKey, .* or Plaintext\(\), got {got}$"):
        Consortium([client("a")], keys=keys)


def test_shared_keys_and_plaintext_are_accepted() -> None:
    assert [Consortium([client("a")], keys=keys).mode for keys in (SharedKey.generate(), Plaintext())] == ["SharedKey", "Plaintext"]
