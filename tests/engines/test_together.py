"""Terms of a session that meet each other among parties with folders of their own: the same rounds as in the local engine."""

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from privfed.aggregation.private_weights import PrivateWeights
from privfed.agreement import Validator
from privfed.contribution.trajectory import FedTsv
from privfed.dp.ledger import Ledger
from privfed.dp.silo import SiloNoise
from privfed.engines.coordinator import coordinate
from privfed.he.codec import dequantise
from privfed.he.escrow_secret import EscrowKey
from privfed.he.params import CkksParams
from privfed.he.secret import SharedKey
from privfed.he.threshold_key import ThresholdKey
from privfed.phases import Step
from privfed.round_record import Stage
from privfed.training.model import values_of
from tests.engines.beside_local import check_same_as_local
from tests.engines.deployed import HOLDER, SERVER, deploy, simulated
from tests.engines.exchanges import LocalExchange, dropping
from tests.engines.test_faults import Script
from tests.engines.test_planned_rules import TSV, VALIDATOR, made

MODES: dict[str, Any] = {
    "SharedKey": lambda: {"keys": SharedKey.generate(), "params": CkksParams.standard()},
    "EscrowKey": lambda: {"keys": EscrowKey.generate(), "params": CkksParams.escrow()},
}


@pytest.mark.parametrize("mode", MODES)
def test_scores_go_on_over_a_dropout_a_missed_opening_and_restarts_of_all(tmp_path: Path, mode: str) -> None:
    """FedTSV keeps scores from round to round: at each bank under a shared key, at the key holder else."""
    deployed = made(tmp_path / "plan", rule=TSV, mode=mode, validator=VALIDATOR, weights=6 * (1.0,))
    coefficients = check_same_as_local(
        deployed,
        tmp_path / "local",
        rounds=3,
        fault=dropping(("bank_2", Step.OPEN, 0), ("bank_3", Step.COMMIT if mode == "EscrowKey" else Step.UPLOAD, 1)),
        absences=Script(round_0={"bank_2": Stage.OPENING}, round_1={"bank_3": Stage.UPLOAD}),
        restarted=(*deployed.names, *((HOLDER,) if mode == "EscrowKey" else ())),
        exact=False,
        rule=FedTsv(),
        validator=Validator(name="bank_0", commitment=b"\xab" * 32, public=True),
    )
    assert ["bank_3" in each for each in coefficients] == [True, False, True]  # it was there again, with the scores of all rounds
    assert all(each["bank_4"] < each["bank_1"] for each in coefficients)


@pytest.mark.parametrize("mode", MODES)
def test_weights_that_stay_with_the_banks_give_the_mean_of_the_local_engine(tmp_path: Path, mode: str) -> None:
    private = PrivateWeights(largest=7)
    weights = {"bank_0": 7.0, "bank_1": 2.0, "bank_2": 1.0}
    deployed = deploy(tmp_path / "parties", private_weights=private, weights=weights, **MODES[mode]())
    assert set(deployed.agreement.weights.values()) == {1}
    coefficients = check_same_as_local(
        deployed,
        tmp_path / "local",
        rounds=2,
        fault=dropping(("bank_1", Step.OPEN, 0)),
        absences=Script(round_0={"bank_1": Stage.OPENING}),
        private_weights=private,
    )
    assert coefficients == 2 * [dict.fromkeys(deployed.names, 1)]
    # With other weights it is another mean.
    weighted = deployed.state("bank_0").values.values
    others = deploy(tmp_path / "others", private_weights=private, weights=dict.fromkeys(weights, 1.0), **MODES[mode]())
    assert not np.array_equal(simulated(others, tmp_path / "alike", rounds=2, private_weights=private).model.values, weighted)


_SILO = """
    def client():
        data = features(generate_transactions(rows=300, fraud_rate=0.05, rng=np.random.default_rng(INDEX)), PRE)
        ledger = Ledger.open(
            FOLDER / "records.ledger",
            population="bank_" + str(INDEX),
            budget=Budget.unlimited(delta=1e-6),
            silo_budget=Budget(epsilon=200.0, delta=1e-6),
        )
        training = NonPrivate(learning_rate=0.3, batch_size=20, steps=4, seed=INDEX)
        return Client("bank_" + str(INDEX), data, training=training, ledger=ledger, weight=WEIGHT)
"""


@pytest.mark.parametrize("mode", MODES)
def test_noise_for_whole_silos_is_in_what_all_banks_open_is_charged_by_each_and_needs_all_of_its_shares(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what distribution the noise is, is tested without an engine; here, that the model moves by exactly what was noised."""
    made_grids: list[np.ndarray] = []
    real = SiloNoise.noised

    def noised(self: SiloNoise, *arguments: Any, **options: Any) -> Any:
        made_grids.append(real(self, *arguments, **options))
        return made_grids[-1]

    monkeypatch.setattr(SiloNoise, "noised", noised)
    weights = dict.fromkeys(("bank_0", "bank_1", "bank_2"), 1.0)
    plain = deploy(tmp_path / "plain", weights=weights)
    silo = SiloNoise(weights=dict.fromkeys(weights, 1), clip_steps=1000, noise_multiplier=0.5, coordinates=plain.agreement.layout.size)
    deployed = deploy(tmp_path / "parties", site=_SILO, weights=weights, silo=silo, **MODES[mode]())
    trains_at = Step.COMMIT if mode == "EscrowKey" else Step.UPLOAD
    with LocalExchange(deployed, fault=dropping(("bank_2", trains_at, 0))) as exchange:
        result = coordinate(deployed.folder(SERVER), exchange, rounds=2)
        assert not any(step is Step.OPEN and number == 0 for _, step, number in exchange.asked)
    assert [failed.round for failed in result.failed] == [0]
    assert len(made_grids) == 2 + 3
    moved = dequantise(np.sum(made_grids[2:], axis=0), silo.denominator, deployed.agreement.params)
    start = values_of(runpy.run_path(str(deployed.folder("bank_0") / "site.py"))["model"]()).values
    for name in deployed.names:
        np.testing.assert_array_equal(deployed.state(name).values.values, start + moved)
        with Ledger.read(deployed.folder(name) / "records.ledger") as ledger:
            assert ledger.silo_events() == (silo.event(),) * (1 if name == "bank_2" else 2)


@pytest.mark.parametrize("mode", MODES)
def test_scaffold_variates_follow_the_aggregates_also_at_a_bank_that_missed_one_and_after_restarts(tmp_path: Path, mode: str) -> None:
    site = """
    def correction():
        return Scaffold(clients=4)
    """
    names = tuple(f"bank_{index}" for index in range(4))
    terms = {"count": 4, "weights": dict.fromkeys(names, 1.0)}
    deployed = deploy(tmp_path / "parties", site=site, **terms, **MODES[mode]())
    check_same_as_local(
        deployed,
        tmp_path / "local",
        rounds=3,
        fault=dropping(("bank_1", Step.OPEN, 0), ("bank_3", Step.UPLOAD, 1)),
        absences=Script(round_0={"bank_1": Stage.OPENING}, round_1={"bank_3": Stage.UPLOAD}),
        restarted=names,
    )
    plain = deploy(tmp_path / "plain", **terms, **MODES[mode]())
    absences = Script(round_1={"bank_3": Stage.UPLOAD})
    without = simulated(plain, tmp_path / "without", rounds=3, absences=absences).model.values
    assert not np.array_equal(without, deployed.state("bank_0").values.values)


@pytest.mark.parametrize("step", [Step.SETUP, Step.UPLOAD, Step.APPROVE, Step.OPEN])
def test_a_quorum_opens_exact_sums_with_a_bank_that_falls_silent_at_any_step(tmp_path: Path, step: Step) -> None:
    deployed = deploy(tmp_path / "parties", keys=ThresholdKey(clients=4, corrupted=1, dropouts=1), count=4)
    coefficients = check_same_as_local(
        deployed,
        tmp_path / "local",
        rounds=2,
        fault=dropping(("bank_1", step, 0)),
        absences=Script(round_0={"bank_1": step.stage}),
    )
    assert ("bank_1" in coefficients[0]) is (step in (Step.APPROVE, Step.OPEN))
    assert "bank_1" in coefficients[1]
