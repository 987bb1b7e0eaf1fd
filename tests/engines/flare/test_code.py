"""Banks behind a server that allows everything: what comes with a job still does not run at any of them."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="needs nvflare: pip install 'privfed[flare]'")

from privfed.deploy.plan import Plan
from privfed.engines.deployments import write_deployment
from tests.engines.flare.commanding import ANSWERED
from tests.engines.flare.loopback import Loopback, edit, free_port
from tests.engines.flare.plans import write_plan

BANKS = ("bank_a", "bank_b", "bank_c")
SECONDS = 160  # 40 s measured on two idle cores
_ECHO = "tests.engines.flare.echo"
_COMMANDING = "tests.engines.flare.commanding"
_PARAMETERS = 10_000_000


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loopback]:
    folder = tmp_path_factory.mktemp("flare")
    root = folder / "deployment"
    write_deployment(Plan.load(write_plan(folder, port=free_port())), root)
    edit(root / "server/flare/local/authorization.json", "permissions", to={"lead": "any", "project_admin": "any"})
    edit(root / "server/flare/local/resources.json", "class_allow_list", to=["*"])
    for name in BANKS:
        resources = json.loads((root / name / "flare/local/resources.json").read_text())
        # Beside what `privfed deploy init` allows, so that long messages can be tried without anything to compute.
        edit(root / name / "flare/local/resources.json", "class_allow_list", to=[*resources["class_allow_list"], f"{_ECHO}.EchoParty"])
    with Loopback(root) as loopback:
        loopback.start()
        yield loopback


def _job(loopback: Loopback, name: str, *, party: str, coordinator: str | None = None, **arguments: object) -> Path:
    job = loopback.folder / name
    shutil.copytree(loopback.folder / "operator/job", job, ignore=shutil.ignore_patterns(".*"))
    config = job / "party/config/config_fed_client.json"
    edit(config, "executors", to=[{"tasks": ["privfed"], "executor": {"path": party, "args": {}}}])
    if coordinator is not None:
        workflow = {"id": "coordinator", "path": coordinator, "args": arguments}
        edit(job / "server/config/config_fed_server.json", "workflows", to=[workflow])
    return job


def test_code_that_comes_with_a_job_is_refused_at_every_bank(running: Loopback) -> None:
    job = _job(running, "code", party="intruder.Intruder")
    ran = running.folder / "ran"
    (job / "party/custom").mkdir()
    (job / "party/custom/intruder.py").write_text(f"import os, pathlib\npathlib.Path({str(ran)!r}).touch()\n")
    assert running.submit(job, seconds=SECONDS) != "FINISHED:COMPLETED"
    for name in BANKS:
        assert re.search(rf"'{name}: [^']*BYOC not permitted", running.output("server")), name
    assert not ran.exists()


def test_a_class_that_is_not_ours_is_refused_at_every_bank(running: Loopback) -> None:
    job = _job(running, "named", party="nvflare.app_common.np.np_trainer.NPTrainer")
    assert running.submit(job, seconds=SECONDS) != "FINISHED:COMPLETED"
    for name in BANKS:
        assert "NPTrainer' at config path 'executors.#1.executor' is not in allow_list" in running.output(name), name


def test_a_server_that_gives_commands_without_a_claim_to_a_right_gets_nothing_of_a_bank(running: Loopback) -> None:
    """It leaves out that the bank should look at its own policy, which is then not looked at."""
    commands = {
        "sys.shell": "cat ../identity.pem",
        "sys.info": "",
        "sys.report_env": "",
        "sys.report_version": "",
        "sys.configure_site_log": "DEBUG",
        "resource_manager.report_resources": "",
        "info.show_errors": "",
        "info.show_stats": "",
        "info.reset_errors": "",
        "train.configure_job_log": "DEBUG",
        "train.check_status": "",
        "train.get_scopes": "",
        "train.abort_task": "",
        "train.restart": "",
        "train.shutdown": "",
    }
    job_commands = ["show_stats", "show_errors", "reset_errors", "configure_job_log"]
    coordinator = f"{_COMMANDING}.CommandingCoordinator"
    arguments = {"banks": ["bank_a", "bank_c"], "commands": list(commands.items()), "job_commands": job_commands}
    job = _job(running, "commands", party=f"{_ECHO}.EchoParty", coordinator=coordinator, **arguments)
    assert running.submit(job, seconds=SECONDS) == "FINISHED:COMPLETED"
    answers = json.loads(running.output("server").rpartition(ANSWERED)[2].splitlines()[0])
    refused = dict.fromkeys(commands, "'invalid_request'") | dict.fromkeys(job_commands, "invalid_request None")
    assert answers == {"bank_a": refused, "bank_c": refused}
    assert "PRIVATE KEY" not in running.output("server")


def test_an_update_of_ten_million_parameters_travels(running: Loopback) -> None:
    """Both ways, to and from three banks at once. At 8 bytes a parameter it is longer than any encrypted update of `SharedKey`."""
    job = _job(running, "echo", party=f"{_ECHO}.EchoParty", coordinator=f"{_ECHO}.EchoCoordinator", size=8 * _PARAMETERS)
    assert running.submit(job, seconds=SECONDS) == "FINISHED:COMPLETED"
    assert "ECHO of 3 x 80000000 bytes took" in running.output("server")
    assert "the replies are not" not in running.output("server")
    assert "a stranger answered" not in running.output("server")
