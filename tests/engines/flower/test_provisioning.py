"""What a Flower deployment's folders hold, and what is said when something in them is wrong."""

import datetime
import os
import re
import shutil
import ssl
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install privfed[flower]")

from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from privfed import __version__
from privfed.engines.flower import certificates, control, provisioning, scripts
from privfed.engines.flower.provisioning import write

PARTIES = ("bank_a", "bank_b", "key_holder")


@pytest.fixture
def deployment() -> Any:
    return SimpleNamespace(host="hub.example", port=9443, parties=PARTIES, versions={"privfed": __version__}, rounds=3)


@pytest.fixture(autouse=True)
def server_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """What answers at the port is told apart with a real proxy, elsewhere."""
    monkeypatch.setattr(provisioning, "_port_problems", lambda *_, **__: [])


@pytest.fixture(autouse=True)
def nginx_is_there(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    put_nginx(tmp_path_factory.mktemp("bin"), monkeypatch)


def put_nginx(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of this name on the path."""
    (folder / "nginx").write_text("#!/bin/sh\n")
    (folder / "nginx").chmod(0o700)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def problems(folder: Path, deployment: Any) -> list[str]:
    return provisioning.problems(folder, deployment, name=folder.name, now=datetime.datetime.now(datetime.UTC))


@pytest.fixture
def folder(tmp_path: Path, deployment: Any) -> Path:
    write(deployment, tmp_path)
    return tmp_path


def test_what_is_written_has_no_problems_and_nobody_else_can_read_it(folder: Path, deployment: Any) -> None:
    for party in ("server", *PARTIES):
        assert problems(folder / party, deployment) == []
        for path in (folder / party / "flower").rglob("*"):
            assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


def test_each_secret_is_in_the_folder_of_its_owner_alone(folder: Path) -> None:
    secrets = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file() and b"PRIVATE KEY" in path.read_bytes()}
    assert secrets == {"server/flower/server.key", *(f"{party}/flower/node.key" for party in PARTIES)}


def test_the_server_knows_each_node_by_the_key_that_the_node_has(folder: Path) -> None:
    from privfed.engines.flower import server

    registered = server.read_node_keys(folder / "server" / server.NODES)
    for party in PARTIES:
        private = load_ssh_private_key((folder / party / "flower" / "node.key").read_bytes(), None)
        assert registered[party] == public_key_to_bytes(private.public_key())  # type: ignore[arg-type]
    assert set(registered) == set(PARTIES)


def test_nothing_is_written_over(folder: Path, deployment: Any) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*.key")}
    with pytest.raises(FileExistsError):
        write(deployment, folder)
    assert {path: path.read_bytes() for path in folder.rglob("*.key")} == before


def test_the_proxy_passes_on_the_nodes_paths_alone_and_bodies_of_at_least_8_mb(folder: Path) -> None:
    configuration = (folder / "server" / "flower" / "nginx.conf").read_text()
    assert re.findall(r"location (\S+) \{", configuration) == ["/v1/fleet/", "/"]
    assert re.findall(r"proxy_pass (\S+);", configuration) == ["https://127.0.0.1:8000/v1/fleet/"]
    assert re.search(r"location / \{\s*return 403;", configuration)
    assert int(re.findall(r"client_max_body_size (\d+)m;", configuration)[0]) >= 8


def test_the_superlink_listens_on_loopback_with_tls_and_node_authentication_and_keeps_updates_in_memory(folder: Path) -> None:
    script = (folder / "server" / "flower" / "start-superlink.sh").read_text()
    command = re.sub(r"\\\n\s*", "", script).splitlines()[-1].split()
    assert command[:2] == ["exec", "flower-superlink"]
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert command[command.index("--database") + 1] == ":flwr-in-memory:"
    assert {"--enable-supernode-auth", "--disable-runtime-dependency-installation", "--ssl-certfile", "--ssl-keyfile"} <= set(command)
    assert "--insecure" not in script


@pytest.mark.parametrize("party", ["server", *PARTIES])
def test_telemetry_and_update_checks_are_off_at_every_party(party: str, folder: Path, deployment: Any) -> None:
    path = folder / party / "flower" / "flower.env"
    lines = path.read_text().splitlines()
    assert {"FLWR_TELEMETRY_ENABLED=0", "FLWR_DISABLE_UPDATE_CHECK=1"} <= set(lines)
    path.write_text(path.read_text().replace("FLWR_TELEMETRY_ENABLED=0", "FLWR_TELEMETRY_ENABLED=1"))
    assert problems(folder / party, deployment) == ["flower.env lacks FLWR_TELEMETRY_ENABLED=0: Flower reports to its makers"]


def _remove(name: str) -> Callable[[Path], object]:
    return lambda place: (place / name).unlink()


def _replace(name: str, old: str, new: str) -> Callable[[Path], object]:
    def replace(place: Path) -> None:
        text = (place / name).read_text()
        assert old in text
        (place / name).write_text(text.replace(old, new))

    return replace


WRONG: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "open key": ("bank_a", lambda place: (place / "node.key").chmod(0o644), "node.key can be read by others"),
    "open server key": ("server", lambda place: (place / "server.key").chmod(0o640), "readable by its owner only"),
    "no list": ("bank_a", _remove("apps.sha256"), "apps.sha256: "),
    "open list": ("bank_a", lambda place: (place / "apps.sha256").chmod(0o666), "apps.sha256: "),
    "other list": ("bank_a", lambda place: (place / "apps.sha256").write_text("a" * 64), "apps.sha256 allows another app"),
    "more on the list": (
        "bank_a",
        lambda place: (place / "apps.sha256").write_text((place / "apps.sha256").read_text() + "a" * 64),
        "apps.sha256 allows another app",
    ),
    "no node": ("server", _remove("nodes/bank_b.pub"), "the SuperNode of bank_b is not registered"),
    "stranger": ("server", lambda place: (place / "nodes/other.pub").write_text("x"), "nodes/other.pub is of nobody"),
    "open proxy": (
        "server",
        lambda place: (place / "nginx.conf").write_text((place / "nginx.conf").read_text().replace("return 403;", "proxy_pass x;")),
        "nginx.conf is not what was written",
    ),
    "unlisted apps": (
        "bank_a",
        _replace("start-supernode.sh", "privfed.engines.flower.supernode", "x"),
        "start-supernode.sh is not what was",
    ),
    "open SuperLink": (
        "server",
        _replace("start-superlink.sh", "--host 127.0.0.1", "--host 0.0.0.0"),
        "start-superlink.sh is not what was",
    ),
    "anybody's nodes": ("server", _replace("start-superlink.sh", "--enable-supernode-auth", ""), "start-superlink.sh is not what was"),
    "on again": (
        "bank_a",
        lambda place: (place / "flower.env").write_text((place / "flower.env").read_text() + "FLWR_TELEMETRY_ENABLED=1\n"),
        "flower.env lacks FLWR_TELEMETRY_ENABLED=0",
    ),
    "another server": ("bank_a", _replace("flower.env", "SUPERLINK=hub", "SUPERLINK=another"), "the SuperNode speaks to another server"),
    "no key": ("bank_a", _remove("node.key"), "node.key is missing"),
    "key of another": (
        "bank_a",
        lambda place: shutil.copy(place.parents[1] / "bank_b/flower/node.key", place / "node.key"),
        "node.key is not the key of node.pub",
    ),
    "no key in it": ("bank_a", lambda place: (place / "node.key").write_text("x"), "node.key holds no private key"),
    "no authority": ("server", _remove("ca.pem"), "ca.pem is missing"),
    "no server key": ("server", _remove("server.key"), "server.key: the private key is missing"),
    "registered by another key": ("server", lambda place: (place / "nodes/bank_b.pub").write_text("x"), "a public key of a SuperNode"),
    "one key for two": (
        "server",
        lambda place: shutil.copy(place / "nodes/bank_a.pub", place / "nodes/bank_b.pub"),
        "a public key of a SuperNode",
    ),
    "another app": (
        "server",
        lambda place: (place / "consortium-app/consortium_app/server.py").write_text("import os\n"),
        "consortium-app is not the app",
    ),
    "another Python": (
        "bank_a",
        lambda place: (place / "flower.env").write_text((place / "flower.env").read_text() + "PYTHONPATH=/elsewhere\n"),
        "flower.env sets PYTHONPATH",
    ),
    "no environment": ("bank_a", _remove("flower.env"), "flower.env lacks FLWR_TELEMETRY_ENABLED=0"),
}


@pytest.mark.parametrize(("party", "spoil", "expected"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said(party: str, spoil: Callable[[Path], object], expected: str, folder: Path, deployment: Any) -> None:
    spoil(folder / party / "flower")
    assert any(expected in problem for problem in problems(folder / party, deployment))


def test_a_server_s_host_without_nginx_is_found_and_a_bank_needs_none(
    folder: Path, deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts, "NGINX_FOLDERS", "/nowhere")
    assert problems(folder / "server", deployment) == []
    monkeypatch.setenv("PATH", "/nowhere")
    (problem,) = problems(folder / "server", deployment)
    assert problem.startswith("nginx is neither on the PATH nor in /nowhere, so no bank gets in; install it")
    assert problems(folder / "bank_a", deployment) == []


def test_a_folder_without_flowers_part_is_said_to_be_one(tmp_path: Path, deployment: Any) -> None:
    assert problems(tmp_path, deployment) == [f"flower is missing: put back what was made for {tmp_path.name!r}"]


@pytest.mark.parametrize(("days", "expected"), [(366, "expired on"), (-1, "begins on"), (364, None)])
def test_a_certificate_that_is_expired_or_of_the_future_is_said_to_be(
    days: int, expected: str | None, folder: Path, deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = datetime.datetime.now(datetime.UTC)
    authority, server, key = certificates.server_certificate("hub.example", now=now - datetime.timedelta(days=days))
    (folder / "server" / "flower" / "ca.pem").write_bytes(authority)
    (folder / "server" / "flower" / "server.pem").write_bytes(server)
    (folder / "server" / "flower" / "server.key").write_bytes(key)
    found = problems(folder / "server", deployment)
    assert found == [] if expected is None else len(found) == 2 and all(expected in problem for problem in found)


@pytest.mark.parametrize("host", ["hub.example", "10.0.0.7"])
def test_the_certificate_names_the_host_and_its_loopback_and_the_authority_can_sign_no_more(host: str, tmp_path: Path) -> None:
    authority, server, key = certificates.server_certificate(host, now=datetime.datetime.now(datetime.UTC))
    certificate = x509.load_pem_x509_certificate(server)
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(authority))
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {str(name.value) for name in names} == {host, "localhost", "127.0.0.1"}
    for name, content in {"ca": authority, "server": server, "key": key}.items():
        (tmp_path / name).write_bytes(content)
    ssl.create_default_context(cafile=str(tmp_path / "ca"))
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tmp_path / "server", tmp_path / "key")


@pytest.fixture
def fake_flwr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A `flwr` that prints what it is told to and always ends with 0, as Flower's does."""

    def make(*answers: str) -> Path:
        folder = tmp_path / "bin"
        folder.mkdir()
        for number, answer in enumerate(answers):
            (folder / f"answer{number}").write_text(answer)
        script = folder / "flwr"
        script.write_text(
            f'#!/bin/sh\ncd {folder}\necho "$@" >> calls\nn=$(wc -l < calls)\n'
            f"cat answer$((n-1)) 2>/dev/null || cat answer{len(answers) - 1}\n"
        )
        script.chmod(0o700)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
        return folder / "calls"

    return make


STARTED = '{"success": true, "run-id": "7"}'


def listed(status: str, details: str = "") -> str:
    return f'noise\n{{"success": true, "runs": [{{"run-id": "7", "status": "{status}", "status-details": "{details}"}}]}}'


def test_a_run_is_followed_to_its_end(fake_flwr: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_RUN_POLL_SECONDS", 0.01)
    calls = fake_flwr(STARTED, listed("running"), listed("running"), listed("finished:completed"))
    control.run(tmp_path, rounds=3)
    assert len(calls.read_text().splitlines()) == 4
    assert "--run-config rounds=3 --format json" in calls.read_text()


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (['{"success": false, "error-message": "no app"}'], "flwr run failed: no app"),
        (["{}"], "flwr run failed"),
        (["Traceback"], "flwr run gave no answer: Traceback"),
        ([""], "flwr run gave no answer"),
        ([STARTED, listed("finished:failed", "too few clients")], "ended as finished:failed: too few clients"),
        ([STARTED, listed("finished:stopped")], "ended as finished:stopped"),
        ([STARTED, '{"success": false}'], "flwr list failed"),
    ],
)
def test_a_failure_is_an_error_though_flwr_ends_with_0(
    answers: list[str], expected: str, fake_flwr: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_POLL_SECONDS", 0.01)
    fake_flwr(*answers)
    with pytest.raises(control.ControlError, match=re.escape(expected)):
        control.run(tmp_path, rounds=1)
    (tmp_path / "bin" / "calls").unlink()
    with pytest.raises(SystemExit) as end:
        control.main(["run", str(tmp_path), "--rounds", "1"])
    assert expected in str(end.value.code)


def test_every_key_in_the_folder_is_registered_under_its_party_s_name_and_a_refusal_is_an_error(
    fake_flwr: Callable[..., Path], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_POLL_SECONDS", 0.01)
    keys = folder / "server" / "flower" / "nodes"
    calls = fake_flwr("", listed("running"), '{"success": true}', '{"success": true}', '{"success": false, "error-message": "known"}')
    with pytest.raises(control.ControlError, match="known"):
        control.register(keys, seconds=10)
    names = [line.partition("--name ")[2].split()[0] for line in calls.read_text().splitlines() if "register" in line]
    assert names == list(PARTIES)
    with pytest.raises(control.ControlError, match="no public keys"):
        control.register(folder, seconds=0)


def test_a_superlink_that_never_comes_up_is_an_error(fake_flwr: Callable[..., Path], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_POLL_SECONDS", 0.01)
    fake_flwr("")
    with pytest.raises(control.ControlError, match="flwr list gave no answer"):
        control.register(folder / "server" / "flower" / "nodes", seconds=0.1)


def test_provisioning_names_its_two_functions_as_deployments_expect() -> None:
    assert callable(provisioning.write)
    assert callable(provisioning.problems)


def test_deploy_init_writes_ready_folders_for_flower_and_check_finds_nothing_but_the_server_that_is_not_started(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from privfed.cli import app

    plan = Path(__file__).parents[3] / "examples" / "deployment"
    shutil.copytree(plan, tmp_path / "plan")
    terms = (tmp_path / "plan" / "fraud.toml").read_text()
    (tmp_path / "plan" / "fraud.toml").write_text(terms.replace('engine = "flare"', 'engine = "flower"'))
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["deploy", "init", str(tmp_path / "plan" / "fraud.toml"), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert {path.name for path in out.iterdir()} == {"server", "bank_a", "bank_b", "bank_c", "operator"}
    for party in ("server", "bank_a"):
        done = CliRunner().invoke(app, ["deploy", "check", str(out / party)])
        assert done.exit_code == 0, done.output
    assert (out / "operator" / "submit.sh").read_text().splitlines()[-1].endswith('/flower/run.sh" 3 "$@"')
    for script in out.rglob("*.sh"):
        assert stat.S_IMODE(script.stat().st_mode) == 0o700
        subprocess.run(["sh", "-n", str(script)], check=True)
    (out / "bank_a" / "flower" / "apps.sha256").write_text("a" * 64)
    done = CliRunner().invoke(app, ["deploy", "check", str(out / "bank_a")])
    assert done.exit_code == 1
    assert "apps.sha256 allows another app" in done.output
