"""What all parties of a session agreed on before it began. All of it is public, and every message is bound to all of it."""

import hashlib
import json
import math
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import ClassVar, Literal, TypeAlias

from privfed.aggregation.linear import check_weight
from privfed.aggregation.private_weights import PrivateWeights
from privfed.aggregation.rules import CumulativeRule, FedAvg, Rule, WeightRule
from privfed.aggregation.server_optimizer import ServerOptimizer, ServerSgd, check_server_optimizer, with_optimizer
from privfed.aggregation.weighting import Weighting
from privfed.dp.entries import is_population
from privfed.dp.silo import SiloNoise
from privfed.errors import OpeningRefusedError, UnsupportedInThisModeError
from privfed.he.escrow import check_escrow_params
from privfed.he.params import SEALED_TAGS_BYTES, CkksParams
from privfed.he.product_params import ProductParams
from privfed.hpke import SEALED_OVERHEAD_BYTES
from privfed.identity import Roster
from privfed.policy import OpeningPolicy
from privfed.trust import EscrowTrust, ThresholdTrust, Trust
from privfed.update import Layout

SESSION_BYTES = 16
DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedRule:
    """A rule that looks at inner products, known by its name alone. It is all that a server needs of it: it chooses nothing.

    Args:
        name: Canonical name.
        needs_reference: Whether it looks at a reference.
    """

    needs_gram: ClassVar[Literal[True]] = True

    name: str
    needs_reference: bool


AgreedRule: TypeAlias = Rule | CumulativeRule | NamedRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Validator:
    """Who provides the reference that a rule needs: a client whose upload is one, and counts nothing in the mean. Public.

    The reference comes from data that are public, or for which a privacy ledger pays, and never from the server: who chooses a
    reference at will learns from the scores who had which records. The commitment names the data before the session begins. It is
    salted, so that it does not tell whether a guess of the data is right.

    Args:
        name: Its name in the roster.
        commitment: 32 bytes, from `commit`.
        public: Whether its data are public. Else it trains with differential privacy, on a ledger.

    Raises:
        ValueError: If the commitment is not 32 bytes.
    """

    name: str
    commitment: bytes
    public: bool

    def __post_init__(self) -> None:
        if type(self.commitment) is not bytes or len(self.commitment) != DIGEST_BYTES:
            raise ValueError(f"expected a commitment of {DIGEST_BYTES} bytes, as Validator.commit makes it")

    @staticmethod
    def commit(data: bytes, *, salt: bytes) -> bytes:
        """What a validator commits to: SHA-256 over a salt and its data, 32 bytes.

        Args:
            data: The records, in a form of the validator's own that an auditor can be shown. Private.
            salt: 32 bytes from the operating system's generator, kept with the data. Private.

        Raises:
            ValueError: If the salt is not 32 bytes.
        """
        if len(salt) != DIGEST_BYTES:
            raise ValueError(f"expected a salt of {DIGEST_BYTES} bytes, got {len(salt)}")
        return hashlib.sha256(b"privfed reference data v1" + salt + hashlib.sha256(data).digest()).digest()


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What a session is about: who, what, how weighted, under which policy. Public; every party holds the same one.

    Args:
        session: 16 bytes that no other session has.
        roster: The pinned parties.
        params: Encryption parameters.
        layout: Names and shapes of the model's tensors.
        start: `PlainVector.digest` of the weights from which all start, 32 bytes.
        weights: Weight of every client of the roster, by name. Agreed numbers, not counts of private records.
        rule: How coefficients follow from the weights.
        policy: When an aggregate may be opened.
        populations: Population of the privacy ledger of every client that keeps one, by name of the client. In every round its peers
            demand the ledger's head, and refuse one that was set back.
        silo: Noise that protects whole silos, which every client adds to its upload; None for none.
        private_weights: That clients keep their weights to themselves: then all of `weights` are 1, and the policy counts heads. None
            where the weights are public.
        validator: Whose upload is the reference; for the rules that need one, and for no others.
        noise_energy: Declared squared norm of the noise in an update, by name of the client, for rules that look at inner products; see
            `privfed.aggregation.gram.noise_energy`. Clients that are not named declare none.
        server_optimizer: How everybody who opens an aggregate moves the model by it.
        trust: Who opens what; None where the clients share a key.

    Raises:
        TypeError: If the server optimiser is none that `encode_agreement` can name.
        ValueError: If the session is not 16 bytes or the start not 32, a client has no weight, a population is not that of a client,
            or rule and parameters cannot express the weights; or as `Weighting`, if the noise is for another length of updates, or
            if there are public weights beside private ones.
        UnsupportedInThisModeError: If the rule needs inner products, and the parameters are not `ProductParams` or there is silo noise,
            or `ThresholdKey`; or a reference, and there is no validator; or if there is a validator in `ThresholdKey` mode; or if the
            parameters are for another trust mode; or as `Weighting`, or if private weights meet silo noise, another rule than FedAvg, or
            clients that pre-scale; or if `ThresholdKey` meets parameters with which the server weights, silo noise or private weights.
        OpeningRefusedError: If the policy would refuse even a round of all clients.
    """

    session: bytes
    roster: Roster
    params: CkksParams
    layout: Layout
    start: bytes
    weights: Mapping[str, float]
    rule: AgreedRule
    policy: OpeningPolicy = field(default_factory=OpeningPolicy)
    populations: Mapping[str, str] = field(default_factory=dict[str, str])
    silo: SiloNoise | None = None
    private_weights: PrivateWeights | None = None
    validator: Validator | None = None
    noise_energy: Mapping[str, float] = field(default_factory=dict[str, float])
    server_optimizer: ServerOptimizer = field(default_factory=ServerSgd)
    trust: Trust | None = None

    def __post_init__(self) -> None:
        check_server_optimizer(self.server_optimizer)
        if not (type(self.session) is type(self.start) is bytes):
            raise ValueError("expected the session and the start to be bytes")
        if len(self.session) != SESSION_BYTES or len(self.start) != DIGEST_BYTES:
            raise ValueError(
                f"expected a session of {SESSION_BYTES} bytes and a start of {DIGEST_BYTES}, got {len(self.session)} and {len(self.start)}"
            )
        if set(self.weights) != set(self.roster.names):
            missing, extra = sorted(set(self.roster.names) - set(self.weights)), sorted(set(self.weights) - set(self.roster.names))
            raise ValueError(f"expected a weight for every client of the roster; missing {missing}, not in the roster {extra}")
        weights = {name: check_weight(self.weights[name], name=name) for name in self.roster.names}
        object.__setattr__(self, "weights", MappingProxyType(weights))
        if strangers := sorted(set(self.populations) - set(self.roster.names)):
            raise ValueError(f"expected populations of clients of the roster, got some of {strangers}")
        kept = {name: self.populations[name] for name in self.roster.names if name in self.populations}
        if not all(is_population(population) for population in kept.values()):
            raise ValueError("expected populations of 1 to 200 printable characters, got others")
        object.__setattr__(self, "populations", MappingProxyType(kept))
        if self.silo is not None and self.silo.coordinates != self.layout.size:
            raise ValueError(f"expected silo noise for updates of {self.layout.size} coordinates, got {self.silo.coordinates}")
        self._check_trust()
        if self.private_weights is not None:
            self._check_private(self.private_weights)
        self._check_scoring()
        self._check_noise_energy()
        self.coefficients(self.roster.names)

    @property
    def scored(self) -> bool:
        """Whether the coefficients follow from inner products of the updates, and are known only after these were opened."""
        return self.rule.needs_gram is True

    @property
    def weighed_by_clients(self) -> bool:
        """Whether a session is `scored`, and it is the clients that open inner products."""
        return self.scored and self.trust is None

    def _check_scoring(self) -> None:
        rule = self.rule
        if rule.needs_gram is True:
            if not isinstance(self.params, ProductParams):
                fitting = "ProductParams.exact" if self.trust is None else "ProductParams.escrow"
                raise UnsupportedInThisModeError(
                    f"{rule.name} needs inner products of updates, and these parameters cannot multiply ciphertexts; no session was made; "
                    f"take {fitting}, or the rule in the clear"
                )
            if self.silo is not None:
                raise UnsupportedInThisModeError(
                    f"{rule.name} needs inner products of updates, of which noise for whole silos allows none; no session was made"
                )
            if rule.needs_reference and self.validator is None:
                raise UnsupportedInThisModeError(f"{rule.name} needs a reference, and there is no validator; no session was made")
        if self.validator is not None:
            if not (rule.needs_gram is True and rule.needs_reference):
                raise ValueError(f"expected no validator beside {rule.name}, which needs no reference")
            if self.validator.name not in self.roster.names:
                raise ValueError(f"expected a validator of the roster, got {self.validator.name!r}")

    def _check_noise_energy(self) -> None:
        if self.noise_energy and not self.scored:
            raise ValueError(f"expected no noise_energy beside {self.rule.name}, which looks at no inner products")
        if strangers := sorted(set(self.noise_energy) - set(self.roster.names)):
            raise ValueError(f"expected a noise_energy of clients of the roster, got some of {strangers}")
        energies = {name: self.noise_energy[name] for name in self.roster.names if name in self.noise_energy}
        for energy in energies.values():
            if not isinstance(energy, float) or not 0 < energy < math.inf:
                raise ValueError(f"expected a noise_energy above 0 and finite, got {energy!r}")
        object.__setattr__(self, "noise_energy", MappingProxyType(energies))

    def contributors(self, participants: Collection[str]) -> tuple[str, ...]:
        """Those participants whose upload may count in the mean: all but the validator."""
        return tuple(name for name in participants if self.validator is None or name != self.validator.name)

    def _check_trust(self) -> None:
        if isinstance(self.trust, ThresholdTrust) and (self.scored or self.validator is not None):
            what = f"{self.rule.name} needs" if self.scored else "a validator is for"
            raise UnsupportedInThisModeError(
                f"{what} inner products of updates, which {self.trust.mode} rounds cannot compute; no session was made; take SharedKey "
                "with ProductParams.exact, EscrowKey with ProductParams.escrow, or FedAvg without a validator"
            )
        if isinstance(self.trust, EscrowTrust):
            self._check_escrow(self.trust)
        elif self.params.asymmetric:
            fitting = "ProductParams.exact" if isinstance(self.params, ProductParams) else "CkksParams.standard"
            raise UnsupportedInThisModeError(f"these parameters are for EscrowKey; nothing was agreed; take {fitting}")
        if isinstance(self.trust, ThresholdTrust):
            self._check_threshold(self.trust)

    def _check_encryption_keys(self, trust: Trust) -> None:
        if set(trust.encryption_keys) != set(self.roster.names):
            raise ValueError("expected an encryption key of every client of the roster, and of nobody else")

    def _check_escrow(self, trust: EscrowTrust) -> None:
        self._check_encryption_keys(trust)
        if trust.holder.name in {self.roster.server.name, *self.roster.names}:
            raise ValueError(f"expected a key holder beside the server and the clients, got {trust.holder.name!r}, which is one of them")
        check_escrow_params(self.params)

    def _check_threshold(self, trust: ThresholdTrust) -> None:
        self._check_encryption_keys(trust)
        if self.silo is not None or self.private_weights is not None:
            raise UnsupportedInThisModeError(
                "ThresholdKey adds what the clients have scaled by their public shares of all weights: there is no weighting after the "
                "noise of a silo, and no private weight; nothing was agreed; take SharedKey"
            )
        trust.key.check_params(self.params)

    def _check_private(self, private: PrivateWeights) -> None:
        if self.silo is not None or self.params.prescaled or not isinstance(self.rule, FedAvg):
            raise UnsupportedInThisModeError(
                "private weights need FedAvg without silo noise, and parameters for which the clients do not pre-scale; nothing was "
                "agreed; take CkksParams.standard"
            )
        if set(self.weights.values()) != {1}:
            raise ValueError("expected weights of 1 beside private weights, because the weights of an agreement are public")
        private.check_capacity(self.params, clients=len(self.weights))

    @property
    def mode(self) -> str:
        """Name of the trust mode."""
        return "SharedKey" if self.trust is None else self.trust.mode

    @property
    def least_participants(self) -> int:
        """Fewest clients with which a round can be held: those that the policy demands, or the quorum."""
        return max(self.policy.min_clients, 0 if self.trust is None else self.trust.quorum)

    @cached_property
    def upload_chunk_sizes(self) -> tuple[int, ...]:
        """Bytes of each chunk of an upload: the same of all, but for the last one, which may be cut where the clients share a key."""
        if self.trust is None:
            return self.params.fresh_chunk_sizes(self.sent_layout)
        sealed = self.params.sum_chunk_bytes + SEALED_OVERHEAD_BYTES
        size = sealed if isinstance(self.trust, EscrowTrust) else self.params.polynomial_bytes
        return (size,) * self.params.chunks(self.sent_layout)

    @property
    def upload_tags_bytes(self) -> int:
        """Bytes of the sealed tags behind the chunks of an upload: without a shared key there are none."""
        return SEALED_TAGS_BYTES if self.trust is None else 0

    @property
    def setup_key_bytes(self) -> int:
        """Bytes of the round's public key in a setup message, where the server multiplies uploads under a shared key."""
        return self.params.public_key_bytes if self.trust is None and self.scored and isinstance(self.params, ProductParams) else 0

    @property
    def answer_bytes(self) -> int:
        """Bytes of a participant's sum of shares in its approval, where it answers with one."""
        return self.params.polynomial_bytes if isinstance(self.trust, ThresholdTrust) else 0

    @property
    def opened_bytes(self) -> int:
        """Bytes of one coordinate of an opened sum, as a key holder encrypts it to the clients."""
        return ((2 * self.params.largest_sum).bit_length() + 7) // 8

    @cached_property
    def sent_layout(self) -> Layout:
        """Layout of what is encrypted: the model's, with the weight where weights are private."""
        return self.layout if self.private_weights is None else self.private_weights.layout(self.layout)

    def coefficients(self, participants: Collection[str]) -> dict[str, int]:
        """The integer weights in the mean that a round of these participants must have, in roster order; zeros if they are `scored`.

        The server, every participant and every opener compute them here, each for itself. The policy is checked on these, whoever
        applies them: see `Weighting`.

        Raises:
            OpeningRefusedError: If the policy or the silo noise does not allow an opening of these participants, or one is not in the
                roster.
        """
        strangers = sorted(set(participants) - self.weights.keys())
        if strangers or not participants:
            raise OpeningRefusedError(f"expected participants of the roster, got none or strangers {strangers}; nothing was opened")
        if self.scored:
            contributors = self.contributors(participants)
            if self.validator is not None and len(contributors) == len(participants):
                raise OpeningRefusedError(f"the reference of {self.validator.name!r} is missing; nothing was opened")
            if len(contributors) < self.policy.min_clients:
                raise OpeningRefusedError(
                    f"{len(contributors)} clients contribute and the policy demands {self.policy.min_clients}; nothing was opened"
                )
            return {name: 0 for name in self.roster.names if name in participants}
        if self.silo is not None:
            self.silo.check_arrivals(participants)
        if self.trust is not None and len(set(participants)) < self.trust.quorum:
            raise OpeningRefusedError(
                f"{len(set(participants))} clients are fewer than the quorum of {self.trust.quorum}; nothing was opened"
            )
        coefficients = self.weighting.coefficients(participants)
        self.policy.check(coefficients)
        return coefficients

    @cached_property
    def weighting(self) -> Weighting:
        """Who applies the weights, and what a mean is divided by."""
        return Weighting(weights=self.weights, rule=self._weight_rule, params=self.params, silo=self.silo)

    @property
    def _weight_rule(self) -> WeightRule:
        # Coefficients of scored rounds do not follow from the weights. Who multiplies, and that nobody pre-scales, is as with FedAvg.
        return FedAvg() if self.rule.needs_gram is True else self.rule

    @cached_property
    def parts(self) -> Mapping[str, bytes]:
        """SHA-256 of each part, 32 bytes, by name in the order of the wire header: what differs can be named."""
        weights = b"".join(struct.pack(">d", float(weight)) for weight in self.weights.values())
        policy = struct.pack(">Qdd", self.policy.min_clients, self.policy.max_share, self.policy.min_effective_clients)
        rule = with_optimizer(self.rule.name, self.server_optimizer).encode()
        for name, energy in self.noise_energy.items():
            rule += b"\0noise" + struct.pack(">Id", len(name.encode()), energy) + name.encode()
        if self.validator is not None:
            name = self.validator.name.encode()
            rule += b"\0" + len(name).to_bytes(4, "big") + name + self.validator.commitment + bytes([self.validator.public])
        populations = json.dumps(list(self.populations.items())).encode()
        silo = b"none" if self.silo is None else self.silo.digest
        private = b"none" if self.private_weights is None else struct.pack(">Q", self.private_weights.largest)
        trust = b"shared key" if self.trust is None else self.trust.digest
        return MappingProxyType(
            {
                "roster": self.roster.digest,
                "params": self.params.digest,
                "layout": self.layout.digest,
                "start": self.start,
                "weights": hashlib.sha256(b"privfed weights v1" + weights).digest(),
                "rule": hashlib.sha256(b"privfed rule v1" + rule).digest(),
                "policy": hashlib.sha256(b"privfed policy v2" + policy).digest(),
                "populations": hashlib.sha256(b"privfed populations v1" + populations).digest(),
                "silo noise": hashlib.sha256(b"privfed silo noise v1" + silo).digest(),
                "private weights": hashlib.sha256(b"privfed private weights v1" + private).digest(),
                "trust mode": hashlib.sha256(b"privfed trust mode v1" + trust).digest(),
            }
        )

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 over the session and all parts, 32 bytes."""
        return hashlib.sha256(b"privfed agreement v1" + self.session + b"".join(self.parts.values())).digest()


@dataclass(frozen=True, kw_only=True)
class RoundContext:
    """One attempt at one round of a session. Public.

    Args:
        agreement: What the session agreed on.
        round: Number of the round, from 0 to 2^32 - 1.
        attempt: Number of the attempt, from 0 to 2^32 - 1. A new attempt has new keys.
        history: `RoundDigest.digest` of the last round that was opened before, 32 bytes; zeros before the first. As a digest
            covers the history before it, equal histories mean equal models.

    Raises:
        ValueError: If a number or a length is out of its range.
    """

    agreement: Agreement
    round: int
    attempt: int = 0
    history: bytes = bytes(DIGEST_BYTES)

    def __post_init__(self) -> None:
        if type(self.history) is not bytes or len(self.history) != DIGEST_BYTES:
            raise ValueError(f"expected a history of {DIGEST_BYTES} bytes, got something else")
        for number in (self.round, self.attempt):
            if type(number) is not int or not 0 <= number < 2**32:
                raise ValueError(f"expected round and attempt from 0 to 2^32 - 1, got {number!r}")

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 over the agreement, the round, the attempt and the history, 32 bytes."""
        numbers = struct.pack(">II", self.round, self.attempt)
        return hashlib.sha256(b"privfed round v1" + self.agreement.digest + numbers + self.history).digest()
