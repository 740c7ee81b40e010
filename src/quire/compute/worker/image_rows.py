"""ImageRows: the rows of images in a worker's prompts.

    RowStart.images ─► ImageEncoder.encode ─► rows, one for each placeholder ─► StepInputs.given_rows

An image is encoded by the first step that computes one of its tokens. Its rows are kept until every row of the worker
that has this image has computed it. A prompt with a cached prefix encodes only images that end behind the prefix.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np

from quire.compute.arrays import FloatArray, IntArray
from quire.compute.worker.model_runner import StepInputs
from quire.core.images import Image
from quire.core.step import RowStart, StepPlan


class ImageEncoder(Protocol):
    """Turns the images of a model into rows of its hidden size."""

    @property
    def placeholder(self) -> int:
        """The token whose places in a prompt take the rows."""
        ...

    def encode(self, image: Image) -> FloatArray:
        """Return the rows of an image. Equal pixels give equal bits. Does not mutate."""
        ...


class _Placed(NamedTuple):
    """An image of a prompt. `indices`: for each of its tokens the index of the row that it takes, -1: none."""

    image: Image
    indices: IntArray
    num_rows: int


class ImageRows:
    """The images of a worker's rows; `encoder` None: the model reads no images."""

    def __init__(self, encoder: ImageEncoder | None) -> None:
        self._encoder = encoder
        self._placed: dict[int, list[_Placed]] = {}  # by row: images that it has not computed completely
        self._rows: dict[bytes, FloatArray] = {}  # by digest

    def start(self, start: RowStart) -> None:
        """Note the images of a prompt that takes a row. Mutates."""
        self.release(start.row)
        if not start.images:
            return
        if self._encoder is None:
            raise ValueError("this engine reads no images")
        placed = []
        for image in start.images:
            tokens = np.array(start.tokens[image.start : image.end], np.int64)
            takes_row = tokens == self._encoder.placeholder
            indices: IntArray = np.where(takes_row, np.cumsum(takes_row) - 1, -1)
            placed.append(_Placed(image, indices, int(takes_row.sum())))
        self._placed[start.row] = placed

    def release(self, row: int) -> None:
        """Forget the images of a row that is free. Mutates."""
        if self._placed.pop(row, None) is not None:
            self._drop_unused()

    def with_rows(self, plan: StepPlan, inputs: StepInputs) -> StepInputs:
        """Return the inputs of a step with the rows of the images in it; encodes those that are not. Mutates."""
        if not self._placed:
            return inputs
        given: IntArray = np.full(len(inputs.token_ids), -1, np.int64)
        rows: list[FloatArray] = []
        num_rows = 0
        for sequence, entry in enumerate(inputs.entries):
            start, end = plan.starts[entry], plan.starts[entry] + plan.counts[entry]
            for image, indices, count in self._placed.get(plan.rows[entry], ()):
                first, after = max(start, image.start), min(end, image.end)
                if first >= after:
                    continue
                encoded = self._encoded(image, count)
                taken = indices[first - image.start : after - image.start]
                at = int(inputs.query_starts[sequence]) + first - start
                given[at : at + after - first] = np.where(taken < 0, -1, taken + num_rows)
                rows.append(encoded)
                num_rows += len(encoded)
        return replace(inputs, given=given, given_rows=np.concatenate(rows)) if rows else inputs

    def note_computed(self, plan: StepPlan) -> None:
        """Forget images that a step has computed completely. Mutates."""
        if not self._placed:
            return
        for entry, row in enumerate(plan.rows):
            if row in self._placed:
                end = plan.starts[entry] + plan.counts[entry]
                self._placed[row] = [each for each in self._placed[row] if each.image.end > end]
                if not self._placed[row]:
                    del self._placed[row]
        self._drop_unused()

    def _encoded(self, image: Image, num_placeholders: int) -> FloatArray:
        rows = self._rows.get(image.digest)
        if rows is None and self._encoder is not None:
            rows = self._rows[image.digest] = self._encoder.encode(image)
        if rows is None or len(rows) != num_placeholders:
            found = 0 if rows is None else len(rows)
            raise ValueError(f"an image has {found} rows, and {num_placeholders} tokens that take one")
        return rows

    def _drop_unused(self) -> None:
        used = {each.image.digest for placed in self._placed.values() for each in placed}
        for digest in self._rows.keys() - used:
            del self._rows[digest]
