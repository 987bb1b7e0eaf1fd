"""The server's side of one round: bytes in, bytes out, a weighted sum on ciphertexts, and no key.

Everything that the server knows about the round stands in its spool as the signed messages themselves, so a new `Server` on
the same directory goes on where the last one stopped. It holds one upload in memory while it checks it, and one chunk of one
upload while it adds.
"""

from collections import defaultdict
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from pathlib import Path

from privfed.agreement import RoundContext
from privfed.digest import RoundDigest, abridge, hash_abridged, hash_message
from privfed.errors import (
    CohortError,
    DamagedFileError,
    InvalidMessageError,
    OpeningRefusedError,
    ParametersMismatchError,
    RoundMismatchError,
    RoundSkippedError,
    UnsupportedInThisModeError,
)
from privfed.he.additive import CkksVector, SeededSum, sum_chunks, sum_first_polynomials
from privfed.he.params import KEY_ID_BYTES, SEED_BYTES
from privfed.he.product import masked_products
from privfed.he.threshold import OnePolynomialVector, sum_polynomials
from privfed.identity import SIGNATURE_BYTES, Identity
from privfed.message import Kind
from privfed.spool import Spool
from privfed.trust import EscrowTrust, ThresholdTrust
from privfed.wire import (
    check_key,
    check_upload,
    decode_abort,
    decode_approval,
    decode_digest,
    decode_setup,
    decode_upload,
    encode_digest,
    setup_public_key,
    upload_chunk,
    upload_statement,
)
from privfed.wire_aggregate import EncryptedSum, encode_aggregate
from privfed.wire_commit import decode_commitment, decode_commitments, encode_commitments
from privfed.wire_escrow import decode_holder_key, decode_opened, encode_request, opened_digest
from privfed.wire_products import decode_coefficients, encode_products, product_params, sketch_seed
from privfed.wire_shares import decode_dealt_setup, encode_relay

_PRODUCTS = "products"
_OPENED = "opened"
_COMMITMENTS = "commitments"
_HOLDER_KEY = "holder_key"


class Phase(Enum):
    """Where a round stands. A phase ends when the file of its value is in the spool; they follow each other in this order.

    A message in the wrong phase is refused without a look at it.
    """

    SETUP = "key"
    """Setup messages come in: every client says which key it derived."""
    UPLOAD = "digest"
    """Uploads come in."""
    APPROVAL = "aggregate"
    """The digest is announced and approvals come in."""
    DONE = "done"
    """The aggregate is made; there is no such file, so it never ends."""


class Server:
    """Runs one attempt at one round, in any trust mode.

    An identical resend of a message is fine in every phase. A second, different message of a client is refused.

    Args:
        context: Agreement, round and attempt.
        identity: The roster's server.
        selected: Names of the clients of this round.
        spool: Directory for the messages of all rounds; a subdirectory is made for this attempt.

    Raises:
        ValueError: If the identity is not the roster's server, or a selected client is not in the roster.
        CohortError: If the policy demands more clients than were selected; nothing was started.

    What the server kept is verified again when it is used. Where it is not what came, every method raises `DamagedFileError`.
    """

    def __init__(self, *, context: RoundContext, identity: Identity, selected: Collection[str], spool: Path) -> None:
        roster = context.agreement.roster
        if identity.public != roster.server:
            raise ValueError(f"expected the identity of the roster's server, got {identity.name!r}")
        strangers = sorted(set(selected) - set(roster.names))
        if strangers:
            raise ValueError(f"expected clients of the roster, got {strangers}")
        self._context = context
        self._identity = identity
        self._selected = frozenset(selected)
        self._require_enough(self._selected, "selected clients")
        self._spool = Spool(spool / f"{context.agreement.session.hex()}-{context.round}-{context.attempt}")

    @property
    def phase(self) -> Phase:
        """Where the round stands.

        Raises:
            DamagedFileError: If what ended an earlier phase is gone, and something of a later one is there.
        """
        phase = next(phase for phase in Phase if not self._spool.has(phase.value))
        later = {Phase.SETUP: (Kind.COMMIT, Kind.UPLOAD, Kind.APPROVAL), Phase.UPLOAD: (Kind.APPROVAL,)}.get(phase, ())
        with self._reading():
            order = list(Phase)
            ended = [after for after in order[order.index(phase) :] if self._spool.has(after.value)]
            if ended or any(self._spool.names(_prefix(kind)) for kind in later):
                raise InvalidMessageError
        return phase

    def received(self, kind: Kind) -> tuple[str, ...]:
        """Names of the clients whose message of this kind is stored, in roster order."""
        stored = set(self._spool.names(_prefix(kind)))
        return tuple(name for name in self._context.agreement.roster.names if name in stored)

    def cohort(self) -> tuple[str, ...]:
        """Names of the clients that may upload; none before the setup has ended."""
        return () if self.phase is Phase.SETUP else self.received(Kind.SETUP)

    def participants(self) -> tuple[str, ...]:
        """Names of the clients in the announced digest; none before it was announced."""
        return () if self.phase in (Phase.SETUP, Phase.UPLOAD) else self._digest().participants

    def next_history(self) -> bytes:
        """`RoundDigest.history` of this round, 32 bytes.

        Raises:
            CohortError: If no digest was announced, or nothing was summed.
        """
        decided = self._decided()
        if self.phase is not Phase.DONE:
            raise CohortError(f"nothing was summed in round {self._context.round}, so nothing can build on it")
        return decided.history(self._context, self._spool.get(Phase.APPROVAL.value))

    def coefficients(self) -> dict[str, int]:
        """Integer coefficient of each participant in the sum, by name.

        Raises:
            CohortError: As `aggregate`.
        """
        return dict(self._decided().by_name)

    def missing_approvals(self) -> tuple[str, ...]:
        """Names of the participants that have not approved the announced digest yet."""
        approved = self.received(Kind.APPROVAL)
        return tuple(name for name in self.participants() if name not in approved)

    def receive_holder_key(self, data: bytes) -> None:
        """Verifies and stores the key holder's public key of the attempt, for the clients. It comes before their setup messages.

        Raises:
            CohortError: If another one came before.
            UnsupportedInThisModeError: If there is no key holder.
            PrivFedError: As `wire_escrow.decode_holder_key`.
        """
        self._require_holder()
        decode_holder_key(data, self._context)
        try:
            self._spool.put(_HOLDER_KEY, data)
        except FileExistsError:
            raise CohortError("another key of the key holder came before; this one was dropped") from None

    def holder_key(self) -> bytes:
        """The key holder's public key of the attempt, as it signed it.

        Raises:
            CohortError: If it has not come.
            UnsupportedInThisModeError: If there is no key holder.
            DamagedFileError: If what was stored is not what came.
        """
        self._require_holder()
        return self._stored_holder_key()[0]

    def _stored_holder_key(self) -> tuple[bytes, bytes]:
        """The key holder's message, verified again, and the key id in it."""
        if not self._spool.has(_HOLDER_KEY) and not self.received(Kind.SETUP):
            raise CohortError(f"the key holder has announced no key for round {self._context.round}; nothing happened; ask it")
        with self._reading():
            data = self._spool.get(_HOLDER_KEY)
            return data, decode_holder_key(data, self._context).key_id

    def receive_setup(self, data: bytes) -> str:
        """Stores a client's setup message; returns the client's name.

        Raises:
            CohortError: If the client was not selected, sent another setup message before, or comes too late; where there is a key
                holder, if its key has not come.
            RoundMismatchError: If the client has another key of the key holder.
            PrivFedError: As `wire.decode_setup`.
        """
        sender, key_id = self._read_setup(data)
        if isinstance(self._context.agreement.trust, EscrowTrust):
            check_key(sender, key_id, self._stored_holder_key()[1])
        return self._store(Kind.SETUP, sender, data, phase=Phase.SETUP, cohort=self._selected)

    def start_uploads(self) -> tuple[str, ...]:
        """Ends the setup: names of the clients that may upload, which all derived the same key, and its public half where there is one.

        Raises:
            CohortError: If the policy demands more clients; the setup goes on.
            ParametersMismatchError: If key ids or public keys differ; names the clients outside the largest group. Nothing was started.
        """
        cohort = self.received(Kind.SETUP)
        if self.phase is not Phase.SETUP:
            return cohort
        self._require_enough(cohort, "setup messages")
        groups: defaultdict[tuple[bytes, bytes], list[str]] = defaultdict(list)
        with self._reading():
            for name in cohort:
                groups[self._stored_setup(name)].append(name)
        keys = max(groups, key=lambda candidate: len(groups[candidate]))
        if len(groups) > 1:
            differing = [name for name in cohort if name not in groups[keys]]
            raise ParametersMismatchError(
                f"{differing} derived another key than {groups[keys]}; nothing was started. Either their shared key is another "
                "one, or their platform is: SEAL's sampling depends on the C++ library: transport the key",
                names=tuple(differing),
            )
        self._spool.put(Phase.SETUP.value, keys[0])
        return cohort

    def _stored_setup(self, name: str) -> tuple[bytes, bytes]:
        """Key id and public key, empty where there is none, in a client's setup message, verified again."""
        data = self._spool.get(_prefix(Kind.SETUP) + name)
        sender, key_id = self._read_setup(data)
        if sender != name:
            raise InvalidMessageError
        return key_id, setup_public_key(data, self._context)

    def _public_key(self) -> bytes:
        """The public key that every client of the round made. One alone could choose a key under which zeros hide nothing from it."""
        made = {self._stored_setup(name) for name in self.received(Kind.SETUP)}
        if len(made) != 1:
            raise InvalidMessageError
        ((key_id, public_key),) = made
        if key_id != self._key_id:
            raise InvalidMessageError
        return public_key

    def _read_setup(self, data: bytes) -> tuple[str, bytes]:
        if isinstance(self._context.agreement.trust, ThresholdTrust):
            return decode_dealt_setup(data, self._context)[:2]
        return decode_setup(data, self._context)

    def relay(self, name: str) -> bytes:
        """What the clients of the round tell one of them before its upload; the same bytes again when called again.

        Returns:
            A message with the shares that they made for that client, or with their commitments, for it to check; no bytes in trust modes
            that have neither.

        Raises:
            CohortError: If the setup has not ended, the commitments were not closed, or the client took no part.
            DamagedFileError: If what was stored is not what came.
        """
        if isinstance(self._context.agreement.trust, EscrowTrust):
            if name not in self.committed():
                raise CohortError(f"{name!r} is not among the closed commitments of round {self._context.round}; nothing happened")
            return self._spool.get(_COMMITMENTS)
        if not isinstance(self._context.agreement.trust, ThresholdTrust):
            return b""
        self._require_started()
        cohort = self.received(Kind.SETUP)
        if name not in cohort:
            raise CohortError(f"{name!r} took no part in the setup of round {self._context.round}; nothing happened")
        with self._reading():
            setups = {sender: decode_dealt_setup(self._spool.get(_prefix(Kind.SETUP) + sender), self._context) for sender in cohort}
            if any(setup[0] != sender for sender, setup in setups.items()):
                raise InvalidMessageError
        return encode_relay(self._context, self._identity, {sender: setup[2][name] for sender, setup in setups.items()})

    def receive_commitment(self, data: bytes) -> str:
        """Verifies and stores a client's commitment to its upload; returns the client's name. In sessions with a key holder.

        Raises:
            CohortError: If the client took no part in the setup, sent another commitment before, or comes when they are closed.
            UnsupportedInThisModeError: If there is no key holder.
            PrivFedError: As `wire_commit.decode_commitment`.
        """
        self._require_started()
        self._require_holder()
        sender, _ = decode_commitment(data, self._context, self._key_id)
        return self._store(Kind.COMMIT, sender, data, phase=Phase.UPLOAD, cohort=self.committed() or self.received(Kind.SETUP))

    def close_commitments(self) -> tuple[str, ...]:
        """Ends the commitments: names of the clients that may upload. What is relayed from here on is one set, and never another.

        Raises:
            CohortError: If the setup has not ended, or the policy demands more clients; more commitments may come.
            UnsupportedInThisModeError: If there is no key holder.
            DamagedFileError: If what was stored is not what came.
        """
        self._require_started()
        self._require_holder()
        if not self.committed():
            names = self.received(Kind.COMMIT)
            self._require_enough(names, "commitments")
            with self._reading():
                messages = {name: self._spool.get(_prefix(Kind.COMMIT) + name) for name in names}
                closed = encode_commitments(self._context, self._identity, messages, key_id=self._key_id)
                if tuple(decode_commitments(closed, self._context, self._key_id)) != names:
                    raise InvalidMessageError
            self._spool.put(_COMMITMENTS, closed)
        return self.committed()

    def committed(self) -> tuple[str, ...]:
        """Names of the clients in the closed commitments, in roster order; none before they were closed, and where there are none.

        Raises:
            DamagedFileError: If what was stored is not what came.
        """
        return tuple(self._commitments())

    def _commitments(self) -> Mapping[str, bytes]:
        uploaded = isinstance(self._context.agreement.trust, EscrowTrust) and self.received(Kind.UPLOAD)
        if not uploaded and not self._spool.has(_COMMITMENTS):
            return {}
        with self._reading():
            return decode_commitments(self._spool.get(_COMMITMENTS), self._context, self._key_id)

    def _require_holder(self) -> None:
        if not isinstance(self._context.agreement.trust, EscrowTrust):
            raise UnsupportedInThisModeError("a key holder and commitments exist in EscrowKey mode only; nothing happened")

    def receive_upload(self, data: bytes) -> str:
        """Verifies and stores a client's upload; returns the client's name.

        Raises:
            CohortError: If the client took no part in the setup, sent another upload before, or comes in another phase; where there is a
                key holder, if it is not the upload to which it committed, or the commitments were not closed.
            RoundMismatchError: If it is encrypted under another key.
            PrivFedError: As `wire.decode_upload`.
        """
        self._require_started()
        sender = decode_upload(data, self._context, self._key_id).sender
        if isinstance(self._context.agreement.trust, EscrowTrust) and self._commitments().get(sender) != hash_message(data):
            raise CohortError(f"{sender!r} sent an upload that is not the one of its closed commitment; it was dropped")
        return self._store(Kind.UPLOAD, sender, data, phase=Phase.UPLOAD, cohort=self.received(Kind.SETUP))

    def close(self) -> bytes:
        """Ends the uploads and announces what will be summed; the same bytes again when called again.

        Returns:
            A digest message, for every participant to approve.

        Raises:
            CohortError: If uploads were not started, or the policy does not allow an opening of those that came. Nothing was
                summed; more uploads may come.
        """
        self._require_started()
        if self.phase is Phase.UPLOAD:
            participants = self.received(Kind.UPLOAD)
            self._require_enough(participants, "uploads")
            try:
                coefficients = self._context.agreement.coefficients(participants)
            except OpeningRefusedError as error:
                raise CohortError(f"the uploads that came may not be opened: {error}; nothing was summed") from error
            hashes, statements = list[bytes](), dict[str, bytes]()
            with self._reading():
                for name in participants:
                    upload = self._spool.get(_prefix(Kind.UPLOAD) + name)
                    check_upload(upload, self._context, sender=name)
                    hashes.append(hash_message(upload))
                    statements[name] = upload_statement(upload, self._context)
            digest = RoundDigest(
                participants=participants,
                coefficients=tuple(coefficients.values()),
                upload_hashes=tuple(hashes),
                rule=self._context.agreement.rule.name,
                key_id=self._key_id,
            )
            self._spool.put(Phase.UPLOAD.value, encode_digest(self._context, self._identity, digest, statements))
        self._digest()  # what is announced again is what was announced
        return self._spool.get(Phase.UPLOAD.value)

    def receive_approval(self, data: bytes) -> str:
        """Verifies and stores a participant's approval; returns the participant's name.

        Raises:
            CohortError: If no digest was announced, the client is not in it, or it comes in another phase.
            RoundMismatchError: If it approves another digest.
            PrivFedError: As `wire.decode_approval`.
        """
        digest = self._digest()
        sender = decode_approval(data, self._context, digest)
        return self._store(Kind.APPROVAL, sender, data, phase=Phase.APPROVAL, cohort=digest.participants)

    def products(self) -> bytes:
        """Multiplies every pair of uploads, and masks and rerandomises the products; the same bytes again when called again.

        For scored sessions.

        Returns:
            A products message, for the openers.

        Raises:
            CohortError: If an approval is missing; nothing was multiplied.
            DamagedFileError: If what was stored is not what came.
            UnsupportedInThisModeError: If the session's parameters are none for products.
        """
        params, layout, digest = product_params(self._context), self._context.agreement.sent_layout, self._digest()
        if not self._spool.has(_PRODUCTS):
            missing = self.missing_approvals()
            if missing:
                raise CohortError(f"approvals of {list(missing)} are missing; nothing was multiplied; wait for them")
            with self._reading():
                for name, upload_hash in zip(digest.participants, digest.upload_hashes, strict=True):
                    self._announced(name, upload_hash)
                approvals = [self._spool.get(_prefix(Kind.APPROVAL) + name) for name in digest.participants]
                products = masked_products(
                    lambda upload, chunk: self._chunk(digest.participants[upload], chunk),
                    count=len(digest.participants),
                    layout=layout,
                    params=params,
                    key_id=digest.key_id,
                    public_key=self._public_key(),
                    seed=sketch_seed(self._context, digest, approvals),
                )
            announcement = self._spool.get(Phase.UPLOAD.value)
            message = encode_products(self._context, self._identity, announcement, approvals, products=products)
            self._spool.put(_PRODUCTS, message)
        return self._spool.get(_PRODUCTS)

    def receive_coefficients(self, data: bytes) -> str:
        """Verifies and stores the coefficients that an opener found; returns its name. The server learns nothing else of the scores.

        Raises:
            CohortError: If no products were made, the client is not in the digest, or it sent others before.
            RoundMismatchError: If it speaks of another digest.
            PrivFedError: As `wire_products.decode_coefficients`.
        """
        digest = self._digest()
        sender, _ = decode_coefficients(data, self._context, digest)
        if not self._spool.has(_PRODUCTS):
            raise CohortError(f"{sender!r} weighed products that were never made; its message was dropped")
        return self._store(Kind.COEFFICIENTS, sender, data, phase=Phase.APPROVAL, cohort=digest.participants)

    def _decided(self) -> RoundDigest:
        """The digest with the coefficients of the sum: what the agreement makes of it or, in a scored session, what its openers found."""
        digest = self._digest()
        if not self._context.agreement.scored:
            return digest
        trust = self._context.agreement.trust
        if isinstance(trust, EscrowTrust):
            with self._reading():
                coefficients = decode_opened(self.result(), self._context, digest.key_id)[1].coefficients
            if not any(coefficients):
                raise RoundSkippedError(f"round {self._context.round} is skipped: the key holder found no weights that the policy allows")
            return replace(digest, coefficients=coefficients)
        names = self.received(Kind.COEFFICIENTS)
        self._require_enough(names, "openers that sent coefficients")
        with self._reading():
            found = {name: decode_coefficients(self._spool.get(_prefix(Kind.COEFFICIENTS) + name), self._context, digest) for name in names}
        if any(sender != name for name, (sender, _) in found.items()) or len({numbers for _, numbers in found.values()}) != 1:
            raise CohortError(f"the openers {list(names)} did not find the same coefficients; nothing was summed; go on with a new round")
        coefficients = next(numbers for _, numbers in found.values())
        if not any(coefficients):
            raise RoundSkippedError(f"round {self._context.round} is skipped: its openers found no weights that the policy allows")
        return replace(digest, coefficients=coefficients)

    def aggregate(self) -> bytes:
        """Sums the uploads, chunk by chunk; the same bytes again when called again.

        Returns:
            An aggregate message, for the openers.

        Raises:
            CohortError: If an approval is missing; nothing was summed.
            DamagedFileError: If what was stored is not what came; nothing was summed.
        """
        digest = self._digest()
        if self.phase is Phase.APPROVAL:
            missing, trust = self.missing_approvals(), self._context.agreement.trust
            spared = len(digest.participants) - trust.quorum if isinstance(trust, ThresholdTrust) else 0
            if len(missing) > spared:
                raise CohortError(f"approvals of {list(missing)} are missing; nothing was summed; wait for them or go on with a new round")
            final = digest if isinstance(trust, EscrowTrust) else self._decided()
            with self._reading():
                uploads = [self._announced(name, upload) for name, upload in zip(digest.participants, digest.upload_hashes, strict=True)]
                approvals = [self._spool.get(_prefix(Kind.APPROVAL) + name) for name in digest.participants if name not in missing]
                for approval in approvals:
                    decode_approval(approval, self._context, digest)
                announcement = self._spool.get(Phase.UPLOAD.value)
                total = None if isinstance(trust, EscrowTrust) else self._sum(final)
            if total is None:
                with self._reading():
                    commitments = self._spool.get(_COMMITMENTS)
                    decode_commitments(commitments, self._context, digest.key_id)
                request = encode_request(
                    self._context, self._identity, announcement, approvals, commitments=commitments, key_id=digest.key_id
                )
                self._spool.put(Phase.APPROVAL.value, request)
                return request
            abridged = uploads if self._context.agreement.upload_tags_bytes else ()
            message = encode_aggregate(
                self._context,
                self._identity,
                announcement,
                approvals,
                uploads=abridged,
                total=total,
                coefficients=final.coefficients if self._context.agreement.scored else (),
            )
            self._spool.put(Phase.APPROVAL.value, message)
            return message
        message = self._spool.get(Phase.APPROVAL.value)
        with self._reading():
            self._identity.public.verify(memoryview(message)[:-SIGNATURE_BYTES], message[-SIGNATURE_BYTES:])
        return message

    def upload(self, name: str) -> bytes:
        """A participant's upload, as it came: the key holder computes the sum itself.

        Raises:
            CohortError: If no digest was announced, or the client is not in it.
            DamagedFileError: If what was stored is not what was announced.
        """
        digest = self._digest()
        if name not in digest.participants:
            raise CohortError(f"{name!r} is not in the digest of round {self._context.round}; nothing happened")
        with self._reading():
            self._announced(name, digest.upload_hashes[digest.participants.index(name)])
            return self._spool.get(_prefix(Kind.UPLOAD) + name)

    def receive_opened(self, data: bytes) -> None:
        """Stores what the key holder published, for all clients.

        Raises:
            CohortError: If nothing was requested, or other bytes came before.
            RoundMismatchError: If it is of another digest.
            PrivFedError: As `wire_escrow.decode_opened`.
        """
        digest = self._digest()
        if opened_digest(data, self._context, digest.key_id) != digest:
            raise RoundMismatchError("what the key holder opened is of another digest; it was dropped and nothing happened")
        if self.phase is not Phase.DONE:
            raise CohortError(f"nothing was requested of the key holder in round {self._context.round}; its message was dropped")
        try:
            self._spool.put(_OPENED, data)
        except FileExistsError:
            raise CohortError("the key holder sent another message before; this one was dropped") from None

    def result(self) -> bytes:
        """What every client opens, the same bytes whenever it is called: the aggregate, or what the key holder published of it.

        Raises:
            CohortError: If an approval is missing, or nothing came from the key holder yet.
            DamagedFileError: If what was stored is not what came.
        """
        if not isinstance(self._context.agreement.trust, EscrowTrust):
            return self.aggregate()
        if not self._spool.has(_OPENED):
            raise CohortError(f"the key holder has not opened round {self._context.round}; nothing happened; ask it")
        return self._spool.get(_OPENED)

    def _announced(self, name: str, upload_hash: bytes) -> bytes:
        """What stays of a stored upload when its ciphertexts are taken away, if it is the one that was announced."""
        abridged = abridge(self._spool.get(_prefix(Kind.UPLOAD) + name))
        if hash_abridged(abridged) != upload_hash:
            raise InvalidMessageError
        return abridged

    def receive_abort(self, data: bytes) -> str:
        """Stores a client's word that it did not open the aggregate; returns the client's name. Nobody tells the server why.

        Raises:
            CohortError: If there is no aggregate yet.
            PrivFedError: As `wire.decode_abort`.
        """
        self._require_started()
        sender = decode_abort(data, self._context, self._key_id)
        return self._store(Kind.ABORT, sender, data, phase=Phase.DONE, cohort=self._context.agreement.roster.names)

    def _sum(self, digest: RoundDigest) -> EncryptedSum:
        params, layout = self._context.agreement.params, self._context.agreement.sent_layout
        sizes = params.first_polynomial_sizes(layout)
        if isinstance(self._context.agreement.trust, ThresholdTrust):
            columns = (self._column(digest, index, {}) for index in range(len(sizes)))
            chunks = tuple(sum_polynomials((chunk for _, chunk in column), params) for column in columns)
            return OnePolynomialVector(layout=layout, params=params, key_id=digest.key_id, chunks=chunks)
        seeds = {name: bytearray() for name in digest.participants}
        if params.seeded_sums:
            chunks = tuple(sum_first_polynomials(self._column(digest, index, seeds), params, size) for index, size in enumerate(sizes))
            collected = tuple(bytes(seed) for seed in seeds.values())
            return SeededSum(layout=layout, params=params, key_id=digest.key_id, chunks=chunks, seeds=collected)
        chunks = tuple(sum_chunks(self._column(digest, index, seeds), params, size) for index, size in enumerate(sizes))
        return CkksVector(layout=layout, params=params, key_id=digest.key_id, chunks=chunks, fresh=False)

    def _column(self, digest: RoundDigest, index: int, seeds: Mapping[str, bytearray]) -> Iterator[tuple[int, bytes]]:
        """Multiplier and chunk `index` of every upload, read from disk one at a time; appends its seed to those of its client, if asked."""
        counting = {name: coefficient for name, coefficient in digest.by_name.items() if coefficient}
        multipliers = self._context.agreement.weighting.multipliers(tuple(counting.values()))
        for name, multiplier in zip(counting, multipliers, strict=True):
            chunk = self._chunk(name, index)
            if name in seeds:
                seeds[name].extend(chunk[-SEED_BYTES:])
            yield multiplier, chunk

    def _chunk(self, name: str, index: int) -> bytes:
        """Chunk `index` of a stored upload."""
        path = self._upload_path(name)
        span = upload_chunk(path.stat().st_size, self._context, index)
        with path.open("rb") as file:
            file.seek(span.start)
            return file.read(span.stop - span.start)

    def received_bytes(self) -> dict[str, int]:
        """Bytes of the setup message, commitment, upload and approval that each client sent, by name; of all that sent any."""
        kinds = (Kind.SETUP, Kind.COMMIT, Kind.UPLOAD, Kind.APPROVAL, Kind.COEFFICIENTS)
        sent: defaultdict[str, int] = defaultdict(int)
        for kind in kinds:
            for name in self.received(kind):
                sent[name] += self._spool.path(_prefix(kind) + name).stat().st_size
        return dict(sent)

    @property
    def _key_id(self) -> bytes:
        key_id = self._spool.get(Phase.SETUP.value)
        with self._reading():
            if len(key_id) != KEY_ID_BYTES:
                raise InvalidMessageError
        return key_id

    @contextmanager
    def _reading(self) -> Generator[None]:
        """For what this server verified when it came, and kept: now it can only be damaged."""
        try:
            yield
        except (InvalidMessageError, RoundMismatchError, FileNotFoundError, IsADirectoryError) as error:
            raise DamagedFileError(
                f"the server's spool of round {self._context.round} is damaged: a message is missing or is not what came; nothing was "
                "summed; put the folder back as it was, end the round with the version of privfed that began it, or go on with a new round"
            ) from error

    def _upload_path(self, name: str) -> Path:
        return self._spool.path(_prefix(Kind.UPLOAD) + name)

    def _digest(self) -> RoundDigest:
        if self.phase in (Phase.SETUP, Phase.UPLOAD):
            raise CohortError(f"round {self._context.round} has no digest yet; close the uploads first; nothing happened")
        key_id = self._key_id
        with self._reading():
            return decode_digest(self._spool.get(Phase.UPLOAD.value), self._context, key_id)

    def _require_started(self) -> None:
        if self.phase is Phase.SETUP:
            raise CohortError(f"round {self._context.round} is still in its setup; start the uploads first; nothing happened")

    def _require_enough(self, names: Collection[str], what: str) -> None:
        least = self._context.agreement.least_participants
        if len(names) < least:
            demands = "the policy demands" if least == self._context.agreement.policy.min_clients else "the quorum is"
            raise CohortError(f"{demands} {least} clients, and there are {len(names)} {what}; nothing was summed")

    def _store(self, kind: Kind, sender: str, data: bytes, *, phase: Phase, cohort: Collection[str]) -> str:
        """Keeps a verified message, or refuses it; the same bytes again are fine whenever they come."""
        name = _prefix(kind) + sender
        if self._spool.has(name):
            stored = self._spool.get(name)
            if stored != data:
                with self._reading():
                    self._context.agreement.roster.client(sender).verify(memoryview(stored)[:-SIGNATURE_BYTES], stored[-SIGNATURE_BYTES:])
                raise CohortError(f"{sender!r} sent another {kind.name} message before; this one was dropped")
            return sender
        if self.phase is not phase:
            raise CohortError(f"the {kind.name} message of {sender!r} came in the phase {self.phase.name}; it was dropped")
        if sender not in cohort:
            raise CohortError(f"{sender!r} takes no part in round {self._context.round}; its {kind.name} message was dropped")
        self._spool.put(name, data)
        return sender


def _prefix(kind: Kind) -> str:
    return f"{kind.name.lower()}-"
