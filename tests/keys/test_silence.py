"""Keys stay out of `repr`, logs, standard output, error messages, pickles and copies."""

import base64
import copy
import logging
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from privfed.cli import app
from privfed.he.secret import RoundBinding
from privfed.keys.chain import KeyChain
from privfed.keys.party import Party
from privfed.keys.roster import PinnedRoster
from tests.keys.conftest import People

Bind = Callable[..., RoundBinding]


def forms(secret: bytes) -> Iterator[str]:
    """How a secret could show."""
    yield secret.hex()
    yield repr(secret)[2:18]
    yield base64.b64encode(secret).decode()[4:30]


def secrets_of(party: Party, chain: KeyChain) -> list[bytes]:
    return [chain._chain_key, party._encryption_key.private_bytes_raw(), party._identity._key.private_bytes_raw()]


def test_no_object_shows_what_it_holds(people: People, chain: KeyChain, roster: PinnedRoster) -> None:
    party = people["bank_a"]
    things = [party, party.public, chain, chain.facts, roster, roster.parties]
    for thing in things:
        for text in (repr(thing), str(thing), f"{thing}", repr([thing])):
            assert not any(form in text for secret in secrets_of(party, chain) for form in forms(secret)), type(thing).__name__
    assert repr(chain) == "KeyChain(<secret>)"
    assert repr(party) == "Party(<secret>)"


@pytest.mark.parametrize("kind", ["party", "chain"])
def test_secret_types_cannot_be_copied_or_pickled_and_have_no_dictionary(people: People, chain: KeyChain, kind: str) -> None:
    thing = people["bank_a"] if kind == "party" else chain
    for attempt in (copy.copy, copy.deepcopy, *(lambda it, p=p: pickle.dumps(it, protocol=p) for p in range(6))):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            attempt(thing)
    with pytest.raises(TypeError):
        vars(thing)


def test_the_pattern_would_find_a_secret(chain: KeyChain) -> None:
    text = f"{chain._chain_key!r} {chain._chain_key.hex()} {base64.b64encode(chain._chain_key).decode()}"
    assert all(form in text for form in forms(chain._chain_key))


def test_no_command_prints_or_logs_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.chdir(tmp_path)
    shown: list[str] = []

    def run(*arguments: str) -> Result:
        result = CliRunner().invoke(app, ["keys", *arguments])
        shown.append(result.output)
        if result.exception is not None:
            shown.append(repr(result.exception))
        return result

    for name in ("bank_a", "bank_b"):
        run("init", name)
    run("init", "hub", "--server")
    Path("roster.txt").write_text("".join(Path(name, "public.txt").read_text() for name in ("bank_a", "bank_b", "hub")))
    Path("roster.txt").chmod(0o644)
    options = ("--roster", "roster.txt", "--key")
    assert run("wrap", "bank_a", *options, "a.key", "--out", "wraps").exit_code == 0
    assert run("unwrap", "bank_b", "wraps/bank_b.wrap", *options, "b.key").exit_code == 0
    chains = [KeyChain.load(Path("a.key"), roster=PinnedRoster.load(Path("roster.txt")))]
    parties = [Party.load(Path(name)) for name in ("bank_a", "bank_b")]
    assert run("unwrap", "bank_b", "wraps/bank_b.wrap", *options, "b.key").exit_code == 2
    assert run("rotate", "bank_a", *options, "a.key", "--out", "wraps2").exit_code == 0
    chains.append(KeyChain.load(Path("a.key"), roster=PinnedRoster.load(Path("roster.txt"))))
    for path in ("a.key", "bank_a", "hub", "roster.txt", "bank_a/identity.pem", "wraps/bank_b.wrap"):
        run("show", path)
        run("show", path, "--json")
    Path("b.key").write_bytes(Path("b.key").read_bytes()[:-1] + b"x")
    assert run("show", "b.key").exit_code == 2
    assert run("scan", ".").exit_code == 3
    text = "\n".join([*shown, caplog.text])
    found = [form for party in parties for chain in chains for secret in secrets_of(party, chain) for form in forms(secret) if form in text]
    assert len(shown) > 15
    assert found == []
