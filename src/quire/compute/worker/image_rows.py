"""ImageRows: the images in a worker's prompts, as a step needs them.

    RowStart.images ─► ImageEncoder.begin ─► rows, one for each placeholder ─► StepInputs.given_rows
                   └─► coordinates of the tokens, if the model counts images by height and width
                   └─► ends_seen, if the tokens of an image attend to one another

The rows of an image are made between steps, before its request starts (image_queue.py), and otherwise by the first step
that computes one of its tokens. A prompt with a cached prefix needs only the rows of images that end behind the prefix.

Models with several axes of positions count an image as a grid: its tokens are at one time, in rows and columns, and the
text continues behind its longer side.

    tokens            a   b   P   P   P   P   P   P   c         an image of two rows and three columns
    time              0   1   2   2   2   2   2   2   5
    height            0   1   2   2   2   3   3   3   5
    width             0   1   2   3   4   2   3   4   5
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from quire.compute.arrays import FloatArray, IntArray
from quire.compute.worker.image_queue import EncodedImages, ImageEncoder, key_of
from quire.compute.worker.model_runner import StepInputs
from quire.core.images import Image
from quire.core.request import CacheScope
from quire.core.step import RowStart, StepPlan

BEHIND_ALL = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class _Placed:
    """An image of a prompt. `indices`: for each of its tokens the index of the row that it takes, -1: none."""

    image: Image
    scope: CacheScope
    indices: IntArray
    num_rows: int


class ImageRows:
    """The images of a worker's rows; `encoder` None: the model reads no images."""

    def __init__(self, encoder: ImageEncoder | None, encoded: EncodedImages) -> None:
        self._encoder = encoder
        self._encoded = encoded
        self._grids: dict[int, ImageGrids] = {}  # by row, if the model counts images by height and width
        self._pending: dict[int, list[_Placed]] = {}  # by row: images that it has not computed completely

    def start(self, start: RowStart) -> None:
        """Note the images of a prompt that takes a row. Mutates."""
        self.release(start.row)
        if not start.images:
            return
        if self._encoder is None:
            raise ValueError("this engine reads no images")
        placed = []
        for image in start.images:
            takes_row = np.array(start.tokens[image.start : image.end], np.int64) == self._encoder.placeholder
            indices: IntArray = np.where(takes_row, np.cumsum(takes_row) - 1, -1)
            placed.append(_Placed(image, start.scope, indices, int(takes_row.sum())))
        if self._encoder.cell is not None:
            self._grids[start.row] = ImageGrids.of(start.images, self._encoder.cell)
        self._pending[start.row] = placed

    def release(self, row: int) -> None:
        """Forget the images of a row that is free. Mutates."""
        self._grids.pop(row, None)
        self._pending.pop(row, None)

    def with_images(self, plan: StepPlan, inputs: StepInputs) -> StepInputs:
        """Return the inputs of a step with what images add to them; encodes the images in it. Mutates."""
        inputs = self._with_rows(plan, inputs) if self._pending else inputs
        return self._with_coordinates(inputs) if self._grids else inputs

    def note_computed(self, plan: StepPlan) -> None:
        """Forget images before the last token that a step has computed. Mutates.

        That token may be computed again, because a mask for the next one came late.
        """
        for entry, row in enumerate(plan.rows if self._pending else ()):
            if row in self._pending:
                end = plan.starts[entry] + plan.counts[entry]
                self._pending[row] = [each for each in self._pending[row] if each.image.end >= end]
                if not self._pending[row]:
                    del self._pending[row]

    def _with_rows(self, plan: StepPlan, inputs: StepInputs) -> StepInputs:
        given: IntArray = np.full(len(inputs.token_ids), -1, np.int64)
        ends: IntArray = np.zeros(len(inputs.token_ids), np.int64)
        rows: list[FloatArray] = []
        num_rows = 0
        for sequence, entry in enumerate(inputs.entries):
            start, end = plan.starts[entry], plan.starts[entry] + plan.counts[entry]
            for placed in self._pending.get(plan.rows[entry], ()):
                image = placed.image
                first, after = max(start, image.start), min(end, image.end)
                if first >= after:
                    continue
                encoded = self._rows_of(placed)
                taken = placed.indices[first - image.start : after - image.start]
                at = int(inputs.query_starts[sequence]) + first - start
                given[at : at + after - first] = np.where(taken < 0, -1, taken + num_rows)
                ends[at : at + after - first] = image.end if image.is_whole else 0
                rows.append(encoded)
                num_rows += len(encoded)
        if not rows:
            return inputs
        inputs = replace(inputs, given=given, given_rows=np.concatenate(rows))
        return replace(inputs, ends_seen=ends) if ends.any() else inputs

    def _rows_of(self, placed: _Placed) -> FloatArray:
        key = key_of(placed.image, placed.scope)
        rows = self._encoded.get(key)
        if rows is None and self._encoder is not None:
            work = self._encoder.begin(placed.image)
            while rows is None:
                rows = work.advance(math.inf)
            self._encoded.put(key, rows)
        if rows is None or len(rows) != placed.num_rows:
            found = 0 if rows is None else len(rows)
            raise ValueError(f"an image has {found} rows, and {placed.num_rows} tokens that take one")
        return rows

    def _with_coordinates(self, inputs: StepInputs) -> StepInputs:
        coordinates: IntArray = np.stack([inputs.positions] * 3)
        for sequence, row in enumerate(inputs.rows.tolist()):
            if row in self._grids:
                tokens = inputs.tokens_of(sequence)
                coordinates[:, tokens] = self._grids[row].coordinates(inputs.positions[tokens])
        return replace(inputs, coordinates=coordinates)


@dataclass(frozen=True, slots=True)
class ImageGrids:
    """The images of a prompt as columns, so that a step works as much for many as for one.

    `shifts[i]`: what the first i images add to the positions behind them. The last entries stand for no image.
    """

    starts: IntArray
    ends: IntArray
    widths: IntArray
    shifts: IntArray

    @classmethod
    def of(cls, images: Sequence[Image], cell: int) -> ImageGrids:
        """Return the grids of images in the order of their places."""
        columns = [(image.start, image.end, image.height // cell, image.width // cell) for image in images]
        starts, ends, heights, widths = np.array(columns, np.int64).reshape(-1, 4).T
        shifts = np.cumsum(np.maximum(heights, widths) - (ends - starts))
        return cls(np.append(starts, BEHIND_ALL), ends, np.append(widths, 1), np.append(0, shifts))

    def coordinates(self, positions: IntArray) -> IntArray:
        """Return time, height and width of positions, `[3, positions]`. Does not mutate.

        >>> grids = ImageGrids.of([Image.of(2, 6, 2, 3, bytes(18))], cell=1)
        >>> grids.coordinates(np.arange(9))[1:].tolist()
        [[0, 1, 2, 2, 2, 3, 3, 3, 5], [0, 1, 2, 3, 4, 2, 3, 4, 5]]
        """
        image = np.searchsorted(self.ends, positions, side="right")
        place = np.maximum(0, positions - self.starts[image])
        first = positions + self.shifts[image] - place
        rows, columns = np.divmod(place, self.widths[image])
        return np.stack([first, first + rows, first + columns])
