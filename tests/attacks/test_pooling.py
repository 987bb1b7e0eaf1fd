import numpy as np
import pytest

from privfed.attacks.pooling import certainty, pool_rows, whole_categories


def test_starts_that_found_the_same_rows_in_another_order_agree(table) -> None:
    rows, _ = table.batch(5)
    rng = np.random.default_rng(0)
    starts = np.stack([rows, *(rng.permutation(rows) for _ in range(7))])
    pooled = pool_rows(starts, best=0)
    np.testing.assert_allclose(pooled.rows, rows)
    np.testing.assert_allclose(pooled.spreads, 0, atol=1e-12)
    np.testing.assert_allclose(certainty(pooled, schema=table.schema, usual_spread=table.public.std(axis=0)), 1, atol=1e-6)


def test_starts_that_found_different_rows_are_unsure(table) -> None:
    starts = np.stack([table.batch(5, seed=seed)[0] for seed in range(8)])
    unsure = certainty(pool_rows(starts, best=0), schema=table.schema, usual_spread=table.public.std(axis=0))
    assert ((unsure >= 0) & (unsure < 0.5)).all()


@pytest.mark.parametrize("entries", [(1.0, 0.5), (0.5, 0.75)])
def test_even_shares_are_no_certainty_and_whole_ones_are(entries: tuple[float, float], generate_table) -> None:
    table = generate_table(numeric=0, categories=(2,), count=10)
    share, expected = entries[0], 1 - -(entries[0] * np.log2(entries[0]) + (1 - entries[0]) * np.log2(max(1 - entries[0], 1e-12)))
    pooled = pool_rows(np.array([[[share, 1 - share]]]), best=0)
    np.testing.assert_allclose(certainty(pooled, schema=table.schema, usual_spread=np.ones(2)), expected, atol=1e-9)


def test_the_largest_share_becomes_the_category_and_numbers_stay(table) -> None:
    rows, _ = table.batch(4)
    blurred = rows.copy()
    for block in table.schema.blocks:
        blurred[:, block] = 0.6 * rows[:, block] + 0.1
    np.testing.assert_array_equal(whole_categories(blurred, schema=table.schema), rows)
