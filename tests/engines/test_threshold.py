"""`ThresholdKey` through the engine: real wire bytes, clients that fall silent, and runs that are killed and started again."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from privfed.aggregation.private_weights import PrivateWeights
from privfed.aggregation.robust import FLTrust
from privfed.aggregation.rules import MultiKrum
from privfed.aggregation.server_optimizer import FedAdam, ServerOptimizer, ServerSgd
from privfed.agreement import RoundContext, Validator
from privfed.client import Client
from privfed.consortium import Consortium
from privfed.dp.silo import SiloNoise
from privfed.engines.local import Simulation, simulate
from privfed.errors import (
    AgreementMismatchError,
    CohortError,
    DamagedFileError,
    HistoryMismatchError,
    KeyErasedError,
    OpeningRefusedError,
    UnsupportedInThisModeError,
)
from privfed.he.codec import pack_words, quantise, unpack_words
from privfed.he.params import CkksParams
from privfed.he.product_params import ProductParams
from privfed.he.secret import SharedKey
from privfed.he.threshold import OnePolynomialVector, key_id
from privfed.he.threshold_key import ThresholdKey
from privfed.he.threshold_secret import open_sum
from privfed.keys.party import ENCRYPTION
from privfed.message import Kind
from privfed.phases import RoundServer
from privfed.round import Participant
from privfed.round_record import Stage
from privfed.server import Server
from privfed.server_spool import Phase
from privfed.threshold_session import ThresholdSession
from privfed.training.mechanism import NonPrivate
from privfed.training.scaffold import Scaffold
from privfed.trust import ThresholdTrust
from privfed.wire_aggregate import decode_aggregate, encode_aggregate
from tests.engines.conftest import table

Make = Callable[..., Consortium]


class Script:
    """Says for each round who falls silent when."""

    def __init__(self, **rounds: Mapping[str, Stage]) -> None:
        self._rounds = {int(name.removeprefix("round_")): silent for name, silent in rounds.items()}

    def silent(self, round: int, names: Sequence[str]) -> Mapping[str, Stage]:
        return self._rounds.get(round, {})


def terms(clients: int, *, corrupted: int = 0, dropouts: int = 0) -> dict[str, Any]:
    return {
        "count": clients,
        "keys": ThresholdKey(clients=clients, corrupted=corrupted, dropouts=dropouts),
        "params": CkksParams.threshold(clients=clients),
    }


def test_a_run_gives_the_same_model_as_under_a_shared_key_and_in_a_server_process(model: torch.nn.Module, non_private: Make) -> None:
    models = []
    for keys, separate in ((None, False), (None, True), (SharedKey.generate(), False)):
        options = terms(4, dropouts=1) | ({} if keys is None else {"keys": keys})
        weights = (4.0, 3.0, 2.0, 1.0)
        with Simulation(non_private(weights=weights, **options), model, separate_server=separate) as simulation:
            history = simulation.run(rounds=2)
        assert history.mode == ("ThresholdKey" if keys is None else "SharedKey")
        assert history.grid_error_max == 0
        models.append(history.model.values)
    assert np.array_equal(models[0], models[1])
    assert np.array_equal(models[0], models[2])


def test_rounds_survive_every_kind_of_dropout_up_to_their_number(model: torch.nn.Module, private: Make) -> None:
    script = Script(
        round_0={"bank_0": Stage.SETUP, "bank_1": Stage.UPLOAD},
        round_1={"bank_2": Stage.APPROVAL, "bank_3": Stage.APPROVAL},
        round_2={"bank_0": Stage.UPLOAD, "bank_4": Stage.APPROVAL},
        round_3={"bank_1": Stage.OPENING},
        round_4={"bank_0": Stage.APPROVAL, "bank_1": Stage.APPROVAL, "bank_2": Stage.APPROVAL},
        round_5={"bank_0": Stage.UPLOAD, "bank_1": Stage.SETUP, "bank_2": Stage.UPLOAD},
    )
    with Simulation(private(**terms(5, dropouts=2)), model) as simulation:
        history = simulation.run(rounds=7, absences=script)
        models = [participant.session.state for participant in simulation.encrypted.participants.values()]
    assert [summary.record.round for summary in history.rounds] == [0, 1, 2, 3, 6]
    assert [failed.round for failed in history.failed] == [4, 5]
    assert history.grid_error_max == 0
    assert [len(summary.record.participants) for summary in history.rounds] == [3, 5, 4, 5, 5]
    assert all(state.rounds == (0, 1, 2, 3, 6) for state in models)


def test_three_banks_of_which_one_may_be_corrupted_hold_exact_rounds_when_all_answer(model: torch.nn.Module, private: Make) -> None:
    script = Script(round_1={"bank_1": Stage.UPLOAD}, round_2={"bank_2": Stage.APPROVAL})
    with Simulation(private(**terms(3, corrupted=1)), model) as simulation:
        history = simulation.run(rounds=4, absences=script)
    assert [summary.record.round for summary in history.rounds] == [0, 3]
    assert [failed.round for failed in history.failed] == [1, 2]
    assert history.grid_error_max == 0


def test_the_server_cannot_import_what_could_open_a_single_update(model: torch.nn.Module, non_private: Make) -> None:
    """The server's process blocks the secret halves before its imports, and holds whole rounds all the same."""
    from privfed.engines import forbidden, server_process

    assert "    forbid_secrets()\n\nfrom privfed.agreement" in Path(server_process.__file__).read_text()
    text = Path(forbidden.__file__).read_text()
    assert all(
        f'"privfed.he.{module}"' in text for module in ("secret", "threshold_secret", "escrow_secret", "product_secret", "_seal_secret")
    )
    with Simulation(non_private(**terms(3)), model, separate_server=True) as simulation:
        assert simulation.run(rounds=1).grid_error_max == 0


class Crash(BaseException):
    """The process ends here."""


def crash(*arguments: object) -> None:
    raise Crash


def test_a_run_that_was_killed_after_the_uploads_goes_on_with_the_same_attempt(
    model: torch.nn.Module, non_private: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = simulate(non_private(**terms(4, dropouts=1)), model, rounds=2)
    for method in ("close", "aggregate"):
        directory = tmp_path / method
        with monkeypatch.context() as patch:
            patch.setattr(Server, method, crash)
            with pytest.raises(Crash):
                simulate(non_private(**terms(4, dropouts=1)), model, rounds=2, directory=directory)
        history = simulate(non_private(**terms(4, dropouts=1)), model, rounds=2, directory=directory)
        assert [summary.record.attempt for summary in history.rounds] == [0, 0]
        assert np.array_equal(history.model.values, whole.model.values)


def test_a_run_that_was_killed_before_the_uploads_begins_a_new_attempt_with_fresh_secrets(
    model: torch.nn.Module, non_private: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = simulate(non_private(**terms(4, dropouts=1)), model, rounds=2)
    with monkeypatch.context() as patch:
        patch.setattr(Server, "start_uploads", crash)
        with pytest.raises(Crash):
            simulate(non_private(**terms(4, dropouts=1)), model, rounds=2, directory=tmp_path / "run")
    # One client misses the opening, and opens a second attempt when it is back, in another process.
    absences = Script(round_0={"bank_3": Stage.OPENING})
    first = simulate(non_private(**terms(4, dropouts=1)), model, rounds=1, directory=tmp_path / "run", absences=absences)
    assert first.rounds[0].record.attempt == 1
    history = simulate(non_private(**terms(4, dropouts=1)), model, rounds=2, directory=tmp_path / "run")
    assert [summary.record.attempt for summary in history.rounds] == [1, 0]
    assert np.array_equal(history.model.values, whole.model.values)


def test_a_client_whose_secret_is_lost_refuses_before_it_trains(
    model: torch.nn.Module, private: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    consortium = private(**terms(3))
    with monkeypatch.context() as patch:
        patch.setattr(Server, "start_uploads", crash)
        with pytest.raises(Crash):
            simulate(consortium, model, rounds=1, directory=tmp_path / "run")
    with Simulation(consortium, model, directory=tmp_path / "run") as simulation:
        context = simulation.encrypted.context(0)
        session = simulation.encrypted.participants["bank_0"].session
        assert isinstance(session, ThresholdSession)
        assert session.key_lost(context)
        with pytest.raises(KeyErasedError, match="nothing was trained or charged; begin a new attempt"):
            session.upload(context)
        ledger = consortium.clients[0].ledger
        assert ledger is not None
        assert ledger.events() == ()
        simulation.run(rounds=1)
        assert len(ledger.events()) == 1


def test_a_client_uploads_nothing_before_the_shares_of_the_others_came_and_takes_them_once(
    model: torch.nn.Module, non_private: Make
) -> None:
    with Simulation(non_private(**terms(3)), model) as simulation:
        context = simulation.encrypted.context(0)
        parties = simulation.encrypted.participants
        server = simulation.encrypted._server(context, tuple(parties))
        setups = {name: party.setup(context) for name, party in parties.items()}
        assert all(party.setup(context) == setups[name] for name, party in parties.items())
        for message in setups.values():
            server.receive_setup(message)
        server.start_uploads()
        bank = parties["bank_0"]
        with pytest.raises(Exception, match="the shares of the others have not come"):
            bank.upload(context)
        with pytest.raises(Exception, match="did not|not signed by it for 'bank_0'"):
            bank.take_shares(context, server.relay("bank_1"))
        bank.take_shares(context, server.relay("bank_0"))
        bank.take_shares(context, server.relay("bank_0"))
        upload = bank.upload(context)
        assert bank.upload(context) == upload
        session = bank.session
        assert isinstance(session, ThresholdSession)
        assert session._secret is None
        assert not session.key_lost(context)


def test_another_encryption_key_than_the_agreed_one_and_a_lost_one_are_refused(
    model: torch.nn.Module, non_private: Make, tmp_path: Path
) -> None:
    simulate(non_private(**terms(3)), model, rounds=1, directory=tmp_path)
    path = tmp_path / "clients" / "bank_1" / ENCRYPTION
    other = (tmp_path / "clients" / "bank_2" / ENCRYPTION).read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600
    kept = path.read_bytes()
    path.write_bytes(other)
    with pytest.raises(ValueError, match="none twice"):
        simulate(non_private(**terms(3)), model, rounds=2, directory=tmp_path)
    path.unlink()
    with pytest.raises(DamagedFileError, match="encryption.pem is missing or damaged"):
        simulate(non_private(**terms(3)), model, rounds=2, directory=tmp_path)
    path.write_bytes(kept)
    path.chmod(0o600)
    with pytest.raises(AgreementMismatchError, match="another trust mode"):
        simulate(non_private(**terms(3) | {"keys": SharedKey.generate()}), model, rounds=2, directory=tmp_path)
    simulate(non_private(**terms(3)), model, rounds=2, directory=tmp_path)


def test_a_session_without_shares_takes_none(model: torch.nn.Module, non_private: Make) -> None:
    with Simulation(non_private(), model) as simulation:
        bank: Participant = simulation.encrypted.participants["bank_0"]
        context = simulation.encrypted.context(0)
        with pytest.raises(UnsupportedInThisModeError, match="ThresholdKey mode only"):
            bank.take_shares(context, b"")
        assert simulation.encrypted._server(context, ("bank_0", "bank_1", "bank_2")).relay("bank_0") == b""


def test_a_consortium_refuses_what_the_mode_does_not_have_before_anything_starts(non_private: Make) -> None:
    options = terms(4)
    weights = {f"bank_{index}": 1 for index in range(4)}
    silo = SiloNoise(weights=weights, clip_steps=10, noise_multiplier=1.0, coordinates=49)
    for text, changes in (
        (r"take CkksParams.threshold\(clients=4\)", {"params": CkksParams.standard()}),
        ("no SCAFFOLD, whose variates follow updates that are not scaled", {"correction": Scaffold(clients=4)}),
        ("no noise for whole silos, which is weighted before it is added, and not after", {"silo": silo}),
        ("no private weights", {"private_weights": PrivateWeights(largest=3)}),
        ("needs inner products of updates, which ThresholdKey rounds cannot compute", {"rule": MultiKrum(byzantine=1, keep=2)}),
        (
            "which ThresholdKey rounds cannot compute; nothing was started; take SharedKey",
            {"rule": MultiKrum(byzantine=0, keep=3), "params": ProductParams.exact()},
        ),
        (
            "'bank_0' would be a validator, whose reference ThresholdKey rounds cannot compare",
            {"validator": Validator(name="bank_0", commitment=bytes(32), public=True)},
        ),
    ):
        with pytest.raises(UnsupportedInThisModeError, match=text):
            non_private(**(options | changes))
    with pytest.raises(ValueError, match="expected a ThresholdKey for 4 clients, got one for 5"):
        non_private(**(options | {"keys": ThresholdKey(clients=5, corrupted=0, dropouts=0)}))
    with pytest.raises(TypeError, match="got the class ThresholdKey"):
        non_private(**(options | {"keys": ThresholdKey}))


def test_a_session_without_a_key_takes_no_rule_that_looks_at_inner_products_and_no_validator(
    model: torch.nn.Module, non_private: Make
) -> None:
    with Simulation(non_private(**terms(4)), model) as simulation:
        agreement = simulation.agreement
    validator = Validator(name="bank_0", commitment=bytes(32), public=True)
    for changes in (
        {"rule": MultiKrum(byzantine=0, keep=3)},
        {"rule": MultiKrum(byzantine=0, keep=3), "params": ProductParams.exact()},
        {"rule": FLTrust(), "params": ProductParams.exact(), "validator": validator},
        {"validator": validator},
    ):
        with pytest.raises(
            UnsupportedInThisModeError, match="inner products of updates, which ThresholdKey rounds cannot compute; no session"
        ):
            replace(agreement, **changes)


@pytest.mark.parametrize("optimizer", [FedAdam(learning_rate=0.05), ServerSgd(learning_rate=0.7, momentum=0.5)], ids=["FedAdam", "FedAvgM"])
def test_every_client_applies_the_server_optimiser_to_what_a_quorum_opened(
    model: torch.nn.Module, non_private: Make, tmp_path: Path, optimizer: ServerOptimizer
) -> None:
    """All clients move to the same weights, and as under a shared key; also after a restart, and a client that missed an opening."""
    options = terms(4, dropouts=1) | {"server_optimizer": optimizer}
    expected = simulate(non_private(**options | {"keys": SharedKey.generate()}), model, rounds=3)
    simulate(non_private(**options), model, rounds=1, directory=tmp_path)
    with Simulation(non_private(**options), model, directory=tmp_path) as simulation:
        history = simulation.run(rounds=3, absences=Script(round_1={"bank_2": Stage.OPENING}))
        states = [participant.session.state for participant in simulation.encrypted.participants.values()]
    assert np.array_equal(history.model.values, expected.model.values)
    assert all(np.array_equal(state.values.values, expected.model.values) for state in states)
    assert not np.array_equal(history.model.values, simulate(non_private(**terms(4, dropouts=1)), model, rounds=3).model.values)


def test_a_selection_below_the_quorum_holds_no_round(model: torch.nn.Module, non_private: Make) -> None:
    with pytest.raises(CohortError, match="the quorum is 4 clients, and there are 3 selected clients"):
        simulate(non_private(**terms(5, dropouts=1)), model, rounds=1, fraction=0.6, rng=np.random.default_rng(0))


# ---------------------------------------------------------------- a server that does not keep to the protocol


def _uploaded(server: RoundServer, clients: Mapping[str, Participant], context: RoundContext, names: Sequence[str]) -> None:
    """A round up to its uploads."""
    for name in names:
        server.receive_setup(clients[name].setup(context))
    server.start_uploads()
    for name in names:
        clients[name].take_shares(context, server.relay(name))
        server.receive_upload(clients[name].upload(context))


def _held(simulation: Simulation, context: RoundContext, names: Sequence[str]) -> Server:
    """A round up to its sum, which is delivered to nobody."""
    encrypted = simulation.encrypted
    server, clients = encrypted._server(context, names), encrypted.participants
    _uploaded(server, clients, context, names)
    digest = server.close()
    for name in names:
        server.receive_approval(clients[name].approve(context, digest))
    server.aggregate()
    return server


def _shifted(server: Server, context: RoundContext) -> bytes:
    """The sum of a round plus one grid step of the first coordinate and more, as a server can make it: under its own signature."""
    message = decode_aggregate(server.aggregate(), context, key_id(context.digest))
    assert isinstance(message.total, OnePolynomialVector)
    params = context.agreement.params
    words = unpack_words(message.total.chunks[0], params)
    # Adding the public encoding of a polynomial shifts what is opened, without any key. A constant's transform is that constant.
    shifted = (words + np.uint64(1 << params.guard_bits)) % np.uint64(params.modulus)
    total = replace(message.total, chunks=(pack_words(shifted, params), *message.total.chunks[1:]))
    approvals = [server._spool.message(Kind.APPROVAL, name) for name in message.approved_by]
    digest = server._spool.files.get(Phase.UPLOAD.value)
    return encode_aggregate(context, server._identity, digest, approvals, uploads=(), total=total)


def test_clients_to_whom_the_server_gave_different_sums_hold_no_round_together(model: torch.nn.Module, non_private: Make) -> None:
    with Simulation(non_private(**terms(4, dropouts=1)), model) as simulation:
        context, clients = simulation.encrypted.context(0), simulation.encrypted.participants
        server = _held(simulation, context, tuple(clients))
        honest, shifted = server.result(), _shifted(server, context)
        for name, client in clients.items():
            client.open(context, honest if name == "bank_0" else shifted)
        states = [client.session.state for client in clients.values()]
        assert not np.array_equal(states[0].values.values, states[1].values.values)
        assert states[0].history != states[1].history == states[2].history == states[3].history
        assert server.next_history() == states[0].history
        for state in states[:2]:
            later = RoundContext(agreement=context.agreement, round=1, history=state.history)
            refused = 0
            for client in clients.values():
                try:
                    client.setup(later)
                except HistoryMismatchError:
                    refused += 1
            assert refused == (3 if state is states[0] else 1)


def test_who_answered_for_a_sum_that_never_came_does_not_train_without_noise_on_the_same_model(
    model: torch.nn.Module, non_private: Make
) -> None:
    """Else a server opens the sum of all in silence, then a sum without one of them: the difference is that one's update."""
    with Simulation(non_private(**terms(4, dropouts=1)), model) as simulation:
        first, clients = simulation.encrypted.context(0), simulation.encrypted.participants
        server = _held(simulation, first, tuple(clients))
        later = RoundContext(agreement=first.agreement, round=1, history=first.history)
        for client in clients.values():
            with pytest.raises(OpeningRefusedError, match=r"answered for round 0 and its sum never came.*nothing was done"):
                client.setup(later)
        for client in clients.values():
            client.open(first, server.result())
        _held(simulation, RoundContext(agreement=first.agreement, round=1, history=server.next_history()), tuple(clients))


@pytest.mark.parametrize("waits", [True, False])
def test_a_client_that_uploaded_in_two_rounds_of_one_model_answers_in_one_of_them(
    model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """A server has both uploaded before it asks for an answer. Where clients give both, the difference is the update of one of them."""
    if not waits:
        monkeypatch.setattr(ThresholdSession, "_check_answered", lambda self, context: None)
    training = NonPrivate(learning_rate=0.3, batch_size=60, steps=5, seed=0)  # whole batches: the same update from the same model
    clients_of_four = [Client(f"bank_{index}", table(60, seed=index), training=training) for index in range(4)]
    options = terms(4, dropouts=1)
    with Simulation(Consortium(clients_of_four, keys=options["keys"], params=options["params"]), model) as simulation:
        encrypted, clients = simulation.encrypted, simulation.encrypted.participants
        first = encrypted.context(0)
        later = RoundContext(agreement=first.agreement, round=1, history=first.history)
        rounds = [
            (context, names, encrypted._server(context, names))
            for context, names in ((first, tuple(clients)), (later, tuple(clients)[:-1]))
        ]
        for context, names, server in rounds:
            _uploaded(server, clients, context, names)
        sums = list[Any]()
        for context, names, server in rounds:
            digest = server.close()
            if waits and context is later:
                for name in names:
                    with pytest.raises(OpeningRefusedError, match=r"answered for round 0 and its sum never came.*nothing was done"):
                        clients[name].approve(context, digest)
                continue
            for name in names:
                server.receive_approval(clients[name].approve(context, digest))
            sums.append(_read_by_the_server(server, context))
        assert len(sums) == (1 if waits else 2)
        if not waits:
            share = first.agreement.weighting.share("bank_3")
            update = quantise(simulation.updates["bank_3"].vector.values, first.agreement.params, share)[0]
            assert np.abs(update).max() > 1000
            # The order in which a whole batch is added moves each of three updates by a grid step or so.
            assert np.abs(sums[0] - sums[1] - update).max() <= 6


def _read_by_the_server(server: Any, context: RoundContext) -> Any:
    """The opened sum of a round: the server has all that it takes."""
    message, trust = decode_aggregate(server.aggregate(), context, key_id(context.digest)), context.agreement.trust
    assert isinstance(message.total, OnePolynomialVector)
    assert isinstance(trust, ThresholdTrust)
    names = context.agreement.roster.names
    answers = {names.index(name) + 1: answer for name, answer in message.answers.items()}
    return open_sum(message.total, context.digest, answers, summands=len(message.digest.participants), quorum=trust.quorum)


def test_a_round_that_failed_before_the_answers_is_gone_on_from_and_so_is_one_with_fresh_noise(
    model: torch.nn.Module, non_private: Make, private: Make
) -> None:
    options = terms(4, dropouts=1)
    with Simulation(non_private(**options), model) as simulation:
        history = simulation.run(rounds=2, absences=Script(round_0={"bank_0": Stage.UPLOAD, "bank_1": Stage.UPLOAD}))
    assert [summary.record.round for summary in history.rounds] == [1]
    with Simulation(private(**options), model) as simulation:
        first, clients = simulation.encrypted.context(0), simulation.encrypted.participants
        _held(simulation, first, tuple(clients))
        _held(simulation, RoundContext(agreement=first.agreement, round=1, history=first.history), ("bank_0", "bank_1", "bank_2"))
