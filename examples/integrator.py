"""Three banks train one fraud model: made-up transactions, DP-SGD at each bank, encrypted updates."""

import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np

import privfed as pf

rng = np.random.default_rng(1)  # decides who gets which record; noise and keys take no seed
table = pf.generate_transactions(rows=20_000, fraud_rate=0.02, rng=rng)  # your own: pf.load_paysim("log.csv")
train, test = pf.grouped_split(pf.features(table, pf.PRE), test_share=0.25, rng=rng)
partition = pf.dirichlet_partition(train, clients=3, alpha=0.5, rng=rng, min_samples=2000, min_positive=20)

budget = pf.Budget(epsilon=4.0, delta=1e-5)  # for all rounds together, at each bank
training = pf.DpSgd.for_budget(budget, rounds=6, max_records=12_000, expected_batch_size=512, steps=30, learning_rate=1.0)

with ExitStack() as stack:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))  # real ledgers outlive the program
    clients = [
        pf.Client(name, data, training=training, ledger=stack.enter_context(pf.Ledger.open(folder / name, population=name, budget=budget)))
        for name, data in zip(["bank_a", "bank_b", "bank_c"], partition.split(train), strict=True)
    ]
    loss = pf.BinaryCrossEntropy(positive_weight=20.0)
    consortium = pf.Consortium(clients, keys=pf.SharedKey.generate(), loss=loss)
    history = pf.simulate(consortium, pf.mlp(len(train.columns), hidden=(64, 48)), rounds=6, evaluation=test)

print("PR-AUC per round:", [round(value, 3) for value in history.pr_auc], f"(guessing: {test.labels.mean():.3f})")
print("epsilon spent:   ", {name: round(value, 2) for name, value in history.epsilon.items()})
print(f"sent:             {history.bytes_up_per_parameter:.2f} bytes per parameter and round, encrypted")
