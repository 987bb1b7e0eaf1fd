"""Flower's SecAgg+ in one process per role: masks instead of encryption. Its client functions, and its server's arithmetic."""

import importlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from flwr.common import ConfigRecord, bytes_to_ndarray, ndarrays_to_parameters
from flwr.common.secure_aggregation.crypto.shamir import combine_shares
from flwr.common.secure_aggregation.ndarrays_arithmetic import (
    factor_extract,
    get_parameters_shape,
    parameters_addition,
    parameters_mod,
    parameters_subtraction,
)
from flwr.common.secure_aggregation.quantization import dequantize
from flwr.common.secure_aggregation.secaggplus_constants import Key
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from flwr.common.serde import ProtoConfigRecord, config_record_from_proto, config_record_to_proto
from numpy.typing import NDArray

from benchmarks.he.meter import Meter
from benchmarks.he.workload import BOUND, Workload

# The package has a function of this name, which hides the module.
secaggplus = importlib.import_module("flwr.client.mod.secure_aggregation.secaggplus_mod")

# Flower's defaults, but for the clipping range, which is the bound that our profiles are given too.
_QUANTIZATION_RANGE, _MODULUS_RANGE = 1 << 22, 1 << 32
_MOST_NEIGHBOURS = 21  # a client shares masks with all others while they are few


def _dump(record: ConfigRecord) -> bytes:
    return config_record_to_proto(record).SerializeToString()


def _load(data: bytes) -> ConfigRecord:
    return config_record_from_proto(ProtoConfigRecord.FromString(data))


class SecAggPlus:
    """Nobody drops out. A client is known by its number plus one."""

    def __init__(self, work: Workload, folder: Path) -> None:
        logging.disable(logging.CRITICAL)
        self._work = work
        self._folder = folder
        self._nodes = range(1, work.clients + 1)
        self._shares = min(work.clients, _MOST_NEIGHBOURS)
        self._threshold = max(2, round(self._shares * 2 / 3))

    def _neighbours(self, node: int) -> list[int]:
        reach = self._shares // 2
        return sorted({(node - 1 + offset) % self._work.clients + 1 for offset in range(-reach, reach + 1)})

    def _state(self, node: int) -> object:
        return secaggplus.SecAggPlusState(**_load((self._folder / f"state-{node}").read_bytes()))

    def _keep(self, node: int, state: object) -> None:
        (self._folder / f"state-{node}").write_bytes(_dump(ConfigRecord(state.to_dict())))

    def prepare(self, meter: Meter) -> None:
        terms = {
            Key.SAMPLE_NUMBER: self._work.clients,
            Key.SHARE_NUMBER: self._shares,
            Key.THRESHOLD: self._threshold,
            Key.CLIPPING_RANGE: BOUND,
            Key.TARGET_RANGE: _QUANTIZATION_RANGE,
            Key.MOD_RANGE: _MODULUS_RANGE,
            Key.MAX_WEIGHT: float(max(self._work.weights)),
        }
        states, public_keys = {node: secaggplus.SecAggPlusState(nid=node) for node in self._nodes}, dict[int, list[bytes]]()
        for node, state in states.items():
            with meter:
                keys = secaggplus._setup(state, ConfigRecord(terms))
            public_keys[node] = [keys[Key.PUBLIC_KEY_1], keys[Key.PUBLIC_KEY_2]]
        sources, ciphertexts = {node: list[int]() for node in self._nodes}, {node: list[bytes]() for node in self._nodes}
        for node, state in states.items():
            with meter:
                shared = secaggplus._share_keys(state, {str(other): tuple(public_keys[other]) for other in self._neighbours(node)})
            for other, ciphertext in zip(shared[Key.DESTINATION_LIST], shared[Key.CIPHERTEXT_LIST], strict=True):
                sources[other].append(node)
                ciphertexts[other].append(ciphertext)
        for node, state in states.items():
            self._keep(node, state)
            received = ConfigRecord({Key.SOURCE_LIST: sources[node], Key.CIPHERTEXT_LIST: ciphertexts[node]})
            (self._folder / f"received-{node}").write_bytes(_dump(received))

    def upload(self, client: int, meter: Meter, agreeing: Meter) -> bytes:  # noqa: ARG002
        node = client + 1
        state, received = self._state(node), _load((self._folder / f"received-{node}").read_bytes())
        parameters = ndarrays_to_parameters(list(self._work.update(client).values()))
        with meter:
            masked = secaggplus._collect_masked_vectors(state, received, self._work.weights[client], parameters)
            data = _dump(ConfigRecord(masked, keep_input=False))
        self._keep(node, state)
        return data

    def answer(self, meter: Meter) -> None:
        for node in self._nodes:
            state = self._state(node)
            with meter:
                answered = secaggplus._unmask(state, {Key.ACTIVE_NODE_ID_LIST: self._neighbours(node), Key.DEAD_NODE_ID_LIST: []})
            (self._folder / f"answer-{node}").write_bytes(_dump(ConfigRecord(answered)))

    def serve(self, uploads: Iterator[bytes], answers: Callable[[], None], meter: Meter) -> bytes:
        total = None
        for data in uploads:
            with meter:
                masked = [bytes_to_ndarray(part) for part in _load(data)[Key.MASKED_PARAMETERS]]
                total = masked if total is None else parameters_addition(total, masked)
                del masked, data
        answers()
        shares = {node: list[bytes]() for node in self._nodes}
        for node in self._nodes:
            answered = _load((self._folder / f"answer-{node}").read_bytes())
            for owner, share in zip(answered[Key.NODE_ID_LIST], answered[Key.SHARE_LIST], strict=True):
                shares[owner].append(share)
        with meter:
            total = parameters_mod(total, _MODULUS_RANGE)
            for parts in shares.values():
                mask = pseudo_rand_gen(combine_shares(parts), _MODULUS_RANGE, get_parameters_shape(total))
                total = parameters_subtraction(total, mask)
            ratio, total = factor_extract(parameters_mod(total, _MODULUS_RANGE))
            opened = dequantize(total, BOUND, _QUANTIZATION_RANGE)
            offset = (self._work.clients - 1) * BOUND
            return b"".join(((part - offset) * (_QUANTIZATION_RANGE / ratio)).astype(np.float32).tobytes() for part in opened)

    def open(self, data: bytes, meter: Meter) -> NDArray[np.floating]:
        with meter:
            return np.frombuffer(data, np.float32)
