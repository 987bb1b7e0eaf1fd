"""A round as it ran: its real messages and what was really opened, all in one place.

Only an auditor holds such a record. It is made from canary rows, never from anybody's data.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from privfed.agreement import RoundContext
from privfed.attacks.adversary import Form, Holding
from privfed.he.additive import CkksVector, weighted_sum
from privfed.he.codec import dequantise, quantise
from privfed.he.params import CkksParams
from privfed.he.secret import RoundKey, SharedKey, open_sum
from privfed.protect import round_key
from privfed.update import Aggregate, PlainVector
from privfed.wire import decode_approval, decode_digest, decode_setup, decode_upload
from privfed.wire_aggregate import decode_aggregate


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class EncryptedRecord:
    """An encrypted round as it ran. Secret: it contains the key.

    Args:
        context: Agreement, round, attempt and history.
        keys: The clients' shared key.
        start: The model before the round.
        opened: What the clients opened.
        stored: Every file that the server keeps, by its path.
    """

    context: RoundContext
    keys: SharedKey
    start: PlainVector
    opened: Aggregate[PlainVector]
    stored: Mapping[str, bytes]

    @property
    def params(self) -> CkksParams:
        """Encryption parameters. Public."""
        return self.context.agreement.params

    @cached_property
    def _round_key(self) -> RoundKey:
        return round_key(self.keys, self.context)

    @cached_property
    def files(self) -> tuple[tuple[str, Holding], ...]:
        """What the server stores: the start of each file's name, and what the file is, verified as the message it is called.

        Raises:
            ValueError: If there is a file that no message accounts for: what it gives away is not known.
            PrivFedError: If a file is not the message that it is called.
        """
        return tuple(self._identify(path, data) for path, data in sorted(self.stored.items()))

    def _identify(self, path: str, data: bytes) -> tuple[str, Holding]:
        kind, _, sender = path.rpartition("/")[2].partition("-")
        key_id, context = self._round_key.key_id, self.context
        match kind:
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
        """Opens one client's upload, as whoever has its bytes and the key can: a sum of one is a sum."""
        upload = decode_upload(self._message(f"upload-{client}"), self.context, self._round_key.key_id).vector
        if not isinstance(upload, CkksVector):
            raise ValueError("expected a round under a shared key")
        grid = open_sum(weighted_sum([upload], [1]), self._round_key, coefficients=(1,))
        return PlainVector(layout=upload.layout, values=dequantise(grid, 1, self.params))


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
