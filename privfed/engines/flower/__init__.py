"""The consortium on Flower: the protocol's bytes between a SuperLink and one SuperNode per party.

Needs the extra `privfed[flower]`. Nothing here decides anything about a round: `privfed.engines.coordinator` and
`privfed.engines.node` do, and what they sign is checked there. Flower carries bytes, and is not trusted with them.
"""

import os

# Read by flwr when it is imported, and inherited by the processes that it starts.
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"
