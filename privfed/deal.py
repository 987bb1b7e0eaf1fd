"""Who gets which record in a simulation: a quarter is set aside for evaluation, and the others are dealt to banks.

`privfed simulate` and `privfed partition` deal alike: the same file, banks, alpha and seed give the same banks.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from privfed.data.partition import Partition, dirichlet_partition
from privfed.data.paysim import grouped_split
from privfed.data.samples import Samples
from privfed.errors import UnsupportedDataError

TEST_SHARE = 0.25
"""Share of every class that no bank gets: the model is evaluated on it after each round."""

SMALLEST_SHARE = 0.1
"""Every bank gets at least this fraction of an even share of the records, and one fraud: less would be nothing but noise."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Deal:
    """Records that were dealt. Private where the data are.

    Args:
        test: What was set aside.
        banks: What each bank got, by its name, in order.
        partition: The same as positions in what was not set aside, and what the guards did.
        alpha: Concentration of the Dirichlet distribution.
    """

    test: Samples
    banks: Mapping[str, Samples]
    partition: Partition
    alpha: float

    @property
    def repairs(self) -> str | None:
        """What the guards did to the banks, in words; None if they did nothing."""
        redraws, moved = self.partition.redraws, self.partition.moved
        if not redraws and not moved:
            return None
        done: list[str] = []
        if redraws:
            done.append(f"the shares were drawn anew {'once' if redraws == 1 else f'{redraws} times'}")
        if moved:
            done.append(f"{moved:,} records were moved")
        return (
            f"so that every bank has a fraud and a tenth of an even share, {' and then '.join(done)}: the banks differ less than alpha "
            f"{self.alpha:g} alone would make them"
        )


def deal(samples: Samples, *, banks: int, alpha: float, seed: int) -> Deal:
    """Sets records aside and deals the others. Only labels and groups decide, so features may be any.

    Args:
        samples: All records.
        banks: Number of banks, at least 1.
        alpha: Concentration of the Dirichlet distribution, above 0; small makes the banks differ much.
        seed: Decides who gets what, from 0.

    Raises:
        UnsupportedDataError: If there are too few records or frauds for so many banks. Nothing was dealt.
        ValueError: If an argument is out of its range.
    """
    rng = np.random.default_rng(seed)
    train, test = grouped_split(samples, test_share=TEST_SHARE, rng=rng)
    groups = np.arange(len(train)) if train.groups is None else train.groups
    if np.unique(groups[train.labels > 0]).size < banks:
        raise UnsupportedDataError(
            f"the table has too few frauds for {banks} banks: each needs one, after a quarter was set aside; nothing was dealt or trained; "
            "use more data or fewer banks"
        )
    smallest = max(1, int(SMALLEST_SHARE * len(train) / max(banks, 1)))
    partition = dirichlet_partition(train, clients=banks, alpha=alpha, rng=rng, min_samples=smallest, min_positive=1)
    width = len(str(banks))
    names = [f"bank_{number:0{width}}" for number in range(1, banks + 1)]
    return Deal(test=test, banks=dict(zip(names, partition.split(train), strict=True)), partition=partition, alpha=alpha)
