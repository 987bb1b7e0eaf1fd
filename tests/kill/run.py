"""Kills parties of a federation at random moments and looks whether anything is spent twice or forgotten.

`python -m tests.kill.run [--kills 200] [--seed 1]` starts a server and three banks, each a process of its own, and holds rounds while
a random party is killed (SIGKILL) at a random moment of each round, and started again on its folder. At the end:

- every bank's model equals, bit for bit, that of an undisturbed run with the same noise;
- no ledger shows less than one reservation per upload that was made;
- each upload that the server holds is the one that the bank stored.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from privfed.aggregation.rules import FedAvg
from privfed.agreement import Agreement, RoundContext
from privfed.dp.ledger import Ledger
from privfed.engines.frames import Tag, read_frame, write_frame
from privfed.engines.spawned import SpawnedServer
from privfed.he.params import CkksParams
from privfed.he.secret import SharedKey
from privfed.identity import Identity, Roster
from privfed.policy import OpeningPolicy
from privfed.round import run_round
from privfed.state import ModelStore
from privfed.training.model import values_of
from privfed.written_agreement import encode_agreement
from tests.kill.party import BANKS, ledger_path, model

T = TypeVar("T")
ROOT = Path(__file__).parents[2]


def prepare(folder: Path) -> Agreement:
    """Writes everything that the parties start with."""
    keys = SharedKey.generate()
    server = Identity.generate("server")
    folder.mkdir(parents=True)
    server.save(folder / "server.pem")
    identities = [Identity.generate(name) for name in BANKS]
    for identity in identities:
        own = folder / "clients" / identity.name
        own.mkdir(parents=True)
        identity.save(own / "identity.pem")
        keys.save(own / "shared.key")
    start = values_of(model())
    agreement = Agreement(
        session=os.urandom(16),
        roster=Roster(server=server.public, clients=tuple(identity.public for identity in identities)),
        params=CkksParams.standard(),
        layout=start.layout,
        start=start.digest,
        weights={"bank_a": 0.5, "bank_b": 0.3, "bank_c": 0.2},
        rule=FedAvg(),
        policy=OpeningPolicy(),
        populations={identity.name: identity.name for identity in identities},
    )
    (folder / "agreement.json").write_text(encode_agreement(agreement))
    return agreement


class Bank:
    """A bank's process, started when it is needed and started again when it is gone."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self._folder = name, folder
        self.process: subprocess.Popen[bytes] | None = None

    def _ask(self, tag: Tag, context: RoundContext, data: bytes = b"") -> bytes:
        if self.process is None or self.process.poll() is not None:
            command = [sys.executable, "-m", "tests.kill.party", self.name, str(self._folder)]
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        head = json.dumps({"round": context.round, "history": context.history.hex()}).encode()
        try:
            write_frame(self.process.stdin, tag, head + b"\n" + data)
            reply, answer = read_frame(self.process.stdout)
        except (EOFError, OSError) as error:
            self.process.wait()
            raise ConnectionError(f"{self.name} is gone") from error
        if reply is not Tag.DONE:
            raise RuntimeError(f"{self.name} refused: {answer.decode()}")
        return answer

    def opened_rounds(self, context: RoundContext) -> tuple[int, ...]:
        return tuple(json.loads(self._ask(Tag.COHORT, context)))

    def setup(self, context: RoundContext) -> bytes:
        return self._ask(Tag.SETUP, context)

    def upload(self, context: RoundContext) -> bytes:
        return self._ask(Tag.UPLOAD, context)

    def approve(self, context: RoundContext, digest: bytes) -> bytes:
        return self._ask(Tag.APPROVAL, context, digest)

    def open(self, context: RoundContext, data: bytes) -> None:
        self._ask(Tag.AGGREGATE, context, data)

    def abort(self, context: RoundContext) -> bytes:
        return self._ask(Tag.ABORT, context)


class Federation:
    """The parties, and a coordinator that knows nothing it could not ask again."""

    def __init__(self, folder: Path, agreement: Agreement) -> None:
        self.folder, self.agreement = folder, agreement
        self.banks = {name: Bank(name, folder) for name in BANKS}
        self.server: SpawnedServer | None = None
        self.opened: list[RoundContext] = []
        self.history = RoundContext(agreement=agreement, round=0).history

    def _begin(self, context: RoundContext) -> SpawnedServer:
        if self.server is None or self.server._process.poll() is not None:
            self.server = SpawnedServer(agreement=self.agreement, identity_path=self.folder / "server.pem", spool=self.folder / "spool")
        return self.server.begin(context, BANKS)

    def hold(self, number: int) -> None:
        context = RoundContext(agreement=self.agreement, round=number, history=self.history)
        for bank in self.banks.values():
            known = bank.opened_rounds(context)
            for missed in self.opened:
                if missed.round not in known:
                    bank.open(missed, self._begin(missed).aggregate())
        record = run_round(server=self._begin(context), clients=self.banks, context=context, selected=BANKS)
        self.opened.append(context)
        self.history = bytes.fromhex(record.history)

    def victims(self) -> list[int]:
        processes = [bank.process for bank in self.banks.values()] + [self.server._process if self.server else None]
        return [process.pid for process in processes if process is not None and process.poll() is None]

    def end(self) -> None:
        for bank in self.banks.values():
            if bank.process is not None:
                bank.process.kill()
                bank.process.communicate()
        if self.server is not None:
            self.server.__exit__(None, None, None)


def persist(action: Callable[[], T], *, tries: int) -> T:
    """Repeats what failed because a party was killed."""
    for _ in range(tries):
        try:
            return action()
        except ConnectionError:
            continue
    raise RuntimeError("a party did not come back")


class Killer:
    """Kills one random party after a random time, as often as it is asked to."""

    def __init__(self, federation: Federation, rng: random.Random, longest: float) -> None:
        self._federation, self._rng, self._longest = federation, rng, longest
        self.kills = 0

    def during(self, action: Callable[[], object]) -> None:
        """Runs an action while a party is killed."""
        killer = threading.Thread(target=self._kill)
        killer.start()
        action()
        killer.join()

    def _kill(self) -> None:
        time.sleep(self._rng.uniform(0, self._longest))
        victims = self._federation.victims()
        if victims:
            try:
                os.kill(self._rng.choice(victims), signal.SIGKILL)
            except ProcessLookupError:
                return
            self.kills += 1


def check(folder: Path, reference: Path, agreement: Agreement, rounds: int) -> dict[str, int]:
    """What must hold at the end; returns what each bank was charged."""
    charged: dict[str, int] = {}
    for name in BANKS:
        layout = agreement.layout
        mine = ModelStore(folder / "clients" / name / "model.npz", layout=layout).load()
        undisturbed = ModelStore(reference / "clients" / name / "model.npz", layout=layout).load()
        assert mine is not None
        assert undisturbed is not None
        assert mine.rounds == undisturbed.rounds == tuple(range(rounds)), f"{name} opened {mine.rounds}"
        assert np.array_equal(mine.values.values, undisturbed.values.values), f"{name} has another model"
        with Ledger.reopen(ledger_path(folder, name)) as ledger:
            ledger.verify()
            charged[name] = len(ledger.events())
            for number in range(rounds):
                place = {"session": agreement.session, "round": number}
                retries = 0
                while ledger.reservation(**place, attempt=retries + 1) is not None:
                    retries += 1
                newest = ledger.reservation(**place, attempt=retries)
                assert newest is not None, f"{name} uploaded in round {number} and shows no charge"
                assert newest.committed, f"{name} uploaded in round {number} and committed nothing"
                sent = folder / "spool" / f"{agreement.session.hex()}-{number}-0" / f"upload-{name}"
                stored = folder / "clients" / name / "outbox" / f"{agreement.session.hex()}-{number}-0"
                assert sent.read_bytes() == stored.read_bytes(), f"the server holds another upload of {name} than {name}"
    return charged


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="10 kills")
    options = parser.parse_args(arguments)
    kills = 10 if options.quick else options.kills
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="privfed-kill-") as name:
        disturbed, reference = Path(name) / "disturbed", Path(name) / "reference"
        agreement = prepare(disturbed)
        shutil.copytree(disturbed, reference)
        federation = Federation(disturbed, agreement)
        rounds = 0
        try:
            federation.hold(0)  # starts the processes
            started = time.perf_counter()
            federation.hold(1)
            killer = Killer(federation, rng, longest=time.perf_counter() - started)
            rounds = 2
            while killer.kills < kills:
                number = rounds
                killer.during(lambda: persist(lambda: federation.hold(number), tries=10))  # noqa: B023 # runs at once
                rounds += 1
                print(f"round {number}: {killer.kills} kills", file=sys.stderr)
        finally:
            federation.end()
        undisturbed = Federation(reference, agreement)
        try:
            for number in range(rounds):
                undisturbed.hold(number)
        finally:
            undisturbed.end()
        charged = check(disturbed, reference, agreement, rounds)
    print(json.dumps({"kills": killer.kills, "rounds": rounds, "charged": charged}))


if __name__ == "__main__":
    main()
