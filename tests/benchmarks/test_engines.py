from dataclasses import replace

import numpy as np
import pytest

from benchmarks import engines
from benchmarks.engines import FLARE, FLOWER, ONE_PROCESS, THREADS, Outcome


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return engines.measure({"tiny": (16,)}, engines=(ONE_PROCESS, THREADS), rounds=3)


def test_the_run_with_folders_and_nodes_ends_in_the_model_of_the_run_in_one_process(outcomes: list[Outcome]) -> None:
    alone, threads = outcomes
    assert (alone.same, threads.same) == (None, True)
    assert alone.parameters == threads.parameters == 10 * 16 + 16 + 16 + 1
    assert engines.failures(outcomes) == []
    assert engines.failures([alone, replace(threads, same=False)]) == [f"{THREADS}, tiny: another model than in one process"]


def test_the_first_round_is_not_among_those_that_are_timed(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        assert len(outcome.rounds) == 2
        assert min(outcome.rounds) > 0 < outcome.start_seconds
    assert replace(outcomes[0], rounds=(1.0, 9.0, 2.0)).seconds == 2.0


def test_messages_hold_an_upload_of_each_bank_and_a_sum_to_each(outcomes: list[Outcome]) -> None:
    from privfed.he.params import SEED_BYTES, CkksParams

    for outcome in outcomes:
        # Three uploads with a seed each, and three sums with the seeds of all; what stands around them is below eight kB a bank.
        coordinates = outcome.parameters * CkksParams.standard().word_bytes
        encrypted = 3 * (coordinates + SEED_BYTES) + 3 * (coordinates + 3 * SEED_BYTES)
        assert encrypted < outcome.message_bytes < encrypted + 3 * 8192


def test_models_have_the_sizes_of_their_names() -> None:
    sizes = {}
    for name, (first, second) in engines.HIDDEN.items():
        sizes[name] = 10 * first + first + first * second + second + second + 1
    assert sizes == {"fraud": 3_873, "1M": 1_000_329, "10M": 10_003_027}


def test_the_page_has_a_row_for_each_run_and_says_how_it_was_made() -> None:
    fields = {"model": "1M", "parameters": 1_000_329, "rounds": (5.0, 7.0), "start_seconds": 9.0, "message_bytes": 80_000_000}
    found = [
        Outcome(engine=ONE_PROCESS, **fields),
        Outcome(engine=FLARE, **fields, loopback_bytes=10**9, server_megabytes=1234.0, bank_megabytes=567.0, same=True),
        Outcome(engine=FLOWER, **fields, same=False),
    ]
    text = engines.page(found, command="the command", rounds=3)
    assert "`the command` made this page" in text
    assert "1M has 1,000,329 parameters" in text
    assert "| 1M | one process | 6.0 | 9.0 | 80.0 | - | - | - | - |" in text
    assert "| 1M | FLARE | 6.0 | 9.0 | 80.0 | 1,000.0 | 1,234 | 567 | yes |" in text
    assert "| 1M | Flower | 6.0 | 9.0 | 80.0 | - | - | - | no |" in text


@pytest.mark.nightly
@pytest.mark.parametrize(("engine", "module"), [(FLARE, "nvflare"), (FLOWER, "flwr")])
def test_an_engine_ends_in_the_model_of_the_run_in_one_process_and_is_measured(engine: str, module: str) -> None:
    pytest.importorskip(module)
    alone, other = engines.measure({"tiny": (16,)}, engines=(ONE_PROCESS, engine), rounds=2)
    assert other.same is True
    assert other.loopback_bytes > other.message_bytes > 0
    assert other.server_megabytes > 0 < other.bank_megabytes
    assert np.isclose(alone.message_bytes, other.message_bytes, rtol=0.2)
