"""PooledRows: the rows whose text becomes a vector. See `quire.core.pooling`.

    step    hidden states after the final norm, of the last token or of all ──► sum of the row ──► vector at the end

A sum adds token after token in float64, so a vector has the same bits however the text was cut into steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from quire.compute.activations import Numbers
from quire.compute.arrays import FloatArray
from quire.compute.weights.classifier import Classifier
from quire.compute.weights.dense import Dense
from quire.compute.worker.model_runner import StepInputs
from quire.core.pooling import FIRST, LABELS, Pooling
from quire.core.step import StepPlan


@dataclass(slots=True)
class _Row:
    """The state of a row: the sum of the hidden states of its first `num_added` tokens; `kind`: those that count."""

    pooling: Pooling
    kind: str
    num_tokens: int
    num_added: int = 0
    sum: NDArray[np.float64] | None = None

    def wanted(self, start: int, count: int) -> range:
        """Return the positions of a step whose states are needed."""
        end = start + count
        if self.kind == FIRST:
            return range(start, 1)  # of a text in one step
        return range(start if self.kind == "mean" else max(start, self.num_tokens - 1), end)

    def add(self, states: FloatArray | Numbers, positions: range) -> None:
        """Add the states of the next positions. Mutates."""
        for position, state in zip(positions, states, strict=True):
            if self.kind != "mean" or position == 0:
                self.sum = state.astype(np.float64)
            elif self.sum is not None and position == self.num_added:
                self.sum += state
            self.num_added = self.num_tokens if self.kind == FIRST else position + 1

    def vector(self, classifier: Classifier | None, dense: Sequence[Dense]) -> bytes | None:
        """Return the vector, if all tokens were added."""
        if self.sum is None or self.num_added < self.num_tokens:
            return None
        num_summed = self.num_tokens if self.kind == "mean" else 1
        if self.pooling.kind == LABELS and classifier is not None:
            return classifier.shares(self.sum / num_summed).astype("<f4").tobytes()
        if dense:
            vector = (self.sum / num_summed).astype(np.float32)
            for layer in dense:
                vector = layer(vector)
            self.sum = vector.astype(np.float64)
        kept = self.sum[: self.pooling.dimensions or len(self.sum)]
        length = float(np.sqrt(np.add.reduce(kept * kept)))
        return (kept / length if length else kept).astype("<f4").tobytes()


class PooledRows:
    """The pooled rows of a worker, and their sums. `classifier`: of a model with labels. `dense`: layers of others."""

    def __init__(self, classifier: Classifier | None, dense: Sequence[Dense]) -> None:
        self._classifier, self._dense = classifier, dense
        self._rows: dict[int, _Row] = {}

    def apply(self, plan: StepPlan) -> None:
        """Note which requests leave and take rows. Mutates."""
        for row in plan.released_rows:
            self._rows.pop(row, None)
        for start in plan.row_starts:
            self._rows.pop(start.row, None)
            if start.pooling is not None:
                self._rows[start.row] = _Row(start.pooling, self._kind_of(start.pooling), len(start.tokens))

    def _kind_of(self, pooling: Pooling) -> str:
        """Return the tokens whose states count."""
        of_labels = "last" if self._classifier is None else self._classifier.pooling
        return of_labels if pooling.kind == LABELS else pooling.kind

    def with_states(self, plan: StepPlan, inputs: StepInputs) -> StepInputs:
        """Return the inputs of a step with the tokens whose hidden states are needed. Does not mutate."""
        if not self._rows:
            return inputs
        indices = [
            int(inputs.query_starts[sequence]) + position - plan.starts[entry]
            for sequence, entry in enumerate(inputs.entries)
            for position in self._wanted(plan, entry)
        ]
        return replace(inputs, state_indices=np.array(indices, np.int64)) if indices else inputs

    def vectors(self, plan: StepPlan, inputs: StepInputs, states: FloatArray) -> dict[int, bytes]:
        """Add the hidden states of a step; return the vectors of rows that are now complete. Mutates."""
        found: dict[int, bytes] = {}
        first = 0
        for entry in inputs.entries if self._rows else ():
            positions = self._wanted(plan, entry)
            if not positions:
                continue
            row = plan.rows[entry]
            own: FloatArray | Numbers = states[first : first + len(positions)]
            if self._rows[row].pooling.kind == LABELS and self._classifier is not None:
                own = self._classifier.before_pooling(own)
            self._rows[row].add(own, positions)
            first += len(positions)
            vector = self._rows[row].vector(self._classifier, self._dense)
            if vector is not None:
                found[row] = vector
        return found

    def _wanted(self, plan: StepPlan, entry: int) -> range:
        row = self._rows.get(plan.rows[entry])
        return range(0) if row is None else row.wanted(plan.starts[entry], plan.counts[entry])
