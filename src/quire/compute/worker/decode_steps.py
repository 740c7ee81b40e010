"""DecodeSteps: the short way to build the arrays of a step that only decodes, as most steps do.

    a plan of plain decodes only ──► arrays by row, without a loop over entries ──► ModelRunner.run
    any other plan               ──► InputBatch.build

In a plain decode a row computes its last token and draws one, from its logits only. So every column of the step's
arrays follows from `rows` and `starts`, and Python only looks up one token per row. Everything else takes the long
way: rules, grammars, beams, reports, drafts, a row that has failed, a plan that is wrong. Both ways build the same
arrays.
"""

from __future__ import annotations

import numpy as np

from quire.compute.arrays import IntArray
from quire.compute.worker.careful_rows import CarefulRows
from quire.compute.worker.input_batch import InputBatch
from quire.compute.worker.model_runner import NO_COORDINATES, NO_INDICES, NO_STATES, StepInputs
from quire.core.step import StepPlan


class DecodeSteps:
    """Builds the arrays of steps with plain decodes only."""

    def __init__(self, careful: CarefulRows) -> None:
        self._careful = careful
        self._counting = np.arange(1, dtype=np.int64)

    def build(self, plan: StepPlan, batch: InputBatch) -> StepInputs | None:
        """Return the arrays of a step, None if it must take the long way. Mutates only a cache."""
        count = len(plan.rows)
        if plan.num_decodes != count or not count or not self._careful.isdisjoint(plan.rows):
            return None
        rows, starts = np.array(plan.rows, np.int64), np.array(plan.starts, np.int64)
        token_ids = batch.last_tokens(plan)
        tables = None if token_ids is None else batch.decode_tables(rows, starts)
        if token_ids is None or tables is None:
            return None
        slots, block_tables = tables
        counting = self._count_to(count)
        return StepInputs(
            entries=tuple(range(count)),
            query_starts=counting,
            token_ids=token_ids,
            positions=starts,
            slots=slots,
            block_tables=block_tables,
            logit_starts=counting,
            logit_indices=counting[:-1],
            rows=rows,
            state_indices=NO_INDICES,  # the defaults, named: without a call for each
            given=NO_INDICES,
            given_rows=NO_STATES,
            coordinates=NO_COORDINATES,
            ends_seen=NO_INDICES,
        )

    def _count_to(self, count: int) -> IntArray:
        """Return 0 … count; the array is shared, so callers must not change it."""
        if len(self._counting) != count + 1:
            self._counting = np.arange(count + 1, dtype=np.int64)
        return self._counting
