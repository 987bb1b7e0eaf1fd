"""The frame, over every kind of message: what is not authentic is refused in one way, what is authentic and foreign in another."""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from privfed import message
from privfed.aggregation.rules import FedAvg
from privfed.agreement import RoundContext
from privfed.digest import hash_message
from privfed.errors import (
    AgreementMismatchError,
    HistoryMismatchError,
    InvalidMessageError,
    LayoutMismatchError,
    ParametersMismatchError,
    PrivFedError,
    RoundMismatchError,
)
from privfed.he.escrow import public_key_id
from privfed.he.params import CkksParams
from privfed.he.threshold import key_id as threshold_key_id
from privfed.identity import SIGNATURE_BYTES, Identity, PublicIdentity, Roster
from privfed.message import MAX_FRAME_BYTES, Kind, Reader, attach, detach, seal, write_text
from privfed.policy import OpeningPolicy
from privfed.update import Layout
from privfed.wire import decode_abort, decode_setup, decode_upload, encode_abort, encode_setup
from privfed.wire_aggregate import decode_aggregate
from privfed.wire_commit import decode_commitment, decode_commitments, encode_commitment, encode_commitments
from privfed.wire_digest import decode_approval, decode_digest
from privfed.wire_escrow import decode_holder_key, decode_opened, decode_request, encode_request
from privfed.wire_products import decode_coefficients, decode_products
from privfed.wire_shares import decode_relay, decode_share, encode_relay, encode_share, sealed_share_bytes
from tests.holders import HeldRound

FROM_SERVER = (Kind.DIGEST, Kind.AGGREGATE, Kind.SHARES, Kind.REQUEST, Kind.COMMITS)
# A key holder speaks in sessions that have one: the same people have such a session, too.
FROM_HOLDER = (Kind.HOLDER_KEY, Kind.OPENED)
# Those of scored rounds are refused in the sessions here; in their own they are tested in tests/test_scorer.py.
ELSEWHERE = (Kind.PRODUCTS, Kind.COEFFICIENTS)
ALL = [kind for kind in Kind if kind not in ELSEWHERE]
KINDS = pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.name)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """One authentic message of each kind, and what the receiver of each calls."""

    context: RoundContext
    messages: Mapping[Kind, bytes]
    signers: Mapping[Kind, Identity]
    other_client: Identity
    key_id: bytes
    digest: Any
    held: HeldRound

    def context_of(self, kind: Kind) -> RoundContext:
        return self.held.context if kind in FROM_HOLDER else self.context

    def decode(self, kind: Kind, data: bytes, context: RoundContext | None = None) -> object:
        context = context or self.context_of(kind)
        decoders: dict[Kind, Callable[[], object]] = {
            Kind.SETUP: lambda: decode_setup(data, context),
            Kind.UPLOAD: lambda: decode_upload(data, context, self.key_id),
            Kind.DIGEST: lambda: decode_digest(data, context, self.key_id),
            Kind.APPROVAL: lambda: decode_approval(data, context, self.digest),
            Kind.AGGREGATE: lambda: decode_aggregate(data, context, self.key_id),
            Kind.ABORT: lambda: decode_abort(data, context, self.key_id),
            Kind.PRODUCTS: lambda: decode_products(data, context, self.key_id),
            Kind.COEFFICIENTS: lambda: decode_coefficients(data, context, self.digest),
            Kind.SHARE: lambda: decode_share(data, context),
            Kind.SHARES: lambda: decode_relay(data, context),
            Kind.REQUEST: lambda: decode_request(data, context, self.key_id),
            Kind.COMMIT: lambda: decode_commitment(data, context, self.key_id),
            Kind.COMMITS: lambda: decode_commitments(data, context, self.key_id),
            Kind.HOLDER_KEY: lambda: decode_holder_key(data, context),
            Kind.OPENED: lambda: decode_opened(data, context, self.key_of(Kind.OPENED)),
        }
        return decoders[kind]()

    def key_of(self, kind: Kind) -> bytes:
        """Shares belong to no key that clients have in common, and name their round instead; what a holder says, to its own key."""
        if kind in FROM_HOLDER:
            return public_key_id(self.held.public_key)
        return threshold_key_id(self.context.digest) if kind in (Kind.SHARE, Kind.SHARES) else self.key_id

    def resigned(self, kind: Kind, body: bytes, signer: Identity | None = None) -> bytes:
        return body + (signer or self.signers[kind]).sign(body)


# Module-wide: 'meet' is per test, and a round costs more than any of these tests.
@pytest.fixture(scope="module", params=[{}, {"bank_00": "accounts", "bank_01": "cards"}], ids=["no ledgers", "ledgers"])
def traffic(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, people: Any) -> Traffic:
    parties = people.meet(tmp_path_factory.mktemp("traffic"), count=3, populations=request.param)
    joint = parties.round(5, attempt=2)
    setup = [joint.setup_message(name) for name in parties.clients]
    aggregate = joint.run()
    key_id = joint.new_key().key_id
    announced = joint.server.close()
    bank = parties.clients["bank_00"]
    approvals = [joint.approve(name, announced) for name in parties.clients]
    share = encode_share(joint.context, bank, recipient="bank_01", sealed=bytes(sealed_share_bytes(joint.context)))
    commits = {
        name: encode_commitment(joint.context, identity, hash_message(joint.uploads[name]), key_id=key_id)
        for name, identity in parties.clients.items()
    }
    commitments = encode_commitments(joint.context, parties.server, commits, key_id=key_id)
    held = HeldRound(parties.agreement, parties.server, tuple(parties.clients.values()), round=5, attempt=2)
    signers = {kind: parties.server if kind in FROM_SERVER else bank for kind in ALL}
    return Traffic(
        context=joint.context,
        messages={
            Kind.SETUP: setup[0],
            Kind.UPLOAD: joint.uploads["bank_00"],
            Kind.DIGEST: announced,
            Kind.APPROVAL: joint.approve("bank_00", announced),
            Kind.AGGREGATE: aggregate,
            Kind.ABORT: encode_abort(joint.context, bank, key_id),
            Kind.SHARE: share,
            Kind.SHARES: encode_relay(joint.context, parties.server, {"bank_00": share}),
            Kind.REQUEST: encode_request(joint.context, parties.server, announced, approvals, commitments=commitments, key_id=key_id),
            Kind.COMMIT: commits["bank_00"],
            Kind.COMMITS: commitments,
            **{kind: held.messages[kind] for kind in FROM_HOLDER},
        },
        signers=signers | dict.fromkeys(FROM_HOLDER, held.holder),
        other_client=parties.clients["bank_01"],
        key_id=key_id,
        digest=decode_digest(announced, joint.context, key_id),
        held=held,
    )


def body_of(data: bytes) -> bytes:
    return data[:-SIGNATURE_BYTES]


def some_positions(data: bytes) -> list[int]:
    """Every position of the header, the signature and the edges; of a long payload a spread that a hole would have to dodge."""
    if len(data) < 3000:
        return list(range(len(data)))
    return sorted({*range(600), *range(len(data) - 600, len(data)), *range(600, len(data), 211)})


def test_a_message_has_the_bytes_that_the_format_says(traffic: Traffic) -> None:
    agreement = traffic.context.agreement
    name, versions = b"bank_00", agreement.params.versions.encode()
    hints = agreement.roster.digest, agreement.params.digest, agreement.layout.digest, agreement.start
    body = (
        b"privfed\0\x02\x01" + bytes([len(name)]) + name + b"session of tests" + struct.pack(">II", 5, 2) + bytes(32)
        + agreement.digest + b"".join(hint[:4] for hint in hints)
        + agreement.parts["weights"][:4] + agreement.parts["rule"][:4] + agreement.parts["policy"][:4]
        + agreement.parts["populations"][:4] + agreement.parts["silo noise"][:4]
        + agreement.parts["private weights"][:4] + agreement.parts["trust mode"][:4]
        + traffic.key_id
        + bytes([len(versions)]) + versions + bytes(8)
    )  # fmt: skip
    assert traffic.messages[Kind.SETUP] == traffic.resigned(Kind.SETUP, body)


@KINDS
def test_an_authentic_message_is_accepted(traffic: Traffic, kind: Kind) -> None:
    traffic.decode(kind, traffic.messages[kind])


@KINDS
def test_a_flipped_bit_anywhere_is_refused(traffic: Traffic, kind: Kind) -> None:
    original = traffic.messages[kind]
    for position in some_positions(original):
        data = bytearray(original)
        data[position] ^= 1 << (position % 8)
        with pytest.raises(InvalidMessageError):
            traffic.decode(kind, bytes(data))


@KINDS
def test_a_truncated_or_extended_message_is_refused(traffic: Traffic, kind: Kind) -> None:
    original = traffic.messages[kind]
    for length in some_positions(original):
        with pytest.raises(InvalidMessageError):
            traffic.decode(kind, original[:length])
    for extended in (original + b"\0", b"\0" + original, original + original, original + bytes(SIGNATURE_BYTES)):
        with pytest.raises(InvalidMessageError):
            traffic.decode(kind, extended)


@KINDS
def test_a_message_with_another_senders_name_is_refused_whoever_signs_it(traffic: Traffic, kind: Kind) -> None:
    signer = traffic.signers[kind]
    body = body_of(traffic.messages[kind])
    start = len(b"privfed\0") + 2
    with pytest.raises(InvalidMessageError):  # signed by another pinned client in the name of the sender
        traffic.decode(kind, traffic.resigned(kind, body, traffic.other_client))
    for name in (traffic.other_client.name, "stranger", "", "\xff"):
        encoded = name.encode("latin-1")
        renamed = body[:start] + bytes([len(encoded)]) + encoded + body[start + 1 + len(signer.name) :]
        with pytest.raises(InvalidMessageError):  # signed by the sender in the name of another
            traffic.decode(kind, traffic.resigned(kind, renamed))


@KINDS
def test_nobody_speaks_in_the_place_of_client_server_or_key_holder(traffic: Traffic, kind: Kind) -> None:
    wrong = traffic.other_client if kind in FROM_SERVER else traffic.signers[Kind.DIGEST]
    with pytest.raises(ValueError, match=f"pins for {kind.name}"):
        seal(traffic.context_of(kind), wrong, kind, key_id=traffic.key_id, payload=b"")
    body = body_of(traffic.messages[kind])
    start = len(b"privfed\0") + 2
    renamed = body[:start] + write_text(wrong.name) + body[start + 1 + len(traffic.signers[kind].name) :]
    with pytest.raises(InvalidMessageError):
        traffic.decode(kind, traffic.resigned(kind, renamed, wrong))


@KINDS
def test_no_kind_passes_for_another(traffic: Traffic, kind: Kind) -> None:
    for other in ALL:
        if other is kind:
            continue
        with pytest.raises(InvalidMessageError):
            traffic.decode(other, traffic.messages[kind])
        relabelled = bytearray(body_of(traffic.messages[kind]))
        relabelled[len(b"privfed\0") + 1] = other
        for read_as in (kind, other):
            # Even when the sender itself signs the confusion. An authentic message about another key says so.
            # So does what begins with 32 bytes where the hash of the approved digest should be: it approves another one.
            approves = read_as is Kind.APPROVAL and kind is Kind.COMMIT
            with pytest.raises(InvalidMessageError if traffic.key_of(kind) == traffic.key_of(other) and not approves else PrivFedError):
                traffic.decode(read_as, traffic.resigned(kind, bytes(relabelled)))


@KINDS
@pytest.mark.parametrize("position", [0, len(b"privfed\0")], ids=["magic", "version"])
def test_another_format_is_refused_even_when_signed(traffic: Traffic, kind: Kind, position: int) -> None:
    body = bytearray(body_of(traffic.messages[kind]))
    body[position] += 1
    with pytest.raises(InvalidMessageError):
        traffic.decode(kind, traffic.resigned(kind, bytes(body)))


@KINDS
def test_a_payload_of_another_length_is_refused_even_when_signed(traffic: Traffic, kind: Kind) -> None:
    signer, whole = traffic.signers[kind], body_of(traffic.messages[kind])
    key_id = traffic.key_of(kind)
    header = len(body_of(seal(traffic.context_of(kind), signer, kind, key_id=key_id, payload=b"")))
    payload = whole[header:]
    for other in (payload + b"\0", payload[:-1]):
        if len(other) != len(payload) + 1 and not payload:
            continue
        with pytest.raises(InvalidMessageError):  # the header is honest about it
            traffic.decode(kind, seal(traffic.context_of(kind), signer, kind, key_id=key_id, payload=other))
        with pytest.raises(InvalidMessageError):  # the header lies
            traffic.decode(kind, traffic.resigned(kind, whole[:header] + other))


def test_a_text_that_is_not_printable_ascii_is_refused_even_when_signed(traffic: Traffic) -> None:
    body = body_of(traffic.messages[Kind.SETUP])
    start = len(body) - 8 - len(traffic.context.agreement.params.versions)
    for byte in (b"\n", b"\x1b", b"\x7f", b"\xc3"):
        with pytest.raises(InvalidMessageError):
            traffic.decode(Kind.SETUP, traffic.resigned(Kind.SETUP, body[:start] + byte + body[start + 1 :]))


@KINDS
def test_a_message_beyond_the_largest_length_is_dropped_before_its_signature_is_looked_at(
    traffic: Traffic, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[bytes] = []
    monkeypatch.setattr(PublicIdentity, "verify", lambda self, body, signature: looked.append(signature))
    params, clients, owners = traffic.context.agreement.params, 3, len(traffic.context.agreement.populations)
    # What the layout, the parameters and the roster allow at most, counted from the format: not from the code.
    frame = 8 + 2 + 16 + 8 + 2 * 32 + 11 * 4 + 16 + 2 * 256 + 8 + 64
    coordinates, opened_sum = traffic.context.agreement.layout.size, 4  # sums of up to 256 numbers of 23 bits, and their signs
    abridged, chunk = 32 + 92, coordinates * 7 + clients * 64
    digest = 256 + 4 + clients * (256 + 8 + 32 + 4) + owners * 2**20
    countersigned = 64 if owners else 0
    approved = digest + 4 + clients * (256 + 64 + 64)
    share = frame + 256 + params.polynomial_bytes + 48
    commitments = frame + 4 + clients * (4 + frame + 38)
    request = frame + approved + 4 + commitments
    largest = {
        Kind.SETUP: frame,
        Kind.UPLOAD: frame + (2**20 if owners else 0) + 4 + coordinates * 7 + 64 + 92,
        Kind.DIGEST: frame + digest,
        Kind.APPROVAL: frame + 32 + countersigned,
        Kind.AGGREGATE: frame + approved + clients * abridged + chunk,
        Kind.ABORT: frame + 5,
        Kind.SHARE: share,
        Kind.SHARES: frame + 4 + clients * (256 + 4 + share),
        Kind.REQUEST: request,
        Kind.HOLDER_KEY: frame + 2 * 4096 * 7 + 32,
        Kind.OPENED: frame + 4 + request + clients * 80 + coordinates * opened_sum + 16,
        Kind.COMMIT: frame + 38,
        Kind.COMMITS: commitments,
    }[kind]
    padding = largest - len(traffic.messages[kind])
    assert padding >= SIGNATURE_BYTES
    for extra in (0, 1):
        looked.clear()
        with pytest.raises(InvalidMessageError):
            traffic.decode(kind, traffic.messages[kind] + bytes(padding + extra))
        assert looked == ([] if extra else [bytes(SIGNATURE_BYTES)])


@KINDS
def test_nothing_of_an_unsigned_payload_is_parsed(traffic: Traffic, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    original = Reader.take
    monkeypatch.setattr(Reader, "take", lambda self, size: (taken.append(size), original(self, size))[1])
    forged = body_of(traffic.messages[kind]) + bytes(SIGNATURE_BYTES)
    with pytest.raises(InvalidMessageError):
        traffic.decode(kind, forged)
    assert taken == [10, 1, len(traffic.signers[kind].name)]  # magic, version and kind; the length and the bytes of the name


class OtherRule(FedAvg):
    @property
    def name(self) -> str:
        return "Other"


def disagreements(context: RoundContext) -> dict[str, tuple[RoundContext, type[PrivFedError], str]]:
    """Receivers that took part in something else, what they must raise, and what the text must name."""
    agreement = context.agreement
    bound = (CkksParams.escrow if agreement.params.asymmetric else CkksParams.standard)(bound=2.0)
    trust = (
        agreement.trust
        if agreement.trust is None
        else replace(agreement.trust, encryption_keys=dict(agreement.trust.encryption_keys) | {"newcomer": bytes([9]) * 32})
    )
    newcomer = Roster(server=agreement.roster.server, clients=(*agreement.roster.clients, Identity.generate("newcomer").public))

    def under(**changes: Any) -> RoundContext:
        return replace(context, agreement=replace(agreement, **changes))

    return {
        "session": (under(session=bytes(16)), RoundMismatchError, "another session"),
        "round": (replace(context, round=6), RoundMismatchError, "belongs to round 5, attempt 2, and not to round 6, attempt 2"),
        "attempt": (replace(context, attempt=1), RoundMismatchError, "belongs to round 5, attempt 2, and not to round 5, attempt 1"),
        "history": (replace(context, history=b"h" * 32), HistoryMismatchError, "has not opened the same rounds before round 5"),
        "start": (under(start=bytes(32)), AgreementMismatchError, "another idea of the start;"),
        "params": (under(params=bound), ParametersMismatchError, "other encryption parameters or library"),
        "layout": (under(layout=Layout(names=("x",), shapes=((8,),))), LayoutMismatchError, "another layout"),
        "roster": (
            under(roster=newcomer, weights=dict(agreement.weights) | {"newcomer": 1.0}, trust=trust),
            AgreementMismatchError,
            f"another idea of the roster and the weights{'' if trust is None else ' and the trust mode'};",
        ),
        "weights": (under(weights=dict.fromkeys(agreement.weights, 2.0)), AgreementMismatchError, "another idea of the weights;"),
        "rule": (under(rule=OtherRule()), AgreementMismatchError, "another idea of the rule;"),
        "policy": (under(policy=OpeningPolicy(max_share=0.5)), AgreementMismatchError, "another idea of the policy;"),
    }


@KINDS
@pytest.mark.parametrize(
    "what", ["session", "round", "attempt", "history", "start", "params", "layout", "roster", "weights", "rule", "policy"]
)
def test_an_authentic_message_of_another_agreement_or_round_is_refused_by_name(traffic: Traffic, kind: Kind, what: str) -> None:
    context, error, text = disagreements(traffic.context_of(kind))[what]
    with pytest.raises(error, match=text) as caught:
        traffic.decode(kind, traffic.messages[kind], context)
    assert "nothing happened" in str(caught.value)
    assert repr(traffic.signers[kind].name) in str(caught.value)


def test_other_versions_are_named_on_both_sides(traffic: Traffic) -> None:
    here = traffic.context.agreement.params.versions
    there = here.replace("SEAL", "SEAX")
    body = body_of(traffic.messages[Kind.SETUP]).replace(here.encode(), there.encode())
    body = body.replace(traffic.context.agreement.params.digest[:4], bytes(4)).replace(traffic.context.agreement.digest, bytes(32))
    with pytest.raises(ParametersMismatchError, match=f"{there}; here {here}"):
        traffic.decode(Kind.SETUP, traffic.resigned(Kind.SETUP, body))


def test_who_agrees_has_the_same_hints_and_only_first_messages_say_versions(traffic: Traffic) -> None:
    agreement = traffic.context.agreement
    for part in agreement.parts.values():
        body = body_of(traffic.messages[Kind.APPROVAL]).replace(part[:4], bytes(4))
        with pytest.raises(InvalidMessageError):
            traffic.decode(Kind.APPROVAL, traffic.resigned(Kind.APPROVAL, body))
    start = len(body_of(seal(traffic.context, traffic.signers[Kind.ABORT], Kind.ABORT, key_id=traffic.key_id, payload=b""))) - 9
    body = body_of(traffic.messages[Kind.ABORT])
    assert body[start] == 0
    with pytest.raises(InvalidMessageError):
        traffic.decode(Kind.ABORT, traffic.resigned(Kind.ABORT, body[:start] + b"\x01v" + body[start + 1 :]))


def test_who_agreed_on_something_else_that_hints_do_not_show_is_refused(traffic: Traffic) -> None:
    body = body_of(traffic.messages[Kind.SETUP]).replace(traffic.context.agreement.digest, bytes(32))
    with pytest.raises(AgreementMismatchError, match="another idea of what was agreed; its message was dropped and nothing happened"):
        traffic.decode(Kind.SETUP, traffic.resigned(Kind.SETUP, body))


@KINDS
def test_a_message_is_the_same_again_from_its_sender_its_payload_its_signature_and_the_context(traffic: Traffic, kind: Kind) -> None:
    original, context = traffic.messages[kind], traffic.context_of(kind)
    sender, payload, signature = detach(original)
    assert sender == traffic.signers[kind].name
    assert attach(context, kind, sender=sender, key_id=traffic.key_of(kind), payload=payload, signature=signature) == original
    other = attach(replace(context, attempt=9), kind, sender=sender, key_id=traffic.key_of(kind), payload=payload, signature=signature)
    with pytest.raises(InvalidMessageError):
        traffic.decode(kind, other)


def test_every_refusal_of_hostile_bytes_has_the_same_text(traffic: Traffic) -> None:
    original = traffic.messages[Kind.APPROVAL]
    texts: set[str] = set()
    for data in (b"", b"\0" * 500, original[:-1], original + b"\0", body_of(original) + bytes(64), bytes(MAX_FRAME_BYTES + 99)):
        with pytest.raises(InvalidMessageError) as caught:
            traffic.decode(Kind.APPROVAL, data)
        assert caught.value.__cause__ is None
        texts.add(str(caught.value))
    assert len(texts) == 1


def test_random_bytes_are_refused(traffic: Traffic) -> None:
    rng = np.random.default_rng(0)
    for size in (*range(80), 300, 1000, 40_000):
        for kind in ALL:
            for data in (rng.bytes(size), b"privfed\0\x01" + bytes([kind]) + rng.bytes(size)):
                with pytest.raises(InvalidMessageError):
                    traffic.decode(kind, data)


def test_a_text_that_does_not_fit_its_length_byte_is_refused() -> None:
    assert write_text("a" * 255) == b"\xff" + b"a" * 255
    with pytest.raises(ValueError, match="255 characters"):
        write_text("a" * 256)


def test_the_frame_lists_the_parts_in_the_order_of_the_agreement(traffic: Traffic) -> None:
    assert tuple(traffic.context.agreement.parts) == message._PARTS


def test_an_identity_outside_the_roster_cannot_seal(traffic: Traffic) -> None:
    with pytest.raises(ValueError, match="pins for SETUP, got 'bank_00'"):
        encode_setup(traffic.context, Identity.generate("bank_00"), traffic.key_id)
