"""States that are matrices, in the blocks of a sequence: those of linear attention and of state-space layers.

A state is stored in two halves, where a block of a full layer has keys and values. Each half has its records (see
`MatrixStates`):

    S         of each value head, [heads, key_dim, value_dim]
    inputs    [filter_width, …]: query, key and values of the token at position p, before the filter, in row p % width
    change    what the last token changes in S: its key, and for each value head a vector and its decay
    count     how many tokens S contains

The state **lags behind by one token**: S contains all tokens but the last, whose change is stored. The next token
applies it first. So the last token can be computed again (if nothing could be drawn after it), which S alone would not
allow. A step may begin at `count` or one later; at any other position it gives no number.

At the end of a block its state stays there, and the next token writes to the next block. Tokens are added one by one,
so the bits of a state do not depend on chunks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from quire.compute.arrays import FloatArray, IntArray
from quire.compute.models.recurrent import MatrixStates
from quire.compute.models.sublayers import Activation
from quire.compute.reference.operations import activate
from quire.compute.worker.cache_engine import StateCache


@dataclass(slots=True)
class State:
    """The state of one sequence in one layer, as stored."""

    matrices: FloatArray  # [records, heads, key_dim, value_dim]
    inputs: FloatArray  # [records, filter_width, …]
    key: FloatArray  # [records, key_dim]
    change: FloatArray  # [records, heads, value_dim]
    decay: FloatArray  # [records, heads]
    count: int

    @classmethod
    def empty(cls, shape: MatrixStates) -> State:
        """Return the state before the first token."""
        return cls._of(shape, np.zeros((shape.num_records, shape.record_floats), np.float32))

    @classmethod
    def read(cls, shape: MatrixStates, cache: StateCache, block: int) -> State:
        """Return a copy of the state in a block."""
        return cls._of(shape, np.concatenate([half[block] for half in cache.halves]))

    @classmethod
    def _of(cls, shape: MatrixStates, records: FloatArray) -> State:
        count, heads = shape.num_records, shape.heads
        matrices, inputs, rest = np.split(
            records, [shape.matrices, shape.matrices + shape.filter_width * shape.inputs], axis=1
        )
        values = shape.key_dim + heads * shape.value_dim
        key, change, decay = np.split(rest[:, : values + heads], [shape.key_dim, values], axis=1)
        return cls(
            matrices.reshape(count, heads, shape.key_dim, shape.value_dim),
            inputs.reshape(count, shape.filter_width, shape.inputs),
            key,
            change.reshape(count, heads, shape.value_dim),
            decay,
            int(records[0, -1:].view(np.int32)[0]),
        )

    def apply(self) -> None:
        """Apply the change of the last token. Mutates."""
        self.matrices = (
            self.matrices * self.decay[..., None, None] + self.key[:, None, :, None] * self.change[:, :, None, :]
        )

    def read_by(self, row: FloatArray) -> FloatArray:
        """Return S times a key or query of each record, after forgetting: `[records, heads, value_dim]`."""
        known: FloatArray = self.decay[..., None] * np.einsum("rk,rhkv->rhv", row, self.matrices)
        return known

    def write(self, cache: StateCache, block: int) -> None:
        """Store the state in a block. Mutates the block."""
        count = len(self.matrices)
        parts = [part.reshape(count, -1) for part in (self.matrices, self.inputs, self.key, self.change, self.decay)]
        rest = cache.halves[0].shape[-1] - sum(part.shape[1] for part in parts)
        last = np.zeros((count, rest), np.float32)
        last.view(np.int32)[:, -1] = self.count
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
        """Note what a token changes in a state that has its inputs and its decay, and write its output. Mutates."""

    def compute(self, first: int, table: IntArray, cache: StateCache) -> None:
        """Add the tokens, from position `first` on, to the state in the sequence's blocks. Mutates the blocks."""
        size, shape = cache.block_size, self.shape
        state = State.empty(shape) if first == 0 else State.read(shape, cache, int(table[(first - 1) // size]))
        if state.count not in (first - 1, first):
            self.output[...] = np.nan
            return
        for index in range(len(self.rows)):
            position = first + index
            if state.count == position - 1:
                state.apply()
            state.count = position
            state.inputs[:, position % shape.filter_width, : self.rows.shape[-1]] = self.rows[index]
            state.decay = self.decays[index]
            self.add(state, index)
            if (position + 1) % size == 0 or index == len(self.rows) - 1:
                state.write(cache, int(table[position // size]))

    def filtered(self, state: State, bias: FloatArray | None = None) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return the query, key and values of the last token, for each record; `bias` is added by the filter."""
        shape, (num_records, count, _) = self.shape, self.filter.shape
        total: FloatArray = np.zeros((num_records, count), np.float32) if bias is None else bias
        for place in range(shape.filter_width):
            earlier = state.count - shape.filter_width + 1 + place
            if earlier >= 0:
                total = total + self.filter[..., place] * state.inputs[:, earlier % shape.filter_width, :count]
        query, key, value = np.split(activate(total, Activation.SILU), [shape.key_dim, 2 * shape.key_dim], axis=1)
        return query, key, value.reshape(num_records, shape.heads, shape.value_dim)
