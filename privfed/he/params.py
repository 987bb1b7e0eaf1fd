"""Encryption parameters: which CKKS ring, which integer grid, and the proof that a weighted sum fits into it.

An update is quantised to integers of at most `amplitude`, shifted left by `guard_bits`, encrypted, added up by the server,
decrypted, and rounded back to the grid. The sum is exact, bit for bit, when two inequalities hold for the worst case (no
probability is involved; a CKKS sum beyond half the modulus would wrap around silently):

    noise < 2^(guard_bits - 1)                                   the noise rounds away
    2^guard_bits * largest_sum + noise < modulus / 2             the sum does not wrap around

Who applies the weights decides what the largest sum is. The server multiplies by integers of at most W in sum: the largest sum
is W * amplitude, and the noise is W times that of one ciphertext. Or each of K clients multiplies by its share of all weights
before it encrypts, and the server only adds: then it is amplitude + K / 2, for K roundings to the grid, and the noise is K times
that of one. Pre-scaling takes fewer bits, and weights that are fixed before it is known who answers.
"""

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Self

from privfed.errors import InsufficientCapacityError
from privfed.he import _seal_public
from privfed.he.profiles import COMPACT, COMPATIBLE, ESCROW, PARITY, PROFILES, STANDARD, THRESHOLD, Profile
from privfed.update import Layout

KEY_ID_BYTES = 16
# `RoundContext.digest`, which keys of one attempt are bound to.
BINDING_BYTES = 32
SEED_BYTES = _seal_public.SEED_BYTES
# Sealed tags of an upload (`he.tags`): nonce, four tags of eight bytes and a digest of the seeds, authentication code.
SEALED_TAGS_BYTES = 12 + 4 * 8 + 32 + 16

# SEAL 4 draws encryption noise as the difference of two sums of 21 bits (native/src/seal/util/rlwe.cpp, sample_poly_cbd).
FRESH_NOISE = 21
FRESH_NOISE_VARIANCE = FRESH_NOISE / 2

_ASYMMETRIC_DEVIATIONS = 10
_UNIT_ROUNDOFF = 2.0**-53
# Far from underflow and overflow, so that the error of every scaling is relative.
_LARGEST_NUMBER = 2**62
_SMALLEST_BOUND, _LARGEST_BOUND = 2.0**-256, 2.0**256
# As fine as float32 numbers near the bound. A finer grid shows nothing more, and DP-SGD refuses grids finer than its noise allows.
_LARGEST_AMPLITUDE = 2**23 - 1
# What pre-scaled weights are apportioned to, if they are no integers: off by less than any grid here can show.
_PRESCALED_TOTAL = 2**32
# Measured: SEAL expands 25 to 30 million words a second. On a line of 100 Mbit/s a byte takes as long as two words.
_EXPANSION_SECONDS_PER_WORD = 4e-8
_LINE_SECONDS_PER_BYTE = 8 / 100e6


def transform_roundoff(poly_modulus_degree: int) -> float:
    """Bound on the relative error, in the Euclidean norm, of encoding or decoding in double precision.

    Each way runs two FFTs, one in numpy of half the degree and one in SEAL, and one multiplication by roots of unity. Higham,
    2002, theorem 24.2: an FFT of log2(n) levels has a relative error of at most log2(n) * eta (1 + small), where
    eta = mu + gamma_4 (sqrt(2) + mu), gamma_4 = 4u (1 + small), and mu bounds the error of the roots. SEAL computes its roots
    from angles up to pi/4, each with an error of at most 2u, with sine and cosine to 1 ulp: mu <= 3.5u. So eta < 10u, and
    the multiplication by roots (angles up to pi, product sqrt(5) u) is below 10u as well. With slots, numpy has no part in it.
    """
    return (2 * math.log2(poly_modulus_degree) + 1) * 10 * _UNIT_ROUNDOFF


@dataclass(frozen=True, kw_only=True)
class CkksParams:
    """Parameters on which all parties of a session agree. Public, and proven to hold the sum before anything is encrypted.

    Args:
        poly_modulus_degree: Degree N of the ring.
        modulus: The prime that SEAL creates for N and its bit length.
        weight_sum: Largest sum of the positive integer coefficients of a sum, at least 4. Where the clients pre-scale, every
            coefficient is 1, and this is the largest number of clients, at least 2.
        guard_bits: Bits below the grid that take the noise.
        amplitude: Grid value of a coordinate that equals `bound`.
        bound: Public bound on the absolute value of a coordinate, from 2^-256 to 2^256; larger coordinates saturate.
        prescaled: Whether the clients multiply by their shares of all weights before they encrypt, and the server only adds.
        slots: Whether a coordinate takes one of the N / 2 slots, as in a TenSEAL vector, and not one of the N coefficients. The
            ring is then the last level of TenSEAL's usual chain of 60, 40 and 40 bits.
        seeded_sums: Whether a sum travels as c0 and the seeds of the uploads in it, from which each opener regenerates c1: half
            the bytes, and one expansion per upload.
        asymmetric: Whether clients encrypt to a public key. Their noise then has no worst case that is of use, and room is left for ten
            standard deviations of it.

    Raises:
        ValueError: If a value is out of its range, the modulus is not the prime that this SEAL creates, or SEAL's table does
            not give 256 bits of security for it (192 with slots).
        InsufficientCapacityError: If the noise reaches the grid, or the largest sum wraps around.

    Example:
        >>> params = CkksParams.standard(bound=0.5)
        >>> params.amplitude, params.guard_bits, params.fresh_chunk_bytes
        (8388607, 18, 28736)
        >>> CkksParams.parity(clients=16).amplitude
        2097075
    """

    poly_modulus_degree: int
    modulus: int
    weight_sum: int
    guard_bits: int
    amplitude: int
    bound: float
    prescaled: bool
    slots: bool
    seeded_sums: bool
    asymmetric: bool = False

    def __post_init__(self) -> None:
        for name in ("poly_modulus_degree", "modulus", "weight_sum", "guard_bits", "amplitude"):
            value: object = getattr(self, name)
            if type(value) is not int or not 1 <= value < _LARGEST_NUMBER:
                raise ValueError(f"expected {name} to be a positive int below 2^62, got another {type(value).__name__}")
        if self.guard_bits > 62:
            raise ValueError(f"expected at most 62 guard_bits, got {self.guard_bits}")
        for name in ("prescaled", "slots", "seeded_sums", "asymmetric"):
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"expected {name} to be True or False, got {getattr(self, name)!r}")
        if self.asymmetric and (self.slots or self.seeded_sums):
            raise ValueError("expected no slots and no seeded sums where clients encrypt to a public key: there are no seeds")
        # SEAL's encoder takes values up to a quarter of the modulus. With four or more of them in a sum, one is far below; and a
        # client that pre-scales holds at most half of the weights, see `largest_point`.
        least = 2 if self.prescaled else 4
        if self.weight_sum < least:
            raise ValueError(f"expected weight_sum of at least {least}, got {self.weight_sum}")
        object.__setattr__(self, "bound", float(self.bound))
        if not _SMALLEST_BOUND <= self.bound <= _LARGEST_BOUND:
            raise ValueError(f"expected bound from 2^-256 to 2^256, got {self.bound!r}")
        prime = _seal_public.prime(self.poly_modulus_degree, self.modulus.bit_length())
        if self.modulus != prime:
            raise ValueError(f"expected the modulus {prime} that SEAL creates for these bits, got {self.modulus}")
        _seal_public.ring(self.poly_modulus_degree, self.modulus, slots=self.slots)
        if not self.noise < 2 ** (self.guard_bits - 1):
            raise InsufficientCapacityError(
                f"{self.guard_bits} guard bits do not hold the worst-case noise {self.noise:.0f}; nothing was encrypted"
            )
        if not 2 * (2**self.guard_bits * self.largest_sum + math.ceil(self.noise)) < self.modulus:
            raise InsufficientCapacityError(
                f"a sum of weights {self.weight_sum} at amplitude {self.amplitude} wraps around the modulus; nothing was encrypted"
            )

    @classmethod
    def standard(cls, *, bound: float = 1.0) -> Self:
        """The default profile: one 54-bit prime, coefficients up to 4096 in sum, 23-bit grid, 7.02 bytes up per parameter."""
        return cls.from_profile(STANDARD, bound=bound)

    @classmethod
    def compact(cls, *, bound: float = 1.0) -> Self:
        """One 40-bit prime, coefficients up to 256 in sum, 17-bit grid, 5.02 bytes up per parameter."""
        return cls.from_profile(COMPACT, bound=bound)

    @classmethod
    def parity(cls, *, clients: int, bound: float = 1.0) -> Self:
        """One 32-bit prime, pre-scaled by the clients, 4.02 bytes up per parameter: as many as float32 has."""
        return cls.from_profile(PARITY, bound=bound, clients=clients)

    @classmethod
    def compatible(cls, *, clients: int, bound: float = 1.0) -> Self:
        """Ciphertexts that any server with TenSEAL can add up (`he.tenseal_vectors`), pre-scaled by the clients."""
        return cls.from_profile(COMPATIBLE, bound=bound, clients=clients)

    @classmethod
    def threshold(cls, *, clients: int, bound: float = 1.0) -> Self:
        """For `ThresholdKey`: one 40-bit prime, pre-scaled by the clients, one polynomial, 5.00 bytes per parameter up and down.

        The proof is the same as for two polynomials. What is added to the sum of c_i = m_i + e_i - a s_i before the decoder sees it is
        a times the sum of the s_i, exactly, modulo the prime: so the noise is the sum of the e_i, at most 21 each, and neither the
        number of the secrets in their sum nor its size adds to it.
        """
        return replace(cls.from_profile(THRESHOLD, bound=bound, clients=clients), seeded_sums=False)

    @classmethod
    def escrow(cls, *, bound: float = 1.0, weight_sum: int = 256) -> Self:
        """For `EscrowKey`: one 54-bit prime, coefficients up to `weight_sum` in sum, 14 bytes up per parameter, and 23 bits at 256.

        Raises:
            InsufficientCapacityError: If coefficients of that sum leave no room for a grid.
        """
        return cls.from_profile(replace(ESCROW, weight_sum=weight_sum), bound=bound, asymmetric=True)

    @classmethod
    def from_profile(cls, profile: Profile, *, bound: float, clients: int | None = None, asymmetric: bool = False) -> Self:
        """Parameters of a profile, with the fewest guard bits and the largest amplitude, up to 2^23 - 1, that are proven to fit.

        Args:
            profile: Row of the table.
            bound: Public bound on the absolute value of a coordinate.
            clients: Number of clients in the roster. A profile that pre-scales needs it; for the others, left out, they are few.
            asymmetric: Whether clients encrypt to a public key.

        Raises:
            ValueError: If the bound is out of its range, the number of clients is missing, or SEAL refuses the profile.
            InsufficientCapacityError: If nothing fits.
        """
        prescaled = profile.weight_sum is None
        weight_sum = clients if profile.weight_sum is None else profile.weight_sum
        if weight_sum is None:
            raise ValueError(f"expected the number of clients for the profile {profile.name!r}, in which they pre-scale")
        degree, modulus = profile.poly_modulus_degree, _seal_public.prime(profile.poly_modulus_degree, profile.modulus_bits)
        few = (clients or 1) * _EXPANSION_SECONDS_PER_WORD < word_bytes(modulus) * _LINE_SECONDS_PER_BYTE
        for guard_bits in range(1, profile.modulus_bits):
            room = (modulus // 2 - 2 ** (guard_bits - 1)) // 2**guard_bits
            amplitude = min(room - weight_sum // 2 if prescaled else room // weight_sum, _LARGEST_AMPLITUDE)
            if amplitude < 1:
                break
            largest_sum = _largest_sum(weight_sum, amplitude, prescaled=prescaled)
            noise = worst_case_noise(degree, weight_sum, guard_bits, largest_sum, slots=profile.slots, asymmetric=asymmetric)
            if noise < 2 ** (guard_bits - 1):
                return cls(
                    poly_modulus_degree=degree,
                    modulus=modulus,
                    weight_sum=weight_sum,
                    guard_bits=guard_bits,
                    amplitude=amplitude,
                    bound=bound,
                    prescaled=prescaled,
                    slots=profile.slots,
                    seeded_sums=not profile.slots and few and not asymmetric,
                    asymmetric=asymmetric,
                )
        raise InsufficientCapacityError(f"the profile {profile.name!r} leaves no room for a grid; nothing was encrypted")

    @classmethod
    def for_clients(cls, *, clients: int, bound: float, tolerance: float, weights: Sequence[float] | None = None) -> Self:
        """Parameters of the profile with the fewest bytes up whose weighted mean is within the tolerance.

        The tolerance holds for the mean of whoever answers, and against the weights as they are given: what their apportionment
        to integers changes counts.

        Args:
            clients: Number of clients in the roster, at least 2.
            bound: Public bound on the absolute value of a coordinate.
            tolerance: Largest acceptable absolute error of a coordinate of the mean. Positive.
            weights: Weight of each client, positive; left out, they are equal.

        Raises:
            ValueError: If an argument is not positive, or there is not one weight for each client.
            InsufficientCapacityError: If no profile fits, with the reason in one sentence.
        """
        if clients < 2 or not tolerance > 0:
            raise ValueError(f"expected at least 2 clients and a positive tolerance, got {clients} and {tolerance!r}")
        weights = [1.0] * clients if weights is None else weights
        if len(weights) != clients or not all(0 < weight < math.inf for weight in weights):
            raise ValueError(f"expected a positive, finite weight for each of {clients} clients, got others")
        exact = [Fraction(weight) for weight in weights]
        whole = sum(exact)
        smallest, largest = min(exact) / whole, max(exact) / whole
        reasons: list[str] = []
        for profile in PROFILES:
            try:
                params = cls.from_profile(profile, bound=bound, clients=clients)
            except InsufficientCapacityError:
                reasons.append(f"{profile.name!r} has no room for {clients} clients")
                continue
            error = params.mean_error(1, smallest) if params.prescaled else params.max_error
            if whole > params.weight_total or any(weight.denominator != 1 for weight in exact):
                # Each share is off by less than 1 / total: of the shares of all, or of those of whoever pre-scaled and answers.
                error += params.bound * float((2 / smallest if params.prescaled else clients) / Fraction(params.weight_total))
            if params.prescaled and largest > Fraction(1, 2):
                reasons.append(f"{profile.name!r} takes no client with more than half of all weights")
            elif smallest * params.weight_total < 1:
                reasons.append(f"{profile.name!r} has no coefficient for a client with 1/{math.floor(1 / smallest)} of all weights")
            elif error > tolerance:
                reasons.append(f"{profile.name!r} has an error of {error:.2e}, above {tolerance:.2e}")
            else:
                return params
        raise InsufficientCapacityError(f"no profile fits: {'; '.join(reasons)}; nothing was encrypted")

    def multipliers(self, coefficients: Sequence[int]) -> tuple[int, ...]:
        """What the server multiplies the uploads of clients with these coefficients by: 1 where the clients have pre-scaled."""
        return (1,) * len(coefficients) if self.prescaled else tuple(coefficients)

    @property
    def weight_total(self) -> int:
        """Sum to which weights are apportioned if they are no integers, or too large ones."""
        return _PRESCALED_TOTAL if self.prescaled else self.weight_sum

    @property
    def step(self) -> float:
        """Distance between two grid points, in the unit of a coordinate."""
        return self.bound / self.amplitude

    @property
    def max_error(self) -> float:
        """Largest absolute error of a coordinate of the weighted mean of all clients, if no input was beyond the bound.

        Half a step per input, so half a step for any weighted mean of them; where the clients pre-scale, half a step for each
        client. Ten roundings in double precision come on top. See `mean_error` for a mean of fewer clients that pre-scaled.
        """
        return self.mean_error(self.weight_sum if self.prescaled else 1, Fraction(1))

    def mean_error(self, participants: int, share: Fraction) -> float:
        """Largest absolute error of a coordinate of the mean of some clients that pre-scaled, if no input was beyond the bound.

        Args:
            participants: Number of clients in the mean.
            share: Share of all weights that they hold, above 0.
        """
        return float(participants * Fraction(self.step) / 2 / share) + 10 * _UNIT_ROUNDOFF * self.bound

    @property
    def largest_point(self) -> int:
        """Largest absolute value of a grid point that may be encrypted. A client that pre-scales holds at most half of all weights."""
        return (self.amplitude + 1) // 2 if self.prescaled else self.amplitude

    @property
    def largest_sum(self) -> int:
        """Largest absolute value of a sum of grid points, for which these parameters have room."""
        return _largest_sum(self.weight_sum, self.amplitude, prescaled=self.prescaled)

    @property
    def noise(self) -> float:
        """Worst-case absolute difference between a decoded number of a sum and its grid point, in units of 2^-guard_bits."""
        return worst_case_noise(
            self.poly_modulus_degree,
            self.weight_sum,
            self.guard_bits,
            self.largest_sum,
            slots=self.slots,
            asymmetric=self.asymmetric,
        )

    @property
    def fresh_noise_variance(self) -> float:
        """Variance of the encryption noise of one coefficient of one ciphertext."""
        return asymmetric_noise_variance(self.poly_modulus_degree) if self.asymmetric else FRESH_NOISE_VARIANCE

    @property
    def moduli(self) -> tuple[int, ...]:
        """The primes whose product is the modulus: a coefficient has a word for each."""
        return (self.modulus,)

    @property
    def word_bytes(self) -> int:
        """Bytes of one packed word: as many as the modulus needs."""
        return word_bytes(self.modulus)

    @property
    def polynomial_bytes(self) -> int:
        """Bytes of one packed polynomial."""
        return self.poly_modulus_degree * self.word_bytes

    @property
    def public_key_bytes(self) -> int:
        """Bytes of a public key, where clients encrypt to one: both polynomials."""
        return self.sum_chunk_bytes

    @property
    def fresh_chunk_bytes(self) -> int:
        """Bytes of one whole chunk of a fresh vector: packed c0 and the seed of c1."""
        return self.polynomial_bytes + SEED_BYTES

    @property
    def sum_chunk_bytes(self) -> int:
        """Bytes of one whole chunk of a sum: packed c0 and packed c1."""
        return 2 * self.polynomial_bytes

    @property
    def chunk_coordinates(self) -> int:
        """Number of coordinates in one ciphertext."""
        return self.poly_modulus_degree // 2 if self.slots else self.poly_modulus_degree

    def chunks(self, layout: Layout) -> int:
        """Number of ciphertexts that hold a vector of the layout."""
        return -(-layout.size // self.chunk_coordinates)

    def first_polynomial_sizes(self, layout: Layout) -> tuple[int, ...]:
        """Bytes of the packed c0 of each chunk of a vector of the layout under a shared key: of `CkksVector` and `SeededSum`.

        A last chunk of coefficients that the layout does not fill is cut: its c0 travels not in NTT form but as coefficients, and only
        those in use. Coefficient i of what decrypts takes nothing of c0 but c0[i]; of c1, which follows from its seed or is whole, it
        takes everything. Slots mix all coefficients, so they are never cut, nor is what was encrypted to a public key.
        """
        sizes = (self.polynomial_bytes,) * self.chunks(layout)
        used = layout.size % self.poly_modulus_degree
        return sizes if self.slots or self.asymmetric or not used else (*sizes[:-1], used * self.word_bytes)

    def fresh_chunk_sizes(self, layout: Layout) -> tuple[int, ...]:
        """Bytes of each chunk of a fresh vector of the layout: packed c0, see `first_polynomial_sizes`, and the seed of c1."""
        return tuple(size + SEED_BYTES for size in self.first_polynomial_sizes(layout))

    def sum_chunk_sizes(self, layout: Layout) -> tuple[int, ...]:
        """Bytes of each chunk of a sum of vectors of the layout: packed c0, see `first_polynomial_sizes`, and packed c1, whole."""
        return tuple(size + self.polynomial_bytes for size in self.first_polynomial_sizes(layout))

    @property
    def versions(self) -> str:
        """Versions of the libraries behind the parameters, for messages: other SEAL minors cannot read these ciphertexts."""
        return f"SEAL {_seal_public.seal_version()}, TenSEAL {_seal_public.tenseal_version()}"

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 over every parameter and the major and minor version of SEAL and TenSEAL, 32 bytes."""
        state = hashlib.sha256(b"privfed ckks parameters v4")
        for value in (self.poly_modulus_degree, self.modulus, self.word_bytes, self.weight_sum, self.guard_bits, self.amplitude):
            state.update(value.to_bytes(8, "big"))
        state.update(bytes((self.prescaled, self.slots, self.seeded_sums, self.asymmetric)))
        state.update(struct.pack(">d", self.bound))
        for version in (_seal_public.seal_version(), _seal_public.tenseal_version()):
            minor = ".".join(version.split(".")[:2]).encode()
            state.update(len(minor).to_bytes(1, "big") + minor)
        return state.digest()


def word_bytes(modulus: int) -> int:
    """Bytes of one packed word below a modulus: as many as the modulus needs."""
    return (modulus.bit_length() + 7) // 8


def _largest_sum(weight_sum: int, amplitude: int, *, prescaled: bool) -> int:
    # Shares sum to at most 1, and each client rounds once: at most amplitude + weight_sum / 2, and it is an integer.
    return amplitude + weight_sum // 2 if prescaled else weight_sum * amplitude


def ring_of(params: CkksParams) -> _seal_public.Ring:
    """The ring in which vectors are encrypted under these parameters. Public."""
    return _seal_public.ring(params.poly_modulus_degree, params.modulus, slots=params.slots)


def asymmetric_noise_variance(poly_modulus_degree: int) -> float:
    """Variance of a coefficient of e u + e0 + e1 s, the noise of encryption to a public key.

    The key (-(a s + e), a) is multiplied by a ternary u, and e0 and e1 are added to it; decryption multiplies the second by s. Two products
    of N terms each, of a ternary number, whose mean square is 2/3, and one of SEAL's noise; and one noise more.
    """
    return (2 * poly_modulus_degree * 2 / 3 + 1) * FRESH_NOISE_VARIANCE


def worst_case_noise(
    poly_modulus_degree: int, weight_sum: int, guard_bits: int, largest_sum: int, *, slots: bool, asymmetric: bool = False
) -> float:
    """Worst case over all inputs and all randomness of |decoded number - its grid point * 2^guard_bits|.

    A fresh coefficient is off by the encryption noise (at most 21) and the rounding of the encoder (1/2), a slot by at most N
    times that; the sum by `weight_sum` times that. On top come the floating-point errors of encoding every summand, together at
    most the relative error times N numbers of 2^guard_bits * largest_sum, and of decoding a sum of less than one grid step more.
    The largest error of one number is at most the Euclidean norm of all. Only slots go through the encoder; coefficients are encoded
    exactly, and use less than their room.

    Of encryption to a public key the worst case is thousands of times what ever happens. Ten standard deviations stand in its place: a
    coefficient is beyond them with a probability of about 2 exp(-50) < 2^-71, by the central limit, and the round is then refused or, at
    one coordinate, off by a step.
    """
    if asymmetric:
        fresh = _ASYMMETRIC_DEVIATIONS * math.sqrt(asymmetric_noise_variance(poly_modulus_degree)) + 0.5
    else:
        fresh = (FRESH_NOISE + 0.5) * (poly_modulus_degree if slots else 1)
    return weight_sum * fresh + sum_roundoff(poly_modulus_degree, guard_bits, largest_sum)


def sum_roundoff(poly_modulus_degree: int, guard_bits: int, largest_sum: int) -> float:
    """What floating point adds to a decoded number: see `worst_case_noise`."""
    return transform_roundoff(poly_modulus_degree) * math.sqrt(poly_modulus_degree) * 2**guard_bits * (2 * largest_sum + 1)
