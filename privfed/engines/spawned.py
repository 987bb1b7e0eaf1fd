"""The server as a process of its own, in which torch, opacus and secret keys cannot be imported.

So that "the server holds no key" is a statement about a process whose memory can be searched.
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import privfed.errors
from privfed.agreement import Agreement, RoundContext
from privfed.engines.frames import Tag, read_frame, write_frame
from privfed.errors import InvalidMessageError
from privfed.written_agreement import encode_agreement

_END_SECONDS = 10
_OTHER_ERRORS = {kind.__name__: kind for kind in (ValueError, OSError)}


class SpawnedServer:
    """Starts a server process and speaks to it; ends it when the `with` block ends.

    Args:
        agreement: What the session agreed on.
        identity_path: File with the server's signing key.
        spool: Directory for the messages that the server keeps.
    """

    def __init__(self, *, agreement: Agreement, identity_path: Path, spool: Path) -> None:
        # A new program, never a fork: a forked child would start with a copy of this process's memory, keys included.
        self._process = subprocess.Popen(  # no shell, fixed arguments
            [sys.executable, "-m", "privfed.engines.server_process"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the server process has no pipes")
        self._sink, self._source = self._process.stdin, self._process.stdout
        start = {"agreement": encode_agreement(agreement), "identity": str(identity_path), "spool": str(spool)}
        write_frame(self._sink, Tag.BEGIN, json.dumps(start).encode())

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    def begin(self, context: RoundContext, selected: Sequence[str]) -> Self:
        """Starts a round, or goes on with one that stands in the spool.

        Raises:
            PrivFedError: As `Server`.
        """
        begin = {
            "round": context.round,
            "attempt": context.attempt,
            "history": context.history.hex(),
            "selected": list(selected),
        }
        self._ask(Tag.BEGIN, json.dumps(begin).encode())
        return self

    def cohort(self) -> tuple[str, ...]:
        """See `Server.cohort`."""
        return tuple(json.loads(self._ask(Tag.COHORT)))

    def participants(self) -> tuple[str, ...]:
        """See `Server.participants`."""
        return tuple(json.loads(self._ask(Tag.PARTICIPANTS)))

    def missing_approvals(self) -> tuple[str, ...]:
        """See `Server.missing_approvals`."""
        return tuple(json.loads(self._ask(Tag.MISSING_APPROVALS)))

    def next_history(self) -> bytes:
        """See `Server.next_history`."""
        return self._ask(Tag.NEXT_HISTORY)

    def receive_holder_key(self, data: bytes) -> None:
        """See `Server.receive_holder_key`."""
        self._ask(Tag.RECEIVE_HOLDER_KEY, data)

    def holder_key(self) -> bytes:
        """See `Server.holder_key`."""
        return self._ask(Tag.HOLDER_KEY)

    def receive_setup(self, data: bytes) -> str:
        """See `Server.receive_setup`."""
        return self._ask(Tag.SETUP, data).decode()

    def start_uploads(self) -> tuple[str, ...]:
        """See `Server.start_uploads`."""
        return tuple(json.loads(self._ask(Tag.START_UPLOADS)))

    def relay(self, name: str) -> bytes:
        """See `Server.relay`."""
        return self._ask(Tag.RELAY, name.encode())

    def receive_commitment(self, data: bytes) -> str:
        """See `Server.receive_commitment`."""
        return self._ask(Tag.COMMIT, data).decode()

    def close_commitments(self) -> tuple[str, ...]:
        """See `Server.close_commitments`."""
        return tuple(json.loads(self._ask(Tag.CLOSE_COMMITMENTS)))

    def committed(self) -> tuple[str, ...]:
        """See `Server.committed`."""
        return tuple(json.loads(self._ask(Tag.COMMITTED)))

    def receive_upload(self, data: bytes) -> str:
        """See `Server.receive_upload`."""
        return self._ask(Tag.UPLOAD, data).decode()

    def close(self) -> bytes:
        """See `Server.close`."""
        return self._ask(Tag.CLOSE)

    def receive_approval(self, data: bytes) -> str:
        """See `Server.receive_approval`."""
        return self._ask(Tag.APPROVAL, data).decode()

    def products(self) -> bytes:
        """See `Server.products`."""
        return self._ask(Tag.PRODUCTS)

    def receive_coefficients(self, data: bytes) -> str:
        """See `Server.receive_coefficients`."""
        return self._ask(Tag.RECEIVE_COEFFICIENTS, data).decode()

    def coefficients(self) -> dict[str, int]:
        """See `Server.coefficients`."""
        return json.loads(self._ask(Tag.COEFFICIENTS))

    def aggregate(self) -> bytes:
        """See `Server.aggregate`."""
        return self._ask(Tag.AGGREGATE)

    def upload(self, name: str) -> bytes:
        """See `Server.upload`."""
        return self._ask(Tag.STORED_UPLOAD, name.encode())

    def receive_opened(self, data: bytes) -> None:
        """See `Server.receive_opened`."""
        self._ask(Tag.OPENED, data)

    def result(self) -> bytes:
        """See `Server.result`."""
        return self._ask(Tag.RESULT)

    def receive_abort(self, data: bytes) -> str:
        """See `Server.receive_abort`."""
        return self._ask(Tag.ABORT, data).decode()

    def received_bytes(self) -> dict[str, int]:
        """See `Server.received_bytes`."""
        return json.loads(self._ask(Tag.RECEIVED_BYTES))

    def _ask(self, tag: Tag, payload: bytes = b"") -> bytes:
        try:
            write_frame(self._sink, tag, payload)
            reply, answer = read_frame(self._source)
        except (EOFError, OSError) as error:
            self._process.kill()  # a pipe can be gone a moment before its process
            self._process.wait()
            raise ConnectionError("the server process is gone; its spool holds what it had received") from error
        if reply is Tag.DONE:
            return answer
        refusal = json.loads(answer)
        if refusal["kind"] == InvalidMessageError.__name__:
            raise InvalidMessageError
        raise (_OTHER_ERRORS.get(refusal["kind"]) or getattr(privfed.errors, refusal["kind"]))(refusal["text"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        with contextlib.suppress(OSError):  # it may have ended before
            self._sink.close()  # the process ends when its input does
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._source.close()
