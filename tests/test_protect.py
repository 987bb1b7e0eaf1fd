from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from privfed.errors import LayoutMismatchError, ParametersMismatchError, RoundKeyUsedError, TamperedAggregateError
from privfed.he.additive import CkksVector, seeded_sum, weighted_sum
from privfed.he.params import CkksParams
from privfed.he.secret import SharedKey, check_sum, open_sum
from privfed.identity import Identity, Roster
from privfed.protect import Protected, protect, round_key
from privfed.update import Layout, PlainVector, Update


@pytest.fixture
def joint(parties: Any) -> Any:
    return parties.round()


def plain(joint: Any, values: Any) -> Update[PlainVector]:
    return Update(sender="bank_00", round=0, vector=PlainVector(layout=joint.context.agreement.layout, values=values))


def guarded(joint: Any, values: Any) -> Protected:
    return protect(plain(joint, values), joint.context, round_key=joint.new_key())


def test_what_leaves_is_encrypted_and_opens_to_the_grid(joint: Any) -> None:
    values = np.array([0.5, -0.25, 0.1, 0, 1, -1, 1e-9, 0.3])
    protected = guarded(joint, values)
    assert isinstance(protected.update.vector, CkksVector)
    assert (protected.update.sender, protected.update.round) == ("bank_00", 0)
    opened = open_sum(weighted_sum([protected.update.vector], [1]), joint.new_key(), coefficients=[1])
    params = joint.context.agreement.params
    assert np.abs(opened * params.step - values).max() <= params.max_error


def test_coordinates_beyond_the_bound_are_clipped_and_counted_locally(joint: Any) -> None:
    protected = guarded(joint, [1.0, -1.0, 1.0001, -5.0, 1e300, 0.5, 0, 0])
    assert protected.saturated == 3
    opened = open_sum(weighted_sum([protected.update.vector], [1]), joint.new_key(), coefficients=[1])
    top = joint.context.agreement.params.amplitude
    assert opened.tolist() == [top, -top, top, -top, top, round(top / 2), 0, 0]


def test_where_clients_pre_scale_the_share_of_the_sender_is_applied(meet: Callable[..., Any]) -> None:
    params = CkksParams.parity(clients=4)
    joint = meet(params=params, weights={"bank_00": 1, "bank_01": 2, "bank_02": 3, "bank_03": 2}).round()
    assert joint.context.agreement.weighting.share("bank_00") == Fraction(1, 8)
    protected = guarded(joint, [1.0, -0.5, 2.0, 0, 0, 0, 0, 0])
    assert protected.saturated == 1
    opened = open_sum(weighted_sum([protected.update.vector], [1]), joint.new_key(), coefficients=[1])
    eighth = round(params.amplitude / 8)
    assert opened.tolist() == [eighth, -round(params.amplitude / 16), eighth, 0, 0, 0, 0, 0]


def test_an_update_of_another_layout_is_refused(joint: Any) -> None:
    other = Layout(names=("weight",), shapes=((8,),))
    with pytest.raises(LayoutMismatchError, match="nothing was encrypted"):
        protect(
            Update(sender="bank_00", round=0, vector=PlainVector(layout=other, values=[0.0] * 8)), joint.context, round_key=joint.new_key()
        )


def test_the_tags_of_an_upload_are_sealed_for_its_sender(joint: Any) -> None:
    key = joint.new_key()
    vector = protect(plain(joint, [0.5] * 8), joint.context, round_key=key).update.vector
    total = check_sum(seeded_sum([vector], [1]), joint.new_key(), sealed_tags={"bank_00": vector.sealed_tags}, coefficients=[1])
    assert not total.fresh
    with pytest.raises(TamperedAggregateError):
        check_sum(seeded_sum([vector], [1]), joint.new_key(), sealed_tags={"bank_01": vector.sealed_tags}, coefficients=[1])


def test_the_number_of_clipped_coordinates_is_not_in_what_leaves_nor_in_any_text(joint: Any) -> None:
    protected = guarded(joint, [9.0] * 8)
    assert not hasattr(protected.update, "saturated")
    assert "saturated" not in repr(protected)


def test_the_update_in_the_clear_is_not_changed(joint: Any) -> None:
    update = plain(joint, [2.0] * 8)
    protect(update, joint.context, round_key=joint.new_key())
    assert update.vector.values.tolist() == [2.0] * 8


def test_a_round_key_encrypts_once(joint: Any) -> None:
    key = joint.new_key()
    protect(plain(joint, [0.0] * 8), joint.context, round_key=key)
    with pytest.raises(RoundKeyUsedError):
        protect(plain(joint, [0.0] * 8), joint.context, round_key=key)


def test_a_key_for_other_parameters_is_refused(joint: Any) -> None:
    other = replace(joint.context, agreement=replace(joint.context.agreement, params=CkksParams.standard(bound=2.0)))
    with pytest.raises(ParametersMismatchError, match="nothing was encrypted"):
        protect(plain(joint, [0.0] * 8), other, round_key=joint.new_key())


def test_all_clients_derive_one_key_and_every_field_of_the_round_another(meet: Callable[..., Any]) -> None:
    parties = meet()
    context, agreement = parties.round().context, parties.agreement
    copy = SharedKey.from_bytes(b"k" * 32)
    assert round_key(SharedKey.from_bytes(b"k" * 32), context).key_id == round_key(copy, context).key_id
    newcomer = Roster(server=agreement.roster.server, clients=(*agreement.roster.clients, Identity.generate("newcomer").public))
    contexts = [
        context,
        replace(context, round=1),
        replace(context, attempt=1),
        replace(context, agreement=replace(agreement, session=bytes(16))),
        replace(context, agreement=replace(agreement, params=CkksParams.standard(bound=2.0))),
        replace(context, agreement=replace(agreement, roster=newcomer, weights=dict(agreement.weights) | {"newcomer": 1.0})),
    ]
    ids = {round_key(copy, other).key_id for other in contexts} | {round_key(SharedKey.generate(), context).key_id}
    assert len(ids) == len(contexts) + 1
