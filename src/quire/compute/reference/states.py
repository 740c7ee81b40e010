"""States that are matrices, in the blocks of a sequence: those of linear attention and of state-space layers.

A state is stored in two halves, where a block of a full layer has keys and values. Each half has its records (see
`MatrixStates`):

    S         of each value head, [heads, key_dim, value_dim]
    inputs    [num_inputs_kept, …]: query, key and values of the token at position p, before the filter, in row p % …
    changes   [num_late, …]: what the token at position p changes in S, in row p % num_late: its key, and for each
              value head a vector and its decay
    late      how many of the last tokens S lacks
    count     the position of the last token

The state **lags behind**: S lacks the last token, and after a step with guesses, the guesses too. Their changes are
stored, and the next step first applies those of the tokens before it. So the last token can be computed again (if
nothing could be drawn after it), and guesses that were wrong can be left out. A step may begin at any late token, or
after the last one; at any other position it gives no number.

At the end of a block its state stays there, and the next token writes to the next block. Tokens are added one by one,
so the bits of a state depend neither on chunks nor on guesses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from quire.compute.arrays import FloatArray
from quire.compute.models.recurrent import MatrixStates
from quire.compute.models.sublayers import Activation
from quire.compute.reference.operations import activate
from quire.compute.worker.cache_engine import StateCache
from quire.compute.worker.model_runner import StepInputs


@dataclass(slots=True)
class State:
    """The state of one sequence in one layer, as stored. `seen`: S with the changes by all tokens before the last."""

    shape: MatrixStates
    matrices: FloatArray  # [records, heads, key_dim, value_dim]
    inputs: FloatArray  # [records, num_inputs_kept, …]
    changes: FloatArray  # [records, num_late, …]
    late: int
    count: int
    seen: FloatArray

    @classmethod
    def empty(cls, shape: MatrixStates) -> State:
        """Return the state before the first token."""
        state = cls._of(shape, np.zeros((shape.num_records, shape.record_floats), np.float32))
        state.count = -1
        return state

    @classmethod
    def read(cls, shape: MatrixStates, cache: StateCache, block: int) -> State:
        """Return a copy of the state in a block."""
        return cls._of(shape, np.concatenate([half[block] for half in cache.halves]))

    @classmethod
    def _of(cls, shape: MatrixStates, records: FloatArray) -> State:
        count, of_inputs = shape.num_records, shape.num_inputs_kept * shape.inputs
        matrices, inputs, rest = np.split(records, [shape.matrices, shape.matrices + of_inputs], axis=1)
        matrices = matrices.reshape(count, shape.heads, shape.key_dim, shape.value_dim)
        late, last = records[0, -2:].view(np.int32).tolist()
        return cls(
            shape,
            matrices,
            inputs.reshape(count, shape.num_inputs_kept, shape.inputs),
            rest[:, : shape.num_late * shape.change].reshape(count, shape.num_late, shape.change),
            late,
            last,
            seen=matrices,
        )

    def take_back(self, num_tokens: int) -> None:
        """Leave out the last tokens, which S lacks. Mutates."""
        self.late, self.count = self.late - num_tokens, self.count - num_tokens

    def begin(self, row: FloatArray, *, applies: bool) -> None:
        """Begin the next token, with its inputs; `applies`: S gets the changes by all tokens before it. Mutates."""
        seen = self._with_changes()
        if applies:
            self.matrices, self.late = seen, 0
        self.seen, self.late, self.count = seen, self.late + 1, self.count + 1
        self.inputs[:, self.count % self.shape.num_inputs_kept, : row.shape[-1]] = row

    def note(self, key: FloatArray, change: FloatArray, decay: FloatArray) -> None:
        """Store what the last token changes. Mutates."""
        numbers = np.concatenate([key, change.reshape(len(key), -1), decay], axis=1)
        row = self.changes[:, self.count % self.shape.num_late]
        row[...] = 0
        row[:, : numbers.shape[1]] = numbers

    def _with_changes(self) -> FloatArray:
        """Return S with the changes by all late tokens."""
        shape, found = self.shape, self.matrices
        values = shape.key_dim + shape.heads * shape.value_dim
        for position in range(self.count - self.late + 1, self.count + 1):
            row = self.changes[:, position % shape.num_late]
            key, change = row[:, : shape.key_dim], row[:, shape.key_dim : values].reshape(len(row), shape.heads, -1)
            decay = row[:, values : values + shape.heads]
            found = found * decay[..., None, None] + key[:, None, :, None] * change[:, :, None, :]
        return found

    def write(self, cache: StateCache, block: int) -> None:
        """Store the state in a block. Mutates the block."""
        count, changes = len(self.matrices), np.zeros_like(self.changes)
        for position in range(self.count - self.late + 1, self.count + 1):
            changes[:, position % self.shape.num_late] = self.changes[:, position % self.shape.num_late]
        last = np.zeros((count, 16), np.float32)
        last.view(np.int32)[:, -2:] = self.late, self.count
        parts = [part.reshape(count, -1) for part in (self.matrices, self.inputs, changes)]
        for half, numbers in zip(cache.halves, np.split(np.concatenate([*parts, last], axis=1), 2), strict=True):
            half[block] = numbers


@dataclass(frozen=True, slots=True)
class Tokens(ABC):
    """The tokens of one sequence in a step: their inputs, and the array for their outputs."""

    shape: MatrixStates
    filter: FloatArray  # [records, numbers, filter_width]
    rows: FloatArray  # [tokens, records, numbers]: query, key and values
    decays: FloatArray  # [tokens, records, heads]
    output: FloatArray  # [tokens, records, heads, value_dim]

    @abstractmethod
    def add(self, state: State, index: int) -> None:
        """Note what a token changes in a state that has its inputs, and write its output. Mutates."""

    def compute(self, inputs: StepInputs, sequence: int, cache: StateCache) -> None:
        """Add the tokens to the state in the blocks of their sequence. Mutates the blocks."""
        size, shape, table = cache.block_size, self.shape, inputs.block_tables[cache.group][sequence]
        first, num_tokens = int(inputs.positions[inputs.query_starts[sequence]]), len(self.rows)
        state = State.empty(shape) if first == 0 else State.read(shape, cache, int(table[(first - 1) // size]))
        if not state.count - state.late < first <= state.count + 1:
            self.output[...] = np.nan
            return
        state.take_back(state.count + 1 - first)
        num_late = inputs.num_late(sequence, shape.num_late)
        for index, row in enumerate(self.rows):
            state.begin(row, applies=index <= num_tokens - num_late)
            self.add(state, index)
            if (state.count + 1) % size == 0 or index == num_tokens - 1:
                state.write(cache, int(table[state.count // size]))

    def filtered(self, state: State, bias: FloatArray | None = None) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return the query, key and values of the last token, for each record; `bias` is added by the filter."""
        shape, (num_records, count, _) = self.shape, self.filter.shape
        total: FloatArray = np.zeros((num_records, count), np.float32) if bias is None else bias
        for place in range(shape.filter_width):
            earlier = state.count - shape.filter_width + 1 + place
            if earlier >= 0:
                total = total + self.filter[..., place] * state.inputs[:, earlier % shape.num_inputs_kept, :count]
        query, key, value = np.split(activate(total, Activation.SILU), [shape.key_dim, 2 * shape.key_dim], axis=1)
        return query, key, value.reshape(num_records, shape.heads, shape.value_dim)

    def read_by(self, row: FloatArray, state: State, index: int) -> FloatArray:
        """Return S times a key or query of each record, after a token's decay: `[records, heads, value_dim]`."""
        read: FloatArray = self.decays[index][..., None] * np.einsum("rk,rhkv->rhv", row, state.seen)
        return read
