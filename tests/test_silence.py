"""Private values and keys stay out of `repr`, logs, standard output and error messages."""

import logging
import re
import traceback
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from privfed.client import Client, Trainer
from privfed.consortium import Consortium
from privfed.data.samples import Samples
from privfed.engines.local import Simulation
from privfed.he.codec import quantise
from privfed.he.params import CkksParams
from privfed.he.secret import SharedKey
from privfed.identity import Identity
from privfed.protect import protect, round_key
from privfed.training.loss import binary_cross_entropy
from privfed.training.mechanism import NonPrivate
from privfed.training.model import mlp, values_of
from privfed.update import Layout, PlainVector, Update

MARK = 7.654321  # no other number in a run begins with these digits
DIGITS = re.compile(r"7[.,]?65432")


def marked(records: int = 40) -> Samples:
    rng = np.random.default_rng(0)
    features = np.full((records, 4), MARK, dtype=np.float32)
    return Samples(features=features, labels=rng.integers(0, 2, records), groups=None, columns=("a", "b", "c", "d"))


def consortium(keys: SharedKey) -> Consortium:
    training = NonPrivate(learning_rate=0.1, batch_size=10, steps=2, seed=1)
    clients = [Client(f"bank_{index}", marked(), training=training) for index in range(3)]
    return Consortium(clients, keys=keys, params=CkksParams.standard(bound=10.0))


def test_a_whole_run_prints_and_logs_no_private_value(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with Simulation(consortium(SharedKey.generate()), mlp(inputs=4, hidden=(3,)), separate_server=True) as simulation:
        simulation.run(rounds=1)
        update = next(iter(simulation._updates.values()))
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
    digits = {f"{abs(value):.8g}"[:7] for value in update.vector.values if abs(value) > 1e-4}
    assert digits
    assert not any(part in caplog.text for part in digits)
    assert not DIGITS.search(caplog.text)


def test_no_object_shows_what_it_holds() -> None:
    keys = SharedKey.generate()
    layout = Layout(names=("weight",), shapes=((4,),))
    vector = PlainVector(layout=layout, values=[MARK] * 4)
    update = Update(sender="bank_0", round=0, vector=vector)
    with Simulation(consortium(keys), mlp(inputs=4, hidden=(3,))) as simulation:
        history = simulation.run(rounds=1)
        context = simulation.encrypted.context(1)
        participant = simulation.encrypted.participants["bank_0"]
        sealed_for = replace(context, agreement=replace(context.agreement, layout=layout))
        key = round_key(keys, sealed_for)
        protected = protect(update, sealed_for, round_key=key)
        things = [
            keys, key, vector, update, protected, protected.update, protected.update.vector, marked(), consortium(keys),
            consortium(keys).clients[0], simulation, simulation.encrypted, participant, participant.session, history, history.model,
            history.rounds[0], Identity.generate("bank_0"), participant.session.state,
        ]  # fmt: skip
        for thing in things:
            for text in (repr(thing), str(thing), f"{thing}"):
                assert not DIGITS.search(text), type(thing).__name__
                assert keys._secret.hex() not in text, type(thing).__name__
                assert repr(keys._secret)[2:20] not in text, type(thing).__name__


def refusals() -> list[Callable[[], object]]:
    layout = Layout(names=("weight",), shapes=((4,),))
    good = PlainVector(layout=layout, values=[MARK] * 4)
    other = Layout(names=("other",), shapes=((4,),))
    infinite = np.array([MARK, np.nan, np.inf, MARK])
    params = CkksParams.standard(bound=1.0)
    model = mlp(inputs=4, hidden=(3,))
    return [
        lambda: PlainVector(layout=layout, values=infinite),
        lambda: PlainVector(layout=layout, values=[MARK] * 5),
        lambda: layout.flatten({"weight": [MARK] * 5}),
        lambda: other.unflatten(good),
        lambda: quantise(infinite, params),
        lambda: Samples(features=[[np.nan, MARK]], labels=[0], groups=None, columns=("a", "b")),
        lambda: Samples(features=[[MARK, MARK]], labels=[-765432], groups=None, columns=("a", "b")),
        lambda: Trainer(
            client=Client(
                "bank_0",
                Samples(features=[[MARK] * 4], labels=[765432], groups=None, columns=tuple("abcd")),
                training=NonPrivate(learning_rate=0.1, batch_size=1, steps=1, seed=0),
            ),
            model=model,
            start=values_of(model),
            loss=binary_cross_entropy,
            params=params,
        ),
    ]


@pytest.mark.parametrize("index", range(8))
def test_no_error_shows_a_private_value(index: int) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 # which one is another test's matter; here it is what it says
        refusals()[index]()
    # The frames of this file hold the value in their source; what counts are the messages, through all causes.
    error: BaseException | None = caught.value
    while error is not None:
        text = "".join(traceback.format_exception_only(error))
        assert not DIGITS.search(text)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def test_the_pattern_would_find_the_value() -> None:
    assert DIGITS.search(repr(np.float32(MARK)))
    assert DIGITS.search(str(-765432))
    torch.manual_seed(0)
    assert DIGITS.search(repr(torch.tensor([MARK]))) is None  # torch rounds to four digits: tensors are never printed by privfed
