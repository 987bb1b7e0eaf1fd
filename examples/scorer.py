"""Scores transactions with the model that `privfed simulate log.csv --out run1` saved: `scorer.py run1/model.npz log.csv`."""

import sys
from pathlib import Path

import numpy as np
import torch

import privfed as pf

if len(sys.argv) != 3 or not sys.argv[1].endswith(".npz"):
    raise SystemExit("expected two files: scorer.py run1/model.npz log.csv")
path, log = sys.argv[1:]
if missing := [file for file in (path, log) if not Path(file).is_file()]:
    raise SystemExit(f"there is no file {' and no file '.join(missing)}")
with np.load(path) as saved:
    tensors = {name: torch.from_numpy(saved[name]) for name in saved.files}  # named as torch names them
feature_set = next(known for known in (pf.PRE, pf.NOBAL) if len(known.columns) == tensors["0.weight"].shape[1])
model = pf.mlp(len(feature_set.columns), hidden=(64, 48))  # what privfed simulate trains
model.load_state_dict(tensors)

try:
    samples = pf.features(pf.load_paysim(log), feature_set)
except pf.PrivFedError as error:
    raise SystemExit(f"refused: {error}") from None
with torch.inference_mode():
    suspicion = model(torch.tensor(samples.features))[:, 0].numpy()  # higher is more suspicious; a rank, no probability
worst = np.argsort(-suspicion)[:20]
for row in worst:
    print(f"line {row + 2}: {suspicion[row]:.2f}")  # of the file, whose first line is the header
print("frauds among the 20 most suspicious:", int(samples.labels[worst].sum()))
