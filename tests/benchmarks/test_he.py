import dataclasses
import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.he import environments, runs
from benchmarks.he.catalogue import CONTENDERS, FLARE, NAMES, OURS, STANDARD, Contender, find
from benchmarks.he.environments import MissingPeerError, interpreter, versions
from benchmarks.he.meter import Meter
from benchmarks.he.ours import Round
from benchmarks.he.party import Implementation
from benchmarks.he.runs import Bench, Cost, Missing, measure
from benchmarks.he.tables import Requirement, judge, print_tables
from benchmarks.he.workload import BOUND, Workload, pack, unpack
from privfed.errors import InvalidMessageError
from privfed.he.params import SEED_BYTES, CkksParams

ROOT = Path(runs.__file__).parents[2]
WORK = Workload(params=5000, clients=4, tensors=3)
HERE = [contender.name for contender in CONTENDERS if contender.requirement is None]


def type_of(name: str) -> type[Implementation]:
    contender = find(name)
    return getattr(importlib.import_module(contender.module), contender.type_name)


def largest_error(name: str) -> float:
    """What an implementation may be off by: half a step of the grid for each rounding, or noise at the scale that it has."""
    made = type_of(name)
    if issubclass(made, Round):
        return made.params(WORK.clients).max_error
    # float32: each of the products and sums rounds by 2^-24 of at most the bound times all weights. TenSEAL: noise of 22 for each of
    # the coefficients in a slot, 8192 at most, under a scale of 2^40; the weights are rounded at the same scale.
    return BOUND * 2 * WORK.clients * 2.0**-24 if name == "float32" else 2 * 22 * 8192 * 2.0**-40


def cost(name: str, **changes: Any) -> Cost:
    figures: dict[str, Any] = {field.name: 1.0 for field in dataclasses.fields(Cost)}
    figures |= {"params": 1_000_000, "clients": 10, "tensors": 8, "versions": {"numpy": "2"}}
    return Cost(**(figures | {"name": name} | changes))


def good() -> list[Cost]:
    flare = {"bytes_up_per_parameter": 64.0, "client_cpu_s": 5.0, "server_cpu_s": 5.0, "server_peak_mb": 6.0}
    return [cost(STANDARD, bytes_up_per_parameter=7.1), cost("parity", bytes_up_per_parameter=4.1), cost(FLARE, **flare)]


def changed(name: str, **changes: Any) -> list[Cost]:
    return [dataclasses.replace(one, **changes) if one.name == name else one for one in good()]


def reached(requirements: list[Requirement]) -> list[bool | None]:
    return [requirement.reached for requirement in requirements]


# ---- the work


def test_the_vectors_are_the_same_for_everybody_and_within_the_bound() -> None:
    values = WORK.values(1)
    assert values.dtype == np.float32
    assert np.abs(values).max() <= BOUND
    assert (values == WORK.values(1)).all()
    assert (values != WORK.values(2)).any()
    tensors = WORK.update(1)
    assert (np.concatenate(list(tensors.values())) == values).all()
    assert [tensor.size for tensor in tensors.values()] == [1666, 1667, 1667] == list(WORK.sizes.values())


def test_the_mean_is_weighted() -> None:
    assert WORK.weights == (1, 2, 3, 1)
    updates = [WORK.values(client).astype(np.float64) for client in range(4)]
    np.testing.assert_allclose(WORK.mean(), (updates[0] + 2 * updates[1] + 3 * updates[2] + updates[3]) / 7, rtol=1e-12)


def test_every_profile_holds_the_weights_of_128_clients_exactly() -> None:
    weights = Workload(params=1, clients=128, tensors=1).weights
    assert sum(weights) <= CkksParams.compact().weight_sum


def test_packed_parts_come_out_as_they_went_in() -> None:
    for parts in ([], [b""], [b"a", b"", b"bc" * 300]):
        assert unpack(pack(parts)) == parts


# ---- the roles


@pytest.mark.parametrize("name", HERE)
def test_the_opener_gets_the_mean_within_the_error_that_the_parameters_allow(name: str, tmp_path: Path) -> None:
    meter, made = Meter(), type_of(name)
    made(WORK, tmp_path).prepare(meter)
    uploads = [made(WORK, tmp_path).upload(client, meter, Meter()) for client in range(WORK.clients)]
    result = made(WORK, tmp_path).serve(iter(uploads), lambda: made(WORK, tmp_path).answer(meter), meter)
    opened = made(WORK, tmp_path).open(result, meter)
    error = np.abs(opened - WORK.mean()).max()
    assert 0 < error <= largest_error(name)


def test_a_server_refuses_an_upload_that_was_changed(tmp_path: Path) -> None:
    made = type_of(STANDARD)
    made(WORK, tmp_path).prepare(Meter())
    upload = bytearray(made(WORK, tmp_path).upload(0, Meter(), Meter()))
    upload[-1000] ^= 1
    with pytest.raises(InvalidMessageError):
        made(WORK, tmp_path).serve(iter([bytes(upload)]), lambda: None, Meter())


def test_the_meter_counts_what_happens_within_and_nothing_else() -> None:
    before = np.ones(5_000_000)
    meter = Meter()
    sum(range(1_000_000))
    with meter:
        pass
    assert meter.cpu_seconds < 0.01
    with meter:
        inside = np.ones(10_000_000)
        del inside
    np.ones(20_000_000).sum()
    assert before.nbytes == 40_000_000
    # 80 MB, give or take what the interpreter does itself; neither the 40 MB before nor the 160 MB after.
    assert 75 < meter.peak_megabytes < 100
    spent = meter.cpu_seconds
    with meter:
        subprocess.run([sys.executable, "-c", "sum(range(3_000_000))"], check=True)
    assert meter.cpu_seconds > spent + 0.02


# ---- processes, and those who are missing


def test_a_quick_run_prints_a_line_for_each_implementation_and_names_who_is_not_installed(tmp_path: Path) -> None:
    chosen = [STANDARD, FLARE, "flower-secagg+", "float32"]
    options = [option for name in chosen for option in ("--implementations", name)]
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.he", "--quick", "--json", "--environments", str(tmp_path), *options],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stderr
    *lines, last = [json.loads(line) for line in run.stdout.splitlines()]
    assert [line["name"] for line in lines] == chosen
    standard, flare, flower, plain = lines
    assert flare["missing"].startswith("not installed here: nvflare")
    assert flower["missing"].startswith("not installed here: flwr")
    assert list(tmp_path.iterdir()) == []
    assert set(standard) == set(plain) == {field.name for field in dataclasses.fields(Cost)}
    params = CkksParams.from_profile(type_of(STANDARD).profile, bound=BOUND, clients=3)
    # Three chunks, of which the last is cut, and a frame of less than 1000 bytes.
    chunks = 10_000 * params.word_bytes + 3 * SEED_BYTES
    assert chunks <= standard["bytes_up_per_parameter"] * 10_000 < chunks + 1000
    assert plain["bytes_up_per_parameter"] == plain["bytes_down_per_parameter"] == 4.0
    assert 0 < standard["max_error"] <= params.max_error
    assert all(standard[f"{role}_cpu_s"] > 0 for role in ("client", "server", "agreement", "opener"))
    assert plain["agreement_cpu_s"] == 0
    assert [requirement["reached"] for requirement in last["requirements"]] == [None]


def test_an_unknown_implementation_is_refused_before_anything_runs() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.he", "--implementations", "palisade"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert run.returncode == 2
    assert "palisade" in run.stderr
    assert "nothing was run" in run.stderr


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(contender=find("float32"), python=Path(sys.executable), work=WORK, folder=tmp_path, repetitions=2)


def uploads_in(folder: Path) -> Iterator[Path]:
    return folder.glob("upload-*")


def test_uploads_that_are_too_many_for_the_disk_are_made_one_at_a_time_and_removed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = bench.measure()
    assert len(list(uploads_in(bench.folder))) == WORK.clients
    first = (bench.folder / "result").read_bytes()
    monkeypatch.setattr(runs, "_MOST_OF_DISK", 0.0)
    streamed = bench.measure()
    assert list(uploads_in(bench.folder)) == []
    assert (bench.folder / "result").read_bytes() == first
    assert streamed["bytes_up_per_parameter"] == kept["bytes_up_per_parameter"] == 4.0


def test_uploads_that_do_not_fit_on_the_disk_at_all_are_not_begun(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(bench.folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=4 * WORK.params * WORK.clients - 1))
    with pytest.raises(MissingPeerError, match="GB are free"):
        bench.measure()


def test_a_role_that_fails_is_named_with_its_last_words(bench: Bench) -> None:
    with pytest.raises(MissingPeerError, match="its bystander failed: ValueError: expected a role, got 'bystander'"):
        bench.play("bystander")


def test_an_implementation_without_its_libraries_is_missing_and_not_an_error(tmp_path: Path) -> None:
    lacking = dataclasses.replace(find("float32"), libraries=("a-library-that-is-not-there",))
    outcome = measure(lacking, WORK, mean=WORK.mean(), environments=tmp_path, repetitions=1, install=False)
    assert outcome == Missing(
        name="float32", params=5000, clients=4, tensors=3, missing="not all of a-library-that-is-not-there is installed"
    )


def test_an_installation_that_fails_is_named_and_tried_anew_the_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = dataclasses.replace(find(FLARE), requirement="peer==1")
    tried = list[list[str]]()

    def fail(command: list[str], **_: Any) -> None:
        tried.append(command)
        raise subprocess.CalledProcessError(1, command, stderr="looking\nERROR: no matching distribution\n")

    monkeypatch.setattr(environments.venv, "create", lambda home, **_: home.mkdir(parents=True))
    monkeypatch.setattr(environments.subprocess, "run", fail)
    for _ in range(2):
        with pytest.raises(MissingPeerError, match="peer==1 could not be installed: ERROR: no matching distribution"):
            interpreter(peer, tmp_path, install=True)
    assert len(tried) == 2


def test_an_environment_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = dataclasses.replace(find(FLARE), requirement="peer==1")
    tried = list[list[str]]()
    monkeypatch.setattr(environments.venv, "create", lambda home, **_: home.mkdir(parents=True))
    monkeypatch.setattr(environments.subprocess, "run", lambda command, **_: tried.append(command))
    assert interpreter(peer, tmp_path, install=True) == interpreter(peer, tmp_path, install=False)
    assert [command[1:] for command in tried] == [["-m", "pip", "install", "--quiet", "peer==1"]]


def test_versions_are_those_of_the_interpreter_that_runs() -> None:
    own = Contender(name="x", module="x", type_name="X", libraries=("numpy",), requirement="numpy")
    assert versions(own, Path(sys.executable)) == versions(find("float32"), Path(sys.executable)) == {"numpy": np.__version__}


# ---- what is required


def test_a_run_that_reaches_everything_is_accepted() -> None:
    requirements = judge(good())
    assert len(requirements) == 6
    assert reached(requirements) == [True] * 6


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("parity", {"bytes_up_per_parameter": 4.21}),
        (FLARE, {"bytes_up_per_parameter": 56.0}),
        (FLARE, {"client_cpu_s": 3.9}),
        (FLARE, {"server_cpu_s": 3.9}),
        (FLARE, {"server_peak_mb": 4.9}),
    ],
)
def test_a_figure_that_is_not_reached_is_refused_alone(name: str, changes: dict[str, float]) -> None:
    assert sorted(reached(judge(changed(name, **changes)))) == [False] + [True] * 5


def test_small_models_are_not_judged() -> None:
    small = [dataclasses.replace(one, params=999_999) for one in changed("parity", bytes_up_per_parameter=9.0)]
    assert set(reached(judge(small))) == {None}


def test_without_its_peer_nothing_is_compared_with_it() -> None:
    missing = Missing(name=FLARE, params=1_000_000, clients=10, tensors=8, missing="not installed here")
    requirements = judge([*good()[:2], missing])
    assert [requirement.what.split(":")[0] for requirement in requirements] == ["parity", STANDARD]


def test_the_memory_of_a_server_must_not_grow_with_its_clients() -> None:
    def flat(megabytes: float, **changes: Any) -> list[bool | None]:
        many = cost(STANDARD, clients=100, server_peak_mb=megabytes, bytes_up_per_parameter=7.1, **changes)
        few = cost(STANDARD, clients=3, bytes_up_per_parameter=7.1)
        return [requirement.reached for requirement in judge([few, many]) if "server_peak_mb" in requirement.what]

    assert flat(1.2) == [True]
    assert flat(1.3) == [False]
    assert flat(2.0, bytes_down_per_parameter=14.2) == []  # a whole sum, which is another thing to hold


def test_tables_have_a_row_for_each_implementation_and_a_line_for_each_that_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    missing = Missing(name="flower-secagg+", params=1_000_000, clients=10, tensors=8, missing="not installed here: [flwr]")
    results = [*good(), missing]
    print_tables(results, judge(results))
    printed = capsys.readouterr().out
    rows = [line.split("|")[1].strip() for line in printed.splitlines() if line.startswith("|")]
    assert {STANDARD, "parity", FLARE} < set(rows)
    assert "64.00 (9.0)" in printed
    assert "flower-secagg+ is missing: not installed here: [flwr]" in printed


def test_the_catalogue_finds_every_name_and_knows_ours() -> None:
    assert [find(name).name for name in NAMES] == list(NAMES)
    assert all(issubclass(type_of(name), Round) for name in OURS)
    with pytest.raises(ValueError, match="expected one of"):
        find("palisade")
