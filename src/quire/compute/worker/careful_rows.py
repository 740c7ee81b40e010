"""CarefulRows: the rows of which a step must look at each token by itself.

A row is careful if what it draws depends on more than its logits (rules, grammars, beams), or if more is wanted than
the token (log-probabilities). Steps ahead and the short way for decodes are for the others.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.core.step import RowStart, StepPlan


class CarefulRows:
    """Keeps which rows are careful, as requests take rows and leave them."""

    def __init__(self) -> None:
        self._rows: set[int] = set()

    def apply(self, plan: StepPlan) -> None:
        """Note who leaves a row and who takes one. Mutates."""
        self._rows.difference_update(plan.released_rows)
        for start in plan.row_starts:
            self._rows.discard(start.row)
            if _is_careful(start):
                self._rows.add(start.row)

    def isdisjoint(self, rows: Iterable[int]) -> bool:
        """Return whether none of some rows is careful. Does not mutate."""
        return self._rows.isdisjoint(rows)


def _is_careful(start: RowStart) -> bool:
    sampling = start.sampling
    has_reports = sampling.logprobs is not None or bool(start.num_prompt_logits)
    return sampling.has_rules or sampling.grammar is not None or sampling.beam_search or has_reports
