"""What a FLARE task of ours is called, and where the bytes are in it; and where the reason of a failed run is."""

TASK = "privfed"
REQUEST = "request"
REPLY = "reply"

STATS = "privfed"
"""Our group among the statistics of a job, with the reason why a run failed."""
REASON = "reason"

MOST_BYTES = 2**31 - 2**22
"""Longest request or reply: FLARE's frames hold 2 GB less 2 MB, with its own header in them."""
