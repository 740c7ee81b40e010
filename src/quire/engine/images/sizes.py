"""Sizes that several families compute alike."""

from __future__ import annotations

import math


def within_pixels(size: tuple[int, int], cell: int, bounds: tuple[int, int], *, fewest: int = 0) -> tuple[int, int]:
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
