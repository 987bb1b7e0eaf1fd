"""SEAL with secrets: key generation, encryption, and the one unrounded decryption, which stays inside this package."""

import hashlib
import struct
from collections.abc import Sequence
from typing import NoReturn, final

import numpy as np
import tenseal.sealapi as seal
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from numpy.typing import NDArray

from privfed.he import _seal_public

KEY_SEED_BYTES = 64


def derive(secret: bytes, length: int, *fields: bytes) -> bytes:
    """HKDF-Expand-SHA512 (RFC 5869) of a uniform secret over length-prefixed fields: no two lists of fields are the same bytes."""
    info = b"".join(len(field).to_bytes(4, "big") + field for field in fields)
    return HKDFExpand(algorithm=hashes.SHA512(), length=length, info=info).derive(secret)


class Secret:
    """Base of everything that holds key material: it cannot be printed, copied or pickled.

    Python cannot promise to erase memory: copies of a key may stay in freed memory until the process ends. Keep processes
    that hold keys short-lived, and their memory out of swap and core dumps.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(<secret>)"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} holds key material and cannot be copied or pickled")

    def __getstate__(self) -> NoReturn:
        self.__reduce__()


@final
class RingKey(Secret):
    """A ternary secret key of a ring.

    Args:
        ring: The ring.
        seed: 64 bytes, uniform and secret. The same seed gives the same key on machines whose SEAL was built alike.
    """

    __slots__ = ("_decryptor", "_encryptor", "_key", "_ring")

    def __init__(self, ring: _seal_public.Ring, seed: bytes) -> None:
        if len(seed) != KEY_SEED_BYTES:
            raise ValueError(f"expected a seed of {KEY_SEED_BYTES} bytes, got {len(seed)}")
        parameters = _seal_public.encryption_parameters(ring.poly_modulus_degree, ring.chain_bits)
        parameters.set_random_generator(seal.Blake2xbPRNGFactory(list(struct.unpack("<8Q", seed))))
        generator = seal.KeyGenerator(_seal_public.checked_context(parameters, ring.security_bits))
        self._ring = ring
        self._key = seal.SecretKey()
        # The key moves into the ring's own context and the seeded one is dropped: encryption under the seeded context would
        # draw the same polynomials and the same noise each time.
        with _seal_public.memory_path() as path:
            generator.secret_key().save(path)
            self._key.load(ring.context, path)
        self._encryptor = seal.Encryptor(ring.context, self._key)
        self._decryptor = seal.Decryptor(ring.context, self._key)

    def digest(self, label: bytes) -> bytes:
        """SHA-256 over a label and the key, 32 bytes. Public: the key has more entropy than anyone can search."""
        return hashlib.sha256(len(label).to_bytes(4, "big") + label + _seal_public.members(_seal_public.saved(self._key))).digest()

    def words(self) -> NDArray[np.uint64]:
        """The key modulo the last prime of the chain, as SEAL keeps it in memory, of shape (N,). Secret: for the memory scan alone."""
        body = _seal_public.members(_seal_public.saved(self._key))
        return np.frombuffer(body[-8 * self._ring.poly_modulus_degree :], "<u8")

    def encrypt(self, polynomials: Sequence[NDArray[np.complex128]]) -> list[tuple[NDArray[np.uint64], bytes]]:
        """Encrypts the polynomials with these values at SEAL's slots, with fresh randomness from the operating system.

        Returns:
            Of each the words of c0, of shape (N,), and the seed of c1.
        """
        # Step by step for all, and not all steps for each: a sixth less time, because code and tables stay in the processor's caches.
        plaintexts = [self._ring.plaintext(values) for values in polynomials]
        ciphertexts = [self._encryptor.encrypt_symmetric(plaintext) for plaintext in plaintexts]
        containers = list(_seal_public.saved_each(ciphertexts))
        return [_seal_public.ciphertext_members(container, self._ring, seeded=True) for container in containers]

    def decrypt_unrounded(self, words: NDArray[np.uint64]) -> NDArray[np.complex128]:
        """Values, at SEAL's slots, of the polynomial inside a ciphertext, noise included.

        Never hand these, nor anything computed from them but grid points, to anyone: they give the key away (Li and
        Micciancio, 2021, "On the security of homomorphic encryption on approximate numbers", section 3).

        Raises:
            InvalidMessageError: If it is not a valid ciphertext.
        """
        plain = seal.Plaintext()
        self._decryptor.decrypt(_seal_public.load_sum(self._ring, words), plain)
        return np.array(self._ring.encoder.decode_complex(plain), np.complex128)
