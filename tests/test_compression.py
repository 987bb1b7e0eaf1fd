from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from privfed.audit.metering import meter_training
from privfed.compression import Compressor, ErrorFeedback, Sign, StochasticQuantisation, TopK, with_feedback
from privfed.consortium import Plaintext
from privfed.dp.silo import SiloNoise
from privfed.engines.local import Simulation
from privfed.errors import HistoryMismatchError, LayoutMismatchError, UnsupportedInThisModeError
from privfed.he.params import CkksParams
from privfed.training.scaffold import Scaffold
from privfed.update import Aggregate, Layout, PlainVector
from tests.consortia import OPEN, consortium, network
from tests.test_session import Bank

ALL: list[Compressor] = [TopK(share=0.1), TopK(share=1.0), Sign(), StochasticQuantisation(levels=4)]
UPDATES = arrays(np.float64, st.integers(1, 50), elements=st.floats(-1e3, 1e3))


@pytest.mark.parametrize("compressor", ALL, ids=lambda compressor: compressor.name)
@given(values=UPDATES)
@example(values=np.array([5e-324]))  # the smallest float, which levels cannot divide
def test_what_is_sent_and_what_is_left_add_up_to_what_came_in(compressor: Compressor, values: np.ndarray) -> None:
    before = values.copy()
    sent, left = with_feedback(compressor, values, 0.5 * values, np.random.default_rng(0))
    # One rounding of a number of at most 1.5 times the largest magnitude in the sum, and one in the difference.
    np.testing.assert_allclose(sent + left, 1.5 * values, atol=8 * np.finfo(float).eps * max(1.0, float(np.abs(values).max())), rtol=0)
    assert np.array_equal(values, before)
    assert sent.shape == values.shape


@pytest.mark.parametrize("compressor", ALL, ids=lambda compressor: compressor.name)
def test_with_feedback_nothing_is_lost_over_many_rounds_and_without_it_something_is(compressor: Compressor) -> None:
    rng = np.random.default_rng(1)
    constant = rng.normal(size=200) * np.geomspace(1e-2, 1, 200)
    left, total = np.zeros(200), np.zeros(200)
    for _ in range(2000):
        sent, left = with_feedback(compressor, constant, left, rng)
        total += sent
    error = np.linalg.norm(total / 2000 - constant) / np.linalg.norm(constant)
    # What is missing is the last remainder alone, shared out over 2,000 rounds; it is bounded for these compressors.
    assert error == pytest.approx(np.linalg.norm(left) / 2000 / np.linalg.norm(constant), rel=1e-6, abs=1e-12)
    assert error < 0.03
    if isinstance(compressor, Sign) or (isinstance(compressor, TopK) and compressor.share < 1):
        forgetful = compressor.compress(constant, rng)
        assert np.linalg.norm(forgetful - constant) / np.linalg.norm(constant) > 0.3


def test_top_k_keeps_the_largest_coordinates_as_they_were() -> None:
    values = np.array([0.1, -3.0, 0.2, 2.0, -0.3])
    assert TopK(share=0.4).compress(values, np.random.default_rng(0)).tolist() == [0.0, -3.0, 0.0, 2.0, 0.0]
    assert np.count_nonzero(TopK(share=1e-9).compress(values, np.random.default_rng(0))) == 1


def test_signs_have_one_magnitude_and_zeros_stay() -> None:
    assert Sign().compress(np.array([-3.0, 0.0, 1.0, 2.0]), np.random.default_rng(0)).tolist() == [-1.5, 0.0, 1.5, 1.5]


def test_quantisation_gives_neighbouring_levels_that_are_right_on_average() -> None:
    values, rng = np.array([-1.0, -0.3, 0.0, 0.1, 0.9]), np.random.default_rng(2)
    draws = np.stack([StochasticQuantisation(levels=4).compress(values, rng) for _ in range(4000)])
    assert set(np.unique(draws)) <= {-1.0, -0.5, -0.25, 0.0, 0.25, 0.75, 1.0}
    # A draw has a standard deviation of at most half a level: five standard errors of a mean of 4,000.
    assert np.abs(draws.mean(axis=0) - values).max() < 5 * 0.125 / np.sqrt(4000)
    assert np.array_equal(StochasticQuantisation(levels=1).compress(np.zeros(3), rng), np.zeros(3))


def test_compressors_that_keep_nothing_are_refused() -> None:
    for share in (0.0, 1.1, float("nan")):
        with pytest.raises(ValueError, match="share above 0 and at most 1"):
            TopK(share=share)
    with pytest.raises(ValueError, match="at least 1 level"):
        StochasticQuantisation(levels=0)


# -- error feedback of a client -------------------------------------------------------------------------------------------------

LAYOUT = Layout(names=("w",), shapes=((8,),))
PARAMS = CkksParams.standard()
HALF = TopK(share=0.5)


def vector(*values: float) -> PlainVector:
    return PlainVector(layout=LAYOUT, values=np.array(values))


FIRST, SECOND = vector(0.5, 0.1, 0.5, 0.1, 0.5, 0.1, 0.5, 0.1), vector(*[0.25] * 8)


def opened(number: int, **coefficients: int) -> Aggregate[PlainVector]:
    return Aggregate(round=number, vector=vector(*[0.0] * 8), coefficients=coefficients)


def test_what_a_round_left_out_is_sent_in_the_next_one_after_a_restart_too(tmp_path: Path) -> None:
    path = tmp_path / "remainder.sqlite"
    feedback = ErrorFeedback(compressor=HALF, layout=LAYOUT, path=path)
    sent = feedback.compress(FIRST, PARAMS, round=0, attempt=0).values
    assert np.flatnonzero(sent).tolist() == [0, 2, 4, 6]
    feedback.opened(opened(0, a=1, b=1), client="a", attempt=0)
    again = ErrorFeedback(compressor=HALF, layout=LAYOUT, path=path, rounds=(0,))
    for one in (feedback, again):
        after = one.compress(SECOND, PARAMS, round=1, attempt=0).values
        assert np.flatnonzero(after).tolist() == [1, 3, 5, 7]
        assert after[1] == pytest.approx(0.35, abs=PARAMS.step)
    # Nothing is lost but what is still left, to the rounding of double precision: the grid's own rounding is made up for as well.
    again.opened(opened(1, a=1), client="a", attempt=0)
    np.testing.assert_allclose(sent + after + again._left.values, FIRST.values + SECOND.values, atol=1e-15, rtol=0)


def test_a_round_that_was_not_opened_or_had_others_in_it_leaves_the_remainder_as_it_was() -> None:
    feedback = ErrorFeedback(compressor=HALF, layout=LAYOUT)
    first = feedback.compress(FIRST, PARAMS, round=0, attempt=0)
    assert np.array_equal(feedback.compress(FIRST, PARAMS, round=0, attempt=1).values, first.values)
    feedback.opened(opened(0, a=0, b=1), client="a", attempt=1)
    assert np.array_equal(feedback.compress(FIRST, PARAMS, round=1, attempt=0).values, first.values)
    feedback.opened(opened(1, a=1, b=1), client="a", attempt=0)
    left = feedback._left.values
    feedback.opened(opened(1, a=1, b=1), client="a", attempt=0)
    assert feedback._left.values is left


def test_a_remainder_that_is_not_of_the_opened_round_or_of_the_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "remainder.sqlite"
    feedback = ErrorFeedback(compressor=HALF, layout=LAYOUT, path=path)
    feedback.compress(FIRST, PARAMS, round=0, attempt=0)
    with pytest.raises(HistoryMismatchError, match="'a' took part in round 0 and does not know what it left out"):
        feedback.opened(opened(0, a=1), client="a", attempt=1)
    with pytest.raises(HistoryMismatchError, match="misses a round that is in the model"):
        ErrorFeedback(compressor=HALF, layout=LAYOUT, path=path, rounds=(0,))
    with pytest.raises(LayoutMismatchError):
        ErrorFeedback(compressor=HALF, layout=Layout(names=("w",), shapes=((9,),)), path=path)


def test_an_encrypted_round_of_compressed_updates_equals_the_same_round_in_the_clear_bit_for_bit(tmp_path: Path) -> None:
    models = []
    with ExitStack() as stack:
        for keys in ({}, {"keys": Plaintext()}):
            banks = consortium(stack, tmp_path, training=OPEN, **keys)
            banks = replace(banks, clients=[replace(client, compressor=TopK(share=0.05)) for client in banks.clients])
            with Simulation(banks, network()) as simulation:
                history = simulation.run(rounds=2)
                sent = [update.vector.values for update in simulation.updates.values()]
            size = history.model.layout.size
            assert all(np.count_nonzero(values) <= np.ceil(0.05 * size) for values in sent)
            models.append(history.model.values)
    assert np.array_equal(*models)


def test_a_client_compresses_what_it_sends_and_takes_its_remainder_up_again_after_a_restart(tmp_path: Path) -> None:
    bank = Bank(tmp_path)
    with bank.ledger() as ledger:
        trainer = bank.trainer(ledger)
        squeezed = bank.trainer(ledger, client=replace(trainer._client, compressor=HALF))
        bank.session(ledger, trainer=squeezed).upload(bank.round())
    size = bank.start.layout.size
    assert np.count_nonzero(bank.trained[-1].vector.values) <= np.ceil(size / 2)
    assert (tmp_path / "bank_a" / "remainder.sqlite").exists()


def test_compression_is_refused_with_scaffold_and_silo_noise_before_anything_is_trained(tmp_path: Path) -> None:
    bank = Bank(tmp_path)
    silo = SiloNoise(weights={"bank_a": 1}, clip_steps=10, noise_multiplier=1.0, coordinates=bank.start.layout.size)
    with bank.ledger() as ledger:
        client = replace(bank.trainer(ledger)._client, compressor=HALF)
        for other in ({"silo": silo}, {"correction": Scaffold(clients=3)}):
            with pytest.raises(UnsupportedInThisModeError, match="compresses its updates.*nothing was trained"):
                bank.trainer(ledger, client=client, **other)
        assert not ledger.events()


def test_a_client_that_compresses_is_measured_to_train_as_it_declares(tmp_path: Path) -> None:
    with ExitStack() as stack:
        banks = consortium(stack, tmp_path)
        metered = meter_training(replace(banks.clients[0], compressor=HALF), consortium=banks, model=network())
    assert metered.reading is not None
    assert metered.fault == ""
