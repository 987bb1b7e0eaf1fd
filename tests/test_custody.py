"""Who holds the key of a simulated consortium."""

import pytest

from privfed.custody import Custody, Holder
from privfed.he.escrow_secret import EscrowKey
from privfed.he.params import CkksParams
from privfed.he.secret import SharedKey
from privfed.he.threshold_key import ThresholdKey


@pytest.mark.parametrize(
    ("holder", "kind", "params"),
    [
        (Holder.EVERY_CLIENT, SharedKey, CkksParams.standard()),
        (Holder.KEY_HOLDER, EscrowKey, CkksParams.escrow()),
        (Holder.NOBODY, ThresholdKey, CkksParams.threshold(clients=5)),
    ],
    ids=lambda value: getattr(value, "value", ""),
)
def test_every_trust_mode_has_its_keys_its_parameters_and_its_words(holder: Holder, kind: type, params: CkksParams) -> None:
    custody = Custody(clients=5, holder=holder)
    assert isinstance(custody.keys(), kind)
    assert custody.params == params
    assert kind.__name__ == holder.value == custody.content()["mode"]
    assert len({Custody(clients=5, holder=each).words for each in Holder}) == len(Holder)


def test_keys_are_new_each_time() -> None:
    for holder in (Holder.EVERY_CLIENT, Holder.KEY_HOLDER):
        first, second = (Custody(clients=3, holder=holder).keys() for _ in range(2))
        assert not isinstance(first, ThresholdKey)
        assert not isinstance(second, ThresholdKey)
        assert first.fingerprint != second.fingerprint


@pytest.mark.parametrize("holder", [Holder.EVERY_CLIENT, Holder.KEY_HOLDER])
@pytest.mark.parametrize("numbers", [{"corrupted": 1}, {"dropouts": 1}])
def test_numbers_for_a_quorum_are_refused_where_somebody_holds_the_key(holder: Holder, numbers: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"beside ThresholdKey alone, whose quorum they decide, got . and . with {holder.value}"):
        Custody(clients=5, holder=holder, **numbers)


def test_a_quorum_that_cannot_be_solved_is_refused_with_the_nearest_numbers() -> None:
    with pytest.raises(ValueError, match=r"nearest that can be solved: dropouts=1 \(a quorum of 4\)"):
        Custody(clients=5, holder=Holder.NOBODY, corrupted=1, dropouts=2)
