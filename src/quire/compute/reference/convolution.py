"""Short convolutions over the last tokens, with a state in the blocks of a sequence (see `ConvolutionSpec`).

A state is stored in two halves, as that of linear attention is. Each half has a record for each of its chunks of
channels:

    inputs    [filter_width, chunk]: the inputs of the token at position p, in row p % filter_width
    count     the position of the last token

The last token can be computed again, because the inputs before it are still there. A step may begin at `count` or one
later; at any other position it gives no number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.compute.arrays import FloatArray, IntArray
from quire.compute.models.parts import Part
from quire.compute.models.recurrent import ConvolutionSpec
from quire.compute.reference.operations import linear
from quire.compute.weights.decoder_weights import Parts
from quire.compute.worker.cache_engine import StateCache
from quire.compute.worker.model_runner import StepInputs


@dataclass(frozen=True, slots=True)
class Convolution:
    """The convolution of one layer."""

    spec: ConvolutionSpec
    parts: Parts

    def attend(self, hidden: FloatArray, cache: StateCache, inputs: StepInputs) -> FloatArray:
        """Add the step's tokens to the states and return the output: `[num_tokens, hidden_size]`. Mutates."""
        gate, value, output_gate = (
            linear(hidden, self.parts[part])
            for part in (Part.CONVOLUTION_GATE, Part.CONVOLUTION_VALUE, Part.CONVOLUTION_OUTPUT_GATE)
        )
        rows, output = gate * value, np.empty_like(gate)
        for sequence in range(len(inputs.entries)):
            tokens = inputs.tokens_of(sequence)
            table = inputs.block_tables[cache.group][sequence]
            output[tokens] = self._filtered(rows[tokens], int(inputs.positions[tokens.start]), table, cache)
        return linear(output_gate * output, self.parts[Part.CONVOLUTION_OUTPUT])

    def _filtered(self, rows: FloatArray, first: int, table: IntArray, cache: StateCache) -> FloatArray:
        """Return the filtered inputs of a sequence's tokens, from position `first` on. Mutates its blocks."""
        size, width, weights = cache.block_size, self.spec.filter_width, self.parts[Part.CONVOLUTION_FILTER].weight
        last, count = np.zeros((width, self.spec.size), np.float32), -1
        if first > 0:
            last, count = self._read(cache, int(table[(first - 1) // size]))
            if count not in (first - 1, first):
                return np.full_like(rows, np.nan)
        output = np.zeros_like(rows)
        for index, row in enumerate(rows):
            position = first + index
            last[position % width] = row
            for place in range(width):
                earlier = position - width + 1 + place
                if earlier >= 0:
                    output[index] += weights[:, 0, place] * last[earlier % width]
            if (position + 1) % size == 0 or index == len(rows) - 1:
                self._write(cache, int(table[position // size]), last, position)
        return output

    def _read(self, cache: StateCache, block: int) -> tuple[FloatArray, int]:
        """Return the inputs of the last tokens, `[filter_width, size]`, and the position of the last one."""
        spec = self.spec
        records = np.stack([half[block] for half in cache.halves]).reshape(-1, spec.record_floats)
        inputs = records[:, : spec.filter_width * spec.chunk].reshape(-1, spec.filter_width, spec.chunk)
        return inputs.swapaxes(0, 1).reshape(spec.filter_width, -1), int(records[0, -1:].view(np.int32)[0])

    def _write(self, cache: StateCache, block: int, inputs: FloatArray, count: int) -> None:
        """Store the state in a block. Mutates the block."""
        spec = self.spec
        records = np.zeros((spec.size // spec.chunk, spec.record_floats), np.float32)
        by_chunk = inputs.reshape(spec.filter_width, -1, spec.chunk).swapaxes(0, 1)
        records[:, : spec.filter_width * spec.chunk] = by_chunk.reshape(len(records), -1)
        records.view(np.int32)[:, -1] = count
        for half, numbers in zip(cache.halves, np.split(records, 2), strict=True):
            half[block] = numbers.reshape(half[block].shape)
