"""Short convolutions over the last tokens, with a state in the blocks of a sequence (see `ConvolutionSpec`).

A state is stored in two halves, as that of linear attention is. Each half has a record for each of its chunks of
channels:

    inputs    [num_inputs_kept, chunk]: the inputs of the token at position p, in row p % num_inputs_kept
    late      how many of the last tokens can be computed again
    count     the position of the last token

The last token can be computed again, and after a step with guesses also these, because the inputs before them are still
there. A step may begin at any of these tokens, or after the last one; at any other position it gives no number.
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
            first, num_late = int(inputs.positions[tokens.start]), inputs.num_late(sequence, self.spec.num_late)
            output[tokens] = self._filtered(rows[tokens], first, table, cache, num_late)
        return linear(output_gate * output, self.parts[Part.CONVOLUTION_OUTPUT])

    def _filtered(self, rows: FloatArray, first: int, table: IntArray, cache: StateCache, num_late: int) -> FloatArray:
        """Return the filtered inputs of a sequence's tokens, from position `first` on. Mutates its blocks."""
        size, width, weights = cache.block_size, self.spec.filter_width, self.parts[Part.CONVOLUTION_FILTER].weight
        kept = self.spec.num_inputs_kept
        last = np.zeros((kept, self.spec.size), np.float32)
        if first > 0:
            last, late, count = self._read(cache, int(table[(first - 1) // size]))
            if not count - late < first <= count + 1:
                return np.full_like(rows, np.nan)
        output = np.zeros_like(rows)
        for index, row in enumerate(rows):
            position = first + index
            last[position % kept] = row
            for place in range(width):
                earlier = position - width + 1 + place
                if earlier >= 0:
                    output[index] += weights[:, 0, place] * last[earlier % kept]
            if (position + 1) % size == 0 or index == len(rows) - 1:
                late = 1 + max(0, index - (len(rows) - num_late))
                self._write(cache, int(table[position // size]), last, (late, position))
        return output

    def _read(self, cache: StateCache, block: int) -> tuple[FloatArray, int, int]:
        """Return the inputs of the last tokens, `[num_inputs_kept, size]`, then `late` and `count`."""
        spec, kept = self.spec, self.spec.num_inputs_kept
        records = np.stack([half[block] for half in cache.halves]).reshape(-1, spec.record_floats)
        inputs = records[:, : kept * spec.chunk].reshape(-1, kept, spec.chunk)
        late, count = records[0, -2:].view(np.int32).tolist()
        return inputs.swapaxes(0, 1).reshape(kept, -1), late, count

    def _write(self, cache: StateCache, block: int, inputs: FloatArray, late_and_count: tuple[int, int]) -> None:
        """Store the state in a block. Mutates the block."""
        spec, kept = self.spec, self.spec.num_inputs_kept
        records = np.zeros((spec.size // spec.chunk, spec.record_floats), np.float32)
        by_chunk = inputs.reshape(kept, -1, spec.chunk).swapaxes(0, 1)
        records[:, : kept * spec.chunk] = by_chunk.reshape(len(records), -1)
        records.view(np.int32)[:, -2:] = late_and_count
        for half, numbers in zip(cache.halves, np.split(records, 2), strict=True):
            half[block] = numbers.reshape(half[block].shape)
