"""Main program of a server in a process of its own: `python -m privfed.engines.server_process`, started by `SpawnedServer`.

It reads frames from its standard input and answers on its standard output. torch, opacus and the secret half of the encryption
cannot be imported in it.
"""

import json
import sys
from pathlib import Path

from privfed.engines.forbidden import forbid_secrets

if __name__ == "__main__":  # before the imports below, so that they cannot load any of it either
    forbid_secrets()

from privfed.agreement import RoundContext
from privfed.engines.frames import Tag, read_frame, write_frame
from privfed.errors import InvalidMessageError, PrivFedError
from privfed.identity import Identity
from privfed.server import Server
from privfed.written_agreement import decode_agreement


def _answer(server: Server, tag: Tag, payload: bytes) -> bytes:
    match tag:
        case Tag.COHORT:
            return json.dumps(server.cohort()).encode()
        case Tag.PARTICIPANTS:
            return json.dumps(server.participants()).encode()
        case Tag.MISSING_APPROVALS:
            return json.dumps(server.missing_approvals()).encode()
        case Tag.NEXT_HISTORY:
            return server.next_history()
        case Tag.RECEIVE_HOLDER_KEY:
            server.receive_holder_key(payload)
            return b""
        case Tag.HOLDER_KEY:
            return server.holder_key()
        case Tag.SETUP:
            return server.receive_setup(payload).encode()
        case Tag.START_UPLOADS:
            return json.dumps(server.start_uploads()).encode()
        case Tag.RELAY:
            return server.relay(payload.decode())
        case Tag.COMMIT:
            return server.receive_commitment(payload).encode()
        case Tag.CLOSE_COMMITMENTS:
            return json.dumps(server.close_commitments()).encode()
        case Tag.COMMITTED:
            return json.dumps(server.committed()).encode()
        case Tag.UPLOAD:
            return server.receive_upload(payload).encode()
        case Tag.CLOSE:
            return server.close()
        case Tag.APPROVAL:
            return server.receive_approval(payload).encode()
        case Tag.PRODUCTS:
            return server.products()
        case Tag.RECEIVE_COEFFICIENTS:
            return server.receive_coefficients(payload).encode()
        case Tag.COEFFICIENTS:
            return json.dumps(server.coefficients()).encode()
        case Tag.AGGREGATE:
            return server.aggregate()
        case Tag.STORED_UPLOAD:
            return server.upload(payload.decode())
        case Tag.OPENED:
            server.receive_opened(payload)
            return b""
        case Tag.RESULT:
            return server.result()
        case Tag.ABORT:
            return server.receive_abort(payload).encode()
        case Tag.RECEIVED_BYTES:
            return json.dumps(server.received_bytes()).encode()
        case _:
            raise InvalidMessageError


def main() -> None:
    """Serves rounds, one request and one reply at a time, until the other side closes the pipe."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    _, payload = read_frame(source)
    start = json.loads(payload)
    agreement = decode_agreement(start["agreement"])
    identity = Identity.load(Path(start["identity"]), name=agreement.roster.server.name)
    server: Server | None = None
    while True:
        try:
            tag, payload = read_frame(source)
        except EOFError:
            return
        try:
            if tag is Tag.BEGIN:
                begin = json.loads(payload)
                context = RoundContext(
                    agreement=agreement, round=begin["round"], attempt=begin["attempt"], history=bytes.fromhex(begin["history"])
                )
                server = Server(context=context, identity=identity, selected=begin["selected"], spool=Path(start["spool"]))
                answer = b""
            elif server is None:
                raise InvalidMessageError
            else:
                answer = _answer(server, tag, payload)
        except (PrivFedError, ValueError, OSError) as error:
            kind = next((kind.__name__ for kind in (ValueError, OSError) if isinstance(error, kind)), type(error).__name__)
            write_frame(sink, Tag.REFUSED, json.dumps({"kind": kind, "text": str(error)}).encode())
        else:
            write_frame(sink, Tag.DONE, answer)


if __name__ == "__main__":
    main()
