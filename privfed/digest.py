"""The digest of a round: what will be summed, named so that every participant can check it before anything is opened."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from privfed.agreement import DIGEST_BYTES, RoundContext
from privfed.he.params import SEALED_TAGS_BYTES
from privfed.identity import SIGNATURE_BYTES
from privfed.message import write_text
from privfed.trust import ThresholdTrust

COUNT_BYTES = 4
COEFFICIENT_BYTES = 8
ABRIDGED_BYTES = DIGEST_BYTES + SEALED_TAGS_BYTES


def abridge(data: bytes) -> bytes:
    """SHA-256 of a signed message but for what is in front of its signature, and that: 124 bytes that show the sealed tags of an upload."""
    tags = max(0, len(data) - SEALED_TAGS_BYTES - SIGNATURE_BYTES)
    signature = max(tags, len(data) - SIGNATURE_BYTES)
    state = hashlib.sha256(memoryview(data)[:tags])
    state.update(memoryview(data)[signature:])
    return state.digest() + data[tags:signature]


def sealed_tags(abridged: bytes) -> bytes:
    """The sealed tags of an upload, out of what `abridge` left of it."""
    return abridged[DIGEST_BYTES:]


def hash_abridged(abridged: bytes) -> bytes:
    """`hash_message` of the message that was abridged."""
    return hashlib.sha256(abridged).digest()


def hash_message(data: bytes) -> bytes:
    """Hash of a whole signed message, 32 bytes: how a digest refers to an upload and a journal to an aggregate.

    SHA-256 over what `abridge` leaves, so that who knows the hash can check the sealed tags in a message without the rest of it.
    """
    return hash_abridged(abridge(data))


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundDigest:
    """What the server will sum, announced before it does, for every participant to check and sign. Public.

    Args:
        participants: Names of the clients in the sum, each once, in roster order.
        coefficients: Integer weight of each participant in the mean, whoever applies it.
        upload_hashes: `hash_message` of each participant's upload.
        rule: Name of the rule.
        key_id: Key under which the uploads are encrypted, 16 bytes.

    Raises:
        ValueError: If the lengths differ or there is no participant.
    """

    participants: tuple[str, ...]
    coefficients: tuple[int, ...]
    upload_hashes: tuple[bytes, ...]
    rule: str
    key_id: bytes

    def __post_init__(self) -> None:
        if not self.participants or not len(self.participants) == len(self.coefficients) == len(self.upload_hashes):
            raise ValueError("expected one coefficient and one upload hash for each of at least one participant")

    @property
    def by_name(self) -> Mapping[str, int]:
        """Coefficient of each participant, by name."""
        return dict(zip(self.participants, self.coefficients, strict=True))

    @property
    def payload(self) -> bytes:
        """The canonical bytes that travel."""
        entries = (
            write_text(name) + coefficient.to_bytes(COEFFICIENT_BYTES, "big") + upload_hash
            for name, coefficient, upload_hash in zip(self.participants, self.coefficients, self.upload_hashes, strict=True)
        )
        return write_text(self.rule) + len(self.participants).to_bytes(COUNT_BYTES, "big") + b"".join(entries)

    def digest(self, context: RoundContext) -> bytes:
        """SHA-256 over the agreement, the round, the attempt, the key id and everything in here, 32 bytes."""
        return hashlib.sha256(b"privfed digest v1" + context.digest + self.key_id + self.payload).digest()

    def history(self, context: RoundContext, aggregate: bytes) -> bytes:
        """The history of the round after this one, 32 bytes.

        It is the digest, which fixes what is opened where tags or a key holder vouch for the sum. In `ThresholdKey` nothing does, so it
        covers the message that was opened as well: clients to whom the server gave different sums have different histories, and no
        round is held on both.

        Args:
            context: Agreement, round and attempt.
            aggregate: The aggregate message.
        """
        digest = self.digest(context)
        if not isinstance(context.agreement.trust, ThresholdTrust):
            return digest
        return hashlib.sha256(b"privfed history of an opened sum v1" + digest + hash_message(aggregate)).digest()
