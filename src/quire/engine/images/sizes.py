"""Sizes that several families compute alike."""

from __future__ import annotations

import math
from collections.abc import Sequence


def within_pixels(size: tuple[int, int], cell: int, bounds: tuple[float, float], *, fewest: int = 0) -> tuple[int, int]:
    """Return height and width as multiples of `cell`, with a number of pixels within bounds, in about the same shape.

    `fewest`: the fewest cells of an edge before the bounds count. Raises `ValueError` for a shape too long for that.

    >>> within_pixels((90, 130), 28, (3136, 50_000)), within_pixels((900, 1300), 28, (3136, 50_000))
    ((84, 140), (168, 252))
    """
    height, width = size
    least, most = bounds
    rows, columns = (max(fewest, round(edge / cell)) for edge in size)
    if rows * columns * cell**2 > most:
        shrunk = math.sqrt(height * width / most)
        rows, columns = (max(1, math.floor(edge / shrunk / cell)) for edge in size)
    elif rows * columns * cell**2 < least:
        grown = math.sqrt(least / (height * width))
        rows, columns = (math.ceil(edge * grown / cell) for edge in size)
    if rows * columns * cell**2 > max(most, least):
        raise ValueError("an image whose edges differ less")
    return rows * cell, columns * cell


def grids_of(fewest: int, most: int) -> tuple[tuple[int, int], ...]:
    """Return all rows and columns of a number of tiles within bounds, the fewest first.

    >>> grids_of(2, 3)
    ((2, 1), (1, 2), (3, 1), (1, 3))
    """
    grids = [(rows, columns) for columns in range(1, most + 1) for rows in range(1, most // columns + 1)]
    return tuple(sorted((grid for grid in grids if grid[0] * grid[1] >= fewest), key=math.prod))


def nearest_grid(size: tuple[int, int], grids: Sequence[tuple[int, int]], tile_pixels: int) -> tuple[int, int]:
    """Return the rows and columns whose shape is the nearest to that of an image.

    Of several with the same shape, the largest one whose tiles have fewer than twice the pixels of the image.

    >>> nearest_grid((300, 610), grids_of(1, 8), tile_pixels=100 * 100), nearest_grid((90, 180), grids_of(1, 8), 10_000)
    ((2, 4), (1, 2))
    """
    height, width = size
    found, nearest = (1, 1), math.inf
    for rows, columns in grids:
        difference = abs(width / height - columns / rows)
        is_larger = 2 * height * width > rows * columns * tile_pixels
        if difference < nearest or (difference == nearest and is_larger):
            found, nearest = (rows, columns), difference
    return found
