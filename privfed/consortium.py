"""The consortium as an integrator describes it, whatever engine runs it."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, TypeGuard

from privfed.aggregation.private_weights import PrivateWeights
from privfed.aggregation.rules import CumulativeRule, FedAvg, PlaintextRule, Rule, WeightRule
from privfed.agreement import OpeningPolicy
from privfed.client import Client
from privfed.dp.silo import SiloNoise
from privfed.errors import UnsupportedInThisModeError
from privfed.he.escrow import check_escrow_params
from privfed.he.params import CkksParams
from privfed.he.threshold import ThresholdKey
from privfed.training.loss import PerSampleLoss, binary_cross_entropy
from privfed.training.objective import Correction
from privfed.training.scaffold import Scaffold

if TYPE_CHECKING:
    from privfed.he.escrow_secret import EscrowKey
    from privfed.he.secret import SharedKey


@dataclass(frozen=True, slots=True)
class Plaintext:
    """In place of keys: no encryption at all, for comparison runs in one process.

    Updates are the same integers on the same grid, so an encrypted run of the same updates gives the same aggregates, bit for
    bit. Whoever sums them sees every update; the report says so.
    """


def is_escrow(keys: object) -> "TypeGuard[EscrowKey]":
    """Whether these keys are a key holder's. Told by what they do: who describes a consortium need not load the module with the secrets."""
    return hasattr(keys, "public_key")


@dataclass(frozen=True, eq=False)
class Consortium:
    """Who trains together, and how.

    Args:
        clients: The data owners.
        keys: `SharedKey`; `ThresholdKey`, which needs the parameters of `CkksParams.threshold`; `EscrowKey`, which needs those of
            `CkksParams.escrow`; or `Plaintext` for comparison runs in one process.
        rule: How aggregates are combined.
        policy: When an aggregate may be opened.
        params: Encryption parameters; they fix the public bound on a coordinate of an update and the grid.
        loss: Loss per record.
        correction: Data-independent correction of every client's gradients, for example `FedProx`; or `Scaffold`.
        silo: Noise with which every client protects itself as a whole, beside what training does for its records. Every client needs a
            ledger with a `silo_budget`.
        private_weights: That the weights of the clients stay with them; whole numbers up to a largest one. The policy then counts heads.

    Raises:
        TypeError: If the clients or the keys are of another kind.
        ValueError: If there is no client, or two have the same name; or if there is silo noise and a client has another weight than it
            was made for, or no ledger with a budget for it; or if a private weight is no whole number up to the largest one.
        UnsupportedInThisModeError: If the rule needs inner products of updates, or the updates, and these are encrypted; if it
            needs a reference; or as `Scaffold.check`; or if silo noise meets anything but encrypted FedAvg without SCAFFOLD,
            or private weights anything but encrypted FedAvg without SCAFFOLD and silo noise; or `ThresholdKey` any of these, or
            parameters with which the server weights.
    """

    clients: Sequence[Client]
    _: KW_ONLY
    keys: "SharedKey | ThresholdKey | EscrowKey | Plaintext"
    rule: Rule | CumulativeRule | PlaintextRule = field(default_factory=FedAvg)
    policy: OpeningPolicy = field(default_factory=OpeningPolicy)
    params: CkksParams = field(default_factory=CkksParams.standard)
    loss: PerSampleLoss = binary_cross_entropy
    correction: Correction | Scaffold | None = None
    silo: SiloNoise | None = None
    private_weights: PrivateWeights | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "clients", tuple(self.clients))
        for client in self.clients:
            if not isinstance(client, Client):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers without a type checker
                raise TypeError(f"expected clients to be Client objects, got {type(client).__name__}")
        self._check_keys()
        names = [client.name for client in self.clients]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"expected at least one client, each with its own name, got {names}")
        if isinstance(self.correction, Scaffold):
            weights = {client.name: client.weight for client in self.clients}
            training = {client.name: client.training for client in self.clients}
            self.correction.check(weights=weights, training=training, rule=self.rule)
        if isinstance(self.keys, ThresholdKey):
            self._check_threshold(self.keys)
        elif is_escrow(self.keys):
            check_escrow_params(self.params)
        if self.silo is not None:
            self._check_silo(self.silo)
        if self.private_weights is not None:
            self._check_private_weights(self.private_weights)
        if self.encrypted:
            _ = self.session_rule
        elif not isinstance(self.rule, PlaintextRule) and self.rule.needs_gram is True and self.rule.needs_reference:
            raise UnsupportedInThisModeError(
                f"{self.rule.name} needs a reference, which nobody in this consortium provides; nothing was started"
            )

    def _check_keys(self) -> None:
        # Told by what it does: who describes a consortium need not load the module with the secrets.
        if isinstance(self.keys, type) or not (
            isinstance(self.keys, Plaintext | ThresholdKey) or hasattr(self.keys, "round_key") or is_escrow(self.keys)
        ):
            got = f"the class {self.keys.__name__}" if isinstance(self.keys, type) else type(self.keys).__name__
            raise TypeError(
                "expected keys to be a SharedKey, as SharedKey.generate() makes it, a ThresholdKey, an EscrowKey, or Plaintext(), "
                f"got {got}"
            )

    def _check_threshold(self, key: ThresholdKey) -> None:
        if key.clients != len(self.clients):
            raise ValueError(f"expected a ThresholdKey for {len(self.clients)} clients, got one for {key.clients}")
        key.check_params(self.params)
        refused = {
            "SCAFFOLD, whose variates follow updates that are not scaled before they are encrypted": isinstance(self.correction, Scaffold),
            "noise for whole silos, which is weighted before it is added, and not after": self.silo is not None,
            "private weights, which nobody could divide by": self.private_weights is not None,
        }
        if unsupported := [words for words, present in refused.items() if present]:
            raise UnsupportedInThisModeError(
                "ThresholdKey adds what the clients scaled by their public shares of all weights, and so has no "
                f"{'; and no '.join(unsupported)}; nothing was started; take SharedKey"
            )

    def _check_silo(self, silo: SiloNoise) -> None:
        if not self.encrypted or not isinstance(self.rule, FedAvg) or isinstance(self.correction, Scaffold):
            raise UnsupportedInThisModeError(
                "noise for whole silos needs encryption, FedAvg, and no SCAFFOLD: its promise is for the sum, so no single update and no "
                "inner product may be seen, and no coefficient chosen after it; nothing was started"
            )
        weights = {client.name: client.weight for client in self.clients}
        if weights != dict(silo.weights):
            raise ValueError(f"expected the weights for which the silo noise was made, {dict(silo.weights)}, got {weights}")
        without = [client.name for client in self.clients if client.ledger is None or client.ledger.terms.silo_budget is None]
        if without:
            raise ValueError(f"expected a ledger with a silo_budget for every client, got none for {without}")

    def _check_private_weights(self, private: PrivateWeights) -> None:
        if not self.encrypted or not isinstance(self.rule, FedAvg) or self.silo is not None or isinstance(self.correction, Scaffold):
            raise UnsupportedInThisModeError(
                "private weights need encryption and FedAvg, without silo noise and SCAFFOLD; nothing was started; agree on public weights"
            )
        for client in self.clients:
            private.check(client.weight, name=client.name)

    @property
    def session_rule(self) -> WeightRule:
        """The rule, if a session can be held under it.

        Raises:
            UnsupportedInThisModeError: If it cannot.
        """
        if isinstance(self.rule, PlaintextRule):
            raise UnsupportedInThisModeError(
                f"{self.rule.name} needs to see every update; nothing was started; take Plaintext for a comparison run"
            )
        if self.rule.needs_gram is True:
            raise UnsupportedInThisModeError(
                f"{self.rule.name} needs inner products of updates, which {self.mode} rounds cannot compute; nothing was started; "
                "take FedAvg, or Plaintext for a comparison run"
            )
        return self.rule

    @property
    def encrypted(self) -> bool:
        """Whether updates leave a client encrypted."""
        return not isinstance(self.keys, Plaintext)

    @property
    def mode(self) -> str:
        """Name of the trust mode, for reports."""
        return type(self.keys).__name__

    def __repr__(self) -> str:
        return f"Consortium(clients={len(self.clients)}, mode={self.mode}, rule={self.rule.name})"
