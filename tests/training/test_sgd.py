import copy
import hashlib
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from privfed.training.loss import binary_cross_entropy
from privfed.training.mechanism import NonPrivate
from privfed.training.model import mlp, values_of
from privfed.training.objective import Correction, FedProx
from privfed.training.sgd import _batches, descend

torch.set_num_threads(1)
ROOT = Path(__file__).parents[2]
FEATURES = torch.arange(80.0).cos().view(20, 4)
LABELS = (torch.arange(20) % 3 == 0).long()


def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return mlp(4, hidden=(6,))


def trained(mechanism: NonPrivate, *, correction: Correction | None = None, round: int = 0) -> list[float]:
    module = model()
    descend(module, FEATURES, LABELS, mechanism=mechanism, loss=binary_cross_entropy, correction=correction, round=round)
    return values_of(module).values.tolist()


def test_one_full_batch_is_one_step_of_gradient_descent_on_the_mean_loss() -> None:
    module = model()
    binary_cross_entropy(module(FEATURES), LABELS).mean().backward()
    expected = torch.cat([(p - 0.5 * p.grad).detach().reshape(-1) for p in module.parameters() if p.grad is not None])
    # The rows come in another order, so sums round differently.
    assert trained(NonPrivate(learning_rate=0.5, batch_size=20, steps=1, seed=3)) == pytest.approx(expected.tolist(), abs=1e-6)


def test_each_pass_takes_every_record_at_most_once_and_all_when_the_batches_divide_them() -> None:
    mechanism = NonPrivate(learning_rate=0.5, batch_size=6, steps=8, seed=3)
    batches = list(_batches(18, mechanism=mechanism, round=0))
    assert [len(batch) for batch in batches] == [6] * 8
    for first in (0, 3):
        assert sorted(np.concatenate(batches[first : first + 3])) == list(range(18))
    uneven = list(_batches(20, mechanism=mechanism, round=0))
    assert all(len(batch) == 6 for batch in uneven)
    assert max(Counter(np.concatenate(uneven[:3]).tolist()).values()) == 1


def test_a_client_smaller_than_the_batch_uses_all_it_has() -> None:
    batches = list(_batches(5, mechanism=NonPrivate(learning_rate=0.5, batch_size=64, steps=3, seed=3), round=0))
    assert [sorted(batch) for batch in batches] == [list(range(5))] * 3


def test_training_is_the_same_bit_for_bit_for_one_seed_and_round_and_differs_for_others() -> None:
    mechanism = NonPrivate(learning_rate=0.5, batch_size=6, steps=5, seed=3)
    assert trained(mechanism, round=2) == trained(mechanism, round=2)
    others = [trained(mechanism, round=1), trained(NonPrivate(learning_rate=0.5, batch_size=6, steps=5, seed=4), round=2)]
    assert all(trained(mechanism, round=2) != other for other in others)


def test_training_is_the_same_bit_for_bit_in_another_process() -> None:
    code = f"""
import hashlib, runpy, torch
torch.manual_seed(99)
names = runpy.run_path({str(Path(__file__))!r})
values = names["trained"](names["NonPrivate"](learning_rate=0.5, batch_size=6, steps=20, seed=3), round=7)
print(hashlib.sha256(repr(values).encode()).hexdigest())
"""
    here = trained(NonPrivate(learning_rate=0.5, batch_size=6, steps=20, seed=3), round=7)
    there = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    assert there == hashlib.sha256(repr(here).encode()).hexdigest()


def test_training_neither_reads_nor_moves_the_global_generators() -> None:
    mechanism = NonPrivate(learning_rate=0.5, batch_size=6, steps=5, seed=3)
    torch.manual_seed(1)
    first = trained(mechanism)
    torch.manual_seed(2)
    torch_state, numpy_state = torch.random.get_rng_state(), np.random.get_state(legacy=False)  # noqa: NPY002
    assert trained(mechanism) == first
    assert torch.equal(torch_state, torch.random.get_rng_state())
    assert repr(numpy_state) == repr(np.random.get_state(legacy=False))  # noqa: NPY002


def test_fedprox_equals_the_proximal_term_in_the_loss() -> None:
    module = model()
    start = copy.deepcopy(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for _ in range(4):
        optimizer.zero_grad()
        proximal = sum((p - s.detach()).square().sum() for p, s in zip(module.parameters(), start.parameters(), strict=True))
        (binary_cross_entropy(module(FEATURES), LABELS).mean() + 0.8 / 2 * proximal).backward()
        optimizer.step()
    mechanism = NonPrivate(learning_rate=0.5, batch_size=20, steps=4, seed=3)
    expected = values_of(module).values.tolist()
    assert trained(mechanism, correction=FedProx(proximal_weight=0.8)) == pytest.approx(expected, abs=1e-5)
    assert trained(mechanism) != pytest.approx(expected, abs=1e-5)
