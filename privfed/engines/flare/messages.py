"""What a FLARE task of ours is called, and where the bytes are in it."""

TASK = "privfed"
REQUEST = "request"
REPLY = "reply"

MOST_BYTES = 2**31 - 2**22
"""Longest request or reply: FLARE's frames hold 2 GB less 2 MB, with its own header in them."""
