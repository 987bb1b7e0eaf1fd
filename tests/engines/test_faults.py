"""Clients that fall silent, clients that come back, and runs that are killed and started again."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from privfed.agreement import RoundContext
from privfed.consortium import Consortium
from privfed.engines.dropouts import Dropouts
from privfed.engines.local import Simulation, simulate
from privfed.errors import (
    AgreementMismatchError,
    CohortError,
    HistoryMismatchError,
    ModelMismatchError,
    TamperedAggregateError,
)
from privfed.he.secret import SharedKey
from privfed.policy import OpeningPolicy
from privfed.round import Participant
from privfed.round_record import Stage
from privfed.server import Server
from privfed.update import PlainVector
from privfed.wire import decode_abort

Make = Callable[..., Consortium]


class Script:
    """Says for each round who falls silent when."""

    def __init__(self, **rounds: Mapping[str, Stage]) -> None:
        self._rounds = {int(name.removeprefix("round_")): silent for name, silent in rounds.items()}

    def silent(self, round: int, names: Sequence[str]) -> Mapping[str, Stage]:
        return self._rounds.get(round, {})


@pytest.mark.parametrize("stage", [Stage.SETUP, Stage.UPLOAD])
def test_a_round_goes_on_without_who_is_silent_and_weights_are_apportioned_anew(
    model: torch.nn.Module, non_private: Make, stage: Stage
) -> None:
    consortium = non_private(count=4, weights=(0.4, 0.3, 0.2, 0.1))
    history = simulate(consortium, model, rounds=3, absences=Script(round_1={"bank_2": stage}))
    full, without, again = (summary.record for summary in history.rounds)
    assert full.coefficients == again.coefficients == {"bank_0": 1638, "bank_1": 1229, "bank_2": 819, "bank_3": 410}
    assert without.coefficients == {"bank_0": 2048, "bank_1": 1536, "bank_3": 512}
    assert without.silent == {"bank_2": stage}
    assert history.grid_error_max == 0


@pytest.mark.parametrize("stage", [Stage.SETUP, Stage.OPENING])
def test_a_client_that_missed_rounds_catches_up_exactly(model: torch.nn.Module, non_private: Make, stage: Stage) -> None:
    silent = {"bank_3": stage}
    with Simulation(non_private(count=4), model) as simulation:
        simulation.run(rounds=2, absences=Script(round_0=silent, round_1=silent))
        states = {name: participant.session.state for name, participant in simulation.encrypted.participants.items()}
        # Who is silent from the setup on was not there at all; who fell silent before the opening had caught up with round 0.
        assert states["bank_3"].rounds == (() if stage is Stage.SETUP else (0,))
        assert states["bank_0"].rounds == (0, 1)
    with Simulation(non_private(count=4), model) as simulation:
        simulation.run(rounds=3, absences=Script(round_0=silent, round_1=silent))
        states = {name: participant.session.state for name, participant in simulation.encrypted.participants.items()}
        assert all(state.rounds == (0, 1, 2) for state in states.values())
        assert all(np.array_equal(state.values.values, states["bank_0"].values.values) for state in states.values())


def test_a_client_whose_missed_aggregate_is_lost_takes_no_part(model: torch.nn.Module, non_private: Make) -> None:
    with Simulation(non_private(count=4), model) as simulation:
        simulation.run(rounds=1, absences=Script(round_0={"bank_3": Stage.OPENING}))
        spool = simulation.encrypted._site.spool
        for folder in spool.iterdir():
            shutil.rmtree(folder)
        record, _ = simulation.encrypted.hold(1, selected=simulation._names, silent={})
        assert record.participants == ("bank_0", "bank_1", "bank_2")
        assert record.selected == ("bank_0", "bank_1", "bank_2")
        assert simulation.encrypted.participants["bank_3"].opened_rounds() == ()


def test_silence_after_the_digest_ends_the_round_unopened_and_the_next_one_is_held(model: torch.nn.Module, non_private: Make) -> None:
    history = simulate(non_private(count=4), model, rounds=3, absences=Script(round_1={"bank_1": Stage.APPROVAL}))
    assert [summary.record.round for summary in history.rounds] == [0, 2]
    (failed,) = history.failed
    assert (failed.round, failed.silent) == (1, {"bank_1": Stage.APPROVAL})
    assert "nothing was summed" in failed.reason


def test_silence_of_too_many_is_a_failed_round_and_refusal_of_too_many_is_an_error(model: torch.nn.Module, non_private: Make) -> None:
    absences = Script(round_0={"bank_1": Stage.UPLOAD, "bank_2": Stage.SETUP})
    history = simulate(non_private(), model, rounds=2, absences=absences)
    assert [failed.round for failed in history.failed] == [0]
    with pytest.raises(CohortError, match="none of 1 rounds could be held"):
        simulate(non_private(), model, rounds=1, absences=absences)


def test_a_refusing_client_is_told_apart_from_a_silent_one(model: torch.nn.Module, private: Make) -> None:
    consortium = private(count=5, epsilons=(20.0, 20.0, 20.0, 20.0, 0.1))
    history = simulate(consortium, model, rounds=1, absences=Script(round_0={"bank_0": Stage.UPLOAD}))
    record = history.rounds[0].record
    assert record.refused == ("bank_4",)
    assert record.silent == {"bank_0": Stage.UPLOAD}
    assert record.participants == ("bank_1", "bank_2", "bank_3")


def test_random_dropouts_do_not_harm_exactness(model: torch.nn.Module, non_private: Make) -> None:
    consortium = non_private(count=8, policy=OpeningPolicy(min_clients=3))
    with Simulation(consortium, model) as simulation:
        history = simulation.run(rounds=8, fraction=0.7, rng=np.random.default_rng(1), absences=Dropouts(probability=0.25, seed=5))
        states = [participant.session.state for participant in simulation.encrypted.participants.values()]
    assert history.rounds
    assert {summary.grid_error_max for summary in history.rounds} <= {0, None}
    assert 0 in {summary.grid_error_max for summary in history.rounds}
    by_history = {state.history: state.values.values for state in states}
    assert all(np.array_equal(by_history[state.history], state.values.values) for state in states)


def test_dropouts_have_the_probability_that_was_asked_for() -> None:
    names = [f"bank_{index}" for index in range(50)]
    drawn = sum(len(Dropouts(probability=0.2, seed=1).silent(number, names)) for number in range(200))
    # 10,000 draws: three standard deviations are 120.
    assert abs(drawn - 2000) < 120
    assert abs(drawn - 2000 * 1.2) > 120
    with pytest.raises(ValueError, match="probability"):
        Dropouts(probability=1.5, seed=1)


def test_a_finished_run_goes_on_where_it_stopped(model: torch.nn.Module, non_private: Make, tmp_path: Path) -> None:
    keys = SharedKey.generate()
    undisturbed = simulate(non_private(keys=keys), model, rounds=4)
    first = simulate(non_private(keys=keys), model, rounds=2, directory=tmp_path / "run")
    second = simulate(non_private(keys=keys), model, rounds=4, directory=tmp_path / "run")
    assert len(first.rounds) == 2
    assert [summary.record.round for summary in second.rounds] == [0, 1, 2, 3]
    assert second.rounds[1].record == first.rounds[1].record
    assert np.array_equal(second.model.values, undisturbed.model.values)
    repeated = simulate(non_private(keys=keys), model, rounds=4, directory=tmp_path / "run")
    assert np.array_equal(repeated.model.values, second.model.values)


def test_selection_after_a_restart_is_what_it_would_have_been(model: torch.nn.Module, non_private: Make, tmp_path: Path) -> None:
    keys = SharedKey.generate()

    def run(rounds: int, directory: Path | None) -> list[tuple[str, ...]]:
        consortium = non_private(count=6, keys=keys, policy=OpeningPolicy(min_clients=3))
        history = simulate(consortium, model, rounds=rounds, fraction=0.5, rng=np.random.default_rng(3), directory=directory)
        return [summary.record.selected for summary in history.rounds]

    whole = run(4, None)
    run(2, tmp_path)
    assert run(4, tmp_path) == whole
    assert len(set(whole)) > 1


@pytest.mark.parametrize("what", ["key", "weights", "clients", "model"])
def test_a_folder_of_another_run_is_refused_and_left_as_it_is(model: torch.nn.Module, non_private: Make, tmp_path: Path, what: str) -> None:
    keys = SharedKey.generate()
    simulate(non_private(keys=keys), model, rounds=1, directory=tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    changes = {
        "key": lambda: (non_private(), model),
        "weights": lambda: (non_private(keys=keys, weights=(2, 1, 1)), model),
        "clients": lambda: (non_private(keys=keys, count=4), model),
        "model": lambda: (non_private(keys=keys), torch.nn.Sequential(torch.nn.Linear(4, 1))),
    }
    consortium, other_model = changes[what]()
    words = {"key": "another shared key", "weights": "another set of weights", "clients": "without", "model": "another layout"}[what]
    with pytest.raises(AgreementMismatchError, match=f"{words}.*nothing was changed"):
        simulate(consortium, other_model, rounds=2, directory=tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_log_line_that_a_crash_cut_off_is_dropped(model: torch.nn.Module, non_private: Make, tmp_path: Path) -> None:
    keys = SharedKey.generate()
    whole = simulate(non_private(keys=keys), model, rounds=3, directory=tmp_path)
    log = tmp_path / "rounds.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    assert [next(iter(json.loads(line))) for line in lines] == ["selection", "held", "held", "held"]
    log.write_bytes(b"".join(lines[:-1]) + lines[-1][: len(lines[-1]) // 2])
    resumed = simulate(non_private(keys=keys), model, rounds=3, directory=tmp_path)
    assert np.array_equal(resumed.model.values, whole.model.values)
    assert len(log.read_bytes().splitlines()) == 4


@pytest.mark.parametrize("separate", [False, True])
def test_of_a_client_that_refuses_the_aggregate_the_server_learns_that_and_not_why(
    model: torch.nn.Module, non_private: Make, monkeypatch: pytest.MonkeyPatch, separate: bool
) -> None:
    whole = Participant.open

    def refuses(party: Participant, context: RoundContext, data: bytes) -> None:
        if party.session.name == "bank_1":
            raise TamperedAggregateError
        whole(party, context, data)

    monkeypatch.setattr(Participant, "open", refuses)
    with Simulation(non_private(), model, separate_server=separate) as simulation:
        with pytest.raises(TamperedAggregateError):
            simulation.run(rounds=1)
        (folder,) = simulation.encrypted._site.spool.iterdir()
        (stored,) = [path for path in folder.iterdir() if "abort" in path.name]
        context = RoundContext(agreement=simulation.agreement, round=0)
        key_id = simulation.encrypted.participants["bank_1"].session.round_key(context).key_id
        assert decode_abort(stored.read_bytes(), context, key_id) == "bank_1"


def test_a_client_with_a_gap_opens_nothing_and_catches_up_in_order(model: torch.nn.Module, non_private: Make) -> None:
    silent = {"bank_3": Stage.SETUP}
    with Simulation(non_private(count=4), model) as simulation:
        simulation.run(rounds=2, absences=Script(round_0=silent, round_1=silent))
        encrypted = simulation.encrypted
        first, second = ((held.context, encrypted._server(held.context, held.selected).aggregate()) for held in encrypted._opened)
        late = encrypted.participants["bank_3"]
        with pytest.raises(HistoryMismatchError, match="open the missed aggregates first"):
            late.open(*second)
        assert late.opened_rounds() == ()
        assert np.array_equal(late.session.state.values.values, simulation._initial.values)
        late.open(*first)  # the refused one left nothing in the journal that would stand in the way
        late.open(*second)
        state = encrypted.participants["bank_0"].session.state
        assert late.session.state.history == state.history
        assert np.array_equal(late.session.state.values.values, state.values.values)
        other = replace(first[0], round=2)  # as a server would have it that gives out a withheld round later
        with pytest.raises(HistoryMismatchError):
            late.open(other, first[1])
        assert late.opened_rounds() == (0, 1)


def test_clients_with_one_history_and_two_models_are_an_error_whoever_is_silent(
    model: torch.nn.Module, non_private: Make, tmp_path: Path
) -> None:
    keys = SharedKey.generate()
    simulate(non_private(count=4, keys=keys), model, rounds=1, directory=tmp_path)
    path = tmp_path / "clients" / "bank_1" / "model.npz"
    whole = path.read_bytes()
    parts = dict(np.load(path))
    np.savez(path, **(parts | {"values": parts["values"] + 1.0}))
    for absences in (None, Script(round_1={"bank_3": Stage.OPENING})):
        with pytest.raises(ModelMismatchError, match="'bank_0' and 'bank_1' opened the same rounds and hold different models"):
            simulate(non_private(count=4, keys=keys), model, rounds=2, directory=tmp_path, absences=absences)
    assert len(list((tmp_path / "server" / "spool").iterdir())) == 1  # it is noticed before anybody trains
    path.write_bytes(whole)
    history = simulate(non_private(count=4, keys=keys), model, rounds=2, directory=tmp_path)
    assert [summary.record.round for summary in history.rounds] == [0, 1]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_one_weight_that_differs_is_noticed_before_a_round_and_after_it(
    model: torch.nn.Module, non_private: Make, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    with Simulation(non_private(), model) as simulation:
        simulation.run(rounds=1)
        session = simulation.encrypted.participants["bank_2"].session

        def change() -> None:
            values = session.state.values.values.copy()
            values[-1] += 2.0**-40
            session._state = replace(session.state, values=PlainVector(layout=session.state.values.layout, values=values))

        if moment == "before":
            change()
        else:
            whole = session.apply
            monkeypatch.setattr(session, "apply", lambda *arguments, **options: (whole(*arguments, **options), change()))
        with pytest.raises(ModelMismatchError, match="'bank_0' and 'bank_2'"):
            simulation.encrypted.hold(1, selected=simulation._names, silent={})


def test_who_refused_and_what_was_sent_is_the_same_after_a_restart(
    model: torch.nn.Module, private: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    epsilons = (20.0, 20.0, 20.0, 20.0, 0.1)
    consortium = private(count=5, epsilons=epsilons)
    absences = Script(round_0={"bank_0": Stage.UPLOAD})
    whole = Server.close

    def crash(server: Server) -> bytes:
        whole(server)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Server, "close", crash)
        with pytest.raises(KeyboardInterrupt):
            simulate(consortium, model, rounds=1, directory=tmp_path / "run", absences=absences)
    resumed = simulate(consortium, model, rounds=1, directory=tmp_path / "run", absences=absences).rounds[0].record
    undisturbed = simulate(private(count=5, epsilons=epsilons, folder=tmp_path / "l"), model, rounds=1, absences=absences).rounds[0].record
    assert resumed.refused == undisturbed.refused == ("bank_4",)
    assert resumed.silent == undisturbed.silent == {"bank_0": Stage.UPLOAD}
    assert resumed.bytes_up == undisturbed.bytes_up
    assert resumed.bytes_down == undisturbed.bytes_down
    assert set(resumed.bytes_up) == {"bank_1", "bank_2", "bank_3"}
    # The openers that took no part were sent the aggregate, and no digest.
    assert 0 < resumed.bytes_down["bank_4"] < resumed.bytes_down["bank_1"]
