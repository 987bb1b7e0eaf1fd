"""Kills a process that spends (SIGKILL) at random moments, and looks whether the ledger ever forgets.

`python -m tests.dp.kill_ledger [--kills 200] [--seed 1] [--quick]`. A worker opens the ledger, and reserves and commits as fast as it
can; it says each step on a pipe *after* the call returned. It is killed after a random time, again and again, on the same files. The
time of every second worker begins when it has charged once: a busy machine would else kill beginnings alone. Each time, whoever opens
the ledger next must find every charge that the worker had said, every commit, and an epsilon that never falls.
"""

import argparse
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from privfed.dp.countersign import HeadMemory, read_statement, state_head
from privfed.dp.ledger import Ledger
from privfed.dp.mechanism import Budget, GaussianRelease
from privfed.identity import Identity

BUDGET = Budget.unlimited(delta=1e-6)
EVENT = GaussianRelease(noise_multiplier=100.0)
SESSION = b"killed"
CONTEXT = bytes(32)
UNDISTURBED = 5  # charges that are made and timed before the first kill
QUICK_KILLS = 10


def work(path: Path, says: int) -> None:
    """Spends until it is killed. `says` is the pipe on which it tells what has returned."""
    with Ledger.open(path, population="bank_a", budget=BUDGET) as ledger:
        number = len(ledger.events())
        while True:
            reservation = ledger.reserve(EVENT, session=SESSION, round=number, attempt=0)
            os.write(says, f"reserved {number}\n".encode())
            ledger.commit(reservation)
            os.write(says, f"committed {number}\n".encode())
            number += 1


def spawn(path: Path) -> tuple[int, int]:
    """A worker, and the pipe on which it speaks. Forked, because importing takes longer than a kill should wait."""
    hears, says = os.pipe()
    child = os.fork()
    if not child:
        os.close(hears)
        try:
            work(path, says)
        finally:
            os._exit(1)
    os.close(says)
    return child, hears


def first_line(pipe: int) -> bytes:
    """Waits until something was said; empty if the worker ends before."""
    data = b""
    while not data.endswith(b"\n") and (part := os.read(pipe, 1)):
        data += part
    return data


def heard(pipe: int, begun: bytes) -> list[str]:
    """Everything that was said, to the last whole line, after what was heard before."""
    data = begun
    while part := os.read(pipe, 1 << 16):
        data += part
    os.close(pipe)
    return data.decode().split("\n")[:-1]


def warm_up(path: Path) -> tuple[float, int]:
    """Spends a little undisturbed; returns the longest time that a worker may live, so that most kills hit while it writes."""
    start = time.perf_counter()
    with Ledger.open(path, population="bank_a", budget=BUDGET) as ledger:
        for number in range(UNDISTURBED):
            ledger.commit(ledger.reserve(EVENT, session=SESSION, round=number, attempt=0))
    return min(time.perf_counter() - start, 0.5), UNDISTURBED


def check(path: Path, said: Sequence[str], spent_before: float) -> tuple[int, float]:
    """What must hold after a kill; returns how many charges there are, and their epsilon."""
    with Ledger.open(path, population="bank_a", budget=BUDGET) as ledger:
        ledger.verify()
        charges = len(ledger.events())
        for line in said:
            word, number = line.split()
            reservation = ledger.reservation(session=SESSION, round=int(number), attempt=0)
            assert reservation is not None, f"{line} was forgotten"
            assert word == "reserved" or reservation.committed, f"{line} was forgotten"
        spent = ledger.spent()
        assert spent >= spent_before, "epsilon fell"
        return charges, spent


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_KILLS} kills")
    options = parser.parse_args(arguments)
    rng = random.Random(options.seed)
    owner, peer = Identity.generate("bank_a"), Identity.generate("bank_b")
    began, spent, unsaid = time.perf_counter(), 0.0, 0
    kills = QUICK_KILLS if options.quick else options.kills
    with tempfile.TemporaryDirectory(prefix="privfed-kill-ledger-") as name:
        path, memory = Path(name) / "bank_a.ledger", HeadMemory(Path(name) / "peer.heads")
        longest, charges = warm_up(path)
        for number in range(kills):
            worker, pipe = spawn(path)
            begun = first_line(pipe) if number % 2 else b""
            time.sleep(rng.uniform(0, longest))
            os.kill(worker, signal.SIGKILL)
            _, status = os.waitpid(worker, 0)
            assert os.WIFSIGNALED(status), "the worker failed by itself"
            said = heard(pipe, begun)
            before = charges
            charges, spent = check(path, said, spent)
            unsaid += charges - before - sum(line.startswith("reserved") for line in said)
            # And a peer that saw it before each kill agrees that it only grew.
            with Ledger.open(path, population="bank_a", budget=BUDGET) as ledger:
                statement = state_head(ledger, owner, context=CONTEXT, peers=("bank_b",))
            memory.countersign([read_statement(statement, owner=owner.public, population="bank_a", context=CONTEXT)], signer=peer)
    found = {"kills": kills, "charges": charges, "charged_but_not_said": unsaid, "seconds": round(time.perf_counter() - began, 1)}
    print(json.dumps(found))
    return found


if __name__ == "__main__":
    main()
