"""Rules that look at inner products in `EscrowKey` mode: the key holder multiplies, chooses and opens, and nobody else sees a score."""

import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from privfed import escrow
from privfed.aggregation.robust import FLTrust, GeometricMedian, NormBound
from privfed.aggregation.rules import MultiKrum
from privfed.agreement import NamedRule, Validator
from privfed.consortium import Consortium, Plaintext
from privfed.contribution.cosine import Cgsv
from privfed.contribution.scores import Scores, ScoreStore
from privfed.contribution.trajectory import FedTsv
from privfed.decision import Decision, Fallback
from privfed.engines.local import Simulation, simulate
from privfed.errors import (
    AgreementMismatchError,
    AlreadyOpenedError,
    CohortError,
    DamagedFileError,
    InvalidMessageError,
    OpeningRefusedError,
    RoundSkippedError,
    TamperedAggregateError,
    UnsupportedInThisModeError,
)
from privfed.escrow import EscrowHolder
from privfed.he.escrow_secret import AttemptKey, EscrowKey
from privfed.he.product_params import ProductParams
from privfed.policy import OpeningPolicy
from privfed.release import seal_release
from privfed.report.tables import traffic
from privfed.round_record import Stage
from privfed.wire_aggregate import SealedSum
from privfed.wire_escrow import Chosen, encode_opened, encode_request, read_opened, weighing
from privfed.written_agreement import decode_agreement, encode_agreement
from tests.engines.test_escrow import Halted
from tests.engines.test_threshold import Crash, Script

Make = Callable[..., Consortium]
PARAMS = ProductParams.escrow(bound=2.0)
VALIDATOR = Validator(name="bank_5", commitment=Validator.commit(b"public records", salt=bytes(32)), public=True)
RULES: list[tuple[Any, Validator | None]] = [
    (MultiKrum(byzantine=1, keep=3), None),
    (GeometricMedian(), None),
    (NormBound(max_norm=0.3), None),
    (Cgsv(), None),
    (FedTsv(), VALIDATOR),
    (FLTrust(), VALIDATOR),
]
NAMES = tuple(f"bank_{index}" for index in range(6))


@pytest.fixture
def six(non_private: Make) -> Make:
    def make(**options: Any) -> Consortium:
        return non_private(**({"count": 6, "params": PARAMS, "keys": EscrowKey.generate()} | options))

    return make


def crash(*_: object, **__: object) -> None:
    raise Crash


def scores_at(run: Path, rule: Any) -> Scores:
    return ScoreStore(run / "key_holder" / "scores.json", rule=rule.name).load()


@pytest.mark.parametrize(("rule", "validator"), RULES, ids=lambda value: str(getattr(value, "name", ""))[:20])
def test_a_run_with_a_key_holder_is_the_run_in_the_clear(
    model: torch.nn.Module, six: Make, rule: Any, validator: Any, tmp_path: Path
) -> None:
    """The same coefficients, the same scores but for 1e-6 of the largest, and a model off by no more than norms are rounded by."""
    rounds = 2 if rule in (Cgsv(), FedTsv()) else 1
    encrypted = simulate(six(rule=rule, validator=validator), model, rounds=rounds, directory=tmp_path / "run")
    with Simulation(six(rule=rule, validator=validator, keys=Plaintext()), model) as simulation:
        clear = simulation.run(rounds=rounds)
        scores = dict(simulation._rounds.state.scores)  # type: ignore[attr-defined]
    for sealed, plain in zip(encrypted.rounds, clear.rounds, strict=True):
        assert dict(sealed.record.coefficients) == dict(plain.record.coefficients)
        assert sealed.grid_error_max == 0
        assert (sealed.record.disclosed, sealed.record.assurance, sealed.record.fallback) == (21, "RECOMPUTED", "NONE")
        assert sealed.record.bytes_scoring == 0
    np.testing.assert_allclose(encrypted.model.values, clear.model.values, rtol=0, atol=1e-6)
    stored = scores_at(tmp_path / "run", rule)
    assert set(stored.values) == set(scores)
    if scores:
        assert max(abs(stored.values[name] - score) for name, score in scores.items()) <= 1e-6 * max(map(abs, scores.values()))
        assert stored.rounds == (0, 1)
    # Scores are the key holder's: neither a client nor the server has a file of them, or products.
    others = [path.name for folder in ("clients", "server") for path in (tmp_path / "run" / folder).rglob("*")]
    assert not [name for name in others if "scores" in name or "product" in name]


def test_a_server_process_knows_the_rule_by_name_and_holds_the_same_round(model: torch.nn.Module, six: Make) -> None:
    with Simulation(six(rule=MultiKrum(byzantine=1, keep=3)), model, separate_server=True) as simulation:
        history = simulation.run(rounds=1)
    assert sorted(history.rounds[0].record.coefficients.values()) == [0, 0, 0, 1, 1, 1]
    sentences = traffic(history)
    assert "the key holder multiplied the signed uploads itself and opened 21 inner products in 1 rounds" in sentences
    assert "server" not in sentences


def test_an_interrupted_run_goes_on_with_the_scores_at_the_holder(model: torch.nn.Module, six: Make, tmp_path: Path) -> None:
    consortium = six(count=3, rule=Cgsv())
    simulate(consortium, model, rounds=1, directory=tmp_path / "run")
    resumed = simulate(consortium, model, rounds=2, directory=tmp_path / "run")
    whole = simulate(six(count=3, rule=Cgsv()), model, rounds=2, directory=tmp_path / "whole")
    assert [dict(s.record.coefficients) for s in resumed.rounds] == [dict(s.record.coefficients) for s in whole.rounds]
    assert scores_at(tmp_path / "run", Cgsv()) == scores_at(tmp_path / "whole", Cgsv())
    assert np.array_equal(resumed.model.values, whole.model.values)


def test_a_client_that_missed_a_scored_round_takes_it_over_later(model: torch.nn.Module, six: Make) -> None:
    with Simulation(six(rule=GeometricMedian()), model) as simulation:
        history = simulation.run(rounds=2, absences=Script(round_0={"bank_1": Stage.OPENING}))
        states = [participant.session.state for participant in simulation.encrypted.participants.values()]
    assert all(np.array_equal(state.values.values, history.model.values) and state.rounds == (0, 1) for state in states)


def test_a_round_without_allowed_weights_is_skipped_and_the_next_one_is_held(model: torch.nn.Module, six: Make, monkeypatch: Any) -> None:
    calls: list[Mapping[str, int]] = []
    real = OpeningPolicy.check_chosen

    def once(self: OpeningPolicy, coefficients: Mapping[str, int]) -> None:
        calls.append(coefficients)
        real(OpeningPolicy(min_effective_clients=100.0) if len(calls) == 1 else self, coefficients)

    monkeypatch.setattr(OpeningPolicy, "check_chosen", once)
    history = simulate(six(count=3, rule=GeometricMedian()), model, rounds=2)
    assert [lost.round for lost in history.failed] == [0]
    assert "no aggregate was opened" in history.failed[0].reason
    assert [summary.record.round for summary in history.rounds] == [1]


def test_the_weights_before_are_taken_where_the_policy_does_not_allow_the_new_ones(
    model: torch.nn.Module, six: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Mapping[str, int]] = []
    real = OpeningPolicy.check_chosen

    def eighth(self: OpeningPolicy, coefficients: Mapping[str, int]) -> None:
        calls.append(coefficients)
        # In each round the key holder checks, and then each of six clients.
        real(OpeningPolicy(min_effective_clients=100.0) if len(calls) == 8 else self, coefficients)

    monkeypatch.setattr(OpeningPolicy, "check_chosen", eighth)
    first, second, third = (summary.record for summary in simulate(six(rule=FedTsv(), validator=VALIDATOR), model, rounds=3).rounds)
    assert [record.fallback for record in (first, second, third)] == ["NONE", "PREVIOUS", "NONE"]
    assert dict(second.coefficients) == dict(first.coefficients) != dict(third.coefficients)
    assert second.disclosed == 21


def test_a_run_whose_every_round_would_single_out_a_client_opens_no_aggregate(
    model: torch.nn.Module, six: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AttemptKey, "open_sum", crash)
    consortium = six(count=3, rule=GeometricMedian(), policy=OpeningPolicy(min_effective_clients=3.0))
    with pytest.raises(CohortError, match="none of 1 rounds could be held"):
        simulate(consortium, model, rounds=1)
    with pytest.raises(UnsupportedInThisModeError, match="would open a mean of 1"):
        six(rule=MultiKrum(byzantine=1, keep=1))
    with pytest.raises(UnsupportedInThisModeError, match="name a validator"):
        six(rule=FedTsv())


# ---- the key holder


@pytest.fixture
def halted(model: torch.nn.Module, six: Make, monkeypatch: pytest.MonkeyPatch) -> Any:
    with Simulation(six(rule=Cgsv()), model) as simulation:
        yield Halted(simulation, monkeypatch)


def open_at(halted: Halted, request: bytes | None = None, upload: Callable[[str], bytes] | None = None) -> bytes:
    return halted.holder.open(halted.context, request or halted.request, upload or halted.server.upload)


def restarted(halted: Halted) -> None:
    holder: Any = halted.holder
    site = halted.encrypted._site
    assert site.holder is not None
    halted.holder = EscrowHolder(identity=site.holder, key=holder._key, agreement=site.agreement, directory=site.holder_folder)


def other_request(halted: Halted) -> bytes:
    """With every approval too, in other bytes: the approvals of a ledgerless session may be signed anew."""
    digest, names = halted.server.close(), tuple(halted.encrypted.participants)
    approvals = [halted.encrypted.participants[name].approve(halted.context, digest) for name in names]
    key_id = halted.encrypted.participants["bank_0"].session.key_id(halted.context)
    commitments = halted.server.relay("bank_0")
    return encode_request(halted.context, halted.encrypted._site.server, digest, approvals[:-1], commitments=commitments, key_id=key_id)


def test_inner_products_are_opened_with_every_approval_and_on_record_before(halted: Halted, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(escrow, "open_escrowed_products", crash)
        with pytest.raises(OpeningRefusedError, match=r"missing \['bank_5'\]; nothing was decrypted"):
            open_at(halted, other_request(halted))
        with pytest.raises(Crash):
            open_at(halted)
    holder: Any = halted.holder
    digest = read_opened(open_at(halted), halted.context, halted.key_id).message.digest.digest(halted.context)
    with pytest.raises(AlreadyOpenedError, match="were already opened"):
        holder._journal.begin_products(halted.context, digest, products=bytes(32))


def test_a_second_opening_of_inner_products_is_refused_also_after_a_crash_in_the_first(
    halted: Halted, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = other_request(halted)
    with monkeypatch.context() as patch:
        patch.setattr(escrow, "check_all_approved", lambda message: None)
        patch.setattr(escrow, "open_escrowed_products", crash)
        with pytest.raises(Crash):
            open_at(halted)
        restarted(halted)
        with pytest.raises(AlreadyOpenedError, match="others than these; nothing was decrypted"):
            open_at(halted, asked)
    open_at(halted)
    with pytest.raises(AlreadyOpenedError, match="was already opened; nothing was decrypted"):
        open_at(halted, asked)


def test_a_holder_that_is_restarted_between_inner_products_and_aggregate_goes_on_with_what_it_decided(
    halted: Halted, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = halted.encrypted._site.holder_folder
    with monkeypatch.context() as patch:
        patch.setattr(AttemptKey, "open_sum", crash)
        with pytest.raises(Crash):
            open_at(halted)
    assert not (folder / "scores.json").exists()  # the scores are those of rounds that were opened
    restarted(halted)
    with monkeypatch.context() as patch:
        patch.setattr(escrow, "open_escrowed_products", crash)
        patch.setattr(escrow, "decide", crash)
        # And once more, after the scores and before the message.
        with monkeypatch.context() as again:
            again.setattr(escrow, "encode_opened", crash)
            with pytest.raises(Crash):
                open_at(halted)
        before = ScoreStore(folder / "scores.json", rule=Cgsv().name).load()
        restarted(halted)
        opened = open_at(halted)
    assert ScoreStore(folder / "scores.json", rule=Cgsv().name).load() == before
    assert before.rounds == (0,)
    restarted(halted)
    assert open_at(halted) == opened
    halted.server.receive_opened(opened)
    for participant in halted.encrypted.participants.values():
        participant.open(halted.context, halted.server.result())
    assert halted.server.next_history() == halted.encrypted.participants["bank_0"].session.state.history


def test_a_holder_whose_scores_or_journal_were_lost_or_set_back_does_nothing(halted: Halted) -> None:
    folder = halted.encrypted._site.holder_folder
    older = (folder / "journal.sqlite").read_bytes()
    open_at(halted)
    restarted(halted)
    scores, journal = (folder / "scores.json").read_bytes(), (folder / "journal.sqlite").read_bytes()
    (folder / "scores.json").unlink()
    with pytest.raises(DamagedFileError, match="do not hold the same rounds: one of them is an older copy or was lost; nothing was done"):
        restarted(halted)
    (folder / "scores.json").write_bytes(scores)
    (folder / "journal.sqlite").write_bytes(older)
    with pytest.raises(DamagedFileError, match="do not hold the same rounds"):
        restarted(halted)
    (folder / "journal.sqlite").write_bytes(journal)
    restarted(halted)


def test_pairs_of_other_uploads_than_the_signed_ones_are_never_multiplied(halted: Halted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(escrow, "open_escrowed_products", crash)
    upload = halted.server.upload
    damaged = bytearray(upload("bank_0"))
    damaged[-1000] ^= 1
    swapped = {"bank_0": "bank_1", "bank_1": "bank_0"}
    lies: tuple[Callable[[str], bytes], ...] = (
        lambda name: upload(swapped.get(name, name)),
        lambda name: upload("bank_0"),
        lambda name: bytes(damaged) if name == "bank_0" else upload(name),
        lambda name: b"",
    )
    for lie in lies:
        with pytest.raises(TamperedAggregateError):
            open_at(halted, upload=lie)
    with pytest.raises(Crash):
        open_at(halted)
    # The server has no products to lie about, and no coefficients.
    with pytest.raises(UnsupportedInThisModeError, match="needs no inner products; nothing was multiplied"):
        halted.server.products()


def test_the_server_sees_coefficients_and_neither_scale_nor_scores(halted: Halted) -> None:
    holder: Any = halted.holder
    opened = open_at(halted)
    digest = read_opened(opened, halted.context, halted.key_id).message.digest
    decision = Decision.from_bytes(holder._journal.decision(halted.context, digest.digest(halted.context)))
    assert decision.assurance == "RECOMPUTED"
    halted.server.receive_opened(opened)
    assert halted.server.coefficients() == dict(decision.coefficients)
    assert sum(decision.coefficients.values()) == PARAMS.weight_sum
    stored = b"".join(path.read_bytes() for path in halted.encrypted._site.server_identity_path.parent.rglob("*") if path.is_file())
    private = [*decision.scores.values(), decision.scale]
    assert len(private) == 7
    assert not any(struct.pack(order, number) in stored for number in private for order in (">d", "<d"))
    found = weighing(opened, halted.context, halted.key_id)
    assert found is not None
    assert (found.fallback, found.disclosed, found.assurance) == (Fallback.NONE, 21, "RECOMPUTED")


def published(halted: Halted, coefficients: tuple[int, ...], fallback: Fallback = Fallback.NONE, scale: float | None = 1.0) -> bytes:
    """What a key holder signs that opens with coefficients of its own."""
    holder: Any = halted.holder
    message = read_opened(open_at(halted), halted.context, halted.key_id).message
    final = replace(message.digest, coefficients=coefficients)
    grid = np.zeros(halted.context.agreement.sent_layout.size, np.int64)
    release = seal_release(grid, halted.context, holder._trust, digest=final.digest(halted.context), scale=scale)
    if fallback is Fallback.SKIPPED:
        release = SealedSum(sealed={}, ciphertext=b"")
    chosen = Chosen(coefficients=coefficients, fallback=fallback)
    terms: dict[str, Any] = {"key_id": halted.key_id, "chosen": chosen}
    return encode_opened(halted.context, holder._identity, halted.request, release, **terms)


def test_clients_refuse_what_a_key_holder_opened_for_a_single_client(halted: Halted) -> None:
    client = halted.encrypted.participants["bank_0"]
    for coefficients in ((1024, 0, 0, 0, 0, 0), (512, 512, 0, 0, 0, 0), (1000, 6, 6, 6, 6, 0)):
        with pytest.raises(OpeningRefusedError, match="nothing was opened"):
            client.open(halted.context, published(halted, coefficients))
    with pytest.raises(OpeningRefusedError, match="is skipped"):
        client.open(halted.context, published(halted, (0,) * 6, Fallback.SKIPPED))
    assert client.opened_rounds() == ()
    client.open(halted.context, published(halted, (1,) * 6))
    assert client.opened_rounds() == (0,)


def test_a_key_holders_message_that_says_nothing_clear_is_refused(halted: Halted) -> None:
    client = halted.encrypted.participants["bank_0"]
    for coefficients, fallback in (((1,) * 6, Fallback.SKIPPED), ((0,) * 6, Fallback.NONE), ((1024, 1, 0, 0, 0, 0), Fallback.NONE)):
        with pytest.raises(InvalidMessageError):
            client.open(halted.context, published(halted, coefficients, fallback))
    # A client that has begun with one message takes no other: one client for each.
    for name, scale in zip(NAMES, (None, 0.0, -1.0, float("nan"), float("inf")), strict=False):
        with pytest.raises(InvalidMessageError):
            halted.encrypted.participants[name].open(halted.context, published(halted, (1,) * 6, scale=scale))
    holder: Any = halted.holder
    nothing = SealedSum(sealed={}, ciphertext=b"")
    with pytest.raises(ValueError, match="what a rule chose in a scored session"):
        encode_opened(halted.context, holder._identity, halted.request, nothing, key_id=halted.key_id)
    good = published(halted, (1,) * 6)
    skipped = published(halted, (0,) * 6, Fallback.SKIPPED)
    for data in (good, skipped):
        read_opened(data, halted.context, halted.key_id)
        for place in (60, len(data) // 2, len(data) - 100):
            flipped = bytearray(data)
            flipped[place] ^= 1
            with pytest.raises(InvalidMessageError):
                read_opened(bytes(flipped), halted.context, halted.key_id)


def test_a_reference_that_a_key_holder_opened_is_refused(model: torch.nn.Module, six: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with Simulation(six(rule=FLTrust(), validator=VALIDATOR), model) as simulation:
        halted = Halted(simulation, monkeypatch)
        client = halted.encrypted.participants["bank_0"]
        with pytest.raises(OpeningRefusedError, match="the reference has a share in the aggregate"):
            client.open(halted.context, published(halted, (1,) * 6))
        client.open(halted.context, published(halted, (1, 1, 1, 1, 1, 0)))


def test_a_skipped_round_is_skipped_at_the_server_and_stays_skipped_at_the_holder(halted: Halted, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: OpeningPolicy, coefficients: Mapping[str, int]) -> None:
        raise OpeningRefusedError("too few; nothing was opened")

    with monkeypatch.context() as patch:
        patch.setattr(OpeningPolicy, "check_chosen", refuse)
        opened = open_at(halted)
    assert open_at(halted) == opened
    halted.server.receive_opened(opened)
    with pytest.raises(RoundSkippedError, match="the key holder found no weights that the policy allows"):
        halted.server.coefficients()
    assert not (halted.encrypted._site.holder_folder / "scores.json").exists()


def test_a_holder_that_knows_the_rule_by_name_alone_is_refused(halted: Halted, tmp_path: Path) -> None:
    site: Any = halted.encrypted._site
    read = decode_agreement(encode_agreement(site.agreement))
    assert read.digest == site.agreement.digest
    assert isinstance(read.rule, NamedRule)
    with pytest.raises(AgreementMismatchError, match="by name alone; nothing was done; put the rule in its place"):
        EscrowHolder(identity=site.holder, key=EscrowKey.generate(), agreement=read, directory=tmp_path / "other")
    assert not (tmp_path / "other").exists()
