r"""What goes around the messages of a round on an engine: what a party is asked, and what it answers. Signed, like the messages.

    request  magic "privfed?" | version 1 | step 1 | agreement 32 | round 4 | attempt 4 | history 32 | about | payload length 8 |
             payload | Ed25519 signature 64, by the server
    reply    magic "privfed!" | version 1 | SHA-256 of the request 32 | refusal | facts length 4 | facts, a JSON object | payload length 8 |
             payload | Ed25519 signature 64, by the party

Numbers are big-endian; `about` and `refusal` are ASCII with a length byte in front. Nothing is looked at before the length was bounded,
and nothing behind the version before the signature was verified. A reply belongs to one request, so one that comes late is no reply to
the next. What is carried out for a request is what would be carried out for the same request again: a copy of one does nothing new.
"""

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from privfed import errors
from privfed.agreement import DIGEST_BYTES, Agreement, RoundContext
from privfed.errors import AgreementMismatchError, InvalidMessageError
from privfed.he.product import pairs
from privfed.he.product_params import ProductParams
from privfed.identity import SIGNATURE_BYTES, Identity, PublicIdentity
from privfed.message import MAX_FRAME_BYTES, Reader, write_text
from privfed.phases import Step
from privfed.strict_json import parse
from privfed.wire import MAX_STATEMENT_BYTES

_ASKING, _ANSWERING = b"privfed?", b"privfed!"
_VERSION = 1
_PREFIX = struct.Struct(">8sB")
_REQUEST = struct.Struct(f">B{DIGEST_BYTES}sII{DIGEST_BYTES}s")
_MOST_FACTS_BYTES = 1 << 20
_LENGTH_BYTES, _FACTS_LENGTH_BYTES = 8, 4
_OVERHEAD_BYTES = _MOST_FACTS_BYTES + 4096
# A refusal becomes a label of a counter, so its kind is one of a few.
_REFUSALS = {kind.__name__ for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.PrivFedError)}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Request:
    """What a party is asked.

    Args:
        step: What to do.
        context: Agreement, round, attempt and history.
        about: Whose upload the payload is, for `Step.STORE`; else empty.
        payload: A message of the round, or nothing.
    """

    step: Step
    context: RoundContext
    about: str = ""
    payload: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Answer:
    """What a party answers.

    Args:
        name: Who answers.
        refusal: Name of the kind of error if it refuses, and no more than that; empty if it does not.
        facts: What it says outside of messages: JSON values. Public.
        payload: A message of the round, or nothing.
    """

    name: str
    refusal: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    payload: bytes = b""


def seal_request(request: Request, identity: Identity) -> bytes:
    """The bytes of a request, signed by the server."""
    context = request.context
    body = b"".join(
        (
            _PREFIX.pack(_ASKING, _VERSION),
            _REQUEST.pack(request.step, context.agreement.digest, context.round, context.attempt, context.history),
            write_text(request.about),
            len(request.payload).to_bytes(_LENGTH_BYTES, "big"),
            request.payload,
        )
    )
    return body + identity.sign(body)


def open_request(data: bytes, agreement: Agreement) -> Request:
    """What the server of this agreement asks.

    Raises:
        InvalidMessageError: If it is no authentic request of this server.
        AgreementMismatchError: If it is authentic, and speaks of another agreement or session.
    """
    reader = _verified(data, _ASKING, agreement.roster.server, most=most_bytes(agreement))
    step, digest, number, attempt, history = _REQUEST.unpack(reader.take(_REQUEST.size))
    about, payload = reader.text(), reader.take(reader.integer(_LENGTH_BYTES))
    reader.end()
    if step not in list(Step):
        raise InvalidMessageError
    if digest != agreement.digest:
        raise AgreementMismatchError("the server asks about another agreement or session than this party's; nothing was done")
    context = RoundContext(agreement=agreement, round=number, attempt=attempt, history=history)
    return Request(step=Step(step), context=context, about=about, payload=payload)


def said_step(data: bytes) -> str:
    """Round and step of a request as it says itself, unverified: for the words of a log alone. Empty if it is no request.

    Example:
        >>> said_step(b"something else")
        ''
    """
    if not data.startswith(_PREFIX.pack(_ASKING, _VERSION)) or len(data) < _PREFIX.size + _REQUEST.size:
        return ""
    step, _, number, _, _ = _REQUEST.unpack_from(data, _PREFIX.size)
    return f"{number}, {Step(step).name}" if step in list(Step) else ""


def seal_answer(answer: Answer, request: bytes, identity: Identity) -> bytes:
    """The bytes of an answer to the bytes of a request, signed by the party."""
    facts = json.dumps(dict(answer.facts), allow_nan=False).encode()
    body = b"".join(
        (
            _PREFIX.pack(_ANSWERING, _VERSION),
            hashlib.sha256(request).digest(),
            write_text(answer.refusal),
            len(facts).to_bytes(_FACTS_LENGTH_BYTES, "big"),
            facts,
            len(answer.payload).to_bytes(_LENGTH_BYTES, "big"),
            answer.payload,
        )
    )
    return body + identity.sign(body)


def open_answer(data: bytes, request: bytes, party: PublicIdentity, *, agreement: Agreement) -> Answer:
    """What a party answered to exactly this request.

    Raises:
        InvalidMessageError: If it is no authentic answer of this party to it: damaged, forged, or to an earlier one and late.
    """
    reader = _verified(data, _ANSWERING, party, most=most_bytes(agreement))
    if reader.take(DIGEST_BYTES) != hashlib.sha256(request).digest():
        raise InvalidMessageError
    refusal, facts = reader.text(), reader.take(reader.integer(_FACTS_LENGTH_BYTES))
    payload = reader.take(reader.integer(_LENGTH_BYTES))
    reader.end()
    if len(facts) > _MOST_FACTS_BYTES or (refusal and refusal not in _REFUSALS):
        raise InvalidMessageError
    try:
        values = parse(facts.decode())
    except (ValueError, RecursionError):
        raise InvalidMessageError from None
    if not isinstance(values, dict):
        raise InvalidMessageError
    return Answer(name=party.name, refusal=refusal, facts=values, payload=payload)


def most_payload_bytes(agreement: Agreement) -> int:
    """A bound on the bytes of any message of a session, generous; each message has a tight one of its own."""
    params, clients = agreement.params, len(agreement.roster.clients)
    chunk = max(*agreement.upload_chunk_sizes, params.sum_chunk_bytes) + clients * DIGEST_BYTES
    around = 2 * (MAX_FRAME_BYTES + MAX_STATEMENT_BYTES) + agreement.answer_bytes
    most = (clients + 2) ** 2 * around + (clients + 2) * params.chunks(agreement.sent_layout) * chunk + agreement.setup_key_bytes
    if isinstance(params, ProductParams):
        most += len(pairs(clients)) * params.product_bytes
    return most


def most_bytes(agreement: Agreement) -> int:
    """A bound on the bytes of a request or an answer: longer ones are not looked at, and need not be taken in."""
    return most_payload_bytes(agreement) + _OVERHEAD_BYTES


def _verified(data: bytes, magic: bytes, signer: PublicIdentity, *, most: int) -> Reader:
    """Takes the beginning and the signature off, both checked."""
    if not _PREFIX.size + SIGNATURE_BYTES <= len(data) <= most:
        raise InvalidMessageError
    body = memoryview(data)[:-SIGNATURE_BYTES]
    reader = Reader(body)
    if _PREFIX.unpack(reader.take(_PREFIX.size)) != (magic, _VERSION):
        raise InvalidMessageError
    signer.verify(body, bytes(data[-SIGNATURE_BYTES:]))
    return reader
