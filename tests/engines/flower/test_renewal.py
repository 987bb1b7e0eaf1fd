"""`privfed deploy certificates` for Flower: what it writes, what it leaves alone, and what a party takes from it."""

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install privfed[flower]")

from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from typer.testing import CliRunner

from privfed.cli import app
from privfed.deploy.plan import Plan
from privfed.engines import deployments
from privfed.engines.deployments import problems, write_deployment
from privfed.engines.flower import provisioning, server
from privfed.files import FolderLock
from tests.engines.flare.plans import PLAN, write_plan
from tests.engines.flower.test_provisioning import put_nginx

BANKS = ("bank_a", "bank_b", "bank_c")
PARTIES = ("server", *BANKS)
# As the command says it.
TAKEN = {"server": ("ca.pem", "server.pem", "server.key", "nodes")} | dict.fromkeys(BANKS, ("ca.pem", "node.key", "node.pub"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    plan = PLAN.replace('engine = "flare"', 'engine = "flower"')
    write_deployment(Plan.load(write_plan(folder, port=9443, plan=plan)), folder / "deployment")
    return folder / "deployment"


@pytest.fixture
def deployment(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(provisioning, "_port_problems", lambda *_, **__: [])
    put_nginx(tmp_path, monkeypatch)
    shutil.copytree(made, tmp_path / "deployment")
    return tmp_path / "deployment"


def content(folder: Path) -> dict[str, tuple[bytes, int, int]]:
    """Of every file: bytes, mode, and when it was written."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mode, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def renew(folder: Path, out: Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["deploy", "certificates", str(folder), "--out", str(out)])
    return result.exit_code, result.output


def take(deployment: Path, new: Path, *parties: str) -> None:
    """What each party puts in the place of what it has."""
    for party in parties:
        for name in TAKEN[party]:
            old, renewed = deployment / party / "flower" / name, new / party / "flower" / name
            if renewed.is_dir():
                shutil.rmtree(old)
                shutil.copytree(renewed, old)
            else:
                shutil.copy(renewed, old)


def test_a_renewal_beside_parties_that_are_at_work_writes_to_its_new_folder_alone(deployment: Path, tmp_path: Path) -> None:
    before = content(deployment)
    locks = [FolderLock(deployment / party) for party in PARTIES]  # as a node and a coordinator hold them
    code, output = renew(deployment / "server", tmp_path / "renewed")
    assert code == 0, output
    for lock in locks:
        lock.check()
        lock.release()
    after = content(deployment)
    assert {name: after[name] for name in after if not name.endswith(".lock")} == before
    # Nothing that belongs to a session is made anew, and nothing of it is copied.
    names = {path.name for path in (tmp_path / "renewed").rglob("*")}
    assert not names & {"identity.pem", "encryption.pem", "shared.key", "roster.txt", "agreement.json", "site.py", "party.txt", "ledger"}
    assert [path for path in (tmp_path / "renewed").rglob("*") if path.stat().st_mode & 0o077] == []


def test_what_a_renewal_brings_is_new_fits_together_and_leaves_the_rest_of_a_partys_folder_alone(deployment: Path, tmp_path: Path) -> None:
    environment = deployment / "bank_a" / "flower" / "flower.env"
    environment.write_text(environment.read_text() + "PRIVFED_SOCKET=/run/privfed/node.sock\n")
    before = content(deployment)
    code, output = renew(deployment / "bank_b", tmp_path / "renewed")  # any party's folder says who takes part
    assert code == 0, output
    assert all(name in " ".join(output.split()) for names in TAKEN.values() for name in names)
    take(deployment, tmp_path / "renewed", *PARTIES)
    after = content(deployment)
    changed = {name for name in after if after[name][0] != before[name][0]}
    assert changed == {
        *(f"{bank}/flower/{name}" for bank in BANKS for name in ("ca.pem", "node.key", "node.pub")),
        *(f"server/flower/{name}" for name in ("ca.pem", "server.pem", "server.key", *(f"nodes/{bank}.pub" for bank in BANKS))),
    }
    registered = server.read_node_keys(deployment / "server" / server.NODES)
    for party in PARTIES:
        assert problems(deployment / party) == []
        if party != "server":
            private = load_ssh_private_key((deployment / party / "flower" / "node.key").read_bytes(), None)
            assert registered[party] == public_key_to_bytes(private.public_key())  # type: ignore[arg-type]
    authorities = {(deployment / party / "flower" / "ca.pem").read_bytes() for party in PARTIES}
    (authority,) = (x509.load_pem_x509_certificate(each) for each in authorities)
    x509.load_pem_x509_certificate((deployment / "server/flower/server.pem").read_bytes()).verify_directly_issued_by(authority)


def test_expired_certificates_are_found_and_renewed_ones_are_in_order(deployment: Path, tmp_path: Path) -> None:
    later = datetime.now(UTC) + timedelta(days=366)
    for party, names in (("server", ("ca.pem", "server.pem")), ("bank_a", ("ca.pem",))):
        found = problems(deployment / party, now=later)
        assert [line.partition(" ")[0] for line in found if "expired on" in line and "privfed deploy certificates" in line] == list(names)
    assert renew(deployment / "server", tmp_path / "renewed")[0] == 0
    take(deployment, tmp_path / "renewed", *PARTIES)
    almost = datetime.now(UTC) + timedelta(days=364)
    assert [problems(deployment / party, now=almost) for party in PARTIES] == [[]] * 4


@pytest.mark.parametrize(
    ("taken", "expected"),
    [
        (("ca.pem",), "server.pem is not signed by ca.pem"),
        (("server.pem", "ca.pem"), "server.key: it is not the key of server.pem"),
        (("server.pem", "server.key"), "server.pem is not signed by ca.pem"),
    ],
)
def test_a_renewal_of_which_the_server_took_a_part_is_found(
    deployment: Path, tmp_path: Path, taken: tuple[str, ...], expected: str
) -> None:
    assert renew(deployment / "server", tmp_path / "renewed")[0] == 0
    for name in taken:
        shutil.copy(tmp_path / "renewed/server/flower" / name, deployment / "server/flower" / name)
    (problem,) = problems(deployment / "server")
    assert problem.startswith(expected)


def test_a_certificate_with_a_chain_of_ones_own_authority_is_in_order(deployment: Path) -> None:
    """What is between the server's certificate and the authority stands behind it in the same file."""
    place = deployment / "server" / "flower"
    between = (place / "ca.pem").read_bytes()
    (place / "server.pem").write_bytes((place / "server.pem").read_bytes() + between)
    assert problems(deployment / "server") == []


@pytest.mark.parametrize("what", ["no certificate", "no authority"])
def test_certificates_that_cannot_be_read_are_found(deployment: Path, what: str) -> None:
    (deployment / "server/flower" / ("server.pem" if what == "no certificate" else "ca.pem")).write_text("nothing")
    assert any("server.pem or ca.pem cannot be read" in line for line in problems(deployment / "server"))


def test_an_engine_that_is_not_installed_or_not_known_is_refused_and_nothing_is_written(
    deployment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content(deployment)
    path = deployment / "server" / "deployment.json"
    text = path.read_text()
    path.write_text(text.replace('"flower"', '"carrier pigeon"'))
    code, output = renew(deployment / "server", tmp_path / "renewed")
    assert (code, "deployment.json is damaged" in output) == (2, True)
    path.write_text(text)
    monkeypatch.setattr(deployments.importlib.util, "find_spec", lambda _: None)
    code, output = renew(deployment / "server", tmp_path / "renewed")
    assert code == 2
    assert "the engine flower needs flwr; nothing was done; pip install 'privfed[flower]'" in " ".join(output.split())
    assert not (tmp_path / "renewed").exists()
    assert {name: each[0] for name, each in content(deployment).items()} == {name: each[0] for name, each in before.items()}


def test_a_check_without_flower_says_so_and_is_no_traceback(deployment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployments.importlib.util, "find_spec", lambda _: None)
    (problem,) = problems(deployment / "bank_a")
    assert problem.startswith("flwr is not installed here, so what belongs to it was not looked at; install")


def test_a_folder_that_is_there_is_not_written_into(deployment: Path) -> None:
    before = content(deployment)
    for out in (deployment, deployment / "bank_a"):
        code, output = renew(deployment / "server", out)
        assert code == 2
        assert "is there already; nothing was done" in " ".join(output.split())
    assert content(deployment) == before


def test_a_renewal_that_fails_leaves_nothing_half_done(deployment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(provisioning, "node_key", fails)
    before = content(deployment)
    code, _ = renew(deployment / "server", tmp_path / "renewed")
    assert code == 2
    assert not (tmp_path / "renewed").exists()
    assert content(deployment) == before
