"""State-space layers (Mamba-2), over states in the blocks of a sequence (see `MambaSpec`)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.compute.arrays import FloatArray
from quire.compute.models.parts import Part
from quire.compute.models.recurrent import MambaSpec
from quire.compute.models.sublayers import Activation
from quire.compute.reference.operations import activate, linear, normalize
from quire.compute.reference.states import State, Tokens
from quire.compute.weights.decoder_weights import Parts, PartWeights
from quire.compute.worker.cache_engine import StateCache
from quire.compute.worker.model_runner import StepInputs


class Mamba:
    """The state-space layer of one layer."""

    def __init__(self, spec: MambaSpec, parts: Parts) -> None:
        self._parts = parts
        self._spec = spec

    def attend(self, hidden: FloatArray, cache: StateCache, inputs: StepInputs) -> FloatArray:
        """Add the step's tokens to the states and return the output: `[num_tokens, hidden_size]`. Mutates."""
        shape, parts = self._spec.states, self._parts
        rows = np.concatenate(
            [
                self._by_record(linear(hidden, parts[part]).T, part is not Part.MAMBA_VALUE)
                for part in (Part.MAMBA_QUERY, Part.MAMBA_KEY, Part.MAMBA_VALUE)
            ],
            axis=1,
        ).transpose(2, 0, 1)
        steps = np.logaddexp(
            0, linear(hidden, parts[Part.MAMBA_STEP]) + parts[Part.MAMBA_STEP_OFFSET].weight, dtype=np.float64
        )
        decays = np.exp(-np.exp(parts[Part.MAMBA_LOG_DECAY].weight, dtype=np.float64) * steps)
        steps, decays = (
            each.astype(np.float32).reshape(len(hidden), shape.num_records, -1) for each in (steps, decays)
        )
        output = np.empty((*steps.shape, shape.value_dim), np.float32)
        filters, bias = self._filters()
        skip = parts[Part.MAMBA_SKIP].weight.reshape(shape.num_records, shape.heads, 1)
        for sequence in range(len(inputs.entries)):
            of = inputs.tokens_of(sequence)
            run = _Tokens(shape, filters, rows[of], decays[of], output[of], steps[of], skip, bias)
            run.compute(inputs, sequence, cache)
        gate = activate(linear(hidden, parts[Part.MAMBA_GATE]), Activation.SILU)
        return linear(self._normed(output.reshape(gate.shape) * gate), parts[Part.MAMBA_OUTPUT])

    def _by_record(self, numbers: FloatArray, of_groups: bool) -> FloatArray:
        """Return numbers of each channel by record, `[records, channels, …]`; records share those of groups."""
        spec, count = self._spec, self._spec.states.num_records
        if not of_groups:
            return numbers.reshape(count, -1, *numbers.shape[1:])
        return numbers.reshape(spec.num_groups, -1, *numbers.shape[1:]).repeat(count // spec.num_groups, axis=0)

    def _filters(self) -> tuple[FloatArray, FloatArray | None]:
        """Return the filter by record, `[records, numbers, filter_width]`, and its bias, `[records, numbers]`."""
        spec, part = self._spec, self._parts[Part.MAMBA_FILTER]
        values = spec.num_heads * spec.value_dim
        ends = [values, values + spec.num_groups * spec.key_dim]

        def ordered(numbers: FloatArray) -> FloatArray:
            value, key, query = np.split(numbers, ends)
            pieces = (self._by_record(query, True), self._by_record(key, True), self._by_record(value, False))
            return np.concatenate(pieces, axis=1)

        return ordered(part.weight[:, 0]), None if part.bias is None else ordered(part.bias)

    def _normed(self, output: FloatArray) -> FloatArray:
        """Return the outputs normalised over the heads of each group, if the model has that norm."""
        if self._spec.norm is None:
            return output
        groups = self._spec.num_groups, -1
        weights = PartWeights(self._parts[Part.MAMBA_NORM].weight.reshape(groups))
        return normalize(output.reshape(len(output), *groups), weights, self._spec.norm).reshape(output.shape)


@dataclass(frozen=True, slots=True)
class _Tokens(Tokens):
    steps: FloatArray  # [tokens, records, heads]
    skip: FloatArray  # [records, heads, 1]
    bias: FloatArray | None

    def add(self, state: State, index: int) -> None:
        """Note what a token changes, and write its output. Mutates."""
        query, key, value = self.filtered(state, self.bias)
        change = value * self.steps[index][..., None]
        state.note(key, change, self.decays[index])
        overlap = np.einsum("rk,rk->r", query, key)[:, None, None]
        self.output[index] = self.read_by(query, state, index) + overlap * change + self.skip * value
