"""The folder of a run: what is done with damaged, foreign and lost files, and who may use it."""

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from privfed.client import Client
from privfed.consortium import Consortium
from privfed.engines.local import Simulation, simulate
from privfed.errors import DamagedFileError, FolderInUseError, PrivFedError
from privfed.he.secret import SharedKey
from privfed.training.mechanism import NonPrivate
from tests.engines.conftest import table

Make = Callable[..., Consortium]
KEYS = SharedKey.generate()


def files(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def consortium(*names: str) -> Consortium:
    training = NonPrivate(learning_rate=0.1, batch_size=10, steps=1, seed=1)
    return Consortium([Client(name, table(60, seed=index), training=training) for index, name in enumerate(names)], keys=KEYS)


@pytest.fixture
def run(model: torch.nn.Module, non_private: Make, tmp_path: Path) -> Path:
    """The folder of a run of one round."""
    simulate(non_private(keys=KEYS), model, rounds=1, directory=tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize(
    "name", ["../../other/clients/bank_0", "..", ".", "a/b", "a\\b", "b\n", "Bank \u00e9", "x" * 65, "", "-x", None, 7]
)
def test_what_is_no_name_never_becomes_a_path(model: torch.nn.Module, tmp_path: Path, name: Any) -> None:
    simulate(consortium("bank_0", "bank_1", "bank_2"), model, rounds=1, directory=tmp_path / "other")
    before = files(tmp_path)
    with pytest.raises(ValueError, match="expected a name of 1-64 letters"):
        simulate(consortium(name, "b", "c"), model, rounds=1, directory=tmp_path / "run")
    assert files(tmp_path) == before
    assert not (tmp_path / "run").exists()


def test_no_client_has_the_servers_name(model: torch.nn.Module, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected no client with the name 'server'"):
        simulate(consortium("server", "b", "c"), model, rounds=1, directory=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_whose_terms_are_lost_keeps_its_identities_and_everything_else(model: torch.nn.Module, non_private: Make, run: Path) -> None:
    terms = (run / "terms.json").read_bytes()
    (run / "terms.json").unlink()
    before = files(run)
    with pytest.raises(DamagedFileError, match=r"and no terms\.json, so it cannot be told what run it belongs to; nothing was changed"):
        simulate(non_private(keys=KEYS), model, rounds=2, directory=run)
    assert files(run) == before
    (run / "terms.json").write_bytes(terms)
    assert len(simulate(non_private(keys=KEYS), model, rounds=2, directory=run).rounds) == 2


def test_a_folder_with_something_else_in_it_is_left_as_it_is(model: torch.nn.Module, non_private: Make, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(DamagedFileError, match=r"holds notes\.txt and no terms\.json"):
        simulate(non_private(), model, rounds=1, directory=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_identities_of_a_folder_that_was_never_used_are_taken_over(model: torch.nn.Module, non_private: Make, run: Path) -> None:
    identities = {path: data for path, data in files(run).items() if path.name == "identity.pem"}
    assert len(identities) == 4
    for path in files(run):
        if path not in identities:
            path.unlink()
    simulate(non_private(keys=KEYS), model, rounds=1, directory=run)
    assert {path: path.read_bytes() for path in identities} == identities


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "emptied": lambda _: b"",
    "cut": lambda data: data[: len(data) // 2],
    "flipped": lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 255]) + data[len(data) // 2 + 1 :],
    "junk": lambda _: b"\xff{[junk" * 20 + b"\n",
}
NAMES = ("terms.json", "rounds.jsonl", "server/identity.pem", "clients/bank_0/identity.pem")


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_file_of_a_run_is_refused_by_name_and_left_as_it_is(
    model: torch.nn.Module, non_private: Make, run: Path, name: str, damage: str
) -> None:
    path = run / name
    whole = path.read_bytes()
    path.write_bytes(DAMAGES[damage](whole))
    before = files(run)
    if (name, damage) == ("rounds.jsonl", "cut"):
        # A log that ends early is what a crash leaves: the round is gone through again, and everybody has opened it.
        history = simulate(non_private(keys=KEYS), model, rounds=2, directory=run)
        assert [summary.record.round for summary in history.rounds] == [0, 1]
        return
    with pytest.raises(PrivFedError) as refused:
        simulate(non_private(keys=KEYS), model, rounds=2, directory=run)
    assert files(run) == before
    path.write_bytes(whole)
    assert len(simulate(non_private(keys=KEYS), model, rounds=2, directory=run).rounds) == 2, refused


def test_two_objects_never_work_on_one_folder(model: torch.nn.Module, non_private: Make, run: Path) -> None:
    with Simulation(non_private(keys=KEYS), model, directory=run):
        before = files(run)
        with pytest.raises(FolderInUseError, match="the folder 'run' is in use by another process"):
            simulate(non_private(keys=KEYS), model, rounds=2, directory=run)
        assert files(run) == before
    assert len(simulate(non_private(keys=KEYS), model, rounds=2, directory=run).rounds) == 2


HOLDER = """
import sys
from pathlib import Path
from privfed.files import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print(1, flush=True)
input()
"""


def test_a_folder_that_another_process_holds_is_refused_until_that_has_ended(model: torch.nn.Module, non_private: Make, run: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"1\n"
    with pytest.raises(FolderInUseError):
        simulate(non_private(keys=KEYS), model, rounds=2, directory=run)
    process.kill()
    process.communicate()
    assert len(simulate(non_private(keys=KEYS), model, rounds=2, directory=run).rounds) == 2


def test_everything_in_the_folder_of_a_run_is_for_its_owner_only(model: torch.nn.Module, non_private: Make, tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        simulate(non_private(), model, rounds=1, directory=tmp_path / "runs" / "first")
    finally:
        os.umask(umask)
    paths = [tmp_path / "runs", *(tmp_path / "runs").rglob("*")]
    assert len(paths) > 20
    assert [path for path in paths if stat.S_IMODE(path.stat().st_mode) & 0o077] == []


def test_what_a_killed_process_left_unfinished_is_gone_after_a_restart(model: torch.nn.Module, non_private: Make, run: Path) -> None:
    client = run / "clients" / "bank_1"
    for place in (run, run / "server", client, client / "outbox", *(run / "server" / "spool").iterdir()):
        (place / ".unfinished-abc").write_bytes(b"half")
    simulate(non_private(keys=KEYS), model, rounds=2, directory=run)
    assert not list(run.rglob(".unfinished-*"))


def test_a_run_whose_shared_key_is_another_one_is_refused(model: torch.nn.Module, non_private: Make, run: Path) -> None:
    with pytest.raises(PrivFedError, match="another shared key"):
        simulate(non_private(keys=SharedKey.generate()), model, rounds=2, directory=run)


@pytest.mark.parametrize("change", ["lost", "emptied", "no beginning", "twice", "out of order", "gap"])
def test_a_log_that_lacks_rounds_is_refused(model: torch.nn.Module, non_private: Make, run: Path, change: str) -> None:
    simulate(non_private(keys=KEYS), model, rounds=3, directory=run)
    path = run / "rounds.jsonl"
    first, *rounds = path.read_bytes().splitlines(keepends=True)
    path.unlink()
    changed = {
        "emptied": [],
        "no beginning": rounds,
        "twice": [first, *rounds, rounds[-1]],
        "out of order": [first, *rounds[::-1]],
        "gap": [first, rounds[0], rounds[2]],
    }
    if change in changed:
        path.write_bytes(b"".join(changed[change]))
    with pytest.raises(DamagedFileError):
        simulate(non_private(keys=KEYS), model, rounds=4, directory=run)


def test_a_client_that_is_missing_in_the_folder_is_refused_and_not_made(model: torch.nn.Module, non_private: Make, run: Path) -> None:
    before = sorted(run.rglob("*"))
    with pytest.raises(PrivFedError, match=r"the folder holds a run without \['bank_3'\]; nothing was changed"):
        simulate(non_private(keys=KEYS, count=4), model, rounds=2, directory=run)
    assert sorted(run.rglob("*")) == before


def test_a_simulation_that_has_ended_holds_no_more_rounds(model: torch.nn.Module, non_private: Make) -> None:
    with Simulation(non_private(), model) as simulation:
        simulation.run(rounds=1)
    with pytest.raises((FolderInUseError, FileNotFoundError)):
        simulation.run(rounds=2)
