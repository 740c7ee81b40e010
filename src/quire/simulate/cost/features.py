"""The numbers that a step's time depends on: the features of a fitted cost model."""

from __future__ import annotations

from typing import NamedTuple

from quire.core.step import StepPlan


class StepFeatures(NamedTuple):
    """The counts of a step.

    `num_read` counts the tokens whose keys and values are read, once for each row; `num_pairs` counts pairs of a token
    and one that it attends to. Both measure the lengths of contexts, the former for memory, the latter for arithmetic.
    """

    is_step: int
    num_tokens: int
    num_logits: int
    num_read: int
    num_pairs: int
    num_moved_blocks: int

    @classmethod
    def of(cls, plan: StepPlan) -> StepFeatures:
        """Return the features of a plan. Does not mutate; O(rows).

        >>> from quire.core.step import column
        >>> StepFeatures.of(StepPlan(0, column(0, 1), column(9, 0), column(1, 3), column(1, 0), num_decodes=1))
        StepFeatures(is_step=1, num_tokens=4, num_logits=1, num_read=13, num_pairs=16, num_moved_blocks=0)
        """
        num_tokens, num_decodes = plan.num_tokens, plan.num_decodes
        num_read = sum(plan.starts) + num_tokens
        num_pairs = sum(plan.starts[:num_decodes]) + num_decodes
        for start, count in zip(plan.starts[num_decodes:], plan.counts[num_decodes:], strict=True):
            num_pairs += count * start + count * (count + 1) // 2
        num_moved = len(plan.copies) + len(plan.moves_in) + len(plan.moves_out)
        return cls(1, num_tokens, sum(plan.samples), num_read, num_pairs, num_moved)
