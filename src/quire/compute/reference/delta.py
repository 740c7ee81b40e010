"""Linear attention by the gated delta rule, over states in the blocks of a sequence (see `DeltaSpec`).

A state is stored in two halves, where a block of a full layer has keys and values. Each half has a record for each of
its key heads:

    S         of each value head, [heads per key, key_dim, value_dim]
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

from dataclasses import dataclass
from typing import Final

import numpy as np

from quire.compute.arrays import FloatArray, IntArray
from quire.compute.models.parts import Part
from quire.compute.models.sublayers import Activation, DeltaSpec
from quire.compute.reference.mlp import sigmoid
from quire.compute.reference.operations import activate, linear, normalize
from quire.compute.weights.decoder_weights import Parts
from quire.compute.worker.cache_engine import StateCache
from quire.compute.worker.model_runner import StepInputs

LENGTH_EPSILON: Final = np.float32(1e-6)


class DeltaAttention:
    """The linear attention of one layer."""

    def __init__(self, spec: DeltaSpec, parts: Parts) -> None:
        self._parts = parts
        self._spec = spec

    def attend(self, hidden: FloatArray, cache: StateCache, inputs: StepInputs) -> FloatArray:
        """Add the step's tokens to the states and return the output: `[num_tokens, hidden_size]`. Mutates."""
        spec, shape = self._spec, (len(hidden), self._spec.num_key_heads, -1)
        parts = Part.DELTA_QUERY, Part.DELTA_KEY, Part.DELTA_VALUE
        rows = np.concatenate([linear(hidden, self._parts[part]).reshape(shape) for part in parts], axis=-1)
        rates, decays = self._rates(hidden)
        output = np.empty((len(hidden), spec.num_key_heads, spec.heads_per_key, spec.value_dim), np.float32)
        for sequence in range(len(inputs.entries)):
            tokens = inputs.tokens_of(sequence)
            table = inputs.block_tables[cache.group][sequence]
            run = _Run(spec, self._filter(), rows[tokens], rates[tokens], decays[tokens], output[tokens])
            first, num_late = int(inputs.positions[tokens.start]), inputs.num_late(sequence, spec.num_late)
            run.compute(first, table, cache, num_late)
        gate = activate(linear(hidden, self._parts[Part.DELTA_GATE]), Activation.SILU)
        heads = output.swapaxes(1, 2) if spec.outputs_in_turns else output
        normed = normalize(heads, self._parts[Part.DELTA_NORM], spec.norm).reshape(gate.shape)
        return linear(normed * gate, self._parts[Part.DELTA_OUTPUT])

    def _rates(self, hidden: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the rate and the decay of each token and value head: `[num_tokens, key heads, heads per key]`."""
        shape = len(hidden), self._spec.num_key_heads, self._spec.heads_per_key
        rows = linear(hidden, self._parts[Part.DELTA_DECAY]) + self._parts[Part.DELTA_DECAY_OFFSET].weight
        softplus = np.logaddexp(0, rows, dtype=np.float64)
        speed = np.exp(self._parts[Part.DELTA_LOG_DECAY].weight, dtype=np.float64) * softplus
        rates = sigmoid(linear(hidden, self._parts[Part.DELTA_RATE]))
        return rates.reshape(shape), np.exp(-speed).astype(np.float32).reshape(shape)

    def _filter(self) -> FloatArray:
        """Return the filter by key head: `[key heads, numbers, filter_width]`."""
        spec, rows = self._spec, self._parts[Part.DELTA_FILTER].weight[:, 0]
        keys = spec.num_key_heads * spec.key_dim
        by_head = [part.reshape(spec.num_key_heads, -1, spec.filter_width) for part in np.split(rows, [keys, 2 * keys])]
        return np.concatenate(by_head, axis=1)


@dataclass(frozen=True, slots=True)
class _Run:
    """The tokens of one sequence in a step: their inputs, and the array for their outputs."""

    spec: DeltaSpec
    filter: FloatArray
    rows: FloatArray  # [tokens, key heads, numbers]
    rates: FloatArray
    decays: FloatArray
    output: FloatArray

    def compute(self, first: int, table: IntArray, cache: StateCache, num_late: int) -> None:
        """Add the tokens, from position `first` on, to the state in the sequence's blocks. Mutates the blocks.

        The stored matrices lack the last `num_late` tokens.
        """
        size, spec, num_tokens = cache.block_size, self.spec, len(self.rows)
        state = _State.empty(spec) if first == 0 else _State.read(spec, cache, int(table[(first - 1) // size]))
        if not state.count - state.late < first <= state.count + 1:
            self.output[...] = np.nan
            return
        state.take_back(state.count + 1 - first)
        for index in range(num_tokens):
            position = first + index
            if index <= num_tokens - num_late:
                state.apply_all()
            state.count, state.late = position, state.late + 1
            state.inputs[:, position % spec.num_inputs_kept, : self.rows.shape[-1]] = self.rows[index]
            self._add(state, index)
            if (position + 1) % size == 0 or index == num_tokens - 1:
                state.write(cache, int(table[position // size]))

    def _add(self, state: _State, index: int) -> None:
        """Note what a token changes, and write its output. Mutates."""
        query, key, value = self._filtered(state)
        decay, matrices = self.decays[index][..., None], state.with_changes(state.late - 1)
        known, read = (decay * np.einsum("gk,ghkv->ghv", each, matrices) for each in (key, query))
        change = (value - known) * self.rates[index][..., None]
        state.note(key, change, self.decays[index])
        self.output[index] = read + np.einsum("gk,gk->g", query, key)[:, None, None] * change

    def _filtered(self, state: _State) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return the query, key and values of the last token, for each key head."""
        spec, (num_heads, count, _) = self.spec, self.filter.shape
        total: FloatArray = np.zeros((num_heads, count), np.float32)
        for place in range(spec.filter_width):
            earlier = state.count - spec.filter_width + 1 + place
            if earlier >= 0:
                total = total + self.filter[..., place] * state.inputs[:, earlier % spec.num_inputs_kept, :count]
        numbers = activate(total, Activation.SILU)
        query, key, value = np.split(numbers, [spec.key_dim, 2 * spec.key_dim], axis=1)
        query = _of_length_1(query) / np.float32(spec.key_dim**0.5)
        return query, _of_length_1(key), value.reshape(spec.num_key_heads, spec.heads_per_key, spec.value_dim)


@dataclass(slots=True)
class _State:
    """The state of one sequence in one layer, as stored."""

    spec: DeltaSpec
    matrices: FloatArray  # [key heads, heads per key, key_dim, value_dim]
    inputs: FloatArray  # [key heads, num_inputs_kept, …]
    changes: FloatArray  # [key heads, num_late, …]
    late: int
    count: int

    @classmethod
    def empty(cls, spec: DeltaSpec) -> _State:
        """Return the state before the first token."""
        state = cls._of(spec, np.zeros((spec.num_key_heads, spec.record_floats), np.float32))
        state.count = -1
        return state

    @classmethod
    def read(cls, spec: DeltaSpec, cache: StateCache, block: int) -> _State:
        """Return a copy of the state in a block."""
        return cls._of(spec, np.concatenate([half[block] for half in cache.halves]))

    @classmethod
    def _of(cls, spec: DeltaSpec, records: FloatArray) -> _State:
        heads, start = spec.num_key_heads, spec.record_matrices + spec.num_inputs_kept * spec.record_inputs
        matrices, inputs, rest = np.split(records, [spec.record_matrices, start], axis=1)
        late, count = records[0, -2:].view(np.int32).tolist()
        return cls(
            spec,
            matrices.reshape(heads, spec.heads_per_key, spec.key_dim, spec.value_dim),
            inputs.reshape(heads, spec.num_inputs_kept, spec.record_inputs),
            rest[:, : spec.num_late * spec.record_change].reshape(heads, spec.num_late, spec.record_change),
            late,
            count,
        )

    def take_back(self, num_tokens: int) -> None:
        """Leave out the last tokens, which the matrices lack. Mutates."""
        self.late, self.count = self.late - num_tokens, self.count - num_tokens

    def note(self, key: FloatArray, change: FloatArray, decay: FloatArray) -> None:
        """Store what the last token changes. Mutates."""
        heads = len(key)
        numbers = np.concatenate([key, change.reshape(heads, -1), decay], axis=1)
        row = self.changes[:, self.count % self.spec.num_late]
        row[...] = 0
        row[:, : numbers.shape[1]] = numbers

    def with_changes(self, count: int) -> FloatArray:
        """Return the matrices with the first changes of late tokens. Does not mutate."""
        spec, found = self.spec, self.matrices
        heads, values = len(found), spec.key_dim + spec.heads_per_key * spec.value_dim
        for position in range(self.count - self.late + 1, self.count - self.late + 1 + count):
            row = self.changes[:, position % spec.num_late]
            key, change = row[:, : spec.key_dim], row[:, spec.key_dim : values].reshape(heads, spec.heads_per_key, -1)
            decay = row[:, values : values + spec.heads_per_key]
            found = found * decay[..., None, None] + key[:, None, :, None] * change[:, :, None, :]
        return found

    def apply_all(self) -> None:
        """Apply the changes of all late tokens. Mutates."""
        self.matrices = self.with_changes(self.late)
        self.late = 0

    def write(self, cache: StateCache, block: int) -> None:
        """Store the state in a block. Mutates the block."""
        spec, heads = self.spec, len(self.matrices)
        changes = np.zeros_like(self.changes)  # a block may be stored on disk: it has nothing else of earlier requests
        for position in range(self.count - self.late + 1, self.count + 1):
            changes[:, position % spec.num_late] = self.changes[:, position % spec.num_late]
        last = np.zeros((heads, 16), np.float32)
        last.view(np.int32)[:, -2:] = self.late, self.count
        parts = [part.reshape(heads, -1) for part in (self.matrices, self.inputs, changes)]
        for half, numbers in zip(cache.halves, np.split(np.concatenate([*parts, last], axis=1), 2), strict=True):
            half[block] = numbers


def _of_length_1(heads: FloatArray) -> FloatArray:
    length: FloatArray = np.sqrt((heads * heads).sum(axis=-1, keepdims=True) + LENGTH_EPSILON)
    return heads / length
