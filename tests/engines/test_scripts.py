"""Start scripts whose programs are not there: one line that says what to install, and nothing started."""

import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from privfed.deploy.scripts import need_program, need_python
from privfed.engines.flower import scripts

FLOWER = {
    "start-superlink.sh": scripts.START_SUPERLINK,
    "start-proxy.sh": scripts.START_PROXY,
    "run.sh": scripts.RUN,
    "start-node.sh": scripts.START_NODE,
    "start-supernode.sh": scripts.START_SUPERNODE,
}


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A folder for the PATH with nothing but what a shell needs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "dirname", "mkdir", "chmod", "cat", "sleep"):
        (folder / name).symlink_to(str(shutil.which(name)))
    return folder


def put(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o700)


def run(script: Path, path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", str(script)], env={"PATH": str(path)}, capture_output=True, text=True, timeout=30, check=False)


def without_packages(folder: Path, name: str) -> None:
    put(folder, name, f'exec {sys.executable} -I -S "$@"')


@pytest.mark.parametrize("name", FLOWER)
def test_a_flower_script_without_its_programs_starts_nothing_and_says_what_to_install(name: str, tmp_path: Path, bare: Path) -> None:
    script = tmp_path / name
    script.write_text(FLOWER[name].replace("/usr/sbin:/usr/local/sbin", "/nowhere"))
    (tmp_path / "flower.env").write_text(scripts.server_environment())
    done = run(script, bare)
    missing = "nginx" if name == "start-proxy.sh" else "python"
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith(f"privfed: {missing} is not on the PATH; nothing was started; ")
    if missing == "python":
        without_packages(bare, "python")
        done = run(script, bare)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        assert done.stderr.startswith("privfed: the python on the PATH has no privfed[flower]; nothing was started; install it there")
    if name == "start-superlink.sh":
        put(bare, "python", "exit 0")
        assert run(script, bare).stderr.startswith("privfed: flower-superlink is not on the PATH; nothing was started; ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "flower.env", name]


def test_a_flare_script_without_its_programs_starts_nothing_and_says_what_to_install(tmp_path: Path, bare: Path) -> None:
    pytest.importorskip("nvflare", reason="needs nvflare: pip install 'privfed[flare]'")
    from privfed.engines.flare.provisioning import _SUBMIT, _write_start

    _write_start(tmp_path, "bank_a")
    (tmp_path / "submit.sh").write_text(_SUBMIT)
    for name in ("start.sh", "submit.sh"):
        done = run(tmp_path / name, bare)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        assert done.stderr.startswith("privfed: python3 is not on the PATH; nothing was started; activate the environment")
    without_packages(bare, "python3")
    for name in ("start.sh", "submit.sh"):
        done = run(tmp_path / name, bare)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        assert done.stderr.startswith("privfed: the python3 on the PATH has no privfed[flare]; nothing was started; install it there")


def test_programs_that_are_there_are_no_reason_to_stop(tmp_path: Path, bare: Path) -> None:
    put(bare, "python", f'PYTHONPATH={Path(__file__).parents[2]} exec {sys.executable} "$@"')
    script = tmp_path / "script.sh"
    script.write_text(f"{need_program('cat', install='')}{need_python('python', module='json', extra='flower')}echo started\n")
    done = run(script, bare)
    assert (done.returncode, done.stdout, done.stderr) == (0, "started\n", "")


def test_the_proxy_is_not_started_as_root_whose_nginx_could_take_no_update_and_is_started_as_another_user(
    tmp_path: Path, bare: Path
) -> None:
    script = tmp_path / "start-proxy.sh"
    script.write_text(scripts.START_PROXY.replace("/usr/sbin:/usr/local/sbin", "/nowhere"))
    (tmp_path / "flower.env").write_text(scripts.server_environment())
    put(bare, "nginx", "echo started")
    put(bare, "id", "echo 0")
    done = run(script, bare)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("privfed: nginx that root starts works as nobody, who cannot write here")
    assert "nothing was started; give the server's folder to an ordinary user" in done.stderr
    put(bare, "id", "echo 1000")
    assert (run(script, bare).stdout, (tmp_path / "proxy").is_dir()) == ("started\n", True)


@pytest.mark.parametrize("ending", ["first.sh", "second.sh"])
def test_when_one_of_a_party_s_two_processes_ends_so_does_the_other_and_what_started_both(tmp_path: Path, bare: Path, ending: str) -> None:
    """A server whose proxy died would else look alive, and let nobody in."""
    flower = tmp_path / "flower"
    flower.mkdir()
    for name in ("first.sh", "second.sh"):
        put(flower, name, "exit 3" if name == ending else "echo $$ > pid; exec sleep 600")
    script = tmp_path / "start.sh"
    script.write_text(scripts.start_all("first.sh", "second.sh"))
    done = run(script, bare)
    assert done.returncode == 1
    assert "privfed: first.sh or second.sh ended" in done.stderr
    assert is_gone(int((flower / "pid").read_text()))


def is_gone(pid: int) -> bool:
    """Whether a process has ended, within some seconds."""
    for _ in range(100):
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.1)
                continue
        return True
    return False
