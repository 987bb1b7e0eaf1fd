"""Vectors as TenSEAL writes them, so that a server that knows nothing but `tenseal.ckks_vector` can add them up.

Parameters with `slots` are a level of the usual context: `ts.context(ts.SCHEME_TYPE.CKKS, 8192, coeff_mod_bit_sizes=[60, 40, 40])`
with a `global_scale` of 2^40, of which such a server needs the public half alone. It may only add: the clients have pre-scaled.

TenSEAL crashes on hostile bytes. What comes back is therefore read here, without TenSEAL and without SEAL, and nothing is believed
but words below the modulus.
"""

import struct

import numpy as np

from privfed.errors import InvalidMessageError
from privfed.he import _seal_public
from privfed.he._seal_bytes import read_foreign_ciphertext, write_ciphertext
from privfed.he.additive import CkksVector
from privfed.he.codec import pack_words, unpack_words
from privfed.he.params import SEED_BYTES, CkksParams
from privfed.update import Layout

_SCALE = 2.0**40
# Protocol buffers: CKKSVectorProto { repeated uint32 sizes = 1; repeated bytes ciphertexts = 2; double scale = 3; }
_SIZES, _CIPHERTEXT, _SCALE_FIELD = 0x0A, 0x12, 0x19


def encode_vector(vector: CkksVector) -> bytes:
    """A vector, fresh or a sum, as the bytes that `ts.ckks_vector_from` reads.

    A number in it is a grid point times 2^guard_bits / 2^40. Sealed tags do not travel with it.

    Raises:
        ValueError: If the parameters have no slots.
    """
    params = _with_slots(vector.params)
    ring = _seal_public.ring(params.poly_modulus_degree, params.modulus, slots=True)
    fields = [_field(_SIZES, b"".join(varint(size) for size in _sizes(vector.layout, params)))]
    for chunk in vector.chunks:
        if vector.fresh:
            words = np.concatenate((unpack_words(chunk[:-SEED_BYTES], params), _seal_public.expand(ring, chunk[-SEED_BYTES:])))
        else:
            words = unpack_words(chunk, params)
        fields.append(_field(_CIPHERTEXT, write_ciphertext(ring.form(_SCALE), words)))
    return b"".join((*fields, bytes([_SCALE_FIELD]), struct.pack("<d", _SCALE)))


def decode_sum(data: bytes, *, layout: Layout, params: CkksParams, key_id: bytes) -> CkksVector:
    """The sum in bytes that a TenSEAL server wrote with `serialize`. Whether it is the right sum is for the tags to tell.

    Raises:
        ValueError: If the parameters have no slots.
        InvalidMessageError: If it is not a vector of this layout under these parameters, as TenSEAL writes it.
    """
    ring = _seal_public.ring(params.poly_modulus_degree, _with_slots(params).modulus, slots=True)
    sizes = _field(_SIZES, b"".join(varint(size) for size in _sizes(layout, params)))
    end = bytes([_SCALE_FIELD]) + struct.pack("<d", _SCALE)
    if not data.startswith(sizes) or not data.endswith(end):
        raise InvalidMessageError
    chunks: list[bytes] = []
    position, stop = len(sizes), len(data) - len(end)
    while position < stop and len(chunks) < params.chunks(layout):
        length, position = _read_length(data, position)
        if length > stop - position:
            raise InvalidMessageError
        chunks.append(pack_words(read_foreign_ciphertext(data[position : position + length], ring.form(_SCALE), ring.modulus), params))
        position += length
    if position != stop or len(chunks) != params.chunks(layout):
        raise InvalidMessageError
    return CkksVector(layout=layout, params=params, key_id=key_id, chunks=tuple(chunks), fresh=False)


def _with_slots(params: CkksParams) -> CkksParams:
    if not params.slots or len(params.moduli) > 1:
        raise ValueError("expected parameters with slots, for example CkksParams.compatible; TenSEAL knows no others")
    return params


def _sizes(layout: Layout, params: CkksParams) -> list[int]:
    whole, rest = divmod(layout.size, params.chunk_coordinates)
    return [params.chunk_coordinates] * whole + ([rest] if rest else [])


def _field(tag: int, content: bytes) -> bytes:
    return bytes([tag]) + varint(len(content)) + content


def varint(number: int) -> bytes:
    """A whole number as protocol buffers write it: seven bits a byte, the lowest first."""
    groups = bytearray()
    while number > 0x7F:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*groups, number))


def _read_length(data: bytes, position: int) -> tuple[int, int]:
    """Length of the ciphertext whose field begins here, and where its bytes begin."""
    if data[position] != _CIPHERTEXT:
        raise InvalidMessageError
    length = 0
    for index, byte in enumerate(data[position + 1 : position + 5]):
        length |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return length, position + 2 + index
    raise InvalidMessageError
