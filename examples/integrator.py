"""Three banks train one fraud model: made-up transactions, DP-SGD at each bank, encrypted updates. Then the model scores."""

import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

import privfed as pf

torch.set_num_threads(1)  # batches of a small network are so short that more threads wait for each other
rng = np.random.default_rng(1)  # decides who gets which record; noise and keys take no seed
table = pf.generate_transactions(rows=20_000, fraud_rate=0.02, rng=rng)  # your own: pf.load_paysim("log.csv")
train, test = pf.grouped_split(pf.features(table, pf.PRE), test_share=0.25, rng=rng)
partition = pf.dirichlet_partition(train, clients=3, alpha=0.5, rng=rng, min_samples=2000, min_positive=20)

declared = {"bank_a": 7_000, "bank_b": 6_000, "bank_c": 3_000}  # most records that each may have: public, and not len(data)
budget = pf.Budget(epsilon=4.0, delta=1e-6)  # for all rounds together, at each bank; delta far below 1 / 7,000
recipe = {"rounds": 10, "steps": 100, "expected_batch_size": 512, "learning_rate": 2.0}

with ExitStack() as stack:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))  # real ledgers outlive the program
    clients = []
    for (name, records), data in zip(declared.items(), partition.split(train), strict=True):
        ledger = stack.enter_context(pf.Ledger.open(folder / name, population=name, budget=budget))
        clients.append(pf.Client(name, data, training=pf.DpSgd.for_budget(budget, max_records=records, **recipe), ledger=ledger))
    loss = pf.BinaryCrossEntropy(positive_weight=20.0)  # else frauds, one record in fifty, are hardly learnt
    consortium = pf.Consortium(clients, keys=pf.SharedKey.generate(), loss=loss)
    model = pf.mlp(len(train.columns), hidden=(64, 48))
    history = pf.simulate(consortium, model, rounds=recipe["rounds"], evaluation=test)

print("PR-AUC per round:", [round(value, 3) for value in history.pr_auc], f"(guessing: {test.labels.mean():.3f})")
print("epsilon spent:   ", {name: round(value, 2) for name, value in history.epsilon.items()})
print(f"sent:             {history.bytes_up_per_parameter:.2f} bytes per parameter and round, encrypted")

pf.load_values(model, history.model)  # from here on it is an ordinary torch module
with torch.inference_mode():
    suspicion = model(torch.tensor(test.features))[:, 0].numpy()
print("frauds among the 20 most suspicious:", int(test.labels[np.argsort(-suspicion)[:20]].sum()))
