"""From the pixels of an image to the rows of its patches.

image [height, width, 3] ─► normalised by a table for each colour ─► squares of merge × merge patches, each patch:
                                                                    red, green, blue: its pixels row by row
"""

from __future__ import annotations

from typing import Final

import numpy as np

from quire.compute.arrays import FloatArray, IntArray
from quire.compute.models.vision.spec import VisionSpec
from quire.core.images import CHANNELS, Image

LEVELS: Final = 256


def patch_rows(image: Image, spec: VisionSpec) -> FloatArray:
    """Return the normalised pixels of each patch, `[num_patches, 3 × size × size]`. Does not mutate."""
    patches = spec.patches
    size, merge = patches.size, patches.merge
    rows, columns = patches.grid(image.height, image.width)
    pixels = np.frombuffer(image.pixels, np.uint8).reshape(image.height, image.width, CHANNELS)
    numbers = normalised_levels(spec)[pixels, np.arange(CHANNELS)]
    # [rows of squares, rows in a square, pixel rows, columns of squares, columns in a square, pixel columns, colours]
    cut = numbers.reshape(rows // merge, merge, size, columns // merge, merge, size, CHANNELS)
    return np.ascontiguousarray(cut.transpose(0, 3, 1, 4, 6, 2, 5)).reshape(rows * columns, -1)


def normalised_levels(spec: VisionSpec) -> FloatArray:
    """Return the number of each level of each colour, `[256, 3]`, rounded to float32 where processors round."""
    scaled = (np.arange(LEVELS, dtype=np.float64) * spec.rescale).astype(np.float32)[:, None]
    mean, deviation = (np.array(numbers, np.float32) for numbers in (spec.mean, spec.deviation))
    levels: FloatArray = (scaled - mean) / deviation
    return levels


def block_order(rows: int, columns: int, merge: int) -> IntArray:
    """Return the index of each patch, counted row by row, in the order of the tower's rows.

    >>> block_order(2, 4, 2).tolist()
    [0, 1, 4, 5, 2, 3, 6, 7]
    """
    indices = np.arange(rows * columns).reshape(rows // merge, merge, columns // merge, merge)
    return indices.transpose(0, 2, 1, 3).reshape(-1)
