"""The table of parameter sets, from which `CkksParams` makes parameters and proves them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One row of the table of parameter sets. Public.

    Args:
        name: Name of the row, for messages.
        poly_modulus_degree: Degree of the ring.
        modulus_bits: Bits of the prime.
        weight_sum: Largest sum of the integer coefficients that the server may apply; None where the clients pre-scale.
        slots: Whether a coordinate takes a slot, as in a TenSEAL vector, and not a coefficient.
    """

    name: str
    poly_modulus_degree: int
    modulus_bits: int
    weight_sum: int | None
    slots: bool = False


PARITY = Profile(name="parity", poly_modulus_degree=4096, modulus_bits=32, weight_sum=None)
COMPACT = Profile(name="compact", poly_modulus_degree=4096, modulus_bits=40, weight_sum=256)
STANDARD = Profile(name="standard", poly_modulus_degree=4096, modulus_bits=54, weight_sum=4096)
COMPATIBLE = Profile(name="compatible", poly_modulus_degree=8192, modulus_bits=60, weight_sum=None, slots=True)
# For one polynomial per chunk (`he.threshold`): five bytes a word, and room for thousands of clients on the finest grid.
THRESHOLD = Profile(name="threshold", poly_modulus_degree=4096, modulus_bits=40, weight_sum=None)
# For encryption to a public key (`he.escrow`), whose noise takes seven bits more than 54 leave at the weights of `standard`.
ESCROW = Profile(name="escrow", poly_modulus_degree=4096, modulus_bits=54, weight_sum=256)
# Fewest bytes first: `CkksParams.for_clients` takes the first that fits.
PROFILES = (PARITY, COMPACT, STANDARD, COMPATIBLE)
