"""The short form of the fuzzing: mutations of valid inputs, and all inputs that are kept. `python -m tests.fuzz.run` is the long one."""

import random
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from privfed.message import Kind
from tests.fuzz.targets import HostileBytesAcceptedError, Session, Target, corpus, targets

NAMES = (
    *(f"{whose}-{kind.name.lower()}" for whose in ("stranger", "insider") for kind in Kind),
    *(
        "header",
        "statement",
        "fresh-chunk",
        "sum-chunk",
        "agreement",
        "privacy-statement",
        "federation-statement",
        "shared-key-file",
        "identity-file",
        "stranger-wrap",
        "insider-wrap",
        "roster",
        "key-chain-file",
        "scanned-file",
        "model-file",
    ),
)


@pytest.fixture(scope="module")
def known() -> Mapping[str, Target]:
    return targets()


def test_every_target_is_fuzzed_here(known: Mapping[str, Target]) -> None:
    assert set(known) == set(NAMES)


@st.composite
def mutations(draw: st.DrawFn) -> tuple[int, int]:
    return draw(st.integers(0, 2**32 - 1)), draw(st.integers(1, 6))


def mutated(data: bytes, seed: int, times: int) -> bytes:
    """Some bits flipped, numbers set to extremes, pieces cut, repeated, inserted."""
    rng, changed = random.Random(seed), bytearray(data)
    for _ in range(times):
        place = rng.randrange(len(changed) + 1)
        match rng.randrange(6):
            case 0 if place < len(changed):
                changed[place] ^= 1 << rng.randrange(8)
            case 1:
                size = rng.choice((1, 2, 4, 8))
                changed[place : place + size] = rng.choice((bytes(size), b"\xff" * size, (2 ** (8 * size - 1)).to_bytes(size, "big")))
            case 2:
                del changed[place:]
            case 3:
                del changed[place : place + rng.randrange(1, 40)]
            case 4:
                changed[place:place] = changed[place : place + rng.randrange(1, 200)]
            case _:
                changed[place:place] = rng.randbytes(rng.randrange(1, 20))
    return bytes(changed)


@pytest.mark.parametrize("name", NAMES)
def test_mutated_inputs_are_refused_as_documented(known: Mapping[str, Target], name: str) -> None:
    target = known[name]
    for sample in target.samples:
        target.run(sample)

    @settings(deadline=None, max_examples=300)
    @given(mutations())
    def all_are(mutation: tuple[int, int]) -> None:
        for sample in target.samples:
            target.run(mutated(sample, *mutation))

    all_are()


@pytest.mark.parametrize("name", NAMES)
def test_inputs_that_are_kept_are_refused_as_documented(known: Mapping[str, Target], name: str) -> None:
    for data in (b"", bytes(10), bytes(5000), *corpus(name)):
        known[name].run(data)


@pytest.mark.parametrize("kind", list(Kind), ids=lambda kind: kind.name)
def test_the_fuzzing_notices_an_unsigned_message_that_is_accepted(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session()
    target = session.stranger(kind)
    monkeypatch.setattr("privfed.identity.PublicIdentity.verify", lambda *_: None)
    with pytest.raises(HostileBytesAcceptedError):
        target.run(target.samples[0][:-1] + bytes([target.samples[0][-1] ^ 1]))
