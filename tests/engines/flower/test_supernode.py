"""A bank's list of apps: what is not on it is neither stored nor run."""

import hashlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install privfed[flower]")

from flwr.app import Message
from flwr.cli.build import build_fab_from_disk
from flwr.common.constant import ErrorCode
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import get_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supernode import start_client_internal as internals
from flwr.supernode.nodestate import NodeStateFactory

from privfed.engines.flower import supernode
from privfed.engines.flower.app import bundle_hash, installed_hash, write_app
from privfed.engines.flower.envelope import seal
from tests.engines.flower.grid import a_task


@pytest.fixture
def bundle(tmp_path: Path) -> bytes:
    return build_fab_from_disk(write_app(tmp_path))


def deliver(
    content: bytes, *, apps: set[str], monkeypatch: pytest.MonkeyPatch, run_changes: dict[str, Any] | None = None, named: str | None = None
) -> tuple[Any, list[Message], list[str], int]:
    """Has Flower's own SuperNode code take in one message whose run brings an app.

    Returns:
        The node's state, the replies it made by itself, the reasons that were given, and the number of the run.
    """
    refusals: list[str] = []
    for name in ("_pull_and_store_message", "_verify_fab"):
        monkeypatch.setattr(internals, name, getattr(internals, name))
    supernode.guard(apps, refused=refusals.append)
    digest = hashlib.sha256(content).hexdigest()
    run = replace(Run.create_empty(1), fab_id="privfed/privfed-consortium", fab_version=supernode_version(), fab_hash=digest)
    run = replace(run, **(run_changes or {}))
    objects = ObjectStoreFactory()
    state = NodeStateFactory(objectstore_factory=objects).state()
    state.set_node_id(1)
    with a_task():
        message = Message(seal(b"request"), 1, "train")
        message.metadata.__dict__["_message_id"] = message.object_id
        contents = {message.object_id: b""}
        internals._pull_and_store_message(
            state=state,
            object_store=objects.store(),
            node_config={},
            receive=lambda: (message, get_object_tree(message)),
            get_run=lambda _: run,
            get_fab=lambda *_: Fab(named or digest, content, {}),
            pull_object=lambda _, identifier: contents.get(identifier, b"x"),
            confirm_message_received=lambda *_: None,
            trusted_entities=None,
        )
        return state, list(state.get_messages_legacy(is_reply=True)), refusals, 1


def supernode_version() -> str:
    from privfed import __version__

    return __version__


def test_the_app_on_the_list_is_stored(bundle: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    state, replies, refusals, run = deliver(bundle, apps={hashlib.sha256(bundle).hexdigest()}, monkeypatch=monkeypatch)
    assert (replies, refusals) == ([], [])
    assert state.get_run(run) is not None


def test_an_app_outside_the_list_is_refused_and_neither_stored_nor_run(
    tmp_path: Path, bundle: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    folder = write_app(tmp_path / "other")
    (folder / "consortium_app" / "client.py").write_text("open('/etc/passwd')\n")
    other = build_fab_from_disk(folder)
    state, replies, refusals, run = deliver(other, apps={hashlib.sha256(bundle).hexdigest()}, monkeypatch=monkeypatch)
    assert [reply.error.code for reply in replies] == [ErrorCode.INVALID_FAB]
    assert refusals == [f"the app {hashlib.sha256(other).hexdigest()} is not among the allowed ones"]
    assert state.get_run(run) is None


@pytest.mark.parametrize(
    "change",
    [
        {"run_changes": {"fab_id": "privfed/../../tmp"}},
        {"run_changes": {"fab_version": "9"}},
        {"run_changes": {"fab_hash": "0" * 64}},
        {"named": "0" * 64},
        {"run_changes": {"primary_task_type": TaskType.AGENT_APP}},
        {"run_changes": {"primary_task_type": ""}},
    ],
    ids=str,
)
def test_an_allowed_app_under_another_name_or_purpose_is_refused(
    change: dict[str, Any], bundle: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, replies, refusals, run = deliver(bundle, apps={hashlib.sha256(bundle).hexdigest()}, monkeypatch=monkeypatch, **change)
    assert [reply.error.code for reply in replies] == [ErrorCode.INVALID_FAB]
    assert len(refusals) == 1
    assert state.get_run(run) is None


def test_an_empty_bundle_is_refused(bundle: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    _, replies, refusals, _ = deliver(b"", apps={hashlib.sha256(bundle).hexdigest()}, monkeypatch=monkeypatch)
    assert [reply.error.code for reply in replies] == [ErrorCode.INVALID_FAB]
    assert len(refusals) == 1


def test_another_flower_than_the_one_this_was_made_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supernode, "package_version", "1.43.0")
    with pytest.raises(RuntimeError, match=r"1\.43\.0 is installed; nothing was started"):
        supernode.guard({"0" * 64}, refused=lambda _: None)
    monkeypatch.undo()
    monkeypatch.delattr(internals, "_verify_fab")
    with pytest.raises(RuntimeError, match="nothing was started"):
        supernode.guard({"0" * 64}, refused=lambda _: None)


def test_the_list_is_read_with_comments_and_anything_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "apps.sha256"
    path.write_text(f"# ours\n{'a' * 64}  # old\n\n{'b' * 64}\n")
    path.chmod(0o644)
    assert supernode.read_apps(path) == {"a" * 64, "b" * 64}
    for wrong in ("", "# nothing\n", "a" * 63, "A" * 64, f"{'a' * 64} {'b' * 64}", "*"):
        path.write_text(wrong)
        with pytest.raises(ValueError, match="expected apps.sha256 to hold"):
            supernode.read_apps(path)
    path.write_text("a" * 64)
    path.chmod(0o666)
    with pytest.raises(PermissionError, match="owner only"):
        supernode.read_apps(path)


@pytest.mark.parametrize("option", ["--insecure", "--insec", "--trusted-entities=x", "--allow-runtime-dependency-installation", "--allow"])
def test_options_that_would_undo_the_list_are_refused_before_anything_starts(option: str, tmp_path: Path) -> None:
    path = tmp_path / "apps.sha256"
    path.write_text("a" * 64)
    path.chmod(0o600)
    with pytest.raises(SystemExit) as refusal:
        supernode.main(["--apps", str(path), option])
    assert refusal.value.code == 2


def test_no_list_means_no_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--apps", str(tmp_path / "missing")]):
        with pytest.raises(SystemExit) as refusal:
            supernode.main(arguments)
        assert refusal.value.code == 2


def test_the_app_is_built_to_the_same_bytes_everywhere_and_holds_nothing_but_imports(tmp_path: Path) -> None:
    folders = [write_app(tmp_path / name) for name in ("one", "two")]
    (folders[1] / "pyproject.toml").touch()
    printed = subprocess.run(
        [sys.executable, "-m", "privfed.engines.flower.app"], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert {bundle_hash(folder) for folder in folders} == {installed_hash()} == {printed}
    (folders[1] / "consortium_app" / "client.py").write_text("app = None\n")
    assert bundle_hash(folders[1]) != bundle_hash(folders[0])
    code = [(folders[0] / "consortium_app" / name).read_text().split() for name in ("client.py", "server.py")]
    assert code == [["from", "privfed.engines.flower", "import", side, "app", "=", f"{side}.app"] for side in ("client", "server")]


@pytest.mark.parametrize("module", ["client", "exchange", "control", "supernode", "doorway", "server"])
def test_neither_the_app_nor_the_exchange_loads_torch_or_secret_keys(module: str) -> None:
    program = (
        f"import sys, privfed.engines.flower.{module}; loaded = set(sys.modules);"
        "secret = {'privfed.he.secret', 'privfed.he._seal_secret', 'privfed.protect', 'privfed.keyholder'};"
        "print(sorted(loaded & ({'torch', 'opacus'} | secret)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_supernode_reports_nothing_to_flower_whatever_the_environment_says() -> None:
    program = "import privfed.engines.flower.supernode, flwr.supercore.telemetry as t; print(t.FLWR_TELEMETRY_ENABLED)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={"FLWR_TELEMETRY_ENABLED": "1", **_environment()}
    )
    assert done.stdout.strip() == "0"


def _environment() -> dict[str, str]:
    import os

    return {name: value for name, value in os.environ.items() if name != "FLWR_TELEMETRY_ENABLED"}
