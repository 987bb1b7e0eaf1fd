import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from privfed.agreement import RoundContext
from privfed.consortium import Consortium
from privfed.engines.local import Simulation
from privfed.errors import CohortError, InvalidMessageError
from privfed.he.secret import SharedKey
from privfed.memory import patterns_in_process
from privfed.scanner import process_holds_key

Make = Callable[..., Consortium]
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/<pid>/mem")


def test_a_server_process_gives_the_same_model_as_one_in_this_process(model: torch.nn.Module, non_private: Make) -> None:
    models = []
    for separate in (False, True):
        with Simulation(non_private(), model, separate_server=separate) as simulation:
            models.append(simulation.run(rounds=2).model.values)
    assert np.array_equal(*models)


@linux
def test_a_server_process_does_not_hold_a_key(model: torch.nn.Module, non_private: Make) -> None:
    keys = SharedKey.generate()
    with Simulation(non_private(keys=keys), model, separate_server=True) as simulation:
        simulation.run(rounds=2)
        contexts = [RoundContext(agreement=simulation.agreement, round=number) for number in range(2)]
        assert not process_holds_key(simulation.server_pid, keys, contexts)
        # The scan reads this server's memory at all: it finds the session, which the server knows.
        assert patterns_in_process(simulation.server_pid, [simulation.agreement.session]) == (True,)


@linux
@pytest.mark.parametrize("only", ["shared", "round"])
def test_the_same_scan_finds_the_keys_in_a_client_process(model: torch.nn.Module, non_private: Make, tmp_path: Path, only: str) -> None:
    keys = SharedKey.generate()
    keys.save(tmp_path / "shared.key")
    with Simulation(non_private(keys=keys), model) as simulation:
        agreement = simulation.agreement
    from privfed.written_agreement import encode_agreement

    (tmp_path / "agreement.json").write_text(encode_agreement(agreement))
    client = textwrap.dedent(f"""
        from pathlib import Path
        from privfed.agreement import RoundContext
        from privfed.written_agreement import decode_agreement
        from privfed.he.secret import SharedKey
        from privfed.protect import round_key
        agreement = decode_agreement(Path({str(tmp_path / "agreement.json")!r}).read_text())
        shared = SharedKey.load(Path({str(tmp_path / "shared.key")!r}))
        key = round_key(shared, RoundContext(agreement=agreement, round=1)) if {only == "round"} else None
        print("ready", flush=True)
        input()
    """)
    process = subprocess.Popen([sys.executable, "-c", client], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        holds = process_holds_key(process.pid, keys, [RoundContext(agreement=agreement, round=1)])
        stranger = process_holds_key(process.pid, SharedKey.generate(), [RoundContext(agreement=agreement, round=1)])
    finally:
        process.kill()
        process.communicate()
    assert holds
    assert not stranger


@linux
def test_a_round_key_alone_is_found(model: torch.nn.Module, non_private: Make, tmp_path: Path) -> None:
    """A process that holds the key of a round, but not the shared key."""
    keys = SharedKey.generate()
    with Simulation(non_private(keys=keys), model) as simulation:
        context = RoundContext(agreement=simulation.agreement, round=0)
    from privfed.protect import round_key
    from privfed.scanner import _parts

    words = b"".join(_parts(round_key(keys, context)))
    program = f"import sys; words = sys.stdin.buffer.read({len(words)}); print('ready', flush=True); sys.stdin.buffer.read()"
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(words)
        process.stdin.flush()
        assert process.stdout.readline() == b"ready\n"
        assert process_holds_key(process.pid, keys, [context])
        assert not process_holds_key(process.pid, keys, [RoundContext(agreement=context.agreement, round=1)])
    finally:
        process.kill()
        process.communicate()


def test_the_scan_refuses_to_say_no_when_it_looked_at_nothing() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        patterns_in_process(1, [b"short"])
    with pytest.raises(ValueError, match="at least one pattern"):
        patterns_in_process(1, [])


@linux
def test_torch_and_opacus_and_the_secret_half_cannot_be_imported_in_the_server_process() -> None:
    program = textwrap.dedent("""
        import runpy
        import sys
        try:
            runpy.run_module("privfed.engines.server_process", run_name="__main__")
        except EOFError:
            pass  # nobody speaks to it
        for module in ("torch", "opacus", "privfed.he.secret", "privfed.he._seal_secret", "privfed.keyholder", "privfed.protect"):
            try:
                __import__(module)
            except ImportError:
                continue
            raise SystemExit(module + " was imported")
        print(sorted(name for name in sys.modules if sys.modules[name] is not None and name.startswith("privfed.he")))
    """)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert result.returncode == 0, result.stderr + result.stdout
    assert "additive" in result.stdout
    assert "secret" not in result.stdout


def test_a_refusal_of_the_server_process_arrives_as_the_same_error(model: torch.nn.Module, non_private: Make) -> None:
    with Simulation(non_private(), model, separate_server=True) as simulation:
        assert simulation.encrypted.spawned is not None
        context = RoundContext(agreement=simulation.agreement, round=0)
        server = simulation.encrypted.spawned.begin(context, ["bank_0", "bank_1", "bank_2"])
        with pytest.raises(CohortError, match="setup"):
            server.close()
        with pytest.raises(InvalidMessageError):
            server.receive_setup(b"noise")
        with pytest.raises(CohortError, match="demands 3"):
            simulation.encrypted.spawned.begin(context, ["bank_0"])


def test_a_server_process_that_is_gone_is_an_error_and_not_a_hang(model: torch.nn.Module, non_private: Make) -> None:
    with Simulation(non_private(), model, separate_server=True) as simulation:
        assert simulation.encrypted.spawned is not None
        simulation.encrypted.spawned._process.kill()
        simulation.encrypted.spawned._process.wait()
        with pytest.raises(ConnectionError, match="the server process is gone"):
            simulation.run(rounds=1)


def test_a_server_process_survives_what_is_no_decision_of_the_protocol(model: torch.nn.Module, non_private: Make) -> None:
    with Simulation(non_private(), model, separate_server=True) as simulation:
        assert simulation.encrypted.spawned is not None
        context = RoundContext(agreement=simulation.agreement, round=0)
        with pytest.raises(ValueError, match="expected clients of the roster"):
            simulation.encrypted.spawned.begin(context, ["bank_0", "bank_1", "stranger"])
        spool = simulation.encrypted._site.spool / f"{simulation.agreement.session.hex()}-0-0"
        spool.write_bytes(b"a file where the folder should be")
        with pytest.raises(OSError, match="exists"):
            simulation.encrypted.spawned.begin(context, ["bank_0", "bank_1", "bank_2"])
        spool.unlink()
        assert simulation.run(rounds=1).rounds
