"""Plans of small deployments."""

from pathlib import Path

SITE = """
import torch
from privfed.training.model import mlp

def model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return mlp(8, hidden=(16,))
"""

PLAN = """
name = "fraud"
engine = "flare"
host = "localhost"
port = {port}
rounds = 3
site = "site.py"

[banks]
bank_a = 1.0
bank_b = 1.0
bank_c = 0.5
"""


def write_plan(folder: Path, *, port: int, site: str = SITE, plan: str = PLAN) -> Path:
    (folder / "site.py").write_text(site)
    (folder / "fraud.toml").write_text(plan.format(port=port))
    return folder / "fraud.toml"


PAYSIM_SITE = """
import time
import zlib
from pathlib import Path

import numpy as np
import torch

import privfed as pf
from privfed.training.randomness import _SeededRandomness

HERE = Path(__file__).parent
WEIGHTS = {"bank_a": 1.0, "bank_b": 1.0, "bank_c": 0.5}
BUDGET = pf.Budget(epsilon=8.0, delta=1e-6)
torch.set_num_threads(1)


def model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return pf.mlp(10, hidden=(32, 16))


loss = pf.BinaryCrossEntropy(positive_weight=20.0)


def client():
    name = (HERE / "party.txt").read_text().strip()
    transactions = pf.generate_transactions(rows=2000, fraud_rate=0.02, rng=np.random.default_rng(list(name.encode())))
    training = pf.DpSgd.for_budget(BUDGET, rounds=8, steps=5, max_records=3000, expected_batch_size=128, learning_rate=1.0)
    ledger = pf.Ledger.open(HERE / "ledger", population=name, budget=BUDGET)
    return pf.Client(name, pf.features(transactions, pf.PRE), training=training, ledger=ledger, weight=WEIGHTS.get(name, 1.0))


def _randomness(name, number):
    if (HERE / f"hold-{number}").exists():
        (HERE / "holding").touch()
    while (HERE / f"hold-{number}").exists():
        time.sleep(0.05)
    return _SeededRandomness(zlib.crc32(f"{name} {number}".encode()))
"""
