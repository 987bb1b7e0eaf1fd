import json
import os
import shutil
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare", reason="needs nvflare: pip install 'privfed[flare]'")

from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509 import load_pem_x509_certificate
from typer.testing import CliRunner

from privfed.cli import app
from privfed.deploy.certificates import lets_strangers_in
from privfed.deploy.plan import Plan
from privfed.engines.deployments import problems, write_deployment
from privfed.engines.flare.policies import FORBIDDEN, NO_CODE
from privfed.engines.node import Node
from privfed.engines.party_folder import read_agreement
from privfed.errors import DeploymentError
from privfed.he.secret import SharedKey
from privfed.identity import Identity
from privfed.keys.chain import KeyChain
from privfed.keys.party import Party, create_server
from privfed.keys.roster import PinnedRoster, server_line
from privfed.policy import OpeningPolicy
from privfed.written_agreement import encode_agreement
from tests.engines.flare.loopback import edit, free_port
from tests.engines.flare.plans import PAYSIM_SITE, PLAN, SITE, write_plan

UNREACHABLE = "cannot be reached from here"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    write_deployment(Plan.load(write_plan(folder, port=free_port())), folder / "deployment")
    return folder / "deployment"


@pytest.fixture
def deployment(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "deployment")
    return tmp_path / "deployment"


def found(folder: Path, **options: Any) -> str:
    """What is wrong, apart from the server that is not running."""
    return "\n".join(line for line in problems(folder, **options) if UNREACHABLE not in line)


def test_nothing_is_wrong_with_a_folder_as_it_was_written(deployment: Path) -> None:
    for name in ("server", "bank_a", "bank_b", "bank_c"):
        assert found(deployment / name) == "", name


def test_nobody_but_the_owner_can_read_anything_of_a_deployment(deployment: Path) -> None:
    assert [path for path in (deployment, *deployment.iterdir()) if path.stat().st_mode & 0o077] == []


def test_the_server_and_the_operator_get_no_key_of_the_banks(deployment: Path) -> None:
    secret = (deployment / "bank_a" / "shared.key").read_bytes()
    assert secret == (deployment / "bank_b" / "shared.key").read_bytes()
    for name in ("server", "operator"):
        assert not [path for path in (deployment / name).rglob("*") if path.is_file() and secret[-32:] in path.read_bytes()], name


def test_the_key_of_the_certificate_authority_is_not_kept(deployment: Path) -> None:
    held = [path for path in deployment.rglob("*") if path.is_file() and b"PRIVATE KEY" in path.read_bytes()]
    tls = [path for path in held if path.name in {"client.key", "server.key"}]
    assert len(tls) == 5
    assert {path.name for path in held} == {"client.key", "server.key", "identity.pem", "encryption.pem"}
    root = load_pem_x509_certificate((deployment / "server/flare/startup/rootCA.pem").read_bytes()).public_key()
    assert root not in [load_pem_private_key(path.read_bytes(), password=None).public_key() for path in tls]


def test_the_job_is_configuration_only(deployment: Path) -> None:
    files = [path for path in (deployment / "operator" / "job").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json"}
    assert len(files) == 3


@pytest.mark.parametrize("which", ["server", "bank_a"])
def test_an_expired_certificate_is_found(deployment: Path, which: str) -> None:
    later = datetime.now(UTC) + timedelta(days=400)
    assert "expired on" in found(deployment / which, now=later)
    assert "privfed deploy certificates" in found(deployment / which, now=later)


def test_a_clock_that_is_behind_is_found(deployment: Path) -> None:
    lines = found(deployment / "bank_a", now=datetime.now(UTC) - timedelta(days=2))
    assert "before this deployment was made" in lines
    assert "client.crt: the certificate begins on" in lines
    assert lines.count("set the clock") == 3  # this deployment, the certificate, and that of its authority


def test_a_key_of_another_certificate_is_found(deployment: Path) -> None:
    shutil.copy(deployment / "bank_b/flare/startup/client.key", deployment / "bank_a/flare/startup/client.key")
    assert "client.key: it is not the key of client.crt" in found(deployment / "bank_a")


def test_a_certificate_of_another_party_is_found(deployment: Path) -> None:
    for file in ("client.crt", "client.key"):
        shutil.copy(deployment / "bank_b/flare/startup" / file, deployment / "bank_a/flare/startup" / file)
    assert "client.crt: it belongs to 'bank_b', not to 'bank_a'" in found(deployment / "bank_a")


def test_a_certificate_of_another_authority_is_found_and_new_ones_are_in_order(deployment: Path, tmp_path: Path) -> None:
    new = tmp_path / "renewed"
    result = CliRunner().invoke(app, ["deploy", "certificates", str(deployment / "server"), "--out", str(new)])
    assert result.exit_code == 0, result.output
    assert not [path for path in new.rglob("*") if path.name in {"identity.pem", "shared.key", "agreement.json"}]
    startup = deployment / "bank_a/flare/startup"
    shutil.copy(new / "bank_a/flare/startup/rootCA.pem", startup / "rootCA.pem")
    assert "client.crt: it is not signed by rootCA.pem" in found(deployment / "bank_a")
    (deployment / "bank_a/flare/local/privacy.json").write_text("{}")
    shutil.rmtree(startup)
    shutil.move(new / "bank_a/flare/startup", startup)
    assert found(deployment / "bank_a") == ""
    assert (deployment / "bank_a/flare/local/privacy.json").read_text() == "{}"
    assert CliRunner().invoke(app, ["deploy", "certificates", str(deployment / "server"), "--out", str(new)]).exit_code == 2


def test_missing_and_readable_keys_are_found(deployment: Path) -> None:
    startup = deployment / "bank_a/flare/startup"
    (startup / "client.key").chmod(0o644)
    assert "client.key" in found(deployment / "bank_a")
    assert "chmod 600" in found(deployment / "bank_a")
    (startup / "client.key").unlink()
    (startup / "client.crt").unlink()
    assert "cannot be read" in found(deployment / "bank_a")


def test_a_signing_key_that_the_agreement_does_not_pin_is_found(deployment: Path) -> None:
    (deployment / "bank_a/identity.pem").unlink()
    assert "identity.pem is missing" in found(deployment / "bank_a")
    Identity.generate("bank_a").save(deployment / "bank_a/identity.pem")
    assert "identity.pem is not the key that the agreement pins for 'bank_a'" in found(deployment / "bank_a")


def test_another_shared_key_is_found(deployment: Path) -> None:
    (deployment / "bank_a/shared.key").unlink()
    assert "shared.key is missing" in found(deployment / "bank_a")
    SharedKey.generate().save(deployment / "bank_a/shared.key")
    assert "shared.key is another key" in found(deployment / "bank_a")


def test_other_versions_are_found(deployment: Path) -> None:
    for name in ("privfed", "tenseal", "nvflare"):
        edit(deployment / "bank_a/deployment.json", "versions", name, to="0.0.7")
    lines = found(deployment / "bank_a")
    for name in ("privfed", "tenseal", "nvflare"):
        assert f"install {name}==0.0.7" in lines


@pytest.mark.parametrize("right", NO_CODE)
@pytest.mark.parametrize("role", ["project_admin", "lead"])
def test_code_of_jobs_that_a_role_may_bring_is_found(deployment: Path, role: str, right: str) -> None:
    edit(deployment / "bank_a/flare/local/authorization.json", "permissions", role, right, to="any")
    assert f"lets the role {role!r} bring code ({right})" in found(deployment / "bank_a")


def test_flare_s_own_policy_is_found_wanting(deployment: Path) -> None:
    local = deployment / "bank_a/flare/local"
    shutil.copy(local / "authorization.json.default", local / "authorization.json")
    assert "lets the role 'lead' bring code" in found(deployment / "bank_a")
    (local / "authorization.json").unlink()
    assert "authorization.json is missing or damaged" in found(deployment / "bank_a")
    shutil.copy(local / "resources.json.default", local / "resources.json")
    assert "lets jobs name other classes" in found(deployment / "bank_a")
    assert "sends logs to the server" in found(deployment / "bank_a")


@pytest.mark.parametrize(
    ("key", "value"), [("class_allow_list", ["*"]), ("class_allow_list", ["privfed."]), ("class_list_enforcement_mode", "warn")]
)
def test_other_classes_that_jobs_may_name_are_found(deployment: Path, key: str, value: object) -> None:
    for name in ("server", "bank_a"):
        edit(deployment / name / "flare/local/resources.json", key, to=value)
        assert "lets jobs name other classes" in found(deployment / name)


def test_a_server_that_stores_where_others_read_or_waits_for_the_dead_is_found(deployment: Path) -> None:
    resources = deployment / "server/flare/local/resources.json"
    edit(resources, "servers", 0, "heart_beat_timeout", to=600)
    edit(resources, "components", 1, "args", "uri_root", to="/tmp/nvflare/jobs-storage")  # noqa: S108
    (deployment / "server/flare/storage").chmod(0o755)
    lines = found(deployment / "server")
    assert "set heart_beat_timeout to 30" in lines
    assert "under /tmp" in lines
    assert "chmod 700" in lines


def _components(folder: Path) -> list[Any]:
    return json.loads((folder / "flare/local/resources.json").read_text())["components"]


def _set(file: str, *keys: str | int, to: object) -> Callable[[Path], object]:
    return lambda folder: edit(folder / file, *keys, to=to)


def _append(file: str, line: str) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_text(f"{(folder / file).read_text()}{line}\n")


def _agree(folder: Path, **terms: Any) -> None:
    agreement = replace(read_agreement(folder), **terms)
    (folder / "agreement.json").write_text(encode_agreement(agreement))


def _other_banks(folder: Path) -> None:
    roster = read_agreement(folder).roster
    clients = (*roster.clients[:2], Identity.generate("bank_x").public)
    names = [client.name for client in clients]
    _agree(folder, roster=replace(roster, clients=clients), weights=dict.fromkeys(names, 1.0), populations={name: name for name in names})


RIGHTS = ("permissions", "lead")
PLANTED: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "commands of the server": (
        "bank_a",
        lambda folder: edit(
            folder / "flare/local/resources.json", "components", to=[each for each in _components(folder) if each["id"] != "commands"]
        ),
        "so the server can have FLARE print any file",
    ),
    "component of another": (
        "bank_a",
        lambda folder: edit(folder / "flare/local/resources.json", "components", to=[*_components(folder), {"id": "x", "path": "a.B"}]),
        "has components that were not written: a.B",
    ),
    "more components": (
        "bank_a",
        lambda folder: (folder / "flare/local/x__resources.json").write_text("{}"),
        "local/x__resources.json adds to",
    ),
    "code of the site": ("bank_a", lambda folder: (folder / "flare/local/custom").mkdir(mode=0o700), "local/custom holds code"),
    "shell commands": (
        "bank_a",
        _set("flare/local/authorization.json", *RIGHTS, "shell_commands", to="any"),
        "give commands (shell_commands)",
    ),
    "restarts": ("bank_a", _set("flare/local/authorization.json", *RIGHTS, "operate", to="any"), "give commands (operate)"),
    "rights of another role": (
        "bank_a",
        _set("flare/local/authorization.json", "permissions", "member", "submit_job", to="any"),
        "gives the role 'member' other rights than were written (submit_job)",
    ),
    "a role of another": (
        "bank_a",
        _set("flare/local/authorization.json", "permissions", "guest", to=dict.fromkeys(FORBIDDEN, "none") | {"manage_job": "any"}),
        "gives the role 'guest' other rights than were written (manage_job)",
    ),
    **{
        f"setting {line}": ("bank_a", _append("env", line), expected)
        for line, expected in {
            "PYTHONPATH=/elsewhere": "env sets PYTHONPATH, so that other code may run",
            " LD_PRELOAD=x.so": "env sets LD_PRELOAD",
            "PATH=/elsewhere:/usr/bin": "env sets PATH",
            "PYTHONSTARTUP=x.py": "env sets PYTHONSTARTUP",
            "A=$(curl x)": "'A=$(curl x)', which is more than a setting",
            "export PYTHONPATH=x": "'export PYTHONPATH=x', which is more than a setting",
            "A=1; sh x": "'A=1; sh x', which is more than a setting",
            "A=`x`": "which is more than a setting",
        }.items()
    },
    "another server": (
        "bank_a",
        _set("flare/startup/fed_client.json", "servers", 0, "service", "target", to="elsewhere.example:1"),
        "connects to 'elsewhere.example:1'",
    ),
    "a bank as the server": ("bank_a", _set("flare/startup/fed_client.json", "servers", 0, "identity", to="bank_b"), "as 'bank_b'"),
    "no TLS": (
        "bank_a",
        lambda folder: (folder / "start.sh").write_text(
            (folder / "start.sh").read_text().replace("secure_train=true", "secure_train=false")
        ),
        "start.sh is not what was written",
    ),
    "open site file": ("bank_a", lambda folder: (folder / "site.py").chmod(0o666), "others may write site.py;"),
    "open start": ("server", lambda folder: (folder / "start.sh").chmod(0o720), "others may write start.sh;"),
    "open settings": ("bank_a", lambda folder: (folder / "env").chmod(0o606), "others may write env;"),
    "open policy": ("bank_a", lambda folder: (folder / "flare/local").chmod(0o777), "others may write flare/local;"),
    "file of another user": ("bank_a", lambda folder: os.lchown(folder / "site.py", 54321, -1), "site.py belong to another user"),
    "no site file": ("bank_a", lambda folder: (folder / "site.py").unlink(), "site.py is missing"),
    "fewer banks": (
        "bank_a",
        lambda folder: _agree(folder, policy=OpeningPolicy(min_clients=2, max_share=0.9)),
        "agreement.json and deployment.json differ in min_clients",
    ),
    "other banks": ("bank_a", _other_banks, "agreement.json and deployment.json differ in the banks"),
    "the banks' key at the server": (
        "server",
        lambda folder: shutil.copy(folder.parent / "bank_a/shared.key", folder),
        "shared.key is in the folder of 'server'",
    ),
}


@pytest.mark.parametrize(("party", "spoil", "expected"), PLANTED.values(), ids=PLANTED)
def test_what_would_undo_a_promise_of_the_guide_is_found(
    party: str, spoil: Callable[[Path], object], expected: str, deployment: Path
) -> None:
    if "another user" in expected and os.geteuid() != 0:
        pytest.skip("only root gives files away")
    spoil(deployment / party)
    assert expected in found(deployment / party)


def test_settings_of_ones_own_and_rights_that_are_taken_away_are_in_order(deployment: Path) -> None:
    _append("env", "# PYTHONPATH=x\nOMP_NUM_THREADS=2\nHTTPS_PROXY='http://proxy.example:80'\nTZ=\"Europe/Vienna\"")(deployment / "bank_a")
    edit(deployment / "bank_a/flare/local/authorization.json", "permissions", "lead", "view", to="none")
    assert found(deployment / "bank_a") == ""


def test_a_decryption_key_that_others_read_or_that_is_another_or_gone_is_found(tmp_path: Path) -> None:
    plan = f'mode = "EscrowKey"\n{PLAN}'
    write_deployment(Plan.load(write_plan(tmp_path, port=free_port(), plan=plan)), tmp_path / "out")
    key = tmp_path / "out/bank_a/encryption.pem"
    assert found(tmp_path / "out/bank_a") == found(tmp_path / "out/key_holder") == ""
    key.chmod(0o644)
    assert "readable by its owner only" in found(tmp_path / "out/bank_a")
    shutil.copy(tmp_path / "out/bank_b/encryption.pem", key)
    key.chmod(0o600)
    assert "encryption.pem is not the key that the agreement names" in found(tmp_path / "out/bank_a")
    key.unlink()
    assert "encryption.pem is missing" in found(tmp_path / "out/bank_a")


def test_an_open_control_port_is_found(deployment: Path) -> None:
    edit(deployment / "server/flare/startup/fed_server.json", "servers", 0, "admin_port", to=8003)
    edit(deployment / "server/flare/startup/fed_server.json", "servers", 0, "connection_security", to="tls")
    edit(deployment / "bank_a/flare/startup/fed_client.json", "client", "connection_security", to="clear")
    assert "opens a control port of its own" in found(deployment / "server")
    assert "does not demand certificates from both sides" in found(deployment / "server")
    assert "does not demand certificates from both sides" in found(deployment / "bank_a")


def test_an_unreachable_server_is_found_and_the_exit_code_is_1(deployment: Path) -> None:
    result = CliRunner().invoke(app, ["deploy", "check", str(deployment / "bank_a")])
    assert result.exit_code == 1
    assert UNREACHABLE in result.stdout
    assert len(result.stdout.splitlines()) == 1
    assert CliRunner().invoke(app, ["deploy", "check", str(deployment / "server")]).exit_code == 0


@contextmanager
def listening(folder: Path, *, demand: bool) -> Iterator[int]:
    """A TLS server with the certificate of a deployment, that demands one of its clients, or does not."""
    startup = folder / "server/flare/startup"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(startup / "server.crt", startup / "server.key")
    context.load_verify_locations(startup / "rootCA.pem")
    context.verify_mode = ssl.CERT_REQUIRED if demand else ssl.CERT_NONE
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                    with context.wrap_socket(connection, server_side=True) as secured:
                        secured.sendall(b"\x00\x00\x00\x04\x00")
                        secured.recv(100)
                except ssl.SSLError:
                    continue
                except OSError:
                    return

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def test_a_server_that_talks_to_strangers_is_told_from_one_that_demands_certificates(deployment: Path) -> None:
    with listening(deployment, demand=True) as port:
        assert lets_strangers_in("localhost", port, seconds=5) is False
    with listening(deployment, demand=False) as port:
        assert lets_strangers_in("localhost", port, seconds=5) is True
        edit(deployment / "bank_a/deployment.json", "port", to=port)
        assert "talks to somebody without a certificate" in found(deployment / "bank_a")


@pytest.mark.parametrize(
    ("plan", "site", "message"),
    [
        ('engine = "pigeons"', SITE, "expected an engine of flare, flower"),
        ('mode = "Plaintext"', SITE, "expected a mode of"),
        ("colour = 1", SITE, "keys that no plan has: colour"),
        ("dropouts = 1", SITE, "with ThresholdKey alone"),
        ("rounds = 0", SITE, "at least 1 round"),
        ("", "x = 1", "has no model()"),
        ("min_clients = 4", SITE, "the policy demands 4"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_and_nothing_is_left(tmp_path: Path, plan: str, site: str, message: str) -> None:
    path = write_plan(tmp_path, port=8002, site=site)
    key = plan.partition(" = ")[0]
    lines = [line for line in path.read_text().splitlines() if not key or not line.startswith(f"{key} =")]
    path.write_text("\n".join([plan, *lines]))
    result = CliRunner().invoke(app, ["deploy", "init", str(path), "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_name_that_flare_does_not_take_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    path = write_plan(tmp_path, port=8002)
    path.write_text(path.read_text().replace("bank_a", '"bank.a"'))
    with pytest.raises(DeploymentError, match="FLARE does not take these names"):
        write_deployment(Plan.load(path), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_there_is_not_touched(deployment: Path, tmp_path: Path) -> None:
    path = write_plan(tmp_path, port=8002)
    before = sorted(deployment.rglob("*"))
    with pytest.raises(DeploymentError, match="is there already"):
        write_deployment(Plan.load(path), deployment)
    assert sorted(deployment.rglob("*")) == before


@pytest.mark.parametrize("mode", ["EscrowKey", "ThresholdKey"])
def test_every_trust_mode_has_folders(tmp_path: Path, mode: str) -> None:
    path = write_plan(tmp_path, port=free_port(), site=PAYSIM_SITE)
    banks = "\n".join(f"bank_{letter} = 1.0" for letter in "defg")
    quorum = "corrupted = 2\ndropouts = 1" if mode == "ThresholdKey" else ""
    path.write_text(f'mode = "{mode}"\n{quorum}\n{path.read_text()}\n{banks}\n')
    parties = write_deployment(Plan.load(path), tmp_path / "out").parties
    assert ("key_holder" in parties) is (mode == "EscrowKey")
    for name in ("server", *parties):
        assert found(tmp_path / "out" / name) == "", name
    for name in parties:
        with Node(tmp_path / "out" / name) as node:
            assert node.name == name
    assert not list((tmp_path / "out").rglob("shared.key"))
    assert len(list((tmp_path / "out").rglob("escrow.key"))) == (mode == "EscrowKey")


def rostered(folder: Path) -> Path:
    """A plan with the roster of keys that were made elsewhere, in the folder `keys`."""
    (folder / "keys").mkdir()
    lines = [server_line(create_server(folder / "keys/server", name="server"))]
    lines += [Party.create(folder / "keys" / name, name=name).public.line for name in ("bank_a", "bank_b", "bank_c")]
    (folder / "roster.txt").write_text("\n".join(lines))
    (folder / "roster.txt").chmod(0o644)
    path = write_plan(folder, port=free_port(), site=PAYSIM_SITE)
    path.write_text(f'roster = "roster.txt"\n{path.read_text()}')
    return path


def test_with_a_roster_no_key_of_a_bank_is_made_and_each_puts_its_own_into_its_folder(tmp_path: Path) -> None:
    path = rostered(tmp_path)
    with pytest.raises(ValueError, match="expected the session of the banks' shared key where a roster is given"):
        Plan.load(path)
    chain = KeyChain.generate(PinnedRoster.load(tmp_path / "roster.txt"))
    path.write_text(f'session = "{chain.facts.session.hex()}"\n{path.read_text()}')
    write_deployment(Plan.load(path), tmp_path / "out")
    for name in ("identity.pem", "encryption.pem", "shared.key"):
        assert not list((tmp_path / "out").rglob(name))
    bank = tmp_path / "out/bank_a"
    assert "copy what privfed keys init made" in found(bank)
    assert "shared.key is missing" in found(bank)
    shutil.copytree(tmp_path / "keys/bank_a", bank, dirs_exist_ok=True)
    chain.save(bank / "shared.key")
    assert found(bank) == ""
    with Node(bank) as node:
        assert node.name == "bank_a"


@pytest.mark.parametrize("session", ["", "0" * 31, "g" * 32])
def test_a_session_that_is_none_is_refused(tmp_path: Path, session: str) -> None:
    path = rostered(tmp_path)
    path.write_text(f'session = "{session}"\n{path.read_text()}')
    with pytest.raises(ValueError, match="expected (the|a) session"):
        Plan.load(path)


def test_the_example_can_be_deployed_and_its_banks_open_their_folders(tmp_path: Path) -> None:
    write_deployment(Plan.load(Path(__file__).parents[3] / "examples/deployment/fraud.toml"), tmp_path / "out")
    for name in ("bank_a", "bank_b", "bank_c"):
        with Node(tmp_path / "out" / name) as node:
            assert node.name == name
