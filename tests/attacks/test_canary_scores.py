import numpy as np
import pytest
from scipy.spatial import ConvexHull

from privfed.attacks.canary_scores import CanaryScores


def test_corners_run_from_all_canaries_to_none() -> None:
    counts = CanaryScores(included=np.array([1.0, 2.0, 3.0]), excluded=np.array([0.0, 1.5])).counts
    assert counts.true_positives.tolist() == [3, 3, 2, 0]
    assert counts.false_positives.tolist() == [2, 1, 0, 0]


def test_corners_are_the_upper_hull_of_the_roc_curve() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        scores = CanaryScores(included=rng.normal(0.5, 1, size=40), excluded=rng.normal(size=60))
        counts = scores.counts
        every = np.append(np.concatenate([scores.included, scores.excluded]), np.inf)
        curve = np.array([[(scores.excluded >= t).sum(), (scores.included >= t).sum()] for t in every])
        hull = ConvexHull(np.vstack([curve, [60, 0]]))
        expected = {tuple(point) for point in hull.points[hull.vertices].astype(int)} - {(60, 0)}
        assert set(zip(counts.false_positives.tolist(), counts.true_positives.tolist(), strict=True)) == expected


def test_more_canaries_need_a_stricter_test() -> None:
    def looks(count: int) -> int:
        return CanaryScores(included=np.zeros(count), excluded=np.ones(count)).looks

    assert [looks(count) for count in (1, 4, 500)] == [2, 6, 20]
    # Where the curve has more corners than that, their number counts.
    grid = np.linspace(0, 1, 1000)
    assert CanaryScores(included=np.sqrt(grid), excluded=grid).looks > 2 * np.log2(2000)


@pytest.mark.parametrize("broken", [np.zeros(0), np.array([1.0, np.nan]), np.array([np.inf]), np.zeros((2, 2))])
def test_scores_that_are_missing_or_not_finite_are_refused(broken: np.ndarray) -> None:
    for kinds in ({"included": broken, "excluded": np.zeros(1)}, {"included": np.zeros(1), "excluded": broken}):
        with pytest.raises(ValueError, match="at least one finite score"):
            CanaryScores(**kinds)
