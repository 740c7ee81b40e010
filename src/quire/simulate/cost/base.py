"""StepCost: what a cost model is."""

from __future__ import annotations

from typing import Protocol

from quire.core.step import StepPlan


class StepCost(Protocol):
    """How long a step takes."""

    def step_s(self, plan: StepPlan) -> float:
        """Return the seconds that the plan takes. Does not mutate."""
        ...
