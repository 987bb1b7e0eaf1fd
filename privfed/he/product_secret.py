"""The secret half of encrypted inner products: opening them to rounded numbers, and to nothing else.

What leaves this module are multiples of `ProductParams.scalar_step`. The product of two updates slot by slot, which a masked ciphertext
hides and an own one would show, is never decoded for anybody.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from privfed.errors import ParametersMismatchError, RoundMismatchError, TamperedProductsError
from privfed.he._seal_secret import RingKey
from privfed.he.additive import CkksVector
from privfed.he.codec import interpolate, unpack_words
from privfed.he.escrow import WholeVector
from privfed.he.escrow_secret import AttemptKey
from privfed.he.product import Assurance, MaskedProducts, pairs, unmasked_products
from privfed.he.product_params import ProductParams
from privfed.he.secret import RoundKey

# Masked coefficients that are compared, and the distance, as a share of the modulus, below which two of them are close: products are
# below 2^-12 of it, so those under one mask are all close, and those under two are with a probability of 2^-10 each.
_COMPARED, _CLOSE = 64, 2.0**-11


@dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)
class OpenedProducts:
    """Inner products of every pair of uploads. Private: norms and angles of updates.

    Args:
        products: Of shape (n, n), symmetric, rounded to `ProductParams.scalar_step`.
        assurance: What they rest on. Public.
    """

    products: NDArray[np.float64]
    assurance: Assurance

    @property
    def disclosed(self) -> int:
        """How many numbers were opened: n (n + 1) / 2. Public."""
        return len(pairs(len(self.products)))

    def __repr__(self) -> str:
        return f"OpenedProducts(uploads={len(self.products)}, assurance={self.assurance.name})"


def open_products(masked: MaskedProducts, round_key: RoundKey) -> OpenedProducts:
    """Opens what a server multiplied and masked. Whether it multiplied what it says cannot be seen from it.

    A server that multiplies an upload by a unit vector of its own and says it is a pair has a coordinate opened: that is what
    `Assurance.HONEST_BUT_CURIOUS` says. `open_own_products` does not depend on it.

    Raises:
        ParametersMismatchError, RoundMismatchError: If the key is for other parameters, or is another one.
        TamperedProductsError: If two products have the same mask, or one has none; nothing leaves.
        InvalidMessageError: If a product is not a valid ciphertext.
    """
    _check_key(masked.params, masked.key_id, round_key)
    words = (unpack_words(chunk, masked.params) for chunk in masked.chunks)
    constants, coefficients = _decrypted(words, masked.params, round_key._ring_key)  # pyright: ignore[reportPrivateUsage]
    _check_masks(coefficients)
    return OpenedProducts(products=_matrix(constants, masked.count, masked.params), assurance=Assurance.HONEST_BUT_CURIOUS)


def open_own_products(
    uploads: Sequence[CkksVector], round_key: RoundKey, *, seed: bytes = b"", announced: MaskedProducts | None = None
) -> OpenedProducts:
    """Multiplies signed uploads and opens their inner products. The caller has verified the signatures.

    No mask is needed: nobody but this function sees a product before it is a number.

    Args:
        uploads: Fresh, of one key and layout.
        round_key: Key of the round.
        seed: As in `masked_products`.
        announced: What a server says it multiplied: opened, and compared up to the noise of a mask. Left out, nothing is.

    Raises:
        ValueError: If there are fewer than two uploads, or one is a sum.
        ParametersMismatchError, RoundMismatchError: As `open_products`; or if the uploads differ in layout or key.
        TamperedProductsError: If what was announced does not open to the inner products of these uploads, or as `open_products`; nothing
            leaves but that.
        InvalidMessageError: If a chunk is not a valid ciphertext.
    """
    if len(uploads) < 2 or not all(upload.fresh for upload in uploads):
        raise ValueError(f"expected at least 2 fresh uploads, got {len(uploads)}, or a sum; nothing was opened")
    first = uploads[0]
    params = first.params
    if not isinstance(params, ProductParams):
        raise ParametersMismatchError("the uploads cannot be multiplied under their parameters; nothing was opened")
    if any(upload.params != params or upload.layout != first.layout for upload in uploads):
        raise ParametersMismatchError("the uploads have different parameters or layouts; nothing was opened")
    for upload in uploads:
        _check_key(params, upload.key_id, round_key)
    every = list(
        unmasked_products(
            lambda upload, chunk: uploads[upload].chunks[chunk], count=len(uploads), layout=first.layout, params=params, seed=seed
        )
    )
    constants, _ = _decrypted(every, params, round_key._ring_key)  # pyright: ignore[reportPrivateUsage]
    if announced is not None:
        if announced.params != params or announced.key_id != first.key_id or announced.count != len(uploads):
            raise TamperedProductsError
        told, coefficients = _decrypted((unpack_words(chunk, params) for chunk in announced.chunks), params, round_key._ring_key)  # pyright: ignore[reportPrivateUsage]
        _check_masks(coefficients)
        # All three polynomials are rerandomised, so that no word of them is what multiplication makes: what they open to is.
        most = int(params.constant_per_scalar) + params.zeros_noise
        if any(abs(said - constant) > most for said, constant in zip(told, constants, strict=True)):
            raise TamperedProductsError
    return OpenedProducts(products=_matrix(constants, len(uploads), params), assurance=Assurance.RECOMPUTED)


def open_escrowed_products(uploads: Sequence[WholeVector], key: AttemptKey) -> OpenedProducts:
    """Multiplies signed uploads that were encrypted to the key holder, and opens their inner products. It has verified the signatures.

    Args:
        uploads: Of one public key and layout.
        key: The holder's key of the attempt.

    Raises:
        ValueError: If there are fewer than two uploads.
        ParametersMismatchError, RoundMismatchError: If parameters, layouts or public keys differ, or cannot be multiplied.
        InvalidMessageError: If a chunk is not a valid ciphertext.
    """
    if len(uploads) < 2:
        raise ValueError(f"expected at least 2 uploads, got {len(uploads)}; nothing was opened")
    first = uploads[0]
    params = first.params
    if not isinstance(params, ProductParams) or not params.asymmetric:
        raise ParametersMismatchError("the uploads cannot be multiplied under their parameters; nothing was opened")
    if any(upload.params != params or upload.layout != first.layout for upload in uploads):
        raise ParametersMismatchError("the uploads have different parameters or layouts; nothing was opened")
    if any(upload.key_id != first.key_id for upload in uploads):
        raise RoundMismatchError("the uploads were encrypted to different keys; nothing was opened")
    products = unmasked_products(
        lambda upload, chunk: uploads[upload].chunks[chunk], count=len(uploads), layout=first.layout, params=params
    )
    constants, _ = _decrypted(products, params, key._ring_key)  # pyright: ignore[reportPrivateUsage]
    return OpenedProducts(products=_matrix(constants, len(uploads), params), assurance=Assurance.RECOMPUTED)


def _check_key(params: ProductParams, key_id: bytes, round_key: RoundKey) -> None:
    if params != round_key.params:
        raise ParametersMismatchError("the round key was made for other parameters; nothing was opened")
    if key_id != round_key.key_id:
        raise RoundMismatchError("the products belong to another round key; nothing was opened")


def _decrypted(products: Iterable[NDArray[np.uint64]], params: ProductParams, key: RingKey) -> tuple[list[int], NDArray[np.float64]]:
    """Constant coefficients, and the first others as shares of the modulus, of shape (pairs, 64), from -1/2 to 1/2."""
    constants, coefficients = list[int](), list[NDArray[np.float64]]()
    for words in products:
        constant, values = key.decrypt_product(words)
        constants.append(constant)
        coefficients.append(interpolate(values)[1 : _COMPARED + 1] / params.modulus)
    return constants, np.array(coefficients, dtype=np.float64)


def _check_masks(coefficients: NDArray[np.float64]) -> None:
    """Refuses masked coefficients of which two rows, or one row and zero, are close: uniform ones never are, see `_CLOSE`."""
    rows = np.vstack((np.zeros(coefficients.shape[1]), coefficients))
    for index, row in enumerate(rows[:-1]):
        apart = rows[index + 1 :] - row
        if (np.abs(apart - np.rint(apart)) < _CLOSE).all(axis=1).any():
            raise TamperedProductsError


def _matrix(constants: Sequence[int], count: int, params: ProductParams) -> NDArray[np.float64]:
    """Rounded inner products, exactly computed from constant coefficients until the last step."""
    unit = (params.amplitude << params.guard_bits) ** 2
    matrix = np.zeros((count, count))
    for (first, second), constant in zip(pairs(count), constants, strict=True):
        scaled = constant * (params.poly_modulus_degree // 2) * params.scalars_per_square
        matrix[first, second] = matrix[second, first] = float((2 * scaled + unit) // (2 * unit)) * params.scalar_step
    return matrix
