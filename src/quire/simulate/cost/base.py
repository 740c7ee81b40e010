"""StepCost: the protocol of cost models."""

from __future__ import annotations

from typing import Protocol

from quire.core.step import StepPlan


class StepCost(Protocol):
    """Predicts the time of a step."""

    def step_s(self, plan: StepPlan) -> float:
        """Return the seconds that the plan takes. Does not mutate."""
        ...
