from collections.abc import Callable
from dataclasses import replace

import numpy as np

from privfed.attacks.facts import AdaptiveOptimizer
from privfed.attacks.observation import CiphertextOnly, NotApplicable, Observation, Reconstruction
from privfed.attacks.quotients import quotients
from privfed.attacks.scoring import match_rows, mean_rows
from privfed.update import PlainVector
from tests.attacks.conftest import Table


def cells_right(found: Reconstruction | NotApplicable, truth: np.ndarray, table: Table) -> float:
    assert isinstance(found, Reconstruction)
    baseline = mean_rows(table.public, schema=table.schema, count=len(truth))
    return float(match_rows(found.rows, truth, schema=table.schema, tolerance=0.05, baseline=baseline).right.mean())


def test_without_noise_it_reads_the_rows_that_a_neuron_has_to_itself(table: Table, observe: Callable[..., Observation]) -> None:
    rows, labels = table.batch(4)
    found = quotients(observe(rows, labels, table.schema))
    assert cells_right(found, rows, table) > 0.95


def test_under_noise_it_still_speaks_and_says_possible_records(table: Table, observe: Callable[..., Observation]) -> None:
    rows, labels = table.batch(4)
    observation = observe(rows, labels, table.schema)
    noise = PlainVector(layout=observation.layout, values=np.random.default_rng(0).normal(size=observation.layout.size))
    found = quotients(replace(observation, seen=noise))
    assert isinstance(found, Reconstruction)
    assert len(found.rows) == 4
    assert (found.rows >= table.schema.low).all()
    assert (found.rows <= table.schema.high).all()
    assert all((found.rows[:, block].sum(axis=1) == 1).all() for block in table.schema.blocks)
    assert cells_right(found, rows, table) < 0.6


def test_it_certifies_nothing_even_where_it_is_right(table: Table, observe: Callable[..., Observation]) -> None:
    found = quotients(observe(*table.batch(1), table.schema))
    assert isinstance(found, Reconstruction)
    assert not found.certified.any()
    assert len(found.rows) == 1


def test_an_update_of_zeros_gives_no_row(table: Table, observe: Callable[..., Observation]) -> None:
    observation = observe(*table.batch(4), table.schema)
    still = PlainVector(layout=observation.layout, values=np.zeros(observation.layout.size))
    found = quotients(replace(observation, seen=still))
    assert isinstance(found, Reconstruction)
    assert found.rows.shape == (0, table.schema.width)


def test_it_says_why_it_does_not_apply(table: Table, observe: Callable[..., Observation]) -> None:
    observation = observe(*table.batch(4), table.schema)
    adaptive = replace(observation.training, optimizer=AdaptiveOptimizer(name="Adam"))
    for changed in (replace(observation, seen=CiphertextOnly(bytes_seen=9)), replace(observation, training=adaptive)):
        assert isinstance(quotients(changed), NotApplicable)
    narrow = Table.generate(numeric=3, categories=(2,), count=5)
    reason = quotients(replace(observation, schema=narrow.schema))
    assert "5 columns" in str(reason)
