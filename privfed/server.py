"""The server's side of one round: bytes in, bytes out, a weighted sum on ciphertexts, and no key.

Everything that the server knows about the round stands in its spool as the signed messages themselves, so a new `Server` on
the same directory goes on where the last one stopped. It holds one upload in memory while it checks it, and one chunk of one
upload while it adds.
"""

from collections import defaultdict
from collections.abc import Collection
from pathlib import Path

from privfed.agreement import RoundContext
from privfed.digest import hash_message
from privfed.errors import CohortError, RoundMismatchError, UnsupportedInThisModeError
from privfed.identity import SIGNATURE_BYTES, Identity
from privfed.message import Kind
from privfed.server_setup import agreed_key_id, closed_commitments, require_enough
from privfed.server_spool import COMMITMENTS, HOLDER_KEY, OPENED, PRODUCTS, Phase, RoundSpool, read_setup
from privfed.server_sum import aggregate_message, announcement, decided, products_message, request_message
from privfed.trust import EscrowTrust, ThresholdTrust
from privfed.wire import check_key, decode_abort, decode_upload
from privfed.wire_commit import decode_commitment
from privfed.wire_digest import decode_approval
from privfed.wire_escrow import decode_holder_key, opened_digest
from privfed.wire_products import decode_coefficients, product_params
from privfed.wire_shares import encode_relay


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
        require_enough(context, self._selected, "selected clients")
        self._spool = RoundSpool(context=context, directory=spool)

    @property
    def phase(self) -> Phase:
        """Where the round stands.

        Raises:
            DamagedFileError: If what ended an earlier phase is gone, and something of a later one is there.
        """
        return self._spool.phase

    def received(self, kind: Kind) -> tuple[str, ...]:
        """Names of the clients whose message of this kind is stored, in roster order."""
        return self._spool.received(kind)

    def received_bytes(self) -> dict[str, int]:
        """Bytes of the setup message, commitment, upload and approval that each client sent, by name; of all that sent any."""
        kinds = (Kind.SETUP, Kind.COMMIT, Kind.UPLOAD, Kind.APPROVAL, Kind.COEFFICIENTS)
        sent: defaultdict[str, int] = defaultdict(int)
        for kind in kinds:
            for name in self.received(kind):
                sent[name] += self._spool.path(kind, name).stat().st_size
        return dict(sent)

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
            self._spool.files.put(HOLDER_KEY, data)
        except FileExistsError:
            raise CohortError("another key of the key holder came before; this one was dropped") from None

    def holder_key(self) -> bytes:
        """The key holder's public key of the attempt, as it signed it.

        Raises:
            CohortError: If it has not come.
            UnsupportedInThisModeError: If there is no key holder.
        """
        self._require_holder()
        return self._spool.holder_key()[0]

    def receive_setup(self, data: bytes) -> str:
        """Stores a client's setup message; returns the client's name.

        Raises:
            CohortError: If the client was not selected, sent another setup message before, or comes too late; where there is a key
                holder, if its key has not come.
            RoundMismatchError: If the client has another key of the key holder.
            PrivFedError: As `wire.decode_setup`.
        """
        sender, key_id = read_setup(data, self._context)
        if self._escrow:
            check_key(sender, key_id, self._spool.holder_key()[1])
        return self._spool.store(Kind.SETUP, sender, data, phase=Phase.SETUP, cohort=self._selected)

    def start_uploads(self) -> tuple[str, ...]:
        """Ends the setup: names of the clients that may upload, which all derived the same key, and its public half where there is one.

        Raises:
            CohortError: If the policy demands more clients; the setup goes on.
            ParametersMismatchError: If key ids or public keys differ; names the clients outside the largest group. Nothing was started.
        """
        cohort = self.received(Kind.SETUP)
        if self.phase is Phase.SETUP:
            self._spool.files.put(Phase.SETUP.value, agreed_key_id(self._spool, cohort))
        return cohort

    def cohort(self) -> tuple[str, ...]:
        """Names of the clients that may upload; none before the setup has ended."""
        return () if self.phase is Phase.SETUP else self.received(Kind.SETUP)

    def relay(self, name: str) -> bytes:
        """What the clients of the round tell one of them before its upload; the same bytes again when called again.

        Returns:
            A message with the shares that they made for that client, or with their commitments, for it to check; no bytes in trust modes
            that have neither.

        Raises:
            CohortError: If the setup has not ended, the commitments were not closed, or the client took no part.
        """
        if self._escrow:
            if name not in self.committed():
                raise CohortError(f"{name!r} is not among the closed commitments of round {self._context.round}; nothing happened")
            return self._spool.files.get(COMMITMENTS)
        if not isinstance(self._context.agreement.trust, ThresholdTrust):
            return b""
        self._require_started()
        if name not in self.received(Kind.SETUP):
            raise CohortError(f"{name!r} took no part in the setup of round {self._context.round}; nothing happened")
        return encode_relay(self._context, self._identity, self._spool.shares_for(name))

    def receive_commitment(self, data: bytes) -> str:
        """Verifies and stores a client's commitment to its upload; returns the client's name. In sessions with a key holder.

        Raises:
            CohortError: If the client took no part in the setup, sent another commitment before, or comes when they are closed.
            UnsupportedInThisModeError: If there is no key holder.
            PrivFedError: As `wire_commit.decode_commitment`.
        """
        self._require_started()
        self._require_holder()
        sender, _ = decode_commitment(data, self._context, self._spool.key_id)
        return self._spool.store(Kind.COMMIT, sender, data, phase=Phase.UPLOAD, cohort=self.committed() or self.received(Kind.SETUP))

    def close_commitments(self) -> tuple[str, ...]:
        """Ends the commitments: names of the clients that may upload. What is relayed from here on is one set, and never another.

        Raises:
            CohortError: If the setup has not ended, or the policy demands more clients; more commitments may come.
            UnsupportedInThisModeError: If there is no key holder.
        """
        self._require_started()
        self._require_holder()
        if not self.committed():
            self._spool.files.put(COMMITMENTS, closed_commitments(self._spool, self._identity))
        return self.committed()

    def committed(self) -> tuple[str, ...]:
        """Names of the clients in the closed commitments, in roster order; none before they were closed, and where there are none."""
        return tuple(self._spool.commitments())

    def receive_upload(self, data: bytes) -> str:
        """Verifies and stores a client's upload; returns the client's name.

        Raises:
            CohortError: If the client took no part in the setup, sent another upload before, or comes in another phase; where there is a
                key holder, if it is not the upload to which it committed, or the commitments were not closed.
            RoundMismatchError: If it is encrypted under another key.
            PrivFedError: As `wire.decode_upload`.
        """
        self._require_started()
        sender = decode_upload(data, self._context, self._spool.key_id).sender
        if self._escrow and self._spool.commitments().get(sender) != hash_message(data):
            raise CohortError(f"{sender!r} sent an upload that is not the one of its closed commitment; it was dropped")
        return self._spool.store(Kind.UPLOAD, sender, data, phase=Phase.UPLOAD, cohort=self.received(Kind.SETUP))

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
            self._spool.files.put(Phase.UPLOAD.value, announcement(self._spool, self._identity))
        self._spool.digest()  # what is announced again is what was announced
        return self._spool.files.get(Phase.UPLOAD.value)

    def participants(self) -> tuple[str, ...]:
        """Names of the clients in the announced digest; none before it was announced."""
        return () if self.phase in (Phase.SETUP, Phase.UPLOAD) else self._spool.digest().participants

    def receive_approval(self, data: bytes) -> str:
        """Verifies and stores a participant's approval; returns the participant's name.

        Raises:
            CohortError: If no digest was announced, the client is not in it, or it comes in another phase.
            RoundMismatchError: If it approves another digest.
            PrivFedError: As `wire_digest.decode_approval`.
        """
        digest = self._spool.digest()
        sender = decode_approval(data, self._context, digest)
        return self._spool.store(Kind.APPROVAL, sender, data, phase=Phase.APPROVAL, cohort=digest.participants)

    def missing_approvals(self) -> tuple[str, ...]:
        """Names of the participants that have not approved the announced digest yet."""
        approved = self.received(Kind.APPROVAL)
        return tuple(name for name in self.participants() if name not in approved)

    def products(self) -> bytes:
        """Multiplies every pair of uploads, and masks and rerandomises the products; the same bytes again when called again.

        For scored sessions.

        Returns:
            A products message, for the openers.

        Raises:
            CohortError: If an approval is missing; nothing was multiplied.
            UnsupportedInThisModeError: If the session's parameters are none for products.
        """
        params, digest = product_params(self._context), self._spool.digest()
        if not self._spool.files.has(PRODUCTS):
            if missing := self.missing_approvals():
                raise CohortError(f"approvals of {list(missing)} are missing; nothing was multiplied; wait for them")
            self._spool.files.put(PRODUCTS, products_message(self._spool, self._identity, digest, params=params))
        return self._spool.files.get(PRODUCTS)

    def receive_coefficients(self, data: bytes) -> str:
        """Verifies and stores the coefficients that an opener found; returns its name. The server learns nothing else of the scores.

        Raises:
            CohortError: If no products were made, the client is not in the digest, or it sent others before.
            RoundMismatchError: If it speaks of another digest.
            PrivFedError: As `wire_products.decode_coefficients`.
        """
        digest = self._spool.digest()
        sender, _ = decode_coefficients(data, self._context, digest)
        if not self._spool.files.has(PRODUCTS):
            raise CohortError(f"{sender!r} weighed products that were never made; its message was dropped")
        return self._spool.store(Kind.COEFFICIENTS, sender, data, phase=Phase.APPROVAL, cohort=digest.participants)

    def coefficients(self) -> dict[str, int]:
        """Integer coefficient of each participant in the sum, by name.

        Raises:
            CohortError: As `aggregate`.
        """
        return dict(decided(self._spool).by_name)

    def aggregate(self) -> bytes:
        """Sums the uploads, chunk by chunk; the same bytes again when called again.

        Returns:
            An aggregate message, for the openers.

        Raises:
            CohortError: If an approval is missing; nothing was summed.
            DamagedFileError: If what was stored is not what came; nothing was summed.
        """
        digest = self._spool.digest()
        if self.phase is Phase.APPROVAL:
            missing, trust = self.missing_approvals(), self._context.agreement.trust
            spared = len(digest.participants) - trust.quorum if isinstance(trust, ThresholdTrust) else 0
            if len(missing) > spared:
                raise CohortError(f"approvals of {list(missing)} are missing; nothing was summed; wait for them or go on with a new round")
            approved = [name for name in digest.participants if name not in missing]
            make = request_message if self._escrow else aggregate_message
            message = make(self._spool, self._identity, digest, approved=approved)
            self._spool.files.put(Phase.APPROVAL.value, message)
            return message
        message = self._spool.files.get(Phase.APPROVAL.value)
        with self._spool.reading():
            self._identity.public.verify(memoryview(message)[:-SIGNATURE_BYTES], message[-SIGNATURE_BYTES:])
        return message

    def upload(self, name: str) -> bytes:
        """A participant's upload, as it came: the key holder computes the sum itself.

        Raises:
            CohortError: If no digest was announced, or the client is not in it.
        """
        digest = self._spool.digest()
        if name not in digest.participants:
            raise CohortError(f"{name!r} is not in the digest of round {self._context.round}; nothing happened")
        with self._spool.reading():
            self._spool.announced(digest, name)
            return self._spool.message(Kind.UPLOAD, name)

    def receive_opened(self, data: bytes) -> None:
        """Stores what the key holder published, for all clients.

        Raises:
            CohortError: If nothing was requested, or other bytes came before.
            RoundMismatchError: If it is of another digest.
            PrivFedError: As `wire_escrow.decode_opened`.
        """
        digest = self._spool.digest()
        if opened_digest(data, self._context, digest.key_id) != digest:
            raise RoundMismatchError("what the key holder opened is of another digest; it was dropped and nothing happened")
        if self.phase is not Phase.DONE:
            raise CohortError(f"nothing was requested of the key holder in round {self._context.round}; its message was dropped")
        try:
            self._spool.files.put(OPENED, data)
        except FileExistsError:
            raise CohortError("the key holder sent another message before; this one was dropped") from None

    def result(self) -> bytes:
        """What every client opens, the same bytes whenever it is called: the aggregate, or what the key holder published of it.

        Raises:
            CohortError: If an approval is missing, or nothing came from the key holder yet.
        """
        return self._spool.opened() if self._escrow else self.aggregate()

    def next_history(self) -> bytes:
        """`RoundDigest.history` of this round, 32 bytes.

        Raises:
            CohortError: If no digest was announced, or nothing was summed.
        """
        final = decided(self._spool)
        if self.phase is not Phase.DONE:
            raise CohortError(f"nothing was summed in round {self._context.round}, so nothing can build on it")
        return final.history(self._context, self._spool.files.get(Phase.APPROVAL.value))

    def receive_abort(self, data: bytes) -> str:
        """Stores a client's word that it did not open the aggregate; returns the client's name. Nobody tells the server why.

        Raises:
            CohortError: If there is no aggregate yet.
            PrivFedError: As `wire.decode_abort`.
        """
        self._require_started()
        sender = decode_abort(data, self._context, self._spool.key_id)
        return self._spool.store(Kind.ABORT, sender, data, phase=Phase.DONE, cohort=self._context.agreement.roster.names)

    @property
    def _escrow(self) -> bool:
        return isinstance(self._context.agreement.trust, EscrowTrust)

    def _require_holder(self) -> None:
        if not self._escrow:
            raise UnsupportedInThisModeError("a key holder and commitments exist in EscrowKey mode only; nothing happened")

    def _require_started(self) -> None:
        if self.phase is Phase.SETUP:
            raise CohortError(f"round {self._context.round} is still in its setup; start the uploads first; nothing happened")
