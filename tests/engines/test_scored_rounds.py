"""Rules that look at inner products, on ciphertexts: the same coefficients, scores and models as in the clear."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from privfed import scorer
from privfed.aggregation.coordinatewise import CoordinateMedian
from privfed.aggregation.gram import gram
from privfed.aggregation.robust import CenteredClipping, FLTrust, GeometricMedian, NormBound
from privfed.aggregation.rules import FedAvg, MultiKrum
from privfed.agreement import Validator
from privfed.consortium import Consortium, Plaintext
from privfed.contribution.cosine import Cgsv
from privfed.contribution.estimators import MonteCarlo
from privfed.contribution.scores import ScoreStore
from privfed.contribution.trajectory import FedTsv
from privfed.engines.local import Simulation, simulate
from privfed.errors import CohortError, UnsupportedInThisModeError
from privfed.he.codec import dequantise, quantise
from privfed.he.product_params import ProductParams
from privfed.he.sketch import standard_error
from privfed.history import RoundSummary
from privfed.policy import OpeningPolicy
from privfed.training.mechanism import DpSgd
from privfed.training.model import mlp, values_of
from privfed.training.objective import FedProx
from privfed.update import PlainVector

Make = Callable[..., Consortium]
PARAMS = ProductParams.exact(bound=2.0)
VALIDATOR = Validator(name="bank_5", commitment=Validator.commit(b"public records", salt=bytes(32)), public=True)
RULES: list[tuple[Any, Validator | None]] = [
    (MultiKrum(byzantine=1, keep=3), None),
    (GeometricMedian(), None),
    (NormBound(max_norm=0.3), None),
    (Cgsv(), None),
    (FedTsv(), VALIDATOR),
    (FLTrust(), VALIDATOR),
]


@pytest.fixture
def six(non_private: Make) -> Make:
    def make(**options: Any) -> Consortium:
        return non_private(**({"count": 6, "params": PARAMS} | options))

    return make


@pytest.mark.parametrize(("rule", "validator"), RULES, ids=lambda value: str(getattr(value, "name", ""))[:20])
def test_an_encrypted_run_is_the_run_in_the_clear(model: torch.nn.Module, six: Make, rule: Any, validator: Any, tmp_path: Path) -> None:
    rounds = 2 if rule in (Cgsv(), FedTsv()) else 1
    encrypted = simulate(six(rule=rule, validator=validator), model, rounds=rounds, directory=tmp_path / "run")
    with Simulation(six(rule=rule, validator=validator, keys=Plaintext()), model) as simulation:
        clear = simulation.run(rounds=rounds)
        scores = dict(simulation._rounds.state.scores)  # type: ignore[attr-defined]
    for sealed, plain in zip(encrypted.rounds, clear.rounds, strict=True):
        assert dict(sealed.record.coefficients) == dict(plain.record.coefficients)
        assert sealed.grid_error_max == 0
        assert (sealed.record.disclosed, sealed.record.assurance, sealed.record.fallback) == (21, "HONEST_BUT_CURIOUS", "NONE")
        assert sealed.record.bytes_scoring > 21 * PARAMS.product_bytes
        assert all(count > sealed.record.bytes_scoring for count in sealed.record.bytes_down.values())
        assert RoundSummary.from_json(json.loads(json.dumps(sealed.to_json()))) == sealed
    # The mean is the same integers; only `scale` follows from norms, which are off by the opening's rounding.
    np.testing.assert_allclose(encrypted.model.values, clear.model.values, rtol=0, atol=1e-6)
    stored = [ScoreStore(tmp_path / "run" / "clients" / f"bank_{index}" / "scores.json", rule=rule.name).load() for index in range(6)]
    assert all(store == stored[0] for store in stored)
    assert set(stored[0].values) == set(scores)
    if scores:
        largest = max(map(abs, scores.values()))
        assert max(abs(stored[0].values[name] - score) for name, score in scores.items()) <= 1e-6 * largest
        assert stored[0].rounds == (0, 1)


def test_an_interrupted_run_goes_on_with_its_scores(model: torch.nn.Module, six: Make, tmp_path: Path) -> None:
    consortium = six(count=3, rule=Cgsv())
    simulate(consortium, model, rounds=1, directory=tmp_path / "run")
    resumed = simulate(consortium, model, rounds=2, directory=tmp_path / "run")
    whole = simulate(six(count=3, rule=Cgsv(), keys=Plaintext()), model, rounds=2)
    assert [dict(s.record.coefficients) for s in resumed.rounds] == [dict(s.record.coefficients) for s in whole.rounds]


def test_sketches_open_inner_products_within_their_stated_interval(six: Make, monkeypatch: Any) -> None:
    torch.manual_seed(3)
    model = mlp(inputs=4, hidden=(1500,))  # 9001 weights, three chunks
    seen: list[np.ndarray] = []
    real = scorer.decide
    monkeypatch.setattr(scorer, "decide", lambda *args, **named: seen.append(args[2]) or real(*args, **named))
    params = ProductParams.sketched(bound=2.0)
    with Simulation(six(rule=GeometricMedian(), params=params), model) as simulation:
        history = simulation.run(rounds=1)
        rows = {name: dequantise(quantise(update.vector.values, params)[0], 1, params) for name, update in simulation.updates.items()}
    assert history.grid_error_max == 0
    exact = gram({name: PlainVector(layout=history.model.layout, values=row) for name, row in rows.items()}).products
    assert all(np.array_equal(products, seen[0]) for products in seen)
    apart = np.abs(seen[0] - exact)
    stated = np.array([[standard_error(exact[i, j], exact[i, i], exact[j, j]) for j in range(6)] for i in range(6)])
    assert (apart <= 6 * stated).all()
    assert (apart > params.scalar_error(9001)).any()  # it is a sketch


def test_all_openers_of_a_round_draw_the_same_permutations_and_every_round_draws_others(
    model: torch.nn.Module, six: Make, monkeypatch: Any
) -> None:
    drawn: list[int] = []
    real = MonteCarlo.values
    monkeypatch.setattr(MonteCarlo, "values", lambda self, game: drawn.append(game.seed) or real(self, game))
    rule = FedTsv(estimator=MonteCarlo(permutations=3))
    simulate(six(count=4, rule=rule, validator=replace(VALIDATOR, name="bank_3")), model, rounds=2)
    assert len(drawn) == 2 * 4
    assert len(set(drawn[:4])) == len(set(drawn[4:])) == 1
    assert drawn[0] != drawn[4]


def test_a_server_process_multiplies_without_a_key(model: torch.nn.Module, six: Make) -> None:
    with Simulation(six(rule=MultiKrum(byzantine=1, keep=3)), model, separate_server=True) as simulation:
        history = simulation.run(rounds=1)
    assert sorted(history.rounds[0].record.coefficients.values()) == [0, 0, 0, 1, 1, 1]


def test_a_round_without_allowed_weights_is_skipped_and_the_next_one_is_held(model: torch.nn.Module, six: Make, monkeypatch: Any) -> None:
    calls = []
    real = OpeningPolicy.check_chosen

    def once(self: OpeningPolicy, coefficients: Any) -> None:
        calls.append(coefficients)
        # Three openers check in each round.
        if len(calls) <= 3:
            real(OpeningPolicy(min_effective_clients=100.0), coefficients)

    monkeypatch.setattr(OpeningPolicy, "check_chosen", once)
    history = simulate(six(count=3, rule=GeometricMedian()), model, rounds=2)
    assert [lost.round for lost in history.failed] == [0]
    assert "no aggregate was opened" in history.failed[0].reason
    assert [summary.record.round for summary in history.rounds] == [1]


def test_a_run_that_is_only_skipped_says_so(model: torch.nn.Module, six: Make) -> None:
    consortium = six(count=3, rule=GeometricMedian(), policy=OpeningPolicy(min_effective_clients=3.0))
    with pytest.raises(CohortError, match="none of 1 rounds could be held"):
        simulate(consortium, model, rounds=1)


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"rule": MultiKrum(byzantine=1, keep=1)}, UnsupportedInThisModeError, "would open a mean of 1"),
        ({"rule": CenteredClipping(radius=1.0), "validator": VALIDATOR}, UnsupportedInThisModeError, "which nobody opens"),
        ({"rule": FedTsv()}, UnsupportedInThisModeError, "name a validator"),
        ({"rule": GeometricMedian(), "validator": VALIDATOR}, ValueError, "a rule that needs a reference"),
        ({"rule": FLTrust(), "validator": replace(VALIDATOR, name="x")}, ValueError, "among the clients"),
        (
            {"rule": FLTrust(), "validator": Validator(name="bank_5", commitment=bytes(32), public=False)},
            ValueError,
            "to be public, or DpSgd",
        ),
    ],
)
def test_a_consortium_that_would_show_too_much_is_refused(six: Make, options: Any, error: Any, reason: str) -> None:
    with pytest.raises(error, match=reason):
        six(**options)


def test_a_selection_always_has_the_validator(model: torch.nn.Module, six: Make) -> None:
    history = simulate(six(rule=FLTrust(), validator=VALIDATOR), model, rounds=1, fraction=0.6, rng=np.random.default_rng(0))
    for summary in history.rounds:
        assert "bank_5" in summary.record.selected
        assert len(summary.record.selected) == 4
        assert summary.record.coefficients["bank_5"] == 0
        assert summary.record.disclosed == 4 * 3 // 2 + 3 + 1  # n (n + 1) / 2, and n + 1 with the reference


# ---------------------------------------------------------------- declared noise


def test_a_rule_of_inner_products_is_told_the_noise_that_clients_declare_and_no_other_rule_is(private: Make) -> None:
    declared = private(rule=GeometricMedian(), keys=Plaintext())
    energies = declared.noise_energy(100)
    assert list(energies) == [client.name for client in declared.clients]
    for client in declared.clients:
        how = client.training
        assert isinstance(how, DpSgd)
        deviation = how.learning_rate * how.noise_multiplier * how.max_grad_norm / how.expected_batch_size
        assert energies[client.name] == pytest.approx(100 * how.steps * deviation**2)
    for rule in (FedAvg(), CoordinateMedian()):
        assert replace(declared, rule=rule).noise_energy(100) == {}


def test_noise_whose_size_does_not_follow_from_what_is_declared_is_taken_for_none(private: Make, non_private: Make) -> None:
    assert private(rule=GeometricMedian(), keys=Plaintext(), correction=FedProx(proximal_weight=0.1)).noise_energy(100) == {}
    assert non_private(rule=GeometricMedian(), keys=Plaintext()).noise_energy(100) == {}


def test_both_engines_hand_the_declared_noise_to_the_rule(private: Make, model: torch.nn.Module, tmp_path: Path) -> None:
    seen: list[list[float]] = []

    class Looking(GeometricMedian):
        def mixture(self, weights: Any, gram: Any) -> Any:
            seen.append(gram.declared_noise.tolist())
            return super().mixture(weights, gram)

    consortium = private(count=4, rule=Looking(), params=PARAMS)
    simulate(consortium, model, rounds=1, directory=tmp_path / "run")
    clear = private(count=4, rule=Looking(), params=PARAMS, keys=Plaintext(), folder=tmp_path / "clear")
    simulate(clear, model, rounds=1)
    expected = list(consortium.noise_energy(values_of(model).layout.size).values())
    assert len(seen) == 5  # four openers, and the engine in the clear
    assert all(energies == expected for energies in seen)
    assert min(expected) > 0
