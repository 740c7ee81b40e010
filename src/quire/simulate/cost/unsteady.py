"""UnsteadyCost: another cost model, on a machine whose speed varies.

    recorded steps   1.0 0.9 1.0 1.1 │ 1.0 4.8 1.3 1.2 │ 1.0 …      ratios of measured to fitted time, in their order
    simulated steps  └─ stretch 2 ─┘   └─ stretch 0 ─┘   …          random stretches of the record

A fit predicts the average time of steps, and so the throughput. But the slowest of a hundred first tokens is late
because a step was delayed, and delays come in series: another process runs, or the clock frequency drops. So the
recorded ratios are used in stretches, in the order of the record.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass

from quire.core.step import StepPlan
from quire.simulate.cost.base import StepCost

STRETCH = 200


@dataclass(frozen=True, slots=True)
class UnsteadyCost:
    """The times of `steady`, each multiplied by a recorded ratio, chosen by the seed and the number of the step.

    >>> from quire.core.step import column
    >>> from quire.simulate.cost.linear import LinearCost
    >>> plan = StepPlan(7, column(0), column(0), column(10), column(1))
    >>> steady = LinearCost()
    >>> UnsteadyCost(steady, array("d", [2.0]), seed=0).step_s(plan) == 2 * steady.step_s(plan)
    True
    """

    steady: StepCost
    ratios: array[float]
    seed: int

    def step_s(self, plan: StepPlan) -> float:
        """Return the seconds that the plan takes. Does not mutate."""
        stretch, place = divmod(plan.step_id, STRETCH)
        begin = random.Random(f"{self.seed} {stretch}").randrange(max(1, len(self.ratios) - STRETCH))
        return self.steady.step_s(plan) * self.ratios[(begin + place) % len(self.ratios)]
