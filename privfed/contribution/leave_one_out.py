"""Leave-one-out: what is lost when one client alone is missing. Two clients that send the same thing both look dispensable."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

from privfed.aggregation.gram import Gram
from privfed.aggregation.mixture import Mixture
from privfed.contribution.trajectory import TrajectoryGame, added, positive_mixture
from privfed.errors import LayoutMismatchError
from privfed.update import PlainVector


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveOneOut:
    """Mean of the updates, weighted by each client's cumulative leave-one-out value, where that is positive.

    Args:
        game: What a coalition of this round is worth.
    """

    needs_gram: ClassVar[Literal[True]] = True

    game: TrajectoryGame = field(default_factory=TrajectoryGame)

    @property
    def needs_reference(self) -> bool:
        """It does."""
        return True

    @property
    def name(self) -> str:
        """Canonical name. Public."""
        return f"LeaveOneOut({self.game.name})"

    def scores(self, gram: Gram) -> dict[str, float]:
        """Worth of all minus worth of all others, for each client in this round alone.

        Raises:
            ValueError: If there is no reference, or it is zero.
        """
        game = self.game.of(gram)
        count = game.clients
        if count == 1:
            return {gram.names[0]: game.whole - game.empty}
        square = game.products.sum() - 2 * game.products.sum(axis=1) + np.diag(game.products)
        others = game.utility.value(np.maximum(square, 0.0), game.linear.sum() - game.linear, count - 1)
        return dict(zip(gram.names, (game.whole - others).tolist(), strict=True))

    def step(self, scores: Mapping[str, float], gram: Gram) -> tuple[dict[str, float], Mixture]:
        """See `CumulativeRule.step`. If no participant has a positive score, all count alike.

        Raises:
            ValueError: If there is no reference, or it is zero.
        """
        after = added(scores, self.scores(gram))
        return after, positive_mixture(after, gram)


def leave_one_out_by_utility(updates: Mapping[str, PlainVector], utility: Callable[[PlainVector], float]) -> dict[str, float]:
    """Utility of the mean of all updates minus that of the mean of all others, for each client: for simulations, in the clear.

    Args:
        updates: Updates of one layout, by client, at least two.
        utility: What a movement of the model is worth, for example minus the loss on validation records after it. Finite.

    Raises:
        ValueError: If there are fewer than two clients, or a utility is NaN or infinite.
        LayoutMismatchError: If layouts differ.
    """
    if len(updates) < 2:
        raise ValueError(f"expected at least 2 clients, got {len(updates)}")
    if len({vector.layout for vector in updates.values()}) > 1:
        raise LayoutMismatchError("expected updates of one layout, got different ones; nothing was evaluated")
    values = {name: vector.values for name, vector in updates.items()}
    layout = next(iter(updates.values())).layout
    whole = np.sum(list(values.values()), axis=0)

    def worth(total: np.ndarray, count: int) -> float:
        worth = utility(PlainVector(layout=layout, values=total / count))
        if not np.isfinite(worth):
            raise ValueError("expected a finite utility, got NaN or infinity")
        return worth

    of_all = worth(whole, len(updates))
    return {name: of_all - worth(whole - update, len(updates) - 1) for name, update in values.items()}
