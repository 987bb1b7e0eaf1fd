"""`EscrowKey` through the engine: the key holder computes the sum itself, and nobody else can open anything."""

from collections.abc import Callable
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
from privfed.agreement import Validator
from privfed.consortium import Consortium
from privfed.engines.local import Simulation, simulate
from privfed.engines.site import HOLDER_NAME
from privfed.errors import (
    AgreementMismatchError,
    AlreadyOpenedError,
    CohortError,
    InvalidMessageError,
    OpeningRefusedError,
    TamperedAggregateError,
    UnsupportedInThisModeError,
)
from privfed.escrow import EscrowHolder
from privfed.he.escrow_secret import EscrowKey
from privfed.he.params import CkksParams
from privfed.he.product_params import ProductParams
from privfed.he.secret import SharedKey
from privfed.identity import Identity
from privfed.release import open_release
from privfed.round import Stage
from privfed.server import Server
from privfed.training.scaffold import Scaffold
from privfed.wire_escrow import decode_opened, encode_request
from tests.engines.test_threshold import Crash, Script, crash

Make = Callable[..., Consortium]


def terms(key: EscrowKey | None = None) -> dict[str, Any]:
    return {"keys": key or EscrowKey.generate(), "params": CkksParams.escrow()}


def test_a_run_gives_the_same_model_as_under_a_shared_key_and_in_a_server_process(model: torch.nn.Module, non_private: Make) -> None:
    models = []
    weights = (0.5, 0.3, 0.2)
    shared = {"keys": SharedKey.generate(), "params": replace(CkksParams.standard(), weight_sum=256)}
    for options, separate in ((terms(), False), (terms(), True), (shared, False)):
        with Simulation(non_private(weights=weights, **options), model, separate_server=separate) as simulation:
            history = simulation.run(rounds=2)
        assert history.grid_error_max == 0
        models.append(history.model.values)
    assert history.mode == "SharedKey"
    assert np.array_equal(models[0], models[1])
    assert np.array_equal(models[0], models[2])


def test_clients_that_fall_silent_before_their_upload_or_at_the_opening_leave_exact_rounds(
    model: torch.nn.Module, non_private: Make
) -> None:
    script = Script(
        round_0={"bank_3": Stage.SETUP},
        round_1={"bank_2": Stage.UPLOAD, "bank_1": Stage.OPENING},
        round_2={"bank_0": Stage.APPROVAL},
    )
    with Simulation(non_private(count=4, **terms()), model) as simulation:
        history = simulation.run(rounds=4, absences=script)
        states = [participant.session.state for participant in simulation.encrypted.participants.values()]
    assert [failed.round for failed in history.failed] == [2]
    assert history.grid_error_max == 0
    assert all(state.rounds == (0, 1, 3) for state in states)


@pytest.mark.parametrize("stop", ["start_uploads", "close", "aggregate", "receive_opened", "result"])
def test_a_run_that_was_killed_goes_on_where_it_stood(
    model: torch.nn.Module, non_private: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: str
) -> None:
    key = EscrowKey.generate()
    whole = simulate(non_private(**terms(key)), model, rounds=1)
    with monkeypatch.context() as patch:
        patch.setattr(Server, stop, crash)
        with pytest.raises(Crash):
            simulate(non_private(**terms(key)), model, rounds=1, directory=tmp_path)
    history = simulate(non_private(**terms(key)), model, rounds=1, directory=tmp_path)
    assert np.array_equal(history.model.values, whole.model.values)
    with pytest.raises(AgreementMismatchError, match="another shared key"):
        simulate(non_private(**terms()), model, rounds=2, directory=tmp_path)


class Halted:
    """A round as the key holder finds it: everybody has approved, and nothing is opened."""

    def __init__(self, simulation: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
        self.encrypted = simulation.encrypted
        with monkeypatch.context() as patch:
            patch.setattr(EscrowHolder, "open", crash)
            with pytest.raises(Crash):
                simulation.run(rounds=1)
        self.context = self.encrypted.context(0)
        server = self.encrypted._server(self.context, tuple(self.encrypted.participants))
        assert isinstance(server, Server)
        self.server = server
        assert self.encrypted.holder is not None
        self.holder = self.encrypted.holder
        self.request = server.aggregate()


@pytest.fixture
def halted(model: torch.nn.Module, non_private: Make, monkeypatch: pytest.MonkeyPatch) -> Any:
    with Simulation(non_private(**terms()), model) as simulation:
        yield Halted(simulation, monkeypatch)


def test_the_holder_opens_the_signed_uploads_and_nothing_that_the_server_puts_in_their_place(halted: Halted) -> None:
    swapped = {"bank_0": "bank_1", "bank_1": "bank_0", "bank_2": "bank_2"}
    damaged = bytearray(halted.server.upload("bank_0"))
    damaged[-1000] ^= 1
    lies: tuple[Callable[[str], bytes], ...] = (
        lambda name: halted.server.upload(swapped[name]),
        lambda name: halted.server.upload("bank_0"),
        lambda name: bytes(damaged) if name == "bank_0" else halted.server.upload(name),
        lambda name: b"",
    )
    for lie in lies:
        with pytest.raises(TamperedAggregateError):
            halted.holder.open(halted.context, halted.request, lie)
    opened = halted.holder.open(halted.context, halted.request, halted.server.upload)
    assert halted.holder.open(halted.context, halted.request, halted.server.upload) == opened


def test_the_holder_opens_one_request_a_round_and_only_with_every_approval(halted: Halted) -> None:
    digest, server = halted.server.close(), halted.encrypted._site.server
    approvals = [halted.encrypted.participants[name].approve(halted.context, digest) for name in halted.encrypted.participants]
    key_id = halted.encrypted.participants["bank_0"].session.key_id(halted.context)
    fewer = encode_request(halted.context, server, digest, approvals[:2], key_id=key_id)
    with pytest.raises(OpeningRefusedError, match=r"missing \['bank_2'\]; nothing was decrypted"):
        halted.holder.open(halted.context, fewer, halted.server.upload)
    halted.holder.open(halted.context, halted.request, halted.server.upload)
    with pytest.raises(AlreadyOpenedError, match="was already opened; nothing was decrypted"):
        halted.holder.open(halted.context, fewer, halted.server.upload)


def test_what_the_holder_publishes_is_read_by_the_clients_and_by_nobody_else(halted: Halted) -> None:
    opened = halted.holder.open(halted.context, halted.request, halted.server.upload)
    session: Any = halted.encrypted.participants["bank_0"].session
    _, message = decode_opened(opened, halted.context, session.key_id(halted.context))
    digest = message.digest.digest(halted.context)
    release: Any = message.total
    numbers = open_release(release, halted.context, session.party, digest=digest)
    other: Any = halted.encrypted.participants["bank_1"].session
    stolen = replace(release, sealed=release.sealed | {"bank_1": release.sealed["bank_0"]})
    for wrong, party, named in (
        (stolen, other.party, digest),
        (release, session.party, bytes(32)),
        (replace(release, ciphertext=release.ciphertext[:-1]), session.party, digest),
    ):
        with pytest.raises(InvalidMessageError):
            open_release(wrong, halted.context, party, digest=named)
    # The server stores it, and the numbers are not in it.
    halted.server.receive_opened(opened)
    stored = b"".join(path.read_bytes() for path in halted.encrypted._site.server_identity_path.parent.rglob("*") if path.is_file())
    largest = halted.context.agreement.params.largest_sum
    assert (numbers[:8] + largest).astype("<u8").view(np.uint8).reshape(-1, 8)[:, :5].tobytes() not in stored


def test_a_release_that_the_holder_did_not_sign_is_refused_by_server_and_clients(halted: Halted) -> None:
    with pytest.raises(CohortError, match="the key holder has not opened round 0"):
        halted.server.result()
    opened = halted.holder.open(halted.context, halted.request, halted.server.upload)
    damaged = bytearray(opened)
    damaged[-70] ^= 1
    with pytest.raises(InvalidMessageError):
        halted.server.receive_opened(bytes(damaged))
    with pytest.raises(InvalidMessageError):
        halted.encrypted.participants["bank_0"].open(halted.context, bytes(damaged))
    halted.server.receive_opened(opened)
    halted.server.receive_opened(opened)
    assert halted.server.result() == opened
    halted.encrypted.participants["bank_0"].open(halted.context, opened)
    with pytest.raises(CohortError, match="'stranger' is not in the digest"):
        halted.server.upload("stranger")


def test_one_client_together_with_the_server_cannot_open_an_upload(halted: Halted) -> None:
    """They hold the public key, the uploads and the client's decryption key; under a shared key the same pair reads every update."""
    from privfed.he.escrow import WholeVector
    from privfed.wire import decode_upload

    session: Any = halted.encrypted.participants["bank_0"].session
    held = [path.read_bytes() for path in halted.encrypted._site.client("bank_0").rglob("*") if path.is_file()]
    held += [path.read_bytes() for path in halted.encrypted._site.server_identity_path.parent.rglob("*") if path.is_file()]
    holder: Any = halted.holder
    assert not any(holder._key._secret in data for data in held)
    vector = decode_upload(halted.server.upload("bank_1"), halted.context, session.key_id(halted.context)).vector
    assert isinstance(vector, WholeVector)
    assert not hasattr(session._trust, "open_sum")
    with pytest.raises(ValueError, match="share a key"):
        session.round_key(halted.context)


def test_another_holder_than_the_agreed_one_is_refused(halted: Halted, tmp_path: Path) -> None:
    agreement = halted.context.agreement
    with pytest.raises(AgreementMismatchError, match="pins another key holder"):
        EscrowHolder(identity=Identity.generate("other"), key=EscrowKey.generate(), agreement=agreement, directory=tmp_path / "other")
    trust: Any = agreement.trust
    with pytest.raises(ValueError, match="beside the server and the clients"):
        replace(agreement, trust=replace(trust, holder=agreement.roster.server))
    with pytest.raises(ValueError, match="expected a public key of 57344 bytes"):
        replace(agreement, trust=replace(trust, public_key=b"short"))
    with pytest.raises(UnsupportedInThisModeError, match="these parameters are for EscrowKey"):
        replace(agreement, trust=None)
    from privfed.agreement import decode_agreement, encode_agreement

    assert decode_agreement(encode_agreement(agreement)).digest == agreement.digest
    other = replace(agreement, trust=replace(trust, holder=Identity.generate("other").public))
    assert [part for part in agreement.parts if agreement.parts[part] != other.parts[part]] == ["trust mode"]


def test_a_consortium_takes_the_parameters_of_the_mode_and_of_the_rule(model: torch.nn.Module, non_private: Make) -> None:
    with pytest.raises(UnsupportedInThisModeError, match="take CkksParams.escrow"):
        non_private(keys=EscrowKey.generate())
    with pytest.raises(UnsupportedInThisModeError, match="these parameters cannot compute; nothing was started; take ProductParams.escrow"):
        non_private(count=5, rule=MultiKrum(byzantine=1, keep=3), **terms())
    for params in (ProductParams.exact(), ProductParams.sketched()):
        with pytest.raises(UnsupportedInThisModeError, match=r"nothing was agreed; take .* ProductParams.escrow"):
            non_private(count=5, rule=MultiKrum(byzantine=1, keep=3), **terms() | {"params": params})
    validator = Validator(name="bank_0", commitment=bytes(32), public=True)
    with pytest.raises(ValueError, match="a rule that needs a reference"):
        non_private(validator=validator, **terms())
    with pytest.raises(TypeError, match="got the class EscrowKey"):
        non_private(**terms() | {"keys": EscrowKey})
    consortium = non_private(**terms())
    assert consortium.mode == "EscrowKey"
    renamed = [replace(consortium.clients[0], name=HOLDER_NAME), *consortium.clients[1:]]
    with pytest.raises(ValueError, match="which is the key holder's"):
        simulate(replace(consortium, clients=renamed), model, rounds=1)


def test_a_session_with_a_key_holder_takes_a_rule_that_looks_at_inner_products_with_its_own_parameters_alone(halted: Halted) -> None:
    agreement = halted.context.agreement
    validator = Validator(name="bank_0", commitment=bytes(32), public=True)
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"rule": MultiKrum(byzantine=0, keep=3)}, r"cannot multiply ciphertexts; no session was made; take ProductParams.escrow"),
        ({"rule": MultiKrum(byzantine=0, keep=3), "params": ProductParams.exact()}, r"nothing was agreed; take .* ProductParams.escrow"),
        ({"rule": FLTrust(), "params": ProductParams.sketched(), "validator": validator}, r"take .* ProductParams.escrow"),
        (
            {"trust": None, "params": ProductParams.escrow()},
            r"these parameters are for EscrowKey; nothing was agreed; take ProductParams.exact",
        ),
    )
    for changes, words in refused:
        with pytest.raises(UnsupportedInThisModeError, match=words):
            replace(agreement, **changes)
    with pytest.raises(ValueError, match="expected no validator beside"):
        replace(agreement, validator=validator)


@pytest.mark.parametrize("optimizer", [FedAdam(learning_rate=0.05), ServerSgd(learning_rate=0.7, momentum=0.5)], ids=["FedAdam", "FedAvgM"])
def test_every_client_applies_the_server_optimiser_to_what_the_key_holder_published(
    model: torch.nn.Module, non_private: Make, tmp_path: Path, optimizer: ServerOptimizer
) -> None:
    """The key holder has no model: the clients move theirs, all to the same weights, and as under a shared key; also after a restart."""
    key, shared = EscrowKey.generate(), {"keys": SharedKey.generate(), "params": replace(CkksParams.standard(), weight_sum=256)}
    expected = simulate(non_private(server_optimizer=optimizer, **shared), model, rounds=3)
    simulate(non_private(server_optimizer=optimizer, **terms(key)), model, rounds=1, directory=tmp_path)
    with Simulation(non_private(server_optimizer=optimizer, **terms(key)), model, directory=tmp_path) as simulation:
        history = simulation.run(rounds=3, absences=Script(round_1={"bank_2": Stage.OPENING}))
        states = [participant.session.state for participant in simulation.encrypted.participants.values()]
    assert np.array_equal(history.model.values, expected.model.values)
    assert all(np.array_equal(state.values.values, expected.model.values) for state in states)
    assert not np.array_equal(history.model.values, simulate(non_private(**terms()), model, rounds=3).model.values)


def test_private_weights_and_scaffold_work_with_a_key_holder(model: torch.nn.Module, non_private: Make) -> None:
    private = non_private(weights=(3, 2, 1), private_weights=PrivateWeights(largest=4), **terms())
    assert simulate(private, model, rounds=1).grid_error_max == 0
    scaffold = non_private(correction=Scaffold(clients=3), **terms())
    assert simulate(scaffold, model, rounds=2).grid_error_max == 0


def test_ledgers_are_countersigned_in_rounds_with_a_key_holder(model: torch.nn.Module, private: Make) -> None:
    consortium = private(**terms())
    history = simulate(consortium, model, rounds=2)
    assert history.grid_error_max == 0
