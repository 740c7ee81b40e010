"""Linear attention by the gated delta rule, over states in the blocks of a sequence (see `DeltaSpec`).

A state is stored in two halves, where a block of a full layer has keys and values. Each half has a record for each of
its key heads:

    S         of each value head, [heads per key, key_dim, value_dim]
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
            run.compute(int(inputs.positions[tokens.start]), table, cache)
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

    def compute(self, first: int, table: IntArray, cache: StateCache) -> None:
        """Add the tokens, from position `first` on, to the state in the sequence's blocks. Mutates the blocks."""
        size, spec = cache.block_size, self.spec
        state = _State.empty(spec) if first == 0 else _State.read(spec, cache, int(table[(first - 1) // size]))
        if state.count not in (first - 1, first):
            self.output[...] = np.nan
            return
        for index in range(len(self.rows)):
            position = first + index
            if state.count == position - 1:
                state.apply()
            state.count = position
            state.inputs[:, position % spec.filter_width, : self.rows.shape[-1]] = self.rows[index]
            self._add(state, index)
            if (position + 1) % size == 0 or index == len(self.rows) - 1:
                state.write(cache, int(table[position // size]))

    def _add(self, state: _State, index: int) -> None:
        """Note what a token changes, and write its output. Mutates."""
        query, key, value = self._filtered(state)
        decay = self.decays[index][..., None]
        known, read = (decay * np.einsum("gk,ghkv->ghv", each, state.matrices) for each in (key, query))
        state.key, state.decay = key, self.decays[index]
        state.change = (value - known) * self.rates[index][..., None]
        self.output[index] = read + np.einsum("gk,gk->g", query, key)[:, None, None] * state.change

    def _filtered(self, state: _State) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return the query, key and values of the last token, for each key head."""
        spec, (num_heads, count, _) = self.spec, self.filter.shape
        total: FloatArray = np.zeros((num_heads, count), np.float32)
        for place in range(spec.filter_width):
            earlier = state.count - spec.filter_width + 1 + place
            if earlier >= 0:
                total = total + self.filter[..., place] * state.inputs[:, earlier % spec.filter_width, :count]
        numbers = activate(total, Activation.SILU)
        query, key, value = np.split(numbers, [spec.key_dim, 2 * spec.key_dim], axis=1)
        query = _of_length_1(query) / np.float32(spec.key_dim**0.5)
        return query, _of_length_1(key), value.reshape(spec.num_key_heads, spec.heads_per_key, spec.value_dim)


@dataclass(slots=True)
class _State:
    """The state of one sequence in one layer, as stored."""

    matrices: FloatArray  # [key heads, heads per key, key_dim, value_dim]
    inputs: FloatArray  # [key heads, filter_width, …]
    key: FloatArray  # [key heads, key_dim]
    change: FloatArray  # [key heads, heads per key, value_dim]
    decay: FloatArray  # [key heads, heads per key]
    count: int

    @classmethod
    def empty(cls, spec: DeltaSpec) -> _State:
        """Return the state before the first token."""
        return cls._of(spec, np.zeros((spec.num_key_heads, spec.record_floats), np.float32))

    @classmethod
    def read(cls, spec: DeltaSpec, cache: StateCache, block: int) -> _State:
        """Return a copy of the state in a block."""
        return cls._of(spec, np.concatenate([half[block] for half in cache.halves]))

    @classmethod
    def _of(cls, spec: DeltaSpec, records: FloatArray) -> _State:
        heads, per_key = spec.num_key_heads, spec.heads_per_key
        start = spec.record_matrices + spec.filter_width * spec.record_inputs
        matrices, inputs, rest = np.split(records, [spec.record_matrices, start], axis=1)
        values = spec.key_dim + per_key * spec.value_dim
        key, change, decay = np.split(rest[:, : values + per_key], [spec.key_dim, values], axis=1)
        return cls(
            matrices.reshape(heads, per_key, spec.key_dim, spec.value_dim),
            inputs.reshape(heads, spec.filter_width, spec.record_inputs),
            key,
            change.reshape(heads, per_key, spec.value_dim),
            decay,
            int(records[0, -1:].view(np.int32)[0]),
        )

    def apply(self) -> None:
        """Apply the change of the last token. Mutates."""
        self.matrices = (
            self.matrices * self.decay[..., None, None] + self.key[:, None, :, None] * self.change[:, :, None, :]
        )

    def write(self, cache: StateCache, block: int) -> None:
        """Store the state in a block. Mutates the block."""
        heads = len(self.matrices)
        parts = [part.reshape(heads, -1) for part in (self.matrices, self.inputs, self.key, self.change, self.decay)]
        rest = cache.halves[0].shape[-1] - sum(part.shape[1] for part in parts)
        last = np.zeros((heads, rest), np.float32)
        last.view(np.int32)[:, -1] = self.count
        for half, numbers in zip(cache.halves, np.split(np.concatenate([*parts, last], axis=1), 2), strict=True):
            half[block] = numbers


def _of_length_1(heads: FloatArray) -> FloatArray:
    length: FloatArray = np.sqrt((heads * heads).sum(axis=-1, keepdims=True) + LENGTH_EPSILON)
    return heads / length
