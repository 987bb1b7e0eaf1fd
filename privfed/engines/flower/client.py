"""The app at each party: it hands what it is sent to the party's own node, and holds nothing itself."""

from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from privfed.engines.flower.doorway import ask
from privfed.engines.flower.envelope import seal, unseal

SOCKET = "socket"
"""Key of the SuperNode's configuration: path of the socket at which the party's node listens."""

_RESTART_SECONDS = 60.0

app = ClientApp()


@app.train()
def answer(message: Message, context: Context) -> Message:
    """What the party's node answers.

    Raises:
        ConnectionError: If the node is not there.
        InvalidMessageError: If the message is none of privfed's.
        ValueError: If the SuperNode was started without the path of the node's socket.
    """
    socket = context.node_config.get(SOCKET)
    if not isinstance(socket, str):
        raise ValueError(f"expected the SuperNode's --node-config to have {SOCKET}, the path at which the party's node listens")
    return Message(seal(ask(Path(socket), unseal(message.content), seconds=_RESTART_SECONDS)), reply_to=message)
