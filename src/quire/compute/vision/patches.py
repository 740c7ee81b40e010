"""From the pixels of an image to the rows of its patches, and the order of these rows.

image [height, width, 3] ─► normalised by a table for each colour ─► patches, row by row; each of them:
red, green, blue: its pixels row by row
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from quire.compute.arrays import FloatArray, IntArray
from quire.compute.models.vision.spec import VisionSpec, cropped
from quire.core.errors import InvariantError
from quire.core.images import CHANNELS, Image

LEVELS: Final = 256
CUBIC: Final = np.float32(-0.75)
"""The slope of cubic convolution, as in torch."""


def patch_rows(image: Image, spec: VisionSpec) -> FloatArray:
    """Return the normalised pixels of each patch, row by row, `[num_patches, num_numbers]`. Does not mutate."""
    patches = spec.patches
    rows, columns = patches.grid(image.height, image.width)
    pixels = np.frombuffer(image.pixels, np.uint8).reshape(image.height, image.width, CHANNELS)
    whole = pixels[: rows * patches.size, : columns * patches.size]
    numbers = normalised_levels(spec)[whole, np.arange(CHANNELS)]
    # [rows, pixel rows, columns, pixel columns, colours]
    cut = numbers.reshape(rows, patches.size, columns, patches.size, CHANNELS)
    each = cut.transpose((0, 2, 1, 3, 4) if patches.colours_last else (0, 2, 4, 1, 3)).reshape(rows * columns, -1)
    if patches.frames == 1:
        return each
    frames = each.reshape(rows * columns, CHANNELS, 1, patches.size**2).repeat(patches.frames, axis=2)
    return frames.reshape(rows * columns, -1)


def tiles_of(image: Image, side: int) -> list[Image]:
    """Return the square tiles of an image, row by row. Does not mutate."""
    pixels = np.frombuffer(image.pixels, np.uint8).reshape(image.height, image.width, CHANNELS)
    return [
        replace(image, height=side, width=side, pixels=pixels[top : top + side, left : left + side].tobytes())
        for top in range(0, image.height, side)
        for left in range(0, image.width, side)
    ]


def joined_tiles(rows: FloatArray, grid: tuple[int, int], num_rows: int, newline: FloatArray) -> FloatArray:
    """Return the rows of tiles, `[num_tiles, tile_rows, size]`, line by line through all tiles, each with a last row.

    `grid`: the lines of all tiles, and the columns. Only the middle part is returned that has `num_rows` in total.
    """
    part = cropped(grid, num_rows)
    if part is None:
        raise InvariantError(f"{num_rows} rows are no part of {grid[0]} lines of {grid[1]} rows")
    (lines, columns), side, size = grid, math.isqrt(rows.shape[1]), rows.shape[2]
    whole = rows.reshape(lines // side, columns // side, side, side, size).transpose(0, 2, 1, 3, 4)
    top, left = ((count - kept) // 2 for count, kept in zip(grid, part, strict=True))
    middle = whole.reshape(lines, columns, size)[top : top + part[0], left : left + part[1]]
    ends = np.broadcast_to(newline, (part[0], 1, size))
    return np.ascontiguousarray(np.concatenate([middle, ends], axis=1).reshape(num_rows, size), np.float32)


def normalised_levels(spec: VisionSpec) -> FloatArray:
    """Return the number of each level of each colour, `[256, 3]`, rounded to float32 where processors round."""
    scaled = (np.arange(LEVELS, dtype=np.float64) * spec.rescale).astype(np.float32)[:, None]
    mean, deviation = (np.array(numbers, np.float32) for numbers in (spec.mean, spec.deviation))
    levels: FloatArray = (scaled - mean) / deviation
    return levels


class TowerOrder(NamedTuple):
    """The order of the tower's rows, and where its windows begin and end."""

    order: IntArray  # [num_patches], the index of each patch, counted row by row
    window_starts: IntArray  # [num_windows + 1]


def tower_order(grid: tuple[int, int], merge: int, window: int | None) -> TowerOrder:
    """Return the order of patches in the tower: windows, in each of them squares, in each of them patches, row by row.

    >>> tower_order((2, 4), 2, window=None).order.tolist()
    [0, 1, 4, 5, 2, 3, 6, 7]
    >>> tower_order((4, 4), 2, window=2).window_starts.tolist()
    [0, 4, 8, 12, 16]
    """
    rows, columns = grid
    side = window or max(grid)
    indices = np.arange(rows * columns).reshape(rows, columns)
    windows = [
        _by_square(indices[row : row + side, column : column + side], merge)
        for row in range(0, rows, side)
        for column in range(0, columns, side)
    ]
    return TowerOrder(np.concatenate(windows), np.cumsum([0, *map(len, windows)]))


def _by_square(indices: IntArray, merge: int) -> IntArray:
    rows, columns = indices.shape
    return indices.reshape(rows // merge, merge, columns // merge, merge).transpose(0, 2, 1, 3).reshape(-1)


def resized(
    table: FloatArray, side: int, grid: tuple[int, int], *, reaches_edges: bool, cubic: bool = False
) -> FloatArray:
    """Return a table of positions for a grid of patches, `[rows × columns, size]`; it has `side` rows and columns.

    A position between those of the table is their weighted mean; in a coarser grid, that of all within its reach. With
    `reaches_edges`, the corners of the grid are those of the table, and a position has only its neighbours. With
    `cubic`, it is a mean of four neighbours on each axis; beyond the edges of the table, there are copies of them.

    >>> table = np.array([[0.0], [1.0], [2.0], [3.0]], np.float32)
    >>> resized(table, 2, (1, 3), reaches_edges=False).ravel().tolist()
    [1.0, 1.5, 2.0]
    >>> resized(table, 2, (2, 3), reaches_edges=True).ravel().tolist()
    [0.0, 0.5, 1.0, 2.0, 2.5, 3.0]
    >>> resized(table, 2, (1, 3), reaches_edges=False, cubic=True).ravel().round(4)
    array([0.9132, 1.5   , 2.0868], dtype=float32)
    """
    by_row, by_column = (
        _cubic_weights(side, count) if cubic else _weights(side, count, reaches_edges) for count in grid
    )
    rows = _blended(table.reshape(side, side, -1), by_row)
    return _blended(rows.swapaxes(0, 1), by_column).swapaxes(0, 1).reshape(grid[0] * grid[1], -1)


def _weights(side: int, count: int, reaches_edges: bool) -> FloatArray:
    """Return the weight of each place of a side in each of `count` places, `[count, side]`."""
    places = np.arange(count, dtype=np.float32)
    if reaches_edges:
        reach, centres = np.float32(1), places * np.float32(side - 1) / np.float32(max(count - 1, 1))
    else:
        scale = np.float32(side) / np.float32(count)
        reach, centres = max(scale, np.float32(1)), (places + np.float32(0.5)) * scale - np.float32(0.5)
    weights = np.maximum(1 - np.abs(np.arange(side, dtype=np.float32) - centres[:, None]) / reach, np.float32(0))
    shares: FloatArray = weights / weights.sum(axis=1, keepdims=True)
    return shares


def _cubic_weights(side: int, count: int) -> FloatArray:
    """Return the weight of each place of a side in each of `count` places, `[count, side]`, by cubic convolution."""
    centres = (np.arange(count, dtype=np.float32) + np.float32(0.5)) / np.float32(count) * side - np.float32(0.5)
    weights = np.zeros((count, side), np.float32)
    for tap in range(-1, 3):
        places = np.floor(centres) + tap
        far = np.abs(centres - places)
        near = ((CUBIC + 2) * far - (CUBIC + 3)) * far * far + 1
        outer = ((CUBIC * far - 5 * CUBIC) * far + 8 * CUBIC) * far - 4 * CUBIC
        taken = np.clip(places, 0, side - 1).astype(np.int64)
        np.add.at(weights, (np.arange(count), taken), np.where(far <= 1, near, outer).astype(np.float32))
    return weights


def _blended(places: FloatArray, weights: FloatArray) -> FloatArray:
    """Return the sums of `places`, `[side, …]`, with these weights `[count, side]`, most of which are 0."""
    used = weights != 0
    num_taps = int((weights.shape[1] - used[:, ::-1].argmax(axis=1) - used.argmax(axis=1)).max())
    first = np.minimum(used.argmax(axis=1), weights.shape[1] - num_taps)
    total = np.zeros((len(weights), *places.shape[1:]), np.float32)
    for tap in range(num_taps):
        factors = np.take_along_axis(weights, (first + tap)[:, None], axis=1)
        total += factors[:, :, None] * places[first + tap]
    return total
