"""A party of a small federation as a process of its own: `python -m tests.kill.party ROLE FOLDER`.

Requests come on standard input and answers go to standard output, in the frames of `privfed.engines.frames`. Everything the party
knows is in its folder, so that it may be killed at any moment and started again. Noise comes from a seeded source, so that an
undisturbed run can be compared with a disturbed one, bit for bit.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch

from privfed.agreement import RoundContext
from privfed.client import Client, Trainer
from privfed.data.samples import Samples
from privfed.dp.ledger import Ledger
from privfed.dp.mechanism import Budget
from privfed.engines.frames import Tag, read_frame, write_frame
from privfed.errors import PrivFedError
from privfed.he.secret import SharedKey
from privfed.identity import Identity
from privfed.round import Participant
from privfed.session import ClientSession
from privfed.training.loss import binary_cross_entropy
from privfed.training.mechanism import DpSgd
from privfed.training.model import mlp, values_of
from privfed.training.randomness import _SeededRandomness
from privfed.written_agreement import decode_agreement

BANKS = ("bank_a", "bank_b", "bank_c")
BUDGET = Budget(epsilon=10_000.0, delta=1e-5)
MECHANISM = DpSgd(
    noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.2, expected_batch_size=20, steps=40, learning_rate=0.3, max_records=200
)


def model() -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return mlp(inputs=4, hidden=(6,))


def table(name: str) -> Samples:
    rng = np.random.default_rng(BANKS.index(name))
    features = rng.normal(size=(80, 4)).astype(np.float32)
    labels = (features[:, 0] > 0.3).astype(np.int64)
    return Samples(features=features, labels=labels, groups=None, columns=("a", "b", "c", "d"))


def ledger_path(folder: Path, name: str) -> Path:
    return folder / "clients" / name / "privacy.ledger"


def participant(folder: Path, name: str, ledger: Ledger) -> Participant:
    agreement = decode_agreement((folder / "agreement.json").read_text())
    start = values_of(model())
    trainer = Trainer(
        client=Client(name, table(name), training=MECHANISM, ledger=ledger, weight=agreement.weights[name]),
        model=model(),
        start=start,
        loss=binary_cross_entropy,
        params=agreement.params,
        randomness=lambda number: _SeededRandomness(1000 * number + BANKS.index(name)),
    )
    own = folder / "clients" / name
    session = ClientSession(
        trainer=trainer,
        identity=Identity.load(own / "identity.pem", name=name),
        agreement=agreement,
        keys=SharedKey.load(own / "shared.key"),
        start=start,
        directory=own,
    )
    return Participant(session)


def answer(party: Participant, tag: Tag, context: RoundContext, data: bytes) -> bytes:
    match tag:
        case Tag.COHORT:
            return json.dumps(party.opened_rounds()).encode()
        case Tag.SETUP:
            return party.setup(context)
        case Tag.UPLOAD:
            return party.upload(context)
        case Tag.APPROVAL:
            return party.approve(context, data)
        case Tag.AGGREGATE:
            party.open(context, data)
            return b""
        case Tag.ABORT:
            return party.abort(context)
        case _:
            raise ValueError(tag)


def main(name: str, folder: Path) -> None:
    torch.set_num_threads(1)
    with Ledger.open(ledger_path(folder, name), population=name, budget=BUDGET) as ledger:
        party = participant(folder, name, ledger)
        agreement = decode_agreement((folder / "agreement.json").read_text())
        while True:
            try:
                tag, payload = read_frame(sys.stdin.buffer)
            except EOFError:
                return
            head, _, data = payload.partition(b"\n")
            place = json.loads(head)
            context = RoundContext(agreement=agreement, round=place["round"], history=bytes.fromhex(place["history"]))
            try:
                result = answer(party, tag, context, data)
            except PrivFedError as error:
                write_frame(sys.stdout.buffer, Tag.REFUSED, f"{type(error).__name__}: {error}".encode())
            else:
                write_frame(sys.stdout.buffer, Tag.DONE, result)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
