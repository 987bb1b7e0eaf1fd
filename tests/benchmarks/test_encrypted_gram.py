from dataclasses import replace

import pytest

from benchmarks.encrypted_gram import measure_all, missed, ours
from privfed.he.product_params import ProductParams
from privfed.he.sketch import standard_error


@pytest.fixture(scope="module")
def costs():
    return measure_all(clients=3, sizes=(9000,))


def test_every_way_is_measured_and_only_what_is_scaled_says_so(costs):
    assert [cost.way for cost in costs if cost.extrapolated] == ["TenSEAL dot()"]
    assert len(costs) == 6


def test_errors_are_those_that_are_stated(costs):
    exact = ProductParams.exact(bound=2.0)
    for cost in costs:
        if cost.way.startswith("exact"):
            assert 0 < cost.error <= 2 * exact.scalar_error(9000)  # the largest inner product is about 1
        elif cost.way.startswith("sketch"):
            assert 1e-6 < cost.error <= 6 * standard_error(1.0, 1.0, 1.0)


def test_bytes_of_a_round_are_counted(costs):
    params = ProductParams.exact(bound=2.0)
    masked, own = costs[0], costs[1]
    assert masked.bytes_up == 3 * params.fresh_chunk_bytes
    assert masked.bytes_scoring == 6 * params.product_bytes
    assert own.bytes_scoring == 3 * masked.bytes_up
    held = costs[-2]
    assert held.bytes_scoring == 3 * held.bytes_up == 3 * 3 * ProductParams.escrow().sum_chunk_bytes
    assert masked.bytes_keys == 0 < costs[-1].bytes_keys


def test_a_missed_requirement_is_named():
    (cost, _) = ours(clients=2, size=100, sketch=False)
    slow = replace(cost, clients=10, size=100_000, server_seconds=5.0, error=1e-3)
    assert len(missed([slow])) == 2
    assert missed([replace(slow, server_seconds=0.5, error=1e-9), cost]) == []
