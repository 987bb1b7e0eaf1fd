"""The secret key from published decryptions, and from one crafted ciphertext.

A CKKS decryption is the message plus the encryption noise. Who sees a ciphertext (c0, c1) and its exact decryption m knows
c0 + c1 s = m, an equation that is linear in the key s (Li and Micciancio, 2021, "On the security of homomorphic encryption on
approximate numbers", section 3). TenSEAL publishes real parts only, half of the equations; two ciphertexts give the rest. Rounded to a
grid that swallows the noise, m is a function of the plaintexts alone, and there is no equation.

Rounding does not help against a server that invents ciphertexts: c1 = 2^g opens to the key itself, on the grid. That is what the
tags of `he.tags` refuse.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from privfed.attacks.observation import NotApplicable
from privfed.he import _seal_public
from privfed.he.additive import CkksVector
from privfed.he.codec import evaluate, gather, interpolate, pack_words, unpack_words
from privfed.he.params import FRESH_NOISE, SEED_BYTES, CkksParams, ring_of
from privfed.he.peers import PeerRound, PeerSetting, SeenCiphertext

FLARE = PeerSetting(name="NVIDIA FLARE's default", poly_modulus_degree=8192, chain_bits=(60, 40, 40), scale_bits=40, server_weights=True)
ADDITIVE = PeerSetting(name="additions only", poly_modulus_degree=4096, chain_bits=(54, 54), scale_bits=40, server_weights=False)
ADDITIVE_FLOAT32 = PeerSetting(
    name="additions only, published as float32",
    poly_modulus_degree=4096,
    chain_bits=(54, 54),
    scale_bits=30,
    server_weights=False,
    precision=np.float32,
)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RecoveredKey:
    """A ternary key that fits what was published. Whoever reads it reads every ciphertext of its round.

    Args:
        coefficients: Of shape (N,): -1, 0 and 1.
        words: The same in NTT form.
        seconds: How long it took.
    """

    coefficients: NDArray[np.int64]
    words: NDArray[np.uint64]
    seconds: float


def recover_key(
    ring: _seal_public.Ring, ciphertexts: Sequence[SeenCiphertext], published: Sequence[NDArray[np.float64]]
) -> RecoveredKey | NotApplicable:
    """The key behind two ciphertexts and the real parts of what they decrypt to, or why these do not give it.

    The finding needs no truth to be believed: that 4096 words which are the solution of other equations form a ternary polynomial
    does not happen.

    Args:
        ring: Public parameters.
        ciphertexts: Two.
        published: Of each, the numbers that were published, of shape (N / 2,).
    """
    start = time.perf_counter()
    modulus, degree = ring.modulus, ring.poly_modulus_degree
    # The polynomial 2 Re is m(X) + m(1 / X), whose word t is m_t + m_(N - 1 - t): the conjugate of the root t is the root N - 1 - t.
    sums = [ring.encode(2.0 * values.astype(np.complex128), seen.scale) for seen, values in zip(ciphertexts, published, strict=True)]
    (first, a, d), (second, b, e) = (
        (
            (words.astype(object) - seen.c0 - seen.c0[::-1])[: degree // 2],
            seen.c1.astype(object)[: degree // 2],
            seen.c1.astype(object)[::-1][: degree // 2],
        )
        for words, seen in zip(sums, ciphertexts, strict=True)
    )
    determinants = (a * e - b * d) % modulus
    if not determinants.all():
        return NotApplicable(reason="the two ciphertexts give the same equations")
    inverses = np.array([pow(value, -1, modulus) for value in determinants.tolist()], dtype=object)
    words = np.empty(degree, np.uint64)
    words[: degree // 2] = ((first * e - second * d) * inverses % modulus).astype(np.uint64)
    words[degree // 2 :] = ((a * second - b * first) * inverses % modulus).astype(np.uint64)[::-1]
    return _as_key(ring, words, time.perf_counter() - start)


def _as_key(ring: _seal_public.Ring, words: NDArray[np.uint64], seconds: float) -> RecoveredKey | NotApplicable:
    coefficients = interpolate(ring.decode(words))
    if np.abs(coefficients).max() > 1.25:
        return NotApplicable(reason="what solves the equations is not a key: the noise is not in what was published")
    return RecoveredKey(coefficients=np.rint(coefficients).astype(np.int64), words=words, seconds=seconds)


def decrypt(ring: _seal_public.Ring, key: RecoveredKey, seen: SeenCiphertext) -> NDArray[np.complex128]:
    """Values at SEAL's slots, of shape (N / 2,), of a ciphertext under the key. It takes no more than public arithmetic."""
    words = (seen.c1.astype(object) * key.words + seen.c0) % ring.modulus
    return ring.decode(words.astype(np.uint64), seen.scale)


def recover_peer_key(setting: PeerSetting, seen: PeerRound) -> RecoveredKey | NotApplicable:
    """The key of a round of others, from its first two aggregate ciphertexts and what was published of them."""
    slots = setting.poly_modulus_degree // 2
    return recover_key(setting.ring, seen.sums[:2], [seen.published[:slots], seen.published[slots : 2 * slots]])


def see_sum(total: CkksVector) -> tuple[SeenCiphertext, ...]:
    """The ciphertexts of one of our sums, but for a last one that is cut: it shows less than the equations here need."""
    params, degree = total.params, total.params.poly_modulus_degree
    chunks = (unpack_words(chunk, params) for chunk in total.chunks if len(chunk) == params.sum_chunk_bytes)
    return tuple(SeenCiphertext(c0=words[:degree], c1=words[degree:], scale=1.0) for words in chunks)


def see_upload(upload: CkksVector) -> tuple[SeenCiphertext, ...]:
    """The ciphertexts of one of our uploads, c1 expanded from the seeds, as anyone can; but for a last one that is cut."""
    params, ring = upload.params, ring_of(upload.params)
    return tuple(
        SeenCiphertext(c0=unpack_words(chunk[:-SEED_BYTES], params), c1=_seal_public.expand(ring, chunk[-SEED_BYTES:]), scale=1.0)
        for chunk in upload.chunks
        if len(chunk) == params.fresh_chunk_bytes
    )


def real_parts(opened: NDArray[np.float64], params: CkksParams) -> NDArray[np.float64]:
    """What TenSEAL would have published of one chunk of numbers above the guard bits, noise included or not."""
    return opened if params.slots else evaluate(opened).real


def read_upload(upload: CkksVector, key: RecoveredKey) -> NDArray[np.int64]:
    """Grid points of what `see_upload` sees of a client's upload, with a key that was recovered."""
    params, ring = upload.params, ring_of(upload.params)
    numbers = [gather(decrypt(ring, key, seen), params) for seen in see_upload(upload)]
    return np.rint(np.concatenate(numbers) / 2**params.guard_bits).astype(np.int64)[: upload.layout.size]


def craft_sum(total: CkksVector, coefficients: Sequence[int], rng: np.random.Generator) -> CkksVector:
    """What an active server returns in place of a sum: its first chunk opens to the key, and its residual is that of an honest sum.

    Args:
        total: The honest sum, the rest of which is kept.
        coefficients: Those of the honest sum, whose noise is imitated.
        rng: Source of that noise.
    """
    params, ring = total.params, ring_of(total.params)
    degree = params.poly_modulus_degree
    bits = rng.binomial(2 * FRESH_NOISE, 0.5, (len(coefficients), degree)) - FRESH_NOISE
    noise = (np.array(coefficients)[:, np.newaxis] * bits).sum(axis=0).astype(np.float64)
    c1 = np.full(degree, 2**params.guard_bits, np.uint64)  # a constant polynomial has the same word everywhere
    size = params.first_polynomial_sizes(total.layout)[0]
    coefficients_of_c0 = (noise[: size // params.word_bytes].astype(np.int64) % params.modulus).astype(np.uint64)
    c0 = ring.encode(evaluate(noise)) if size == params.polynomial_bytes else coefficients_of_c0
    chunk = pack_words(c0, params) + pack_words(c1, params)
    return CkksVector(layout=total.layout, params=params, key_id=total.key_id, chunks=(chunk, *total.chunks[1:]), fresh=False)


def read_crafted(opened: NDArray[np.int64], params: CkksParams) -> RecoveredKey | NotApplicable:
    """The key, from the first chunk of what a crafted sum was opened to."""
    start = time.perf_counter()
    ring = ring_of(params)
    coefficients = opened[: params.poly_modulus_degree]
    words = ring.encode(evaluate(coefficients.astype(np.float64)))
    return _as_key(ring, words, time.perf_counter() - start)
