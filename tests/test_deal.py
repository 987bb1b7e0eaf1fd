import numpy as np
import pytest

from privfed.data.paysim import NOBAL, PRE, features
from privfed.data.transactions import generate_transactions
from privfed.deal import deal
from privfed.errors import UnsupportedDataError

TABLE = generate_transactions(rows=4000, fraud_rate=0.03, rng=np.random.default_rng(1))


def test_a_quarter_of_each_class_is_set_aside_and_the_others_are_dealt():
    samples = features(TABLE, NOBAL)
    dealt = deal(samples, banks=4, alpha=0.5, seed=1)
    assert list(dealt.banks) == ["bank_1", "bank_2", "bank_3", "bank_4"]
    assert len(dealt.test) + sum(len(shard) for shard in dealt.banks.values()) == len(samples)
    frauds = int(samples.labels.sum())
    assert abs(int(dealt.test.labels.sum()) - frauds / 4) <= 2  # within a fraud's two legs
    assert int(dealt.test.labels.sum()) + sum(int(shard.labels.sum()) for shard in dealt.banks.values()) == frauds


def test_the_same_arguments_deal_alike_whatever_the_features_and_another_seed_does_not():
    first, again, other = (
        deal(features(TABLE, kind), banks=3, alpha=0.5, seed=seed).partition.indices for kind, seed in ((PRE, 1), (NOBAL, 1), (PRE, 2))
    )
    assert all(np.array_equal(own, same) for own, same in zip(first, again, strict=True))
    assert not all(np.array_equal(own, same) for own, same in zip(first, other, strict=True))


def test_every_bank_has_a_fraud_and_a_tenth_of_an_even_share_and_what_it_took_is_said():
    dealt = deal(features(TABLE, NOBAL), banks=6, alpha=0.05, seed=0)
    train = sum(len(shard) for shard in dealt.banks.values())
    assert all(shard.labels.any() and len(shard) >= train / 60 - 1 for shard in dealt.banks.values())
    assert dealt.partition.moved > 0
    assert f"drawn anew 100 times and then {dealt.partition.moved} records were moved" in dealt.repairs
    assert "less than alpha 0.05 alone" in dealt.repairs
    assert deal(features(TABLE, NOBAL), banks=3, alpha=100.0, seed=0).repairs is None


def test_too_few_frauds_for_the_banks_are_refused():
    with pytest.raises(UnsupportedDataError, match="too few frauds for 200 banks: .* nothing was dealt"):
        deal(features(TABLE, NOBAL), banks=200, alpha=0.5, seed=0)


@pytest.mark.parametrize("change", [{"banks": 0}, {"alpha": 0.0}, {"alpha": -1.0}, {"seed": -1}])
def test_an_argument_out_of_its_range_is_refused(change):
    with pytest.raises(ValueError, match=r"expected|non-negative"):
        deal(features(TABLE, NOBAL), **({"banks": 3, "alpha": 0.5, "seed": 0} | change))


def test_a_deal_shows_no_records():
    assert "Samples" not in repr(deal(features(TABLE, NOBAL), banks=3, alpha=0.5, seed=0))
