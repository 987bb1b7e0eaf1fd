"""What one bank knows: every bank gets a copy and completes it on its own disk. Nobody else runs it or sees it."""

from pathlib import Path

import numpy as np
import torch
from torch import nn

import privfed as pf

HERE = Path(__file__).parent
BUDGET = pf.Budget(epsilon=4.0, delta=1e-6)
loss = pf.BinaryCrossEntropy(positive_weight=20.0)  # else frauds, one record in fifty, are hardly learnt
RECORDS = 5_000  # most records that this bank may have: public, and not len(data)


def model() -> nn.Module:
    """The same at every bank: architecture and initial weights are agreed."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return pf.mlp(len(pf.PRE.columns), hidden=(64, 48))


def client() -> pf.Client:
    """This bank's data, ledger and training."""
    name = (HERE / "party.txt").read_text().strip()
    # Invented, so that everything can be tried at once. Your own: pf.load_paysim(HERE / "transactions.csv")
    transactions = pf.generate_transactions(rows=4_000, fraud_rate=0.02, rng=np.random.default_rng(list(name.encode())))
    training = pf.DpSgd.for_budget(BUDGET, rounds=3, steps=20, max_records=RECORDS, expected_batch_size=256, learning_rate=1.0)
    ledger = pf.Ledger.open(HERE / "ledger", population=name, budget=BUDGET)
    return pf.Client(name, pf.features(transactions, pf.PRE), training=training, ledger=ledger)
