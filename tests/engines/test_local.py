import math
from collections.abc import Callable
from pathlib import Path

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting import pld

from privfed.aggregation.rules import MultiKrum
from privfed.client import Client
from privfed.consortium import Consortium, Plaintext
from privfed.data.samples import Samples
from privfed.dp.accounting import epsilon
from privfed.engines.dropouts import Dropouts
from privfed.engines.local import Simulation, simulate
from privfed.errors import BudgetExceededError, CohortError, OpeningRefusedError
from privfed.he.params import CkksParams
from privfed.policy import OpeningPolicy
from privfed.training.evaluate import EvaluationScope
from privfed.training.loss import cross_entropy
from privfed.training.model import values_of
from privfed.training.randomness import _SeededRandomness
from tests.engines.conftest import MECHANISM, table

Make = Callable[..., Consortium]


def test_an_encrypted_run_equals_the_plaintext_run_bit_for_bit(model: torch.nn.Module, non_private: Make) -> None:
    weights = (0.5, 0.3, 0.2)
    encrypted = simulate(non_private(weights=weights), model, rounds=3)
    plain = simulate(non_private(weights=weights, keys=Plaintext()), model, rounds=3)
    assert np.array_equal(encrypted.model.values, plain.model.values)
    assert not np.array_equal(encrypted.model.values, encrypted.initial.values)
    assert encrypted.grid_error_max == plain.grid_error_max == 0
    assert (encrypted.mode, plain.mode) == ("SharedKey", "Plaintext")
    assert plain.bytes_up_per_parameter == 0 < encrypted.bytes_up_per_parameter


def test_the_same_training_in_another_order_of_rounds_gives_another_model(model: torch.nn.Module, non_private: Make) -> None:
    """So that the equality above is not one of constants."""
    first = simulate(non_private(), model, rounds=1)
    second = simulate(non_private(weights=(5, 1, 1)), model, rounds=1)
    assert not np.array_equal(first.model.values, second.model.values)


def test_noise_is_really_added_to_what_is_summed(model: torch.nn.Module, private: Make) -> None:
    """Two DP-SGD runs on the same data differ, and under a seeded source they do not."""

    def run(consortium: Consortium, seed: int | None) -> np.ndarray:
        seam = None if seed is None else lambda name, number: _SeededRandomness(hash((name, number, seed)) % 2**60)
        with Simulation(consortium, model, _randomness=seam) as simulation:
            return simulation.run(rounds=1).model.values

    consortium = private()
    unseeded = [run(consortium, None) for _ in range(2)]
    seeded = [run(consortium, 7) for _ in range(2)]
    assert not np.array_equal(*unseeded)
    assert np.array_equal(*seeded)


def test_spent_epsilon_equals_an_independent_computation_from_the_recorded_events(model: torch.nn.Module, private: Make) -> None:
    consortium = private()
    history = simulate(consortium, model, rounds=4)
    event = dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(MECHANISM.sample_rate, dp_accounting.GaussianDpEvent(MECHANISM.noise_multiplier)),
        4 * MECHANISM.steps,
    )
    accountant = pld.PLDAccountant(value_discretization_interval=1e-4)
    accountant.compose(event)
    expected = accountant.get_epsilon(1e-5)
    assert len(history.epsilon) == 3
    for client in consortium.clients:
        # Both are upper bounds on the same number; grids of 1e-3 and 1e-4 over 12 compositions differ by less than 12e-3.
        assert history.epsilon[client.name] == pytest.approx(expected, abs=12e-3)
        assert client.ledger is not None
        assert len(client.ledger.events()) == 4


def test_a_client_over_its_budget_is_left_out_before_it_trains_and_the_round_goes_on(model: torch.nn.Module, private: Make) -> None:
    one_round = epsilon([MECHANISM.event()], delta=1e-5)
    consortium = private(count=4, epsilons=(20.0, 20.0, 20.0, 1.01 * one_round))
    history = simulate(consortium, model, rounds=2)
    assert [summary.record.refused for summary in history.rounds] == [(), ("bank_3",)]
    assert history.rounds[1].record.participants == ("bank_0", "bank_1", "bank_2")
    ledger = consortium.clients[3].ledger
    assert ledger is not None
    assert len(ledger.events()) == 1


def test_a_run_in_which_too_many_refuse_stops_and_keeps_what_was_reached(model: torch.nn.Module, private: Make) -> None:
    one_round = epsilon([MECHANISM.event()], delta=1e-5)
    consortium = private(epsilons=(1.01 * one_round,) * 3)
    done = []
    with Simulation(consortium, model) as simulation:
        # Who may be absent may take part in fewer rounds, so that budgets are not counted beforehand.
        with pytest.raises(CohortError, match="nothing was summed"):
            simulation.run(rounds=2, progress=done.append, absences=Dropouts(probability=0.0, seed=0))
        assert len(done) == 1
        assert not np.array_equal(simulation.model_values.values, values_of(model).values)


@pytest.mark.parametrize("keys", ["shared", "plain"])
def test_a_run_that_too_few_budgets_cover_to_its_end_is_refused_before_anything_is_charged(
    model: torch.nn.Module, private: Make, keys: str
) -> None:
    two = epsilon([MECHANISM.event()] * 2, delta=1e-5)
    options = {} if keys == "shared" else {"keys": Plaintext()}
    consortium = private(epsilons=(20.0, 1.01 * two, 20.0), **options)
    words = "the budget of bank_1 covers 2 of 3 rounds, and each needs 3 clients; nothing was trained; take at most 2 rounds"
    with pytest.raises(BudgetExceededError, match=words):
        simulate(consortium, model, rounds=3)
    assert [client.ledger.events() for client in consortium.clients if client.ledger] == [(), (), ()]
    assert len(simulate(consortium, model, rounds=2).rounds) == 2
    with pytest.raises(
        BudgetExceededError, match="the budget of bank_1 covers 0 of 1 round, .*; take training whose noise is made for all"
    ):
        simulate(consortium, model, rounds=1)


def test_all_clients_whose_budgets_end_too_early_are_named(model: torch.nn.Module, private: Make) -> None:
    one, two = (epsilon([MECHANISM.event()] * number, delta=1e-5) for number in (1, 2))
    with pytest.raises(BudgetExceededError, match="of bank_0 covers 1 of 4 rounds, that of bank_2 2, and .*; take at most 2 rounds"):
        simulate(private(count=4, epsilons=(1.01 * one, 20.0, 1.01 * two, 20.0)), model, rounds=4)


def test_rounds_that_a_folder_holds_are_not_asked_of_the_budget_again(model: torch.nn.Module, private: Make, tmp_path: Path) -> None:
    three = epsilon([MECHANISM.event()] * 3, delta=1e-5)
    consortium, folder = private(epsilons=(1.01 * three,) * 3), tmp_path / "run"
    simulate(consortium, model, rounds=2, directory=str(folder))
    with pytest.raises(BudgetExceededError, match="of bank_0 covers 1 of the 2 rounds that are left.*take at most 3 rounds"):
        simulate(consortium, model, rounds=4, directory=folder)
    assert len(simulate(consortium, model, rounds=3, directory=folder).rounds) == 3


def test_a_round_that_was_charged_before_a_crash_is_not_asked_of_the_budget_again(
    model: torch.nn.Module, private: Make, tmp_path: Path
) -> None:
    two = epsilon([MECHANISM.event()] * 2, delta=1e-5)
    consortium, folder = private(epsilons=(1.01 * two,) * 3), tmp_path / "run"

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with Simulation(consortium, model, directory=folder) as simulation:
        simulation.run(rounds=1)
        simulation._evaluate = stop  # the second round is held, and not in the log yet
        with pytest.raises(KeyboardInterrupt):
            simulation.run(rounds=2)
    assert [len(client.ledger.events()) for client in consortium.clients if client.ledger] == [2, 2, 2]
    assert len(simulate(consortium, model, rounds=2, directory=folder).rounds) == 2


def test_an_evaluation_that_cannot_be_scored_is_refused_before_anything_is_charged(model: torch.nn.Module, private: Make) -> None:
    consortium = private()
    with pytest.raises(TypeError, match="expected evaluation to be Samples, got ndarray; nothing was trained"):
        simulate(consortium, model, rounds=1, evaluation=np.zeros((3, 4)))
    other = Samples(features=np.zeros((3, 2)), labels=[0, 1, 0], groups=None, columns=("a", "b"))
    with pytest.raises(ValueError, match="expected evaluation to have the columns of 'bank_0', a, b, c, d, got a, b; nothing was trained"):
        simulate(consortium, model, rounds=1, evaluation=other)
    classes = Samples(features=np.zeros((3, 4)), labels=[0, 1, 2], groups=None, columns=tuple("abcd"))
    with pytest.raises(ValueError, match="expected evaluation to have labels of 0 and 1, got others; nothing was trained"):
        simulate(consortium, model, rounds=1, evaluation=classes)
    assert [client.ledger.events() for client in consortium.clients if client.ledger] == [(), (), ()]


def test_a_model_of_several_outputs_is_not_evaluated_and_nothing_is_charged(private: Make) -> None:
    consortium, test = private(loss=cross_entropy), Samples(features=np.zeros((2, 4)), labels=[0, 1], groups=None, columns=tuple("abcd"))
    with pytest.raises(ValueError, match=r"one output per record where evaluation is given, got \(2,\); nothing was trained"):
        simulate(consortium, torch.nn.Linear(4, 2), rounds=1, evaluation=test)
    assert [client.ledger.events() for client in consortium.clients if client.ledger] == [(), (), ()]


def test_a_bare_seed_is_no_generator(model: torch.nn.Module, private: Make) -> None:
    consortium = private()
    with pytest.raises(TypeError, match=r"expected rng to be a NumPy generator, as np.random.default_rng\(1\) makes it, got int"):
        simulate(consortium, model, rounds=1, fraction=0.5, rng=1)
    assert [client.ledger.events() for client in consortium.clients if client.ledger] == [(), (), ()]


@pytest.mark.parametrize("rounds", ["10", 2.0, True, None])
def test_a_number_of_rounds_that_is_none_is_refused(model: torch.nn.Module, non_private: Make, rounds: object) -> None:
    with pytest.raises(TypeError, match=f"expected rounds to be a whole number, got {type(rounds).__name__}; nothing was trained"):
        simulate(non_private(), model, rounds=rounds)


def test_a_round_that_the_policy_forbids_is_not_held(model: torch.nn.Module, non_private: Make) -> None:
    with pytest.raises(CohortError, match="nothing was summed"):
        simulate(non_private(count=2, policy=OpeningPolicy(min_clients=3), keys=Plaintext()), model, rounds=1)
    with pytest.raises(OpeningRefusedError, match="demands 3"):
        simulate(non_private(count=2, policy=OpeningPolicy(min_clients=3)), model, rounds=1)
    with pytest.raises(OpeningRefusedError, match="one client would be more"):
        simulate(non_private(weights=(98, 1, 1)), model, rounds=1)


def test_a_gram_rule_scores_first_and_sums_second_in_the_clear(model: torch.nn.Module, non_private: Make) -> None:
    rule = MultiKrum(byzantine=1, keep=3)
    history = simulate(non_private(count=5, keys=Plaintext(), rule=rule), model, rounds=2)
    for summary in history.rounds:
        assert sorted(summary.record.coefficients.values()) == [0, 0, 1, 1, 1]
        assert summary.record.effective_clients == 3
        assert summary.grid_error_max == 0


def test_selection_takes_the_fraction_and_every_client_gets_the_model(model: torch.nn.Module, non_private: Make) -> None:
    consortium = non_private(count=6, policy=OpeningPolicy(min_clients=3))
    with Simulation(consortium, model) as simulation:
        history = simulation.run(rounds=4, fraction=0.5, rng=np.random.default_rng(0))
        states = [participant.session.state for participant in simulation.encrypted.participants.values()]
    assert all(len(summary.record.participants) == 3 for summary in history.rounds)
    assert len({summary.record.participants for summary in history.rounds}) > 1
    assert all(np.array_equal(state.values.values, history.model.values) for state in states)
    assert all(state.rounds == (0, 1, 2, 3) for state in states)


def test_selection_without_a_source_of_choice_is_refused(model: torch.nn.Module, non_private: Make) -> None:
    with pytest.raises(ValueError, match="rng"):
        simulate(non_private(count=4), model, rounds=1, fraction=0.5)
    with pytest.raises(ValueError, match="at least 1 round"):
        simulate(non_private(), model, rounds=0)


def test_evaluation_is_stamped_with_its_scope(model: torch.nn.Module, non_private: Make) -> None:
    history = simulate(non_private(), model, rounds=2, evaluation=table(100, seed=9), scope=EvaluationScope.PUBLIC_DATA)
    assert len(history.pr_auc) == 2
    assert all(summary.evaluation.scope is EvaluationScope.PUBLIC_DATA for summary in history.rounds if summary.evaluation)
    assert history.pr_auc[1] > 0.4  # a third of the labels are positive: a model that learned nothing has about 0.33


def test_a_run_without_privacy_says_so(model: torch.nn.Module, non_private: Make, private: Make) -> None:
    history = simulate(non_private(), model, rounds=1)
    assert all(math.isinf(epsilon) for epsilon in history.epsilon.values())
    assert not history.private
    assert simulate(private(), model, rounds=1).private


def test_a_run_with_seeded_noise_is_never_called_private(model: torch.nn.Module, private: Make) -> None:
    with Simulation(private(), model, _randomness=lambda _name, number: _SeededRandomness(number)) as simulation:
        assert not simulation.run(rounds=1).private


def test_a_grid_finer_than_differential_privacy_allows_is_refused_before_training(model: torch.nn.Module, private: Make) -> None:
    consortium = private(params=CkksParams.standard(bound=1e-4))
    with pytest.raises(ValueError, match="raise the bound"):
        simulate(consortium, model, rounds=1)
    assert all(client.ledger is not None and not client.ledger.events() for client in consortium.clients)


def test_coordinates_outside_the_bound_saturate_and_the_run_goes_on(model: torch.nn.Module, non_private: Make) -> None:
    bound = 1e-3
    history = simulate(non_private(params=CkksParams.standard(bound=bound)), model, rounds=1)
    moved = np.abs(history.model.values - history.initial.values)
    assert moved.max() == pytest.approx(bound, rel=1e-9)


def test_a_client_without_positives_takes_part(model: torch.nn.Module, non_private: Make) -> None:
    others = non_private().clients
    negatives = table(200, seed=5)
    negatives = negatives.take(np.flatnonzero(negatives.labels == 0))
    quiet = Client("bank_9", negatives, training=others[0].training)
    history = simulate(Consortium([*others, quiet], keys=non_private().keys), model, rounds=1)
    assert history.rounds[0].record.participants == ("bank_0", "bank_1", "bank_2", "bank_9")


def test_clients_that_pre_scale_give_the_weighted_mean_of_who_answered(model: torch.nn.Module, non_private: Make) -> None:
    weights = (4, 3, 2, 1)
    server_weights = simulate(non_private(count=4, weights=weights), model, rounds=1)
    prescaled = simulate(non_private(count=4, weights=weights, params=CkksParams.parity(clients=4)), model, rounds=1)
    assert prescaled.grid_error_max == 0
    assert prescaled.rounds[0].record.coefficients.keys() == server_weights.rounds[0].record.coefficients.keys()
    # Each of four updates is rounded to the coarser grid by at most half a step, and divided by a share of 1.
    assert np.abs(prescaled.model.values - server_weights.model.values).max() < 3 * CkksParams.parity(clients=4).step
    # All else is the same: a coordinate takes four bytes there, and seven here.
    assert prescaled.bytes_up_per_parameter == pytest.approx(server_weights.bytes_up_per_parameter - 3)
