"""The consortium as an integrator describes it, whatever engine runs it."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, TypeGuard

from privfed.aggregation.gram import noise_energy
from privfed.aggregation.private_weights import PrivateWeights
from privfed.aggregation.robust import check_openable
from privfed.aggregation.rules import CumulativeRule, FedAvg, PlaintextRule, Rule
from privfed.aggregation.server_optimizer import ServerOptimizer, ServerSgd, check_server_optimizer, with_optimizer
from privfed.agreement import Validator
from privfed.client import Client
from privfed.dp.silo import SiloNoise
from privfed.errors import UnsupportedInThisModeError
from privfed.he.escrow import check_escrow_params
from privfed.he.params import CkksParams
from privfed.he.product_params import ProductParams
from privfed.he.threshold_key import ThresholdKey
from privfed.policy import OpeningPolicy
from privfed.training.loss import PerSampleLoss, binary_cross_entropy
from privfed.training.mechanism import DpSgd, NonPrivate
from privfed.training.objective import Correction
from privfed.training.scaffold import Scaffold

if TYPE_CHECKING:
    from privfed.he.escrow_secret import EscrowKey
    from privfed.he.secret import SharedKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Plaintext:
    """In place of keys: no encryption at all, for comparison runs in one process.

    Updates are the same integers on the same grid, so an encrypted run of the same updates gives the same aggregates, bit for
    bit. Whoever sums them sees every update; the report says so.

    Args:
        train_together: Trains all clients of a round as one stacked model, which is far faster where they are many and small. Their
            updates then differ from those that each trains alone in the last digits of float32.
    """

    train_together: bool = False


def is_escrow(keys: object) -> "TypeGuard[EscrowKey]":
    """Whether these keys are a key holder's. Told by what they do: who describes a consortium need not load the module with the secrets."""
    return hasattr(keys, "attempt_key")


@dataclass(frozen=True, eq=False)
class Consortium:
    """Who trains together, and how.

    Args:
        clients: The data owners.
        keys: `SharedKey`; `ThresholdKey`, which needs the parameters of `CkksParams.threshold`; `EscrowKey`, which needs those of
            `CkksParams.escrow` or `ProductParams.escrow`; or `Plaintext` for comparison runs in one process.
        rule: How aggregates are combined.
        policy: When an aggregate may be opened.
        params: Encryption parameters; they fix the public bound on a coordinate of an update and the grid.
        loss: Loss per record.
        correction: Data-independent correction of every client's gradients, for example `FedProx`; or `Scaffold`.
        silo: Noise with which every client protects itself as a whole, beside what training does for its records. Every client needs a
            ledger with a `silo_budget`.
        private_weights: That the weights of the clients stay with them; whole numbers up to a largest one. The policy then counts heads.
        validator: The client whose upload is the reference of a rule that needs one. It counts nothing in the mean, and its data are
            public or it trains with `DpSgd`.
        server_optimizer: How everybody who opens an aggregate moves the model by it, for example `FedAdam`.

    Raises:
        TypeError: If the clients, the keys or the server optimiser are of another kind.
        ValueError: If there is no client, or two have the same name; or if there is silo noise and a client has another weight than it
            was made for, or no ledger with a budget for it; or if a private weight is no whole number up to the largest one.
        UnsupportedInThisModeError: If the rule needs inner products of updates, these are encrypted, and the parameters are not
            `ProductParams` or the mode is `ThresholdKey`; if it needs the updates, and these are encrypted; if it needs a reference
            and there is no validator; or as `Scaffold.check`; or if silo noise meets anything but encrypted FedAvg without SCAFFOLD,
            or private weights anything but encrypted FedAvg without SCAFFOLD and silo noise; or if clients that train together do not
            train alike; or if `ThresholdKey` meets SCAFFOLD, silo noise, private weights, parameters with which the server weights, or
            a validator; or if `EscrowKey` meets parameters without room for its noise.
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
    validator: Validator | None = None
    server_optimizer: ServerOptimizer = field(default_factory=ServerSgd)

    def __post_init__(self) -> None:
        check_server_optimizer(self.server_optimizer)
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
            self._check_no_products()
            self._check_threshold(self.keys)
        elif is_escrow(self.keys):
            check_escrow_params(self.params)
        if self.silo is not None:
            self._check_silo(self.silo)
        if self.private_weights is not None:
            self._check_private_weights(self.private_weights)
        if self.validator is not None:
            self._check_validator(self.validator)
        if isinstance(self.keys, Plaintext) and self.keys.train_together:
            self._check_alike()
        if self.encrypted:
            _ = self.session_rule
        elif self._needs_reference and self.validator is None:
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

    def _check_no_products(self) -> None:
        if not isinstance(self.rule, PlaintextRule) and self.rule.needs_gram is True:
            raise UnsupportedInThisModeError(
                f"{self.rule.name} needs inner products of updates, which {self.mode} rounds cannot compute; nothing was started; take "
                "SharedKey with ProductParams.exact, EscrowKey with ProductParams.escrow, FedAvg, or Plaintext for a comparison run"
            )
        if self.validator is not None:
            raise UnsupportedInThisModeError(
                f"{self.validator.name!r} would be a validator, whose reference {self.mode} rounds cannot compare with updates; nothing "
                "was started; take SharedKey with ProductParams.exact, EscrowKey with ProductParams.escrow, or no validator"
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

    @property
    def _needs_reference(self) -> bool:
        return not isinstance(self.rule, PlaintextRule) and self.rule.needs_gram is True and self.rule.needs_reference

    def _check_validator(self, validator: Validator) -> None:
        found = [client for client in self.clients if client.name == validator.name]
        if not found or not self._needs_reference:
            raise ValueError(f"expected a validator among the clients, and a rule that needs a reference, got {validator.name!r} with none")
        if not validator.public and not isinstance(found[0].training, DpSgd):
            raise ValueError(
                f"expected the data of {validator.name!r} to be public, or DpSgd and a ledger that pays for them: scores tell of it; "
                "nothing was started"
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

    def _check_alike(self) -> None:
        plain = [client.training for client in self.clients if isinstance(client.training, NonPrivate) and client.ledger is None]
        alike = len({replace(training, seed=0) for training in plain}) == 1 and len(plain) == len(self.clients)
        if not alike or self.correction is not None or len({client.data.columns for client in self.clients}) > 1:
            raise UnsupportedInThisModeError(
                "clients that train together need NonPrivate training that differs in the seed at most, the same columns, no ledger and no "
                "correction; nothing was started; take Plaintext()"
            )

    @property
    def session_rule(self) -> Rule | CumulativeRule:
        """The rule, if a session can be held under it.

        Raises:
            UnsupportedInThisModeError: If it cannot.
        """
        rule = check_openable(self.rule, min_clients=self.policy.min_clients)
        if rule.needs_gram is True:
            if not isinstance(self.params, ProductParams):
                fitting = "ProductParams.escrow" if is_escrow(self.keys) else "ProductParams.exact"
                raise UnsupportedInThisModeError(
                    f"{self.rule.name} needs inner products of updates, which these parameters cannot compute; nothing was started; take "
                    f"{fitting}, or FedAvg, or Plaintext for a comparison run"
                )
            if self.silo is not None:
                raise UnsupportedInThisModeError(f"{self.rule.name} needs inner products, and silo noise allows none; nothing was started")
            if rule.needs_reference and self.validator is None:
                raise UnsupportedInThisModeError(
                    f"{self.rule.name} needs a reference, which nobody in this consortium provides; nothing was started; name a validator"
                )
        return rule

    def noise_energy(self, size: int) -> dict[str, float]:
        """Declared squared norm of the noise in an update, by client, for rules that look at inner products: they take it out of distances.

        Of clients whose noise follows from what they declare: DP-SGD with a fixed clipping norm, without a correction.

        Args:
            size: Number of coordinates of an update.
        """
        rule = self.rule
        if isinstance(rule, PlaintextRule) or rule.needs_gram is not True or self.correction is not None:
            return {}
        return {
            client.name: noise_energy(
                size,
                steps=how.steps,
                learning_rate=how.learning_rate,
                noise_multiplier=how.noise_multiplier,
                max_grad_norm=how.max_grad_norm,
                expected_batch_size=how.expected_batch_size,
            )
            for client in self.clients
            if isinstance(how := client.training, DpSgd) and how.adaptive_clipping is None
        }

    @property
    def rule_name(self) -> str:
        """Name of the rule and of the server optimiser."""
        return with_optimizer(self.rule.name, self.server_optimizer)

    @property
    def encrypted(self) -> bool:
        """Whether updates leave a client encrypted."""
        return not isinstance(self.keys, Plaintext)

    @property
    def mode(self) -> str:
        """Name of the trust mode, for reports."""
        return type(self.keys).__name__

    def __repr__(self) -> str:
        return f"Consortium(clients={len(self.clients)}, mode={self.mode}, rule={self.rule_name})"
