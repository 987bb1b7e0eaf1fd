"""Encryption parameters: which CKKS ring, which integer grid, and the proof that a weighted sum fits into it.

An update is quantised to integers of at most `amplitude`, shifted left by `guard_bits`, encrypted, weighted and added by the
server, decrypted, and rounded back to the grid. The sum is exact, bit for bit, when two inequalities hold for the worst case
(no probability is involved; a CKKS sum beyond half the modulus would wrap around silently):

    noise < 2^(guard_bits - 1)                                              the noise rounds away
    2^guard_bits * weight_sum * amplitude + noise < modulus / 2             the sum does not wrap around

The noise of the sum is `weight_sum` times that of one fresh ciphertext, plus the floating-point error of decoding.
"""

import hashlib
import math
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from privfed.errors import InsufficientCapacityError
from privfed.he import _seal_public
from privfed.update import Layout

KEY_ID_BYTES = 16
SEED_BYTES = _seal_public.SEED_BYTES

# SEAL 4 draws encryption noise as the difference of two sums of 21 bits (native/src/seal/util/rlwe.cpp, sample_poly_cbd).
FRESH_NOISE = 21
FRESH_NOISE_VARIANCE = FRESH_NOISE / 2

_UNIT_ROUNDOFF = 2.0**-53
# Far from underflow and overflow, so that the error of every scaling is relative.
_SMALLEST_BOUND, _LARGEST_BOUND = 2.0**-256, 2.0**256


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One row of the table of parameter sets. Public.

    Args:
        name: Name of the row, for messages.
        poly_modulus_degree: Degree of the ring, also the number of coordinates per ciphertext.
        modulus_bits: Bits of the only prime.
        weight_sum: Largest sum of the integer coefficients that the server may apply, at least 4.
    """

    name: str
    poly_modulus_degree: int
    modulus_bits: int
    weight_sum: int


STANDARD = Profile(name="standard", poly_modulus_degree=4096, modulus_bits=54, weight_sum=4096)
# Cheapest first: `for_clients` takes the first that fits.
PROFILES = (STANDARD,)


def transform_roundoff(poly_modulus_degree: int) -> float:
    """Bound on the relative error, in the Euclidean norm, of encoding or decoding in double precision.

    Each way runs two FFTs of the degree, one in numpy and one in SEAL, and one multiplication by roots of unity. Higham,
    2002, theorem 24.2: an FFT of log2(n) levels has a relative error of at most log2(n) * eta (1 + small), where
    eta = mu + gamma_4 (sqrt(2) + mu), gamma_4 = 4u (1 + small), and mu bounds the error of the roots. SEAL computes its roots
    from angles up to pi/4, each with an error of at most 2u, with sine and cosine to 1 ulp: mu <= 3.5u. So eta < 10u, and
    the multiplication by roots (angles up to pi, product sqrt(5) u) is below 10u as well.
    """
    return (2 * math.log2(poly_modulus_degree) + 1) * 10 * _UNIT_ROUNDOFF


@dataclass(frozen=True, kw_only=True)
class CkksParams:
    """Parameters on which all parties of a session agree. Public, and proven to hold the sum before anything is encrypted.

    Args:
        poly_modulus_degree: Degree N of the ring; one ciphertext holds N coordinates.
        modulus: The prime that SEAL creates for N and its bit length.
        weight_sum: Largest sum of the positive integer coefficients of a weighted sum, at least 4.
        guard_bits: Bits below the grid that take the noise.
        amplitude: Grid value of a coordinate that equals `bound`.
        bound: Public bound on the absolute value of a coordinate, from 2^-256 to 2^256; larger coordinates saturate.

    Raises:
        ValueError: If a value is out of its range, the modulus is not the prime that this SEAL creates, or SEAL's table does
            not give 256 bits of security for it.
        InsufficientCapacityError: If the noise reaches the grid, or the largest sum wraps around.

    Example:
        >>> params = CkksParams.standard(bound=0.5)
        >>> params.amplitude, params.guard_bits, params.fresh_chunk_bytes
        (8388607, 18, 28736)
    """

    poly_modulus_degree: int
    modulus: int
    weight_sum: int
    guard_bits: int
    amplitude: int
    bound: float

    def __post_init__(self) -> None:
        for name in ("poly_modulus_degree", "modulus", "weight_sum", "guard_bits", "amplitude"):
            value: object = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"expected {name} to be a positive int, got {value!r}")
        if self.weight_sum < 4:
            # SEAL's encoder takes values up to a quarter of the modulus; with four or more of them in a sum, one is far below.
            raise ValueError(f"expected weight_sum of at least 4, got {self.weight_sum}")
        object.__setattr__(self, "bound", float(self.bound))
        if not _SMALLEST_BOUND <= self.bound <= _LARGEST_BOUND:
            raise ValueError(f"expected bound from 2^-256 to 2^256, got {self.bound!r}")
        prime = _seal_public.prime(self.poly_modulus_degree, self.modulus.bit_length())
        if self.modulus != prime:
            raise ValueError(f"expected the modulus {prime} that SEAL creates for these bits, got {self.modulus}")
        _seal_public.ring(self.poly_modulus_degree, self.modulus)
        if not self.noise < 2 ** (self.guard_bits - 1):
            raise InsufficientCapacityError(
                f"{self.guard_bits} guard bits do not hold the worst-case noise {self.noise:.0f}; nothing was encrypted"
            )
        if not 2 * (2**self.guard_bits * self.weight_sum * self.amplitude + math.ceil(self.noise)) < self.modulus:
            raise InsufficientCapacityError(
                f"a sum of weights {self.weight_sum} at amplitude {self.amplitude} wraps around the modulus; nothing was encrypted"
            )

    @classmethod
    def standard(cls, *, bound: float = 1.0) -> Self:
        """Parameters of the default profile: one 54-bit prime, coefficients up to 4096 in sum, 23-bit grid."""
        return cls.from_profile(STANDARD, bound=bound)

    @classmethod
    def from_profile(cls, profile: Profile, *, bound: float) -> Self:
        """Parameters of a profile, with the fewest guard bits and the largest amplitude that are proven to fit.

        Raises:
            ValueError: If the bound is out of its range, or SEAL refuses the profile.
            InsufficientCapacityError: If nothing fits.
        """
        modulus = _seal_public.prime(profile.poly_modulus_degree, profile.modulus_bits)
        for guard_bits in range(1, profile.modulus_bits):
            amplitude = (modulus // 2 - 2 ** (guard_bits - 1)) // (2**guard_bits * profile.weight_sum)
            if amplitude < 1:
                break
            if worst_case_noise(profile.poly_modulus_degree, modulus, profile.weight_sum, guard_bits, amplitude) < 2 ** (guard_bits - 1):
                return cls(
                    poly_modulus_degree=profile.poly_modulus_degree,
                    modulus=modulus,
                    weight_sum=profile.weight_sum,
                    guard_bits=guard_bits,
                    amplitude=amplitude,
                    bound=bound,
                )
        raise InsufficientCapacityError(f"the profile {profile.name!r} leaves no room for a grid; nothing was encrypted")

    @classmethod
    def for_clients(cls, *, clients: int, bound: float, tolerance: float) -> Self:
        """Parameters of the cheapest profile whose weighted mean over so many clients is within the tolerance.

        Args:
            clients: Number of clients, at least 1, each of which needs a coefficient of at least 1.
            bound: Public bound on the absolute value of a coordinate.
            tolerance: Largest acceptable `max_error`. Positive.

        Raises:
            ValueError: If an argument is not positive.
            InsufficientCapacityError: If no profile fits, with the reason in one sentence.
        """
        if clients < 1 or not tolerance > 0:
            raise ValueError(f"expected at least 1 client and a positive tolerance, got {clients} and {tolerance!r}")
        reasons: list[str] = []
        for profile in PROFILES:
            params = cls.from_profile(profile, bound=bound)
            if clients > params.weight_sum:
                reasons.append(f"{profile.name!r} has coefficients for {params.weight_sum} clients, not for {clients}")
            elif params.max_error > tolerance:
                reasons.append(f"{profile.name!r} has an error of {params.max_error:.2e} at this bound, above {tolerance:.2e}")
            else:
                return params
        raise InsufficientCapacityError(f"no profile fits: {'; '.join(reasons)}; nothing was encrypted")

    @property
    def step(self) -> float:
        """Distance between two grid points, in the unit of a coordinate."""
        return self.bound / self.amplitude

    @property
    def max_error(self) -> float:
        """Largest absolute error of a coordinate of the weighted mean, if no input was beyond the bound.

        Half a step per input, so half a step for any weighted mean of them, plus six roundings in double precision.
        """
        return self.step / 2 + 6 * _UNIT_ROUNDOFF * self.bound

    @property
    def noise(self) -> float:
        """Worst-case absolute difference between a decoded coefficient of a sum and its grid point, in units of 2^-guard_bits."""
        return worst_case_noise(self.poly_modulus_degree, self.modulus, self.weight_sum, self.guard_bits, self.amplitude)

    @property
    def word_bytes(self) -> int:
        """Bytes of one packed word: as many as the modulus needs."""
        return (self.modulus.bit_length() + 7) // 8

    @property
    def fresh_chunk_bytes(self) -> int:
        """Bytes of one chunk of a fresh vector: packed c0 and the seed of c1."""
        return self.poly_modulus_degree * self.word_bytes + SEED_BYTES

    @property
    def sum_chunk_bytes(self) -> int:
        """Bytes of one chunk of a sum: packed c0 and packed c1."""
        return 2 * self.poly_modulus_degree * self.word_bytes

    def chunks(self, layout: Layout) -> int:
        """Number of ciphertexts that hold a vector of the layout."""
        return -(-layout.size // self.poly_modulus_degree)

    @property
    def versions(self) -> str:
        """Versions of the libraries behind the parameters, for messages: other SEAL minors cannot read these ciphertexts."""
        return f"SEAL {_seal_public.seal_version()}, TenSEAL {_seal_public.tenseal_version()}"

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 over every parameter and the major and minor version of SEAL and TenSEAL, 32 bytes."""
        state = hashlib.sha256(b"privfed ckks parameters v1")
        for value in (self.poly_modulus_degree, self.modulus, self.word_bytes, self.weight_sum, self.guard_bits, self.amplitude):
            state.update(value.to_bytes(8, "big"))
        state.update(struct.pack(">d", self.bound))
        for version in (_seal_public.seal_version(), _seal_public.tenseal_version()):
            minor = ".".join(version.split(".")[:2]).encode()
            state.update(len(minor).to_bytes(1, "big") + minor)
        return state.digest()


def worst_case_noise(poly_modulus_degree: int, modulus: int, weight_sum: int, guard_bits: int, amplitude: int) -> float:
    """Worst case over all inputs and all randomness of |decoded coefficient - its grid point * 2^guard_bits|.

    A fresh coefficient is off by the encryption noise (at most 21), the rounding of the encoder (1/2) and the floating-point
    error of encoding N coefficients of at most 2^guard_bits * amplitude. The sum is off by `weight_sum` times that, and by
    the floating-point error of decoding N coefficients of at most modulus / 2. The largest error of one coefficient is at
    most the Euclidean norm of all.
    """
    roundoff = transform_roundoff(poly_modulus_degree) * math.sqrt(poly_modulus_degree)
    encoding = roundoff * 2**guard_bits * amplitude
    decoding = roundoff * modulus / 2
    return weight_sum * (FRESH_NOISE + 0.5 + encoding) + decoding
