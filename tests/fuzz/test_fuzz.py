"""The short form of the fuzzing: mutations of valid inputs, and all inputs that are kept. `python -m tests.fuzz.run` is the long one."""

from collections.abc import Mapping

import pytest
from hypothesis import given, settings

from privfed.message import Kind
from tests.fuzz.targets import FUZZED, HostileBytesAcceptedError, Session, Target, corpus, targets
from tests.hostile import mutated, mutations

NAMES = (
    *(f"{whose}-{kind.name.lower()}" for whose in ("stranger", "insider") for kind in FUZZED),
    *(
        "dealt-setup",
        "answer",
        "quorum-aggregate",
        "whole-upload",
        "sealed-chunk",
        "held-request",
        "agreement-held",
        "agreement-quorum",
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


@pytest.mark.parametrize("kind", FUZZED, ids=lambda kind: kind.name)
def test_the_fuzzing_notices_an_unsigned_message_that_is_accepted(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session()
    target = session.stranger(kind)
    monkeypatch.setattr("privfed.identity.PublicIdentity.verify", lambda *_: None)
    with pytest.raises(HostileBytesAcceptedError):
        target.run(target.samples[0][:-1] + bytes([target.samples[0][-1] ^ 1]))
