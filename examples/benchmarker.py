"""What encryption costs: the same round in the clear and encrypted, timed by phase."""

import time

import numpy as np

import privfed as pf

rng = np.random.default_rng(1)
table = pf.generate_transactions(rows=6_000, fraud_rate=0.02, rng=rng)
samples = pf.features(table, pf.PRE)
banks = pf.dirichlet_partition(samples, clients=3, alpha=1.0, rng=rng, min_samples=500).split(samples)
# Without noise, so that both runs train the same updates and must open to the same model.
training = pf.NonPrivate(learning_rate=0.2, batch_size=256, steps=20, seed=0)
clients = [pf.Client(f"bank_{number}", data, training=training) for number, data in enumerate(banks)]
model = pf.mlp(len(samples.columns), hidden=(512, 256))

runs: dict[str, pf.History] = {}
for keys in (pf.Plaintext(), pf.SharedKey.generate()):
    consortium = pf.Consortium(clients, keys=keys)
    pf.simulate(consortium, model, rounds=1)  # what is done only once, such as loading libraries, is not timed
    start = time.perf_counter()
    run = pf.simulate(consortium, model, rounds=3)
    runs[run.mode] = run
    seconds = (time.perf_counter() - start) / len(run.rounds)
    phases = {phase: round(value, 4) for phase, value in run.rounds[-1].record.seconds.items()}
    print(f"{run.mode}: {seconds:.3f} s per round, last round by phase {phases}")
    print(f"  bytes per parameter: {run.bytes_up_per_parameter:.2f} up, {run.bytes_down_per_parameter:.2f} down")

plain, encrypted = runs["Plaintext"], runs["SharedKey"]
print(f"parameters: {encrypted.model.layout.size}")
print("same model, bit for bit:", bool((plain.model.values == encrypted.model.values).all()))
