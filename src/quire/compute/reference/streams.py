"""Four residual streams, of which layers change the first one (AltUp); `StreamsSpec` has the formulas."""

from __future__ import annotations

import numpy as np

from quire.compute.arrays import FloatArray
from quire.compute.models.parts import STREAM_INS, STREAM_OUTS, NormSpec, Part
from quire.compute.models.sublayers import NUM_STREAMS, SHORTEST
from quire.compute.reference.operations import linear, mean_square, normalize, soft_cap
from quire.compute.weights.decoder_weights import Parts


class Streams:
    """The streams of the tokens of a step, as one layer after another changes them."""

    def __init__(self, embedded: FloatArray, parts: Parts, norm: NormSpec) -> None:
        """Make the others of the first one, `[num_tokens, hidden_size]`; `parts` are those of the model."""
        others = [_as_long(linear(embedded, parts[part]), embedded) for part in STREAM_INS]
        self._rows = [embedded, *others]
        self._norm = norm

    def predict(self, parts: Parts) -> FloatArray:
        """Return the first stream as a layer reads it; `parts` are the layer's. Mutates: predicts all streams."""
        weights = linear(self._weights(self._rows[0], parts), parts[Part.STREAM_PREDICT])
        self._rows = [
            row + _summed(self._rows, weights[:, NUM_STREAMS * j : NUM_STREAMS * (j + 1)])
            for j, row in enumerate(self._rows)
        ]
        return self._rows[0]

    def correct(self, output: FloatArray, parts: Parts) -> FloatArray:
        """Correct all streams by the `output` of a layer, and return the rows that gate its own input. Mutates."""
        weights = 1 + linear(self._weights(output, parts), parts[Part.STREAM_CORRECT])
        change = output - self._rows[0]
        self._rows = [row + weights[:, j, None] * change for j, row in enumerate(self._rows)]
        first = self._rows[0]
        return first * parts[Part.STREAM_SCALE].weight if Part.STREAM_SCALE in parts else first

    def add(self, update: FloatArray) -> None:
        """Add rows to the streams after the first one. Mutates."""
        self._rows[1:] = [row + update for row in self._rows[1:]]

    def merged(self, parts: Parts) -> FloatArray:
        """Return the mean of the streams; `parts` are those of the model. Does not mutate."""
        total = first = self._rows[0]
        for row, part in zip(self._rows[1:], STREAM_OUTS, strict=True):
            total = total + _as_long(linear(row, parts[part]), first)
        return total * np.float32(1 / NUM_STREAMS)

    def _weights(self, rows: FloatArray, parts: Parts) -> FloatArray:
        """Return four weights for each row, between -1 and 1."""
        normed = normalize(rows, parts[Part.STREAM_NORM], self._norm)
        scores = linear(normed, parts[Part.STREAM_ROUTER]) * np.float32(1 / rows.shape[1])
        return soft_cap(scores, 1.0)


def _summed(rows: list[FloatArray], weights: FloatArray) -> FloatArray:
    """Return the weighted sum of the streams, `[num_tokens, hidden_size]`."""
    total = weights[:, 0, None] * rows[0]
    for i in range(1, NUM_STREAMS):
        total = total + weights[:, i, None] * rows[i]
    return total


def _as_long(rows: FloatArray, others: FloatArray) -> FloatArray:
    """Return the rows with the lengths of others."""
    length = np.sqrt(mean_square(others)) / np.sqrt(np.maximum(mean_square(rows), np.float32(SHORTEST)))
    found: FloatArray = rows * length.astype(np.float32)
    return found
