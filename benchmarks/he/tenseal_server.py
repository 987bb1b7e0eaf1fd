"""Servers that know nothing but TenSEAL: with vectors that our clients write for it, and as its tutorials use it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import tenseal
from numpy.typing import NDArray

from benchmarks.he.meter import Meter
from benchmarks.he.ours import Compatible
from benchmarks.he.workload import Workload, pack, unpack
from privfed.he.codec import dequantise
from privfed.he.secret import open_sum
from privfed.he.tenseal_vectors import decode_sum, encode_vector


class CompatibleTenseal(Compatible):
    """The compatible profile where the server is another's: no signatures, no tags, nothing but vectors that it adds."""

    def upload(self, client: int, meter: Meter, agreeing: Meter) -> bytes:
        tensors = self._work.update(client)
        self._load_ring()
        with agreeing:
            key = self._round_key()
        with meter:
            return encode_vector(self._protected(client, tensors, key).update.vector)

    def serve(self, uploads: Iterator[bytes], answers: Callable[[], None], meter: Meter) -> bytes:  # noqa: ARG002
        context = tenseal.context(tenseal.SCHEME_TYPE.CKKS, 8192, coeff_mod_bit_sizes=[60, 40, 40])
        context.make_context_public()
        total = None
        for data in uploads:
            with meter:
                vector = tenseal.ckks_vector_from(context, data)
                total = vector if total is None else total + vector
        with meter:
            return total.serialize()

    def answer(self, meter: Meter) -> None: ...

    def open(self, data: bytes, meter: Meter) -> NDArray[np.floating]:
        agreement, clients = self._context.agreement, self._work.clients
        self._load_ring()
        with meter:
            key = self._round_key()
            total = decode_sum(data, layout=agreement.sent_layout, params=agreement.params, key_id=key.key_id)
            grid = open_sum(total, key, coefficients=(1,) * clients)
            return dequantise(grid, agreement.weighting.divisor(self._names), agreement.params)


class PerTensor:
    """One vector for each tensor under a public key, weights multiplied by the server, decryptions as they come."""

    def __init__(self, work: Workload, folder: Path) -> None:
        self._work = work
        self._folder = folder

    def prepare(self, meter: Meter) -> None:  # noqa: ARG002
        context = tenseal.context(tenseal.SCHEME_TYPE.CKKS, poly_modulus_degree=8192, coeff_mod_bit_sizes=[60, 40, 40, 60])
        context.global_scale = 2**40
        (self._folder / "client.context").write_bytes(context.serialize(save_secret_key=True))
        (self._folder / "server.context").write_bytes(context.serialize(save_secret_key=False))

    def answer(self, meter: Meter) -> None: ...

    def _context(self, party: str) -> tenseal.Context:
        return tenseal.context_from((self._folder / f"{party}.context").read_bytes())

    def upload(self, client: int, meter: Meter, agreeing: Meter) -> bytes:  # noqa: ARG002
        update, context = self._work.update(client), self._context("client")
        with meter:
            return pack([tenseal.ckks_vector(context, tensor).serialize() for tensor in update.values()])

    def serve(self, uploads: Iterator[bytes], answers: Callable[[], None], meter: Meter) -> bytes:  # noqa: ARG002
        context, whole = self._context("server"), sum(self._work.weights)
        totals = list[tenseal.CKKSVector]()
        for data, weight in zip(uploads, self._work.weights, strict=True):
            with meter:
                vectors = [tenseal.ckks_vector_from(context, part) * (weight / whole) for part in unpack(data)]
                totals = [total + vector for total, vector in zip(totals, vectors, strict=True)] if totals else vectors
                del vectors
        with meter:
            return pack([total.serialize() for total in totals])

    def open(self, data: bytes, meter: Meter) -> NDArray[np.floating]:
        context = self._context("client")
        with meter:
            return np.concatenate([tenseal.ckks_vector_from(context, part).decrypt() for part in unpack(data)])
