"""The operator's command over FLARE: it fails loudly, and says why, also where FLARE says that a job completed."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

pytest.importorskip("nvflare", reason="needs nvflare: pip install 'privfed[flare]'")

from nvflare.apis.event_type import EventType
from nvflare.apis.signal import Signal
from nvflare.fuel.flare_api import api_spec
from nvflare.widgets.info_collector import GroupInfoCollector, InfoCollector

from privfed.deploy.deployment import OPERATOR
from privfed.deploy.plan import Plan
from privfed.engines.deployments import write_deployment
from privfed.engines.flare import controller as module
from privfed.engines.flare import submit
from privfed.engines.flare.controller import Coordinator
from privfed.engines.forbidden import forbid_secrets
from privfed.files import FolderLock
from privfed.phases import Step
from tests.engines.deployed import SERVER, Deployed, deploy
from tests.engines.exchanges import LocalExchange, dropping
from tests.engines.flare.loopback import free_port
from tests.engines.flare.plans import write_plan

COMPLETED, FAILED = "FINISHED:COMPLETED", "FINISHED:EXECUTION_EXCEPTION"


class Context:
    """FLARE's context, as far as a controller and the collector of statistics use it; and its engine, which knows who is in the job."""

    def __init__(self, *, clients: tuple[str, ...] = (), peer: str = "", **properties: Any) -> None:
        self.properties = properties
        self.clients = clients
        self.peer = peer

    def get_prop(self, name: str) -> Any:
        return self.properties.get(name)

    def get_engine(self) -> "Context":
        return self

    def get_clients(self) -> list[Any]:
        return [SimpleNamespace(name=name) for name in self.clients]

    def get_peer_context(self) -> "Context":
        return self

    def get_identity_name(self) -> str:
        return self.peer


def statistics(coordinator: Coordinator) -> dict[str, Any]:
    collector = GroupInfoCollector()
    context: Any = Context(**{InfoCollector.CTX_KEY_STATS_COLLECTOR: collector})
    coordinator.handle_event(InfoCollector.EVENT_TYPE_GET_STATS, context)
    return collector.info


class Job:
    """A coordinator in a job of FLARE, and how that ended."""

    def __init__(
        self, deployed: Deployed, exchange: LocalExchange, monkeypatch: pytest.MonkeyPatch, *, rounds: int, clients: tuple[str, ...] = ()
    ) -> None:
        self.panics: list[str] = []
        self.clients = clients
        self.coordinator = Coordinator(rounds)
        monkeypatch.setattr(module, "forbid_secrets", lambda: None)  # this process has them: it holds the banks too
        monkeypatch.setattr(module, "FlareExchange", lambda *_, **__: exchange)
        monkeypatch.setattr(module, "party_folder", lambda _: deployed.folder(SERVER))
        monkeypatch.setattr(self.coordinator, "system_panic", lambda reason, _: self.panics.append(reason))

    def run(self, abort: Signal | None = None) -> None:
        context: Any = Context(clients=self.clients)
        self.coordinator.control_flow(abort or Signal(), context)

    def join(self, name: str) -> None:
        """A client's first request for a task."""
        context: Any = Context(peer=name)
        self.coordinator.handle_event(EventType.BEFORE_PROCESS_TASK_REQUEST, context)

    def runs_until(self, *names: str) -> None:
        """Runs, and looks whether it ends when the last of these has joined, and not before."""
        running = threading.Thread(target=self.run)
        running.start()
        for name in names:
            running.join(0.5)
            assert running.is_alive(), f"the job ended before {name} was in it"
            self.join(name)
        running.join(30)
        assert not running.is_alive()


@pytest.fixture
def deployed(tmp_path: Path) -> Deployed:
    return deploy(tmp_path / "parties", private=False)


def test_a_job_in_which_a_round_failed_ends_as_failed_and_tells_who_asks_which_round_and_why(
    deployed: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalExchange(deployed, fault=dropping(("bank_1", Step.SETUP, 1))) as exchange:
        job = Job(deployed, exchange, monkeypatch, rounds=3)
        running = threading.Thread(target=job.run)
        running.start()
        said: dict[str, Any] = {}
        while running.is_alive():
            said |= statistics(job.coordinator)
            time.sleep(0.01)
        running.join()
    (reason,) = said["privfed"].values()
    assert reason.startswith("1 of 3 rounds were not held, and nothing of them was opened: round 1: ")
    assert job.panics == [f"the run ended: {reason}"]


def test_a_job_whose_rounds_were_all_held_is_in_order_and_says_nothing(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalExchange(deployed) as exchange:
        job = Job(deployed, exchange, monkeypatch, rounds=1)
        job.run()
    assert job.panics == []
    assert statistics(job.coordinator) == {}


def test_a_job_that_failed_ends_also_if_nobody_asks_why(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TELLING_SECONDS", 0.2)
    with LocalExchange(deployed, names=("bank_0",)) as exchange:
        job = Job(deployed, exchange, monkeypatch, rounds=1)
        job.run()
        assert len(job.panics) == 1
        monkeypatch.setattr(module, "_TELLING_SECONDS", 600.0)
        abort = Signal()
        abort.trigger("aborted")
        job.run(abort)
    assert len(job.panics) == 2


def test_a_job_in_which_nothing_is_left_to_do_does_not_end_before_all_parties_are_in_it(
    deployed: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLARE tells the end to those who are there, once: who came later would wait for ever, and the operator with it."""
    with LocalExchange(deployed) as exchange:
        Job(deployed, exchange, monkeypatch, rounds=1).run()
        job = Job(deployed, exchange, monkeypatch, rounds=1, clients=deployed.names)
        job.runs_until(*deployed.names)
    assert job.panics == []


@pytest.mark.parametrize("what", ["folder in use", "no agreement", "secrets"])
def test_a_job_that_is_refused_at_its_start_does_not_end_before_all_parties_are_in_it(
    deployed: Deployed, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(module, "_TELLING_SECONDS", 0.0)
    with LocalExchange(deployed, names=()) as exchange, ExitStack() as stack:
        job = Job(deployed, exchange, monkeypatch, rounds=1, clients=("bank_0", "bank_1"))
        if what == "folder in use":
            stack.callback(FolderLock(deployed.folder(SERVER)).release)
        elif what == "no agreement":
            (deployed.folder(SERVER) / "agreement.json").unlink()
        else:
            monkeypatch.setattr(module, "forbid_secrets", forbid_secrets)
            monkeypatch.setattr(job, "run", suppressed(job.run))
        job.runs_until("bank_0", "bank_1")
    assert len(job.panics) == (what != "secrets")


def suppressed(run: Callable[[], None]) -> Callable[[], None]:
    """As FLARE, which takes any error of a workflow as the end of the job."""

    def running() -> None:
        with suppress(ImportError):
            run()

    return running


def test_a_job_does_not_wait_for_parties_that_are_gone_or_longer_than_for_a_status_or_when_it_is_aborted(
    deployed: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalExchange(deployed) as exchange:
        Job(deployed, exchange, monkeypatch, rounds=1).run()
        job = Job(deployed, exchange, monkeypatch, rounds=1, clients=("bank_0", "bank_1"))
        gone = {"bank_1"}
        monkeypatch.setattr(job.coordinator, "get_client_disconnect_time", lambda name: 1.0 if name in gone else None)
        job.runs_until("bank_0")
        gone.clear()
        monkeypatch.setattr(job, "coordinator", Coordinator(1, {"status": 0.5}))
        begun = time.monotonic()
        job.run()
        assert 0.5 <= time.monotonic() - begun < 10
        monkeypatch.setattr(job, "coordinator", Coordinator(1, {"status": 600.0}))
        abort = Signal()
        abort.trigger("aborted")
        job.run(abort)


def test_what_another_library_says_of_the_servers_files_stays_at_the_server(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TELLING_SECONDS", 0.0)
    (deployed.folder(SERVER) / "agreement.json").unlink()
    with LocalExchange(deployed, names=()) as exchange:
        job = Job(deployed, exchange, monkeypatch, rounds=1)
        job.run()
    assert "agreement.json" in job.panics[0]
    assert statistics(job.coordinator) == {"privfed": {"reason": "FileNotFoundError at the server; see its output"}}


@pytest.fixture(scope="module")
def operator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("submit")
    write_deployment(Plan.load(write_plan(folder, port=free_port())), folder / "out")
    return folder / "out" / OPERATOR


class Session:
    """FLARE's session, with a job that runs for a while and ends as it is told."""

    def __init__(self, status: str, *, stats: Any = None, submitting: Exception | None = None, looking: Exception | None = None) -> None:
        self.status, self.stats, self.submitting, self.looking = status, stats, submitting, looking
        self.looks = 0
        self.closed = False

    def submit_job(self, folder: str) -> str:
        assert (Path(folder) / "meta.json").exists()
        if self.submitting is not None:
            raise self.submitting
        return "7"

    def monitor_job(self, number: str, *, timeout: float, poll_interval: float, cb: Callable[[Any, str, Any], bool]) -> None:
        for status in ("SUBMITTED", "RUNNING", "RUNNING", self.status):
            if self.looking is not None and status == self.status:
                raise self.looking
            assert cb(self, number, {"status": status})

    def show_stats(self, number: str, target: str) -> Any:
        assert (number, target) == ("7", "server")
        self.looks += 1
        if self.looks == 1:
            raise api_spec.JobNotRunning("not yet")
        return self.stats

    def get_job_meta(self, number: str) -> dict[str, str]:
        return {"status": self.status}

    def close(self) -> None:
        self.closed = True
        raise api_spec.SessionClosed("closed before")


def ended(
    operator: Path, session: Session | Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    def new_session(*_: object, **__: object) -> Session:
        if isinstance(session, Exception):
            raise session
        return session

    monkeypatch.setattr(submit, "new_secure_session", new_session)
    monkeypatch.setattr(sys, "argv", ["submit", str(operator)])
    code = submit.main()
    output = capsys.readouterr()
    if isinstance(session, Session):
        assert session.closed
    return code, output.out, output.err


def test_a_run_that_was_held_to_its_end_is_exit_code_0(
    operator: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(operator, Session(COMPLETED, stats={"server": {}}), monkeypatch, capsys) == (0, f"{COMPLETED}\n", "")


def test_a_run_in_which_rounds_failed_is_exit_code_1_with_what_the_server_said_of_it(
    operator: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = "1 of 3 rounds were not held: round 1: too few\x1b[2J\nanswer"
    session = Session(FAILED, stats={"server": {"privfed": {"reason": reason}}})
    code, out, err = ended(operator, session, monkeypatch, capsys)
    assert (code, out) == (1, f"{FAILED}\n")
    assert err == "privfed: the run failed: 1 of 3 rounds were not held: round 1: too few [2J answer\n"  # nothing that a terminal obeys


@pytest.mark.parametrize("stats", [None, [], {}, {"server": {"privfed": {}}}, {"server": {"privfed": {"reason": 3}}}])
def test_a_server_that_gives_no_reason_is_said_to_have_given_none(
    operator: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stats: Any
) -> None:
    code, _, err = ended(operator, Session(FAILED, stats=stats), monkeypatch, capsys)
    assert (code, err) == (1, "privfed: the run failed: the server gave no reason; see its output\n")


@pytest.mark.parametrize(
    ("session", "expected"),
    [
        (api_spec.NoConnection("no way"), "there is no session with the server at localhost:{port} (no way); nothing was submitted"),
        (api_spec.AuthenticationError("who?"), "there is no session with the server at localhost:{port} (who?); nothing was submitted"),
        (Session("", submitting=api_spec.InvalidJobDefinition("bad")), "the server did not take the job (bad); nothing was started"),
        (Session("", submitting=api_spec.AuthorizationError("")), "the server did not take the job (AuthorizationError); nothing was"),
        (Session("", looking=api_spec.NoConnection("gone")), "the server went away before the job ended (gone); what is stored stays"),
        (Session("", looking=RuntimeError("odd")), "the server went away before the job ended (odd); what is stored stays"),
    ],
)
def test_what_goes_wrong_at_flare_is_one_line_that_says_what_to_do_next_and_exit_code_1(
    operator: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    session: Session | Exception,
    expected: str,
) -> None:
    code, out, err = ended(operator, session, monkeypatch, capsys)
    port = submit.Deployment.load(operator).port
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith(f"privfed: {expected.format(port=port)}")


def test_a_folder_that_is_no_operators_is_refused_in_one_line(
    operator: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for folder, reason in ((tmp_path, "holds no deployment.json"), (tmp_path / "copy", "holds no flare/startup")):
        if folder.name == "copy":
            folder.mkdir()
            (folder / "deployment.json").write_bytes((operator / "deployment.json").read_bytes())
        code, out, err = ended(folder, api_spec.NoConnection(""), monkeypatch, capsys)
        assert (code, out) == (1, "")
        assert reason in err


def test_the_operators_script_passes_the_exit_code_on(operator: Path, tmp_path: Path) -> None:
    """With a python3 that finds everything and ends with 1, as `submit` does."""
    python = tmp_path / "python3"
    python.write_text('#!/bin/sh\ncase "$1" in -c) exit 0;; esac\necho "$@"\nexit 1\n')
    python.chmod(0o700)
    done = subprocess.run([operator / "submit.sh"], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "-m privfed.engines.flare.submit .\n")


def test_without_a_server_the_command_says_so_in_one_line_and_an_interrupted_one_ends(operator: Path) -> None:
    """In a process of its own: FLARE logs, and leaves threads that keep it alive."""
    program = "from privfed.engines.flare import submit; submit._CONNECT_SECONDS = {}; submit.main()"
    command = [sys.executable, "-c", program.format(2.0), str(operator)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.stderr.count("\n")) == ("", 1), done.stderr
    assert done.stderr.startswith("privfed: there is no session with the server at ")
    waiting = subprocess.Popen(
        [sys.executable, "-m", "privfed.engines.flare.submit", str(operator)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 60
        while len(psutil.Process(waiting.pid).threads()) < 2:  # until FLARE tries to connect, with threads of its own
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(3)
        waiting.send_signal(signal.SIGINT)
        out, err = waiting.communicate(timeout=30)
    finally:
        waiting.kill()
    assert (waiting.returncode, out, err.count("\n")) == (1, "", 1), err
    assert err.startswith("privfed: stopped waiting; if the job was submitted, it goes on")
