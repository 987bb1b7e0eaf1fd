"""Ways to change bytes so that what is behind the first check is reached, too."""

import random

from hypothesis import strategies as st


@st.composite
def mutations(draw: st.DrawFn) -> tuple[int, int]:
    return draw(st.integers(0, 2**32 - 1)), draw(st.integers(1, 6))


def mutated(data: bytes, seed: int, times: int) -> bytes:
    """Some bits flipped, numbers set to extremes, the end cut off, pieces cut out, repeated or put in."""
    rng, changed = random.Random(seed), bytearray(data)
    for _ in range(times):
        place = rng.randrange(len(changed) + 1)
        match rng.randrange(7):
            case 0 | 1 if place < len(changed):
                changed[place] ^= 1 << rng.randrange(8)
            case 2:
                size = rng.choice((1, 2, 4, 8))
                changed[place : place + size] = rng.choice((bytes(size), b"\xff" * size, (2 ** (8 * size - 1)).to_bytes(size, "big")))
            case 3:
                del changed[place : place + rng.randrange(1, 40)]
            case 4:
                changed[place:place] = changed[place : place + rng.randrange(1, 200)]
            case 5:
                del changed[place:]
            case _:
                changed[place:place] = rng.randbytes(rng.randrange(1, 20))
    return bytes(changed)
