"""The homomorphic path of NVIDIA FLARE in one process per role: its encryptor, aggregator, generator and decryptor, and its messages.

Wired as its examples wire them: differences of weights, which the clients multiply by their numbers of steps before they encrypt; one
secret key that all clients share.
"""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.utils.decomposers import flare_decomposers
from nvflare.app_common.abstract.model import make_model_learnable
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.decomposers import common_decomposers
from nvflare.app_opt.he import decomposers
from nvflare.app_opt.he.intime_accumulate_model_aggregator import HEInTimeAccumulateWeightedAggregator
from nvflare.app_opt.he.model_decryptor import HEModelDecryptor
from nvflare.app_opt.he.model_encryptor import HEModelEncryptor
from nvflare.app_opt.he.model_shareable_generator import HEModelShareableGenerator
from nvflare.fuel.sec.security_content_service import SecurityContentService
from nvflare.fuel.utils import fobs
from nvflare.lighter.impl.he import HEBuilder

from benchmarks.he.meter import Meter
from benchmarks.he.workload import Workload


class Flare:
    """FLARE's classes, called as its engine calls them."""

    def __init__(self, work: Workload, folder: Path) -> None:
        logging.disable(logging.CRITICAL)
        self._work = work
        self._folder = folder
        for each in (flare_decomposers, common_decomposers, decomposers):
            each.register()
        SecurityContentService.initialize(content_folder=str(folder))
        self._context = FLContext()
        self._context.set_prop(FLContextKey.SECURE_MODE, value=False, private=True, sticky=False)  # nobody provisioned certificates here

    def _set_peer(self, name: str) -> None:
        peer = FLContext()
        peer.set_prop(ReservedKey.IDENTITY_NAME, name, private=False, sticky=False)
        self._context.set_peer_context(peer)

    def prepare(self, meter: Meter) -> None:  # noqa: ARG002
        builder = HEBuilder()
        builder.initialize(None, None)
        for party, is_client in (("client", True), ("server", False)):
            (self._folder / f"{party}_context.tenseal").write_bytes(builder.get_serialized_context(is_client=is_client))

    def answer(self, meter: Meter) -> None: ...

    def upload(self, client: int, meter: Meter, agreeing: Meter) -> bytes:  # noqa: ARG002
        update = self._work.update(client)
        self._set_peer("server")
        encryptor = HEModelEncryptor(weigh_by_local_iter=True)
        encryptor.handle_event(EventType.START_RUN, self._context)
        difference = DXO(DataKind.WEIGHT_DIFF, data=update, meta={MetaKey.NUM_STEPS_CURRENT_ROUND: self._work.weights[client]})
        with meter:
            return fobs.dumps(encryptor.process_dxo(difference, Shareable(), self._context).to_shareable())

    def serve(self, uploads: Iterator[bytes], answers: Callable[[], None], meter: Meter) -> bytes:  # noqa: ARG002
        aggregator = HEInTimeAccumulateWeightedAggregator(expected_data_kind=DataKind.WEIGHT_DIFF, weigh_by_local_iter=False)
        generator = HEModelShareableGenerator()
        for each in (aggregator, generator):
            each.handle_event(EventType.START_RUN, self._context)
        zeros = {name: np.zeros(size, np.float32) for name, size in self._work.sizes.items()}
        self._context.set_prop(AppConstants.CURRENT_ROUND, 0, private=True, sticky=False)
        self._context.set_prop(AppConstants.GLOBAL_MODEL, make_model_learnable(zeros, {}), private=True, sticky=False)
        for client, data in enumerate(uploads):
            name = f"site-{client}"
            self._set_peer(name)
            with meter:
                message = fobs.loads(data)
                message.set_peer_props({ReservedKey.IDENTITY_NAME: name})
                message.add_cookie(AppConstants.CONTRIBUTION_ROUND, 0)
                if not aggregator.accept(message, self._context):
                    raise RuntimeError("the aggregator took no upload")
                del message, data  # else this one would be held while the next one comes
        with meter:
            learnable = generator.shareable_to_learnable(aggregator.aggregate(self._context), self._context)
            return fobs.dumps(generator.learnable_to_shareable(learnable, self._context))

    def open(self, data: bytes, meter: Meter) -> NDArray[np.floating]:
        decryptor = HEModelDecryptor()
        decryptor.handle_event(EventType.START_RUN, self._context)
        with meter:
            message = fobs.loads(data)
            opened = decryptor.process_dxo(from_shareable(message), message, self._context)
            return np.concatenate([np.asarray(opened.data[name]).ravel() for name in self._work.sizes])
