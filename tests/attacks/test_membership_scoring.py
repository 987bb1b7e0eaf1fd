import numpy as np
import pytest

from privfed.attacks.membership_scoring import MembershipScore, score_membership


def test_a_perfect_attack_finds_everybody() -> None:
    members = np.arange(3000) < 500
    assert score_membership(members.astype(float), members) == MembershipScore(area=1.0, found_at_1_percent=1.0, found_at_1_per_mille=1.0)


def test_a_coin_scores_as_the_baseline() -> None:
    rng = np.random.default_rng(0)
    members = np.arange(40_000) < 20_000
    score = score_membership(rng.random(40_000), members)
    # Standard errors: 0.003 of the area, 0.001 and 0.0003 of the shares.
    assert score.area == pytest.approx(0.5, abs=0.012)
    assert score.found_at_1_percent == pytest.approx(0.01, abs=0.004)
    assert score.found_at_1_per_mille == pytest.approx(0.001, abs=0.0013)


def test_scores_that_are_all_equal_accuse_nobody() -> None:
    members = np.arange(100) < 50
    assert score_membership(np.ones(100), members) == MembershipScore(area=0.5, found_at_1_percent=0.0, found_at_1_per_mille=0.0)


def test_an_attack_that_is_worse_than_a_coin_is_shown_as_such() -> None:
    members = np.arange(100) < 50
    assert score_membership(-members.astype(float), members).area == 0.0


def test_no_more_than_the_allowed_share_is_accused() -> None:
    others = np.arange(200.0)
    members = np.array([197.5, 198.5, 199.5])
    score = score_membership(np.concatenate([members, others]), np.arange(203) < 3)
    # Two of 200 others may be accused: those with 198 and 199.
    assert score.found_at_1_percent == 1.0
    assert score.found_at_1_per_mille == pytest.approx(1 / 3)


@pytest.mark.parametrize("members", [np.ones(3, dtype=bool), np.zeros(3, dtype=bool), np.array([True, False])])
def test_scores_without_both_kinds_of_records_are_refused(members: np.ndarray) -> None:
    with pytest.raises(ValueError, match="some of them members"):
        score_membership(np.zeros(3), members)
