"""A round as it ran: its real messages and what was really opened, all in one place.

Only an auditor holds such a record. It is made from canary rows, never from anybody's data.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from privfed.agreement import RoundContext
from privfed.attacks.adversary import Form, Holding
from privfed.he import threshold
from privfed.he.additive import CkksVector, SeededSum, weighted_sum
from privfed.he.codec import dequantise, quantise
from privfed.he.escrow import RunningSum, SealedVector
from privfed.he.escrow_secret import EscrowKey
from privfed.he.params import CkksParams
from privfed.he.secret import RoundKey, SharedKey, open_sum
from privfed.protect import round_key
from privfed.scanner import bytes_hold_key
from privfed.trust import EscrowTrust, ThresholdTrust
from privfed.update import Aggregate, PlainVector
from privfed.wire import decode_setup, decode_upload
from privfed.wire_aggregate import decode_aggregate
from privfed.wire_commit import decode_commitment, decode_commitments
from privfed.wire_digest import decode_approval, decode_digest
from privfed.wire_escrow import decode_holder_key, decode_opened, decode_request
from privfed.wire_shares import decode_dealt_setup


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class EncryptedRecord:
    """An encrypted round as it ran. Secret: it contains the key, or what was encrypted.

    Args:
        context: Agreement, round, attempt and history.
        keys: The clients' shared key, or the key holder's; None in `ThresholdKey` mode, in which there is none.
        updates: What each client trained, by name: in `ThresholdKey` mode nobody but this process has it.
        start: The model before the round.
        opened: What the clients opened.
        published: The same in steps of the grid, before the mean is taken and with all that was published, of shape (layout.size,).
        stored: Every file that the server keeps, by its path.
    """

    context: RoundContext
    keys: SharedKey | EscrowKey | None
    updates: Mapping[str, PlainVector]
    start: PlainVector
    opened: Aggregate[PlainVector]
    published: NDArray[np.float64]
    stored: Mapping[str, bytes]

    @property
    def params(self) -> CkksParams:
        """Encryption parameters. Public."""
        return self.context.agreement.params

    @cached_property
    def _round_key(self) -> RoundKey | None:
        return round_key(self.keys, self.context) if isinstance(self.keys, SharedKey) else None

    @cached_property
    def _key_id(self) -> bytes:
        match self.context.agreement.trust:
            case EscrowTrust():
                return decode_holder_key(self._message("holder_key"), self.context).key_id
            case ThresholdTrust():
                return threshold.key_id(self.context.digest)
            case _:
                return b"" if self._round_key is None else self._round_key.key_id

    @cached_property
    def files(self) -> tuple[tuple[str, Holding], ...]:
        """What the server stores: the start of each file's name, and what the file is, verified as the message it is called.

        Raises:
            ValueError: If there is a file that no message accounts for: what it gives away is not known.
            PrivFedError: If a file is not the message that it is called.
        """
        return tuple(self._identify(path, data) for path, data in sorted(self.stored.items()))

    @property
    def key_at_server(self) -> bool:
        """Whether a file of the server holds the secret key, so that the server can open everything."""
        return any(holding.form is Form.KEY for _, holding in self.files)

    @property
    def total(self) -> CkksVector | None:
        """The encrypted sum that was opened, as anyone who has the message can make it; None where no key of the clients opens it."""
        if self._round_key is None:
            return None
        message = decode_aggregate(self._message("aggregate"), self.context, self._round_key.key_id)
        if not isinstance(message.total, SeededSum):
            return message.total if isinstance(message.total, CkksVector) else None
        return message.total.regenerate(self.context.agreement.weighting.multipliers(message.digest.coefficients))

    def _identify(self, path: str, data: bytes) -> tuple[str, Holding]:
        if self.keys is not None and bytes_hold_key(data, self.keys, self.context):
            return "", Holding(what=f"the secret key, in {path}", size=len(data), form=Form.KEY)
        kind, _, sender = path.rpartition("/")[2].partition("-")
        key_id, context, trust = self._key_id, self.context, self.context.agreement.trust
        match kind:
            case "setup" if isinstance(trust, ThresholdTrust):
                decode_dealt_setup(data, context)
                what, form = f"shares of {sender}, each encrypted to one client", Form.CIPHERTEXT
            case "approval" if isinstance(trust, ThresholdTrust):
                decode_approval(data, context, decode_digest(self._message("digest"), context, key_id))
                what, form = f"approval of {sender}, with its part in opening the sum", Form.NUMBERS
            case "aggregate" if isinstance(trust, ThresholdTrust):
                decode_aggregate(data, context, key_id)
                what, form = "sum, with the answers of a quorum that open it", Form.OPENABLE
            case "aggregate" if isinstance(trust, EscrowTrust):
                decode_request(data, context, key_id)
                what, form = "request to the key holder, with all approvals", Form.PUBLIC
            case "holder_key" if isinstance(trust, EscrowTrust):
                decode_holder_key(data, context)
                what, form = "public keys of the key holder for this attempt", Form.PUBLIC
            case "commit" if isinstance(trust, EscrowTrust):
                decode_commitment(data, context, key_id)
                what, form = f"commitment of {sender} to its upload", Form.PUBLIC
            case "commitments" if isinstance(trust, EscrowTrust):
                decode_commitments(data, context, key_id)
                what, form = "commitments of all clients, as they were relayed", Form.PUBLIC
            case "opened" if isinstance(trust, EscrowTrust):
                decode_opened(data, context, key_id)
                what, form = "opened sum, encrypted to the clients", Form.CIPHERTEXT
            case "setup":
                decode_setup(data, context)
                what, form = f"setup message of {sender}", Form.PUBLIC
            case "upload":
                decode_upload(data, context, key_id)
                what, form = f"encrypted update of {sender}", Form.CIPHERTEXT
            case "digest":
                decode_digest(data, context, key_id)
                what, form = "announcement of who takes part, with which coefficients", Form.PUBLIC
            case "approval":
                decode_approval(data, context, decode_digest(self._message("digest"), context, key_id))
                what, form = f"approval of {sender}", Form.PUBLIC
            case "aggregate":
                decode_aggregate(data, context, key_id)
                what, form = "encrypted sum, with all approvals", Form.CIPHERTEXT
            case "key" if data == key_id:
                what, form = "name of the round's key, not the key", Form.PUBLIC
            case "identity.pem":
                what, form = "its own signing key", Form.OWN
            case _:
                raise ValueError(f"expected only messages of the round and its own identity at the server, got {path!r} too")
        return kind, Holding(what=what, size=len(data), form=form)

    def _message(self, name: str) -> bytes:
        return next(data for path, data in self.stored.items() if path.rpartition("/")[2] == name)

    def update_of(self, client: str) -> PlainVector:
        """One client's update on the grid: opened from its upload, as whoever has its bytes and the key can; where there is no key, known.

        Where clients pre-scale, the public share that it was multiplied by is taken off again.
        """
        share = self.context.agreement.weighting.share(client)
        values = self._grid_of(client, share) * self.params.step / float(share or 1)
        return PlainVector(layout=self.context.agreement.layout, values=values)

    def _grid_of(self, client: str, share: Fraction | None) -> NDArray[np.int64]:
        if self.keys is None:
            return quantise(self.updates[client].values, self.params, share)[0]
        upload = decode_upload(self._message(f"upload-{client}"), self.context, self._key_id).vector
        if isinstance(self.keys, EscrowKey) and isinstance(upload, SealedVector):
            key = self.keys.attempt_key(binding=self.context.digest, params=self.params)
            total = RunningSum(layout=upload.layout, params=self.params, key_id=self._key_id)
            total.add(1, key.unseal(upload, sender=client))
            return key.open_sum(total.total(), coefficients=(1,))
        if self._round_key is None or not isinstance(upload, CkksVector):
            raise ValueError("expected uploads under the key of the record, got others")
        return open_sum(weighted_sum([upload], [1]), self._round_key, coefficients=(1,))


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PlaintextRecord:
    """A round in the clear as it ran, for comparison. Private.

    Args:
        params: The grid.
        start: The model before the round.
        opened: What the clients got.
        updates: What each client trained, by name.
    """

    params: CkksParams
    start: PlainVector
    opened: Aggregate[PlainVector]
    updates: Mapping[str, PlainVector]

    def update_of(self, client: str) -> PlainVector:
        """One client's update as the server sees it: on the grid."""
        grid, _ = quantise(self.updates[client].values, self.params)
        return PlainVector(layout=self.start.layout, values=dequantise(grid, 1, self.params))


Record = EncryptedRecord | PlaintextRecord
