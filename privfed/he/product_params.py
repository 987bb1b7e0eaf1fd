"""Parameters under which ciphertexts can be multiplied once: for rounds that score updates by their inner products.

A round under them takes one upload per client. Inner products *and* the sum come from those ciphertexts, so what is scored is what is
summed. An update is shortened to a public bound on its Euclidean norm and quantised to integers g; a slot holds V g / amplitude for a
V of 2^49, and the product of two slots is below 2^98, with a modulus of 2^100.

The inner product of two updates is the sum of the slots of the product of their ciphertexts, and the sum of all slots of a polynomial
is N / 2 times its constant coefficient. All other coefficients are masked (`he.product`), so they may wrap around: only the
constant one must not.

Where clients encrypt to a key holder (`ProductParams.escrow`), the noise has no worst case that is of use, and in slots no normal tail
either: see `slot_noise`.
"""

import hashlib
import math
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from privfed.errors import InsufficientCapacityError
from privfed.he import _seal_public
from privfed.he.params import FRESH_NOISE, CkksParams, asymmetric_noise_variance, sum_roundoff, word_bytes
from privfed.he.profiles import Profile

# Sums of coefficients up to 2^10, and the fewest guard bits that take their noise; then as fine a grid as the products have room for
# with 13 bits to spare.
_WEIGHT_SUM, _GUARD_BITS, _AMPLITUDE = 2**10, 29, 2**20 - 1
_SCALAR_BITS = 30
# Standard deviations of the noise of a slot, of encryption to a public key, beyond which it is with a probability below 2^-72.
_SLOT_DEVIATIONS = 39
_SMALLEST_BOUND, _LARGEST_BOUND = 2.0**-256, 2.0**256


@dataclass(frozen=True, kw_only=True)
class ProductParams(CkksParams):
    """Parameters of a session whose rule looks at inner products. Public; made by `exact`, `sketched` or `escrow`.

    A ring of degree 8192 with primes of 60 and 40 bits, at 256 bits of security by SEAL's table, and 26 bytes up per parameter, or 52 to a
    key holder. The sum is exact on its grid, as under `CkksParams`: the two inequalities there are proven here for coefficients up to 1024
    in sum; of encryption to a key holder with the noise of `slot_noise` in place of a worst case.

    Args:
        sketch: Whether inner products are those of sketches of 4096 numbers (`he.sketch`), for long updates: one multiplication per pair.

    The bound is one on the Euclidean norm of an update, not on a coordinate; a longer update is shortened. `asymmetric` says whether the
    clients encrypt to a key holder. All other numbers are those of the one set of parameters that there is.

    Raises:
        ValueError: If a number is another one, the bound is out of its range, or sketches are to be encrypted to a key holder.
        InsufficientCapacityError: If the noise reaches the grid, or sums or inner products wrap around.

    Example:
        >>> params = ProductParams.exact(bound=2.0)
        >>> params.amplitude, params.guard_bits, params.fresh_chunk_bytes / params.chunk_coordinates
        (1048575, 29, 26.015625)
    """

    sketch: bool

    def __post_init__(self) -> None:
        ring = _seal_public.product_ring()
        expected: dict[str, int | bool] = {
            "poly_modulus_degree": ring.poly_modulus_degree,
            "modulus": ring.modulus,
            "weight_sum": _WEIGHT_SUM,
            "guard_bits": _GUARD_BITS,
            "amplitude": _AMPLITUDE,
            "prescaled": False,
            "slots": True,
            "seeded_sums": False,
        }
        for name, value in expected.items():
            if type(getattr(self, name)) is not type(value) or getattr(self, name) != value:
                raise ValueError(f"expected {name}={value} of parameters for products, got {getattr(self, name)!r}")
        for name in ("sketch", "asymmetric"):
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"expected {name} to be True or False, got {getattr(self, name)!r}")
        if self.sketch and self.asymmetric:
            raise ValueError("expected no sketches where clients encrypt to a key holder: its key lasts, and so would their order")
        object.__setattr__(self, "bound", float(self.bound))
        if not _SMALLEST_BOUND <= self.bound <= _LARGEST_BOUND:
            raise ValueError(f"expected bound from 2^-256 to 2^256, got {self.bound!r}")
        fits = (
            self.noise < 2 ** (self.guard_bits - 1)
            and 2 * (2**self.guard_bits * self.largest_sum + math.ceil(self.noise)) < self.modulus
            and self.largest_constant < self.modulus // 2
        )
        if not fits:
            raise InsufficientCapacityError("sums or inner products do not fit into the modulus; nothing was encrypted")

    @classmethod
    def _of(cls, *, bound: float, sketch: bool = False, weight_sum: int = _WEIGHT_SUM, asymmetric: bool = False) -> Self:
        ring = _seal_public.product_ring()
        return cls(
            poly_modulus_degree=ring.poly_modulus_degree,
            modulus=ring.modulus,
            weight_sum=weight_sum,
            guard_bits=_GUARD_BITS,
            amplitude=_AMPLITUDE,
            bound=bound,
            prescaled=False,
            slots=True,
            seeded_sums=False,
            asymmetric=asymmetric,
            sketch=sketch,
        )

    @classmethod
    def exact(cls, *, bound: float = 1.0) -> Self:
        """Inner products of whole updates: a multiplication for each pair and each 4096 coordinates."""
        return cls._of(bound=bound)

    @classmethod
    def sketched(cls, *, bound: float = 1.0) -> Self:
        """Inner products of sketches, for long updates: about 1.6 % of the product of the norms off, by chance (`he.sketch`)."""
        return cls._of(bound=bound, sketch=True)

    @classmethod
    def escrow(cls, *, bound: float = 1.0, weight_sum: int = _WEIGHT_SUM) -> Self:
        """For `EscrowKey`: inner products of whole updates that clients encrypt to a key holder. `weight_sum` has one value here."""
        return cls._of(bound=bound, weight_sum=weight_sum, asymmetric=True)

    @classmethod
    def standard(cls, *, bound: float = 1.0) -> Self:
        """The same as `exact`."""
        return cls.exact(bound=bound)

    @classmethod
    def from_profile(cls, profile: Profile, *, bound: float, clients: int | None = None, asymmetric: bool = False) -> Self:  # noqa: ARG003
        """There are no profiles of products.

        Raises:
            ValueError: Always.
        """
        raise ValueError(f"expected ProductParams.exact or ProductParams.sketched: the profile {profile.name!r} is one of sums alone")

    @property
    def moduli(self) -> tuple[int, ...]:
        """The two primes whose product is the modulus."""
        return _seal_public.product_ring().moduli

    @property
    def key_moduli(self) -> tuple[int, ...]:
        """The primes of a public key: those two, and the last one of the chain."""
        return _seal_public.product_ring().chain_moduli

    @property
    def public_key_bytes(self) -> int:
        """Bytes of a public key: both polynomials, with a word for every prime of the chain."""
        return 2 * self.poly_modulus_degree * sum(word_bytes(prime) for prime in self.key_moduli)

    @property
    def fresh_noise_variance(self) -> float:
        """Variance of the noise of one coefficient of one ciphertext.

        SEAL encrypts to a public key modulo the whole chain, and then divides by its last prime p. That leaves 1 / p of the noise
        e u + e0 + e1 s, and the roundings of both polynomials, r0 + r1 s, each coefficient of them uniform from -1/2 to 1/2.
        """
        if not self.asymmetric:
            return super().fresh_noise_variance
        degree = self.poly_modulus_degree
        return (degree * 2 / 3 + 1) / 12 + asymmetric_noise_variance(degree) / self.key_moduli[-1] ** 2

    @property
    def slot_noise(self) -> float:
        """What the noise of a slot of one ciphertext, encrypted to a public key, stays below with a probability above 1 - 2^-72.

        A coefficient of r1 s is a sum of N products, and close to normal. A slot is not: it is the *product* r1(z) s(z) of two sums, at a
        root z, and s is the same in every ciphertext of the session. Given s, its real part is a sum of independent, strictly
        sub-Gaussian terms of variance |s(z)|^2 N / 24, so E exp(L x) <= E exp(L^2 N |s(z)|^2 / 48); and with s(z) such a sum itself, of
        variance N / 3 in each direction, that is at most 1 / (1 - L^2 N^2 / 72), as of a Laplace distribution with the standard deviation
        d = N / 6. By Chernoff, with y = L N / sqrt(72), P(|x| > k d) <= 2 exp(-y sqrt(2) k) / (1 - y^2), at its best below 2^-72 for
        k = 39. Ten deviations, which are enough for a coefficient, have a probability of 7e-7 per slot here: one in 340 ciphertexts. What
        r0 and the noise divided by p add to the exponent is below 1e-3. A weighted sum of such numbers has the same bound times the
        sum of its weights. That roundings are uniform is what makes ciphertexts look random, and no more.

        The encoder's rounding, at most 1/2 per coefficient, comes on top.
        """
        degree = self.poly_modulus_degree
        return _SLOT_DEVIATIONS * math.sqrt(self.fresh_noise_variance * degree / 2) + degree / 2

    @property
    def noise(self) -> float:
        """As in `CkksParams`; of encryption to a public key but for a probability below 2^-72 per number: see `slot_noise`."""
        if not self.asymmetric:
            return super().noise
        return self.weight_sum * self.slot_noise + sum_roundoff(self.poly_modulus_degree, self.guard_bits, self.largest_sum)

    @property
    def word_bytes(self) -> int:
        """Bytes of the words of one coefficient, one for each prime."""
        return sum(word_bytes(prime) for prime in self.moduli)

    @property
    def product_bytes(self) -> int:
        """Bytes of the masked product of one pair: three packed polynomials."""
        return 3 * self.polynomial_bytes

    @property
    def zeros_noise(self) -> int:
        """Largest constant coefficient of what two encryptions of zero, (b0, a0, 0) and (0, b1, a1), leave in an opened product.

        SEAL encrypts zero under the public key modulo q p, for the last prime p of the chain: b + a s = w = e u + e0 + e1 s there. u and s
        are ternary and the noises at most B = 21, so the coefficients of w are at most B (2 N + 1), whatever is drawn. Then it divides by
        p and rounds b and a by at most 1/2 each: left is at most z = B (2 N + 1) / p + (N + 1) / 2. The second one is opened times s: the
        constant coefficient of w0 + w1 s is at most (N + 1) z, about 2^25, where a step of what is opened is 2^56 and a mask's noise too.
        """
        degree = self.poly_modulus_degree
        each = FRESH_NOISE * (2 * degree + 1) / self.key_moduli[-1] + (degree + 1) / 2
        return math.ceil((degree + 1) * each)

    @property
    def largest_constant(self) -> int:
        """Constant coefficient of the product of two updates as long as the bound, with their noise, a mask's, and that of the zeros.

        In terms of a square of norms: by Cauchy and Schwarz it is 2 / N times at most the product of the two norms.
        """
        longest = (self.amplitude + math.isqrt(2**40) // 2 + 1) * 2**self.guard_bits
        return 4 * (longest**2 // (self.poly_modulus_degree // 2) + 1) + self.zeros_noise

    @property
    def scalar_step(self) -> float:
        """Distance between two values of an opened inner product: bound^2 / 2^30. What is opened is rounded to it."""
        return self.bound**2 / 2**_SCALAR_BITS

    @property
    def scalars_per_square(self) -> int:
        """How many steps of an opened inner product make the square of the bound."""
        return 2**_SCALAR_BITS

    @property
    def wraps_at(self) -> float:
        """What opened squares and inner products are taken modulo, in squares of the bound: about 2^14, from minus half to half of it."""
        return self.modulus / self.constant_per_scalar / self.scalars_per_square

    @property
    def constant_per_scalar(self) -> float:
        """Constant coefficient of the product of two updates whose inner product is one `scalar_step`."""
        square = (self.amplitude * 2**self.guard_bits) ** 2
        return square / (self.poly_modulus_degree // 2) / self.scalars_per_square

    def scalar_error(self, size: int) -> float:
        """Largest absolute error of an opened inner product of two quantised updates within the bound, sketches aside.

        The mask adds noise of up to one step, and the rounding half of one. The error of a fresh ciphertext is at most b = 21.5 per
        coefficient; against a chunk of norm v over its slots, whose coefficients have a norm of sqrt(2 / N) v, it weighs at most
        b sqrt(N) sqrt(2 / N) v in the constant coefficient. So over m chunks of two updates of at most V, by Cauchy and Schwarz,
        the sum of slots is off by at most N / 2 (2 sqrt(2) b sqrt(m) V + m N b^2). The zeros that hide the other polynomials come after
        the sum over chunks, once a pair and sketched or not, with at most `zeros_noise` in the constant coefficient: N / 2 times that.

        Of encryption to a public key b is the rounding 1/2 alone. What an update v makes of the noise of another ciphertext is, given s, a
        sum of independent terms, whose variance is the squared norm of v times the mean, by the v^2 of the slots, of those in `slot_noise`.
        As exp is convex, its bound is that of a slot times the norm of v, but for a probability below 2^-72, over however many chunks. The
        product of two noises is, in a slot, below twice the square of the bound.

        Args:
            size: Number of coordinates of an update.
        """
        chunks, degree = -(-size // self.chunk_coordinates), self.poly_modulus_degree
        longest = self.amplitude * 2.0**self.guard_bits
        if self.asymmetric:
            crossed = 2 * self.slot_noise + degree / 2 * math.sqrt(2 * chunks)
            return 1.5 * self.scalar_step + (crossed / longest + chunks * degree * (self.slot_noise / longest) ** 2) * self.bound**2
        worst = FRESH_NOISE + 0.5
        noise = degree / 2 * (2 * math.sqrt(2 * chunks) * worst * longest + chunks * degree * worst**2 + self.zeros_noise) / longest**2
        return 1.5 * self.scalar_step + noise * self.bound**2

    def shortened(self, values: NDArray[np.float64]) -> tuple[NDArray[np.float64], int]:
        """An update of at most the bound, and how many coordinates changed: all or none. Both private.

        Args:
            values: Coordinates, of shape (n,). What is not finite stays for the caller to refuse.
        """
        norm = float(np.linalg.norm(values))
        if not self.bound < norm < math.inf:
            return values, 0
        return values * (self.bound / norm), values.size

    def longest(self, size: int) -> float:
        """Largest norm of an update on the grid, and so of a mean of them: the grid may add half a step in every coordinate.

        Args:
            size: Number of coordinates of an update.
        """
        return self.bound + math.sqrt(size) * self.step / 2

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 over every parameter and the major and minor version of SEAL and TenSEAL, 32 bytes."""
        state = hashlib.sha256(b"privfed product parameters v1")
        for prime in self.moduli:
            state.update(prime.to_bytes(8, "big"))
        for value in (self.poly_modulus_degree, self.weight_sum, self.guard_bits, self.amplitude, self.scalars_per_square):
            state.update(value.to_bytes(8, "big"))
        state.update(bytes([self.sketch]) + struct.pack(">d", self.bound))
        if self.asymmetric:
            state.update(b"to a public key")
        for version in (_seal_public.seal_version(), _seal_public.tenseal_version()):
            minor = ".".join(version.split(".")[:2]).encode()
            state.update(len(minor).to_bytes(1, "big") + minor)
        return state.digest()
