"""MovingCost: another cost model, plus the time that blocks take to the host and back.

It is for what-if questions: steps that were recorded without swapping do not show how long a swap takes.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.core.step import StepPlan
from quire.simulate.cost.base import StepCost


@dataclass(frozen=True, slots=True)
class MovingCost:
    """The times of `resting`, plus a time for each block that moves.

    >>> from quire.core.step import BlockMove, column
    >>> from quire.simulate.cost.linear import LinearCost
    >>> moves = (BlockMove(3, 0), BlockMove(4, 1))
    >>> plan = StepPlan(7, column(0), column(0), column(10), column(1), moves_out=moves)
    >>> MovingCost(LinearCost(1.0, 0.0), s_per_block=0.25).step_s(plan)
    1.5
    """

    resting: StepCost
    s_per_block: float

    def step_s(self, plan: StepPlan) -> float:
        """Return the seconds that the plan takes. Does not mutate."""
        return self.resting.step_s(plan) + self.s_per_block * (len(plan.moves_in) + len(plan.moves_out))
