"""Homomorphic averaging as others ship it: TenSEAL vectors whose decryptions are published as they come.

It is here to be attacked (`privfed.attacks.key_recovery`) and for nothing else: publishing what these rounds publish gives their
key away. TenSEAL's own vectors and contexts are used in this module alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tenseal
from numpy.typing import ArrayLike, NDArray

from privfed.he import _seal_public
from privfed.he._seal_bytes import CIPHERTEXT, CONTAINER_MAGIC, members


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSetting:
    """How a system averages: which TenSEAL context, who weights, and with how many bits it publishes. Public.

    Args:
        name: What is shown.
        poly_modulus_degree: Degree N of the ring.
        chain_bits: Bits of the primes.
        scale_bits: Bits of the scale.
        server_weights: Whether the server multiplies by the weights; else the clients do it before they encrypt.
        precision: Type of the numbers that are published, float64 as TenSEAL returns them, or float32 as models are stored.
    """

    name: str
    poly_modulus_degree: int
    chain_bits: tuple[int, ...]
    scale_bits: int
    server_weights: bool
    precision: type[np.float64] | type[np.float32] = np.float64

    @property
    def ring(self) -> _seal_public.Ring:
        """The last level of the chain, modulo its first prime: enough to find the key. Public."""
        return _seal_public.chain_ring(self.poly_modulus_degree, self.chain_bits, 128)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SeenCiphertext:
    """A ciphertext, as its carrier sees it, modulo the first prime. Public.

    Args:
        c0: First polynomial in NTT form, of shape (N,).
        c1: Second polynomial.
        scale: What the numbers in it are multiplied by.
    """

    c0: NDArray[np.uint64]
    c1: NDArray[np.uint64]
    scale: float


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PeerRound:
    """What the server of such a round, or whoever reads its traffic, sees. There is no key in it.

    Args:
        uploads: Of each client, its ciphertexts.
        sums: Ciphertexts of the aggregate.
        published: The decrypted aggregate, of shape (size,), as it was published.
    """

    uploads: tuple[tuple[SeenCiphertext, ...], ...]
    sums: tuple[SeenCiphertext, ...]
    published: NDArray[np.float64]


def hold_peer_round(setting: PeerSetting, updates: Sequence[ArrayLike], weights: Sequence[float]) -> PeerRound:
    """Runs one round of clients and server, all of them here, under a new key that is then forgotten.

    Args:
        setting: Which system.
        updates: Update of each client, of shape (size,) with a multiple of N / 2 coordinates. Private.
        weights: Weight of each client in the sum.
    """
    context = tenseal.context(tenseal.SCHEME_TYPE.CKKS, setting.poly_modulus_degree, coeff_mod_bit_sizes=list(setting.chain_bits))
    context.global_scale = 2.0**setting.scale_bits
    server = tenseal.context_from(context.serialize(save_secret_key=False))
    slots = setting.poly_modulus_degree // 2
    uploads: list[list[bytes]] = []
    for update, weight in zip(updates, weights, strict=True):
        values = np.asarray(update, dtype=np.float64) * (1 if setting.server_weights else weight)
        parts = values.reshape(-1, slots).tolist()
        uploads.append([tenseal.ckks_vector(context, part).serialize() for part in parts])
    sums: list[bytes] = []
    for column in zip(*uploads, strict=True):
        vectors = [tenseal.ckks_vector_from(server, data) for data in column]
        if setting.server_weights:
            vectors = [vector * float(weight) for vector, weight in zip(vectors, weights, strict=True)]
        total = vectors[0]
        for vector in vectors[1:]:
            total = total + vector
        sums.append(total.serialize())
    opened = [tenseal.ckks_vector_from(context, data).decrypt() for data in sums]
    return PeerRound(
        uploads=tuple(tuple(_seen(data) for data in upload) for upload in uploads),
        sums=tuple(_seen(data) for data in sums),
        published=np.concatenate(opened).astype(setting.precision).astype(np.float64),
    )


def _seen(data: bytes) -> SeenCiphertext:
    """The one ciphertext in a vector that this process's own TenSEAL wrote."""
    # The ciphertext is all between the first container header and the last field, a tag byte and the scale.
    body = members(data[data.index(CONTAINER_MAGIC) : -9])
    _, _, size, degree, primes, scale, _ = CIPHERTEXT.unpack_from(body)
    words = np.frombuffer(body, "<u8", size * primes * degree, len(body) - 8 * size * primes * degree).reshape(size, primes, degree)
    first, second = words[:, 0].astype(np.uint64)
    return SeenCiphertext(c0=first, c1=second, scale=scale)
