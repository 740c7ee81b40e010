"""Linear attention by the gated delta rule, over states in the blocks of a sequence (see `DeltaSpec`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from quire.compute.arrays import FloatArray
from quire.compute.models.parts import Part
from quire.compute.models.recurrent import DeltaSpec
from quire.compute.models.sublayers import Activation
from quire.compute.reference.mlp import sigmoid
from quire.compute.reference.operations import activate, linear, normalize
from quire.compute.reference.states import State, Tokens
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
            run = _Tokens(spec.states, self._filter(), rows[tokens], decays[tokens], output[tokens], rates[tokens])
            run.compute(inputs, sequence, cache)
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
        rates = sigmoid(linear(hidden, self._parts[Part.DELTA_RATE])) * np.float32(self._spec.rate_scale)
        return rates.reshape(shape), np.exp(-speed).astype(np.float32).reshape(shape)

    def _filter(self) -> FloatArray:
        """Return the filter by key head: `[key heads, numbers, filter_width]`."""
        spec, rows = self._spec, self._parts[Part.DELTA_FILTER].weight[:, 0]
        keys = spec.num_key_heads * spec.key_dim
        by_head = [part.reshape(spec.num_key_heads, -1, spec.filter_width) for part in np.split(rows, [keys, 2 * keys])]
        return np.concatenate(by_head, axis=1)


@dataclass(frozen=True, slots=True)
class _Tokens(Tokens):
    rates: FloatArray  # [tokens, key heads, heads per key]

    def add(self, state: State, index: int) -> None:
        """Note what a token changes, and write its output. Mutates."""
        query, key, value = self.filtered(state)
        query, key = _of_length_1(query) / np.float32(self.shape.key_dim**0.5), _of_length_1(key)
        change = (value - self.read_by(key, state, index)) * self.rates[index][..., None]
        state.note(key, change, self.decays[index])
        overlap = np.einsum("rk,rk->r", query, key)[:, None, None]
        self.output[index] = self.read_by(query, state, index) + overlap * change


def _of_length_1(heads: FloatArray) -> FloatArray:
    length: FloatArray = np.sqrt((heads * heads).sum(axis=-1, keepdims=True) + LENGTH_EPSILON)
    return heads / length
