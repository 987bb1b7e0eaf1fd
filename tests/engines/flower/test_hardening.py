"""What a stranger, or an operator, cannot do to a deployment with a real SuperLink, a real proxy and real SuperNodes."""

import datetime
import os
import shutil
import ssl
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install privfed[flower]")

from privfed import __version__
from privfed.engines.flower import certificates, scripts
from privfed.engines.flower.provisioning import _port_problems, write
from tests.engines.deployed import deploy
from tests.engines.flower.processes import BANKS, FORGOTTEN_SECONDS, Place, free_port, nginx, wait_for

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="pf-") as folder:
        root = Path(folder)
        deploy(root)  # without an agreement, a run would end before a bank is asked
        write(SimpleNamespace(host="127.0.0.1", port=free_port(), parties=BANKS, versions={"privfed": __version__}, rounds=3), root)
        with Place(root) as place:
            place.settle()
            place.start_superlink()
            yield place


def start_proxy(place: Place) -> int:
    """Starts nginx with the configuration of the deployment, but for the ports."""
    program = nginx()
    if program is None:
        pytest.skip("nginx is not installed: install it, or name one with PRIVFED_NGINX")
    path = place.folder("server") / "nginx.conf"
    port = free_port()
    path.write_text(scripts.proxy_configuration(port=port).replace(f":{scripts.SUPERLINK_PORT}/", f":{place.superlink_port}/"))
    links = place.root / "bin"
    links.mkdir(exist_ok=True)
    (links / "nginx").symlink_to(program)
    place.environment["PATH"] = f"{links}:{place.variables('server')['PATH']}"
    proxy = place.start("server", "start-proxy.sh", user=give_to_nobody(place) if os.geteuid() == 0 else None)
    wait_for(lambda: status(place, port, "/") in {403} or proxy.process.poll() is not None, "the proxy")
    assert proxy.process.poll() is None, proxy.text()
    return port


def give_to_nobody(place: Place) -> str:
    """Root cannot start the proxy, so the server's folder is given to another user."""
    for folder in (place.root, place.root / "server"):
        folder.chmod(0o711)
    for path in (place.folder("server"), *place.folder("server").rglob("*")):
        shutil.chown(path, "nobody")
    return "nobody"


def status(place: Place, port: int, path: str, *, body: bytes | None = b"") -> int | None:
    context = ssl.create_default_context(cafile=str(place.folder("server") / "ca.pem"))
    request = urllib.request.Request(f"https://127.0.0.1:{port}{path}", data=body, headers={"Content-Type": "application/protobuf"})
    try:
        with urllib.request.urlopen(request, context=context, timeout=20) as answer:  # noqa: S310 -- an address of this test's own
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except urllib.error.URLError:
        return None


FORBIDDEN = [
    "/",
    "/v1/control/start-run",
    "/v1/control/list-runs",
    "/v1/control/unregister-node",
    "/v1/runtime/acquire-task",
    "/docs",
    "/openapi.json",
    "/health",
    "/v1/fleet/../control/list-runs",
    "/v1/fleet/%2e%2e/control/list-runs",
    "/v1/fleet/%2E%2E%2Fcontrol/list-runs",
    "/v1//fleet/..//control/list-runs",
    "/V1/fleet/pull-messages",
]


def test_the_proxy_closes_every_path_but_those_of_the_nodes(place: Place) -> None:
    port = start_proxy(place)
    assert {path: status(place, port, path) for path in FORBIDDEN} == dict.fromkeys(FORBIDDEN, 403)
    # `privfed deploy check` tells the one from the other, and from nobody.
    authority = place.folder("bank_0") / "ca.pem"
    found = [
        _port_problems(SimpleNamespace(host="127.0.0.1", port=at), authority=authority, server=False)
        for at in (port, place.superlink_port, free_port())
    ]
    assert [len(each) for each in found] == [0, 1, 1]
    assert "the control path is open" in found[1][0]
    assert "nothing of ours answers" in found[2][0]
    # On the SuperLink's own port, which is on loopback alone, the control path is open to all: that is why there is a proxy.
    assert status(place, place.superlink_port, "/v1/control/list-runs") == 200
    # Nodes get through, to a SuperLink that asks who they are; so do pieces of 8 MB.
    assert status(place, port, "/v1/fleet/pull-messages") == 401
    assert status(place, port, "/v1/fleet/push-object", body=bytes(8 * 2**20)) not in {403, 413, 500, None}
    # What would pass the proxy's check and be something else behind it, is nothing there.
    assert status(place, port, "/v1/control/list-runs/%2e%2e/%2e%2e/fleet/pull-messages") in {401, 403, 404}

    # With nothing but the public certificate of the authority, no app can be submitted.
    config = place.root / "stranger" / "config.toml"
    config.parent.mkdir()
    for target, expected in ((port, False), (place.superlink_port, True)):
        config.write_text(
            f'[superlink]\ndefault = "consortium"\n[superlink.consortium]\n'
            f'address = "127.0.0.1:{target}"\nroot-certificates = "{authority}"\n'
        )
        done = subprocess.run(
            ["flwr", "list", "consortium", "--format", "json"],
            env={**place.variables("server"), "FLWR_HOME": str(config.parent), "FLWR_TELEMETRY_ENABLED": "0"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert ('"success": true' in done.stdout) is expected


def copied(place: Place, bank: str, name: str) -> Path:
    """A bank's Flower folder under another name, with a port of its own."""
    shutil.copytree(place.root / bank, place.root / name)
    place.set(name, "PRIVFED_NODE_PORT", str(free_port()))
    return place.folder(name)


def test_a_supernode_with_a_key_that_is_not_registered_is_not_let_in(place: Place) -> None:
    folder = copied(place, "bank_0", "stranger_bank")
    (folder / "node.key").write_bytes(certificates.node_key()[0])
    supernode = place.start("stranger_bank", "start-supernode.sh")
    wait_for(lambda: "Failed to initialize the connection" in supernode.text(), "the refusal")
    assert "SuperNode ID" not in supernode.text()


def test_a_supernode_does_not_speak_to_a_server_with_another_certificate(place: Place) -> None:
    folder = copied(place, "bank_1", "misled_bank")
    ours = (folder / "ca.pem").read_bytes()
    now = datetime.datetime.now(datetime.UTC)
    (folder / "ca.pem").write_bytes(certificates.server_certificate("127.0.0.1", now=now)[0])
    supernode = place.start("misled_bank", "start-supernode.sh")
    time.sleep(20)  # Flower tries again and again, and says nothing
    assert "SuperNode ID" not in supernode.text()
    supernode.kill()
    (folder / "ca.pem").write_bytes(ours)
    begun = time.monotonic()
    supernode = place.start("misled_bank", "start-supernode.sh")
    place.wait_until_online(supernode)
    assert time.monotonic() - begun < 20, "20 s say nothing if a welcome node takes longer"
    supernode.process.terminate()
    supernode.kill()


def test_an_app_outside_the_list_is_refused_at_every_bank_and_the_run_fails(place: Place) -> None:
    leaked = place.root / "leaked"
    app = place.folder("server") / "consortium-app" / "consortium_app" / "client.py"
    ours = app.read_text()
    app.write_text(f"open({str(leaked)!r}, 'a').write('x')\n{ours}")
    supernodes = [place.start(name, "start-supernode.sh") for name in BANKS]
    place.wait_until_online(*supernodes, seconds=FORGOTTEN_SECONDS)  # the key of bank_1 was used in the test above
    leaked.unlink(missing_ok=True)  # `flwr run` itself looks into the app
    done = place.run(1)
    assert done.returncode == 1
    assert "finished:failed" in done.stderr
    for supernode in supernodes:
        assert "privfed: refused: the app " in supernode.text()
        assert "nothing was run" in supernode.text()
    assert not leaked.exists()
    app.write_text(ours)
    for supernode in supernodes:
        supernode.kill()
