"""The process in which a bank's, or a key holder's, node answers: `python -m privfed.engines.flower.party --folder DIR --socket FILE`.

It runs as the user who owns the party's folder. The SuperNode runs as another one, who can reach the socket and nothing else.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from privfed.engines.flower.doorway import serve
from privfed.engines.node import Node
from privfed.errors import PrivFedError


def _say_ready() -> None:
    sys.stderr.write("privfed: the node listens\n")
    sys.stderr.flush()


def main(arguments: Sequence[str] | None = None) -> None:
    """Opens the folder and answers until it is told to stop."""
    parser = argparse.ArgumentParser(prog="python -m privfed.engines.flower.party", description=__doc__, allow_abbrev=False)
    parser.add_argument("--folder", type=Path, required=True, metavar="DIR", help="the party's own folder")
    parser.add_argument("--socket", type=Path, required=True, metavar="FILE", help="where the SuperNode's app finds the node")
    known = parser.parse_args(arguments)
    # As an exception, so that the folder is let go of in order.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        with closing(Node(known.folder)) as node:
            serve(node, known.socket, ready=_say_ready)
    except (PrivFedError, OSError, ValueError) as error:
        sys.exit(f"privfed: {error}")


if __name__ == "__main__":
    main()
