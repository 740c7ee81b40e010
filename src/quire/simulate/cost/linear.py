"""LinearCost: a step takes a fixed time, plus a time per token, independent of the contexts."""

from __future__ import annotations

from dataclasses import dataclass

from quire.core.step import StepPlan


@dataclass(frozen=True, slots=True)
class LinearCost:
    """A fixed time per step and per token.

    >>> from quire.core.step import column
    >>> LinearCost(0.01, 0.001).step_s(StepPlan(0, column(0), column(0), column(5), column(1)))
    0.015
    """

    fixed_s: float = 0.02
    per_token_s: float = 0.0002

    def step_s(self, plan: StepPlan) -> float:
        """Return the seconds that the plan takes."""
        return self.fixed_s + self.per_token_s * plan.num_tokens
