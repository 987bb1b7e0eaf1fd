"""A bank's node that answers honestly for the bank's server to see, and then has something happen to the answer on its way.

`python -m tests.engines.flower.hostile FOLDER SOCKET` serves it as the party's process would: in round 1 what it uploads is tampered
with, in round 2 it is that of round 1, in round 3 it is signed by somebody whom nobody knows.
"""

import sys
from pathlib import Path

from privfed.engines.envelope import Answer, seal_answer
from privfed.engines.flower.doorway import serve
from privfed.engines.node import Node
from privfed.identity import Identity
from privfed.phases import Step
from tests.engines.exchanges import round_of, step_of

FAULTS = ("tampered", "stale", "stranger")


class HostileNode:
    def __init__(self, folder: Path, *, faults: tuple[str, ...] = FAULTS) -> None:
        self._node = Node(folder)
        self._name = folder.name
        self._faults = faults
        self._kept = b""

    @property
    def most_bytes(self) -> int:
        return self._node.most_bytes

    def answer(self, request: bytes) -> bytes:
        honest = self._node.answer(request)
        if step_of(request) is not Step.UPLOAD or round_of(request) >= len(self._faults):
            return honest
        kept, self._kept = self._kept, honest
        match self._faults[round_of(request)]:
            case "tampered":
                return honest[: len(honest) // 2] + bytes([honest[len(honest) // 2] ^ 1]) + honest[len(honest) // 2 + 1 :]
            case "stale":
                return kept
            case _:
                return seal_answer(Answer(name=self._name), request, Identity.generate(self._name))

    def close(self) -> None:
        self._node.close()


if __name__ == "__main__":
    serve(HostileNode(Path(sys.argv[1])), Path(sys.argv[2]))
